"""Values in host memory meanwhile -> the copies there and back, each held where the schedule has it.

Copies run beside the kernels, and the compiler begins each as early and waits for it as late as it can. So a copy to
the host passes, on its way to nowhere else, a barrier with an operand of its exit: a product of the forward pass, which
thereby waits until the copy is over and the device's memory free. Before the stage of the way back the copy passes the
stage's barrier, behind which that begins. The barrier of the stage by which it is over waits for it, or its first
reader: the compiler has few copies under way at once, and by itself waits wherever it is when another begins. All that
reads the value from then on reads what came back, fused values that are made of it included.

Stacks of loops: see `_stacks_elsewhere`.

Images are copied with their axes in the order of memory, as they pass barriers (see `_layouts`).
"""

from collections.abc import Sequence
from typing import Any

import jax

from .._model._host_copies import HostCopy, chain, exit_operand
from .._program import _compat
from ._layouts import append_barrier

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Elsewhere:
    """The copies of an emitter's schedule."""

    def __init__(self, emitter: Any) -> None:
        self.emitter = emitter
        self.there: dict[int, Any] = {}  # value -> its present name in host memory
        values = emitter.graph.values
        copies = (copy for copy in emitter.schedule.offloaded if not values[copy.value].length)
        self.copies: Sequence[HostCopy] = sorted(copies, key=lambda copy: copy[1:])
        self.leaving: dict[int, list[int]] = {}  # node -> the values whose way to the host begins behind it
        for copy in self.copies:
            self.leaving.setdefault(copy.left, []).append(copy.value)
        first = emitter.graph.away.first([copy.value for copy in self.copies], emitter.schedule.recomputed)
        self.back: dict[int, list[Any]] = {}  # stage -> what has come back before it
        for copy in self.copies:
            if 0 <= copy.over <= first[copy.value].stage:
                self.back.setdefault(copy.over, []).append(emitter.variable[copy.value])

    def leave(self, n: int) -> None:
        """Append the copies to the host that begin behind a node of the forward pass."""
        for v in self.leaving.get(n, ()):
            var = self.emitter.variable[v]
            name = self.emitter.passed.get(var, var)
            self.there[v] = self._append(name, self._axes(v), _HOST, "offload")

    def behind_exit(self, n: int) -> Any:
        """The equation of a node of the forward pass, which waits for the copies whose exit it is."""
        emitter = self.emitter
        eqn = emitter.source[n]
        if not self.copies:
            return eqn
        if gone := [copy.value for copy in self.copies if copy.gone == n]:
            values = emitter.graph.values
            self._wait(n, gone, [v for v in self.leaving.get(n, ()) if values[v].producer != n])
        invars = [a if _compat.is_literal(a) else emitter.passed.get(a, a) for a in eqn.invars]
        return eqn.replace(invars=invars)

    def through(self, k: int) -> list[Any]:
        """The copies that pass the barrier of a stage: those that have to be over, and those that are wanted back."""
        start = self.emitter.graph.stages[k].start
        return [self.there[copy.value] for copy in self.copies if copy.begun == k or copy.gone == start]

    def arriving(self, k: int) -> set[Any]:
        """What comes back behind the barrier of a stage, and does not pass it here."""
        return {self.emitter.variable[copy.value] for copy in self.copies if copy.begun == k}

    def arrive(self, k: int, renamed: dict[Any, Any]) -> None:
        """Append the copies back that begin behind the barrier of a stage; `renamed` what has passed that."""
        for copy in self.copies:
            passed = renamed.pop(self.there[copy.value], None)
            if passed is not None:
                self.there[copy.value] = passed
            if copy.begun == k:
                axes = self._axes(copy.value)
                back = [axes.index(axis) for axis in range(len(axes))]
                var = self._append(self.there.pop(copy.value), (), _DEVICE, "fetch", back)
                self.emitter.passed[self.emitter.variable[copy.value]] = var
        self.copies = [copy for copy in self.copies if copy.begun != k]

    def _wait(self, n: int, gone: Sequence[int], leaving: Sequence[int]) -> None:
        """Append the barrier through which an operand of a node passes with copies that have to be over, and with what
        leaves behind them.
        """
        emitter, graph = self.emitter, self.emitter.graph
        operand = exit_operand(graph, n)
        nodes = chain(graph, operand) or []
        source = graph.nodes[nodes[-1]].inputs[0] if nodes else operand
        own = dict.fromkeys(emitter.variable[v] for v in (source, *leaving))
        through = [*own, *(self.there[v] for v in gone)]
        operands = [emitter.passed.get(a, a) for a in through]
        info = emitter.source[n].source_info
        names = append_barrier(emitter, through, operands, "barrier_offload", -1, info, emitter.barrier)
        emitter.passed.update(zip(own, names, strict=False))
        self.there.update(zip(gone, names[len(own) :], strict=True))
        for m in reversed(nodes):
            eqn = emitter.source[m]
            outvar = _compat.new_var(eqn.outvars[0].aval)
            invars = [a if _compat.is_literal(a) else emitter.passed.get(a, a) for a in eqn.invars]
            emitter.append([eqn.replace(invars=invars, outvars=[outvar])], [-1])
            emitter.passed[eqn.outvars[0]] = outvar

    def _axes(self, v: int) -> tuple[int, ...]:
        return self.emitter.graph.values[v].axes

    def _append(
        self, var: Any, before: Sequence[int], space: Any, scope: str, behind: Sequence[int] = ()
    ) -> Any:
        """Append a copy to that memory, with the axes put in these orders before and behind it."""
        source = self.emitter.source[self.emitter.graph.forward_stop].source_info
        eqns: list[Any] = []
        if before:
            eqns.append(_compat.permuted(var, before, source))
        eqns.append(_compat.placed(eqns[-1].outvars[0] if eqns else var, space, source))
        if behind:
            eqns.append(_compat.permuted(eqns[-1].outvars[0], behind, source))
        self.emitter.append([_compat.in_scope(eqn, scope) for eqn in eqns], [-1] * len(eqns))
        return eqns[-1].outvars[0]
