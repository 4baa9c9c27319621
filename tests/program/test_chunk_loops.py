"""A loop over chunks of rows is the work on all rows at once, and no other loop is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxremat._program._equivalence import Equivalence

ROWS, CHUNKS = 8, 4
ARGS = jnp.ones((ROWS, ROWS)), jnp.ones((ROWS, ROWS)), jnp.ones((3, ROWS)), jnp.arange(ROWS) % 3


def all_rows(x: Any, w: Any, table: Any, words: Any, *, dtype: Any = jnp.float32) -> Any:
    x, w = x.astype(dtype), w.astype(dtype)
    h = jnp.tanh(x @ w) + table[words].astype(dtype)

    def inner(h: Any, scale: Any) -> Any:
        return jnp.sin(h) * scale, (h.astype(jnp.float32).sum(0), h)

    last, (sums, stack) = lax.scan(inner, h, jnp.arange(3, dtype=dtype))
    counts = jnp.zeros((3, ROWS)).at[words].add(last.astype(jnp.float32))
    repeated = jnp.ones((ROWS, ROWS), dtype) * w.max()
    dw = lax.dot_general(x, last, (((0,), (0,)), ((), ())))
    return h, stack, dw, sums, counts, w.max(), last * repeated


def in_chunks(count: int = CHUNKS, wrong: str = "", dtype: Any = jnp.float32) -> Callable[..., Any]:
    """The same chunk after chunk, with one thing wrong."""
    size = ROWS // count

    def fn(x: Any, w: Any, table: Any, words: Any) -> Any:
        x, w = x.astype(dtype), w.astype(dtype)
        added = dtype if wrong == "short sums" else jnp.float32
        start = jnp.ones if wrong == "begins elsewhere" else jnp.zeros
        state = (
            jnp.zeros((ROWS, ROWS), dtype), jnp.zeros((3, ROWS, ROWS), dtype), start((ROWS, ROWS), added),
            jnp.zeros((3, ROWS), jnp.float32), jnp.zeros((3, ROWS)), jnp.zeros((), dtype),
            jnp.zeros((ROWS, ROWS), dtype),
        )  # fmt: skip

        def chunk(state: Any, i: Any) -> Any:
            hs, stacks, dw, totals, counts, most, products = state
            at = i * size + (wrong == "shifted")
            rows = lax.dynamic_slice_in_dim(x, at, size, 1 if wrong == "other axis" else 0)
            rows = rows.T if wrong == "other axis" else rows
            own = lax.dynamic_slice_in_dim(
                words, ((count - 1 - i) * size if wrong == "other words" else i * size), size
            )
            h = jnp.tanh(rows @ w) + table[own].astype(dtype)
            length = 2 if wrong == "fewer iterations" else 3

            def inner(h: Any, scale: Any) -> Any:
                return jnp.sin(h) * scale, (h.astype(jnp.float32).sum(0), h)

            last, (sums, stack) = lax.scan(inner, h, jnp.arange(length, dtype=dtype))
            if length < 3:
                sums, stack = jnp.pad(sums, ((0, 1), (0, 0))), jnp.pad(stack, ((0, 1), (0, 0), (0, 0)))
            part = lax.dot_general(rows, last, (((0,), (0,)), ((), ())), preferred_element_type=added)
            dw = (
                part
                if wrong == "written for added"
                else dw + (part + part if wrong == "added twice" else part)
            )
            top = w.max()
            to = (count - 1 - i) * size if wrong == "written backward" else i * size
            hs = lax.dynamic_update_slice_in_dim(hs, h, to, 0)
            stacks = lax.dynamic_update_slice_in_dim(stacks, stack, i * size, 1)
            product = last * (jnp.ones((size, ROWS), dtype) * top)
            return (
                hs, stacks, dw, totals + sums, counts.at[own].add(last.astype(jnp.float32)),
                most + top if wrong == "added for whole" else top,
                lax.dynamic_update_slice_in_dim(products, product, i * size, 0),
            ), None  # fmt: skip

        numbers = jnp.arange(count - (wrong == "a chunk less"), dtype=jnp.int32)
        found = list(lax.scan(chunk, state, numbers)[0])
        if wrong == "exchanged":
            found[0], found[6] = found[6], found[0]
        return *found[:2], found[2].astype(dtype), *found[3:]

    return fn


def is_proved(whole: Callable[..., Any], other: Callable[..., Any]) -> bool:
    return Equivalence(jax.make_jaxpr(whole)(*ARGS)).difference(jax.make_jaxpr(other)(*ARGS)) is None


@pytest.mark.parametrize("count", [2, CHUNKS, ROWS])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chunks_of_rows_are_all_rows(count: int, dtype: Any) -> None:
    assert is_proved(lambda *args: all_rows(*args, dtype=dtype), in_chunks(count, dtype=dtype))


WRONG = (
    "shifted", "other axis", "other words", "fewer iterations", "written for added", "added twice", "added for whole",
    "written backward", "begins elsewhere", "a chunk less", "exchanged",
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("count", [CHUNKS, ROWS])
def test_one_thing_wrong_is_seen(wrong: str, count: int) -> None:
    assert not is_proved(all_rows, in_chunks(count, wrong))


def test_sums_in_short_numbers_are_seen() -> None:
    whole = lambda *args: all_rows(*args, dtype=jnp.bfloat16)  # noqa: E731
    assert not is_proved(whole, in_chunks(CHUNKS, "short sums", jnp.bfloat16))


def test_rows_that_wait_for_others_are_in_no_chunks() -> None:
    """Means over a chunk are no means over all rows, and sorted chunks are not sorted rows."""

    def chunks(f: Callable[[Any], Any]) -> Callable[..., Any]:
        def fn(x: Any, *_: Any) -> Any:
            def body(so_far: Any, i: Any) -> Any:
                part = f(lax.dynamic_slice_in_dim(x, 2 * i, 2))
                return lax.dynamic_update_slice_in_dim(so_far, part, 2 * i, 0), None

            return lax.scan(body, jnp.zeros_like(x), jnp.arange(CHUNKS))[0]

        return fn

    rows = lambda f: lambda x, *_: f(x)  # noqa: E731
    for f in (jnp.tanh, lambda x: x - x.mean(1, keepdims=True), lambda x: jnp.sort(x, 1)):
        assert is_proved(rows(f), chunks(f))
    for f in (
        lambda x: x - x.mean(0),
        lambda x: jnp.sort(x, 0),
        lambda x: jnp.cumsum(x, 0),
        lambda x: x[::-1],
    ):
        assert not is_proved(rows(f), chunks(f))


def test_rows_in_parts() -> None:
    """As those of several devices, each of which has some of every chunk."""

    def fn(x: Any, *_: Any) -> Any:
        laid = x.reshape(2, CHUNKS, ROWS)

        def body(so_far: Any, i: Any) -> Any:
            rows, total = so_far
            part = jnp.tanh(lax.dynamic_slice_in_dim(laid, 2 * i, 2, 1).reshape(4, ROWS))
            return (
                lax.dynamic_update_slice_in_dim(rows, part.reshape(2, 2, ROWS), 2 * i, 1),
                total + part.sum(0),
            ), None

        rows, total = lax.scan(body, (jnp.zeros_like(laid), jnp.zeros(ROWS)), jnp.arange(2))[0]
        return rows.reshape(ROWS, ROWS), total

    def crossed(x: Any, *_: Any) -> Any:
        rows, total = fn(x.reshape(2, 2, 2, ROWS).swapaxes(0, 1).reshape(ROWS, ROWS))
        return rows, total

    assert is_proved(lambda x, *_: (jnp.tanh(x), jnp.tanh(x).sum(0)), fn)
    assert not is_proved(lambda x, *_: (jnp.tanh(x), jnp.tanh(x).sum(0)), crossed)


@pytest.mark.parametrize("count", [CHUNKS, ROWS])
def test_choices_are_made_row_by_row_in_a_loop_within(count: int) -> None:
    """Where a chunk has one row, what all iterations choose from may look as if it were read whole."""

    def iterated(x: Any) -> Any:
        least = jnp.full_like(x, -1.0)

        def body(h: Any, _: Any) -> Any:
            return jnp.where(h > least, jnp.sin(h) * x, least), None

        return lax.scan(body, jnp.zeros_like(x), None, length=3)[0]

    def chunks(x: Any, *_: Any) -> Any:
        def body(so_far: Any, i: Any) -> Any:
            at = i * (ROWS // count)
            part = iterated(lax.dynamic_slice_in_dim(x, at, ROWS // count))
            return lax.dynamic_update_slice_in_dim(so_far, part, at, 0), None

        return lax.scan(body, jnp.zeros_like(x), jnp.arange(count))[0]

    assert is_proved(lambda x, *_: iterated(x), chunks)


@pytest.mark.parametrize("begin", [0.0, 1.0])
def test_a_sum_over_what_is_scattered_begins_with_nothing(begin: float) -> None:
    """Or each chunk would add that once more."""

    def scattered(words: Any, values: Any) -> Any:
        return jnp.full(3, begin).at[words].add(values)

    def whole(x: Any, w: Any, table: Any, words: Any) -> Any:
        return scattered(words, x[0])

    def chunks(x: Any, w: Any, table: Any, words: Any) -> Any:
        def chunk(total: Any, i: Any) -> Any:
            own = (lax.dynamic_slice_in_dim(a, i * 2, 2) for a in (words, x[0]))
            return total + scattered(*own), None

        return lax.scan(chunk, jnp.zeros(3), jnp.arange(ROWS // 2))[0]

    assert is_proved(whole, chunks) == (begin == 0.0)


@pytest.mark.parametrize("at", ["start", "case"])
def test_a_sum_that_chooses_is_no_sum_of_choices(at: str) -> None:
    def chosen(table: Any, count: Any) -> Any:
        table = table * count.astype(jnp.float32)
        if at == "start":
            return lax.dynamic_slice(table, (count,), (1,))
        return lax.select_n(count, table, table * 2)

    def whole(table: Any, words: Any) -> Any:
        return chosen(table, words.sum())

    def chunks(table: Any, words: Any) -> Any:
        def chunk(total: Any, i: Any) -> Any:
            own = lax.dynamic_slice_in_dim(words, i * 2, 2)
            return total + chosen(table, own.sum()), None

        return lax.scan(chunk, jnp.zeros_like(whole(table, words)), jnp.arange(ROWS // 2))[0]

    args = jnp.ones(ROWS), jnp.arange(ROWS, dtype=jnp.uint32 if at == "start" else jnp.int32)
    wanted = Equivalence(jax.make_jaxpr(whole)(*args))
    assert wanted.difference(jax.make_jaxpr(chunks)(*args)) is not None


def chosen_by(wrong: str, *, in_chunks: bool = True) -> Callable[..., Any]:
    """Rows and a sum over them that one of two branches makes, the other rows alike and zeros: with one thing wrong."""

    def chunk(x: Any, w: Any, own: Any, i: Any) -> Any:
        def one(own: Any) -> Any:
            return jnp.tanh(own @ w), lax.dot_general(own, own, (((0,), (0,)), ((), ())))

        def other(own: Any) -> Any:
            rest = jnp.full(w.shape, float(wrong == "adds in all"))
            return jnp.ones_like(own) * (2.0 if wrong == "scaled" else 1.0), rest

        by = i > 1 if wrong == "chosen by the chunk" else x.sum() > 0
        return lax.cond(by, *((other, one) if wrong == "exchanged" else (one, other)), own)

    def fn(x: Any, w: Any) -> Any:
        def each(state: Any, i: Any) -> Any:
            h, total = chunk(x, w, lax.dynamic_slice_in_dim(x, i * 2, 2), i)
            return (lax.dynamic_update_slice_in_dim(state[0], h, i * 2, 0), state[1] + total), None

        begin = jnp.zeros_like(x), jnp.zeros_like(w)
        return lax.scan(each, begin, jnp.arange(ROWS // 2))[0] if in_chunks else chunk(x, w, x, 0)

    return fn


@pytest.mark.parametrize("wrong", ["", "adds in all", "scaled", "chosen by the chunk", "exchanged"])
def test_what_is_chosen_for_all_chunks_is_chosen_for_all_rows(wrong: str) -> None:
    args = jnp.ones((ROWS, 3)), jnp.ones((3, 3))
    of_all = chosen_by(wrong if wrong == "adds in all" else "", in_chunks=False)
    wanted = Equivalence(jax.make_jaxpr(of_all)(*args))
    difference = wanted.difference(jax.make_jaxpr(chosen_by(wrong))(*args))
    assert (difference is not None) == bool(wrong)


LONG = 11


def stacked(count: int, wrong: str = "") -> Callable[..., Any]:
    """Rows of `x`, columns of `y`, a sum of both: in a scan over stacks of chunks, with one thing wrong. The last chunk
    has rows again where there are none left.
    """

    def fn(x: Any, y: Any, w: Any) -> Any:
        rows = x.shape[0]
        size = -(-rows // count)
        beyond = count * size - rows

        def chunks(a: Any, axis: int) -> Any:
            own = rows - (wrong == "begins earlier")
            again = lax.slice_in_dim(a, own - beyond, rows, axis=axis)
            a = jnp.concatenate([lax.slice_in_dim(a, 0, own, axis=axis), again], axis) if beyond else a
            parts = a.reshape(*a.shape[:axis], count, size, *a.shape[axis + 1 :])
            return jnp.moveaxis(parts, axis, 0)

        def joined(stack: Any, axis: int) -> Any:
            a = jnp.moveaxis(stack, 0, axis)
            a = a.reshape(*a.shape[:axis], count * size, *a.shape[axis + 2 :])
            begin = int(wrong == "other rows")
            return lax.slice_in_dim(a, begin, begin + rows, axis=axis)

        def chunk(total: Any, each: Any) -> Any:
            i, own, columns = each
            h = jnp.tanh(own @ w) * 2.0 if wrong == "scaled" else jnp.tanh(own @ w)

            def within(a: Any, axis: int) -> Any:
                at = i * size + lax.broadcasted_iota(jnp.int32, a.shape, axis)
                return (
                    lax.select(at < rows - (wrong == "masked too far"), a, jnp.zeros_like(a)) if beyond else a
                )

            counted = h if wrong == "counts what is behind" else within(h, 0)
            total += lax.dot_general(counted, columns, (((0,), (1,)), ((), ())))
            return total, (within(h, 0), within(columns + 1.0, 1))

        order = chunks(y, 1)[::-1] if wrong == "other columns" else chunks(y, 1)
        begin = jnp.ones if wrong == "begins elsewhere" else jnp.zeros
        total, (h, columns) = lax.scan(chunk, begin((ROWS, 3)), (jnp.arange(count), chunks(x, 0), order))
        return total, joined(h[::-1] if wrong == "backward" else h, 0), joined(columns, 1)

    return fn


def in_a_scan(rows: int, count: int, wrong: str = "") -> str | None:
    def whole(x: Any, y: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        return lax.dot_general(h, y, (((0,), (1,)), ((), ()))), h, y + 1.0

    args = jnp.ones((rows, ROWS)), jnp.ones((3, rows)), jnp.ones((ROWS, ROWS))
    return Equivalence(jax.make_jaxpr(whole)(*args)).difference(jax.make_jaxpr(stacked(count, wrong))(*args))


@pytest.mark.parametrize(("rows", "count"), [(12, 2), (12, 12), (LONG, 2), (LONG, 3), (LONG, 6)])
def test_scans_over_stacks_of_chunks_are_all_rows(rows: int, count: int) -> None:
    assert in_a_scan(rows, count) is None


@pytest.mark.parametrize("wrong", ["scaled", "other columns", "begins elsewhere", "backward"])
@pytest.mark.parametrize(("rows", "count"), [(12, 3), (LONG, 3)])
def test_one_thing_wrong_in_a_scan_is_seen(wrong: str, rows: int, count: int) -> None:
    assert in_a_scan(rows, count, wrong) is not None


@pytest.mark.parametrize("wrong", ["begins earlier", "other rows", "masked too far", "counts what is behind"])
def test_wrong_ends_are_seen(wrong: str) -> None:
    assert in_a_scan(LONG, 3, wrong) is not None
