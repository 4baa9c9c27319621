"""The planner's view of a step: plain ints, floats and strings, no JAX object.

A `Graph` is a schedule of `Node`s that read and write `Value`s. Nodes stand in execution order: the first
`stages[0].start` are the forward pass, and every later node belongs to one `Stage`. Values that the forward pass
computes and a stage reads are *residuals*; the planner decides which are saved, and in which stages the others are
recomputed.

Only *materialised* values occupy memory. The others exist only inside the kernels into which XLA fuses their producers:
reading such a value means reading its materialised `sources`.

`Backend` describes the compiler of a platform, as far as plans depend on it. `in_place` returns the kernels whose
result takes over the memory of an operand that is read for the last time.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._runtime._mechanisms import mechanism
from . import _tape
from ._host_copies import HostMemory, Offload
from ._primitive_names import OVERWRITING
from ._variant import PLAIN, Variant


@dataclass(frozen=True, slots=True)
class Backend:
    """Properties of a compiler that the model depends on.

    **Fields:**

    - `materialises_eagerly`: it computes large arrays (broadcasts, zeros, operands in another layout, costly pointwise
      results) long before they are read, unless a barrier holds their operands back.
    - `fuses_reductions`: it fuses a reduction or an update with the producers of its operands. A barrier would split
      that kernel, so barriers are few, updates run in the stage of their gradient, and step times are read off compiled
      kernels.
    """

    materialises_eagerly: bool
    fuses_reductions: bool


@functools.cache
def backend(platform: str) -> Backend:
    """Return the compiler of a platform, given JAX's name (`"cpu"`, `"gpu"`, ...)."""
    return Backend(materialises_eagerly=platform == "cpu", fuses_reductions=platform != "cpu")


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the step.

    **Fields:**

    - `id`: its dense index. `producer`: the id of the node that computes it, -1 for arguments and constants.
    - `nbytes`: its size on one device. `materialised`: whether it is written to memory. `is_output`: whether the step
      returns it.
    - `shape` as text (`f32[32,56,56,64]`); `name`: the user's `checkpoint_name`, or "".
    - `length`: the trip count of the forward loop that computes one such value per iteration; saved for a backward
      loop, all of them are stacked. 0 outside of loops.
    - `saved_seconds`: the time of the copies into such a stack and out of it.
    - `axes`: an image's axes, from the outermost to the innermost in memory; () for the program's order.
    """

    id: int
    producer: int
    nbytes: int
    materialised: bool
    is_output: bool = False
    shape: str = ""
    name: str = ""
    length: int = 0
    saved_seconds: float = 0.0
    axes: tuple[int, ...] = ()

    @property
    def saved_nbytes(self) -> int:
        """The bytes that saving the value takes: `nbytes` for each iteration."""
        return self.nbytes * (self.length or 1)


@dataclass(frozen=True, slots=True)
class Node:
    """One equation.

    **Fields:**

    - `id`: its place in the schedule. `primitive`: its name in JAX. `inputs` and `outputs`: ids of values.
    - `seconds`: the time of running it once more on the device, for all iterations of its loop. `flops`: of one
      iteration. `workspace_nbytes`: scratch memory while it runs.
    - `fusable_into`: nodes of the backward pass into whose kernel the compiler fuses it if both run in the same stage.
      `fused_seconds`: its time in that kernel, if no other recomputed node reads its result.
    - `summed_nbytes` and `gathered_nbytes`: the bytes that a device sends per iteration to sum partial results, and for
      other reasons.
    - `fusion_root`: whether it is a separate kernel (a contraction, reduction, loop, ...) that no reader can absorb.
      `contraction`: whether its operands must be in memory, because it absorbs none of their producers.
    - `forward`: whether its outputs may be residuals. `repeatable`: whether it may run twice. `decides`: whether it
      must not because it makes a decision, or computes an operand of one.
    - `scope`: its JAX name stack. `source`: the user's line, `file.py:12 (function)`.
    - `loop`: the loop whose body contains it, -1 for none. The nodes of a loop are consecutive.
    """

    id: int
    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float
    flops: float = 0.0
    workspace_nbytes: int = 0
    fusion_root: bool = False
    contraction: bool = False
    forward: bool = True
    repeatable: bool = True
    decides: bool = False
    scope: str = ""
    source: str = ""
    loop: int = -1
    fusable_into: tuple[int, ...] = ()
    fused_seconds: float = 0.0
    summed_nbytes: int = 0
    gathered_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Pin:
    """A decision of the user's, which every solver follows.

    **Fields:** `action`: `"save"`, `"recompute"` or `"offload"` for a value, or `"stage"` for a cut of the backward
    pass. `at`: the value's id, or the node before which a stage begins. `origin`: the user's call or option, `hint(...,
    "save") at model.py:12`.
    """

    action: str
    at: int
    origin: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch `start <= node id < stop` of the schedule, before which dropped values are recomputed.

    **Fields:** `finished`: the values (weight gradients, statistics) that mark its end. `deferred`: its nodes
    (optimizer updates) that wait for the next barrier, see `Graph.released`.
    """

    start: int
    stop: int
    finished: tuple[int, ...] = ()
    deferred: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A step as solvers see it.

    **Fields:**

    - `nodes` in execution order; `values`; `stages`, which tile the schedule from the end of the forward pass to its
      end.
    - `base_nbytes`: the bytes in use all the time (arguments + outputs - aliased). `step_seconds`: the plain step's
      time, to which overheads are relative. `small_nbytes`: residuals up to this size are always saved.
    - `donated`: the arguments whose memory the step's outputs reuse.
    - `platform`: the compiler's, by JAX's name (`"cpu"`, `"gpu"`).
    - `parents`: for each loop the loop around it, -1 for none. `groups`: a number for each loop, shared only by the two
      loops of a pair. `loop_lengths`: the iterations of each.
    - `extra_seconds`: the extra time of this `form` of the step before anything is saved in loops or recomputed;
      negative if it is faster.
    - `pins`: the user's decisions. `counts_forward`: whether memory counts in the forward pass too, or only from its
      end on (see `_residuals`). `host`: the host memory to which values may be offloaded, None for none.
    """

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    stages: tuple[Stage, ...]
    base_nbytes: int
    step_seconds: float
    small_nbytes: int = 0
    donated: frozenset[int] = frozenset()
    platform: str = "cpu"
    parents: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    loop_lengths: tuple[int, ...] = ()
    extra_seconds: float = 0.0
    form: Variant = PLAIN
    pins: tuple[Pin, ...] = ()
    counts_forward: bool = True
    host: HostMemory | None = None

    def alike(self, other: "Graph") -> bool:
        """Return whether the model errs in the same way for both graphs: equal forms, and both with or without host
        memory.
        """
        return self.form == other.form and (self.host is None) == (other.host is None)

    def around(self, node: int) -> int:
        """Return the innermost loop that contains both this node and the one before it, -1 for none."""
        before = self.loops_of(node - 1) if node else ()
        return next((loop for loop in self.loops_of(node) if loop in before), -1)

    def loops_of(self, node: int) -> tuple[int, ...]:
        """Return the loops whose bodies contain a node, the innermost first."""
        return self.within(self.nodes[node].loop)

    def within(self, loop: int) -> tuple[int, ...]:
        """Return a loop and the loops around it, the innermost first; () for -1."""
        found = []
        while loop >= 0:
            found.append(loop)
            loop = self.parents[loop]
        return tuple(found)

    @cached_property
    def pairs(self) -> tuple[int, ...]:
        """The forward loops of pairs outside of other loops."""
        loops = Counter(self.groups)
        return tuple(loop for loop, count in loops.items() if count > 1 and self.parents[loop] < 0)

    @cached_property
    def total_trips(self) -> tuple[int, ...]:
        """The runs of each loop's body in one step: its iterations times those of all loops around it."""
        found: list[int] = []
        for length, parent in zip(self.loop_lengths, self.parents, strict=True):
            found.append(length * (found[parent] if parent >= 0 else 1))
        return tuple(found)

    @property
    def backend(self) -> Backend:
        """The properties of the platform's compiler."""
        return backend(self.platform)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each node, -1 in the forward pass."""
        stage_of = [-1] * len(self.nodes)
        for k, stage in enumerate(self.stages):
            stage_of[stage.start : stage.stop] = [k] * (stage.stop - stage.start)
        return tuple(stage_of)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The materialised values that a kernel reads to read each value; the value itself if materialised.

        Arguments and constants are always in memory and count as no source.
        """
        sources: list[tuple[int, ...]] = [()] * len(self.values)
        for value in self.values:
            if value.producer < 0:
                continue
            if value.materialised:
                sources[value.id] = (value.id,)
        for node in self.nodes:
            fused = [v for v in node.outputs if not self.values[v].materialised]
            if fused:
                reads = self._union(sources, node.inputs)
                for v in fused:
                    sources[v] = reads
        return tuple(sources)

    @staticmethod
    def _union(sources: list[tuple[int, ...]], values: tuple[int, ...]) -> tuple[int, ...]:
        distinct = {sources[v] for v in values if sources[v]}
        if len(distinct) == 1:
            return distinct.pop()
        return tuple(sorted({u for group in distinct for u in group}))

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each value, in order, whether or not it is materialised."""
        readers: list[list[int]] = [[] for _ in self.values]
        for node in self.nodes:
            for v in node.inputs:
                readers[v].append(node.id)
        return tuple(map(tuple, readers))

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The materialised values that each node's kernel reads; empty for nodes that are fused away."""
        sources = list(self.sources)
        return tuple(self._union(sources, n.inputs) if self.kernel[n.id] else () for n in self.nodes)

    def joins(self, n: int, stage: int) -> int:
        """Return the node of this stage into whose kernel a recomputed node is fused, -1 for none. It holds only if no
        other recomputed node reads the result.
        """
        return next((m for m in self.nodes[n].fusable_into if self.stage_of[m] == stage), -1)

    @cached_property
    def forward_tape(self) -> _tape.Tape:
        """The simulated forward pass that all schedules share."""
        return _tape.forward_tape(self)

    @cached_property
    def played(self) -> dict[Any, Any]:
        """The profiles of the last few simulated schedules; see `simulate`."""
        return {}

    @cached_property
    def loop_stop(self) -> dict[int, int]:
        """The id after each loop's last node."""
        return {n.loop: n.id + 1 for n in self.nodes if n.loop >= 0}

    @cached_property
    def kernel(self) -> tuple[bool, ...]:
        """Whether each node writes memory or is heavy, and so runs as a kernel (or as the root of one)."""
        return tuple(
            n.fusion_root or not n.outputs or any(self.values[v].materialised for v in n.outputs)
            for n in self.nodes
        )

    @cached_property
    def residuals(self) -> tuple[int, ...]:
        """The materialised forward values that stages need, directly or to recompute others; ascending ids."""
        needed: set[int] = set()
        stack = [v for needs in self._needs for v in needs]
        while stack:
            v = stack.pop()
            if v in needed or not self.is_residual(v):
                continue
            needed.add(v)
            node = self.nodes[self.values[v].producer]
            if node.repeatable and v not in self.pinned["save"]:
                stack.extend(self.reads[node.id])
        return tuple(sorted(needed))

    @cached_property
    def pinned(self) -> dict[str, frozenset[int]]:
        """The values, or nodes, that are pinned to each action; `"save"` includes `"offload"`."""
        actions = ("save", "recompute", "offload", "stage")
        found = {action: frozenset(p.at for p in self.pins if p.action == action) for action in actions}
        return found | {"save": found["save"] | found["offload"]}

    @cached_property
    def in_place(self) -> frozenset[int]:
        """The nodes of the backward pass whose result overwrites an operand at its last use."""
        return in_place(self)

    @cached_property
    def last_reader(self) -> dict[int, int]:
        """The last node that reads each value under any schedule: a forward node may run again for readers of its
        results.
        """
        last: dict[int, int] = {}
        for node in reversed(self.nodes):
            until = max((last.get(v, -1) for v in node.outputs), default=-1) if node.forward else -1
            for v in (*self.reads[node.id], *(node.inputs if node.forward else ())):
                last[v] = max(last.get(v, -1), node.id, until)
        return last

    @cached_property
    def away(self) -> Offload:
        """The values that may be offloaded between their readers, and the times of their copies."""
        return Offload(self)

    @cached_property
    def lingering(self) -> dict[int, int]:
        """The finished values that deferred nodes read, each with the stage whose barrier releases these nodes."""
        lingering: dict[int, int] = {}
        for k, stage in enumerate(self.stages):
            read = {v for n in stage.deferred for v in self.nodes[n].inputs}
            lingering |= dict.fromkeys(read.intersection(stage.finished), self.released[k])
        return lingering

    @cached_property
    def released(self) -> list[int]:
        """For each stage, the stage whose barrier its deferred nodes wait for: the next outside of loops, or one past
        the last for the step's end.
        """
        found = [following := len(self.stages)]
        for k in range(len(self.stages) - 1, 0, -1):
            following = k if self.around(self.stages[k].start) < 0 else following
            found.append(following)
        return found[::-1]

    def holdable(self, value: int, stage: int) -> bool:
        """Return whether the stage before can recompute the value and hand it on: never into a loop or out of one."""
        if stage <= self.stage_of[self.values[value].producer] + 1:
            return False
        before, loop = (self.nodes[s.start].loop for s in self.stages[stage - 1 : stage + 1])
        return before == loop and self.repeats(loop, self.nodes[self.values[value].producer].loop)

    def kept_by(self, value: int, loop: int) -> int:
        """Return the outermost loop that keeps a value because `loop` reads it, -1 for none: each iteration of a loop
        that does not compute the value may read it. Loops of one iteration do not count.
        """
        made, kept = self.values[value].producer, -1
        while loop >= 0 and loop not in self.loops_of(made):
            kept, loop = loop if self.loop_lengths[loop] > 1 else kept, self.parents[loop]
        return kept

    def reader_loop(self, node: Node) -> int:
        """Return the loop in whose iterations a node reads its operands: for a carry's start, the surrounding one."""
        return self.parents[node.loop] if node.primitive == "scan_carry" else node.loop

    def kept_until(self, value: int, loop: int) -> int:
        """Return the last node of the loop that `kept_by` returns, -1 for none."""
        kept = self.kept_by(value, loop)
        return self.loop_stop[kept] - 1 if kept >= 0 else -1

    def repeats(self, loop: int, other: int) -> bool:
        """Return whether a node of one loop's body may run again in another's; -1 stands for no loop."""
        return loop == other or (min(loop, other) >= 0 and self.groups[loop] == self.groups[other])

    def recomputable(self, value: int) -> bool:
        """Return whether the value may be dropped and recomputed."""
        made_again = self.is_residual(value) and self.nodes[self.values[value].producer].repeatable
        return made_again and value not in self.pinned["save"]

    @cached_property
    def _needs(self) -> tuple[tuple[int, ...], ...]:
        needs: list[set[int]] = [set() for _ in self.stages]
        for node in self.nodes[self.forward_stop :]:
            k = self.stage_of[node.id]
            needs[k].update(v for v in self.reads[node.id] if self.stage_of[self.values[v].producer] != k)
        return tuple(tuple(sorted(v for v in group if self.is_residual(v))) for group in needs)

    def needs(self, stage: int) -> tuple[int, ...]:
        """Return the residuals that the stage's nodes read, those of its recomputation not included."""
        return self._needs[stage]

    def is_small(self, value: int) -> bool:
        """Return whether the value is saved because it is small; never in loops if each stack needs its own kernel."""
        small = self.values[value].saved_nbytes <= self.small_nbytes
        return small and not (self.values[value].length and self.backend.fuses_reductions)

    def is_residual(self, value: int) -> bool:
        """Return whether the forward pass computed the value."""
        producer = self.values[value].producer
        return producer >= 0 and self.nodes[producer].forward

    @property
    def forward_stop(self) -> int:
        """The number of nodes of the forward pass."""
        return self.stages[0].start if self.stages else len(self.nodes)

    def computed_nbytes(self, n: int) -> int:
        """Return the bytes of a node's operands that the step computes, arguments not included."""
        return sum(self.values[v].nbytes for v in self.nodes[n].inputs if self.values[v].producer >= 0)

    def kernels(self) -> Iterator[Node]:
        """Return the nodes that run as separate kernels, in execution order."""
        return (n for n in self.nodes if self.kernel[n.id])


