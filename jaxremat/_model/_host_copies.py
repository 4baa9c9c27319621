"""Graph -> the values that may be offloaded, when their copies to the host end, and when their copies back begin.

Invariant: copies are placed by the clock of a step that recomputes nothing. A step that recomputes leaves more time for
each copy, so a copy to the host always ends by its exit, and only copies back cause waiting.

A value leaves the device's memory when its copy to the host is complete. An *exit* waits for that: a product of the
forward pass, or the beginning of a stage. Copies run one at a time. The copy back begins before a stage, early enough
for the first stage that reads the value, and spaced so that few copies are under way at once; a stage waits for late
copies.

A forward loop copies each iteration's slice to the host as soon as it is computed; the slice has left when the
iteration ends. It is copied back one iteration before the one that reads it, and the first slices between the loops.
These copies run in parallel with the iteration's kernels, one at a time; if they take longer, the loop waits. Other
values of loops stay on the device.

The compiler starts every copy a fixed time before its end is due. Kernels would wait for longer copies, so values whose
copies take longer stay on the device.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ._primitive_names import FETCH, LOOP_SLICES

AT_ONCE = 2
"""Copies under way at once: with more, the compiler makes kernels wait for the first. So at most this many stacks of a
loop are in host memory.
"""

SLICES = 2
"""Slices of a stack on the device while the backward loop runs: the one that is read, and the next."""


class Pair(NamedTuple):
    """A `forward` and a `backward` loop, and the `stages` of the latter."""

    forward: int
    backward: int
    stages: range


def kept_here(graph: Any, v: int) -> bool:
    """Return whether a pin saves the value, and on the device."""
    return v in graph.pinned["save"] and v not in graph.pinned["offload"]


class Stacks:
    """The stacks of a graph that may be in host memory.

    **Arguments:** `starts` the seconds at which each node begins in a step that recomputes nothing; `least_nbytes` of a
    slice.
    """

    def __init__(self, graph: Any, starts: Sequence[float], least_nbytes: int) -> None:
        self.graph, self.starts, self.least_nbytes = graph, starts, least_nbytes

    @cached_property
    def pair_of(self) -> dict[int, Pair]:
        """The pair of loops of each value whose stack may be offloaded."""
        graph = self.graph
        pairs = {pair.forward: pair for pair in self._pairs()}
        readers: dict[int, list[int]] = {}
        for node in graph.nodes:
            for v in graph.reads[node.id]:
                readers.setdefault(v, []).append(node.id)
        found: dict[int, Pair] = {}
        for v in graph.residuals:
            value = graph.values[v]
            pair = pairs.get(graph.nodes[value.producer].loop)
            if pair is None or value.is_output or value.nbytes < self.least_nbytes or kept_here(graph, v):
                continue
            if value.length <= SLICES or graph.nodes[value.producer].primitive in (FETCH, *LOOP_SLICES):
                continue
            loops = (graph.loops_of(n) for n in readers.get(v, ()))
            if all(pair.forward in around or pair.backward in around for around in loops):
                found[v] = pair
        return found

    def _pairs(self) -> Iterator[Pair]:
        graph = self.graph
        for loop, stop in graph.loop_stop.items():
            others = [i for i, group in enumerate(graph.groups) if group == graph.groups[loop] and i != loop]
            if stop > graph.forward_stop or len(others) != 1:
                continue
            (backward,) = others
            inside = [k for k, stage in enumerate(graph.stages) if graph.nodes[stage.start].loop == backward]
            if inside and graph.parents[backward] == graph.parents[loop]:
                yield Pair(loop, backward, range(inside[0], inside[-1] + 1))

    def by_pair(self, values: Iterable[int]) -> dict[Pair, list[int]]:
        """Return these values by pair of loops, in the order in which they are computed."""
        found: dict[Pair, list[int]] = {}
        for v in sorted(values, key=lambda v: self.graph.values[v].producer):
            found.setdefault(self.pair_of[v], []).append(v)
        return found

    def here_nbytes(self, v: int, stage: int) -> int:
        """Return the bytes of an offloaded stack on the device in a stage; -1 is the forward pass after its loop."""
        return SLICES * self.graph.values[v].nbytes if stage in self.pair_of[v].stages else 0

    def copy_seconds(self, v: int) -> float:
        """Return the seconds of copying a whole stack, one way."""
        graph = self.graph
        loop = graph.nodes[graph.values[v].producer].loop
        trips = graph.total_trips[loop] if loop >= 0 else 1
        return trips * graph.values[v].nbytes / graph.host.link

    def leaving(self, v: int) -> tuple[float, float]:
        """Return when the forward loop that computes a value begins and ends."""
        loop = self.pair_of[v].forward
        begin = next(n for n in range(len(self.graph.nodes)) if loop in self.graph.loops_of(n))
        return self.starts[begin], self.starts[self.graph.loop_stop[loop]]

    def left(self, v: int) -> float:
        """Return the seconds of a forward loop that remain, over all iterations, after the value is computed."""
        stop = self.graph.loop_stop[self.pair_of[v].forward]
        return self.starts[stop] - self.starts[self.graph.values[v].producer + 1]

    def first_seconds(self, v: int) -> float:
        """Return the seconds of copying the first slice back."""
        return self.copy_seconds(v) / self.graph.values[v].length

    def between_seconds(self, pair: Pair) -> float:
        """Return the seconds between the loops of a pair."""
        begin = self.graph.stages[pair.stages[0]].start
        return self.starts[begin] - self.starts[self.graph.loop_stop[pair.forward]]

    def own_seconds(self, pair: Pair) -> float:
        """Return the seconds of a backward loop that recomputes nothing."""
        begin = self.graph.stages[pair.stages[0]].start
        return self.starts[self.graph.loop_stop[pair.backward]] - self.starts[begin]

    def waits(self, values: Collection[int], again: Sequence[float]) -> dict[int, float]:
        """Return the seconds for which each pair of loops waits for copies, by the first stage of its backward loop.

        **Arguments:** `again` the seconds for which each stage recomputes.
        """
        found: dict[int, float] = {}
        for pair, away in self.by_pair(values).items():
            late = there = 0.0  # seconds of copying after the loop's last kernel; of all copies
            for v in reversed(away):
                there += self.copy_seconds(v)
                late = max(late, there - self.left(v))
            time = self.own_seconds(pair) + sum(again[k] for k in pair.stages)
            late += max(sum(map(self.first_seconds, away)) - self.between_seconds(pair), 0.0)
            found[pair.stages[0]] = late + max(there - time, 0.0)
        return found


LEAST_NBYTES = 1 << 20
"""Smaller values stay on the device: copying this much takes about as long as starting a copy."""

LEAD = 1.5
"""A copy back begins this multiple of its own duration before it is needed."""

REST = 1.1
"""An exit comes this multiple of a copy's duration after the copy begins, so that it need not wait."""


