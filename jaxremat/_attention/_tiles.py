"""A tile of scores, as one program of a kernel has it: which part of each array it reads, and what becomes of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .._program._compat import DType
from ._pattern import Axes, Pattern, run

LEAST = 16
"""The smallest tile of a matrix product on tensor cores."""


@dataclass(frozen=True)
class Layout:
    """Where the tiles of a pattern lie.

    **Fields:** `pattern`; the axes of scores that are the `row` of a tile and those that are the same for keys and
    values; `groups` the others, which share keys and values.
    """

    pattern: Pattern
    row: int
    batch: tuple[int, ...]
    groups: tuple[int, ...]

    @cached_property
    def key(self) -> int:
        return self.pattern.key

    def count(self, axes: Sequence[int]) -> int:
        """Return how many places there are along these axes."""
        return math.prod(self.pattern.sizes[axis] for axis in axes)

    def places(self, number: jax.Array | int, axes: Sequence[int]) -> dict[int, Any]:
        """Return the place along each axis that has this number, counted along the last first."""
        found = {}
        for axis in reversed(axes):
            size = self.pattern.sizes[axis]
            found[axis] = lax.rem(number, jnp.int32(size))
            number = lax.div(number, jnp.int32(size))
        return found


def layout(pattern: Pattern) -> Layout | None:
    """Return where tiles lie; None of a pattern that kernels do not do."""
    wide = [axis for axis in pattern.rows if pattern.sizes[axis] > 1]
    columns = (pattern.scores.columns, pattern.mixed.columns)
    shared = [{axis for axis in wide if axis in axes} for axes in columns]
    rows = [axis for axis in wide if axis not in shared[0]]
    beside = [axis for axes in columns for axis in axes if axis is not None and axis >= len(pattern.sizes)]
    whole = all(axis in axes for axis in wide for axes in (pattern.scores.rows, pattern.mixed.result))
    if shared[0] != shared[1] or not rows or len(beside) != 2 or not whole:
        return None
    row = max(rows, key=lambda axis: pattern.sizes[axis])
    groups = tuple(axis for axis in rows if axis != row)
    return Layout(pattern, row, tuple(sorted(shared[0])), groups)


@dataclass(frozen=True)
class Blocks:
    """How many queries and keys a tile has, in warps of so many threads."""

    rows: int
    keys: int
    warps: int


def blocks_of(pattern: Pattern, row: int, *, gradient: str) -> Blocks:
    """Choose the tile of the kernel of the gradient of "queries" or "keys", or, "", of the forward kernel.

    With 2-byte numbers tiles of 64 x 64 in 4 warps were within 20 % of the fastest of eight or more choices for each
    kernel on an H200, at widths 64 and 128; with 8 warps, or half a tile, gradients took up to 2.6 times as long.
    """
    width = max(pattern.widths)
    if np.dtype(pattern.types[1]).itemsize == 2:
        rows, keys, warps = 64, 64, 4
    else:
        rows, keys = {"": (64, 64), "queries": (64, 32), "keys": (32, 64)}[gradient]
        warps = 8 if width > 64 else 4
        if width > 64:  # an L4 has 99 KiB of shared memory for a block
            rows, keys = {"": (64, 32)}.get(gradient, (32, 32))
    most = [padded(pattern.sizes[axis]) for axis in (row, pattern.key)]
    return Blocks(min(rows, most[0]), min(keys, most[1]), warps)


def padded(n: int) -> int:
    """Return how long a tile is that holds so many: a power of two."""
    return max(1 << (n - 1).bit_length(), LEAST)


def tiles(n: int, block: int) -> int:
    return -(-n // block)


class Tile:
    """One tile of scores, as a program has it.

    **Arguments:** `made`, the `blocks`; `places` along axes by number; the `row` and `key` that it begins with.
    """

    def __init__(
        self,
        made: Layout,
        blocks: Blocks,
        places: Mapping[int, jax.Array],
        row: jax.Array | int,
        key: jax.Array | int,
    ):
        self.made, self.blocks, self.places, self.row, self.key = made, blocks, places, row, key
        self.pattern = made.pattern

    def _along(self, axis: int) -> tuple[Any, int, int]:
        """Return where a tile begins along an axis, how long it is there, and how many places there are."""
        sizes = self.pattern.sizes
        if axis == self.made.row:
            return self.row, self.blocks.rows, sizes[axis]
        return self.key, self.blocks.keys, sizes[axis]

    def _index(self, ref: jax.Ref, axes: Axes) -> tuple[tuple[Any, ...], list[int], jax.Array | None]:
        """Return where in an array its part lies, the axes that this has, and what of it is there; None if all is."""
        index: list[Any] = []
        own: list[int] = []
        inside: list[tuple[Any, int, int]] = []
        for d, axis in enumerate(axes):
            if axis is None or ref.shape[d] == 1:
                index.append(jnp.int32(0))
            elif axis in (self.made.row, self.made.key):
                start, block, size = self._along(axis)
                index.append(pl.ds(start, block))
                own.append(axis)
                inside.append((start, block, size))
            elif axis >= len(self.pattern.sizes):  # numbers of a query or value
                block = padded(ref.shape[d])
                index.append(pl.ds(0, block))
                own.append(axis)
                inside.append((0, block, ref.shape[d]))
            else:
                index.append(self.places[axis])
        mask = None
        for i, (start, block, size) in enumerate(inside):
            if size % block:
                there = start + lax.iota(jnp.int32, block) < size
                shape = [block if j == i else 1 for j in range(len(inside))]
                part = jnp.broadcast_to(jnp.reshape(there, shape), [each[1] for each in inside])
                mask = part if mask is None else mask & part
        return tuple(index), own, mask

    def load(self, ref: jax.Ref, axes: Axes, first: int, other: float = 0.0) -> jax.Array:
        """Return the part of an array that this tile is of, the axis `first` in front; `other` where there
        is none.
        """
        index, own, mask = self._index(ref, axes)
        found = triton.load(ref.at[index], mask=mask, other=None if mask is None else other)
        return found.T if len(own) == 2 and own[0] != first else found

    def store(self, ref: jax.Ref, axes: Axes, first: int, made: jax.Array) -> None:
        """Write such a part."""
        index, own, mask = self._index(ref, axes)
        made = made.T if len(own) == 2 and own[0] != first else made
        triton.store(ref.at[index], made.astype(ref.dtype), mask=mask)

    def leaf(self, ref: jax.Ref) -> jax.Array:
        """Return a leaf for each score."""
        axes = tuple(range(len(self.pattern.sizes)))
        index, own, mask = self._index(ref, axes)
        found = triton.load(
            ref.at[index], mask=mask, other=None if mask is None else np.zeros((), ref.dtype)[()]
        )
        if len(own) == 2:
            return found.T if own[0] == self.made.key else found
        if len(own) == 1:
            return found[:, None] if own[0] == self.made.row else found[None, :]
        return found

    def counted(self, axis: int, dtype: DType) -> jax.Array:
        """Return what `run` asks for."""
        if axis not in (self.made.row, self.made.key):
            return jnp.asarray(self.places.get(axis, 0), dtype)
        start, _, _ = self._along(axis)
        shape = (self.blocks.rows, self.blocks.keys)
        return (start + lax.broadcasted_iota(jnp.int32, shape, int(axis == self.made.key))).astype(dtype)

    def scores(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Return their products, in f32."""
        return dot(queries, keys.T, self.pattern.scores.params)

    def softmax_of(self, scores: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
        """Return what the softmax is of, in f32."""
        return run(self.pattern.before, scores, leaves, self.counted, wide=True)

    def inside(self, x: jax.Array) -> jax.Array:
        """Return what the softmax is of, minus infinity where there is no key."""
        start, block, size = self._along(self.made.key)
        if size % block == 0:
            return x
        return jnp.where((start + lax.iota(jnp.int32, block) < size)[None, :], x, -jnp.inf)

    def mixing(self, weights: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
        """Return what values are multiplied by, in f32."""
        return run(self.pattern.after, weights, leaves, self.counted, wide=True)


def dot(a: jax.Array, b: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    return triton.dot(a, b, precision=params["precision"])
