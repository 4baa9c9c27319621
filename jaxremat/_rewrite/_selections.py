"""Comparisons of a value with what was selected from it -> the same, where recomputing cannot come between.

The gradient of a maximum asks which operand equals it. Made again an operand may differ in its last bit from what it
was when the maximum was taken: then none equals it, and the gradient is lost. The same is true of whatever compares a
value with what was selected from it, as of entries not smaller than the k-th largest.

Law: a comparison of an operand with the larger of two is one of the two, exactly. What else compares so runs once,
behind the selection; where the backward pass compares, what was selected from runs once. Compilers too repeat pointwise
work in kernels that select and in kernels that compare: what both are of passes a fence.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._program import _compat
from .._program._primitives import LOOP_EDGES, LOOP_SLICES, is_pointwise
from ._cotangent_chains import in_memory

INSTEAD = {lax.max_p: lax.ge_p, lax.min_p: lax.le_p}
"""What an operand is to the other one if it is the result."""

_SCOPE = "selected_from"

_COMPARING = frozenset({"eq", "ne", "ge", "gt", "le", "lt"})

_SELECTING = frozenset(
    {
        "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "cummax", "cummin",
        "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "jaxremat_hint", "max", "min",
        "optimization_barrier", "pad", "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min",
        "reshape", "rev", "scatter", "scatter-max", "scatter-min", "scatter_max", "scatter_min", "select_n",
        "slice", "sort", "split", "squeeze", "stop_gradient", "top_k", "transpose", *LOOP_EDGES, *LOOP_SLICES,
    }
)  # fmt: skip
"""Of whose results each entry is one of an operand's, as it is."""


def compared_directly(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The equations, as many, where an operand of a maximum or minimum is compared with the other one."""
    chosen: dict[Any, Any] = {}
    eqns = []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive in INSTEAD:
            chosen[eqn.outvars[0]] = eqn
        elif eqn.primitive is lax.eq_p:
            eqn = _directly(eqn, chosen)
        eqns.append(eqn)
    return _with(closed, eqns)


def _directly(eqn: Any, chosen: dict[Any, Any]) -> Any:
    for one, result in (eqn.invars, eqn.invars[::-1]):
        choice = None if _compat.is_literal(result) else chosen.get(result)
        if choice is not None and any(one is operand for operand in choice.invars):
            a, b = choice.invars
            primitive = INSTEAD[choice.primitive]
            return eqn.replace(invars=[one, b if one is a else a], primitive=primitive)
    return eqn


def of_one_run(eqns: Sequence[Any], late: Sequence[bool]) -> set[int]:
    """The equations that may not run again, lest a value is compared with what was selected from another run's.

    **Arguments:** `late` of each equation whether it is of the backward pass.
    """
    return {j for i, shared in _compared(eqns).items() for j in (shared if late[i] else (i,))}


def marked(closed: jex.ClosedJaxpr, alive: Sequence[bool]) -> jex.ClosedJaxpr:
    """The equations, as many, those under one more name that a compiler should not repeat in a kernel that selects and
    in one that compares: what it makes twice may differ in its last bit too.

    **Arguments:** `alive` of each equation whether anything needs it.
    """
    direct = compared_directly(closed)
    made = _made_twice(direct.jaxpr.eqns, alive)
    return _with(
        direct, [_compat.in_scope(e, _SCOPE) if i in made else e for i, e in enumerate(direct.jaxpr.eqns)]
    )


def is_marked(eqn: Any) -> bool:
    """Whether it is one of those. Loops and calls may have their names from one."""
    return _compat.has_scope(eqn, _SCOPE) and is_pointwise(eqn)


def settled(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The equations of a body that is compiled as it stands, where what both are of passes a fence."""
    direct = compared_directly(closed)
    made = _made_twice(direct.jaxpr.eqns, _alive(direct.jaxpr))
    parts = (in_memory(e) if i in made else [e] for i, e in enumerate(direct.jaxpr.eqns))
    return _with(direct, [eqn for part in parts for eqn in part])


def _with(closed: jex.ClosedJaxpr, eqns: list[Any]) -> jex.ClosedJaxpr:
    jaxpr = closed.jaxpr
    return _compat.new_jaxpr(jaxpr.constvars, closed.consts, jaxpr.invars, jaxpr.outvars, eqns)


def _alive(jaxpr: Any) -> list[bool]:
    needed = set(_compat.variables(jaxpr.outvars))
    found = []
    for eqn in reversed(jaxpr.eqns):
        found.append(bool(eqn.effects) or not needed.isdisjoint(eqn.outvars))
        if found[-1]:
            needed.update(_compat.variables(eqn.invars))
    return found[::-1]


def _made_twice(eqns: Sequence[Any], alive: Sequence[bool]) -> set[int]:
    """The equations that compilers repeat in a kernel that selects and in one that compares."""
    shared = {j for i, own in _compared(eqns).items() if alive[i] for j in own}
    return {i for i in shared if is_pointwise(eqns[i]) and len(eqns[i].outvars) == 1}


def _compared(eqns: Sequence[Any]) -> dict[int, frozenset[int]]:
    """The comparisons of values with what was selected from them, and the equations that made the entries of both."""
    # of each value the equations that made its entries, selections left out; none made those of arguments
    sources: dict[Any, frozenset[int]] = {}
    found: dict[int, frozenset[int]] = {}
    for i, eqn in enumerate(eqns):
        read = [sources.get(v, frozenset()) for v in _compat.variables(eqn.invars) if _is_real(v)]
        two = eqn.primitive.name in _COMPARING and len(read) == 2 and eqn.invars[0] is not eqn.invars[1]
        if two and (shared := read[0] & read[1]):
            found[i] = shared
        own = frozenset().union(*read) if eqn.primitive.name in _SELECTING else frozenset({i})
        sources.update(dict.fromkeys(eqn.outvars, own))
    return found


def _is_real(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.floating)
