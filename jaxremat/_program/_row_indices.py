"""Gather or scatter whose indices count rows -> the same operation with the rows as batch dimensions.

`x[jnp.arange(n), places]` and `zeros.at[jnp.arange(n)[:, None], places].add(y)` name the row of each entry by a column
of indices 0, 1, 2, ... along one of their axes. As batch dimensions, which `take_along_axis` and `vmap` use, the rows
are known to be independent, and the operation can run in chunks of rows like pointwise work.

Invariant: the same entries are read and written. Rows are never out of bounds, so modes keep their meaning.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from ._compat import is_literal, shaped

_GATHERS = ("collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims")
_SCATTERS = (
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)
"""The parameters of gathers and scatters that name dimensions with a window of one entry, dimensions indexed by a
column each, batch dimensions, and the indices' axes for those.
"""


def is_indexing(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a gather or a scatter with several columns of indices."""
    name, indices = eqn.primitive.name, eqn.invars[1:2]
    return (name == "gather" or name.startswith("scatter")) and shaped(indices[0]).shape[-1:] > (1,)


def batched_indices(eqn: jex.JaxprEqn) -> tuple[Any, int]:
    """Return the indices of a gather or scatter, and the number of its batch dimensions that index one place each; None
    for other equations and for literal indices.
    """
    name = eqn.primitive.name
    if not (name == "gather" or name.startswith("scatter")) or is_literal(eqn.invars[1]):
        return None, 0
    return eqn.invars[1], len(eqn.params["dimension_numbers"].operand_batching_dims)


def by_row(eqn: jex.JaxprEqn, counted: Sequence[int | None]) -> tuple[dict[str, Any], int] | None:
    """Return the parameters of the same equation with rows as batch dimensions, and the indices' remaining column; None
    if more than one remains.

    **Arguments:** `counted` for each column of the indices the axis along which it counts from zero, None for none.
    """
    numbers, (operand, indices) = eqn.params["dimension_numbers"], (shaped(a).shape for a in eqn.invars[:2])
    names = _GATHERS if eqn.primitive.name == "gather" else _SCATTERS
    single, mapped, batched, axes = (list(map(int, getattr(numbers, name))) for name in names)
    rows: dict[int, int] = {}  # dimension of the operand -> axis of the indices
    for dimension, axis in zip(mapped, counted, strict=True):
        if axis is None or axis in (*axes, *rows.values()) or dimension not in single:
            continue
        if indices[axis] == operand[dimension]:
            rows[dimension] = axis
    left = [k for k, dimension in enumerate(mapped) if dimension not in rows]
    if not rows or len(left) != 1:
        return None
    pairs = sorted([*zip(batched, axes, strict=True), *rows.items()])
    found = (
        tuple(d for d in single if d not in rows),
        (mapped[left[0]],),
        tuple(d for d, _ in pairs),
        tuple(axis for _, axis in pairs),
    )
    changed = numbers._replace(**dict(zip(names, found, strict=True)))
    return {**eqn.params, "dimension_numbers": changed}, left[0]
