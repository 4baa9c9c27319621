"""Equations on the rows around a loop's chunk -> the equations of all rows of which they are parts. See `_chunk_loops`.

A *slab* is a chunk with its halo: chunk `i` has the rows of a value from `i * step - before` on. Where the value has no
such row, the slab has a known number if a mask puts it there, and an unknown one otherwise.

Row-wise work on slabs is the same as on chunks. Windows over a slab's rows, padded only as dilation requires, are
windows over all rows with some padding. Several paddings may fit, as for slices with different starts; the one that the
program under comparison has is taken.

Other slabs are *added* by their chunk to a value, and are zero elsewhere. A linear equation adds its results to that of
the value. It does so for windows if the chunk has every window that reads one of its rows.

Invariant: a slab's row that the value has equals that row, or the sum of all slabs equals the value. Sums run over the
rows that belong to one part alone, or over what the slabs add.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Protocol

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from . import _compat
from ._axes import BatchingRule, is_scattered, rules, terms
from ._chunk_kinds import (
    Index,
    Kind,
    OtherLoopError,
    Places,
    Rows,
    Slab,
    Sum,
    Wanted,
    Whole,
    is_rule,
    linear_in,
)
from ._compat import Atom, SourceInfo, shaped
from ._splice import inlined, needed, typed
from ._windows import WindowRule, windows

Found = tuple[list[Kind], jex.JaxprEqn]
"""The results of an equation on slabs, and the equation of all rows."""


class Loop(Protocol):
    """The facts about a loop. **Fields:** its `count` of chunks; `places`; the equations of values that are the same in
    all chunks; `given` the operands' places, in an inner body; `known` numbers; `eqns` the equations of all rows.
    """

    count: int
    places: Places
    maker: dict[Any, tuple[Any, int, list[Kind]]]
    given: dict[Any, int]
    known: dict[Any, int]
    eqns: list[Any]

    def made(self, eqn: jex.JaxprEqn, kinds: Sequence[Kind], **changed: object) -> list[jex.Var]:
        """Append an equation with these operands, and return its results."""
        ...

    def filled(self, kind: Kind) -> float | None:
        """Return the number that all entries of a value equal, None if it is not known."""
        ...


class Slabs:
    """The slabs of a loop."""

    def __init__(self, loop: Loop):
        self.loop, self.places = loop, loop.places
        self.numbers: dict[Any, int | None] = {}
        self.spread: dict[tuple[Any, int, int], Any] = {}

    # Reading, masking and writing.

    def read(self, eqn: jex.JaxprEqn, array: Kind, indices: Kind) -> Kind:
        """Return the rows that a gather reads at consecutive places."""
        numbers, shape = eqn.params["dimension_numbers"], shaped(eqn.invars[0]).shape
        place = self.places.counted(indices.number) if isinstance(indices, Index) else None
        if place is None or not isinstance(array, Whole) or len(numbers.start_index_map) != 1:
            raise OtherLoopError
        (d,) = numbers.start_index_map
        others = tuple(i for i in range(len(shape)) if i != d)
        sizes = tuple(1 if i == d else n for i, n in enumerate(shape))
        of_rows = numbers.collapsed_slice_dims == (d,) and numbers.offset_dims == others
        if not of_rows or numbers.operand_batching_dims or tuple(eqn.params["slice_sizes"]) != sizes:
            raise OtherLoopError
        symbols, first = place
        if len(symbols) != 1 or symbols[0][0] != self.places.symbol or symbols[0][1] <= 0:
            raise OtherLoopError
        return self.kind(Slab(array.atom, d, symbols[0][1], -first), shaped(eqn.outvars[0]).shape[d])

    def masked(self, eqn: jex.JaxprEqn, mask: Kind, *cases: Kind) -> Kind | None:
        """Return a slab with a number in place of the rows that its value lacks, None for any other selection."""
        if not isinstance(mask, Index) or len(cases) != 2 or not isinstance(cases[1], (Rows, Slab)):
            return None
        found, fill, shape = (
            self.places.inside(mask.number),
            self.loop.filled(cases[0]),
            shaped(eqn.outvars[0]).shape,
        )
        d = cases[1].dimension
        if found is None or fill is None or shaped(eqn.invars[0]).shape != shape or found.dimension != d:
            return None
        slab = self._slab(cases[1], shape[d])
        begins, ends = self._beyond(slab, shape[d])
        if slab.adds and fill != 0:
            return None
        if found.begin != (((self.places.symbol, slab.step),), -slab.before):
            return None
        if found.least not in (0, *[None] * (not begins)) or found.below not in (
            _rows(slab),
            *[None] * (not ends),
        ):
            return None
        return self.kind(slab._replace(fill=fill, also=()), shape[d])

    def written(self, kind: Rows | Slab, size: int, source_info: SourceInfo) -> Atom:
        """Return the value whose parts a loop writes one behind the other, with zeros behind its rows."""
        if isinstance(kind, Rows):
            if kind.parts > 1:
                raise OtherLoopError
            return kind.atom
        if not self.is_own(kind, size):
            raise OtherLoopError
        beyond = self.loop.count * size - _rows(kind)
        config = [(0, beyond * (i == kind.dimension), 0) for i in range(kind.atom.aval.ndim)]
        closed = jax.make_jaxpr(lambda x: lax.pad(x, np.zeros((), x.dtype), config))(typed(kind.atom))
        eqns, (made,) = inlined(closed, [kind.atom], source_info)
        self.loop.eqns += eqns
        return made

    # Equations.

    def results(self, eqn: jex.JaxprEqn, kinds: Sequence[Kind]) -> list[Kind]:
        """Return the results of an equation on slabs, as those of a known equation of the values."""
        options = [[kind, *kind.also] if isinstance(kind, Slab) else [kind] for kind in kinds]
        found = list(filter(None, (self._results(eqn, each) for each in itertools.product(*options))))
        if not found:
            raise OtherLoopError
        known = (made for made, whole in found if len(found) == 1 or self.is_known(whole))
        return next(known, found[0][0])

    def is_known(self, eqn: jex.JaxprEqn) -> bool:
        """Return whether the program under comparison has such an equation."""
        numbers = self._numbers(eqn)
        return numbers is not None and self.places.known(eqn, numbers)

    def _results(self, eqn: jex.JaxprEqn, kinds: Sequence[Kind]) -> Found | None:
        if eqn.primitive.name == "slice" and (narrowed := self._narrowed(eqn, kinds[0])) is not None:
            return [narrowed], eqn
        if eqn.primitive.name == "concatenate" and (widened := self._widened(eqn, kinds)) is not None:
            return [widened], eqn
        for rule in (*windows(eqn), *rules(eqn)):
            own = self._operands(eqn, kinds, rule)
            if own is None:
                continue
            made = (
                self._windowed(eqn, own, rule)
                if isinstance(rule, WindowRule)
                else self._apart(eqn, own, rule)
            )
            if made is not None:
                return made, self.loop.eqns[-1]
        return None

    def _operands(
        self, eqn: jex.JaxprEqn, kinds: Sequence[Kind], rule: BatchingRule
    ) -> list[Whole | Slab] | None:
        """Return the operands, if their rows are where this rule has them."""
        found: list[Whole | Slab] = []
        for a, kind, d in zip(eqn.invars, kinds, rule.operands, strict=True):
            if isinstance(kind, (Rows, Slab)) and d == kind.dimension:
                found.append(self._slab(kind, shaped(a).shape[d]))
            elif isinstance(kind, Whole):
                found.append(kind)
            else:
                return None
        able = not rule.groups and any(isinstance(kind, Slab) for kind in found)
        return found if able else None

    def _apart(
        self, eqn: jex.JaxprEqn, kinds: Sequence[Whole | Slab], rule: BatchingRule
    ) -> list[Kind] | None:
        """Return the results of row-wise work, or of a sum over rows."""
        slabs = [
            (kind, shaped(a).shape[kind.dimension])
            for a, kind in zip(eqn.invars, kinds, strict=True)
            if isinstance(kind, Slab)
        ]
        like, size = slabs[0]
        ratio = Fraction(_rows(like), size)
        if (
            len(
                {
                    (Fraction(kind.step, n), Fraction(kind.before, n), Fraction(_rows(kind), n))
                    for kind, n in slabs
                }
            )
            > 1
        ):
            return None
        adds = [isinstance(kind, Slab) and kind.adds for kind in kinds]
        if any(adds) and not self._adds(eqn, kinds, adds):
            return None
        atoms = [
            self.spread_over(kind, d, ratio) if isinstance(kind, Whole) and d is not None else kind.atom
            for kind, d in zip(kinds, rule.operands, strict=True)
        ]
        whole = _resized(eqn, rule, ratio, atoms)
        if whole is None:
            return None
        found = (*rules(whole), *windows(whole))
        if not any(is_rule(each, rule.operands, rule.results, rule.sizes) for each in found):
            return None
        if rule.summed:
            # Zeros of one factor are enough: rows behind all are some that there are, and finite where those are.
            factors = ((kinds[k], shaped(eqn.invars[k]).shape) for k in terms(eqn, rule))
            once = (any(adds) or self._is_apart(like, size)) and any(
                kind.fill == 0 or not any(self._beyond(kind, shape[kind.dimension]))
                for kind, shape in factors
                if isinstance(kind, Slab)
            )
            return [Sum(v) for v in self._made(whole)] if once else None
        places: list[tuple[int, int, Fraction, Fraction]] = []
        for v, d in zip(eqn.outvars, rule.results, strict=True):
            if d is None:
                return None
            n = shaped(v).shape[d]
            places.append((d, n, Fraction(like.step * n, size), Fraction(like.before * n, size)))
        if any(step.denominator != 1 or before.denominator != 1 for _, _, step, before in places):
            return None
        made = zip(self._made(whole), places, strict=True)
        return [
            self.kind(Slab(v, d, int(step), int(before), adds=any(adds)), n)
            for v, (d, n, step, before) in made
        ]

    def _adds(self, eqn: jex.JaxprEqn, kinds: Sequence[Whole | Slab], adds: Sequence[bool]) -> bool:
        """Return whether an equation maps chunks' contributions to operands onto contributions to its results."""
        if is_scattered(eqn):
            return list(adds) == [False, False, True]
        terms = linear_in(eqn, adds)
        if terms is None:
            return False
        others = [(kinds[k], shaped(eqn.invars[k]).shape) for k in terms if not adds[k]]
        return all(
            self._is_apart(kind, shape[kind.dimension])
            if isinstance(kind, Slab)
            else self.loop.filled(kind) == 0
            for kind, shape in others
        )

    def _windowed(
        self, eqn: jex.JaxprEqn, kinds: Sequence[Whole | Slab], rule: WindowRule
    ) -> list[Kind] | None:
        """Return the results of windows. Padding of a slab must lie in gaps that dilation leaves, or around
        contributions.
        """
        slab, others = kinds[0], [kind for kind in kinds[1:] if isinstance(kind, Slab)]
        if not isinstance(slab, Slab) or len(others) != rule.summed:
            return None
        size, step = (
            shaped(eqn.invars[0]).shape[slab.dimension],
            Fraction(slab.step * rule.dilation, rule.stride),
        )
        if step.denominator != 1:
            return None
        adds = slab.adds or not (rule.at[0] == "start_indices" or rule.pads_gaps(eqn))
        if adds:
            count = 0 if rule.summed else shaped(eqn.outvars[0]).shape[rule.results[0] or 0]
            every = rule.has_every(size, count) and (slab.adds or self._is_apart(slab, size))
            if rule.summed or not every or not rule.is_linear(eqn):
                return None
        if rule.fill is not None and any(self._beyond(slab, size)) and slab.fill != rule.fill:
            return None
        first = rule.padding + slab.before * rule.dilation
        if rule.summed:
            (other,) = others
            size = shaped(eqn.invars[1]).shape[other.dimension]
            once = other.adds and (other.fill == 0 or not any(self._beyond(other, size)))
            if other.step != step or not (once or self.is_own(other, size)):
                return None
            known = self._known_windows(eqn, kinds, rule, first - other.before * rule.stride, [_rows(other)])
            return None if known is None else [Sum(v) for v in self._made(known)]
        (d,) = rule.results
        assert d is not None
        most, found = shaped(eqn.outvars[0]).shape[d], list[Slab]()
        sizes = self.places.sizes(eqn, d)
        for before in (*range(most), *range(-1, -most, -1)):
            if found and (rule.at[0] == "padding" or before < 0):
                break
            low = first - before * rule.stride
            counts = {size for size, begin in sizes if begin in (None, low)}
            known = self._known_windows(eqn, kinds, rule, low, counts)
            found += (
                [Slab(v, d, int(step), before, adds=adds) for v in self._made(known)]
                if known is not None
                else []
            )
        if not found:
            return None
        return [self.kind(found[0]._replace(also=tuple(found[1:])), most)]

    def _known_windows(
        self,
        eqn: jex.JaxprEqn,
        kinds: Sequence[Whole | Slab],
        rule: WindowRule,
        low: int,
        counts: Iterable[int],
    ) -> jex.JaxprEqn | None:
        """Return a known equation of windows over all rows, with this many rows of padding in front.

        **Arguments:** `counts` the possible numbers of windows.
        """
        slab, d = kinds[0], rule.results[0]
        assert isinstance(slab, Slab)
        for count, high in _ends(rule, _rows(slab), low, counts):
            aval = eqn.outvars[0].aval if d is None else _with_rows(eqn.outvars[0], d, count)
            whole = eqn.replace(
                invars=[kind.atom for kind in kinds],
                outvars=[_compat.new_var(_compat.unvaried(aval))],
                params=rule.padded(eqn, low, high, _rows(slab)),
            )
            if self.is_known(whole) and replace(rule, padding=low) in windows(whole):
                return whole
        return None

    def _narrowed(self, eqn: jex.JaxprEqn, kind: Kind) -> Kind | None:
        """Return a slab with fewer rows, None for a slice of all rows: a part of that has the rows that it needs."""
        if not isinstance(kind, (Rows, Slab)):
            return None
        d, shape = kind.dimension, shaped(eqn.invars[0]).shape
        starts, limits, strides = (eqn.params[n] for n in ("start_indices", "limit_indices", "strides"))
        ends = [*zip(starts, limits, strict=True)]
        alone = all(i == d or own == (0, n) for i, (own, n) in enumerate(zip(ends, shape, strict=True)))
        if ends[d] == (0, shape[d]) or not alone or any(each != 1 for each in strides or ()):
            return None
        slab, (start, limit) = self._slab(kind, shape[d]), ends[d]
        if slab.adds:
            return None
        return self.kind(slab._replace(before=slab.before - start, also=()), limit - start)

    def _widened(self, eqn: jex.JaxprEqn, kinds: Sequence[Kind]) -> Kind | None:
        """Return a chunk's contribution extended with zeros to more rows, None if anything else is concatenated."""
        at = [k for k, kind in enumerate(kinds) if not isinstance(kind, Whole)]
        kind, sizes = kinds[at[0]], [shaped(a).shape for a in eqn.invars]
        if len(at) != 1 or not isinstance(kind, (Rows, Slab)) or kind.dimension != eqn.params["dimension"]:
            return None
        d = kind.dimension
        slab, size = self._slab(kind, sizes[at[0]][d]), sizes[at[0]][d]
        zeros = all(self.loop.filled(other) == 0 for k, other in enumerate(kinds) if k not in at)
        if not zeros or not (slab.adds or self._is_apart(slab, size)):
            return None
        fill = slab.fill if any(self._beyond(slab, size)) else 0
        before = slab.before + sum(shape[d] for shape in sizes[: at[0]])
        made = slab._replace(before=before, fill=fill, also=(), adds=True)
        return self.kind(made, shaped(eqn.outvars[0]).shape[d])

    def spread_over(self, kind: Whole, dimension: int, ratio: Fraction) -> Any | None:
        """Return a value whose rows are all equal, with the number of rows multiplied."""
        if kind.atom in self.loop.given:
            raise Wanted(self.loop.given[kind.atom], dimension, ratio)
        if kind.atom not in self.loop.maker:
            return None
        eqn, place, kinds = self.loop.maker[kind.atom]
        key = kind.atom, dimension, int(shaped(kind.atom).shape[dimension] * ratio)
        for rule in rules(eqn) if key not in self.spread else ():
            if rule.results[place] != dimension or rule.groups:
                continue
            atoms = [
                None
                if not isinstance(own, Whole)
                else own.atom
                if d is None
                else self.spread_over(own, d, ratio)
                for own, d in zip(kinds, rule.operands, strict=True)
            ]
            if (whole := _resized(eqn, rule, ratio, atoms)) is not None:
                self.spread[key] = self._made(whole)[place]
                break
        return self.spread.get(key)

    # What is known of slabs.

    def _is_apart(self, kind: Slab, size: int) -> bool:
        """Return whether the chunks have every row exactly once."""
        return kind.before == 0 and size == kind.step and _rows(kind) <= self.loop.count * kind.step

    def is_own(self, kind: Slab, size: int, fill: float = 0) -> bool:
        """Return whether slabs have zeros, or another number, in rows besides their own."""
        return self._is_apart(kind, size) and (
            _rows(kind) == self.loop.count * kind.step or kind.fill == fill
        )

    def _beyond(self, kind: Slab, size: int) -> tuple[bool, bool]:
        """Return whether the first slab starts before the first row, and whether the last ends behind the last."""
        return kind.before > 0, (self.loop.count - 1) * kind.step - kind.before + size > _rows(kind)

    def _slab(self, kind: Rows | Slab, size: int) -> Slab:
        if isinstance(kind, Slab):
            return kind
        if kind.parts > 1 or kind.atom.aval.shape[kind.dimension] != self.loop.count * size:
            raise OtherLoopError
        return Slab(kind.atom, kind.dimension, size, 0)

    def kind(self, slab: Slab, size: int) -> Kind:
        """Return a slab, as plain rows if it is just a chunk of them."""
        if slab.before == 0 and size == slab.step and _rows(slab) == self.loop.count * size and not slab.also:
            return Rows(slab.atom, slab.dimension)
        return slab

    def _made(self, whole: jex.JaxprEqn) -> list[jex.Var]:
        return self.loop.made(whole, list(map(Whole, whole.invars)))

    def _numbers(self, eqn: jex.JaxprEqn) -> list[int] | None:
        found = list(map(self._number, eqn.invars))
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    def _number(self, atom: Atom) -> int | None:
        if _compat.is_literal(atom):
            return self.places.literal(atom)
        if atom in self.loop.known:
            return self.loop.known[atom]
        if atom not in self.numbers:
            for eqn in (self.loop.eqns[i] for i in needed(self.loop.eqns, [atom])):
                if eqn.outvars[0] not in self.numbers and (given := self._numbers(eqn)) is not None:
                    self.numbers.update(zip(eqn.outvars, self.places.of_all(eqn, given), strict=True))
        return self.numbers.setdefault(atom, None)


