"""Flat equations -> a set of them that falls apart into rows alike, about a large value.

What a language model's head makes of a token (logits over the vocabulary, their exponentials, the gradient of both)
depends on that token alone; what it leaves, a loss per token and gradients of weights that are sums over tokens, is
small. Such a *region* grows from a large value in both directions as long as what is made or read is large too, and is
a few products of matrices and what is between them, not the whole step. `_row_chunks` does it chunk after chunk.

What waits for work elsewhere, as the gradient of a layer's messages does for the layers behind it, is in a loop of its
own, which computes once more what it reads of the first: see `_region_loops`. Regions share no equation.

Law: no result of a loop is read by what it reads itself; a sum over rows is read by none of its equations; what runs
once is in none, and keeps its order around it.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._axes import (
    OF_SUM,
    OF_SUMS,
    BatchingRule,
    agree,
    joined,
    rules,
    sum_type,
)
from .._program._compat import shaped
from .._program._flops import aval_nbytes, body_nbytes, eqn_flops
from .._program._primitives import contracts, is_backward, is_draw, is_fusion_root, is_relabelling, runs_once
from .._program._windows import WindowRule, windows
from ._halos import in_parts
from ._program_readers import Readers
from ._region_loops import USUAL, WIDE, Limits, Loop, goes_on, handed_on, loops_of, owners, schedule
from ._regions import Region
from ._row_scans import Around, BodyBatchingRule, ways

LARGE = 1 / 16
"""What a region must not hand on is at least this share of the value that it grows from."""

LEAST_NBYTES = 1 << 19
"""It keeps no less than this to itself. Whether more is worth a loop, its price says. In a step of 450 KiB of
temporaries the model gives chunks 12 % and recomputation 19 %, but by the compiled kernels they take 20 % and 19 %."""

AT_ONCE = 8
"""One that is most of a step keeps so many times that, for no more than such a share of it is in memory at once."""

LITTLE_WORK = 1 / 32
"""Contractions of at most this share of the largest one's operations do not count, as of adapters of low rank."""

FEW = 1 / 32
"""What sums over the rows are made of that the region itself reads is at most this share of all that the step makes."""

HANDED = 1 / 4
"""It hands on no more than this share of what it keeps to itself and kernels write to memory."""

REGIONS = 16
"""There are no more regions of a step."""

SEEDS = 3
"""So many of the largest values of different shapes are tried for each, ..."""

SEED = 1 / 8
"""... of at least this share of the largest of all."""

ENOUGH = 8
"""Of the dimensions that rows may be of, the outermost is taken that allows so many chunks."""


def regions(program: Readers, outside: Collection[int] = ()) -> tuple[Region, ...]:
    """Return those about the largest values that have one, in the order of these; none where it is not worth it.

    They share no equation, and any of them can be done in chunks together. None is about what loops alone read: of
    what they stack it is the loops' forms that decide, and of a long sequence that is many times larger than all else.

    **Arguments:** `outside` equations that are in none.
    """
    if found := _regions(program, outside, USUAL):
        return found
    return _regions(program, outside, WIDE)


def _regions(program: Readers, outside: Collection[int], limits: Limits) -> tuple[Region, ...]:
    """Return those within these limits."""
    able = (i for i in program.alive if i not in outside and i not in program.for_loops)
    made = [v for i in able for v in program.eqns[i].outvars if program.inner(v)]
    least = max(SEED * max(map(_nbytes, made), default=0), LEAST_NBYTES / 8)
    found: list[Region] = []
    taken = set(outside)
    while len(found) < REGIONS:
        seeds = (v for v in largest(program, SEEDS, taken | program.for_loops) if _nbytes(v) >= least)
        region = next(filter(None, (_best_about(program, v, taken, limits) for v in seeds)), None)
        if region is None:
            break
        if schedule(program, [loop for each in (*found, region) for loop in each.loops]) is None:
            break
        found.append(region)
        taken.update(region.rules)
    return tuple(found)


