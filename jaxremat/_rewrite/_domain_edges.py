"""Equations -> the numbers that are large at the edge of a function's domain, and the values that must share a run.

In `sqrt(max(a + b - c, 0) + eps)` the derivative is of order 1 / sqrt(eps) where the difference nearly vanishes, and
depends on its last bit. In the plain step, results of one such number agree with results of another up to rounding;
with numbers from separate runs they do not. So these come from one run:

- a large cotangent with several readers: it goes to `a`, `b` and `c`, where it cancels;
- a large number of the forward pass that the backward pass reads several times;
- the difference, where the backward pass reads several numbers that are large by it (as of `x / d`), or a large one and
  another function of the same root: in `cos(sqrt(d))` a small sine meets the root's large derivative. Of an arc cosine
  the operand takes the difference's place, which is taken unseen;
- the factors and summands of large numbers that the forward pass itself goes on from, as in second derivatives, which
  only cancellation keeps finite. Statistics of many numbers are exempt: a variance is hardly ever near zero;
- a cheap difference, such as a variance, instead of the large cotangent, which would need a separate kernel.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from .._program import _compat
from .._program._compat import DType
from .._program._flops import aval_nbytes
from .._program._primitives import LOOP_EDGES, LOOP_SLICES, is_pointwise

CHOICES = frozenset(
    {
        "abs", "clamp", "cummax", "cummin", "max", "min", "reduce_max", "reduce_min", "reduce_window_max",
        "reduce_window_min", "scatter-max", "scatter-min", "scatter_max", "scatter_min", "sort", "top_k",
    }
)  # fmt: skip
"""Primitives that choose entries of their operands by comparison: `abs` chooses between a number and its negative."""

MOVES = frozenset(
    {
        "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice",
        "dynamic_update_slice", "expand_dims", "gather", "jaxremat_hint", "neg", "optimization_barrier", "pad",
        "reshape", "rev", "scatter", "select_n", "slice", "split", "squeeze", "stop_gradient", "transpose",
        *LOOP_EDGES, *LOOP_SLICES,
    }
)  # fmt: skip
"""Primitives whose results' entries are operands' entries, or their negatives."""

_KEEPING = CHOICES | MOVES

_ROOTS_AWAY_FROM_ZERO = frozenset({"acos", "acosh", "asin", "atanh", "log1p"})
"""Roots whose domain ends at another number than zero: the operand's difference from it is computed inside."""

ROOTS = _ROOTS_AWAY_FROM_ZERO | {"log", "pow", "rsqrt", "sqrt"}
"""Functions whose first operand has a limited domain."""

SCALINGS = frozenset({"integer_pow", "mul", "square"})
"""Primitives that keep a guarded value guarded, and do not restore digits lost by rounding."""

_MULTIPLES = SCALINGS | {"abs", "add_any", "div", "neg", "select_n"}
"""Primitives with large results for large operands."""

_INVERSES = frozenset({"div", "integer_pow", "pow", "rem", "rsqrt"})
"""Primitives with large results for small operands."""

LIGHT = 1 / 16
"""A difference of at most this share of the largest value, such as a variance, is kept instead of a cotangent, which
would need a separate kernel.
"""


def is_float(atom: Var | Literal) -> bool:
    """Return whether a variable or literal holds floats, real or complex."""
    return _inexact(getattr(atom.aval, "dtype", None))


@functools.cache
def _inexact(dtype: DType) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def in_domain(eqn: JaxprEqn) -> Var | None:
    """Return the operand of an equation that has a limited domain, or None."""
    name = eqn.primitive.name
    inverse = name == "integer_pow" and eqn.params["y"] < 0
    at = 0 if inverse or name in ROOTS else 1 if name in ("div", "rem") else None
    operand = None if at is None else eqn.invars[at]
    return operand if isinstance(operand, Var) and is_float(operand) else None


