"""Equations that carry an axis in windows -> how many rows each value has in a part, and how many around it.

A convolution in chunks of an image's rows reads a few rows more than a chunk has, and those before it more again:

    for i in range(parts):
        x = rows of the image from i * step - 2 to (i + 1) * step + 2        zeros where it has none
        h = gelu(convolution(x))            from i * step - 1 to (i + 1) * step + 1; zeros again where there is none
        y = convolution(h)                  the rows of this part

Rows of values are as many, in a part, as the strides between them say. Halos are found from what loops hand on, of
which a part has its own rows alone, back to what they read. What both passes read has the wider one.

Invariant: a row of a part is that row of the value; a sum is of the part's own rows.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._program import _compat
from .._program._axes import BatchingRule, Parts
from .._program._compat import Atom, shaped
from .._program._primitives import is_fusion_root
from .._program._windows import Halo, PartWithHalo, WindowRule
from ._loop_inlining import append
from ._program_readers import Readers
from ._region_loops import Loop, handed_on, owners

NO_HALO: Halo = (0, 0)


class Halos:
    """The rows that one loop over parts does of each value.

    **Arguments:** `rules` of all loops of its region, and those that are its `own`; `leaves` what it hands on;
    `dimension` of the rows in values.
    """

    def __init__(
        self,
        eqns: Sequence[jex.JaxprEqn],
        rules: Loop,
        own: Loop,
        leaves: Collection[jex.Var],
        dimension: Mapping[Any, int | None],
        parts: Parts,
    ):
        scale = scales(eqns, rules)
        assert scale is not None  # or it was no region
        self.scale, self.parts = scale, parts
        self.dimension = {v: d for v, d in dimension.items() if d is not None}
        self.halo = halos(eqns, own, [v for v in leaves if v in self.dimension], scale)

    def step(self, v: jex.Var) -> int:
        """Return how many rows of a value are a part's own."""
        return self.parts.size * self.scale[v]

    def rows(self, v: jex.Var) -> int:
        """Return how many rows of a value a part has, with its halo."""
        return self.step(v) + sum(self.halo.get(v, NO_HALO))

    def is_ragged(self, v: jex.Var) -> bool:
        """Return whether parts have more rows together than a value has."""
        return self.parts.count * self.step(v) != shaped(v).shape[self.dimension[v]]

    def laid(self, v: jex.Var) -> tuple[int, ...]:
        """Return the shape of a value with the rows of all parts."""
        shape = list(shaped(v).shape)
        shape[self.dimension[v]] = self.parts.count * self.step(v)
        return tuple(shape)

    def read(self, whole: jax.Array, i: jax.Array, v: jex.Var) -> jax.Array:
        """Return the rows of a part with its halo, any where the value has none."""
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
        neutral: float,
    ) -> dict[str, Any]:
        """Return the parameters of an equation for a part with its halo, and let its operands have the rows for it.

        **Arguments:** `neutral` what its results are made of where there are no rows, if they are sums.
        """
        results = [v for v, d in zip(eqn.outvars, rule.results, strict=True) if d is not None]
        halo = self.halo[results[0]] if results else NO_HALO
        for k, (a, d) in enumerate(zip(eqn.invars, rule.operands, strict=True)):
            if d is None or _compat.is_literal(a):
                continue
            fill = neutral if rule.summed else None
            if isinstance(rule, WindowRule) and k == 0:
                fill = rule.fill
            own = wanted(eqn, rule, k, halo, self.scale)
            invars[k] = self.slab(eqns, env, a, own, fill, index, eqn)
        params = rule.in_chunk(eqn, PartWithHalo(self.rows(results[0]), 1) if results else self.parts)
        if isinstance(rule, WindowRule):
            rows = shaped(invars[0]).shape[self.dimension[eqn.invars[0]]]
            params = rule.padded(eqn.replace(params=params), *rule.halo(halo)[1], rows)
        return params

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
        """Return so many rows around a part of a value, and a number where the value has no row, if there is one."""
        (before, behind), d, step = halo, self.dimension[v], self.step(v)
        size, rows, start = step + before + behind, shaped(v).shape[d], self.halo[v][0] - before
        begins, ends = bool(before > 0), bool(self.parts.count * step + behind > rows)
        fill = fill if begins or ends else None
        key = v, halo, fill

        def slab(part: jax.Array, i: jax.Array) -> jax.Array:
            if size != part.shape[d]:
                part = lax.slice_in_dim(part, start, start + size, axis=d)
            if fill is None:
                return part
            at = i * step - before + lax.broadcasted_iota(jnp.int32, part.shape, d)
            sides = [at >= 0] * begins + [at < rows] * ends
            return lax.select(functools.reduce(lax.bitwise_and, sides), part, jnp.full_like(part, fill))

        if key not in env:
            changes = fill is not None or halo != self.halo[v]
            env[key] = append(eqns, slab, (env[v], index), reader) if changes else env[v]
        return env[key]


