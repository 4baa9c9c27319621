"""Plan of a neighbour (nearly the same step) -> a plan of this step, or None if a new search is better.

Invariant: at most one solve and two compilations; a returned plan was compiled for this step and is within its budget.
If its schedule takes longer than the neighbour's by the model, no other form promises to take much less.

A neighbour's equations differ only in shapes: another batch size or sequence length, the last batch of an epoch. Its
plan gives the form of the step, the stages, the values that XLA writes to memory and those worth saving, so neither the
plain step nor candidates need to be compiled. Shapes may change the equations: chunks that do not divide the rows add
some, and the order of equations depends on sizes. So equations of the two steps are matched by content (`Outline`).
"""

import logging
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf, log
from typing import NamedTuple

from .._model._graph import Graph
from .._model._loop_levels import Loops, nested
from .._model._schedule import check
from .._model._simulate import extra_seconds, simulate
from .._model._stages import uncut
from .._model._variant import INSIDE, LOOP, PLAIN, ROWS, Choice, Variant
from .._rewrite._fingerprint import Outline, region_names
from .._runtime._budgets import parse_margin
from .._runtime._errors import HintError, JaxrematWarning, SolverError
from .._runtime._progress import Stopwatch, timed
from .._solver import MinCut, Solution
from .._solver._mincut import saving_less
from ._baseline import EstimatedGraphs
from ._ledger import CompiledCandidate, Effort, Ledger
from ._plan import Plan
from ._planned import MOST_MISSING, Planned, compiled_facts, plan_of, planned
from ._problem import Problem
from ._request import Request
from ._step_compiler import StepCompiler

logger = logging.getLogger("jaxremat")

MORE = 0.02
"""A schedule may take this share of the step's time longer than the neighbour's before other forms are tried: a search
gains little more."""

FITS_ANYWAY = 0.5
"""A step whose estimated peak is at most this share of the budget is taken to fit as written, at no extra time."""

UNUSED = 0.1
"""If the neighbour's schedule recomputes and leaves this share of the room for temporaries unused, a new one is
solved."""

SAFETY = 0.01
"""Share of the room for temporaries that a solve leaves free, to save a second compilation: twice the model's usual
error between two batch sizes."""

PROMISED = 0.5
"""Another form is better if it promises to cost less than this share: a minimum cut of a sketch errs by as much."""

MORE_CHUNKS = 2
"""Larger numbers of chunks that are tried if the neighbour's does not fit: each needs a graph."""

UNSURE = 0.05
"""If all else fails, a neighbour's schedule that misses by at most this share of the room is compiled too."""

COMPILATIONS = 2

MATCHED = 0.9
"""Share of a form's equations that must match the neighbour's for its plan to apply."""


def plan_nearby(problem: Problem, request: Request) -> Planned | None:
    """Return a plan adapted from the first of the request's neighbours that applies. None if it gives no plan within
    the budget, or if only a search can answer: for the least memory, or a budget that the plain step fits.
    """
    budget = request.nbytes
    if budget is None or budget == "min" or len(problem.processes) > 1:
        return None
    if not (request.neighbours and request.planning.verify):
        return None
    margin = parse_margin(request.planning.workspace_margin, budget)
    if problem.estimated_peak_nbytes <= FITS_ANYWAY * (budget - margin):
        return None
    graphs = EstimatedGraphs(problem)
    for plan in request.neighbours:
        if (form := _form(graphs, plan)) is not None:
            with timed() as stopwatch:
                return _Neighbour(graphs, request, plan, budget, margin, stopwatch).planned(form)
        if plan in (request.like or ()):
            warnings.warn(
                f"`like`: the plan of `{plan.step}` has other equations, was made by an earlier version, or uses "
                "a form that these shapes or `allow` rule out. This step is planned without it.",
                JaxrematWarning,
                stacklevel=2,
            )
    return None


def _form(graphs: EstimatedGraphs, plan: Plan) -> Variant | None:
    """Return the form of a neighbour's plan for these shapes. None if the plan is for another step, or if these shapes,
    `allow` or the device rule its form out.

    Numbers of parts depend on shapes: rows get the nearest number of chunks, loops the same number of levels.
    """
    problem = graphs.problem
    simple = plan.stages and plan.outline and not (plan.offloaded or plan.on_host)
    if not simple or plan.devices != problem.division.devices:
        return None
    if plan.respect_checkpoint != problem.respect_checkpoint or plan.structure != problem.structure:
        return None
    before = Outline.parse(plan.outline)
    names = region_names(problem.traced) if plan.form.settings(ROWS) else []
    found = [_choice(graphs, choice, before, names) for choice in plan.form.choices]
    return None if None in found else Variant.of(*filter(None, found))


