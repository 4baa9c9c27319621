"""Graph -> the kernels whose result takes over the memory of an operand that dies there."""

from typing import Any

from .._runtime._mechanisms import mechanism
from ._primitive_names import OVERWRITING


def dies_at(graph: Any, v: int, node: Any, nbytes: int | None = None) -> bool:
    """Return whether no later node reads the value (of this size), which the step made, under any schedule.

    Of the forward pass's values it is known where compilers fuse: XLA:CPU may keep them under another kernel's result.
    """
    value = graph.values[v]
    own = value.producer >= 0 and not value.is_output
    own = own and (graph.backend.fuses_reductions or not graph.nodes[value.producer].forward)
    own = own and nbytes in (None, value.nbytes) and graph.last_reader.get(v) == node.id
    return own and graph.kept_by(v, graph.reader_loop(node)) < 0


def _begun(graph: Any) -> frozenset[int]:
    """Return the carries of loops in the memory of what they begin with: it is for nothing else, and none of it runs
    again.
    """
    values, carries = graph.values, (node for node in graph.nodes if node.primitive == "scan_carry")
    begun = (
        (node, values[v]) for node in carries for v in node.inputs if list(graph.readers[v]) == [node.id]
    )
    return frozenset(
        node.id
        for node, value in begun
        if value.producer >= 0 and not value.is_output and value.nbytes == values[node.outputs[0]].nbytes
    )


@mechanism("operands' memory taken over", off=lambda _: frozenset())
def in_place(graph: Any) -> frozenset[int]:
    """Return the nodes of the backward pass whose result takes over the memory of an operand that dies there.

    These are pointwise kernels and those of `OVERWRITING`, with an operand of the result's size that nobody else
    reads later, nor a reduction that is fused into the kernel; and carries, in either pass.
    """
    # what reductions that a fused value hides read, before any of it may be written over
    reduced: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        fused = [v for v in node.outputs if not graph.values[v].materialised]
        hidden = frozenset().union(*(reduced[v] for v in node.inputs if v in reduced)) if fused else None
        if hidden is not None and node.fusion_root:
            hidden = hidden.union(*(graph.sources[v] for v in node.inputs))
        reduced.update((v, hidden) for v in fused if hidden)

    return _begun(graph).union(
        node.id
        for node in graph.nodes
        if (node.primitive in OVERWRITING or not node.fusion_root)
        and not node.forward
        and len(node.outputs) == 1
        for nbytes in (graph.values[node.outputs[0]].nbytes,)
        for read in (frozenset().union(*(reduced[v] for v in node.inputs if v in reduced)),)
        if any(v not in read and dies_at(graph, v, node, nbytes) for v in graph.reads[node.id])
    )
