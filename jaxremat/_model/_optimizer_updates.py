"""Graph + cuts -> stages: what each stage leaves behind for the optimizer, and which updates wait for a later barrier.

A barrier must wait for the stage before it, and what says that a stage is done are the results that nothing else goes
on from: weight gradients, statistics. They are held until a later barrier, with the updates behind it. Two reasons: the
compiler drops what passes a barrier and is read by nobody; and it copies every donated argument that is overwritten
before its last reader is known to be done.

Law: whatever reads a deferred node's results is deferred with it or longer, or runs after it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ._graph import Graph, Node, Stage
from ._later_passes import later_passes
from ._primitive_names import PUT

SMALL = 64
"""Results up to this multiple of `Graph.small_nbytes` count as finished even where the backward pass reads on."""

_OWN_LAYOUT = frozenset({"conv_general_dilated"})


def with_updates(graph: Graph, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages between the cuts, ascending node ids, with what they finish and defer."""
    return _Updates(graph, cuts).stages()


def finishing_sums(graph: Graph) -> tuple[Stage, ...]:
    """Return the stages, which finish also what reductions leave behind that ends lines of work, where they have
    products to finish.

    As they read what those read, they are done with them. But where copies run beside the kernels, the compiler orders
    kernels by that, and puts off what nobody waits for, with all that it is made of.
    """
    updates = _Updates(graph, [*(stage.start for stage in graph.stages), len(graph.nodes)])
    left = (updates.sums(range(stage.start, stage.stop)) for stage in graph.stages)
    return tuple(
        replace(stage, finished=(*stage.finished, *more))
        for stage, more in zip(graph.stages, left, strict=True)
    )


