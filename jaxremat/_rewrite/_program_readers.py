"""Flat program -> the equation that computes each value, and those that read it."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._axes import BatchingRule, rules
from .._program._flops import aval_nbytes
from .._program._primitives import is_draw, is_fusion_root
from ._backward_equations import backward_equations
from ._flat_program import FlatProgram, within

SMALL = 1 / 64
"""A value of at most this share of a result's bytes is small next to it."""


class Readers:
    """The makers and readers of values, among the live equations of a program.

    **Arguments:** `differentiable` whether the program is a function that is differentiated later.
    """

    def __init__(self, program: FlatProgram, *, differentiable: bool = False):
        self.differentiable = differentiable
        self.program, self.eqns = program, program.eqns
        self.returned = set(_compat.variables(program.closed.jaxpr.outvars))
        self.loop_of, self.scopes = program.loop_of, program.scopes
        self.alive = [i for i, needed in enumerate(program.alive) if needed]
        self.maker = {v: i for i in self.alive for v in self.eqns[i].outvars}
        self._rules: dict[int, tuple[BatchingRule, ...]] = {}
        self.readers: dict[Any, list[int]] = {}
        operands = [_compat.variables(eqn.invars) for eqn in self.eqns]
        self.makers = [[(a, self.maker[a]) for a in each if a in self.maker] for each in operands]
        for i in self.alive:
            for a in dict.fromkeys(operands[i]):
                self.readers.setdefault(a, []).append(i)

    @cached_property
    def made_nbytes(self) -> list[int]:
        """The bytes of each equation's results."""
        return [sum(aval_nbytes(v.aval) for v in eqn.outvars) for eqn in self.eqns]

    def rules(self, i: int) -> tuple[BatchingRule, ...]:
        """Return the independent axes of an equation without bodies."""
        if i not in self._rules:
            self._rules[i] = tuple(rules(self.eqns[i]))
        return self._rules[i]

    @cached_property
    def for_loops(self) -> frozenset[int]:
        """The equations whose largest result only loops read, such as the stacks of a forward loop for a backward one,
        and those that kernels of these absorb: a causal mask is computed from numbers four times its size.
        """
        scans = {i for i in self.alive if self.eqns[i].primitive.name == "scan"}
        found = set[int]()
        for i in (i for i in reversed(self.alive) if self.eqns[i].outvars):
            largest = max(self.eqns[i].outvars, key=lambda v: aval_nbytes(v.aval))
            absorbing = scans if is_fusion_root(self.eqns[i]) else scans | found
            if self.inner(largest) and absorbing.issuperset(self.readers.get(largest, (-1,))):
                found.add(i)
        return frozenset(found)

    @cached_property
    def drawn(self) -> frozenset[int]:
        """The equations that draw random numbers, or depend only on such draws and on small values."""
        found = set[int]()
        for i in self.alive:
            eqn = self.eqns[i]
            small = max((aval_nbytes(v.aval) for v in eqn.outvars), default=0) * SMALL
            operands = _compat.variables(eqn.invars)
            made = [self.maker.get(a) in found for a in operands]
            alone = all(m or aval_nbytes(a.aval) <= small for a, m in zip(operands, made, strict=True))
            if is_draw(eqn) or (any(made) and alone):
                found.add(i)
        return frozenset(found)

    @cached_property
    def of_one_run(self) -> set[int]:
        """The equations that must not run again, because decisions or large cotangents depend on their exact result."""
        once = self.program.decisions.once(self.in_backward)
        return once | self.program.decisions.edges.shared_cotangents(self.in_backward)

    @cached_property
    def of_a_run(self) -> dict[int, tuple[frozenset[int], frozenset[int]]]:
        """Those of them that may run again if their operands do: comparisons of a value with a selection from it. For
        each, the equations that computed both sides, and those between these and the comparison.
        """
        compared = self.program.decisions.compared
        shared = {j for i, own in compared.items() if self.in_backward[i] for j in own}
        alone = self.of_one_run - shared - self.program.decisions.counted
        return {i: (compared[i], frozenset(self._between(compared[i], i))) for i in alone if i in compared}

    @cached_property
    def loops_at_edges(self) -> frozenset[int]:
        """The outermost loops with values that the forward pass combines with numbers that are large at the edge of a
        domain, as with second derivatives.
        """
        edges = self.program.decisions.edges
        combined = edges.combined(self.in_backward) if self.program.loops else {}
        found = {j for i, others in combined.items() for j in (i, *others)}
        around = (within(self.loop_of[i], self.program.loops) for i in found)
        return frozenset(loops[-1] for loops in around if loops)

    @cached_property
    def in_backward(self) -> Sequence[bool]:
        """For each equation, whether it is part of the backward pass or comes after it."""
        return backward_equations(self.eqns, self.loop_of, self.program.loops)

    def _between(self, begin: Collection[int], end: int) -> list[int]:
        """Return the equations on paths from some equations to another."""
        before, waiting = set[int](), [end]
        while waiting:
            new = {j for _, j in self.makers[waiting.pop()] if j > min(begin, default=end)} - before
            before |= new
            waiting.extend(new)
        found = list[int]()
        behind = set(begin)
        for i in sorted(before - behind):
            if any(j in behind for _, j in self.makers[i]):
                behind.add(i)
                found.append(i)
        return found

    def inner(self, v: jex.Var) -> bool:
        """Return whether a value may stay within a region."""
        return v not in self.returned and v in self.maker and bool(getattr(v.aval, "shape", ()))
