"""Program, arguments, budget -> a compiled step whose peak the compiler has confirmed, and its plan.

The plain step is compiled first, which says what it needs and what it keeps in memory; `_search` then finds the best
plan that fits. Nothing that exceeds the budget is returned.
"""

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .._compiler._hlo import parse
from .._compiler._memory_stats import MemoryStats
from .._compiler._peak_contents import alive_at_peak
from .._compiler._program import Compiled
from .._compiler._roofline import roofline
from .._emit._emit import FENCES
from .._lower._lower import as_stacked, lower
from .._model._graph import Graph
from .._model._pins import Patterns
from .._model._schedule import Schedule, check
from .._model._simulate import simulate
from .._report._account import account, account_of_plain
from .._report._actions import actions
from .._report._loop_forms import loop_forms
from .._runtime._bytes import Budget, format_nbytes, parse_budget, parse_margin
from .._runtime._errors import InfeasibleBudgetError, JaxrematWarning, PlanMismatchError
from .._runtime._progress import phase
from .._solver import Solution, Solver
from ._baseline import Baseline, everything, text_of
from ._blame import blamed, without
from ._plan import Plan
from ._search import MOST_OVERHEAD, Search
from ._trial import Trial

logger = logging.getLogger("jaxremat")

_ROUNDS = {"normal": 3, "thorough": 7}
"""Schedules that are compiled in search of the best, at most."""


@dataclass(frozen=True)
class Options:
    """How to plan. **Fields** as the arguments of `jaxremat.optimize`."""

    solver: Solver | None
    time_limit: float
    verify: bool
    effort: str
    profile: str
    workspace_margin: int | float | str
    cache: bool = True
    respect_checkpoint: bool = False
    progress: bool | None = None
    pins: Patterns = ()


@dataclass(frozen=True)
class Request:
    """What to plan for.

    **Fields:** `budget`; `options`, with a solver; `device_nbytes` the memory that the device reports.
    """

    budget: Budget
    options: Options
    device_nbytes: int | None


@dataclass(frozen=True)
class Planned:
    """A plan, the jitted step that follows it, and that step compiled (None where nothing was compiled)."""

    plan: Plan
    jitted: Any
    compiled: Compiled | None


def make_plan(baseline: Baseline, request: Request) -> Planned:
    """Plan a step for its arguments.

    **Raises:** `InfeasibleBudgetError`, `BudgetError`, `SolverError`.
    """
    return _Planner(baseline, request).run()


def make_plan_of(baseline: Baseline, request: Request, graph: Graph, solution: Solution) -> Planned:
    """The plan of a schedule that is known already, whose budget is what it needs; the request's is not looked at."""
    return _Planner(baseline, request).follow(graph, solution)


def apply_plan(baseline: Baseline, plan: Plan, verify: bool) -> Planned:
    """The step that follows a plan made before; needs no solver.

    **Raises:** `PlanMismatchError` where the plan is of another program; `InfeasibleBudgetError` where this machine's
    compiler needs more than the plan's budget for it.
    """
    found = baseline.fingerprint
    if found != plan.fingerprint:
        raise PlanMismatchError(
            f"The plan was made for the program {plan.fingerprint[:12]}, this step is {found[:12]}: its code, the "
            "shapes or types of its arguments, its static arguments, its donated arguments or the version of jax "
            "differ. "
            "Plan this step afresh, with `optimize(budget)`."
        )
    if not plan.stages:
        jitted = baseline.program.plain
    else:
        graph = plan.layout(lower(baseline.form(plan.segments), baseline.device, base_nbytes=0))
        schedule = check(graph, plan.schedule(graph))
        plan = replace(plan, actions=actions(graph, schedule))  # with lines of the code as it is today
        jitted = baseline.jitted(graph, schedule, plan.fence)
    if not verify:
        return Planned(plan, jitted, None)
    with phase("compiling the plan"):
        compiled = baseline.compile(jitted)
    memory = confirm(plan, compiled)
    plan = replace(
        plan,
        compiled_peak_nbytes=memory.peak_nbytes,
        memory=memory,
        compiler=baseline.compiler,
        alive=alive_at_peak(text_of(compiled)),
    )
    return Planned(plan, jitted, compiled)


