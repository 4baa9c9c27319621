"""Graph + schedule -> profile: the one definition of memory and time that every solver is judged by.

The schedule is played event by event: the forward kernels, then for each stage its recomputed kernels in forward
order and its own kernels. A materialised value occupies its bytes from the kernel that makes it through the last
kernel that reads it (a kernel of `Graph.in_place` writes over its operand, so its result counts from the next kernel
on); a kernel's own workspace counts while it runs. What waits for a deferred update lives until its fence. Outputs of
the step are part of the base.

Where a graph says that memory does not count in the forward pass, nothing is there until its end.

The body of a loop is played once. What an iteration of the forward pass makes counts once there, and from the end of
its loop on as often as there are iterations, if something behind the loop reads the original. What a loop reads that
was made outside of it is there until it ends. A row that is copied for a contraction (see `Graph.copies`) is there from
the beginning of its stage's part of the iteration to the last contraction of that stage which reads it. What several
kernels of a stage share (see `Graph.shared`) is there from the first to the last of them; what nothing holds back (see
`Graph.early`) from the beginning of the iteration to the kernel that wants it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ._graph import Graph
from ._schedule import Schedule


class Event(NamedTuple):
    """One kernel run: the node, the stage it is recomputed for (-1 where it runs in its own place), live bytes."""

    node: int
    recomputed_for: int
    live_nbytes: int


@dataclass(frozen=True)
class Profile:
    """What a schedule costs.

    **Fields:** `peak_nbytes` including the base; `peak_event` the index of the first event at the peak; `runs` the
    fields of all events, one tuple each; `alive` pairs (value, stage that made it or -1) at the peak, largest first;
    `extra_seconds` more than the plain step takes.
    """

    peak_nbytes: int
    peak_event: int
    runs: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    alive: tuple[tuple[int, int], ...]
    extra_seconds: float

    @property
    def events(self) -> tuple[Event, ...]:
        """The timeline, `live_nbytes` without the base."""
        return tuple(map(Event, *self.runs))


def extra_seconds(graph: Graph, schedule: Schedule) -> float:
    """Seconds by which a step that follows the schedule takes longer than the plain one."""
    recomputed = math.fsum(
        s for k, nodes in enumerate(schedule.recomputed) for s in run_again(graph, k, nodes)
    )
    stacked = sum(graph.values[v].saved_seconds for v in sorted(schedule.saved))
    return graph.extra_seconds + stacked + recomputed


def run_again(graph: Graph, stage: int, nodes: Sequence[int]) -> list[float]:
    """Seconds of each of the nodes that a stage runs again."""
    others = joined(graph, stage, nodes)
    return [graph.nodes[n].joined_seconds if n in others else graph.nodes[n].seconds for n in nodes]


def joined(graph: Graph, stage: int, nodes: Sequence[int]) -> dict[int, int]:
    """Of the nodes that a stage runs again those that are part of another kernel there, with a node of that."""
    read = {v for n in nodes for v in graph.reads[n]}
    found = ((n, graph.joins(n, stage)) for n in nodes if graph.nodes[n].partners)
    return {n: m for n, m in found if m >= 0 and read.isdisjoint(graph.nodes[n].outputs)}


class Life(NamedTuple):
    """A stretch in which an instance of a value is in memory: the value, the stage that made it (-1 in its own place),
    the first and the last event, its bytes. What a loop stacks has two, before and behind the end of its loop.
    """

    value: int
    stage: int
    begin: int
    end: int
    nbytes: int


class Run(NamedTuple):
    """A schedule played: the nodes that ran, the stage that each is recomputed for (-1 in its own place), what was
    in memory when, and what has no place in the graph: copies of rows, and what kernels share.
    """

    nodes: tuple[int, ...]
    made_for: tuple[int, ...]
    lives: tuple[Life, ...]
    scratch: tuple[Life, ...]


def simulate(graph: Graph, schedule: Schedule) -> Profile:
    """Play the schedule; see the module's docstring for the law."""
    ran, made_for, lives, scratch = play(graph, schedule)
    delta = [0] * (len(ran) + 2)
    for life in (*lives, *scratch):
        delta[life.begin] += life.nbytes
        delta[life.end + 1] -= life.nbytes
    live = list(accumulate(delta[: len(ran)]))
    for event, n in enumerate(ran):
        live[event] += graph.nodes[n].workspace_nbytes
    if not graph.counts_forward:
        late = (i for i, n in enumerate(ran) if made_for[i] >= 0 or n >= graph.forward_stop)
        passed = next(late, len(ran))
        live[:passed] = [0] * passed
    peak = max(live, default=0)
    at = live.index(peak) if live else 0
    alive = [(life.value, life.stage) for life in lives if life.begin <= at <= life.end]
    alive.sort(key=lambda i: (-graph.values[i[0]].saved_nbytes, i[1], i[0]))
    return Profile(
        peak_nbytes=graph.base_nbytes + max(peak, 0),
        peak_event=at,
        runs=(ran, made_for, tuple(live)),
        alive=tuple(alive),
        extra_seconds=extra_seconds(graph, schedule),
    )


