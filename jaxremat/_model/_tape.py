"""Graph -> tape of a schedule being played: the runs, the last reader of each value, and at the end all lives.

Invariant: the rules of `_simulate`'s docstring. All schedules of a graph share its forward pass, so the tape of that is
recorded once (`Graph.forward_tape`) and copied.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._host_copies import SLICES


class Life(NamedTuple):
    """A stretch in which an instance of a value is in memory: the value, the stage that recomputed it (-1 for the
    original), the first and the last event, its bytes. A stacked value has two stretches, before and after the end of
    its loop; so has one that is offloaded in between.
    """

    value: int
    stage: int
    begin: int
    end: int
    nbytes: int


class Run(NamedTuple):
    """A played schedule: the nodes that ran, the stage that recomputed each (-1 for its regular run), and all lives."""

    nodes: tuple[int, ...]
    made_for: tuple[int, ...]
    lives: tuple[Life, ...]


class Tape:
    """The schedule as played so far.

    **Fields:** `nodes` that ran, in order; `made_for` the stage that recomputes each, -1 for its regular run; `last`
    the last run that reads each instance; `where` the current clone of each value, none for the original. An instance
    of value v is v itself, or v + size * (k + 1) if stage k recomputes it: ints, for very deep nets.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.nodes: list[int] = []
        self.made_for: list[int] = []
        self.last: dict[int, int] = {}
        self.where: dict[int, int] = {}
        self._keeping: list[tuple[int, int]] = []  # originals and the loops that read them from outside
        self._ended: dict[int, int] = {}  # loop -> its last event

    def copy(self) -> "Tape":
        """Return an independent copy, on which to play further."""
        other = Tape(self.graph)
        other.nodes, other.made_for = self.nodes.copy(), self.made_for.copy()
        other.last, other.where = self.last.copy(), self.where.copy()
        other._keeping, other._ended = self._keeping.copy(), self._ended.copy()
        return other

    def run_all(self, kernels: Iterable[int]) -> None:
        """Run these kernels in their regular places."""
        for n in kernels:
            self.run(n, -1)

    def run(self, n: int, stage: int) -> None:
        """Run a kernel, recomputed for a stage or, with -1, in its regular place."""
        graph, where, event = self.graph, self.where, len(self.nodes)
        self.nodes.append(n)
        self.made_for.append(stage)
        reads: tuple[int, ...] = graph.reads[n]
        for v in reads:
            self.last[where.get(v, v)] = event
        if (loop := graph.nodes[n].loop) < 0:
            return
        if stage < 0:
            self._ended[loop] = event
            loop = graph.reader_loop(graph.nodes[n])
        else:
            loop = graph.nodes[graph.stages[stage].start].loop
        kept = ((v, graph.kept_by(v, loop)) for v in graph.reads[n] if v not in where)
        self._keeping.extend((v, loop) for v, loop in kept if loop >= 0)

    def over(self, own: Sequence[int], gaps: Mapping[int, tuple[int, int]]) -> Run:
        """Return all runs and lives.

        **Arguments:** `own` for each stage the last event up to its first node; `gaps` for offloaded values the first
        event without them, and the first with them again. `SLICES` slices of a stack are on the device from then on.
        """
        graph, nodes, last = self.graph, self.nodes, self.last
        for v, loop in self._keeping:
            last[v] = max(last[v], self._ended[loop])
        for v, k in graph.lingering.items():
            end = own[k] if k < len(own) else len(nodes) - 1
            last[v] = max(last.get(v, end), end)
        return Run(tuple(nodes), tuple(self.made_for), tuple(self._lives(gaps)))

    def _lives(self, gaps: Mapping[int, tuple[int, int]]) -> Iterator[Life]:
        graph, last, size = self.graph, self.last, len(self.graph.values)
        behind: dict[int, int] = {}  # loop of the forward pass -> the first event after it
        for event, (n, stage) in enumerate(zip(self.nodes, self.made_for, strict=True)):
            if stage < 0 and graph.nodes[n].loop >= 0:
                behind[graph.nodes[n].loop] = event + 1
        for event, (n, stage) in enumerate(zip(self.nodes, self.made_for, strict=True)):
            begin = event + (stage < 0 and n in graph.in_place)
            for v in graph.nodes[n].outputs:
                value = graph.values[v]
                if value.materialised and not (value.is_output and stage < 0):
                    end = last.get(v + size * (stage + 1), event)
                    if end < begin:
                        continue
                    if stage < 0 and v in gaps:
                        gone, back = gaps[v]
                        yield Life(v, stage, begin, gone - 1, value.nbytes)
                        yield Life(v, stage, back, end, value.nbytes * (SLICES if value.length else 1))
                    elif stage < 0 and value.length and end >= (stacked := behind[graph.nodes[n].loop]):
                        yield Life(v, stage, begin, stacked - 1, value.nbytes)
                        yield Life(v, stage, stacked, end, value.saved_nbytes)
                    else:
                        yield Life(v, stage, begin, end, value.nbytes)


def forward_tape(graph: Any) -> Tape:
    """Return the tape of the forward pass, with which all schedules begin."""
    tape = Tape(graph)
    tape.run_all(n for n in range(graph.forward_stop) if graph.kernel[n])
    return tape
