"""Graph + schedule -> profile: the definition of memory and time by which every solver is judged.

The schedule is played event by event: the forward kernels, then for each stage its recomputed kernels in forward order
and its own kernels. A materialised value occupies its bytes from the kernel that computes it through the last kernel
that reads it (a kernel of `Graph.in_place` writes over its operand, so its result counts from the next kernel on); a
kernel's workspace counts while it runs. Operands of deferred updates live until the barrier that releases these.
Outputs of the step are part of the base.

An offloaded value (see `_host_copies`) takes no device memory from the end of its copy to the host to the stage before
which its copy back begins; two slices of an offloaded stack do.

If `Graph.counts_forward` is false, memory counts from the end of the forward pass on.

The body of a loop is played once. The values of a forward iteration count once inside the loop; from its end on they
count once per iteration, if an event after the loop reads the originals. A value from outside a loop that the loop
reads lives until the loop ends.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ._graph import Graph
from ._host_copies import Transit
from ._schedule import Schedule
from ._tape import Life, Run

REMEMBERED = 4  # profiles of a graph: those of very deep nets are large


class Event(NamedTuple):
    """One kernel run: the node, the stage that recomputes it (-1 for its regular run), live bytes."""

    node: int
    recomputed_for: int
    live_nbytes: int


@dataclass(frozen=True)
class Profile:
    """The memory and time of a schedule.

    **Fields:** `peak_nbytes`: including the base. `peak_event`: the index of the first event at the peak. `runs`: the
    fields of all events, one tuple each. `lives`: when each value is in memory. `alive`: pairs (value, stage that
    recomputed it, or -1) at the peak, largest first. `extra_seconds`: beyond the plain step's time.
    """

    peak_nbytes: int
    peak_event: int
    runs: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    lives: tuple[Life, ...]
    alive: tuple[tuple[int, int], ...]
    extra_seconds: float

    @property
    def events(self) -> tuple[Event, ...]:
        """The timeline, `live_nbytes` without the base."""
        return tuple(map(Event, *self.runs))


def extra_seconds(graph: Graph, schedule: Schedule) -> float:
    """Return the seconds by which a step that follows the schedule takes longer than the plain one."""
    recomputed = math.fsum(
        s for k, nodes in enumerate(schedule.recomputed) for s in run_again(graph, k, nodes)
    )
    stacked = sum(graph.values[v].saved_seconds for v in sorted(schedule.saved))
    return graph.extra_seconds + stacked + recomputed + math.fsum(waits(graph, schedule))


def waits(graph: Graph, schedule: Schedule) -> list[float]:
    """Return the seconds for which each stage waits for copies from host memory."""
    return transits(graph, schedule)[1] if schedule.offloaded else []


def transits(graph: Graph, schedule: Schedule) -> tuple[list[Transit], list[float]]:
    """Return when copies to host memory and back are under way, and the seconds for which each stage waits for them."""
    return graph.away.transits(schedule.offloaded, schedule.recomputed, again_seconds(graph, schedule))


def again_seconds(graph: Graph, schedule: Schedule) -> list[float]:
    """Return the seconds for which each stage recomputes."""
    return [math.fsum(run_again(graph, k, nodes)) for k, nodes in enumerate(schedule.recomputed)]


def run_again(graph: Graph, stage: int, nodes: Sequence[int]) -> list[float]:
    """Return the seconds of each node that a stage runs again."""
    others = joined(graph, stage, nodes)
    return [graph.nodes[n].fused_seconds if n in others else graph.nodes[n].seconds for n in nodes]


def joined(graph: Graph, stage: int, nodes: Sequence[int]) -> dict[int, int]:
    """Return the recomputed nodes of a stage that are fused into another kernel of it, each with a node of that."""
    read = {v for n in nodes for v in graph.reads[n]}
    found = ((n, graph.joins(n, stage)) for n in nodes if graph.nodes[n].fusable_into)
    return {n: m for n, m in found if m >= 0 and read.isdisjoint(graph.nodes[n].outputs)}


def simulate(graph: Graph, schedule: Schedule) -> Profile:
    """Simulate the schedule, and return its peak and time. The last few results are cached."""
    known: dict[Any, Profile] = graph.played
    profile = known.pop(schedule, None) or _simulated(graph, schedule)
    known[schedule] = profile
    if len(known) > REMEMBERED:
        del known[next(iter(known))]
    return profile


def _simulated(graph: Graph, schedule: Schedule) -> Profile:
    ran, made_for, lives = play(graph, schedule)
    delta = [0] * (len(ran) + 2)
    for _, _, begin, end, nbytes in lives:
        delta[begin] += nbytes
        delta[end + 1] -= nbytes
    live = list(accumulate(delta[: len(ran)]))
    for event, n in enumerate(ran):
        live[event] += graph.nodes[n].workspace_nbytes
    if not graph.counts_forward:
        late = (i for i, n in enumerate(ran) if made_for[i] >= 0 or n >= graph.forward_stop)
        passed = next(late, len(ran))
        live[:passed] = [0] * passed
    peak = max(live, default=0)
    at = live.index(peak) if live else 0
    alive = [(v, stage) for v, stage, begin, end, _ in lives if begin <= at <= end]
    alive.sort(key=lambda i: (-graph.values[i[0]].saved_nbytes, i[1], i[0]))
    return Profile(
        peak_nbytes=graph.base_nbytes + max(peak, 0),
        peak_event=at,
        runs=(ran, made_for, tuple(live)),
        lives=lives,
        alive=tuple(alive),
        extra_seconds=extra_seconds(graph, schedule),
    )


def play(graph: Graph, schedule: Schedule) -> Run:
    """Return all runs and lives, by the rules of the module's docstring."""
    size = len(graph.values)
    tape = graph.forward_tape.copy()
    held: list[list[int]] = [[] for _ in graph.stages]
    for v, k in schedule.kept:
        held[k].append(v)
    own: list[int] = []  # for each stage the last event up to its first node
    begun: list[int] = []  # its first event, recomputation included
    where: dict[int, int] = {}
    for k, stage in enumerate(graph.stages):
        tape.where = where = {v: where[v] for v in held[k] if v in where}
        again = schedule.recomputed[k]
        begun.append(len(tape.nodes))
        for n in again:
            tape.run(n, k)
            for v in graph.nodes[n].outputs:
                if v not in schedule.saved:
                    where[v] = v + size * (k + 1)
        own.append(len(tape.nodes) - (not graph.kernel[stage.start]))
        kernels = [n for n in range(stage.start, stage.stop) if graph.kernel[n]]
        first = len(tape.nodes)
        tape.run_all(kernels)
        for n, m in joined(graph, k, again).items():
            if ran := bisect_right(kernels, m):  # the kernels up to the one that it is fused into
                for v in graph.nodes[n].outputs:
                    if v in where:
                        tape.last[where[v]] = max(tape.last.get(where[v], -1), first + ran - 1)
    return tape.over(own, _gaps(graph, schedule, tape.nodes, begun))


def _gaps(
    graph: Graph, schedule: Schedule, ran: Sequence[int], begun: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """Return, for each value that is offloaded for a while, the first event without it and the first with it again.

    **Arguments:** `begun` the first event of each stage.
    """
    starts = {stage.start: event for stage, event in zip(graph.stages, begun, strict=True)}
    passed = begun[0] if begun else 0  # the nodes of the forward pass ascend
    return {
        copy.value: (starts.get(copy.gone, bisect_left(ran, copy.gone, hi=passed)), begun[copy.begun])
        for copy in schedule.offloaded
    }


def rank(graph: Graph, schedule: Schedule, budget_nbytes: int | None) -> tuple[float, ...]:
    """Return the order of schedules, less is better: those that fit by time; the others by memory, then time."""
    profile = simulate(graph, schedule)
    if budget_nbytes is not None and profile.peak_nbytes <= budget_nbytes:
        return (0.0, profile.extra_seconds, profile.peak_nbytes)
    return (1.0, profile.peak_nbytes, profile.extra_seconds)
