"""Program, arguments, budget -> a compiled step whose peak the compiler has confirmed, and its plan.

The plain step is compiled first, which says what it needs and what it keeps in memory; `_search` then finds the best
plan that fits. Nothing that exceeds the budget is returned.
"""

import logging
import math
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from .._emit._emit import COMBINED
from .._lower._lower import as_stacked
from .._model._form import Form
from .._model._graph import Graph
from .._model._pins import offloading, staying
from .._model._schedule import everything
from .._model._simulate import simulate, waits
from .._report._account import account, account_of_plain
from .._report._actions import NONE_DECIDED, actions, decided
from .._report._loop_forms import loop_forms
from .._report._planning_time import PlanningTime
from .._runtime._bytes import format_nbytes, parse_budget, parse_margin
from .._runtime._errors import InfeasibleBudgetError, JaxrematWarning
from .._runtime._progress import Stopwatch, phase, timed
from .._solver import Solution
from ._baseline import Baseline, measure_baseline
from ._blame import blamed, without
from ._compiled_schedule import compile_schedule
from ._copies import copies
from ._defects import run_as_written
from ._effort import Effort
from ._graphs import EstimatedGraphs, Graphs
from ._made_for_call import made_for
from ._plan import Plan
from ._planned import Planned, confirmed, planned, sent, warn_of
from ._prediction import predict
from ._problem import Problem
from ._refusal import Least, compiled, infeasible, predicted, slow
from ._request import Request
from ._search import Search
from ._trial import NoProgramError, Trial, some
from ._trial import allowance as next_allowance

logger = logging.getLogger("jaxremat")

_ROUNDS = {"normal": 3, "thorough": 7}
"""Schedules that are compiled in search of the best, at most: of each kind."""

LIKELY = 1.2
"""A step that rules say to need at most this multiple of the budget may well fit as it is written: it is compiled."""

COMBINED_ROUNDS = 3
"""Fences that leave sums over devices alone need more or less than others: so many further schedules are compiled that
use the budget with them."""

SURELY = 0.5
"""Up to this share of the budget a step that rules say to need so much is taken to fit, and nothing else is made."""


def make_plan(problem: Problem, request: Request, baseline: Baseline | None = None) -> Planned:
    """Plan a step for its arguments.

    **Arguments:** `baseline` of the step, where it is measured already.

    **Raises:** `InfeasibleBudgetError`, `BudgetError`, `SolverError`.
    """
    with timed() as stopwatch:
        found = _Planner(problem, request, stopwatch, baseline).run()
    warn_of(found.plan)
    return found


def make_plan_of(
    problem: Problem, request: Request, graph: Graph, solution: Solution, baseline: Baseline | None
) -> Planned:
    """The plan of a schedule that is known already, whose budget is what it needs; the request's is not looked at.

    **Arguments:** `baseline` of the step, None where nothing is to be compiled.
    """
    with timed() as stopwatch:
        found = _Planner(problem, request, stopwatch, baseline).follow(graph, solution)
    warn_of(found.plan)
    return found


