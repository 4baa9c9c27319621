"""Flat equations -> a set of them that falls apart into rows alike, about a large value.

What a language model's head makes of a token (logits over the vocabulary, their exponentials, the gradient of both)
depends on that token alone; what it leaves, a loss per token and gradients of weights that are sums over tokens, is
small. Such a *region* grows from a large value in both directions as long as what is made or read is large too, and is
a few products of matrices and what is between them, not the whole step. `_row_chunks` does it chunk after chunk.

Law: no result of a region is read by what it reads itself; a sum over rows is read by none of its equations; what
runs once is in none, and keeps its order around it.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

import jax.extend.core as jex

from .._model._device_specs import DeviceSpec
from .._program import _compat
from .._program._axes import BatchingRule, agree, rules
from .._program._flops import alone_seconds, aval_nbytes
from .._program._primitives import is_contraction, is_draw, is_fusion_root, runs_once
from ._program_readers import Readers
from ._region_loops import Loop, handed_on, owners, schedule

LARGE = 1 / 16
"""What a region must not hand on is at least this share of the value that it grows from."""

LEAST_NBYTES = 4 << 20
"""It keeps no less than this to itself: chunks of that would be kernels of a few microseconds."""

AT_ONCE = 8
"""One that is most of a step keeps so many times that, for no more than such a share of it is in memory at once."""

PRODUCTS = 6
"""It has no more contractions: those of two layers, with the gradients of their operands."""

SEEDS = 3
"""So many of the largest values are tried, ..."""

SEED = 1 / 8
"""... of at least this share of the largest of all."""

CHUNKS = (2, 4, 8, 16)
"""Of the numbers of chunks that divide the rows the nearest to these are considered."""

ENOUGH = 8
"""Of the dimensions that rows may be of, the outermost is taken that allows so many chunks."""


@dataclass(frozen=True)
class Region:
    """Equations of a program that fall apart into rows alike.

    **Fields:** the `loops` over chunks that do them, in order; `rows` that any number of chunks must divide;
    `inner_nbytes` of what it neither reads nor leaves; `left_nbytes` of the rows that it leaves; `sum_nbytes` of its
    sums; `read_nbytes` of what each chunk reads whole; `kernels` about how many it takes; `source` the user's line;
    `whole` whether it is most of a step, see `_microbatches`; `parts` in how many pieces its rows lie, each on devices
    of its own, 0 where they may not be done in chunks there: a chunk has rows of every part; `sent_nbytes` of what
    these devices send each other for each chunk; `repeated` the equations that loops do once more.
    """

    loops: tuple[Loop, ...]
    rows: int
    inner_nbytes: int
    left_nbytes: int
    sum_nbytes: int
    read_nbytes: int
    kernels: int
    source: str
    whole: bool = False
    parts: int = 1
    sent_nbytes: int = 0
    repeated: tuple[Any, ...] = ()

    @cached_property
    def rules(self) -> Loop:
        """The ways of all its equations, by index."""
        return {i: rule for loop in self.loops for i, rule in loop.items()}

    def on_devices(self, parts: int, share: float) -> "Region":
        """Return the same of rows that lie in so many parts: they add up their sums, and gather what they read whole.

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
        """Return what so many chunks may save at most."""
        return self.inner_nbytes - self.inner_nbytes // chunks

    def more_seconds(self, chunks: int, device: DeviceSpec) -> float:
        """Return what so many chunks take longer: sums are read and written for each, what is read whole is read
        again, devices send it again, kernels are launched, and loops repeat some of them.
        """
        nbytes = (3 * chunks - 1) * self.sum_nbytes + (chunks - 1) * self.read_nbytes
        again = self.kernels * device.launch_seconds + self.sent_nbytes / device.link
        repeated = math.fsum(alone_seconds(device, eqn) for eqn in self.repeated if is_fusion_root(eqn))
        return nbytes / device.bandwidth + (chunks - 1) * again + repeated


def regions(closed: jex.ClosedJaxpr) -> tuple[Region, ...]:
    """Return that about the largest value that has one; none where it is not worth it."""
    program = Readers(closed)
    for v in largest(program, SEEDS):
        grown = (region_about(program, v, d) for d in range(len(v.aval.shape)))
        able = [region for region in grown if region is not None and region.choices]
        if able:
            enough = (region for region in able if region.choices[-1] >= ENOUGH)
            return (next(enough, max(able, key=lambda region: region.fewer_nbytes(region.choices[-1]))),)
    return ()


def largest(program: Readers, count: int, without: Collection[int] = ()) -> list[Any]:
    """Return so many of the largest values that may stay within a region, of different shapes and not much smaller.

    **Arguments:** `without` those that these equations make.
    """
    sized = sorted(
        (
            (-aval_nbytes(v.aval), i, v)
            for i in program.alive
            if i not in without
            for v in program.eqns[i].outvars
        ),
        key=lambda each: each[:2],
    )
    found: dict[Any, Any] = {}
    for _, _, v in sized:
        if len(found) == count:
            break
        if program.inner(v):
            found.setdefault(v.aval.shape, v)
    least = SEED * max(map(_nbytes, found.values()), default=0)
    return [v for v in found.values() if _nbytes(v) >= least]


def _nbytes(v: jex.Var) -> int:
    return aval_nbytes(v.aval)


def region_about(program: Readers, seed: Any, dimension: int) -> Region | None:
    """Return the region about a value with its rows in this dimension, if there is one."""
    grower = Grower(program, LARGE * aval_nbytes(seed.aval))
    return region_of(program, (dict(sorted(grower.rules.items())),)) if grower.grow(seed, dimension) else None


