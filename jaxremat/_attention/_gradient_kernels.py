"""The gradient of attention as kernels of a GPU, which make the scores again, a tile at a time.

One has a block of queries and goes over the keys, one a block of keys and goes over the queries, so that nothing is
added up in memory. Where a bias is learned for each query and key, one more has a tile of it, and goes over the
examples and heads that share it.

    of each row:  weights = exp(scores - largest) / total
                  d scores = weights (d weights - sum(result * cotangent))

What happens to scores before and behind the softmax is what `run` makes of a tile, and `jax.vjp` gives its derivative.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._kernels import call, flops_of, layout_of, place_of
from ._pattern import Pattern, as_it_was, delta, in_order
from ._tiles import Blocks, Tile, blocks_of, dot, padded, tiles


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
    mean: jax.Array | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Do what `attend_gradient` does, in two kernels, and one for each learned leaf."""
    mean = delta(pattern, result, cotangent) if mean is None else mean
    ordered = in_order(leaves, pattern)
    backward = _Backward(
        pattern, (queries, keys, values, largest, total, mean, cotangent), ordered, interpret
    )
    to_leaves = (as_it_was(backward.of_leaf(i), pattern.leaves[i], leaves[i].shape) for i in pattern.learned)
    return [backward.of_queries(), *backward.of_keys(), *to_leaves]


