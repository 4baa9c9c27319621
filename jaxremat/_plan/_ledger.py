"""Graph, allowance -> a schedule; schedule -> compiled: the ledger of a search, with the seconds and work of both.

Invariant: no answer is worse, by the model, than one that the solver gave before for the same graph.
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
"""A search compiles 2 plans, and 6,000 divided by its step's number of equations more, but at most 8: a thousand
equations take XLA 2 to 5 s, so all compilations take at most three of the plain step plus 15 s."""

WHILE_NOTHING_FITS = 2
"""Multiple of that number while no plan fits."""

SOLVES = 10
"""For each of these compilations: two for each form of the step that a round compares."""

FIRST_SOLVES, FIRST_SHARE, LATER_SHARE = 12, 1 / 3, 1 / 10
"""The first solves get the first share of the time limit, later ones the second: with many forms each is worth less."""

LEAST_SOLVE_SECONDS = 1.0
"""Time limit of a solve after the user's deadline."""


@dataclass
class Effort:
    """The work of a search, which ends it.

    Work is counted, not timed, so that a warm cache or a busy machine changes no plan; a clock ends a search only where
    the user gave `planning_seconds`, and the plan says so. What is begun is not stopped.

    **Fields:** `stopwatch` since planning began; `equations` of the step; `planning_seconds` that the user gave;
    `limited` whether work is; `turns` in which plans are looked for, which have as much work each and share the user's
    seconds; `turn` the present one, from 1 on; `unfused_builds` whether what is compiled in search is compiled anew to
    run; `interruptible` whether Ctrl-C ends it with the best so far; `fits` whether there is a program that does
    anyway; `compile_seconds` of the last plan, at first of the plain step; `compilations` of plans and `solves` so far;
    `exhausted` whether a limit on work has ended the search.
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
        """Return how many compilations one turn may take."""
        most = COMPILATIONS + min(MORE_COMPILATIONS, EQUATIONS // max(self.equations, 1))
        return most if fits or self.fits else WHILE_NOTHING_FITS * most

    @property
    def left_seconds(self) -> float:
        """The user's, in this turn."""
        finishing = self.compile_seconds if self.unfused_builds else 0.0
        return self.turn * self.planning_seconds / self.turns - self.stopwatch.seconds - finishing

    def allows(self, fits: bool, more: int = 0) -> bool:
        """Return whether one more plan may be compiled, once something fits or while nothing does.

        **Arguments:** `more` compilations than a turn may take.
        """
        if self.left_seconds < self.compile_seconds:
            self.stopwatch.interrupted = True
            return False
        most = self.turn * self.most(fits) + more
        allowed = not self.limited or (self.compilations < most and self.solves < SOLVES * most)
        self.exhausted |= not allowed
        return allowed

    def compiled(self, seconds: float) -> None:
        """Count a plan that was compiled."""
        self.compilations += 1
        self.compile_seconds = seconds

    def solving(self, time_limit: float) -> float:
        """Count a solve, and return the seconds for it."""
        self.solves += 1
        return self.limit(time_limit)

    def limit(self, time_limit: float) -> float:
        """Return the seconds for the last solve, of those that the user allows at most."""
        if self.limited:
            time_limit *= FIRST_SHARE if self.solves <= FIRST_SOLVES else LATER_SHARE
        left = max(self.left_seconds, LEAST_SOLVE_SECONDS)
        self.stopwatch.interrupted |= time_limit > left
        return min(time_limit, left)

    def __str__(self) -> str:
        return PlanningTime(plans_compiled=self.compilations, solves=self.solves).work


SLACK = 0.02
"""A plan that leaves this share of the temporaries' budget unused, and costs something, is worth another round,"""

UNPROVEN = 0.1
"""and so is one that uses it, where the solver was left as far, as a share of the step, from its own bound."""

DOUBT = 0.05
"""If the model's seconds decide, extra seconds of the compiled kernels count only above this share of a step."""


