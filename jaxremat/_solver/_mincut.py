"""The Lagrangian frontier: with a price per byte saved, the best set of saved residuals is a minimum cut.

For a price `p` (seconds per byte) minimise `sum_recomputed seconds(n) + p * sum_saved nbytes(v)`. Let `y_n = 1` if node
`n` is recomputed and `z_v = 1` if `v` is required, by a stage or by a recomputed node. The energy

    sum_n seconds(n) y_n + p sum_v nbytes(v) z_v (1 - y_producer(v)),    y_n <= z_v for every v that n reads,

is submodular, hence a cut: `source -> y_n` of capacity `seconds(n)`, `y_producer(v) -> z_v` of capacity `p nbytes(v)`,
`z_v -> y_n` infinite for every `v` that `n` reads, `z_v -> sink` infinite where a stage reads `v`. Sweeping the price
gives the convex hull of bytes saved against seconds (Everett's method).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from .._model._graph import Graph
from .._model._schedule import Schedule, close_over_dependencies, must_save
from .._model._simulate import Profile, extra_seconds, rank, simulate
from ._hull import Lagrangian
from ._interface import Solution

_INFINITE = 2**30
_SCALE = 2**20

PRICES = -32, 33
"""Quarters of powers of two, in units in which all bytes cost as much as all seconds."""


@dataclass(frozen=True)
class MinCut:
    """The cheapest minimum cut that fits. **Arguments:** `rounds`: bisection steps on the price of a byte."""

    rounds: int = 18

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        del time_limit  # `rounds` bounds the work
        cuts = _Cuts(graph)
        free = cuts.at(0.0)
        if not cuts.residuals or (budget_nbytes is not None and free[1].peak_nbytes <= budget_nbytes):
            return Solution(free[0], solver="mincut")
        points = [free]
        low, high = -24.0, 8.0  # log2 of the price, in units where all bytes cost as much as all seconds
        for _ in range(self.rounds):
            middle = (low + high) / 2
            point = cuts.at(2.0**middle)
            points.append(point)
            if budget_nbytes is not None and point[1].peak_nbytes <= budget_nbytes:
                high = middle
            else:
                low = middle
        best = min((schedule for schedule, _ in points), key=lambda s: rank(graph, s, budget_nbytes))
        return Solution(best, solver="mincut")

    def priced(self, graph: Graph, price: float, start: Schedule, *, time_limit: float) -> Solution:
        """Return a schedule with small seconds + price x peak, without a bound; see `_hull.Priced`.

        The saved bytes replace the peak, which they dominate where recomputation is worthwhile.
        """
        cuts, lagrangian = _Cuts(graph), Lagrangian(graph, price)
        seconds = sum(graph.nodes[n].seconds for n in cuts.producers)
        unit = seconds / (sum(graph.values[v].saved_nbytes for v in cuts.residuals) or 1)
        found = [start] + [cuts.at(scale * price / (unit or 1.0))[0] for scale in (0.5, 1.0, 2.0)]
        return Solution(min(found, key=lagrangian.order), solver="mincut")


def fewest_saved(graph: Graph, banned: frozenset[int]) -> Schedule:
    """Return the schedule that saves the fewest bytes without running any of the banned nodes again."""
    # A banned node costs more than all bytes together, so no minimum cut recomputes it.
    dear = 1.0 + sum(n.seconds for n in graph.nodes)
    nodes = (replace(n, seconds=dear) if n.id in banned else n for n in graph.nodes)
    cuts = _Cuts(replace(graph, nodes=tuple(nodes)))
    return cuts.at(1 / (2 * max(len(banned), 1)))[0]


def saving_less(graph: Graph, schedule: Schedule) -> list[Schedule]:
    """Return ever slower schedules with subsets of this one's saved values: those that minimum cuts still save as the
    price of a byte rises.
    """
    cuts, found = _Cuts(graph), [schedule]
    for power in range(*PRICES):
        saved = schedule.saved & cuts.at(2.0 ** (power / 4))[0].saved
        less = close_over_dependencies(graph, saved, schedule.kept, schedule.away & saved)
        if extra_seconds(graph, less) > extra_seconds(graph, found[-1]):
            found.append(less)
    return found[1:]


class _Cuts:
    def __init__(self, graph: Graph):
        self.graph = graph
        fixed = must_save(graph)
        self.residuals = [v for v in graph.residuals if v not in fixed]
        self.producers = sorted({graph.values[v].producer for v in self.residuals})

    @cached_property
    def _skeleton(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
        """The edges (from, to, constant capacity, capacity per unit of price)."""
        graph, values = self.graph, self.residuals
        producers = self.producers
        y = {n: 2 + i for i, n in enumerate(producers)}
        z = {v: 2 + len(y) + i for i, v in enumerate(values)}
        uses: dict[int, int] = {}
        for k in range(len(graph.stages)):
            for v in graph.needs(k):
                uses[v] = uses.get(v, 0) + 1
        seconds = {n: graph.nodes[n].seconds for n in producers}
        scale_seconds = _SCALE / (sum(seconds.values()) or 1.0)
        scale_bytes = _SCALE / (sum(graph.values[v].saved_nbytes for v in values) or 1)
        edges: list[tuple[int, int, float, float]] = []
        for n in producers:
            times = max([1, *(uses.get(v, 0) for v in graph.nodes[n].outputs)])
            edges.append((0, y[n], times * seconds[n] * scale_seconds + 1e-3, 0.0))
            edges.extend((z[u], y[n], _INFINITE, 0.0) for u in graph.reads[n] if u in z)
        for v in values:
            value = graph.values[v]
            if v in graph.pinned["recompute"]:
                edges.append((y[value.producer], z[v], _INFINITE, 0.0))
            # The infinite edge above recomputes pinned values at any price, whatever saving them would cost.
            stacking = value.saved_seconds * scale_seconds
            edges.append((y[value.producer], z[v], stacking, value.saved_nbytes * scale_bytes))
            if v in uses:
                edges.append((z[v], 1, _INFINITE, 0.0))
        array = np.array(edges, dtype=float).reshape(-1, 4)
        return (
            array[:, 0].astype(np.int32),
            array[:, 1].astype(np.int32),
            array[:, 2],
            array[:, 3],
            2 + len(y) + len(z),
        )

    def at(self, price: float) -> tuple[Schedule, Profile]:
        """Return the best schedule at this price, and its profile."""
        graph = self.graph
        if not self.residuals or price == 0.0:
            schedule = close_over_dependencies(graph, graph.residuals)
            return schedule, simulate(graph, schedule)
        tails, heads, constant, per_price, size = self._skeleton
        capacity = np.minimum(np.ceil(16 * (constant + price * per_price)), _INFINITE).astype(np.int32)
        network = coo_array((capacity, (tails, heads)), shape=(size, size)).tocsr()
        flow = maximum_flow(network, 0, 1).flow
        residual = network - flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        reached = set(breadth_first_order(residual, 0, return_predecessors=False).tolist())
        dropped = {n for i, n in enumerate(self.producers) if 2 + i not in reached}
        schedule = close_over_dependencies(
            graph, (v for v in self.residuals if graph.values[v].producer not in dropped)
        )
        return schedule, simulate(graph, schedule)