class HostMemory(NamedTuple):
    """The memory of the host, as one device uses it.

    **Fields:** `link` the bytes/s of copies to the host, and of those back; `nbytes` that values may take in it, None
    if not known; `ahead_seconds`: the compiler begins a copy at most so long before its end is due, however early the
    copy may begin; `sparing`: use it only if the plan without it takes much longer than the step, or there is no such
    plan.
    """

    link: float
    nbytes: int | None = None
    ahead_seconds: float = math.inf
    sparing: bool = False


class HostCopy(NamedTuple):
    """A value that is in host memory between two of its readers.

    **Fields:** `value`; `left` the node after which its copy to the host begins: its producer, or the exit of another
    copy; `gone` its exit, the node before which that copy has ended; `begun` the stage before which its copy back
    begins; `over` the stage before which the copy back has ended, -1 if its first reader waits for it. For a stack,
    `gone` is the first node after its loop, and `begun` the first stage of the loop that reads it.
    """

    value: int
    left: int
    gone: int
    begun: int
    over: int = -1


class Transit(NamedTuple):
    """A copy under way, by the clock of `Offload.starts` plus the delay of the step up to then.

    **Fields:** `value`; `back` whether it comes from host memory; `begin` and `end` in seconds: for a stack, those of
    the loop that runs in parallel with the copies of its slices.
    """

    value: int
    back: bool
    begin: float
    end: float


class Reading(NamedTuple):
    """The first reader of a value in the backward pass.

    **Fields:** the `stage`; the `node`, -1 if the value is read to recompute another.
    """

    stage: int
    node: int