class _Backward:
    """The kernels of a gradient.

    **Arguments:** the `pattern`; `operands` queries, keys, values, what the softmax of each row gave, the sums of
    results times cotangents, and the cotangents; `leaves` in order; `interpret` instead of compiling.
    """

    def __init__(
        self, pattern: Pattern, operands: Sequence[jax.Array], leaves: Sequence[jax.Array], interpret: bool
    ):
        self.pattern, self.operands, self.leaves, self.interpret = pattern, operands, leaves, interpret
        self.made = layout_of(pattern)
        self.others = (*self.made.batch, *self.made.groups)

    def of_queries(self) -> jax.Array:
        """Return their gradient."""
        made, pattern, blocks = self.made, self.pattern, self._blocks("queries")
        scores = pattern.scores

        def kernel(*refs: jax.Ref) -> None:
            *of, to_queries = refs
            row, rest = place_of(pattern.sizes[made.row], blocks.rows)
            places = made.places(rest, self.others)
            here = Tile(made, blocks, places, row, 0)
            rows = self._rows(here, of)

            def step(i: jax.Array, so_far: Any) -> Any:
                tile = Tile(made, blocks, places, row, i * blocks.keys)
                keys, values = self._columns(tile, of)
                _, to_scores = self._passed_back(tile, rows, keys, values, self._leaves(tile, of))
                return so_far + dot(to_scores.astype(keys.dtype), keys, scores.params)

            begun = jnp.zeros((blocks.rows, padded(pattern.widths[0])), jnp.float32)
            found = lax.fori_loop(0, tiles(pattern.sizes[made.key], blocks.keys), step, begun)
            here.store(to_queries, scores.rows, made.row, found)

        programs = tiles(pattern.sizes[made.row], blocks.rows) * made.count(self.others)
        (found,) = self._call(kernel, (2, 1), programs, blocks, self.operands[:1])
        return found

    def of_keys(self) -> list[jax.Array]:
        """Return their gradient, and that of values."""
        made, pattern, blocks = self.made, self.pattern, self._blocks("keys")
        scores, mixed = pattern.scores, pattern.mixed

        def kernel(*refs: jax.Ref) -> None:
            *of, to_keys, to_values = refs
            key, rest = place_of(pattern.sizes[made.key], blocks.keys)
            batch = made.places(rest, made.batch)
            here = Tile(made, blocks, batch, 0, key)
            keys, values = self._columns(here, of)
            steps = tiles(pattern.sizes[made.row], blocks.rows)

            def step(i: jax.Array, so_far: Any) -> Any:
                group = made.places(lax.div(i, jnp.int32(steps)), made.groups)
                tile = Tile(made, blocks, {**batch, **group}, lax.rem(i, jnp.int32(steps)) * blocks.rows, key)
                rows = self._rows(tile, of)
                mixing, to_scores = self._passed_back(tile, rows, keys, values, self._leaves(tile, of))
                queries, to = rows[0], rows[-1]
                return (
                    so_far[0] + dot(to_scores.astype(queries.dtype).T, queries, scores.params),
                    so_far[1] + dot(mixing.astype(to.dtype).T, to, mixed.params),
                )

            begun = tuple(jnp.zeros((blocks.keys, padded(width)), jnp.float32) for width in pattern.widths)
            found = lax.fori_loop(0, made.count(made.groups) * steps, step, begun)
            here.store(to_keys, scores.columns, made.key, found[0])
            here.store(to_values, mixed.columns, made.key, found[1])

        programs = tiles(pattern.sizes[made.key], blocks.keys) * made.count(made.batch)
        return self._call(kernel, (2, 2), programs, blocks, self.operands[1:3])

    def of_leaf(self, number: int) -> jax.Array:
        """Return the gradient of a learned leaf, in order."""
        made, pattern, blocks, leaf = self.made, self.pattern, self._blocks("queries"), self.leaves[number]
        own = [axis for axis in self.others if leaf.shape[axis] > 1]
        shared = [axis for axis in self.others if axis not in own]
        columns = tiles(pattern.sizes[made.key], blocks.keys)

        def kernel(*refs: jax.Ref) -> None:
            *of, to_leaf = refs
            row, rest = place_of(pattern.sizes[made.row], blocks.rows)
            key = lax.rem(rest, jnp.int32(columns)) * blocks.keys
            places = made.places(lax.div(rest, jnp.int32(columns)), own)

            def step(i: jax.Array, so_far: Any) -> Any:
                tile = Tile(made, blocks, {**places, **made.places(i, shared)}, row, key)
                keys, values = self._columns(tile, of)
                leaves = self._leaves(tile, of)
                return so_far + self._passed_back(tile, self._rows(tile, of), keys, values, leaves, number)[1]

            begun = jnp.zeros((blocks.rows, blocks.keys), jnp.float32)
            found = lax.fori_loop(0, made.count(shared), step, begun)
            axes = tuple(range(len(pattern.sizes)))
            Tile(made, blocks, places, row, key).store(to_leaf, axes, made.row, found)

        programs = tiles(pattern.sizes[made.row], blocks.rows) * columns * made.count(own)
        (found,) = self._call(kernel, (1, 1), programs, blocks, [leaf])
        return found

    def _blocks(self, gradient: str) -> Blocks:
        return blocks_of(self.pattern, self.made.row, gradient=gradient)

    def _rows(self, tile: Tile, refs: Sequence[jax.Ref]) -> tuple[Any, ...]:
        """Return of a block of queries these, what the softmax of each gave, and the cotangents of the results."""
        q, _, _, most, sums, mean, to = refs[: len(self.operands)]
        row, own = self.made.row, tuple(range(len(self.pattern.sizes)))
        return (
            tile.load(q, self.pattern.scores.rows, row),
            tile.load(most, own, row, math.inf),
            tile.load(sums, own, row, 1.0),
            tile.load(mean, own, row),
            tile.load(to, self.pattern.mixed.result, row),
        )

    def _columns(self, tile: Tile, refs: Sequence[jax.Ref]) -> tuple[jax.Array, jax.Array]:
        """Return a block of keys, and of values."""
        of = zip(refs[1:3], (self.pattern.scores.columns, self.pattern.mixed.columns), strict=True)
        keys, values = (tile.load(ref, axes, self.made.key) for ref, axes in of)
        return keys, values

    def _leaves(self, tile: Tile, refs: Sequence[jax.Ref]) -> list[jax.Array]:
        return [tile.leaf(ref) for ref in refs[len(self.operands) :]]

    def _passed_back(
        self,
        tile: Tile,
        rows: Sequence[Any],
        keys: jax.Array,
        values: jax.Array,
        leaves: Sequence[jax.Array],
        learned: int | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return what values are multiplied by, and the gradient with respect to scores, or to a learned leaf."""
        queries, most, sums, mean, to = rows
        made_of = tile.scores(queries, keys)
        if learned is None:
            x, before = jax.vjp(lambda s: tile.softmax_of(s, leaves), made_of)
        else:
            first, rest = leaves[:learned], leaves[learned + 1 :]
            wide = leaves[learned].astype(jnp.float32)
            x, before = jax.vjp(lambda a: tile.softmax_of(made_of, [*first, a, *rest]), wide)
        weights = jnp.exp(tile.inside(x) - most[:, None]) / sums[:, None]
        mixing, after = jax.vjp(lambda w: tile.mixing(w, leaves), weights)
        (to_weights,) = after(dot(to, values.T, self.pattern.mixed.params))
        (passed,) = before(weights * (to_weights - mean[:, None]))
        return mixing, passed

    def _call(
        self,
        kernel: Callable[..., None],
        products: tuple[int, int],
        programs: int,
        blocks: Blocks,
        likes: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Run a kernel whose results are like these."""
        return call(
            kernel,
            flops_of(self.made, blocks, products),
            programs,
            blocks,
            [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in likes],
            [*self.operands, *self.leaves],
            self.interpret,
        )
