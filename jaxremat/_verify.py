"""Program, arguments, budget -> a compiled step whose peak the compiler has confirmed, and its plan.

The loop: solve within what the model allows, emit, compile, read the compiler's peak, correct the model's allowance by
the difference, solve again. The best plan that fits is kept; nothing that exceeds the budget is returned.
"""

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ._budget import Budget, format_nbytes, parse_budget
from ._devices import DeviceSpec
from ._emit import emit
from ._errors import InfeasibleBudgetError, PlanMismatchError, SolverError
from ._fingerprint import fingerprint
from ._graph import Graph
from ._hlo import parse
from ._lower import estimate_base, lower
from ._plan import Plan, actions
from ._program import MemoryStats, Program
from ._roofline import roofline
from ._schedule import Schedule, check
from ._simulate import Profile, rank, simulate
from ._solver import MinCut, Solution, Solver
from ._stages import cut_stages
from ._tags import tagged, written
from ._trace import trace
from ._workspace import workspaces

logger = logging.getLogger("jaxremat")

_REPLANS = {"normal": 2, "thorough": 6}
_SLACK = 0.02
"""A plan that leaves this share of the temporaries' budget unused, and costs something, is worth another round."""

_CHEAP = 0.002
"""A plan of at most this overhead is not worth another cutting into stages, nor is a gain of half of it."""

_LEAST_SLACK = 0.02
"""Of schedules of about the least memory, within this share of the plain step's temporaries, the fastest is taken."""

_WORKSPACE_SHARE = 1 / 200
"""Equations with an operand above this share of the temporaries are compiled alone for their scratch memory."""


@dataclass(frozen=True)
class Request:
    """How to plan. **Fields** as the arguments of `jaxremat.optimize`."""

    budget: Budget
    solver: Solver
    time_limit: float
    verify: bool
    effort: str
    device: DeviceSpec
    device_nbytes: int | None


@dataclass(frozen=True)
class Planned:
    """A plan, the jitted step that follows it, and that step compiled (None where nothing was compiled)."""

    plan: Plan
    jitted: Any
    compiled: jax.stages.Compiled | None


