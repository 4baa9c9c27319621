"""Attention and its gradient as kernels of a GPU: a tile of scores at a time, which never leaves the chip.

Forward, a program has a block of queries and goes over all keys, with the largest score so far and the sum of the
exponentials above it. Backward there are two kernels: one has a block of queries and goes over the keys, one a block of
keys and goes over the queries, so that nothing is added up in memory; both make the scores again.

    in the gradient, of each row:  weights = exp(scores - largest) / total
                                   d scores = weights (d weights - sum(result * cotangent))

What happens to scores before and behind the softmax is what `run` makes of a tile, and `jax.vjp` gives its derivative.
Arrays have the layout that the program gives them; sizes that are no multiples of a block's are masked.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .._model._device_specs import KERNEL_RATE, DeviceSpec
from ._pattern import Pattern, canonical, in_order, results_of
from ._tiles import Blocks, Layout, Tile, blocks_of, dot, layout, padded, tiles

LEAST_CAPABILITY = (8, 0)
"""CUDA's compute capability from which devices have these kernels."""

_TYPES = ("float32", "bfloat16", "float16")
_MOST_WIDE = 128
"""Numbers that a query or a value may have: more do not fit into registers."""

_ABLE = frozenset(
    {
        "abs", "add", "and", "clamp", "convert_element_type", "div", "eq", "exp", "ge", "gt", "integer_pow", "le",
        "log", "log1p", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "rsqrt", "select_n", "sqrt", "sub",
        "square", "tanh", "xor",
    }
)  # fmt: skip
"""What tiles may be made of. Not all that Triton has: with a derivative that it has too."""


def fits(pattern: Pattern, operands: Sequence[Any]) -> bool:
    """Whether there are kernels for a pattern of such operands."""
    floats = [str(a.dtype) for a in operands[: len(operands) - len(pattern.leaves)]]
    known = all(kind in _TYPES for kind in (*floats, *map(str, pattern.types)))
    able = all(
        step.axis is not None or step.primitive.name in _ABLE for step in (*pattern.before, *pattern.after)
    )
    return known and able and max(pattern.widths) <= _MOST_WIDE and layout(pattern) is not None


def _flops(made: Layout, blocks: Blocks, products: tuple[int, int]) -> float:
    """What a kernel does: so many products of queries' and of values' width, of whole tiles."""
    sizes, (query, value) = made.pattern.sizes, made.pattern.widths
    rows = tiles(sizes[made.row], blocks.rows) * blocks.rows
    keys = tiles(sizes[made.key], blocks.keys) * blocks.keys
    whole = made.count((*made.batch, *made.groups)) * rows * keys
    return 2.0 * whole * (products[0] * query + products[1] * value)


def kernels_seconds(pattern: Pattern, device: DeviceSpec, *, gradient: bool) -> float:
    """About what attention takes in kernels, and its gradient if it has one."""
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(str(pattern.types[1]), "f32")
    passes = (False, True) if gradient else (False,)
    flops = sum(pattern.flops(gradient=each, kernels=True) for each in passes)
    return flops / (device.peak(dtype) * KERNEL_RATE) + (2 * len(passes) - 1) * device.launch_seconds


