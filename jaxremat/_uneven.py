"""Schedule of a form of a step -> the share of a loop's iterations that would rather have another schedule.

All iterations of a loop have one schedule, so that what it saves jumps by a value of every iteration at once, and a
budget between two schedules is not used up. As two loops (see `_levels`), one takes the cheaper schedule and the other
the smaller one: seconds and bytes lie on the line between the two, which are the ends of an edge of the convex hull of
memory against time (`_solver._hull`).
"""

from typing import NamedTuple

from ._graph import Graph
from ._schedule import Schedule
from ._simulate import extra_seconds
from ._solver import MinCut, Solution, Solver
from ._solver._hull import Priced, edge

TIME_SHARE = 0.25
"""Share of a solve's time limit for finding the edge."""


class Uneven(NamedTuple):
    """**Fields:** `pair` the number of the loop among the graph's pairs; `share` of its iterations that have the
    smaller schedule; `seconds` that the step then takes longer than the plain one, if its memory is linear in between.
    """

    pair: int
    share: float
    seconds: float


def uneven(
    graph: Graph, solution: Solution, budget_nbytes: int, solver: Solver, time_limit: float
) -> Uneven | None:
    """What a step may gain by treating iterations of one loop in two ways; None where it is nothing.

    **Arguments:** `solution` within the budget.
    """
    if not graph.pairs:
        return None
    priced = solver if isinstance(solver, Priced) else MinCut()
    ends = edge(graph, priced, solution, budget_nbytes, TIME_SHARE * time_limit)
    if ends is None:
        return None
    high, low = ends
    assert high.solution is not None and low.solution is not None
    share = (high.peak_nbytes - budget_nbytes) / (high.peak_nbytes - low.peak_nbytes)
    seconds = high.seconds + share * (low.seconds - high.seconds)
    stacked = _stacked(graph, high.solution.schedule), _stacked(graph, low.solution.schedule)
    fewer = [more - less for more, less in zip(*stacked, strict=True)]
    pair = max(range(len(fewer)), key=fewer.__getitem__)
    if fewer[pair] <= 0 or seconds >= extra_seconds(graph, solution.schedule):
        return None
    return Uneven(pair, share, seconds)


def _stacked(graph: Graph, schedule: Schedule) -> list[int]:
    """By pair the bytes that a schedule saves in its forward loop."""
    loops = [graph.nodes[graph.values[v].producer].loop for v in schedule.saved]
    nbytes = [graph.values[v].saved_nbytes for v in schedule.saved]
    return [sum(n for n, loop in zip(nbytes, loops, strict=True) if loop == pair) for pair in graph.pairs]
