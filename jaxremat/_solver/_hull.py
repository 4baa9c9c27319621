"""Graphs, a price per byte -> the convex hull of memory against time, one vertex for each solve.

With a price `p` (seconds per byte of the peak) instead of a budget, the problem is `L(p) = min seconds + p peak`. Its
solution is a vertex of the lower convex hull of all (peak, seconds), and it bounds every schedule at once: `seconds >=
L(p) - p peak`. A vertex is the optimum for the budget equal to its peak, so that budget needs no separate solve. The
hull is found edge by edge (Aneja and Nair 1979): the price at which both ends of an edge cost the same yields either a
vertex below the edge or the proof that there is none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from .._model._graph import Graph
from .._model._schedule import Schedule, close_over_dependencies
from .._model._simulate import simulate
from ._interface import Solution


@runtime_checkable
class Priced(Protocol):
    """A solver that also finds vertices of the hull."""

    def priced(self, graph: Graph, price: float, start: Schedule, *, time_limit: float) -> Solution:
        """Return the schedule of least `extra_seconds + price x peak_nbytes`, never worse than `start`.

        **Arguments:** `price` in seconds per byte; `start` a schedule of the graph; `time_limit` in seconds.

        **Returns:** a solution whose `lower_bound` bounds that sum, divided by the step's seconds.
        """
        ...


@dataclass(frozen=True)
class Lagrangian:
    """The cost of a graph's schedules if each byte of the peak has a price."""

    graph: Graph
    price: float

    def order(self, schedule: Schedule) -> tuple[float, ...]:
        """Return the rank in the form of `_simulate.rank`: less is better."""
        profile = simulate(self.graph, schedule)
        return (0.0, profile.extra_seconds + self.price * profile.peak_nbytes)


class Vertex(NamedTuple):
    """A schedule by its predicted peak and seconds, with its graph and solution, or None if unknown."""

    peak_nbytes: int
    seconds: float
    graph: Graph | None = None
    solution: Solution | None = None

    def at(self, price: float) -> float:
        """Return its cost at a price of a byte."""
        return self.seconds + price * self.peak_nbytes


class Bound(NamedTuple):
    """For every schedule: extra seconds >= `seconds` - `price` x peak in bytes."""

    price: float
    seconds: float


def vertex(graph: Graph, solution: Solution) -> Vertex:
    """Return a solution with its simulated peak and seconds."""
    profile = simulate(graph, solution.schedule)
    return Vertex(profile.peak_nbytes, profile.extra_seconds, graph, solution)


def cheapest(
    graphs: Sequence[Graph], solver: Priced, price: float, starts: Sequence[Vertex], time_limit: float
) -> tuple[Vertex, Bound]:
    """Return the best schedule of several cuttings of a step at a price, and the bound over all of them."""
    found, bounds = [], []
    for graph in graphs:
        own = [v.solution.schedule for v in starts if v.graph is graph and v.solution is not None]
        own.append(close_over_dependencies(graph, graph.residuals))
        start = min(own, key=Lagrangian(graph, price).order)
        solution = solver.priced(graph, price, start, time_limit=time_limit)
        found.append(vertex(graph, solution))
        bounds.append(solution.lower_bound * (graph.step_seconds or 1.0))
    return min(found, key=lambda v: v.at(price)), Bound(price, min(bounds))


def improves(found: Vertex, edge: tuple[Vertex, Vertex], price: float) -> bool:
    """Return whether a vertex lies between the ends of an edge, and below it by more than rounding."""
    high, low = edge
    within = low.peak_nbytes < found.peak_nbytes < high.peak_nbytes
    return within and found.at(price) < min(high.at(price), low.at(price)) * (1 - 1e-9)


def hull(
    ends: tuple[Vertex, Vertex],
    at: Callable[[float, tuple[Vertex, Vertex]], tuple[Vertex, Bound]],
    most: int,
) -> tuple[list[Vertex], list[Bound]]:
    """Return the vertices between two ends, by falling peak, and the bounds proven in the process.

    **Arguments:** `ends` the plain step and the schedule of least peak; `at` returns the best schedule at a price,
    below an edge; `most` solves, spent on the edges with the largest area below them.
    """
    known = sorted(ends, key=lambda v: (-v.peak_nbytes, v.seconds))
    bounds: list[Bound] = []
    closed: set[tuple[tuple[float, ...], ...]] = set()
    for _ in range(most):
        edges = [
            ((a.peak_nbytes - b.peak_nbytes) * (b.seconds - a.seconds), i)
            for i, (a, b) in enumerate(pairwise(known))
            if a.peak_nbytes > b.peak_nbytes and b.seconds > a.seconds and (a[:2], b[:2]) not in closed
        ]
        if not edges:
            break
        i = max(edges)[1]
        edge = a, b = known[i], known[i + 1]
        price = (b.seconds - a.seconds) / (a.peak_nbytes - b.peak_nbytes)
        found, bound = at(price, edge)
        bounds.append(bound)
        if improves(found, edge, price):
            known.insert(i + 1, found)
        else:
            # No vertex lies below this edge: do not spend another solve on it.
            closed.add((a[:2], b[:2]))
    return known, bounds
