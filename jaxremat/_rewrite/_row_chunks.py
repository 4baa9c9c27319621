"""Flat equations, regions of rows -> the same program with each region computed one chunk at a time.

    logits = h @ W                                       for i in range(chunks):
    loss, dlogits = softmax_cross_entropy(logits)   ->       logits = h[i] @ W
    dW, dh = h.T @ dlogits, dlogits @ W.T                    loss[i], dlogits = softmax_cross_entropy(logits)
                                                             dW, dh[i] = dW + h[i].T @ dlogits, dlogits @ W.T

The loop needs a fraction of the memory and repeats no operation. It is one call, within which nothing is planned.

In a function that is *differentiated later* the loop is a scan over chunks with stacked results. Its gradient is then a
loop over chunks of cotangents, which adds sums over chunks in place. An iteration is planned as in any scan of such a
function.

Invariant: rows are computed by the same operations as before; sums over rows are added chunk by chunk.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from itertools import compress
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .._program import _compat
from .._program._axes import JOINS, Parts, is_scattered, sum_type
from .._program._chunk_kinds import stacked
from .._program._compat import Atom, Aval, DType, shaped
from .._program._primitives import (
    IN_CHUNKS,
    contracts,
    is_backward,
    is_light,
    is_loop_edge,
    is_placing,
    is_relabelling,
)
from .._program._splice import inlined, typed
from ._flat_program import FlatProgram, alive, with_eqns
from ._halos import Halos
from ._loop_closing import without_unread
from ._loop_inlining import CARRY, append
from ._program_readers import Readers
from ._region_loops import Loop, goes_on, handed_on, owners, schedule
from ._regions import Region
from ._row_parts import RowParts, in_shape
from ._row_scans import Around
from ._selections import settled

NONE: Mapping[Any, str] = MappingProxyType({})


def chunked(
    before: FlatProgram,
    chosen: Sequence[tuple[Region, int]],
    labels: Mapping[jex.Var, str] = NONE,
    *,
    apart: Collection[int] = (),
    differentiable: bool = False,
) -> FlatProgram:
    """Return the program with each of these regions in its number of chunks.

    **Arguments:** `labels` the user's `checkpoint_name`s by variable; `apart` equations, such as those of attention,
    that a later pass needs unchanged; `differentiable` whether the program is a function that is differentiated later.
    """
    program = Readers(before, differentiable=differentiable)
    all_loops = [loop for region, _ in chosen for loop in region.loops]
    of_loops = [each for each in chosen for _ in each[0].loops]
    kind = _ScannedChunks if differentiable else _Chunks
    order = schedule(program, all_loops)
    assert order is not None  # regions have an order
    place = {each: k for k, each in enumerate(order)}
    loops = [
        kind(program, all_loops, number, *each, labels, place, apart) for number, each in enumerate(of_loops)
    ]
    moved = {i for loop in loops for i in loop.moved}
    moved.update(i for loop in loops for chain, _ in loop.begun.values() for i in chain)
    eqns: list[Any] = []
    origin: list[int] = []
    loop_of: list[int] = []
    for i in order:
        if i not in moved:
            made = loops[~i].equations() if i < 0 else [program.eqns[i]]
            eqns += made
            origin += [-1] * len(made) if i < 0 else [i]
            loop_of += [loops[~i].loop if i < 0 else program.loop_of[i]] * len(made)
    needed = alive(with_eqns(before.closed, eqns))  # chunks have copies of equations that only they read
    eqns, origin, loop_of = (list(compress(each, needed)) for each in (eqns, origin, loop_of))
    return before.moved(with_eqns(before.closed, eqns), origin, loop_of)


class _Chunks:
    """One loop over the chunks of a region's rows: the one with index `number` among `loops`.

    **Arguments:** `place` the position of each equation and loop, as in `schedule`; `apart` as in `chunked`.
    """

    def __init__(
        self,
        program: Readers,
        loops: Sequence[Loop],
        number: int,
        region: Region,
        chunks: int,
        labels: Mapping[jex.Var, str],
        place: Mapping[int, int],
        apart: Collection[int],
    ):
        self.program, self.region, self.labels, self.apart = program, region, labels, apart
        self.parts = Parts(region.rows, chunks)
        self.rules = loops[number]
        self.others = {i for other, loop in enumerate(loops) if other != number for i in loop}
        self.own = {i for i, rule in self.rules.items() if not rule.copied}
        self.leaves = handed_on(program, loops, number)
        first = owners(loops)
        # Forward values that only gradients read are computed in the backward loop.
        self.loop = program.loop_of[max(i for i in self.own if first[i] == number)]
        # A loop of most of a step belongs to the forward pass, and so does a loop without gradients that is not
        # the last of its region.
        in_backward = [i for i in sorted(self.own) if is_backward(program.eqns[i])]
        early = [i for i in sorted(self.own) if not is_backward(program.eqns[i])]
        has_gradients = any(contracts(program.eqns[i]) for i in in_backward)
        self.opens = region.whole and has_gradients
        is_last = self.rules is region.loops[-1]
        differentiates = not region.whole and (has_gradients or is_last)
        self.like = program.eqns[(in_backward + early if differentiates else early + in_backward)[0]]
        self.dimension: dict[Any, int | None] = {}
        self.adder: dict[Any, int] = {}  # sums -> the equation that makes them
        for i, rule in self.rules.items():
            eqn = program.eqns[i]
            both = zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True)
            self.dimension.update((a, d) for a, d in both if not _compat.is_literal(a))
            self.adder.update((v, i) for v, is_sum in zip(eqn.outvars, rule.sums, strict=True) if is_sum)
        self.rows: RowParts = (
            Halos(program.eqns, region.rules, self.rules, self.leaves, self.dimension, self.parts)
            if region.windowed or self.parts.beyond
            else RowParts(self.dimension, self.parts, region.parts)
        )
        # XLA schedules the last results of a body first. Products that return rows come last, so their operands are
        # freed before products that are sums: with a head of tied weights, one gradient less is in memory.
        self.leaves.sort(
            key=lambda v: self.dimension[v] is not None and contracts(program.eqns[program.maker[v]])
        )
        # A scattered sum, or a sum of several with a scattered one among them, is added in place to the array that it
        # starts with: tied embeddings have one gradient, not one per reader.
        self.going = {v: leaf for leaf in self.leaves for v in self._going(leaf)}
        self.over = {leaf: self._begins(leaf) for leaf in dict.fromkeys(self.going.values())}
        # So is a sum that is added, maybe scaled, to a carry of the surrounding loop (accumulated gradients), or to a
        # value computed before this loop (the gradient of a value that two loops read).
        before = {i for i in place if i >= 0 and place[i] < place[~number]}
        before.update(i for i, other in first.items() if place[~other] < place[~number])
        self.begun = {v: made for v in self.leaves if (made := self._added_to(v, before)) is not None}
        self.moved = self._moved()
        self.turned = self._turned()
        # `parted` are the operands of a chunk, in parts or whole; `reads` are those of the call.
        self.parted = self._read_by([*self.turned, *self.rules])
        carries = (begin for _, begin in self.begun.values())
        self.reads = list(dict.fromkeys([*self._read_by([*self.moved, *self.rules]), *carries]))

    def _going(self, v: Atom) -> list[Any]:
        """Return a sum that each chunk adds to in place, and the sums that it adds up; empty for any other value."""
        if _compat.is_literal(v) or not goes_on(self.program, self.rules, v):
            return []
        eqn = self.program.eqns[self.program.maker[v]]
        return [v, *(own for a in eqn.invars if not is_scattered(eqn) for own in self._going(a))]

    def _begins(self, leaf: jex.Var) -> list[Any]:
        """Return the start values of such a sum, which are added up; zeros only if it has no others."""
        made = [self.program.eqns[self.program.maker[v]] for v, of in self.going.items() if of is leaf]
        begins = [eqn.invars[0] for eqn in made if is_scattered(eqn)]
        maker = self.program.maker
        around = Around({}, lambda v: self.program.eqns[maker[v]] if v in maker else None)
        return [a for a in begins if not around.is_zero(a)] or begins[:1]

    def _added_to(self, v: jex.Var, before: Collection[int]) -> tuple[list[int], Any] | None:
        """Return the equations that scale a sum and add it to a value, and that value: a carry, or a value with no
        other reader. None if the sum is read in any other way.

        **Arguments:** `before` the equations that run before this loop.
        """
        program, chain = self.program, list[int]()
        if v not in self.adder or v in self.over or self._type(v) != shaped(v).dtype or self._joins(v):
            return None
        last = v
        while True:
            readers = program.readers.get(last, ())
            if last in program.returned or len(readers) != 1 or readers[0] in self.others:
                return None
            chain.append(readers[0])
            eqn = program.eqns[readers[0]]
            others = [a for a in _compat.variables(eqn.invars) if a is not last]
            scales = eqn.primitive.name in ("mul", "div") and eqn.invars[0] is last and not others
            if not scales or eqn.outvars[0].aval != v.aval:
                break
            (last,) = eqn.outvars
        if eqn.primitive.name not in ("add", "add_any") or len(others) != 1:
            return None
        (begin,) = others
        maker = program.maker.get(begin, -1)
        if maker < 0 or shaped(begin) != shaped(v):
            return None
        alone = program.readers[begin] == chain[-1:] and begin not in program.returned
        return (
            (chain, begin) if program.eqns[maker].primitive is CARRY or (alone and maker in before) else None
        )

    def _read_by(self, indices: Sequence[int]) -> list[jex.Var]:
        """Return the operands of some equations that others compute."""
        eqns = [self.program.eqns[i] for i in indices]
        made = {v for eqn in eqns for v in eqn.outvars}
        return list(dict.fromkeys(a for eqn in eqns for a in _compat.variables(eqn.invars) if a not in made))

    def _moved(self) -> list[int]:
        """Return the equations that only move data, and only for this region."""
        program, found = self.program, set[int]()
        waiting = self._read_by(list(self.rules))
        while waiting:
            i = program.maker.get(waiting.pop(), -1)
            if (
                i in found
                or i in self.others
                or i in self.apart
                or i < 0
                or not _moves(program.eqns[i])
                or len(program.eqns[i].outvars) > 1
            ):
                continue
            if any(program.maker.get(a, -1) in self.rules for a in _compat.variables(program.eqns[i].invars)):
                continue  # its operand is also computed by an earlier loop, which hands it on
            (v,) = program.eqns[i].outvars
            readers = program.readers[v]
            alone = self.others.isdisjoint(readers) and v not in program.returned
            if alone and all(j in self.own or j in found for j in readers):
                found.add(i)
                waiting.extend(_compat.variables(program.eqns[i].invars))
        return sorted(found)

    def _turned(self) -> list[int]:
        """Return those of the moved equations that reorder (such as a transpose) or gather a whole value: products in
        chunks do this as part of the product.
        """
        program, found = self.program, list[int]()
        for i in reversed(self.moved):
            (v,) = program.eqns[i].outvars
            turns = is_relabelling(program.eqns[i]) or is_placing(program.eqns[i])
            operands = _compat.variables(program.eqns[i].invars)
            whole = turns and all(self.dimension.get(a) is None for a in (v, *operands))
            if whole and all(j in self.rules or j in found for j in program.readers[v]):
                found.append(i)
        return found[::-1]

    def equations(self) -> list[jex.JaxprEqn]:
        """Return the equations that replace the region: the loop itself if the region is most of a step, with both
        passes; else a call, in the backward pass if any of its equations is.
        """

        def run(*operands: jax.Array) -> list[Any]:
            return self._run(*operands)

        run.__name__ = IN_CHUNKS
        call, place = (run, _compat.root_source(self.like)) if self.opens else (
            jax.jit(run), self.like.source_info
        )  # fmt: skip
        names = [
            self.program.eqns[self.begun[v][0][-1]].outvars[0] if v in self.begun else v for v in self.leaves
        ]
        made, _ = inlined(jax.make_jaxpr(call)(*map(typed, self.reads)), self.reads, place, names)
        return made

    def _read(self, operands: Sequence[object]) -> dict[Any, Any]:
        """Return the operands of the chunks, by variable, given those of the region."""
        env = dict(zip(self.reads, operands, strict=True))
        for eqn in (self.program.eqns[i] for i in self.moved if i not in self.turned):
            invars = [a.val if _compat.is_literal(a) else env[a] for a in eqn.invars]
            made = eqn.primitive.bind(*invars, **eqn.params)
            (env[eqn.outvars[0]],) = made if eqn.primitive.multiple_results else [made]
        return env

    def _run(self, *operands: object) -> list[jax.Array]:
        """Return the results of the region for its operands."""
        env = self._read(operands)
        zero = jnp.zeros((), jnp.float32)
        if self.parted and not self.opens:
            # Zeros that depend on nothing could be filled at any time, and several loops would share one array. The
            # barrier ties them to the latest operand. It only affects reads after it.
            last = max(self.parted, key=lambda a: self.program.maker.get(a, -1))
            zero, env[last] = lax.optimization_barrier((zero, env[last]))
        start = [
            self._begun(env, v)
            if v in self.over
            else env[self.begun[v][1]]
            if v in self.begun
            else self._before(v, zero)
            for v in self.leaves
        ]
        body = self._body()
        parted = [in_shape(env[a], self.rows.read_shape(a)) for a in self.parted]

        def step(state: list[jax.Array], i: jax.Array) -> tuple[list[Any], None]:
            return jex.jaxpr_as_fun(body)(i, *state, *parted), None

        state, _ = lax.scan(step, start, jnp.arange(self.parts.count, dtype=jnp.int32))
        return [self.rows.all(a.astype(shaped(v).dtype), v) for a, v in zip(state, self.leaves, strict=True)]

    def _begun(self, env: Mapping[Any, Any], v: jex.Var) -> jax.Array:
        """Return the start value of a sum that is added in place."""
        return reduce(lax.add, (env[a] for a in self.over[v]))

    def _type(self, v: jex.Var) -> Any:
        """Return the type in which a result is carried from chunk to chunk."""
        return sum_type(shaped(v).dtype) if v in self.adder and v not in self.over else shaped(v).dtype

    def _joins(self, v: jex.Var) -> Any:
        """Return the operation that joins a result with that of another chunk; None for sums and rows."""
        return JOINS.get(self.program.eqns[self.program.maker[v]].primitive.name) if v in self.adder else None

    def _before(self, v: jex.Var, zero: jax.Array) -> jax.Array:
        """Return the value of a result before the first chunk: neutral for the operation that joins or adds chunks."""
        fill = zero.astype(self._type(v))
        if self._joins(v) is lax.and_p:
            fill = jnp.asarray(np.invert(np.zeros((), self._type(v))))
        return _compat.varied(lax.broadcast(fill, self.rows.written_shape(v)), v)

    def _body(self) -> jex.ClosedJaxpr:
        """Return the program of one chunk: its index, the results so far, the operands of the region -> the results."""
        eqns: list[Any] = []
        index = _compat.new_var(ShapedArray((), jnp.int32))
        state = [
            _compat.new_var(
                v.aval.update(shape=self.rows.written_shape(v), dtype=self._type(v), weak_type=False)
            )
            for v in self.leaves
        ]
        so_far = dict(zip(self.leaves, state, strict=True))
        operands = [
            _compat.new_var(a.aval.update(shape=self.rows.read_shape(a)) if a in self.dimension else a.aval)
            for a in self.parted
        ]
        env: dict[Any, Any] = {}
        for a, operand in zip(self.parted, operands, strict=True):
            env[a] = operand
            if self.dimension.get(a) is not None:
                part = partial(self.rows.read, v=a)
                env[a] = append(eqns, part, (operand, index), self._reader(a))
        self._each(eqns, env, so_far, index)
        results = [self._added(eqns, v, so_far[v], env[v], index) for v in self.leaves]
        made = _compat.new_jaxpr((), (), [index, *state, *operands], results, eqns)
        if self.opens:
            return made
        # A loop of only one pass does not read all results of scans.
        return settled(with_eqns(made, without_unread(eqns, results, {"scan"})))

    def _each(
        self,
        eqns: list[jex.JaxprEqn],
        env: dict[jex.Var, Atom],
        so_far: Mapping[jex.Var, jex.Var],
        index: jex.Var,
    ) -> None:
        """Append the equations of a chunk. **Arguments:** `env` its operands, to which its values are added."""
        for eqn in (self.program.eqns[i] for i in self.turned):
            env[eqn.outvars[0]] = made = _compat.new_var(eqn.outvars[0].aval)
            eqns.append(_compat.renamed(eqn, env).replace(outvars=[made]))
        going = dict(so_far)  # sums that are added in place, with the terms of this chunk so far
        for i, rule in self.rules.items():
            eqn = self.program.eqns[i]
            leaf = self.going.get(eqn.outvars[0])
            if leaf is not None:
                own = [a for a in eqn.invars[is_scattered(eqn) :] if a not in self.going]
                if not own:
                    continue  # both operands add to the same array in place
                invars = [going[leaf], *(a if _compat.is_literal(a) else env[a] for a in own)]
            else:
                invars = [a if _compat.is_literal(a) else env[a] for a in eqn.invars]
            params = self.rows.around(eqns, env, eqn, rule, invars, index, self._joins(eqn.outvars[0]))
            outvars = [
                _compat.new_var(self._aval(v, d, params))
                for v, d in zip(eqn.outvars, rule.results, strict=True)
            ]
            eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
            env.update(zip(eqn.outvars, outvars, strict=True))
            if leaf is not None:
                going[leaf] = env[leaf] = outvars[0]
            named = ((v, self.labels[v]) for v in eqn.outvars if v in self.labels and self.opens)
            for v, name in named:  # the planner sees the equations of this loop, so they keep their names
                made = _compat.new_var(env[v].aval)
                eqns.append(_compat.name_eqn(env[v], made, name, eqn.source_info))

    def _aval(self, v: jex.Var, dimension: int | None, params: Mapping[str, object]) -> Any:
        if dimension is None:
            return v.aval.update(dtype=params.get("preferred_element_type") or shaped(v).dtype)
        return v.aval.update(shape=self.rows.part(v))

    def _added(self, eqns: list[jex.JaxprEqn], v: jex.Var, so_far: Atom, made: Atom, index: jex.Var) -> Atom:
        """Return a result so far, joined with this chunk's part of it."""
        d = self.dimension[v]
        chain, begin = self.begun.get(v, ((), None))
        for eqn in (self.program.eqns[i] for i in chain):
            invars = [a if _compat.is_literal(a) else so_far if a is begin else made for a in eqn.invars]
            made = _compat.new_var(eqn.outvars[0].aval.update(weak_type=False))
            eqns.append(eqn.replace(invars=invars, outvars=[made]))
        if (
            chain or v in self.over or (d is None and v not in self.adder)
        ):  # the same value in each chunk, such as a loop's counter
            return made

        maker = self.program.eqns[self.program.maker[v]]
        if d is not None:
            made = self.rows.own(eqns, made, v, index, maker)
            return append(eqns, partial(self.rows.written, v=v), (so_far, made, index), maker)

        def added(so_far: jax.Array, part: jax.Array) -> jax.Array:
            return (self._joins(v) or lax.add_p).bind(so_far, part.astype(so_far.dtype))

        return append(eqns, added, (so_far, made), maker)

    def _reader(self, v: jex.Var) -> jex.JaxprEqn:
        return next(self.program.eqns[i] for i in self.program.readers[v] if i in self.rules)


