"""Equations -> the decisions among them that run once, whatever is recomputed.

A decision turns floats into something discrete: a comparison, the indices of a sort, an argmax, a cast to integers. Two
runs of the same equations may differ in the last bit, because a compiler makes different kernels of them, and so may
their decisions. A mask of one run and the numbers of another are harmless if only entries within rounding of the
threshold change sides: the step itself is as uncertain there. Five kinds are harmful:

1. A comparison that holds *by construction*: of a value with a selection from it (the largest, the k-th of a sort, a
   running maximum, a median), directly or after arithmetic: `y - y.max() >= 0`. With values from two runs it fails for
   the selected entry itself. Such a comparison runs once; in the backward pass, its operands run once.
2. Operations that end in integers: positions, indices, counts. A changed position moves everything placed after it, and
   values placed by one run must not be read by another. So these run once, and so do the masks that they count and the
   roundings that they are cast from. Factorisations decide too, about pivots, signs and a basis of equal eigenvalues:
   factors from two runs do not fit together. So do draws by rejection.
3. A value that its own mask keeps in a function's domain, as in `sqrt(where(d > 0, d, 1))`. The mask of one run lets
   the other's zero through, and the gradient is not a number; or lets its one through, if another mask reads the root.
   So the guarded value runs once. So does a root of a difference of kind 1, which only the maximum keeps from being
   the root of a negative number.
4. A number that is zero by construction, such as a row's distance from itself in `y - y[:1]` or `y[:, None] - y`. With
   rows from another run it is not zero: a mask then lets it through, and a root's derivative of it is as large as any.
   So `y` runs once if a comparison or the edge of a domain reads the difference.
5. A choice between two numbers, such as `max(a, b)`, or a kink where they meet, such as `abs(a - b)`. It may be
   uncertain which of the two gets the cotangent, but exactly one must. Masks from two runs let it through to both, or
   to neither. So the comparison of two computed numbers runs once, as in kind 1.

`_domain_edges` finds the values that must come from one run because a function's derivative is large.

Invariant: under any schedule, a decision of these kinds and the values that it is combined with come from one run.
"""

import functools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import inner_eqns, inner_jaxprs, is_pointwise
from ._domain_edges import (
    CHOICES,
    MOVES,
    ROOTS,
    SCALINGS,
    DomainEdges,
    in_domain,
    is_float,
    scales,
    takes_difference,
)

_COMPARISONS = frozenset({"eq", "ne", "ge", "gt", "le", "lt", "eq_to", "le_to", "lt_to"})
_ROUNDINGS = frozenset({"ceil", "floor", "rem", "round", "sign"})
_DIFFERENCES = frozenset({"sub", "div"})
_OF_TWO = _COMPARISONS | {"add", "add_any", "sign", "sub"}
"""Primitives that may compare two numbers, or subtract one from the other."""

_SUMS = frozenset({"add_any", "dot_general", "reduce_sum"})
"""Primitives whose result is zero if all terms are."""

_AMBIGUOUS = frozenset(
    {"eig", "eigh", "geqp3", "geqrf", "hessenberg", "lu", "qr", "random_gamma", "schur", "svd", "tridiagonal"}
)
"""Operations with several right results, of which one bit of the operands may choose another: factorisations (not
Cholesky's), and draws by rejection.
"""

_WITHOUT_ROUNDING = MOVES | {"add", "iota", "max", "min", "mul", "sub"}
"""Primitives that turn random bits into a uniform number: every run gives the same, to the last bit."""


_WINDOW = 2048
"""The number of equations over which a value's origins are followed. Following all would take memory quadratic in the
program's length, because each layer's residual stream depends on those of all layers before.
"""


