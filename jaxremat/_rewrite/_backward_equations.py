"""Equations of a step with its loops inlined -> which of them are of the backward pass, or come after it."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._primitives import is_backward, is_fetch, is_in_chunks, runs_once
from ._flat_program import BACKWARD, UNPAIRED, Loop


def backward_equations(
    eqns: Sequence[jex.JaxprEqn], loop_of: Sequence[int], loops: Sequence[Loop]
) -> list[bool]:
    """Return for each equation whether it is late: what it makes is no value of the forward pass.

    All of a loop of a pair is of the pass that the loop is of. What is made of nothing, as the gradient of a mean is,
    may be made before the forward pass ends, for a loop that holds both passes: it does not begin the backward pass.
    """
    found: list[bool] = []
    constant: set[Any] = set()  # what is made of nothing outside of loops
    early: list[int] = []  # the equations of the backward pass that make it
    begun = False  # whether any other of its equations is behind us
    backward: set[Any] = set()  # what is downstream of the backward pass
    behind: set[Any] = set()  # and of what makes gradients along with the loss
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
    """Return for each equation whether it is of the backward pass, or reads what that makes; alike for all of a
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
