"""Graph -> blocks of residuals and the frontier of each; blocks + budget -> the cheapest combination of their points.

Invariant: blocks with equal integer programs share one frontier, whatever ids their values have. A net of a thousand
equal layers has only a few programs.

Stages with few bytes between them form *groups*. A value that several groups read is saved, or is a block by itself if
it can be recomputed from saved values. The other residuals of a group, those of each forward pass separately, are cut
into *blocks* at places that few bytes cross. For each block, the frontier consists of solutions of

    minimise    sum seconds(n) r[n,k] + sum saved_seconds(v) s[v]
    subject to  s[v] + r[prod(v),k] >= 1                   stage k, or a later block of it, reads v
                r[n,k] <= s[u] + r[prod(u),k]              n reads u, a value of the block
                sum saved_nbytes(v) s[v] <= nbytes         for falling nbytes

with s[v] if v is saved and r[n,k] if n runs again for stage k: by enumeration for small blocks, otherwise as an integer
program (HiGHS).

An allocation then chooses one point of each block's frontier. While stage k runs, the saved values of later groups are
in memory:

    sum of saved bytes of the blocks of later groups  <=  budget - rest[k]        for every k, and for the forward pass

This is a knapsack with nested bounds, solved by dynamic programming from the last group to the first. `rest` is all
other memory at the stage's highest moment, by the simulator. It depends on the choice, so choosing and simulating
alternate. If a later stage contains another forward pass (see `_later_passes`), its blocks have a separate knapsack,
bounded in that stage and those after it; the saved values of the other passes are part of its `rest`, and vice versa.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from .._model._graph import Graph
from .._model._later_passes import LaterPass, later_passes, made_later
from .._model._schedule import Schedule, close_over_dependencies, must_save
from .._model._simulate import Profile, rank, simulate
from ._interface import Solution

LEAST_VALUES, MOST_VALUES = 8, 32
"""The fewest and the most residuals of a block."""

LITTLE = 0.1
"""Groups may have this share of an average stage's residuals between them."""

MOST_STAGES = 6
LEAST_GROUPS = 8
"""The most stages of a group, and the fewest groups, if there are as many stages."""

MOST_ENUMERATED = 14
"""Values of a block up to which all choices are enumerated: with 8 that takes a millisecond, with 14 ten, while the
integer programs of a frontier take a hundred.
"""

POINTS = 16
"""The most points of a frontier."""

MOST_NODES = 1000
"""Branch-and-bound nodes for each point: most need one."""

MOST_FOUND = 4096
"""The most frontiers in the cache."""


@dataclass(frozen=True)
class Block:
    """Residuals of one group of stages that are chosen together.

    **Fields:** `group` its first stage; `born` the stage in which its values are computed, -1 for the first forward
    pass; `values` in order; `program` the integer program without ids: for each producer its seconds, the values of the
    block that it reads (as places in `values`), the stages, counted from the group's first, that may run it again, and
    its results as (place, saved bytes, saved seconds, stages that want it); infinite seconds forbid saving a value.
    """

    group: int
    born: int
    values: tuple[int, ...]
    program: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """A choice for a block: `saved` places in `values`, their bytes, and seconds."""

    nbytes: int
    seconds: float
    saved: tuple[int, ...]


def blocks(graph: Graph) -> tuple[list[Block], frozenset[int]]:
    """Return the blocks of all groups, the last group's first; and further residuals that are saved."""
    fixed = must_save(graph)
    passes = later_passes(graph)
    first = _groups(graph, fixed, passes)
    read: dict[int, set[int]] = {}
    for k in range(len(graph.stages)):
        for v in graph.needs(k):
            read.setdefault(v, set()).add(k)
    wanted = {v: set(stages) for v, stages in read.items()}
    made = {v: graph.values[v].producer for v in graph.residuals}
    born = {v: graph.stage_of[n] if made_later(passes, n) else -1 for v, n in made.items()}
    own: dict[tuple[int, int], list[int]] = {}  # by group and pass
    shared: dict[int, set[int]] = {}  # with the stages that want it
    for v in reversed(graph.residuals):
        stages = wanted.get(v, set())
        groups = {first[k] for k in stages}
        if v in fixed or not stages:
            continue
        if len(groups) > 1:
            shared[v] = stages
            continue
        own.setdefault((groups.pop(), born[v]), []).append(v)
        for u in graph.reads[graph.values[v].producer]:
            # Recomputing v in these stages reads u there; hence the order from last to first.
            wanted.setdefault(u, set()).update(stages)
    found = [block for at, values in own.items() for block in _cut(graph, *at, values[::-1], read, wanted)]
    kept: set[int] = set()
    for v, stages in sorted(shared.items()):
        if all(u in fixed or u in kept for u in graph.reads[graph.values[v].producer]):
            found.append(_block(graph, max(first[k] for k in stages), born[v], (v,), shared, [stages]))
        else:
            kept.add(v)
    return sorted(found, key=lambda block: -block.group), frozenset(kept)


