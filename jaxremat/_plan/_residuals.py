"""Joint program, budget of *held* bytes -> the values that its forward pass keeps for its backward pass.

A plan for a function that is differentiated later knows nothing about the surrounding program: neither when its
backward pass runs, nor which other values are in memory then. The plan decides which values stay in memory between the
two passes, and which the backward pass recomputes. So it counts only forward values, from the end of the forward pass:

    held = max over the moments of the backward pass of (saved values with a reader to come + recomputed values in use),

not arguments and closed-over values (the caller has them in any case), cotangents and gradients, nor temporaries of the
forward pass. Before the first moment, all saved values are in memory.

`best_way`: function that is differentiated later, budget of held bytes -> the function as a whole or in parts,
whichever has the better plan. Parts are loops of the function, so a function in parts is planned like any other. For
each set of regions, at most two numbers of parts are tried: one that is certain to be enough, and the fewest that are
enough by the result for the first, since the recomputed values of a part are as large as the part.

Invariant: a function in parts is proved to equal the function, or is not used.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.extend.core as jex
import numpy as np

from .._emit._bodies import without_numbers
from .._emit._joint import Function, Joint, NotReversibleError, in_parts
from .._model._device_specs import DeviceSpec
from .._model._graph import Graph, Stage
from .._model._schedule import check, close_over_dependencies
from .._model._simulate import Profile, rank, simulate
from .._model._stages import coarser, cut_stages, uncut
from .._program._primitives import inner_eqns
from .._program._value_numbers import UndecidedError
from .._report._actions import actions
from .._report._loop_forms import LoopForm
from .._rewrite._function_parts import Division, divisions
from .._rewrite._kernel_choice import equivalence
from .._runtime._budgets import OF_PARTS, Share, read_budget
from .._runtime._bytes import format_nbytes, least_budget
from .._runtime._errors import BudgetError, HintError, InfeasibleBudgetError
from .._solver import Solution, Solver
from .._solver._mincut import fewest_saved
from ._plan import HeldPlan
from ._refusal import blamed

Held = int | float | str
"""Held bytes as an int or text, "40% of residuals" of what plain JAX keeps, "min", "dots" or "free"."""


def parse_held(budget: Held, plain_nbytes: int) -> int | Literal["min", "dots", "free"]:
    """Return a budget in held bytes, or one of the words. **Raises:** `BudgetError` for anything else."""
    if isinstance(budget, str) and (word := budget.strip().lower()) in ("dots", "free"):
        return word  # type: ignore[return-value]
    found = read_budget(budget, OF_PARTS)
    if not isinstance(found, Share):
        return found
    if found.whole != "residuals":
        meant = replace(found, whole="residuals")
        raise BudgetError(
            f"`checkpoint(budget={budget!r})` is {found}, but this function is only part of a step. Write "
            f'"{meant}" for a share of what plain JAX would keep for the backward pass, or {OF_PARTS}.'
        )
    return int(found.share * plain_nbytes)


def counted(graph: Graph) -> Graph:
    """Return the graph with held bytes in place of all bytes, in the same stages."""
    values = (
        replace(v, is_output=False) if graph.is_residual(v.id) else replace(v, nbytes=0, is_output=False)
        for v in graph.values
    )
    nodes = (replace(n, workspace_nbytes=0) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes), values=tuple(values), base_nbytes=0, counts_forward=False)


LEAST_SLACK = 0.02
"""For `"min"`, the fastest schedule within this share (of the bytes that plain JAX keeps) of the least held bytes."""


@dataclass(frozen=True)
class Found:
    """**Fields:** `graph` with its stages; `solution`; `profile` in held bytes; `budget_nbytes`, None for "min" etc."""

    graph: Graph
    solution: Solution
    profile: Profile
    budget_nbytes: int | None


def plan_held(
    joint: Joint,
    graph: Graph,
    budget: Held,
    solver: Solver,
    time_limit: float,
    restrict: Callable[[Graph], Graph] | None = None,
    plain_nbytes: int | None = None,
) -> Found:
    """Return the cheapest schedule within a budget of held bytes.

    **Arguments:** `graph` of the joint program; `restrict` removes choices that cannot be emitted from a graph with its
    stages; `plain_nbytes` that plain JAX keeps for the function as written, if the joint program is of another form.

    **Raises:** `BudgetError`, `InfeasibleBudgetError`, and `InfeasibleHintError` if hints are to blame.
    """
    plain = graph
    plain_nbytes = joint.plain_nbytes if plain_nbytes is None else plain_nbytes
    wanted = parse_held(budget, plain_nbytes)
    allowance = wanted if isinstance(wanted, int) else None
    cuts: list[tuple[Graph, Graph]] = []  # each with its graph in held bytes
    kept: list[str] = []
    for stages in _cuttings(graph):
        cut = replace(graph, stages=stages)
        cut = restrict(cut) if restrict else cut
        # Values that one part passes to another are always saved, which may contradict a hint.
        kept = [p.origin for p in cut.pins if p.action == "recompute" and not cut.recomputable(p.at)]
        if not kept:
            cuts.append((cut, counted(cut)))
    if not cuts:
        raise HintError(
            f"{kept[0]} cannot be honoured: a loop of the function reads the value, and values that a loop "
            'reads are always saved. Remove the hint, or use `emit="custom_vjp"`.'
        )

    def solved(held: Graph, within: int | None) -> Solution:
        if wanted == "dots" or wanted == "free":
            solution = Solution(fewest_saved(held, _kept_whole(held, wanted == "dots")), solver="mincut")
        else:
            solution = solver.solve(held, within, time_limit=time_limit)
        check(held, solution.schedule)
        return solution

    within = allowance
    found = [(cut, held, solved(held, within)) for cut, held in cuts]
    if wanted == "min":
        least = [simulate(held, solution.schedule).peak_nbytes for _, held, solution in found]
        within = min(least) + int(LEAST_SLACK * plain_nbytes)
        low = [pair for pair, nbytes in zip(cuts, least, strict=True) if nbytes <= within]
        found.extend((cut, held, solved(held, within)) for cut, held in low)
        cut, held = cuts[-1]  # uncut: the schedule of a `jax.checkpoint` that saves nothing
        found.append((cut, held, Solution(close_over_dependencies(held, ()), solver="none")))
        twice = [_of_two(held, solution) for _, held, solution in found]
        enough = min(twice) + int(LEAST_SLACK * plain_nbytes)
        found = [each for each, nbytes in zip(found, twice, strict=True) if nbytes <= enough]
        within = max(simulate(held, solution.schedule).peak_nbytes for _, held, solution in found)
    graph, held, solution = min(
        found, key=lambda each: (rank(each[1], each[2].schedule, within), len(each[1].stages))
    )
    profile = simulate(held, solution.schedule)
    if allowance is not None and profile.peak_nbytes > allowance:
        advice = ', or `emit="custom_vjp"`, which may hold less' if restrict else ""
        error = InfeasibleBudgetError(
            f"The budget {budget!r} cannot be met: with the least memory found, the backward pass "
            f"still holds {format_nbytes(profile.peak_nbytes)} of the forward pass's values at once; plain JAX "
            f"keeps {format_nbytes(plain_nbytes)}. Use a budget of at least "
            f"{least_budget(profile.peak_nbytes)}{advice}.",
            budget_nbytes=allowance,
            min_peak_nbytes=profile.peak_nbytes,
        )

        def free() -> int:
            bare = replace(plain, pins=())
            try:
                found = plan_held(joint, bare, budget, solver, time_limit, restrict, plain_nbytes)
            except InfeasibleBudgetError as error:
                return error.min_peak_nbytes
            return found.profile.peak_nbytes

        raise blamed(error, allowance, counted(plain), free, "the backward pass has")
    return Found(graph, solution, profile, allowance)


def _of_two(held: Graph, solution: Solution) -> int:
    """Return the held bytes if the function is called twice in a row, like blocks of a network: all saved values of
    the first call, during the backward pass of the second.
    """
    return _saved_nbytes(held, solution) + simulate(held, solution.schedule).peak_nbytes


def _saved_nbytes(held: Graph, solution: Solution) -> int:
    return sum(held.values[v].nbytes for v in solution.schedule.saved if held.is_residual(v))


def saved_nbytes(found: Found) -> int:
    """Return the bytes of the saved values."""
    return _saved_nbytes(counted(found.graph), found.solution)


def of_two(found: Found) -> int:
    """Return the held bytes if the function is called twice in a row."""
    return _of_two(counted(found.graph), found.solution)


def overhead(found: Found, plain_seconds: float) -> float:
    """Return the extra time of both passes over those of the plain function, as a share of the latter."""
    seconds = found.graph.step_seconds + found.profile.extra_seconds
    return (seconds - plain_seconds) / (plain_seconds or 1.0)


def as_plan(
    joint: Joint, found: Found, parts: tuple[LoopForm, ...], plain_nbytes: int, plain_seconds: float
) -> HeldPlan:
    """Return the public plan.

    **Arguments:** `parts` in which the function runs; `plain_nbytes` that plain JAX keeps for the function as written,
    and `plain_seconds` of both of its passes.
    """
    graph, called = found.graph, joint.called
    nodes = tuple(replace(n, scope=without_numbers(n.scope)) for n in graph.nodes)
    values = tuple(replace(v, name=called.get(v.name, "")) for v in graph.values)
    return HeldPlan(
        budget_nbytes=found.budget_nbytes,
        held_nbytes=found.profile.peak_nbytes,
        plain_nbytes=plain_nbytes,
        overhead=overhead(found, plain_seconds),
        solver=found.solution.solver,
        stage_count=len(graph.stages),
        actions=actions(replace(graph, nodes=nodes, values=values), found.solution.schedule),
        parts=parts,
    )


def _cuttings(graph: Graph) -> Iterable[tuple[Stage, ...]]:
    """Return the ways to cut the backward pass into stages, from the finest to the fewest stages."""
    fine, coarse = cut_stages(graph, fine=True), graph.stages
    groups = (coarser(graph, coarse, every) for every in (2, 3, 4, 6, 8) if every < len(coarse))
    return dict.fromkeys((fine, coarse, *groups, uncut(graph)))


def _kept_whole(graph: Graph, contractions: bool) -> frozenset[int]:
    """Return the nodes that may not run again: only contractions, or all fusion roots."""
    return frozenset(
        n.id for n in graph.nodes if n.forward and (n.contraction if contractions else n.fusion_root)
    )


logger = logging.getLogger("jaxremat")

FEW = 0.02
"""A plan that recomputes for at most this share of the time of both passes is good enough without parts."""

MOST_OVERHEAD = 1.0
"""Parts that cost more than this share of both passes, as kernels of few rows do, are not used if the function can be
planned without parts."""

BESIDE = 1 / 4
"""Parts are small enough if one of them keeps at most this share of the values that regions pass on."""


@dataclass(frozen=True)
class Way:
    """A function, whole or in parts, with its schedule.

    **Fields:** the `function`, whole or in parts; its `joint` program; the schedule `found` for it; the `division`,
    None for the whole; `plain_nbytes` that plain JAX keeps for the whole, and `plain_seconds` of both of its passes.
    """

    function: Function
    joint: Joint
    found: Found
    division: Division | None
    plain_nbytes: int
    plain_seconds: float

    @property
    def plan(self) -> HeldPlan:
        """The public plan."""
        return as_plan(self.joint, self.found, self.forms, self.plain_nbytes, self.plain_seconds)

    @property
    def seconds(self) -> float:
        """The time of both passes by the model."""
        return self.found.graph.step_seconds + self.found.profile.extra_seconds

    @property
    def forms(self) -> tuple[LoopForm, ...]:
        """The regions in parts, for reports."""
        if self.division is None:
            return ()
        both = zip(self.division.regions, self.division.parts, strict=True)
        return tuple(LoopForm(region.rows, (count,), region.source, rows=True) for region, count in both)


Choice = tuple[int, int] | None
"""The ladder and the rung of a division among a function's `divisions`."""


