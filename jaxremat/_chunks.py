"""Flat equations -> the same with work on large rows done chunk after chunk.

What a language model's head makes of a token (logits over the vocabulary, their exponentials, the gradient of both)
depends on that token alone; what it leaves, a loss per token and gradients of weights that are sums over tokens, is
small. All of it for some of the tokens, then for the next, needs a fraction of the memory and no operation twice:

    logits = h @ W                                       for i in range(chunks):
    loss, dlogits = softmax_cross_entropy(logits)   ->       logits = h[i] @ W
    dW, dh = h.T @ dlogits, dlogits @ W.T                    loss[i], dlogits = softmax_cross_entropy(logits)
                                                             dW, dh[i] = dW + h[i].T @ dlogits, dlogits @ W.T

A *region* is a set of equations that fall apart into rows (`_rows`) alike. It grows from a large value in both
directions as long as what is made or read is large too, and is a few products of matrices and what is between them, not
the whole step. In chunks it is one call, within which nothing is planned.

Law: no result of a region is read by what it reads itself; a sum over rows is read by none of its equations. Rows are
made by the same operations as before, sums over rows chunk by chunk.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from . import _compat
from ._cost import aval_nbytes
from ._devices import DeviceSpec
from ._primitives import is_contraction, is_heavy, is_late, is_light, is_relabelling
from ._rows import Way, in_chunk, sum_type, ways

LARGE = 1 / 16
"""What a region must not hand on is at least this share of the value that it grows from."""

LEAST_NBYTES = 1 << 20
"""It grows from no smaller value: chunks of that would be kernels of a few microseconds."""

PRODUCTS = 6
"""It has no more contractions: those of two layers, with the gradients of their operands."""

SEEDS = 3
"""So many of the largest values are tried."""

IN_CHUNKS = "in_chunks"
"""What the call is named that stands for a region that is not planned."""

CHUNKS = (2, 4, 8, 16)
"""Of the numbers of chunks that divide the rows the nearest to these are considered."""

ENOUGH = 8
"""Of the dimensions that rows may be of, the outermost is taken that allows so many chunks."""


@dataclass(frozen=True)
class Region:
    """Equations of a program that fall apart into rows alike.

    **Fields:** `ways` of its equations, by index; `rows` that any number of chunks must divide; `inner_nbytes` of what
    it neither reads nor leaves; `sum_nbytes` of its sums; `read_nbytes` of what each chunk reads whole; `kernels` about
    how many it takes; `source` the user's line.
    """

    ways: Mapping[int, Way]
    rows: int
    inner_nbytes: int
    sum_nbytes: int
    read_nbytes: int
    kernels: int
    source: str

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """Numbers of chunks, in ascending order."""
        able = [n for n in range(2, min(self.rows, 4 * CHUNKS[-1]) + 1) if self.rows % n == 0]
        return tuple(sorted({min(able, key=lambda n: abs(n - wanted)) for wanted in CHUNKS if able}))

    def fewer_nbytes(self, chunks: int) -> int:
        """What so many chunks may save at most."""
        return self.inner_nbytes - self.inner_nbytes // chunks

    def more_seconds(self, chunks: int, device: DeviceSpec) -> float:
        """What so many chunks take longer: sums are read and written for each, what is read whole is read again, and
        kernels are launched.
        """
        nbytes = (3 * chunks - 1) * self.sum_nbytes + (chunks - 1) * self.read_nbytes
        return nbytes / device.bandwidth + (chunks - 1) * self.kernels * device.launch_seconds


def regions(closed: jex.ClosedJaxpr) -> tuple[Region, ...]:
    """That about the largest value that has one; none where it is not worth it."""
    program = _Program(closed)
    sized = sorted(
        ((aval_nbytes(v.aval), -i, v) for i in program.alive for v in program.eqns[i].outvars),
        key=lambda each: each[:2],
        reverse=True,
    )
    seeds: dict[Any, Any] = {}
    for nbytes, _, v in sized:
        if nbytes < LEAST_NBYTES or len(seeds) == SEEDS:
            break
        if program.inner(v):
            seeds.setdefault(v.aval.shape, v)
    for v in seeds.values():
        grown = (program.grown(v, d) for d in range(len(v.aval.shape)))
        able = [region for region in grown if region is not None and region.choices]
        if able:
            enough = (region for region in able if region.choices[-1] >= ENOUGH)
            return (next(enough, max(able, key=lambda region: region.fewer_nbytes(region.choices[-1]))),)
    return ()


class _Program:
    """Who makes and reads what, of the equations that anything needs."""

    def __init__(self, closed: jex.ClosedJaxpr):
        jaxpr = closed.jaxpr
        self.eqns = jaxpr.eqns
        self.returned = set(_compat.variables(jaxpr.outvars))
        needed = set(self.returned)
        alive: list[int] = []
        for i in reversed(range(len(self.eqns))):
            if self.eqns[i].effects or not needed.isdisjoint(self.eqns[i].outvars):
                alive.append(i)
                needed.update(_compat.variables(self.eqns[i].invars))
        self.alive = alive[::-1]
        self.maker = {v: i for i in self.alive for v in self.eqns[i].outvars}
        self.readers: dict[Any, list[int]] = {}
        for i in self.alive:
            for a in dict.fromkeys(_compat.variables(self.eqns[i].invars)):
                self.readers.setdefault(a, []).append(i)

    def inner(self, v: Any) -> bool:
        """Whether a value may stay within a region."""
        return v not in self.returned and v in self.maker and bool(getattr(v.aval, "shape", ()))

    def grown(self, seed: Any, dimension: int) -> Region | None:
        """The region about a value with its rows in this dimension, if there is one."""
        grower = _Grower(self, LARGE * aval_nbytes(seed.aval))
        return grower.region() if grower.grow(seed, dimension) else None


class _Grower:
    """A region as it grows: the `ways` of its equations, and the dimension of the rows of what these read and make."""

    def __init__(self, program: _Program, above: float):
        self.program, self.above = program, above
        self.ways: dict[int, Way] = {}
        self.dimension: dict[Any, int | None] = {}
        self.products = 0
        self.large: list[
            Any
        ] = []  # what is to stay within, and whose maker and readers are not in the region yet

    def grow(self, seed: Any, dimension: int) -> bool:
        """Whether that ended in a region."""
        program, eqns = self.program, self.program.eqns
        self.dimension[seed] = dimension
        self.large.append(seed)
        while True:
            while self.large:
                v = self.large.pop()
                near = [program.maker[v], *program.readers.get(v, ())]
                for i in near:
                    if i not in self.ways and not self._add(i) and v is seed:
                        return False
                if self.products > PRODUCTS:
                    return False
            between = self._between()
            if not between:
                break
            if not all(self._add(i) for i in between if i not in self.ways):
                return False
        made = {v for i in self.ways for v in eqns[i].outvars}
        return all(
            a not in made or self.dimension[a] is not None
            for i in self.ways
            for a in _compat.variables(eqns[i].invars)
        )

    def _add(self, i: int) -> bool:
        """Add an equation, if its rows are where they are known to be."""
        eqn = self.program.eqns[i]
        atoms = [*eqn.invars, *eqn.outvars]
        for way in ways(eqn):
            both = list(zip(atoms, (*way.operands, *way.results), strict=True))
            placed = [(a, d) for a, d in both if not _compat.is_literal(a)]
            known = [(d, self.dimension[a]) for a, d in placed if a in self.dimension]
            if any(d is not None for d, _ in known) and all(d == at for d, at in known) and _agrees(placed):
                break
        else:
            return False
        self.products += is_contraction(eqn)
        self.ways[i] = way
        for a, d in placed:
            if a not in self.dimension:
                self.dimension[a] = d
                if d is not None and aval_nbytes(a.aval) >= self.above and self.program.inner(a):
                    self.large.append(a)
        return True

    def _between(self) -> list[int]:
        """The equations that read, if only through others, what the region makes, and make what it reads."""
        eqns, maker = self.program.eqns, self.program.maker
        first, last = min(self.ways), max(self.ways)
        near = [i for i in self.program.alive if first <= i <= last]
        behind: set[int] = set()
        for i in near:
            makers = (maker.get(a, -1) for a in _compat.variables(eqns[i].invars))
            if any(j in self.ways or j in behind for j in makers):
                behind.add(i)
        before: set[int] = set()
        for i in reversed(near):
            if i in self.ways or i in before:
                before.update(maker.get(a, -1) for a in _compat.variables(eqns[i].invars))
        return sorted(i for i in behind & before if i not in self.ways)

    def region(self) -> Region:
        """What has grown."""
        eqns = self.program.eqns
        reads, leaves = _edges(self.program, self.ways)
        made = {v for i in self.ways for v in eqns[i].outvars}
        sizes = [a.aval.shape[d] for a, d in self.dimension.items() if d is not None]
        inner = made.difference(leaves)
        largest = max((a for a in made), key=lambda a: aval_nbytes(a.aval))
        return Region(
            ways=dict(sorted(self.ways.items())),
            rows=gcd(*sizes),
            inner_nbytes=sum(aval_nbytes(a.aval) for a in inner),
            sum_nbytes=sum(aval_nbytes(a.aval) for a in leaves if self.dimension[a] is None),
            read_nbytes=sum(aval_nbytes(a.aval) for a in reads if self.dimension[a] is None),
            kernels=sum(is_heavy(eqns[i]) for i in self.ways),
            source=_compat.user_line(eqns[self.program.maker[largest]]),
        )


def _agrees(placed: Iterable[tuple[Any, int | None]]) -> bool:
    """Whether no value has its rows in two places."""
    found: dict[Any, int | None] = {}
    return all(found.setdefault(a, d) == d for a, d in placed)


def _edges(program: _Program, members: Collection[int]) -> tuple[list[Any], list[Any]]:
    """What equations read of others, and what others read of them."""
    eqns = program.eqns
    made = {v for i in members for v in eqns[i].outvars}
    reads = dict.fromkeys(a for i in members for a in _compat.variables(eqns[i].invars) if a not in made)
    leaves = [
        v
        for i in members
        for v in eqns[i].outvars
        if v in program.returned or any(j not in members for j in program.readers.get(v, ()))
    ]
    return list(reads), leaves


def chunked(
    closed: jex.ClosedJaxpr, found: Sequence[Region], chunks: Sequence[int]
) -> tuple[jex.ClosedJaxpr, list[int]]:
    """The program with one of its regions in chunks; also for each equation its index before, -1 for new ones.

    **Arguments:** `chunks` for each region how many, 0 for one that is left as it is.
    """
    eqns = list(closed.jaxpr.eqns)
    for region, count in zip(found, chunks, strict=True):
        if count:
            return _in_chunks(closed, region, count)
    return closed, list(range(len(eqns)))


def _in_chunks(closed: jex.ClosedJaxpr, region: Region, chunks: int) -> tuple[jex.ClosedJaxpr, list[int]]:
    program = _Program(closed)
    eqns = program.eqns
    loop = _Chunks(program, region, chunks)
    made = loop.equations()
    gone = region.ways.keys() | loop.moved
    first, last = min(region.ways), max(region.ways)
    # What reads the region's results, in between, waits for them.
    waits: list[int] = []
    late = {v for i in region.ways for v in eqns[i].outvars}
    before = [i for i in program.alive if i < first and i not in gone]
    for i in program.alive:
        if not first <= i <= last or i in gone:
            continue
        if late.isdisjoint(_compat.variables(eqns[i].invars)):
            before.append(i)
        else:
            waits.append(i)
            late.update(eqns[i].outvars)
    after = [*waits, *(i for i in program.alive if i > last)]
    origin = [*before, *(-1 for _ in made), *after]
    whole = [*(eqns[i] for i in before), *made, *(eqns[i] for i in after)]
    jaxpr = closed.jaxpr
    result = _compat.new_jaxpr(jaxpr.constvars, closed.consts, jaxpr.invars, jaxpr.outvars, whole)
    return result, origin


class _Chunks:
    """The loop over chunks of a region's rows."""

    def __init__(self, program: _Program, region: Region, chunks: int):
        self.program, self.region, self.chunks = program, region, chunks
        self.dimension: dict[Any, int | None] = {}
        self.adder: dict[Any, int] = {}  # sums -> the equation that makes them
        for i, way in region.ways.items():
            eqn = program.eqns[i]
            both = zip((*eqn.invars, *eqn.outvars), (*way.operands, *way.results), strict=True)
            self.dimension.update((a, d) for a, d in both if not _compat.is_literal(a))
            if way.summed:
                self.adder.update((v, i) for v in eqn.outvars)
        # A sum that is scattered goes on in the array that it starts with.
        self.over = {
            v: program.eqns[i].invars[0] for v, i in self.adder.items() if _scatters(program.eqns[i])
        }
        self.moved = self._moved()
        self.turned = self._turned()
        # What chunks read, parts of it or all, and what they leave; and what the call reads.
        self.parted, self.leaves = _edges(program, [*self.turned, *region.ways])
        self.reads, _ = _edges(program, [*self.moved, *region.ways])

    def _moved(self) -> list[int]:
        """Mere movement of data for the region alone: nothing else needs the result."""
        program, found = self.program, set[int]()
        waiting, _ = _edges(program, self.region.ways)
        while waiting:
            i = program.maker.get(waiting.pop(), -1)
            if i in found or i < 0 or not is_light(program.eqns[i]) or len(program.eqns[i].outvars) > 1:
                continue
            (v,) = program.eqns[i].outvars
            readers = program.readers[v]
            if v not in program.returned and all(j in self.region.ways or j in found for j in readers):
                found.add(i)
                waiting.extend(_compat.variables(program.eqns[i].invars))
        return sorted(found)

    def _turned(self) -> list[int]:
        """What of that is only read in another order, as a turned matrix is, whole: products in chunks do so."""
        program, found = self.program, list[int]()
        for i in reversed(self.moved):
            (v,) = program.eqns[i].outvars
            near = [j for j in program.readers[v] if j in self.region.ways or j in self.moved]
            whole = self.dimension.get(v) is None
            if (
                whole
                and is_relabelling(program.eqns[i])
                and all(j in self.region.ways or j in found for j in near)
            ):
                found.append(i)
        return found[::-1]

    def equations(self) -> list[Any]:
        """The call in place of the region's equations, one of the backward pass if any of them is."""
        late = [i for i in self.region.ways if is_late(self.program.eqns[i])]
        like = self.program.eqns[late[0] if late else min(self.region.ways)]

        def in_chunks(*operands: Any) -> list[Any]:
            return self._run(*operands)

        in_chunks.__name__ = IN_CHUNKS
        types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=_weak(a)) for a in self.reads]
        closed = jax.make_jaxpr(jax.jit(in_chunks))(*types)
        made, _ = _compat.inlined(closed, self.reads, like.source_info, self.leaves)
        return made

    def _run(self, *operands: Any) -> list[Any]:
        """The results of the region for what it reads."""
        env = dict(zip(self.reads, operands, strict=True))
        for eqn in (self.program.eqns[i] for i in self.moved if i not in self.turned):
            invars = [a.val if _compat.is_literal(a) else env[a] for a in eqn.invars]
            env[eqn.outvars[0]] = eqn.primitive.bind(*invars, **eqn.params)
        # Zeros that depend on nothing could be filled at any time.
        zero, _ = lax.optimization_barrier((jnp.zeros((), jnp.float32), operands[0]))
        start = [
            env[self.over[v]] if v in self.over else lax.broadcast(zero.astype(self._type(v)), v.aval.shape)
            for v in self.leaves
        ]
        body = self._body()

        def step(state: list[Any], i: Any) -> tuple[list[Any], None]:
            return jex.jaxpr_as_fun(body)(i, *state, *(env[a] for a in self.parted)), None

        state, _ = lax.scan(step, start, jnp.arange(self.chunks, dtype=jnp.int32))
        return [a.astype(v.aval.dtype) for a, v in zip(state, self.leaves, strict=True)]

    def _type(self, v: Any) -> Any:
        """The type in which a result is carried from chunk to chunk."""
        return sum_type(v.aval.dtype) if v in self.adder and v not in self.over else v.aval.dtype

    def _body(self) -> jex.ClosedJaxpr:
        """One chunk: its index, the results so far and what the region reads -> the results."""
        eqns: list[Any] = []
        index = _compat.new_var(ShapedArray((), jnp.int32))
        state = [_compat.new_var(v.aval.update(dtype=self._type(v), weak_type=False)) for v in self.leaves]
        so_far = dict(zip(self.leaves, state, strict=True))
        operands = [_compat.new_var(a.aval) for a in self.parted]
        env: dict[Any, Any] = {}
        for a, operand in zip(self.parted, operands, strict=True):
            d = self.dimension.get(a)
            env[a] = operand if d is None else self._part(eqns, operand, index, d, a)
        for eqn in (self.program.eqns[i] for i in self.turned):
            env[eqn.outvars[0]] = made = _compat.new_var(eqn.outvars[0].aval)
            eqns.append(eqn.replace(invars=[env.get(a, a) for a in eqn.invars], outvars=[made]))
        for i, way in self.region.ways.items():
            eqn = self.program.eqns[i]
            invars = [a if _compat.is_literal(a) else env[a] for a in eqn.invars]
            if way.summed and _scatters(eqn):
                invars[0] = so_far[eqn.outvars[0]]
            params = in_chunk(eqn, way, self.chunks)
            outvars = [
                _compat.new_var(self._aval(v, d, params))
                for v, d in zip(eqn.outvars, way.results, strict=True)
            ]
            eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
            env.update(zip(eqn.outvars, outvars, strict=True))
        results = [self._added(eqns, v, so_far[v], env[v], index) for v in self.leaves]
        body = _compat.new_jaxpr((), (), [index, *state, *operands], results, eqns)
        _compat.check_jaxpr(body)
        return body

    def _aval(self, v: Any, dimension: int | None, params: Mapping[str, Any]) -> Any:
        if dimension is None:
            return v.aval.update(dtype=params.get("preferred_element_type") or v.aval.dtype)
        shape = list(v.aval.shape)
        shape[dimension] //= self.chunks
        return v.aval.update(shape=tuple(shape))

    def _part(self, eqns: list[Any], operand: Any, index: Any, dimension: int, like: Any) -> Any:
        """The rows of this chunk."""
        size = operand.aval.shape[dimension] // self.chunks

        def part(whole: Any, i: Any) -> Any:
            return lax.dynamic_slice_in_dim(whole, i * size, size, dimension)

        return self._append(eqns, part, (operand, index), self._reader(like))

    def _added(self, eqns: list[Any], v: Any, so_far: Any, made: Any, index: Any) -> Any:
        """A result with what this chunk makes of it."""
        d = self.dimension[v]
        if v in self.over:
            return made

        def written(whole: Any, part: Any, i: Any) -> Any:
            if d is None:
                return whole + part.astype(whole.dtype)
            return lax.dynamic_update_slice_in_dim(whole, part, i * part.shape[d], d)

        return self._append(eqns, written, (so_far, made, index), self.program.maker[v])

    def _reader(self, v: Any) -> int:
        return next(i for i in self.program.readers[v] if i in self.region.ways)

    def _append(self, eqns: list[Any], fn: Any, operands: Sequence[Any], like: int) -> Any:
        types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
        closed = jax.make_jaxpr(fn)(*types)
        made, (result,) = _compat.inlined(closed, operands, self.program.eqns[like].source_info)
        eqns.extend(made)
        return result


def is_in_chunks(eqn: Any) -> bool:
    """Whether an equation is all of a region, in chunks."""
    return eqn.params.get("name") == IN_CHUNKS


def _scatters(eqn: Any) -> bool:
    return eqn.primitive.name == "scatter-add"


def _weak(a: Any) -> bool:
    return bool(getattr(a.aval, "weak_type", False))
