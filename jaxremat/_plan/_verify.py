"""Program, arguments, budget -> a compiled step and its plan.

Invariant: the compiler has confirmed that the step's peak is within the budget.

The plain step is compiled first, which gives its peak and the values that it writes to memory. `_search` then looks for
the best plan that fits.
"""

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

from .._lower._lower import as_stacked
from .._model._graph import Graph
from .._model._pins import offloading, staying
from .._model._schedule import save_all
from .._model._simulate import simulate
from .._report._account import account_of_plain
from .._report._outcome import Round
from .._runtime._budgets import parse_budget, parse_margin
from .._runtime._errors import InfeasibleBudgetError, JaxrematWarning, warn
from .._runtime._progress import Stopwatch, timed
from .._solver import Solution
from ._baseline import Baseline, EstimatedGraphs, measure_baseline
from ._candidates import Space
from ._defects import run_as_written
from ._ledger import CompiledCandidate, Effort, Ledger, NoProgramError
from ._plan import Plan
from ._planned import Planned, compiled_facts, confirmed, plan_of, planned, sent, warn_of
from ._problem import Problem
from ._refusal import Least, UnpinnedGraphs, blamed, compiled, infeasible, predicted, slow
from ._request import Request
from ._search import Search
from ._state_on_host import advice
from ._step_compiler import Compiled, StepCompiler

_ROUNDS = {"normal": 3, "thorough": 7}
"""Rounds of a search by effort: the schedules that it compiles in each turn."""

LIKELY = 1.2
"""A step whose estimated peak is at most this multiple of the budget may fit as written: it is compiled."""

ENOUGH = 0.2
"""A schedule between two plans is not corrected if it closes this share of the gap (bytes times seconds): one halfway
between them on a straight line closes a quarter."""

SURELY = 0.5
"""A step whose estimated peak is at most this share of the budget is assumed to fit: it is compiled once, to run."""


@dataclass
class Before:
    """Results of planning the same step for other budgets: the `compiled` schedules, and their `rounds`."""

    compiled: Compiled = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)


def make_plan(
    problem: Problem, request: Request, baseline: Baseline | None = None, before: Before | None = None
) -> Planned:
    """Plan a step for its arguments.

    **Arguments:** `baseline` of the step, if measured already; `before` the results for other budgets on it.

    **Raises:** `InfeasibleBudgetError`, `BudgetError`, `SolverError`.
    """
    with timed() as stopwatch:
        found = _Planner(problem, request, stopwatch, baseline, before or Before()).run()
    warn_of(found.plan)
    return found


class Gap(NamedTuple):
    """A gap between two plans: the peaks and overheads of both."""

    low_nbytes: int
    low_overhead: float
    high_nbytes: int
    high_overhead: float

    @property
    def middle_nbytes(self) -> int:
        """The peak halfway between the two."""
        return (self.low_nbytes + self.high_nbytes) // 2

    @property
    def size(self) -> float:
        """The area between the two, in bytes times a share of the step's time."""
        return (self.high_nbytes - self.low_nbytes) * (self.low_overhead - self.high_overhead)

    def closed_by(self, found: CompiledCandidate) -> float:
        """Return the area that a schedule closes; 0 unless it needs less than the one and is faster than the other."""
        told = found.round
        overhead = told.compiled_overhead if found.graph.backend.fuses_reductions else told.overhead
        fewer, less = self.high_nbytes - found.peak_nbytes, self.low_overhead - max(overhead, 0.0)
        return fewer * less if min(fewer, less) > 0 else 0.0


def make_plan_between(
    problem: Problem, request: Request, gap: Gap, baseline: Baseline, before: Before
) -> Planned | None:
    """Return a plan in a gap between two others, with its peak as its budget, or None. The request's budget is ignored.

    **Arguments:** `baseline` and `before` as in `make_plan`.
    """
    with timed() as stopwatch:
        found = _Planner(problem, request, stopwatch, baseline, before).between(gap)
    if found is not None:
        warn_of(found.plan)
    return found


