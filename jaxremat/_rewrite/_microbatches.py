"""Flat equations -> those of a step that can be done for some of its examples after the others.

Where no statistics cross the batch, what a step makes of an example, forward and backward, depends on that example
alone, and gradients are sums over examples. A loop over *microbatches* then needs a fraction of the activations, runs
no operation twice, and reads the parameters once for each: gradient accumulation, as many write it by hand. Within the
loop is a forward and a backward pass, which are planned as those of any step.

Law: as that of `_row_regions`. What is random stays as it is: all of it is drawn before the loop.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._axes import OF_SUM, OF_SUMS, BatchingRule, is_scattered, sum_type
from .._program._compat import shaped
from .._program._flops import aval_nbytes
from .._program._primitives import is_backward, is_contraction, is_relabelling
from ._program_readers import Readers
from ._region_loops import loops_of
from ._row_regions import Grower, Region, largest, region_of
from ._row_scans import Around, scan_batching_rule

LEAST_SHARE = 0.75
"""A region is most of a step: it holds at least this share of the contractions."""

SEEDS = 4
"""So many of the largest values of different shapes are tried, ..."""

DIMENSIONS = 3
"""... with the examples in one of so many of their outermost dimensions."""

LARGE = 1 / 8
"""Another component is looked for while a value that is in none has this share of the largest that is in one, ..."""

COMPONENTS = 4
"""... and there are no more. Towers of a contrastive loss are tied together by what mixes examples alone."""

FEW = 1 / 32
"""What sums over the batch are made of that the step itself reads is at most this share of all that it makes."""


def microbatches(closed: jex.ClosedJaxpr) -> tuple[Region, ...]:
    """Return the region that is most of a step, if there is one."""
    program = Readers(closed)
    if not any(is_backward(program.eqns[i]) for i in program.alive):
        return ()
    made = sum(aval_nbytes(v.aval) for i in program.alive for v in program.eqns[i].outvars)
    products = sum(is_contraction(program.eqns[i]) for i in program.alive)
    enough = LEAST_SHARE * products
    grown: list[_Whole] = []
    while len(grown) < COMPONENTS and (best := _most_grown(program, made, enough, grown)) is not None:
        grown.append(best)
    if sum(each.products for each in grown) < enough:
        return ()
    found = loops_of(program, grown)
    region = region_of(program, found, whole=True) if found else None
    return (region,) if region is not None and region.choices else ()


def _most_grown(
    program: Readers, made_nbytes: int, enough: float, others: Sequence["_Whole"]
) -> "_Whole | None":
    """Return the component with the most products about one of the largest values of no other; None if that has none,
    or where none is large.

    **Arguments:** `enough` products: no better one is looked for then.
    """
    taken = {i for each in others for i in each.rules}
    least = max((each.largest_nbytes for each in others), default=0) * LARGE
    best = None
    for v in largest(program, SEEDS, taken):
        for dimension in range(min(len(v.aval.shape), DIMENSIONS)):
            if aval_nbytes(v.aval) < least or (best is not None and best.products >= enough):
                return best
            grower = _Whole(program, made_nbytes, taken)
            if grower.grow(v, dimension) and grower.products > (best.products if best is not None else 0):
                best = grower
    return best


class _Whole(Grower):
    """A component that grows as far as rows go.

    **Arguments:** `taken` the equations of others.
    """

    def __init__(self, program: Readers, total_nbytes: int, taken: Collection[int]):
        super().__init__(program, 0, float("inf"))
        self.few_nbytes = FEW * total_nbytes
        self.early: set[int] = set()  # what is done before
        self.taken = taken

    def grow(self, seed: Any, dimension: int) -> bool:
        """Grow as far as rows go; whether all that is handed on has rows or is a sum over them."""
        self.dimension[seed] = dimension
        self.large.append(seed)
        while True:
            if not self.spread(seed):
                return False
            between = self._between()
            left = [i for i in between if not self._add(i)]
            if len(left) < len(between):
                continue
            left += [self.program.maker[a] for a in self.sums_read()]
            if not [i for i in left if self._done_before(i)]:  # the others are waited for
                return True

    @property
    def largest_nbytes(self) -> int:
        """The bytes of its largest value."""
        return max(aval_nbytes(v.aval) for i in self.rules for v in self.program.eqns[i].outvars)

    def with_sums(self, indices: Collection[int]) -> list[int]:
        """Add the equations that add up sums which some of its equations make, or make another form of one; return
        which these are.
        """
        eqns, found = self.program.eqns, list[int]()
        made = {v for i in indices for v in eqns[i].outvars if v in self.sums}
        for i in self.program.alive:
            if i in self.rules or i in self.taken or (rule := self._of_sums(eqns[i], made)) is None:
                continue
            (total,) = eqns[i].outvars
            self.rules[i] = rule
            self.dimension[total] = None
            self.sums.add(total)
            made.add(total)
            found.append(i)
        return found

    def batching_rules_of(self, eqn: jex.JaxprEqn) -> Iterable[BatchingRule]:
        if eqn.primitive.name != "scan":
            return super().batching_rules_of(eqn)
        eqns, maker = self.program.eqns, self.program.maker
        found = scan_batching_rule(
            eqn, Around(self.dimension, lambda v: eqns[maker[v]] if v in maker else None)
        )
        return () if found is None else (found,)

    def _done_before(self, i: int) -> bool:
        """Leave an equation out, with all that it is made of, if that is little, as the number of words that count is;
        whether that was possible.
        """
        eqns, maker = self.program.eqns, self.program.maker
        before: set[int] = set()
        waiting, made = [i], 0
        while waiting:
            j = waiting.pop()
            if j in before:
                continue
            before.add(j)
            if j == i or j in self.rules:
                made += sum(aval_nbytes(v.aval) for v in eqns[j].outvars)
                if made > self.few_nbytes or is_contraction(eqns[j]):
                    return False
            waiting.extend(maker[a] for a in _compat.variables(eqns[j].invars) if a in maker)
        before &= self.rules.keys() | {i}
        self.early |= before
        for i in before & self.rules.keys():
            del self.rules[i]
            self.sums.difference_update(eqns[i].outvars)
        return bool(self.rules)

    def _add(self, i: int) -> bool:
        return i not in self.early and i not in self.taken and super()._add(i)

    def _goes_on(self, v: jex.Var) -> bool:
        """Return whether each microbatch adds to a sum in its place, so that there is no sum of its own."""
        return is_scattered(self.program.eqns[self.program.maker[v]])

    def _of_sums(self, eqn: jex.JaxprEqn, made: Collection[Any]) -> BatchingRule | None:
        """Return the way of an equation that adds two sums of these, or puts one that nothing else reads in another
        form; not of short numbers, whose sums have another type here.
        """
        operands = eqn.invars
        if not operands or any(_compat.is_literal(a) or a not in made or self._goes_on(a) for a in operands):
            return None
        if any(sum_type(shaped(a).dtype) != shaped(a).dtype for a in operands):
            return None
        if eqn.primitive.name in ("add", "add_any"):
            return OF_SUMS
        (a, *_) = operands
        alone = len(self.program.readers[a]) == 1 and a not in self.program.returned
        return OF_SUM if alone and is_relabelling(eqn) else None