def _choice(graphs: EstimatedGraphs, choice: Choice, before: Outline, names: Sequence[str]) -> Choice | None:
    """Return this step's nearest choice to one of the neighbour, None if there is none.

    **Arguments:** `names` of this step's regions of rows.
    """
    rule, site, setting = choice
    if rule == LOOP:
        return _looped(graphs.variants.loops, choice)
    if rule == INSIDE:  # estimates of these exist only once the chunks are built
        return choice
    able = next((each.estimates for each in graphs.variants.others if each.rule == rule), {})
    if rule != ROWS:
        return choice if (site, setting) in able else None
    name, (chunks,) = dict(before.rows)[site], setting
    here = names.index(name) if name in names else -1
    near = [own for number, own in able if number == here]
    nearest = min(near, key=lambda own: abs(log(own[0] / chunks)), default=None)
    return None if nearest is None else Choice(rule, here, nearest)


def _looped(loops: Loops, choice: Choice) -> Choice | None:
    """Return the choice with as many levels as the pair of loops has in the neighbour."""
    rule, pair, setting = choice
    if not nested(setting):
        return Choice(rule, pair, (loops.lengths[pair],))
    deep = (own for own in loops.choices[pair] if len(own) == len(setting))
    return next((Choice(rule, pair, own) for own in deep), None)


class _Layout(NamedTuple):
    """The plan of a neighbour, applied to this step in some form.

    **Fields:** the `plan` in the numbers of the `graph`, which has its stages; `own` is the plan's schedule.
    """

    plan: Plan
    graph: Graph
    own: Solution

    def temporaries_nbytes(self, solution: Solution) -> int:
        """Return the predicted peak of a schedule without arguments and outputs."""
        return simulate(self.graph, solution.schedule).peak_nbytes - self.graph.base_nbytes