def _best_about(program: Readers, v: jex.Var, taken: Collection[int], limits: Limits) -> Region | None:
    """Return the region about a value whose rows are of the outermost dimension that allows enough chunks: with all
    that follows on the same rows, as the layers behind an attention do, or, where that is too much for one, without.
    """
    able, dimensions = list[Region](), list(range(len(shaped(v).shape)))
    above = LARGE * aval_nbytes(v.aval)
    for within_passes in (False, True):
        growers = [
            Grower(program, taken, above, limits.most_products, within_passes=within_passes)
            for _ in dimensions
        ]
        grown = (
            region_about(program, each, v, d, limits) for each, d in zip(growers, dimensions, strict=True)
        )
        able += [region for region in grown if region is not None and region.choices]
        if enough := [region for region in able if region.choices[-1] >= ENOUGH]:
            return enough[0]
        dimensions = [d for each, d in zip(growers, dimensions, strict=True) if each.follows]
    return max(able, key=lambda region: region.fewer_nbytes(region.choices[-1]), default=None)


def largest(program: Readers, count: int, without: Collection[int] = ()) -> list[Any]:
    """Return so many of the largest values that may stay within a region, of different shapes and not much smaller.

    **Arguments:** `without` those that these equations make.
    """
    made = [(i, v) for i in program.alive if i not in without for v in program.eqns[i].outvars]
    sized = sorted(made, key=lambda each: (-_nbytes(each[1]), each[0]))
    found: dict[Any, Any] = {}
    for _, v in sized:
        if len(found) == count:
            break
        if program.inner(v):
            found.setdefault(shaped(v).shape, v)
    least = SEED * max(map(_nbytes, found.values()), default=0)
    return [v for v in found.values() if _nbytes(v) >= least]


def _nbytes(v: jex.Var) -> int:
    return aval_nbytes(v.aval)


def region_about(
    program: Readers, grower: "Grower", seed: jex.Var, dimension: int, limits: Limits
) -> Region | None:
    """Return the region that grows about a value with its rows in this dimension, if there is one."""
    if not grower.grow(seed, dimension) or (loops := loops_of(program, [grower], limits)) is None:
        return None
    first = owners(loops)
    products = Counter(first[i] for i in large_products(program, first))
    if max(products.values(), default=0) > limits.products:
        return None
    roots = (program.eqns[i] for i in first if is_fusion_root(program.eqns[i]))
    written = {v for eqn in roots for v in (*_compat.variables(eqn.invars), *eqn.outvars)}
    handed = {v for number in range(len(loops)) for v in handed_on(program, loops, number)}
    kept = sum(_nbytes(v) for v in written - handed if program.maker.get(v) in first)
    worthwhile = sum(map(_nbytes, handed)) <= HANDED * kept
    return region_of(program, loops) if worthwhile else None


def large_products(program: Readers, indices: Iterable[int]) -> list[int]:
    """Return the contractions among some equations that are not little work beside the largest."""
    flops = {i: eqn_flops(program.eqns[i]) for i in indices if contracts(program.eqns[i])}
    least = LITTLE_WORK * max(flops.values(), default=0)
    return [i for i, each in flops.items() if each > least]


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
                    sizes.add(shaped(a).shape[d] if d is not None else 0)
    first = owners(loops)
    rules = [rule for loop in loops for rule in loop.values()]
    windowed = any(isinstance(rule, WindowRule) for rule in rules)
    around = in_parts(program, loops) if windowed else None
    if windowed and around is None:
        return None
    made = {v for i in first for v in eqns[i].outvars}
    leaves = {v for number in range(len(loops)) for v in handed_on(program, loops, number)}
    inner = made - leaves
    read = {a for i in first for a in _compat.variables(eqns[i].invars)} - made
    inner_nbytes = sum(map(_nbytes, inner)) + sum(body_nbytes(eqns[i]) for i in first)
    if inner_nbytes < (AT_ONCE if whole else 1) * LEAST_NBYTES:
        return None
    most = max(first, key=lambda i: max(aval_nbytes(v.aval) for v in eqns[i].outvars))
    return Region(
        loops=tuple(loops),
        rows=gcd(*sizes) if around is None else around[0],
        inner_nbytes=inner_nbytes,
        left_nbytes=sum(aval_nbytes(a.aval) for a in leaves if dimension[a] is not None),
        sum_nbytes=sum(aval_nbytes(a.aval) for a in leaves if dimension[a] is None),
        read_nbytes=sum(aval_nbytes(a.aval) for a in read if dimension[a] is None),
        kernels=sum(is_fusion_root(eqns[i]) for loop in loops for i in loop),
        source=_compat.user_line(eqns[most]),
        whole=whole,
        loop=program.scopes[most],
        uneven=not any(any(rule.sums) for rule in rules if isinstance(rule, BodyBatchingRule)),
        windowed=windowed,
        halos=around[1] if around else (),
        repeated=tuple(
            eqns[i] for number, loop in enumerate(loops) for i in loop if first.get(i, number) != number
        ),
    )


