"""Jaxpr and operands -> its equations applied to them, as a part of another jaxpr.

Invariant: the equations compute every named result, also one that the jaxpr only passes on.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from . import _compat
from ._compat import AbstractValue, Atom, SourceInfo, shaped

BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
"""Primitives that contain jaxprs, and the parameters that hold them."""

CALLS = {"jit": ("jaxpr",), "pjit": ("jaxpr",), "closed_call": ("call_jaxpr",)}
"""Primitives whose bodies are inlined."""


def with_bodies(eqn: jex.JaxprEqn, change: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]) -> jex.JaxprEqn:
    """Return the equation with its bodies changed; the equation itself if none changes."""
    changed: dict[str, Any] = {}
    for param in {**BODIES, **CALLS}.get(eqn.primitive.name, ()):
        found = eqn.params[param]
        bodies = found if isinstance(found, tuple) else (found,)
        made = tuple(map(change, bodies))
        if not all(map(operator.is_, made, bodies)):
            changed[param] = made if isinstance(found, tuple) else made[0]
    return eqn.replace(params={**eqn.params, **changed}) if changed else eqn


def inlined(
    closed: jex.ClosedJaxpr,
    operands: Sequence[Atom],
    source_info: SourceInfo,
    results: Sequence[jex.Var | None] = (),
) -> tuple[list[jex.JaxprEqn], list[Any]]:
    """Return a constant-free jaxpr's equations for these operands, and their results, under given names if any.
    Equations that the library created get the source line of the equation that they replace.
    """
    jaxpr = closed.jaxpr
    named: dict[Any, Any] = {}
    passed = []  # results that are operands, literals, or others once more
    for v, name in zip(jaxpr.outvars, results, strict=False):
        if _compat.is_literal(v) or v in jaxpr.invars or v in named:
            passed.append((v, name))
        else:
            named[v] = name
    rename: dict[Any, Any] = {**dict(zip(jaxpr.invars, operands, strict=True)), **named}
    eqns = []
    for eqn in jaxpr.eqns:
        invars = [a if _compat.is_literal(a) else rename[a] for a in eqn.invars]
        outvars = [rename.setdefault(v, _compat.new_var(v.aval)) for v in eqn.outvars]
        own = _compat.under(source_info, eqn)
        if not _compat.user_line(eqn):
            own = own.replace(traceback=source_info.traceback)
        eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=own))
    made = [a if _compat.is_literal(a) else rename[a] for a in jaxpr.outvars]
    eqns += [
        _compat.barrier([v if _compat.is_literal(v) else rename[v]], [name], source_info)
        for v, name in passed
    ]
    return eqns, [*results, *made[len(results) :]]


def typed(atom: Atom) -> AbstractValue | jax.ShapeDtypeStruct:
    """Return a variable's type as an argument for tracing a function."""
    if _compat.varying_axes(atom):
        return atom.aval
    weak = bool(getattr(atom.aval, "weak_type", False))
    return jax.ShapeDtypeStruct(shaped(atom).shape, shaped(atom).dtype, weak_type=weak)


def in_place_of(eqn: jex.JaxprEqn, fn: Callable[..., object]) -> list[jex.JaxprEqn]:
    """Return the equations of a function of an equation's operands, to replace it."""
    closed = jax.make_jaxpr(fn)(*map(typed, eqn.invars))
    return inlined(closed, eqn.invars, eqn.source_info, eqn.outvars)[0]


def needed(eqns: Sequence[jex.JaxprEqn], results: Iterable[Atom]) -> list[int]:
    """Return the indices of the equations that results or effects need, in order."""
    wanted = set(_compat.variables(results))
    found = []
    for i in reversed(range(len(eqns))):
        if eqns[i].effects or not wanted.isdisjoint(eqns[i].outvars):
            wanted.update(_compat.variables(eqns[i].invars))
            found.append(i)
    return found[::-1]
