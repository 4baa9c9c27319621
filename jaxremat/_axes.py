"""Equations -> images' axes in the order of memory, in which they pass fences.

XLA:GPU keeps what it convolves in the order that cuDNN computes in, for numbers of 32 bits and more channels before
pixels, and calls its axes by that order from then on; only what passes a fence keeps the program's own names for them.
A kernel that reduces would then read the same order by two names, which XLA does not look through: it leaves the masks
of what has passed, and other results that it writes with a reduction's otherwise, to kernels of their own.

So images pass with their axes in the order of memory and are turned round behind the fence: no kernel runs for either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from . import _compat
from ._graph import Graph

_OTHERWISE = frozenset(
    {"transpose", "reshape", "broadcast_in_dim", "dot_general", "gather", "sort", "scan", "while", "cond"}
)
"""Results of these have no axes that are their operands'."""


def axes_in_memory(graph: Graph, eqns: Sequence[Any]) -> dict[Any, tuple[int, ...]]:
    """For variables that hold images their axes from the outermost to the innermost, where that is not the program's
    order.
    """
    found: dict[Any, tuple[int, ...]] = {}
    if not graph.backend.fuses:
        return found
    for node, eqn in zip(graph.nodes, eqns, strict=True):
        if eqn.primitive.name == "conv_general_dilated":
            (made,), kernel = eqn.outvars, graph.values[node.inputs[-1]].producer
            axes = tuple(eqn.params["dimension_numbers"].out_spec)
            wide = jnp.issubdtype(made.aval.dtype, jnp.floating) and made.aval.dtype.itemsize >= 4
            is_image = kernel < 0 or graph.nodes[kernel].forward  # the other kind makes a kernel's gradient
            if wide and is_image and axes != tuple(range(len(axes))):
                found[made] = axes
        elif eqn.primitive.name not in _OTHERWISE:
            known = (found[a] for a in _compat.variables(eqn.invars) if a in found)
            if axes := next(known, ()):
                found.update((v, axes) for v in eqn.outvars if len(getattr(v.aval, "shape", ())) == len(axes))
    return found


def append_fence(
    emitter: Any,
    variables: Sequence[Any],
    operands: Sequence[Any],
    scope: str,
    loop: int,
    source_info: Any,
    fence: Callable[..., Any] = _compat.barrier,
) -> list[Any]:
    """Append a fence to what an emitter has in a loop, -1 for none; returns the operands' fenced names.

    **Arguments:** `variables` the step's own whose values the operands are; `fence` makes the fence's equation.
    """
    axes = [emitter.axes.get(v) for v in variables]
    turned = [
        _compat.permuted(a, order, source_info) if order else None
        for a, order in zip(operands, axes, strict=True)
    ]
    passing = [eqn.outvars[0] if eqn else a for a, eqn in zip(operands, turned, strict=True)]
    passed = [_compat.new_var(a.aval) for a in passing]
    back = [
        _compat.permuted(a, [order.index(axis) for axis in range(len(order))], source_info) if order else None
        for a, order in zip(passed, axes, strict=True)
    ]
    eqns = [*filter(None, turned), fence(passing, passed, source_info), *filter(None, back)]
    emitter.append([_compat.in_scope(eqn, scope) for eqn in eqns], [loop] * len(eqns))
    return [eqn.outvars[0] if eqn else a for a, eqn in zip(passed, back, strict=True)]
