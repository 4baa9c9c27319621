"""Graph + schedule -> the same with fewer stages: barriers only where something is recomputed.

On GPUs a barrier costs traffic, because what passes through cannot be fused across, and brings nothing where nothing
waits for it. A stage that recomputes nothing, and with which no copy from or to host memory begins or ends, therefore
becomes part of the one before. Law: saved, recomputed, kept and offloaded values stay what they were; a schedule that
drops nothing and offloads nothing has no stage left, unless there are loops, whose ends stay.
"""

from bisect import bisect_left
from dataclasses import replace

from ._graph import Graph, Stage
from ._host_copies import HostCopy
from ._optimizer_updates import sums
from ._schedule import Schedule


def merged(graph: Graph, schedule: Schedule) -> tuple[Graph, Schedule]:
    """The graph and the schedule without the stages that need no barrier, but for the first.

    All that a merged stage finishes waits for the barrier behind it: else the compiler puts weight gradients off, and
    keeps what they are made of.
    """
    if not graph.stages or (schedule.drops_nothing and not graph.loop_stop):
        return replace(graph, stages=()), Schedule(schedule.saved, ())
    loop_of = [graph.nodes[stage.start].loop for stage in graph.stages]
    copying = {copy.begun for copy in schedule.offloaded}
    gone = {copy.gone for copy in schedule.offloaded}
    copying.update(k for k, stage in enumerate(graph.stages) if stage.start in gone)
    first = [
        k
        for k, nodes in enumerate(schedule.recomputed)
        if nodes or k in copying or k == 0 or loop_of[k] != loop_of[k - 1]
    ]
    new_of = {k: i for i, k in enumerate(first)}
    graph = replace(graph, stages=_finishing_sums(graph)) if schedule.offloaded else graph
    groups = [graph.stages[k:stop] for k, stop in zip(first, [*first[1:], len(graph.stages)], strict=True)]
    barriers = {n: bisect_left(first, fence) for stage in graph.stages for n, fence in stage.deferred}
    waits = _waiting(graph, barriers, first)
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
    return replace(graph, stages=tuple(stages)), Schedule(
        schedule.saved,
        tuple(schedule.recomputed[k] for k in first),
        kept,
        frozenset(_merged(copy, first) for copy in schedule.offloaded),
    )


def _finishing_sums(graph: Graph) -> tuple[Stage, ...]:
    """The stages, which finish what reductions leave behind too."""
    each = zip(graph.stages, sums(graph), strict=True)
    return tuple(replace(stage, finished=(*stage.finished, *left)) for stage, left in each)


def _merged(copy: HostCopy, first: list[int]) -> HostCopy:
    """A copy in terms of the stages that are left. Where its value is read before one of them begins, none waits."""
    over = bisect_left(first, copy.over) if copy.over >= 0 else -1
    return copy._replace(begun=bisect_left(first, copy.begun), over=over if over < len(first) else -1)


def _waiting(graph: Graph, waits: dict[int, int], first: list[int]) -> dict[int, int]:
    """The deferred nodes with the stages of their barriers, but for those whose results are read before."""
    starts = [*(graph.stages[k].start for k in first), len(graph.nodes)]
    readers: dict[int, list[int]] = {}
    for node in graph.nodes[graph.forward_stop :]:
        for v in node.inputs:
            readers.setdefault(v, []).append(node.id)
    waiting: dict[int, int] = {}
    for n in sorted(waits, reverse=True):
        after = [m for v in graph.nodes[n].outputs for m in readers.get(v, ())]
        if all(waiting.get(m, -1) >= waits[n] or m >= starts[waits[n]] for m in after):
            waiting[n] = waits[n]
    return waiting
