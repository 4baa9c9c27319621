"""Equations -> the memory order of images' axes, in which they pass barriers.

XLA:GPU stores the images that it convolves in an order of its own (channels before pixels on GPUs before Hopper), and
names their axes in that order from then on. Only a barrier's operands keep the program's order. A kernel with a
reduction would then read one image by two orders, which XLA does not recognise as the same: it moves masks of the
operand, and other results that it would write with the reduction's, to kernels of their own. So images pass barriers
with their axes in memory order and are transposed back behind them. Neither transposition runs a kernel.
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
"""Equations whose results' axes are not their operands'."""


@mechanism("image layouts", off=lambda *_: {})
def axes_in_memory(
    eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node], values: Sequence[Value], chip: Chip | None
) -> dict[int, tuple[int, ...]]:
    """Return the axes of images from the outermost to the innermost in memory, where that is not the program's order;
    none without a chip.
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
    """Return the node that computes the same numbers as a value, -1 for none: gradients read reversed kernels."""
    while (n := values[v].producer) >= 0 and len(nodes[n].inputs) == 1 and not nodes[n].fusion_root:
        (v,) = nodes[n].inputs
    return n