def confirm(plan: Plan, compiled: Compiled) -> MemoryStats:
    """What the compiled step of a plan that was made elsewhere needs.

    **Raises:** `InfeasibleBudgetError` where that is more than the plan's budget.
    """
    memory = MemoryStats.of(compiled)
    if memory.peak_nbytes > (room := plan.budget_nbytes - plan.margin_nbytes):
        raise InfeasibleBudgetError(
            f"The plan was made for {format_nbytes(room)}, but this machine's compiler needs "
            f"{format_nbytes(memory.peak_nbytes)} for it. Plan again on this machine, without `target`.",
            budget_nbytes=plan.budget_nbytes,
            min_peak_nbytes=memory.peak_nbytes,
        )
    return memory


@dataclass
class _Planner:
    """Plans for one budget on what the plain step's other plans start from too."""

    baseline: Baseline
    request: Request
    margin_nbytes: int = 0

    def __post_init__(self) -> None:
        self.compiled_before = self.baseline.compile_count
        self.tried = 0

    def run(self) -> Planned:
        options, baseline = self.request.options, self.baseline
        budget = parse_budget(self.request.budget, self.request.device_nbytes)
        if budget != "min":
            self.margin_nbytes = parse_margin(options.workspace_margin, budget)
            budget -= self.margin_nbytes  # from here on what the compiled peak may be
        if not options.verify:
            return self._unverified(budget)
        if budget != "min" and not baseline.must_recompute and self._plain_fits(budget):
            return self._plain(budget)
        search = self._search(rough=False)
        if budget == "min":
            trial = search.least(_ROUNDS[options.effort])
            return self._planned(search, trial, trial.peak_nbytes)
        trial = search.within(budget, _ROUNDS[options.effort])
        if trial is None:
            error = self._infeasible(budget, search.trials)
            raise blamed(error, budget, baseline.graph, self._least_compiled)
        if options.effort == "thorough":
            trial = _reformed(search, trial, budget)
        if said := dear(search, trial):
            warnings.warn(f"`optimize({self.request.budget!r})`: {said}", JaxrematWarning, stacklevel=2)
        return self._planned(search, trial, budget)

    def follow(self, graph: Graph, solution: Solution) -> Planned:
        if not self.request.options.verify:
            search = self._search(rough=True)
            peak = simulate(graph, solution.schedule).peak_nbytes
            plan = self._as_plan(graph, peak, solution, search)
            return Planned(plan, self.baseline.jitted(graph, solution.schedule), None)
        search = self._search(rough=False)
        trial = search.follow(graph, solution)
        return self._planned(search, trial, trial.peak_nbytes)

    def _plain_fits(self, budget: int) -> bool:
        """Whether the plain step keeps the budget; it is compiled where that is likely, the tagged one is anyway."""
        baseline = self.baseline
        if baseline.rough_peak_nbytes <= 1.2 * budget:
            return MemoryStats.of(baseline.plain).peak_nbytes <= budget
        return baseline.peak_nbytes <= budget and MemoryStats.of(baseline.plain).peak_nbytes <= budget

    def _plain(self, budget: int) -> Planned:
        compiled, graph = self.baseline.plain, self.baseline.rough
        plan = self._as_plan(graph, budget, Solution(everything(graph), solver="none"))
        plan = replace(
            self._confirmed(plan, compiled),
            predicted_peak_nbytes=plan.baseline_peak_nbytes,
            compiled_overhead=0.0,
            stages=(),
            segments=self.baseline.traced.segments,
            account=account_of_plain(as_stacked(graph)),
        )
        return Planned(plan, self.baseline.program.plain, compiled)

    def _planned(self, search: Search, trial: Trial, budget: int) -> Planned:
        plan = self._as_plan(trial.graph, budget, trial.solution, search)
        plan = replace(
            self._confirmed(plan, trial.compiled),
            compiled_overhead=trial.compiled_overhead,
            fence=trial.fence,
        )
        return Planned(plan, trial.jitted, trial.compiled)

    def _confirmed(self, plan: Plan, compiled: Compiled) -> Plan:
        """The plan with what the compiler says of its step."""
        memory = MemoryStats.of(compiled)
        return replace(
            plan,
            compiled_peak_nbytes=memory.peak_nbytes,
            memory=memory,
            compiler=self.baseline.compiler,
            alive=alive_at_peak(text_of(compiled)),
        )

    def _unverified(self, budget: int | Literal["min"]) -> Planned:
        baseline = self.baseline
        allowance = None if budget == "min" else budget
        rough_peak = baseline.rough_peak_nbytes
        search = self._search(rough=True)
        graph, solution = search.predict(allowance)
        peak = simulate(graph, solution.schedule).peak_nbytes
        if allowance is not None and peak > allowance:
            error = self._infeasible(allowance, predicted=(graph, solution.schedule))
            raise blamed(error, allowance, baseline.rough, self._least_predicted)
        plan = self._as_plan(graph, allowance or peak, solution, search)
        if solution.schedule.drops_nothing and (not graph.loop_stop or rough_peak <= (allowance or 0)):
            plan = replace(plan, stages=(), account=account_of_plain(as_stacked(baseline.rough)))
            return Planned(plan, baseline.program.plain, None)
        return Planned(plan, baseline.jitted(graph, solution.schedule), None)

    def _least_compiled(self) -> int:
        """The least compiled peak that is found without pins."""
        return self._search(rough=False, pinned=False).lowest().peak_nbytes

    def _least_predicted(self) -> int:
        graph, solution = self._search(rough=True, pinned=False).predict(None)
        return simulate(graph, solution.schedule).peak_nbytes

    def _search(self, *, rough: bool, pinned: bool = True) -> Search:
        options, baseline = self.request.options, self.baseline
        assert options.solver is not None
        nbytes = baseline.rough_peak_nbytes - baseline.rough.base_nbytes

        def wanted(graph: Graph) -> Graph:
            return graph if pinned else without(graph, None)

        graph = wanted(baseline.plain_graph(rough=rough))
        return Search(
            graph=graph,
            pairs=baseline.pairs(graph),
            graph_of=lambda segments: wanted(baseline.graph_of(segments, rough=rough)),
            solver=options.solver,
            time_limit=options.time_limit,
            attempt=self._try,
            temporaries_nbytes=nbytes if rough else baseline.temporaries_nbytes,
        )

    def _try(self, graph: Graph, solution: Solution, fence: str) -> Trial:
        baseline = self.baseline
        profile = simulate(graph, solution.schedule)
        self.tried += 1
        began = time.monotonic()
        with phase(f"compiling plan {self.tried}"):
            jitted = baseline.jitted(graph, solution.schedule, fence)
            compiled = baseline.compile(jitted)
        seconds = roofline(parse(text_of(compiled)), baseline.device).seconds
        trial = Trial(
            graph=graph,
            solution=solution,
            fence=fence,
            profile=profile,
            jitted=jitted,
            compiled=compiled,
            peak_nbytes=MemoryStats.of(compiled).peak_nbytes,
            compiled_overhead=seconds / baseline.seconds - 1,
            compile_seconds=time.monotonic() - began,
        )
        logger.info(
            "predicted %s, compiled %s, overhead predicted %.2f %%, compiled %.2f %%",
            format_nbytes(profile.peak_nbytes), format_nbytes(trial.peak_nbytes),
            100 * profile.extra_seconds / graph.step_seconds, 100 * trial.compiled_overhead,
        )  # fmt: skip
        return trial

    def _as_plan(self, graph: Graph, budget: int, solution: Solution, search: Search | None = None) -> Plan:
        schedule = solution.schedule
        profile = simulate(graph, schedule)
        overhead = profile.extra_seconds / (graph.step_seconds or 1.0)
        trials, traced = search.trials if search else [], self.baseline.traced
        return Plan(
            step=getattr(self.baseline.program.fn, "__name__", "step"),
            budget_nbytes=budget + self.margin_nbytes,
            baseline_peak_nbytes=self.baseline.peak_nbytes
            if self.request.options.verify
            else self.baseline.rough_peak_nbytes,
            predicted_peak_nbytes=profile.peak_nbytes,
            compiled_peak_nbytes=None,
            memory=None,
            compiler="",
            overhead=overhead,
            compiled_overhead=None,
            lower_bound=solution.lower_bound,
            gap=max(overhead - solution.lower_bound, 0.0),
            solver=solution.solver or type(self.request.options.solver).__name__,
            solve_seconds=search.solve_seconds if search else 0.0,
            compile_count=self.baseline.compile_count - self.compiled_before,
            rounds=tuple(t.round for t in trials),
            actions=actions(graph, schedule),
            alive=(),
            account=account(as_stacked(search.graph if search else graph), graph, schedule),
            fingerprint=self.baseline.fingerprint,
            saved=tuple(sorted(schedule.saved)),
            kept=tuple(sorted(schedule.kept)),
            stages=tuple((s.start, s.stop) for s in graph.stages),
            materialised=tuple(v.id for v in graph.values if v.materialised and v.producer >= 0),
            small_nbytes=graph.small_nbytes,
            fence="finished",
            segments=graph.segments,
            loops=loop_forms(traced.lengths, graph.segments, traced.sources, traced.rows),
            margin_nbytes=self.margin_nbytes,
            devices=self.baseline.division.devices,
            respect_checkpoint=self.baseline.respect_checkpoint,
        )

    def _infeasible(
        self,
        budget: int,
        trials: Sequence[Trial] = (),
        predicted: tuple[Graph, Schedule] | None = None,
    ) -> InfeasibleBudgetError:
        if predicted is None:
            trial = min(trials, key=lambda t: t.peak_nbytes)
            graph, schedule, peak, how = trial.graph, trial.solution.schedule, trial.peak_nbytes, "compiled"
        else:
            graph, schedule = predicted
            peak, how = simulate(graph, schedule).peak_nbytes, "predicted"
        least = peak + self.margin_nbytes
        profile = simulate(graph, schedule)
        event = profile.events[profile.peak_event]
        node = graph.nodes[event.node]
        largest = "; ".join(
            f"{format_nbytes(graph.values[v].nbytes)} {graph.values[v].shape} "
            f"from {graph.nodes[graph.values[v].producer].primitive}"
            for v, _ in profile.alive[:3]
        )
        return InfeasibleBudgetError(
            f"`optimize({self.request.budget!r})` cannot be met: with the least memory found, the step still needs "
            f"{format_nbytes(peak)} ({how}), at {node.primitive} ({node.source or node.scope}): arguments and outputs "
            f"{format_nbytes(graph.base_nbytes)}, live values {format_nbytes(event.live_nbytes)}, "
            f"the largest {largest or 'none'}. "
            f"Use a budget of at least {least} bytes ({format_nbytes(least)}), or a smaller batch.",
            budget_nbytes=budget + self.margin_nbytes,
            min_peak_nbytes=peak,
        )


