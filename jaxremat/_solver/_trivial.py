"""The two ends of the frontier: save every residual, or as few as possible."""

from dataclasses import dataclass

from .._graph import Graph
from .._schedule import complete
from ._interface import Solution


@dataclass(frozen=True)
class SaveAll:
    """The plain step: nothing is recomputed, whatever the budget."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        return Solution(complete(graph, graph.residuals), solver="save_all")


@dataclass(frozen=True)
class RecomputeAll:
    """Every stage recomputes all it needs from the step's arguments, whatever the budget."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        return Solution(complete(graph, ()), solver="recompute_all")
