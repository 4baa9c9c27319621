"""Existing plan, step -> the step that follows it, compiled on request; schedule -> the fields of a plan.

Invariant: the compiled plan is within its budget on this machine too, or an error says so. A plan from another machine,
without the device, or from drafts may need more on this one, because the compiler lays out, fuses and copies
differently. A correction solves the same variant and stages again, with the allowance lowered by the excess.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from .._compiler._compiled_step import KINDS, CompiledStep
from .._compiler._devices import host_memory
from .._compiler._memory_stats import MemoryStats
from .._compiler._program import Compiled
from .._compiler._target import in_words
from .._emit._detaching import Detached
from .._emit._emit import FINISHED
from .._lower._lower import as_stacked
from .._model._graph import Graph
from .._model._loop_levels import may_have
from .._model._schedule import Schedule, check
from .._model._simulate import simulate, waits
from .._model._variant import LOOP
from .._report._account import account
from .._report._actions import NONE_DECIDED, actions, decided
from .._report._loop_forms import Copied, loop_forms
from .._report._outcome import Collectives, PlanningTime
from .._rewrite._encodings import BY_CODE
from .._rewrite._fingerprint import Outline
from .._rewrite._trace import Traced
from .._runtime._bytes import format_nbytes
from .._runtime._errors import InfeasibleBudgetError, PlanMismatchError, warn
from .._runtime._progress import phase
from .._solver import Solution
from ._baseline import Baseline
from ._ledger import CompiledCandidate, Effort, Ledger
from ._made_for import made_for
from ._plan import Plan
from ._problem import Problem
from ._request import Planning
from ._step_compiler import CompiledSchedule, OverwrittenReadError, StepCompiler, compile_schedule

CORRECTIONS = 2
"""Most schedules compiled to correct a plan that does not fit: few, because the user is waiting to run a step."""

MOST_MISSING = 0.25
"""A plan that misses the budget by more than this share of the temporaries is refused: it must be for another device
or budget."""


@dataclass
class Planned:
    """A plan, the jitted step that follows it, and that step compiled, None if nothing was compiled.

    **Fields:** if `compiled` is only an unfused build, `finish` compiles the step to run; `correct` returns a plan that
    fits and its step if that build exceeds the budget, and `keep` stores the corrected plan in place of this one.
    """

    plan: Plan
    jitted: Any
    compiled: CompiledStep | None
    finish: Callable[[], CompiledStep] | None = None
    correct: Callable[[CompiledStep, InfeasibleBudgetError], tuple[Plan, CompiledCandidate]] | None = None
    keep: Callable[[Plan], None] = lambda plan: None

    def executable(self) -> Compiled | None:
        """Return the compiled step, ready to run. **Raises:** `InfeasibleBudgetError` if it exceeds the budget and no
        correction fits.
        """
        if self.finish is not None:
            compiled = self.finish()
            try:
                confirm(self.plan, compiled.memory)
            except InfeasibleBudgetError as refusal:
                if self.correct is None:
                    raise
                self.plan, made = self.correct(compiled, refusal)
                self.jitted, compiled = made.jitted, made.compiled
                self.keep(self.plan)
            self.compiled, self.finish = compiled, None
        return self.compiled and self.compiled.executable


def apply_plan(problem: Problem, plan: Plan, planning: Planning, *, to_run: bool = False) -> Planned:
    """Return the step that follows an existing plan. A plan that fits needs no solver and at most one compilation:
    the build that will run also gives the peak. A step for a target, or one that several processes compile together, is
    compiled only to read its peak.

    **Arguments:** `planning`: whether the plan is compiled and its peak checked, and the solver that corrects it;
    `to_run` compiles it in any case.

    **Raises:** `PlanMismatchError` if the plan is for another program; `InfeasibleBudgetError` if this machine's
    compiler needs more than the plan's budget for it and for its corrections.
    """
    verify = planning.verify
    found, alike = problem.fingerprint, False
    if found != plan.fingerprint:
        alike = problem.structure == plan.structure
        problem = problem.ordered_before
    if problem.fingerprint != plan.fingerprint:
        afresh = "Make a new plan for this step, with `optimize(budget)`."
        if alike:
            afresh = f"{afresh[:-1]}, or from this plan, with `optimize(budget, like=plan)`."
        if plan.devices != (here := problem.division.devices):
            raise PlanMismatchError(
                f"The plan is for a mesh of {in_words(plan.devices)}, but this step is on {in_words(here)}. {afresh}"
            )
        raise PlanMismatchError(
            f"The plan was made for the program {plan.fingerprint[:12]}, but this step is {found[:12]}: "
            f"{_how_they_differ(plan, problem)}. {afresh}"
        )
    lengths = problem.traced.sites.lengths
    if any(not may_have(lengths[pair], levels) for pair, levels in plan.form.settings(LOOP).items()):
        raise PlanMismatchError(
            "The plan splits a loop into separately planned parts, which this version cannot run. "
            "Make a new plan for this step, with `optimize(budget)`."
        )
    host = host_memory(problem.device, problem.here, None)
    if plan.offloaded and host is None:
        here = "a CPU" if problem.device.platform == "cpu" else str(problem.here)
        raise PlanMismatchError(
            f"The plan offloads {len(plan.offloaded)} values, but {here} has no memory besides the host's. "
            "Plan for this device without `offload=True`."
        )
    compiled, to_run = None, to_run or (verify and problem.compiles_to_run)
    warn_of(plan)
    if not plan.stages:
        jitted = problem.program.plain
    else:
        graph = plan.layout(problem.bare(plan.form))
        if plan.offloaded and graph.host is None:  # plans offload even without `offload=True`
            graph = replace(graph, host=host)
        schedule = check(graph, plan.schedule(graph))
        plan = replace(plan, actions=actions(graph, schedule))  # with the line numbers of today's code
        if verify or to_run:
            made = _compiled(problem, plan, graph, schedule, to_run=to_run)
            jitted, compiled, plan = made.jitted, made.compiled, replace(plan, detached=made.detached)
        else:
            jitted = problem.jitted(graph, schedule, plan.fence, Detached(plan.detached))
    if not verify and not to_run:
        return Planned(plan, jitted, None)
    if compiled is None:
        with phase("compiling the plan", kind="compile"):
            compiled = problem.finished(jitted) if to_run else problem.compile(jitted)
    if not verify:
        return Planned(plan, jitted, compiled)
    try:
        confirm(plan, compiled.memory)
    except InfeasibleBudgetError as refusal:
        plan, made = corrected(problem, plan, planning, compiled, refusal)
        return Planned(plan, made.jitted, made.compiled)
    plan = replace(plan, **confirmed(problem, compiled))
    return Planned(plan, jitted, compiled) if to_run else planned(problem, plan, planning, jitted, compiled)


def _compiled(
    problem: Problem, plan: Plan, graph: Graph, schedule: Schedule, *, to_run: bool
) -> CompiledSchedule:
    """Compile a plan's step. **Raises:** `PlanMismatchError` if this compiler overwrites values that are still read."""
    try:
        with phase("compiling the plan", kind="compile"):
            return compile_schedule(problem, graph, schedule, plan.fence, plan.detached, to_run=to_run)
    except OverwrittenReadError as error:
        raise PlanMismatchError(
            f"The plan gives wrong results with this compiler: {error}. Make a new plan, with `optimize(budget)`."
        ) from error