def _groups(graph: Graph, fixed: Collection[int], passes: Sequence[LaterPass]) -> list[int]:
    """Return the first stage of each stage's group, which lies within one backward pass."""
    count = len(graph.stages)
    read = {v for k in range(count) for v in graph.needs(k)}
    begun: dict[int, int] = {}
    last: dict[int, int] = {}
    for k in range(count):
        stack = list(graph.needs(k))
        needed = set(stack)
        while stack:
            v = stack.pop()
            known = last.get(v) == k
            begun.setdefault(v, k)
            last[v] = k
            # A stage recomputes its residuals from the nearest earlier values that other stages read themselves.
            if not known and (v in needed or v not in read) and v not in fixed and graph.is_residual(v):
                stack.extend(graph.reads[graph.values[v].producer])
    across = np.zeros(count + 1, dtype=np.int64)  # bytes wanted by stages on both sides of a stage's start
    free = [v for v in begun if v not in fixed]
    for v in free:
        across[begun[v] + 1] += graph.values[v].saved_nbytes
        across[last[v] + 1] -= graph.values[v].saved_nbytes
    across = np.cumsum(across)
    little = LITTLE * sum(graph.values[v].saved_nbytes for v in free) / max(count, 1)
    ends = [0, *sorted({graph.stage_of[own.stop] for own in passes if own.stop < len(graph.nodes)}), count]
    starts = [0]
    for begin, end in pairwise(ends):
        most = max(min(MOST_STAGES, (end - begin) // LEAST_GROUPS), 1)
        while (start := starts[-1]) < end:
            places = range(start + 1, min(start + most, end) + 1)
            starts.append(
                next((k for k in places if across[k] <= little), min(places, key=lambda k: (across[k], -k)))
            )
    return [a for a, b in pairwise(starts) for _ in range(a, b)]


def _cut(
    graph: Graph,
    group: int,
    born: int,
    values: Sequence[int],
    read: Mapping[int, Collection[int]],
    wanted: Mapping[int, Collection[int]],
) -> list[Block]:
    """Return one group's residuals in blocks, with the fewest possible bytes read across their ends.

    **Arguments:** `read` the stages that read each residual; `wanted` those and the ones that may recompute others from
    it.
    """
    place = {v: i for i, v in enumerate(values)}
    readers: list[list[int]] = [[] for _ in values]
    for i, v in enumerate(values):
        for u in graph.reads[graph.values[v].producer]:
            if u in place:
                readers[place[u]].append(i)
    across = np.zeros(len(values) + 1, dtype=np.int64)
    for i, v in enumerate(values):
        across[i] += graph.values[v].nbytes
        across[max(readers[i], default=i)] -= graph.values[v].nbytes
    across = np.cumsum(across)  # bytes of values before a place that are read after it
    producer = [graph.values[v].producer for v in values]
    starts = [0]
    while len(values) - (start := starts[-1]) > MOST_VALUES:
        places = [
            i for i in range(start + LEAST_VALUES, start + MOST_VALUES + 1) if producer[i - 1] != producer[i]
        ]
        starts.append(min(places, key=lambda i: (across[i - 1], i), default=start + MOST_VALUES))
    found = []
    for begin, end in pairwise([*starts, len(values)]):
        others = [
            set(read.get(values[i], ())).union(*(wanted[values[j]] for j in readers[i] if j >= end))
            for i in range(begin, end)
        ]
        found.append(_block(graph, group, born, tuple(values[begin:end]), wanted, others))
    return found


def _block(
    graph: Graph,
    group: int,
    born: int,
    values: tuple[int, ...],
    wanted: Mapping[int, Collection[int]],
    others: Sequence[Collection[int]],
) -> Block:
    """Return the block of these values.

    **Arguments:** `others` for each value, the stages in which readers outside the block want it.
    """
    place = {v: i for i, v in enumerate(values)}
    program = []
    for n in dict.fromkeys(graph.values[v].producer for v in values):
        outputs = [v for v in graph.nodes[n].outputs if v in place]
        makes = tuple(
            (
                place[v],
                graph.values[v].saved_nbytes,
                np.inf if v in graph.pinned["recompute"] else graph.values[v].saved_seconds,
                tuple(sorted(k - group for k in others[place[v]])),
            )
            for v in outputs
        )
        stages = tuple(sorted({k - group for v in outputs for k in wanted[v]}))
        reads = tuple(place[u] for u in graph.reads[n] if u in place)
        program.append((graph.nodes[n].seconds, reads, stages, makes))
    return Block(group, born, values, tuple(program))


def frontier(block: Block, points: int = POINTS) -> tuple[Point, ...]:
    """Return the block's choices from all saved to as few as possible, each slower and smaller than the one before.

    They depend only on the block's program, and a search requests them for many budgets: they are cached.

    **Arguments:** `points` to compute, in equal steps of memory, besides the smallest.
    """
    key = block.program, points
    if key not in _found:
        if len(_found) >= MOST_FOUND:
            _found.clear()
        _found[key] = _points(block, points)
    return _found[key]


_found: dict[tuple[Any, ...], tuple[Point, ...]] = {}


def _points(block: Block, most: int) -> tuple[Point, ...]:
    sizes = [nbytes for *_, makes in block.program for _, nbytes, *_ in makes]
    total, unit = float(sum(sizes)), max(*sizes, 1.0)
    solve = _by_enumeration(block) if len(block.values) <= MOST_ENUMERATED else _by_integer_programs(block)
    points = [solve(True, total)]
    # Each next bound lies below the last point's bytes too, so that no solve repeats a point.
    step, allowed = max(total / most, 1e-4 * unit), total
    while allowed >= 0:
        points.append(point := solve(False, allowed))
        allowed = min(point.nbytes, allowed) - step if point is not None else -1.0
    best: list[Point] = []
    for point in sorted(filter(None, points), key=lambda p: (p.nbytes, p.seconds)):
        if not best or point.seconds < best[-1].seconds:
            best.append(point)
    return tuple(reversed(best))


Solve = Callable[[bool, float], Point | None]
"""The best choice that saves at most so many bytes: of least bytes if the first argument is true, else of least time;
ties go to the faster, or the smaller. None if there is no such choice.
"""


def _by_enumeration(block: Block) -> Solve:
    """Evaluate all choices at once: the saved values determine which nodes run again."""
    size = len(block.values)
    saved = (np.arange(2**size)[:, None] >> np.arange(size)) % 2 == 1
    nbytes, seconds = np.zeros(len(saved)), np.zeros(len(saved))
    most = 0.0
    wanted: dict[
        tuple[int, int], np.ndarray
    ] = {}  # (value, stage) -> by choice, whether a recomputed node reads it
    for each_seconds, reads, stages, makes in reversed(block.program):
        most += len(stages) * each_seconds
        for v, saved_nbytes, saved_seconds, _ in makes:
            nbytes += saved_nbytes * saved[:, v]
            seconds[saved[:, v]] += saved_seconds  # infinite if it may not be saved
            most += saved_seconds if saved_seconds < np.inf else 0.0
        for k in stages:
            again = np.zeros(len(saved), dtype=bool)
            for v, _, _, others in makes:
                again |= ~saved[:, v] & (k in others or wanted.get((v, k), False))
            seconds[again] += each_seconds
            for u in reads:
                wanted[u, k] = wanted.get((u, k), False) | again
    shares = nbytes / (nbytes.max() or 1.0), seconds / (most or 1.0)
    orders = shares[1] + 1e-6 * shares[0], shares[0] + 1e-6 * shares[1]

    def solve(bytes_first: bool, allowed: float) -> Point | None:
        order = np.where(nbytes <= allowed, orders[bytes_first], np.inf)
        i = int(order.argmin())
        if order[i] == np.inf:
            return None
        return Point(int(nbytes[i]), float(seconds[i]), tuple(np.flatnonzero(saved[i]).tolist()))

    return solve


def _by_integer_programs(block: Block) -> Solve:
    size = len(block.values)
    nbytes, price = [0.0] * size, [0.0] * size
    again: dict[tuple[int, int], int] = {}  # (producer, stage) -> its variable
    made_by: dict[int, int] = {}
    for n, (seconds, _, stages, makes) in enumerate(block.program):
        for k in stages:
            again[n, k] = len(price)
            price.append(seconds)
        for v, saved_nbytes, saved_seconds, _ in makes:
            nbytes[v], price[v], made_by[v] = saved_nbytes, saved_seconds, n
    rows: list[dict[int, float]] = []  # coefficients by variable; their sum is at least the bound below
    bounds: list[float] = []
    for n, (_, reads, stages, makes) in enumerate(block.program):
        for v, _, _, others in makes:
            for k in others:
                rows.append({v: 1.0, again[n, k]: 1.0})
                bounds.append(1.0)
        for u, k in product(reads, stages):
            rows.append({u: 1.0, again[made_by[u], k]: 1.0, again[n, k]: -1.0})
            bounds.append(0.0)
    if not rows:
        return lambda bytes_first, allowed: Point(0, 0.0, ())
    entries = [(r, c, x) for r, row in enumerate(rows) for c, x in row.items()]
    r, c, x = zip(*entries, strict=True)
    count, total = len(price), sum(nbytes)
    lower: Any = np.array(bounds)
    needs = LinearConstraint(csr_array((x, (r, c)), shape=(len(rows), count)), lb=lower)
    unit = max(*nbytes, 1.0)
    weights = np.array([*nbytes, *[0.0] * (count - size)])
    seconds = np.array(price)
    pinned = np.isinf(seconds)
    seconds[pinned] = 0.0
    upper: Any = np.where(pinned, 0, 1)

    def solve(bytes_first: bool, allowed: float) -> Point | None:
        shares = weights / (total or 1.0), seconds / (seconds.sum() or 1.0)
        first, second = shares if bytes_first else shares[::-1]
        room = LinearConstraint(csr_array(weights[None] / unit), ub=allowed / unit)
        found = milp(
            first + 1e-6 * second,
            integrality=np.ones(count),
            bounds=Bounds(0, upper),
            constraints=[needs, room],
            # With presolve, HiGHS sometimes prints that it repairs a solution of these programs.
            options={"mip_rel_gap": 1e-7, "node_limit": MOST_NODES, "presolve": False},
        )
        if found.x is None:
            return None
        chosen = found.x > 0.5
        saved = tuple(np.flatnonzero(chosen[:size]).tolist())
        return Point(int(weights[list(saved)].sum()), float(chosen @ seconds), saved)

    return solve


STATES = 2000
"""Sums of saved bytes that the allocation distinguishes."""

ROUNDS = 8
"""The most choices that are simulated."""

PROGRAMS_PER_SECOND = 40
"""Integer programs of blocks that a second of the time limit stands for: a count, so that no clock changes a plan."""

LEAST_POINTS = 2
"""The fewest points of a frontier besides its ends, for any number of blocks."""

LEAST_SLACK = 0.002
"""Slack above the least memory, as a share of the plain step's live bytes, that saves time."""


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
        """Return the schedule that saves the least."""
        return self._schedule([len(points) - 1 for points in self.frontiers])

    def within(self, budget_nbytes: int) -> Schedule:
        """Return the cheapest choice found that fits, or the one of least memory if none does."""
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
            # If two choices in a row do not fit, the next leaves room for the larger rest of both, stage by stage.
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
        """Return for the blocks of each forward pass the peak of each stage, and at the end that of the forward pass,
        without the bytes that blocks of later groups (in the forward pass, all) have saved; minus infinity before the
        values are computed.
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
        """Choose the points of least time for the blocks of one forward pass whose saved bytes, summed from the last
        group on, stay below the bound of each stage and, last, of the forward pass; those of fewest bytes if none do.
        """
        own = [i for i, block in enumerate(self.blocks) if block.born == born]
        nbytes, seconds = np.zeros(1), np.zeros(1)
        total = sum(self.frontiers[i][0].nbytes for i in own)
        width = max(total / STATES, 1.0)
        steps: list[tuple[np.ndarray, np.ndarray]] = []  # by block: each state's predecessor and point
        above = len(self.graph.stages)  # stages from here on have been bounded

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
