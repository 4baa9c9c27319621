"""Attention as a kernel of a GPU: a tile of scores at a time, which never leaves the chip.

A program has a block of queries and goes over all keys, with the largest score so far and the sum of the
exponentials above it. What happens to scores before and behind the softmax is what `run` makes of a tile. Arrays have
the layout that the program gives them; sizes that are no multiples of a block's are masked.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .._model._device_specs import KERNEL_RATES, DeviceSpec
from .._program._compat import Aval
from ._pattern import Pattern, in_order, results_of
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
"""The operations that tiles may contain: those that Triton has, and whose derivatives it has too."""


def fits(pattern: Pattern, operands: Sequence[Aval]) -> bool:
    """Return whether there are kernels for a pattern of such operands."""
    floats = [str(a.dtype) for a in operands[: len(operands) - len(pattern.leaves)]]
    known = all(kind in _TYPES for kind in (*floats, *map(str, pattern.types)))
    able = all(
        step.axis is not None or step.primitive.name in _ABLE for step in (*pattern.before, *pattern.after)
    )
    return known and able and max(pattern.widths) <= _MOST_WIDE and layout(pattern) is not None


def gradient_fits(pattern: Pattern, operands: Sequence[Aval]) -> bool:
    """Return whether there are kernels for its gradient too: learned leaves have to be tiles of scores."""
    made = layout(pattern)
    if made is None or not fits(pattern, operands):
        return False
    leaves = operands[len(operands) - len(pattern.leaves) :]
    return all(
        {made.row, made.key} <= {*pattern.leaves[i]} and str(leaves[i].dtype) in _TYPES
        for i in pattern.learned
    )


def flops_of(made: Layout, blocks: Blocks, products: tuple[int, int]) -> float:
    """Return what a kernel does: so many products of queries' and of values' width, of whole tiles."""
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
    return flops / (device.peak(dtype) * KERNEL_RATES[dtype]) + (2 * len(passes) - 1) * device.launch_seconds


def attend_in_kernels(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *leaves: jax.Array,
    pattern: Pattern,
    kernels: bool = True,
    interpret: bool = False,
) -> list[jax.Array]:
    """Do what `attend` does, in a kernel."""
    made = layout_of(pattern)
    blocks = blocks_of(pattern, made.row, gradient="")
    own = tuple(range(len(pattern.sizes)))
    scores, mixed, result = pattern.scores, pattern.mixed, pattern.mixed.result
    others = (*made.batch, *made.groups)

    def kernel(q: jax.Ref, k: jax.Ref, v: jax.Ref, *refs: jax.Ref) -> None:
        *of, o, largest, total = refs
        row, rest = place_of(pattern.sizes[made.row], blocks.rows)
        places = made.places(rest, others)
        queries = Tile(made, blocks, places, row, 0).load(q, scores.rows, made.row)

        def step(i: jax.Array, so_far: tuple[jax.Array, ...]) -> Any:
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

    return call(
        kernel,
        flops_of(made, blocks, (1, 1)),
        tiles(pattern.sizes[made.row], blocks.rows) * made.count(others),
        blocks,
        results_of(pattern, values),
        [queries, keys, values, *in_order(leaves, pattern)],
        interpret,
    )


def place_of(size: int, block: int) -> tuple[Any, Any]:
    """Return where this program's block begins along an axis, and the number of the rest of it; the former counted
    first, so that programs at the same time read the same. A grid has many programs in its first dimension alone.
    """
    number, count = pl.program_id(0), jnp.int32(tiles(size, block))
    return lax.rem(number, count) * block, lax.div(number, count)


def layout_of(pattern: Pattern) -> Layout:
    """Return where the tiles of a pattern lie that there are kernels for."""
    made = layout(pattern)
    assert made is not None  # see `fits`
    return made


def call(
    kernel: Callable[..., None],
    flops: float,
    programs: int,
    blocks: Blocks,
    results: Sequence[jax.ShapeDtypeStruct],
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
