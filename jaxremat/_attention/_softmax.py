"""Flat equations -> the softmax that a value is linear in: exponentials above the largest, divided by their sum."""

from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
import numpy as np

from .._program import _compat
from .._program._compat import Atom, shaped
from ._pattern import Axes
from ._reading import DEEPEST, LINEAR, Program, behind, count, is_cast, relabelled


@dataclass(frozen=True)
class Softmax:
    """**Fields:** `weights` that it gives and what it is `of`, both with the same `axes`; along axis `key`."""

    weights: Any
    of: Any
    axes: Axes
    key: int


def softmax_in(program: Program, a: Atom, axes: Axes, key: int, depth: int = 0) -> Softmax | None:
    """Return the softmax that a value is linear in."""
    eqn = program.made(a)
    if eqn is None or depth > DEEPEST:
        return None
    if eqn.primitive.name == "div" and (found := _is_softmax(program, eqn, axes, key)) is not None:
        return found
    if (inner := relabelled(eqn, axes)) is not None:
        whole = not _compat.is_literal(eqn.invars[0]) and count(eqn.invars[0]) == count(a)
        return softmax_in(program, eqn.invars[0], inner, key, depth + 1) if whole else None
    if eqn.primitive.name in LINEAR:
        for b in _compat.variables(eqn.invars):
            whole = shaped(b).shape == shaped(a).shape and shaped(b).dtype != np.bool_
            if whole and (found := softmax_in(program, b, axes, key, depth + 1)) is not None:
                return found
    return None


def _is_softmax(program: Program, eqn: jex.JaxprEqn, axes: Axes, key: int) -> Softmax | None:
    exponentials, total = eqn.invars
    exp = program.made(exponentials)
    if exp is None or exp.primitive.name != "exp" or _compat.is_literal(total):
        return None
    difference = program.made(exp.invars[0])
    if difference is None or difference.primitive.name != "sub":
        return None
    of, most = difference.invars
    if _compat.is_literal(of) or _compat.is_literal(most):
        return None
    rest = tuple(axis for axis in axes if axis != key)
    if _reduced(program, total, axes, "reduce_sum", exponentials) != rest:
        return None
    if _reduced(program, most, axes, "reduce_max", of) != rest:
        return None
    return Softmax(eqn.outvars[0], of, axes, key)


def _reduced(program: Program, a: Atom, axes: Axes, name: str, of: Atom) -> Axes | None:
    """Return the axes that are left where a value is a reduction of another along one axis, spread again; None
    where not.
    """
    root, left = behind(program, a, axes, maxima=name == "reduce_max")
    eqn = program.made(root)
    if eqn is None or eqn.primitive.name != name or len(eqn.params["axes"]) != 1:
        return None
    operand = eqn.invars[0]
    while operand is not of:  # sums of short numbers are in f32
        cast = program.made(operand)
        if cast is None or not is_cast(cast):
            return None
        operand = cast.invars[0]
    d = int(eqn.params["axes"][0])
    if operand.aval.shape[:d] + operand.aval.shape[d + 1 :] != root.aval.shape:
        return None
    # Dimensions of size 1 may have lost their number on the way.
    own = [axis for i, axis in enumerate(axes) if i != d]
    agree = all(axis == there or n == 1 for axis, there, n in zip(left, own, root.aval.shape, strict=True))
    return tuple(own) if agree else None