class _ScannedChunks(_Chunks):
    """A loop over chunks that is differentiated later."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.opens = True
        self.carried = [v for v in self.leaves if self.dimension[v] is None]
        self.stacked = [v for v in self.leaves if self.dimension[v] is not None]
        self.scanned = [a for a in self.parted if self.dimension.get(a) is not None]
        self.whole = [a for a in self.parted if self.dimension.get(a) is None]

    def _added_to(self, v: jex.Var, before: Collection[int]) -> None:
        """Return None: the start value of a sum has a separate gradient."""

    def _run(self, *operands: object) -> list[jax.Array]:
        env = self._read(operands)
        start = [
            self._begun(env, v) if v in self.over else self._before(v, jnp.zeros(())) for v in self.carried
        ]
        # Gradients of operands that chunks read whole are added up in the operand's type: cast to a wide one.
        whole = [env[a].astype(_sum_type(env[a].dtype)) for a in self.whole]
        body = self._body()
        indices = jnp.arange(self.parts.count, dtype=jnp.int32)

        def step(
            state: list[jax.Array], each: tuple[jax.Array, list[jax.Array]]
        ) -> tuple[list[Any], list[Any]]:
            made = jex.jaxpr_as_fun(body)(each[0], *state, *whole, *each[1])
            return made[: len(state)], made[len(state) :]

        count = self.parts.count
        rows = [
            stacked(env[a], d, count, self.parts.of(env[a].shape[d])) for a, d in self._placed(self.scanned)
        ]
        state, stacks = lax.scan(step, start, (indices, rows))
        sums = (a.astype(shaped(v).dtype) for a, v in zip(state, self.carried, strict=True))
        joined = (
            _joined(a, d, shaped(v)) for a, (v, d) in zip(stacks, self._placed(self.stacked), strict=True)
        )
        found = dict(zip((*self.carried, *self.stacked), (*sums, *joined), strict=True))
        return [found[v] for v in self.leaves]

    def _body(self) -> jex.ClosedJaxpr:
        """Return the program of one chunk: its index, sums so far, whole operands and its rows -> sums and its rows."""
        eqns: list[Any] = []
        index = _compat.new_var(ShapedArray((), jnp.int32))
        state = [_compat.new_var(v.aval.update(dtype=self._type(v), weak_type=False)) for v in self.carried]
        so_far = dict(zip(self.carried, state, strict=True))
        whole = [_compat.new_var(_strong(shaped(a), _sum_type(shaped(a).dtype))) for a in self.whole]
        rows = [_compat.new_var(self._aval(a, d, {})) for a, d in self._placed(self.scanned)]
        env: dict[Any, Any] = dict(zip((*self.whole, *self.scanned), (*whole, *rows), strict=True))
        for a, v in zip(self.whole, whole, strict=True):
            if (dtype := shaped(a).dtype) != shaped(v).dtype:
                env[a] = append(eqns, lambda x, dtype=dtype: x.astype(dtype), (v,), self._reader(a))
        self._each(eqns, env, so_far, index)
        results = [self._added(eqns, v, so_far[v], env[v], index) for v in self.carried]
        makers = (self.program.eqns[self.program.maker[v]] for v in self.stacked)
        results += [
            self.rows.own(eqns, env[v], v, index, i) for v, i in zip(self.stacked, makers, strict=True)
        ]
        return _compat.new_jaxpr((), (), [index, *state, *whole, *rows], results, eqns)

    def _reader(self, v: jex.Var) -> jex.JaxprEqn:
        return next(
            self.program.eqns[i] for i in self.program.readers[v] if i in self.rules or i in self.turned
        )

    def _placed(self, values: Sequence[jex.Var]) -> list[tuple[jex.Var, int]]:
        return [(v, d) for v in values if (d := self.dimension[v]) is not None]


def _joined(stack: jax.Array, dimension: int, like: Aval) -> jax.Array:
    """Return the rows that chunks have stacked, as one array."""
    count, size = stack.shape[0], stack.shape[1 + dimension]
    parts = jnp.moveaxis(stack, 0, dimension)
    shape = (*like.shape[:dimension], count * size, *like.shape[dimension + 1 :])
    return lax.slice_in_dim(lax.reshape(parts, shape), 0, like.shape[dimension], axis=dimension)


def _sum_type(dtype: DType) -> Any:
    """Return the type in which gradients of a value with this type are added up."""
    return sum_type(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _strong(aval: Aval, dtype: DType) -> Any:
    return aval if aval.dtype == dtype else aval.update(dtype=dtype, weak_type=False)


def _moves(eqn: jex.JaxprEqn) -> bool:
    return (is_light(eqn) or is_placing(eqn)) and not is_loop_edge(eqn)