def make_plan_of(
    problem: Problem,
    request: Request,
    graph: Graph,
    solution: Solution,
    baseline: Baseline | None,
    before: Before | None = None,
) -> Planned:
    """Return the plan of a given schedule, with its peak as its budget. The request's budget is ignored.

    **Arguments:** `baseline` of the step, None if nothing is to be compiled; `before` as in `make_plan`.
    """
    with timed() as stopwatch:
        found = _Planner(problem, request, stopwatch, baseline, before or Before()).follow(graph, solution)
    warn_of(found.plan)
    return found


@dataclass
class _Planner:
    """Planner for one budget. Other plans of the step may share its `baseline`, which is None until measured, and if
    nothing is compiled.
    """

    problem: Problem
    request: Request
    stopwatch: Stopwatch
    baseline: Baseline | None
    before: Before
    margin_nbytes: int = 0

    def __post_init__(self) -> None:
        self.compiled_before = self.problem.compilations.count
        self.estimated = EstimatedGraphs(self.problem)
        planning = self.request.planning
        self.rounds = _ROUNDS[planning.effort]
        self.effort = Effort(
            self.stopwatch,
            planning_seconds=planning.planning_seconds or math.inf,
            limited=planning.effort == "normal",
            unfused_builds=self.problem.unfused_builds,
            interruptible=planning.on_interrupt == "best",
        )

    def run(self) -> Planned:
        planning, problem = self.request.planning, self.problem
        pins = offloading(problem.estimated)
        if pins and not self.request.offload:
            said = "saved on the device: plans use host memory only with `offload=True`."
            warn(f"{pins[0].origin}: {said}")
        elif (
            pins
            and not problem.must_plan
            and (said := staying(problem.estimated, save_all(problem.estimated)))
        ):
            warn(said)
        asked = self.request
        budget = asked.nbytes or parse_budget(asked.budget, asked.device_nbytes)
        if budget != "min":
            self.margin_nbytes = parse_margin(planning.workspace_margin, budget)
            budget -= self.margin_nbytes  # from here on, the most that the compiled peak may be
        if not planning.verify:
            return self._unverified(budget)
        fits = budget != "min" and not problem.must_plan and self._plain_fits(budget)
        if budget != "min" and fits and not problem.undoes:
            return self._plain(budget)
        try:
            return self._found(budget, fits=fits)
        except NoProgramError:
            return self._as_written(budget)

    def _found(self, budget: int | Literal["min"], *, fits: bool) -> Planned:
        """Search for a plan. **Arguments:** `fits` whether the plain step fits."""
        baseline = self._measured()
        search = self.problem.defects.attempted("pricing", self._measured_search)
        if search is None:
            raise NoProgramError
        if budget == "min":
            found = search.least(self.rounds)
            if found is None:
                return self._plain(baseline.peak_nbytes)
            found = self._combined(search, found, found.peak_nbytes)
            return self._planned(search, found, found.peak_nbytes)
        if fits:  # without the user's checkpoints the step may be faster in no more memory
            with warnings.catch_warnings():  # the plain step runs if the solver finds nothing
                warnings.filterwarnings("ignore", "The integer program found no solution", JaxrematWarning)
                found = search.faster(min(budget, baseline.peak_nbytes), self.rounds)
            return self._plain(budget) if found is None else self._planned(search, found, budget)
        found = search.within(budget, self.rounds, briefly=self.request.briefly)
        if found is None:
            if search.ledger.compiled:
                least = compiled(search.ledger.compiled, baseline)
            else:
                graph, solution = search.least_known()
                least = predicted(graph, solution.schedule)
            error = blamed(self._refusal(budget, least), budget, baseline.graphs.plain, self._least_compiled)
            if least.candidate is not None:
                error.least_plan = self._planned(search, least.candidate, least.peak_nbytes).plan
            raise error
        found = self._combined(search, found, budget)
        said = slow(search, found)
        said = (f"Budget {self.request.budget!r}: {said}",) if said else ()
        return self._planned(search, found, budget, said)

    def follow(self, graph: Graph, solution: Solution) -> Planned:
        if not self.request.planning.verify:
            peak = simulate(graph, solution.schedule).peak_nbytes
            plan = self._as_plan(graph, peak, solution, self._search(self.estimated))
            return Planned(plan, self.problem.jitted(graph, solution.schedule), None)
        search = self._measured_search()
        try:
            found = search.follow(graph, solution)
        except NoProgramError:
            return self._as_written("min")
        return self._planned(search, found, found.peak_nbytes)

    def between(self, gap: Gap) -> Planned | None:
        search, found = self._measured_search(), None
        for count in range(self.rounds):
            search.approach(lambda: gap.middle_nbytes, 1)
            found = max(filter(gap.closed_by, search.ledger.compiled), key=gap.closed_by, default=None)
            enough = found is not None and gap.closed_by(found) >= ENOUGH * gap.size
            if enough or len(search.ledger.compiled) <= count:  # no candidate was worth this round
                break
        if found is None:
            return None
        found = self._combined(search, found, gap.high_nbytes - 1)
        return self._planned(search, found, found.peak_nbytes)

    def _plain_fits(self, budget: int) -> bool:
        """Return whether the plain step fits the budget. Compiles it if that is likely, and the tagged step unless that
        is certain.
        """
        problem, likely = self.problem, LIKELY * budget
        if self.baseline is None:
            estimated = problem.estimated_peak_nbytes
            surely = estimated <= SURELY * budget
            self.baseline = measure_baseline(
                problem, plain=estimated <= likely, tagged=not surely, to_run=surely and not problem.undoes
            )
        if self.baseline.compiling is None and self.baseline.peak_nbytes <= budget:
            self.baseline = self.baseline.with_plain(self.baseline.tagged)
        written = self.baseline.written_nbytes
        return written is not None and written <= budget

    def _measured(self) -> Baseline:
        """Return the baseline, measuring it first if needed."""
        if self.baseline is None:
            self.baseline = measure_baseline(self.problem, plain=False, tagged=True)
        return self.baseline

    def _as_written(self, budget: int | Literal["min"]) -> Planned:
        """Return the plain step, if no variant could be built.

        **Raises:** `InfeasibleBudgetError` if it exceeds the budget; `CompilationError` if it does not compile either.
        """
        if self.request.planning.verify:
            self.baseline = self._measured().with_plain()
            if self.baseline.refused:
                raise self.problem.defects.no_form(self.problem.name) from None
        peak = self.baseline.peak_nbytes if self.baseline else self.problem.estimated_peak_nbytes
        room = peak if budget == "min" else budget
        run_as_written(self.request.budget, peak, room, self.margin_nbytes)
        return self._plain(room)

    def _plain(self, budget: int) -> Planned:
        """Return the plain step, compiled if plans are verified."""
        problem, graph = self.problem, self.problem.estimated
        if self.request.planning.verify:
            self.baseline = self._measured().with_plain()
        plan = self._as_plan(graph, budget, Solution(save_all(graph), solver="none"))
        plan = replace(
            plan,
            overhead=0.0,
            gap=0.0,
            stages=(),
            form=problem.traced.form,
            account=account_of_plain(as_stacked(graph)),
        )
        if not self.request.planning.verify:
            return Planned(plan, problem.program.plain, None)
        made = self._measured().plain
        told = confirmed(problem, made) | {"predicted_peak_nbytes": plan.baseline_peak_nbytes}
        plan = replace(plan, **told, compiled_overhead=0.0)
        if self._measured().to_run:
            return Planned(plan, problem.program.plain, made)
        return planned(problem, plan, self.request.planning, problem.program.plain, made)

    def _planned(
        self, search: Search, found: CompiledCandidate, budget: int, said: tuple[str, ...] = ()
    ) -> Planned:
        stays = staying(found.graph, found.solution.schedule)
        plan = replace(
            self._as_plan(found.graph, budget, found.solution, search),
            **compiled_facts(self.problem, found),
            collectives=sent(self._measured(), found.compiled),
            warnings=(stays, *said) if stays else said,
        )
        return planned(self.problem, plan, self.request.planning, found.jitted, found.compiled)

    def _unverified(self, budget: int | Literal["min"]) -> Planned:
        problem = self.problem
        allowance = None if budget == "min" else budget
        search = self._search(self.estimated)
        graph, solution = search.predicted(allowance)
        peak = simulate(graph, solution.schedule).peak_nbytes
        if allowance is not None and peak > allowance:
            error = self._refusal(allowance, predicted(graph, solution.schedule))
            raise blamed(error, allowance, problem.estimated, self._least_predicted)
        plan = self._as_plan(graph, allowance or peak, solution, search)
        fits = problem.estimated_peak_nbytes <= (allowance or 0)
        if solution.schedule.drops_nothing and (not graph.loop_stop or fits):
            plan = replace(plan, stages=(), account=account_of_plain(as_stacked(problem.estimated)))
            return Planned(plan, problem.program.plain, None)
        emitted = partial(problem.jitted, graph, solution.schedule)
        jitted = problem.defects.attempted("emitting", emitted, graph.form, graph, solution)
        return self._as_written(budget) if jitted is None else Planned(plan, jitted, None)

    def _combined(self, search: Search, found: CompiledCandidate, budget: int) -> CompiledCandidate:
        """Return the candidate, or the result of `Search.combined` for a step on several devices."""
        if self.problem.division.devices == 1 or found.solution.schedule.drops_nothing:
            return found
        return search.combined(found, budget)

    def _least_compiled(self) -> int:
        """Return the least compiled peak of a search without pins."""
        return self._measured_search(pinned=False).lowest().peak_nbytes

    def _least_predicted(self) -> int:
        graph, solution = self._search(UnpinnedGraphs(self.estimated)).predicted(None)
        return simulate(graph, solution.schedule).peak_nbytes

    def _measured_search(self, *, pinned: bool = True) -> Search:
        baseline = self._measured()
        graphs = baseline.graphs if pinned else UnpinnedGraphs(baseline.graphs)
        _ = graphs.plain  # build the graph while the plain step compiles in another thread
        if (compiled := baseline.measured or (baseline.tagged_form and baseline.tagged)) is not None:
            self.effort.compile_seconds = compiled.compile_seconds
        compiler = StepCompiler(
            self.problem,
            self.stopwatch,
            lambda: baseline.seconds,
            arrays=baseline.detached,
            known=self.before.compiled if pinned else {},
        )
        return self._search(graphs, compiler)

    def _search(self, graphs: Space, compiler: StepCompiler | None = None) -> Search:
        """Return a search. **Arguments:** `compiler` None if nothing is compiled."""
        planning = self.request.planning
        return Search(
            graphs,
            Ledger(planning.solver, self.effort, planning.time_limit, compiler, rounds=self.before.rounds),
            self._searched_nbytes(),
            self.baseline.written_nbytes if compiler and self.baseline else None,
        )

    def _as_plan(self, graph: Graph, budget: int, solution: Solution, search: Search | None = None) -> Plan:
        problem, planning = self.problem, self.request.planning
        return plan_of(
            problem,
            search.graph if search else graph,
            graph,
            solution,
            budget,
            search.ledger if search else Ledger(planning.solver, self.effort, planning.time_limit),
            self.baseline.memory if self.baseline else problem.modelled_memory("nothing was compiled"),
            margin_nbytes=self.margin_nbytes,
            compile_count=problem.compilations.count - self.compiled_before,
        )

    def _refusal(self, budget: int, least: Least) -> InfeasibleBudgetError:
        return infeasible(
            self.request.budget,
            budget,
            self.margin_nbytes,
            least,
            temporaries_nbytes=self._temporaries(),
            effort=self.effort,
            advice=advice(self.problem),
        )

    def _searched_nbytes(self) -> int:
        """Return the temporaries of the step with the user's checkpoints undone, where the tagged step was compiled."""
        if self.baseline is not None and self.baseline.tagged_form:
            return self.baseline.tagged.memory.temporaries_nbytes
        return self._temporaries()

    def _temporaries(self) -> int:
        """Return the plain step's temporaries."""
        if self.baseline is not None:
            return self.baseline.temporaries_nbytes
        return self.problem.estimated_peak_nbytes - self.problem.estimated.base_nbytes