def _ends(rule: WindowRule, rows: int, low: int, counts: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the possible numbers of windows, with the padding behind for each."""
    if rule.at[0] == "padding_config":  # a pad is of any width
        yield from ((count, (count - 1) - (rows - 1) * rule.dilation - low) for count in counts)
        return
    is_slice = rule.at[0] == "start_indices"
    most = 0 if is_slice else rule.extent + rule.dilation + rule.stride
    for count in counts if low <= most and (is_slice or -most <= low) else ():
        least = (count - 1) * rule.stride + rule.extent - (rows - 1) * rule.dilation - low
        for high in range(least, least + rule.stride):
            if -rows < high <= most and not (is_slice and rule.stride == 1 and low == high == 0):
                yield count, high


def _rows(kind: Slab) -> int:
    return kind.atom.aval.shape[kind.dimension]


def _with_rows(v: Atom, dimension: int, rows: int) -> Any:
    shape = list(shaped(v).shape)
    shape[dimension] = rows
    return v.aval.update(shape=tuple(shape))


def _resized(
    eqn: jex.JaxprEqn, rule: BatchingRule, ratio: Fraction, atoms: Sequence[Any]
) -> jex.JaxprEqn | None:
    """Return an equation with rows multiplied by this ratio, None if that is not a whole number or an operand is
    missing.
    """
    sizes = [
        (eqn.params[name] if index is None else eqn.params[name][index]) * ratio for name, index in rule.sizes
    ]
    both = [*zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True)]
    rows = [None if d is None else shaped(a).shape[d] * ratio for a, d in both]
    if None in atoms or any(each is not None and each.denominator != 1 for each in (*sizes, *rows)):
        return None
    params = dict(eqn.params)
    for (name, index), size in zip(rule.sizes, sizes, strict=True):
        known = params[name]
        params[name] = int(size) if index is None else (*known[:index], int(size), *known[index + 1 :])
    count = len(eqn.invars)
    if any(
        n is not None and shaped(a).shape[d] != n for a, (_, d), n in zip(atoms, both, rows, strict=False)
    ):
        return None
    results = zip(both[count:], rows[count:], strict=True)
    avals = [v.aval if n is None or d is None else _with_rows(v, d, int(n)) for (v, d), n in results]
    outvars = [_compat.new_var(_compat.unvaried(aval)) for aval in avals]
    return eqn.replace(invars=list(atoms), outvars=outvars, params=params)
