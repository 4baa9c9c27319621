"""Gather or scatter whose indices count the rows -> the same with the rows as batch dimensions.

`x[jnp.arange(n), places]` and `zeros.at[jnp.arange(n)[:, None], places].add(y)` name the row of each entry by a column
of the indices that is 0, 1, 2, ... along one of their axes. As a batch dimension, as `take_along_axis` and `vmap` have
it, the rows are known to be independent: such indexing is done in chunks of rows as pointwise work is.

Law: the same entries are read and written. A row is never out of bounds, so modes mean the same.
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
"""What gathers and scatters call the dimensions of which one entry is read, those that each column of the indices
names, those that are batched, and their axes of the indices."""


def is_indexing(eqn: jex.JaxprEqn) -> bool:
    """Return whether it is a gather or a scatter of several columns of indices."""
    name, indices = eqn.primitive.name, eqn.invars[1:2]
    return (name == "gather" or name.startswith("scatter")) and shaped(indices[0]).shape[-1:] > (1,)


def batched_indices(eqn: jex.JaxprEqn) -> tuple[Any, int]:
    """Return the indices of a gather or scatter, None of others or where they are a literal, and of how many batch
    dimensions each names one place alone.
    """
    name = eqn.primitive.name
    if not (name == "gather" or name.startswith("scatter")) or is_literal(eqn.invars[1]):
        return None, 0
    return eqn.invars[1], len(eqn.params["dimension_numbers"].operand_batching_dims)


def by_row(eqn: jex.JaxprEqn, counted: Sequence[int | None]) -> tuple[dict[str, Any], int] | None:
    """Return the parameters of the same equation with rows as batch dimensions, and the column that its indices are
    then; None where there is not one.

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