class _Origin(NamedTuple):
    """The origins of a value's entries: sets of equations, as bits from the equation `base` on.

    **Fields:** `same` computed entries that are this value's, unchanged; `through` computed it and the operands of the
    pointwise arithmetic behind it; `chosen` computed the operands of a choice on the way; `tied` computed both sides of
    a difference between a value and a selection from it; `masks` are the comparisons behind a mask, `roundings` those
    behind a number; `guards` must run once for a selection to keep the number in a domain; `apart` are the differences
    that it is a multiple of; `itself` computed both sides of the differences in it, each zero where its entries meet.
    """

    base: int = 0
    same: int = 0
    through: int = 0
    chosen: int = 0
    tied: int = 0
    masks: int = 0
    roundings: int = 0
    guards: int = 0
    apart: int = 0
    itself: int = 0

    def rebased(self, base: int) -> "_Origin":
        """Return the same sets from a later equation on."""
        by = base - self.base
        return self if by == 0 else _Origin(base, *(bits >> by for bits in self[1:]))


_NONE = _Origin()


def _aligned(origins: Sequence[_Origin], base: int = 0) -> list[_Origin]:
    """Return the origins with their bits starting at one common equation."""
    base = max([base, *(origin.base for origin in origins)])
    return [origin.rebased(base) for origin in origins]


def _union(origins: Sequence[_Origin]) -> _Origin:
    """Return the union of aligned origins."""
    found, *others = origins or (_NONE,)
    for other in others:
        found = _Origin(found.base, *map(operator.or_, found[1:], other[1:]))
    return found


@dataclass(frozen=True)
class Decisions:
    """**Fields:** `compared` for each comparison that holds by construction, or is between two computed numbers, the
    equations that computed both sides; `selected` the comparisons of the first kind; `counted` the equations of
    decisions that end in integers, and of values that decisions keep in a domain; `put_together` for each rounding the
    equations that combine its result with other numbers; `edges` the numbers near the edge of a function's domain.
    """

    compared: dict[int, frozenset[int]]
    selected: frozenset[int]
    counted: frozenset[int]
    put_together: dict[int, list[int]]
    edges: DomainEdges

    def once(self, in_backward: Sequence[bool]) -> set[int]:
        """Return the equations that must not run again.

        **Arguments:** `in_backward` for each equation whether it is part of the backward pass.
        """
        found = {j for i, shared in self.compared.items() for j in (shared if in_backward[i] else (i,))}
        forward = self.counted | self.edges.once(in_backward)
        forward |= {
            i for i, readers in self.put_together.items() if sum(not in_backward[j] for j in readers) > 1
        }
        return found | {i for i in forward if not in_backward[i]}


