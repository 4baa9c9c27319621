"""Result of a search where nothing fits, or only expensive plans -> an error that says why, and what to write.

If pins make the budget infeasible, the error names them, with the least peak with and without them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .._model._graph import Graph
from .._model._schedule import Schedule
from .._model._simulate import simulate
from .._model._sites import Variants
from .._model._stages import cut_stages
from .._model._variant import Variant
from .._runtime._budgets import Budget
from .._runtime._bytes import format_nbytes, least_budget
from .._runtime._errors import InfeasibleBudgetError, InfeasibleHintError
from .._solver import MinCut, RecomputeAll
from ._baseline import Baseline, Graphs
from ._ledger import CompiledCandidate, Effort
from ._search import MOST_OVERHEAD, Search

SMALL_NBYTES = 2**20
"""Below this size of temporaries, the compiler's own buffers are a large part."""

MOST_NAMED = 5
"""The most pins that an error names: more would hide the advice."""

MOST_TRIED = 24
"""The most pins that are left out one at a time to measure their cost, largest first: each takes two fast solves."""

_TRY_SECONDS = 1.0

_AS_WRITTEN = (
    "Hints and `pins` name values that other forms of attention, rows or microbatches would not keep, so these run "
    "as written. Without hints and pins, the step may need less."
)


class Least(NamedTuple):
    """The least memory of a search.

    **Fields:** `peak_nbytes`, and `how` it is known; the `schedule` of that peak and its `graph`; the compiled
    `candidate`, None if nothing was compiled, or for the plain step.
    """

    peak_nbytes: int
    how: str
    graph: Graph
    schedule: Schedule
    candidate: CompiledCandidate | None = None


def compiled(candidates: Sequence[CompiledCandidate], baseline: Baseline) -> Least:
    """Return the least of the compiled candidates, or the plain step if that needs less."""
    candidate = min(candidates, key=lambda t: t.peak_nbytes)
    least = Least(
        candidate.peak_nbytes,
        f"compiled, the least of {len(candidates)} plans",
        candidate.graph,
        candidate.solution.schedule,
        candidate,
    )
    if (written := baseline.written_nbytes) is None or written >= candidate.peak_nbytes:
        return least
    how = f"compiled as written: none of {len(candidates)} plans needs less"
    return least._replace(peak_nbytes=written, how=how, candidate=None)


def predicted(graph: Graph, schedule: Schedule) -> Least:
    """Return the predicted peak of a schedule as the least memory."""
    return Least(simulate(graph, schedule).peak_nbytes, "predicted", graph, schedule)


def infeasible(
    asked: Budget,
    budget: int,
    margin_nbytes: int,
    least: Least,
    *,
    temporaries_nbytes: int,
    effort: Effort,
    advice: str,
) -> InfeasibleBudgetError:
    """Return the error for a budget that no plan fits.

    **Arguments:** `asked` the budget as the user wrote it; `budget` in bytes without the margin; `temporaries_nbytes`
    of the plain step; `effort` of the search; `advice` on other options of the user.
    """
    graph = least.graph
    profile = simulate(graph, least.schedule)
    event = profile.events[profile.peak_event]
    node = graph.nodes[event.node]
    largest = "; ".join(
        f"{format_nbytes(graph.values[v].nbytes)} {graph.values[v].shape} "
        f"from {graph.nodes[graph.values[v].producer].primitive}"
        for v, _ in profile.alive[:3]
    )
    enough = least.peak_nbytes + margin_nbytes
    return InfeasibleBudgetError(
        f"The budget {asked!r} cannot be met: with the least memory found, the step still needs "
        f"{format_nbytes(least.peak_nbytes)} ({least.how}), at {node.primitive} ({node.source or node.scope}): "
        f"arguments and outputs {format_nbytes(graph.base_nbytes)}, live values {format_nbytes(event.live_nbytes)}, "
        f"the largest {largest or 'none'}. "
        f"Use a budget of at least {least_budget(enough)}, or a smaller batch."
        + _ended(effort)
        + advice
        + (
            f" With {format_nbytes(temporaries_nbytes)} of temporaries, the step is too small to plan well: the "
            "compiler's own buffers dominate."
            if temporaries_nbytes < SMALL_NBYTES
            else ""
        ),
        budget_nbytes=budget + margin_nbytes,
        min_peak_nbytes=least.peak_nbytes,
        step_seconds=graph.step_seconds,
    )


def _ended(effort: Effort) -> str:
    """Return a note if a limit ended the search, else ""."""
    if effort.stopwatch.interrupted:
        return " The clock cut planning short: a larger `Planning.planning_seconds` may find a smaller peak."
    if effort.exhausted:
        return f' The search ended after {effort}: `Planning(effort="thorough")` may find a smaller peak.'
    return ""


