"""Equal equations computed once: also scans and conds that the backward pass repeats, with more results."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_trace import normal, runnable

from jaxremat._program import _compat
from jaxremat._program._splice import inlined
from jaxremat._rewrite._trace import Traced, trace

STEPS, WIDTH = 5, 8


def repeating(first: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose forward pass is `first`, and whose backward pass scales with what `again` gives."""

    @jax.custom_vjp
    def run(x: jax.Array, ws: jax.Array) -> Any:
        return first(x, ws)

    def forward(x: jax.Array, ws: jax.Array) -> Any:
        return first(x, ws), (x, ws)

    def backward(kept: Any, g: Any) -> Any:
        x, ws = kept
        scale = sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(again(x, ws)))
        return jax.tree.map(lambda g: g * scale, g), jnp.zeros_like(ws)

    run.defvjp(forward, backward)
    return lambda x, ws: jax.grad(lambda x: jnp.sum(run(x, ws) ** 2))(x)


def counted(step: Callable[..., Any]) -> tuple[Traced, Counter[str]]:
    """The step, checked against itself once its loops are closed, and how often each primitive stands in it."""
    args = normal(4, WIDTH, seed=1), normal(STEPS, WIDTH, WIDTH, seed=2)
    found = trace(jax.jit(step), args, {})
    want = jax.jit(step)(*args)
    (got,) = jax.jit(jex.jaxpr_as_fun(runnable(found)))(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    return found, Counter(eqn.primitive.name for eqn in found.jaxpr.jaxpr.eqns)


def chain(x: jax.Array, ws: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def chain_and_more(x: jax.Array, ws: jax.Array) -> Any:
    def body(x: jax.Array, w: jax.Array) -> Any:
        h = x @ w
        return jnp.tanh(h), (jnp.sin(h), x, x)

    return lax.scan(body, x, ws)


def two_carries(swapped: bool, last: float = 1.0) -> Callable[..., Any]:
    """Two carries that begin alike; `swapped` in the other order."""

    def run(x: jax.Array, ws: jax.Array) -> Any:
        def body(carry: Any, w: jax.Array) -> Any:
            a, b = carry[::-1] if swapped else carry
            a, b = jnp.tanh(a @ w) + b, b * 0.5 + last
            return ((b, a) if swapped else (a, b)), (a if swapped else None)

        (a, b), _ = lax.scan(body, (x, x), ws)
        return b + 2 * a if swapped else a + 2 * b

    return run


def branching(more: bool, other: bool = False) -> Callable[..., Any]:
    def run(x: jax.Array, ws: jax.Array) -> Any:
        def left(x: jax.Array) -> Any:
            h = x @ ws[0]
            return (jnp.tanh(h), jnp.sin(h)) if more else (jnp.tanh(h),)

        def right(x: jax.Array) -> Any:
            h = x @ ws[2 if other else 1]
            return (jnp.exp(h), h) if more else (jnp.exp(h),)

        y = lax.cond(x[0, 0] > 0, left, right, x)
        return y if more else y[0]

    return run


def test_a_repeated_scan_is_joined() -> None:
    _, counts = counted(repeating(chain, chain_and_more))
    assert counts["scan"] == 1


def test_a_scan_that_comes_once_more_is_the_one_that_another_has_joined() -> None:
    both = repeating(chain, chain_and_more)
    _, primitives = counted(lambda x, ws: both(x, ws) + chain(x, ws))
    assert primitives["scan"] == 1


def test_carries_that_begin_alike_are_told_apart() -> None:
    _, counts = counted(repeating(two_carries(False), two_carries(True)))
    assert counts["scan"] == 1


def test_carries_that_go_on_otherwise_stay() -> None:
    _, counts = counted(repeating(two_carries(False), two_carries(True, last=2.0)))
    assert counts["scan"] == 2


@pytest.mark.parametrize(
    "again",
    [
        lambda x, ws: chain_and_more(2 * x, ws),
        lambda x, ws: chain_and_more(x, ws[:4]),
        lambda x, ws: chain_and_more(x, ws[::-1]),
        lambda x, ws: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws, reverse=True),
        lambda x, ws: lax.scan(lambda x, w: (jnp.tanh(x @ w), (x + 1) @ w), x, ws),
        lambda x, ws: lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws),
    ],
)
def test_other_scans_stay(again: Callable[..., Any]) -> None:
    _, counts = counted(repeating(chain, again))
    assert counts["scan"] == 2


def test_a_repeated_cond_is_joined() -> None:
    _, counts = counted(repeating(branching(False), branching(True)))
    assert counts["cond"] == 1


def test_other_conds_stay() -> None:
    _, counts = counted(repeating(branching(False), branching(True, other=True)))
    assert counts["cond"] == 2


def test_equal_bodies_have_no_names() -> None:
    """Two loops traced apart are one."""

    def once(x: jax.Array, ws: jax.Array) -> jax.Array:
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1]

    def twice(x: jax.Array, ws: jax.Array) -> jax.Array:
        return lax.while_loop(lambda t: t[0] < 3, lambda t: (t[0] + 1, jnp.sin(t[1])), (0, x))[1]

    def other(x: jax.Array, ws: jax.Array) -> jax.Array:
        return lax.while_loop(lambda t: t[0] < 4, lambda t: (t[0] + 1, jnp.sin(t[1])), (0, x))[1]

    assert counted(lambda x, ws: once(x, ws) + twice(x, ws))[1]["while"] == 1
    assert counted(lambda x, ws: once(x, ws) + other(x, ws))[1]["while"] == 2


def test_results_have_the_names_that_are_given_also_where_they_are_handed_on() -> None:
    """An operand, a literal, and a result that is returned twice."""
    closed = jax.make_jaxpr(lambda x, y: (y, 2.0, z := x + y, z, x * z))(1.0, 2.0)
    operands = [_compat.new_var(v.aval) for v in closed.jaxpr.invars]
    names = [_compat.new_var(jnp.asarray(0.0).aval) for _ in closed.jaxpr.outvars]
    eqns, results = inlined(closed, operands, closed.jaxpr.eqns[0].source_info, names)
    assert results == names
    spliced = _compat.new_jaxpr((), (), operands, names, eqns)
    _compat.check_jaxpr(spliced)
    assert [float(v) for v in jex.jaxpr_as_fun(spliced)(np.float32(3), np.float32(4))] == [4, 2, 7, 7, 21]
    *_, last = inlined(closed, operands, closed.jaxpr.eqns[0].source_info)[1]
    assert last not in names
