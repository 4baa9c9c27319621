"""Gradients that pass layers by pointwise work alone: written once each layer, not made again by every kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import descent
from comparing import assert_same

import jaxremat
from jaxremat._model._graph import backend
from jaxremat._rewrite._cotangent_chains import in_memory, is_named
from jaxremat._rewrite._kernel_choice import inline, replaced
from jaxremat._rewrite._trace import trace

LAYERS, WIDTH, ROWS = 8, 64, 2048


def gated(x: jax.Array, w: jax.Array) -> jax.Array:
    u = x @ w
    return x * jax.nn.sigmoid(u[:, :WIDTH]) + jnp.tanh(u[:, WIDTH:])


def highway(x: jax.Array, w: jax.Array) -> jax.Array:
    gate = jax.nn.sigmoid(x @ w[:, :WIDTH])
    return gate * jnp.tanh(x @ w[:, WIDTH:]) + (1 - gate) * x


def residual(x: jax.Array, w: jax.Array) -> jax.Array:
    """Gradients reach the product as they are, and are in memory for it."""
    return x + jnp.tanh(x @ w[:, :WIDTH]) @ w[:, WIDTH:]


def step_of(layer: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    @descent
    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        h = x
        for w in weights:
            h = layer(h, w)
        return (h**2).mean()

    return step


def args() -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(k, (WIDTH, 2 * WIDTH)) * 0.1 for k in keys[1:]]
    return weights, jax.random.normal(keys[0], (ROWS, WIDTH))


@pytest.mark.parametrize("layer", [gated, highway])
def test_a_half_without_other_forms(layer: Any) -> None:
    step = step_of(layer)
    planned = jaxremat.optimize("50% of temporaries", donate_argnums=0, allow=())(step)
    plan = planned.plan(*args())
    assert plan.peak_nbytes <= plan.budget_nbytes
    assert_same(jax.jit(step)(*args()), planned(*args()))


def test_which_are_named() -> None:
    def named(layer: Any) -> int:
        return sum(map(is_named, trace(jax.jit(step_of(layer)), args(), {}).jaxpr.jaxpr.eqns))

    assert named(residual) == 0
    for layer in (gated, highway):
        assert LAYERS // 3 <= named(layer) <= LAYERS


@pytest.mark.parametrize("layer", [gated, highway, residual])
def test_what_checkpoints_make_again_is_no_gradient(layer: Any) -> None:
    plain, own = (
        sum(map(is_named, trace(jax.jit(step_of(each)), args(), {}).jaxpr.jaxpr.eqns))
        for each in (layer, jax.checkpoint(layer))
    )
    assert own == plain


def test_a_fence_of_its_own_where_the_compiler_repeats_work() -> None:
    eqns = trace(jax.jit(step_of(gated)), args(), {}).jaxpr.jaxpr.eqns
    eqn = next(filter(is_named, eqns))
    assert replaced(backend("cpu"))(eqn)
    assert not replaced(backend("gpu"))(eqn)
    made, fence = inline(eqn)
    assert (made.primitive, fence.primitive.name) == (eqn.primitive, "optimization_barrier")
    assert (fence.invars, fence.outvars) == (made.outvars, eqn.outvars)
    assert [e.primitive for e in in_memory(eqn)] == [made.primitive, fence.primitive]
