"""Traced + graph + schedule -> jaxpr of the planned step.

The jaxpr is the traced one with, at the start of each stage, a fence (`lax.optimization_barrier`) and clones of the
dropped equations behind it. Tied as follows:

- through the fence pass the saved and kept values that the clones read, and the saved values and arguments that the
  stage's own contractions read, which the compiler would else copy into another layout long before; other readers keep
  the originals, so that nothing else is cut. Arguments pass for a clone only where it reads nothing else.
- the trigger holds the fence back until the stage before is done: the small results (weight gradients, reductions)
  that it leaves behind pass through the fence on their way to the optimizer, whose updates wait for it. Only where
  there is none that is late enough, a cotangent passes through, which cuts it off from kernels that would read it.
- images pass with their axes in the order of memory (see `_layouts`), so that kernels behind the fence find them as the
  plain step's do.
- fused values (never in memory) that a clone reads are cloned with it; the stage's own equations read the original
  of a fused value whose sources are all originals.
- saved values that the compiler might make again in the backward pass's kernels pass through the first fence.
- what is in host memory meanwhile leaves behind its producer, and comes back behind a fence (see `_elsewhere`), or
  within loops (see `_stacks_elsewhere`).
- what undoes blocks waits for a cotangent behind a fence of its own (see `_undone_blocks`).
- what the user's own program copies from the host's memory, or there, begins and is over where the graph has it (see
  `_streams`).
- in a loop of the backward pass all happens within an iteration: clones of what an iteration of the forward loop made,
  fused values always among them, lest they be stacked, and fences between the loop's own stages. At its start there is
  none: an iteration is held back by the one before, and the first by a fence through which the loop's carries pass.

Laws: what runs once (effects, draws) does so as often as in the traced step, in the same order; what the schedule does
not drop is read in the original. A schedule that drops nothing still has fences, behind
which updates wait until they may overwrite their argument; a graph without stages gives the traced jaxpr.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jex

from .._model._graph import Graph
from .._model._later_passes import later_passes
from .._model._optimizer_updates import finishing_sums
from .._model._primitive_names import FETCH
from .._model._schedule import Passing, Schedule
from .._program import _compat
from .._program._run_counts import check_runs
from .._rewrite._canonical_convolutions import canonical_in_bodies
from .._rewrite._kernel_choice import inline, replaced
from .._rewrite._loop_closing import close_loops, without_unread
from .._rewrite._loop_opening import CARRY, LAST, SLICE, STACK
from .._rewrite._sinking import sink, sunk_values
from .._rewrite._stack_buffers import begun_late, stacked_nbytes
from .._rewrite._trace import Traced
from .._runtime._garbage import uncollected
from ._decoding import Decoding
from ._detaching import detach
from ._differentiable_barrier import fence
from ._elsewhere import Elsewhere
from ._fence_operands import ZERO as PASSING_ZERO
from ._fence_operands import fence_within, passing
from ._hoisting import ZERO, Hazards, is_zero
from ._last_reads import hold, last_reads
from ._layouts import append_fence
from ._mask_operands import behind_fence
from ._placement import entered, places
from ._stacks_elsewhere import StacksElsewhere
from ._streams import Streams
from ._triggers import finished, trigger
from ._undone_blocks import before_blocks
from ._validation import validated
from ._weight_copies import behind_operand

FINISHED = "finished"
"""Barriers that the small results of the stage before hold back. Plans of earlier versions may name other kinds, which
are followed as this one.
"""

COMBINED = "combined"
"""Barriers of a step on several devices through which nothing passes that these add up: the compiler then adds up all
gradients at once, as it does in the plain step. What finishes a stage is a cotangent, so that more may be in memory.
"""

FENCES = (FINISHED, COMBINED)


@uncollected
def emit(
    traced: Traced,
    graph: Graph,
    schedule: Schedule,
    fence: str = FINISHED,
    detached: Sequence[Passing] = (),
) -> jex.ClosedJaxpr:
    """The planned step as a jaxpr whose types are checked, those of its loops too, and which `_validation` has seen to
    compute the step; node ids of `graph` are equation indices of `traced.jaxpr`. Where that is a body, so is this.

    **Arguments:** `fence` the kind of barriers, `FINISHED` or `COMBINED`; `detached` the barriers' operands that are
    put behind barriers of their own, see `_detaching`.
    """
    graph = _with_needed_stages(graph, schedule)
    jaxpr = traced.jaxpr.jaxpr
    if not graph.stages and not traced.loops and not any(map(replaced(graph.backend), jaxpr.eqns)):
        planned = traced.jaxpr
    else:
        emitter = Emitter(traced, graph, schedule, fence)
        outvars = emitter.run()
        eqns, loop_of = sink(emitter.eqns, emitter.loop_of, traced.loops)
        if detached:
            eqns, loop_of, outvars = detach(eqns, loop_of, traced.loops, outvars, detached)
        eqns = close_loops(eqns, loop_of, traced.loops, hoists=graph.backend.hoists)
        eqns = without_unread(eqns, outvars)
        planned = _compat.new_jaxpr(jaxpr.constvars, traced.jaxpr.consts, jaxpr.invars, outvars, eqns)
    if not graph.backend.fuses:
        planned = canonical_in_bodies(planned)
    _compat.check_jaxpr(traced.step(planned))
    check_runs(planned, traced.flat)
    validated(traced, planned)
    return planned


def _with_needed_stages(graph: Graph, schedule: Schedule) -> Graph:
    """Return the graph with the stages that are written: on GPUs none for a schedule that drops nothing, unless there
    are loops, whose ends stay; stages between which copies run finish sums too.
    """
    if not graph.backend.fuses:
        return graph
    if schedule.drops_nothing and not graph.loop_stop:
        return replace(graph, stages=())
    return replace(graph, stages=finishing_sums(graph)) if schedule.offloaded else graph


_CONSTANTS = {PASSING_ZERO: ZERO}


class Emitter:
    """Appends the planned step's equations to `eqns`, with the loop of each in `loop_of`."""

    def __init__(
        self, traced: Traced, graph: Graph, schedule: Schedule, form: str, cotangents: Sequence[Any] = ()
    ):
        self.traced, self.graph = traced, graph
        self.cotangents = cotangents  # of a backward pass that is a program of its own
        self.poor = replaced(graph.backend)
        self.combined = form == COMBINED
        self.schedule = schedule
        self.source = traced.jaxpr.jaxpr.eqns
        self.eqns: list[Any] = []
        self.loop_of: list[int] = []  # of each of them
        self.forward_count = 0  # how many of them are the forward pass's
        self.home: dict[Any, int] = {}  # variable -> the loop in whose iterations it is, -1 for none
        self.clones: dict[Any, Any] = {}  # variable -> its clone that the present stage reads
        self.passed: dict[Any, Any] = {}  # trigger -> its fenced name, which later readers use
        self.mask_operands: dict[Any, Any] = {}  # result -> the name by which masks read it
        self.zeros: dict[int, tuple[Any]] = {}  # loop -> a zero behind the fence before it
        self.waiting: dict[int, int] = {}  # deferred equation -> the stage of the fence that it waits for
        self.value_of: dict[Any, int] = {}
        self.variable: dict[int, Any] = {}
        self.readers: dict[Any, list[int]] = {}
        self.streams = Streams(self)
        for node, eqn in zip(graph.nodes, self.source, strict=True):
            self.value_of.update(zip(eqn.outvars, node.outputs, strict=True))
            self.variable.update(zip(node.outputs, eqn.outvars, strict=True))
            for a in () if node.id in self.streams.begun else eqn.invars:
                if not _compat.is_literal(a):
                    self.readers.setdefault(a, []).append(node.id)
        self.passes = later_passes(graph)
        self.place = places(self)
        self.sunk = sunk_values(self.source, traced.loop_of, traced.loops)
        self.own: list[list[int]] = [[] for _ in graph.stages]
        for n in range(graph.forward_stop, len(graph.nodes)):
            self.own[self.place[n]].append(n)
        self.hazards = Hazards(graph, self.source, self.readers, self.value_of)
        self.returned = {a for a in traced.jaxpr.jaxpr.outvars if not _compat.is_literal(a)}
        self.returned |= self.streams.returning
        self.last_reads, self.held = last_reads(self)
        self.overwritten: dict[Any, Any] = {}  # argument -> its name where it is updated
        self.decoding = Decoding(self)
        self.elsewhere = Elsewhere(self)
        self.stacks_elsewhere = StacksElsewhere(self)
        self.blocks = before_blocks(self)

    def run(self) -> list[Any]:
        """Append everything; returns the step's outputs by their final names."""
        for n in range(self.graph.forward_stop):
            eqn = self.decoding.as_made(n, behind_fence(self, n, self.elsewhere.behind_exit(n)))
            self.append([behind_operand(self, n, eqn, lambda a: a)], [self.traced.loop_of[n]])
            self.elsewhere.leave(n)
            self.stacks_elsewhere.leave(n)
        self.forward_count = len(self.eqns)
        for k in range(len(self.graph.stages)):
            self.stage(k)
        return self.finish(self.traced.jaxpr.jaxpr.outvars)

    def append(self, eqns: Sequence[Any], loop_of: Sequence[int]) -> None:
        for eqn, loop in zip(eqns, loop_of, strict=True):
            placed = inline(eqn) if self.poor(eqn) else [eqn]
            late = self.graph.backend.hoists and self.forward_count > 0 and loop < 0
            if late and stacked_nbytes(eqn) > self.graph.small_nbytes:
                placed = begun_late(eqn)
            self.eqns.extend(placed)
            self.loop_of.extend([loop] * len(placed))
            leaves = eqn.primitive in (LAST, STACK)
            around = self.traced.loops[loop].parent if leaves else loop
            self.home.update((v, around) for made in placed for v in made.outvars)

    def finish(self, outvars: Sequence[Any]) -> list[Any]:
        """Append what still waits; returns the step's outputs by their final names."""
        if self.waiting:
            self.fenced([], finished(self, len(self.graph.stages)), "fence_updates", -1)
            self._run(list(self.waiting), {})
        return [a if _compat.is_literal(a) else self.passed.get(a, a) for a in outvars]

    def stage(self, k: int) -> None:
        graph, stage = self.graph, self.graph.stages[k]
        kept_here = {v for v, s in self.schedule.kept if s == k}
        self.clones = {var: clone for var, clone in self.clones.items() if self.value_of[var] in kept_here}
        wanted = self._wanted(k)
        loop, around = graph.nodes[stage.start].loop, graph.around(stage.start)
        # The fence of a loop's first stage holds the whole loop back, not what its iterations recompute.
        begins = loop != around
        renamed = self._fence(k, [] if begins else wanted, around)
        self.elsewhere.arrive(k, renamed)
        inside = [n for n in self.own[k] if graph.nodes[n].loop == loop]
        outside = [n for n in self.own[k] if graph.nodes[n].loop != loop]
        if begins:
            self.waiting = self._resume(k, renamed)
            self._run(outside, renamed)
            self.stacks_elsewhere.arrive(k, loop, around)
            if PASSING_ZERO in renamed:
                self.zeros[loop] = (renamed.pop(PASSING_ZERO),)
            if self.traced.loops[loop].length == 1:
                renamed = fence_within(self, k, wanted, inside, loop)
        for n in wanted:
            eqn = self.decoding.again(n, self.source[n])
            invars = [
                a if _compat.is_literal(a) else self._name(eqn, loop, a, renamed.get(a), self.clones.get(a))
                for a in eqn.invars
            ]
            outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
            clone = _compat.in_scope(eqn.replace(invars=invars, outvars=outvars), f"recompute_{k}")
            placed = self._placed(n, clone, renamed)
            self.append(placed, [loop] * len(placed))
            self.clones.update(
                (var, clone)
                for var, clone in zip(eqn.outvars, outvars, strict=True)
                if self.value_of[var] not in self.schedule.saved
            )
        if not begins:
            self.waiting = self._resume(k, renamed)
        self.waiting |= dict(stage.deferred)
        now = [n for n in inside if n not in self.waiting]
        self._run(sorted(now, key=lambda n: (n in self.held, n)), renamed)

    def _resume(self, k: int, renamed: dict[Any, Any]) -> dict[int, int]:
        """Append the deferred equations that waited for the fence of stage `k`; returns those that wait on."""
        self._run([n for n, until in self.waiting.items() if until <= k], renamed)
        return {n: until for n, until in self.waiting.items() if until > k}

    def _run(self, nodes: Sequence[int], renamed: dict[Any, Any]) -> None:
        """Append equations in their own place, reading clones and fenced names where there are any."""
        for n in nodes:
            if n in self.streams.begun:
                continue
            if n in self.blocks:
                self.fenced([], self.blocks[n], "fence_block", -1)
            self.streams.hold(n, renamed)
            eqn = self.decoding.as_made(n, self.source[n])
            invars = [
                a
                if _compat.is_literal(a)
                else self._name(
                    eqn,
                    self.graph.nodes[n].loop,
                    a,
                    self.streams.names.get(a) or (self._waits(n, a) and renamed.get(a)),
                    n in self.held and self.overwritten.get(a),
                    self.clones.get(a),
                )
                for a in eqn.invars
            ]
            eqn = eqn if invars == list(eqn.invars) else eqn.replace(invars=invars)
            placed = self._placed(n, eqn, renamed)
            self.append(placed, [self.graph.nodes[n].loop] * len(placed))
            hold(self, n)
            self.streams.leave(n)

    def _name(self, eqn: Any, loop: int, var: Any, *names: Any) -> Any:
        """What an equation, in the iterations of a loop, reads in place of an operand: of these names, and that
        behind a trigger's fence, the first that it sees; else the operand itself.

        A loop begins with what is there before it: names made within its iterations mean nothing there.
        """
        if eqn.primitive in (CARRY, SLICE) and loop >= 0:
            loop = self.graph.parents[loop]
        seen = {-1}
        while loop >= 0:
            seen.add(loop)
            loop = self.graph.parents[loop]
        known = (name for name in (*names, self.passed.get(var)) if name)
        return next((name for name in known if self.home.get(name, -1) in seen), var)

    def maker(self, var: Any) -> int:
        """The equation that makes a variable."""
        return self.graph.values[self.value_of[var]].producer

    def _placed(self, n: int, eqn: Any, renamed: dict[Any, Any]) -> list[Any]:
        """The equation, which is `n` or a clone of it, held back where nothing else would hold it."""
        zero = renamed.get(PASSING_ZERO) if self.graph.backend.hoists else None
        if is_zero(eqn) and zero is not None:
            return [eqn.replace(invars=[zero])]
        if eqn.primitive.name == "scan_stack" and len(eqn.invars) == 1:
            eqn = eqn.replace(invars=[*eqn.invars, *self.zeros.get(eqn.params["loop"], ())])
        loop = self.graph.nodes[n].loop
        return [behind_operand(self, n, eqn, lambda a: self._name(eqn, loop, a, renamed.get(a)))]

    def _wanted(self, k: int) -> list[int]:
        """The equations to clone: the schedule's nodes, and the fused ones between them and the stage's readers."""
        graph = self.graph
        wanted = set(self.schedule.recomputed[k])
        gone = {v for n in wanted for v in graph.nodes[n].outputs}
        gone |= {v for v, s in self.schedule.kept if s == k} | self.schedule.away | self.decoding.copies
        stack = [
            v
            for n in self.own[k]
            for v in graph.nodes[n].inputs
            if not graph.values[v].materialised
            and (
                self._apart(n, v)
                or self.hazards.early(n, self.variable[v])
                or not gone.isdisjoint(graph.sources[v])
            )
        ]
        # What a clone reads must not be written to memory for its sake: fused operands are cloned with it.
        stack.extend(v for n in wanted for v in graph.nodes[n].inputs)
        self._clone_fused(k, stack, wanted)
        if graph.backend.fuses:
            # A kernel that makes what is cloned besides its own result is to read the sources of both once.
            again = {v for n in wanted for v in graph.reads[n]} & self.schedule.saved
            stack = [v for n in self.own[k] for v in graph.nodes[n].inputs]
            self._clone_fused(k, [v for v in stack if not again.isdisjoint(graph.sources[v])], wanted)
        return sorted(n for n in wanted if graph.nodes[n].repeatable)

    def _clone_fused(self, k: int, stack: list[int], wanted: set[int]) -> None:
        """Add to the equations to clone for a stage those that make these values and are fused, and theirs."""
        graph = self.graph
        loop = graph.nodes[graph.stages[k].start].loop
        while stack:
            v = stack.pop()
            producer = graph.values[v].producer
            if (
                producer < 0
                or producer in wanted
                or graph.values[v].materialised
                or self.place[producer] >= k
                or producer in self.waiting
                or not graph.repeats(loop, graph.nodes[producer].loop)
            ):
                continue
            wanted.add(producer)
            stack.extend(graph.nodes[producer].inputs)

    def _apart(self, n: int, v: int) -> bool:
        """Whether what the equation reads was made in another loop's iteration, or in another program."""
        values, nodes = self.graph.values, self.graph.nodes
        producer = values[v].producer
        elsewhere = values[v].length > 0 and nodes[producer].loop != nodes[n].loop
        return elsewhere or bool(self.cotangents and 0 <= producer < self.graph.forward_stop)

    def _fence(self, k: int, wanted: list[int], loop: int) -> dict[Any, Any]:
        """Append the stage's fence in a loop, -1 for none; returns the fenced names of what passes through."""
        through = [*passing(self, k, wanted, loop), *self.elsewhere.through(k), *self.streams.through(k)]
        through = list(dict.fromkeys(through))
        # What is outside of a loop is over before the loop, or behind it.
        over = [*self.streams.over(k), *self.elsewhere.back.get(k, ())] if loop < 0 else []
        due = any(until <= k for until in self.waiting.values())
        waits_for = [*trigger(self, k), *over]
        return self.fenced(through, waits_for, f"fence_{k}", loop) if through or due or over else {}

    def fenced(self, through: list[Any], trigger: list[Any], name: str, loop: int) -> dict[Any, Any]:
        """Append a fence; returns the fenced names of what passes through, and remembers those of the trigger."""
        varying = {_compat.varying_axes(a) for a in (*trigger, *through) if not isinstance(a, str)}
        if any(varying):
            # In a `shard_map` a fence takes what varies over the same axes; what recomputation reads does somewhere.
            axes = max(varying, key=len)
            through = [a for a in through if not isinstance(a, str) and _compat.varying_axes(a) == axes]
            trigger = [a for a in trigger if _compat.varying_axes(a) == axes]
        trigger = [a for a in dict.fromkeys(trigger) if a not in set(through)]
        operands = [
            _CONSTANTS.get(a) or self.clones.get(a) or self.passed.get(a, a) for a in (*through, *trigger)
        ]
        if not operands:
            return {}
        source = self.source[self.graph.forward_stop].source_info
        outvars = append_fence(self, (*through, *trigger), operands, name, loop, source, self.barrier)
        self.passed.update(zip(trigger, outvars[len(through) :], strict=True))
        return dict(zip(through, outvars, strict=False))

    @property
    def barrier(self) -> Any:
        """What makes a fence's equation."""
        return fence if self.cotangents else _compat.barrier

    def beside(self, operands: Sequence[Any], source: Any) -> list[Any]:
        """Append a fence for one equation outside of loops; returns the names of what passes."""
        return append_fence(self, operands, operands, "fence_operand", -1, source, self.barrier)

    def _waits(self, n: int, var: Any) -> bool:
        """Whether the equation reads the operand behind the fence, though that is not recomputed."""
        saved = self.graph.backend.fuses and self.value_of.get(var) in self.schedule.saved
        fetched = self.graph.nodes[n].primitive == FETCH
        return saved or fetched or bool(entered(self, n)) or self.hazards.early(n, var)
