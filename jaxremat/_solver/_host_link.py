"""Values that may be offloaded -> the link time of their copies, in rows of an integer program.

`Graph.away` says, by the clock of the plain step, when a single value would have left and when its copy back would
begin. Copies wait for one another:

- Copies to the host end later. At a node, at most what the link carries since some value v was made has left; the rest
  of the values that would be gone by themselves, `waiting`, counts as memory.
- Copies back end later. All copies that begin in stage j or later and are needed in stage k or before must end within
  these stages; if the stages, with their recomputation, are too short, the step waits.
- All copies of a loop's iteration must end with it, or the loop waits.

All are linear, and never more than what the simulator finds.

A heuristic saves everything, and offloads as much as the budget requires.
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
"""The number of values v, evenly spaced, for which there are such rows."""


class HostLink:
    """The copies of an integer program.

    **Arguments:** `start` a schedule: of what is pinned to be away, what is there is in all.

    **Fields:** `offload` the variables that say what is away.
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
        """Return the variable of how many MiB wait at a node to leave, though they would be gone by themselves."""
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
        """Variables of the seconds for which stages wait, for the objective.

        **Arguments:** `again` the variables of what stages recompute.
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
        """Yield the same of loops."""
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
    """What is made first is away longest, and is the first to go, as in vDNN (Rhu et al., 2016) and SuperNeurons. Of
    everything, and of what is saved where something is recomputed, as few values go as let the rest fit.
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
        """Return the schedule with the fewest of its saved values away with which it fits, or what comes nearest."""
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
    """Return the schedule with no value away that could as well stay: one whose copies nobody waits for costs
    nothing by the model, and something in truth.
    """
    for v in sorted(schedule.away, key=lambda v: (-graph.values[v].saved_nbytes, v)):
        fewer = close_over_dependencies(graph, schedule.saved, schedule.kept, schedule.away - {v})
        if rank(graph, fewer, budget_nbytes)[:2] <= rank(graph, schedule, budget_nbytes)[:2]:
            schedule = fewer
    return schedule
