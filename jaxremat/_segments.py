"""Flat equations -> the same with pairs of scans in two levels, which saves one carry per segment instead of per layer.

A pair of `L = S * M` iterations

    c, R = scan(forward, c0, xs)                g, Y = scan(backward, g0, (R, ...), reverse)

becomes `S` segments of `M` iterations. The outer backward body runs the inner forward scan again:

    c, C = scan(c -> (scan(forward, c, xs'), c), c0, xs[S, M, ...])
    g, Y = scan(g -> (R = scan(forward, c', xs'); scan(backward, g, (R, ...))), g0, (C, xs[S, M, ...], ...), reverse)

so that a carry is stacked `S` times and everything else `M` times, at one more forward pass. These are scans like any
others: `_loops` lays the outer backward scan open, and in it the inner pair.
"""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import jax
import jax.extend.core as jex

from . import _compat
from ._inline import Inliner
from ._loops import operands, pairs


def choices(length: int) -> tuple[int, ...]:
    """Numbers of segments worth trying for a scan of this length: divisors around its square root."""
    divisors = [s for s in range(2, length) if length % s == 0]
    root = isqrt(length)
    near = sorted(divisors, key=lambda s: max(s / root, root / s))
    return tuple(near[:1])


def segmented(
    flat: jex.ClosedJaxpr, inliner: Inliner, segments: Sequence[int]
) -> tuple[jex.ClosedJaxpr, list[int], set[int]]:
    """The program with its pairs in two levels; also for each equation its index before, -1 for new ones; and the
    indices of the outer backward scans.

    **Arguments:** `segments` for each pair of the program's top level, in the order of the forward scans, into how many
    segments it is cut; 1 leaves it as it is.
    """
    eqns = flat.jaxpr.eqns
    backward_of: dict[int, list[int]] = {}
    for backward, forward in pairs(eqns).items():
        backward_of.setdefault(forward, []).append(backward)
    counts = dict(zip(sorted(backward_of), segments, strict=True))
    replaced: dict[int, list[Any]] = {}
    read_by: dict[Any, set[int]] = {}
    for i, eqn in enumerate(eqns):
        for a in eqn.invars:
            if not _compat.is_literal(a):
                read_by.setdefault(a, set()).add(i)
    returned = {a for a in flat.jaxpr.outvars if not _compat.is_literal(a)}
    for i, count in counts.items():
        if count > 1:
            own = set(backward_of[i])
            seen = [v in returned or not read_by.get(v, set()) <= own for v in eqns[i].outvars]
            pair = _Pair(eqns[i], count, seen)
            replaced[i] = pair.forward()
            replaced.update((j, pair.backward(eqns[j])) for j in own)
    found: list[Any] = []
    origin: list[int] = []
    outer: set[int] = set()
    for i, eqn in enumerate(eqns):
        if i in replaced and i not in counts:
            outer.update(
                len(found) + j for j, new in enumerate(replaced[i]) if new.primitive is eqn.primitive
            )
        found.extend(replaced.get(i, [eqn]))
        origin.extend([-1] * len(replaced[i]) if i in replaced else [i])
    jaxpr = flat.jaxpr
    return (
        _compat.new_jaxpr(inliner.constvars, inliner.consts, jaxpr.invars, jaxpr.outvars, found),
        origin,
        outer,
    )


