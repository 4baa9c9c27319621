"""Graph, allowance -> a schedule; schedule -> a compiled step: the ledger of a search, with the time and work of both.

Invariant: no solution is worse, by the model, than an earlier one of the same graph.
"""

import math
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from .._compiler._compiled_step import CompiledStep
from .._emit._emit import FINISHED
from .._model._graph import Graph
from .._model._schedule import Passing, Schedule, check
from .._model._simulate import Profile, simulate
from .._model._variant import Variant
from .._report._outcome import PlanningTime, Round
from .._runtime._bytes import format_nbytes
from .._runtime._errors import InstallError, SolverError
from .._runtime._progress import Stopwatch, phase
from .._solver import MinCut, Solution, Solver
from .._solver._frontiers import repeated_seconds
from .._solver._interface import Staged

COMPILATIONS = 2
MORE_COMPILATIONS = 6
EQUATIONS = 6000
"""A search compiles 2 plans, plus 6,000 divided by the step's number of equations, at most 8 in all: XLA takes 2 to 5 s
for a thousand equations, so all compilations take at most three times the plain step's plus 15 s."""

WHILE_NOTHING_FITS = 2
"""Multiple of that number while no plan fits."""

SOLVES = 10
"""Most solves for each of these compilations: two for each form of the step that a round compares."""

FIRST_SOLVES, FIRST_SHARE, LATER_SHARE = 12, 1 / 3, 1 / 10
"""The first solves get the first share of the time limit, later ones the second: with many forms each is worth less."""

LEAST_SOLVE_SECONDS = 1.0
"""Time limit of a solve after the user's deadline."""


