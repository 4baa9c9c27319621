"""Contraction's operand -> the name under which it last passed a fence, if it has passed one.

A library that multiplies matrices wants its operands in layouts of its own, and the kernel that makes a value writes it
in as many as its readers want. What recomputation reads of a saved value comes through a fence, in one of them. Were
the stage's own products, or later ones, to read the original, it would be kept in theirs as well, from the forward
pass on. So they read what has passed: it is there once, and copied where a product runs.
"""

from collections.abc import Mapping
from typing import Any

from .._program import _compat
from .._program._primitives import is_relabelling


def remember(emitter: Any, renamed: Mapping[Any, Any]) -> None:
    """Note the fenced names of the saved values among what has passed a fence outside of loops."""
    if emitter.graph.backend.fuses and not emitter.graph.loop_stop:
        saved = (a for a in renamed if emitter.value_of.get(a) in emitter.schedule.saved)
        emitter.names_behind.update((a, renamed[a]) for a in saved)


def fenced_name(emitter: Any, n: int, var: Any) -> Any:
    """What equation `n` reads in place of a variable, None where that stays; appends the views that it is behind."""
    if n not in emitter.hazards.loads:
        return None
    views: list[Any] = []
    name = var
    while name not in emitter.names_behind:
        v = emitter.value_of.get(name)
        if v is None or emitter.graph.values[v].materialised or not emitter.graph.is_residual(v):
            return None
        eqn = emitter.source[emitter.maker(name)]
        operands = _compat.variables(eqn.invars)
        if not is_relabelling(eqn) or len(operands) != 1:
            return None
        views.append(eqn)
        (name,) = operands
    for eqn in reversed(views):
        (made,), outvar = eqn.outvars, _compat.new_var(eqn.outvars[0].aval)
        emitter.append([eqn.replace(invars=[emitter.names_behind[name]], outvars=[outvar])], [-1])
        emitter.names_behind[made], name = outvar, made
    return emitter.names_behind[var]