@dataclass(frozen=True)
class CompiledCandidate:
    """One emitted and compiled schedule, of a graph with some cutting into stages.

    **Fields:** `compiled_overhead` None where the plain step's time is not known; `detached` as of `_emit.emit`;
    `ended_seconds` since planning began when it was there.
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
        """Extra seconds of a step: of the compiled kernels where they say it, else by the model, unless those are
        many: what the compiler makes of a form may be another program than the model has in mind.
        """
        if self.compiled_overhead is None:
            return self.profile.extra_seconds
        if self.graph.backend.fuses_reductions:
            return self.compiled_overhead * self.graph.step_seconds
        believed = (self.compiled_overhead - DOUBT) * self.graph.step_seconds
        return max(self.profile.extra_seconds, believed) if believed > 0 else self.profile.extra_seconds

    @property
    def beyond_nbytes(self) -> int:
        """The difference of the compiled peak and the predicted one."""
        return self.peak_nbytes - self.profile.peak_nbytes

    def fills(self, budget: int) -> bool:
        """Return whether it uses the budget, and is about the cheapest that would."""
        room = budget - self.peak_nbytes
        return 0 <= room <= SLACK * (budget - self.graph.base_nbytes) and self.round.gap <= UNPROVEN

    @property
    def round(self) -> Round:
        """The `Round` of a plan for it."""
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
    """Return the one that takes least, of several the one that needs least; None of none."""
    return min(among, key=lambda each: (each.seconds, each.peak_nbytes), default=None)


class NoProgramError(Exception):
    """No variant of a step could be emitted and compiled, which is a defect; not for the user to see."""


class Compiler(Protocol):
    """Emits and compiles solutions."""

    def compile(self, graph: Graph, solution: Solution, fence: str) -> CompiledCandidate | None:
        """Return a solution compiled with a form of barriers (see `_emit`), None where no program came of it."""
        ...


@dataclass
class Ledger:
    """The record of a search's solves and compilations.

    **Fields:** the user's `solver` and its `time_limit` for each solve; the `effort` that the search takes; the
    `compiler`, None where nothing is to be compiled; `compiled` candidates in order; `seconds` spent in solvers; the
    schedules that were `solved`, within other allowances too; `failed` the `id`s of graphs of which no program came;
    the `rounds` of plans for other budgets, which say how the model errs.
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
        # The model is least sure where memory is least: a mere price of memory, which leans on it less, is asked too.
        self.of_least: tuple[Solver, ...] = (self.solver, MinCut())
        self._lowest: dict[tuple[int, int], Solution] = {}  # by `id`s of a graph and a solver
        self._finished: set[tuple[int, int]] = set()  # `id`s of graphs, with allowances

    def beyond_nbytes(self, form: Variant, budget: int, within_nbytes: float) -> int:
        """Return what compiled peaks of a variant are above predicted ones at about a budget, by plans for others; 0
        where none says. Between the nearest of either side it is as near to that of each as the budget is.
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
        """Return the least by which compiled peaks were above predicted ones of variants that do some of what this one
        does otherwise; None where nothing of the kind was compiled.
        """
        alike = (each for each in self.compiled if each.graph.form.overlaps(form))
        return min((each.beyond_nbytes for each in alike), default=None)

    def some(self) -> list[CompiledCandidate]:
        """Return what was compiled. **Raises:** `NoProgramError` where that is nothing."""
        if not self.compiled:
            raise NoProgramError
        return self.compiled

    def best(self, budget: float) -> CompiledCandidate | None:
        """Return the cheapest that fits so far."""
        return fastest(each for each in self.compiled if each.peak_nbytes <= budget)

    def compile(self, graph: Graph, solution: Solution, fence: str = FINISHED) -> CompiledCandidate | None:
        """Compile a solution, and note the seconds of solving since the one before; None where no program came."""
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
        """Return whether a schedule of the same variant was compiled that needs and takes the same by the model, be it
        of another cutting.
        """
        profile = simulate(graph, solution.schedule)
        needs = profile.peak_nbytes, profile.extra_seconds
        same = (each for each in self.compiled if each.graph.form == graph.form)
        return any((each.profile.peak_nbytes, each.profile.extra_seconds) == needs for each in same)

    def know(self, graph: Graph, schedule: Schedule) -> None:
        """Remember a schedule that was found elsewhere."""
        self.solved.append((graph, schedule, simulate(graph, schedule)))

    def lowest(self, graph: Graph, solver: Solver | None = None) -> Solution:
        """Return the solution of least predicted peak, of one of the solvers `of_least`."""
        key = id(graph), id(solver or self.solver)
        if key not in self._lowest:
            self._lowest[key] = self.within(graph, None, solver)
        return self._lowest[key]

    def is_lowest(self, solution: Solution, solver: Solver | None = None) -> bool:
        """Return whether it is one of those, of this solver where one is named."""
        return any(
            solution is found
            for (_, own), found in self._lowest.items()
            if solver is None or own == id(solver)
        )

    def lowest_compiled(self, graph: Graph, solver: Solver) -> list[CompiledCandidate]:
        """Return what was compiled of a variant that this solver takes for the least memory, in any cutting."""
        alike = (each for each in self.compiled if each.graph.alike(graph))
        return [each for each in alike if self.is_lowest(each.solution, solver)]

    def within(
        self, graph: Graph, allowance: int | None, solver: Solver | None = None, *, begin: bool = False
    ) -> Solution:
        """Return the solution within an allowance, None for the least memory. **Raises:** `SolverError`.

        **Arguments:** `begin` whether one that `finished` may improve is enough.
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
        """Return whether `finished` would change nothing: what was finished before is never worse."""
        return not isinstance(self.solver, Staged) or (id(graph), allowance) in self._finished

    def open_seconds(self, graph: Graph, allowance: int, begun: Solution) -> float:
        """Return what finishing a solution may save: what its stages recompute that the one before has."""
        return 0.0 if self.has_finished(graph, allowance) else repeated_seconds(graph, begun.schedule)

    def finished(self, graph: Graph, allowance: int, begun: Solution) -> Solution:
        """Return the solution of which the solver has begun."""
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
        """Return the same; None where it needs more, or no solver answers: whoever asks can do without."""
        try:
            solution = self.within(graph, allowance)
        except (SolverError, InstallError):
            return None
        return solution if simulate(graph, solution.schedule).peak_nbytes <= allowance else None

    def _never_worse(self, graph: Graph, allowance: int | None, solution: Solution) -> Solution:
        """Return the solution, with the best schedule that the solver has found before in place of its own, if that is
        better: it may have come to the end of its work.
        """
        self.know(graph, solution.schedule)
        if allowance is None:
            return solution
        alike = [each for each in self.solved if each[0] is graph and each[2].peak_nbytes <= allowance]
        best = min(reversed(alike), key=lambda each: each[2].extra_seconds, default=self.solved[-1])
        return replace(solution, schedule=best[1])
