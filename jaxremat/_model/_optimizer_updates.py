"""Graph + cuts -> stages: the results that mark the end of each stage, and the updates that wait for the next barrier.

Invariant: every node that reads a deferred node's results is deferred with it.

A barrier must wait for the stage before it. A stage has ended when the results that no later backward work reads are
computed: weight gradients, statistics. The compiler drops an operand of a barrier whose result nobody reads. So either
the update's results pass the barrier, or the gradient does, and its update waits behind the barrier.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ._graph import Graph, Node, Stage
from ._later_passes import later_passes
from ._primitive_names import PUT

SMALL = 64
"""Results up to this multiple of `Graph.small_nbytes` count as finished even if the backward pass reads them later."""

_OWN_LAYOUT = frozenset({"conv_general_dilated"})


def with_updates(graph: Graph, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages between the cuts (ascending node ids), with their finished values and deferred nodes."""
    return _Updates(graph, cuts).stages()


def finishing_sums(graph: Graph) -> tuple[Stage, ...]:
    """Return the stages, whose finished values now include final results of reductions, if they include those of
    products.

    Reductions share operands with the products, so they normally run in time. But with copies in parallel to kernels,
    the compiler schedules around the copies, and delays results that nothing waits for, with all their operands.
    """
    updates = _Updates(graph, [*(stage.start for stage in graph.stages), len(graph.nodes)])
    left = (updates.sums(range(stage.start, stage.stop)) for stage in graph.stages)
    return tuple(
        replace(stage, finished=(*stage.finished, *more))
        for stage, more in zip(graph.stages, left, strict=True)
    )


def updated_alone(graph: Graph) -> list[int]:
    """Return the donated arguments that neither the forward pass nor a product reads, in reading order: optimizer
    state.
    """
    first: dict[int, int] = {}
    used: set[int] = set()
    for node in graph.nodes:
        first.update((v, node.id) for v in node.inputs if v not in first)
        if node.id < graph.forward_stop or node.fusion_root:
            used.update(node.inputs)
    return sorted((graph.donated & first.keys()) - used, key=first.__getitem__)


