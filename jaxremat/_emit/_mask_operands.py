"""Mask made of a result in place of its operand (see `_masks`) -> the same, reading the result behind a fence.

What XLA sees to be `max(x, 0) > 0` it computes of `x` within the kernels that read the mask, and keeps `x` for them. A
fence of its own hides from these what the result is made of. It costs nothing: the result is in memory when it passes,
where the backward pass wants it, and all others read it in front.

Law: a fence stands only before masks that kernels of the backward pass make themselves, of a result that is saved on
the device. Loops of the backward pass read results from a stack, of which nothing else is known.
"""

from typing import Any

from .._program import _compat
from .._runtime._mechanisms import mechanism
from ._layouts import append_fence


@mechanism("results of masks behind fences", off=lambda _, __, eqn: eqn)
def behind_fence(emitter: Any, n: int, eqn: Any) -> Any:
    """The equation of a node of the forward pass; appends the fence that it is behind, if any."""
    if n not in emitter.traced.masked:
        return eqn
    graph, schedule = emitter.graph, emitter.schedule
    (mask,) = graph.nodes[n].outputs
    (result,) = graph.nodes[n].inputs
    if graph.values[mask].materialised:  # by the kernel that makes the result: that need not read it again
        operand = emitter.traced.masked[n]
        return eqn.replace(invars=[a if _compat.is_literal(a) else operand for a in eqn.invars])
    stays = result in schedule.saved and result not in schedule.away and not graph.is_small(result)
    if not stays or graph.values[result].length:
        return eqn
    variable = emitter.variable[result]
    if variable not in emitter.mask_operands:
        scope, loop = "fence_mask", graph.nodes[n].loop
        name = emitter.passed.get(variable, variable)
        (emitter.mask_operands[variable],) = append_fence(
            emitter, [variable], [name], scope, loop, eqn.source_info, emitter.barrier
        )
    return eqn.replace(
        invars=[a if _compat.is_literal(a) else emitter.mask_operands[variable] for a in eqn.invars]
    )