def dies_at(graph: Any, v: int, node: Any, nbytes: int | None = None) -> bool:
    """Return whether this node is the last under any schedule to read a value (of this size) that the step computed.

    For forward values this is known only where the compiler fuses: XLA:CPU may keep them under another kernel's result.
    """
    value = graph.values[v]
    own = value.producer >= 0 and not value.is_output
    own = own and (graph.backend.fuses_reductions or not graph.nodes[value.producer].forward)
    own = own and nbytes in (None, value.nbytes) and graph.last_reader.get(v) == node.id
    return own and graph.kept_by(v, graph.reader_loop(node)) < 0


def _begun(graph: Any) -> frozenset[int]:
    """Return the carries of loops in the memory of their initial value: no other node reads it, and carries never run
    again.
    """
    values, carries = graph.values, (node for node in graph.nodes if node.primitive == "scan_carry")
    begun = (
        (node, values[v]) for node in carries for v in node.inputs if list(graph.readers[v]) == [node.id]
    )
    return frozenset(
        node.id
        for node, value in begun
        if value.producer >= 0 and not value.is_output and value.nbytes == values[node.outputs[0]].nbytes
    )


@mechanism("in-place results", off=lambda _: frozenset())
def in_place(graph: Any) -> frozenset[int]:
    """Return the nodes of the backward pass whose result takes over the memory of an operand that is read for the last
    time.

    These are pointwise kernels and those of `OVERWRITING` with an operand of the result's size that no later node
    reads, and no reduction that is fused into the kernel; and carries, in either pass.
    """
    # Operands of reductions hidden in a fused value: the kernel reads them in full before it may overwrite any.
    reduced: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        fused = [v for v in node.outputs if not graph.values[v].materialised]
        hidden = frozenset().union(*(reduced[v] for v in node.inputs if v in reduced)) if fused else None
        if hidden is not None and node.fusion_root:
            hidden = hidden.union(*(graph.sources[v] for v in node.inputs))
        reduced.update((v, hidden) for v in fused if hidden)

    return _begun(graph).union(
        node.id
        for node in graph.nodes
        if (node.primitive in OVERWRITING or not node.fusion_root)
        and not node.forward
        and len(node.outputs) == 1
        for nbytes in (graph.values[node.outputs[0]].nbytes,)
        for read in (frozenset().union(*(reduced[v] for v in node.inputs if v in reduced)),)
        if any(v not in read and dies_at(graph, v, node, nbytes) for v in graph.reads[node.id])
    )
