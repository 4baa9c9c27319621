"""Plan of nearly the same step -> a plan of this one, certified as any other, or None where planning afresh is better.

Nearly the same is a step with the same equations but for shapes: another batch size, another length of sequences, the
last batch of an epoch. Its plan says where stages begin, which values XLA writes to memory and which are worth saving,
so that neither the plain step nor candidates need to be compiled.

Invariant: at most one solve and two compilations; what is returned was compiled for this step and is within its budget,
and takes, by the model, at most `MORE` of the step longer than the neighbour's plan said of its own.
"""

import logging
import warnings
from dataclasses import replace

from jax.extend.core import Var

from .._model._graph import Graph
from .._model._schedule import check
from .._model._simulate import simulate
from .._model._variant import ATTENTION, COPIES, REVERSED, ROWS
from .._report._planning_time import PlanningTime
from .._runtime._budgets import parse_margin
from .._runtime._bytes import format_nbytes
from .._runtime._errors import CompilationError, InstallError, JaxrematWarning, SolverError
from .._runtime._progress import Stopwatch, phase, timed
from .._solver import Solution
from ._baseline import EstimatedGraphs
from ._ledger import CompiledCandidate
from ._made_for import made_for
from ._plan import Plan
from ._planned import MOST_MISSING, Planned, compiled_facts, facts, planned
from ._problem import Problem
from ._request import Request
from ._step_compiler import OverwrittenReadError, compile_schedule

logger = logging.getLogger("jaxremat")

MORE = 0.02
"""What a plan made from a neighbour's may take longer than that one, as a share of the step's time: the model's seconds
of the two differ by about so much, and a search gains little more."""

FITS_ANYWAY = 0.5
"""Up to this share of the budget a step that rules say to need so much fits as it is written, which costs nothing."""

UNUSED = 0.1
"""A plan that recomputes and leaves this share of its temporaries' room unused is solved once more."""


def plan_nearby(problem: Problem, request: Request) -> Planned | None:
    """Return a plan made from the first of the request's neighbours that is near; None where it gives none within the
    budget, and where only a search can answer: the least memory, or a budget that the step fits as it is written.
    """
    budget = request.nbytes
    if budget is None or budget == "min" or len(problem.processes) > 1:
        return None
    if not (request.neighbours and request.planning.verify):
        return None
    near = [plan for plan in request.neighbours if _is_near(problem, plan)]
    if request.like and request.like[0] not in near:
        warnings.warn(
            f"`like`: the plan of `{request.like[0].step}` is of other equations, or in a form that "
            "these shapes or `allow` rule out. This step is planned without it.",
            JaxrematWarning,
            stacklevel=2,
        )
    margin = parse_margin(request.planning.workspace_margin, budget)
    if not near or problem.estimated_peak_nbytes <= FITS_ANYWAY * (budget - margin):
        return None
    with timed() as stopwatch:
        return _Neighbour(problem, request, near[0], budget, margin, stopwatch).planned()