def play(graph: Graph, schedule: Schedule) -> Run:
    """What runs and lives when, by the law of the module's docstring."""
    # An instance of value v is v itself, or v + size * (k + 1) where stage k recomputes it: ints, for very deep nets.
    size = len(graph.values)
    ran: list[int] = []  # nodes, in order
    made_for: list[int] = []  # the stage that each is recomputed for, -1 in its own place
    last: dict[int, int] = {}  # instance -> the last run that reads it
    where: dict[int, int] = {}  # value -> its present clone; absent: the original
    keeping: list[tuple[int, int]] = []  # originals and the loops that read them from outside
    ended: dict[int, int] = {}  # loop -> its last event
    # stage, loop -> the first event of what of an iteration is in that stage
    begun: dict[tuple[int, int], int] = {}
    # stage, loop, value -> the last event there that reads a row of it
    copied: dict[tuple[int, int, int], int] = {}
    # stage, loop, fused node -> the events there that want it
    shared: dict[tuple[int, int, int], list[int]] = {}

    opened: dict[int, int] = {}  # loop -> its first event
    early: list[Life] = []

    def run(n: int, stage: int) -> None:
        event = len(ran)
        k = stage if stage >= 0 else graph.stage_of[n]
        inside = graph.nodes[n].loop if stage < 0 else graph.nodes[graph.stages[k].start].loop
        begun.setdefault((k, inside), event)
        opened.setdefault(inside, event)
        if inside >= 0 and (nbytes := graph.early[n] if stage < 0 else graph.nodes[n].constant_nbytes):
            early.append(Life(graph.nodes[n].outputs[0], -1, opened[graph.since(inside)], event, nbytes))
        copied.update(((k, inside, v), event) for v in graph.copies(n, inside) if v not in where)
        for m in graph.shared[n]:
            shared.setdefault((k, inside, m), []).append(event)
        ran.append(n)
        made_for.append(stage)
        for v in graph.reads[n]:
            last[where.get(v, v)] = event
        if (loop := graph.nodes[n].loop) < 0:
            return
        if stage < 0:
            ended[loop] = event
            loop = graph.reader_loop(graph.nodes[n])
        else:
            loop = graph.nodes[graph.stages[stage].start].loop
        kept = ((v, graph.kept_by(v, loop)) for v in graph.reads[n] if v not in where)
        keeping.extend((v, loop) for v, loop in kept if loop >= 0)

    for n in range(graph.forward_stop):
        if graph.kernel[n]:
            run(n, -1)
    held: list[list[int]] = [[] for _ in graph.stages]
    for v, k in schedule.kept:
        held[k].append(v)
    own: list[int] = []  # for each stage the last event before or at its first node
    for k, stage in enumerate(graph.stages):
        where = {v: where[v] for v in held[k] if v in where}
        for n in schedule.recomputed[k]:
            run(n, k)
            for v in graph.nodes[n].outputs:
                if v not in schedule.saved:
                    where[v] = v + size * (k + 1)
        others = joined(graph, k, schedule.recomputed[k])
        late = [(m, where[v]) for n, m in others.items() for v in graph.nodes[n].outputs if v in where]
        own.append(len(ran) - (not graph.kernel[stage.start]))
        for n in range(stage.start, stage.stop):
            if graph.kernel[n]:
                run(n, -1)
                last.update((v, len(ran) - 1) for m, v in late if n <= m)

    for v, loop in keeping:
        last[v] = max(last[v], ended[loop])
    for v, k in graph.lingering.items():
        end = own[k] if k < len(own) else len(ran) - 1
        last[v] = max(last.get(v, end), end)
    behind: dict[int, int] = {}  # loop of the forward pass -> the first event behind it
    for event, (n, stage) in enumerate(zip(ran, made_for, strict=True)):
        if stage < 0 and graph.nodes[n].loop >= 0:
            behind[graph.nodes[n].loop] = event + 1
    lives: list[Life] = []
    for event, (n, stage) in enumerate(zip(ran, made_for, strict=True)):
        for v in graph.nodes[n].outputs:
            value = graph.values[v]
            if value.materialised and not (value.is_output and stage < 0):
                begin = event + (stage < 0 and n in graph.in_place)
                end = last.get(v + size * (stage + 1), event)
                if end < begin:
                    continue
                if stage < 0 and value.length and end >= (stacked := behind[graph.nodes[n].loop]):
                    lives.append(Life(v, stage, begin, stacked - 1, value.nbytes))
                    lives.append(Life(v, stage, stacked, end, value.saved_nbytes))
                else:
                    lives.append(Life(v, stage, begin, end, value.nbytes))
    scratch = [
        Life(v, -1, begun[k, loop], end, graph.values[v].nbytes) for (k, loop, v), end in copied.items()
    ]
    scratch.extend(early)
    scratch.extend(
        Life(graph.nodes[n].outputs[0], -1, events[0], events[-1], graph.nodes[n].shared_nbytes)
        for (_, _, n), events in shared.items()
        if len(events) > 1
    )
    return Run(tuple(ran), tuple(made_for), tuple(lives), tuple(scratch))


def rank(graph: Graph, schedule: Schedule, budget_nbytes: int | None) -> tuple[float, ...]:
    """What makes one schedule better than another: to fit, then time; where neither fits, memory, then time."""
    profile = simulate(graph, schedule)
    if budget_nbytes is not None and profile.peak_nbytes <= budget_nbytes:
        return (0.0, profile.extra_seconds, profile.peak_nbytes)
    return (1.0, profile.peak_nbytes, profile.extra_seconds)
