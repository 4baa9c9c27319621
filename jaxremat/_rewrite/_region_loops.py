"""Equations that carry an axis -> the loops over parts of the axis that compute them, in order.

A contrastive loss compares all examples: a tower's output for an example depends on that example alone, its gradient on
all the others too. Such work runs in two loops, with the comparison between them:

    for i in range(parts): z[i] = tower(w, x[i])
    dz = gradient of the loss of all z
    for i in range(parts): dw += gradient of tower(w, x[i]) for dz[i]       recomputes the tower for this part

and no value of a tower but `z` is kept. In general, the *stage* of an equation counts how often it waits for all parts:
for a sum over them, or for an equation that mixes them. Each stage is a loop. It recomputes the values that it reads
from earlier stages, unless these are small or are handed on anyway.

Invariants: the loops and the equations between them have an order in which each value is computed before it is read. A
value that must come from one run is computed by one loop and handed on to the others; a comparison of a value with a
selection from it may be recomputed by a loop that recomputes both.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.extend.core as jex

from .._program import _compat
from .._program._axes import OF_SUMS, BatchingRule, is_scattered
from .._program._compat import Atom
from .._program._flops import aval_nbytes, eqn_flops
from .._program._primitives import contracts
from ._flat_program import within
from ._program_readers import Readers
from ._region_cut import narrower, outside_nbytes

LIGHT = 1 / 16
"""A stage with less than this share of the largest stage's bytes runs between the loops, on all parts at once."""

SMALL = 1 / 32
"""Loops may hand on values of at most this share of the largest, instead of recomputing them, ..."""

LESS = 1 / 2
"""... if this leaves at most this share of the operations that they would repeat otherwise."""

LEAST_LEFT = 0.5
"""If some equations run between loops, the loops keep at least this share of the contractions."""

Loop = Mapping[int, BatchingRule]
"""The equations of one loop, by index, with the rules by which they carry the axis."""


@dataclass(frozen=True)
class Limits:
    """The limits of a region; a larger one is left unchanged.

    **Fields:** the contractions of one loop (`products`), because a longer one would need a plan of its own, and of all
    loops (`most_products`); the number of `stages`, and the `fewest` of these; the operations that loops `repeat`, as a
    share of those that they compute.
    """

    products: int
    most_products: int
    stages: int
    repeat: float
    fewest: int = 1


USUAL = Limits(products=8, most_products=24, stages=4, repeat=1.25)
"""Each batch normalisation is two stages. A frozen layer with adapters repeats 1.02 times its operations."""

WIDE = Limits(products=16, most_products=64, stages=16, repeat=2.0, fewest=USUAL.stages + 1)
"""For a step in which the usual limits find no region, or a far smaller one. Forces of a graph network of three layers,
which are gradients that are differentiated, have ten stages of 33 contractions and repeat 1.5 times their operations,
for a quarter of the memory. A large region of few stages, such as a few equal layers, is left to microbatches and
plans.
"""


class Component(Protocol):
    """Equations that carry one axis. **Fields:** their `rules`, by index; the `dimension` of the axis in values."""

    rules: dict[int, BatchingRule]
    dimension: dict[Any, int | None]

    def with_sums(self, indices: Collection[int]) -> list[int]:
        """Add the equations that add up sums computed by some of its equations; return the added ones."""
        ...


def loops_of(
    program: Readers, components: Sequence[Component], limits: Limits = USUAL
) -> tuple[Loop, ...] | None:
    """Return the loops that compute these components, in an order in which they can run; None if none is within
    `limits`.

    Equations that no loop computes are removed from the components.
    """
    found: list[Loop] = []
    for component in components:
        stages = _narrowed(program, component, limits)
        if len(stages) < limits.fewest:
            return None
        kept = {i for own in stages for i in own}
        component.rules = {i: rule for i, rule in component.rules.items() if i in kept or rule.copied}
        stages = [[*own, *component.with_sums(own)] for own in stages]
        loops, again = _with_repeated(program, component, stages, 0)
        if len(stages) > 1:
            handing, left = _with_repeated(program, component, stages, SMALL)
            # Handing on costs memory: it must spare most of the repeated operations.
            if left <= LESS * again:
                loops, again = handing, left
        if again > limits.repeat * sum(_flops(program, own) for own in stages):
            return None
        found += filter(None, loops)
    order = schedule(program, found)
    return None if order is None else tuple(found[~i] for i in order if i < 0)


