"""Gradients of reading one entry of each row: the same numbers, by comparison."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxremat
from jaxremat._compiler._target import Target
from jaxremat._program._inline import Inliner
from jaxremat._rewrite._entry_gradients import by_comparison, with_comparisons
from jaxremat._rewrite._kernel_choice import equivalence
from jaxremat._rewrite._trace import trace

Read = Callable[[jax.Array, jax.Array], jax.Array]


def along(x: jax.Array, places: jax.Array, axis: int = -1, mode: str = "fill") -> jax.Array:
    return jnp.take_along_axis(x, jnp.expand_dims(places, axis), axis, mode=mode).squeeze(axis)


def in_turn(x: jax.Array, places: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, place: row[place])(x, places)


def pulled(read: Read, x: jax.Array, places: jax.Array, cotangent: jax.Array) -> jax.Array:
    return jax.vjp(lambda x: read(x, places), x)[1](cotangent)[0]


def flat(fn: Any, *args: Any) -> jex.ClosedJaxpr:
    return Inliner().program(jax.make_jaxpr(fn)(*args))


def scattered(closed: jex.ClosedJaxpr) -> int:
    return sum(eqn.primitive.name.startswith("scatter") for eqn in closed.jaxpr.eqns)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_same_numbers(data: st.DataObject) -> None:
    """Bit by bit, with places outside of their rows, and of small types; the proof knows."""
    draw = data.draw
    shape = draw(st.lists(st.integers(2, 5), min_size=2, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = draw(st.sampled_from([2, 3, 300]))
    reads = [partial(along, axis=axis, mode=mode) for mode in ("fill", "clip")]
    reads += [in_turn] if len(shape) == 2 and axis == 1 else []
    read: Read = draw(st.sampled_from(reads))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    rows = [n for d, n in enumerate(shape) if d != axis]
    most = shape[axis] + 2
    kind = draw(st.sampled_from([jnp.int32, jnp.uint8] if read is not in_turn else [jnp.int32]))
    places = jnp.asarray(rng.integers(0 if kind is jnp.uint8 else -most, min(most, 255), rows), kind)
    dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16]))
    x, cotangent = jnp.ones(shape, dtype), jnp.asarray(rng.normal(size=rows), dtype)
    closed = flat(partial(pulled, read), x, places, cotangent)
    changed = with_comparisons(closed)
    assert (scattered(closed), scattered(changed)) == (1, 0)
    wanted, got = (jex.jaxpr_as_fun(each)(x, places, cotangent)[0] for each in (closed, changed))
    np.testing.assert_array_equal(np.asarray(wanted, np.float32), np.asarray(got, np.float32))
    assert equivalence(closed).difference(changed) is None


def several(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.stack([places, places], 1), 1).sum(1)


def rows_of(x: jax.Array, places: jax.Array) -> jax.Array:
    return x[places].sum(1)


@pytest.mark.parametrize("read", [several, rows_of])
def test_what_reads_more_of_a_row_stays(read: Read) -> None:
    closed = flat(partial(pulled, read), jnp.ones((4, 5)), jnp.array([0, 1, 1, 3]), jnp.ones(4))
    assert by_comparison(closed.jaxpr.eqns) == closed.jaxpr.eqns


def test_what_is_added_to_other_numbers_stays() -> None:
    """There the compiler's scatter touches one entry of a row."""
    numbers = lax.ScatterDimensionNumbers(
        (), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,)
    )

    def added(x: jax.Array, places: jax.Array) -> jax.Array:
        return lax.scatter_add(x, places[:, None], jnp.ones(4), numbers)

    closed = flat(added, jnp.ones((4, 5)), jnp.array([0, 1, 1, 3]))
    assert by_comparison(closed.jaxpr.eqns) == closed.jaxpr.eqns


def cross_entropy(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return -along(jax.nn.log_softmax(x @ w), labels).mean()


def test_in_the_body_of_accumulation() -> None:
    def step(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        def one(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
            return total + jax.grad(cross_entropy)(w, *part), None

        return w - lax.scan(one, jnp.zeros_like(w), (x, labels))[0]

    args = jnp.ones((8, 16)), jnp.ones((3, 4, 8)), jnp.zeros((3, 4), jnp.int32)
    traced = trace(jax.jit(step), args, {})
    assert scattered(traced.jaxpr) == 0
    assert jaxremat.optimize("99%")(step)(*args) == pytest.approx(np.asarray(jax.jit(step)(*args)), abs=1e-6)


def test_a_gradient_of_logits_is_written_over_them() -> None:
    """On GPUs, which make one kernel of the gradient then."""
    tokens, width, words = 512, 64, 32_768
    shapes = ((width, words), jnp.float32), ((tokens, width), jnp.float32), ((tokens,), jnp.int32)
    args = [jax.ShapeDtypeStruct(*each) for each in shapes]

    def temporaries(fn: Any) -> int:
        return (
            Target("h100")
            .lower(jax.jit(fn), tuple(args), {}, {})
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    def plain(*args: Any) -> Any:
        return jax.grad(cross_entropy, 1)(*args)

    changed = with_comparisons(flat(plain, *args))
    logits = 4 * tokens * words
    assert temporaries(plain) > 1.9 * logits
    assert temporaries(lambda *args: jex.jaxpr_as_fun(changed)(*args)) < 1.2 * logits
