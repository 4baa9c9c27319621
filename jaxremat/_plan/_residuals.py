"""Joint program + budget -> which values its forward pass keeps for its backward pass, counted in *held* bytes.

A function that is differentiated later knows nothing of the program around it: neither when its backward pass runs, nor
what else is in memory then. What a plan for it decides is what lies in memory between the two passes, and what the
backward pass has to make again. So only that is counted: values of the forward pass, from its end on,

    held = max over the moments of the backward pass of (saved values with a reader to come + recomputed values in use),

not arguments and what the function closes over (the caller has them in any case), cotangents and gradients, and not
what the forward pass makes and lets go of itself. Before the first moment all that is saved is there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .._emit._bodies import without_numbers
from .._emit._joint import Joint
from .._model._graph import Graph, Stage
from .._model._schedule import check, close_over_dependencies
from .._model._simulate import Profile, rank, simulate
from .._model._stages import coarser, cut_stages, uncut
from .._report._actions import actions
from .._report._loop_forms import LoopForm
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
            f"`checkpoint(budget={budget!r})` is {found}, but this function is only a part of a step. Write "
            f'"{meant}" for a share of what plain JAX would keep for the backward pass, or {OF_PARTS}.'
        )
    return int(found.share * plain_nbytes)


def counted(graph: Graph) -> Graph:
    """Return the graph with held bytes in place of all bytes; its stages, too, are the graph's own."""
    values = (
        replace(v, is_output=False) if graph.is_residual(v.id) else replace(v, nbytes=0, is_output=False)
        for v in graph.values
    )
    nodes = (replace(n, workspace_nbytes=0) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes), values=tuple(values), base_nbytes=0, counts_forward=False)


LEAST_SLACK = 0.02
"""Of schedules that hold about the least, within this share of what plain JAX keeps, the fastest is taken."""


@dataclass(frozen=True)
class Found:
    """**Fields:** `graph` with its stages; `solution`; `profile` in held bytes; `budget_nbytes`, None for words."""

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

    **Arguments:** `graph` of the joint program; `restrict` takes from a graph with its stages what cannot be followed;
    `plain_nbytes` what plain JAX keeps of the function as it is written, where the joint program is of another form.

    **Raises:** `BudgetError`, `InfeasibleBudgetError`, and `InfeasibleHintError` where hints are to blame.
    """
    plain = graph
    plain_nbytes = joint.plain_nbytes if plain_nbytes is None else plain_nbytes
    wanted = parse_held(budget, plain_nbytes)
    allowance = wanted if isinstance(wanted, int) else None
    cuts: list[tuple[Graph, Graph]] = []  # each with what is counted of it
    kept: list[str] = []
    for stages in _cuttings(graph):
        cut = replace(graph, stages=stages)
        cut = restrict(cut) if restrict else cut
        # What one part hands on to another is kept, whatever a hint says of it.
        kept = [p.origin for p in cut.pins if p.action == "recompute" and not cut.recomputable(p.at)]
        if not kept:
            cuts.append((cut, counted(cut)))
    if not cuts:
        raise HintError(
            f"{kept[0]} cannot be followed: a loop of the function reads the value, and values that a loop "
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
        cut, held = cuts[-1]  # uncut: what every checkpoint that saves nothing does
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
    """Return what is held at once where the function is called twice, as blocks are one after the other: all that
    the first saves, while the second goes back.
    """
    return _saved_nbytes(held, solution) + simulate(held, solution.schedule).peak_nbytes


def _saved_nbytes(held: Graph, solution: Solution) -> int:
    return sum(held.values[v].nbytes for v in solution.schedule.saved if held.is_residual(v))


def saved_nbytes(found: Found) -> int:
    """Return the bytes of what is saved."""
    return _saved_nbytes(counted(found.graph), found.solution)


def of_two(found: Found) -> int:
    """Return what is held at once where the function is called twice."""
    return _of_two(counted(found.graph), found.solution)


def as_plan(
    joint: Joint, found: Found, parts: tuple[LoopForm, ...], plain_nbytes: int, plain_seconds: float
) -> HeldPlan:
    """Return what is told of it.

    **Arguments:** `parts` in which the function is done; `plain_nbytes` what plain JAX keeps of it as it is written,
    and `plain_seconds` what both passes take then.
    """
    graph, called = found.graph, joint.called
    nodes = tuple(replace(n, scope=without_numbers(n.scope)) for n in graph.nodes)
    values = tuple(replace(v, name=called.get(v.name, "")) for v in graph.values)
    return HeldPlan(
        budget_nbytes=found.budget_nbytes,
        held_nbytes=found.profile.peak_nbytes,
        plain_nbytes=plain_nbytes,
        overhead=(graph.step_seconds + found.profile.extra_seconds - plain_seconds) / (plain_seconds or 1.0),
        solver=found.solution.solver,
        stage_count=len(graph.stages),
        actions=actions(replace(graph, nodes=nodes, values=values), found.solution.schedule),
        parts=parts,
    )


def _cuttings(graph: Graph) -> Iterable[tuple[Stage, ...]]:
    """Ways to cut the backward pass into stages, from the finest to the fewest stages."""
    fine, coarse = cut_stages(graph, fine=True), graph.stages
    groups = (coarser(graph, coarse, every) for every in (2, 3, 4, 6, 8) if every < len(coarse))
    return dict.fromkeys((fine, coarse, *groups, uncut(graph)))


def _kept_whole(graph: Graph, contractions: bool) -> frozenset[int]:
    """Return the nodes that may not run again: contractions and the like alone, or all kernels that no reader
    absorbs.
    """
    return frozenset(
        n.id for n in graph.nodes if n.forward and (n.contraction if contractions else n.fusion_root)
    )