def slow(search: Search, candidate: CompiledCandidate) -> str:
    """Return a warning for a plan that takes several times the plain step's time, else ""."""
    step = search.graph.step_seconds or 1.0
    if candidate.seconds <= MOST_OVERHEAD * step:
        return ""
    times = 1 + candidate.seconds / step
    said = f"the cheapest plan found within this budget takes {times:.1f} times the plain step's time."
    cheaper = [t for t in search.ledger.compiled if t.seconds <= MOST_OVERHEAD * step]
    if not cheaper:
        return f"{said} Use a larger budget, or a smaller batch."
    near = min(cheaper, key=lambda t: t.peak_nbytes)
    return (
        f"{said} With {least_budget(near.peak_nbytes)} it takes {1 + near.seconds / step:.1f} times: use that "
        "budget, or a smaller batch."
    )


@dataclass(frozen=True)
class UnpinnedGraphs:
    """The graphs of a step's variants without pins, to compute the memory that the pins cost."""

    pinned: Graphs

    @cached_property
    def plain(self) -> Graph:
        """The graph of the step as it is written."""
        return without(self.pinned.plain, None)

    @cached_property
    def variants(self) -> Variants:
        """The variants that the step may take."""
        return self.pinned.variants_of(self.plain)

    def known(self, graph: Graph) -> Schedule | None:
        """Return None: the schedule of the user's checkpoints is used for the pinned graphs only."""
        return None

    def of(self, variant: Variant) -> Graph | None:
        """Return the graph of a variant."""
        graph = self.pinned.whatever_is_pinned(variant)
        return graph and without(graph, None)


def blamed(
    error: InfeasibleBudgetError,
    room_nbytes: int,
    graph: Graph,
    least_without: Callable[[], int],
    needs: str = "the step needs",
) -> InfeasibleBudgetError:
    """Return the error, or one that names the pins if the budget can be met without them.

    **Arguments:** `room_nbytes` the budget less the margin; `graph` of the plain step; `least_without` returns the
    least peak without pins, in bytes; `needs` the subject and verb of the message.
    """
    if not graph.pins:
        return error
    free = least_without()
    if free > room_nbytes:
        error.args = (f"{error} {_AS_WRITTEN}",)
        return error
    costs = _costs(graph)
    named = [f"{origin} ({_more(nbytes)})" for origin, nbytes in costs[:MOST_NAMED]]
    rest = f" and {len(costs) - MOST_NAMED} more" if len(costs) > MOST_NAMED else ""
    least = error.min_peak_nbytes + error.budget_nbytes - room_nbytes
    return InfeasibleHintError(
        f"A budget of {format_nbytes(error.budget_nbytes)} cannot be met with these hints: "
        f"{', '.join(named)}{rest}. With them {needs} at least {format_nbytes(error.min_peak_nbytes)}, without "
        f"them {format_nbytes(free)}. In brackets: what each hint alone adds, by the model. "
        f"Remove one, or use a budget of at least {least_budget(least)}.",
        budget_nbytes=error.budget_nbytes,
        min_peak_nbytes=error.min_peak_nbytes,
        free_min_peak_nbytes=free,
        step_seconds=error.step_seconds,
        hints=tuple(origin for origin, _ in costs),
    )


def without(graph: Graph, origin: str | None) -> Graph:
    """Return the graph without the pins of one origin, None for all, cut into new stages."""
    pins = tuple(pin for pin in graph.pins if origin is not None and pin.origin != origin)
    graph = replace(graph, pins=pins)
    return replace(graph, stages=cut_stages(graph))


def _costs(graph: Graph) -> list[tuple[str, int]]:
    """Return each origin of pins with the bytes by which its pins raise the least peak, most first."""
    weight: dict[str, int] = {}
    for pin in graph.pins:
        nbytes = 0 if pin.action == "stage" else graph.values[pin.at].saved_nbytes
        weight[pin.origin] = weight.get(pin.origin, 0) + nbytes
    origins = sorted(weight, key=lambda origin: (-weight[origin], origin))
    now = _least(graph)
    found = {origin: now - _least(without(graph, origin)) for origin in origins[:MOST_TRIED]}
    return sorted(((origin, found.get(origin, 0)) for origin in origins), key=lambda each: -each[1])


def _least(graph: Graph) -> int:
    solvers = (MinCut(), RecomputeAll())
    schedules = [solver.solve(graph, None, time_limit=_TRY_SECONDS).schedule for solver in solvers]
    return min(simulate(graph, schedule).peak_nbytes for schedule in schedules)


def _more(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes > 0 else "nothing"
