"""Pairs of scans inside pairs of loops -> inlined as well.

An iteration of the outer backward loop runs the inner forward scan again and has its results, so it only needs that
scan's operands from the outer forward loop, as if the inner scan had a `jax.checkpoint` (as it often does). The inner
loops read values of the outer forward loop by a name of the loop around them: if such a value is recomputed, then
there, once for all inner iterations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
from jax.extend.core.primitives import reshape_p

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._flops import aval_nbytes
from .._program._inline import Inliner
from .._program._primitives import runs_once
from .._runtime._mechanisms import mechanism
from ._flat_program import BACKWARD, FORWARD, FlatProgram, Loop
from ._loop_closing import without_unread
from ._loop_inlining import Opener, operands, pairs


@mechanism("inner loops inlined", off=lambda *_: {})
def inner_pairs(
    eqns: Sequence[jex.JaxprEqn], loop_of: Sequence[int], loops: Sequence[Loop]
) -> dict[int, int]:
    """Return for each inner backward scan the index of its inner forward scan; the outer loops are inlined."""
    found: dict[int, int] = {}
    for loop in loops:
        if loop.role == BACKWARD:
            among = [i for i, own in enumerate(loop_of) if own in (loop.group, loop.id)]
            inside = [(among[b], among[f]) for b, f in pairs([eqns[i] for i in among]).items()]
            found.update((b, f) for b, f in inside if loop_of[b] == loop.id and not runs_once(eqns[f]))
    return found


def fewer_nbytes(eqns: Sequence[jex.JaxprEqn], forward_of: Mapping[int, int]) -> int:
    """Return the bytes that the forward scans of inner pairs stack for one outer iteration, without carries."""
    stacked = 0
    for b, f in forward_of.items():
        read = set(operands(eqns[b])[2])
        stacked += sum(aval_nbytes(v.aval) for v in eqns[f].outvars if v in read)
        stacked -= eqns[f].params["length"] * sum(aval_nbytes(a.aval) for a in operands(eqns[f])[1])
    return max(stacked, 0)


def open_inner(program: FlatProgram, inliner: Inliner) -> FlatProgram:
    """Inline the inner pairs of a program with inlined loops."""
    jaxpr, loop_of, loops = program.closed.jaxpr, program.loop_of, program.loops
    forward_of = inner_pairs(jaxpr.eqns, loop_of, loops)
    opener = Opener(inliner, {}, list(loops))
    made_in = {v: i for eqn, i in zip(jaxpr.eqns, loop_of, strict=True) for v in eqn.outvars}
    named: dict[tuple[int, Any], Any] = {}  # by loop and variable of the outer forward loop

    def here(eqn: jex.JaxprEqn, i: int) -> Any:
        """Return the inner scan, with values of the forward loop renamed to names in this one."""

        def name(a: Atom) -> Any:
            if _compat.is_literal(a) or made_in.get(a) != loops[i].group:
                return a
            if (i, a) not in named:
                named[i, a] = _compat.new_var(a.aval)
                same = {"new_sizes": shaped(a).shape, "dimensions": None, "sharding": None}
                opener.add(_compat.new_eqn([a], [named[i, a]], reshape_p, same, eqn.source_info), i)
            return named[i, a]

        return eqn.replace(invars=[name(a) for a in eqn.invars])

    for i, (eqn, own) in enumerate(zip(jaxpr.eqns, loop_of, strict=True)):
        if i not in forward_of:
            opener.add(eqn, own, i)
            continue
        forward = jaxpr.eqns[forward_of[i]]
        again = dict(zip(forward.outvars, (_compat.new_var(v.aval) for v in forward.outvars), strict=True))
        copy = here(forward.replace(outvars=list(again.values())), own)
        number = opener.open(copy, FORWARD, None, own)
        opener.open(here(_compat.renamed(eqn, again), own), BACKWARD, number, own)
    # The outer forward scans need not stack results of inner scans that now only the copies compute.
    opener.eqns = without_unread(opener.eqns, jaxpr.outvars, {"scan"})
    return opener.program(program)
