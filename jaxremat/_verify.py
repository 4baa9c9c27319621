"""Program, arguments, budget -> a compiled step whose peak the compiler has confirmed, and its plan.

The plain step is compiled first, which says what it needs and what it keeps in memory; `_search` then finds the best
plan that fits. Nothing that exceeds the budget is returned.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ._alive import alive_at_peak
from ._budget import Budget, format_nbytes, parse_budget, parse_margin
from ._devices import DeviceSpec
from ._emit import FENCES, emit
from ._errors import InfeasibleBudgetError, PlanMismatchError
from ._fingerprint import fingerprint
from ._graph import Graph
from ._hlo import parse
from ._lower import as_stacked, estimate_base, lower
from ._measured import measure
from ._plan import Plan, actions
from ._program import Compiled, MemoryStats, Program
from ._roofline import roofline
from ._schedule import Schedule, check
from ._search import Search, Trial
from ._segments import choices
from ._simulate import simulate
from ._solver import Solution, Solver
from ._tags import tagged, written
from ._trace import Traced, trace
from ._workspace import workspaces

logger = logging.getLogger("jaxremat")

_ROUNDS = {"normal": 3, "thorough": 7}
"""Schedules that are compiled in search of the best, at most."""

_WORKSPACE_SHARE = 1 / 200
"""Equations with an operand above this share of the temporaries are compiled alone for their scratch memory."""

_MEASURED_SHARE = 1 / 1000
"""Equations with an operand above this share of them are timed where `profile="measure"`."""


@dataclass(frozen=True)
class Options:
    """How to plan. **Fields** as the arguments of `jaxremat.optimize`."""

    solver: Solver | None
    time_limit: float
    verify: bool
    effort: str
    profile: str
    workspace_margin: int | float | str


@dataclass(frozen=True)
class Request:
    """What to plan for.

    **Fields:** `budget`; `options`, with a solver; `device` and the memory that it reports; `here` the `jax.Device` to
    measure on, None for a target.
    """

    budget: Budget
    options: Options
    device: DeviceSpec
    device_nbytes: int | None
    here: Any = None


@dataclass(frozen=True)
class Planned:
    """A plan, the jitted step that follows it, and that step compiled (None where nothing was compiled)."""

    plan: Plan
    jitted: Any
    compiled: Compiled | None


def make_plan(program: Program, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
    """Plan a step for these arguments.

    **Raises:** `InfeasibleBudgetError`, `BudgetError`, `SolverError`.
    """
    return _Planner(program, request, args, kwargs).run()


def apply_plan(
    program: Program,
    plan: Plan,
    device: DeviceSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    verify: bool,
) -> Planned:
    """The step that follows a plan made before; needs no solver.

    **Raises:** `PlanMismatchError` where the plan is of another program; `InfeasibleBudgetError` where this machine's
    compiler needs more than the plan's budget for it.
    """
    traced = trace(program.plain, args, kwargs)
    found = fingerprint(traced)
    if found != plan.fingerprint:
        raise PlanMismatchError(
            f"The plan was made for the program {plan.fingerprint[:12]}, this step is {found[:12]}: its code, the "
            "shapes or types of its arguments, its static arguments, its donated arguments or the version of jax "
            "differ. "
            "Plan this step afresh, with `optimize(budget)`."
        )
    if not plan.stages:
        jitted = program.plain
    else:
        if plan.segments != traced.segments:
            traced = traced.in_segments(plan.segments)
        graph = plan.layout(lower(traced, device, base_nbytes=0))
        jitted = program.evaluating(
            emit(traced, graph, check(graph, plan.schedule(graph)), plan.fence), traced
        )
    if not verify:
        return Planned(plan, jitted, None)
    compiled = program.lower(jitted, args, kwargs).compile()
    peak = MemoryStats.of(compiled).peak_nbytes
    if peak > (room := plan.budget_nbytes - plan.margin_nbytes):
        raise InfeasibleBudgetError(
            f"The plan was made for {format_nbytes(room)}, but this machine's compiler needs "
            f"{format_nbytes(peak)} for it. Plan again on this machine.",
            budget_nbytes=plan.budget_nbytes,
            min_peak_nbytes=peak,
        )
    return Planned(replace(plan, compiled_peak_nbytes=peak), jitted, compiled)


@dataclass
class _Planner:
    program: Program
    request: Request
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    compile_count: int = 0
    margin_nbytes: int = 0

    def run(self) -> Planned:
        request = self.request
        options = request.options
        budget = parse_budget(request.budget, request.device_nbytes)
        if budget != "min":
            self.margin_nbytes = parse_margin(options.workspace_margin, budget)
            budget -= self.margin_nbytes  # from here on what the compiled peak may be
        self.traced = trace(self.program.plain, self.args, self.kwargs)
        self.forms = {self.traced.segments: self.traced}
        self.fingerprint = fingerprint(self.traced)
        rough = lower(self.traced, request.device, base_nbytes=estimate_base(self.traced))
        stacked = as_stacked(rough)
        rough_peak = simulate(stacked, _everything(stacked)).peak_nbytes
        if not options.verify:
            return self._unverified(rough, rough_peak, budget)
        plain: Compiled | None = None
        if self.traced.rematted or (budget != "min" and rough_peak <= 1.2 * budget):
            plain = self._compile(self.program.plain)
            if budget != "min" and MemoryStats.of(plain).peak_nbytes <= budget:
                return self._plain(plain, rough, budget)
        witness = self._compile(self.program.evaluating(tagged(self.traced), self.traced))
        module = parse(_text(witness))
        stats = MemoryStats.of(plain or witness)
        self.baseline_nbytes = stats.peak_nbytes
        if plain is None and budget != "min" and self.baseline_nbytes <= budget:
            return self._plain(self._compile(self.program.plain), rough, budget)
        self.baseline_seconds = roofline(module, request.device).seconds
        base = MemoryStats.of(witness).base_nbytes
        temporaries = self.baseline_nbytes - base
        least = int(temporaries * _WORKSPACE_SHARE)
        found = written(module)

        def lowered(traced: Traced) -> Graph:
            return lower(
                traced,
                request.device,
                base_nbytes=base,
                written=found.renumbered(self.traced.places(traced)),
                workspace=workspaces(traced, self.program, request.device.platform, least),
                seconds=self._measured(traced, temporaries),
            )

        graph = lowered(self.traced)
        logger.info(
            "plain step: peak %s, %d equations, %d residuals, %d stages",
            format_nbytes(self.baseline_nbytes), len(graph.nodes), len(graph.residuals), len(graph.stages),
        )  # fmt: skip
        forms = self._forms(graph, lowered)
        if graph.backend.fuses and options.profile == "roofline":
            forms = [replace(form, step_seconds=self.baseline_seconds) for form in forms]
        search = self._search(forms, self.baseline_nbytes - base)
        if budget == "min":
            trial = search.least()
            return self._planned(search, trial, trial.peak_nbytes)
        trial = search.within(budget, _ROUNDS[options.effort])
        if trial is None:
            raise self._infeasible(budget, search.trials)
        if options.effort == "thorough":
            trial = _reformed(search, trial, budget)
        return self._planned(search, trial, budget)

    def _forms(self, graph: Graph, lowered: Callable[[Traced], Graph]) -> list[Graph]:
        """The graph, and that of the step with its loops in two levels if there are any to cut."""
        forms = [graph]
        segments = tuple(choices(length)[0] if choices(length) else 1 for length in self.traced.lengths)
        if segments != self.traced.segments:
            self.forms[segments] = self.traced.in_segments(segments)
            cut = lowered(self.forms[segments])
            longer = max(cut.step_seconds - graph.step_seconds, 0.0) + graph.extra_seconds
            forms.append(replace(cut, step_seconds=graph.step_seconds, extra_seconds=longer))
        return forms

    def _measured(self, traced: Traced, temporaries_nbytes: int) -> dict[int, float] | None:
        """Seconds of equations on the device at hand, where they are asked for."""
        if self.request.options.profile != "measure":
            return None
        least = int(temporaries_nbytes * _MEASURED_SHARE)
        return measure(traced, self.request.here, self.program.compiler_options, least)

    def _search(self, forms: Sequence[Graph], temporaries_nbytes: int) -> Search:
        options = self.request.options
        assert options.solver is not None
        return Search(forms, options.solver, options.time_limit, self._try, temporaries_nbytes)

    def _try(self, graph: Graph, solution: Solution, fence: str) -> Trial:
        profile = simulate(graph, solution.schedule)
        jitted = self._jitted(graph, solution.schedule, fence)
        compiled = self._compile(jitted)
        seconds = roofline(parse(_text(compiled)), self.request.device).seconds
        trial = Trial(
            graph=graph,
            solution=solution,
            fence=fence,
            profile=profile,
            jitted=jitted,
            compiled=compiled,
            peak_nbytes=MemoryStats.of(compiled).peak_nbytes,
            compiled_overhead=seconds / self.baseline_seconds - 1,
        )
        logger.info(
            "predicted %s, compiled %s, overhead predicted %.2f %%, compiled %.2f %%",
            format_nbytes(profile.peak_nbytes), format_nbytes(trial.peak_nbytes),
            100 * profile.extra_seconds / graph.step_seconds, 100 * trial.compiled_overhead,
        )  # fmt: skip
        return trial

    def _jitted(self, graph: Graph, schedule: Schedule, fence: str = FENCES[0]) -> Any:
        """The step that follows a schedule of one of its forms."""
        traced = self.forms[graph.segments]
        return self.program.evaluating(emit(traced, graph, schedule, fence), traced)

    def _compile(self, jitted: Any) -> Compiled:
        self.compile_count += 1
        return self.program.lower(jitted, self.args, self.kwargs).compile()

    def _plain(self, compiled: Compiled, graph: Graph, budget: int) -> Planned:
        peak = MemoryStats.of(compiled).peak_nbytes
        self.baseline_nbytes = peak
        plan = self._as_plan(graph, budget, Solution(_everything(graph), solver="none"))
        plan = replace(
            plan,
            predicted_peak_nbytes=peak,
            compiled_peak_nbytes=peak,
            compiled_overhead=0.0,
            stages=(),
            segments=self.traced.segments,
            alive=alive_at_peak(_text(compiled)),
        )
        return Planned(plan, self.program.plain, compiled)

    def _planned(self, search: Search, trial: Trial, budget: int) -> Planned:
        plan = self._as_plan(trial.graph, budget, trial.solution, search)
        plan = replace(
            plan,
            compiled_peak_nbytes=trial.peak_nbytes,
            compiled_overhead=trial.compiled_overhead,
            fence=trial.fence,
            alive=alive_at_peak(_text(trial.compiled)),
        )
        return Planned(plan, trial.jitted, trial.compiled)

    def _unverified(self, graph: Graph, rough_peak: int, budget: Any) -> Planned:
        self.baseline_nbytes = rough_peak
        allowance = None if budget == "min" else budget
        base = graph.base_nbytes
        forms = self._forms(graph, lambda traced: lower(traced, self.request.device, base_nbytes=base))
        search = self._search(forms, rough_peak - base)
        graph, solution = search.predict(allowance)
        peak = simulate(graph, solution.schedule).peak_nbytes
        if allowance is not None and peak > allowance:
            raise self._infeasible(allowance, predicted=(graph, solution.schedule))
        plan = self._as_plan(graph, allowance or peak, solution, search)
        if solution.schedule.drops_nothing and (not graph.loop_stop or rough_peak <= (allowance or 0)):
            return Planned(replace(plan, stages=()), self.program.plain, None)
        return Planned(plan, self._jitted(graph, solution.schedule), None)

    def _as_plan(self, graph: Graph, budget: int, solution: Solution, search: Search | None = None) -> Plan:
        schedule = solution.schedule
        profile = simulate(graph, schedule)
        overhead = profile.extra_seconds / (graph.step_seconds or 1.0)
        trials = search.trials if search else []
        return Plan(
            budget_nbytes=budget + self.margin_nbytes,
            baseline_peak_nbytes=self.baseline_nbytes,
            predicted_peak_nbytes=profile.peak_nbytes,
            compiled_peak_nbytes=None,
            overhead=overhead,
            compiled_overhead=None,
            lower_bound=solution.lower_bound,
            gap=max(overhead - solution.lower_bound, 0.0),
            solver=solution.solver or type(self.request.options.solver).__name__,
            solve_seconds=search.solve_seconds if search else 0.0,
            compile_count=self.compile_count,
            rounds=tuple((t.profile.peak_nbytes, t.peak_nbytes) for t in trials),
            actions=actions(graph, schedule),
            alive=(),
            fingerprint=self.fingerprint,
            saved=tuple(sorted(schedule.saved)),
            kept=tuple(sorted(schedule.kept)),
            stages=tuple((s.start, s.stop) for s in graph.stages),
            materialised=tuple(v.id for v in graph.values if v.materialised and v.producer >= 0),
            small_nbytes=graph.small_nbytes,
            fence="finished",
            segments=graph.segments,
            margin_nbytes=self.margin_nbytes,
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


def _reformed(search: Search, trial: Trial, budget: int) -> Trial:
    """The trial, or the same schedule with another form of fences, if its compiled program is faster and fits."""
    for fence in FENCES:
        if fence != trial.fence and trial.profile.extra_seconds > 0:
            search.reform(trial, fence)
    same = [t for t in search.trials if t.solution is trial.solution and t.peak_nbytes <= budget]
    return min(same, key=lambda t: t.compiled_overhead)


def _everything(graph: Graph) -> Schedule:
    return Schedule(frozenset(graph.residuals), ((),) * len(graph.stages))


def _text(compiled: Compiled) -> str:
    """The optimised, scheduled HLO."""
    return compiled.as_text() or ""
