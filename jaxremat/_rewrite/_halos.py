"""Equations that carry an axis -> the number of rows of each value in a part, and of those around it that windows read.

A convolution in chunks of an image's rows reads a few rows more than a chunk has, and the convolutions before it still
more:

    for i in range(parts):
        x = rows of the image from i * step - 2 to (i + 1) * step + 2        zeros outside the image
        h = gelu(convolution(x))            from i * step - 1 to (i + 1) * step + 1; zeros outside again
        y = convolution(h)                  the rows of this part

The strides between values set how many rows of each a part has. Halos are computed backwards, from the values that
loops hand on, of which a part has only its own rows, to those that they read. A value that both passes read has the
wider of two halos.

Cotangents go the other way. All equations from a cotangent on are linear up to sums, so a part computes *its
contribution* to them and to the rows around its own, and no part needs more of the forward pass than its own results:

        dy = gradient of the loss           the rows of this part
        dh = transposed convolution(dy)     its contribution, from i * step - 1 to (i + 1) * step + 1
        dw += gradient of the kernel(h, dy)

Invariant: a row of a part is that row of the value, or the contributions of all parts add up to it; a sum is over the
part's own rows, or over its contributions.
"""

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._program import _compat
from .._program._axes import BatchingRule, Parts, is_scattered, terms
from .._program._chunk_kinds import linear_in
from .._program._compat import Atom, shaped
from .._program._flops import aval_nbytes
from .._program._primitives import is_fusion_root
from .._program._windows import Halo, PartWithHalo, WindowRule
from ._loop_inlining import append
from ._program_readers import Readers
from ._region_loops import Loop, handed_on, owners
from ._row_parts import RowParts

NO_HALO: Halo = (0, 0)


