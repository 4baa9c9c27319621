"""Graph -> the stage to which each residual belongs, and the residuals that stages hand on to one another."""

from itertools import pairwise

from .._model._graph import Graph
from .._model._schedule import Schedule, close_over_dependencies
from .._model._simulate import rank

MOST_HELD = 300
"""The most values that `hold` tries: each is a simulation, of some milliseconds."""


def home_stages(graph: Graph) -> dict[int, int]:
    """Return for each residual the first stage that reads it, directly or to recompute another value.

    A residual that only recomputation reads belongs to the last stage among its readers' homes.
    """
    home: dict[int, int] = {}
    for k in range(len(graph.stages)):
        for v in graph.needs(k):
            home.setdefault(v, k)
    readers: dict[int, list[int]] = {}
    for v in graph.residuals:
        node = graph.nodes[graph.values[v].producer]
        for u in graph.reads[node.id]:
            readers.setdefault(u, []).append(v)
    for v in reversed(graph.residuals):
        if v not in home:
            home[v] = max((home[w] for w in readers.get(v, ()) if w in home), default=0)
    return home


def boundaries(graph: Graph) -> dict[int, int]:
    """Return the residuals from which an earlier stage's own residuals are recomputed, with the first such stage."""
    home = home_stages(graph)
    first: dict[int, int] = {}
    for v in graph.residuals:
        node = graph.nodes[graph.values[v].producer]
        for u in graph.reads[node.id]:
            if u in home and home[u] > home[v]:
                first[u] = min(first.get(u, home[v]), home[v])
    return first


def hold(graph: Graph, schedule: Schedule, budget_nbytes: int) -> Schedule:
    """Return the schedule, or a faster one that also fits and hands recomputed values on from stage to stage.

    Tries the values that two consecutive stages recompute one by one, the most expensive first.
    """
    best, best_rank = schedule, rank(graph, schedule, budget_nbytes)
    repeated = [
        (graph.nodes[n].seconds, v, k, n)
        for k in range(1, len(graph.stages))
        for n in set(schedule.recomputed[k - 1]).intersection(schedule.recomputed[k])
        for v in graph.nodes[n].outputs
        if v not in schedule.saved and graph.values[v].materialised
    ]
    for _, v, k, n in sorted(repeated, reverse=True)[:MOST_HELD]:
        if n not in best.recomputed[k]:  # no node reads it in this stage any more
            continue
        tried = close_over_dependencies(graph, schedule.saved, best.kept | {(v, k)}, schedule.away)
        tried_rank = rank(graph, tried, budget_nbytes)
        if tried_rank < best_rank:
            best, best_rank = tried, tried_rank
    return best


def holdable(graph: Graph) -> frozenset[tuple[int, int]]:
    """Return every recomputable value with every stage that it could be handed on to."""
    stages = range(1, len(graph.stages))
    values = [v for v in graph.residuals if graph.recomputable(v)]
    return frozenset((v, k) for v in values for k in stages if graph.holdable(v, k))


def repeated_seconds(graph: Graph, schedule: Schedule) -> float:
    """Return the seconds of nodes that two consecutive stages recompute, which keeping their values would save."""
    rows = pairwise(schedule.recomputed)
    return sum(graph.nodes[n].seconds for before, after in rows for n in set(before) & set(after))
