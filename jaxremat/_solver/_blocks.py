"""The cheapest choice for all blocks of the forward pass (`_block_frontiers`): an allocation that spreads the budget.

It chooses one point of each block's frontier. While stage k runs, what later groups have saved is there:

    sum of saved bytes of the blocks of later groups  <=  budget - rest[k]        for every k, and for the forward pass

which is a knapsack with nested bounds, solved by dynamic programming from the last group to the first. `rest` is what
else the simulator finds at the stage's highest moment. It hangs on the choice, so that choosing and simulating go on
in turn. Where a later stage is a forward pass of its own (see `_later_passes`), its blocks have a knapsack to
themselves, bounded in that stage and those behind it; what the others have saved is of its rest, and the other way
round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._model._graph import Graph
from .._model._schedule import Schedule, close_over_dependencies
from .._model._simulate import Profile, rank, simulate
from ._block_frontiers import POINTS, blocks, frontier
from ._interface import Solution

STATES = 2000
"""Sums of saved bytes that the allocation tells apart."""

ROUNDS = 8
"""Choices that are simulated, at most."""

PROGRAMS_PER_SECOND = 40
"""Integer programs of blocks that a second of the time limit stands for: a count, so that no clock changes a plan."""

LEAST_POINTS = 2
"""Of a frontier, besides its ends, however many blocks there are."""

LEAST_SLACK = 0.002
"""The least memory may be exceeded by this share of what the plain step has live, for the sake of time."""


@dataclass(frozen=True)
class Blocks:
    """Blockwise frontiers and an allocation: for graphs that are too large for one integer program."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        allocation = _Allocation(graph, time_limit)
        if budget_nbytes is not None:
            return Solution(allocation.within(budget_nbytes), solver="blocks")
        least = allocation.least()
        plain = (
            simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes - graph.base_nbytes
        )
        budget = simulate(graph, least).peak_nbytes + int(LEAST_SLACK * plain)
        found = allocation.within(budget)
        return Solution(min((found, least), key=lambda s: rank(graph, s, budget)), solver="blocks")


class _Allocation:
    """Choices for all blocks of a graph."""

    def __init__(self, graph: Graph, time_limit: float):
        self.graph = graph
        self.blocks, self.shared = blocks(graph)
        distinct = len({block.program for block in self.blocks})
        points = int(time_limit / 2 * PROGRAMS_PER_SECOND / max(distinct, 1))
        points = min(max(points, LEAST_POINTS), POINTS)
        self.frontiers = [frontier(block, points) for block in self.blocks]
        self.passes = sorted({block.born for block in self.blocks})  # by the stage in which each runs

    def least(self) -> Schedule:
        """Return the schedule that saves least."""
        return self._schedule([len(points) - 1 for points in self.frontiers])

    def within(self, budget_nbytes: int) -> Schedule:
        """Return the cheapest choice found that fits; where none does, that of least memory."""
        graph = self.graph
        best = self.least()
        best_rank = rank(graph, best, budget_nbytes)
        chosen = [0] * len(self.blocks)
        rest = self._rest(chosen, simulate(graph, self._schedule(chosen)))
        room = budget_nbytes - graph.base_nbytes
        for i in range(ROUNDS):
            allowed = ([room - nbytes for nbytes in beside] for beside in rest)
            for born, bounds in zip(self.passes, allowed, strict=True):
                self._choose(born, bounds, chosen)
            schedule = self._schedule(chosen)
            profile = simulate(graph, schedule)
            found = rank(graph, schedule, budget_nbytes)
            settled = found[0] == 0 and found >= best_rank
            if found < best_rank:
                best, best_rank = schedule, found
            if settled:
                break
            measured = self._rest(chosen, profile)
            # What does not fit twice in a row is given the room of both.
            rest = [
                [max(a, b) for a, b in zip(*both, strict=True)] if found[0] and i else both[1]
                for both in zip(rest, measured, strict=True)
            ]
        return best

    def _schedule(self, chosen: Sequence[int]) -> Schedule:
        saved = set(self.shared)
        for block, points, i in zip(self.blocks, self.frontiers, chosen, strict=True):
            saved.update(block.values[place] for place in points[i].saved)
        return close_over_dependencies(self.graph, saved)

    def _rest(self, chosen: Sequence[int], profile: Profile) -> list[list[float]]:
        """Return for the blocks of each forward pass what is live at most in each stage, and last in the forward
        pass, besides what those of later groups (in the forward pass all) have saved; boundlessly little before
        they are made.
        """
        graph, count = self.graph, len(self.graph.stages)
        highest = [0] * (count + 1)
        for n, made_for, live_nbytes in zip(*profile.runs, strict=True):
            k = made_for if made_for >= 0 else graph.stage_of[n]
            highest[k] = max(highest[k], live_nbytes)
        found = []
        for born in self.passes:
            saved = [0] * count
            for block, points, i in zip(self.blocks, self.frontiers, chosen, strict=True):
                saved[block.group] += points[i].nbytes if block.born == born else 0
            later, beside = 0, [-math.inf] * (count + 1)
            for k in reversed(range(max(born, 0), count)):
                beside[k] = highest[k] - later
                later += saved[k]
            if born < 0:
                beside[count] = highest[count] - later
            found.append(beside)
        return found

    def _choose(self, born: int, allowed: Sequence[float], chosen: list[int]) -> None:
        """Choose, of the blocks of one forward pass, the points of least time whose saved bytes, added up from the last
        group on, are never above what each stage, and at the end the forward pass, allows; of least bytes where there
        are none.
        """
        own = [i for i, block in enumerate(self.blocks) if block.born == born]
        nbytes, seconds = np.zeros(1), np.zeros(1)
        total = sum(self.frontiers[i][0].nbytes for i in own)
        width = max(total / STATES, 1.0)
        steps: list[tuple[np.ndarray, np.ndarray]] = []  # by block, of each state that before and the point
        above = len(self.graph.stages)  # stages from here on are behind us

        def kept(limit: float) -> np.ndarray:
            fits = np.flatnonzero(nbytes <= limit)
            return fits if len(fits) else np.array([int(nbytes.argmin())])

        for i in own:
            points, group = self.frontiers[i], self.blocks[i].group
            before = np.arange(len(nbytes))
            if group < above:
                before = kept(min(allowed[group:above]))
                above = group
            sums = (nbytes[before, None] + [p.nbytes for p in points]).ravel()
            times = (seconds[before, None] + [p.seconds for p in points]).ravel()
            order = np.lexsort((times, sums))
            lowest = np.minimum.accumulate(times[order])
            order = order[np.concatenate([[True], lowest[1:] < lowest[:-1]])]
            bucket = (sums[order] / width).astype(int)
            ends = np.concatenate([bucket[1:] != bucket[:-1], [True]])
            ends[0] = True
            order = order[ends]
            steps.append((before[order // len(points)], order % len(points)))
            nbytes, seconds = sums[order], times[order]
        left = kept(min([allowed[-1], *allowed[:above]]))
        state = int(left[seconds[left].argmin()])
        for i, (before, point) in zip(reversed(own), reversed(steps), strict=True):
            chosen[i] = int(point[state])
            state = int(before[state])