class _Neighbour:
    """The adaptation of a neighbour's plan to this step, within one solve and two compilations."""

    def __init__(
        self,
        graphs: EstimatedGraphs,
        request: Request,
        like: Plan,
        budget: int,
        margin: int,
        stopwatch: Stopwatch,
    ) -> None:
        self.graphs, self.request, self.like = graphs, request, like
        self.problem = problem = graphs.problem
        self.margin, self.room = margin, budget - margin
        self.base_nbytes = problem.estimated.base_nbytes
        self.compiler = StepCompiler(problem, stopwatch, to_run=problem.compiles_to_run)
        planning = request.planning
        effort = Effort(stopwatch, limited=False)
        self.ledger = Ledger(planning.solver, effort, planning.time_limit, self.compiler)
        # The model errs on this step as on its neighbour.
        base = like.memory.base_nbytes if like.memory is not None else 0
        error = (like.peak_nbytes - base) / max(like.predicted_peak_nbytes - base, 1)
        self.temporaries_nbytes = int((self.room - self.base_nbytes) / error)
        """The temporaries that schedules may use, by the model."""
        self.layouts: dict[Variant, _Layout | None] = {}
        self.solved: tuple[_Layout, Solution] | None = None

    def planned(self, form: Variant) -> Planned | None:
        """Return the first of at most two compiled schedules that fits, None if neither does.

        The peak of the first gives the model's error on this step. The second may be another schedule or form.
        """
        for _ in range(COMPILATIONS):
            if (layout := self._cheapest(form)) is None or (solution := self._chosen(layout)) is None:
                return None
            self.compiler.detached = layout.plan.detached if solution is layout.own else ()
            found = self.ledger.compile(layout.graph, solution, layout.plan.fence)
            if found is None:
                return None
            beyond = found.peak_nbytes - self.room
            if beyond <= 0:
                return self._as_planned(found)
            if beyond > MOST_MISSING * found.compiled.memory.temporaries_nbytes:
                return None
            # A tenth more than is missing, so that the next one does not miss.
            self.temporaries_nbytes = layout.temporaries_nbytes(solution) - int(1.1 * beyond)
        return None

    def _chosen(self, layout: _Layout) -> Solution | None:
        """Return the schedule to compile next, from the first of these attempts that succeeds: the neighbour's, if it
        fits and uses the room; the solved one with fewer saved values; a newly solved one; the neighbour's, if it
        nearly fits. None if all fail.
        """
        most, graph, own = self.temporaries_nbytes, layout.graph, layout.own
        new = all(each.solution is not own for each in self.ledger.compiled)
        left = most - layout.temporaries_nbytes(own)
        repeats = extra_seconds(graph, own.schedule) > graph.extra_seconds
        is_best = self.ledger.solved or not repeats or left <= UNUSED * most
        attempts: list[tuple[bool, Callable[[], Solution | None]]] = [
            (new and left >= 0 and bool(is_best), lambda: own),
            (self.solved is not None, partial(self._saving_less, layout)),
            (not self.ledger.solved, partial(self._solved_for, layout)),
            (new and left >= -UNSURE * most and self.solved is None, lambda: own),
        ]
        found = (attempt() for able, attempt in attempts if able)
        return next((solution for solution in found if solution is not None), None)

    def _solved_for(self, layout: _Layout) -> Solution | None:
        """Return the solver's schedule of a layout; None if it is too slow."""
        graph = layout.graph
        found = self.ledger.tried(graph, graph.base_nbytes + int((1 - SAFETY) * self.temporaries_nbytes))
        if found is None or not self._is_worth(layout, found):
            return None
        self.solved = layout, found
        return found

    def _saving_less(self, layout: _Layout) -> Solution | None:
        """Return the solved schedule without some of its saved values, to make it fit. None if that is too slow, or if
        the solution is of another layout.
        """
        if self.solved is None or self.solved[0] is not layout:
            return None
        graph, most, solution = layout.graph, self.temporaries_nbytes, self.solved[1]
        less = (replace(solution, schedule=each) for each in saving_less(graph, solution.schedule))
        able = (each for each in less if layout.temporaries_nbytes(each) <= most)
        found = min(able, key=lambda each: extra_seconds(graph, each.schedule), default=None)
        return found if found is not None and self._is_worth(layout, found) else None

    def _cheapest(self, form: Variant) -> _Layout | None:
        """Return the layout of a form; if its schedule does not fit, the most promising one of those with rows in more
        chunks too. None if the plan is for another program.
        """
        first = self._laid_out(form)
        if first is None or first.temporaries_nbytes(first.own) <= self.temporaries_nbytes:
            return first
        layouts = [first, *filter(None, map(self._laid_out, self._deeper(form)))]
        return min(layouts, key=self._promise)

    def _laid_out(self, form: Variant) -> _Layout | None:
        """Return the neighbour's plan applied to a form; None if that has other equations or cannot be built."""
        if form not in self.layouts:
            self.layouts[form] = None
            make = partial(self._layout, form)
            # A pattern may match nothing in this form, or pins may differ from the neighbour's.
            with suppress(HintError, SolverError):
                self.layouts[form] = self.problem.defects.attempted("rewriting", make, form)
        return self.layouts[form]

    def _layout(self, form: Variant) -> _Layout | None:
        problem, like = self.problem, self.like
        bare = problem.bare(form, pinned=True)
        before, now = Outline.parse(like.outline), Outline.of(problem.form(form))
        if len(before.matches(now)) < MATCHED * len(now.words):
            return None
        plan = like if before.numbers == now.numbers else _renumbered(like, before, now, bare)
        graph = replace(
            plan.with_scratch(plan.layout(bare)),
            base_nbytes=self.base_nbytes,
            step_seconds=problem.estimated.step_seconds,
            extra_seconds=self.graphs.variants.estimate(form).more_seconds if form else 0.0,
            # The threshold for small values follows the shapes, so more values of a smaller step are small.
            small_nbytes=max(bare.small_nbytes, like.small_nbytes),
        )
        return _Layout(plan, graph, Solution(check(graph, plan.schedule(graph)), solver=plan.solver))

    def _deeper(self, form: Variant) -> list[Variant]:
        """Return forms with the rows of one region in more chunks, for each region."""
        sites = {each.rule: each for each in self.graphs.variants.others}
        found = []
        for choice in form.choices:
            if choice.rule == ROWS:
                able = sorted(own for site, own in sites[ROWS].estimates if site == choice.site)
                more = [own for own in able if own > choice.setting][:MORE_CHUNKS]
                found += [form.also(choice._replace(setting=own)) for own in more]
        return found

    def _promise(self, layout: _Layout) -> float:
        """Return the extra seconds of a schedule that fits in this layout: the neighbour's, else a minimum cut's."""
        graph, own, most = layout.graph, layout.own, self.temporaries_nbytes
        if layout.temporaries_nbytes(own) > most:
            own = MinCut().solve(graph, graph.base_nbytes + most, time_limit=self.ledger.time_limit)
            if layout.temporaries_nbytes(own) > most:
                return inf
        return extra_seconds(graph, own.schedule)

    def _is_worth(self, layout: _Layout, solution: Solution) -> bool:
        """Return whether a schedule is about as fast as the neighbour's, or no form promises to be much faster."""
        graph = layout.graph
        step = graph.step_seconds or 1.0
        before, more = (extra_seconds(graph, each.schedule) / step for each in (layout.own, solution))
        if more <= max(before, self.like.overhead, 0.0) + MORE:
            return True
        if (better := self._promised(layout, PROMISED * more * step)) is not None:
            logger.info("the plan for other shapes would take %.2f %% longer: trying %s", 100 * more, better)
        return better is None

    def _promised(self, layout: _Layout, seconds: float) -> Variant | None:
        """Return a form that promises to fit with less than `seconds` extra over the plain step, by a minimum cut of
        its sketch; None if there is none.
        """
        variants, plain = self.graphs.variants, self.graphs.plain
        room = self.base_nbytes + self.temporaries_nbytes
        for variant in (PLAIN, *variants.exact()):
            more = variants.estimate(variant).more_seconds
            sketch = variants.sketch(plain, variant) if variant else plain
            if more >= seconds or sketch is None or variant == layout.graph.form:
                continue
            cut = MinCut().solve(sketch, room, time_limit=self.ledger.time_limit).schedule
            profile = simulate(sketch, cut)
            if profile.peak_nbytes <= room and profile.extra_seconds + more < seconds:
                return variant
        return None

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
        plan = replace(plan, **compiled_facts(problem, found), like=self.like.fingerprint)
        if problem.compiles_to_run:
            return Planned(plan, found.jitted, found.compiled)
        return planned(problem, plan, self.request.planning, found.jitted, found.compiled)


