"""Checkpoints between segments of equal size: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

The backward pass handles one segment at a time: it recomputes the whole segment from the checkpoint at its beginning,
and keeps its values until they are read. With `n` stages of equal size, `sqrt(n)` segments need `O(sqrt(n))` memory for
at most one extra forward pass. If the budget leaves room, the segments nearest to the loss, whose residuals die first,
are saved whole.
"""

import math
from dataclasses import dataclass

from .._model._graph import Graph
from .._model._schedule import Schedule, close_over_dependencies
from .._model._simulate import rank
from ._frontiers import home_stages
from ._interface import Solution


@dataclass(frozen=True)
class Chen:
    """Checkpoints between segments of equal size (Chen et al., 2016).

    **Arguments:** `segments`: their number; None tries numbers around the square root of the number of stages (like the
    paper's budget search), and takes the cheapest that fits, or the one of least peak.
    """

    segments: int | None = None

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        total = max(len(graph.stages), 1)
        del time_limit  # the counts below bound the work
        root = math.isqrt(total)
        around = {max(1, min(round(root * 2 ** (i / 2)), total)) for i in range(-6, 7)}
        counts = (
            [self.segments] if self.segments else sorted(around, key=lambda count: (abs(count - root), count))
        )
        home = home_stages(graph)
        plain = close_over_dependencies(graph, graph.residuals)
        best: tuple[tuple[float, ...], Schedule] = (rank(graph, plain, budget_nbytes), plain)
        for count in counts:
            # Bisect the most segments at the end of the net that can be saved whole.
            low, high = -1, min(count, total)
            while high - low > 1:
                whole = (low + high) // 2 if low >= 0 else 0
                schedule = self._segmented(graph, home, min(count, total), whole)
                order = rank(graph, schedule, budget_nbytes)
                if order < best[0]:
                    best = (order, schedule)
                low, high = (whole, high) if order[0] == 0 else (low, whole)
        return Solution(best[1], solver="chen")

    @staticmethod
    def _segmented(graph: Graph, home: dict[int, int], count: int, whole: int) -> Schedule:
        weight = [0] * (len(graph.stages) + 1)
        for v, k in home.items():
            weight[k] += graph.values[v].saved_nbytes
        total, running = sum(weight) or 1, 0
        segment_of, first_of = [], {}
        for k in range(len(graph.stages)):
            segment = min(count * running // total, count - 1)
            running += weight[k]
            segment_of.append(segment)
            first_of.setdefault(segment, k)
        saved, kept = {v for v, k in home.items() if segment_of[k] < whole}, set()
        for v in graph.residuals:
            for u in graph.reads[graph.values[v].producer]:
                if u in home and segment_of[home[u]] != segment_of[home[v]]:
                    saved.add(u)
        for v, k in home.items():
            kept.update((v, j) for j in range(first_of[segment_of[k]] + 1, k + 1))
        return close_over_dependencies(graph, saved, kept)
