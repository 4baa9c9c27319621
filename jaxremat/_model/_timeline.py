"""Graph + schedule -> timeline: the simulator's memory over the step's time, in few enough moments to store in a plan.

Invariant: the largest moment of a timeline is the peak of `simulate`, and the bytes of a moment's kinds add up to the
simulator's live bytes.
"""

import heapq
import operator
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from ._graph import Graph, Node
from ._later_passes import later_passes, made_later
from ._schedule import Schedule
from ._simulate import again_seconds, simulate, transits
from ._tape import Life

MOMENTS = 240
"""The most moments of a timeline: about one per four pixels of a page."""

NAMED = 6
"""The number of live values that are named at each moment, largest first."""

Kind = Literal["forward", "recomputed", "backward"]

KINDS: tuple[Kind, ...] = ("forward", "recomputed", "backward")


class Group(NamedTuple):
    """Arrays that look alike: results of the same line in one module, or in modules whose names differ by a number.

    **Fields:** `name` the user's `checkpoint_name`, else the primitive; `shape` as text; `kind` the pass that computed
    them; `nbytes` of one; `module` the name stack, with `*` for numbers that differ; `source` the user's line.
    """

    name: str
    shape: str
    kind: Kind
    nbytes: int
    module: str
    source: str


class Moment(NamedTuple):
    """The event of most memory in one slice of the step's time, which lasts until the next moment.

    **Fields:** `seconds` when it begins; `running` the `Group` of the running kernel, by index, whose `kind` is the
    pass; live bytes by kind, `scratch_nbytes` those of the running kernel's scratch memory; `alive` pairs (index of a
    `Group`, count), the largest first.
    """

    seconds: float
    running: int
    forward_nbytes: int
    recomputed_nbytes: int
    backward_nbytes: int
    scratch_nbytes: int
    alive: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Live bytes, without the base."""
        return self.forward_nbytes + self.recomputed_nbytes + self.backward_nbytes + self.scratch_nbytes


class Copied(NamedTuple):
    """A copy between the device's memory and the host's.

    **Fields:** `group` of the value, by index; `back` whether it comes from the host; `begin` and `end` in seconds.
    """

    group: int
    back: bool
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory over one run of a step, as modelled.

    **Fields:** `seconds` of the whole run; `forward_seconds` where the backward pass begins; `moments` in order;
    `copies` from and to host memory.
    """

    seconds: float
    forward_seconds: float
    moments: tuple[Moment, ...]
    copies: tuple[Copied, ...] = ()

    @property
    def peak(self) -> Moment | None:
        """The first moment of most memory, None for a step without kernels."""
        return max(self.moments, key=lambda m: m.nbytes, default=None)

    def link_seconds(self, back: bool) -> float:
        """Return the seconds during which at least one copy to host memory, or back, is under way."""
        busy = until = 0.0
        for copy in sorted((copy for copy in self.copies if copy.back == back), key=lambda copy: copy.begin):
            busy += max(copy.end - max(copy.begin, until), 0.0)
            until = max(until, copy.end)
        return busy


class Groups:
    """Sorts a graph's arrays into groups, and numbers those that are named."""

    def __init__(self) -> None:
        self._modules: dict[Group, set[str]] = {}
        self._index: dict[Group, int] = {}

    def of_value(self, graph: Graph, v: int, kind: Kind, nbytes: int) -> Group:
        """Return the group of a value that occupies so many bytes."""
        value = graph.values[v]
        stacked = value.length > 1 and nbytes == value.saved_nbytes
        shape = f"{value.length} x {value.shape}" if stacked else value.shape
        return self._group(graph.nodes[value.producer], value.name, shape, kind, nbytes)

    def of_node(self, graph: Graph, n: int, kind: Kind) -> Group:
        """Return the group of a node's largest output."""
        outputs = (graph.values[v] for v in graph.nodes[n].outputs)
        largest = max(outputs, key=lambda value: value.nbytes, default=None)
        if largest is None:
            return self._group(graph.nodes[n], "", "", kind, 0)
        return self._group(graph.nodes[n], largest.name, largest.shape, kind, largest.nbytes)

    def _group(self, node: Node, name: str, shape: str, kind: Kind, nbytes: int) -> Group:
        module = "/".join(module_path(node.scope))
        group = Group(name or node.primitive, shape, kind, nbytes, numberless(module), node.source)
        self._modules.setdefault(group, set()).add(module)
        return group

    def index(self, group: Group) -> int:
        """Return the index of a group."""
        return self._index.setdefault(group, len(self._index))

    def listed(self) -> tuple[Group, ...]:
        """Return the groups that have an index, in its order."""
        return tuple(
            group._replace(module=next(iter(modules))) if len(modules := self._modules[group]) == 1 else group
            for group in self._index
        )


_WRAPPED = re.compile(r"^[\w.]+\((.*)\)$")
_MACHINERY = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation|recompute_\d+"
)


def module_path(scope: str) -> tuple[str, ...]:
    """Return the modules of a name stack, the outermost first: `transpose(jvp(Net))/Dense_0` is `Net`, `Dense_0`.

    Names added by loops and rematerialisation are left out. The body of a loop begins with the path of all modules
    again.
    """
    path: list[str] = []
    inside = False  # of a loop or the like: its body repeats the path from the outermost module
    for part in scope.split("/"):
        while found := _WRAPPED.match(part):
            part = found[1]
        part = part.removesuffix(".<lambda>")
        if not part or _MACHINERY.fullmatch(part):
            inside = True
            continue
        if inside and path[:1] == [part]:
            path.clear()
        inside = False
        path.append(part)
    return tuple(path)


def numberless(path: str) -> str:
    """Return the path with `*` for each number, so that repeated modules have the same path."""
    return re.sub(r"\d+", "*", path)


