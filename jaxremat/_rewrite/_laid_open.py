"""Flat equations -> the same with loops laid open and equals merged, within each loop and its pair."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.extend.core as jex

from .._attention._pattern import Pattern
from .._attention._places import Places
from .._attention._rewriting import attending
from .._program import _compat
from .._program._common_subexpressions import Equals
from .._program._inline import Inliner
from ._inner_loops import open_inner
from ._loop_opening import ALONE, BACKWARD, Loop, Opened, open_loops
from ._reversed_chains import chains_in_reverse
from ._sinking import sink_into


@dataclass(frozen=True)
class LaidOpen:
    """**Fields:** `closed` the equations; `loop_of` and `loops` as of `Opened`; `origin` as there, before
    equals were merged, and `merged_of` the equation of `closed` that each of those has become, -1 for none; `read`
    what a variable is called now.
    """

    closed: jex.ClosedJaxpr
    loop_of: list[int]
    loops: tuple[Loop, ...]
    origin: tuple[int, ...]
    merged_of: list[int]
    read: Callable[[Any], Any]


def laid_open(flat: jex.ClosedJaxpr, inliner: Inliner, over: Mapping[Any, Any], *, inner: bool) -> LaidOpen:
    """Lay open the loops of flat equations that `inliner` has made; `over` as of `open_loops`.

    **Arguments:** `inner` whether pairs inside of pairs are too.
    """
    opened = open_loops(flat, inliner, over)
    if not opened.loops:
        count = len(opened.closed.jaxpr.eqns)
        return LaidOpen(opened.closed, [-1] * count, (), opened.origin, list(range(count)), lambda a: a)
    closed, merged_of, loop_of, read = merged_equals(opened.closed, inliner, opened)
    if not inner:
        return LaidOpen(closed, loop_of, opened.loops, opened.origin, merged_of, read)
    deeper = open_inner(closed, loop_of, opened.loops, inliner)
    closed, deeper_of, loop_of, again = merged_equals(deeper.closed, inliner, deeper)
    place = {i: deeper_of[k] for k, i in enumerate(deeper.origin) if i >= 0}
    merged_of = [place.get(i, -1) for i in merged_of]
    return LaidOpen(closed, loop_of, deeper.loops, opened.origin, merged_of, lambda a: again(read(a)))


def attended(opened: LaidOpen, places: Mapping[Pattern, Places] | None, how: int = 0) -> LaidOpen:
    """The same with attention without its matrix of scores, on one device in the bodies of loops that are not laid
    open too.

    **Arguments:** `places` as of `attending`; `how` as in a `Form`: 0 as it is written, 1 in parts, 2 in kernels.
    """
    if not how:
        return opened
    own, needed = scopes(opened.loop_of, opened.loops), alive(opened.closed)
    made = attending(opened.closed, own, needed, kernels=how > 1, places=places)
    jaxpr = made.closed.jaxpr
    eqns = list(jaxpr.eqns)
    if places is None:
        closed_loops = {i for i, eqn in enumerate(eqns) if eqn.primitive.name == "scan"}
        for i, sunk in enumerate(sink_into(eqns, closed_loops)):
            eqns[i] = (_attended_inside(sunk, how) if i in closed_loops else None) or eqns[i]
    closed = _compat.new_jaxpr(jaxpr.constvars, made.closed.consts, jaxpr.invars, jaxpr.outvars, eqns)
    place = [i if i >= 0 and eqns[i] is jaxpr.eqns[i] else -1 for i in made.place]
    return _moved(opened, closed, [opened.loop_of[i] for i in made.origin], place)


def closed_loop(eqn: Any) -> jex.ClosedJaxpr | None:
    """The body of a loop that is not laid open, flat."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return None
    return Inliner().program(eqn.params["jaxpr"])


