"""Graph + equations -> the equations that the compiler runs far ahead of their readers, unless a barrier prevents it.

XLA:CPU fills arrays with zeros, broadcasts small operands and copies contractions' operands into other layouts as early
as it can. It recomputes cheap pointwise results in the kernels that read them, from operands that it keeps for that
purpose. Costly ones it computes once inside kernels of both passes, and keeps. On other platforms, kernels do all of
this where it is needed.
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
    """The equations of a step that a compiler hoists. **Arguments:** `source` the equations of the graph's nodes;
    `readers` the nodes that read each variable; `value_of` each variable's value.
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
        """Return whether the compiler may compute a large value from an operand long before the equation runs, or keep
        a value for that. It copies a contraction's operand into another layout, and broadcasts a small operand.
        """
        if not self.graph.backend.materialises_eagerly or is_loop_edge(self.source[n]):
            return False
        made = max((aval_nbytes(v.aval) for v in self.source[n].outvars), default=0)
        small = made > self.graph.small_nbytes and 2 * aval_nbytes(var.aval) <= made
        return n in self.loads or small or self._kept_for(n, var)

    def fills(self, n: int) -> bool:
        """Return whether the compiler may fill an array with zeros at any time for an equation: as its result, or for
        the kernel of a pooling, which absorbs a ReLU but not the zeros that the whole step shares.
        """
        eqn = self.source[n]
        if eqn.primitive.name == "max" and self.graph.backend.materialises_eagerly:
            readers = (self.source[m].primitive.name for m in self.readers.get(eqn.outvars[0], ()))
            return _is_large_of_zero(eqn) and any(name.startswith("reduce_window") for name in readers)
        return is_zero(eqn)

    def _kept_for(self, n: int, var: jex.Var) -> bool:
        """Return whether the compiler may keep more than the saved values for an equation of the backward pass that
        reads a residual: the operands of a pointwise result, because kernels can read those as well, and the result of
        a costly one inside kernels of both passes.
        """
        value = self.value_of.get(var)
        if value is None or self.graph.nodes[n].loop >= 0:
            return False
        if not 0 <= self.graph.values[value].producer < self.graph.forward_stop <= n:
            return False
        return value in self.costly or any(map(self._is_cheap, self.graph.sources[value]))

    def _is_cheap(self, value: int) -> bool:
        """Return whether kernels that read a large value compute it themselves: nothing costly, which the compiler
        computes once.
        """
        if not self._is_pointwise(value):
            return False
        maker = self.graph.values[value].producer
        return not is_costly(self.source[maker]) and self.costly.isdisjoint(self.graph.nodes[maker].inputs)

    def _is_pointwise(self, value: int) -> bool:
        """Return whether a large value is the only result of a kernel that others could absorb."""
        made = self.graph.values[value]
        if made.producer < 0 or made.nbytes <= self.graph.small_nbytes:
            return False
        node = self.graph.nodes[made.producer]
        return len(node.outputs) == 1 and not node.fusion_root and node.loop < 0

    def _costly(self) -> set[int]:
        """Large values of the forward pass that are costly to compute and not in memory."""
        costly: set[int] = set()
        for node in self.graph.nodes[: self.graph.forward_stop]:
            if is_costly(self.source[node.id]) or not costly.isdisjoint(node.inputs):
                costly.update(
                    v for v in node.outputs if self._is_pointwise(v) and not self.graph.values[v].materialised
                )
        return costly

    def _loads(self) -> set[int]:
        """Return the backward pass's contractions, and the equations that only change the layout of their operands."""
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
    """Return whether an equation computes a large value from a float32 zero."""
    return any(map(is_zero_literal, eqn.invars)) and aval_nbytes(eqn.outvars[0].aval) > 2**20


def is_zero_literal(atom: Any) -> bool:
    """Return whether an operand is a float32 zero written into the equation."""
    return _compat.is_literal(atom) and atom.aval == ZERO.aval and atom.val == 0
