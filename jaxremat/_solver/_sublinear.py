"""The least memory for at most one more forward pass: the task of Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016, and of its planner, memonger, with any solver.

Chen's own schedule costs no more than that by construction. Below its peak, the budget is bisected towards the least at
which the solver's schedule costs no more than recomputing every value of the forward pass once.
"""

from dataclasses import dataclass, replace

from .._model._graph import Graph
from .._model._schedule import close_over_dependencies
from .._model._simulate import simulate
from ._chen import Chen
from ._interface import Solution, Solver
from ._mincut import MinCut

ROUNDS = 6
"""Bisections of the budget: they find the least within 1/64 of the distance between the first two guesses."""


@dataclass(frozen=True)
class Sublinear:
    """**Arguments:** `solver`: finds the cost of a budget. Given a budget, the answer is that solver's."""

    solver: Solver

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        if budget_nbytes is not None:
            return self.solver.solve(graph, budget_nbytes, time_limit=time_limit)
        each = time_limit / (ROUNDS + 2)
        known = [Solution(close_over_dependencies(graph, graph.residuals), solver="sublinear")]
        known += [solver.solve(graph, None, time_limit=each) for solver in (Chen(), MinCut(), self.solver)]
        low = min(simulate(graph, solution.schedule).peak_nbytes for solution in known)
        best = min(filter(lambda s: self._bearable(graph, s), known), key=lambda s: self._peak(graph, s))
        for _ in range(ROUNDS):
            high = self._peak(graph, best)
            middle = (low + high) // 2
            if middle <= low:
                break
            found = self.solver.solve(graph, middle, time_limit=each)
            if self._bearable(graph, found) and self._peak(graph, found) < high:
                best = found
            else:
                low = middle
        return replace(best, lower_bound=0.0, proven=False, solver="sublinear")

    def most_seconds(self, graph: Graph) -> float:
        """Return the seconds of one more forward pass."""
        return sum(node.seconds for node in graph.kernels() if node.forward)

    def _bearable(self, graph: Graph, solution: Solution) -> bool:
        most = max(
            self.most_seconds(graph),
            simulate(graph, close_over_dependencies(graph, graph.residuals)).extra_seconds,
        )
        return simulate(graph, solution.schedule).extra_seconds <= most * (1 + 1e-9)

    @staticmethod
    def _peak(graph: Graph, solution: Solution) -> int:
        return simulate(graph, solution.schedule).peak_nbytes
