"""Offloaded values and the user's own copies to and from host memory -> barriers that say when each copy begins and
ends.

Copies run beside the kernels. The compiler begins each as early, and waits for it as late, as it can. It keeps few
under way at once, and waits for one wherever another begins. So barriers say when:

- A value of the forward pass leaves right behind its producer. Its copy passes a barrier with an operand of its exit, a
  product of the forward pass, which thereby waits until the copy has ended and the device's memory is free. The value
  comes back behind the barrier of a stage; its first reader, or the barrier of the stage by which the copy must have
  ended, waits for it. All later readers read the copy, also for fused values computed from it.
- Each iteration of a loop copies its slice of a stack to the host, where the slices are stacked. An iteration of the
  backward loop begins to copy the next iteration's slice back and hands it on as a carry, so that the copy may run
  until the iteration ends. The first slice comes back before the loop.
- The user's own copies to the device pass the barrier of their stage. A copy to the host begins once its operand is
  computed, and ends at its place in the program. Updates may follow one another within a stage, as they do if the norm
  of all gradients scales each. So the values copied for an update also pass a barrier of their own, together with the
  results of the update before the last.

Images are copied with their axes in memory order, as they pass barriers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var

from .._model._host_copies import chain, exit_operand
from .._program import _compat
from .._program._compat import MemorySpace
from .._program._splice import inlined
from .._rewrite._loop_inlining import CARRY, LAST, STACK
from .._rewrite._streamed_copies import UPDATES, updates
from ._analysis import Analysis
from ._constraints import Point
from ._writer import Writer

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Transfer(NamedTuple):
    """A copy of a value to another memory. **Fields:** `to` that memory; `begin` the point at which it begins; `end`
    the point before which it ends, None if its first reader waits for it.
    """

    value: int
    to: object
    begin: Point
    end: Point | None = None


def transfers(step: Analysis) -> list[Transfer]:
    """Return the schedule's copies, and the user's own to the host."""
    graph, schedule = step.graph, step.schedule
    stacked = sorted(copy for copy in schedule.offloaded if graph.values[copy.value].length)
    whole = sorted(schedule.offloaded.difference(stacked), key=lambda copy: copy[1:])
    first = graph.away.first([copy.value for copy in whole], schedule.recomputed)
    stage_at = {stage.start: k for k, stage in enumerate(graph.stages)}
    found: list[Transfer] = []
    for v, left, gone, begun, over in whole:
        exit_ = Point("stage", stage_at[gone]) if gone in stage_at else Point("before", gone)
        end = Point("stage", over) if 0 <= over <= first[v].stage else None
        found.append(Transfer(v, _HOST, Point("behind", left), exit_))
        found.append(Transfer(v, _DEVICE, Point("stage", begun), end))
    for copy in stacked:
        found.append(Transfer(copy.value, _HOST, Point("behind", copy.left)))
        found.append(Transfer(copy.value, _DEVICE, Point("within", copy.begun)))
    for maker, puts in step.puts.items():
        places = ((*graph.nodes[n].outputs, Point("stage", step.place[n])) for n in puts)
        found.extend(Transfer(v, _HOST, Point("behind", maker), end) for v, end in places)
    return found


class Transfers:
    """The copies of a step, and the present state of each. **Fields:** `there` the names in host memory of values, and
    of loops' stacks; `under_way` the user's copies to the host that have begun, with their results.
    """

    def __init__(self, step: Analysis, writer: Writer) -> None:
        self.step, self.writer = step, writer
        self.there: dict[int, Var] = {}
        self.under_way: dict[Transfer, Var] = {}
        self.begun: dict[Point, list[Transfer]] = {}
        self.over: dict[Point, list[Transfer]] = {}
        for each in transfers(step):
            self.begun.setdefault(each.begin, []).append(each)
            if each.end is not None:
                self.over.setdefault(each.end, []).append(each)
        self._ordered_updates()

    def _ordered_updates(self) -> None:
        """Return the updates that the user's copies to the device serve, in order, with the results of each."""
        step = self.step
        of = updates(step.source, step.fetches)
        made = {n: step.source[n].outvars[0] for n in step.fetches}
        self.update = {n: of[var] for n, var in made.items() if var in of}
        self.turns = list(dict.fromkeys(self.update.values()))
        self.results: dict[int, list[Var]] = {}
        for var in dict.fromkeys(_compat.variables(step.traced.jaxpr.jaxpr.outvars)):
            if (update := of.get(var)) is not None:
                self.results.setdefault(update, []).append(var)
        self.held: set[Var] = set()  # arguments that are behind barriers of their own

    def begin(self, n: int) -> None:
        """Write the copies to the host that begin behind an equation."""
        step, values = self.step, self.step.graph.values
        for each in self.begun.get(Point("behind", n), ()):
            maker, name = values[each.value].producer, self.writer.name(step.variable[each.value])
            if maker in step.begun:
                self.writer.append([step.source[maker]], -1)
                self.under_way[each] = step.variable[each.value]
            elif values[each.value].length:
                self.there[each.value] = self._stack(n, name)
            else:
                self.there[each.value] = self._copy(name, values[each.value].axes, _HOST, "offload")

    def wait(self, n: int) -> None:
        """Write the barrier of an equation of the forward pass that is the exit of copies: one of its operands passes,
        with the copies that must have ended and the values that leave behind it.
        """
        step, writer, graph = self.step, self.writer, self.step.graph
        gone = [each.value for each in self.over.get(Point("before", n), ())]
        if not gone:
            return
        begun = self.begun.get(Point("behind", n), ())
        leaving = [each.value for each in begun if graph.values[each.value].producer != n]
        operand = exit_operand(graph, n)
        nodes = chain(graph, operand) or []
        source = graph.nodes[nodes[-1]].inputs[0] if nodes else operand
        own = [*dict.fromkeys(step.variable[v] for v in (source, *leaving))]
        through = [*own, *(self.there[v] for v in gone)]
        info = step.source[n].source_info
        names = writer.barrier(through, [writer.name(a) for a in through], "barrier_offload", -1, info)
        writer.rename(zip(own, names, strict=False))
        self.there.update(zip(gone, names[len(own) :], strict=True))
        for m in reversed(nodes):
            eqn = step.source[m]
            outvar = _compat.new_var(eqn.outvars[0].aval)
            invars = [writer.name(a) if isinstance(a, Var) else a for a in eqn.invars]
            writer.append([eqn.replace(invars=invars, outvars=[outvar])], -1)
            writer.rename([(eqn.outvars[0], outvar)])

    def through(self, k: int) -> list[Var]:
        """Return the copies that the barrier of a stage delays: those that must have ended, and those back."""
        at = Point("stage", k)
        gone = {each.value for each in self.over.get(at, ()) if each.to is _HOST}
        wanted = gone.union(each.value for each in self.begun.get(at, ()))
        return [name for v, name in self.there.items() if v in wanted]

    def finished(self, k: int) -> list[Var]:
        """Return the copies that must have ended before a stage outside of loops."""
        own = [each for each in self.under_way if each.end is not None and each.end.number <= k]
        back = [each.value for each in self.over.get(Point("stage", k), ()) if each.to is _DEVICE]
        return [*(self.under_way.pop(each) for each in own), *(self.step.variable[v] for v in back)]

    def arrive(self, k: int) -> None:
        """Write the copies back that begin behind the barrier of a stage."""
        self.there = {v: self.writer.held.get(name, name) for v, name in self.there.items()}
        for each in self.begun.get(Point("stage", k), ()):
            axes = self.step.graph.values[each.value].axes
            back = [axes.index(axis) for axis in range(len(axes))]
            name = self._copy(self.there.pop(each.value), (), _DEVICE, "fetch", back)
            self.writer.rename([(self.step.variable[each.value], name)])

    def arrive_in_loop(self, k: int, loop: int, around: int) -> None:
        """Write the copies back of the values read by a loop whose first stage this is. **Arguments:** `around` the
        loop that contains it, -1 for none.
        """
        due = [each.value for each in self.begun.get(Point("within", k), ())]
        if not due:
            return
        opened = self.step.traced.loops[loop]
        backward, last = opened.eqn.params["reverse"], opened.length - 1
        index = _compat.scan_counts(opened.eqn)[1]

        def fetched(i: jax.Array, *stacks: jax.Array) -> list[jax.Array]:
            return [jax.device_put(_row(stack, i), _DEVICE) for stack in stacks]

        def next_fetched(i: jax.Array, *stacks: jax.Array) -> list[jax.Array]:
            i = lax.max(i - 1, jnp.int32(0)) if backward else lax.min(i + 1, jnp.int32(last))
            return [i, *fetched(i, *stacks)]

        stacks = [self.there[v] for v in due]
        start = _compat.literal(jnp.int32(last if backward else 0))
        begun = [start, *self._inlined(fetched, [start, *stacks], around)]
        carries = [_compat.new_var(a.aval) for a in begun]
        self._edges(CARRY, loop, index, begun, carries)
        nexts = self._inlined(next_fetched, [carries[0], *stacks], loop)
        self._edges(LAST, loop, index, nexts, [_compat.new_var(a.aval) for a in nexts])
        self.writer.rename((self.step.variable[v], c) for v, c in zip(due, carries[1:], strict=True))

    def hold(self, n: int) -> None:
        """Write the barrier of the update whose first copy an equation is."""
        step, writer = self.step, self.writer
        if (update := self.update.get(n)) is None or (turn := self.turns.index(update) - UPDATES - 1) < 0:
            return
        nodes = [m for m in step.fetches if self.update.get(m) == update]
        arguments = [step.operands(m)[0] for m in nodes]
        results = [v for v in self.results.get(self.turns[turn], ()) if v in writer.made]
        if not results or not self.held.isdisjoint(arguments):
            return
        through = [*arguments, *results]
        operands = [writer.held.get(a) or writer.name(a) for a in through]
        names = writer.barrier(through, operands, "barrier_fetch", -1, step.source[n].source_info)
        self.held.update(arguments)
        writer.read_behind({m: {a: name} for m, a, name in zip(nodes, arguments, names, strict=False)})
        writer.rename(zip(results, names[len(arguments) :], strict=True))
        self.under_way = {each: var for each, var in self.under_way.items() if var not in results}

    def _copy(
        self, var: Var, before: Sequence[int], space: MemorySpace, scope: str, behind: Sequence[int] = ()
    ) -> Var:
        """Write a copy to a memory, with the axes permuted before and behind it."""
        source = self.step.source[self.step.graph.forward_stop].source_info
        eqns: list[jex.JaxprEqn] = []
        if before:
            eqns.append(_compat.permuted(var, before, source))
        eqns.append(_compat.placed(eqns[-1].outvars[0] if eqns else var, space, source))
        if behind:
            eqns.append(_compat.permuted(eqns[-1].outvars[0], behind, source))
        self.writer.append([_compat.in_scope(eqn, scope) for eqn in eqns], -1)
        return eqns[-1].outvars[0]

    def _stack(self, n: int, name: Var) -> Var:
        """Write the copy to the host of a forward loop's value; return the stack there."""
        loop, source = self.step.graph.nodes[n].loop, self.step.source[n].source_info
        there = _compat.in_scope(_compat.placed(name, _HOST, source), "offload")
        slice_ = there.outvars[0]
        params = {"loop": loop, "index": -1, "length": self.step.traced.loops[loop].length}
        stack = _compat.new_var(STACK.abstract_eval(slice_.aval, **params)[0])
        self.writer.append([there, _compat.new_eqn([slice_], [stack], STACK, params, source)], loop)
        return stack

    def _edges(
        self,
        primitive: jex.Primitive,
        loop: int,
        index: int,
        atoms: Sequence[Var | jex.Literal],
        made: Sequence[Var],
    ) -> None:
        """Write the carries of an iteration, from an index on, that connect it with the code before the loop and the
        next iteration.
        """
        source = self.step.traced.loops[loop].eqn.source_info
        eqns = [
            _compat.new_eqn([a], [var], primitive, {"loop": loop, "index": index + i}, source)
            for i, (a, var) in enumerate(zip(atoms, made, strict=True))
        ]
        self.writer.append(eqns, loop)

    def _inlined(
        self, fn: Callable[..., list[jax.Array]], arguments: Sequence[Var | jex.Literal], loop: int
    ) -> list[Var]:
        """Write the equations of a function of these arguments in a loop; return its results."""
        source = self.step.source[self.step.graph.forward_stop].source_info
        closed = jax.make_jaxpr(fn)(*(a.aval for a in arguments))
        eqns, results = inlined(closed, arguments, source)
        self.writer.append([_compat.in_scope(eqn, "fetch") for eqn in eqns], loop)
        return results


def _row(stack: jax.Array, i: jax.Array) -> jax.Array:
    """Return a row of a stack."""
    zeros = [jnp.int32(0)] * (stack.ndim - 1)
    row = lax.dynamic_slice(stack, (i, *zeros), (1, *stack.shape[1:]), allow_negative_indices=False)
    return lax.squeeze(row, (0,))
