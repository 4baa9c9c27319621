"""Flat equations -> a set of them that falls apart into rows alike, about a large value.

What a language model's head makes of a token (logits over the vocabulary, their exponentials, the gradient of both)
depends on that token alone; what it leaves, a loss per token and gradients of weights that are sums over tokens, is
small. Such a *region* grows from a large value in both directions as long as what is made or read is large too, and is
a few products of matrices and what is between them, not the whole step. `_row_chunks` does it chunk after chunk.

Law: no result of a region is read by what it reads itself; a sum over rows is read by none of its equations; what
runs once is in none, and keeps its order around it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

import jax.extend.core as jex

from .._model._device_specs import DeviceSpec
from .._program import _compat
from .._program._axes import Way, agree, ways
from .._program._flops import aval_nbytes
from .._program._primitives import is_contraction, is_draw, is_heavy, runs_once

LARGE = 1 / 16
"""What a region must not hand on is at least this share of the value that it grows from."""

LEAST_NBYTES = 1 << 20
"""It grows from no smaller value: chunks of that would be kernels of a few microseconds."""

PRODUCTS = 6
"""It has no more contractions: those of two layers, with the gradients of their operands."""

SEEDS = 3
"""So many of the largest values are tried."""

CHUNKS = (2, 4, 8, 16)
"""Of the numbers of chunks that divide the rows the nearest to these are considered."""

ENOUGH = 8
"""Of the dimensions that rows may be of, the outermost is taken that allows so many chunks."""


@dataclass(frozen=True)
class Region:
    """Equations of a program that fall apart into rows alike.

    **Fields:** `ways` of its equations, by index; `rows` that any number of chunks must divide; `inner_nbytes` of what
    it neither reads nor leaves; `sum_nbytes` of its sums; `read_nbytes` of what each chunk reads whole; `kernels` about
    how many it takes; `source` the user's line; `whole` whether it is most of a step, see `_microbatches`; `parts` in
    how many pieces its rows lie, each on devices of its own, 0 where they may not be done in chunks there: a chunk has
    rows of every part; `sent_nbytes` of what these devices send each other for each chunk.
    """

    ways: Mapping[int, Way]
    rows: int
    inner_nbytes: int
    sum_nbytes: int
    read_nbytes: int
    kernels: int
    source: str
    whole: bool = False
    parts: int = 1
    sent_nbytes: int = 0

    def on_devices(self, parts: int, share: float) -> "Region":
        """The same of rows that lie in so many parts: they add up their sums, and gather what they read whole.

        **Arguments:** `share` of what is the same for all rows that a device has.
        """
        return replace(
            self,
            parts=parts,
            inner_nbytes=self.inner_nbytes // max(parts, 1),
            sum_nbytes=int(share * self.sum_nbytes),
            read_nbytes=int(share * self.read_nbytes),
            sent_nbytes=self.sum_nbytes * (parts > 1) + self.read_nbytes * (share < 1),
        )

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """Numbers of chunks, in ascending order."""
        rows = self.rows // self.parts if self.parts and self.rows % self.parts == 0 else 0
        able = [n for n in range(2, min(rows, 4 * CHUNKS[-1]) + 1) if rows % n == 0]
        return tuple(sorted({min(able, key=lambda n: abs(n - wanted)) for wanted in CHUNKS if able}))

    def fewer_nbytes(self, chunks: int) -> int:
        """What so many chunks may save at most."""
        return self.inner_nbytes - self.inner_nbytes // chunks

    def more_seconds(self, chunks: int, device: DeviceSpec) -> float:
        """What so many chunks take longer: sums are read and written for each, what is read whole is read again,
        devices send it again, and kernels are launched.
        """
        nbytes = (3 * chunks - 1) * self.sum_nbytes + (chunks - 1) * self.read_nbytes
        again = self.kernels * device.launch_seconds + self.sent_nbytes / device.link
        return nbytes / device.bandwidth + (chunks - 1) * again


def regions(closed: jex.ClosedJaxpr) -> tuple[Region, ...]:
    """That about the largest value that has one; none where it is not worth it."""
    program = Readers(closed)
    for v in program.largest(SEEDS):
        grown = (program.grown(v, d) for d in range(len(v.aval.shape)))
        able = [region for region in grown if region is not None and region.choices]
        if able:
            enough = (region for region in able if region.choices[-1] >= ENOUGH)
            return (next(enough, max(able, key=lambda region: region.fewer_nbytes(region.choices[-1]))),)
    return ()


class Readers:
    """Who makes and reads what, of the equations that anything needs."""

    def __init__(self, closed: jex.ClosedJaxpr):
        jaxpr = closed.jaxpr
        self.eqns = jaxpr.eqns
        self.returned = set(_compat.variables(jaxpr.outvars))
        needed = set(self.returned)
        alive: list[int] = []
        for i in reversed(range(len(self.eqns))):
            if self.eqns[i].effects or not needed.isdisjoint(self.eqns[i].outvars):
                alive.append(i)
                needed.update(_compat.variables(self.eqns[i].invars))
        self.alive = alive[::-1]
        self.maker = {v: i for i in self.alive for v in self.eqns[i].outvars}
        self.readers: dict[Any, list[int]] = {}
        for i in self.alive:
            for a in dict.fromkeys(_compat.variables(self.eqns[i].invars)):
                self.readers.setdefault(a, []).append(i)

    def largest(self, count: int) -> list[Any]:
        """So many of the largest values that may stay within a region, of different shapes."""
        sized = sorted(
            ((aval_nbytes(v.aval), -i, v) for i in self.alive for v in self.eqns[i].outvars),
            key=lambda each: each[:2],
            reverse=True,
        )
        found: dict[Any, Any] = {}
        for nbytes, _, v in sized:
            if nbytes < LEAST_NBYTES or len(found) == count:
                break
            if self.inner(v):
                found.setdefault(v.aval.shape, v)
        return list(found.values())

    def inner(self, v: Any) -> bool:
        """Whether a value may stay within a region."""
        return v not in self.returned and v in self.maker and bool(getattr(v.aval, "shape", ()))

    def grown(self, seed: Any, dimension: int) -> Region | None:
        """The region about a value with its rows in this dimension, if there is one."""
        grower = Grower(self, LARGE * aval_nbytes(seed.aval))
        return grower.region() if grower.grow(seed, dimension) else None


class Grower:
    """A region as it grows: the `ways` of its equations, the dimension of the rows of what these read and make, and the
    `sums` over rows.

    **Arguments:** `above` the size of what it must not hand on; `most_products` that it may have.
    """

    def __init__(self, program: Readers, above: float, most_products: float = PRODUCTS):
        self.program, self.above, self.most_products = program, above, most_products
        self.ways: dict[int, Way] = {}
        self.dimension: dict[Any, int | None] = {}
        self.sums: set[Any] = set()
        self.products = 0
        # What is to stay within, and whose maker and readers are not in the region yet.
        self.large: list[Any] = []

    def grow(self, seed: Any, dimension: int) -> bool:
        """Whether that ended in a region."""
        program = self.program
        self.dimension[seed] = dimension
        self.large.append(seed)
        while True:
            while self.large:
                v = self.large.pop()
                near = [program.maker[v], *program.readers.get(v, ())]
                for i in near:
                    if i not in self.ways and not self._add(i) and v is seed:
                        return False
                if self.products > self.most_products:
                    return False
            between = self._between()
            if not between:
                break
            left = [i for i in between if i not in self.ways and not self._add(i)]
            if left and not self.done_before(left):
                return False
        return self.closes()

    def done_before(self, indices: Sequence[int]) -> bool:
        """Whether equations that stand between those of the region may be done before it."""
        return not indices

    def closes(self) -> bool:
        """Whether what has grown can be done in chunks."""
        return not self.sums_read()

    def sums_read(self) -> set[Any]:
        """The sums over rows that equations of the region read, but to add them to others."""
        readers = (self.program.eqns[i] for i, way in self.ways.items() if not way.linear)
        return {a for eqn in readers for a in _compat.variables(eqn.invars) if a in self.sums}

    def _add(self, i: int) -> bool:
        """Add an equation, if its rows are where they are known to be."""
        eqn = self.program.eqns[i]
        atoms = [*eqn.invars, *eqn.outvars]
        for way in self.ways_of(eqn):
            both = list(zip(atoms, (*way.operands, *way.results), strict=True))
            placed = [(a, d) for a, d in both if not _compat.is_literal(a)]
            known = [(d, self.dimension[a]) for a, d in placed if a in self.dimension]
            if any(d is not None for d, _ in known) and all(d == at for d, at in known) and agree(placed):
                break
        else:
            return False
        self.products += is_contraction(eqn)
        self.ways[i] = way
        self.sums.update(v for v, is_sum in zip(eqn.outvars, way.sums, strict=True) if is_sum)
        for a, d in placed:
            if a not in self.dimension:
                self.dimension[a] = d
                if d is not None and aval_nbytes(a.aval) >= self.above and self.program.inner(a):
                    self.large.append(a)
        return True

    def ways_of(self, eqn: Any) -> Iterable[Way]:
        """The ways that are looked at of an equation; none of draws, which are made before, all at once."""
        return () if is_draw(eqn) else ways(eqn)

    def _between(self) -> list[int]:
        """The equations that read, if only through others, what the region makes, and make what it reads."""
        eqns, maker = self.program.eqns, self.program.maker
        first, last = min(self.ways), max(self.ways)
        near = [i for i in self.program.alive if first <= i <= last]
        behind: set[int] = set()
        for i in near:
            makers = (maker.get(a, -1) for a in _compat.variables(eqns[i].invars))
            if any(j in self.ways or j in behind for j in makers):
                behind.add(i)
        before: set[int] = set()
        for i in reversed(near):
            if i in self.ways or i in before:
                before.update(maker.get(a, -1) for a in _compat.variables(eqns[i].invars))
        return sorted(i for i in behind & before if i not in self.ways)

    def region(self) -> Region | None:
        """What has grown; None where its being done at once would move an equation that runs once past another."""
        eqns = self.program.eqns
        before, after = surroundings(self.program, self.ways)
        last = max((i for i in before if runs_once(eqns[i])), default=-1)
        if any(i < last and runs_once(eqns[i]) for i in after):
            return None
        reads, leaves = edges(self.program, self.ways)
        made = {v for i in self.ways for v in eqns[i].outvars}
        sizes = [a.aval.shape[d] for a, d in self.dimension.items() if d is not None]
        inner = made.difference(leaves)
        largest = max((a for a in made), key=lambda a: aval_nbytes(a.aval))
        return Region(
            ways=dict(sorted(self.ways.items())),
            rows=gcd(*sizes, *(way.groups for way in self.ways.values())),
            inner_nbytes=sum(aval_nbytes(a.aval) for a in inner),
            sum_nbytes=sum(aval_nbytes(a.aval) for a in leaves if self.dimension[a] is None),
            read_nbytes=sum(aval_nbytes(a.aval) for a in reads if self.dimension[a] is None),
            kernels=sum(is_heavy(eqns[i]) for i in self.ways),
            source=_compat.user_line(eqns[self.program.maker[largest]]),
        )


def surroundings(program: Readers, members: Collection[int]) -> tuple[list[int], list[int]]:
    """The equations that stand before these, where they are done at once, and those that stand behind them."""
    eqns, last = program.eqns, max(members)
    before, behind = list[int](), list[int]()
    late = {v for i in members for v in eqns[i].outvars}
    for i in program.alive:
        if i in members:
            continue
        if i > last or not late.isdisjoint(_compat.variables(eqns[i].invars)):
            behind.append(i)
            late.update(eqns[i].outvars)
        else:
            before.append(i)
    return before, behind


def edges(program: Readers, members: Collection[int]) -> tuple[list[Any], list[Any]]:
    """What equations read of others, and what others read of them."""
    eqns = program.eqns
    made = {v for i in members for v in eqns[i].outvars}
    reads = dict.fromkeys(a for i in members for a in _compat.variables(eqns[i].invars) if a not in made)
    leaves = [
        v
        for i in members
        for v in eqns[i].outvars
        if v in program.returned or any(j not in members for j in program.readers.get(v, ()))
    ]
    return list(reads), leaves