def attend_in_kernels(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *leaves: jax.Array,
    pattern: Pattern,
    kernels: bool = True,
    interpret: bool = False,
) -> list[jax.Array]:
    """As `attend`, in a kernel."""
    made = _layout_of(pattern)
    blocks = blocks_of(pattern, made.row, gradient="")
    own = tuple(range(len(pattern.sizes)))
    scores, mixed, result = pattern.scores, pattern.mixed, pattern.mixed.result
    others = (*made.batch, *made.groups)

    def kernel(q: Any, k: Any, v: Any, *refs: Any) -> None:
        *of, o, largest, total = refs
        row, rest = _place(pattern.sizes[made.row], blocks.rows)
        places = made.places(rest, others)
        queries = Tile(made, blocks, places, row, 0).load(q, scores.rows, made.row)

        def step(i: Any, so_far: Any) -> Any:
            mean, most, sums = so_far
            tile = Tile(made, blocks, places, row, i * blocks.keys)
            leaves = [tile.leaf(ref) for ref in of]
            made_of = tile.scores(queries, tile.load(k, scores.columns, made.key))
            x = tile.inside(tile.softmax_of(made_of, leaves))
            larger = jnp.maximum(most, x.max(axis=1))
            finite = jnp.where(larger == -jnp.inf, 0.0, larger)
            less = jnp.exp(most - finite)
            weights = jnp.exp(x - finite[:, None])
            values = tile.load(v, mixed.columns, made.key)
            more = dot(tile.mixing(weights, leaves).astype(values.dtype), values, mixed.params)
            return mean * less[:, None] + more, larger, sums * less + weights.sum(axis=1)

        width = padded(pattern.widths[1])
        begun = (
            jnp.zeros((blocks.rows, width), jnp.float32),
            jnp.full((blocks.rows,), -jnp.inf, jnp.float32),
            jnp.zeros((blocks.rows,), jnp.float32),
        )
        mean, most, sums = lax.fori_loop(0, tiles(pattern.sizes[made.key], blocks.keys), step, begun)
        tile = Tile(made, blocks, places, row, 0)
        tile.store(o, result, made.row, mean / sums[:, None])
        tile.store(largest, own, made.row, most)
        tile.store(total, own, made.row, sums)

    return _call(
        kernel,
        _flops(made, blocks, (1, 1)),
        tiles(pattern.sizes[made.row], blocks.rows) * made.count(others),
        blocks,
        results_of(pattern, values),
        [queries, keys, values, *in_order(leaves, pattern)],
        interpret,
    )


