"""A checkpoint that is undone leaves nothing behind: the planner sees the program that has none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_loops import CPU
from zoo_checkpoints import CHECKPOINTS

from jaxremat import Graph
from jaxremat._lower._lower import lower
from jaxremat._program import _compat
from jaxremat._program._primitives import is_backward
from jaxremat._rewrite._passes import forward_again
from jaxremat._rewrite._trace import Traced, trace

pytestmark = pytest.mark.usefixtures("remat3")

WIDTH, LAYERS, TOKENS, WORDS = 16, 3, 12, 32


def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Work whose derivatives need more than its values: roots, squares, logistic functions."""
    normal = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return x + jax.nn.silu(normal @ w["gate"]) * (normal @ w["up"]) @ w["down"]


def make_step(wrap: Callable[[Any], Any]) -> Any:
    """A step of an embedding and unrolled blocks, whose first one reads what a gather makes."""

    def step(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            x = params["words"][tokens]
            for w in params["blocks"]:
                x = wrap(block)(x, w)
            logits = x @ params["words"].T
            return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def make_args() -> Any:
    w = {name: jnp.ones((WIDTH, WIDTH)) for name in ("gate", "up", "down")}
    return {"words": jnp.ones((WORDS, WIDTH)), "blocks": [w] * LAYERS}, jnp.zeros((2, TOKENS), jnp.int32)


def traced(wrap: Callable[[Any], Any]) -> Traced:
    return trace(jax.jit(make_step(wrap), donate_argnums=0), make_args(), {})


def residuals(graph: Graph) -> list[str]:
    return sorted(graph.values[v].shape for v in graph.residuals)


@pytest.mark.parametrize(
    "wrap",
    [
        jax.checkpoint,
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
        lambda f: jax.checkpoint(f, prevent_cse=False),
    ],
    ids=["all", "dots", "no barriers"],
)
def test_the_planner_sees_the_program_without_checkpoints(wrap: Callable[[Any], Any]) -> None:
    plain, own = (lower(traced(each), CPU, base_nbytes=0) for each in (lambda f: f, wrap))
    assert own.forward_stop == plain.forward_stop
    assert residuals(own) == residuals(plain)
    assert len(own.stages) == len(plain.stages) > 1


def test_what_the_checkpoints_compute_again_is_known() -> None:
    """So that a plan can start from what they save."""
    found = traced(jax.checkpoint)
    graph = lower(found, CPU, base_nbytes=0)
    again = {v for v in graph.residuals if graph.values[v].producer in found.again}
    assert again
    assert set(graph.residuals) - again
    assert not traced(lambda f: f).again


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_only_what_reads_no_cotangent_moves(name: str) -> None:
    """The law of the new order: it is topological, and every equation that reads a late value keeps its place."""
    case = CHECKPOINTS[name]
    eqns = trace(jax.jit(case.step), case.make_args(), {}).flat.jaxpr.eqns
    ordered, order = forward_again(eqns)
    assert sorted(order) == list(range(len(eqns)))
    made: set[Any] = set()
    everything = {v for eqn in eqns for v in eqn.outvars}
    for eqn in ordered:
        assert all(a in made for a in _compat.variables(eqn.invars) if a in everything)
        made.update(eqn.outvars)
    stayed = [i for i, eqn in zip(order, ordered, strict=True) if eqn is eqns[i]]
    assert stayed == sorted(stayed)
    for i, eqn in zip(order, ordered, strict=True):
        if eqn is not eqns[i]:
            assert is_backward(eqns[i]) and not is_backward(eqn)
