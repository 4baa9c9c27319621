"""Equations of a step with its loops inlined -> which of them are in the backward pass, or come after it."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._primitives import is_backward, is_fetch, is_in_chunks, runs_once
from ._flat_program import BACKWARD, UNPAIRED, Loop


def backward_equations(
    eqns: Sequence[jex.JaxprEqn], loop_of: Sequence[int], loops: Sequence[Loop]
) -> list[bool]:
    """Return for each equation whether it is in the backward pass or after it.

    All equations of a pair's loop belong to the pass of that loop. A value that depends on nothing, such as the
    gradient of a mean, may be computed before the forward pass ends, for a loop that contains both passes: it does not
    begin the backward pass.
    """
    found: list[bool] = []
    constant: set[Any] = set()  # values outside loops that depend on nothing
    early: list[int] = []  # the equations of the backward pass that compute them
    begun = False  # whether any other equation of the backward pass came before
    backward: set[Any] = set()  # values of the backward pass
    behind: set[Any] = set()  # values that depend on chunks that compute gradients along with the loss
    for eqn, i in zip(eqns, loop_of, strict=True):
        loop = loops[i] if i >= 0 else None
        operands = _compat.variables(eqn.invars)
        follows = not behind.isdisjoint(operands)
        if loop is not None and loop.role != UNPAIRED:
            in_backward = loop.role == BACKWARD
        else:
            in_backward = is_backward(eqn) or (
                "jvp(" not in _compat.name_stack_text(eqn) and not backward.isdisjoint(operands)
            )
            in_backward = in_backward or (is_fetch(eqn) and bool(backward)) or follows
        backward.update(eqn.outvars if in_backward else ())
        if (is_in_chunks(eqn) and is_backward(eqn)) or follows:
            behind.update(eqn.outvars)
        if loop is None and constant.issuperset(operands) and not runs_once(eqn):
            constant.update(eqn.outvars)
            early += [len(found)] if in_backward else []
        elif in_backward:
            begun = begun or loop is None
        elif not begun or (loop is not None and loop.role == UNPAIRED):
            while early:
                found[early.pop()] = False
        found.append(in_backward)
    return found


def behind_backward(
    eqns: Sequence[jex.JaxprEqn], loop_of: Sequence[int], loops: Sequence[Loop]
) -> list[bool]:
    """Return for each equation whether it is in the backward pass, or depends on it; the same for all equations of a
    loop.
    """
    in_backward = [is_backward(eqn) for eqn in eqns]
    made: set[Any] = set()
    known = -1
    while known < (known := sum(in_backward)):
        backward = {loop_of[i] for i, is_so in enumerate(in_backward) if is_so and loop_of[i] >= 0}
        for loop in reversed(loops):
            if loop.id in backward and loop.parent >= 0:
                backward.add(loop.parent)
        for i, eqn in enumerate(eqns):
            in_backward[i] = (
                in_backward[i]
                or loop_of[i] in backward
                or any(a in made for a in _compat.variables(eqn.invars))
            )
            if in_backward[i]:
                made.update(eqn.outvars)
    return in_backward