def dear(search: Search, trial: Trial) -> str:
    """What to say of a plan that takes several times as long as the plain step; "" of others."""
    step = search.graph.step_seconds or 1.0
    if trial.seconds <= MOST_OVERHEAD * step:
        return ""
    times = 1 + trial.seconds / step
    said = f"the cheapest plan found within this budget takes {times:.1f} times the plain step's time."
    cheaper = [t for t in search.trials if t.seconds <= MOST_OVERHEAD * step]
    if not cheaper:
        return f"{said} Use a larger budget, or a smaller batch."
    near = min(cheaper, key=lambda t: t.peak_nbytes)
    return (
        f"{said} It is {1 + near.seconds / step:.1f} times with {near.peak_nbytes} bytes "
        f"({format_nbytes(near.peak_nbytes)}): use that budget, or a smaller batch."
    )


def _reformed(search: Search, trial: Trial, budget: int) -> Trial:
    """The trial, or the same schedule with another form of fences, if its compiled program is faster and fits."""
    for fence in FENCES:
        if fence != trial.fence and trial.profile.extra_seconds > 0:
            search.reform(trial, fence)
    same = [t for t in search.trials if t.solution is trial.solution and t.peak_nbytes <= budget]
    return min(same, key=lambda t: t.compiled_overhead)
