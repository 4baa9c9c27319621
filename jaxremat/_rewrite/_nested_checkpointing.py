"""Flat equations -> the same with nested checkpointing of pairs of scans: they keep fewer carries and run the forward
pass again.

A pair of `L = S * M + r` iterations, over the rows of arrays `X[L, ...]`,

    c, R = scan(forward, c0, X)                g, Y = scan(backward, g0, (R, X), reverse)

becomes, in two levels, `S` segments of `M` iterations, and a pair for the last `r`. With `I = arange(S * M)` as `[S,
M]`,

    c, C = scan(c -> (scan(forward, c, I'), c), c0, I)
    c, R = scan(forward, c, rest)
    g, Y = scan(backward, (g0, zeros), (R, rest), reverse)
    g, Y = scan((g, Y) -> (R = scan(forward, c', I'); scan(backward, (g, Y), (R, I'), reverse)),
                (g, Y), (C, I), reverse)

Then `S` carries are stacked, and all other residuals `M` times. With more levels the inner pair is split in the same
way. All levels read and write rows of the whole arrays: none copies its segment's parameters or gradients. A result
that overwrites an array (see `_optimizer_in_backward`) starts as that array instead of zeros, and its rows are read
there. The results are ordinary scans: `_loop_inlining` inlines the outer backward scan, and the inner pair in it.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._model._loop_levels import nested
from .._program import _compat
from .._program._compat import Atom, Aval, shaped
from .._program._inline import Inliner
from .._program._primitives import runs_once
from .._program._splice import needed
from ._flat_program import FlatProgram
from ._loop_inlining import APART, PART, append, operands, pairs, row_at, row_written
from ._program_readers import Readers
from ._selections import settled
from ._sinking import sink_into

Body = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], Sequence[Any], Sequence[Any]]]
"""Constants, carries and slices of an iteration -> its equations, new carries, and the values that it stacks."""


def segmented(program: FlatProgram, inliner: Inliner) -> FlatProgram:
    """Split pairs of the program's top level into the levels of `program.pairs`; a single level leaves a pair
    unchanged.
    """
    jaxpr, over = program.closed.jaxpr, program.over
    both = zip(backward_of(jaxpr.eqns).items(), program.pairs, strict=True)
    divided = [(i, own, form.levels) for (i, own), form in both if nested(form.levels)]
    eqns = sink_into(jaxpr.eqns, {n for i, own, _ in divided for n in (i, *own)})
    read_by: dict[Any, set[int]] = {}
    for i, eqn in enumerate(eqns):
        for a in _compat.variables(eqn.invars):
            read_by.setdefault(a, set()).add(i)
    returned = set(_compat.variables(jaxpr.outvars))
    replaced: dict[int, list[Any]] = {}
    for i, own, levels in divided:
        seen = [v in returned or not read_by.get(v, set()) <= set(own) for v in eqns[i].outvars]
        pair = _Pair(eqns[i], inliner, levels, seen, over)
        replaced[i] = pair.forward()
        replaced.update((j, pair.backward(eqns[j])) for j in own)
    found: list[Any] = []
    sources: list[int] = []
    for i, eqn in enumerate(eqns):
        found.extend(replaced.get(i, [eqn]))
        sources.extend([-1] * len(replaced[i]) if i in replaced else [i])
    cut = _compat.new_jaxpr(inliner.constvars, inliner.consts, jaxpr.invars, jaxpr.outvars, found)
    return program.moved(cut, sources)


def backward_of(eqns: Sequence[jex.JaxprEqn]) -> dict[int, list[int]]:
    """Return for the forward scan of each pair, in order, the indices of its backward scans."""
    found: dict[int, list[int]] = {}
    for backward, forward in pairs(eqns).items():
        found.setdefault(forward, []).append(backward)
    return dict(sorted(found.items()))


def cuttable(eqns: Sequence[jex.JaxprEqn], opened: Readers) -> tuple[bool, ...]:
    """Return for each pair whether it can be split into levels. The results of its backward scans must be able to start
    as zeros, and the forward scan must be allowed to run again, also for other loops that read values of one run.

    **Arguments:** `opened` the program with its loops inlined.
    """
    of_one_run = {id(opened.program.loops[loop].eqn) for loop in opened.loops_at_edges}
    return tuple(
        not runs_once(eqns[i])
        and of_one_run.isdisjoint(id(eqns[j]) for j in (i, *own))
        and all(
            jnp.issubdtype(shaped(v).dtype, jnp.number)
            for j in own
            for v in eqns[j].outvars[_compat.scan_counts(eqns[j])[1] :]
        )
        for i, own in backward_of(eqns).items()
    )


class _Pair:
    """A forward scan to be split into levels; `seen` tells which of its results are read outside its pair.

    All scans created here have the whole arrays as constants, and scan over indices.
    """

    def __init__(
        self,
        eqn: jex.JaxprEqn,
        inliner: Inliner,
        levels: Sequence[int],
        seen: Sequence[bool],
        over: Mapping[jex.Var, Atom],
    ):
        self.eqn = eqn
        self.over = over
        # index of a backward scan's constant -> the carry that replaces it, because it is overwritten
        self.written: dict[int, int] = {}
        self.inliner = inliner
        self.levels = levels
        self.rest = eqn.params["length"] - prod(levels)
        self.carries = len(operands(eqn)[1])
        self.known = self._known(eqn)
        self.visible = [i for i in range(self.carries, len(eqn.outvars)) if seen[i]]
        self.main: Any = None  # the indices of iterations with nested checkpointing
        self.behind: Any = None  # and those of the rest
        self.starts: list[Any] = []  # the stacked initial carries of the segments
        self.last: dict[Any, Any] = {}  # the forward scan's stacked results -> those of the rest

    def _known(self, eqn: jex.JaxprEqn, but: Sequence[Atom] = ()) -> list[Atom]:
        """Return a scan's constants, those of its body, and the arrays that it scans over, without those in `but`."""
        consts, _, arrays = operands(eqn)
        body, held = _compat.opened(eqn.params["jaxpr"])
        own = (self.inliner.constant(c, v.aval) for c, v in zip(held, body.constvars, strict=True))
        return [*own, *consts, *(a for a in arrays if a not in but)]

    def forward(self) -> list[jex.JaxprEqn]:
        """Return the forward scan over the first level, which stacks the initial carries of its segments, and that of
        the rest.
        """
        eqn, count, main, rest = self.eqn, self.carries, prod(self.levels), self.rest
        init, ends = operands(eqn)[1], eqn.outvars[:count]
        reverse = eqn.params["reverse"]
        made: list[Any] = []
        self.main = self._indices(made, self.levels, rest if reverse else 0)
        between = _fresh(init) if rest else ends
        made.append(
            self._forward(self.levels, self.known, init, self.main, self.visible, between, starts=True)
        )
        self.starts, stacks = made[-1].outvars[count : 2 * count], made[-1].outvars[2 * count :]
        if rest:
            self.behind = self._indices(made, (rest,), 0 if reverse else main)
            stacked = range(count, len(eqn.outvars))
            made.append(self._forward((rest,), self.known, between, self.behind, stacked, ends, opened=True))
            self.last = dict(zip(eqn.outvars[count:], made[-1].outvars[count:], strict=True))
        # Results that others read keep their variable and shape, although two scans compute them.
        for v, first in zip((eqn.outvars[i] for i in self.visible), stacks, strict=True):

            def whole(stack: jax.Array, *behind: jax.Array) -> jax.Array:
                stacks = [stack.reshape(main, *stack.shape[len(self.levels) :]), *behind]
                return jnp.concatenate(stacks[::-1] if reverse else stacks)

            append(made, whole, [first, *([self.last[v]] if rest else ())], eqn, v)
        return made

    def backward(self, eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
        """Return the rest's backward scan, and that over the first level, whose body runs a segment's forward scan
        again.
        """
        known = [*self.known, *self._known(eqn, self._handed(eqn))]
        made: list[Any] = []
        init = operands(eqn)[1]
        stacks = eqn.outvars[len(init) :]
        state = [*init, *(self.over[v] if v in self.over else _zeros(made, shaped(v), eqn) for v in stacks)]
        begun = {self.over[v]: len(init) + i for i, v in enumerate(stacks) if v in self.over}
        places = [begun.get(a) if not _compat.is_literal(a) else None for a in known]
        self.written = {i: at for i, at in enumerate(places) if at is not None}
        if self.rest:
            handed = [self.last[a] for a in self._handed(eqn)]
            made.append(self._backward(eqn, self.rest, known, state, self.behind, handed))
            state = made[-1].outvars
        made.append(self._apart(eqn, self.levels, known, state, self.main, self.starts, eqn.outvars))
        return made

    def _handed(self, eqn: jex.JaxprEqn) -> list[Any]:
        """Return the forward scan's stacks that a backward scan reads."""
        stacked = self.eqn.outvars[self.carries :]
        return [v for v in stacked if v in operands(eqn)[2]]

    def _forward(
        self,
        levels: Sequence[int],
        known: Sequence[Atom],
        init: Sequence[Atom],
        indices: Atom,
        results: Sequence[int],
        ends: Sequence[jex.Var] | None = None,
        *,
        starts: bool = False,
        opened: bool = False,
    ) -> Any:
        """Return a forward scan over the first level, which stacks some results, after the initial carries of its
        iterations if `starts`; `opened` if it is one of a pair.
        """

        def body(known: list[Atom], carried: list[Atom], slices: list[Atom]) -> Any:
            if len(levels) == 1:
                eqns, made = self._iteration(self.eqn, known, carried, slices[0], {}, results, opened)
            else:
                eqns = [_inside(self._forward(levels[1:], known, carried, slices[0], results))]
                made = eqns[0].outvars
            return eqns, made[: self.carries], [*(carried if starts else ()), *made[self.carries :]]

        return _loop(self.eqn, levels[0], (known, init, [indices]), body, ends)

    def _backward(
        self,
        eqn: jex.JaxprEqn,
        length: int,
        known: Sequence[Atom],
        state: Sequence[Atom],
        indices: Atom,
        handed: Sequence[Atom],
    ) -> Any:
        """Return a backward scan that carries its own carries and the arrays of its results."""
        carries = len(operands(eqn)[1])
        residuals = self._handed(eqn)
        results = range(carries, len(eqn.outvars))

        def body(known: list[Atom], state: list[Atom], slices: list[Atom]) -> Any:
            known = self._as_written(known, state)
            index, *given = slices
            there = dict(zip(residuals, given, strict=True))
            own = known[len(self.known) :]
            eqns, made = self._iteration(eqn, own, state[:carries], index, there, results, True)
            written = [
                append(eqns, row_written, (whole, row, index), _inside(eqn))
                for whole, row in zip(state[carries:], made[carries:], strict=True)
            ]
            return eqns, [*made[:carries], *written], []

        return _loop(eqn, length, (known, state, [indices, *handed]), body)

    def _apart(
        self,
        eqn: jex.JaxprEqn,
        levels: Sequence[int],
        known: Sequence[Atom],
        state: Sequence[Atom],
        indices: Atom,
        starts: Sequence[Atom],
        ends: Sequence[jex.Var] | None = None,
    ) -> Any:
        """Return the backward scan over the first level, with iterations that each start from a kept carry."""

        def body(known: list[Atom], state: list[Atom], slices: list[Atom]) -> Any:
            known = self._as_written(known, state)
            index, *start = slices
            own = known[: len(self.known)]
            if len(levels) == 2:
                names = {v: i for i, v in enumerate(self.eqn.outvars)}
                wanted = [names[v] for v in self._handed(eqn)]
                again = self._forward(levels[1:], own, start, index, wanted, opened=True)
                handed = again.outvars[self.carries :]
                back = self._backward(eqn, levels[1], known, state, index, handed)
            else:
                again = self._forward(levels[1:], own, start, index, (), starts=True)
                back = self._apart(eqn, levels[1:], known, state, index, again.outvars[self.carries :])
            return [_inside(again), _inside(back)], back.outvars, []

        scan = _loop(eqn, levels[0], (known, state, [indices, *starts]), body, ends)
        return scan.replace(primitive=APART)

    def _as_written(self, known: Sequence[Atom], state: Sequence[Atom]) -> list[Any]:
        """Return the constants, with overwritten ones replaced by their carries."""
        return [state[self.written[i]] if i in self.written else a for i, a in enumerate(known)]

    def _iteration(
        self,
        eqn: jex.JaxprEqn,
        known: Sequence[Atom],
        carried: Sequence[Atom],
        index: Atom,
        given: dict[jex.Var, Atom],
        results: Sequence[int],
        opened: bool,
    ) -> tuple[list[Any], list[Any]]:
        """Return the equations of one iteration of a scan, and its results: the carries and some of the others.

        **Arguments:** `known` from `_known`; `given` slices of arrays that it scans over (other arrays are read at
        `index`).
        """
        closed = eqn.params["jaxpr"]
        jaxpr = _compat.opened(closed)[0]
        arrays = operands(eqn)[2]
        first = len(known) - sum(a not in given for a in arrays)
        eqns: list[Any] = []
        rows = iter([_row(eqns, array, index, _inside(eqn), opened) for array in known[first:]])
        slices = [given[a] if a in given else next(rows) for a in arrays]
        own = zip([*jaxpr.constvars, *jaxpr.invars], [*known[:first], *carried, *slices], strict=True)
        rename: dict[Any, Any] = dict(own)
        outvars = [*jaxpr.outvars[: len(carried)], *(jaxpr.outvars[i] for i in results)]
        for inner in (jaxpr.eqns[i] for i in needed(jaxpr.eqns, outvars)):
            made = [rename.setdefault(v, _compat.new_var(v.aval)) for v in inner.outvars]
            eqns.append(inner.replace(invars=[_read(a, rename) for a in inner.invars], outvars=made))
        return eqns, [_read(a, rename) for a in outvars]

    def _indices(self, into: list[jex.JaxprEqn], shape: Sequence[int], first: int) -> jex.Var:
        """Append an array of this shape with the iterations' indices, from `first` on."""
        made = lambda: lax.iota(jnp.int32, prod(shape)).reshape(shape) + first  # noqa: E731
        return append(into, made, (), self.eqn)


def _read(atom: Atom, rename: dict[jex.Var, Atom]) -> Atom:
    return atom if _compat.is_literal(atom) else rename[atom]


def _row(into: list[jex.JaxprEqn], array: Atom, index: Atom, like: jex.JaxprEqn, opened: bool) -> jex.Var:
    """Append the equations that read an array's row at an index."""
    if opened:
        params = {"length": shaped(array).shape[0]}
        made = _compat.new_var(jex.mapped_aval(params["length"], 0, array.aval))
        into.append(_compat.new_eqn([array, index], [made], PART, params, like.source_info))
        return made
    return append(into, row_at, (array, index), like)


def _zeros(into: list[jex.JaxprEqn], aval: Aval, like: jex.JaxprEqn) -> jex.Var:
    return append(into, lambda: lax.full(aval.shape, 0, aval.dtype), (), like)


def _inside(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """Return the equation as part of a body: the loop has the names around it."""
    return eqn.replace(source_info=_compat.root_source(eqn))


def _fresh(atoms: Sequence[Atom]) -> list[jex.Var]:
    return [_compat.new_var(a.aval) for a in atoms]


def _loop(
    like: jex.JaxprEqn,
    length: int,
    arguments: tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom]],
    body: Body,
    ends: Sequence[jex.Var] | None = None,
) -> Any:
    """Return a scan like another one, with another body, length, operands, and names of its last carries."""
    consts, init, scanned = arguments
    known, carried = _fresh(consts), _fresh(init)
    slices = [_compat.new_var(jex.mapped_aval(length, 0, a.aval)) for a in scanned]
    eqns, lasts, stacked = body(known, carried, slices)
    closed = settled(_compat.new_jaxpr((), (), [*known, *carried, *slices], [*lasts, *stacked], eqns))
    stacks = [_compat.new_var(jex.unmapped_aval(length, 0, a.aval)) for a in stacked]
    results = list(ends) if ends is not None else _fresh(init)
    return _compat.scan_like(like, closed, length, arguments, (results, stacks))
