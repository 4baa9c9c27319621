"""The interface of solvers: `Graph`, budget -> a schedule, and the evidence for its quality.

`jaxremat.testing.check_solver` checks that a solver keeps these rules:

- It answers every graph and budget with a `Solution`, however little time it has. If nothing fits, it returns the
  schedule of least memory that it has seen.
- Its schedule can be emitted: a stage reads values that are saved, recomputed in it or kept from the stage before.
  `jaxremat.close_over_dependencies(graph, saved)` turns any choice of saved values into such a schedule.
- If the schedule that saves everything fits the budget, or the solver's own schedule of least memory does, so does its
  answer: `jaxremat.simulate(graph, schedule).peak_nbytes` is at most the budget.
- Equal graphs, budgets and time limits get equal answers: it counts work rather than reading a clock.
- It does not change the graph.
- Its `lower_bound` is a valid bound, and `proven` is true only if it is.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .._model._graph import Graph
from .._model._schedule import Schedule


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule, and how good it is known to be.

    **Fields:** `schedule`; `lower_bound`: no schedule within the budget that recomputes each stage independently costs
    less than this share of the step's time (0 if nothing is known); `proven`: whether the search finished before its
    time limit; if it did and the schedule exceeds the budget, no schedule that recomputes each stage independently
    fits; `solver`: its name.
    """

    schedule: Schedule
    lower_bound: float = 0.0
    proven: bool = False
    solver: str = ""


@runtime_checkable
class Solver(Protocol):
    """The interface of planners. Write your own as a class with this one method."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        """Return the cheapest schedule whose simulated peak is at most the budget.

        **Arguments:**

        - `graph`: `graph.residuals` are the values to choose from; `graph.values[v].nbytes` is the size of one, and
          `graph.nodes[graph.values[v].producer].seconds` the time to recompute it.
        - `budget_nbytes`: the peak allowed, everything included; None asks for the least peak.
        - `time_limit`: seconds on a typical machine, after which the solver returns its best schedule so far. Counted
          work gives the same answer on every machine (see `Milp`), a clock does not.

        If no schedule within the budget is known, return one with a low peak: the simulator decides whether a schedule
        fits, and the least peak is requested separately.
        """
        ...


@runtime_checkable
class Staged(Protocol):
    """A solver whose last stage takes as long as the others, and rarely improves the schedule.

    With a budget `solve` is `begin`, then `finish`; without one it is `begin`.
    """

    def begin(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        """Return a solution without the last stage."""
        ...

    def finish(self, graph: Graph, budget_nbytes: int, begun: Solution, *, time_limit: float) -> Solution:
        """Return the same or a cheaper solution."""
        ...