@dataclass
class _Planner:
    """Plans for one budget, on a `baseline` from which the step's other plans may start too; None until it is measured,
    and where nothing is compiled.
    """

    problem: Problem
    request: Request
    stopwatch: Stopwatch
    baseline: Baseline | None
    margin_nbytes: int = 0

    def __post_init__(self) -> None:
        self.compiled_before = self.problem.compilations.count
        self.estimated = EstimatedGraphs(self.problem)
        self.tried = 0
        options = self.request.options
        self.rounds = _ROUNDS[options.effort]
        self.effort = Effort(
            self.stopwatch,
            planning_seconds=options.planning_seconds or math.inf,
            limited=options.effort == "normal",
            drafts=self.problem.drafts,
        )

    def run(self) -> Planned:
        options, problem = self.request.options, self.problem
        pins = offloading(problem.estimated)
        if pins and options.offload is False:
            said = "saved on the device, for plans use the host's memory with `offload=True` alone."
            warnings.warn(f"{pins[0].origin}: {said}", JaxrematWarning, stacklevel=2)
        elif (
            pins
            and not problem.must_plan
            and (said := staying(problem.estimated, everything(problem.estimated)))
        ):
            warnings.warn(said, JaxrematWarning, stacklevel=2)
        budget = parse_budget(self.request.budget, self.request.device_nbytes)
        if budget != "min":
            self.margin_nbytes = parse_margin(options.workspace_margin, budget)
            budget -= self.margin_nbytes  # from here on what the compiled peak may be
        if not options.verify:
            return self._unverified(budget)
        fits = budget != "min" and not problem.must_plan and self._plain_fits(budget)
        if budget != "min" and fits and not problem.undoes:
            return self._plain(budget)
        try:
            return self._found(budget, fits=fits)
        except NoProgramError:
            return self._as_written(budget)

    def _found(self, budget: int | Literal["min"], *, fits: bool) -> Planned:
        """**Arguments:** `fits` whether the step does as it is written."""
        baseline = self._measured()
        search = some(self.problem.defects.attempted("pricing", self._measured_search))
        if budget == "min":
            trial = search.least(self.rounds)
            if trial is None:
                return self._plain(baseline.peak_nbytes)
            trial = self._combined(search, trial, trial.peak_nbytes)
            return self._planned(search, trial, trial.peak_nbytes)
        if fits:  # as written it does; without its checkpoints it may be faster in no more memory
            with warnings.catch_warnings():  # nobody waits for it
                warnings.filterwarnings("ignore", "The integer program was left", JaxrematWarning)
                trial = search.faster(min(budget, baseline.peak_nbytes), self.rounds)
            return self._plain(budget) if trial is None else self._planned(search, trial, budget)
        trial = search.within(budget, self.rounds)
        if trial is None:
            least = compiled(search.trials, baseline)
            error = blamed(self._refusal(budget, least), budget, baseline.graphs.plain, self._least_compiled)
            if least.trial is not None:
                error.least_plan = self._planned(search, least.trial, least.peak_nbytes).plan
            raise error
        trial = self._combined(search, trial, budget)
        said = slow(search, trial)
        found = (f"`optimize({self.request.budget!r})`: {said}",) if said else ()
        return self._planned(search, trial, budget, found)

    def follow(self, graph: Graph, solution: Solution) -> Planned:
        if not self.request.options.verify:
            search = self._search(self.estimated)
            peak = simulate(graph, solution.schedule).peak_nbytes
            plan = self._as_plan(graph, peak, solution, search)
            return Planned(plan, self.problem.jitted(graph, solution.schedule), None)
        search = self._measured_search()
        try:
            trial = search.follow(graph, solution)
        except NoProgramError:
            return self._as_written("min")
        return self._planned(search, trial, trial.peak_nbytes)

    def _plain_fits(self, budget: int) -> bool:
        """Whether the plain step keeps the budget; it is compiled where that is likely, the tagged one is anyway."""
        problem, likely = self.problem, LIKELY * budget
        if self.baseline is None:
            estimated = problem.estimated_peak_nbytes
            self.baseline = measure_baseline(
                problem, plain=estimated <= likely, tagged=estimated > SURELY * budget
            )
        if self.baseline.compiling is None and self.baseline.peak_nbytes <= budget:
            self.baseline = self.baseline.with_plain(self.baseline.tagged)
        return self.baseline.peak_nbytes <= budget

    def _measured(self) -> Baseline:
        """The baseline, which is measured now if it is not yet."""
        if self.baseline is None:
            self.baseline = measure_baseline(self.problem, plain=False, tagged=True)
        return self.baseline

    def _as_written(self, budget: int | Literal["min"]) -> Planned:
        """The plain step, where no form could be made. **Raises:** `InfeasibleBudgetError` where that exceeds."""
        verify, graph = self.request.options.verify, self.problem.estimated
        if verify:
            self.baseline = self._measured().with_plain()
        peak = self.baseline.peak_nbytes if self.baseline else self.problem.estimated_peak_nbytes
        room = peak if budget == "min" else budget
        run_as_written(self.request.budget, peak, room, self.margin_nbytes)
        if verify:
            return self._plain(room)
        plan = self._as_plan(graph, room, Solution(everything(graph), solver="none"))
        written = replace(plan, overhead=0.0, gap=0.0, stages=(), account=account_of_plain(as_stacked(graph)))
        return Planned(written, self.problem.program.plain, None)

    def _plain(self, budget: int) -> Planned:
        self.baseline = self._measured().with_plain()
        compiled, graph = self.baseline.plain, self.problem.estimated
        plan = self._as_plan(graph, budget, Solution(everything(graph), solver="none"))
        plan = replace(
            confirmed(plan, compiled, self.problem.compiler),
            predicted_peak_nbytes=plan.baseline_peak_nbytes,
            overhead=0.0,
            gap=0.0,
            compiled_overhead=0.0,
            stages=(),
            form=self.problem.traced.form,
            account=account_of_plain(as_stacked(graph)),
        )
        return planned(self.problem, plan, self.request.options, self.problem.program.plain, compiled)

    def _planned(self, search: Search, trial: Trial, budget: int, found: tuple[str, ...] = ()) -> Planned:
        said = staying(trial.graph, trial.solution.schedule)
        plan = self._as_plan(trial.graph, budget, trial.solution, search)
        plan = replace(
            confirmed(plan, trial.compiled, self.problem.compiler),
            compiled_overhead=trial.compiled_overhead,
            collectives=sent(self._measured(), trial.compiled),
            unproved=self.problem.unproved(trial.jitted),
            fence=trial.fence,
            detached=trial.detached,
            warnings=(said, *found) if said else found,
        )
        return planned(self.problem, plan, self.request.options, trial.jitted, trial.compiled)

    def _unverified(self, budget: int | Literal["min"]) -> Planned:
        problem = self.problem
        allowance = None if budget == "min" else budget
        estimated_peak = problem.estimated_peak_nbytes
        search = self._search(self.estimated)
        graph, solution = predict(search, allowance)
        peak = simulate(graph, solution.schedule).peak_nbytes
        if allowance is not None and peak > allowance:
            error = self._refusal(allowance, predicted(graph, solution.schedule))
            raise blamed(error, allowance, problem.estimated, self._least_predicted)
        plan = self._as_plan(graph, allowance or peak, solution, search)
        if solution.schedule.drops_nothing and (not graph.loop_stop or estimated_peak <= (allowance or 0)):
            plan = replace(plan, stages=(), account=account_of_plain(as_stacked(problem.estimated)))
            return Planned(plan, problem.program.plain, None)
        emitted = partial(problem.jitted, graph, solution.schedule)
        jitted = problem.defects.attempted("emitting", emitted, graph.form, graph, solution)
        return self._as_written(budget) if jitted is None else Planned(plan, jitted, None)

    def _least_compiled(self) -> int:
        """The least compiled peak that is found without pins."""
        return self._measured_search(pinned=False).lowest().peak_nbytes

    def _least_predicted(self) -> int:
        graph, solution = predict(self._search(self.estimated, pinned=False), None)
        return simulate(graph, solution.schedule).peak_nbytes

    def _measured_search(self, *, pinned: bool = True) -> Search:
        baseline = self._measured()
        return self._search(baseline.graphs, baseline, pinned=pinned)

    def _search(self, graphs: Graphs, baseline: Baseline | None = None, *, pinned: bool = True) -> Search:
        """**Arguments:** `baseline` that the graphs are of, None where nothing is compiled."""
        options, problem = self.request.options, self.problem

        def wanted(graph: Graph) -> Graph:
            return graph if pinned else without(graph, None)

        def graph_of(form: Form) -> Graph | None:
            found = problem.defects.attempted("rewriting", partial(graphs.of, form), form)
            return found and wanted(found)

        graph = wanted(graphs.plain)
        self.effort.compile_seconds = baseline.measured.compile_seconds if baseline else 0.0
        return Search(
            graph=graph,
            forms=graphs.forms(graph),
            graph_of=graph_of,
            solver=options.solver,
            time_limit=options.time_limit,
            attempt=self._try,
            temporaries_nbytes=self._temporaries(baseline),
            effort=self.effort,
            known=problem.as_checkpointed if problem.undoes and pinned else None,
            written_nbytes=baseline.peak_nbytes if baseline and not problem.must_plan else None,
        )

    def _try(self, graph: Graph, solution: Solution, fence: str) -> Trial | None:
        make = partial(self._compiled, graph, solution, fence)
        return self.problem.defects.attempted(f"fence {fence!r}", make, graph.form, graph, solution)

    def _compiled(self, graph: Graph, solution: Solution, fence: str) -> Trial:
        baseline = self._measured()
        profile = simulate(graph, solution.schedule)
        self.tried += 1
        began = time.monotonic()
        with phase(f"compiling plan {self.tried}", kind="compile"):
            made = compile_schedule(self.problem, graph, solution.schedule, fence)
        trial = Trial(
            graph=graph,
            solution=solution,
            fence=fence,
            profile=profile,
            jitted=made.jitted,
            compiled=made.compiled,
            detached=made.detached,
            peak_nbytes=made.compiled.peak_nbytes,
            compiled_overhead=made.compiled.seconds / baseline.seconds - 1
            if baseline.seconds
            else 0.0,  # of a step of nothing
            compile_seconds=time.monotonic() - began,
            ended_seconds=self.stopwatch.seconds,
        )
        logger.info(
            "predicted %s, compiled %s, overhead predicted %.2f %%, compiled %.2f %%",
            format_nbytes(profile.peak_nbytes), format_nbytes(trial.peak_nbytes),
            100 * profile.extra_seconds / (graph.step_seconds or 1.0), 100 * trial.compiled_overhead,
        )  # fmt: skip
        return trial

    def _combined(self, search: Search, trial: Trial, budget: int) -> Trial:
        """The trial, or one with fences that leave what devices add up alone, if that fits and its kernels, the
        collectives among them, take no longer: of the same schedule, or of others that use the budget with such fences.
        """
        if self.problem.division.devices == 1 or trial.solution.schedule.drops_nothing:
            return trial
        graph, solution, best = trial.graph, trial.solution, trial
        tried: list[Trial] = []
        for _ in range(1 + COMBINED_ROUNDS):
            found = search.attempt(graph, solution, COMBINED)
            if found is None:
                break
            search.trials.append(found)
            tried.append(found)
            if found.peak_nbytes <= budget and found.compiled_overhead <= best.compiled_overhead:
                best = found
            if found.fills(budget) or (found.peak_nbytes <= budget and found.profile.extra_seconds <= 0):
                break
            solution = search.solving.within(graph, next_allowance(tried, budget))
            if any(solution.schedule == each.solution.schedule for each in tried):
                break
        return best

    def _as_plan(self, graph: Graph, budget: int, solution: Solution, search: Search | None = None) -> Plan:
        schedule = solution.schedule
        profile = simulate(graph, schedule)
        overhead = profile.extra_seconds / (graph.step_seconds or 1.0)
        trials, problem, traced = search.trials if search else [], self.problem, self.problem.traced
        return Plan(
            step=getattr(problem.program.fn, "__name__", "step"),
            budget_nbytes=budget + self.margin_nbytes,
            baseline_peak_nbytes=self.baseline.peak_nbytes
            if self.baseline
            else problem.estimated_peak_nbytes,
            predicted_peak_nbytes=profile.peak_nbytes,
            compiled_peak_nbytes=None,
            memory=None,
            compiler="",
            overhead=overhead,
            compiled_overhead=None,
            lower_bound=solution.lower_bound,
            gap=max(overhead - solution.lower_bound, 0.0),
            solver=solution.solver or type(self.request.options.solver).__name__,
            solve_seconds=search.solving.seconds if search else 0.0,
            compile_count=problem.compilations.count - self.compiled_before,
            rounds=tuple(t.round for t in trials),
            actions=actions(graph, schedule),
            decided=NONE_DECIDED if schedule.drops_nothing else decided(graph, schedule),
            alive=(),
            account=account(as_stacked(search.graph if search else graph), graph, schedule),
            fingerprint=problem.fingerprint,
            made_for=made_for(problem.program, problem.args, problem.kwargs),
            saved=tuple(sorted(schedule.saved)),
            kept=tuple(sorted(schedule.kept)),
            offloaded=tuple(sorted(schedule.offloaded)),
            stages=tuple((s.start, s.stop) for s in graph.stages),
            materialised=tuple(v.id for v in graph.values if v.materialised and v.producer >= 0),
            unrepeated=tuple(n.id for n in graph.nodes if not n.repeatable),
            small_nbytes=graph.small_nbytes,
            fence="finished",
            form=graph.form,
            loops=loop_forms(
                traced.lengths,
                graph.form,
                traced.sources,
                traced.rows,
                problem.form(graph.form).inner,
                problem.form(graph.form).attention,
                problem.form(graph.form).chain,
                devices=1 if schedule.drops_nothing else traced.devices,
            ),
            copies=copies(problem.form(graph.form), graph, schedule),
            margin_nbytes=self.margin_nbytes,
            devices=problem.division.devices,
            waiting=math.fsum(waits(graph, schedule)) / (graph.step_seconds or 1.0),
            respect_checkpoint=problem.respect_checkpoint,
            planning=PlanningTime.of(
                self.stopwatch,
                min((t.ended_seconds for t in trials if t.peak_nbytes <= budget), default=0.0),
                self.effort.compilations,
                self.effort.solves,
            ),
        )

    def _refusal(self, budget: int, least: Least) -> InfeasibleBudgetError:
        return infeasible(
            self.request.budget,
            budget,
            self.margin_nbytes,
            least,
            temporaries_nbytes=self._temporaries(self.baseline),
            effort=self.effort,
        )

    def _temporaries(self, baseline: Baseline | None) -> int:
        """What of the step as it is written is not there all the time."""
        if baseline is not None:
            return baseline.temporaries_nbytes
        return self.problem.estimated_peak_nbytes - self.problem.estimated.base_nbytes