def region_of(program: Readers, loops: Sequence[Loop], *, whole: bool = False) -> Region | None:
    """Return what these loops do; None where it is too little, or where an equation that runs once would pass
    another.

    **Arguments:** `whole` whether it is most of a step.
    """
    eqns, order = program.eqns, schedule(program, loops)
    if order is None:
        return None
    once = [i for i in order if i >= 0 and runs_once(eqns[i])]
    if once != sorted(once):
        return None
    dimension: dict[Any, int | None] = {}
    sizes: set[int] = set()
    for loop in loops:
        for i, rule in loop.items():
            sizes.add(rule.groups)
            for a, d in zip(
                (*eqns[i].invars, *eqns[i].outvars), (*rule.operands, *rule.results), strict=True
            ):
                if not _compat.is_literal(a):
                    dimension[a] = d if dimension.get(a) is None else dimension[a]
                    sizes.add(a.aval.shape[d] if d is not None else 0)
    first = owners(loops)
    made = {v for i in first for v in eqns[i].outvars}
    leaves = {v for number in range(len(loops)) for v in handed_on(program, loops, number)}
    inner = made - leaves
    read = {a for i in first for a in _compat.variables(eqns[i].invars)} - made
    inner_nbytes = sum(aval_nbytes(a.aval) for a in inner)
    if inner_nbytes < (AT_ONCE if whole else 1) * LEAST_NBYTES:
        return None
    most = max(first, key=lambda i: max(aval_nbytes(v.aval) for v in eqns[i].outvars))
    return Region(
        loops=tuple(loops),
        rows=gcd(*sizes),
        inner_nbytes=inner_nbytes,
        left_nbytes=sum(aval_nbytes(a.aval) for a in leaves if dimension[a] is not None),
        sum_nbytes=sum(aval_nbytes(a.aval) for a in leaves if dimension[a] is None),
        read_nbytes=sum(aval_nbytes(a.aval) for a in read if dimension[a] is None),
        kernels=sum(is_fusion_root(eqns[i]) for loop in loops for i in loop),
        source=_compat.user_line(eqns[most]),
        whole=whole,
        repeated=tuple(eqns[i] for number, loop in enumerate(loops) for i in loop if first[i] != number),
    )


class Grower:
    """A region as it grows: the `rules` of its equations, the dimension of the rows of what these read and make, and
    the `sums` over rows.

    **Arguments:** `above` the size of what it must not hand on; `most_products` that it may have.
    """

    def __init__(self, program: Readers, above: float, most_products: float = PRODUCTS):
        self.program, self.above, self.most_products = program, above, most_products
        self.rules: dict[int, BatchingRule] = {}
        self.dimension: dict[Any, int | None] = {}
        self.sums: set[Any] = set()
        self.products = 0
        # What is to stay within, and whose maker and readers are not in the region yet.
        self.large: list[Any] = []

    def grow(self, seed: Any, dimension: int) -> bool:
        """Return whether that ended in a region."""
        self.dimension[seed] = dimension
        self.large.append(seed)
        while self.spread(seed):
            between = self._between()
            if not between:
                return not self.sums_read()
            if not all(list(map(self._add, between))):
                return False
        return False

    def spread(self, seed: Any) -> bool:
        """Add what makes and reads the large values, and so on; whether those of the seed could be added, and no more
        products than there may be.
        """
        program = self.program
        while self.large:
            v = self.large.pop()
            for i in (program.maker[v], *program.readers.get(v, ())):
                if i not in self.rules and not self._add(i) and v is seed:
                    return False
        return self.products <= self.most_products

    def sums_read(self) -> set[Any]:
        """Return the sums over rows that equations of the region read, but to add them to others."""
        readers = (self.program.eqns[i] for i, rule in self.rules.items() if not rule.linear)
        return {a for eqn in readers for a in _compat.variables(eqn.invars) if a in self.sums}

    def _add(self, i: int) -> bool:
        """Add an equation, if its rows are where they are known to be."""
        eqn = self.program.eqns[i]
        atoms = [*eqn.invars, *eqn.outvars]
        for rule in self.batching_rules_of(eqn):
            both = list(zip(atoms, (*rule.operands, *rule.results), strict=True))
            placed = [(a, d) for a, d in both if not _compat.is_literal(a)]
            known = [(d, self.dimension[a]) for a, d in placed if a in self.dimension]
            if any(d is not None for d, _ in known) and all(d == at for d, at in known) and agree(placed):
                break
        else:
            return False
        self.products += is_contraction(eqn)
        self.rules[i] = rule
        self.sums.update(v for v, is_sum in zip(eqn.outvars, rule.sums, strict=True) if is_sum)
        for a, d in placed:
            if a not in self.dimension:
                self.dimension[a] = d
                if d is not None and aval_nbytes(a.aval) >= self.above and self.program.inner(a):
                    self.large.append(a)
        return True

    def batching_rules_of(self, eqn: jex.JaxprEqn) -> Iterable[BatchingRule]:
        """Return the ways that are looked at of an equation; none of draws, which are made before, all at once."""
        return () if is_draw(eqn) else rules(eqn)

    def _between(self) -> list[int]:
        """Return the equations that read, if only through others, what the region makes, and make what it reads."""
        eqns, maker = self.program.eqns, self.program.maker
        first, last = min(self.rules), max(self.rules)
        near = [i for i in self.program.alive if first <= i <= last]
        behind: set[int] = set()
        for i in near:
            makers = (maker.get(a, -1) for a in _compat.variables(eqns[i].invars))
            if any(j in self.rules or j in behind for j in makers):
                behind.add(i)
        before: set[int] = set()
        for i in reversed(near):
            if i in self.rules or i in before:
                before.update(maker.get(a, -1) for a in _compat.variables(eqns[i].invars))
        return sorted(i for i in behind & before if i not in self.rules)
