"""Equations -> images' axes in the order of memory, in which they pass barriers.

XLA:GPU keeps what it convolves in an order of its own, on GPUs before Hopper with channels before pixels, and calls its
axes by that order from then on; only what passes a barrier keeps the program's own names for them. A kernel that
reduces would then read the same order by two names, which XLA does not look through: it leaves the masks of what has
passed, and other results that it writes with a reduction's otherwise, to kernels of their own.

So images pass with their axes in the order of memory and are turned round behind the barrier: no kernel runs for
either.
"""

from collections.abc import Sequence

import jax.extend.core as jex

from .._model._device_specs import Chip
from .._model._graph import Node, Value
from .._program._compat import shaped
from .._runtime._mechanisms import mechanism

_OTHERWISE = frozenset(
    {"transpose", "reshape", "broadcast_in_dim", "dot_general", "gather", "sort", "scan", "while", "cond"}
)
"""Results of these have no axes that are their operands'."""


@mechanism("image layouts", off=lambda *_: {})
def axes_in_memory(
    eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node], values: Sequence[Value], chip: Chip | None
) -> dict[int, tuple[int, ...]]:
    """Return for values that are images their axes from the outermost to the innermost, where that is not the
    program's order; none without a chip.
    """
    found: dict[int, tuple[int, ...]] = {}
    if chip is None:
        return found
    for node, eqn in zip(nodes, eqns, strict=True):
        if eqn.primitive.name == "conv_general_dilated":
            (made,) = node.outputs
            kernel, dtype = _root(nodes, values, node.inputs[-1]), shaped(eqn.outvars[0]).dtype
            image, channel, *pixels = eqn.params["dimension_numbers"].out_spec
            last = chip.channels_last(str(dtype))
            axes = (image, *pixels, channel) if last else (image, channel, *pixels)
            # The convolution that makes a kernel's gradient reads a cotangent in the kernel's place.
            if (kernel < 0 or nodes[kernel].forward) and axes != tuple(sorted(axes)):
                found[made] = axes
        elif eqn.primitive.name not in _OTHERWISE:
            axes = next((found[v] for v in node.inputs if v in found), ())
            alike = (
                v for v, var in zip(node.outputs, eqn.outvars, strict=True) if _rank(var) == len(axes) > 0
            )
            found.update((v, axes) for v in alike)
    return found


def _rank(var: jex.Var) -> int:
    return len(getattr(var.aval, "shape", ()))


def _root(nodes: Sequence[Node], values: Sequence[Value], v: int) -> int:
    """Return the node that makes what a value is the same numbers as, -1 for none: gradients read reversed
    kernels.
    """
    while (n := values[v].producer) >= 0 and len(nodes[n].inputs) == 1 and not nodes[n].fusion_root:
        (v,) = nodes[n].inputs
    return n