def decisions(eqns: Sequence[JaxprEqn]) -> Decisions:
    """Return the decisions among flat equations that must share a run with the values that they are combined with."""
    origins: dict[Var, _Origin] = {}
    through: list[_Origin] = []  # of each equation's results
    compared: dict[int, frozenset[int]] = {}
    selected: set[int] = set()
    counted: set[int] = set()
    sides: dict[int, _Origin] = {}  # of each comparison
    exact: set[Var] = set()  # numbers computed from integers without rounding
    constant: set[Var] = set()  # values that depend on no argument
    negative: set[Var] = set()  # earlier numbers with the opposite sign
    maker: dict[Var, int] = {}
    moved: dict[Var, Var] = {}  # number -> the number that all of its entries come from
    roundings = _Roundings()
    gaps: dict[int, bool] = {}  # difference of two computed numbers -> whether one is spread, such as a mean
    edges = DomainEdges(eqns)
    for i, eqn in enumerate(eqns):
        operands = _compat.variables(eqn.invars)
        numbers = [v for v in operands if is_float(v)]
        rounded = any(v not in exact for v in numbers)
        read = _aligned([origins.get(v, _NONE) for v in operands])
        together = _union(read)
        if eqn.primitive.name in _WITHOUT_ROUNDING and not rounded and not together.through:
            exact.update(v for v in eqn.outvars if is_float(v))
        if constant.issuperset(operands):
            constant.update(eqn.outvars)
        two = 0
        if eqn.primitive.name in _OF_TWO:
            others = (v for v in dict.fromkeys(numbers) if v not in exact and v not in constant)
            computed = [origins.get(v, _NONE) for v in others]
            if len(computed) == 2 and all(origin.same for origin in computed) and _takes(eqn, negative):
                gaps[i] = any(_is_spread(eqns[maker[v]]) for v in numbers)
            two = _between_two(eqn, _aligned(computed, together.base), gaps)
        if shared := _shared(eqn, read):
            selected.add(i)
        if shared or two:
            compared[i] = frozenset(_latest(set(_bits(shared | two, together.base)), through))
        if _is_negative(eqn, negative):
            negative.update(eqn.outvars)
        result = _result(i, eqn, read, together, negative) if rounded or not numbers else _NONE
        small: frozenset[int] = frozenset()  # differences that the operand equals, up to rounding
        if result.masks and eqn.primitive.name in _COMPARISONS:
            sides[i] = together
        elif eqn.primitive.name == "select_n":
            mask, *cases = (origins.get(a, _NONE) if isinstance(a, Var) else _NONE for a in eqn.invars)
            if guarded := _guarded(i, mask, cases, sides):
                base = max(result.base, i - _WINDOW)
                result = result.rebased(base)
                guards = sum(1 << (j - base) for j in guarded if j >= base)
                result = result._replace(guards=result.guards | guards)
        elif (a := in_domain(eqn)) is not None and (origin := origins.get(a)) is not None:
            counted.update(_bits(origin.guards, origin.base))
            unseen = origin.same if takes_difference(eqn) else 0
            small = frozenset(_bits(origin.guards | origin.apart | unseen, origin.base))
        if small or edges.reads(eqn):
            known = {v: origins.get(v, _NONE) for v in operands}
            made = {v: frozenset(_bits(origin.same, origin.base)) for v, origin in known.items()}
            edges.follow(i, eqn, small, made)
        if _asks_for_zero(eqn):
            both = _bits(together.itself, together.base)
            counted.update(
                j for j in both if len(eqns[j].outvars) == 1
            )  # two results of one equation are different values
        counted.update(maker[v] for v in _read_twice(eqn, numbers, moved) if v in maker)
        roundings.follow(i, eqn, [v for v in numbers if v not in exact], moved)
        if eqn.primitive.name in MOVES and len(numbers) == 1:
            moved.update(dict.fromkeys(eqn.outvars, moved.get(numbers[0], numbers[0])))
        maker.update(dict.fromkeys(eqn.outvars, i))
        if rounded and (_is_ambiguous(eqn) or _decides_within(eqn)):
            counted.add(i)
        through.append(result)
        origins.update(dict.fromkeys(eqn.outvars, result))
        if any(_is_integer(v) for v in eqn.outvars) and eqn.primitive.name != "bitcast_convert_type":
            counted.update(_bits(together.masks, together.base))
            if rounded and _decides(eqn):
                counted.update(_bits(together.roundings, together.base), (i,))
    counted.update(roundings.several(), (maker[v] for v in roundings.taken_apart if v in maker))
    return Decisions(compared, frozenset(selected), frozenset(counted), roundings.put_together, edges)