def schedule(program: Readers, loops: Sequence[Loop]) -> list[int] | None:
    """Return the order of equations outside loops, by index, and of loops, by the complement of their index; None if
    loops would wait for one another. Equations of one of the program's own loops stay together.
    """
    first = owners(loops)
    own = program.program.loops
    around = {i: within(program.loop_of[i], own)[::-1] for i in program.alive}
    last = {first[i]: i for i in program.alive if i in first}
    around.update((i, around[last[number]]) for i, number in first.items() if number in last)

    def ordered(alive: Sequence[int], depth: int) -> list[int] | None:
        node = {i: ~first[i] if i in first else i for i in alive}
        node.update((i, len(program.eqns) + around[i][depth]) for i in alive if len(around[i]) > depth)
        order = _ordered(program, loops, first, node)
        parts = {
            each: [i for i in alive if node[i] == each] for each in order or () if each >= len(program.eqns)
        }
        inside = {each: ordered(members, depth + 1) for each, members in parts.items()}
        if order is None or None in inside.values():
            return None
        return [i for each in order for i in inside.get(each) or (each,)]

    return ordered(program.alive, 0)


def _ordered(
    program: Readers, loops: Sequence[Loop], first: Mapping[int, int], node: Mapping[int, int]
) -> list[int] | None:
    """Return the order of the nodes that some equations belong to; None if they would wait for one another."""
    eqns = program.eqns
    members: dict[int, list[int]] = {}
    for i, each in node.items():
        members.setdefault(each, []).append(i)
    waits: dict[int, set[int]] = {}
    followers: dict[int, list[int]] = {}
    for each, own in members.items():
        done = {*own, *(i for number in {first[i] for i in own if i in first} for i in loops[number])}
        reads = {a for i in done for a in _compat.variables(eqns[i].invars)}
        makers = {program.maker[a] for a in reads if a in program.maker}
        waits[each] = {node[j] for j in makers if j in node and j not in done} - {each}
        for other in waits[each]:
            followers.setdefault(other, []).append(each)
    left = {each: len(others) for each, others in waits.items()}
    ready = [(members[each][-1], each) for each, count in left.items() if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, each = heapq.heappop(ready)
        order.append(each)
        for other in followers.get(each, ()):
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, (members[other][-1], other))
    return order if len(order) == len(members) else None


def owners(loops: Sequence[Loop]) -> dict[int, int]:
    """Return the first loop of each equation that loops compute in place of the program: its results are read from that
    loop.
    """
    found: dict[int, int] = {}
    for number, loop in enumerate(loops):
        for i, rule in loop.items():
            if not rule.copied:
                found.setdefault(i, number)
    return found


def handed_on(program: Readers, loops: Sequence[Loop], number: int) -> list[jex.Var]:
    """Return the results of a loop that equations outside it, or other loops, read."""
    first = owners(loops)

    def is_read(v: jex.Var, i: int) -> bool:
        if v in program.returned:
            return True
        readers = program.readers.get(v, ())
        return any(j not in first or any(j in loop and i not in loop for loop in loops) for j in readers)

    own = (i for i in loops[number] if first.get(i) == number)
    return [v for i in own for v in program.eqns[i].outvars if is_read(v, i)]


def goes_on(program: Readers, loop: Loop, v: Atom) -> bool:
    """Return whether a value is a sum of a loop to which each chunk adds in place: a scattered sum, or a sum of several
    with such a sum among them.
    """
    i = -1 if _compat.is_literal(v) else program.maker.get(v, -1)
    if i not in loop:
        return False
    eqn, rule = program.eqns[i], loop[i]
    if is_scattered(eqn):
        return rule.summed
    return rule is OF_SUMS and any(goes_on(program, loop, a) for a in eqn.invars)