def chosen(function: Function, choice: Choice) -> Division | None:
    """Return the division of a choice that was made for an equal function."""
    return None if choice is None else divisions(function.closed)[choice[0]][choice[1]]


def best_way(
    function: Function, planned: Callable[[Division | None], Way], device: DeviceSpec, *, least: bool
) -> tuple[Choice, Way]:
    """Return the best way to run a function, and the choice of its division.

    **Arguments:** `planned` plans a division; `device` that runs it; `least` for the least memory, else a budget.

    **Raises:** `InfeasibleBudgetError` if no way fits: the one of the lowest peak; any other error of `planned`.
    """
    ways: list[tuple[Choice, Way]] = []
    most = math.inf
    refused: list[InfeasibleBudgetError] = []
    try:
        ways.append((None, whole := planned(None)))
        if not least and whole.found.profile.extra_seconds <= FEW * whole.found.graph.step_seconds:
            return ways[0]
        plain_nbytes, budget = whole.plain_nbytes, whole.found.budget_nbytes or 0
        most = MOST_OVERHEAD * whole.found.graph.step_seconds
    except InfeasibleBudgetError as error:
        refused.append(error)
        plain_nbytes, budget = 0, error.budget_nbytes

    def tried(number: int, rung: int) -> Way | None:
        try:
            if is_proved(function, ladder[rung]):
                ways.append(((number, rung), way := planned(ladder[rung])))
                return way
        except NotReversibleError:
            pass
        except InfeasibleBudgetError as error:
            refused.append(error)
        return None

    for number, ladder in enumerate(divisions(function.closed)):
        able = sum(division.more_seconds(device) <= most for division in ladder)
        ladder = ladder[: max(able, 1)]
        rung = _enough(ladder, plain_nbytes, None if least else budget)
        way = tried(number, rung)
        if way is None and rung < len(ladder) - 1:
            rung = len(ladder) - 1
            way = tried(number, rung)
        if way is None:
            continue
        within = of_two(way.found) + LEAST_SLACK * plain_nbytes if least else budget
        if (fewer := _fewest(ladder, rung, way.found, within, least)) < rung:
            tried(number, fewer)
    if not ways:
        raise min(refused, key=lambda error: error.min_peak_nbytes)
    # The plans include the cost of a loop's small kernels, which `more_seconds` only estimates.
    affordable = [way for way in ways if overhead(way[1].found, way[1].plain_seconds) <= MOST_OVERHEAD]
    ways = affordable or ways
    if least:
        enough = min(of_two(way.found) for _, way in ways) + LEAST_SLACK * plain_nbytes
        ways = [each for each in ways if of_two(each[1].found) <= enough]
    return min(ways, key=lambda each: each[1].seconds)


