"""Comparisons of a value with a selection from it -> the same, with both computed from one run of the value.

The gradient of a maximum asks which operand equals it. A recomputed operand may differ in its last bit: then none
equals the maximum, and the gradient is lost. The same holds for every comparison of a value with a selection from it,
such as of entries with the k-th largest.

Invariant: a comparison of an operand with the larger of two becomes a comparison of the two, exactly. Other such
comparisons run once (`_decisions`). Compilers also repeat pointwise work in kernels that select and in kernels that
compare, so the common operand passes a barrier, and so does the mask: otherwise the compiler keeps the mask's operand
for the backward pass, at four times the size. A comparison of two computed numbers with several readers passes a
barrier too: a compiler repeats it in each reader, from a difference that one kernel rounds and another does not.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import jax.extend.core as jex
from jax import lax

from .._program import _compat
from .._program._primitives import is_pointwise
from .._program._splice import needed
from ._cotangent_chains import in_memory
from ._decisions import decisions
from ._domain_edges import CHOICES
from ._flat_program import with_eqns

INSTEAD = {lax.max_p: lax.ge_p, lax.min_p: lax.le_p}
"""For each selection of two operands, the comparison of the operands that tells whether the first is the result."""

_SCOPE = "selected_from"


def compared_directly(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Return the equations, as many, with an operand of a maximum or minimum compared with the other operand."""
    chosen: dict[Any, Any] = {}
    eqns = []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive in INSTEAD:
            chosen[eqn.outvars[0]] = eqn
        elif eqn.primitive is lax.eq_p:
            eqn = _directly(eqn, chosen)
        eqns.append(eqn)
    return with_eqns(closed, eqns)


def _directly(eqn: jex.JaxprEqn, chosen: dict[jex.Var, jex.JaxprEqn]) -> jex.JaxprEqn:
    for one, result in (eqn.invars, eqn.invars[::-1]):
        choice = None if _compat.is_literal(result) else chosen.get(result)
        if choice is not None and any(one is operand for operand in choice.invars):
            a, b = choice.invars
            primitive = INSTEAD[choice.primitive]
            return eqn.replace(invars=[one, b if one is a else a], primitive=primitive)
    return eqn


def marked(closed: jex.ClosedJaxpr, alive: Sequence[bool]) -> jex.ClosedJaxpr:
    """Return the equations, the same number, with one more scope on those that a compiler should not repeat in several
    kernels: their copies may differ in the last bit too.

    **Arguments:** `alive` for each equation whether anything needs it.
    """
    direct = compared_directly(closed)
    made = _made_twice(direct.jaxpr.eqns, [i for i, is_so in enumerate(alive) if is_so])
    return with_eqns(
        direct, [_compat.in_scope(e, _SCOPE) if i in made else e for i, e in enumerate(direct.jaxpr.eqns)]
    )


def is_marked(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation has this scope itself. Loops and calls may inherit it."""
    return _compat.has_scope(eqn, _SCOPE) and is_pointwise(eqn)


def settled(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Return the equations of a body that is compiled unchanged, with barriers behind the operands of both."""
    direct = compared_directly(closed)
    made = _made_twice(direct.jaxpr.eqns, needed(direct.jaxpr.eqns, direct.jaxpr.outvars))
    parts = (in_memory(e) if i in made else [e] for i, e in enumerate(direct.jaxpr.eqns))
    return with_eqns(direct, [eqn for part in parts for eqn in part])


def _made_twice(eqns: Sequence[jex.JaxprEqn], alive: Sequence[int]) -> set[int]:
    """Return the equations that compilers repeat in several kernels whose results must agree."""
    found = decisions(eqns)
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    shared = {
        j
        for i in found.selected.intersection(alive)
        for j in _selected_itself(eqns, maker, i) or found.compared[i]
    }
    readers = Counter(v for i in alive for v in set(_compat.variables(eqns[i].invars)))
    several = {i for i in found.compared if sum(readers[v] for v in eqns[i].outvars) > 1}
    # Calls and loops that compare inside are among the comparisons too; no kernel repeats those.
    made = shared | (found.selected | several).intersection(alive)
    return {i for i in made if is_pointwise(eqns[i]) and len(eqns[i].outvars) == 1}


def _selected_itself(eqns: Sequence[jex.JaxprEqn], maker: Mapping[jex.Var, int], i: int) -> set[int]:
    """Return the equation of a comparison's operand if the other operand was selected directly from it, as in `a ==
    a.max()`: kernels that read this operand agree, and the operands behind it do not matter.
    """
    for one, other in permutations(_compat.variables(eqns[i].invars), 2):
        choice = _moved_from(eqns, maker, other)
        if choice is None or choice.primitive.name not in CHOICES or one not in maker:
            continue
        if any(one is a for a in choice.invars) and is_pointwise(eqns[maker[one]]):
            return {maker[one]}
    return set()


def _moved_from(
    eqns: Sequence[jex.JaxprEqn], maker: Mapping[jex.Var, int], v: jex.Var
) -> jex.JaxprEqn | None:
    """Return the equation that computed the entries of a reshaped variable; None if they are an argument's."""
    while v in maker and eqns[maker[v]].primitive.name in ("broadcast_in_dim", "reshape", "squeeze"):
        moved = _compat.variables(eqns[maker[v]].invars)
        if len(moved) != 1:  # a constant
            return None
        (v,) = moved
    return eqns[maker[v]] if v in maker else None
