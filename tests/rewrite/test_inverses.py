"""What follows from what is known: couplings are undone, the rest is made again, and nothing is made up."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from hypothesis import given
from hypothesis import strategies as st

from jaxremat._program import _compat
from jaxremat._program._inline import Inliner
from jaxremat._rewrite._inverses import Following

ROWS, WIDTH = 4, 8


def weight(seed: int, rows: int = WIDTH, columns: int = WIDTH) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, columns)) / 3


def stream(seed: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(100 + seed), (ROWS, WIDTH)).astype(dtype)


def follow(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Following, jex.ClosedJaxpr, list[Any]]:
    """What follows from the results of a function of arrays, and the names of these."""
    closed = Inliner().program(jax.make_jaxpr(fn)(*args))
    jaxpr = closed.jaxpr
    following = Following({v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}.get)
    results = [_compat.new_var(v.aval) for v in jaxpr.outvars]
    following.know({v: v for v in jaxpr.constvars})
    following.know(dict(zip(jaxpr.outvars, results, strict=True)))
    for eqn in jaxpr.eqns:
        following.learn(eqn)
    return following, closed, results


def undone(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The arguments of a function, made of its results."""
    following, closed, results = follow(fn, args)
    jaxpr = closed.jaxpr
    outvars = [following.name[v] for v in jaxpr.invars]
    eqns = following.needed(jaxpr.invars)
    inverse = _compat.new_jaxpr(jaxpr.constvars, closed.consts, results, outvars, eqns)
    _compat.check_jaxpr(inverse)
    return jex.jaxpr_as_fun(inverse)(*jax.tree.leaves(fn(*args)))


def revnet(x1: Any, x2: Any) -> Any:
    y1 = x1 + jnp.tanh(x2 @ weight(0))
    return y1, x2 + jax.nn.gelu(y1 @ weight(1))


def subtracting(x1: Any, x2: Any) -> Any:
    y1 = jnp.sin(x2 @ weight(0)) - x1
    return -y1, x2 - 2 * jnp.tanh(y1 @ weight(1))


def affine(x: Any) -> Any:
    a, b = jnp.split(x, 2, -1)
    s, t = jnp.split(jnp.tanh(a @ weight(0)[: WIDTH // 2]), 2, -1)
    return jnp.concatenate([b * jnp.exp(s) + t, a], -1)[:, ::-1]


def glow(x: Any) -> Any:
    x = x * jnp.exp(jnp.linspace(-1, 1, WIDTH))
    a, b = x[:, : WIDTH // 2], x[:, WIDTH // 2 :]
    s, t = jnp.split(jax.nn.relu(a @ weight(0)[: WIDTH // 2]), 2, -1)
    return jnp.concatenate([a, (b + t) / (jax.nn.sigmoid(s + 2) + 0.5)], -1)


def squeezed(x: Any) -> Any:
    return affine(x.reshape(2, 2, WIDTH).transpose(1, 0, 2).reshape(ROWS, WIDTH))[:, None]


def of_two_types(x1: Any, x2: Any) -> Any:
    y1 = x1 + jnp.tanh(x2 @ weight(0)).astype(jnp.bfloat16)
    return y1.astype(jnp.float32), x2 + jnp.tanh(y1.astype(jnp.float32) @ weight(1))


COUPLINGS = {
    "revnet": (revnet, (stream(0), stream(1)), 1e-6),
    "subtracting": (subtracting, (stream(0), stream(1)), 1e-6),
    "affine": (affine, (stream(0),), 1e-6),
    "glow": (glow, (stream(0),), 1e-5),
    "squeezed": (squeezed, (stream(0),), 1e-6),
    "of two types": (of_two_types, (stream(0, jnp.bfloat16), stream(1)), 0.02),
}


@pytest.mark.parametrize("name", COUPLINGS)
def test_couplings_are_undone(name: str) -> None:
    fn, args, rounding = COUPLINGS[name]
    for found, want in zip(undone(fn, *args), args, strict=True):
        assert (found.shape, found.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(np.asarray(found, float), np.asarray(want, float), rtol=0, atol=rounding)


def residual(x: Any) -> Any:
    return x + jnp.tanh(x @ weight(0))


def masked(x: Any) -> Any:
    """A product with what may be zero."""
    return x * (stream(5) > 0), jnp.tanh(x @ weight(0))


def scaled(x: Any) -> Any:
    """And with a number of which nothing is known."""
    return x * stream(5), jnp.tanh(x @ weight(0))


def summed(x: Any) -> Any:
    return jnp.sum(x, 0) + 1


def rounded(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


def a_part(x: Any) -> Any:
    return x[:, 1:]


def counted_twice(x: Any) -> Any:
    return x + x @ weight(0), x[::2]


@pytest.mark.parametrize("fn", [residual, masked, scaled, summed, rounded, a_part, counted_twice])
def test_what_does_not_follow_is_not_made_up(fn: Callable[..., Any]) -> None:
    following, closed, _ = follow(fn, (stream(0),))
    assert closed.jaxpr.invars[0] not in following.name


def test_what_is_random_is_drawn_again_and_effects_are_not_repeated() -> None:
    def noisy(x1: Any, x2: Any) -> Any:
        keep = jax.random.bernoulli(jax.random.key(3), 0.5, x2.shape)
        y1 = x1 + jnp.where(keep, jnp.tanh(x2), 0)
        return y1, x2

    assert_close(undone(noisy, stream(0), stream(1)), (stream(0), stream(1)), rtol=0, atol=1e-6)

    def shown(x1: Any, x2: Any) -> Any:
        y = jnp.tanh(x2)
        jax.debug.callback(lambda _: None, y)
        return x1 + y, x2

    following, _, _ = follow(shown, (stream(0), stream(1)))
    assert not any(eqn.effects for eqn in following.eqns)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "sub", "scale", "swap", "turn", "halves", "cast"]), st.integers(0, 3)),
    max_size=6,
)


@given(STEPS)
def test_random_rows_of_couplings_are_undone(steps: Sequence[tuple[str, int]]) -> None:
    def fn(x1: Any, x2: Any) -> Any:
        for kind, seed in steps:
            inner = jnp.tanh(x2 @ weight(seed))
            if kind == "add":
                x1 = x1 + inner
            elif kind == "sub":
                x1 = inner - x1
            elif kind == "scale":
                x1 = x1 * jnp.exp(inner / 4)
            elif kind == "swap":
                x1, x2 = x2, x1
            elif kind == "turn":
                x1 = x1[::-1, ::-1]
            elif kind == "halves":
                x1 = jnp.concatenate([x1[:, 3:], x1[:, :3]], 1)
            else:
                x1 = x1.reshape(-1).reshape(WIDTH, ROWS).T
        return x1, x2

    args = stream(0), stream(1)
    assert_close(undone(fn, *args), args, rtol=0, atol=1e-5)
