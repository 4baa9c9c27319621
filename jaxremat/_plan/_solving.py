"""Graph, allowance -> a schedule of it: the solver asked for so much work, its answers checked and remembered.

Law: no answer is worse, by the model, than one that the solver gave before for the same graph.
"""

import time
from dataclasses import dataclass, field, replace

from .._model._graph import Graph
from .._model._schedule import Schedule, check
from .._model._simulate import Profile, simulate
from .._runtime._bytes import format_nbytes
from .._runtime._errors import SolverError
from .._runtime._progress import phase
from .._solver import MinCut, Solution, Solver
from ._effort import Effort


@dataclass
class Solving:
    """**Fields:** the user's `solver` and `time_limit` for each solve; `effort` of the whole search; `solved` what
    the user's solver gave within other allowances too; `seconds` spent so far.
    """

    solver: Solver
    time_limit: float
    effort: Effort
    solved: list[tuple[Graph, Schedule, Profile]] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        # The model is least sure where memory is least: a mere price of memory, which leans on it less, is asked too.
        self.of_least: tuple[Solver, ...] = (self.solver, MinCut())
        self._lowest: dict[tuple[int, int], Solution] = {}  # by `id`s of a graph and a solver

    def know(self, graph: Graph, schedule: Schedule) -> None:
        """Remember a schedule that was found elsewhere."""
        self.solved.append((graph, schedule, simulate(graph, schedule)))

    def lowest(self, graph: Graph, solver: Solver | None = None) -> Solution:
        """The solution of least predicted peak, of one of the solvers `of_least`."""
        key = id(graph), id(solver or self.solver)
        if key not in self._lowest:
            self._lowest[key] = self.within(graph, None, solver)
        return self._lowest[key]

    def is_lowest(self, solution: Solution, solver: Solver | None = None) -> bool:
        """Whether it is one of those, of this solver where one is named."""
        return any(
            solution is found
            for (_, own), found in self._lowest.items()
            if solver is None or own == id(solver)
        )

    def within(self, graph: Graph, allowance: int | None, solver: Solver | None = None) -> Solution:
        """The solution within an allowance, None for the least memory. **Raises:** `SolverError`."""
        solver = solver or self.solver
        began = time.monotonic()
        within = "for the least memory" if allowance is None else f"within {format_nbytes(allowance)}"
        seconds = self.effort.solving(self.time_limit)
        with phase(f"solving {within}", kind="solve"):
            solution = solver.solve(graph, allowance, time_limit=seconds)
        self.seconds += time.monotonic() - began
        if not isinstance(solution, Solution):
            raise SolverError(
                f"The solver {solver!r} returned a {type(solution).__name__}. "
                "Its method `solve` must return a `jaxremat.Solution`, for example "
                "`Solution(close_over_dependencies(graph, saved))`."
            )
        check(graph, solution.schedule)
        return self._never_worse(graph, allowance, solution) if solver is self.solver else solution

    def _never_worse(self, graph: Graph, allowance: int | None, solution: Solution) -> Solution:
        """The solution, with the best schedule that the solver has found before in place of its own, if that is better:
        it may have come to the end of its work.
        """
        self.know(graph, solution.schedule)
        if allowance is None:
            return solution
        alike = [each for each in self.solved if each[0] is graph and each[2].peak_nbytes <= allowance]
        best = min(reversed(alike), key=lambda each: each[2].extra_seconds, default=self.solved[-1])
        return replace(solution, schedule=best[1])
