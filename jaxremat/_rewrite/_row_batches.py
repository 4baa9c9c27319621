"""Equations -> the same, with indices that count rows turned into batch dimensions, see `_row_indices`.

Invariant: the number of equations stays the same; those that compute the indices may become dead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import shaped
from .._program._equivalence import counted
from .._program._primitives import on_mesh
from .._program._row_indices import by_row, is_indexing
from .._runtime._mechanisms import mechanism

_INDICES = frozenset(
    {
        "add", "broadcast_in_dim", "convert_element_type", "expand_dims", "iota", "lt", "reshape", "select_n",
        "squeeze", "transpose",
    }
)  # fmt: skip
"""Primitives that compute indices; results of others are inputs."""


@mechanism("rows as batch dimensions", off=lambda eqns: list(eqns))
def with_row_batches(eqns: Sequence[jex.JaxprEqn]) -> list[Any]:
    """Return the equations of one body, with such indexing."""
    maker: dict[Any, jex.JaxprEqn] = {}
    found: list[Any] = []
    for eqn in eqns:
        found.append(_batched(eqn, maker) if is_indexing(eqn) else eqn)
        maker.update(dict.fromkeys(eqn.outvars, eqn))
    return found


def _batched(eqn: jex.JaxprEqn, maker: Mapping[Any, jex.JaxprEqn]) -> jex.JaxprEqn:
    """Return the equation by row, unchanged if no column of its indices counts rows."""
    if any(_compat.is_literal(a) or on_mesh(a.aval) for a in eqn.invars):
        return eqn
    joined, shape = maker.get(eqn.invars[1]), shaped(eqn.invars[1]).shape
    if joined is None or joined.primitive.name != "concatenate" or len(joined.invars) != shape[-1]:
        return eqn
    if joined.params["dimension"] != len(shape) - 1 or any(map(_compat.is_literal, joined.invars)):
        return eqn
    made = by_row(eqn, counted(_made_of(joined.invars, maker)))
    if made is None:
        return eqn
    params, column = made
    return eqn.replace(invars=[eqn.invars[0], joined.invars[column], *eqn.invars[2:]], params=params)


def _made_of(columns: Sequence[Any], maker: Mapping[Any, jex.JaxprEqn]) -> jex.ClosedJaxpr:
    """Return the program that computes columns of indices."""
    eqns: dict[int, jex.JaxprEqn] = {}
    free: dict[Any, None] = {}

    def visit(v: Any) -> None:
        eqn = maker.get(v)
        if eqn is None or eqn.primitive.name not in _INDICES:
            free[v] = None
        elif id(eqn) not in eqns:
            for a in _compat.variables(eqn.invars):
                visit(a)
            eqns[id(eqn)] = eqn

    for v in columns:
        visit(v)
    return _compat.new_jaxpr((), (), list(free), list(columns), list(eqns.values()))
