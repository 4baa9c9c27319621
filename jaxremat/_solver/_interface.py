"""What every solver is: a graph and a budget in, a schedule and the evidence for its quality out."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .._graph import Graph
from .._schedule import Schedule


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and how good it is known to be.

    **Fields:** `schedule`; `lower_bound` no schedule within the budget that recomputes for every stage afresh costs
    less than this share of the step's time (0 where nothing is proven); `proven` whether the search ended rather than
    ran out of time; `solver` its name.
    """

    schedule: Schedule
    lower_bound: float = 0.0
    proven: bool = False
    solver: str = ""


@runtime_checkable
class Solver(Protocol):
    """Chooses what to save. Write your own as a class with this one method."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        """The cheapest schedule whose simulated peak is at most the budget.

        **Arguments:** `budget_nbytes` is None where the least reachable peak is asked for; `time_limit` in seconds.

        A solver that finds nothing within the budget returns one of little peak that it came across: whether a
        schedule fits is the simulator's verdict, not the solver's, and the least peak is asked for apart.
        """
        ...