def _narrowed(program: Readers, component: Component, limits: Limits) -> list[list[int]]:
    """Return the equations of each stage that loops compute, without light stages, and without others if there are too
    many, or if the values handed on would need much memory outside the loops; empty if that is impossible within the
    limits.
    """
    own = {i: rule for i, rule in component.rules.items() if not rule.copied}
    everything = _without_light(program, component, own)
    if len(everything) == 1 or len(everything) < limits.fewest:
        return everything
    made = [everything]
    if everything:
        fewer = narrower(program, own, component.dimension, everything)
        made += [_without_light(program, component, each) for each in fewer]
    products = [_products(program, itertools.chain(*stages)) for stages in made]
    able = [
        stages
        for stages, count in zip(made, products, strict=True)
        if 0 < len(stages) <= limits.stages and count >= LEAST_LEFT * products[0]
    ]

    def needed(stages: list[list[int]]) -> float:
        loops, _ = _with_repeated(program, component, stages, 0)
        handed = {v for number in range(len(loops)) for v in handed_on(program, loops, number)}
        inside = {i for own in stages for i in own}
        return outside_nbytes(program, component.dimension, inside, handed)

    return min(able, key=needed, default=[])


def _products(program: Readers, indices: Iterable[int]) -> int:
    return sum(contracts(program.eqns[i]) for i in indices)


def _without_light(program: Readers, component: Component, rules: Collection[int]) -> list[list[int]]:
    """Return these equations of a component by stage, without stages that read and compute little."""
    left = set(rules)
    while True:
        stages = _stages(program, component, left)
        needed = [_touched_nbytes(program, component, own) for own in stages]
        least = min(range(len(stages)), key=needed.__getitem__, default=0)
        if not stages or needed[least] >= LIGHT * max(needed):
            return stages
        left.difference_update(stages[least])


def _touched_nbytes(program: Readers, component: Component, indices: Collection[int]) -> int:
    """Return the bytes, along the axis, of values that some equations compute or read from others of the component:
    weighted sums of each example's gradients are small, but unless a loop computes them all of the gradients are handed
    on.
    """
    made = {v for i in indices for v in program.eqns[i].outvars}
    read = {a for i in indices for a, j in program.makers[i] if j in component.rules}
    return sum(aval_nbytes(v.aval) for v in made | read if component.dimension.get(v) is not None)


def _stages(program: Readers, component: Component, rules: Collection[int]) -> list[list[int]]:
    """Return these equations of a component by stage, in order, with each of the program's own loops separate."""
    ways = ((program.eqns[i], component.rules[i]) for i in rules)
    sums = {v for eqn, rule in ways for v, is_sum in zip(eqn.outvars, rule.sums, strict=True) if is_sum}
    stage: dict[int, int] = {}
    needed: dict[int, int] = {}  # for each other equation, the number of stages that run before it
    for i in program.alive:
        at, own = 0, i in rules
        for a, j in program.makers[i]:
            at = max(at, stage[j] + (not own or a in sums) if j in stage else needed[j])
        (stage if own else needed)[i] = at
    found: dict[tuple[int, int], list[int]] = {}
    for i, at in stage.items():
        found.setdefault((program.loop_of[i], at), []).append(i)
    return [found[each] for each in sorted(found)]


def _with_repeated(
    program: Readers, component: Component, stages: Sequence[Sequence[int]], small: float
) -> tuple[list[Loop], float]:
    """Return for each stage the equations of its loop, its own and recomputed ones, and the operations of the latter.

    **Arguments:** `small` the share of the largest value up to which values are handed on instead.
    """
    loops = _Handing(program, component, stages, small)
    decided: set[int] = set()
    found = loops.built(decided)
    while more := loops.decided_twice(found) - decided:
        decided |= more
        found = loops.built(decided)
    again = sum(_flops(program, loop.keys() - own) for loop, own in zip(found, stages, strict=True))
    return found, again


