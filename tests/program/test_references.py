"""Steps with references (`jax.new_ref`): what they hold is the plain step's, and they are planned as others are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from jax import lax
from test_emit import all_dropped

import jaxremat
from jaxremat._compiler._devices import detect
from jaxremat._compiler._program import Program
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._program import _compat
from jaxremat._program._references import of_values
from jaxremat._rewrite._trace import trace

LAYERS, OPTIONS = 4, jaxremat.compiler_options("cpu")
WS = jax.random.normal(jax.random.key(0), (LAYERS, 32, 32)) / 6
X = jax.random.normal(jax.random.key(1), (64, 32))
Net = Callable[[jax.Array, jax.Array, Any], Any]


def layer(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(h @ w) + 0.1 * jnp.sin(h)


def written_between_layers(ws: jax.Array, h: jax.Array, ref: Any) -> Any:
    """Each layer reads what the one before wrote."""
    for w in ws:
        h = layer(h, w) * (1 + lax.stop_gradient(ref[0]))
        ref[0] = 0.5 * ref[0] + lax.stop_gradient(h.mean())
        ref[1] += 1.0
    return h


def written_in_a_loop(ws: jax.Array, h: jax.Array, ref: Any) -> Any:
    def body(h: jax.Array, w: jax.Array) -> Any:
        h = layer(h, w)
        ref[0] += lax.stop_gradient(h.mean())
        return h * (1 + lax.stop_gradient(ref[0])), None

    return lax.scan(body, h, ws)[0]


def written_in_a_branch(ws: jax.Array, h: jax.Array, ref: Any) -> Any:
    def changed(h: jax.Array) -> jax.Array:
        ref[0] = lax.stop_gradient(h.mean())
        return h * 1.1

    for w in ws:
        h = lax.cond(ref[0] < 9, changed, lambda h: h, layer(h, w))
    return h


def made_within(ws: jax.Array, h: jax.Array, ref: Any) -> Any:
    own = jax.new_ref(jnp.zeros((2,)))
    h = written_between_layers(ws, h, own)
    ref[1] = lax.stop_gradient(own[0])
    return h * lax.stop_gradient(own[1])


def read_alone(ws: jax.Array, h: jax.Array, ref: Any) -> Any:
    for w in ws:
        h = layer(h, w) + lax.stop_gradient(ref[1])
    return h


NETS: tuple[Net, ...] = (
    written_between_layers, written_in_a_loop, written_in_a_branch, made_within, read_alone,
)  # fmt: skip


def make_step(net: Net) -> Callable[..., Any]:
    def step(ws: jax.Array, x: jax.Array, ref: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda ws: jnp.mean(net(ws, x, ref) ** 2))(ws)
        ref[1] = ref[1] + loss
        return ws - 0.1 * gradients, loss, ref[...]

    return step


def make_ref() -> Any:
    return jax.new_ref(jnp.array([0.1, 0.2]))


@pytest.mark.parametrize("net", NETS)
def test_what_references_hold_is_the_plain_steps(net: Net) -> None:
    """All that may be dropped is dropped, and two steps run one after the other."""
    step, ref, own = make_step(net), make_ref(), make_ref()
    plain = jax.jit(step, compiler_options=OPTIONS)
    traced = trace(plain, (WS, X, ref), {})
    assert not traced.closed.effects and traced.source.references is not None
    graph = lower(traced, detect(jax.devices()[0]), base_nbytes=0)
    closed = emit(traced, graph, all_dropped(graph))
    program = Program(step, compiler_options=tuple(OPTIONS.items()))
    run = program.evaluating(closed, traced).lower(WS, X, ref).compile()
    for _ in range(2):
        assert_same(plain(WS, X, ref), run(WS, X, own))
        np.testing.assert_allclose(ref[...], own[...], rtol=1e-6)
    assert not np.array_equal(own[...], make_ref()[...])


@pytest.mark.parametrize("closed_over", [False, True])
def test_steps_with_references_are_planned(closed_over: bool) -> None:
    given = jaxremat.optimize("min", planning=jaxremat.Planning(solver=jaxremat.MinCut()))
    ref, own = make_ref(), make_ref()
    step = make_step(written_between_layers)
    if closed_over:
        plain: Any = jax.jit(lambda ws, x: step(ws, x, ref), compiler_options=OPTIONS)
        planned, args, own_args = given(lambda ws, x: step(ws, x, own)), (WS, X), (WS, X)
    else:
        plain, planned = jax.jit(step, compiler_options=OPTIONS), given(step)
        args, own_args = (WS, X, ref), (WS, X, own)
    for _ in range(3):
        assert_same(plain(*args), planned(*own_args))
        np.testing.assert_allclose(ref[...], own[...], rtol=1e-6)
    plan = planned.plan(*own_args)
    assert len(plan.stages) > 1 and any(each.action == "recompute" for each in plan.actions)


def test_a_large_reference_is_written_in_its_place() -> None:
    def step(ws: jax.Array, x: jax.Array, total: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda ws: jnp.mean(written_in_a_loop(ws, x, make_ref()) ** 2))(
            ws
        )
        total[...] += gradients
        return loss

    total = jax.new_ref(jnp.zeros_like(WS))
    planned = jaxremat.optimize("1GiB", planning=jaxremat.Planning(solver=jaxremat.MinCut()))(step)
    planned(WS, X, total)
    assert trace(jax.jit(step), (WS, X, total), {}).donated == (False, False, True)
    assert planned.plan(WS, X, total).memory.aliased_nbytes >= WS.nbytes  # type: ignore[union-attr]
    assert float(jnp.abs(total[...]).sum()) > 0


@pytest.mark.parametrize("emitter", ["policy", "custom_vjp"])
def test_references_of_a_planned_functions_own_are_its_values(emitter: str) -> None:
    def loss(ws: jax.Array) -> jax.Array:
        return jnp.mean(written_between_layers(ws, X, make_ref()) ** 2)

    planned = jaxremat.checkpoint(
        loss, "min", emit=emitter, planning=jaxremat.Planning(solver=jaxremat.MinCut())
    )
    want = jax.jit(jax.value_and_grad(loss), compiler_options=OPTIONS)(WS)
    assert_same(want, jax.jit(jax.value_and_grad(planned), compiler_options=OPTIONS)(WS))


def test_references_from_outside_are_refused_by_planned_functions() -> None:
    ref = make_ref()
    planned = jaxremat.checkpoint(lambda ws: written_between_layers(ws, X, ref).sum(), "min")
    with pytest.raises(jaxremat.ArgumentError, match="reference"):
        planned(WS)
    given = jaxremat.checkpoint(lambda ws, ref: written_between_layers(ws, X, ref).sum(), "min")
    with pytest.raises(jaxremat.ArgumentError, match="reference"):
        given(WS, ref)


def test_programs_without_references_are_left_alone() -> None:
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    assert of_values(closed) == (closed, None)
    assert not _compat.has_references(closed)