class Halos(RowParts):
    """The rows of each value in parts that read neighbouring rows, or of which the last ends past the rows.

    **Arguments:** `rules` of all loops of its region, and of its `own` loop; `leaves` the values that this hands on.
    """

    def __init__(
        self,
        eqns: Sequence[jex.JaxprEqn],
        rules: Loop,
        own: Loop,
        leaves: Collection[jex.Var],
        dimension: Mapping[Atom, int | None],
        parts: Parts,
    ):
        super().__init__(dimension, parts)
        self.windowed = any(isinstance(rule, WindowRule) for rule in rules.values())
        alike = {v: shaped(v).shape[d] // parts.rows for v, d in self.dimension.items()}
        scale = scales(eqns, rules) if self.windowed else alike
        assert scale is not None  # regions have a scale
        self.scale = scale
        rows = [v for v in leaves if v in self.dimension]
        self.added = added(eqns, own, rows, scale)
        self.halo = halos(eqns, own, rows, scale, self.added)

    def step(self, v: jex.Var) -> int:
        """Return the number of rows of a value that belong to one part."""
        return self.parts.size * self.scale[v]

    def rows(self, v: jex.Var) -> int:
        """Return the number of rows of a value in a part, with its halo."""
        return self.step(v) + sum(self.halo.get(v, NO_HALO))

    def is_ragged(self, v: jex.Var) -> bool:
        """Return whether all parts together have more rows than a value."""
        return self.parts.count * self.step(v) != shaped(v).shape[self.dimension[v]]

    def written_shape(self, v: jex.Var) -> tuple[int, ...]:
        """Return the shape of a value with the rows of all parts."""
        if v not in self.dimension:
            return tuple(shaped(v).shape)
        return self._resized(v, self.parts.count * self.step(v))

    def read(self, whole: jax.Array, i: jax.Array, v: jex.Var) -> jax.Array:
        """Return the rows of a part with its halo, with arbitrary rows outside the value."""
        axis, halo = self.dimension[v], self.halo[v]
        if halo == NO_HALO and not self.is_ragged(v):
            return lax.dynamic_slice_in_dim(whole, i * self.step(v), self.step(v), axis)
        places = i * self.step(v) - halo[0] + lax.iota(jnp.int32, self.rows(v))
        others = tuple(d for d in range(whole.ndim) if d != axis)
        numbers = lax.GatherDimensionNumbers(others, (axis,), (axis,))
        sizes = tuple(1 if d == axis else n for d, n in enumerate(whole.shape))
        return lax.gather(whole, places[:, None], numbers, sizes, mode=lax.GatherScatterMode.CLIP)

    def around(
        self,
        eqns: list[jex.JaxprEqn],
        env: dict[Any, Any],
        eqn: jex.JaxprEqn,
        rule: BatchingRule,
        invars: list[Atom],
        index: jex.Var,
        joins: jex.Primitive | None,
    ) -> dict[str, Any]:
        """Return the parameters of an equation for a part with its halo, and give its operands the rows for it."""
        neutral = -1 if joins is lax.and_p else 0  # the fill of missing rows that are added up or joined
        results = [v for v, d in zip(eqn.outvars, rule.results, strict=True) if d is not None]
        size = [aval_nbytes(a.aval) for a in invars]
        halo = done(eqn, rule, self.halo, self.added, self.scale)
        for k, (a, d) in enumerate(zip(eqn.invars, rule.operands, strict=True)):
            if d is None or _compat.is_literal(a):
                continue
            if isinstance(rule, WindowRule):
                fill = rule.fill if k == 0 else neutral
            else:  # zeros in the smallest factor are enough
                fill = neutral if rule.summed and k == min(terms(eqn, rule), key=size.__getitem__) else None
            wide = wanted(eqn, rule, k, halo, self.scale, self.added)
            invars[k] = self.slab(eqns, env, a, wide, fill, index, eqn)
        wider = self.windowed and results
        params = rule.in_chunk(eqn, PartWithHalo(self.rows(results[0]), 1) if wider else self.parts)
        if isinstance(rule, WindowRule):
            rows = shaped(invars[0]).shape[self.dimension[eqn.invars[0]]]
            padding = rule.halo(halo)[1]
            if eqn.invars[0] in self.added:
                padding = rule.reached(_reaching(rule, self.halo[eqn.invars[0]]))[1]
            params = rule.padded(eqn.replace(params=params), *padding, rows)
        return params

    def own(
        self, eqns: list[jex.JaxprEqn], made: Atom, v: jex.Var, index: jex.Var, maker: jex.JaxprEqn
    ) -> Atom:
        """Return the rows of a part that are written, with zeros past the end in the last part."""
        return self.slab(eqns, {v: made}, v, NO_HALO, 0, index, maker)

    def all(self, whole: jax.Array, v: jex.Var) -> jax.Array:
        """Return a value without the rows that it does not have."""
        if v not in self.dimension or not self.is_ragged(v):
            return whole
        axis = self.dimension[v]
        return lax.slice_in_dim(whole, 0, shaped(v).shape[axis], axis=axis)

    def slab(
        self,
        eqns: list[jex.JaxprEqn],
        env: dict[Any, Any],
        v: jex.Var,
        halo: Halo,
        fill: float | None,
        index: jex.Var,
        reader: jex.JaxprEqn,
    ) -> Atom:
        """Return a part of a value with this halo: zeros where it contributes nothing, and `fill`, if not None, outside
        the value.
        """
        (before, behind), d, step = halo, self.dimension[v], self.step(v)
        rows, known = shaped(v).shape[d], self.halo[v]
        first, last = map(min, halo, known)
        begins, ends = bool(before > 0), bool(self.parts.count * step + behind > rows)
        fill = fill if begins or ends else None
        key = v, halo, fill

        def slab(rows_known: jax.Array, i: jax.Array) -> jax.Array:
            own = rows_known
            if (first, last) != known:
                own = lax.slice_in_dim(own, known[0] - first, known[0] + step + last, axis=d)
            if (first, last) != halo:
                shapes = [(*own.shape[:d], n, *own.shape[d + 1 :]) for n in (before - first, behind - last)]
                zeros = [lax.full(shape, 0, own.dtype) for shape in shapes]
                own = lax.concatenate([zeros[0], own, zeros[1]], d)
            if fill is None:
                return own
            at = i * step - before + lax.broadcasted_iota(jnp.int32, own.shape, d)
            sides = [at >= 0] * begins + [at < rows] * ends
            return lax.select(functools.reduce(lax.bitwise_and, sides), own, jnp.full_like(own, fill))

        if key not in env:
            changes = fill is not None or halo != known
            env[key] = append(eqns, slab, (env[v], index), reader) if changes else env[v]
        return env[key]


def in_parts(
    program: Readers, loops: Sequence[Loop]
) -> tuple[int, tuple[tuple[jex.JaxprEqn, float], ...]] | None:
    """Return the number of rows of the coarsest value of loops with windows, and by equation the share of all rows that
    a part computes besides its own; None without such rows, or if equations decide about values that others read.
    """
    eqns, every = program.eqns, {i: rule for loop in loops for i, rule in loop.items()}
    scale = scales(eqns, every)
    once = program.of_one_run - program.of_a_run.keys()
    grouped = any(rule.groups for rule in every.values())  # parts would need a whole number of groups
    if scale is None or grouped or not once.isdisjoint(owners(loops)):
        return None
    placed = (each for i, rule in every.items() for each in _placed(eqns[i], rule))
    size = {a: shaped(a).shape[d] for a, d in placed if d is not None}
    more: list[tuple[jex.JaxprEqn, float]] = []
    for number, loop in enumerate(loops):
        leaves = [v for v in handed_on(program, loops, number) if v in size]
        for v, halo in halos(eqns, loop, leaves, scale, added(eqns, loop, leaves, scale)).items():
            if (i := program.maker.get(v, -1)) in loop and is_fusion_root(eqns[i]):
                more.append((eqns[i], sum(halo) / size[v]))
    return max(-(-rows // scale[v]) for v, rows in size.items()), tuple(more)


def scales(eqns: Sequence[jex.JaxprEqn], rules: Mapping[int, BatchingRule]) -> dict[Any, int] | None:
    """Return the number of rows of each value per row of the coarsest, by variable; None if that varies."""
    found: dict[Any, Fraction] = {}
    waiting = [own for i, rule in rules.items() if (own := _ratios(eqns[i], rule))]
    if any(0 in own.values() for own in waiting):  # values without rows
        return None
    while waiting:
        left: list[dict[Any, Fraction]] = []
        for own in waiting:
            known = [found[v] / ratio for v, ratio in own.items() if v in found] or [Fraction(1)] * (
                not found
            )
            if not known:
                left.append(own)
            elif any(found.setdefault(v, known[0] * ratio) != known[0] * ratio for v, ratio in own.items()):
                return None
        if len(left) == len(waiting):
            return None
        waiting = left
    unit = math.lcm(*(each.denominator for each in found.values()))
    least = math.gcd(*(int(each * unit) for each in found.values()))
    return {v: int(each * unit) // least for v, each in found.items()}


def _ratios(eqn: jex.JaxprEqn, rule: BatchingRule) -> dict[Any, Fraction]:
    """Return the number of rows of each value with the axis, up to a common factor."""
    placed = [(a, d) for a, d in _placed(eqn, rule) if d is not None]
    if isinstance(rule, WindowRule):
        (operand, _), *others = placed
        return {operand: Fraction(rule.stride, rule.dilation), **{a: Fraction(1) for a, _ in others}}
    return {a: Fraction(shaped(a).shape[d]) for a, d in placed}


def added(
    eqns: Sequence[jex.JaxprEqn],
    rules: Mapping[int, BatchingRule],
    leaves: Collection[jex.Var],
    scale: Mapping[Atom, int],
) -> dict[Any, Halo]:
    """Return the values that parts compute as contributions, with the halo of these: all values that depend on them are
    linear in them, up to sums.
    """
    zeros = _zeros(eqns, rules)
    exact = {*leaves, *zeros}
    while True:
        able, found, more = dict[Any, bool](), dict[Any, Halo](), set[Any]()
        for i in reversed(list(rules)):
            eqn, rule = eqns[i], rules[i]
            results = [v for v, d in zip(eqn.outvars, rule.results, strict=True) if d is not None]
            goes_on = all(able.get(v, True) and v not in exact for v in results)
            able.update(dict.fromkeys(results, goes_on))
            for a in dict.fromkeys(a for a, d in _placed(eqn, rule) if d is not None and a not in results):
                able[a] = able.get(a, True) and goes_on and _is_linear(eqn, rule, a)
        for i, rule in rules.items():
            eqn = eqns[i]
            of = list(dict.fromkeys(a for a in _compat.variables(eqn.invars) if a in found))
            if len(of) > 1 and not _is_linear(eqn, rule, *of):
                # If both factors could be contributions, the one that windows have widened is.
                of.sort(key=lambda a: -sum(found[a]))
                more.update(of[1:])
                del of[1:]
            elif of and not is_scattered(eqn) and not isinstance(rule, WindowRule):
                # A complete value must not be added to a contribution: each part would add it again.
                terms = linear_in(eqn, [a in of for a in eqn.invars]) or ()
                more.update(of if any(eqn.invars[k] not in {*of, *zeros} for k in terms) else ())
            results = [v for v, d in zip(eqn.outvars, rule.results, strict=True) if d is not None]
            if results and able[results[0]]:
                own = NO_HALO
                if of and isinstance(rule, WindowRule):
                    own = rule.reached(_reaching(rule, found[of[0]]))[0]
                elif of:
                    wide = _widest([_scaled(found[a], a, results[0], scale) for a in of])
                    own = _whole_rows(wide, rule, eqn, scale)
                found.update(dict.fromkeys(results, own))
        if not more:
            return found
        exact |= more


def _is_linear(eqn: jex.JaxprEqn, rule: BatchingRule, *operands: Atom) -> bool:
    """Return whether an equation turns contributions to some operands into contributions to its results."""
    at = [k for k, a in enumerate(eqn.invars) if not _compat.is_literal(a) and a in operands]
    if isinstance(rule, WindowRule):
        return at == [int(rule.summed)] and rule.is_linear(eqn)
    if is_scattered(eqn):
        return rule.summed and at == [2]
    terms = linear_in(eqn, [k in at for k in range(len(eqn.invars))])
    if terms is None or rule.copied:
        return False
    return all(rule.operands[k] is not None and not _compat.is_literal(eqn.invars[k]) for k in terms)


def _zeros(eqns: Sequence[jex.JaxprEqn], rules: Iterable[int]) -> set[Any]:
    made = (eqns[i] for i in rules if eqns[i].primitive.name == "broadcast_in_dim")
    return {eqn.outvars[0] for eqn in made if _compat.is_literal(eqn.invars[0]) and eqn.invars[0].val == 0}


def _reaching(rule: WindowRule, halo: Halo) -> Halo:
    """Return the halo of a contribution to an operand, such that slices of it begin and end within the halo."""
    return (halo[0], max(halo[1], -rule.padding)) if rule.at[0] == "start_indices" else halo


def halos(
    eqns: Sequence[jex.JaxprEqn],
    rules: Mapping[int, BatchingRule],
    leaves: Collection[jex.Var],
    scale: Mapping[Atom, int],
    added: Mapping[Atom, Halo],
) -> dict[Any, Halo]:
    """Return the halo of each value with the axis that a loop reads or computes.

    **Arguments:** `leaves` the values that it hands on; `added` the halos of contributions.
    """
    found: dict[Any, Halo] = {**dict.fromkeys(leaves, NO_HALO), **added}
    for i in reversed(list(rules)):
        rule, eqn = rules[i], eqns[i]
        results = [v for v, d in zip(eqn.outvars, rule.results, strict=True) if d is not None]
        own = done(eqn, rule, found, added, scale)
        found.update((v, own) for v in results if v not in added)
        for k, (a, d) in enumerate(zip(eqn.invars, rule.operands, strict=True)):
            if d is not None and not _compat.is_literal(a) and a not in added:
                wide = wanted(eqn, rule, k, own, scale, added)
                found[a] = _widest([*filter(None, [found.get(a)]), wide])
    return found


def done(
    eqn: jex.JaxprEqn,
    rule: BatchingRule,
    found: Mapping[Atom, Halo],
    added: Mapping[Atom, Halo],
    scale: Mapping[Atom, int],
) -> Halo:
    """Return the halo of an equation's results; for sums, that of the operand to which parts contribute."""
    results = [v for v, d in zip(eqn.outvars, rule.results, strict=True) if d is not None]
    if not results:
        return next((added[a] for a in _compat.variables(eqn.invars) if a in added), NO_HALO)
    if results[0] in added:
        return added[results[0]]
    return _whole_rows(_widest([found.get(v, NO_HALO) for v in results]), rule, eqn, scale)


def wanted(
    eqn: jex.JaxprEqn,
    rule: BatchingRule,
    k: int,
    halo: Halo,
    scale: Mapping[Atom, int],
    added: Mapping[Atom, Halo],
) -> Halo:
    """Return the halo that an operand needs for a result, or, for sums, for the operand to which parts contribute."""
    a = eqn.invars[k]
    if isinstance(rule, WindowRule) and k == 0:
        return _reaching(rule, added[a]) if a in added else rule.halo(halo)[0]
    of = [v for v, d in zip(eqn.outvars, rule.results, strict=True) if d is not None]
    of = of or [v for v in _compat.variables(eqn.invars) if v in added]
    return _scaled(halo, of[0], a, scale) if of else NO_HALO


def _scaled(halo: Halo, of: Atom, a: Atom, scale: Mapping[Atom, int]) -> Halo:
    """Return a halo of one value in rows of another."""
    before, behind = (-(-rows * scale[a] // scale[of]) for rows in halo)
    return before, behind


def _whole_rows(halo: Halo, rule: BatchingRule, eqn: jex.JaxprEqn, scale: Mapping[Atom, int]) -> Halo:
    """Return a halo of as many rows that operands have whole rows for them."""
    if isinstance(rule, WindowRule):
        return halo
    units = [scale[a] for a, d in _placed(eqn, rule) if d is not None]
    unit = max(units) // min(units) if scale[eqn.outvars[0]] == max(units) else 1
    before, behind = (-(-rows // unit) * unit for rows in halo)
    return before, behind


def _widest(each: Sequence[Halo]) -> Halo:
    before, behind = zip(*each, strict=True)
    return max(before), max(behind)


def _placed(eqn: jex.JaxprEqn, rule: BatchingRule) -> list[tuple[Any, int | None]]:
    both = zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True)
    return [(a, d) for a, d in both if not _compat.is_literal(a)]