def _attended_inside(eqn: Any, how: int) -> Any | None:
    """A loop that is not laid open, with attention so in its body; None of one that has none."""
    if (body := closed_loop(eqn)) is None:
        return None
    count = len(body.jaxpr.eqns)
    within = LaidOpen(body, [-1] * count, (), tuple(range(count)), list(range(count)), lambda a: a)
    made = attended(within, None, how).closed
    same = len(made.jaxpr.eqns) == count and all(map(operator.is_, made.jaxpr.eqns, body.jaxpr.eqns))
    if same:
        return None
    jaxpr = made.jaxpr
    eqns = [each for each, needed in zip(jaxpr.eqns, alive(made), strict=True) if needed]
    made = _compat.new_jaxpr(jaxpr.constvars, made.consts, jaxpr.invars, jaxpr.outvars, eqns)
    return eqn.replace(params={**eqn.params, "jaxpr": made})


def in_reverse(opened: LaidOpen) -> LaidOpen:
    """The same with chains of blocks undone in the backward pass, where they can be."""
    made = chains_in_reverse(opened.closed, opened.loop_of, opened.loops)
    return _moved(opened, made.closed, made.loop_of, made.place)


def _moved(opened: LaidOpen, closed: jex.ClosedJaxpr, loop_of: list[int], place: Sequence[int]) -> LaidOpen:
    """The same with other equations. **Arguments:** `place` of each of those that were there, -1 for none."""
    merged_of = [place[i] if i >= 0 else -1 for i in opened.merged_of]
    return replace(opened, closed=closed, loop_of=loop_of, merged_of=merged_of)


def scopes(loop_of: Sequence[int], loops: Sequence[Loop]) -> list[int]:
    """For each equation a number for the loop, or the pair of loops, that it is of, -1 for none."""
    return [loops[i].group if i >= 0 else -1 for i in loop_of]


def merged_equals(
    closed: jex.ClosedJaxpr, inliner: Inliner, opened: Opened | None = None
) -> tuple[jex.ClosedJaxpr, list[int], list[int], Callable[[Any], Any]]:
    """Equals computed once; for each old equation the index of the new one, for each new one its loop; and what a
    variable is called now.

    Within a loop and within its pair equals are merged: what the backward loop repeats it may as well read.
    """
    equals = Equals(inliner)
    loop_of: list[int] = []
    for i, eqn in enumerate(closed.jaxpr.eqns):
        loop = opened.loops[opened.loop_of[i]] if opened and opened.loop_of[i] >= 0 else None
        late = None if loop is None or loop.role == ALONE else loop.role == BACKWARD
        equals.add(eqn, -1 if loop is None else loop.group, late)
        if len(equals.eqns) > len(loop_of):
            loop_of.append(-1 if loop is None else loop.id)
    outvars = [equals.read(a) for a in closed.jaxpr.outvars]
    merged = _compat.new_jaxpr(inliner.constvars, inliner.consts, closed.jaxpr.invars, outvars, equals.eqns)
    return merged, equals.merged_of, loop_of, equals.read


def alive(closed: jex.ClosedJaxpr) -> list[bool]:
    """For each equation whether an output or an effect needs it, in this iteration of its loop or the next."""
    eqns = closed.jaxpr.eqns
    needed = {a for a in closed.jaxpr.outvars if not _compat.is_literal(a)}
    carried = {_edge(eqn): eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "scan_carry"}
    found = [False] * len(eqns)
    known = -1
    while known < (known := sum(found)):
        for i in reversed(range(len(eqns))):
            eqn = eqns[i]
            last = eqn.primitive.name == "scan_last" and carried[_edge(eqn)] in needed
            if not found[i] and (eqn.effects or last or any(v in needed for v in eqn.outvars)):
                found[i] = True
                needed.update(a for a in eqn.invars if not _compat.is_literal(a))
                if eqn.primitive.name == "scan_last":
                    needed.add(carried[_edge(eqn)])
    return found


def _edge(eqn: Any) -> tuple[int, int]:
    return eqn.params["loop"], eqn.params["index"]
