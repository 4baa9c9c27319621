"""Graph + schedule -> the same with fewer stages, where the user's program copies from and to host memory.

Each barrier between such copies holds back what they wait for: a transformer's step whose optimizer state is in host
memory needs 226 MiB with all of them and 188 MiB without those of stages that recompute nothing. Such a stage becomes
part of the one before, unless a copy begins or ends with it. Elsewhere these barriers cost nothing.

Invariant: saved, recomputed, kept and offloaded values stay what they were.
"""

from bisect import bisect_left
from dataclasses import replace

from ._graph import Graph, Stage
from ._host_copies import HostCopy
from ._schedule import Schedule


def merged(graph: Graph, schedule: Schedule) -> tuple[Graph, Schedule]:
    """Return the graph and the schedule without the stages that need no barrier, but for the first.

    All that a merged stage finishes waits for the barrier behind it: else the compiler puts weight gradients off, and
    keeps what they are made of.
    """
    loop_of = [graph.nodes[stage.start].loop for stage in graph.stages]
    gone = {copy.gone for copy in schedule.offloaded}
    copying = {copy.begun for copy in schedule.offloaded}
    copying.update(k for k, stage in enumerate(graph.stages) if stage.start in gone)
    first = [
        k
        for k, nodes in enumerate(schedule.recomputed)
        if nodes or k in copying or k == 0 or loop_of[k] != loop_of[k - 1]
    ]
    new_of = {k: i for i, k in enumerate(first)}
    groups = [graph.stages[k:stop] for k, stop in zip(first, [*first[1:], len(graph.stages)], strict=True)]
    waits = _waiting(graph, first)
    stages = [
        Stage(
            start=group[0].start,
            stop=group[-1].stop,
            finished=tuple(v for stage in group for v in stage.finished),
            deferred=tuple((n, waits[n]) for stage in group for n, _ in stage.deferred if n in waits),
        )
        for group in groups
    ]
    kept = frozenset((v, new_of[k]) for v, k in schedule.kept if k in new_of)
    recomputed = tuple(schedule.recomputed[k] for k in first)
    offloaded = frozenset(_in_fewer(copy, first) for copy in schedule.offloaded)
    return replace(graph, stages=tuple(stages)), Schedule(schedule.saved, recomputed, kept, offloaded)


def _in_fewer(copy: HostCopy, first: list[int]) -> HostCopy:
    """Return a copy in terms of the stages that are left. Where its value is read before one begins, none waits."""
    over = bisect_left(first, copy.over) if copy.over >= 0 else -1
    return copy._replace(begun=bisect_left(first, copy.begun), over=over if over < len(first) else -1)


def _waiting(graph: Graph, first: list[int]) -> dict[int, int]:
    """Return the deferred nodes with the stages of their barriers, but for those whose results are read before."""
    waits = {n: bisect_left(first, until) for stage in graph.stages for n, until in stage.deferred}
    starts = [*(graph.stages[k].start for k in first), len(graph.nodes)]
    waiting: dict[int, int] = {}
    for n in sorted(waits, reverse=True):
        after = [m for v in graph.nodes[n].outputs for m in graph.readers[v] if m >= graph.forward_stop]
        if all(waiting.get(m, -1) >= waits[n] or m >= starts[waits[n]] for m in after):
            waiting[n] = waits[n]
    return waiting
