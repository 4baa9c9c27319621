"""A ratio of saved bytes -> schedule: the rule of torch.compile's `activation_memory_budget`, on this library's graph.

In torch/_functorch/partitioners.py, a knapsack chooses which of the expensive activations to save: it maximises the sum
of their run times, subject to the sum of their bytes being at most a ratio of all. Each value is priced as if its
operands were always in memory, and the values that a stage of the backward pass holds while it recomputes do not count.
So a ratio does not determine the step's peak; to meet a budget, one tries ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxremat import Graph, Schedule, Solution, close_over_dependencies, simulate

STEPS = 10_000
"""Bytes are counted in this many units, as torch's dynamic programme counts them."""

RATIOS = tuple(ratio / 20 for ratio in range(20, -1, -1))
"""The ratios tried for a budget."""


@dataclass(frozen=True)
class Knapsack:
    """Saves by a knapsack over single values.

    **Arguments:** `ratio` of the bytes of all activations to save; None for the largest of `RATIOS` whose simulated
    peak is within the budget, as somebody would find it who tries them one after the other.
    """

    ratio: float | None = None

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        """One schedule for one ratio: there is nothing to bound and nothing to search. `time_limit` is not needed."""
        del time_limit
        least: tuple[int, Schedule] | None = None
        for ratio in RATIOS if self.ratio is None else (self.ratio,):
            schedule = close_over_dependencies(graph, chosen(graph, ratio))
            peak = simulate(graph, schedule).peak_nbytes
            if budget_nbytes is not None and peak <= budget_nbytes:
                return Solution(schedule, solver="knapsack")
            if least is None or peak < least[0]:
                least = peak, schedule
        assert least is not None
        return Solution(least[1], solver="knapsack")


def chosen(graph: Graph, ratio: float) -> list[int]:
    """The residuals that the knapsack saves.

    maximise  sum_v seconds(v) s_v    subject to    sum_v nbytes(v) s_v <= ratio sum_v nbytes(v),    s_v in {0, 1}
    """
    values = [v for v in graph.residuals if graph.recomputable(v)]
    nbytes = np.array([graph.values[v].nbytes for v in values], float)
    worth = np.array([graph.nodes[graph.values[v].producer].seconds for v in values])
    units = np.ceil(nbytes * (STEPS / max(nbytes.sum(), 1.0))).astype(int)
    room = units.sum() if ratio >= 1 else int(ratio * STEPS)
    best = np.zeros(room + 1)  # seconds saved within so many units by the values so far
    taken = np.zeros((len(values), room + 1), bool)
    for i, (size, seconds) in enumerate(zip(units, worth, strict=True)):
        if size > room:
            continue
        with_it = best[: room + 1 - size] + seconds
        taken[i, size:] = with_it > best[size:]
        best[size:] = np.maximum(best[size:], with_it)
    left, saved = room, []
    for i in reversed(range(len(values))):
        if taken[i, left]:
            saved.append(values[i])
            left -= units[i]
    return saved
