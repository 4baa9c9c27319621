"""Plan made before, step -> the step that follows it, compiled where that is asked for; needs no solver.

Law: what the compiler needs for it is within the plan's budget on this machine too, or an error says so.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .._compiler._collectives import KINDS
from .._compiler._compiled_step import CompiledStep
from .._compiler._memory_stats import MemoryStats
from .._compiler._program import Compiled
from .._compiler._target import in_words
from .._model._graph import Graph
from .._model._schedule import Schedule, check
from .._report._actions import actions
from .._report._outcome import Collectives
from .._runtime._bytes import format_nbytes
from .._runtime._errors import InfeasibleBudgetError, JaxrematWarning, PlanMismatchError
from .._runtime._progress import phase
from ._baseline import Baseline
from ._compiled_schedule import CompiledSchedule, OverwrittenReadError, compile_schedule
from ._correction import corrected
from ._made_for_call import made_for
from ._plan import Plan
from ._problem import Problem
from ._request import Options


@dataclass
class Planned:
    """A plan, the jitted step that follows it, and that step compiled (None where nothing was compiled), perhaps only
    to be read; then `finish` compiles it to be run, and `correct` makes a plan that fits of one that does not then,
    which `keep` puts where this one is kept.
    """

    plan: Plan
    jitted: Any
    compiled: CompiledStep | None
    finish: Callable[[], CompiledStep] | None = None
    correct: Callable[[CompiledStep, InfeasibleBudgetError], tuple[Plan, CompiledSchedule]] | None = None
    keep: Callable[[Plan], None] = lambda plan: None

    def executable(self) -> Compiled | None:
        """The compiled step, to be run. **Raises:** `InfeasibleBudgetError` where that needs more than the budget, and
        no other schedule does not.
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


def apply_plan(problem: Problem, plan: Plan, options: Options, *, to_run: bool = False) -> Planned:
    """The step that follows a plan made before; needs no solver, and compiles at most once: what will run, of which the
    peak is read too. For a target nothing runs here, and several processes compile what runs together: then it is
    compiled to be read.

    **Arguments:** `options` say whether it is compiled, and its peak read, and who corrects it; `to_run` whether it is
    compiled in any case.

    **Raises:** `PlanMismatchError` where the plan is of another program; `InfeasibleBudgetError` where this machine's
    compiler needs more than the plan's budget for it, and for what corrects it.
    """
    verify = options.verify
    found = problem.fingerprint
    if found != plan.fingerprint:
        problem = problem.ordered_before
    if problem.fingerprint != plan.fingerprint:
        afresh = "Plan this step afresh, with `optimize(budget)`."
        if plan.devices != (here := problem.division.devices):
            raise PlanMismatchError(
                f"The plan is for a mesh of {in_words(plan.devices)}, this step is on {in_words(here)}. {afresh}"
            )
        raise PlanMismatchError(
            f"The plan was made for the program {plan.fingerprint[:12]}, this step is {found[:12]}: "
            f"{_how_they_differ(plan, problem)}. {afresh}"
        )
    if plan.offloaded and problem.device.platform == "cpu":
        raise PlanMismatchError(
            f"The plan keeps {len(plan.offloaded)} values in host memory meanwhile, and a CPU has no memory "
            "besides that. Plan for this device without `offload=True`."
        )
    compiled, to_run = None, to_run or (verify and problem.compiles_to_run)
    warn_of(plan)
    if not plan.stages:
        jitted = problem.program.plain
    else:
        graph = plan.layout(problem.bare(plan.form))
        schedule = check(graph, plan.schedule(graph))
        plan = replace(plan, actions=actions(graph, schedule))  # with lines of the code as it is today
        if verify or to_run:
            made = _compiled(problem, plan, graph, schedule, to_run=to_run)
            jitted, compiled, plan = made.jitted, made.compiled, replace(plan, detached=made.detached)
        else:
            jitted = problem.jitted(graph, schedule, plan.fence, plan.detached)
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
        plan, made = corrected(problem, plan, options, compiled, refusal)
        return Planned(plan, made.jitted, made.compiled)
    plan = confirmed(plan, compiled, problem.compiler)
    return Planned(plan, jitted, compiled) if to_run else planned(problem, plan, options, jitted, compiled)


def _compiled(
    problem: Problem, plan: Plan, graph: Graph, schedule: Schedule, *, to_run: bool
) -> CompiledSchedule:
    """Compile a plan's step. **Raises:** `PlanMismatchError` where this compiler would overwrite what it reads."""
    try:
        with phase("compiling the plan", kind="compile"):
            return compile_schedule(problem, graph, schedule, plan.fence, plan.detached, to_run=to_run)
    except OverwrittenReadError as error:
        raise PlanMismatchError(
            f"The plan gives wrong results with this compiler: {error}. Plan this step afresh, with `optimize(budget)`."
        ) from error


def _how_they_differ(plan: Plan, problem: Problem) -> str:
    """What a plan was made for and the step is not, in words."""
    if plan.made_for is None:
        return (
            "its code, the shapes, types or shardings of its arguments, its static arguments, its donated arguments "
            "or the version of jax differ"
        )
    now = made_for(problem.program, problem.args, problem.kwargs)
    same = "its code differs, for its arguments, the donated and the static ones, the mesh and jax's version are equal"
    return "; ".join(plan.made_for.differences(now)) or same


def warn_of(plan: Plan) -> None:
    """Give the warnings of a plan that is followed."""
    for said in plan.warnings:
        warnings.warn(said, JaxrematWarning, stacklevel=2)
    if plan.planning.cut_short and plan.stages:
        warnings.warn(
            f"A clock ended the search for the plan of `{plan.step}`, after {plan.planning.work}: another search may "
            "find a faster one. Leave `planning_seconds` out, or make it larger.",
            JaxrematWarning,
            stacklevel=2,
        )


def planned(problem: Problem, plan: Plan, options: Options, jitted: Any, compiled: CompiledStep) -> Planned:
    """The plan of a step that was compiled to be read."""
    if not problem.unfused_builds:
        return Planned(plan, jitted, compiled)
    finish = partial(problem.finished, jitted)
    return Planned(plan, jitted, compiled, finish, partial(corrected, problem, plan, options))


def sent(baseline: Baseline, compiled: CompiledStep) -> tuple[Collectives, ...]:
    """What devices send each other in the plain step and in a planned one; nothing on one device."""
    if baseline.problem.division.devices == 1:
        return ()
    plain, made = baseline.tagged.collectives, compiled.collectives
    return tuple(Collectives(kind, plain[kind], made[kind]) for kind in KINDS if plain[kind] or made[kind])


def confirmed(plan: Plan, compiled: CompiledStep, compiler: str) -> Plan:
    """Return the plan with what the compiler of that name says of its step."""
    return replace(
        plan,
        compiled_peak_nbytes=compiled.peak_nbytes,
        memory=compiled.memory,
        compiler=compiler,
        alive=compiled.alive,
    )


def confirm(plan: Plan, memory: MemoryStats) -> None:
    """Check what the compiled step of a plan that was made elsewhere needs.

    **Raises:** `InfeasibleBudgetError` where that is more than the plan's budget.
    """
    if memory.peak_nbytes > (room := plan.budget_nbytes - plan.margin_nbytes):
        raise InfeasibleBudgetError(
            f"The plan was made for {format_nbytes(room)}, but this machine's compiler needs "
            f"{format_nbytes(memory.peak_nbytes)} for it. Plan again on this machine, without `target`.",
            budget_nbytes=plan.budget_nbytes,
            min_peak_nbytes=memory.peak_nbytes,
        )