class _Pair:
    """One forward scan, to be cut into `count` segments; `seen` which of its results others than its pair read."""

    def __init__(self, eqn: Any, count: int, seen: Sequence[bool]):
        self.eqn = eqn
        self.count = count
        self.length = eqn.params["length"] // count
        self.carries = _compat.scan_counts(eqn)[1]
        self.seen = seen
        self.starts: list[Any] = []  # the stacked carries with which the segments start

    def forward(self) -> list[Any]:
        """The outer forward scan, which stacks the carries that its segments start with."""
        eqn = self.eqn
        consts, init, scanned = operands(eqn)
        cuts, arrays = self._cut(scanned)
        visible = [i for i in range(self.carries, len(eqn.outvars)) if self.seen[i]]
        known, carried = _fresh(consts), _fresh(init)
        slices = [_slice(self.count, a) for a in arrays]
        inner = _scan(eqn, _selected(eqn, visible), self.length, known, carried, slices)
        results = [*inner.outvars[: self.carries], *carried, *inner.outvars[self.carries :]]
        body = _compat.new_jaxpr((), (), [*known, *carried, *slices], results, [inner])
        outer = _scan(eqn, body, self.count, consts, init, arrays, eqn.outvars[: self.carries])
        self.starts = outer.outvars[self.carries : 2 * self.carries]
        stacked = outer.outvars[2 * self.carries :]
        return [
            *cuts,
            outer,
            *(_reshape(v, eqn.outvars[i], eqn) for v, i in zip(stacked, visible, strict=True)),
        ]

    def backward(self, eqn: Any) -> list[Any]:
        """The outer backward scan; its body runs a segment's forward scan once more."""
        consts, init, scanned = operands(eqn)
        place = {v: i for i, v in enumerate(self.eqn.outvars) if i >= self.carries}
        wanted = sorted({place[a] for a in scanned if a in place})
        own_consts, _, own_scanned = operands(self.eqn)
        others = [a for a in scanned if a not in place]
        cuts, arrays = self._cut([*own_scanned, *others])
        known, again, carried = _fresh(consts), _fresh(own_consts), _fresh(init)
        starts = [_slice(self.count, a) for a in self.starts]
        slices = [_slice(self.count, a) for a in arrays]
        forward = _scan(
            self.eqn, _selected(self.eqn, wanted), self.length, again, starts, slices[: len(own_scanned)]
        )
        made = dict(zip(wanted, forward.outvars[self.carries :], strict=True))
        rest = iter(slices[len(own_scanned) :])
        inputs = [made[place[a]] if a in place else next(rest) for a in scanned]
        backward = _scan(eqn, eqn.params["jaxpr"], self.length, known, carried, inputs)
        body = _compat.new_jaxpr(
            (), (), [*known, *again, *carried, *starts, *slices], backward.outvars, [forward, backward]
        )
        ends = eqn.outvars[: len(init)]
        outer = _scan(eqn, body, self.count, [*consts, *own_consts], init, [*self.starts, *arrays], ends)
        stacked = zip(outer.outvars[len(init) :], eqn.outvars[len(init) :], strict=True)
        return [*cuts, outer, *(_reshape(v, made, eqn) for v, made in stacked)]

    def _cut(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Equations that shape arrays `[L, ...]` as `[S, M, ...]`, and their results."""
        eqns = []
        for a in arrays:
            shape = (self.count, self.length, *a.aval.shape[1:])
            eqns.append(_reshape(a, _compat.new_var(a.aval.update(shape=shape)), self.eqn))
        return eqns, [eqn.outvars[0] for eqn in eqns]


def _fresh(atoms: Sequence[Any]) -> list[Any]:
    return [_compat.new_var(a.aval) for a in atoms]


def _slice(length: int, array: Any) -> Any:
    return _compat.new_var(jex.mapped_aval(length, 0, array.aval))


def _reshape(array: Any, made: Any, like: Any) -> Any:
    type_ = jax.ShapeDtypeStruct(array.aval.shape, array.aval.dtype)
    template = jax.make_jaxpr(lambda x: jax.lax.reshape(x, made.aval.shape))(type_).eqns[0]
    return template.replace(invars=[array], outvars=[made], source_info=like.source_info)


def _selected(eqn: Any, results: Sequence[int]) -> jex.ClosedJaxpr:
    """A scan's body with its carries and these of its results, without the equations that they do not need."""
    closed = eqn.params["jaxpr"]
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    carries = _compat.scan_counts(eqn)[1]
    outvars = [*jaxpr.outvars[:carries], *(jaxpr.outvars[i] for i in results)]
    needed = {a for a in outvars if not _compat.is_literal(a)}
    kept = []
    for inner in reversed(jaxpr.eqns):
        if any(v in needed for v in inner.outvars):
            kept.append(inner)
            needed.update(a for a in inner.invars if not _compat.is_literal(a))
    return _compat.new_jaxpr(jaxpr.constvars, consts, jaxpr.invars, outvars, kept[::-1])


def _scan(
    like: Any,
    body: Any,
    length: int,
    consts: Sequence[Any],
    init: Sequence[Any],
    scanned: Sequence[Any],
    lasts: Sequence[Any] | None = None,
) -> Any:
    """A scan that runs as another does, with another body, length and operands."""
    results = getattr(body, "jaxpr", body).outvars[len(init) :]
    stacked = [_compat.new_var(jex.unmapped_aval(length, 0, a.aval)) for a in results]
    return _compat.scan_like(like, body, length, (consts, init, scanned), (lasts or _fresh(init), stacked))