def in_parts(
    program: Readers, loops: Sequence[Loop]
) -> tuple[int, tuple[tuple[jex.JaxprEqn, float], ...]] | None:
    """Return how many rows the coarsest value of loops with windows has, and how much more of all rows equations do in
    each part; None where there are no such rows, or where equations decide about what others read.
    """
    eqns, every = program.eqns, {i: rule for loop in loops for i, rule in loop.items()}
    scale = scales(eqns, every)
    once = program.of_one_run - program.of_a_run.keys()
    grouped = any(rule.groups for rule in every.values())  # of which parts would have to be a number
    if scale is None or grouped or not once.isdisjoint(owners(loops)):
        return None
    placed = (each for i, rule in every.items() for each in _placed(eqns[i], rule))
    size = {a: shaped(a).shape[d] for a, d in placed if d is not None}
    more: list[tuple[jex.JaxprEqn, float]] = []
    for number, loop in enumerate(loops):
        leaves = [v for v in handed_on(program, loops, number) if v in size]
        for v, halo in halos(eqns, loop, leaves, scale).items():
            if (i := program.maker.get(v, -1)) in loop and is_fusion_root(eqns[i]):
                more.append((eqns[i], sum(halo) / size[v]))
    return max(-(-rows // scale[v]) for v, rows in size.items()), tuple(more)


def scales(eqns: Sequence[jex.JaxprEqn], rules: Mapping[int, BatchingRule]) -> dict[Any, int] | None:
    """Return how many rows values have for each of the coarsest, by variable; None where that is not one number."""
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
    """Return of the values that have the axis how many rows they have, but for a common factor."""
    placed = [(a, d) for a, d in _placed(eqn, rule) if d is not None]
    if isinstance(rule, WindowRule):
        (operand, _), *others = placed
        return {operand: Fraction(rule.stride, rule.dilation), **{a: Fraction(1) for a, _ in others}}
    return {a: Fraction(shaped(a).shape[d]) for a, d in placed}


def halos(
    eqns: Sequence[jex.JaxprEqn],
    rules: Mapping[int, BatchingRule],
    leaves: Collection[jex.Var],
    scale: Mapping[Atom, int],
) -> dict[Any, Halo]:
    """Return the halo of each value with the axis that a loop reads or makes.

    **Arguments:** `leaves` what it hands on.
    """
    found: dict[Any, Halo] = dict.fromkeys(leaves, NO_HALO)
    for i in reversed(list(rules)):
        rule = rules[i]
        results = [v for v, d in zip(eqns[i].outvars, rule.results, strict=True) if d is not None]
        own = NO_HALO
        if results:
            own = _whole_rows(_widest([found.get(v, NO_HALO) for v in results]), rule, eqns[i], scale)
        found.update(dict.fromkeys(results, own))
        for k, (a, d) in enumerate(zip(eqns[i].invars, rule.operands, strict=True)):
            if d is not None and not _compat.is_literal(a):
                found[a] = _widest([*filter(None, [found.get(a)]), wanted(eqns[i], rule, k, own, scale)])
    return found


def wanted(eqn: jex.JaxprEqn, rule: BatchingRule, k: int, halo: Halo, scale: Mapping[Atom, int]) -> Halo:
    """Return the halo that an operand needs for one of the results."""
    if isinstance(rule, WindowRule) and k == 0:
        return rule.halo(halo)[0]
    if rule.summed or halo == NO_HALO:
        return NO_HALO
    results = zip(eqn.outvars, rule.results, strict=True)
    of = next(scale[v] for v, d in results if d is not None)
    before, behind = (rows * scale[eqn.invars[k]] // of for rows in halo)
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