@dataclass(frozen=True)
class _Trial:
    """One emitted and compiled schedule, of a graph with some cutting into stages."""

    graph: Graph
    solution: Solution
    profile: Profile
    jitted: Any
    compiled: jax.stages.Compiled
    peak_nbytes: int
    compiled_overhead: float


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
        graph = plan.layout(lower(traced, device, base_nbytes=0))
        jitted = program.evaluating(emit(traced, graph, check(graph, plan.schedule(graph))), traced)
    if not verify:
        return Planned(plan, jitted, None)
    compiled = jitted.lower(*args, **kwargs).compile()
    peak = MemoryStats.of(compiled).peak_nbytes
    if peak > plan.budget_nbytes:
        raise InfeasibleBudgetError(
            f"The plan was made for {format_nbytes(plan.budget_nbytes)}, but this machine's compiler needs "
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
    solve_seconds: float = 0.0
    cuttings: list[Graph] = field(default_factory=list)
    trials: list[_Trial] = field(default_factory=list)

    def run(self) -> Planned:
        request = self.request
        budget = parse_budget(request.budget, request.device_nbytes)
        self.traced = trace(self.program.plain, self.args, self.kwargs)
        self.fingerprint = fingerprint(self.traced)
        rough = lower(self.traced, request.device, base_nbytes=estimate_base(self.traced))
        rough_peak = simulate(rough, _everything(rough)).peak_nbytes
        if not request.verify:
            return self._unverified(rough, rough_peak, budget)
        plain: jax.stages.Compiled | None = None
        if self.traced.rematted or (budget != "min" and rough_peak <= 1.2 * budget):
            plain = self._compile(self.program.plain)
            if budget != "min" and MemoryStats.of(plain).peak_nbytes <= budget:
                return self._plain(plain, rough)
        witness = self._compile(self.program.evaluating(tagged(self.traced), self.traced))
        module = parse(_text(witness))
        stats = MemoryStats.of(plain or witness)
        self.baseline_nbytes = stats.peak_nbytes
        if plain is None and budget != "min" and self.baseline_nbytes <= budget:
            return self._plain(self._compile(self.program.plain), rough)
        self.baseline_seconds = roofline(module, request.device).seconds
        base = MemoryStats.of(witness).base_nbytes
        temporaries = self.baseline_nbytes - base
        scratch = workspaces(
            self.traced, dict(self.program.compiler_options), int(temporaries * _WORKSPACE_SHARE)
        )
        graph = lower(
            self.traced, request.device, base_nbytes=base, written=written(module), workspace=scratch
        )
        logger.info(
            "plain step: peak %s, %d equations, %d residuals, %d stages",
            format_nbytes(self.baseline_nbytes), len(graph.nodes), len(graph.residuals), len(graph.stages),
        )  # fmt: skip
        if budget == "min":
            trial = self._least(graph)
            return self._planned(trial, trial.peak_nbytes)
        return self._planned(self._search(graph, budget), budget)

    def _search(self, graph: Graph, budget: int) -> _Trial:
        """The cheapest compiled schedule within the budget."""
        allowance = budget
        for _ in range(1 + _REPLANS[self.request.effort]):
            cut, solution = self._solve(graph, allowance)
            if simulate(cut, solution.schedule).peak_nbytes > allowance:
                cut, solution = self._solve(graph, None)
            if self._tried(solution):
                break
            trial = self._try(cut, solution)
            room = budget - trial.peak_nbytes
            if room >= 0 and (
                room <= _SLACK * (budget - graph.base_nbytes) or trial.profile.extra_seconds == 0
            ):
                break
            allowance = self._allowance(trial, budget)
        if not any(t.peak_nbytes <= budget for t in self.trials):
            self._least(graph, budget)
        fitting = [t for t in self.trials if t.peak_nbytes <= budget]
        if not fitting:
            raise self._infeasible(budget)
        return min(fitting, key=lambda t: (t.profile.extra_seconds, t.peak_nbytes))

    def _allowance(self, trial: _Trial, budget: int) -> int:
        """The predicted peak to ask for next: where predicted against compiled peaks so far meet the budget."""
        fits = [t for t in self.trials if t.peak_nbytes <= budget]
        exceeds = [t for t in self.trials if t.peak_nbytes > budget]
        room = budget - trial.peak_nbytes
        if fits and exceeds:
            low = max(fits, key=lambda t: t.profile.peak_nbytes)
            high = min(exceeds, key=lambda t: t.profile.peak_nbytes)
            reach = high.profile.peak_nbytes - low.profile.peak_nbytes
            if reach > 0:
                share = (budget - low.peak_nbytes) / (high.peak_nbytes - low.peak_nbytes)
                return low.profile.peak_nbytes + int(min(share, 0.95) * reach)
        return trial.profile.peak_nbytes + (room if room > 0 else int(1.1 * room))

    def _least(self, graph: Graph, budget: int | None = None) -> _Trial:
        """The compiled schedule of least peak; with a budget, the first that fits.

        Without one, of those that need about the least the fastest.
        """
        # The model is least sure where memory is least: a mere price of memory, which leans on it less, is tried too.
        for solver in (self.request.solver, MinCut()):
            for cut, solution in self._candidates(graph, None, solver):
                if not self._tried(solution):
                    trial = self._try(cut, solution)
                    if budget is not None and trial.peak_nbytes <= budget:
                        return trial
        about = min(t.peak_nbytes for t in self.trials)
        if budget is None:
            about += _LEAST_SLACK * (self.baseline_nbytes - graph.base_nbytes)
        return min((t for t in self.trials if t.peak_nbytes <= about), key=lambda t: t.profile.extra_seconds)

    def _tried(self, solution: Solution) -> bool:
        return any(t.solution.schedule == solution.schedule for t in self.trials)

    def _solve(self, graph: Graph, allowance: int | None) -> tuple[Graph, Solution]:
        """The best solution of the two ways to cut the graph into stages, with the graph so cut."""
        return self._candidates(graph, allowance, self.request.solver)[0]

    def _candidates(
        self, graph: Graph, allowance: int | None, solver: Solver
    ) -> list[tuple[Graph, Solution]]:
        """The solutions for both ways to cut the graph into stages, best first.

        Only one where it is cheap, or about as good as what the last trial took.
        """
        began = time.monotonic()
        before = self.trials[-1].profile.extra_seconds if self.trials else 0.0
        enough = max(_CHEAP * graph.step_seconds, 1.25 * before)
        found: list[tuple[tuple[float, ...], Graph, Solution]] = []
        for at, cut in enumerate(self._cuttings(graph)):
            solution = self._solution(cut, allowance, solver)
            misfit, *order = rank(cut, solution.schedule, allowance)
            if allowance is not None and misfit == 0.0:
                order[0] += at * _CHEAP / 2 * cut.step_seconds
            found.append(((misfit, *order), cut, solution))
            if misfit == 0.0 and order[0] <= enough:
                break
        self.solve_seconds += time.monotonic() - began
        return [(cut, solution) for _, cut, solution in sorted(found, key=lambda candidate: candidate[0])]

    def _cuttings(self, graph: Graph) -> list[Graph]:
        """The graph cut coarsely and, where that differs, finely; what the last trial took comes first."""
        if not self.cuttings:
            stages = dict.fromkeys((graph.stages, cut_stages(graph, fine=True)))
            self.cuttings = [replace(graph, stages=cut) for cut in stages]
        last = self.trials[-1].graph if self.trials else self.cuttings[0]
        return sorted(self.cuttings, key=lambda cut: cut is not last)

    def _solution(self, graph: Graph, allowance: int | None, solver: Solver) -> Solution:
        solution = solver.solve(graph, allowance, time_limit=self.request.time_limit)
        if not isinstance(solution, Solution):
            raise SolverError(
                f"The solver {solver!r} returned a {type(solution).__name__}. "
                "Its method `solve` must return a `jaxremat.Solution`, for example `Solution(complete(graph, saved))`."
            )
        check(graph, solution.schedule)
        return solution

    def _try(self, graph: Graph, solution: Solution) -> _Trial:
        profile = simulate(graph, solution.schedule)
        jitted = self.program.evaluating(emit(self.traced, graph, solution.schedule), self.traced)
        compiled = self._compile(jitted)
        seconds = roofline(parse(_text(compiled)), self.request.device).seconds
        trial = _Trial(
            graph=graph,
            solution=solution,
            profile=profile,
            jitted=jitted,
            compiled=compiled,
            peak_nbytes=MemoryStats.of(compiled).peak_nbytes,
            compiled_overhead=seconds / self.baseline_seconds - 1,
        )
        self.trials.append(trial)
        logger.info(
            "round %d: predicted %s, compiled %s, overhead predicted %.2f %%, compiled %.2f %%",
            len(self.trials), format_nbytes(profile.peak_nbytes), format_nbytes(trial.peak_nbytes),
            100 * profile.extra_seconds / graph.step_seconds, 100 * trial.compiled_overhead,
        )  # fmt: skip
        return trial

    def _compile(self, jitted: Any) -> jax.stages.Compiled:
        self.compile_count += 1
        return jitted.lower(*self.args, **self.kwargs).compile()

    def _plain(self, compiled: jax.stages.Compiled, graph: Graph) -> Planned:
        peak = MemoryStats.of(compiled).peak_nbytes
        self.baseline_nbytes = peak
        budget = parse_budget(self.request.budget, self.request.device_nbytes)
        plan = self._as_plan(graph, int(budget), Solution(_everything(graph), solver="none"))
        plan = replace(
            plan, predicted_peak_nbytes=peak, compiled_peak_nbytes=peak, compiled_overhead=0.0, stages=()
        )
        return Planned(plan, self.program.plain, compiled)

    def _planned(self, trial: _Trial, budget: int) -> Planned:
        plan = self._as_plan(trial.graph, budget, trial.solution)
        plan = replace(
            plan, compiled_peak_nbytes=trial.peak_nbytes, compiled_overhead=trial.compiled_overhead
        )
        return Planned(plan, trial.jitted, trial.compiled)

    def _unverified(self, graph: Graph, rough_peak: int, budget: Any) -> Planned:
        self.baseline_nbytes = rough_peak
        allowance = None if budget == "min" else budget
        graph, solution = self._solve(graph, allowance)
        peak = simulate(graph, solution.schedule).peak_nbytes
        if allowance is not None and peak > allowance:
            raise self._infeasible(allowance, (graph, solution.schedule))
        plan = self._as_plan(graph, allowance or peak, solution)
        if solution.schedule.drops_nothing:
            return Planned(replace(plan, stages=()), self.program.plain, None)
        return Planned(
            plan, self.program.evaluating(emit(self.traced, graph, solution.schedule), self.traced), None
        )

    def _as_plan(self, graph: Graph, budget: int, solution: Solution) -> Plan:
        schedule = solution.schedule
        profile = simulate(graph, schedule)
        overhead = profile.extra_seconds / (graph.step_seconds or 1.0)
        return Plan(
            budget_nbytes=budget,
            baseline_peak_nbytes=self.baseline_nbytes,
            predicted_peak_nbytes=profile.peak_nbytes,
            compiled_peak_nbytes=None,
            overhead=overhead,
            compiled_overhead=None,
            lower_bound=solution.lower_bound,
            gap=max(overhead - solution.lower_bound, 0.0),
            solver=solution.solver or type(self.request.solver).__name__,
            solve_seconds=self.solve_seconds,
            compile_count=self.compile_count,
            rounds=tuple((t.profile.peak_nbytes, t.peak_nbytes) for t in self.trials),
            actions=actions(graph, schedule),
            fingerprint=self.fingerprint,
            saved=tuple(sorted(schedule.saved)),
            kept=tuple(sorted(schedule.kept)),
            stages=tuple((s.start, s.stop) for s in graph.stages),
            materialised=tuple(v.id for v in graph.values if v.materialised and v.producer >= 0),
            small_nbytes=graph.small_nbytes,
        )

    def _infeasible(
        self, budget: int, predicted: tuple[Graph, Schedule] | None = None
    ) -> InfeasibleBudgetError:
        if predicted is None:
            trial = min(self.trials, key=lambda t: t.peak_nbytes)
            graph, schedule, peak, how = trial.graph, trial.solution.schedule, trial.peak_nbytes, "compiled"
        else:
            graph, schedule = predicted
            peak, how = simulate(graph, schedule).peak_nbytes, "predicted"
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
            f"Use a budget of at least {peak} bytes ({format_nbytes(peak)}), or a smaller batch.",
            budget_nbytes=budget,
            min_peak_nbytes=peak,
        )


def _everything(graph: Graph) -> Schedule:
    return Schedule(frozenset(graph.residuals), ((),) * len(graph.stages))


def _text(compiled: jax.stages.Compiled) -> str:
    """The optimised, scheduled HLO."""
    return compiled.as_text() or ""
