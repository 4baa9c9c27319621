"""Values that may be offloaded -> the link time of their copies, as rows of an integer program; and a heuristic.

By the clock of the plain step, `Graph.away` gives the exit of a value and the begin of its copy back as if no other
value were offloaded. Copies wait for one another:

- Copies to the host end later. By a node, at most the bytes that the link carries since some value v was computed have
  left; the rest of the values that would have left if offloaded individually, `waiting`, counts as memory.
- Copies back end later. All copies that begin in stage j or later and are needed in stage k or before must end within
  these stages; if the stages, with their recomputation, are too short, the step waits.
- All copies of a loop's iteration must end with it, or the loop waits.

Invariant: all rows are linear, and never demand more than the simulator finds.

`HostFirst` saves everything, and offloads as much as the budget requires.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .._model._graph import Graph
from .._model._host_copies import AT_ONCE, HostCopy
from .._model._schedule import Schedule, close_over_dependencies
from .._model._simulate import rank, simulate
from ._integer_program import IntegerProgram, Term
from ._interface import Solution
from ._mincut import MinCut
from ._moments import MIB

CANDIDATES = 12
"""The number of values v, evenly spaced, that get such rows."""


class HostLink:
    """The copies of an integer program.

    **Arguments:** `start` a schedule: values pinned to host memory are offloaded in every solution if they are in it.

    **Fields:** `offload` the variables that say which values are offloaded.
    """

    def __init__(
        self,
        graph: Graph,
        program: IntegerProgram,
        away: Mapping[int, HostCopy],
        save: Mapping[int, int],
        start: Schedule,
    ) -> None:
        self.graph, self.program, self.away = graph, program, away
        self.stacks = graph.away.stacked
        self.offload = {v: program.binary() for v in (*away, *self.stacks)}
        self._queues: dict[int, int] = {}
        for v in save.keys() & self.offload:
            program.at_most([(self.offload[v], 1.0), (save[v], -1.0)], 0.0)
        for v in start.away & graph.pinned["offload"] & self.offload.keys():
            program.at_most([(self.offload[v], -1.0)], -1.0)
        if self.offload and graph.host is not None and graph.host.nbytes is not None:
            program.at_most(map(self._mib, self.offload), graph.host.nbytes / MIB)

    def _mib(self, v: int) -> Term:
        return self.offload[v], self.graph.values[v].saved_nbytes / MIB

    def waiting(self, at: int) -> int:
        """Return the variable of the MiB that wait at a node for their copy, though each value by itself would have
        left.
        """
        if at not in self._queues:
            self._queues[at] = queue = self.program.variable()
            self._fill(queue, at)
        return self._queues[at]

    def _fill(self, queue: int, at: int) -> None:
        graph = self.graph
        assert graph.host is not None
        gone = [v for v in self.away if self.away[v].gone <= at]
        gone.sort(key=lambda v: (graph.values[v].producer, v))
        step = max(len(gone) // CANDIDATES, 1)
        for i in range(0, len(gone), step):
            carried = graph.host.link * (graph.away.starts[at] - graph.away.made(gone[i])) / MIB
            terms = [self._mib(v) for v in gone[i:]]
            if sum(nbytes for _, nbytes in terms) > carried:
                self.program.at_most([*terms, (queue, -1.0)], carried)

    def waits(self, again: Mapping[tuple[int, int], int]) -> Iterator[int]:
        """Yield variables of the seconds for which stages wait, for the objective.

        **Arguments:** `again` the variables of recomputed nodes, by node and stage.
        """
        graph = self.graph
        yield from self._loop_waits(again)
        if not self.away:
            return
        wanted = graph.away.first(self.away, ())
        begins = sorted({copy.begun for copy in self.away.values()})
        ends = sorted({reading.stage for reading in wanted.values()})
        late = {k: self.program.variable() for k in range(len(graph.stages))}
        yield from late.values()
        for j in begins:
            began = graph.away.starts[graph.stages[j].start]
            # A row for each run of stages j to k whose own time is shorter than the copies that must fit into it.
            for k in ends:
                inside = [v for v in self.away if self.away[v].begun >= j and wanted[v].stage <= k]
                needs = [max(wanted[v].node, graph.stages[wanted[v].stage].start) for v in inside]
                if k < j or not inside:
                    continue
                time = graph.away.starts[max(needs)] - began
                if sum(map(graph.away.copy_seconds, inside)) <= time:
                    continue
                terms = [(self.offload[v], graph.away.copy_seconds(v)) for v in inside]
                terms += [(x, -graph.nodes[n].seconds) for (n, i), x in again.items() if j <= i <= k]
                terms += [(late[i], -1.0) for i in range(j, k + 1)]
                self.program.at_most(terms, time)

    def _loop_waits(self, again: Mapping[tuple[int, int], int]) -> Iterator[int]:
        """Yield the variables of the seconds for which loops wait."""
        graph, stacks = self.graph, self.graph.away.stacks
        for pair, away in stacks.by_pair(self.stacks).items():
            copies = [(self.offload[v], stacks.copy_seconds(v)) for v in away]
            self.program.at_most([(x, 1.0) for x, _ in copies], AT_ONCE)
            leaving, first, coming = (self.program.variable() for _ in range(3))
            for i in range(0, len(away), max(len(away) // CANDIDATES, 1)):
                self.program.at_most([*copies[i:], (leaving, -1.0)], stacks.left(away[i]))
            begun = [(self.offload[v], stacks.first_seconds(v)) for v in away]
            self.program.at_most([*begun, (first, -1.0)], stacks.between_seconds(pair))
            more = [(x, -graph.nodes[n].seconds) for (n, k), x in again.items() if k in pair.stages]
            self.program.at_most([*copies, *more, (coming, -1.0)], stacks.own_seconds(pair))
            yield from (leaving, first, coming)


LEVELS = (1.0, 0.5, 0.25, 0.0)
"""Shares of the plain step's excess over the budget that the initial recomputation leaves."""