def updated_alone(graph: Graph) -> list[int]:
    """Return the donated arguments that are read to be updated alone, neither by the forward pass nor by a product,
    as an optimizer's state is: in the order in which they are read.
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
        # copies to host memory, each somewhere behind what it copies and returns
        self.leaving = {n.id for n in graph.nodes if n.primitive == PUT}
        self.returned = {v for n in self.leaving for v in graph.nodes[n].inputs}
        self.overwriting = self._overwriting()
        self.prompt: set[int] = set()  # the nodes of updates that run in the stage of their gradient
        finished = self._settled if graph.backend.fuses_reductions else self._finished
        self.finished = [finished(range(a, b)) for a, b in pairwise(cuts)]

    def stages(self) -> tuple[Stage, ...]:
        waits = self._waits()
        return tuple(
            Stage(a, b, tuple(done), tuple((n, waits[n]) for n in range(a, b) if n in waits))
            for (a, b), done in zip(pairwise(self.cuts), self.finished, strict=True)
        )

    def _finished(self, nodes: range) -> list[int]:
        """Return the results of heavy work that are small, or that end a line of work and should not be put off.

        These free larger operands, or go into the update of a donated argument, which must not be put off either.
        """
        return [v for node in self._fusion_root(nodes) for v in node.outputs if self._counts(node.id, v)]

    def _fusion_root(self, nodes: range) -> list[Node]:
        return [n for n in self.graph.nodes[nodes.start : nodes.stop] if n.fusion_root and not n.forward]

    def _counts(self, n: int, v: int) -> bool:
        graph = self.graph
        if self._leaving(n) and graph.nodes[n].primitive not in ("scan_last", "scan_stack"):
            return False  # it is not to be seen behind the loop
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
        """Return what ends a line of work, in the form that cuts no kernel in two.


        Those are the step's outputs that the line leads to, where all of its update can run within the stage: what
        passes a barrier is written, and updated arguments are in any case; all of them pass, lest the compiler compute
        them apart. Else it is what its readers want, such as the transposed product. So it is for convolutions, which
        libraries write in a layout of their own: the updated arguments would pass in that layout, and be copied. What
        the backward pass goes on from needs no barrier to be done in time.
        """
        ends = self._ends(nodes)
        return self._left_behind([(n, v) for n, v in ends if n.contraction] or ends, nodes)

    def sums(self, nodes: range) -> list[int]:
        """Return what the stage's reductions leave behind, if what it finishes are products alone."""
        ends = self._ends(nodes)
        reduced = [(n, v) for n, v in ends if not n.contraction]
        return self._left_behind(reduced, nodes) if len(reduced) < len(ends) else []

    def _ends(self, nodes: range) -> list[tuple[Node, int]]:
        """Return the results of heavy work that end lines of it, and who makes them."""
        ends = [(n, v) for n in self._fusion_root(nodes) if n.id in self.final for v in n.outputs]
        return [(n, v) for n, v in ends if self._counts(n.id, v)]

    def _left_behind(self, ends: Sequence[tuple[Node, int]], nodes: range) -> list[int]:
        found: dict[int, None] = {}
        for node, v in ends:
            updated = () if node.primitive in _OWN_LAYOUT else self._updated(v, nodes)
            found.update(dict.fromkeys(updated or (self._moved(v, nodes),)))
        return list(found)

    def _updated(self, v: int, nodes: range) -> tuple[int, ...]:
        """Return what the update that the value leads to returns; nothing where not all of it can run in the stage,
        or where what it overwrites is read later.
        """
        graph = self.graph
        update: set[int] = set()
        stack = [v]
        while stack:
            for n in self.readers[stack.pop()]:
                if n not in nodes or graph.nodes[n].fusion_root:
                    return ()
                if n not in update:
                    update.add(n)
                    stack.extend(graph.nodes[n].outputs)
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
        """Return a result in the form that its readers want: what its kernel does to it at the end is done by then.

        Behind the barrier it would be done in the update's kernel, which then could not write in place.
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
        """Return the nodes that read a donated argument, and those that lead to one."""
        found: set[int] = set()
        for node in reversed(self.graph.nodes):
            reads = not self.graph.donated.isdisjoint(node.inputs)
            if reads or any(m in found for v in node.outputs for m in self.readers[v]):
                found.add(node.id)
        return found

    def _waits(self) -> dict[int, int]:
        """Return for each deferred node the stage whose barrier it waits for; one past the last for the
        step's end.
        """
        graph, last = self.graph, len(self.cuts) - 1
        begun = {v for values in self.finished for v in values}
        done = self._done()
        waits: dict[int, int] = {}
        for n, k in self.stage_of.items():
            producers = [graph.values[v].producer for v in graph.nodes[n].inputs]
            if n in self.prompt or n in self.leaving:
                continue
            if not any(v in begun for v in graph.nodes[n].inputs) and not any(p in waits for p in producers):
                continue
            overwritten = [m for v in graph.nodes[n].inputs if v in graph.donated for m in self.readers[v]]
            waits[n] = max(
                [
                    k + 1,
                    *(waits[p] for p in producers if p in waits),
                    *(done[m] for m in overwritten if m in done and (m < n or graph.nodes[m].contraction)),
                ]
            )
        while True:
            # First what cannot wait at all, lest it tie updates together that have nothing to do with each other.
            levelled = waits
            wrong = self._wrong(waits) or self._wrong(levelled := self._levelled(waits))
            if not wrong:
                return {n: self._outside(min(k, last)) for n, k in levelled.items()}
            waits = self._following({n: k for n, k in waits.items() if n not in wrong}, begun)

    def _outside(self, k: int) -> int:
        """Return the stage, or the first behind it whose barrier does not stand in a loop."""
        while self.cuts[k] < len(self.graph.nodes) and self.graph.around(self.cuts[k]) >= 0:
            k += 1
        return k

    def _following(self, waits: dict[int, int], begun: set[int]) -> dict[int, int]:
        """Return those of the nodes that read something finished, or what another of them makes."""
        following: dict[int, int] = {}
        for n in sorted(waits):
            inputs = self.graph.nodes[n].inputs
            if any(v in begun or self.graph.values[v].producer in following for v in inputs):
                following[n] = waits[n]
        return following

    def _levelled(self, waits: dict[int, int]) -> dict[int, int]:
        """Return the waits, raised until all of an update waits as long as its last part: what passes a barrier
        is held back.
        """
        graph, levelled = self.graph, dict(waits)
        before = None
        while before != (before := tuple(levelled.values())):
            for order in (sorted(levelled), sorted(levelled, reverse=True)):
                for n in order:
                    near = [graph.values[v].producer for v in graph.nodes[n].inputs]
                    near += [m for v in graph.nodes[n].outputs for m in self.readers[v]]
                    levelled[n] = max([levelled[n], *(levelled[m] for m in near if m in levelled)])
        return levelled

    def _wrong(self, waits: dict[int, int]) -> set[int]:
        """Return the nodes that cannot be deferred so long, because of what they are or what reads them earlier."""
        graph, last = self.graph, len(self.cuts) - 1
        wrong = set()
        for n, k in waits.items():
            node, stop = graph.nodes[n], self.cuts[min(k, last)]
            early = any(m < stop and m not in waits for v in node.outputs for m in self.readers[v])
            if (
                node.fusion_root
                or node.forward
                or node.loop >= 0
                or not node.repeatable
                or early
                or any(self._held(v) for v in node.inputs)
            ):
                wrong.add(n)
        return wrong

    def _held(self, v: int) -> bool:
        """Return whether the value is a residual that would have to be held for an update."""
        before = self.graph.values[v].producer < self.cuts[0]
        return self.graph.is_residual(v) and before and self.graph.values[v].nbytes > self.graph.small_nbytes

    def _done(self) -> dict[int, int]:
        """Return for each node the first stage whose barrier waits for it: the next, if what its own stage
        finishes needs it.
        """
        graph = self.graph
        done: dict[int, int] = {}
        for k, (start, stop) in enumerate(pairwise(self.cuts)):
            stack = [graph.values[v].producer for v in self.finished[k]]
            while stack:
                n = stack.pop()
                if start <= n < stop and n not in done:
                    done[n] = k + 1
                    stack.extend(graph.values[v].producer for v in graph.nodes[n].inputs)
            for n in range(start, stop):
                done.setdefault(n, k + 2)
        return done


def _readers(graph: Graph) -> list[list[int]]:
    """Return for each value the nodes that read it, but for copies to host memory, which return it."""
    return [[n for n in readers if graph.nodes[n].primitive != PUT] for readers in graph.readers]


def _last_contractions(graph: Graph, readers: list[list[int]]) -> set[int]:
    """Return the nodes from whose results no contraction follows, but for those of later forward passes."""
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
