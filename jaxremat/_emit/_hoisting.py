"""Graph + equations -> what the compiler may do long before its place, if nothing holds it back.

XLA:CPU fills arrays with zeros, broadcasts small operands and copies operands of contractions into other layouts as
soon as it can, and keeps fused values in memory that several kernels would otherwise compute again. Elsewhere kernels
do all that where it is needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._model._graph import Graph
from .._model._later_passes import LaterPass, made_later
from .._model._schedule import Schedule
from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import is_costly, is_light, is_loop_edge

ZERO = _compat.literal(np.float32(0))


class Hazards:
    """What a compiler does early with a step.

    **Arguments:** `source` the equations of the graph's nodes; `readers` for each variable the nodes that read it.

    **Fields:** `lasting` the fused values of the forward pass that it may keep if the backward pass reads them.
    """

    def __init__(self, graph: Graph, source: Sequence[Any], readers: Mapping[Any, Sequence[int]]):
        self.graph = graph
        self.source = source
        self.readers = readers
        self.loads = self._loads()
        self.lasting = self._lasting()

    def early(self, n: int, var: Any) -> bool:
        """Whether the compiler may make something large of an operand long before the equation runs.

        A contraction's operand it copies into another layout; a small one it broadcasts.
        """
        if not self.graph.backend.hoists or is_loop_edge(self.source[n]):
            return False
        made = max((aval_nbytes(v.aval) for v in self.source[n].outvars), default=0)
        return n in self.loads or (made > self.graph.small_nbytes and 2 * aval_nbytes(var.aval) <= made)

    def _lasting(self) -> set[int]:
        """The fused forward values that the compiler may keep in memory all the same, if the backward pass reads them.

        Costly pointwise work it does once for all readers that it sees to be the same. What grows out of little, as a
        broadcast does, it may do at any time.
        """
        graph = self.graph
        if not graph.backend.hoists:
            return set()
        costly: set[int] = set()
        lasting: set[int] = set()
        for node, eqn in zip(graph.nodes, self.source, strict=True):
            fused = [
                v
                for v in node.outputs
                if not graph.values[v].materialised and graph.values[v].nbytes > graph.small_nbytes
            ]
            if not node.forward or not fused:
                continue
            if is_costly(eqn) or not costly.isdisjoint(node.inputs):
                costly.update(fused)
            read = sum(graph.values[u].nbytes for u in graph.sources[fused[0]])
            lasting.update(v for v in fused if v in costly or 2 * read < graph.values[v].nbytes)
        return lasting

    def precarious(self, schedule: Schedule, passes: Sequence[LaterPass]) -> dict[int, list[int]]:
        """Saved values, by loop, -1 for none, that the compiler may make in the backward pass's kernels instead: out of
        what is dropped and larger, which it then keeps.

        **Arguments:** `passes` the forward passes behind the first.
        """
        graph, found = self.graph, dict[int, list[int]]()
        if not graph.backend.hoists:
            return found
        for v in sorted(schedule.saved):
            value, n = graph.values[v], graph.values[v].producer
            node = graph.nodes[n]
            early = n < graph.forward_stop or made_later(passes, n) is not None
            inside = early and not value.length and not value.is_output
            if node.heavy or node.contraction or not inside or is_loop_edge(self.source[n]):
                continue
            dropped = (graph.values[u].nbytes for u in graph.reads[n] if u not in schedule.saved)
            if sum(dropped) > value.nbytes:
                found.setdefault(node.loop, []).append(v)
        return found

    def _loads(self) -> set[int]:
        """The backward pass's contractions, and what only changes the layout of their operands."""
        loads: set[int] = set()
        for n in reversed(range(self.graph.forward_stop, len(self.source))):
            eqn = self.source[n]
            readers = [m for v in eqn.outvars for m in self.readers.get(v, ())]
            moves = (
                is_light(eqn) and len(self.graph.nodes[n].inputs) == 1 and any(m in loads for m in readers)
            )
            if self.graph.nodes[n].contraction or moves:
                loads.add(n)
        return loads


def is_zero(eqn: Any) -> bool:
    """Whether the equation fills an array with float32 zeros, which the compiler may do at any time."""
    if eqn.primitive.name != "broadcast_in_dim" or not _compat.is_literal(eqn.invars[0]):
        return False
    literal = eqn.invars[0]
    return literal.aval == ZERO.aval and literal.val == 0 and aval_nbytes(eqn.outvars[0].aval) > 2**20