def _renumbered(plan: Plan, before: Outline, now: Outline, graph: Graph) -> Plan:
    """Return a plan in the equation and value numbers of another form. Equations that are only in the new form take
    their properties from its graph. Stages also begin where the new form requires it.

    **Arguments:** `before` the outline of the plan's form, `now` that of the other form, with its `graph`.
    """
    nodes = before.matches(now)
    starts, places = before.starts, now.starts

    def value(v: int) -> list[int]:
        node = bisect_right(starts, v) - 1
        return [places[nodes[node]] + v - starts[node]] if node in nodes else []

    def stage(node: int) -> int:
        """Return the new start of a stage: the first equation from the old start on that is in both forms."""
        return next((nodes[i] for i in range(node, len(before.words)) if i in nodes), len(graph.nodes))

    cuts = {stage(start) for start, _ in plan.stages}
    fixed = {each.start for each in uncut(graph)}
    begins = sorted(fixed | {n for n in cuts if graph.forward_stop < n < len(graph.nodes)})
    number = {k: bisect_right(begins, stage(start)) - 1 for k, (start, _) in enumerate(plan.stages)}
    new = set(range(len(graph.nodes))).difference(nodes.values())
    written = {v for n in new for v in graph.nodes[n].outputs if graph.values[v].materialised}
    return replace(
        plan,
        stages=tuple(zip(begins, [*begins[1:], len(graph.nodes)], strict=True)),
        materialised=tuple(sorted(written.union(*map(value, plan.materialised)))),
        unrepeated=tuple(sorted(nodes[n] for n in plan.unrepeated if n in nodes)),
        saved=tuple(sorted({own for v in plan.saved for own in value(v)})),
        scratch=tuple((nodes[n], share) for n, share in plan.scratch if n in nodes),
        kept=tuple(sorted({(own, number[k]) for v, k in plan.kept for own in value(v)})),
        detached=(),
    )