class _Handing:
    """The loops of stages: the values that each hands on to later ones, and the equations that these recompute."""

    def __init__(
        self, program: Readers, component: Component, stages: Sequence[Sequence[int]], small: float
    ) -> None:
        self.program, self.component, self.stages = program, component, stages
        self.stage = {i: n for n, own in enumerate(stages) for i in own}
        self.room = max(aval_nbytes(v.aval) for i in self.stage for v in program.eqns[i].outvars)
        self.small = small * self.room
        self.once = program.of_one_run - program.of_a_run.keys()
        self.wanted = {
            v
            for i in self.stage
            for v in program.eqns[i].outvars
            if v in program.returned or any(j not in self.stage for j in program.readers.get(v, ()))
        }
        """Values that equations outside the loops read."""

    def built(self, decided: Collection[int]) -> list[Loop]:
        """Return the loops if the results of `decided` are handed on too."""
        found: list[Loop] = []
        needed, left = self.wanted, self.room
        for number in reversed(range(len(self.stages))):
            handed = {*decided}
            members, known, after = self._members(number, handed, needed, left)
            while more := {*self._torn(number, members)} - handed:
                handed |= more
                members, known, after = self._members(number, handed, needed, left)
            needed, left = known, after
            found.append({i: self.component.rules[i] for i in sorted(members)})
        return found[::-1]

    def _members(
        self, number: int, handed: Collection[int], needed: Collection[jex.Var], room: int
    ) -> tuple[set[int], set[jex.Var], int]:
        """Return the equations of a stage's loop, the values that it and later loops need from elsewhere, and how many
        more bytes may be handed on.
        """
        program, rules, stage = self.program, self.component.rules, self.stage
        wanted, members = {*needed}, set[int]()
        waiting = [i for i in self.stages[number] if not wanted.isdisjoint(program.eqns[i].outvars)]
        while waiting:
            i = waiting.pop()
            if i in members:
                continue
            members.add(i)
            for a in _compat.variables(program.eqns[i].invars):
                j = program.maker.get(a, -1)
                if j in rules and rules[j].copied:
                    waiting.append(j)
                elif stage.get(j, number) == number:
                    waiting += [j] if j in stage else []
                elif a not in wanted and self.component.dimension[a] is not None:
                    if j in handed or j in self.once:
                        wanted.add(a)
                    elif (nbytes := aval_nbytes(a.aval)) <= min(self.small, room) and not _compat.is_key(a):
                        room -= nbytes
                        wanted.add(a)
                    else:
                        waiting.append(j)
                else:
                    wanted.add(a)
        return members, wanted, room

    def _torn(self, number: int, members: set[int]) -> Iterator[int]:
        """Yield the equations that a loop may not recompute: a decision, if the loop does not recompute both sides from
        their common origin (for a decision of its own stage, that origin), or if it reads another decision about the
        same value, such as `a == max(a, b)` next to `b == max(a, b)`.
        """
        program, stage = self.program, self.stage
        read = {program.maker.get(a, -1) for i in members for a in self._operands(i)}
        about = {a for j in program.of_a_run.keys() & read - members for a in self._operands(j)}
        for i in program.of_a_run.keys() & members:
            shared, between = program.of_a_run[i]
            if stage[i] < number and not about.isdisjoint(self._operands(i)):
                yield i
            if not between <= members:
                own = shared if stage[i] == number else (i,)
                yield from (j for j in own if stage.get(j, number) < number)

    def decided_twice(self, loops: Sequence[Loop]) -> set[int]:
        """Return the decisions about values that several loops decide about: each loop would use values of a separate
        run, and the results of these decisions would be inconsistent.
        """
        of_a_run = self.program.of_a_run
        decided = ({a for i in of_a_run.keys() & loop.keys() for a in self._operands(i)} for loop in loops)
        about = Counter(itertools.chain.from_iterable(decided))
        split = {a for a, count in about.items() if count > 1}
        return {i for i in of_a_run if not split.isdisjoint(self._operands(i))}

    def _operands(self, i: int) -> list[jex.Var]:
        return _compat.variables(self.program.eqns[i].invars)


def _flops(program: Readers, indices: Collection[int]) -> float:
    return sum(eqn_flops(program.eqns[i]) for i in indices)