def gradient_in_kernels(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    result: jax.Array,
    largest: jax.Array,
    total: jax.Array,
    cotangent: jax.Array,
    *leaves: jax.Array,
    pattern: Pattern,
    kernels: bool = True,
    interpret: bool = False,
) -> list[jax.Array]:
    """As `attend_gradient`, in two kernels."""
    made = _layout_of(pattern)
    rank = len(pattern.sizes)
    scores, mixed, own = pattern.scores, pattern.mixed, tuple(range(rank))
    both = result.astype(jnp.float32) * cotangent.astype(jnp.float32)
    inner = tuple(d for d, axis in enumerate(mixed.result) if axis is not None and axis >= rank)
    left = tuple(axis for d, axis in enumerate(mixed.result) if d not in inner)
    delta = canonical(both.sum(inner), left, rank)
    operands = [queries, keys, values, largest, total, delta, cotangent, *in_order(leaves, pattern)]

    def rows_of(tile: Tile, refs: Sequence[Any]) -> tuple[Any, ...]:
        """Of a block of queries these, what the softmax of each gave, and the cotangents of the results."""
        q, _, _, most, sums, mean, to = refs
        return (
            tile.load(q, scores.rows, made.row),
            tile.load(most, own, made.row, math.inf),
            tile.load(sums, own, made.row, 1.0),
            tile.load(mean, own, made.row),
            tile.load(to, mixed.result, made.row),
        )

    def passed_back(
        tile: Tile, rows: Any, keys: Any, values: Any, leaves: Any
    ) -> tuple[jax.Array, jax.Array]:
        """What values are multiplied by, and the gradient with respect to scores."""
        queries, most, sums, mean, to = rows
        x, before = jax.vjp(lambda s: tile.softmax_of(s, leaves), tile.scores(queries, keys))
        weights = jnp.exp(tile.inside(x) - most[:, None]) / sums[:, None]
        mixing, after = jax.vjp(lambda w: tile.mixing(w, leaves), weights)
        (to_weights,) = after(dot(to, values.T, mixed.params))
        (to_scores,) = before(weights * (to_weights - mean[:, None]))
        return mixing, to_scores

    blocks = blocks_of(pattern, made.row, gradient="queries")
    others = (*made.batch, *made.groups)

    def of_queries(*refs: Any) -> None:
        *of, to_queries = refs
        row, rest = _place(pattern.sizes[made.row], blocks.rows)
        places = made.places(rest, others)
        rows = rows_of(Tile(made, blocks, places, row, 0), of[:7])

        def step(i: Any, so_far: Any) -> Any:
            tile = Tile(made, blocks, places, row, i * blocks.keys)
            keys = tile.load(of[1], scores.columns, made.key)
            values = tile.load(of[2], mixed.columns, made.key)
            _, to_scores = passed_back(tile, rows, keys, values, [tile.leaf(ref) for ref in of[7:]])
            return so_far + dot(to_scores.astype(keys.dtype), keys, scores.params)

        begun = jnp.zeros((blocks.rows, padded(pattern.widths[0])), jnp.float32)
        found = lax.fori_loop(0, tiles(pattern.sizes[made.key], blocks.keys), step, begun)
        Tile(made, blocks, places, row, 0).store(to_queries, scores.rows, made.row, found)

    (to_queries,) = _call(
        of_queries,
        _flops(made, blocks, (2, 1)),
        tiles(pattern.sizes[made.row], blocks.rows) * made.count(others),
        blocks,
        [jax.ShapeDtypeStruct(queries.shape, queries.dtype)],
        operands,
        interpret,
    )
    of_key = blocks_of(pattern, made.row, gradient="keys")

    def of_keys(*refs: Any) -> None:
        *of, to_keys, to_values = refs
        key, rest = _place(pattern.sizes[made.key], of_key.keys)
        batch = made.places(rest, made.batch)
        here = Tile(made, of_key, batch, 0, key)
        keys = here.load(of[1], scores.columns, made.key)
        values = here.load(of[2], mixed.columns, made.key)
        steps = tiles(pattern.sizes[made.row], of_key.rows)

        def step(i: Any, so_far: Any) -> Any:
            group = made.places(lax.div(i, jnp.int32(steps)), made.groups)
            tile = Tile(made, of_key, {**batch, **group}, lax.rem(i, jnp.int32(steps)) * of_key.rows, key)
            rows = rows_of(tile, of[:7])
            leaves = [tile.leaf(ref) for ref in of[7:]]
            mixing, to_scores = passed_back(tile, rows, keys, values, leaves)
            queries, to = rows[0], rows[-1]
            return (
                so_far[0] + dot(to_scores.astype(queries.dtype).T, queries, scores.params),
                so_far[1] + dot(mixing.astype(to.dtype).T, to, mixed.params),
            )

        begun = tuple(jnp.zeros((of_key.keys, padded(width)), jnp.float32) for width in pattern.widths)
        found = lax.fori_loop(0, made.count(made.groups) * steps, step, begun)
        here.store(to_keys, scores.columns, made.key, found[0])
        here.store(to_values, mixed.columns, made.key, found[1])

    to_keys, to_values = _call(
        of_keys,
        _flops(made, of_key, (2, 2)),
        tiles(pattern.sizes[made.key], of_key.keys) * made.count(made.batch),
        of_key,
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (keys, values)],
        operands,
        interpret,
    )
    return [to_queries, to_keys, to_values]


def _place(size: int, block: int) -> tuple[Any, Any]:
    """Where this program's block begins along an axis, and the number of the rest of it; the former counted first, so
    that programs at the same time read the same. A grid has many programs in its first dimension alone.
    """
    number, count = pl.program_id(0), jnp.int32(tiles(size, block))
    return lax.rem(number, count) * block, lax.div(number, count)


def _layout_of(pattern: Pattern) -> Layout:
    made = layout(pattern)
    assert made is not None  # see `fits`
    return made


def _call(
    kernel: Callable[..., None],
    flops: float,
    programs: int,
    blocks: Blocks,
    results: Sequence[Any],
    operands: Sequence[jax.Array],
    interpret: bool,
) -> list[jax.Array]:
    """Run a kernel, named after how many operations it does, which nothing else says of a compiled one."""
    kernel.__name__ = f"attention_{int(flops)}_flops"
    found = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=list(results),
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=interpret,
    )(*operands)
    return list(found)
