"""Two programs that compute the same are seen to, however their loops are written; others never are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxremat._program._equivalence import Equivalence

X = jnp.arange(24.0).reshape(6, 4)
C = jnp.ones(4)


def program(fn: Callable[..., Any], *args: Any) -> jex.ClosedJaxpr:
    return jax.make_jaxpr(fn)(*(args or (X, C)))


def same(first: Callable[..., Any], second: Callable[..., Any], *args: Any) -> bool:
    one, two = program(first, *args), program(second, *args)
    found = [Equivalence(a).difference(b) is None for a, b in ((one, two), (two, one))]
    assert found[0] == found[1]
    return found[0]


def loop(x: Any, c: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.tanh(c * row), c), c, x)


def two_carries(x: Any, c: Any) -> Any:
    (_, c), stacks = lax.scan(lambda cs, row: ((cs[1], jnp.tanh(cs[1] * row)), cs[1]), (c, c), x)
    return c, stacks


def in_two_parts(x: Any, c: Any) -> Any:
    c, first = loop(x[:2], c)
    c, second = loop(x[2:], c)
    return c, jnp.concatenate([first, second])


def in_levels(x: Any, c: Any) -> Any:
    c, stacks = lax.scan(lambda c, part: loop(part, c), c, x.reshape(2, 3, 4))
    return c, stacks.reshape(6, 4)


def written(x: Any, c: Any) -> Any:
    def body(i: Any, state: Any) -> Any:
        c, stacks = state
        stacks = lax.dynamic_update_index_in_dim(stacks, c, i, 0)
        return jnp.tanh(c * lax.dynamic_index_in_dim(x, i, keepdims=False)), stacks

    return lax.fori_loop(0, 6, body, (c, jnp.zeros((6, 4))))


def remade(x: Any, c: Any) -> Any:
    """Another loop makes what the first one stacks from what it stacks."""
    last, stacks = loop(x, c)
    _, again = lax.scan(lambda d, given: (jnp.tanh(given[1] * given[0]), d), c, (x, stacks))
    return last, again


@pytest.mark.parametrize(
    "other", [two_carries, in_two_parts, in_levels, written, remade], ids=lambda fn: fn.__name__
)
def test_one_loop_in_other_words(other: Callable[..., Any]) -> None:
    np.testing.assert_allclose(loop(X, C)[1], other(X, C)[1])
    assert same(loop, other)


def later(x: Any, c: Any) -> Any:
    return lax.scan(lambda c, row: ((made := jnp.tanh(c * row)), made), c, x)


def reversed_(x: Any, c: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.tanh(c * row), c), c, x, reverse=True)


def crossed_parts(x: Any, c: Any) -> Any:
    c, first = loop(x[2:], c)
    c, second = loop(x[:2], c)
    return c, jnp.concatenate([second, first])


def restarted(x: Any, c: Any) -> Any:
    _, first = loop(x[:2], c)
    c, second = loop(x[2:], c)
    return c, jnp.concatenate([first, second])


def other_levels(x: Any, c: Any) -> Any:
    c, stacks = lax.scan(lambda c, part: loop(part, c), c, x.reshape(3, 2, 4).swapaxes(0, 1))
    return c, stacks.reshape(6, 4)


def written_elsewhere(x: Any, c: Any) -> Any:
    def body(i: Any, state: Any) -> Any:
        c, stacks = state
        stacks = lax.dynamic_update_index_in_dim(stacks, c, 5 - i, 0)
        return jnp.tanh(c * lax.dynamic_index_in_dim(x, i, keepdims=False)), stacks

    return lax.fori_loop(0, 6, body, (c, jnp.zeros((6, 4))))


def not_quite_written(x: Any, c: Any) -> Any:
    def body(i: Any, state: Any) -> Any:
        c, stacks = state
        stacks = lax.dynamic_update_index_in_dim(stacks, c, i, 0)
        return jnp.tanh(c * lax.dynamic_index_in_dim(x, i, keepdims=False)), stacks

    c, stacks = lax.fori_loop(0, 5, body, (c, jnp.zeros((6, 4))))
    return jnp.tanh(c * x[5]), stacks


def read_before_written(x: Any, c: Any) -> Any:
    """Rows that an earlier iteration wrote are read for those of the array."""

    def body(i: Any, state: Any) -> Any:
        c, stacks = state
        stacks = lax.dynamic_update_index_in_dim(stacks, c, i, 0)
        return jnp.tanh(c * lax.dynamic_index_in_dim(stacks, i, keepdims=False)), stacks

    return lax.fori_loop(0, 6, body, (c, x))


@pytest.mark.parametrize(
    "other",
    [
        later, reversed_, crossed_parts, restarted, other_levels, written_elsewhere, not_quite_written,
        read_before_written,
    ],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_other_loops_are_others(other: Callable[..., Any]) -> None:
    assert not same(loop, other)


def clamped(x: Any, c: Any) -> Any:
    """Rows of an array of fewer: the last one again and again."""
    return lax.scan(
        lambda c, i: (jnp.tanh(c * lax.dynamic_index_in_dim(x[:3], i, keepdims=False)), c), c, jnp.arange(6)
    )


def clamped_backward(x: Any, c: Any) -> Any:
    return lax.scan(
        lambda c, i: (jnp.tanh(c * lax.dynamic_index_in_dim(x[:3], i, keepdims=False)), c),
        c,
        jnp.arange(6),
        reverse=True,
    )


def test_indices_out_of_an_array_are_no_rows() -> None:
    assert same(clamped, clamped) and same(clamped_backward, clamped_backward)
    assert not same(clamped, loop)
    assert not same(clamped_backward, reversed_)


def test_what_is_the_same_in_all_iterations_may_be_made_before_them() -> None:
    def within(x: Any, c: Any) -> Any:
        return lax.scan(lambda a, row: (a * jnp.sin(c) + row, None), c, x)[0]

    def before(x: Any, c: Any) -> Any:
        s = jnp.sin(c)
        return lax.scan(lambda a, row: (a * s + row, None), c, x)[0]

    def growing(x: Any, c: Any) -> Any:
        return lax.scan(lambda a, row: (a * jnp.sin(a) + row, None), c, x)[0]

    assert same(within, before)
    assert not same(within, growing)


def test_a_loop_of_no_iterations_hands_on_what_it_was_given() -> None:
    def none(x: Any, c: Any) -> Any:
        return loop(x[:0], c)

    def others(x: Any, c: Any) -> Any:
        (left, _), stacks = lax.scan(lambda cs, row: ((cs[0] * 2, cs[1] + row), row), (c, x[0]), x[:0])
        return left, stacks

    assert same(none, others)


def test_branches_and_conditions() -> None:
    def chosen(x: Any, c: Any) -> Any:
        return lax.cond(c[0] > 0, lambda: (jnp.sin(x), jnp.cos(c)), lambda: (x, c))

    def apart(x: Any, c: Any) -> Any:
        first = lax.cond(c[0] > 0, lambda: jnp.sin(x), lambda: x)
        return first, lax.cond(c[0] > 0, lambda: jnp.cos(c), lambda: c)

    def exchanged(x: Any, c: Any) -> Any:
        return lax.cond(c[0] > 0, lambda: (x, c), lambda: (jnp.sin(x), jnp.cos(c)))

    assert same(chosen, apart)
    assert not same(chosen, exchanged)


def test_draws_are_neither_merged_nor_exchanged() -> None:
    def drawn(*, turn: int, times: int) -> Callable[..., Any]:
        def fn(low: Any, high: Any) -> Any:
            draws = [lax.rng_uniform(low, high, (3,)) for _ in range(times)]
            return draws[turn] - draws[turn - 1]

        return fn

    args = (jnp.float32(0), jnp.float32(1))
    first = program(drawn(turn=0, times=2), *args)
    assert Equivalence(first).difference(first) is None
    assert not same(drawn(turn=0, times=2), drawn(turn=1, times=2), *args)
    assert not same(drawn(turn=0, times=2), drawn(turn=0, times=1), *args)


def test_effects_keep_their_order() -> None:
    def told(*values: str) -> Callable[..., Any]:
        def fn(x: Any, c: Any) -> Any:
            for value in values:
                io_callback(seen[value], None, x if value == "x" else c, ordered=True)
            return x

        return fn

    seen = {"x": lambda *_: None, "c": lambda *_: None}
    assert same(told("x", "c"), told("x", "c"))
    for other in (("c", "x"), ("x",), ("x", "c", "c")):
        assert not same(told("x", "c"), told(*other))


def test_collectives_have_no_order() -> None:
    """What nothing reads of them, as after a part of a step is removed, counts for nothing."""
    mesh = jax.make_mesh((1,), ("rows",))

    def summed(*readers: int, unread: bool = False) -> Callable[..., Any]:
        def body(x: Any, c: Any) -> Any:
            if unread:
                lax.psum(x[0], "rows")
            sums = [lax.psum((x, c)[i].sum(), "rows") for i in readers]
            return sums[readers.index(0)] - sums[readers.index(1)]

        spec = jax.sharding.PartitionSpec()
        return jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)

    assert same(summed(0, 1), summed(1, 0))
    assert same(summed(0, 1), summed(0, 1, unread=True))
    assert not same(summed(0, 1), lambda x, c: -summed(0, 1)(x, c))


def test_literals_of_other_types_are_others() -> None:
    assert same(lambda x, c: x * 2, lambda x, c: x * 2.0)
    assert not same(lambda x, c: x * 2, lambda x, c: x * 3)
    assert not same(lambda x, c: x - c, lambda x, c: c - x)
    assert not same(lambda x, c: x, lambda x, c: (x, c))


@pytest.mark.parametrize(
    "body", [lambda c: jnp.where(c < 9.0, c + 1.0, 9.0), jnp.tanh], ids=["limited", "tanh"]
)
@pytest.mark.parametrize("begin", [0, 0.5])
def test_one_iteration_is_the_same_before_and_behind_a_loop_that_begins_like_it(
    body: Callable[..., Any], begin: float
) -> None:
    def one(c: Any) -> Any:
        return lax.scan(lambda c, _: (body(c).astype(c.dtype), None), c, length=1)[0]

    def until(c: Any) -> Any:
        return lax.while_loop(lambda c: c < 0.9, lambda c: body(c).astype(c.dtype), c)

    def first(x: Any, c: Any) -> Any:
        return one(jnp.asarray(begin)), until(jnp.asarray(begin))

    def last(x: Any, c: Any) -> Any:
        looped = until(jnp.asarray(begin))
        return one(jnp.asarray(begin)), looped

    assert same(first, last)


@pytest.mark.parametrize(
    ("narrow", "wide", "same"),
    [
        (jnp.bfloat16, jnp.float32, True), (jnp.float8_e4m3fn, jnp.float32, True), (jnp.int8, jnp.int32, True),
        (jnp.int32, jnp.float32, False), (jnp.float16, jnp.bfloat16, False), (jnp.int32, jnp.uint32, False),
    ],
)  # fmt: skip
def test_what_was_in_a_type_that_holds_it_is_as_it_was(narrow: Any, wide: Any, same: bool) -> None:
    there = jax.make_jaxpr(lambda x: jnp.sort(x.astype(wide).astype(narrow)))(jnp.ones(3, narrow))
    plain = jax.make_jaxpr(jnp.sort)(jnp.ones(3, narrow))
    assert (Equivalence(plain).difference(there) is None) == same
