"""Plan, what the compiler of the device needs for it -> the plan that saves less and fits there, or a refusal.

A plan that was made without the device, elsewhere, or of drafts, may need more where it runs: the compiler there lays
out, fuses and copies otherwise. What it missed by is what the next schedule of the same form and stages has to spare.

Invariant: what is returned was compiled by the compiler that says so, and is within the plan's budget.
"""

import logging
import warnings
from dataclasses import replace

from .._compiler._compiled_step import CompiledStep
from .._lower._lower import as_stacked
from .._model._graph import Graph
from .._model._simulate import Profile, simulate
from .._report._account import account
from .._report._actions import actions, decided
from .._report._outcome import Round
from .._runtime._bytes import format_nbytes
from .._runtime._errors import InfeasibleBudgetError, InstallError, JaxrematWarning, SolverError
from .._solver import Solution
from ._compiled_schedule import CompiledSchedule, OverwrittenReadError, compile_schedule
from ._plan import Plan
from ._problem import Problem
from ._request import Options

logger = logging.getLogger("jaxremat")

ROUNDS = 2
"""So many further schedules are compiled."""

MOST = 0.25
"""What misses the budget by more than this share of the temporaries is another device's plan, or was given another
budget: it is refused."""


def corrected(
    problem: Problem, plan: Plan, options: Options, compiled: CompiledStep, refusal: InfeasibleBudgetError
) -> tuple[Plan, CompiledSchedule]:
    """Return a plan that fits where this one does not, and its step, compiled to run where that may be.

    **Arguments:** `compiled` the plan's step as the compiler made it; `refusal` is raised where no schedule fits.
    """
    room = plan.budget_nbytes - plan.margin_nbytes
    missing = compiled.peak_nbytes - room
    far = missing > MOST * compiled.memory.temporaries_nbytes
    if far or len(problem.processes) > 1 or not plan.stages:
        raise refusal
    graph = plan.layout(problem.bare(plan.form, pinned=True))
    graph = replace(graph, base_nbytes=plan.account.base_nbytes)
    predicted = simulate(graph, plan.schedule(graph)).peak_nbytes
    for i in range(ROUNDS):
        allowance = predicted - int(1.1 * 2**i * missing)
        try:
            solution = options.solver.solve(graph, allowance, time_limit=options.time_limit)
        except (SolverError, InstallError):  # a plan that is given needs no solver
            raise refusal from None
        profile = simulate(graph, solution.schedule)
        if profile.peak_nbytes > allowance:
            break
        try:
            made = compile_schedule(
                problem, graph, solution.schedule, plan.fence, to_run=problem.compiles_to_run
            )
        except OverwrittenReadError:
            break
        peak = made.compiled.peak_nbytes
        logger.info("corrected from %s to %s", format_nbytes(room + missing), format_nbytes(peak))
        if peak <= room:
            warnings.warn(
                f"`{plan.step}` needs {format_nbytes(compiled.peak_nbytes)} here with a plan for {format_nbytes(room)} "
                f"that was made otherwise. The plan was corrected: it needs {format_nbytes(peak)}, and takes "
                f"{profile.extra_seconds / (graph.step_seconds or 1.0):.1%} longer than the plain step by the model.",
                JaxrematWarning,
                stacklevel=2,
            )
            return _replaced(problem, plan, graph, solution, profile, compiled, made), made
        predicted, missing = profile.peak_nbytes, peak - room
    raise refusal


def _replaced(
    problem: Problem,
    plan: Plan,
    graph: Graph,
    solution: Solution,
    profile: Profile,
    before: CompiledStep,
    made: CompiledSchedule,
) -> Plan:
    """Return the plan of another schedule of the same graph."""
    schedule, compiled = solution.schedule, made.compiled
    overhead = profile.extra_seconds / (graph.step_seconds or 1.0)
    by_roofline = plan.compiled_overhead
    if by_roofline is not None and before.seconds:
        by_roofline = (1 + by_roofline) * compiled.seconds / before.seconds - 1
    gap = max(overhead - solution.lower_bound, 0.0)
    done = Round(
        predicted_peak_nbytes=profile.peak_nbytes,
        compiled_peak_nbytes=compiled.peak_nbytes,
        overhead=overhead,
        compiled_overhead=by_roofline or 0.0,
        gap=gap,
        solver=solution.solver,
        stages=len(graph.stages),
        form=graph.form,
        fence=plan.fence,
        solve_seconds=0.0,
        compile_seconds=0.0,
    )
    plain = replace(problem.bare(problem.traced.form), base_nbytes=graph.base_nbytes)
    return replace(
        plan,
        predicted_peak_nbytes=profile.peak_nbytes,
        compiled_peak_nbytes=compiled.peak_nbytes,
        memory=compiled.memory,
        compiler=problem.compiler,
        alive=compiled.alive,
        overhead=overhead,
        compiled_overhead=by_roofline,
        lower_bound=solution.lower_bound,
        gap=gap,
        rounds=(*plan.rounds, done),
        actions=actions(graph, schedule),
        decided=decided(graph, schedule),
        account=account(as_stacked(plain), graph, schedule),
        saved=tuple(sorted(schedule.saved)),
        kept=tuple(sorted(schedule.kept)),
        offloaded=tuple(sorted(schedule.offloaded)),
        detached=made.detached,
        unproved=problem.unproved(made.jitted),
    )
