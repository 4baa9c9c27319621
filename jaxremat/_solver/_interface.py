"""The interface of solvers: a graph and a budget in, a schedule and the evidence for its quality out.

The rules, which `jaxremat.testing.check_solver` holds a solver to:

- It answers every graph and budget with a `Solution`, however little time it has. Where nothing fits, too: then with
  the schedule of least memory that it came across.
- Its schedule can be emitted: a stage reads what is saved, recomputed in it or kept from the stage before.
  `jaxremat.close_over_dependencies(graph, saved)` makes such a schedule of any choice of saved values.
- Where everything saved fits the budget, or what it itself gives where the least memory is asked for, so does the
  schedule. By `jaxremat.simulate(graph, schedule).peak_nbytes`, of which the budget is an upper bound.
- Equal graphs, budgets and time limits get equal answers: count work rather than look at a clock.
- It leaves the graph as it is.
- Its `lower_bound` is one, and what it calls `proven` is true.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .._model._graph import Graph
from .._model._schedule import Schedule


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule, and how good it is known to be.

    **Fields:** `schedule`; `lower_bound`: no schedule within the budget that recomputes each stage independently costs
    less than this share of the step's time (0 where nothing is known); `proven`: whether the search finished before its
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
        - `time_limit`: seconds on a typical machine, after which the best schedule so far is the answer. Counted work
          gives the same answer everywhere (see `Milp`), a clock does not.

        If a solver finds nothing within the budget, it returns a schedule with a low peak: the simulator decides
        whether a schedule fits, and the least peak is asked for separately.
        """
        ...


@runtime_checkable
class Staged(Protocol):
    """A solver whose last stage takes as long as the others, and rarely gains anything: `solve` is `begin`, and then
    `finish` where there is a budget.
    """

    def begin(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        """Return a solution without the last stage."""
        ...

    def finish(self, graph: Graph, budget_nbytes: int, begun: Solution, *, time_limit: float) -> Solution:
        """Return the same or a cheaper solution."""
        ...
