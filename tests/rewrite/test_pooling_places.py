"""Gradients of max-pooling by the places of the maxima: the same numbers, of a byte for each window."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxremat
from jaxremat import MemoryStats
from jaxremat._program._inline import Inliner
from jaxremat._rewrite._pooling_places import GRADIENT, MOST_PLACES, PLACES, by_place, pooled_by_place
from jaxremat._rewrite._trace import trace

KINDS = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min)}


def pool(x: jax.Array, window: Any, strides: Any, padding: Any, kind: str = "max") -> jax.Array:
    start, take = KINDS[kind]
    return lax.reduce_window(x, start, take, window, strides, padding)


def both(pooling: Callable[[jax.Array], jax.Array], x: jax.Array, cotangent: jax.Array) -> Any:
    """Result and gradient by JAX, by place with the places early, and with them late; and the early program."""

    def run(x: jax.Array, cotangent: jax.Array) -> Any:
        y, pull = jax.vjp(pooling, x)
        return y, pull(cotangent)[0]

    closed = jax.make_jaxpr(run)(x, cotangent)
    flat = Inliner().program(closed)
    changed = [pooled_by_place(flat, early=early) for early in (True, False)]
    return [jex.jaxpr_as_fun(each)(x, cotangent) for each in (flat, *changed)], changed


def counted(closed: jex.ClosedJaxpr) -> tuple[int, int, int]:
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    return tuple(names.count(each) for each in ("select_and_scatter_add", PLACES.name, GRADIENT.name))  # type: ignore[return-value]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_same_numbers(data: st.DataObject) -> None:
    """Of whole numbers, of which sums are exact in any order, and of which many are equal."""
    draw = data.draw
    rank = draw(st.integers(1, 4))
    shape = draw(st.tuples(*[st.integers(1, 9)] * rank))
    window = tuple(draw(st.integers(1, min(n, 4))) for n in shape)
    strides = draw(st.tuples(*[st.integers(1, 4)] * rank))
    padding = tuple(draw(st.tuples(st.integers(0, w - 1), st.integers(0, w - 1))) for w in window)
    kind = draw(st.sampled_from(sorted(KINDS)))
    dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    x = jnp.asarray(rng.integers(-3, 3, shape), dtype)
    pooling = partial(pool, window=window, strides=strides, padding=padding, kind=kind)
    cotangent = jnp.asarray(rng.integers(-4, 5, jax.eval_shape(pooling, x).shape), dtype)
    (plain, *others), _ = both(pooling, x, cotangent)
    for found in others:
        for got, wanted in zip(found, plain, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


IMAGES = (8, 16, 18, 3)
USUAL = {"window": (1, 3, 3, 1), "strides": (1, 2, 2, 1), "padding": "SAME"}


def images(dtype: Any = jnp.float32) -> tuple[Any, jax.Array, jax.Array]:
    pooling = partial(pool, **USUAL)
    x = jax.random.normal(jax.random.key(0), IMAGES, dtype)
    return pooling, x, jax.random.normal(jax.random.key(1), jax.eval_shape(pooling, x).shape, dtype)


def test_places_stand_behind_the_pooling_or_before_the_gradient() -> None:
    _, (early, late) = both(*images())
    assert counted(early) == counted(late) == (0, 1, 1)
    order = [eqn.primitive.name for eqn in early.jaxpr.eqns]
    assert order.index(PLACES.name) == order.index("reduce_window_max") + 1
    order = [eqn.primitive.name for eqn in late.jaxpr.eqns]
    assert order.index(PLACES.name) == order.index(GRADIENT.name) - 1
    gradient = early.jaxpr.eqns[-1]
    assert str(gradient.invars[1].aval) == "uint8[8,8,9,3]"
    assert gradient.params["sizes"] == (None, 16, 18, None)


def test_two_gradients_of_one_pooling_share_its_places() -> None:
    pooling, x, cotangent = images()

    def run(x: jax.Array, cotangent: jax.Array) -> Any:
        _, pull = jax.vjp(pooling, x)
        return pull(cotangent), pull(cotangent + 1)

    flat = Inliner().program(jax.make_jaxpr(run)(x, cotangent))
    assert counted(pooled_by_place(flat, early=True)) == (0, 1, 2)


def test_large_windows_stay_as_they_are() -> None:
    x = jnp.ones((1, MOST_PLACES + 1))
    pooling = partial(pool, window=(1, MOST_PLACES + 1), strides=(1, 1), padding="VALID")
    closed = jax.make_jaxpr(lambda x: jax.vjp(pooling, x)[1](jnp.ones((1, 1))))(x)
    flat = Inliner().program(closed)
    assert by_place(flat.jaxpr.eqns) == flat.jaxpr.eqns


def test_derivatives_and_batches_of_the_new_equations() -> None:
    pooling, x, cotangent = images()
    _, (early, _) = both(pooling, x, cotangent)

    def changed(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jex.jaxpr_as_fun(early)(x, cotangent)[1]

    def plain(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(pooling, x)[1](cotangent)[0]

    for of in (0, 1):  # the gradient is linear in its cotangent, and constant in the operand
        found, wanted = (
            jax.grad(lambda *a, fn=fn: (fn(*a) ** 2).sum(), of)(x, cotangent) for fn in (changed, plain)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    several = (jnp.stack([x, -x, 2 * x]), jnp.stack([cotangent, cotangent, -cotangent]))
    np.testing.assert_allclose(jax.vmap(changed)(*several), jax.vmap(plain)(*several), rtol=1e-6, atol=1e-6)


def test_less_scratch_memory_and_traffic() -> None:
    """A byte for each window is what passes from forward to backward, of what was pooled nothing."""
    pooling, x, cotangent = images()
    _, (early, _) = both(pooling, x, cotangent)
    options = jaxremat.compiler_options("cpu")

    def temporaries(fn: Any) -> int:
        compiled = jax.jit(fn).lower(x, cotangent).compile(compiler_options=options)
        return MemoryStats.of(compiled).temporaries_nbytes

    plain = temporaries(lambda x, c: jax.vjp(pooling, x)[1](c)[0])
    assert temporaries(lambda x, c: jex.jaxpr_as_fun(early)(x, c)[1]) < plain / 2


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "in microbatches"])
def test_a_step_with_pooling(scanned: bool) -> None:
    """Results are equal, and where pooling is all that the operand is kept for, a byte is kept in its place."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for i in range(3):
            y = lax.conv_general_dilated(x, w[i], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jnp.tanh(pool(y, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
        return (x**2).mean()

    def step(w: Any, x: jax.Array) -> Any:
        if not scanned:
            return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w, x))

        def one(total: Any, rows: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, rows)), None

        total, _ = lax.scan(one, jax.tree.map(jnp.zeros_like, w), x.reshape(4, -1, *x.shape[1:]))
        return jax.tree.map(lambda p, g: p - g, w, total)

    keys = jax.random.split(jax.random.key(0), 4)
    w = [jax.random.normal(k, (3, 3, 8, 8)) / 9 for k in keys[:3]]
    x = jax.random.normal(keys[3], (16, 64, 64, 8))
    traced = trace(jax.jit(step), (w, x), {})
    assert counted(traced.jaxpr) == (0, 3, 3)
    planned = jaxremat.optimize("55% of temporaries")(step)
    plan = planned.plan(w, x)
    assert plan.compiled_peak_nbytes is not None and plan.compiled_peak_nbytes <= plan.budget_nbytes
    assert_close(planned(w, x), jax.jit(step)(w, x), rtol=1e-5, atol=1e-6)
