"""Sections of equations -> the same, where iterations make for themselves what grows out of little, or of nothing.

JAX makes what is alike in all iterations before the loop: an attention's mask as large as its scores, or the number
that masked scores are replaced by. There it fills memory from before the loop to its end, and each iteration's kernels
read it. Made within the iteration it is part of those kernels, which read the little. A scan that is to be cut into
levels is not inlined in all of them: its body makes them itself. Law: the same results.
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
from ._flat_program import Loop, within

GROWTH = 8
"""An array grows out of little if what it is made of has at most this part of its bytes."""


def grows(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation fills a large array from a small one, which any kernel can do while it reads."""
    if eqn.primitive.name not in ("broadcast_in_dim", "iota"):
        return False
    read = sum(aval_nbytes(a.aval) for a in eqn.invars)
    return GROWTH * read <= aval_nbytes(eqn.outvars[0].aval)


@mechanism("what iterations make themselves", off=lambda *_: frozenset())
def sunk_values(
    eqns: Sequence[jex.JaxprEqn], loop_of: Sequence[int], loops: Sequence[Loop]
) -> frozenset[Any]:
    """Return the variables that grow out of little outside of a loop whose iterations read them, each in a kernel
    that can.
    """
    made = _makers(eqns, loop_of)
    stored = {a for eqn in eqns if _in_memory(eqn) for a in _compat.variables(eqn.invars)}
    reads = ((a, n) for eqn, n in zip(eqns, loop_of, strict=True) if not _in_memory(eqn) for a in eqn.invars)
    found = {a for a, n in reads if n >= 0 and _around(made, a, n, loops)} - stored
    waiting = list(found)
    while waiting:
        more = {
            a for a in _compat.variables(made[waiting.pop()].eqn.invars) if a in made and made[a].constant
        }
        waiting.extend(more - found - stored)
        found |= more - stored
    return frozenset(found)


def sink(
    eqns: Sequence[jex.JaxprEqn], loop_of: Sequence[int], loops: Sequence[Loop]
) -> tuple[list[Any], list[int]]:
    """Return equations, and the loop of each, where iterations make such values themselves."""
    made = _makers(eqns, loop_of)
    sunk = sunk_values(eqns, loop_of, loops)
    found: list[Any] = []
    places: list[int] = []
    clones: dict[tuple[Any, int], Any] = {}

    def within(a: Atom, loop: int) -> Atom:
        """Return what the variable is called in the loop, where it is made if need be."""
        if _compat.is_literal(a) or a not in sunk or not _around(made, a, loop, loops):
            return a
        if (a, loop) not in clones:
            clones[a, loop] = _compat.new_var(a.aval)
            eqn = made[a].eqn
            invars = [within(b, loop) for b in eqn.invars]
            found.append(eqn.replace(invars=invars, outvars=[clones[a, loop]]))
            places.append(loop)
        return clones[a, loop]

    for eqn, loop in zip(eqns, loop_of, strict=True):
        if loop >= 0 and not sunk.isdisjoint(_compat.variables(eqn.invars)):
            eqn = eqn.replace(invars=[within(a, loop) for a in eqn.invars])
        found.append(eqn)
        places.append(loop)
    return found, places


def sink_into(eqns: Sequence[jex.JaxprEqn], chosen: Collection[int]) -> list[jex.JaxprEqn]:
    """Return equations of which the chosen scans, which are not inlined, make such values themselves."""
    made = _makers(eqns, [-1] * len(eqns))
    return [_grown_within(eqn, made) if i in chosen else eqn for i, eqn in enumerate(eqns)]


def _grown_within(scan: jex.JaxprEqn, made: Mapping[jex.Var, "_Made"]) -> jex.JaxprEqn:
    """Return a scan whose body makes constants that grow out of little."""
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
        """Return what an outer variable is called in the body, where it is made if it can be."""
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
    """What makes a variable: the equation, its loop, and whether it is made of constants alone."""

    eqn: Any
    loop: int
    constant: bool


def _makers(eqns: Sequence[jex.JaxprEqn], loop_of: Sequence[int]) -> dict[Any, _Made]:
    """Return the variables that grow out of little, and those that take nothing but cheap pointwise work on
    constants.
    """
    made: dict[Any, _Made] = {}
    for eqn, loop in zip(eqns, loop_of, strict=True):
        constant = all(a in made and made[a].constant for a in _compat.variables(eqn.invars))
        constant = constant and not (
            is_fusion_root(eqn) or is_costly(eqn) or runs_once(eqn) or _in_memory(eqn)
        )
        if len(eqn.outvars) == 1 and (constant or grows(eqn)):
            made[eqn.outvars[0]] = _Made(eqn, loop, constant)
    return made


def _around(made: Mapping[jex.Var, _Made], atom: Atom, loop: int, loops: Sequence[Loop]) -> bool:
    """Return whether a variable of these is made in the body around a loop, or further out."""
    if _compat.is_literal(atom) or atom not in made:
        return False
    return made[atom].loop in (*within(loop, loops)[1:], -1)


def _in_memory(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation reads arrays that no kernel of its own can make."""
    return is_loop_edge(eqn) or reads_memory(eqn)