class _Updates:
    def __init__(self, graph: Graph, cuts: Sequence[int]):
        self.graph = graph
        self.cuts = cuts
        self.readers = _readers(graph)
        self.stage_of: dict[int, int] = {n: k for k, (a, b) in enumerate(pairwise(cuts)) for n in range(a, b)}
        self.final = _last_contractions(graph, self.readers)
        # copies to host memory, which the step returns; each stands somewhere after its operand
        self.leaving = {n.id for n in graph.nodes if n.primitive == PUT}
        self.returned = {v for n in self.leaving for v in graph.nodes[n].inputs}
        self.overwriting = self._overwriting()
        self.prompt: set[int] = set()  # the nodes of updates that run in the stage of their gradient
        finished = self._settled if graph.backend.fuses_reductions else self._finished
        self.finished = [finished(range(a, b)) for a, b in pairwise(cuts)]

    def stages(self) -> tuple[Stage, ...]:
        return tuple(
            Stage(a, b, tuple(self.finished[k]), tuple(sorted(self._deferred(k))))
            for k, (a, b) in enumerate(pairwise(self.cuts))
        )

    def _finished(self, nodes: range) -> list[int]:
        """Return the results of heavy work that are small, or that end a line of work and must not be delayed.

        The latter free larger operands, or go into the update of a donated argument, which must not be delayed either.
        """
        return [v for node in self._fusion_root(nodes) for v in node.outputs if self._counts(node.id, v)]

    def _fusion_root(self, nodes: range) -> list[Node]:
        return [n for n in self.graph.nodes[nodes.start : nodes.stop] if n.fusion_root and not n.forward]

    def _counts(self, n: int, v: int) -> bool:
        graph = self.graph
        if self._leaving(n) and graph.nodes[n].primitive not in ("scan_last", "scan_stack"):
            return False  # the value is not visible outside the loop
        made = graph.values[v].nbytes
        read = sum(graph.values[u].nbytes for u in graph.nodes[n].inputs)
        ends = n in self.final and (made <= read or n in self.overwriting)
        return made > 0 and (ends or made <= SMALL * graph.small_nbytes)

    def _leaving(self, n: int) -> bool:
        """Return whether the stage of the node ends with the loop that it begins in."""
        k = self.stage_of[n]
        start, stop = self.cuts[k : k + 2]
        loop = self.graph.nodes[start].loop
        return loop >= 0 and self.graph.loop_stop[loop] == stop

    def _settled(self, nodes: range) -> list[int]:
        """Return the final results of lines of work, in a form that splits no kernel in two.

        If the whole update of a line can run within the stage, these are the step's outputs that it leads to: a
        barrier's operands are written to memory, as updated arguments are in any case; all of them pass, or the
        compiler computes them separately. Otherwise it is the result as its readers want it, such as the transposed
        product. Convolutions always pass their result: libraries write it in a layout of their own, in which the
        updated arguments would pass, to be copied afterwards. Results that the backward pass still reads need no
        barrier to be computed in time.
        """
        ends = self._ends(nodes)
        return self._left_behind([(n, v) for n, v in ends if n.contraction] or ends, nodes)

    def sums(self, nodes: range) -> list[int]:
        """Return the final results of the stage's reductions, if it also has final results of products."""
        ends = self._ends(nodes)
        reduced = [(n, v) for n, v in ends if not n.contraction]
        return self._left_behind(reduced, nodes) if len(reduced) < len(ends) else []

    def _ends(self, nodes: range) -> list[tuple[Node, int]]:
        """Return the final results of lines of heavy work, with their producers."""
        ends = [(n, v) for n in self._fusion_root(nodes) if n.id in self.final for v in n.outputs]
        return [(n, v) for n, v in ends if self._counts(n.id, v)]

    def _left_behind(self, ends: Sequence[tuple[Node, int]], nodes: range) -> list[int]:
        found: dict[int, None] = {}
        for node, v in ends:
            updated = () if node.primitive in _OWN_LAYOUT else self._updated(v, nodes)
            found.update(dict.fromkeys(updated or (self._moved(v, nodes),)))
        return list(found)

    def _update(self, v: int, nodes: range) -> set[int]:
        """Return all nodes that follow from a value if they are fused and lie in this range, otherwise none."""
        update: set[int] = set()
        stack = [v]
        while stack:
            for n in self.readers[stack.pop()]:
                if n not in nodes or self.graph.nodes[n].fusion_root:
                    return set()
                if n not in update:
                    update.add(n)
                    stack.extend(self.graph.nodes[n].outputs)
        return update

    def _updated(self, v: int, nodes: range) -> tuple[int, ...]:
        """Return the outputs of the update that a value leads to; none if not all of it can run in the stage, or if a
        later stage reads an argument that it overwrites.
        """
        graph, update = self.graph, self._update(v, nodes)
        over = graph.donated.intersection(u for n in update for u in graph.nodes[n].inputs)
        if any(m >= nodes.stop for u in over for m in self.readers[u]):
            return ()
        outputs = tuple(
            u
            for n in sorted(update)
            for u in graph.nodes[n].outputs
            if graph.values[u].is_output or u in self.returned
        )
        if outputs:
            self.prompt |= update
        return outputs

    def _moved(self, v: int, nodes: range) -> int:
        """Return a result as its readers want it, after the unary operations that its kernel applies at its end.

        Behind the barrier the update's kernel would apply them, and could then not write in place.
        """
        graph = self.graph
        while len(self.readers[v]) == 1:
            node = graph.nodes[self.readers[v][0]]
            same = (
                len(node.inputs) == 1 and len(node.outputs) == 1 and not node.fusion_root and node.id in nodes
            )
            if not same or graph.values[node.outputs[0]].nbytes != graph.values[v].nbytes:
                break
            v = node.outputs[0]
        return v

    def _overwriting(self) -> set[int]:
        """Return the nodes that read a donated argument, and those that lead to such a node."""
        found: set[int] = set()
        for node in reversed(self.graph.nodes):
            reads = not self.graph.donated.isdisjoint(node.inputs)
            if reads or any(m in found for v in node.outputs for m in self.readers[v]):
                found.add(node.id)
        return found

    def _deferred(self, k: int) -> set[int]:
        """Return the updates of a stage that wait for the next barrier."""
        deferred: set[int] = set()
        for v in self.finished[k]:
            update = self._update(v, range(self.cuts[k], self.cuts[k + 1]))
            if not any(map(self._is_bound, update)):
                deferred |= update
        return deferred

    def _is_bound(self, n: int) -> bool:
        """Return whether a node cannot wait: it is in a loop, may run only once, or would keep a residual in memory
        until then.
        """
        node = self.graph.nodes[n]
        runs_here = node.loop >= 0 or not node.repeatable or n in self.leaving or n in self.prompt
        return runs_here or any(map(self._held, node.inputs))

    def _held(self, v: int) -> bool:
        """Return whether the value is a large residual, which a deferred update would keep in memory."""
        before = self.graph.values[v].producer < self.cuts[0]
        return self.graph.is_residual(v) and before and self.graph.values[v].nbytes > self.graph.small_nbytes


def _readers(graph: Graph) -> list[list[int]]:
    """Return the nodes that read each value, except copies to host memory, which return it."""
    return [[n for n in readers if graph.nodes[n].primitive != PUT] for readers in graph.readers]


def _last_contractions(graph: Graph, readers: list[list[int]]) -> set[int]:
    """Return the nodes from whose results no contraction follows, except those of later forward passes."""
    passes = later_passes(graph)
    leads: set[int] = set()  # nodes that are contractions or lead to one
    last = set()
    for node in reversed(graph.nodes):
        begun = next((own.start for own in passes if node.id < own.start), len(graph.nodes))
        following = (m for v in node.outputs for m in readers[v])
        if all(m not in leads or m >= begun for m in following):
            last.add(node.id)
        if node.id not in last or node.contraction:
            leads.add(node.id)
    return last
