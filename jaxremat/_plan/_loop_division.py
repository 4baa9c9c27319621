"""Schedule of a form of a step -> the share of a loop's iterations that would rather have another schedule.

All iterations of a loop have one schedule, so that what it saves jumps by a value of every iteration at once, and a
budget between two schedules is not used up. As two loops (see `_loop_levels`), one takes the cheaper schedule and the
other the smaller one: seconds and bytes lie on the line between the two, which are the ends of an edge of the convex
hull of memory against time (`_solver._hull`).

The iteration that the backward pass comes to first needs no memory to save what it would recompute at once: it is a
part of its own, and that saves what it would take to recompute it.
"""

from math import ceil
from typing import NamedTuple

from .._model._graph import Graph
from .._model._schedule import Schedule
from .._model._simulate import extra_seconds, simulate
from .._solver import MinCut, Solution, Solver
from .._solver._hull import Priced, edge

TIME_SHARE = 0.25
"""Share of a solve's time limit for finding the edge."""

MULTIPLES = (1, 2, 4)
"""How many iterations may have the larger schedule, or one between the two: so many times those that the edge has."""


class Uneven(NamedTuple):
    """**Fields:** `pair` the number of the loop among the graph's pairs; `share` of its iterations that have the
    smaller schedule; `seconds` that the step then takes longer than the plain one, if its memory is linear in between
    and the last iteration recomputes nothing.
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
    now = extra_seconds(graph, solution.schedule)
    again = [_again(graph, solution.schedule, loop) / graph.loop_lengths[loop] for loop in graph.pairs]
    pair = max(range(len(again)), key=again.__getitem__)
    whole = Uneven(pair, 1.0, now - again[pair]) if again[pair] > 0 else None
    priced = solver if isinstance(solver, Priced) else MinCut()
    ends = edge(graph, priced, solution, budget_nbytes, TIME_SHARE * time_limit)
    if ends is None:
        return whole
    high, low = ends
    if high.peak_nbytes == low.peak_nbytes:
        return whole
    assert high.solution is not None and low.solution is not None
    share = (high.peak_nbytes - budget_nbytes) / (high.peak_nbytes - low.peak_nbytes)
    stacked = _stacked(graph, high.solution.schedule), _stacked(graph, low.solution.schedule)
    fewer = [more - less for more, less in zip(*stacked, strict=True)]
    pair = max(range(len(fewer)), key=fewer.__getitem__)
    length = graph.loop_lengths[graph.pairs[pair]]
    room, larger = budget_nbytes - low.peak_nbytes, length - ceil(share * length)
    found = [] if whole is None else [whole]
    # Of what few iterations leave over, more of them that save less may have a use.
    numbers = {min(max(times * larger, 2), length - 2) for times in MULTIPLES}
    for n in sorted(numbers if fewer[pair] > 0 and length > 3 else ()):
        wanted = low.peak_nbytes + room * length // n
        solved = solver.solve(graph, wanted, time_limit=TIME_SHARE * time_limit)
        seconds = low.seconds + n / length * (extra_seconds(graph, solved.schedule) - low.seconds)
        if seconds < now and simulate(graph, solved.schedule).peak_nbytes <= wanted:
            found.append(Uneven(pair, 1 - n / length, seconds - again[pair]))
    return min(found, key=lambda each: each.seconds, default=None)


def _again(graph: Graph, schedule: Schedule, loop: int) -> float:
    """The seconds of what a schedule recomputes, and need not, for the backward loop of this forward loop's pair."""
    wanted = graph.pinned["recompute"]
    return sum(
        graph.nodes[n].seconds
        for stage, nodes in zip(graph.stages, schedule.recomputed, strict=True)
        if graph.repeats(graph.nodes[stage.start].loop, loop)
        for n in nodes
        if graph.nodes[n].loop == loop and wanted.isdisjoint(graph.nodes[n].outputs)
    )


def _stacked(graph: Graph, schedule: Schedule) -> list[int]:
    """By pair the bytes that a schedule saves in its forward loop."""
    loops = [graph.nodes[graph.values[v].producer].loop for v in schedule.saved]
    nbytes = [graph.values[v].saved_nbytes for v in schedule.saved]
    return [sum(n for n, loop in zip(nbytes, loops, strict=True) if loop == pair) for pair in graph.pairs]
