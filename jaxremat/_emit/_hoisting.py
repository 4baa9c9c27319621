"""Graph + equations -> the work that the compiler hoists far ahead of its readers, unless a barrier prevents it.

XLA:CPU fills arrays with zeros, broadcasts small operands and copies operands of contractions into other layouts as
early as it can. It recomputes a pointwise result in kernels that read it, from operands that it keeps for that, but
computes a costly one within kernels of both passes once, and keeps it. On other platforms, kernels do all of this where
it is needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from .._model._graph import Graph
from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import is_costly, is_light, is_loop_edge
from .._runtime._mechanisms import mechanism

ZERO = _compat.literal(np.float32(0))


class Hazards:
    """The work that a compiler hoists in a step.

    **Arguments:** `source` the equations of the graph's nodes; for each variable `readers` the nodes that read it, and
    `value_of` its value.
    """

    def __init__(
        self,
        graph: Graph,
        source: Sequence[jex.JaxprEqn],
        readers: Mapping[jex.Var, Sequence[int]],
        value_of: Mapping[jex.Var, int],
    ):
        self.graph = graph
        self.source = source
        self.readers = readers
        self.value_of = value_of
        self.loads = self._loads()
        self.costly = self._costly()

    @mechanism("hoisting", off=lambda *_: False)
    def early(self, n: int, var: jex.Var) -> bool:
        """Return whether the compiler may make something large of an operand long before the equation runs, or keep
        something to make it of.

        A contraction's operand it copies into another layout; a small one it broadcasts.
        """
        if not self.graph.backend.materialises_eagerly or is_loop_edge(self.source[n]):
            return False
        made = max((aval_nbytes(v.aval) for v in self.source[n].outvars), default=0)
        small = made > self.graph.small_nbytes and 2 * aval_nbytes(var.aval) <= made
        return n in self.loads or small or self._kept_for(n, var)

    def fills(self, n: int) -> bool:
        """Return whether the compiler may fill an array with zeros for an equation, at any time: to be it, or for the
        kernel of a pooling, which takes in a ReLU but not the zeros that all of the step's share.
        """
        eqn = self.source[n]
        if eqn.primitive.name == "max" and self.graph.backend.materialises_eagerly:
            readers = (self.source[m].primitive.name for m in self.readers.get(eqn.outvars[0], ()))
            return _is_large_of_zero(eqn) and any(name.startswith("reduce_window") for name in readers)
        return is_zero(eqn)

    def _kept_for(self, n: int, var: jex.Var) -> bool:
        """Return whether the compiler may keep more than what is saved for an equation of the backward pass that
        reads a residual: of pointwise results the operands, since a kernel that reads them can as well read those,
        and of costly ones within the kernels of both passes the result.
        """
        value = self.value_of.get(var)
        if value is None or self.graph.nodes[n].loop >= 0:
            return False
        if not 0 <= self.graph.values[value].producer < self.graph.forward_stop <= n:
            return False
        return value in self.costly or any(map(self._is_cheap, self.graph.sources[value]))

    def _is_cheap(self, value: int) -> bool:
        """Return whether kernels that read a large value make it instead: nothing costly, which the compiler
        does once.
        """
        if not self._is_pointwise(value):
            return False
        maker = self.graph.values[value].producer
        return not is_costly(self.source[maker]) and self.costly.isdisjoint(self.graph.nodes[maker].inputs)

    def _is_pointwise(self, value: int) -> bool:
        """Return whether a large value is the one result of a kernel that others could be part of."""
        made = self.graph.values[value]
        if made.producer < 0 or made.nbytes <= self.graph.small_nbytes:
            return False
        node = self.graph.nodes[made.producer]
        return len(node.outputs) == 1 and not node.fusion_root and node.loop < 0

    def _costly(self) -> set[int]:
        """Large values of the forward pass that are costly to make, and in no memory."""
        costly: set[int] = set()
        for node in self.graph.nodes[: self.graph.forward_stop]:
            if is_costly(self.source[node.id]) or not costly.isdisjoint(node.inputs):
                costly.update(
                    v for v in node.outputs if self._is_pointwise(v) and not self.graph.values[v].materialised
                )
        return costly

    def _loads(self) -> set[int]:
        """Return the backward pass's contractions, and what only changes the layout of their operands."""
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


def is_zero(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation fills an array with float32 zeros, which the compiler may do at any time."""
    return eqn.primitive.name == "broadcast_in_dim" and _is_large_of_zero(eqn)


def _is_large_of_zero(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation makes something large of a float32 zero."""
    return any(map(is_zero_literal, eqn.invars)) and aval_nbytes(eqn.outvars[0].aval) > 2**20


def is_zero_literal(atom: Any) -> bool:
    """Return whether it is a float32 zero written into the equation."""
    return _compat.is_literal(atom) and atom.aval == ZERO.aval and atom.val == 0
