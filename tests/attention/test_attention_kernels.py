"""Kernels of attention: the same as in XLA's operations, interpreted here; compiled for a GPU they need no scores."""

from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import FOUND, LENGTH, SHORT, WIDTH, Attend, assert_close, attending, masked
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from test_in_parts import LEARNED, of_buckets, of_places, of_slopes
from test_trace import runnable

from jaxremat import MemoryStats
from jaxremat._attention._finding import Site, attention
from jaxremat._attention._gradient_kernels import gradient_in_kernels
from jaxremat._attention._kernels import attend_in_kernels, fits
from jaxremat._attention._operations import attend as attend_in_parts
from jaxremat._attention._operations import attend_gradient
from jaxremat._attention._pattern import Pattern, with_origins
from jaxremat._attention._places import Places
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._program import Program, compiler_options
from jaxremat._compiler._roofline import kernels
from jaxremat._compiler._target import Target
from jaxremat._model._device_specs import KERNEL_RATES
from jaxremat._model._variant import ATTENTION, Choice, Variant
from jaxremat._report._loop_forms import loop_forms
from jaxremat._rewrite._trace import trace

IN_KERNELS = Variant.of(Choice(ATTENTION, 0, (2,)))


def site_of(attend: Attend, length: int = LENGTH) -> Site:
    case = attending(attend, length=length)
    traced = trace(jax.jit(case.step), case.args, {})
    (site,) = attention(traced.jaxpr, [-1] * len(traced.loop_of), traced.program.alive)
    return site


def drawn(aval: Any, seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jnp.asarray(rng.normal(size=aval.shape), aval.dtype)
    return jnp.asarray(rng.integers(0, 2, aval.shape), aval.dtype)


def compare(site: Site, tolerance: float) -> None:
    operands = [drawn(v.aval, i) for i, v in enumerate((*site.operands, *site.leaves))]
    pattern = site.pattern
    assert fits(pattern, list(map(jax.typeof, operands)))
    parts = attend_in_parts(*operands, pattern=pattern, kernels=False)
    assert_close(attend_in_kernels(*operands, pattern=pattern, interpret=True), parts, tolerance)
    cotangent, leaves = drawn(site.result.aval, 9), operands[3:]
    wanted = attend_gradient(*operands[:3], *parts[1:], cotangent, *leaves, pattern=pattern, kernels=False)
    found = gradient_in_kernels(*operands[:3], *parts, cotangent, *leaves, pattern=pattern, interpret=True)
    assert_close(found, wanted, tolerance)


@pytest.mark.parametrize("attend", FOUND.values(), ids=FOUND)
def test_the_same_numbers(attend: Attend) -> None:
    compare(site_of(attend), 5e-2 if attend in SHORT else 2e-5)


@pytest.mark.parametrize(("name", "length"), [("masked", 34), ("grouped", 130), ("dropout", 64)])
def test_lengths_of_several_tiles(name: str, length: int) -> None:
    """And such as are no whole tiles."""
    compare(site_of(FOUND[name], length), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("length", [130, 197, 256])
@pytest.mark.parametrize("attend", FOUND.values(), ids=FOUND)
def test_any_length(attend: Attend, length: int) -> None:
    compare(site_of(attend, length), 5e-2 if attend in SHORT else 5e-5)


@pytest.mark.parametrize(("first_query", "first_key"), [(32, 0), (32, 32), (0, 32)])
@pytest.mark.parametrize("name", ["masked", "grouped", "biased"])
def test_a_part_of_queries_and_keys_counts_places_from_where_it_begins(
    name: str, first_query: int, first_key: int
) -> None:
    """As on a device that has such a part, and another part of the keys in each turn."""
    site = site_of(FOUND[name], 64)
    whole, key = site.pattern, site.pattern.key
    row = next(
        a
        for a in whole.scores.rows
        if a is not None and a < key and a not in whole.scores.columns and whole.sizes[a] == 64
    )
    half = replace(whole, sizes=tuple(32 if axis in (row, key) else n for axis, n in enumerate(whole.sizes)))
    pattern, origins = with_origins(half, (row, key))
    assert {axis for axis, _ in origins} == {row, key}
    axes = (*whole.axes(gradient=False)[0], *whole.leaves)
    operands = [
        drawn(
            jax.ShapeDtypeStruct(
                [32 if axis in (row, key) else n for axis, n in zip(own, v.aval.shape, strict=True)],
                v.aval.dtype,
            ),
            i,
        )
        for i, (v, own) in enumerate(zip((*site.operands, *site.leaves), axes, strict=True))
    ]
    starts = [jnp.asarray(first_query if axis == row else first_key, kind) for axis, kind in origins]
    assert fits(pattern, list(map(jax.typeof, [*operands, *starts])))
    parts = attend_in_parts(*operands, *starts, pattern=pattern, kernels=False)
    found = attend_in_kernels(*operands, *starts, pattern=pattern, interpret=True)
    assert_close(found, parts, 2e-5)
    others = attend_in_parts(*operands, *(0 * each for each in starts), pattern=pattern, kernels=False)
    assert first_query == first_key or not np.allclose(parts[0], others[0], atol=1e-2)
    cotangent = drawn(parts[0], 9)
    rest = (*parts[1:], cotangent, *operands[3:], *starts)
    wanted = attend_gradient(*operands[:3], *rest, pattern=pattern, kernels=False)
    found = gradient_in_kernels(*operands[:3], parts[0], *rest, pattern=pattern, interpret=True)
    assert_close(found, wanted, 2e-5)


def test_a_row_that_sees_nothing() -> None:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        x = jnp.where((jnp.arange(LENGTH) > 3)[:, None], x, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), v)

    site = site_of(attend)
    operands = [drawn(v.aval, i) for i, v in enumerate((*site.operands, *site.leaves))]
    parts = attend_in_parts(*operands, pattern=site.pattern, kernels=False)
    found = attend_in_kernels(*operands, pattern=site.pattern, interpret=True)
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(parts[0]))
    assert np.isnan(found[0]).any()
    assert not np.isnan(found[0]).all()