class _Roundings:
    """Values that are computed from numbers by rounding, and combined again.

    **Fields:** `put_together` as in `Decisions`; `taken_apart` the numbers whose bits are shifted.
    """

    def __init__(self) -> None:
        self.put_together: dict[int, list[int]] = {}
        self.taken_apart: set[Var] = set()
        self._about: dict[Var, list[int]] = {}  # number -> its roundings
        self._of: dict[Var, frozenset[int]] = {}  # variable -> the roundings that it is a function of
        self._short: dict[Var, tuple[int, Var]] = {}  # variable -> its rounding, and the unrounded number
        self._sums: dict[Var, Sequence[Var]] = {}  # sum or difference -> its terms
        self._left: set[int] = set()  # roundings whose error is computed, by a subtraction
        self._bits: dict[Var, Var] = {}  # integers -> the number whose bits they are

    def follow(self, i: int, eqn: JaxprEqn, numbers: Sequence[Var], moved: Mapping[Var, Var]) -> None:
        """Follow an equation of these computed numbers; `moved` has the number that each number's entries are from."""
        name, operands = eqn.primitive.name, _compat.variables(eqn.invars)
        bits = {self._bits[v] for v in operands if v in self._bits}
        if name == "bitcast_convert_type" and numbers:
            bits = set(numbers)
        if bits and name.startswith("shift_right"):
            self.taken_apart |= bits
        elif len(bits) == 1 and not any(is_float(v) for v in eqn.outvars):
            self._bits.update(dict.fromkeys(eqn.outvars, *bits))
        self._follow_what_is_left(i, eqn, numbers, moved)
        to_integer = name == "convert_element_type" and _is_integer(eqn.outvars[0])
        if numbers and (to_integer or (name in _ROUNDINGS and name != "sign")):
            self._about.setdefault(moved.get(numbers[0], numbers[0]), []).append(i)
            self._of.update(dict.fromkeys(eqn.outvars, frozenset({i})))
        elif len(set(numbers)) == 1 and (is_pointwise(eqn) or name in MOVES) and numbers[0] in self._of:
            self._of.update(dict.fromkeys(eqn.outvars, self._of[numbers[0]]))
        elif is_pointwise(eqn):
            for rounding in {j for v in numbers for j in self._of.get(v, ())}:
                self.put_together.setdefault(rounding, []).append(i)

    def _follow_what_is_left(
        self, i: int, eqn: JaxprEqn, numbers: Sequence[Var], moved: Mapping[Var, Var]
    ) -> None:
        """Follow an equation, for numbers that are subtracted from their rounded values."""
        if not (numbers and eqn.outvars):
            return
        name, made = eqn.primitive.name, eqn.outvars[0]
        if name == "reduce_precision" or _shortens(eqn):
            self._short[made] = (i, moved.get(numbers[0], numbers[0]))
        elif name in MOVES and len(numbers) == 1 and numbers[0] in self._short:
            self._short[made] = self._short[numbers[0]]
        elif name in ("add", "sub") and len(numbers) == 2:
            for one, other in permutations(numbers) if name == "sub" else ():
                rounding, number = self._short.get(one, (i, None))
                if moved.get(other, other) is number:
                    self._left.add(rounding)
                if other in self._sums.get(one, ()):
                    self._left.add(i)
            self._sums[made] = numbers

    def several(self) -> set[int]:
        """Return the roundings of numbers that have several, or that are subtracted from their rounded values."""
        return self._left | {i for about in self._about.values() if len(about) > 1 for i in about}


def _shortens(eqn: JaxprEqn) -> bool:
    """Return whether an equation converts numbers to fewer bits."""
    if eqn.primitive.name != "convert_element_type" or not is_float(eqn.outvars[0]):
        return False
    return aval_nbytes(eqn.outvars[0].aval) < aval_nbytes(eqn.invars[0].aval)


def _asks_for_zero(eqn: JaxprEqn) -> bool:
    """Return whether an equation compares numbers, or reads one at the edge of a domain."""
    return eqn.primitive.name in _COMPARISONS or in_domain(eqn) is not None


def _read_twice(eqn: JaxprEqn, numbers: Sequence[Var], moved: Mapping[Var, Var]) -> set[Var]:
    """Return the numbers that a body may subtract from themselves: it reads their entries in two ways."""
    count = Counter(moved.get(v, v) for v in set(numbers)) if inner_jaxprs(eqn) else {}
    if max(count.values(), default=0) < 2:
        return set()
    inner = inner_eqns(eqn)
    able = any(each.primitive.name == "sub" for each in inner) and any(map(_asks_for_zero, inner))
    return {v for v, n in count.items() if able and n > 1}


def _is_ambiguous(eqn: JaxprEqn) -> bool:
    """Return whether an equation, or one of its bodies', has several right results."""
    return any(each.primitive.name in _AMBIGUOUS for each in (eqn, *inner_eqns(eqn)))


def _decides_within(eqn: JaxprEqn) -> bool:
    """Return whether an equation has several results, which may depend on decisions in its bodies."""
    return len(eqn.outvars) > 1 and any(map(_has_decisions, inner_jaxprs(eqn)))


@functools.lru_cache(maxsize=256)
def _has_decisions(body: Jaxpr) -> bool:
    """Return whether a body has equations whose results from two runs must not be combined."""
    return bool(decisions(body.eqns).once([False] * len(body.eqns)))


