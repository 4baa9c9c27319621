"""An axis in parts, its dimension in each value -> the rows that a loop over the parts reads, computes and writes.

A part has the same number of rows of each value, or a multiple. `_halos` has parts that also read rows of their
neighbours, and parts of which the last ends past all rows.

Invariant: the parts write each row of a value, and a sum includes each row once.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from .._program._axes import BatchingRule, Parts
from .._program._compat import Atom, shaped


class RowParts:
    """The rows of each value in one loop over parts.

    **Arguments:** `dimension` of the rows in values; `pieces` the number of pieces of the rows, each on separate
    devices: a part has rows of each piece.
    """

    def __init__(self, dimension: Mapping[Atom, int | None], parts: Parts, pieces: int = 1):
        self.dimension = {v: d for v, d in dimension.items() if d is not None}
        self.parts, self.pieces = parts, pieces

    def rows(self, v: jex.Var) -> int:
        """Return the number of rows of a value in a part."""
        return self.parts.of(shaped(v).shape[self.dimension[v]])

    def part(self, v: jex.Var) -> tuple[int, ...]:
        """Return the shape of a part of a value."""
        return self._resized(v, self.rows(v))

    def read_shape(self, v: jex.Var) -> tuple[int, ...]:
        """Return the shape in which a value is read: its pieces are a separate dimension, so each device has its rows
        of every part.
        """
        shape, d = tuple(shaped(v).shape), self.dimension.get(v)
        if d is None or self.pieces == 1:
            return shape
        return (*shape[:d], self.pieces, shape[d] // self.pieces, *shape[d + 1 :])

    def written_shape(self, v: jex.Var) -> tuple[int, ...]:
        """Return the shape into which parts are written."""
        return self.read_shape(v)

    def read(self, whole: jax.Array, i: jax.Array, v: jex.Var) -> jax.Array:
        """Return one part of a value."""
        axis = self.dimension[v] + (self.pieces > 1)
        size = self.parts.of(whole.shape[axis])
        return in_shape(lax.dynamic_slice_in_dim(whole, i * size, size, axis), self.part(v))

    def around(
        self,
        eqns: list[jex.JaxprEqn],
        env: dict[Any, Any],
        eqn: jex.JaxprEqn,
        rule: BatchingRule,
        invars: list[Atom],
        index: jex.Var,
        joins: jex.Primitive | None,
    ) -> dict[str, Any]:
        """Return the parameters of an equation for one part, and give its operands the rows for it.

        **Arguments:** `joins` the operation that joins its results, if they are not added up.
        """
        del eqns, env, invars, index, joins
        return rule.in_chunk(eqn, self.parts)

    def own(
        self, eqns: list[jex.JaxprEqn], made: Atom, v: jex.Var, index: jex.Var, maker: jex.JaxprEqn
    ) -> Atom:
        """Return the rows of a part that are written."""
        del eqns, v, index, maker
        return made

    def written(self, whole: jax.Array, part: jax.Array, i: jax.Array, v: jex.Var) -> jax.Array:
        """Return a value with one part written in its place."""
        axis = self.dimension[v] + (self.pieces > 1)
        size = part.shape[self.dimension[v]] // self.pieces
        rows = in_shape(part, (*whole.shape[:axis], size, *whole.shape[axis + 1 :]))
        return lax.dynamic_update_slice_in_dim(whole, rows, i * size, axis)

    def all(self, whole: jax.Array, v: jex.Var) -> jax.Array:
        """Return a value in its own shape, after all parts are written."""
        return in_shape(whole, shaped(v).shape)

    def _resized(self, v: jex.Var, rows: int) -> tuple[int, ...]:
        shape, d = shaped(v).shape, self.dimension[v]
        return (*shape[:d], rows, *shape[d + 1 :])


def in_shape(a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return an array, reshaped if needed."""
    return a if a.shape == tuple(shape) else lax.reshape(a, shape)
