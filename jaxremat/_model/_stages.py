"""Graph -> stages: the places at which the backward pass may stop and recompute.

Invariant: a change of stages leaves the saved, recomputed, kept and offloaded values of a schedule as they are.

A residual that is read on both sides of a cut is recomputed twice or kept across it; residuals that one stage
recomputes are in memory together. Both are bytes, so the stages are the shortest path through

    sum over cuts (bytes of residuals read on both sides + total / FINENESS)
    + sum over stages ((consumed + load)**2 - load**2) / total

where a stage *consumes* the residuals that it is the first to read (of a stack, one iteration's slice), `load` is the
peak of its live gradients and scratch memory, and `total` is the bytes of all residuals. So cuts fall between layers,
and more of them where residuals are large or meet something large, such as the gradients of a language model's logits.
There is a cut at both ends of every loop, and wherever the user has pinned one.

Readers are counted in two ways, hence two cuttings. The *fine* one counts the readers themselves. The *coarse* one also
counts the readers of pointwise results of `u` as readers of `u`, because recomputing those results needs `u`: no cut
between the gradients of an activation and of the contraction before it. The coarse one recomputes less, the fine one
reaches lower peaks where a single layer is large. The fine one may cut anywhere, the coarse one only at local minima of
the bytes read on both sides: no such minimum lies within a stretch that reads one large residual throughout, such as
the end of a residual stream after a mean.

In a step that differentiates several times in sequence (see `_later_passes`), a stage begins after each later forward
pass and none within it, and each backward pass is cut as if it were the only one, with a `total` for itself.

`merged` removes stages where the user's program copies from and to host memory. A barrier between such copies delays
the operands that they wait for: a transformer's step with its optimizer state in host memory needs 226 MiB with all
barriers and 188 MiB without those of stages that recompute nothing. Such a stage becomes part of the one before, unless
a copy begins or ends with it. In other steps these barriers cost nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from .._runtime._mechanisms import mechanism
from ._graph import Graph, Stage
from ._host_copies import HostCopy
from ._later_passes import LaterPass, divides, later_passes, made_later, passes_before
from ._optimizer_updates import with_updates
from ._schedule import Schedule

FINENESS = 1500
"""A cut costs `total / FINENESS` bytes: about `sqrt(FINENESS)` stages where all layers are equal."""

MOST_CANDIDATES = 500
NOISE_SHARE = 0.002


def cut_stages(graph: Graph, *, fine: bool = False) -> tuple[Stage, ...]:
    """Return stages that tile the schedule from the end of the forward pass; see the module's docstring for `fine`."""
    start, stop = graph.forward_stop, len(graph.nodes)
    if start == stop:
        return ()
    passes = later_passes(graph)
    spanning, consumed, totals = _spanning_and_consumed(graph, start, fine, passes)
    ends = set(_fixed_cuts(graph, start, passes))
    between = (n for n in _candidates(graph, start, spanning, consumed, fine) if not divides(passes, n))
    places = sorted({*between, *ends})
    live = _load(graph, start, passes)
    highest = [max(live[a - start : b - start]) for a, b in pairwise(places)]
    # best[i]: cost of the best cutting of everything before places[i]
    best, previous = [0.0], [0]
    for i in range(1, len(places)):
        # Backwards from place i, so that `load` grows to the maximum over the stage; no stage crosses a fixed cut.
        load, found = 0, []
        total = totals[passes_before(passes, places[i] - 1)] or 1
        for j in reversed(range(i)):
            load = max(load, highest[j])
            eaten = consumed[places[i] - start] - consumed[places[j] - start]
            found.append((best[j] + eaten * (eaten + 2 * load) / total, j))
            if places[j] in ends:
                break
        cost, at = min(found)
        best.append(cost + spanning[places[i] - start] + total / FINENESS)
        previous.append(at)
    cuts, i = [], len(places) - 1
    while i:
        cuts.append(places[i])
        i = previous[i]
    cuts.reverse()
    return with_updates(graph, [start, *cuts])


@mechanism("fine stages", off=lambda graph: [graph])
def cuttings(graph: Graph) -> list[Graph]:
    """Return the graph with its coarse stages, and with fine ones if those differ."""
    return [replace(graph, stages=c) for c in dict.fromkeys((graph.stages, cut_stages(graph, fine=True)))]


def uncut(graph: Graph) -> tuple[Stage, ...]:
    """Return the fewest stages: one per backward pass, besides cuts at ends of loops and at pins."""
    start, stop = graph.forward_stop, len(graph.nodes)
    fixed = _fixed_cuts(graph, start, later_passes(graph))
    return with_updates(graph, [start, *fixed, stop]) if start < stop else ()


def coarser(graph: Graph, stages: tuple[Stage, ...], every: int) -> tuple[Stage, ...]:
    """Return stages that each combine `every` of these; ends of loops and of passes, and pinned cuts, remain."""
    fixed = {graph.forward_stop, *_fixed_cuts(graph, graph.forward_stop, later_passes(graph))}
    cuts = [s.start for i, s in enumerate(stages) if i % every == 0 or s.start in fixed]
    return with_updates(graph, [*cuts, len(graph.nodes)])


def _fixed_cuts(graph: Graph, start: int, passes: Sequence[LaterPass]) -> list[int]:
    """Return the nodes of the backward pass at which loops begin or end, forward passes end, or pins want a stage."""
    nodes, wanted = graph.nodes, {*graph.pinned["stage"], *(own.stop for own in passes)}
    return [n for n in range(start + 1, len(nodes)) if nodes[n].loop != nodes[n - 1].loop or n in wanted]