def _how_they_differ(plan: Plan, problem: Problem) -> str:
    """Return the differences between the program of a plan and the step, as text."""
    if plan.made_for is None:
        return (
            "its code, the shapes, types or shardings of its arguments, its static or donated arguments, or the "
            "version of jax differs"
        )
    now = made_for(problem.program, problem.args, problem.kwargs)
    same = "its code differs; the arguments, donated and static ones, the mesh and jax's version are equal"
    return "; ".join(plan.made_for.differences(now)) or same


def warn_of(plan: Plan) -> None:
    """Emit the warnings of a plan."""
    for said in plan.warnings:
        warn(said)
    if plan.planning.cut_short and plan.stages:
        warn(
            f"The search for the plan of `{plan.step}` was cut short after {plan.planning.work}. A longer search, with "
            "a larger `Planning.planning_seconds` or without Ctrl-C, may find a faster plan."
        )


def planned(
    problem: Problem, plan: Plan, planning: Planning, jitted: jax.stages.Wrapped, compiled: CompiledStep
) -> Planned:
    """Return a plan whose step was compiled to read its peak, and is compiled again to run if the builds differ."""
    if not problem.unfused_builds:
        return Planned(plan, jitted, compiled)
    finish = partial(problem.finished, jitted)
    return Planned(plan, jitted, compiled, finish, partial(corrected, problem, plan, planning))


