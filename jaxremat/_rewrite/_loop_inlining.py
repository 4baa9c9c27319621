"""Flat equations -> the same with loops inlined, so that the values of an iteration can be planned.

An inlined scan becomes a *section* of equations: those of its body, for one iteration, and five kinds that connect the
iteration to the rest,

    scan_slice   X[L, ...] -> x[...]     this iteration's slice of a scanned-over array
    scan_carry   init -> c               the carry at the start of this iteration
    scan_last    c' -> last              the carry at its end; after the loop, that of the last iteration
    scan_stack   y[...] -> Y[L, ...]     one slice of a stacked result; a second operand is the slice that it
                                         overwrites, or the zero from which, and not earlier, the array is filled
    scan_part    X[N, ...], i -> x[...]  the row of an array that nested checkpointing reads at an index

while loop-invariant values are read directly. Two kinds of scans are inlined:

- *pairs*: a scan of the forward pass and the one that automatic differentiation derives from it, which runs backward
  and reads the former's stacks. The backward section reads the forward section's own variables; the plan decides in
  which form it gets them (stacked, or recomputed from stacked ones). Both belong to one *group*, in which the slices of
  one array are the same value.
- scans that contain a forward and a backward pass, such as gradient accumulation, and those of
  `_nested_checkpointing`, whose primitive is `APART`.

`_loop_closing` turns the sections into scans again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.extend.core.primitives import scan_p

from .._program import _compat
from .._program._common_subexpressions import Equals
from .._program._compat import Atom, shaped
from .._program._flops import aval_nbytes
from .._program._inline import Inliner
from .._program._primitives import inner_eqns, inner_jaxprs, is_backward, is_light, is_pointwise, on_host
from .._program._splice import inlined
from ._flat_program import BACKWARD, FORWARD, UNPAIRED, FlatProgram, Loop
from ._pooling_places import by_place
from ._row_batches import with_row_batches

operands = _compat.scan_operands

SLICE = jex.Primitive("scan_slice")
CARRY = jex.Primitive("scan_carry")
LAST = jex.Primitive("scan_last")
STACK = jex.Primitive("scan_stack")
PART = jex.Primitive("scan_part")
APART = jex.Primitive("scan_apart")
SLICE.def_abstract_eval(lambda x, *, length, **_: jex.mapped_aval(length, 0, x))
CARRY.def_abstract_eval(lambda x, **_: x)
LAST.def_abstract_eval(lambda x, **_: x)
STACK.def_abstract_eval(lambda x, *_, length, **__: jex.unmapped_aval(length, 0, x))
PART.def_abstract_eval(lambda x, _, *, length: jex.mapped_aval(length, 0, x))


@dataclass
class Section:
    """The roles of a section's values and equations in its scan."""

    carries: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # index -> (initial, in the body)
    lasts: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # index -> (in the body, behind the loop)
    scanned: dict[Any, Any] = field(default_factory=dict)  # in the body -> array
    stacked: dict[Any, Any] = field(default_factory=dict)  # array -> in the body
    filled: dict[Any, tuple[Any, Any]] = field(default_factory=dict)  # array -> in the body, zero
    over: dict[Any, tuple[Any, Any]] = field(default_factory=dict)  # array -> in the body, slice written over
    eqns: list[Any] = field(default_factory=list)


def open_loops(program: FlatProgram, inliner: Inliner) -> FlatProgram:
    """Inline the loops of a flat program that `inliner` produced."""
    opener = Opener(inliner, program.over)
    opener.run(program.eqns, -1, list(range(len(program.eqns))))
    return opener.program(program)