def _load(graph: Graph, start: int, passes: Sequence[LaterPass]) -> list[int]:
    """Return the live bytes at each node of the backward pass that it computed itself, scratch memory included."""
    last: dict[int, int] = {}
    for node in graph.nodes[start:]:
        last.update((v, node.id) for v in graph.reads[node.id])
    load = [0] * (len(graph.nodes) - start + 1)
    for node in graph.nodes[start:]:
        for v in node.outputs:
            value = graph.values[v]
            later = node.forward and made_later(passes, node.id)
            if value.materialised and not value.is_output and not later:
                load[node.id - start] += value.nbytes
                load[last.get(v, node.id) - start + 1] -= value.nbytes
    return [
        live + node.workspace_nbytes
        for live, node in zip(accumulate(load), graph.nodes[start:], strict=False)
    ]


def _spanning_and_consumed(
    graph: Graph, start: int, fine: bool, passes: Sequence[LaterPass]
) -> tuple[list[int], list[int], list[int]]:
    """Return the bytes of residuals read on both sides of each place, and of those first read before it; and for each
    backward pass, the bytes of all that it is the first to read.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def is_read(v: int, n: int) -> bool:
        """Return whether the node reads a residual of an earlier pass; cuts at loops and pins are ignored here."""
        made = graph.values[v].producer
        own = made_later(passes, made) if made >= start else None
        return graph.is_residual(v) and (made < start or (own is not None and own.stop <= n))

    read = {node.id: [v for v in graph.reads[node.id] if is_read(v, node.id)] for node in graph.nodes[start:]}
    own = {v for values in read.values() for v in values}
    for n, values in read.items():
        for v in values:
            producer = graph.nodes[graph.values[v].producer]
            # The coarse cutting counts readers of pointwise results as readers of their operands; see the module's
            # docstring.
            sources = (
                () if fine or producer.fusion_root else (u for u in graph.reads[producer.id] if u in own)
            )
            for u in (v, *sources):
                first.setdefault(u, n - start)
                last[u] = n - start
    size = len(graph.nodes) - start + 1
    spanning, consumed = [0] * (size + 1), [0] * (size + 1)
    for v, begin in first.items():
        nbytes = graph.values[v].nbytes
        spanning[begin + 1] += nbytes
        spanning[last[v] + 1] -= nbytes
        consumed[begin + 1] += nbytes
    for i in range(1, size + 1):
        spanning[i] += spanning[i - 1]
        consumed[i] += consumed[i - 1]
    totals = [0] * (len(passes) + 1)
    for v, begin in first.items():
        totals[passes_before(passes, begin + start)] += graph.values[v].saved_nbytes
    return spanning[:size], consumed[:size], totals


def _candidates(
    graph: Graph, start: int, spanning: list[int], consumed: list[int], anywhere: bool
) -> list[int]:
    """Return places where cutting may be best, and both ends.

    These are the first place of each stretch with locally fewest spanning bytes (or of any stretch, if `anywhere`), and
    every place of it before which something was consumed. Differences below a share of the maximum are noise
    (statistics, biases) and start no new stretch.
    """
    noise = max(spanning) * NOISE_SHARE
    stretches: list[tuple[int, list[int]]] = []  # (bytes that span it, places)
    for node in graph.nodes[start + 1 :]:
        if not graph.kernel[node.id]:
            continue
        here = spanning[node.id - start]
        if not stretches or abs(here - stretches[-1][0]) > noise:
            stretches.append((here, [node.id]))
        elif consumed[node.id - start] > consumed[stretches[-1][1][-1] - start]:
            stretches[-1][1].append(node.id)
    lowest = [
        (stretches[i][0], place)
        for i in range(len(stretches))
        if anywhere
        or (
            (i == 0 or stretches[i - 1][0] > stretches[i][0])
            and (i == len(stretches) - 1 or stretches[i + 1][0] > stretches[i][0])
        )
        for place in stretches[i][1]
    ]
    per_bucket = -(-len(lowest) // MOST_CANDIDATES)  # in too long a list, the best of each run of neighbours
    buckets = [lowest[i : i + per_bucket] for i in range(0, len(lowest), per_bucket or 1)]
    chosen = (min(bucket)[1] for bucket in buckets)
    return [start, *chosen, len(graph.nodes)]


def merged(graph: Graph, schedule: Schedule) -> tuple[Graph, Schedule]:
    """Return the graph and the schedule without the stages that need no barrier; the first stage stays.

    All finished values of a merged stage wait for the next barrier: otherwise the compiler delays weight gradients and
    keeps their operands in memory.
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
    stages = [
        Stage(
            start=group[0].start,
            stop=group[-1].stop,
            finished=tuple(v for stage in group for v in stage.finished),
            deferred=tuple(n for stage in group for n in stage.deferred),
        )
        for group in groups
    ]
    kept = frozenset((v, new_of[k]) for v, k in schedule.kept if k in new_of)
    recomputed = tuple(schedule.recomputed[k] for k in first)
    offloaded = frozenset(_in_fewer(copy, first) for copy in schedule.offloaded)
    return replace(graph, stages=tuple(stages)), Schedule(schedule.saved, recomputed, kept, offloaded)


def _in_fewer(copy: HostCopy, first: list[int]) -> HostCopy:
    """Return a copy in terms of the remaining stages; if none from `over` on remains, the first reader waits for it."""
    over = bisect_left(first, copy.over) if copy.over >= 0 else -1
    return copy._replace(begun=bisect_left(first, copy.begun), over=over if over < len(first) else -1)