def sent(baseline: Baseline, compiled: CompiledStep) -> tuple[Collectives, ...]:
    """Return the collectives of the plain step and of a planned one, by kind; none on one device."""
    if baseline.problem.division.devices == 1 or baseline.refused:
        return ()
    plain, made = baseline.tagged.collectives, compiled.collectives
    return tuple(Collectives(kind, plain[kind], made[kind]) for kind in KINDS if plain[kind] or made[kind])


def facts(problem: Problem, plain: Graph, graph: Graph, solution: Solution) -> dict[str, Any]:
    """Return the fields of a plan that follow from its schedule.

    **Arguments:** `plain` the graph of the plain step, `graph` that of the solution.
    """
    schedule = solution.schedule
    profile = simulate(graph, schedule)
    overhead = profile.extra_seconds / (graph.step_seconds or 1.0)
    return {
        "predicted_peak_nbytes": profile.peak_nbytes,
        "overhead": overhead,
        "lower_bound": solution.lower_bound,
        "gap": max(overhead - solution.lower_bound, 0.0),
        "solver": solution.solver,
        "actions": actions(graph, schedule),
        "decided": NONE_DECIDED if schedule.drops_nothing else decided(graph, schedule),
        "account": account(as_stacked(plain), graph, schedule),
        "saved": tuple(sorted(schedule.saved)),
        "kept": tuple(sorted(schedule.kept)),
        "offloaded": tuple(sorted(schedule.offloaded)),
        "copies": _copies(problem.form(graph.form), graph, schedule),
        "waiting": math.fsum(waits(graph, schedule)) / (graph.step_seconds or 1.0),
    }


def plan_of(
    problem: Problem,
    plain: Graph,
    graph: Graph,
    solution: Solution,
    budget_nbytes: int,
    ledger: Ledger,
    baseline: MemoryStats,
    *,
    margin_nbytes: int,
    compile_count: int,
) -> Plan:
    """Return the plan of a solution, without the fields that need a compilation.

    **Arguments:** `plain` as in `facts`; `budget_nbytes` the most that the compiled peak may be, and `margin_nbytes`
    the rest of the user's budget; the `ledger` of the search that found it; `baseline` the plain step's memory.
    """
    traced, form, effort = problem.traced, problem.form(graph.form), ledger.effort
    fitting = (each.ended_seconds for each in ledger.compiled if each.peak_nbytes <= budget_nbytes)
    told = facts(problem, plain, graph, solution)
    told["solver"] = solution.solver or type(ledger.solver).__name__
    return Plan(
        **told,
        step=problem.name,
        budget_nbytes=budget_nbytes + margin_nbytes,
        baseline_peak_nbytes=baseline.peak_nbytes,
        baseline_modelled=baseline.modelled,
        compiled_peak_nbytes=None,
        memory=None,
        compiler="",
        compiled_overhead=None,
        solve_seconds=ledger.seconds,
        compile_count=compile_count,
        rounds=tuple(each.round for each in ledger.compiled),
        alive=(),
        fingerprint=problem.fingerprint,
        structure=problem.structure,
        outline=str(Outline.of(form)),
        scratch=tuple(
            (n.id, n.workspace_nbytes / computed)
            for n in graph.nodes
            if n.workspace_nbytes > graph.small_nbytes and (computed := graph.computed_nbytes(n.id))
        ),
        made_for=made_for(problem.program, problem.args, problem.kwargs),
        stages=tuple((s.start, s.stop) for s in graph.stages),
        materialised=tuple(v.id for v in graph.values if v.materialised and v.producer >= 0),
        unrepeated=tuple(n.id for n in graph.nodes if not n.repeatable),
        small_nbytes=graph.small_nbytes,
        fence=FINISHED,
        form=graph.form,
        loops=loop_forms(
            traced.sites.lengths,
            graph.form,
            traced.sites.sources,
            traced.rows,
            form.rows_inside,
            form.inner,
            form.attention,
            form.chain,
            devices=1 if solution.schedule.drops_nothing else traced.source.devices,
        ),
        margin_nbytes=margin_nbytes,
        devices=problem.division.devices,
        respect_checkpoint=problem.respect_checkpoint,
        planning=PlanningTime.of(
            effort.stopwatch, min(fitting, default=0.0), effort.compilations, effort.solves
        ),
    )


