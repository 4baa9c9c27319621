"""Flat equations -> a set of them that splits into equal rows, around a large value.

The head of a language model computes, for each token, logits over the vocabulary, their exponentials and both
gradients, all from that token alone. Its outputs are small: a loss per token, and gradients of weights, which are sums
over tokens. Such a *region* grows from a large value in both directions while the values computed or read are large
too; it is a few matrix products and the equations between them, not the whole step. `_row_chunks` runs it one chunk at
a time.

Equations that wait for work elsewhere (the gradient of a layer's messages waits for the layers behind it) form a
separate loop, which recomputes the values that it reads of the first: see `_region_loops`. Regions share no equation.

Invariant: a loop reads no value that depends on its own results; no equation of a loop reads one of its sums over rows;
equations that run once are in no region, and keep their order around it.
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
from ._row_scans import Around, BodyBatchingRule, has_bodies, ways

LARGE = 1 / 16
"""Values of at least this share of the seed's size must not leave a region."""

LEAST_NBYTES = 1 << 19
"""The least bytes inside a region. Whether a larger one is worth a loop depends on its price. For a step with 450 KiB
of temporaries the model predicts 12 % for chunks and 19 % for recomputation; the compiled kernels take 20 % and 19 %.
"""

AT_ONCE = 8
"""The factor on `LEAST_NBYTES` for a region of most of a step: about one part in eight of it is in memory at once."""

LITTLE_WORK = 1 / 32
"""Contractions of at most this share of the largest one's operations are not counted, such as low-rank adapters."""

FEW = 1 / 32
"""The most bytes of sums over rows, with their sources, that run before the region that reads them, as a share
of all.
"""

HANDED = 1 / 4
"""The bytes that leave a region are at most this share of those inside that kernels write to memory."""

MUCH_LARGER = 2
"""A region within wide limits is considered beside others if it keeps this many times as many bytes inside."""

REGIONS = 16
"""The most regions of a step."""

SEEDS = 3
"""For each region, this many of the largest values of different shapes are tried, ..."""

SEED = 1 / 8
"""... of at least this share of the largest of all."""

ENOUGH = 8
"""The rows are along the outermost dimension that allows this many chunks."""


def regions(program: Readers, outside: Collection[int] = ()) -> tuple[Region, ...]:
    """Return the regions around the largest values, in the order of these; empty if none is worth a loop.

    The regions share no equation, and any of them can run in chunks together, except a last one that `overlaps`: it is
    far larger than all others, and repeats more operations. None grows from a value that only loops
    read: the forms of these loops decide about their stacks, which are by far the largest values of a long sequence.

    **Arguments:** `outside` equations that are in no region.
    """
    usual = _regions(program, outside, USUAL)
    if not usual:
        return _regions(program, outside, WIDE)
    wide = _about_the_largest(program, outside, outside, WIDE)
    if wide is None or wide.inner_nbytes < MUCH_LARGER * sum(region.inner_nbytes for region in usual):
        return usual
    return (*usual, replace(wide, overlaps=True))


def _regions(program: Readers, outside: Collection[int], limits: Limits) -> tuple[Region, ...]:
    """Return the regions within these limits."""
    found: list[Region] = []
    taken = set(outside)
    while len(found) < REGIONS:
        region = _about_the_largest(program, outside, taken, limits)
        if region is None:
            break
        # Each region has an order by itself; together, their loops might wait for one another.
        if schedule(program, [loop for each in (*found, region) for loop in each.loops]) is None:
            break
        found.append(region)
        taken.update(region.rules)
    return tuple(found)


def _about_the_largest(
    program: Readers, outside: Collection[int], taken: Collection[int], limits: Limits
) -> Region | None:
    """Return the region around the largest value that is in none yet and has one."""
    able = (i for i in program.alive if i not in outside and i not in program.for_loops)
    made = [v for i in able for v in program.eqns[i].outvars if program.inner(v)]
    least = max(SEED * max(map(_nbytes, made), default=0), LEAST_NBYTES / 8)
    seeds = (v for v in largest(program, SEEDS, program.for_loops.union(taken)) if _nbytes(v) >= least)
    return next(filter(None, (_best_about(program, v, taken, limits) for v in seeds)), None)


def _best_about(program: Readers, v: jex.Var, taken: Collection[int], limits: Limits) -> Region | None:
    """Return the region around a value, with rows along the outermost dimension that allows enough chunks: with all
    equations that follow on the same rows, such as the layers behind an attention, or, if that is too much for one
    region, without those between its forward and its backward pass.
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
    """Return up to `count` of the largest values that may stay inside a region, of different shapes and similar sizes.

    **Arguments:** `without` equations whose results are left out.
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
    """Return the region that grows around a value with its rows along `dimension`, or None."""
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
    """Return the contractions among some equations that are not much less work than the largest."""
    flops = {i: eqn_flops(program.eqns[i]) for i in indices if contracts(program.eqns[i])}
    least = LITTLE_WORK * max(flops.values(), default=0)
    return [i for i, each in flops.items() if each > least]


