"""Save what there is, and have as much of it in host memory meanwhile as the budget asks for."""

from dataclasses import dataclass

from .._model._graph import Graph
from .._model._schedule import Schedule, close_over_dependencies
from .._model._simulate import rank, simulate
from ._interface import Solution
from ._mincut import MinCut

LEVELS = (1.0, 0.5, 0.25, 0.0)
"""What is recomputed to begin with leaves this share of what the plain step is above the budget."""


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
