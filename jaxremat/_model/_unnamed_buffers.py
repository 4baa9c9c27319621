"""Graph -> memory that holds no value of the step: copies of rows, shared work, and what is there before it is wanted.

- Where the compiler does early what it can, a contraction in a loop reads a *row* of a stack in a copy, which is made
  when its stage's part of the iteration begins.
- Rows of an array that the loop writes over are read once, when an iteration begins, and are there until its last
  reader, which is what the update is made of (see `_in_place_stacks`).
- Constants that a kernel wants as arrays are there from an iteration's begin on too: nothing holds them back.
- Fused work that several kernels of a stage want is written for all of them, by the first; `Node.borrows` says what a
  node's expansion (the gauss function in `erfc`) reads of another's.
"""

from collections.abc import Collection, Iterable
from typing import Any

from .._runtime._mechanisms import mechanism
from ._primitive_names import LOOP_SLICES, OVERWRITING


def rows(graph: Any) -> tuple[tuple[int, ...], ...]:
    """For each node the values of which it may read rows that are copied for it; see `copied`."""
    early = graph.backend.hoists and graph.counts_forward
    found = (n.inputs if early and n.contraction and n.loop >= 0 else () for n in graph.nodes)
    return tuple(tuple({row for row in (_row(graph, v) for v in inputs) if row >= 0}) for inputs in found)


def _row(graph: Any, v: int) -> int:
    """The value of which an operand is a row, or a view of one; -1 where it is none."""
    while (producer := graph.values[v].producer) >= 0:
        if graph.nodes[producer].primitive in LOOP_SLICES:
            return v
        if graph.values[v].materialised:
            return v if graph.values[v].length > 1 else -1
        if len(graph.nodes[producer].inputs) != 1:
            break
        (v,) = graph.nodes[producer].inputs
    return -1


def copied(graph: Any, v: int, loop: int) -> bool:
    """Whether what a contraction in this loop reads of one of its `rows`, if that is the original, is a copy made for
    its stage.
    """
    value = graph.values[v]
    made_here = value.materialised and graph.nodes[value.producer].loop == loop
    return not made_here and (loop, graph.array_of.get(v, -1)) not in graph.overwritten


def array_of(graph: Any) -> dict[int, int]:
    """For each row, and each array that is another one written over, that array as it was at first."""
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.inputs and node.primitive in (*LOOP_SLICES, "scan_carry", *OVERWRITING):
            operand: int = node.inputs[0]
            first = found.get(operand, operand)
            found.update((v, first) for v in node.outputs)
    return found


def overwritten(graph: Any) -> frozenset[tuple[int, int]]:
    """Pairs of a loop and an array whose rows its iterations write over, and read."""
    arrays = graph.array_of
    read = {(n.loop, arrays[v]) for n in graph.nodes if n.primitive in LOOP_SLICES for v in n.outputs}
    written = {(n.loop, arrays[n.outputs[0]]) for n in graph.nodes if n.primitive == "dynamic_update_slice"}
    return frozenset(read & written)


@mechanism("buffers that are there early", off=lambda graph: (0,) * len(graph.nodes))
def early(graph: Any) -> tuple[int, ...]:
    """For each node the bytes that are there for it from the begin of its iteration on, where it runs in its own
    place; its constants are too where it is run again.
    """
    found = [n.constant_nbytes if n.loop >= 0 else 0 for n in graph.nodes]
    read: dict[int, frozenset[int]] = {}  # fused value -> the rows in it
    wanted: set[tuple[int, int]] = set()  # by contractions
    last: dict[tuple[int, int], tuple[int, int]] = {}  # -> the last kernel that reads the row, and its bytes
    for node in graph.nodes:
        own = frozenset().union(*(read[v] for v in node.inputs if v in read))
        if (
            node.primitive in LOOP_SLICES
            and (node.loop, graph.array_of[node.outputs[0]]) in graph.overwritten
        ):
            own |= {node.outputs[0]}
        read.update((v, own) for v in node.outputs if own and not graph.values[v].materialised)
        for row in own if graph.kernel[node.id] else ():
            key = node.loop, graph.array_of[row]
            if key in graph.overwritten:
                last[key] = node.id, graph.values[row].nbytes
        wanted.update((node.loop, graph.array_of[v]) for v in graph.rows[node.id] if v in graph.array_of)
    for key, (n, nbytes) in last.items():
        found[n] += nbytes if key in wanted else 0
    return tuple(found)


def shared(graph: Any) -> tuple[tuple[int, ...], ...]:
    """For each kernel the fused nodes in it that the compiler does once for all kernels of a stage."""
    inside: dict[int, frozenset[int]] = {}
    found: list[tuple[int, ...]] = []
    for node in graph.nodes:
        wanted: frozenset[int] = frozenset(node.borrows)
        wanted = wanted.union(*(inside[v] for v in node.inputs if v in inside))
        found.append(tuple(sorted(wanted)) if graph.kernel[node.id] else ())
        wanted = wanted | {node.id} if node.shared_nbytes else wanted
        inside.update((v, wanted) for v in node.outputs if wanted and not graph.values[v].materialised)
    return tuple(found)


def borrows(
    graph: Any, pairs: Iterable[tuple[int, int]], written: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """Of pairs of a node and another whose written work it reads, by node, those of which it is no consequence."""
    found: dict[int, tuple[int, ...]] = {}
    for n, other in sorted(pairs):
        if other in written and not _follows(graph, n, other):
            found[n] = (*found.get(n, ()), other)
    return found


def _follows(graph: Any, n: int, other: int) -> bool:
    """Whether the node is made of another's result in the same kernel."""
    stack, seen = [n], {n}
    while stack:
        for v in graph.nodes[stack.pop()].inputs:
            producer = graph.values[v].producer
            if producer == other:
                return True
            if producer >= 0 and not graph.values[v].materialised and producer not in seen:
                seen.add(producer)
                stack.append(producer)
    return False
