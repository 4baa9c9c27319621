"""Flat program -> the same with loops inlined, equal equations merged, and attention without its matrix of scores."""

import operator
from collections.abc import Mapping
from typing import Any

import jax.extend.core as jex

from .._attention._pattern import Pattern
from .._attention._places import Places
from .._attention._rewriting import attending
from .._program import _compat
from .._program._common_subexpressions import Equals
from .._program._inline import Inliner
from ._flat_program import BACKWARD, UNPAIRED, FlatProgram, with_eqns
from ._inner_loops import open_inner
from ._loop_inlining import open_loops
from ._sinking import sink_into


def inline_loops(program: FlatProgram, inliner: Inliner, *, inner: bool) -> FlatProgram:
    """Inline the loops of a program that `inliner` produced.

    **Arguments:** `inner` whether to inline pairs inside pairs too.
    """
    opened = open_loops(program, inliner)
    if not opened.loops:
        return opened
    merged = merged_equals(opened, inliner)
    return merged_equals(open_inner(merged, inliner), inliner) if inner else merged


def attended(program: FlatProgram, places: Mapping[Pattern, Places] | None, how: int) -> FlatProgram:
    """Run attention without its matrix of scores; on one device also in the bodies of loops that are not inlined.

    **Arguments:** `places` on several devices the places where this is possible, None on one; `how` as in a `Variant`:
    1 in parts, 2 in kernels.
    """
    made = attending(program.closed, program.scopes, program.alive, kernels=how > 1, places=places)
    before, eqns = made.closed.jaxpr.eqns, list(made.closed.jaxpr.eqns)
    if places is None:
        closed_loops = {i for i, eqn in enumerate(eqns) if eqn.primitive.name == "scan"}
        for i, sunk in enumerate(sink_into(eqns, closed_loops)):
            eqns[i] = (_attended_inside(sunk, how) if i in closed_loops else None) or eqns[i]
    sources = [i if made.place[i] == k and eqns[k] is before[k] else -1 for k, i in enumerate(made.origin)]
    return program.moved(with_eqns(made.closed, eqns), sources, [program.loop_of[i] for i in made.origin])


def closed_loop(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """Return the flat body of a loop that is not inlined."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return None
    return Inliner().program(eqn.params["jaxpr"])


def _attended_inside(eqn: jex.JaxprEqn, how: int) -> Any | None:
    """Return a loop that is not inlined, with attention rewritten in its body; None if it has none."""
    if (body := closed_loop(eqn)) is None:
        return None
    made = attended(FlatProgram.of(body), None, how)
    eqns = body.jaxpr.eqns
    if len(made.eqns) == len(eqns) and all(map(operator.is_, made.eqns, eqns)):
        return None
    live = [each for each, needed in zip(made.eqns, made.alive, strict=True) if needed]
    return eqn.replace(params={**eqn.params, "jaxpr": with_eqns(made.closed, live)})


def merged_equals(program: FlatProgram, inliner: Inliner) -> FlatProgram:
    """Merge equal equations within a loop and its pair: the backward loop may read a value instead of repeating it."""
    equals = Equals(inliner)
    loop_of: list[int] = []
    for eqn, own in zip(program.eqns, program.loop_of, strict=True):
        loop = program.loops[own] if own >= 0 else None
        in_backward = None if loop is None or loop.role == UNPAIRED else loop.role == BACKWARD
        equals.add(eqn, -1 if loop is None else loop.group, in_backward)
        if len(equals.eqns) > len(loop_of):
            loop_of.append(own)
    jaxpr = program.closed.jaxpr
    outvars = [equals.read(a) for a in jaxpr.outvars]
    closed = _compat.new_jaxpr(inliner.constvars, inliner.consts, jaxpr.invars, outvars, equals.eqns)
    return program.merged(closed, equals.merged_of, loop_of, equals.read)
