"""Flat program -> who makes and who reads each of its values."""

from typing import Any

import jax.extend.core as jex

from .._program import _compat


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

    def inner(self, v: jex.Var) -> bool:
        """Return whether a value may stay within a region."""
        return v not in self.returned and v in self.maker and bool(getattr(v.aval, "shape", ()))
