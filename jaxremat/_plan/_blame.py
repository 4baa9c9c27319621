"""A budget that pins make infeasible -> an error that names them, with the least peak with and without them."""

from collections.abc import Callable
from dataclasses import replace

from .._model._graph import Graph
from .._model._simulate import simulate
from .._model._stages import cut_stages
from .._runtime._bytes import format_nbytes
from .._runtime._errors import InfeasibleBudgetError, InfeasibleHintError
from .._solver import MinCut, RecomputeAll

MOST_NAMED = 5
MOST_TRIED = 24
"""Hints that are left out one at a time to see what each costs, those of most bytes."""

_TRY_SECONDS = 1.0

_AS_WRITTEN = (
    "Where there are hints or `pins`, attention, rows and microbatches are done as they are written: without any, less "
    "may be enough."
)


def blamed(
    error: InfeasibleBudgetError,
    room_nbytes: int,
    graph: Graph,
    least_without: Callable[[], int],
    needs: str = "the step needs",
) -> InfeasibleBudgetError:
    """The error, or where the budget can be met without pins another that says so.

    **Arguments:** `room_nbytes` the budget less the margin; `graph` of the step, its loops as they are; `least_without`
    gives the least peak that is found without pins, in bytes; `needs` who needs what, in words.
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
        f"{', '.join(named)}{rest}. With them {needs} {format_nbytes(error.min_peak_nbytes)} at the least "
        f"that was found, without them {format_nbytes(free)}. In brackets is what each adds to that by itself, "
        f"by the model. Leave one out, or use a budget of at least {least} bytes ({format_nbytes(least)}).",
        budget_nbytes=error.budget_nbytes,
        min_peak_nbytes=error.min_peak_nbytes,
        free_min_peak_nbytes=free,
        step_seconds=error.step_seconds,
        hints=tuple(origin for origin, _ in costs),
    )


def without(graph: Graph, origin: str | None) -> Graph:
    """The graph without the pins from there, None for all, cut into stages afresh."""
    pins = tuple(pin for pin in graph.pins if origin is not None and pin.origin != origin)
    graph = replace(graph, pins=pins)
    return replace(graph, stages=cut_stages(graph))


def _costs(graph: Graph) -> list[tuple[str, int]]:
    """For who pins something the bytes by which the least peak is lower without that, most first."""
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
