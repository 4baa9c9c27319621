"""Flat program -> who makes and who reads each of its values."""

from functools import cached_property
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._flops import aval_nbytes
from ._backward_equations import backward_equations
from ._decisions import decisions
from ._flat_program import FlatProgram


class Readers:
    """Who makes and reads what, of the equations of a program that anything needs."""

    def __init__(self, program: FlatProgram):
        self.program, self.eqns = program, program.eqns
        self.returned = set(_compat.variables(program.closed.jaxpr.outvars))
        self.loop_of, self.scopes = program.loop_of, program.scopes
        self.alive = [i for i, needed in enumerate(program.alive) if needed]
        self.maker = {v: i for i in self.alive for v in self.eqns[i].outvars}
        self.readers: dict[Any, list[int]] = {}
        for i in self.alive:
            for a in dict.fromkeys(_compat.variables(self.eqns[i].invars)):
                self.readers.setdefault(a, []).append(i)

    @cached_property
    def for_loops(self) -> frozenset[int]:
        """The equations whose largest result loops alone read, as what a forward loop stacks for a backward one."""
        scans = {i for i in self.alive if self.eqns[i].primitive.name == "scan"}
        makers = (i for i in self.alive if self.eqns[i].outvars)
        made = {i: max(self.eqns[i].outvars, key=lambda v: aval_nbytes(v.aval)) for i in makers}
        return frozenset(
            i for i, v in made.items() if self.inner(v) and scans.issuperset(self.readers.get(v, (-1,)))
        )

    @cached_property
    def of_one_run(self) -> set[int]:
        """The equations that may not run again, because decisions depend on their very results."""
        found, in_backward = (
            decisions(self.eqns),
            backward_equations(self.eqns, self.loop_of, self.program.loops),
        )
        return found.once(in_backward) | found.shared_cotangents(in_backward)

    def inner(self, v: jex.Var) -> bool:
        """Return whether a value may stay within a region."""
        return v not in self.returned and v in self.maker and bool(getattr(v.aval, "shape", ()))
