"""Flat equations -> the same with attention in the two operations of `_operations`.

Law: the equations that made an attention's scores are for nothing else, and nothing needs them now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import ShapedArray

from .._program import _compat
from .._program._compat import Atom, SourceInfo, shaped
from ._finding import attention
from ._operations import ATTENTION, GRADIENT
from ._pattern import Pattern
from ._places import Places, makers, ungathered


@dataclass(frozen=True)
class Attending:
    """**Fields:** `closed` the equations with such operations; `place` of each older equation, -1 for those in whose
    place they stand; `origin` of each new one the index of an older equation of the same loop.
    """

    closed: jex.ClosedJaxpr
    place: list[int]
    origin: list[int]


def attending(
    closed: jex.ClosedJaxpr,
    scopes: Sequence[int],
    alive: Sequence[bool],
    *,
    kernels: bool,
    places: Mapping[Pattern, Places] | None,
) -> Attending:
    """Return the equations with each attention that there is done so.

    **Arguments:** `scopes` and `alive` as of `attention`; `kernels` whether in kernels, where the device has them;
    `places` on several devices where those are that may be done so, None on one.
    """
    jaxpr = closed.jaxpr
    made_by = {} if places is None else makers(closed)
    instead: dict[int, list[Any]] = {}
    gone: set[int] = set()
    for site in attention(closed, scopes, alive):
        where = None if places is None else places.get(site.pattern)
        if places is not None and where is None:
            continue
        turning = where is not None and where.turns > 1
        operands = (site.operands[0], *ungathered(site, made_by)) if turning else site.operands
        params = {"pattern": site.pattern, "kernels": kernels, "places": where}
        info = _compat.in_scope(jaxpr.eqns[site.at], "attention").source_info
        forward = _eqn(ATTENTION, (*operands, *site.leaves), params, [site.result, None, None], info)
        instead[site.at] = [forward]
        if site.gradient is None:
            continue
        sums = forward.outvars[1:]
        read = (*operands, *((site.result,) if kernels or turning else ()), *sums, site.gradient.cotangent)
        at = site.gradient.at
        info = _compat.in_scope(jaxpr.eqns[at], "attention").source_info
        backward = _eqn(GRADIENT, (*read, *site.leaves), params, site.gradient.results, info)
        instead[at] = [backward]
        made = {*site.gradient.results, site.result}
        gone.update(i for i in (site.at, *site.backward) if not made.isdisjoint(jaxpr.eqns[i].outvars))
    eqns: list[Any] = []
    place: list[int] = []
    origin: list[int] = []
    for i, eqn in enumerate(jaxpr.eqns):
        place.append(-1 if i in gone else len(eqns))
        eqns += instead.get(i, [] if i in gone else [eqn])
        origin += [i] * (len(eqns) - len(origin))
    made = _compat.new_jaxpr(jaxpr.constvars, closed.consts, jaxpr.invars, jaxpr.outvars, eqns)
    return Attending(made, place, origin)


def _eqn(
    primitive: jex.Primitive,
    operands: Sequence[Atom],
    params: dict[str, object],
    named: Sequence[jex.Var | None],
    info: SourceInfo,
) -> jex.JaxprEqn:
    """Return the equation, whose results have these names where there are any."""
    types = [jax.ShapeDtypeStruct(shaped(a).shape, shaped(a).dtype) for a in operands]
    made = jax.eval_shape(lambda *of: primitive.bind(*of, **params), *types)
    outvars = [
        _compat.new_var(ShapedArray(a.shape, a.dtype)) if v is None else v
        for a, v in zip(made, named, strict=True)
    ]
    return _compat.new_eqn(operands, outvars, primitive, params, info)
