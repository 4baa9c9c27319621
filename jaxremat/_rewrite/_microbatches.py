"""Flat equations -> those of a step that can be done for some of its examples after the others.

Where no statistics cross the batch, what a step makes of an example, forward and backward, depends on that example
alone, and gradients are sums over examples. A loop over *microbatches* then needs a fraction of the activations, runs
no operation twice, and reads the parameters once for each: gradient accumulation, as many write it by hand. Within the
loop is a forward and a backward pass, which are planned as those of any step.

Law: as that of `_row_regions`. What is random stays as it is: all of it is drawn before the loop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._axes import OF_SUM, OF_SUMS, Way, is_scattered, sum_type
from .._program._flops import aval_nbytes
from .._program._primitives import is_contraction, is_late, is_relabelling
from ._row_regions import Grower, Readers, Region, edges
from ._row_scans import Around, scan_way

LEAST_SHARE = 0.75
"""A region is most of a step: it holds at least this share of the contractions."""

SEEDS = 2
"""So many of the largest values of different shapes are tried, ..."""

DIMENSIONS = 3
"""... with the examples in one of so many of their outermost dimensions."""

FEW = 1 / 32
"""What sums over the batch are made of that the step itself reads is at most this share of all that it makes."""


def microbatches(closed: jex.ClosedJaxpr) -> tuple[Region, ...]:
    """The region that is most of a step, if there is one."""
    program = Readers(closed)
    if not any(is_late(program.eqns[i]) for i in program.alive):
        return ()
    made = sum(aval_nbytes(v.aval) for i in program.alive for v in program.eqns[i].outvars)
    products = sum(is_contraction(program.eqns[i]) for i in program.alive)
    for v in program.largest(SEEDS):
        for dimension in range(min(len(v.aval.shape), DIMENSIONS)):
            grower = _Whole(program, made)
            grown = grower.grow(v, dimension)
            if grower.products >= LEAST_SHARE * products:  # of no other value comes more
                region = grower.region() if grown else None
                return (replace(region, whole=True),) if region is not None and region.choices else ()
    return ()


class _Whole(Grower):
    """A region that grows as far as rows go."""

    def __init__(self, program: Readers, total_nbytes: int):
        super().__init__(program, 0, float("inf"))
        self.few_nbytes = FEW * total_nbytes
        self.early: set[int] = set()  # what is done before

    def closes(self) -> bool:
        while read := self.sums_read():
            if not self.done_before([self.program.maker[a] for a in read]):
                return False
        for i in self.program.alive:
            if i not in self.ways and (way := self._of_sums(self.program.eqns[i])) is not None:
                (total,) = self.program.eqns[i].outvars
                self.ways[i] = way
                self.sums.add(total)
                self.dimension[total] = None
        return self._hands_on()

    def _hands_on(self) -> bool:
        """Whether all that it hands on has rows or is a sum over them: nothing that is the same for all."""
        _, leaves = edges(self.program, self.ways)
        return all(self.dimension[v] is not None or v in self.sums for v in leaves)

    def ways_of(self, eqn: Any) -> Iterable[Way]:
        if eqn.primitive.name != "scan":
            return super().ways_of(eqn)
        eqns, maker = self.program.eqns, self.program.maker
        found = scan_way(eqn, Around(self.dimension, lambda v: eqns[maker[v]] if v in maker else None))
        return () if found is None else (found,)

    def done_before(self, indices: Sequence[int]) -> bool:
        """Leave these out, with all that they are made of, if that is little, as the number of words that count is;
        whether that was possible.
        """
        eqns, maker = self.program.eqns, self.program.maker
        before: set[int] = set()
        waiting = list(indices)
        while waiting:
            i = waiting.pop()
            if i not in before:
                before.add(i)
                waiting.extend(maker[a] for a in _compat.variables(eqns[i].invars) if a in maker)
        before &= self.ways.keys() | set(indices)
        made = sum(aval_nbytes(v.aval) for i in before for v in eqns[i].outvars)
        if made > self.few_nbytes or any(is_contraction(eqns[i]) for i in before):
            return False
        self.early |= before
        for i in before & self.ways.keys():
            del self.ways[i]
            self.sums.difference_update(eqns[i].outvars)
        return bool(self.ways)

    def _add(self, i: int) -> bool:
        return i not in self.early and super()._add(i)

    def _goes_on(self, v: Any) -> bool:
        """Whether each microbatch adds to a sum in its place, so that there is no sum of its own."""
        return is_scattered(self.program.eqns[self.program.maker[v]])

    def _of_sums(self, eqn: Any) -> Way | None:
        """The way of an equation that adds two sums, or puts one that nothing else reads in another form; not of short
        numbers, whose sums have another type here.
        """
        operands = eqn.invars
        if not operands or any(
            _compat.is_literal(a) or a not in self.sums or self._goes_on(a) for a in operands
        ):
            return None
        if any(sum_type(a.aval.dtype) != a.aval.dtype for a in operands):
            return None
        if eqn.primitive.name in ("add", "add_any"):
            return OF_SUMS
        (a, *_) = operands
        alone = len(self.program.readers[a]) == 1 and a not in self.program.returned
        return OF_SUM if alone and is_relabelling(eqn) else None