def timeline(graph: Graph, schedule: Schedule, seconds: float, groups: Groups) -> Timeline:
    """Return the timeline of a schedule.

    **Arguments:** `seconds`: the time of the whole run; the nodes' own seconds, which are prices of running them once
    more, only determine how it is divided. `groups`: receives the groups that are named.
    """
    profile = simulate(graph, schedule)
    nodes, made_for, live = profile.runs
    prices = [graph.nodes[n].seconds for n in nodes]
    if sum(prices) <= 0:
        prices = [1.0] * len(nodes)
    scale = seconds / sum(prices) if prices else 0.0
    starts = [scale * t for t in accumulate(prices[:-1], initial=0.0)][: len(nodes)]
    # From here on only the events that are kept count; lives that fall between two of them leave no trace.
    chosen = _chosen(starts, live, seconds)
    begins, ends = _changes(profile.lives, [event for event, _ in chosen])
    moments = []
    passes = later_passes(graph)
    sums: Counter[Kind] = Counter()
    found: Counter[Group] = Counter()
    for (event, begin), born, dead in zip(chosen, begins, ends, strict=True):
        for life, sign in (*((life, 1) for life in born), *((life, -1) for life in dead)):
            kind = _kind(graph.nodes[graph.values[life.value].producer].forward, life.stage)
            sums[kind] += sign * life.nbytes
            found[groups.of_value(graph, life.value, kind, life.nbytes)] += sign
        n = nodes[event]
        forward = n < graph.forward_stop or (graph.nodes[n].forward and made_later(passes, n) is not None)
        there = (group for group, count in found.items() if count)
        largest = heapq.nlargest(NAMED, there, key=lambda group: found[group] * group.nbytes)
        moments.append(
            Moment(
                seconds=rounded(begin),
                running=groups.index(groups.of_node(graph, n, _kind(forward, made_for[event]))),
                forward_nbytes=sums["forward"],
                recomputed_nbytes=sums["recomputed"],
                backward_nbytes=sums["backward"],
                scratch_nbytes=live[event] - sum(sums.values()),
                alive=tuple((groups.index(group), found[group]) for group in largest),
            )
        )
    behind = (
        i
        for i, (n, stage) in enumerate(zip(nodes, made_for, strict=True))
        if n >= graph.forward_stop or stage >= 0
    )
    first = next(behind, None)
    copies = _copies(graph, schedule, [*starts, seconds], nodes, made_for, groups)
    forward_seconds = rounded(seconds if first is None else starts[first])
    return Timeline(rounded(seconds), forward_seconds, tuple(moments), copies)


def _copies(
    graph: Graph,
    schedule: Schedule,
    starts: Sequence[float],
    nodes: Sequence[int],
    made_for: Sequence[int],
    groups: Groups,
) -> tuple[Copied, ...]:
    """Return the copies of a schedule, in the run's time: each keeps its place between the kernels of the copies' own
    clock.

    **Arguments:** `starts` of the run's events, and its end; `nodes` and `made_for`: each event's node, and the stage
    that it recomputes for.
    """
    if not schedule.offloaded:
        return ()
    found, waits = transits(graph, schedule)
    more = map(operator.add, waits, again_seconds(graph, schedule))
    late = list(accumulate(more))  # the step's delay in each stage
    own = [i for i, stage in enumerate(made_for) if stage < 0]
    clock = [
        graph.away.starts[nodes[i]]
        + (late[graph.stage_of[nodes[i]]] if nodes[i] >= graph.forward_stop else 0.0)
        for i in own
    ]
    clock = np.maximum.accumulate([*clock, graph.away.starts[-1] + late[-1]])
    times = [*(starts[i] for i in own), starts[-1]]

    def at(seconds: float) -> float:
        return rounded(np.interp(seconds, clock, times))

    return tuple(
        Copied(
            groups.index(
                groups.of_value(graph, copy.value, "forward", graph.values[copy.value].saved_nbytes)
            ),
            copy.back,
            at(copy.begin),
            at(copy.end),
        )
        for copy in sorted(found, key=lambda copy: copy.begin)
    )


def _kind(forward: bool, stage: int) -> Kind:
    return "recomputed" if stage >= 0 else "forward" if forward else "backward"


def _chosen(starts: Sequence[float], live: Sequence[int], seconds: float) -> list[tuple[int, float]]:
    """Return the event of most memory in each slice of the time, and when the slice begins; equal neighbours are
    merged.
    """
    slices: list[list[int]] = [[] for _ in range(MOMENTS)]
    for event, start in enumerate(starts):
        slices[min(int(start / seconds * MOMENTS), MOMENTS - 1) if seconds else 0].append(event)
    chosen: list[tuple[int, float]] = []
    before: list[int] = []  # the event that may still run when the slice begins
    for i, events in enumerate(slices):
        running = before + events
        if running:
            event = max(running, key=lambda event: live[event])
            if not chosen or chosen[-1][0] != event:
                chosen.append((event, seconds * i / MOMENTS))
            before = running[-1:]
    return chosen


def _changes(lives: Sequence[Life], events: Sequence[int]) -> tuple[list[list[Life]], list[list[Life]]]:
    """Return, for each of the ascending events, the lives that began since the event before, and those that ended."""
    begins: list[list[Life]] = [[] for _ in events]
    ends: list[list[Life]] = [[] for _ in (*events, None)]
    for life in lives:
        first, behind = bisect_left(events, life.begin), bisect_right(events, life.end)
        if first < behind:
            begins[first].append(life)
            ends[behind].append(life)
    return begins, ends[:-1]


def rounded(seconds: float) -> float:
    """Return the seconds to five digits: more would only lengthen the text."""
    return float(f"{seconds:.5g}")