def _is_near(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan is of a step with the same equations, done in the same form."""
    simple = plan.stages and not (plan.offloaded or plan.on_host) and plan.devices == problem.division.devices
    if not simple or plan.respect_checkpoint != problem.respect_checkpoint:
        return False
    if problem.structure != plan.structure:
        return False
    # The number of parts depends on shapes, what `allow` allows on the user, and attention's kernels on the device.
    if not any(plan.form.settings(rule) for rule in (ROWS, COPIES, ATTENTION, REVERSED)):
        return True
    variants = EstimatedGraphs(problem).variants
    return plan.form in (*variants.exact(), *variants.inexact())


class _Neighbour:
    """The plan of a neighbour, laid out on this step."""

    def __init__(
        self, problem: Problem, request: Request, plan: Plan, budget: int, margin: int, stopwatch: Stopwatch
    ) -> None:
        self.problem, self.request, self.plan, self.stopwatch = problem, request, plan, stopwatch
        self.budget, self.margin, self.room = budget, margin, budget - margin
        self.plain = problem.estimated
        bare = problem.bare(plan.form, pinned=True)
        graph = plan.layout(bare)
        # What is small follows the shapes: more of a smaller step is.
        small = max(bare.small_nbytes, plan.small_nbytes)
        self.graph: Graph = replace(graph, base_nbytes=self.plain.base_nbytes, small_nbytes=small)
        self.solves = 0
        self.made: list[CompiledCandidate] = []
        self.first: Solution | None = None  # the neighbour's own schedule
        self.arrays: set[Var] = set()  # as of `compile_schedule`

    def planned(self) -> Planned | None:
        """Return the cheaper of at most two compiled schedules that fit, None where none does."""
        plan, graph = self.plan, self.graph
        try:
            self.first = first = Solution(check(graph, plan.schedule(graph)), solver=plan.solver)
        except SolverError:  # pins are others
            return None
        predicted = simulate(graph, first.schedule).peak_nbytes
        # The model errs on this step as on its neighbour.
        error = plan.peak_nbytes / plan.predicted_peak_nbytes
        solution: Solution | None = first
        if error * predicted > self.room:
            solution = self._solved(int(self.room / error))
        compiled = self._compiled(solution)
        if compiled is None:
            return None
        beyond = compiled.peak_nbytes - self.room
        if solution is first and self._is_worth_more(compiled, beyond):
            # A tenth more than is missing, or a tenth less than is left, so that this one does not miss.
            allowance = compiled.profile.peak_nbytes - int((1.1 if beyond > 0 else 0.9) * beyond)
            self._compiled(self._solved(allowance))
        fitting = [each for each in self.made if each.peak_nbytes <= self.room]
        best = min(fitting, key=lambda each: each.profile.extra_seconds, default=None)
        return None if best is None else self._as_planned(best)

    def _is_worth_more(self, compiled: CompiledCandidate, beyond: int) -> bool:
        """Return whether another schedule may fit where this one does not, or be faster where this one leaves room."""
        temporaries = compiled.compiled.memory.temporaries_nbytes
        if beyond > 0:
            return beyond <= MOST_MISSING * temporaries
        return compiled.profile.extra_seconds > 0 and -beyond > UNUSED * temporaries

    def _solved(self, allowance: int) -> Solution | None:
        planning = self.request.planning
        self.solves += 1
        try:
            with phase(f"solving within {format_nbytes(allowance)}", kind="solve"):
                found = planning.solver.solve(self.graph, allowance, time_limit=planning.time_limit)
            check(self.graph, found.schedule)
        except (SolverError, InstallError):  # planning afresh says what is wrong
            return None
        return found if simulate(self.graph, found.schedule).peak_nbytes <= allowance else None

    def _compiled(self, solution: Solution | None) -> CompiledCandidate | None:
        """Return a solution compiled to run, where it is not too slow."""
        if solution is None:
            return None
        problem, graph, schedule = self.problem, self.graph, solution.schedule
        profile = simulate(graph, schedule)
        overhead = profile.extra_seconds / (graph.step_seconds or 1.0)
        if overhead > max(self.plan.overhead, 0.0) + MORE:
            logger.info("a neighbour's plan would take %.2f %% longer", 100 * overhead)
            return None
        try:
            with phase("compiling a neighbour's plan", kind="compile"):
                made = compile_schedule(
                    problem,
                    graph,
                    schedule,
                    self.plan.fence,
                    self.plan.detached if solution is self.first else (),
                    arrays=self.arrays,
                    to_run=problem.compiles_to_run,
                )
        except (CompilationError, OverwrittenReadError):
            return None
        peak = made.compiled.peak_nbytes
        logger.info("from a neighbour's plan: predicted %s, compiled %s, overhead %.2f %%",
                    format_nbytes(profile.peak_nbytes), format_nbytes(peak), 100 * overhead)  # fmt: skip
        self.made.append(
            CompiledCandidate(
                graph, solution, self.plan.fence, profile, made.jitted, made.compiled, peak, 0.0, 0.0, made.detached,
                ended_seconds=self.stopwatch.seconds,
            )
        )  # fmt: skip
        return self.made[-1]

    def _as_planned(self, found: CompiledCandidate) -> Planned:
        problem, graph = self.problem, found.graph
        plain = replace(problem.bare(problem.traced.form), base_nbytes=graph.base_nbytes)
        told = facts(problem, plain, graph, found.solution) | compiled_facts(problem, found)
        plan = replace(
            self.plan,
            **told
            | {"compiled_overhead": None},  # a roofline of a compiled step and a model's time are no ratio
            like=self.plan.fingerprint,
            fingerprint=problem.fingerprint,
            made_for=made_for(problem.program, problem.args, problem.kwargs),
            step=getattr(problem.program.fn, "__name__", "step"),
            budget_nbytes=self.budget,
            margin_nbytes=self.margin,
            baseline_peak_nbytes=problem.estimated_peak_nbytes,
            baseline_modelled="this plan was made from that of another step",
            small_nbytes=graph.small_nbytes,
            rounds=tuple(each.round for each in self.made),
            solve_seconds=self.stopwatch.spent.get("solve", 0.0),
            compile_count=problem.compilations.count,
            collectives=(),
            warnings=(),
            planning=PlanningTime.of(self.stopwatch, found.ended_seconds, len(self.made), self.solves),
        )
        if problem.compiles_to_run:
            return Planned(plan, found.jitted, found.compiled)
        return planned(problem, plan, self.request.planning, found.jitted, found.compiled)
