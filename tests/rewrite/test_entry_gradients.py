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
from jaxremat._model._graph import backend
from jaxremat._program._inline import Inliner
from jaxremat._program._primitives import inner_eqns
from jaxremat._rewrite._flat_program import with_each
from jaxremat._rewrite._kernel_choice import equivalence, inline, replaced

Read = Callable[[jax.Array, jax.Array], jax.Array]
GPU, CPU = backend("gpu"), backend("cpu")


def along(x: jax.Array, places: jax.Array, axis: int = -1, mode: str = "fill") -> jax.Array:
    return jnp.take_along_axis(x, jnp.expand_dims(places, axis), axis, mode=mode).squeeze(axis)


def in_turn(x: jax.Array, places: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, place: row[place])(x, places)


def pulled(read: Read, x: jax.Array, places: jax.Array, cotangent: jax.Array) -> jax.Array:
    return jax.vjp(lambda x: read(x, places), x)[1](cotangent)[0]


def flat(fn: Any, *args: Any) -> jex.ClosedJaxpr:
    return Inliner().program(jax.make_jaxpr(fn)(*args))


def chosen(closed: jex.ClosedJaxpr, platform: Any = GPU) -> jex.ClosedJaxpr:
    """The program with the kernels that plans for a platform have."""
    return with_each(closed, lambda eqn: inline(eqn) if replaced(platform)(eqn) else [eqn])


def scattered(closed: jex.ClosedJaxpr) -> int:
    eqns = (each for eqn in closed.jaxpr.eqns for each in (eqn, *inner_eqns(eqn)))
    return sum(eqn.primitive.name.startswith("scatter") for eqn in eqns)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_same_numbers(data: st.DataObject) -> None:
    """Bit by bit, with negative places, places outside of their rows, and of small types; the proof knows."""
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
    changed = chosen(closed)
    assert (scattered(closed), scattered(changed)) == (1, 0)
    wanted, got = (jex.jaxpr_as_fun(each)(x, places, cotangent)[0] for each in (closed, changed))
    np.testing.assert_array_equal(np.asarray(wanted, np.float32), np.asarray(got, np.float32))
    assert equivalence(closed).difference(changed) is None


@pytest.mark.parametrize("mode", [lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP])
def test_what_is_added_to(mode: lax.GatherScatterMode) -> None:
    """An operand that is no zeros keeps its numbers, in the backward pass of a rule of the user's."""
    numbers = lax.ScatterDimensionNumbers(
        (), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,)
    )

    @jax.custom_vjp
    def entries(x: jax.Array, places: jax.Array) -> jax.Array:
        return along(x, places) + x.sum(1)

    def backward(places: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
        rest = jnp.broadcast_to(cotangent[:, None], (len(places), 5))
        return lax.scatter_add(rest, places[:, None], cotangent, numbers, mode=mode), None

    entries.defvjp(lambda x, places: (entries(x, places), places), backward)
    args = jnp.ones((4, 5)), jnp.array([-1, 2, 6, 0]), jnp.array([1.5, -2.0, 0.25, 3.0])
    closed = flat(partial(pulled, entries), *args)
    changed = chosen(closed)
    assert (scattered(closed), scattered(changed)) == (1, 0)
    wanted, got = (jex.jaxpr_as_fun(each)(*args)[0] for each in (closed, changed))
    np.testing.assert_array_equal(wanted, got)


def several(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.stack([places, places], 1), 1).sum(1)


def rows_of(x: jax.Array, places: jax.Array) -> jax.Array:
    return x[places].sum(1)


@pytest.mark.parametrize("read", [several, rows_of])
def test_what_reads_more_of_a_row_stays(read: Read) -> None:
    closed = flat(partial(pulled, read), jnp.ones((4, 5)), jnp.array([0, 1, 1, 3]), jnp.ones(4))
    assert chosen(closed) is closed


def test_the_forward_pass_and_cpus_keep_their_scatters() -> None:
    """There a scatter touches one entry of each row of an array that is there anyway."""

    def read(x: jax.Array) -> jax.Array:
        return pulled(along, x, jnp.array([0, 1, 1, 3]), jnp.ones(4))

    closed = flat(read, jnp.ones((4, 5)))
    assert scattered(chosen(closed)) == 0
    assert chosen(closed, CPU) is closed
    twice = flat(jax.grad(lambda x: (read(x) * x).sum()), jnp.ones((4, 5)))
    assert scattered(twice) == scattered(chosen(twice)) > 0


def cross_entropy(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return -along(jax.nn.log_softmax(x @ w), labels).mean()


def accumulated(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    def one(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        return total + jax.grad(cross_entropy)(w, *part), None

    return w - lax.scan(one, jnp.zeros_like(w), (x, labels))[0]


def test_in_the_body_of_a_loop_and_of_a_branch() -> None:
    args = jnp.ones((8, 16)), jnp.ones((3, 4, 8)), jnp.zeros((3, 4), jnp.int32)

    def step(*args: Any) -> jax.Array:
        return lax.cond(args[0].sum() > 0, accumulated, lambda w, *_: w, *args)

    closed = flat(step, *args)
    changed = chosen(closed)
    assert (scattered(closed), scattered(changed)) == (1, 0)
    assert equivalence(closed).difference(changed) is None
    np.testing.assert_array_equal(*(jex.jaxpr_as_fun(each)(*args)[0] for each in (closed, changed)))


TOKENS, WIDTH, WORDS = 512, 64, 32_768
LOGITS = 4 * TOKENS * WORDS
SHAPES = ((WIDTH, WORDS), jnp.float32), ((TOKENS, WIDTH), jnp.float32), ((TOKENS,), jnp.int32)
ARGS = tuple(jax.ShapeDtypeStruct(*each) for each in SHAPES)


def head(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.grad(cross_entropy, 1)(w, x, labels)


def test_a_gradient_of_logits_is_written_over_them() -> None:
    """On GPUs, which make one kernel of the gradient then."""
    plan = jaxremat.plan(head, *ARGS, budget="60%", target="h100")
    assert plan.memory is not None
    assert plan.memory.temporaries_nbytes < 1.2 * LOGITS < 1.9 * LOGITS < plan.baseline_peak_nbytes
    assert not plan.unproved
    assert plan.overhead <= 0


def test_in_chunks_too() -> None:
    """Each chunk is written over itself; the model knows, and the proof does."""
    plan = jaxremat.plan(head, *ARGS, budget="25%", target="h100")
    assert plan.memory is not None
    ((chunks,),) = (choice.setting for choice in plan.form.choices)
    assert plan.memory.temporaries_nbytes < 1.3 * LOGITS / chunks
    assert not plan.unproved
