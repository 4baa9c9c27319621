"""Emitted equations -> the same, with chosen arrays read by all readers behind a barrier of their own.

XLA may write a kernel's result over an array that the kernel reads twice: from its producer and, through a barrier, by
another name (`_compiler._overwritten_reads`). It does not if only a barrier reads the array from its producer. The
barrier names the array twice, because XLA:GPU replaces a barrier with a single operand by that operand.

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
"""The scope of this library's barriers in name stacks."""


@dataclass
class Detached:
    """The arrays that get barriers of their own.

    **Fields:** `passing` their names by the barriers that they pass; `arrays` those of earlier schedules of the same
    traced step: where they pass a barrier again, they are detached again, and added to `passing`.
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

    **Arguments:** `loop_of` the loop that contains each equation, -1 for none; `outvars` the program's results;
    `detached` the arrays, to which more are added.

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
    """Return the arrays to detach, and add them to `detached`."""
    passed = dict(_passed(eqns))
    chosen = {var for at in detached.passing for var in passed.get(at, ())}
    again = [at for at, made in passed.items() if detached.arrays.intersection(made) - chosen]
    detached.passing = tuple(sorted({*detached.passing, *again}))
    chosen.update(var for at in again for var in passed[at])
    detached.arrays |= chosen
    return chosen


def _passed(eqns: Sequence[JaxprEqn]) -> Iterator[tuple[Passing, list[Var]]]:
    """Yield for each operand of this library's barriers the array as its producer wrote it: before other barriers and
    transpositions.
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
