"""Graph -> its forward passes after the first, in steps that differentiate several times in sequence.

Invariant: a step that differentiates once has none.

Such a pass begins after the previous backward pass: of a perturbed or updated network (sharpness-aware minimisation,
the generator after the discriminator's update, the actor after the critic's), or of the next microbatch. Its values
belong to the forward pass, but are computed in the stage in which they run, and may be recomputed in later stages.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from .._runtime._mechanisms import mechanism
from ._graph import Graph, Node


class LaterPass(NamedTuple):
    """The nodes `start <= id < stop`; those of them that are `forward` form one later forward pass."""

    start: int
    stop: int


@mechanism("separate backward passes", off=lambda _: ())
def later_passes(graph: Graph) -> tuple[LaterPass, ...]:
    """Return the forward passes that follow contractions of one backward pass and are read by another."""
    nodes = graph.nodes
    contractions = (n for n in nodes[graph.forward_stop :] if n.contraction)
    runs = [list(run) for _, run in groupby(contractions, key=lambda n: n.forward)]
    found = []
    for i, run in enumerate(runs):
        if not i or not run[0].forward:
            continue
        behind = runs[i + 1][0].id if i + 1 < len(runs) else len(nodes)
        kernels = [n.id for n in nodes[runs[i - 1][-1].id : behind] if _is_kernel(graph, n)]
        if not kernels:
            continue
        stop = next((n.id for n in nodes[kernels[-1] : behind] if not n.forward), behind)
        if _is_read(graph, kernels[0], stop):
            found.append(LaterPass(kernels[0], stop))
    return tuple(found)


def made_later(passes: Sequence[LaterPass], node: int) -> LaterPass | None:
    """Return the later pass that contains a node, None for none."""
    return next((own for own in passes if own.start <= node < own.stop), None)


def divides(passes: Sequence[LaterPass], cut: int) -> bool:
    """Return whether a stage that begins at this node would begin in the middle of a pass."""
    return any(start < cut < stop for start, stop in passes)


def passes_before(passes: Sequence[LaterPass], node: int) -> int:
    """Return the number of passes that have ended before a node runs."""
    return sum(own.stop <= node for own in passes)


def _is_kernel(graph: Graph, node: Node) -> bool:
    return node.forward and graph.kernel[node.id] and (node.contraction or _large(graph, node))


def _large(graph: Graph, node: Node) -> bool:
    values = (graph.values[v] for v in node.outputs)
    return any(v.materialised and not graph.is_small(v.id) for v in values)


def _is_read(graph: Graph, start: int, stop: int) -> bool:
    """Return whether a later backward pass, not only arithmetic on gradients, reads a large value of these nodes."""
    made = {v for n in graph.nodes[start:stop] if n.forward and _large(graph, n) for v in n.outputs}
    late = (n for n in graph.nodes[stop:] if not n.forward and "transpose(" in n.scope)
    return any(not made.isdisjoint(graph.reads[n.id]) for n in late)
