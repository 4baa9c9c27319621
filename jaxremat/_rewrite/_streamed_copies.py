"""Order of equations -> the same with the user's own copies from and to host memory moved to where they overlap
arithmetic.

A user who keeps the optimizer's state in host memory copies it to the device in the step, updates it, and copies it
back. As written, all of it is on the device at once. Here a copy of an argument comes so far ahead of its first reader,
and one of a result so far behind its maker, that the arithmetic between takes as long as the copies; copies in one
direction run one after the other. No copy is farther from its update than `UPDATES` other updates: if the link is the
bottleneck, more distance would not help.

Invariant: a topological order stays one; only these copies move, and none into the forward pass.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._flops import array_nbytes, eqn_flops
from .._program._primitives import is_backward, is_contraction, is_fetch, is_put
from ._flat_program import Loop, within

INTENSITY = 8000.0
"""Floating-point operations of a device per byte on its link: half of an H100's bfloat16 peak at 64 GB/s."""

UPDATES = 1
"""A copy begins at most this many updates early, and ends at most this many late."""


def updates(eqns: Sequence[jex.JaxprEqn], fetches: Collection[int]) -> dict[Any, int]:
    """Return for each variable that depends on these copies, other than through contractions, the number of its update,
    in the order of equations. Counters and similar values, which all updates read, belong to none.
    """
    before: dict[int, int] = {}  # copy -> an earlier one of the same update, or itself if it is the first

    def first(i: int) -> int:
        while before[i] != i:
            i = before[i]
        return i

    of: dict[Any, int] = {}
    for i, eqn in enumerate(eqns):
        if i in fetches:
            if len(shaped(eqn.outvars[0]).shape) > 1:
                before[i] = i
                of[eqn.outvars[0]] = i
        elif not is_contraction(eqn):
            read = {first(of[a]) for a in eqn.invars if not _compat.is_literal(a) and a in of}
            before.update((j, min(read)) for j in read)
            of.update((v, min(read)) for v in eqn.outvars if read)
    return {v: first(i) for v, i in of.items()}


class _Copy(NamedTuple):
    """A copy: its position, that of its first reader or its maker, its update, and the operations that take as long."""

    place: int
    at: int
    update: int
    work: float


def streamed(
    jaxpr: jex.Jaxpr, order: Sequence[int], loop_of: Sequence[int] = (), loops: Sequence[Loop] = ()
) -> list[int]:
    """Return the indices of equations in this order, with those copies moved.

    **Arguments:** as in `_memory_order.memory_order`.
    """
    loop_of = loop_of or [-1] * len(jaxpr.eqns)
    eqns = [jaxpr.eqns[i] for i in order]
    copies = [p for p, i in enumerate(order) if loop_of[i] < 0 and (is_fetch(eqns[p]) or is_put(eqns[p]))]
    if not copies:
        return list(order)
    begin = next((p for p, eqn in enumerate(eqns) if is_backward(eqn)), len(eqns))  # of the backward pass
    reader: dict[Any, int] = {}  # the first of each variable
    maker: dict[Any, int] = {}
    for p, eqn in enumerate(eqns):
        maker.update((v, p) for v in eqn.outvars)
        for a in _compat.variables(eqn.invars):
            reader.setdefault(a, p)
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    coming = {
        p: at
        for p in copies
        if is_fetch(eqns[p]) and eqns[p].invars[0] in arguments
        for at in (reader.get(eqns[p].outvars[0], -1),)
        if at > begin and loop_of[order[at]] < 0  # otherwise it stays before its loop
    }
    leaving = {
        p: at
        for p in copies
        if is_put(eqns[p]) and eqns[p].outvars[0] not in reader
        for at in (maker.get(eqns[p].invars[0], -1),)
        if at > begin
    }
    of = updates(eqns, coming)
    fetches = [_copy(eqns[p].outvars[0], p, at, of) for p, at in coming.items()]
    puts = [_copy(eqns[p].invars[0], p, at, of) for p, at in leaving.items()]
    work = [0.0] * len(order)
    for p, i in enumerate(order):
        if p not in coming and p not in leaving:
            trips = math.prod(loops[loop].length for loop in within(loop_of[i], loops))
            work[p] = trips * eqn_flops(eqns[p])
    clock = [0.0, *accumulate(work)]  # operations before each position

    target = _ahead(fetches, clock, begin) | _behind(puts, clock)
    outside = _outside_loops([loop_of[i] for i in order], loops)
    places = {p: outside[at] + 0.5 for p, at in target.items()}
    return [order[p] for p in sorted(range(len(order)), key=lambda p: (places.get(p, p), p))]


def _copy(var: _compat.Atom, p: int, at: int, of: Mapping[Atom, int]) -> _Copy:
    """Return a copy. **Arguments:** `var` the copied value on the device."""
    return _Copy(p, at, of.get(var, p), INTENSITY * array_nbytes(var.aval))


def _ahead(fetches: Sequence[_Copy], clock: Sequence[float], begin: int) -> dict[int, int]:
    """Return for each copy to the device the position after which it begins, never before `begin`."""
    near, index = _in_turn(fetches, min)
    found: dict[int, int] = {}
    free = math.inf  # the link is free until then, counted in operations
    for copy in sorted(fetches, key=lambda copy: -copy.at):
        free = min(free, clock[copy.at]) - copy.work
        turn = index[copy.update] - UPDATES
        least = max(begin, near[turn] - 1) if turn >= 0 else begin
        at = min(max(bisect_right(clock, free) - 2, least), copy.at - 1)
        found[copy.place], free = at, max(free, clock[at + 1])
    return found


def _behind(puts: Sequence[_Copy], clock: Sequence[float]) -> dict[int, int]:
    """Return for each copy to the host the position after which it is complete."""
    near, index = _in_turn(puts, max)
    found: dict[int, int] = {}
    free = 0.0  # the link is free from then on
    for copy in sorted(puts, key=lambda copy: copy.at):
        free = max(free, clock[copy.at + 1]) + copy.work
        turn = index[copy.update] + UPDATES
        most = near[turn] if turn < len(near) else len(clock) - 2
        at = max(min(bisect_left(clock, free) - 1, most), copy.at)
        found[copy.place], free = at, min(free, clock[at + 1])
    return found


def _in_turn(copies: Iterable[_Copy], outermost: Callable[..., int]) -> tuple[list[int], dict[int, int]]:
    """Return the first (or last) position of each update, in order, and the number of each update in this order."""
    places: dict[int, int] = {}
    for copy in copies:
        places[copy.update] = outermost(places.get(copy.update, copy.at), copy.at)
    turns = sorted(places, key=places.__getitem__)
    return [places[update] for update in turns], {update: turn for turn, update in enumerate(turns)}


def _outside_loops(loop_of: Sequence[int], loops: Sequence[Loop]) -> list[int]:
    """Return for each position the last one of its outermost loop, or itself outside loops."""
    outermost = [(within(loop, loops) or [-1])[-1] for loop in loop_of]
    last = {loop: p for p, loop in enumerate(outermost)}
    return [p if loop < 0 else last[loop] for p, loop in enumerate(outermost)]
