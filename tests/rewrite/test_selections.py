"""What a value is compared with that was selected from it is of the same run, and gradients of maxima are not lost."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jaxremat
from jaxremat._program._inline import Inliner
from jaxremat._rewrite._selections import compared_directly, is_marked, marked, of_one_run

ROWS, WIDTH, LAYERS = 1024, 64, 6


def flattened(run: Callable[..., Any], *args: Any) -> Any:
    return Inliner().program(jax.make_jaxpr(run)(*args))


SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]


@given(st.lists(st.tuples(*[st.sampled_from(SPECIAL)] * 2), min_size=1, max_size=20))
def test_an_operand_is_compared_with_the_other_one(pairs: list[tuple[float, float]]) -> None:
    def run(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        more, less = lax.max(x, y), lax.min(x, y)
        return [x == more, y == more, more == x, x == less, less == y]

    x, y = np.asarray(pairs, np.float32).T
    closed = flattened(run, x, y)
    direct = compared_directly(closed)
    made = [eqn.primitive.name for eqn in direct.jaxpr.eqns]
    assert made == ["max", "min", "ge", "ge", "ge", "le", "le"]
    found, wanted = (jex.jaxpr_as_fun(each)(x, y) for each in (direct, closed))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def _of_the_largest(x: jax.Array) -> jax.Array:
    return x == x.max(-1, keepdims=True)


def _not_below_the_third(x: jax.Array) -> jax.Array:
    return x >= jnp.sort(x)[:, -3:-2]


def _of_the_best(x: jax.Array) -> jax.Array:
    return lax.top_k(x, 2)[0][:, 1:] <= x.astype(jnp.bfloat16).astype(jnp.float32)


def _larger_than_a_constant(x: jax.Array) -> jax.Array:
    return x > 0


def _than_the_mean(x: jax.Array) -> jax.Array:
    return x > x.mean(-1, keepdims=True)


@pytest.mark.parametrize("late", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("compare", "exposed"),
    [
        (_of_the_largest, True),
        (_not_below_the_third, True),
        (_of_the_best, True),
        (_larger_than_a_constant, False),
        (_than_the_mean, False),
    ],
)
def test_what_may_not_run_again(compare: Callable[[Any], Any], exposed: bool, late: bool) -> None:
    def run(x: jax.Array) -> jax.Array:
        return compare(jnp.sin(x))

    eqns = marked(flattened(run, jnp.ones((4, 8)))).jaxpr.eqns
    once = of_one_run(eqns, [late] * len(eqns))
    (sine,) = (i for i, eqn in enumerate(eqns) if eqn.primitive.name == "sin")
    assert is_marked(eqns[sine]) == exposed
    assert (once == {sine}) == (exposed and late)
    assert bool(once) == exposed


def test_of_arguments_nothing_is_made_again() -> None:
    eqns = flattened(_of_the_largest, jnp.ones((4, 8))).jaxpr.eqns
    assert not of_one_run(eqns, [False] * len(eqns))


def largest(h: jax.Array, scale: jax.Array) -> jax.Array:
    return (h * scale + h**2).max(-1)


def largest_of_four(h: jax.Array, scale: jax.Array) -> jax.Array:
    return (h * scale + h**2).reshape(len(h), -1, 4).max(-1)


def clipped(h: jax.Array, scale: jax.Array) -> jax.Array:
    """The loss of values in proximal policy optimisation."""
    value = h @ scale
    return jnp.maximum((value - 1) ** 2, (jnp.clip(value, -0.2, 0.2) - 1) ** 2)


def largest_of_segments(h: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.ops.segment_max(h * scale + h**2, jnp.arange(len(h)) // 8, len(h) // 8)


def highest_so_far(h: jax.Array, scale: jax.Array) -> jax.Array:
    return lax.cummax(h * scale + h**2, axis=1)


@pytest.mark.parametrize("allow", [(), ("microbatches", "rows")], ids=["recomputed", "in forms"])
@pytest.mark.parametrize("select", [largest, largest_of_four, clipped, largest_of_segments, highest_so_far])
def test_gradients_are_those_without_fusion(select: Callable[..., Any], allow: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    weights = [normal(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)], normal(WIDTH)
    x, t = normal(ROWS, WIDTH), normal(ROWS)

    def step(weights: Any, x: jax.Array, t: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h, (layers, scale) = x, weights
            for w in layers:
                y = h @ w
                h = jnp.tanh((y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6))
            chosen = select(h, scale)
            return (chosen * t[: len(chosen)].reshape(-1, *(1,) * (chosen.ndim - 1))).mean()

        return jax.grad(loss)(weights)

    planned = jaxremat.optimize("min", allow=allow, cache=False)(step)
    assert planned.plan(weights, x, t).actions
    with jax.disable_jit():
        wanted = step(weights, x, t)
    for a, b in zip(jax.tree.leaves(planned(weights, x, t)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-3 * float(jnp.abs(b).max()))