def _turned_by_bits(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of scores something that no tile is made of."""
    x = jax.lax.erf(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), v)


def test_what_there_are_no_kernels_for() -> None:
    site = site_of(_turned_by_bits)
    assert not fits(site.pattern, [v.aval for v in site.operands])
    site = site_of(masked)
    operands = [v.aval for v in site.operands]
    assert fits(site.pattern, operands)
    assert not fits(site.pattern, [a.update(dtype=jnp.dtype("float64")) for a in operands])
    wide = Pattern(**{**vars(site.pattern), "widths": (512, 8)})
    assert not fits(wide, operands)


@pytest.mark.parametrize(
    ("attend", "fit", "how"),
    [
        (masked, (True, True), "in kernels"),
        (_turned_by_bits, (False, False), "in parts"),
    ],
)
def test_what_is_in_kernels_is_said(attend: Attend, fit: tuple[bool, bool], how: str) -> None:
    case = attending(attend)
    ((line, *found),) = trace(jax.jit(case.step), case.args, {}).in_form(IN_KERNELS).attention
    assert tuple(found) == fit
    (said,) = loop_forms((), IN_KERNELS, (), attention=[(line, *fit)])
    assert str(said) == f"attention at {line}: without its matrix of scores, {how}"


def learning(attend: Any, bias: jax.Array, length: int = LENGTH, heads: int = 4) -> Any:
    """A step that learns a bias, and its arguments."""

    def step(bias: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def loss(bias: jax.Array, *of: jax.Array) -> jax.Array:
            return (attend(*of, bias) ** 2).sum()

        return jax.grad(loss, (0, 1, 2, 3))(bias, q, k, v)

    each = jax.ShapeDtypeStruct((2, length, heads, WIDTH), jnp.float32)
    return step, (jax.ShapeDtypeStruct(bias.shape, bias.dtype), each, each, each)


def _of_pairs(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """A bias that each example makes for itself."""
    x = jnp.where(
        jnp.arange(q.shape[1])[:, None] >= 3, jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 + bias, -1e9
    )
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), v)


def _of_all_heads(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """A bias that heads share, in front of a soft cap; keys and values are shared too."""
    k, v = k[:, :, :1], v[:, :, :1]
    x = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) + bias.T
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(9 * jnp.tanh(x / 9)), v[:, :, 0])


TILES = {
    "buckets": (of_buckets, LEARNED[of_buckets], LENGTH),
    "places": (of_places, LEARNED[of_places], LENGTH),
    "pairs": (_of_pairs, jnp.zeros((2, 4, 70, 70)), 70),
    "all heads": (_of_all_heads, jnp.zeros((130, 130)), 130),
}


@pytest.mark.parametrize("name", TILES)
def test_biases_that_are_learned(name: str) -> None:
    attend, bias, length = TILES[name]
    step, args = learning(attend, bias, length)
    traced = trace(jax.jit(step), args, {})
    (site,) = attention(traced.jaxpr, [-1] * len(traced.loop_of), traced.program.alive)
    assert len(site.pattern.learned) == 1
    compare(site, 5e-2 if bias.dtype == jnp.bfloat16 else 2e-5)
    ((_, *fit),) = traced.in_form(IN_KERNELS).attention
    assert fit == [True, True]


def test_of_learned_slopes_the_gradient_is_in_no_kernel() -> None:
    step, args = learning(of_slopes, LEARNED[of_slopes])
    ((line, *fit),) = trace(jax.jit(step), args, {}).in_form(IN_KERNELS).attention
    assert fit == [True, False]
    (said,) = loop_forms((), IN_KERNELS, (), attention=[(line, True, False)])
    assert str(said).endswith("in kernels, and in parts in the backward pass")


def compiled(attend: Attend, form: Variant, length: int, target: str = "h100", width: int = WIDTH) -> Any:
    case = attending(attend, length=length, width=width)
    return compiled_step(case.step, case.args, form, target)


def compiled_step(step: Any, args: Any, form: Variant, target: str = "h100") -> Any:
    traced = trace(jax.jit(step), args, {}).in_form(form)
    program = Program(
        lambda: None, compiler_options=tuple(compiler_options("gpu").items()), target=Target(target)
    )
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.tree.leaves(args)]
    return program.compile(program.jit(jex.jaxpr_as_fun(runnable(traced))), tuple(types), {})


@pytest.mark.parametrize("name", ["masked", "grouped", "dropout", "bfloat16"])
def test_a_gpu_has_no_matrix_of_scores(name: str) -> None:
    whole, within = (compiled(FOUND[name], form, 512) for form in (Variant(), IN_KERNELS))
    scores = 2 * 4 * 512 * 512 * 4
    temporaries = [MemoryStats.of(each).temporaries_nbytes for each in (whole, within)]
    assert temporaries[0] > 1.5 * scores
    assert temporaries[1] < (0.6 if name == "dropout" else 0.3) * scores
    found = [k for k in kernels(parse(within.as_text())) if k.rate != 1]
    assert len(found) == 3
    for kernel in found:
        ((dtype, flops),) = kernel.flops
        assert kernel.rate == KERNEL_RATES[dtype]
        assert flops >= 2 * 2 * scores / 4 * 8


def test_the_gradient_of_a_bias_needs_no_matrix_of_scores() -> None:
    """But for the bias's own, of one example."""
    step, args = learning(_of_all_heads, jnp.zeros((512, 512)), 512, heads=8)
    whole, within = (compiled_step(step, args, form) for form in (Variant(), IN_KERNELS))
    scores = 2 * 8 * 512 * 512 * 4
    temporaries = [MemoryStats.of(each).temporaries_nbytes for each in (whole, within)]
    assert temporaries[0] > 1.5 * scores
    assert temporaries[1] < 0.3 * scores
    assert len([k for k in kernels(parse(within.as_text())) if k.rate != 1]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", ["a100-40", "l4", "rtx4090", "h100", "b200"])
@pytest.mark.parametrize("name", ["masked", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128])
def test_there_is_room_for_tiles(name: str, width: int, target: str) -> None:
    """In the shared memory of each device."""
    found = compiled(FOUND[name], IN_KERNELS, 256, target, width=width)
    assert len([k for k in kernels(parse(found.as_text())) if k.rate != 1]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("length", [LENGTH, 197])
@pytest.mark.parametrize("attend", FOUND.values(), ids=FOUND)
def test_each_compiles(attend: Attend, length: int) -> None:
    length = LENGTH if attend is FOUND["crossed"] else length
    found = compiled(attend, IN_KERNELS, length)
    assert len([k for k in kernels(parse(found.as_text())) if k.rate != 1]) == 3


def test_keys_pass_round_where_scores_lie_along_queries_or_keys_that_are_divided_alike() -> None:
    """The compiler divides the scores along either; a device that has all keys has them in one turn."""
    pattern = site_of(masked, 64).pattern
    scores, key = pattern.scores, pattern.key
    row = next(axis for axis in scores.rows if axis is not None and axis not in scores.columns and axis < key)

    def places(along: int, *divided: tuple[int, ...], devices: int = 4) -> Places | None:
        mesh = AbstractMesh((devices,), ("seq",))
        axes = (scores.rows, scores.columns, pattern.mixed.columns)
        found, *operands = (
            NamedSharding(mesh, PartitionSpec(*("seq" if axis in over else None for axis in own)))
            for own, over in zip((scores.result, *axes), ((along,), *divided), strict=True)
        )
        return Places.of(found, pattern, operands)

    passing = places(row, (row,), (key,), (key,))
    assert passing is not None and passing.turns == 4
    assert passing.names[row] == passing.names[key] == ("seq",)
    assert places(key, (row,), (key,), (key,)) == passing
    gathered = places(row, (row,), (), ())
    assert gathered is not None and gathered.turns == 1
    assert places(key, (), (key,), (key,)) is None
    assert places(row, (row,), (key,), (key,), devices=3) is None
