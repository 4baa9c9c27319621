"""Scans that are not inlined -> the same, with loop-invariant values of small or no operands computed in the body.

JAX computes loop-invariant values before the loop: an attention's mask as large as its scores, or the number that
replaces masked scores. The attention then reads that array; with the mask computed in the body it only reads positions
(see `_attention`), and no array is as large as the scores. Invariant: the same results.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom
from .._program._flops import aval_nbytes
from .._program._inline import CALLS
from .._program._primitives import (
    inner_jaxprs,
    is_costly,
    is_fusion_root,
    is_loop_edge,
    reads_memory,
    runs_once,
)
from .._runtime._mechanisms import mechanism

GROWTH = 8
"""A value grows from a small one if its operands have at most one part in this many of its bytes."""


def grows(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation fills a large array from a small one, which any kernel can do while it reads."""
    if eqn.primitive.name not in ("broadcast_in_dim", "iota"):
        return False
    read = sum(aval_nbytes(a.aval) for a in eqn.invars)
    return GROWTH * read <= aval_nbytes(eqn.outvars[0].aval)


@mechanism("sinking into loops", off=lambda eqns, _: list(eqns))
def sink_into(eqns: Sequence[jex.JaxprEqn], chosen: Collection[int]) -> list[jex.JaxprEqn]:
    """Return the equations, with such values computed in the bodies of the chosen scans."""
    made = _makers(eqns)
    return [_grown_within(eqn, made) if i in chosen else eqn for i, eqn in enumerate(eqns)]


def _grown_within(scan: jex.JaxprEqn, made: Mapping[jex.Var, "_Made"]) -> jex.JaxprEqn:
    """Return a scan with constants that grow from small values computed in its body."""
    consts, init, arrays = _compat.scan_operands(scan)
    closed = scan.params["jaxpr"]
    jaxpr, held = _compat.opened(closed)
    stored = _stored(jaxpr)
    inner = dict(zip(jaxpr.invars, consts, strict=False))
    grown = [v for v, a in inner.items() if v not in stored and not _compat.is_literal(a) and a in made]
    if not grown:
        return scan
    own = {v: a for v, a in inner.items() if v not in grown}
    known = {a: v for v, a in own.items() if not _compat.is_literal(a)}
    eqns: list[Any] = []

    def within(a: Atom, name: jex.Var | None = None) -> Atom:
        """Return the name of an outer variable in the body, and compute it there if possible."""
        if _compat.is_literal(a) or (name is None and a in known):
            return a if _compat.is_literal(a) else known[a]
        known[a] = name or _compat.new_var(a.aval)
        if name is None and not (a in made and made[a].constant):
            own[known[a]] = a
        else:
            eqn, name = made[a].eqn, known[a]
            invars = [within(b) for b in eqn.invars]
            source = _compat.root_source(eqn)
            eqns.append(eqn.replace(invars=invars, outvars=[name], source_info=source))
        return known[a]

    for v in grown:
        within(inner[v], v)
    eqns.extend(jaxpr.eqns)
    rest = jaxpr.invars[len(consts) :]
    body = _compat.new_jaxpr(jaxpr.constvars, held, [*own, *rest], jaxpr.outvars, eqns)
    lasts, stacks = scan.outvars[: len(init)], scan.outvars[len(init) :]
    operands = list(own.values()), init, arrays
    return _compat.scan_like(scan, body, scan.params["length"], operands, (lasts, stacks))


def _stored(jaxpr: jex.Jaxpr) -> set[jex.Var]:
    """Return the variables of a body that equations read from memory, in calls too, or that it returns."""
    found = set(_compat.variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        inner = inner_jaxprs(eqn)
        if eqn.primitive.name in CALLS and len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
            deeper = _stored(inner[0])
            read = (a for a, v in zip(eqn.invars, inner[0].invars, strict=True) if v in deeper)
            found.update(_compat.variables(read))
        elif _in_memory(eqn) or inner:
            found.update(_compat.variables(eqn.invars))
    return {a for a in found if not _compat.is_literal(a)}


@dataclass(frozen=True, slots=True)
class _Made:
    """**Fields:** the equation of a variable, and whether it depends only on constants."""

    eqn: Any
    constant: bool


def _makers(eqns: Sequence[jex.JaxprEqn]) -> dict[Any, _Made]:
    """Return the variables that grow from small values, and those that are cheap and pointwise in constants."""
    made: dict[Any, _Made] = {}
    for eqn in eqns:
        constant = all(a in made and made[a].constant for a in _compat.variables(eqn.invars))
        constant = constant and not (
            is_fusion_root(eqn) or is_costly(eqn) or runs_once(eqn) or _in_memory(eqn)
        )
        if len(eqn.outvars) == 1 and (constant or grows(eqn)):
            made[eqn.outvars[0]] = _Made(eqn, constant)
    return made


def _in_memory(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation reads arrays that its kernel cannot compute itself."""
    return is_loop_edge(eqn) or reads_memory(eqn)
