"""Emitted equations -> the same, where chosen arrays are read by everyone behind a barrier of their own.

XLA may write a kernel's result over an array that the kernel reads from its maker and, through a barrier, a second time
(`_compiler._overwritten_reads`). Where nothing but a barrier reads the array from its maker, it does not. The barrier
names the array twice, since XLA:GPU replaces a barrier of a single operand by that operand.

Invariant: the results are the same, bit by bit; no other equation is added or moved.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.extend.core as jex
from jax.extend.core import JaxprEqn, Var

from .._model._schedule import Passing
from .._program import _compat
from .._rewrite._flat_program import Loop
from .._rewrite._loop_inlining import LAST, STACK

SCOPE = re.compile(r"barrier_\w+")
"""The name of a barrier of this library in a name stack."""


@dataclass
class Detached:
    """The arrays that are behind barriers of their own.

    **Fields:** `passing` names them by barriers that they pass; `arrays` those of schedules of the same traced step
    that were emitted before: where they pass a barrier again, they are detached again, and named in `passing`.
    """

    passing: tuple[Passing, ...] = ()
    arrays: set[Var] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.passing or self.arrays)


def detach(
    eqns: Sequence[JaxprEqn],
    loop_of: Sequence[int],
    loops: Sequence[Loop],
    outvars: Sequence[Var | jex.Literal],
    detached: Detached,
) -> tuple[list[JaxprEqn], list[int], list[Var | jex.Literal]]:
    """Put the arrays that pass these barriers behind barriers of their own.

    **Arguments:** `loop_of` for each equation the loop in whose iterations it is, -1 for none; `outvars` the program's
    results; `detached` the arrays, of which it knows more afterwards.

    **Returns:** equations, the loop of each, and results.
    """
    chosen = _chosen(eqns, detached)
    names: dict[Var, Var] = {}

    def renamed(atom: Var | jex.Literal) -> Var | jex.Literal:
        return names.get(atom, atom) if isinstance(atom, Var) else atom

    placed: list[JaxprEqn] = []
    placed_loops: list[int] = []
    for eqn, loop in zip(eqns, loop_of, strict=True):
        placed.append(eqn.replace(invars=[renamed(a) for a in eqn.invars]) if names else eqn)
        placed_loops.append(loop)
        around = loops[loop].parent if eqn.primitive in (LAST, STACK) else loop
        for var in [v for v in eqn.outvars if v in chosen]:
            names[var], _ = behind = [_compat.new_var(var.aval) for _ in range(2)]
            barrier = _compat.barrier([var, var], behind, eqn.source_info)
            placed.append(_compat.in_scope(barrier, "barrier_detached"))
            placed_loops.append(around)
    return placed, placed_loops, [renamed(a) for a in outvars]


def _chosen(eqns: Sequence[JaxprEqn], detached: Detached) -> set[Var]:
    """Return the arrays to detach, and note their names and themselves."""
    passed = dict(_passed(eqns))
    chosen = {var for at in detached.passing for var in passed.get(at, ())}
    again = [at for at, made in passed.items() if detached.arrays.intersection(made) - chosen]
    detached.passing = tuple(sorted({*detached.passing, *again}))
    chosen.update(var for at in again for var in passed[at])
    detached.arrays |= chosen
    return chosen


def _passed(eqns: Sequence[JaxprEqn]) -> Iterator[tuple[Passing, list[Var]]]:
    """Yield for each operand of this library's barriers the array, as it is made: before other barriers and turned
    axes.
    """
    maker: Mapping[Var, JaxprEqn] = {v: eqn for eqn in eqns for v in eqn.outvars}
    for eqn in eqns:
        if eqn.primitive.name != "optimization_barrier":
            continue
        scope = _compat.last_scope(eqn)
        for position, var in enumerate(eqn.invars):
            found: list[Var] = []
            while isinstance(var, Var) and var in maker:
                made = maker[var]
                if made.primitive.name == "optimization_barrier":
                    var = made.invars[made.outvars.index(var)]
                    continue
                found.append(var)
                turned = made.primitive.name == "transpose" and SCOPE.fullmatch(_compat.last_scope(made))
                var = made.invars[0] if turned else None
            yield (scope, position), found
