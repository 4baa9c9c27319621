"""Equations of stacks -> the same for one row: what an iteration can do of the work that stands around its loop.

Law: a row of the result is made of the same rows of the operands, by the same operation.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._primitives import PLACES, is_fetch, is_placed, is_pointwise, is_put, is_repeatable

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_DIMENSIONS = ("broadcast_dimensions", "permutation", "axes")
_SIZES = ("shape", "new_sizes")


def is_by_rows(eqn: jex.JaxprEqn, length: int) -> bool:
    """Return whether the rows of an equation's result, so many, depend on those of its operands alone."""
    if len(eqn.outvars) != 1 or not is_repeatable(eqn) or is_placed(eqn):
        return False
    shape, name = shaped(eqn.outvars[0]).shape, eqn.primitive.name
    if not eqn.invars or not shape or shape[0] != length:
        return False
    if is_pointwise(eqn):
        return all(shaped(a).shape in ((), shape) for a in eqn.invars)
    operand = shaped(eqn.invars[0]).shape
    if name == "broadcast_in_dim":
        return len(eqn.invars) == 1 and (repeats_row(eqn) or operand[0] == length)
    if not operand or operand[0] != length:
        return False
    if is_fetch(eqn) or is_put(eqn):
        return True
    if name == "reshape":
        return eqn.params.get("dimensions") is None and prod(operand) > 0
    if name == "transpose":
        return eqn.params["permutation"][0] == 0
    return name in REDUCTIONS and 0 not in eqn.params["axes"]


def repeats_row(eqn: jex.JaxprEqn) -> bool:
    """Return whether all rows of the result are the same."""
    return eqn.primitive.name == "broadcast_in_dim" and 0 not in eqn.params["broadcast_dimensions"]


def row_equation(
    eqn: jex.JaxprEqn,
    length: int,
    row: Callable[[Any], Atom],
    whole: Callable[[Atom], Atom],
    made: jex.Var | None = None,
) -> jex.JaxprEqn:
    """Return the equation for one row.

    **Arguments:** `row` gives the row of an operand, `whole` an operand that is the same in all iterations; `made` the
    variable for the result, a new one by default.
    """
    params: dict[str, Any] = {name: None if name in PLACES else value for name, value in eqn.params.items()}
    same = repeats_row(eqn)
    invars: Sequence[Any] = [row(a) if not same and shaped(a).shape else whole(a) for a in eqn.invars]
    less = {name: tuple(d - 1 for d in params[name] if d) for name in _DIMENSIONS if name in params}
    less |= {name: tuple(params[name][1:]) for name in _SIZES if name in params}
    made = _compat.new_var(jex.mapped_aval(length, 0, eqn.outvars[0].aval)) if made is None else made
    inner = eqn.replace(invars=list(invars), outvars=[made], params={**params, **less})
    return inner.replace(source_info=_compat.root_source(eqn))
