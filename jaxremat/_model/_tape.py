"""Graph -> tape of a schedule being played: what ran, who read what last, and at its end what was in memory when.

Law: `_simulate`'s docstring. The forward pass is the same in all schedules of a graph, so that its tape is made once
(`Graph.forward_tape`) and copied.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._host_copies import SLICES


class Life(NamedTuple):
    """A stretch in which an instance of a value is in memory: the value, the stage that made it (-1 in its own place),
    the first and the last event, its bytes. What a loop stacks has two, before and behind the end of its loop, and
    what is in host memory meanwhile too.
    """

    value: int
    stage: int
    begin: int
    end: int
    nbytes: int


class Run(NamedTuple):
    """A schedule played: the nodes that ran, the stage that each is recomputed for (-1 in its own place), and what
    was in memory when.
    """

    nodes: tuple[int, ...]
    made_for: tuple[int, ...]
    lives: tuple[Life, ...]


class Tape:
    """What has been played so far.

    **Fields:** `nodes` that ran, in order; `made_for` the stage that each is recomputed for, -1 in its own place;
    `last` for each instance the last run that reads it; `where` for each value its present clone, absent: the
    original. An instance of value v is v itself, or v + size * (k + 1) where stage k recomputes it: ints, for very deep
    nets.
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
        """Return the same, to be played on."""
        other = Tape(self.graph)
        other.nodes, other.made_for = self.nodes.copy(), self.made_for.copy()
        other.last, other.where = self.last.copy(), self.where.copy()
        other._keeping, other._ended = self._keeping.copy(), self._ended.copy()
        return other

    def run_all(self, kernels: Iterable[int]) -> None:
        """These kernels run, in their own places."""
        for n in kernels:
            self.run(n, -1)

    def run(self, n: int, stage: int) -> None:
        """Run a kernel, recomputed for that stage or in its own place."""
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
        """Return all that ran and lived; `own` for each stage the last event before or at its first node, `gaps`
        for values that are elsewhere meanwhile the first event without them, and the first with them again. Of
        stacks a slice and the next are there then.
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
        behind: dict[int, int] = {}  # loop of the forward pass -> the first event behind it
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
    """Return the tape of the forward pass, which all schedules begin with."""
    tape = Tape(graph)
    tape.run_all(n for n in range(graph.forward_stop) if graph.kernel[n])
    return tape