def _copies(traced: Traced, graph: Graph, schedule: Schedule) -> tuple[Copied, ...]:
    """Return the values that are saved only as encoded copies, by kind. **Arguments:** `graph` of the variant."""
    both = zip(traced.jaxpr.jaxpr.eqns, graph.nodes, strict=True)
    value_of = {v: i for eqn, node in both for v, i in zip(eqn.outvars, node.outputs, strict=True)}
    found: dict[int, list[tuple[int, int]]] = {}
    for each in traced.program.encoded:
        parts = [value_of[v] for v in each.parts]
        if schedule.saved.issuperset(parts):
            whole = graph.values[value_of[each.whole]].saved_nbytes
            nbytes = sum(graph.values[v].saved_nbytes for v in parts)
            found.setdefault(each.encoding, []).append((whole, nbytes))
    return tuple(
        Copied(
            kind=BY_CODE[code].label,
            count=len(sizes),
            whole_nbytes=sum(whole for whole, _ in sizes),
            nbytes=sum(nbytes for _, nbytes in sizes),
            exact=BY_CODE[code].exact,
        )
        for code, sizes in sorted(found.items())
    )


def compiled_facts(problem: Problem, found: CompiledCandidate) -> dict[str, Any]:
    """Return the fields of a plan that follow from its compiled candidate."""
    return {
        **confirmed(problem, found.compiled),
        "compiled_overhead": found.compiled_overhead,
        "unproved": problem.unproved(found.jitted),
        "fence": found.fence,
        "detached": found.detached,
    }


def confirmed(problem: Problem, compiled: CompiledStep) -> dict[str, Any]:
    """Return the fields of a plan that follow from its compiled step."""
    return {
        "compiled_peak_nbytes": compiled.peak_nbytes,
        "memory": compiled.memory,
        "compiler": problem.compiler,
        "alive": compiled.alive,
    }


def confirm(plan: Plan, memory: MemoryStats) -> None:
    """Check the compiled peak of a plan that was made elsewhere.

    **Raises:** `InfeasibleBudgetError` if it exceeds the plan's budget.
    """
    if memory.peak_nbytes > (room := plan.budget_nbytes - plan.margin_nbytes):
        raise InfeasibleBudgetError(
            f"The plan was made for {format_nbytes(room)}, but this machine's compiler needs "
            f"{format_nbytes(memory.peak_nbytes)} for it. Plan again on this machine, without `target`.",
            budget_nbytes=plan.budget_nbytes,
            min_peak_nbytes=memory.peak_nbytes,
        )


def corrected(
    problem: Problem, plan: Plan, planning: Planning, compiled: CompiledStep, refusal: InfeasibleBudgetError
) -> tuple[Plan, CompiledCandidate]:
    """Return a corrected plan that fits, and its step, compiled to run if possible.

    **Arguments:** `compiled` step of the plan, which exceeds the budget; `refusal` to raise if no schedule fits.
    """
    room = plan.budget_nbytes - plan.margin_nbytes
    missing = compiled.peak_nbytes - room
    far = missing > MOST_MISSING * compiled.memory.temporaries_nbytes
    if far or len(problem.processes) > 1 or not plan.stages:
        raise refusal
    graph = plan.layout(problem.bare(plan.form, pinned=True))
    graph = replace(graph, base_nbytes=plan.account.base_nbytes)
    predicted = simulate(graph, plan.schedule(graph)).peak_nbytes
    more = plan.compiled_overhead
    plain_seconds = None if more is None or not compiled.seconds else compiled.seconds / (1 + more)
    effort = Effort(limited=False)
    compiler = StepCompiler(problem, effort.stopwatch, lambda: plain_seconds, to_run=problem.compiles_to_run)
    ledger = Ledger(planning.solver, effort, planning.time_limit, compiler)
    # A tenth more than is missing, twice as much the second time: the compiled peak may fall less than the predicted.
    for i in range(CORRECTIONS):
        solution = ledger.tried(graph, predicted - int(1.1 * 2**i * missing))
        found = solution and ledger.compile(graph, solution, plan.fence)
        if not solution or not found:
            break
        if found.peak_nbytes <= room:
            warn(
                f"The plan of `{plan.step}` for {format_nbytes(room)} was made elsewhere, and needs "
                f"{format_nbytes(compiled.peak_nbytes)} here. It was corrected: it now needs "
                f"{format_nbytes(found.peak_nbytes)}, and takes {found.round.overhead:.1%} longer than the "
                "plain step by the model."
            )
            told = facts(problem, problem.bare_plain(graph), graph, solution) | compiled_facts(problem, found)
            del told["solver"]  # keep that of the original plan
            return replace(plan, **told, rounds=(*plan.rounds, found.round)), found
        predicted, missing = found.profile.peak_nbytes, found.peak_nbytes - room
    raise refusal
