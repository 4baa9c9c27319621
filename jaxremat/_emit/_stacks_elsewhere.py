"""Stacks of loops in host memory meanwhile -> the copies there and back, slice by slice, within the loops.

An iteration of the forward loop copies its slice to the host, where the slices are stacked. An iteration of the
backward loop begins to copy the next one's slice back and hands it on, as a carry: the compiler lets the copy run until
the iteration ends. The first slice comes back before the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._program import _compat
from .._program._splice import inlined
from .._rewrite._loop_inlining import CARRY, LAST, STACK

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class StacksElsewhere:
    """The copies of an emitter's schedule that are in loops."""

    def __init__(self, emitter: Any) -> None:
        self.emitter = emitter
        self.stack: dict[int, Any] = {}  # value -> its stack in host memory
        values = emitter.graph.values
        self.copies = sorted(copy for copy in emitter.schedule.offloaded if values[copy.value].length)
        self.leaving: dict[int, list[int]] = {}  # node -> the values that it makes
        for copy in self.copies:
            self.leaving.setdefault(copy.left, []).append(copy.value)

    def leave(self, n: int) -> None:
        """Append the copies to the host of what a node of a forward loop has made."""
        emitter = self.emitter
        for v in self.leaving.get(n, ()):
            loop = emitter.graph.nodes[n].loop
            length = emitter.traced.loops[loop].length
            source = emitter.source[n].source_info
            var = emitter.variable[v]
            there = _compat.in_scope(_compat.placed(emitter.passed.get(var, var), _HOST, source), "offload")
            slice_, params = there.outvars[0], {"loop": loop, "index": -1, "length": length}
            self.stack[v] = _compat.new_var(STACK.abstract_eval(slice_.aval, **params)[0])
            stacked = _compat.new_eqn([slice_], [self.stack[v]], STACK, params, source)
            emitter.append([there, stacked], [loop, loop])

    def arrive(self, k: int, loop: int, around: int) -> None:
        """Append the copies back of what a loop reads whose first stage this is.

        **Arguments:** `around` the loop in which it is, -1 for none.
        """
        due = [copy.value for copy in self.copies if copy.begun == k]
        if not due:
            return
        opened = self.emitter.traced.loops[loop]
        backward, last = opened.eqn.params["reverse"], opened.length - 1
        index = _compat.scan_counts(opened.eqn)[1]

        def fetched(i: jax.Array, *stacks: jax.Array) -> list[jax.Array]:
            return [jax.device_put(_row(stack, i), _DEVICE) for stack in stacks]

        def next_fetched(i: jax.Array, *stacks: jax.Array) -> list[jax.Array]:
            i = lax.max(i - 1, jnp.int32(0)) if backward else lax.min(i + 1, jnp.int32(last))
            return [i, *fetched(i, *stacks)]

        stacks = [self.stack[v] for v in due]
        start = _compat.literal(jnp.int32(last if backward else 0))
        begun = [start, *self._append(fetched, [start, *stacks], around)]
        carries = [_compat.new_var(a.aval) for a in begun]
        self._edges(CARRY, loop, index, begun, carries)
        self._edges(LAST, loop, index, self._append(next_fetched, [carries[0], *stacks], loop))
        self.emitter.passed.update(
            (self.emitter.variable[v], c) for v, c in zip(due, carries[1:], strict=True)
        )

    def _edges(
        self, primitive: Any, loop: int, index: int, atoms: list[Any], made: list[Any] | None = None
    ) -> None:
        """Append what ties an iteration's carries, from that index on, to the loop before it and the next one."""
        source = self.emitter.traced.loops[loop].eqn.source_info
        made = made or [_compat.new_var(a.aval) for a in atoms]
        eqns = [
            _compat.new_eqn([a], [var], primitive, {"loop": loop, "index": index + i}, source)
            for i, (a, var) in enumerate(zip(atoms, made, strict=True))
        ]
        self.emitter.append(eqns, [loop] * len(eqns))

    def _append(self, fn: Callable[..., list[jax.Array]], arguments: list[Any], loop: int) -> list[Any]:
        """Append the equations of a function of these arguments in a loop; returns its results."""
        source = self.emitter.source[self.emitter.graph.forward_stop].source_info
        closed = jax.make_jaxpr(fn)(*(a.aval for a in arguments))
        eqns, results = inlined(closed, arguments, source)
        self.emitter.append([_compat.in_scope(eqn, "fetch") for eqn in eqns], [loop] * len(eqns))
        return results


def _row(stack: jax.Array, i: jax.Array) -> jax.Array:
    """A row of a stack."""
    zeros = [jnp.int32(0)] * (stack.ndim - 1)
    row = lax.dynamic_slice(stack, (i, *zeros), (1, *stack.shape[1:]), allow_negative_indices=False)
    return lax.squeeze(row, (0,))
