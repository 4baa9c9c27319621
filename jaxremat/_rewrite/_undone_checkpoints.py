"""Flat equations, checkpoints among them inlined -> the same with the forward pass of these where forward passes are.

A checkpoint runs its forward pass again in the backward pass, and there makes what the derivative is made of besides.
The repetition merges with the forward pass (`_common_subexpressions`), but what is made besides (`2 * x` of a square,
`1 - y**2` of `tanh`) keeps a place and a name stack of the backward pass. It reads no cotangent: without the checkpoint
it would stand in the forward pass, as a residual that a plan may save or compute again. So there it goes.

Law: the same equations in a topological order; none that reads a cotangent moves.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._primitives import is_backward, runs_once


def forward_again(eqns: Sequence[jex.JaxprEqn]) -> tuple[list[Any], list[int]]:
    """Return the equations in their new order, under the names of a forward pass where they have moved; and for
    each of them its index before.
    """
    anchor: list[int] = []  # behind which equation of its own place each stands
    maker: dict[Any, int] = {}
    in_backward: set[Any] = set()  # what is made of cotangents
    moved: set[int] = set()
    for i, eqn in enumerate(eqns):
        operands = _compat.variables(eqn.invars)
        of_late = any(a in in_backward for a in operands)
        if (
            is_backward(eqn)
            and not of_late
            and not runs_once(eqn)
            and _compat.has_scope(eqn, _compat.REMATTED)
        ):
            moved.add(i)
            anchor.append(max((anchor[maker[a]] for a in operands if a in maker), default=-1))
        else:
            anchor.append(i)
            if of_late or is_backward(eqn):
                in_backward.update(eqn.outvars)
        maker.update(dict.fromkeys(eqn.outvars, i))
    order = sorted(range(len(eqns)), key=lambda i: (anchor[i], i))
    return [_compat.as_forward(eqns[i]) if i in moved else eqns[i] for i in order], order
