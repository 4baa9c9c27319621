"""Function and arguments -> `Frontier`: plans for budgets from the plain step's memory down to the least.

Invariant: a sweep writes its results to disk at once, so that the same sweep continues there when it is called again.

Half of the budgets are the peaks of vertices of the convex hull of memory against time. Each vertex takes one solve
without a budget (see `_solver._hull`). The others are near the middle of the widest gaps between these. A budget is the
peak of its plan, so most take one compilation. The plain step is compiled once.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .._model._graph import Graph
from .._model._simulate import simulate
from .._model._stages import cuttings
from .._model._variant import Variant
from .._plan._baseline import Baseline, EstimatedGraphs, Graphs, measure_baseline
from .._plan._frontier import Frontier, Point, Policy, monotone
from .._plan._plan import Plan
from .._plan._plan_cache import keep, key_of, recall
from .._plan._problem import Problem
from .._plan._request import Request, takes_planning
from .._plan._verify import Before, Gap, make_plan, make_plan_between, make_plan_of
from .._report._frontier_plot import IN_PICTURE
from .._runtime._budgets import Budget, parse_margin, with_margin
from .._runtime._cache_folder import cache_dir
from .._runtime._errors import ArgumentError, InfeasibleBudgetError
from .._runtime._progress import Phase, phase
from .._runtime._progress_bars import shown
from .._solver import Chen, RecomputeAll, SaveDots, Solution
from .._solver._hull import Bound, Priced, Vertex, cheapest, hull, improves, vertex
from ._optimize import optimize
from ._step import Step

POLICIES = {"dots saved": SaveDots(), "√n checkpoints": Chen(), "recompute all": RecomputeAll()}
"""Hand-written rules. The first is `jax.checkpoint_policies.dots_saveable`."""

HULL_SHARE = 0.25
"""Share of the time limit for each solve for a vertex of the hull, for each cutting into stages."""

NARROW = 0.01
"""Gaps between budgets below this share of the whole range are not split further."""


@takes_planning
def sweep(
    fn: Callable[..., object], *args: object, points: int = 12, target: str | None = None, **options: Any
) -> Frontier:
    """Plan a step for several budgets, from the plain step's memory down to the least, and return the extra time of
    each.

    Every plan is kept in the cache folder (`$JAXREMAT_CACHE`) at once: an interrupted sweep continues from there when
    it is called again.

    **Arguments:** the step and its arguments (arrays or `jax.ShapeDtypeStruct`s); `points`, the number of budgets, at
    least 2; `target` and the other options of `jaxremat.optimize`, without `budget` and `plan`. A step from `optimize`
    is swept with its own options.

    **Returns:** a `Frontier`: `print` it, `plot()` it, or ask it for the `best(max_overhead=0.05)`.

    **Raises:** `ArgumentError`, `SolverError`, `TargetError`.

    ```python
    frontier = jaxremat.sweep(train_step, params, batch, donate_argnums=0)
    frontier.plot().figure.savefig("frontier.png")
    frontier.best(max_overhead=0.05).plan.save("plan.json")
    ```
    """
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise ArgumentError(f"`points={points!r}` is not a number of budgets. Write an int of at least 2.")
    if wrong := sorted({"budget", "plan"} & set(options)):
        raise ArgumentError(
            f"`sweep` chooses its own budgets; leave out `{wrong[0]}`. For one budget use `jaxremat.plan`."
        )
    if isinstance(fn, Step):
        if options or target is not None:
            raise ArgumentError(
                "`sweep` uses the options of a step that `optimize` made. Leave out the options here, or pass "
                "the function that the step wraps."
            )
        step = fn
    else:
        step = optimize(None, target=target, **options)(fn)
    if (through := step._through(args, {})) is not None:
        return through.ask(functools.partial(_swept, points), args, {})
    return _swept(points, step, *args)


def _swept(points: int, step: Step, *args: object) -> Frontier:
    """Return the frontier of a step of trees of arrays."""
    problem, request = step._prepare(args, {})
    # Ctrl-C ends the whole sweep, which can continue later, not just the search for one plan.
    request = replace(request, planning=replace(request.planning, on_interrupt="stop"))
    with shown(request.planning.progress), phase("sweeping", points + len(POLICIES)) as progress:
        return _Sweep(problem, request, progress).run(points)


@dataclass
class _Sweep:
    problem: Problem
    request: Request
    progress: Phase

    def __post_init__(self) -> None:
        planning = self.request.planning
        self.solver = planning.solver
        self.key = key_of(self.problem, planning, {"sweep": repr(planning.workspace_margin)})
        self.before = Before()

    @functools.cached_property
    def baseline(self) -> Baseline | None:
        """The baseline of all plans, so that they have the same figures for the plain step; None if nothing is
        compiled. It is measured for the first plan that no earlier sweep has stored.
        """
        return (
            measure_baseline(self.problem, plain=True, tagged=False) if self.request.planning.verify else None
        )

    @property
    def _hull_seconds(self) -> float:
        return HULL_SHARE * self.request.planning.time_limit

    @functools.cached_property
    def graphs(self) -> Graphs:
        """The graphs on which plans are solved."""
        return self.baseline.graphs if self.baseline else EstimatedGraphs(self.problem)

    def run(self, points: int) -> Frontier:
        plain = self._done("plain", self._plain)
        step_seconds = float(plain["step_seconds"])
        found = [Point(_plan(plain), "plain")]
        self.progress.advance()
        least = self._done("least", lambda: self._entry(self._planned("min")))
        found.append(Point(_plan(least), "least"))
        self.progress.advance()
        vertices, proven = self._hull(found[0].plan, found[1].plan, step_seconds, (points - 2) // 2)
        found += [Point(plan, "hull") for plan in vertices]
        compiled = self.request.planning.verify and self.problem.backend.fuses_reductions
        frontier = Frontier(
            points=(),
            policies=(),
            bounds=(),
            judged="compiled" if compiled else "predicted",
            device=self.problem.device.name,
            fingerprint=self.problem.fingerprint,
        )
        while len(found) < points and (gap := self._widest(found, frontier.cost)):
            budget = with_margin(gap.middle_nbytes, self.request.planning.workspace_margin)
            entry = self._done(f"gap-{budget}", lambda gap=gap: self._entry(self._between(gap)))
            if entry["plan"] is None:  # the best known plan is then that of the next smaller budget
                margin = parse_margin(self.request.planning.workspace_margin, budget)
                plan = max((p.plan for p in found if p.budget_nbytes < budget), key=lambda p: p.budget_nbytes)
                plan = replace(plan, budget_nbytes=budget, margin_nbytes=margin)
            else:
                plan = _plan(entry)
            found.append(Point(plan, "budget"))
            self.progress.advance()
        bounds = (self._for_all(bound, forms, found) for bound, forms in proven)
        shares = tuple((price / step_seconds, seconds / step_seconds) for price, seconds in bounds)
        policies = []
        for i, name in enumerate(POLICIES):
            known = self._done(f"rule-{i}", lambda name=name: self._policy(name, found[1].overhead))
            policies.append(Policy(**known))
            self.progress.advance()
        return replace(
            frontier, policies=tuple(policies), bounds=shares, points=monotone(found, frontier.cost)
        )

    def _done(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the stored result of an earlier sweep, else that of `make`, which is stored."""
        path = None if self.key is None else cache_dir() / "sweeps" / f"{self.key}-{name}.json"
        found = None if path is None else recall(path, _parse)
        if found is None:
            found = make()
            if path is not None:
                keep(path, json.dumps(found))
        # A continued sweep must know the same rounds as an uninterrupted one.
        if found.get("plan") is not None:
            self.before.rounds += _plan(found).rounds
        return found

    def _plain(self) -> dict[str, Any]:
        peak = self.baseline.peak_nbytes if self.baseline else self.problem.estimated_peak_nbytes
        plan = self._planned(with_margin(peak, self.request.planning.workspace_margin))
        return {
            **self._entry(plan),
            "step_seconds": self.graphs.plain.step_seconds or 1.0,
        }

    def _planned(self, budget: Budget) -> Plan:
        asked = replace(self.request, budget=budget)
        return make_plan(self.problem, asked, self.baseline, self.before).plan

    def _between(self, gap: Gap) -> Plan | None:
        """Return a plan in a gap, or None."""
        if self.baseline is not None:
            found = make_plan_between(self.problem, self.request, gap, self.baseline, self.before)
            return None if found is None else found.plan
        try:
            return self._planned(with_margin(gap.middle_nbytes, self.request.planning.workspace_margin))
        except InfeasibleBudgetError:
            return None

    def _entry(self, plan: Plan | None) -> dict[str, Any]:
        """Return a plan as stored. A plan whose budget is its peak gets a budget that leaves the margin free."""
        if plan is not None and not plan.margin_nbytes:
            budget = with_margin(plan.budget_nbytes, self.request.planning.workspace_margin)
            plan = replace(plan, budget_nbytes=budget, margin_nbytes=budget - plan.budget_nbytes)
        return {"plan": None if plan is None else json.loads(plan.to_json())}

    def _hull(
        self, plain: Plan, least: Plan, step_seconds: float, most: int
    ) -> tuple[list[Plan], list[tuple[Bound, Collection[Variant]]]]:
        """Return plans at vertices of the convex hull between two plans, and the proven bounds with their variants."""
        if not isinstance(self.solver, Priced):
            return [], []
        plans: list[Plan] = []
        forms: list[Collection[Variant]] = []
        first, last = (
            Vertex(plan.predicted_peak_nbytes, plan.overhead * step_seconds) for plan in (plain, least)
        )

        def at(price: float, edge: tuple[Vertex, Vertex]) -> tuple[Vertex, Bound]:
            forms.append({plan.form for plan in (plain, *plans, least)})
            entry = self._done(f"hull-{price!r}", lambda: self._vertex(price, edge, (*plans, least)))
            if entry["plan"] is not None:
                plans.append(_plan(entry))
                self.progress.advance()
            return Vertex(entry["peak_nbytes"], entry["seconds"]), Bound(price, entry["bound"])

        bounds = hull((first, last), at, most)[1]
        return plans, list(zip(bounds, forms, strict=True))

    def _for_all(self, bound: Bound, forms: Collection[Variant], found: Sequence[Point]) -> Bound:
        """Return a bound that holds for the variants of all plans, given one for `forms`: later plans may be of other
        variants, which are faster.
        """
        solver = self.solver
        assert isinstance(solver, Priced)
        if not (more := sorted({point.plan.form for point in found}.difference(forms), key=str)):
            return bound

        def solved() -> dict[str, Any]:
            if not (graphs := self._cuttings(more)):
                return {"bound": bound.seconds}
            return {"bound": cheapest(graphs, solver, bound.price, (), self._hull_seconds)[1].seconds}

        of = hashlib.sha256(repr(more).encode()).hexdigest()[:16]
        own = self._done(f"bound-{bound.price!r}-{of}", solved)["bound"]
        return Bound(bound.price, min(bound.seconds, own))

    def _cuttings(self, variants: Iterable[Variant]) -> list[Graph]:
        """Return the graphs of variants, in all cuttings into stages."""
        return [cut for graph in filter(None, map(self.graphs.of, variants)) for cut in cuttings(graph)]

    def _vertex(self, price: float, edge: tuple[Vertex, Vertex], plans: Sequence[Plan]) -> dict[str, Any]:
        """Return the best schedule at a price of memory, with its plan if it is below the edge of the hull."""
        assert isinstance(self.solver, Priced)
        plain = self.graphs.plain
        made = dict.fromkeys(plan.form for plan in plans if plan.form != plain.form)
        graphs = [*cuttings(plain), *self._cuttings(made)]
        starts = [
            vertex(graph, Solution(plan.schedule(graph)))
            for plan in plans
            for graph in graphs
            if (plan.form, plan.stages) == (graph.form, tuple((s.start, s.stop) for s in graph.stages))
        ]
        best, bound = cheapest(graphs, self.solver, price, starts, self._hull_seconds)
        entry: dict[str, Any] = {"plan": None}
        if improves(best, edge, price):
            assert best.graph is not None and best.solution is not None
            proven = max(bound.seconds - price * best.peak_nbytes, best.graph.extra_seconds, 0.0)
            solution = replace(best.solution, lower_bound=proven / (best.graph.step_seconds or 1.0))
            entry = self._entry(
                make_plan_of(
                    self.problem, self.request, best.graph, solution, self.baseline, self.before
                ).plan
            )
        return {**entry, "peak_nbytes": best.peak_nbytes, "seconds": best.seconds, "bound": bound.seconds}

    def _widest(self, points: Sequence[Point], cost: Callable[[Point], float]) -> Gap | None:
        """Return the largest gap between budgets, by bytes times overhead; None if all are narrow.

        A gap ends at the peak of its upper plan, since that plan is the best for all budgets from there on. It is empty
        if the lower budget costs no more.
        """
        points = sorted(points, key=lambda point: point.budget_nbytes)
        narrow = max(NARROW * (points[-1].budget_nbytes - points[0].budget_nbytes), 1)
        gaps: list[tuple[float, Gap]] = []
        for low, high in pairwise(points):
            gap = Gap(low.budget_nbytes - low.plan.margin_nbytes, cost(low), high.peak_nbytes, cost(high))
            if gap.high_nbytes - gap.low_nbytes > narrow and gap.size > 0:
                gaps.append((gap.size, gap))
        return max(gaps, default=(0, None))[1]

    def _policy(self, name: str, least_overhead: float) -> dict[str, Any]:
        """Return the peak and overhead of a hand-written rule. It is compiled if it is fast enough for the plot."""
        verify = self.request.planning.verify
        graph = self.graphs.plain
        solution = POLICIES[name].solve(graph, None, time_limit=self.request.planning.time_limit)
        profile = simulate(graph, solution.schedule)
        overhead = profile.extra_seconds / (graph.step_seconds or 1.0)
        found = Policy(name, profile.peak_nbytes, None, overhead, None)
        if verify and overhead <= IN_PICTURE * least_overhead:
            plan = make_plan_of(self.problem, self.request, graph, solution, self.baseline, self.before).plan
            found = replace(
                found,
                compiled_peak_nbytes=plan.compiled_peak_nbytes,
                compiled_overhead=plan.compiled_overhead,
            )
        return vars(found)


def _parse(text: str) -> dict[str, Any]:
    """Return an entry of the sweep's folder. **Raises:** ValueError for another text."""
    entry = json.loads(text)
    if not isinstance(entry, dict):
        raise ValueError("it is not an entry of a sweep")
    if entry.get("plan") is not None:
        _plan(entry)
    return entry


def _plan(entry: dict[str, Any]) -> Plan:
    return Plan.from_json(json.dumps(entry["plan"]))
