"""Plan of nearly the same step -> a plan of this one, certified as any other, or None where planning afresh is better.

Nearly the same is a step with the same equations but for shapes: another batch size, another length of sequences, the
last batch of an epoch. Its plan says where stages begin, which values XLA writes to memory and which are worth saving,
so that neither the plain step nor candidates need to be compiled.

Invariant: at most one solve and two compilations; what is returned was compiled for this step and is within its budget,
and takes, by the model, at most `MORE` of the step longer than the neighbour's plan said of its own.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace

from .._model._graph import Graph
from .._model._schedule import Passing, check
from .._model._simulate import simulate
from .._model._variant import ATTENTION, COPIES, REVERSED, ROWS
from .._runtime._budgets import parse_margin
from .._runtime._errors import JaxrematWarning, SolverError
from .._runtime._progress import Stopwatch, timed
from .._solver import Solution
from ._baseline import EstimatedGraphs
from ._ledger import CompiledCandidate, Effort, Ledger
from ._plan import Plan
from ._planned import MOST_MISSING, Planned, compiled_facts, plan_of, planned
from ._problem import Problem
from ._request import Request
from ._step_compiler import StepCompiler

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
            f"`like`: the plan of `{request.like[0].step}` has other equations, or uses a form that these "
            "shapes or `allow` rule out. This step is planned without it.",
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
        self.problem, self.request, self.plan = problem, request, plan
        self.margin, self.room = margin, budget - margin
        bare = problem.bare(plan.form, pinned=True)
        # What is small follows the shapes: more of a smaller step is.
        small = max(bare.small_nbytes, plan.small_nbytes)
        base = problem.estimated.base_nbytes
        self.graph: Graph = replace(plan.layout(bare), base_nbytes=base, small_nbytes=small)
        self.compiler = StepCompiler(problem, stopwatch, to_run=problem.compiles_to_run)
        planning = request.planning
        effort = Effort(stopwatch, limited=False)
        self.ledger = Ledger(planning.solver, effort, planning.time_limit, self.compiler)

    def planned(self) -> Planned | None:
        """Return the cheaper of at most two compiled schedules that fit, None where none does."""
        plan, graph = self.plan, self.graph
        try:
            first = Solution(check(graph, plan.schedule(graph)), solver=plan.solver)
        except SolverError:  # pins are others
            return None
        predicted = simulate(graph, first.schedule).peak_nbytes
        # The model errs on this step as on its neighbour.
        error = plan.peak_nbytes / plan.predicted_peak_nbytes
        fits = error * predicted <= self.room
        solution = first if fits else self.ledger.tried(graph, int(self.room / error))
        compiled = self._compiled(solution, plan.detached if fits else ())
        if compiled is None:
            return None
        beyond = compiled.peak_nbytes - self.room
        if fits and self._is_worth_more(compiled, beyond):
            # A tenth more than is missing, or a tenth less than is left, so that this one does not miss.
            allowance = compiled.profile.peak_nbytes - int((1.1 if beyond > 0 else 0.9) * beyond)
            self._compiled(self.ledger.tried(graph, allowance))
        best = self.ledger.best(self.room)
        return None if best is None else self._as_planned(best)

    def _is_worth_more(self, compiled: CompiledCandidate, beyond: int) -> bool:
        """Return whether another schedule may fit where this one does not, or be faster where this one leaves room."""
        temporaries = compiled.compiled.memory.temporaries_nbytes
        if beyond > 0:
            return beyond <= MOST_MISSING * temporaries
        return compiled.profile.extra_seconds > 0 and -beyond > UNUSED * temporaries

    def _compiled(
        self, solution: Solution | None, detached: Sequence[Passing] = ()
    ) -> CompiledCandidate | None:
        """Return a solution compiled to run, where it is not too slow."""
        if solution is None:
            return None
        more = simulate(self.graph, solution.schedule).extra_seconds / (self.graph.step_seconds or 1.0)
        if more > max(self.plan.overhead, 0.0) + MORE:
            logger.info("the plan for other shapes would take %.2f %% longer", 100 * more)
            return None
        self.compiler.detached = detached
        return self.ledger.compile(self.graph, solution, self.plan.fence)

    def _as_planned(self, found: CompiledCandidate) -> Planned:
        problem = self.problem
        plan = plan_of(
            problem,
            problem.bare_plain(found.graph),
            found.graph,
            found.solution,
            self.room,
            self.ledger,
            problem.modelled_memory(
                "it was not compiled, because this plan was made from one for other shapes"
            ),
            margin_nbytes=self.margin,
            compile_count=problem.compilations.count,
        )
        plan = replace(plan, **compiled_facts(problem, found), like=self.plan.fingerprint)
        if problem.compiles_to_run:
            return Planned(plan, found.jitted, found.compiled)
        return planned(problem, plan, self.request.planning, found.jitted, found.compiled)
