"""Equations -> the same, with masks computed from a function's result instead of its operand.

The gradient of `max(x, 0)` needs the mask `x > 0`, for which `x` is kept although the result is kept too, as an operand
of the next layer. But if `y = min(max(x, low), high)`, a comparison of `x` with a number within these limits equals
that of `y`, because values beyond the limits stay on their side:

    y > t, y <= t  as  x > t, x <= t   if  low <= t < high
    y >= t, y < t  as  x >= t, x < t   if  low < t <= high
    y == t, y != t as  x == t, x != t  if  low < t < high

Comparisons with NaN are false except `!=`, and `max`, `min` and `clamp` pass NaN on; `-0.0` equals `0.0` everywhere.

Invariant: every value of the step is bitwise unchanged, and equations keep their positions. A mask reads the result if
the backward pass has it in memory for a contraction, and reads no other value that the operand depends on: with batch
normalisation in between, these values are kept in any case.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
import numpy as np

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._flops import aval_nbytes
from .._program._primitives import is_fusion_root, is_relabelling, reads_memory
from ._backward_equations import backward_equations
from ._flat_program import FlatProgram, with_eqns

_MIRRORED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}
"""Comparisons, and their equivalents with operands exchanged."""

_LEAST_SHARE = 0.5
"""The sources of an operand are worth freeing if they have at least this share of its bytes."""


@dataclass(frozen=True)
class _Clamped:
    """A value `min(max(operand, low), high)`; `operands` are the values in between, the original operand last."""

    low: float
    high: float
    operands: tuple[Any, ...]


def with_results(program: FlatProgram) -> FlatProgram:
    """Let masks read results instead of operands that then need not be kept; `masked` has these operands."""
    eqns, loop_of = program.eqns, program.loop_of
    in_backward = backward_equations(eqns, loop_of, program.loops)
    kept = _kept(eqns, in_backward)
    able: dict[int, tuple[Any, Any]] = {}  # index of a mask -> its operand, the result that it may read
    results: dict[tuple[int, Any], list[tuple[Any, _Clamped]]] = {}  # loop, operand -> its clamped values
    made: dict[Any, _Clamped] = {}
    for i, (eqn, loop) in enumerate(zip(eqns, loop_of, strict=True)):
        if (limits := _limits(eqn)) is not None:
            operand, low, high = limits
            inner = made.get(operand, _Clamped(-math.inf, math.inf, ()))
            # The outer limits are applied last, and hold whatever the inner ones are.
            low, high = (min(max(limit, low), high) for limit in (inner.low, inner.high))
            made[eqn.outvars[0]] = own = _Clamped(low, high, (operand, *inner.operands))
            for v in own.operands:
                results.setdefault((loop, v), []).append((eqn.outvars[0], own))
        elif (compared := _compared(eqn)) is not None:
            operand, kind, number = compared
            for y, clamped in reversed(results.get((loop, operand), ())):
                if y in kept and _says_the_same(kind, number, clamped):
                    able[i] = operand, y
                    break
    if not able:
        return program
    wanted = _wanted(eqns, in_backward, kept, able)
    maker: dict[Atom, jex.JaxprEqn] = {v: eqn for eqn in eqns for v in eqn.outvars}
    chosen = {i: pair for i, pair in able.items() if _frees(pair[0], wanted, kept, maker)}
    if not chosen:
        return program
    read = [
        eqn.replace(invars=[chosen[i][1] if a is chosen[i][0] else a for a in eqn.invars]) if i in chosen else eqn
        for i, eqn in enumerate(eqns)
    ]  # fmt: skip
    masked = {i: operand for i, (operand, _) in chosen.items()}
    return program.anew(closed=with_eqns(program.closed, read), masked=masked)


def _limits(eqn: jex.JaxprEqn) -> tuple[Any, float, float] | None:
    """Return the operand that an equation clamps, and its limits, or None."""
    name = eqn.primitive.name
    if name in ("max", "min"):
        numbers = [_number(a) for a in eqn.invars]
        if (numbers[0] is None) == (numbers[1] is None):
            return None
        (operand,) = _compat.variables(eqn.invars)
        limit = next(each for each in numbers if each is not None)
        return (operand, limit, math.inf) if name == "max" else (operand, -math.inf, limit)
    if name == "clamp":
        low, operand, high = eqn.invars
        least, most = _number(low), _number(high)
        if least is None or most is None or least > most or _compat.is_literal(operand):
            return None
        return operand, least, most
    return None


def _compared(eqn: jex.JaxprEqn) -> tuple[Any, str, float] | None:
    """Return the operand that an equation compares with a number, the comparison and the number, or None."""
    name = eqn.primitive.name
    if name not in _MIRRORED:
        return None
    first, second = map(_number, eqn.invars)
    if (first is None) == (second is None):
        return None
    (operand,) = _compat.variables(eqn.invars)
    if second is not None:
        return operand, name, second
    return None if first is None else (operand, _MIRRORED[name], first)


def _number(atom: Atom) -> float | None:
    """Return the real number that a literal holds; None for anything else, and for NaN."""
    if not _compat.is_literal(atom) or np.ndim(atom.val) or np.iscomplexobj(atom.val):
        return None
    exact = np.asarray(atom.val, shaped(atom).dtype).item()
    number = float(exact)
    return number if number == exact else None


def _says_the_same(kind: str, number: float, clamped: _Clamped) -> bool:
    """Return whether the comparison gives the same for the clamped value as for the value itself."""
    low, high = clamped.low, clamped.high
    if kind in ("gt", "le"):
        return low <= number < high
    if kind in ("ge", "lt"):
        return low < number <= high
    return low < number < high


def _kept(eqns: Sequence[jex.JaxprEqn], in_backward: Sequence[bool]) -> set[jex.Var]:
    """Return the values that contractions and the like of the backward pass read, directly or through views."""
    found: set[Any] = set()
    for eqn, is_backward in zip(reversed(eqns), reversed(in_backward), strict=True):
        if (is_backward and reads_memory(eqn)) or (is_relabelling(eqn) and not found.isdisjoint(eqn.outvars)):
            found.update(_compat.variables(eqn.invars))
    return found


def _wanted(
    eqns: Sequence[jex.JaxprEqn], in_backward: Sequence[bool], kept: set[jex.Var], masks: Collection[int]
) -> set[jex.Var]:
    """Return the values of the forward pass that the backward pass reads, and the operands of fused ones, without the
    operands of these masks.
    """
    found: set[Any] = set()
    for i in reversed(range(len(eqns))):
        eqn = eqns[i]
        fused = not is_fusion_root(eqn) and any(v in found and v not in kept for v in eqn.outvars)
        if in_backward[i] or (fused and i not in masks):
            found.update(_compat.variables(eqn.invars))
    return found


def _frees(
    operand: Atom, wanted: set[jex.Var], kept: set[jex.Var], maker: Mapping[Atom, jex.JaxprEqn]
) -> bool:
    """Return whether a large value that the operand depends on is in memory only for this mask."""
    least = _LEAST_SHARE * aval_nbytes(operand.aval)
    stack, seen = [operand], {operand}
    while stack:
        v = stack.pop()
        if v in kept or v in wanted or v not in maker:
            continue
        if is_fusion_root(maker[v]):
            if aval_nbytes(v.aval) >= least:
                return True
            continue
        more = [a for a in _compat.variables(maker[v].invars) if a not in seen]
        seen.update(more)
        stack.extend(more)
    return False