def takes_difference(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a root of its operand's difference from a nonzero number."""
    return eqn.primitive.name in _ROOTS_AWAY_FROM_ZERO


def scales(eqn: JaxprEqn) -> bool:
    """Return whether an equation only scales its operand, or shifts it by a constant."""
    of_one = len(_compat.variables(eqn.invars)) == 1
    return eqn.primitive.name in SCALINGS or (of_one and eqn.primitive.name in ("add", "div", "sub"))


@dataclass
class DomainEdges:
    """Numbers at the edge of a function's domain, and the values that depend on them. A number is identified by its
    equation.

    **Fields:** `eqns` that are followed, in order. `near` the differences by which a variable is at an edge; `numbers`
    the large numbers that a variable scales or moves: its readers count as theirs; `of` the differences by which a
    number is large, and `readers` of it; `inverses` the equations that read a difference; `beside` for each reader of a
    large number the equations of its other operands; `roots` for each variable the number that it is, if a pointwise
    function of roots, `root_of` the differences of such a number, and `root_readers` of it.
    """

    eqns: Sequence[JaxprEqn]
    near: dict[Var, frozenset[int]] = field(default_factory=dict)
    numbers: dict[Var, frozenset[int]] = field(default_factory=dict)
    of: dict[int, frozenset[int]] = field(default_factory=dict)
    readers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    inverses: set[int] = field(default_factory=set)
    beside: dict[int, frozenset[int]] = field(default_factory=dict)
    roots: dict[Var, int] = field(default_factory=dict)
    root_of: dict[int, frozenset[int]] = field(default_factory=dict)
    root_readers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """For each equation the bytes of its results."""
        return [sum(aval_nbytes(v.aval) for v in eqn.outvars) for eqn in self.eqns]

    def reads(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation reads a number at an edge, or a value that depends on one."""
        return any(
            isinstance(a, Var) and (a in self.near or a in self.numbers or a in self.roots)
            for a in eqn.invars
        )

    def follow(
        self, i: int, eqn: JaxprEqn, small: frozenset[int], makers: Mapping[Var, frozenset[int]]
    ) -> None:
        """Follow an equation.

        **Arguments:** `small` the differences that its operand with a limited domain equals; `makers` the equations
        that computed each operand's entries.
        """
        operands, edge = _compat.variables(eqn.invars), in_domain(eqn)
        near = _all(self.near, operands)
        # The mask of a selection may come from another run, so nothing passes through it.
        passes = eqn.primitive.name in _KEEPING and eqn.primitive.name != "select_n"
        self._follow_large(i, eqn, small, makers, passes)
        self._follow_root(i, eqn, small | (near if edge else frozenset()))
        if edge and small:
            self.near[edge] = small
        if made := small | (near if passes or scales(eqn) else frozenset()):
            self.near.update(dict.fromkeys(eqn.outvars, made))

    def _follow_large(
        self, i: int, eqn: JaxprEqn, small: frozenset[int], makers: Mapping[Var, frozenset[int]], passes: bool
    ) -> None:
        operands, name = _compat.variables(eqn.invars), eqn.primitive.name
        numbers = _all(self.numbers, operands)
        of = frozenset[int]()
        if name in _INVERSES and (edge := in_domain(eqn)) is not None:
            of = small | self.near.get(edge, of)
            self.inverses.update([i] if of else [])
        if passes or (scales(eqn) and len(operands) == 1 and not of):
            made = numbers
        else:
            for number in numbers:
                self.readers[number].add(i)
            largest = max(self._sizes[i], *(aval_nbytes(v.aval) for v in operands)) if numbers else 0
            if any(self._sizes[j] > LIGHT * largest for number in numbers for j in self.of[number]):
                others = (makers[v] for v in operands if v not in self.numbers and v not in self.near)
                self.beside[i] = frozenset[int]().union(*others)
            if name in _MULTIPLES:
                of = of.union(*(self.of[number] for number in numbers))
            made = frozenset({i}) if of else of
            if of:
                self.of[i] = of
        if made:
            self.numbers.update(dict.fromkeys(eqn.outvars, made))

    def _follow_root(self, i: int, eqn: JaxprEqn, differences: frozenset[int]) -> None:
        roots = {self.roots[v] for v in _compat.variables(eqn.invars) if v in self.roots}
        for root in roots:
            self.root_readers[root].add(i)
        if is_pointwise(eqn) or eqn.primitive.name in _KEEPING:
            differences = differences.union(*(self.root_of[root] for root in roots))
        if differences and is_float(eqn.outvars[0]):
            self.root_of[i] = differences
            self.roots.update(dict.fromkeys(eqn.outvars, i))

    @functools.cached_property
    def _light_nbytes(self) -> float:
        return LIGHT * max(self._sizes)

    def _is_light(self, i: int) -> bool:
        return self._sizes[i] <= self._light_nbytes

    def _shared(self, in_backward: Sequence[bool]) -> set[int]:
        """Return the cotangents with several readers."""
        return {i for i, by in self.readers.items() if in_backward[i] and len(by) > 1}

    def shared_cotangents(self, in_backward: Sequence[bool]) -> set[int]:
        """Return the equations of the backward pass whose results must come from one run for all readers."""
        return {i for i in self._shared(in_backward) if not all(map(self._is_light, self.of[i]))}

    def once(self, in_backward: Sequence[bool]) -> set[int]:
        """Return the equations that must not run again: numbers of the forward pass that the backward pass reads more
        than once; the differences of several numbers that it reads, or of one and another function of the root; light
        differences of shared cotangents; and the operands next to large numbers in the forward pass.
        """
        read = {i: sum(in_backward[k] for k in by) for i, by in self.readers.items() if not in_backward[i]}
        inverses = (i for i in self.inverses if in_backward[i])
        reads = Counter(j for i in (*filter(read.get, read), *inverses) for j in self.of[i])
        for i, by in self.root_readers.items():
            if i not in self.of and not in_backward[i] and any(in_backward[k] for k in by):
                reads.update(self.root_of[i] & reads.keys())
        several = {key for counts in (read, reads) for key, count in counts.items() if count > 1}
        light = (j for i in self._shared(in_backward) for j in self.of[i] if self._is_light(j))
        return several.union(light, *self.combined(in_backward).values())

    def combined(self, in_backward: Sequence[bool]) -> dict[int, frozenset[int]]:
        """Return the part of `beside` in which the forward pass itself goes on from the result: not of factors of large
        numbers that only the backward pass reads, such as `y` in the derivative `y * x**(y - 1)` of a power.
        """
        goes_on: set[int] = set()
        for i in sorted((i for i in self.beside.keys() | self.of if not in_backward[i]), reverse=True):
            if i not in self.of or not goes_on.isdisjoint(self.readers[i]):
                goes_on.add(i)
        return {i: others for i, others in self.beside.items() if others and i in goes_on}


def _all(by: Mapping[Var, frozenset[int]], variables: Sequence[Var]) -> frozenset[int]:
    """Return the union of the entries of some variables."""
    return frozenset[int]().union(*(by[v] for v in variables if v in by))