def _guarded(i: int, mask: _Origin, cases: Sequence[_Origin], sides: Mapping[int, _Origin]) -> set[int]:
    """Return the equations that must run once for a selection to keep a number in a domain: those of the number, if the
    mask compares the number itself; the comparison and the selection, if the mask compares pointwise operands of it.
    """
    found: set[int] = set()
    for by in _bits(mask.masks, mask.base):
        side, *others = _aligned([sides[by], *cases])
        case = _union(others)
        if same := side.same & case.same:
            found.update(_bits(same, side.base))
        elif (side.same | side.through) & (case.same | case.through):
            found |= {by, i}
    return found


def _result(i: int, eqn: JaxprEqn, read: Sequence[_Origin], together: _Origin, negative: Set[Var]) -> _Origin:
    """Return the origins of an equation's results. **Arguments:** `together` the union of the origins `read`."""
    name = eqn.primitive.name
    if name not in CHOICES and name not in MOVES and together.base < i - _WINDOW:
        read = _aligned(read, i - _WINDOW)
        together = together.rebased(i - _WINDOW)
    base = together.base if read else max(i - _WINDOW, 0)
    own = 1 << (i - base)
    if name in _COMPARISONS and any(is_float(a) for a in eqn.invars):
        return _Origin(base, masks=own)
    if name in _ROUNDINGS:
        return _Origin(base, own, own, roundings=own)
    if name in CHOICES or name in MOVES:
        if name == "select_n" and isinstance(eqn.invars[0], Var):
            # The origins of a mask, such as bits, are not entries of the values that it selects from.
            return _union(read[1:])._replace(base=base, masks=together.masks)
        return together._replace(chosen=together.chosen | together.through) if name in CHOICES else together
    if is_pointwise(eqn) and (is_float(eqn.outvars[0]) or together.through):  # also of a float's bits
        tied = together.tied | (_of_choices(read, exact=False) if name in _DIFFERENCES else 0)
        guards = together.guards if name in SCALINGS else 0
        apart = own if _cancels(eqn, read, negative) else together.apart if scales(eqn) else 0
        itself = together.itself if scales(eqn) else 0
        if name == "sub":
            itself |= functools.reduce(operator.or_, (a.same & b.same for a, b in combinations(read, 2)), 0)
        return _Origin(
            base,
            own,
            own | together.through,
            together.chosen,
            tied,
            0,
            together.roundings,
            guards,
            apart,
            itself,
        )
    if any(is_float(v) for v in eqn.outvars):
        return _Origin(base, own, own, itself=together.itself if name in _SUMS else 0)
    return _Origin(base, masks=0 if any(_is_integer(v) for v in eqn.outvars) else together.masks)


def _is_negative(eqn: JaxprEqn, negative: Set[Var]) -> bool:
    """Return whether an equation changes a sign, or its result has that of an operand whose sign was changed."""
    name, operands = eqn.primitive.name, eqn.invars
    below = (isinstance(a, Literal) and bool(np.all(a.val < 0)) for a in operands)
    if name == "neg" or (name == "mul" and any(below)):
        return True
    kept = name in MOVES or name == "dot_general"
    return kept and any(a in negative for a in _compat.variables(operands))


def _takes(eqn: JaxprEqn, negative: Set[Var]) -> bool:
    """Return whether an equation subtracts a number from another."""
    turned = any(a in negative for a in _compat.variables(eqn.invars))
    return eqn.primitive.name == "sub" or (eqn.primitive.name in ("add", "add_any") and turned)


def _cancels(eqn: JaxprEqn, read: Sequence[_Origin], negative: Set[Var]) -> bool:
    """Return whether an equation's result may be the rounding error of larger numbers."""
    numbers = _compat.variables(eqn.invars)
    if eqn.primitive.name == "sub":
        return len(numbers) == 2 or isinstance(eqn.invars[0], Literal)
    turned = any(origin.apart for origin in read) or any(a in negative for a in numbers)
    return eqn.primitive.name in ("add", "add_any") and len(numbers) == 2 and turned