class Opener:
    """Appends equations, and the sections of scans.

    **Arguments:** `over` for stacked results the scanned-over array that they overwrite; `loops` the existing ones.
    """

    def __init__(self, inliner: Inliner, over: Mapping[jex.Var, Atom], loops: Sequence[Loop] = ()):
        self.inliner = inliner
        self.over = over
        self.eqns: list[Any] = []
        self.loop_of: list[int] = []
        self.origin: list[int] = []
        self.loops = list(loops)
        self.slices: dict[tuple[int, Any], Any] = {}  # (group, array) -> the variable of its slice

    def program(self, before: FlatProgram) -> FlatProgram:
        """Return the program `before` with the equations appended so far."""
        jaxpr = before.closed.jaxpr
        closed = _compat.new_jaxpr(
            self.inliner.constvars, self.inliner.consts, jaxpr.invars, jaxpr.outvars, self.eqns
        )
        return before.moved(closed, self.origin, self.loop_of, loops=tuple(self.loops))

    def add(self, eqn: jex.JaxprEqn, loop: int, origin: int = -1) -> None:
        """Append an equation of a loop; `origin` its old index, -1 for a new one."""
        self.eqns.append(eqn)
        self.loop_of.append(loop)
        self.origin.append(origin)

    def run(self, eqns: Sequence[jex.JaxprEqn], parent: int, origin: Sequence[int]) -> None:
        forward_of = pairs(eqns)
        forward = set(forward_of.values())
        opened: dict[int, int] = {}  # index of a forward scan -> its loop
        for i, eqn in enumerate(eqns):
            if i in forward_of:
                self.open(eqn, BACKWARD, opened[forward_of[i]], parent)
            elif i in forward:
                opened[i] = self.open(eqn, FORWARD, None, parent)
            elif eqn.primitive is APART:
                self.open(eqn.replace(primitive=scan_p), UNPAIRED, None, parent)
            elif _is_scan(eqn) and _has_both_passes(eqn):
                self.open(eqn, UNPAIRED, None, parent)
            else:
                self.add(eqn, parent, origin[i])

    def open(self, eqn: jex.JaxprEqn, role: str, group: int | None, parent: int) -> int:
        """Append the section of a scan; return its loop's id."""
        number = len(self.loops)
        group = number if group is None else group
        loop = Loop(number, group, eqn.params["length"], role, parent, eqn)
        self.loops.append(loop)
        consts, init, scanned = operands(eqn)
        body: list[Any] = []
        carries = [self._edge(CARRY, a, loop, index=i) for i, a in enumerate(init)]
        slices = [self._slice(a, loop) for a in scanned]
        results = self.inliner.body(eqn.params["jaxpr"], [*consts, *carries, *slices], eqn.source_info, body)
        body = with_row_batches(by_place(body))
        # A body with both passes may contain pairs of loops.
        if role == UNPAIRED:
            once = Equals(self.inliner)
            for inner in body:
                once.add(inner)
            results = [once.read(a) for a in results]
            self.run(once.eqns, number, [-1] * len(once.eqns))
        else:
            for inner in body:
                self.add(inner, number)
        for i, (atom, made) in enumerate(zip(results, eqn.outvars, strict=True)):
            if i < len(init):
                self._edge(LAST, atom, loop, made, index=i)
            else:
                # The backward section reads this variable, and the plan decides in which form.
                self.slices[group, made] = atom
                row = [self._slice(self.over[made], loop)] if made in self.over else []
                self._edge(STACK, atom, loop, made, *row, index=i, length=loop.length)
        return number

    def _slice(self, array: Atom, loop: Loop) -> jex.Var:
        key = (loop.group, array)
        if key not in self.slices:
            self.slices[key] = self._edge(SLICE, array, loop, length=loop.length)
        return self.slices[key]

    def _edge(
        self,
        primitive: jex.Primitive,
        atom: Atom,
        loop: Loop,
        made: jex.Var | None = None,
        *more: Atom,
        **params: object,
    ) -> jex.Var:
        params = {"loop": loop.id, **params}
        if made is None:
            made = _compat.new_var(primitive.abstract_eval(atom.aval, **params)[0])
        self.add(_compat.new_eqn([atom, *more], [made], primitive, params, loop.eqn.source_info), loop.id)
        return made


def append(
    into: list[jex.JaxprEqn],
    fn: Callable[..., object],
    arguments: Sequence[Atom],
    like: jex.JaxprEqn,
    made: jex.Var | None = None,
) -> jex.Var:
    """Append the equations of a function of these arguments; return its result, named `made` if given."""
    types = [
        a.aval if on_host(a.aval) else jax.ShapeDtypeStruct(shaped(a).shape, shaped(a).dtype)
        for a in arguments
    ]
    named = () if made is None else (made,)
    eqns, (result,) = inlined(jax.make_jaxpr(fn)(*types), arguments, like.source_info, named)
    into.extend(eqns)
    return result


def row_at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return the row of an array at a non-negative index."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def row_written(array: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    """Return the array with another row at a non-negative index."""
    return lax.dynamic_update_index_in_dim(array, row, index, 0, allow_negative_indices=False)


def _is_scan(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and not eqn.effects and eqn.params["length"] > 0


def pairs(eqns: Sequence[jex.JaxprEqn]) -> dict[int, int]:
    """Return for each backward scan the index of the forward scan whose stacks it scans over, the last if several.
    Pairs that are mere recurrences are left out.
    """
    maker: dict[Any, int] = {}
    forward_of: dict[int, int] = {}
    for i, eqn in enumerate(eqns):
        if not _is_scan(eqn):
            continue
        sources = {maker[a] for a in operands(eqn)[2] if a in maker} if is_backward(eqn) else set()
        matching = [j for j in sources if _runs_backward(eqn, eqns[j])]
        if matching and _is_recurrence(eqns[max(matching)], eqn):
            continue
        if matching:
            forward_of[i] = max(matching)
        else:
            maker.update((v, i) for v in eqn.outvars[_compat.scan_counts(eqn)[1] :])
    return forward_of


def _runs_backward(eqn: jex.JaxprEqn, forward: jex.JaxprEqn) -> bool:
    same = eqn.params["length"] == forward.params["length"]
    return same and eqn.params["reverse"] != forward.params["reverse"]


def _is_recurrence(forward: jex.JaxprEqn, backward: jex.JaxprEqn) -> bool:
    """Return whether a pair is pointwise and stacks no more for the backward pass than it scans over, such as a gated
    linear recurrence. An iteration then has nothing to choose, and the scan may run again as a whole. Pairs that
    `_nested_checkpointing` created are none: they read rows of whole arrays, which only an inlined loop may.
    """
    if any(inner.primitive is PART for eqn in (forward, backward) for inner in inner_eqns(eqn)):
        return False
    kept = forward.outvars[len(operands(forward)[1]) :]
    stacked = sum(aval_nbytes(a.aval) for a in operands(backward)[2] if a in kept)
    scanned = sum(aval_nbytes(a.aval) for a in operands(forward)[2])
    inside = (eqn for eqn in inner_eqns(forward) if not inner_jaxprs(eqn))
    return stacked <= scanned and all(is_pointwise(eqn) or is_light(eqn) for eqn in inside)


def _has_both_passes(eqn: jex.JaxprEqn) -> bool:
    """Return whether a scan's body differentiates a function: it has backward equations, preceded by others."""
    return not is_backward(eqn) and any(map(is_backward, inner_eqns(eqn)))