@dataclass
class Effort:
    """The work of a search, and its limits.

    Work is counted, not timed, so that a warm cache or a busy machine changes no plan. A clock ends a search only if
    the user gave `planning_seconds`, and the plan says so. Running solves and compilations are not interrupted.

    **Fields:** `stopwatch` since planning began; `equations` of the step; `planning_seconds` from the user; `limited`
    whether work is limited; `turns` of the search, each with the same limit of work and a share of the user's seconds;
    `turn` the current one, from 1 on; `unfused_builds` whether the plan is compiled again to run; `interruptible`
    whether Ctrl-C ends the search with the best plan so far; `fits` whether the plain step fits; `compile_seconds` of
    the last plan, at first of the plain step; `compilations` of plans and `solves` so far; `exhausted` whether a limit
    of work has ended the search.
    """

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    equations: int = 0
    planning_seconds: float = math.inf
    limited: bool = True
    turns: int = 1
    turn: int = 1
    unfused_builds: bool = False
    interruptible: bool = False
    fits: bool = False
    compile_seconds: float = 0.0
    compilations: int = 0
    solves: int = 0
    exhausted: bool = False

    def most(self, fits: bool) -> int:
        """Return the most compilations of one turn."""
        most = COMPILATIONS + min(MORE_COMPILATIONS, EQUATIONS // max(self.equations, 1))
        return most if fits or self.fits else WHILE_NOTHING_FITS * most

    @property
    def left_seconds(self) -> float:
        """The rest of the user's `planning_seconds` for this turn."""
        finishing = self.compile_seconds if self.unfused_builds else 0.0
        return self.turn * self.planning_seconds / self.turns - self.stopwatch.seconds - finishing

    def allows(self, fits: bool, more: int = 0) -> bool:
        """Return whether one more plan may be compiled. **Arguments:** `fits` whether a plan fits already; `more`
        compilations in addition to a turn's limit.
        """
        if self.left_seconds < self.compile_seconds:
            self.stopwatch.interrupted = True
            return False
        most = self.turn * self.most(fits) + more
        allowed = not self.limited or (self.compilations < most and self.solves < SOLVES * most)
        self.exhausted |= not allowed
        return allowed

    def compiled(self, seconds: float) -> None:
        """Count a compiled plan."""
        self.compilations += 1
        self.compile_seconds = seconds

    def solving(self, time_limit: float) -> float:
        """Count a solve, and return its time limit."""
        self.solves += 1
        return self.limit(time_limit)

    def limit(self, time_limit: float) -> float:
        """Return the time limit of the last counted solve, given the user's limit for a solve."""
        if self.limited:
            time_limit *= FIRST_SHARE if self.solves <= FIRST_SOLVES else LATER_SHARE
        left = max(self.left_seconds, LEAST_SOLVE_SECONDS)
        self.stopwatch.interrupted |= time_limit > left
        return min(time_limit, left)

    def __str__(self) -> str:
        return PlanningTime(plans_compiled=self.compilations, solves=self.solves).work


SLACK = 0.02
"""A plan with some overhead that leaves this share of the budget for temporaries unused is worth another round."""

UNPROVEN = 0.1
"""So is one that uses the budget, if its overhead exceeds the solver's bound by more than this share of the step."""

DOUBT = 0.05
"""Where the model's seconds decide, extra seconds of the compiled kernels count only above this share of a step."""


@dataclass(frozen=True)
class CompiledCandidate:
    """One emitted and compiled schedule of a graph with its stages.

    **Fields:** `compiled_overhead` None if the plain step's time is unknown; `detached` as in `_emit.emit`;
    `ended_seconds` from the start of planning to the end of its compilation.
    """

    graph: Graph
    solution: Solution
    fence: str
    profile: Profile
    jitted: Any
    compiled: CompiledStep
    peak_nbytes: int
    compiled_overhead: float | None = None
    compile_seconds: float = 0.0
    detached: tuple[Passing, ...] = ()
    solve_seconds: float = 0.0
    ended_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Extra seconds of a step: by the compiled kernels where reductions are fused, else by the model, unless the
        kernels take many more: the compiler may turn a form into a program that the model does not expect.
        """
        if self.compiled_overhead is None:
            return self.profile.extra_seconds
        if self.graph.backend.fuses_reductions:
            return self.compiled_overhead * self.graph.step_seconds
        believed = (self.compiled_overhead - DOUBT) * self.graph.step_seconds
        return max(self.profile.extra_seconds, believed) if believed > 0 else self.profile.extra_seconds

    @property
    def beyond_nbytes(self) -> int:
        """The compiled peak minus the predicted one."""
        return self.peak_nbytes - self.profile.peak_nbytes

    def fills(self, budget: int) -> bool:
        """Return whether it fits, uses the budget, and is about the cheapest schedule that does."""
        room = budget - self.peak_nbytes
        return 0 <= room <= SLACK * (budget - self.graph.base_nbytes) and self.round.gap <= UNPROVEN

    @property
    def round(self) -> Round:
        """Its entry in a plan's `rounds`."""
        overhead = self.profile.extra_seconds / (self.graph.step_seconds or 1.0)
        return Round(
            predicted_peak_nbytes=self.profile.peak_nbytes,
            compiled_peak_nbytes=self.peak_nbytes,
            overhead=overhead,
            compiled_overhead=self.compiled_overhead or 0.0,
            gap=max(overhead - self.solution.lower_bound, 0.0),
            solver=self.solution.solver,
            stages=len(self.graph.stages),
            form=self.graph.form,
            fence=self.fence,
            solve_seconds=self.solve_seconds,
            compile_seconds=self.compile_seconds,
        )


def fastest(among: Iterable[CompiledCandidate]) -> CompiledCandidate | None:
    """Return the fastest candidate, of equals the one of the least peak; None if there is none."""
    return min(among, key=lambda each: (each.seconds, each.peak_nbytes), default=None)


class NoProgramError(Exception):
    """No variant of a step could be emitted and compiled, which is a defect. Users never see this error."""


class Compiler(Protocol):
    """Emits and compiles solutions."""

    def compile(self, graph: Graph, solution: Solution, fence: str) -> CompiledCandidate | None:
        """Return a solution compiled with a kind of barriers (see `_emit`), None if it could not be built."""
        ...


@dataclass
class Ledger:
    """The record of a search's solves and compilations.

    **Fields:** the user's `solver` and its `time_limit` for each solve; the `effort` of the search; the `compiler`,
    None if nothing is to be compiled; `compiled` candidates in order; `seconds` spent in solvers; the schedules
    `solved` so far, for all allowances; `failed` the `id`s of graphs that could not be emitted or compiled; the
    `rounds` of plans for other budgets, which give the model's error.
    """

    solver: Solver
    effort: Effort
    time_limit: float
    compiler: Compiler | None = None
    compiled: list[CompiledCandidate] = field(default_factory=list)
    seconds: float = 0.0
    solved: list[tuple[Graph, Schedule, Profile]] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    rounds: Sequence[Round] = ()

    def __post_init__(self) -> None:
        # The model is least certain near the least memory: a minimum cut, which depends less on it, is solved too.
        self.of_least: tuple[Solver, ...] = (self.solver, MinCut())
        self._lowest: dict[tuple[int, int], Solution] = {}  # by `id`s of a graph and a solver
        self._finished: set[tuple[int, int]] = set()  # `id`s of graphs, with allowances

    def beyond_nbytes(self, form: Variant, budget: int, within_nbytes: float) -> int:
        """Return the excess of a variant's compiled peaks over predicted ones near a budget, by plans for other
        budgets: linear interpolation between the nearest on either side; 0 if none is within `within_nbytes`.
        """

        def distance(of: Round) -> int:
            return abs(of.compiled_peak_nbytes - budget)

        known = [each for each in reversed(self.rounds) if each.form == form]
        sides = ([e for e in known if (e.compiled_peak_nbytes > budget) == above] for above in (False, True))
        nearest = (min(side, key=distance, default=None) for side in sides)
        near = [each for each in nearest if each is not None and distance(each) <= within_nbytes]
        beyond = [each.compiled_peak_nbytes - each.predicted_peak_nbytes for each in near]
        weights = [*map(distance, reversed(near))] if len(near) == 2 else [1]
        return sum(map(operator.mul, beyond, weights)) // (sum(weights) or 1)

    def likely_beyond_nbytes(self, form: Variant) -> int | None:
        """Return the least excess of compiled peaks over predicted ones among variants that share a form with this one;
        None if none of them was compiled.
        """
        alike = (each for each in self.compiled if each.graph.form.overlaps(form))
        return min((each.beyond_nbytes for each in alike), default=None)

    def some(self) -> list[CompiledCandidate]:
        """Return the compiled candidates. **Raises:** `NoProgramError` if there is none."""
        if not self.compiled:
            raise NoProgramError
        return self.compiled

    def best(self, budget: float) -> CompiledCandidate | None:
        """Return the fastest compiled candidate that fits a budget, or None."""
        return fastest(each for each in self.compiled if each.peak_nbytes <= budget)

    def compile(self, graph: Graph, solution: Solution, fence: str = FINISHED) -> CompiledCandidate | None:
        """Compile a solution, and record the solver's seconds since the last one; None if it could not be built."""
        found = None
        if self.compiler is not None and id(graph) not in self.failed:
            found = self.compiler.compile(graph, solution, fence)
        if found is None:
            self.failed.add(id(graph))
            return None
        self.effort.compiled(found.compile_seconds)
        before = sum(each.solve_seconds for each in self.compiled)
        self.compiled.append(replace(found, solve_seconds=self.seconds - before))
        return self.compiled[-1]

    def knows(self, graph: Graph, solution: Solution) -> bool:
        """Return whether the same schedule of the same variant was compiled."""
        same = (each for each in self.compiled if each.solution.schedule == solution.schedule)
        return any(each.graph.form == graph.form for each in same)

    def has_like(self, graph: Graph, solution: Solution) -> bool:
        """Return whether a schedule of the same variant, of any cutting, with the same predicted peak and time was
        compiled.
        """
        profile = simulate(graph, solution.schedule)
        needs = profile.peak_nbytes, profile.extra_seconds
        same = (each for each in self.compiled if each.graph.form == graph.form)
        return any((each.profile.peak_nbytes, each.profile.extra_seconds) == needs for each in same)

    def know(self, graph: Graph, schedule: Schedule) -> None:
        """Record a schedule from elsewhere."""
        self.solved.append((graph, schedule, simulate(graph, schedule)))

    def lowest(self, graph: Graph, solver: Solver | None = None) -> Solution:
        """Return the solution of least predicted peak by one of the solvers `of_least`."""
        key = id(graph), id(solver or self.solver)
        if key not in self._lowest:
            self._lowest[key] = self.within(graph, None, solver)
        return self._lowest[key]

    def lowest_of(
        self, graphs: Sequence[Graph], solver: Solver | None = None
    ) -> list[tuple[Graph, Solution]]:
        """Return graphs with their solutions of least predicted peak."""
        return [(graph, self.lowest(graph, solver)) for graph in graphs]

    def near_least(self, graphs: Sequence[Graph], budget: int, slack: float) -> list[Graph]:
        """Return the graphs whose least temporaries are at most twice the least of all, or that may fit a budget, by
        minimum cuts: these take a hundredth of an integer program's time, and their least peaks are about the same.
        """
        cut = self.of_least[-1]
        peaks = [simulate(each, self.lowest(each, cut).schedule).peak_nbytes for each in graphs]
        beyond = min((each.beyond_nbytes for each in self.compiled), default=0)
        least = min(peaks, default=0)
        most = 2 * least - min((each.base_nbytes for each in graphs), default=0) + slack
        return [each for each, peak in zip(graphs, peaks, strict=True) if peak <= max(most, budget - beyond)]

    def is_lowest(self, solution: Solution, solver: Solver | None = None) -> bool:
        """Return whether a solution is a result of `lowest`, by the given solver if any."""
        return any(
            solution is found
            for (_, own), found in self._lowest.items()
            if solver is None or own == id(solver)
        )

    def lowest_compiled(self, graph: Graph, solver: Solver) -> list[CompiledCandidate]:
        """Return the compiled candidates of a variant, in any cutting, that are a solver's least-memory solutions."""
        alike = (each for each in self.compiled if each.graph.alike(graph))
        return [each for each in alike if self.is_lowest(each.solution, solver)]

    def within(
        self, graph: Graph, allowance: int | None, solver: Solver | None = None, *, begin: bool = False
    ) -> Solution:
        """Return the solution within an allowance, None for the least memory. **Raises:** `SolverError`.

        **Arguments:** `begin` leaves out the solver's last stage, which `finished` runs.
        """
        solver = solver or self.solver
        solve = solver.begin if begin and isinstance(solver, Staged) else solver.solve
        with self._solving(allowance):
            solution = solve(graph, allowance, time_limit=self.effort.solving(self.time_limit))
        if not isinstance(solution, Solution):
            raise SolverError(
                f"The solver {solver!r} returned a {type(solution).__name__}. "
                "Its method `solve` must return a `jaxremat.Solution`, for example "
                "`Solution(close_over_dependencies(graph, saved))`."
            )
        check(graph, solution.schedule)
        return self._never_worse(graph, allowance, solution) if solver is self.solver else solution

    def has_finished(self, graph: Graph, allowance: int) -> bool:
        """Return whether `finished` would return the same solution."""
        return not isinstance(self.solver, Staged) or (id(graph), allowance) in self._finished

    def open_seconds(self, graph: Graph, allowance: int, begun: Solution) -> float:
        """Return the seconds that finishing a solution may save: those of values that a stage recomputes although the
        previous one has them.
        """
        return 0.0 if self.has_finished(graph, allowance) else repeated_seconds(graph, begun.schedule)

    def finished(self, graph: Graph, allowance: int, begun: Solution) -> Solution:
        """Return the result of the solver's last stage for a solution that it began."""
        if not isinstance(self.solver, Staged) or self.has_finished(graph, allowance):
            return begun
        self._finished.add((id(graph), allowance))
        with self._solving(allowance):
            limit = self.effort.limit(self.time_limit)
            solution = self.solver.finish(graph, allowance, begun, time_limit=limit)
        check(graph, solution.schedule)
        return self._never_worse(graph, allowance, solution)

    @contextmanager
    def _solving(self, allowance: int | None) -> Iterator[None]:
        began = time.monotonic()
        within = "for the least memory" if allowance is None else f"within {format_nbytes(allowance)}"
        with phase(f"solving {within}", kind="solve"):
            yield
        self.seconds += time.monotonic() - began

    def tried(self, graph: Graph, allowance: int) -> Solution | None:
        """Return the solution within an allowance; None if it exceeds that or the solver fails."""
        try:
            solution = self.within(graph, allowance)
        except (SolverError, InstallError):
            return None
        return solution if simulate(graph, solution.schedule).peak_nbytes <= allowance else None

    def _never_worse(self, graph: Graph, allowance: int | None, solution: Solution) -> Solution:
        """Return the solution, with an earlier schedule of the same graph in place of its own if that is better: the
        solver may have hit its limits.
        """
        self.know(graph, solution.schedule)
        if allowance is None:
            return solution
        alike = [each for each in self.solved if each[0] is graph and each[2].peak_nbytes <= allowance]
        best = min(reversed(alike), key=lambda each: each[2].extra_seconds, default=self.solved[-1])
        return replace(solution, schedule=best[1])