@dataclass(frozen=True)
class HostFirst:
    """Offload the values that are computed first, as in vDNN (Rhu et al., 2016) and SuperNeurons: they stay in host
    memory longest. As few go as let the rest fit: of all values, and of those saved if some are recomputed.
    """

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        found = close_over_dependencies(graph, graph.residuals)
        most = simulate(graph, found).peak_nbytes
        least = graph.base_nbytes if budget_nbytes is None else budget_nbytes
        for level in LEVELS:
            if not any(found.recomputed) and level != LEVELS[0] and rank(graph, found, budget_nbytes)[0] == 0:
                break
            within = int(least + level * max(most - least, 0))
            start = MinCut().solve(graph, within, time_limit=time_limit / len(LEVELS)).schedule
            known = self._offloaded(graph, start, budget_nbytes)
            found = min((found, known), key=lambda schedule: rank(graph, schedule, budget_nbytes))
        return Solution(found, solver="host first")

    @staticmethod
    def _offloaded(graph: Graph, start: Schedule, budget_nbytes: int | None) -> Schedule:
        """Return the schedule with the fewest saved values offloaded that fits, or the one nearest to fitting."""
        able = sorted(start.saved.intersection(graph.away.alone), key=lambda v: (graph.values[v].producer, v))

        def offloading(count: int) -> Schedule:
            return close_over_dependencies(graph, start.saved, start.kept, able[:count])

        tried = {count: offloading(count) for count in sorted({0, len(able)})}
        low, high = 0, len(able)
        while high - low > 1:
            middle = (low + high) // 2
            tried[middle] = offloading(middle)
            fits = budget_nbytes is not None and rank(graph, tried[middle], budget_nbytes)[0] == 0
            low, high = (low, middle) if fits else (middle, high)
        return min(tried.values(), key=lambda schedule: rank(graph, schedule, budget_nbytes))


def only_needed(graph: Graph, schedule: Schedule, budget_nbytes: int) -> Schedule:
    """Return the schedule without offloaded values that could stay on the device at no higher cost: a copy that nothing
    waits for is free in the model, but not in practice.
    """
    for v in sorted(schedule.away, key=lambda v: (-graph.values[v].saved_nbytes, v)):
        fewer = close_over_dependencies(graph, schedule.saved, schedule.kept, schedule.away - {v})
        if rank(graph, fewer, budget_nbytes)[:2] <= rank(graph, schedule, budget_nbytes)[:2]:
            schedule = fewer
    return schedule
