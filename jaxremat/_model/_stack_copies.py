"""Graph -> which stacks of loops may be in host memory, what of them is here meanwhile, and how long loops wait.

What an iteration of a forward loop makes for the backward loop of its pair leaves as it is made, and has left when the
iteration ends. Of what has left a slice comes back one iteration ahead of the one that reads it.

Law: the copies of an iteration run beside its kernels, one after the other; where they take longer, the loop waits. The
first slices come back beside what is between the loops.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ._primitive_names import LOOP_SLICES

AT_ONCE = 2
"""So many copies are under way at once: of more the compiler has the kernels wait for the first, wherever that is then.
A loop therefore has at most so many stacks in host memory."""

SLICES = 2
"""So many slices of a stack are here while the backward loop runs: the one that is read, and the next on its way."""


class Pair(NamedTuple):
    """A `forward` and a `backward` loop, and the `stages` of the latter."""

    forward: int
    backward: int
    stages: range


def kept_here(graph: Any, v: int) -> bool:
    """Whether a pin has the value saved, and not in host memory."""
    return v in graph.pinned["save"] and v not in graph.pinned["offload"]


class Stacks:
    """The stacks of a graph that may be in host memory.

    **Arguments:** `starts` the seconds at which each node begins in a step that recomputes nothing; `least_nbytes` of a
    slice.
    """

    def __init__(self, graph: Any, starts: Sequence[float], least_nbytes: int) -> None:
        self.graph, self.starts, self.least_nbytes = graph, starts, least_nbytes

    @cached_property
    def pair_of(self) -> dict[int, Pair]:
        """For each value whose stack may be away its loops."""
        graph = self.graph
        pairs = {pair.forward: pair for pair in self._pairs()}
        readers: dict[int, list[int]] = {}
        for node in graph.nodes:
            for v in graph.reads[node.id]:
                readers.setdefault(v, []).append(node.id)
        found: dict[int, Pair] = {}
        for v in graph.residuals:
            value = graph.values[v]
            pair = pairs.get(graph.nodes[value.producer].loop)
            if pair is None or value.is_output or value.nbytes < self.least_nbytes or kept_here(graph, v):
                continue
            if value.length <= SLICES or graph.nodes[value.producer].primitive in LOOP_SLICES:
                continue
            loops = (graph.loops_of(n) for n in readers.get(v, ()))
            if all(pair.forward in around or pair.backward in around for around in loops):
                found[v] = pair
        return found

    def _pairs(self) -> Iterator[Pair]:
        graph = self.graph
        for loop, stop in graph.loop_stop.items():
            others = [i for i, group in enumerate(graph.groups) if group == graph.groups[loop] and i != loop]
            if stop > graph.forward_stop or len(others) != 1:
                continue
            (backward,) = others
            inside = [k for k, stage in enumerate(graph.stages) if graph.nodes[stage.start].loop == backward]
            if inside and graph.parents[backward] == graph.parents[loop]:
                yield Pair(loop, backward, range(inside[0], inside[-1] + 1))

    def by_pair(self, values: Iterable[int]) -> dict[Pair, list[int]]:
        """These values by their loops, in the order in which they are made."""
        found: dict[Pair, list[int]] = {}
        for v in sorted(values, key=lambda v: self.graph.values[v].producer):
            found.setdefault(self.pair_of[v], []).append(v)
        return found

    def here_nbytes(self, v: int, stage: int) -> int:
        """What of a stack that is away is here in a stage, -1 the forward pass behind its loop."""
        return SLICES * self.graph.values[v].nbytes if stage in self.pair_of[v].stages else 0

    def copy_seconds(self, v: int) -> float:
        """What copying a whole stack takes, one way."""
        graph = self.graph
        loop = graph.nodes[graph.values[v].producer].loop
        trips = graph.total_trips[loop] if loop >= 0 else 1
        return trips * graph.values[v].nbytes / graph.host.link

    def leaving(self, v: int) -> tuple[float, float]:
        """When the forward loop that makes a value begins and ends."""
        loop = self.pair_of[v].forward
        begin = next(n for n in range(len(self.graph.nodes)) if loop in self.graph.loops_of(n))
        return self.starts[begin], self.starts[self.graph.loop_stop[loop]]

    def left(self, v: int) -> float:
        """Of the seconds of a forward loop those that are left when its iterations have made a value."""
        stop = self.graph.loop_stop[self.pair_of[v].forward]
        return self.starts[stop] - self.starts[self.graph.values[v].producer + 1]

    def first_seconds(self, v: int) -> float:
        """What copying the first slice back takes."""
        return self.copy_seconds(v) / self.graph.values[v].length

    def between_seconds(self, pair: Pair) -> float:
        """The seconds between the loops of a pair."""
        begin = self.graph.stages[pair.stages[0]].start
        return self.starts[begin] - self.starts[self.graph.loop_stop[pair.forward]]

    def own_seconds(self, pair: Pair) -> float:
        """The seconds of a backward loop that recomputes nothing."""
        begin = self.graph.stages[pair.stages[0]].start
        return self.starts[self.graph.loop_stop[pair.backward]] - self.starts[begin]

    def waits(self, values: Collection[int], again: Sequence[float]) -> dict[int, float]:
        """For the first stage of each backward loop the seconds for which it and its forward loop wait for copies.

        **Arguments:** `again` the seconds for which each stage recomputes.
        """
        found: dict[int, float] = {}
        for pair, away in self.by_pair(values).items():
            late = there = 0.0  # by how much the last copy ends behind the loop's own work
            for v in reversed(away):
                there += self.copy_seconds(v)
                late = max(late, there - self.left(v))
            time = self.own_seconds(pair) + sum(again[k] for k in pair.stages)
            late += max(sum(map(self.first_seconds, away)) - self.between_seconds(pair), 0.0)
            found[pair.stages[0]] = late + max(there - time, 0.0)
        return found
