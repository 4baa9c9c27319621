"""What was found where nothing fits, or only what is expensive -> what to say of it: what is true, and what to
write.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .._model._graph import Graph
from .._model._optimizer_updates import updated_alone
from .._model._schedule import Schedule
from .._model._simulate import simulate
from .._runtime._bytes import Budget, format_nbytes
from .._runtime._errors import InfeasibleBudgetError
from ._baseline import Baseline
from ._effort import Effort
from ._search import MOST_OVERHEAD, Search
from ._trial import Trial

SMALL_NBYTES = 2**20
"""Of steps with smaller temporaries, what the compiler adds for itself is a large part."""


WORTH = 0.1
"""Moving less of the arguments to host memory is not worth a word."""


class Least(NamedTuple):
    """The least memory that was found.

    **Fields:** `peak_nbytes`, and `how` that is known; the `schedule` of a `graph` that needs it; the `trial` in which
    it was compiled, None where it was not, or is of the step as it is written.
    """

    peak_nbytes: int
    how: str
    graph: Graph
    schedule: Schedule
    trial: Trial | None = None


def compiled(trials: Sequence[Trial], baseline: Baseline) -> Least:
    """Of these trials, or of the step as it is written where that needs less."""
    trial = min(trials, key=lambda t: t.peak_nbytes)
    least = Least(
        trial.peak_nbytes,
        f"compiled, the least of {len(trials)} plans",
        trial.graph,
        trial.solution.schedule,
        trial,
    )
    if baseline.problem.must_plan or baseline.peak_nbytes >= trial.peak_nbytes:
        return least
    how = f"compiled, as it is written: none of {len(trials)} plans needs less"
    return least._replace(peak_nbytes=baseline.peak_nbytes, how=how, trial=None)


def predicted(graph: Graph, schedule: Schedule) -> Least:
    """Of a schedule that is not compiled."""
    return Least(simulate(graph, schedule).peak_nbytes, "predicted", graph, schedule)


def infeasible(
    asked: Budget, budget: int, margin_nbytes: int, least: Least, *, temporaries_nbytes: int, effort: Effort
) -> InfeasibleBudgetError:
    """That nothing fits.

    **Arguments:** the budget as it was `asked` for, and without the margin; `temporaries_nbytes` of the step as it is
    written; `effort` that the search took.
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
        f"`optimize({asked!r})` cannot be met: with the least memory found, the step still needs "
        f"{format_nbytes(least.peak_nbytes)} ({least.how}), at {node.primitive} ({node.source or node.scope}): "
        f"arguments and outputs {format_nbytes(graph.base_nbytes)}, live values {format_nbytes(event.live_nbytes)}, "
        f"the largest {largest or 'none'}. "
        f"Use a budget of at least {enough} bytes ({format_nbytes(enough)}), or a smaller batch."
        + _ended(effort)
        + _movable(graph)
        + (
            f" With {format_nbytes(temporaries_nbytes)} of temporaries the step is too small to plan well: at this "
            "size it matters most what the compiler adds for itself."
            if temporaries_nbytes < SMALL_NBYTES
            else ""
        ),
        budget_nbytes=budget + margin_nbytes,
        min_peak_nbytes=least.peak_nbytes,
        step_seconds=graph.step_seconds,
    )


def _ended(effort: Effort) -> str:
    """Return what to say of a search that ended before it had tried all that it would have."""
    if effort.stopwatch.interrupted:
        return " The clock cut planning short: a larger `planning_seconds` may find less."
    if effort.exhausted:
        return f' The search ended after {effort}: `effort="thorough"` may find less.'
    return ""


def _movable(graph: Graph) -> str:
    """What to say of arguments that host memory could hold; "" where they are not worth it."""
    updated = sum(graph.values[v].nbytes for v in updated_alone(graph))
    if graph.platform != "gpu" or updated < WORTH * graph.base_nbytes:
        return ""
    return (
        f" {format_nbytes(updated)} of the arguments are read to be updated alone, as an optimizer's state is. In the "
        "host's memory they take none of the device's: `optimize(..., offload=True)` puts them there, or "
        "`opt_state = jaxremat.to_host(opt_state)`."
    )


def slow(search: Search, trial: Trial) -> str:
    """What to say of a plan that takes several times as long as the plain step; "" of others."""
    step = search.graph.step_seconds or 1.0
    if trial.seconds <= MOST_OVERHEAD * step:
        return ""
    times = 1 + trial.seconds / step
    said = f"the cheapest plan found within this budget takes {times:.1f} times the plain step's time."
    cheaper = [t for t in search.trials if t.seconds <= MOST_OVERHEAD * step]
    if not cheaper:
        return f"{said} Use a larger budget, or a smaller batch."
    near = min(cheaper, key=lambda t: t.peak_nbytes)
    return (
        f"{said} It is {1 + near.seconds / step:.1f} times with {near.peak_nbytes} bytes "
        f"({format_nbytes(near.peak_nbytes)}): use that budget, or a smaller batch."
    )
