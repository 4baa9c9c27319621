"""A step as a list of equations: the type that every pass takes and returns.

Invariant: the program computes what the step computes, and each equation has its loop and the equations of the plain
program that compute the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.extend.core as jex

from .._attention._finding import attention
from .._program import _compat
from .._program._compat import Atom
from .._program._hints import Hint
from ._decisions import Decisions, decisions


@dataclass(frozen=True)
class Loop:
    """An inlined scan.

    **Fields:** `id` its index in the program; `group` that of the forward loop of its pair, or its own; `length` the
    number of iterations; `role`; `parent` the loop around it, or -1; `eqn` the scan.
    """

    id: int
    group: int
    length: int
    role: str
    parent: int
    eqn: Any


FORWARD, BACKWARD, UNPAIRED = "forward", "backward", "alone"
"""A loop's role: one of a pair, or with a forward and a backward pass of its own."""


def within(loop: int, loops: Sequence[Loop]) -> list[int]:
    """Return a loop and those around it, the outermost last; empty for -1, the program."""
    found: list[int] = []
    while loop >= 0:
        found.append(loop)
        loop = loops[loop].parent
    return found


class Gain(NamedTuple):
    """The effect of absorbing updates: `fewer_nbytes` in stacks, and `written_nbytes` of rows; zeros for none."""

    fewer_nbytes: int
    written_nbytes: int


@dataclass(frozen=True)
class Encoded:
    """A value with a copy in fewer bits. **Fields:** `whole` the original; `parts` of the copy; `decoded` the value
    that readers read, from the last of the equations that decode it; `encoding` its code; `exact` whether it replaces
    the original everywhere.
    """

    whole: Any
    parts: tuple[Any, ...]
    decoded: Any
    encoding: int
    exact: bool

    def renamed(self, rename: Callable[[Any], Atom]) -> Encoded:
        """Return the same with renamed variables."""
        names = rename(self.whole), tuple(map(rename, self.parts)), rename(self.decoded)
        return Encoded(*names, self.encoding, self.exact)


@dataclass(frozen=True)
class PairForm:
    """The form of one pair of scans: in `levels`, see `_loop_levels`, or `undone` in the backward pass."""

    levels: tuple[int, ...] = ()
    undone: bool = False


