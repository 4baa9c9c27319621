"""Values in host memory meanwhile, the user's own copies there and back -> each begun, and over, where it should be.

Copies run beside the kernels, and the compiler begins each as early and waits for it as late as it can. It has few
under way at once, and by itself waits wherever it is when another begins. So barriers say when:

- a value of the forward pass leaves behind its producer. Its copy passes, on its way to nowhere else, a barrier with an
  operand of its exit: a product of the forward pass, which thereby waits until the copy is over and the device's memory
  free. It comes back behind the barrier of a stage, and the barrier of the stage by which it is over waits for it, or
  its first reader. All that reads the value from then on reads what came back, fused values made of it included.
- of a loop's stack each iteration copies its slice to the host, where the slices are stacked. An iteration of the
  backward loop begins to copy the next one's slice back and hands it on, as a carry: the compiler lets the copy run
  until the iteration ends. The first slice comes back before the loop.
- what the user's program copies to the device passes the barrier of the stage in which its copy stands. A copy to the
  host begins as soon as there is what it copies, and is over where it stands. Updates may follow one another within a
  stage, as they do where the norm of all gradients scales each. What an update has copied therefore passes a barrier of
  its own besides, with what the one before the last returns, to which memory ever.

Images are copied with their axes in the order of memory, as they pass barriers.
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
    """A copy of a value to another memory.

    **Fields:** `to` that memory; `begin` the point at which it begins; `end` that before which it is over, None where
    its first reader waits for it.
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
    """The copies of a step, and where each is at present.

    **Fields:** `there` the names in host memory of values, and of loops' stacks; `under_way` the user's copies to the
    host that have begun, with their results.
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
        """Find the updates that the user's copies to the device are for, in order, and what each returns."""
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
        """Write the barrier of an equation of the forward pass that is the exit of copies: an operand of it passes,
        with the copies that have to be over, and with what leaves behind them.
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
        """Return the copies that the barrier of a stage holds back: those to the host that have to be over, and those
        that are wanted back.
        """
        at = Point("stage", k)
        gone = {each.value for each in self.over.get(at, ()) if each.to is _HOST}
        wanted = gone.union(each.value for each in self.begun.get(at, ()))
        return [name for v, name in self.there.items() if v in wanted]

    def finished(self, k: int) -> list[Var]:
        """Return the copies that have to be over before a stage outside of loops."""
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
        """Write the copies back of what a loop reads whose first stage this is.

        **Arguments:** `around` the loop in which it is, -1 for none.
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
        """Write the barrier of the update that an equation is the first to copy for."""
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
        """Write a copy to that memory, with the axes put in these orders before and behind it."""
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
        """Write the copy to the host of what an equation of a forward loop has made; returns the stack there."""
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
        """Write what ties an iteration's carries, from that index on, to the loop before it and the next one."""
        source = self.step.traced.loops[loop].eqn.source_info
        eqns = [
            _compat.new_eqn([a], [var], primitive, {"loop": loop, "index": index + i}, source)
            for i, (a, var) in enumerate(zip(atoms, made, strict=True))
        ]
        self.writer.append(eqns, loop)

    def _inlined(
        self, fn: Callable[..., list[jax.Array]], arguments: Sequence[Var | jex.Literal], loop: int
    ) -> list[Var]:
        """Write the equations of a function of these arguments in a loop; returns its results."""
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