class Grower:
    """A region as it grows: the `rules` of its equations, the `dimension` of the rows of what these read and make, the
    `sums` over rows, and the number of `products`.

    **Arguments:** `taken` the equations of other regions; `above` the size of what it must not hand on; `most_products`
    that it may have; `scans` whether scans may be among them, `windowed` whether what reads rows around its own;
    `within_passes` whether what is between its forward and its backward pass stays out of it.
    """

    def __init__(
        self,
        program: Readers,
        taken: Collection[int] = (),
        above: float = 0,
        most_products: float = math.inf,
        *,
        scans: bool = False,
        windowed: bool = False,
        within_passes: bool = False,
    ):
        self.scans, self.windowed, self.within_passes = scans, windowed, within_passes
        self.follows = False  # whether it has what is between its forward and its backward pass
        self.program, self.taken, self.above, self.most_products = program, taken, above, most_products
        made = sum(aval_nbytes(v.aval) for i in program.alive for v in program.eqns[i].outvars)
        self.few_nbytes = FEW * made
        self.rules: dict[int, BatchingRule] = {}
        self.dimension: dict[Any, int | None] = {}
        self.sums: set[Any] = set()
        self.products = 0
        self.early: set[int] = set()  # what is done before
        self.waited: set[int] = set()  # what is done between its loops
        self.scope = -1  # the loop, or pair of loops, of all its equations
        # What is to stay within, and whose maker and readers are not in the region yet.
        self.large: list[Any] = []

    def grow(self, seed: jex.Var, dimension: int) -> bool:
        """Grow as far as rows and large values go; whether that ended in a region.

        What reads the region and is read by it, and has no such rows, is waited for: see `_region_loops`.
        """
        self.scope = self.program.scopes[self.program.maker[seed]]
        self.dimension[seed] = dimension
        self.large.append(seed)
        while True:
            if not self._spread(seed) or not self.rules:
                return False
            between = self._between(self.rules)
            known = dict(self.rules), dict(self.dimension), set(self.sums), self.products
            passes = self._between_passes(between)
            left = [i for i in between if (self.within_passes and i in passes) or not self._add(i)]
            self.follows = self.follows or not passes.issubset(left)
            if not self.scans and not self.waited.issuperset(left):
                # Layers are no part of the region around one of them, of which they read a sum.
                self.rules, self.dimension, self.sums, self.products = known
                self.large.clear()
                self.waited.update(left)
                continue
            if len(left) < len(between):
                continue
            left += [*self.waited, *(self.program.maker[a] for a in self._sums_read())]
            much, little = self._of_much(), set[int]()
            if not [i for i in left if self._done_before(i, much, little)]:  # the others are waited for
                self._copy()
                return bool(self.rules)
            self.waited.clear()

    @property
    def largest_nbytes(self) -> int:
        """The bytes of its largest value."""
        return max(aval_nbytes(v.aval) for i in self.rules for v in self.program.eqns[i].outvars)

    def with_sums(self, indices: Collection[int]) -> list[int]:
        """Add the equations that add up sums which some of its equations make, or make another form of one, and those
        that join rows of theirs (see `JOINS`); return which these are.
        """
        eqns, found = self.program.eqns, list[int]()
        own = {v for i in indices for v in eqns[i].outvars}
        made = own & self.sums
        for i in self.program.alive:
            if i in self.rules or i in self.taken:
                continue
            if (join := self._of_rows(eqns[i], own)) is not None:
                self.rules[i] = join
                self.dimension[eqns[i].outvars[0]] = None
                found.append(i)
                continue
            if (rule := self._of_sums(eqns[i], made)) is None:
                continue
            (total,) = eqns[i].outvars
            self.rules[i] = rule
            self.dimension[total] = None
            self.sums.add(total)
            made.add(total)
            found.append(i)
        return found

    def _spread(self, seed: jex.Var) -> bool:
        """Add what makes and reads the large values, and so on; whether those of the seed could be added, and no more
        products than there may be.
        """
        program = self.program
        while self.large:
            v = self.large.pop()
            near = (program.maker[v], *program.readers.get(v, ())) if not self._is_copied(v) else ()
            for i in near:
                if i not in self.rules and not self._add(i) and v is seed:
                    return False
        most = self.most_products
        return self.products <= most or len(large_products(program, self.rules)) <= most

    def _is_copied(self, v: jex.Var) -> bool:
        """Return whether a value is merely repeated from a smaller one: several regions, and others, may read it, and
        each chunk makes its part.
        """
        i = self.program.maker.get(v, -1)
        if i < 0 or self.scans or self.program.eqns[i].primitive.name != "broadcast_in_dim":
            return False
        return sum(aval_nbytes(shaped(a)) for a in self.program.eqns[i].invars) < aval_nbytes(v.aval)

    def _copy(self) -> None:
        """Add what repeats smaller values for the region."""
        eqns, maker = self.program.eqns, self.program.maker
        read = dict.fromkeys(a for i in self.rules for a in _compat.variables(eqns[i].invars))
        for v in [a for a in read if self.dimension[a] is not None and self._is_copied(a)]:
            i = maker[v]
            if i in self.rules:
                continue
            for rule in rules(eqns[i]):
                operands = zip(_compat.variables(eqns[i].invars), rule.operands, strict=False)
                if rule.results == (self.dimension[v],) and all(
                    self.dimension.get(a, d) == d for a, d in operands
                ):
                    self.rules[i] = replace(rule, copied=True)
                    self.dimension.update(zip(_compat.variables(eqns[i].invars), rule.operands, strict=False))
                    break

    def _sums_read(self) -> list[jex.Var]:
        """Return the sums over rows that equations of the region read, but to add them to others."""
        readers = (self.program.eqns[i] for i, rule in self.rules.items() if not rule.linear)
        read = (a for eqn in readers for a in _compat.variables(eqn.invars) if a in self.sums)
        return list(dict.fromkeys(read))

    def _add(self, i: int) -> bool:
        """Add an equation, if its rows are where they are known to be."""
        program = self.program
        if i in self.early or i in self.taken or program.scopes[i] != self.scope:
            return False
        if (
            program.differentiable and i in program.drawn
        ):  # a mask is smaller than the bits that it is made of
            return False
        eqn = self.program.eqns[i]
        atoms = [*eqn.invars, *eqn.outvars]
        for rule in self._rules_of(eqn):
            both = list(zip(atoms, (*rule.operands, *rule.results), strict=True))
            placed = [(a, d) for a, d in both if not _compat.is_literal(a)]
            known = [(d, self.dimension[a]) for a, d in placed if a in self.dimension]
            if any(d is not None for d, _ in known) and all(d == at for d, at in known) and agree(placed):
                break
        else:
            return False
        self.products += contracts(eqn)
        self.rules[i] = rule
        self.sums.update(v for v, is_sum in zip(eqn.outvars, rule.sums, strict=True) if is_sum)
        for a, d in placed:
            if a not in self.dimension:
                self.dimension[a] = d
                if d is not None and aval_nbytes(a.aval) >= self.above and self.program.inner(a):
                    self.large.append(a)
        return True

    def _rules_of(self, eqn: jex.JaxprEqn) -> Iterable[BatchingRule]:
        """Return the ways that are looked at of an equation; none of draws, which are made before, all at once."""
        if is_draw(eqn) or (eqn.primitive.name in ("scan", "while") and not self.scans):
            return ()
        eqns, maker = self.program.eqns, self.program.maker
        if self.windowed:
            return (*rules(eqn), *windows(eqn))
        later = self.program.differentiable
        return ways(eqn, Around(self.dimension, lambda v: eqns[maker[v]] if v in maker else None, later))

    def _of_much(self) -> set[int]:
        """Return the equations that are made of contractions of the region, or of large values: of the thousands of a
        deep network nearly all are not done before it for that, and are found together.
        """
        eqns, maker, found = self.program.eqns, self.program.maker, set[int]()
        for i in self.program.alive:
            much = i in self.rules and (contracts(eqns[i]) or self._made_nbytes(i) > self.few_nbytes)
            if much or any(maker.get(a) in found for a in _compat.variables(eqns[i].invars)):
                found.add(i)
        return found

    def _made_nbytes(self, i: int) -> int:
        return sum(aval_nbytes(v.aval) for v in self.program.eqns[i].outvars)

    def _done_before(self, i: int, much: Collection[int], little: set[int]) -> bool:
        """Leave an equation out, with all that it is made of, if that is little, as the number of words that count is;
        whether that was possible.

        **Arguments:** `much` equations that are made of more; `little` those that are made of nothing in the region,
        to which it is added.
        """
        eqns, maker = self.program.eqns, self.program.maker
        own = 0 if i in self.rules else self._made_nbytes(i)
        if own > self.few_nbytes or contracts(eqns[i]):
            return False
        before: set[int] = set()
        waiting, made = [i], 0
        while waiting:
            j = waiting.pop()
            if j in much:
                return False
            if j in before or j in little:
                continue
            before.add(j)
            made += self._made_nbytes(j) if j in self.rules else 0
            if made + own > self.few_nbytes:
                return False
            waiting.extend(maker[a] for a in _compat.variables(eqns[j].invars) if a in maker)
        little |= before
        before &= self.rules.keys()
        self.early |= before | {i}
        for i in before:
            del self.rules[i]
            self.sums.difference_update(eqns[i].outvars)
        return bool(self.rules)

    def _of_sums(self, eqn: jex.JaxprEqn, made: Collection[jex.Var]) -> BatchingRule | None:
        """Return the way of an equation that adds two sums of these, or puts one that nothing else reads in another
        form; not of short numbers, whose sums have another type here.
        """
        operands = eqn.invars
        if not operands or any(_compat.is_literal(a) or a not in made for a in operands):
            return None
        if any(sum_type(shaped(a).dtype) != shaped(a).dtype for a in operands):
            return None
        going = [a for a in _compat.variables(operands) if goes_on(self.program, self.rules, a)]
        if any(len(self.program.readers[a]) > 1 or a in self.program.returned for a in going):
            return None
        if going and len({*operands}) < len(operands):
            return None  # it is not added to itself in its place
        if eqn.primitive.name in ("add", "add_any"):
            return OF_SUMS
        (a, *_) = operands
        alone = len(self.program.readers[a]) == 1 and a not in self.program.returned
        return OF_SUM if alone and not going and is_relabelling(eqn) else None

    def _of_rows(self, eqn: jex.JaxprEqn, own: Collection[jex.Var]) -> BatchingRule | None:
        """Return the way of an equation that joins rows which some of these equations make, in the same iteration."""
        for rule in joined(eqn):
            (rows, *_), scope = eqn.invars, self.program.scopes[self.program.maker[eqn.outvars[0]]]
            if rows in own and scope == self.scope and rule.operands == (self.dimension[rows],):
                return rule
        return None

    def _between(self, rules: Collection[int]) -> list[int]:
        """Return the equations that read, if only through others, what some of the region make, and make what these
        read; none of what is waited for, nor through that.
        """
        eqns, maker = self.program.eqns, self.program.maker
        first, last = min(rules, default=0), max(rules, default=0)
        near = [i for i in self.program.alive if first <= i <= last and i not in self.waited]
        behind: set[int] = set()
        for i in near:
            makers = (maker.get(a, -1) for a in _compat.variables(eqns[i].invars))
            if any(j in rules or j in behind for j in makers):
                behind.add(i)
        before: set[int] = set()
        for i in reversed(near):
            if i in rules or i in before:
                before.update(maker.get(a, -1) for a in _compat.variables(eqns[i].invars))
        return sorted(i for i in behind & before if i not in rules)

    def _between_passes(self, between: Sequence[int]) -> set[int]:
        """Return those of what is between equations of the region that are not between any of one pass."""
        if self.scans or not between:
            return set()
        backward = {i for i in self.rules if is_backward(self.program.eqns[i])}
        return {*between}.difference(self._between(backward), self._between(self.rules.keys() - backward))