@dataclass(frozen=True)
class FlatProgram:
    """Equations in a topological order.

    **Fields:**

    - `closed`: the equations as a jaxpr, with inlined loops as sections.
    - `loop_of`: for each equation the index in `loops` of its loop, or -1.
    - `origin`: for each equation the indices of those of the plain program that compute the same; () for a new one.
    - `read`: maps a variable of an earlier program to its name in this one.
    - `pairs`: the form of each pair of scans at the top level.
    - `over`: for stacked results the scanned-over argument whose rows they overwrite; `gains` the effect of absorbing
      updates in each pair.
    - `encoded`: the values with copies in fewer bits; `masked`: by equation the operand of masks that read a result.
    """

    closed: jex.ClosedJaxpr
    loop_of: tuple[int, ...]
    origin: tuple[tuple[int, ...], ...]
    loops: tuple[Loop, ...] = ()
    read: Callable[[Any], Any] = field(default=lambda atom: atom)
    pairs: tuple[PairForm, ...] = ()
    over: Mapping[Any, Any] = field(default_factory=dict)
    gains: tuple[Gain, ...] = ()
    encoded: tuple[Encoded, ...] = ()
    masked: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, closed: jex.ClosedJaxpr) -> FlatProgram:
        """Return a program without inlined loops, with each equation as its own origin."""
        count = len(closed.jaxpr.eqns)
        return cls(closed, (-1,) * count, tuple((i,) for i in range(count)))

    @property
    def eqns(self) -> list[jex.JaxprEqn]:
        """The equations in order."""
        return self.closed.jaxpr.eqns

    def apart_from_rows(self, hints: Iterable[Hint], *, keeps_scores: bool) -> set[int]:
        """Return the equations that no region of rows may contain: those of attention, which has other forms unless the
        step `keeps_scores`, and those that compute values marked by hints.
        """
        marked = {self.read(hint.variable) for hint in hints}
        sites = () if keeps_scores else attention(self.closed, self.scopes, self.alive)
        found = {i for i, eqn in enumerate(self.eqns) if not marked.isdisjoint(eqn.outvars)}
        return found.union(*(site.forward | site.backward | {site.at} for site in sites))

    @cached_property
    def scopes(self) -> list[int]:
        """For each equation a number for its loop or pair of loops, or -1."""
        return [self.loops[i].group if i >= 0 else -1 for i in self.loop_of]

    @cached_property
    def alive(self) -> list[bool]:
        """For each equation whether an output or an effect needs it."""
        return alive(self.closed)

    @cached_property
    def decisions(self) -> Decisions:
        """The decisions that must come from the same run as the values that they are combined with."""
        return decisions(self.eqns)

    def places(self, count: int) -> list[int]:
        """Return for each of the `count` equations of the plain program the last one here that computes the same, or
        -1.
        """
        found = [-1] * count
        for place, origin in enumerate(self.origin):
            for i in origin:
                found[i] = place
        return found

    def anew(self, **fields: Any) -> FlatProgram:
        """Return the program with other fields."""
        return replace(self, **fields)

    def with_same(self, closed: jex.ClosedJaxpr) -> FlatProgram:
        """Return the program with each equation replaced by one that computes the same."""
        return replace(self, closed=closed)

    def moved(
        self,
        closed: jex.ClosedJaxpr,
        sources: Sequence[int],
        loop_of: Sequence[int] | None = None,
        **fields: Any,
    ) -> FlatProgram:
        """Return the program with other equations.

        **Arguments:** `sources` for each of them the index here of the one that computes the same, -1 for a new one;
        `loop_of` the loop of each, by default that of its source.
        """
        origin = tuple(self.origin[i] if i >= 0 else () for i in sources)
        loops = tuple(self.loop_of[i] if i >= 0 else -1 for i in sources) if loop_of is None else loop_of
        return replace(self, closed=closed, loop_of=tuple(loops), origin=origin, **fields)

    def merged(
        self,
        closed: jex.ClosedJaxpr,
        merged_of: Sequence[int],
        loop_of: Sequence[int],
        read: Callable[[Atom], Atom],
    ) -> FlatProgram:
        """Return the program with equal equations merged.

        **Arguments:** `merged_of` for each equation here the index of the one that now computes it; `read` maps a
        variable to its new name.
        """
        origin: list[tuple[int, ...]] = [()] * len(closed.jaxpr.eqns)
        for i, place in enumerate(merged_of):
            origin[place] += self.origin[i]
        before = self.read
        return replace(
            self,
            closed=closed,
            loop_of=tuple(loop_of),
            origin=tuple(origin),
            read=lambda atom: read(before(atom)),
            encoded=tuple(dict.fromkeys(each.renamed(read) for each in self.encoded)),
        )


def with_eqns(closed: jex.ClosedJaxpr, eqns: Sequence[jex.JaxprEqn]) -> jex.ClosedJaxpr:
    """Return the jaxpr with other equations, and the same constants, arguments and results."""
    jaxpr = closed.jaxpr
    return _compat.new_jaxpr(jaxpr.constvars, closed.consts, jaxpr.invars, jaxpr.outvars, list(eqns))


def with_each(
    closed: jex.ClosedJaxpr, change: Callable[[jex.JaxprEqn], Sequence[jex.JaxprEqn]]
) -> jex.ClosedJaxpr:
    """Return the jaxpr with each equation replaced by the result of `change`; the same object if nothing changes."""
    before = closed.jaxpr.eqns
    eqns = [made for eqn in before for made in change(eqn)]
    same = len(eqns) == len(before) and all(map(operator.is_, eqns, before))
    return closed if same else with_eqns(closed, eqns)


def alive(closed: jex.ClosedJaxpr) -> list[bool]:
    """Return for each equation whether an output or an effect needs it, in this iteration of its loop or the next."""
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


def _edge(eqn: jex.JaxprEqn) -> tuple[int, int]:
    return eqn.params["loop"], eqn.params["index"]