def region_of(program: Readers, loops: Sequence[Loop], *, whole: bool = False) -> Region | None:
    """Return the region of these loops; None if it keeps too little inside or reorders equations that run once.

    **Arguments:** `whole` whether it covers most of a step.
    """
    eqns, order = program.eqns, schedule(program, loops)
    if order is None:
        return None
    # Effects and draws must keep their sequence.
    once = [i for i in order if i >= 0 and runs_once(eqns[i])]
    if once != sorted(once):
        return None
    dimension: dict[Any, int | None] = {}
    # The number of chunks must divide the rows of every value and the groups of every rule.
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
    """A region while it grows: the `rules` of its equations, the `dimension` of the rows of their operands and results,
    the `sums` over rows, and the number of `products`.

    **Arguments:** `taken` equations of other regions; `above` the size of values that must not leave it;
    `most_products` the limit of products; `scans` whether scans may be in it, `windowed` whether equations that read
    neighbouring rows may; `within_passes` whether equations between its forward and its backward pass stay outside.
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
        self.follows = False  # whether it has equations between its forward and its backward pass
        self.program, self.taken, self.above, self.most_products = program, taken, above, most_products
        self.few_nbytes = FEW * sum(program.made_nbytes[i] for i in program.alive)
        self.rules: dict[int, BatchingRule] = {}
        self.dimension: dict[Any, int | None] = {}
        self.sums: set[Any] = set()
        self.products = 0
        self.early: set[int] = set()  # equations that run before the region
        self.waited: set[int] = set()  # equations that run between its loops
        self.scope = -1  # the loop, or pair of loops, of all its equations
        # Values that must stay inside, and whose maker and readers are not in the region yet.
        self.large: list[Any] = []

    def grow(self, seed: jex.Var, dimension: int) -> bool:
        """Grow as far as rows and large values go; return whether the result is a region.

        Equations that read the region, are read by it and have no such rows run between its loops: see `_region_loops`.
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
                # Later layers that read a sum of this region do not belong to it.
                self.rules, self.dimension, self.sums, self.products = known
                self.large.clear()
                self.waited.update(left)
                continue
            if len(left) < len(between):
                continue
            left += [*self.waited, *(self.program.maker[a] for a in self._sums_read())]
            much, little = self._of_much(), set[int]()
            if not [i for i in left if self._done_before(i, much, little)]:  # the others run between loops
                self._copy()
                return bool(self.rules)
            self.waited.clear()

    @property
    def largest_nbytes(self) -> int:
        """The bytes of its largest value."""
        return max(aval_nbytes(v.aval) for i in self.rules for v in self.program.eqns[i].outvars)

    def with_sums(self, indices: Collection[int]) -> list[int]:
        """Add the equations that add up, or relabel, sums over rows of `indices`, and those that join their rows (see
        `JOINS`); return the added equations.
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
        """Add the makers and readers of large values, repeatedly; return whether the seed's could be added, within the
        limit of products.
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
        """Return whether a value only repeats a smaller one: several regions, and other equations, may read it, and
        each chunk computes its part.
        """
        i = self.program.maker.get(v, -1)
        if i < 0 or self.scans or self.program.eqns[i].primitive.name != "broadcast_in_dim":
            return False
        return sum(aval_nbytes(shaped(a)) for a in self.program.eqns[i].invars) < aval_nbytes(v.aval)

    def _copy(self) -> None:
        """Add the equations that repeat smaller values for the region."""
        eqns, maker = self.program.eqns, self.program.maker
        read = dict.fromkeys(a for i in self.rules for a in _compat.variables(eqns[i].invars))
        for v in [a for a in read if self.dimension[a] is not None and self._is_copied(a)]:
            i = maker[v]
            if i in self.rules:
                continue
            for rule in self.program.rules(i):
                operands = zip(_compat.variables(eqns[i].invars), rule.operands, strict=False)
                if rule.results == (self.dimension[v],) and all(
                    self.dimension.get(a, d) == d for a, d in operands
                ):
                    self.rules[i] = replace(rule, copied=True)
                    self.dimension.update(zip(_compat.variables(eqns[i].invars), rule.operands, strict=False))
                    break

    def _sums_read(self) -> list[jex.Var]:
        """Return the sums over rows that equations of the region read, other than to add them to others."""
        readers = (self.program.eqns[i] for i, rule in self.rules.items() if not rule.linear)
        read = (a for eqn in readers for a in _compat.variables(eqn.invars) if a in self.sums)
        return list(dict.fromkeys(read))

    def _add(self, i: int) -> bool:
        """Add an equation if its rows agree with the known dimensions; return whether they do."""
        program = self.program
        if i in self.early or i in self.taken or program.scopes[i] != self.scope:
            return False
        if (
            program.differentiable and i in program.drawn
        ):  # a mask is smaller than the random bits that it is computed from
            return False
        eqn = self.program.eqns[i]
        atoms = [*eqn.invars, *eqn.outvars]
        known = [
            (k, self.dimension[a])
            for k, a in enumerate(atoms)
            if not _compat.is_literal(a) and a in self.dimension
        ]
        if all(d is None for _, d in known):
            return False
        for rule in self._rules_of(i):
            each = (*rule.operands, *rule.results)
            placed = [(a, d) for a, d in zip(atoms, each, strict=True) if not _compat.is_literal(a)]
            if all(each[k] == d for k, d in known) and agree(placed):
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

    def _rules_of(self, i: int) -> Iterable[BatchingRule]:
        """Return the rules to try for an equation; none for draws, which run before the region, all at once."""
        eqn = self.program.eqns[i]
        if is_draw(eqn) or (eqn.primitive.name in ("scan", "while") and not self.scans):
            return ()
        eqns, maker = self.program.eqns, self.program.maker
        if self.windowed:
            return (*self.program.rules(i), *windows(eqn))
        if not has_bodies(eqn):
            return self.program.rules(i)
        later = self.program.differentiable
        return ways(eqn, Around(self.dimension, lambda v: eqns[maker[v]] if v in maker else None, later))

    def _of_much(self) -> set[int]:
        """Return the equations that depend on contractions of the region, or on large values of it: of the thousands of
        a deep network nearly all do. They cannot run before the region, and one sweep finds them.
        """
        eqns, found = self.program.eqns, set[int]()
        for i in self.program.alive:
            much = i in self.rules and (contracts(eqns[i]) or self.program.made_nbytes[i] > self.few_nbytes)
            if much or any(j in found for _, j in self.program.makers[i]):
                found.add(i)
        return found

    def _done_before(self, i: int, much: Collection[int], little: set[int]) -> bool:
        """Leave an equation out, with everything that it depends on, if that is little, such as a count of words;
        return whether that was possible.

        **Arguments:** `much` equations that depend on more; `little` equations known to depend on nothing in the
        region, to which more are added.
        """
        eqns = self.program.eqns
        own = 0 if i in self.rules else self.program.made_nbytes[i]
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
            made += self.program.made_nbytes[j] if j in self.rules else 0
            if made + own > self.few_nbytes:
                return False
            waiting.extend(k for _, k in self.program.makers[j])
        little |= before
        before &= self.rules.keys()
        self.early |= before | {i}
        for i in before:
            del self.rules[i]
            self.sums.difference_update(eqns[i].outvars)
        return bool(self.rules)

    def _of_sums(self, eqn: jex.JaxprEqn, made: Collection[jex.Var]) -> BatchingRule | None:
        """Return the rule of an equation that adds two of these sums, or relabels one that nothing else reads. None for
        types with few bits, whose sums have another type in a loop.
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
        """Return the rule of an equation that joins rows of some of these equations, in the same iteration."""
        for rule in joined(eqn):
            (rows, *_), scope = eqn.invars, self.program.scopes[self.program.maker[eqn.outvars[0]]]
            if rows in own and scope == self.scope and rule.operands == (self.dimension[rows],):
                return rule
        return None

    def _between(self, rules: Collection[int]) -> list[int]:
        """Return the equations that read the region, directly or through others, and that the region reads likewise;
        without equations that run between its loops, and paths through these.
        """
        makers = self.program.makers
        first, last = min(rules, default=0), max(rules, default=0)
        near = [i for i in self.program.alive if first <= i <= last and i not in self.waited]
        behind: set[int] = set()
        for i in near:
            if any(j in rules or j in behind for _, j in makers[i]):
                behind.add(i)
        before: set[int] = set()
        for i in reversed(near):
            if i in rules or i in before:
                before.update(j for _, j in makers[i])
        return sorted(i for i in behind & before if i not in rules)

    def _between_passes(self, between: Sequence[int]) -> set[int]:
        """Return the equations of `between` that do not lie within one pass of the region."""
        if self.scans or not between:
            return set()
        backward = {i for i in self.rules if is_backward(self.program.eqns[i])}
        return {*between}.difference(self._between(backward), self._between(self.rules.keys() - backward))
