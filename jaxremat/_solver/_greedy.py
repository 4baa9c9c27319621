"""Drop the residuals with most bytes per second of recomputation, until the simulated peak fits."""

from dataclasses import dataclass

from .._model._graph import Graph
from .._model._schedule import Schedule, close_over_dependencies
from .._model._simulate import simulate
from ._interface import Solution


@dataclass(frozen=True)
class Greedy:
    """Cost-aware greedy dropping, the rule of SuperNeurons (Wang et al., 2018) applied to a byte budget."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        del time_limit  # the bisection bounds the work
        residuals = [v for v in graph.residuals if graph.recomputable(v)]
        price = {
            v: graph.nodes[graph.values[v].producer].seconds / max(graph.values[v].saved_nbytes, 1)
            for v in residuals
        }
        order = sorted(residuals, key=lambda v: (price[v], v))
        everything = frozenset(graph.residuals)

        def dropping(count: int) -> tuple[int, Schedule]:
            schedule = close_over_dependencies(graph, everything.difference(order[:count]))
            return simulate(graph, schedule).peak_nbytes, schedule

        peaks = {count: dropping(count) for count in sorted({0, len(order)})}
        target = -1 if budget_nbytes is None else budget_nbytes
        if peaks[0][0] > target:
            low, high = 0, len(order)
            while high - low > 1:
                middle = (low + high) // 2
                peaks[middle] = dropping(middle)
                low, high = (low, middle) if peaks[middle][0] <= target else (middle, high)
        fitting = [c for c, (peak, _) in peaks.items() if peak <= target]
        chosen = min(fitting) if fitting else min(peaks, key=lambda c: (peaks[c][0], c))
        return Solution(peaks[chosen][1], solver="greedy")
