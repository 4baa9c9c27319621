"""Graph, iterations of its loops compiled alone -> the same with what their kernels have in memory beside its values.

The compiler orders the kernels of an iteration as it likes, copies rows of the arrays that the loop runs over, makes
one kernel of two updates, and parts of sums before it adds them up. So of each kernel what is there while it runs is
compared with what the graph says. Law: where all is saved, an iteration needs at least what it needs compiled alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from .._compiler._attribution import Values, purposes
from .._compiler._hlo import Module
from .._compiler._liveness import lives
from .._model._graph import Graph, Node
from .._model._primitive_names import LOOP_EDGES
from ._iteration import Iteration


def with_beside(graph: Graph, alone: Mapping[int, tuple[Iteration, Module]]) -> Graph:
    """The graph with more scratch memory for the nodes of loops, of which some are compiled alone."""
    more: dict[int, int] = {}
    for loop, (iteration, module) in alone.items():
        nodes = [node for node in graph.nodes if node.loop == loop]
        known, near = _counted(graph, nodes), kernel_of(graph, nodes)
        for n, nbytes in _there(module).items():
            at = near[iteration.places[n]]
            more[at] = max(more.get(at, 0), nbytes - known[at])
    nodes = (replace(n, workspace_nbytes=n.workspace_nbytes + more.get(n.id, 0)) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _there(module: Module) -> dict[int, int]:
    """For each tag the most bytes that are there while a kernel of that equation runs, without what it leaves."""
    computation = module.computations[module.entry]
    change = [0] * (len(computation.instructions) + 1)
    for life in lives(module, module.entry):
        change[life.born] += life.buffer.nbytes
        change[life.dies + 1] -= life.buffer.nbytes
    known = purposes(module, computation, Values({}, {}))
    found: dict[int, int] = {}
    tags: set[int] = set()
    now = 0
    for position, delta in enumerate(change[:-1]):
        now += delta
        tags = known.wanted[position] or tags  # what is nobody's comes right behind what it is for
        found.update((n, max(found.get(n, 0), now)) for n in tags)
    return found


def _counted(graph: Graph, nodes: list[Node]) -> dict[int, int]:
    """For each kernel of a loop's body the bytes of what the body makes for itself that are there while it runs."""
    kernels = [node for node in nodes if graph.kernel[node.id] or node is nodes[-1]]
    place = {node.id: i for i, node in enumerate(kernels)}
    last: dict[int, int] = {}
    for i, node in enumerate(kernels):
        last.update(dict.fromkeys(graph.reads[node.id], i))
    leaving = {v for node in nodes if node.primitive == "scan_last" for v in node.inputs}
    change = [0] * (len(kernels) + 1)
    for node in kernels:
        if node.primitive in LOOP_EDGES or node.primitive == "dynamic_update_slice":
            continue
        for v in node.outputs:
            value = graph.values[v]
            begin = place[node.id] + (node.id in graph.in_place)
            end = last.get(v, place[node.id])
            if value.materialised and v not in leaving and begin <= end:
                change[begin] += value.nbytes
                change[end + 1] -= value.nbytes
    now, found = 0, {}
    for node, delta in zip(kernels, change, strict=False):
        now += delta
        found[node.id] = now
    return found


def kernel_of(graph: Graph, nodes: list[Node]) -> dict[int, int]:
    """For each node of a body the kernel that it is part of: the next one, else the last."""
    kernels = [node.id for node in nodes if graph.kernel[node.id] and node.primitive not in LOOP_EDGES]
    found: dict[int, int] = {}
    following = kernels[-1] if kernels else nodes[-1].id
    for node in reversed(nodes):
        following = node.id if node.id in kernels else following
        found[node.id] = following
    return found
