"""Emitted equations -> the same, where chosen arrays are read by everyone behind a barrier of their own.

XLA may write a kernel's result over an array that the kernel reads from its maker and, through a barrier, a second time
(`_compiler._overwritten_reads`). Where nothing but a barrier reads the array from its maker, it does not. The barrier
names the array twice, since XLA:GPU replaces a barrier of a single operand by that operand.

Invariant: the results are the same, bit by bit; no other equation is added or moved.
"""

import re
from collections.abc import Mapping, Sequence

import jax.extend.core as jex
from jax.extend.core import JaxprEqn, Var

from .._model._schedule import Passing
from .._program import _compat
from .._rewrite._flat_program import Loop
from .._rewrite._loop_inlining import LAST, STACK

SCOPE = re.compile(r"barrier_\w+")
"""The name of a barrier of this library in a name stack."""


def detach(
    eqns: Sequence[JaxprEqn],
    loop_of: Sequence[int],
    loops: Sequence[Loop],
    outvars: Sequence[Var | jex.Literal],
    passing: Sequence[Passing],
) -> tuple[list[JaxprEqn], list[int], list[Var | jex.Literal]]:
    """Put the arrays that pass these barriers behind barriers of their own.

    **Arguments:** `loop_of` for each equation the loop in whose iterations it is, -1 for none; `outvars` the program's
    results.

    **Returns:** equations, the loop of each, and results.
    """
    chosen = _arrays(eqns, passing)
    names: dict[Var, Var] = {}

    def renamed(atom: Var | jex.Literal) -> Var | jex.Literal:
        return names.get(atom, atom) if isinstance(atom, Var) else atom

    placed: list[JaxprEqn] = []
    placed_loops: list[int] = []
    for eqn, loop in zip(eqns, loop_of, strict=True):
        placed.append(eqn.replace(invars=[renamed(a) for a in eqn.invars]) if names else eqn)
        placed_loops.append(loop)
        around = loops[loop].parent if eqn.primitive in (LAST, STACK) else loop
        for var in chosen.intersection(eqn.outvars):
            names[var], _ = behind = [_compat.new_var(var.aval) for _ in range(2)]
            barrier = _compat.barrier([var, var], behind, eqn.source_info)
            placed.append(_compat.in_scope(barrier, "barrier_detached"))
            placed_loops.append(around)
    return placed, placed_loops, [renamed(a) for a in outvars]


def _arrays(eqns: Sequence[JaxprEqn], passing: Sequence[Passing]) -> frozenset[Var]:
    """Return the arrays that pass these barriers, as they are made: before other barriers and turned axes."""
    maker: Mapping[Var, JaxprEqn] = {v: eqn for eqn in eqns for v in eqn.outvars}
    found: set[Var] = set()
    for eqn in eqns:
        if eqn.primitive.name != "optimization_barrier":
            continue
        scope = _compat.last_scope(eqn)
        for position in (position for name, position in passing if name == scope):
            var = eqn.invars[position] if position < len(eqn.invars) else None
            while isinstance(var, Var) and var in maker:
                made = maker[var]
                if made.primitive.name == "optimization_barrier":
                    var = made.invars[made.outvars.index(var)]
                    continue
                found.add(var)
                turned = made.primitive.name == "transpose" and SCOPE.fullmatch(_compat.last_scope(made))
                var = made.invars[0] if turned else None
    return frozenset(found)