def _shared(eqn: JaxprEqn, read: Sequence[_Origin]) -> int:
    """Return the equations that computed both sides of an equation's comparison, as bits."""
    name = eqn.primitive.name
    if name in _ROUNDINGS or (name in _COMPARISONS and len(read) == 1 and not _is_infinite(eqn)):
        return _union(read).tied
    if name in ROOTS:
        return read[0].tied if isinstance(eqn.invars[0], Var) else 0
    if name in _COMPARISONS and len(read) == 2 and eqn.invars[0] is not eqn.invars[1]:
        return _of_choices(read, exact=True) | _union(read).tied
    if inner_jaxprs(eqn) and any(e.primitive.name in _COMPARISONS for e in inner_eqns(eqn)):
        return _of_choices(read, exact=False)
    return 0


def _between_two(eqn: JaxprEqn, computed: Sequence[_Origin], gaps: Mapping[int, bool]) -> int:
    """Return the equations that computed the two numbers that an equation compares, as bits.

    **Arguments:** `computed` the origins of those operands that arithmetic computes; `gaps` the differences of two such
    numbers, and whether one of these, such as a mean, is spread over many entries: if that difference is scaled, as by
    a normalisation, it does not count.
    """
    name = eqn.primitive.name
    if name not in _COMPARISONS and name != "sign":
        return 0
    if len(eqn.invars) > 1 and eqn.invars[0] is eqn.invars[1]:  # whether it is a number
        return 0
    if len(computed) == 2:
        return computed[0].same | computed[1].same if all(origin.same for origin in computed) else 0
    if len(computed) != 1 or any(isinstance(a, Literal) and np.any(a.val) for a in eqn.invars):
        return 0
    (number,) = computed
    made = (i for i in _bits(number.apart, number.base) if i in gaps)
    return sum(1 << i - number.base for i in made if number.same >> i - number.base & 1 or not gaps[i])


def _is_spread(eqn: JaxprEqn) -> bool:
    """Return whether an equation's result repeats each entry of its operand."""
    return eqn.primitive.name == "broadcast_in_dim" and aval_nbytes(eqn.invars[0].aval) < aval_nbytes(
        eqn.outvars[0].aval
    )


def _of_choices(read: Sequence[_Origin], *, exact: bool) -> int:
    """Return the equations of two operands of which one was chosen from the other, or, if `exact`, of shared
    entries.
    """
    found = 0
    for one, other in permutations(read, 2):
        found |= one.through & other.chosen
        found |= one.same & other.same if exact else 0
    return found


def _latest(equations: set[int], results: Sequence[_Origin]) -> Iterator[int]:
    """Yield those of a set of equations that no other of them depends on."""
    for i in equations:
        later = (results[j] for j in equations if j > i)
        if not any(i >= each.base and each.through >> (i - each.base) & 1 for each in later):
            yield i


def _bits(equations: int, base: int) -> Iterator[int]:
    """Yield the numbers of a set of equations."""
    while equations:
        lowest = equations & -equations
        yield base + lowest.bit_length() - 1
        equations ^= lowest


def _decides(eqn: JaxprEqn) -> bool:
    """Return whether an equation computes integers from floats, in at least as many bytes as other results."""
    if eqn.primitive.name in MOVES and eqn.primitive.name != "convert_element_type":
        return False
    integers = sum(aval_nbytes(v.aval) for v in eqn.outvars if not is_float(v))
    if 2 * integers < sum(aval_nbytes(v.aval) for v in eqn.outvars):
        return False
    bodies = inner_jaxprs(eqn)
    return not bodies or any(map(_body_decides, bodies))


def _body_decides(body: Jaxpr) -> bool:
    """Return whether a body returns an integer that depends on floats."""
    of_floats: set[Var] = set()
    for eqn in body.eqns:
        if any(is_float(a) or (isinstance(a, Var) and a in of_floats) for a in eqn.invars):
            of_floats.update(eqn.outvars)
    return any(isinstance(v, Var) and v in of_floats and _is_integer(v) for v in body.outvars)


def _is_integer(atom: Var | Literal) -> bool:
    """Return whether an atom holds integers that may be positions; bytes hold packed masks."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 1


def _is_infinite(eqn: JaxprEqn) -> bool:
    """Return whether one side of a comparison is infinite: no difference of finite values is."""
    return any(
        isinstance(a, Literal) and np.isinf(np.asarray(a.val, np.complex128)).all() for a in eqn.invars
    )
