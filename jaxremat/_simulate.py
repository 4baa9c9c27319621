"""Graph + schedule -> profile: the one definition of memory and time that every solver is judged by.

The schedule is played event by event: the forward kernels, then for each stage its recomputed kernels in forward
order and its own kernels. A materialised value occupies its bytes from the kernel that makes it through the last
kernel that reads it (a kernel of `Graph.in_place` writes over its operand, so its result counts from the next kernel
on); a kernel's own workspace counts while it runs. What waits for a deferred update lives until its fence. Outputs of
the step are part of the base.
"""

from dataclasses import dataclass

from ._graph import Graph
from ._schedule import Schedule


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel run: the node, the stage it is recomputed for (-1 where it runs in its own place), live bytes."""

    node: int
    recomputed_for: int
    live_nbytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """What a schedule costs.

    **Fields:** `peak_nbytes` including the base; `peak_event` the index of the first event at the peak; `events` the
    timeline, `live_nbytes` without the base; `alive` pairs (value, stage that made it or -1) at the peak, largest
    first; `extra_seconds` spent on recomputation.
    """

    peak_nbytes: int
    peak_event: int
    events: tuple[Event, ...]
    alive: tuple[tuple[int, int], ...]
    extra_seconds: float


def extra_seconds(graph: Graph, schedule: Schedule) -> float:
    """Seconds that the schedule spends on recomputation in one step."""
    return sum(graph.nodes[n].seconds for nodes in schedule.recomputed for n in nodes)


def simulate(graph: Graph, schedule: Schedule) -> Profile:
    """Play the schedule; see the module's docstring for the law."""
    runs: list[tuple[int, int]] = []  # (node, recomputed_for)
    reads: list[list[tuple[int, int]]] = []  # instances (value, recomputed_for) that each run reads
    where: dict[int, int] = {}  # value -> the stage of its present clone; absent: the original

    def run(n: int, stage: int) -> None:
        runs.append((n, stage))
        reads.append([(v, where.get(v, -1)) for v in graph.reads[n]])

    kernel = [graph.is_kernel(node) for node in graph.nodes]
    for n in range(graph.forward_stop):
        if kernel[n]:
            run(n, -1)
    own: list[int] = []  # for each stage the last event before or at its first node
    for k, stage in enumerate(graph.stages):
        where = {v: s for v, s in where.items() if (v, k) in schedule.kept}
        for n in schedule.recomputed[k]:
            run(n, k)
            where.update((v, k) for v in graph.nodes[n].outputs if v not in schedule.saved)
        own.append(len(runs) - (not kernel[stage.start]))
        for n in range(stage.start, stage.stop):
            if kernel[n]:
                run(n, -1)

    last: dict[tuple[int, int], int] = {}
    for event, instances in enumerate(reads):
        for instance in instances:
            last[instance] = event
    for v, k in graph.lingering.items():
        end = own[k] if k < len(own) else len(runs) - 1
        last[v, -1] = max(last.get((v, -1), end), end)
    delta = [0] * (len(runs) + 2)
    born: dict[tuple[int, int], int] = {}
    for event, (n, stage) in enumerate(runs):
        for v in graph.nodes[n].outputs:
            value = graph.values[v]
            if value.materialised and not (value.is_output and stage < 0):
                begin = event + (stage < 0 and n in graph.in_place)
                if begin > event and last.get((v, stage), event) == event:
                    continue
                born[v, stage] = begin
                delta[begin] += value.nbytes
                delta[max(begin, last.get((v, stage), begin)) + 1] -= value.nbytes
    live, peak, at, events = 0, -1, 0, []
    for event, (n, stage) in enumerate(runs):
        live += delta[event]
        now = live + graph.nodes[n].workspace_nbytes
        events.append(Event(n, stage, now))
        if now > peak:
            peak, at = now, event
    alive = [i for i, event in born.items() if event <= at <= max(event, last.get(i, event))]
    alive.sort(key=lambda i: (-graph.values[i[0]].nbytes, i))
    return Profile(
        peak_nbytes=graph.base_nbytes + max(peak, 0),
        peak_event=at,
        events=tuple(events),
        alive=tuple(alive),
        extra_seconds=extra_seconds(graph, schedule),
    )


def rank(graph: Graph, schedule: Schedule, budget_nbytes: int | None) -> tuple[float, ...]:
    """What makes one schedule better than another: to fit, then time; where neither fits, memory, then time."""
    profile = simulate(graph, schedule)
    if budget_nbytes is not None and profile.peak_nbytes <= budget_nbytes:
        return (0.0, profile.extra_seconds, profile.peak_nbytes)
    return (1.0, profile.peak_nbytes, profile.extra_seconds)