class Offload:
    """The values of a graph that may be in host memory.

    **Fields:** `starts` the seconds at which each node begins in a step of this form that recomputes nothing.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    @cached_property
    def starts(self) -> tuple[float, ...]:
        graph = self.graph
        # A written value's price includes all that is fused into its kernel, even products: fused nodes count as zero.
        written = [not n.outputs or any(graph.values[v].materialised for v in n.outputs) for n in graph.nodes]
        prices = [node.seconds if alone else 0.0 for node, alone in zip(graph.nodes, written, strict=True)]
        scale = (graph.step_seconds + graph.extra_seconds) / (sum(prices) or 1.0)
        return tuple(accumulate((scale * price for price in prices), initial=0.0))

    def copy_seconds(self, v: int) -> float:
        """Return the seconds of copying a value, one way."""
        return self.graph.values[v].nbytes / self.graph.host.link

    @cached_property
    def stacks(self) -> Stacks:
        """The stacks of loops."""
        return Stacks(self.graph, self.starts, LEAST_NBYTES)

    @cached_property
    def stacked(self) -> dict[int, HostCopy]:
        """The copy of each value whose stack may be offloaded."""
        graph = self.graph
        if graph.host is None or not graph.counts_forward:
            return {}
        pairs = self.stacks.pair_of.items()
        return {
            v: HostCopy(v, graph.values[v].producer, graph.loop_stop[pair.forward], pair.stages[0])
            for v, pair in pairs
        }

    @cached_property
    def alone(self) -> dict[int, HostCopy]:
        """The copy of each value that may be offloaded, if no other is and no stage recomputes from it."""
        graph = self.graph
        if graph.host is None or not graph.counts_forward:
            return {}
        able = [v for v in self._first if self._may_leave(v)]
        producer = [graph.values[v].producer for v in able]
        placed = (
            self._placed(v, n, self.made(v), self._first[v]) for v, n in zip(able, producer, strict=True)
        )
        return {copy.value: copy for copy in placed if copy is not None} | self.stacked

    def made(self, v: int) -> float:
        """Return when a value has been computed."""
        return self.starts[self.graph.values[v].producer + 1]

    def placed(self, chosen: Iterable[int], recomputed: Sequence[Sequence[int]]) -> frozenset[HostCopy]:
        """Return the copies of the chosen values, without those for which there is no time or no more room.

        **Arguments:** `recomputed` as in `Schedule`.
        """
        graph, pinned = self.graph, self.graph.pinned["offload"]
        able = sorted((v for v in set(chosen) if v in self.alone), key=lambda v: graph.values[v].producer)
        first = self.first(able, recomputed)
        able = [v for v in able if v in first]
        found: list[HostCopy] = []
        room = math.inf if graph.host is None or graph.host.nbytes is None else graph.host.nbytes
        in_loop: Counter[int] = Counter()
        # Pinned values come first, before the room in host memory is used up.
        for v in sorted((v for v in able if v in self.stacked), key=lambda v: v not in pinned):
            nbytes, loop = graph.values[v].saved_nbytes, graph.nodes[graph.values[v].producer].loop
            if nbytes <= room and in_loop[loop] < AT_ONCE:
                found.append(self.stacked[v])
                in_loop[loop] += 1
                room -= nbytes
        leaving: list[HostCopy] = []
        free = 0.0  # when the link is free
        for v in able:
            if v in self.stacked or (nbytes := graph.values[v].saved_nbytes) > room:
                continue
            left, ready = graph.values[v].producer, self.made(v)
            if len(leaving) >= AT_ONCE and (exit_before := leaving[-AT_ONCE].gone) > left:
                left, ready = exit_before, self.starts[exit_before]
            if left >= graph.forward_stop:
                continue
            if (copy := self._placed(v, left, max(free, ready), first[v])) is not None:
                leaving.append(copy)
                free = max(free, ready) + self.copy_seconds(v)
                room -= nbytes
        return frozenset((*found, *self._in_turn(leaving, first)))

    def _in_turn(self, copies: Iterable[HostCopy], first: Mapping[int, Reading]) -> list[HostCopy]:
        """Return the copies, with the begins of those back moved earlier until at most `AT_ONCE` are under way, if
        stages permit.
        """
        starts, stages = self.starts, self.graph.stages
        back: list[HostCopy] = []
        for copy in sorted(copies, key=lambda copy: (first[copy.value], copy), reverse=True):
            if len(back) >= AT_ONCE:
                begins = starts[stages[back[-AT_ONCE].begun].start]
                earlier = self._begun_before(copy.value, copy.begun, begins, copy.gone)
                copy = copy._replace(begun=earlier) if earlier >= 0 else copy
            back.append(copy)
        found: list[HostCopy] = []
        free = 0.0  # when the link is free
        for copy in sorted(back, key=lambda copy: (copy.begun, first[copy.value], copy)):
            free = max(free, starts[stages[copy.begun].start]) + self.copy_seconds(copy.value)
            later = (k for k in self._stages if copy.begun < k <= first[copy.value].stage)
            over = next((k for k in later if starts[stages[k].start] >= free), -1)
            found.append(copy._replace(over=over))
        return found

    def first(self, values: Collection[int], recomputed: Sequence[Sequence[int]]) -> dict[int, Reading]:
        """Return the first reader of each of these values."""
        wanted, graph = set(values), self.graph
        found = {v: self._first[v] for v in wanted if v in self._first}
        for k, nodes in enumerate(recomputed):
            for n in nodes:
                for v in wanted.intersection(graph.reads[n]):
                    if v not in found or found[v].stage >= k:
                        found[v] = Reading(k, -1)
        return found

    def transits(
        self, copies: Collection[HostCopy], recomputed: Sequence[Sequence[int]], again: Sequence[float]
    ) -> tuple[list[Transit], list[float]]:
        """Return when each copy is under way, and the seconds for which each stage waits for copies.

        **Arguments:** `again` the seconds for which each stage recomputes.
        """
        graph = self.graph
        waits = [0.0] * len(graph.stages)
        if not copies or graph.host is None:
            return [], waits
        stacks = sorted(copy.value for copy in copies if copy.value in self.stacked)
        in_loops = self.stacks.waits(stacks, again)
        copies = [copy for copy in copies if copy.value not in self.stacked]
        found = [Transit(v, False, *self.stacks.leaving(v)) for v in stacks] + self._leaving(copies)
        first = self.first([copy.value for copy in copies], recomputed)
        begun: dict[int, list[HostCopy]] = {}
        due: dict[int, list[HostCopy]] = {}
        for copy in sorted(copies, key=lambda copy: (first[copy.value], copy)):
            begun.setdefault(copy.begun, []).append(copy)
            due.setdefault(first[copy.value].stage, []).append(copy)
        late = free = 0.0  # the delay of the step against the clock; when the link is free
        back: dict[int, float] = {}
        begin: dict[int, float] = {}  # of each stage
        for k, stage in enumerate(graph.stages):
            waits[k] = in_loops.get(k, 0.0)
            begin[k] = self.starts[stage.start] + late
            late += waits[k]
            for copy in begun.get(k, ()):
                ready = max(free, self.starts[stage.start] + late)
                free = ready + self.copy_seconds(copy.value)
                back[copy.value] = free
                found.append(Transit(copy.value, True, ready, free))
            for copy in due.get(k, ()):
                node = first[copy.value].node
                need = self.starts[stage.start] if node < 0 else self.starts[node] + again[k]
                more = max(back[copy.value] - (need + late), 0.0)
                waits[k] += more
                late += more
            late += again[k]
            over = self.starts[stage.stop] + late
            ending = (v for v in stacks if self.stacks.pair_of[v].stages[-1] == k)
            found += (Transit(v, True, begin[self.stacks.pair_of[v].stages[0]], over) for v in ending)
        return found, waits

    def _leaving(self, copies: Iterable[HostCopy]) -> list[Transit]:
        """Return the copies to the host of values that no loop stacks."""
        found: list[Transit] = []
        free = 0.0  # when the link is free
        for copy in sorted(copies, key=lambda copy: copy[1:]):
            own = copy.left == self.graph.values[copy.value].producer
            begin = max(free, self.made(copy.value) if own else self.starts[copy.left])
            free = begin + self.copy_seconds(copy.value)
            found.append(Transit(copy.value, False, begin, free))
        return found

    def begins(self, v: int, reading: Reading, gone: int) -> int:
        """Return the stage before which a value's copy back begins for a reader, -1 if the value has not left yet."""
        start = self.graph.stages[reading.stage].start
        need = self.starts[start if reading.node < 0 else reading.node]
        begun = self._begun_before(v, reading.stage, need, gone)
        return begun if begun >= 0 else next(iter(self._able(reading.stage, gone)), -1)

    def _begun_before(self, v: int, last: int, need: float, gone: int) -> int:
        """Return the last stage up to `last` before which a copy back begins in time, -1 for none."""
        starts, stages, begin = self.starts, self.graph.stages, need - LEAD * self.copy_seconds(v)
        able = reversed(self._able(last, gone))
        return next((k for k in able if starts[stages[k].start] <= begin), -1)

    def _able(self, last: int, gone: int) -> list[int]:
        """Return the stages up to `last` before which a copy back may begin, for a value that has left before node
        `gone`.
        """
        stages = self.graph.stages
        return [k for k in self._stages if gone < stages[k].start <= stages[last].start]

    def _placed(self, v: int, left: int, begins: float, reading: Reading) -> HostCopy | None:
        over = begins + REST * self.copy_seconds(v)
        at = bisect_left(self._exits, over, key=lambda n: self.starts[n])
        at = max(at, bisect_right(self._exits, max(left, self._last_forward.get(v, -1))))
        if at == len(self._exits):
            return None
        begun = self.begins(v, reading, self._exits[at])
        return HostCopy(v, left, self._exits[at], begun) if begun >= 0 else None

    def _may_leave(self, v: int) -> bool:
        graph, value = self.graph, self.graph.values[v]
        own = value.materialised and not value.is_output and not value.length
        own = own and graph.nodes[value.producer].primitive != FETCH
        outside = graph.nodes[value.producer].loop < 0 and v not in self._in_loops
        quick = value.nbytes >= LEAST_NBYTES and self.copy_seconds(v) <= graph.host.ahead_seconds
        return own and outside and quick and not kept_here(graph, v)

    @cached_property
    def _stages(self) -> list[int]:
        """The stages that begin outside of loops."""
        graph = self.graph
        return [k for k, stage in enumerate(graph.stages) if graph.nodes[stage.start].loop < 0]

    @cached_property
    def _exits(self) -> list[int]:
        """The nodes that may wait for copies to the host: products of the forward pass outside of loops, and starts of
        stages.
        """
        graph = self.graph
        products = [n for n in range(graph.forward_stop) if exit_operand(graph, n) >= 0]
        return products + [graph.stages[k].start for k in self._stages]

    @cached_property
    def _first(self) -> dict[int, Reading]:
        """The first reader of each residual that some stage reads, recomputation not included."""
        graph = self.graph
        found: dict[int, Reading] = {}
        for n in range(graph.forward_stop, len(graph.nodes)):
            k = graph.stage_of[n]
            for v in graph.reads[n]:
                if graph.is_residual(v) and graph.values[v].producer < graph.forward_stop:
                    found.setdefault(v, Reading(k, n))
        return found

    @cached_property
    def _last_forward(self) -> dict[int, int]:
        """The last node of the forward pass that reads each value."""
        return {v: n for n in range(self.graph.forward_stop) for v in self.graph.reads[n]}

    @cached_property
    def _in_loops(self) -> frozenset[int]:
        """Values that loops read."""
        graph = self.graph
        return frozenset(v for node in graph.nodes if node.loop >= 0 for v in graph.reads[node.id])


def exit_operand(graph: Any, n: int) -> int:
    """Return the operand with which a product of the forward pass waits for copies, -1 if the node is no such product:
    one in memory, or a fused view of such a value.
    """
    node = graph.nodes[n]
    if not node.contraction or node.loop >= 0:
        return -1
    return next((v for v in node.inputs if chain(graph, v) is not None), -1)


def chain(graph: Any, v: int) -> list[int] | None:
    """Return the fused nodes of one operand each, the last first, between a value and one that the forward pass has in
    memory; None if there is no such value.
    """
    found: list[int] = []
    while not graph.values[v].materialised:
        n = graph.values[v].producer
        if n < 0 or len(graph.nodes[n].inputs) != 1 or len(graph.nodes[n].outputs) != 1:
            return None
        found.append(n)
        (v,) = graph.nodes[n].inputs
    n = graph.values[v].producer
    return found if 0 <= n < graph.forward_stop and graph.nodes[n].loop < 0 else None
