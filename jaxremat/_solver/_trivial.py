"""Rules that ignore the budget: save every residual, as few as possible, or the results of products."""

from dataclasses import dataclass

from .._model._graph import Graph
from .._model._schedule import close_over_dependencies
from ._interface import Solution


@dataclass(frozen=True)
class SaveAll:
    """The plain step: nothing is recomputed, whatever the budget."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        return Solution(close_over_dependencies(graph, graph.residuals), solver="save_all")


@dataclass(frozen=True)
class RecomputeAll:
    """Every stage recomputes all values that it needs from the step's arguments, whatever the budget."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        return Solution(close_over_dependencies(graph, ()), solver="recompute_all")


@dataclass(frozen=True)
class SaveDots:
    """Save the results of products and convolutions, whatever the budget: `checkpoint_policies.dots_saveable`."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        products = (v for v in graph.residuals if graph.nodes[graph.values[v].producer].contraction)
        return Solution(close_over_dependencies(graph, products), solver="save_dots")