def _fewest(ladder: Sequence[Division], rung: int, found: Found, within: float, least: bool) -> int:
    """Return the rung of the fewest parts that need at most `within`, by the schedule found for `rung`."""
    saved = saved_nbytes(found)
    part = found.profile.peak_nbytes - saved
    kept = 2 * saved if least else saved
    grown = (max(b / a for a, b in zip(each.parts, ladder[rung].parts, strict=True)) for each in ladder)
    return next((i for i, times in enumerate(grown) if kept + part * times <= within), rung)


def _enough(ladder: Sequence[Division], plain_nbytes: int, budget: int | None) -> int:
    """Return the first rung whose parts fit the budget, or are small compared with the values kept in any case."""

    def is_enough(division: Division) -> bool:
        if budget is not None:
            return division.handed_nbytes + division.inner_nbytes <= budget
        return division.inner_nbytes <= max(LEAST_SLACK * plain_nbytes, BESIDE * division.handed_nbytes)

    return next((i for i, division in enumerate(ladder) if is_enough(division)), len(ladder) - 1)


def is_proved(function: Function, division: Division) -> bool:
    """Return whether the function in parts is proved to have the same values and tangents.

    A function with a `custom_vjp` has no tangents. It is compared by values only, if no equation in parts has custom
    derivatives: JAX then differentiates the same operations.
    """
    other = in_parts(function, division)
    differs = _difference(function, other, _with_tangents)
    eqns = [function.closed.jaxpr.eqns[i] for region in division.regions for i in region.rules]
    if differs is not None and not any(_has_derivatives(eqn) for eqn in eqns):
        differs = _difference(function, other, lambda each: each.closed)
    if differs is not None:
        logger.info("not used, because it is not proved: a function in parts (%s)", differs)
    return differs is None


def _difference(
    function: Function, other: Function, program: Callable[[Function], jex.ClosedJaxpr]
) -> str | None:
    """Return where the programs of two functions are not proved equal, None if they are."""
    try:
        return equivalence(program(function)).difference(program(other))
    except (UndecidedError, TypeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _has_derivatives(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation, or one inside it, has custom derivatives."""
    return any(each.primitive.name.startswith("custom_") for each in (eqn, *inner_eqns(eqn)))


def _with_tangents(function: Function) -> Any:
    """Return the program that maps arguments and their tangents to results and theirs."""
    avals, smooth = [v.aval for v in function.closed.jaxpr.invars], function.inexact

    def both(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> Any:
        known = iter(tangents)
        every = [
            next(known) if is_smooth else np.zeros(aval.shape, jax.dtypes.float0)
            for aval, is_smooth in zip(avals, smooth, strict=True)
        ]
        results, changes = jax.jvp(jex.jaxpr_as_fun(function.closed), primals, every)
        return results, [change for change, d in zip(changes, function.differentiable, strict=True) if d]

    return jax.make_jaxpr(both)(avals, [a for a, is_smooth in zip(avals, smooth, strict=True) if is_smooth])
