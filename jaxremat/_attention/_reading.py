"""Flat equations -> one of their values, read backward, entry by entry, with the axis that each dimension is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from .._program import _compat
from .._program._common_subexpressions import Equals
from .._program._compat import Atom, shaped
from .._program._flops import aval_nbytes
from .._program._inline import Inliner
from .._program._primitives import is_pointwise
from ._pattern import Axes, Scalar, Step

DEEPEST = 24
"""How far values are followed that do not depend on the scores."""

LINEAR = frozenset({"convert_element_type", "mul", "div", "select_n"})
"""The only operations allowed on the weights between the softmax and the product."""


class UnlikeError(Exception):
    """The equations are no attention."""


@dataclass
class _UpToShape(Equals):
    """Equals where dimensions of one entry may be added up, taken away and put back: what differentiation makes of a
    batch of one example, and what chunks of one have of a step that was differentiated for more.
    """

    _of: dict[Any, Any] = field(default_factory=dict)

    def add(self, eqn: jex.JaxprEqn, scope: int = -1, in_backward: bool | None = None) -> None:
        if _shapes(eqn):
            (made,) = eqn.outvars
            whole = self.read(eqn.invars[0])
            self._of[made] = whole = self._of.get(whole, whole)
            eqn = eqn.replace(
                primitive=lax.reshape_p, invars=[whole], params={"new_sizes": shaped(made).shape}
            )
        super().add(eqn, scope, in_backward)


def _shapes(eqn: jex.JaxprEqn) -> bool:
    """Return whether the result has the entries of the operand, in order."""
    if len(eqn.invars) != 1 or _compat.is_literal(eqn.invars[0]):
        return False
    in_order = eqn.primitive.name != "reshape" or eqn.params["dimensions"] is None
    return eqn.primitive.name in _SHAPING and in_order and count(eqn.invars[0]) == count(eqn.outvars[0])


_SHAPING = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "reduce_sum"})


@dataclass
class Program:
    closed: jex.ClosedJaxpr
    scopes: Sequence[int]
    alive: Sequence[bool]
    gradients: dict[str, list[jex.ClosedJaxpr]] = field(
        default_factory=dict
    )  # by the text of what is differentiated

    @cached_property
    def eqns(self) -> Sequence[Any]:
        return self.closed.jaxpr.eqns

    @cached_property
    def maker(self) -> dict[Any, int]:
        return {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}

    @cached_property
    def readers(self) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            if self.alive[i]:
                for a in _compat.variables(eqn.invars):
                    found.setdefault(a, []).append(i)
        return found

    @cached_property
    def returned(self) -> set[Any]:
        return set(_compat.variables(self.closed.jaxpr.outvars))

    @cached_property
    def equals(self) -> Equals:
        """All equations, to look others up among them."""
        found = _UpToShape(Inliner())
        for eqn, scope in zip(self.eqns, self.scopes, strict=True):
            found.add(eqn, scope)
        return found

    def made(self, a: Atom) -> Any | None:
        """Return the equation that makes an operand."""
        return None if _compat.is_literal(a) or a not in self.maker else self.eqns[self.maker[a]]


def count(a: Atom) -> int:
    return math.prod(shaped(a).shape)


def relabelled(eqn: jex.JaxprEqn, axes: Axes) -> Axes | None:
    """Return the axes of the operand of a mere change of shape, of those of its result; None of another equation."""
    name, params = eqn.primitive.name, eqn.params
    shape = shaped(eqn.invars[0]).shape if eqn.invars else ()
    if name == "transpose":
        found: list[int | None] = [None] * len(shape)
        for axis, d in zip(axes, params["permutation"], strict=True):
            found[d] = axis
        return tuple(found)
    if name == "broadcast_in_dim" and len(eqn.invars) == 1:
        dimensions = map(int, params["broadcast_dimensions"])
        return tuple(
            axes[d] if shaped(eqn.outvars[0]).shape[d] == n else None
            for d, n in zip(dimensions, shape, strict=True)
        )
    if name in ("reshape", "squeeze", "expand_dims") and len(eqn.invars) == 1:
        result = shaped(eqn.outvars[0]).shape
        if params.get("dimensions") is not None and name == "reshape":
            return None
        kept = [axis for axis, n in zip(axes, result, strict=True) if n > 1]
        if [n for n in result if n > 1] != [n for n in shape if n > 1]:
            return None
        left = iter(kept)
        return tuple(next(left) if n > 1 else None for n in shape)
    return None


def behind(program: Program, a: Atom, axes: Axes, *, maxima: bool = False) -> tuple[Any, Axes]:
    """Return what a value is a mere change of shape, or a cast, of; of `maxima`, with -inf, too."""
    while (eqn := program.made(a)) is not None:
        if is_cast(eqn):
            a = eqn.invars[0]
            continue
        if maxima and eqn.primitive.name == "max" and (other := _above_nothing(program, eqn)) is not None:
            a = other
            continue
        inner = relabelled(eqn, axes)
        if inner is None or _compat.is_literal(eqn.invars[0]):
            break
        a, axes = eqn.invars[0], inner
    return a, axes


def is_cast(eqn: jex.JaxprEqn) -> bool:
    """Return whether it makes floats of floats."""
    if eqn.primitive.name != "convert_element_type" or _compat.is_literal(eqn.invars[0]):
        return False
    both = (shaped(eqn.invars[0]).dtype, shaped(eqn.outvars[0]).dtype)
    return all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in both)


def _above_nothing(program: Program, eqn: jex.JaxprEqn) -> Any | None:
    """Return the other operand of a maximum with -inf."""
    for one, other in (eqn.invars, eqn.invars[::-1]):
        if constant(program, one) == -math.inf and not _compat.is_literal(other):
            return other
    return None


def constant(program: Program, a: Atom) -> float | None:
    """Return the number that all of a value is, None if it is not known."""
    while not _compat.is_literal(a):
        eqn = program.made(a)
        if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
            return None
        a = eqn.invars[0]
    value = np.asarray(a.val)
    number = value.dtype == np.bool_ or jax.numpy.issubdtype(value.dtype, jax.numpy.number)
    return float(value) if value.shape == () and number else None


Reference = tuple[str, int]
"""An operand of a step: the `"source"`, a `"leaf"` or another `"step"`, and which."""


class Reading:
    """Reads a value entry by entry, backward, down to a source; **arguments:** the `source` and its `axes`; `count` of
    the scores; `leaves` so far, which are added to; `scope` that floats are not followed out of, None where they are.
    """

    def __init__(
        self,
        program: Program,
        source: Atom,
        axes: Axes,
        count: int,
        leaves: dict[tuple[Atom, Axes], int],
        scope: int | None = None,
    ):
        self.program, self.source, self.axes, self.count = program, source, axes, count
        self.leaves, self.scope = leaves, scope
        self.steps: list[tuple[Any, Mapping[str, Any], list[Any], int | None]] = []
        self._known: dict[tuple[Any, Axes], Any] = {}
        self._dependent: dict[Any, bool] = {source: True}
        self._prices: dict[Any, int] = {}

    def value(self, a: Atom, axes: Axes) -> Any:
        """Return what stands for a value: a scalar, ("source",), ("leaf", number) or ("step", number)."""
        if _compat.is_literal(a):
            if np.asarray(a.val).shape != ():
                raise UnlikeError
            return Scalar(np.asarray(a.val).item(), np.dtype(shaped(a).dtype))
        if a is self.source:
            if without_units(axes, a) != without_units(self.axes, a):
                raise UnlikeError
            return ("source",)
        if (a, axes) not in self._known:
            self._known[a, axes] = self._made(a, axes)
        return self._known[a, axes]

    def depends(self, a: Atom) -> bool:
        """Return whether a value is made of the source, entry by entry."""
        if _compat.is_literal(a) or count(a) < self.count:
            return False
        if a not in self._dependent:
            eqn = self.program.made(a)
            able = eqn is not None and (is_pointwise(eqn) or _is_relabelling(eqn))
            self._dependent[a] = able and any(map(self.depends, eqn.invars if eqn else ()))
        return self._dependent[a]

    def _made(self, a: Atom, axes: Axes) -> Any:
        eqn = self.program.made(a)
        dependent = self.depends(a)
        if (number := constant(self.program, a)) is not None:
            return Scalar(number, np.dtype(shaped(a).dtype))
        if eqn is None or (not dependent and self._price(a) >= aval_nbytes(a.aval)):
            return self._leaf(a, axes)
        outside = self.scope is not None and self.program.scopes[self.program.maker[a]] != self.scope
        if outside and jax.numpy.issubdtype(shaped(a).dtype, jax.numpy.floating):
            return self._leaf(a, axes)
        if eqn.primitive.name == "iota":
            axis = axes[eqn.params["dimension"]]
            if axis is None:
                return Scalar(0, np.dtype(eqn.params["dtype"]))
            return self._step(eqn, [], axis)
        if (inner := relabelled(eqn, axes)) is not None:
            return self.value(eqn.invars[0], inner)
        if not is_pointwise(eqn):
            if dependent:
                raise UnlikeError
            return self._leaf(a, axes)
        if not dependent and sum(axis is not None for axis in without_units(axes, a)) < 2:
            return self._leaf(a, axes)  # of one axis: there is little of it
        if dependent:
            self._check(eqn)
        return self._step(eqn, [self.value(b, axes if b.aval.shape else ()) for b in eqn.invars], None)

    def _check(self, eqn: jex.JaxprEqn) -> None:
        """Check that an operation on what depends on the source may be. **Raises:** `UnlikeError`."""

    def _step(self, eqn: jex.JaxprEqn, operands: list[Reference | Scalar], axis: int | None) -> Any:
        self.steps.append((eqn.primitive, eqn.params, operands, axis))
        return ("step", len(self.steps) - 1)

    def _leaf(self, a: Atom, axes: Axes) -> Reference:
        key = a, without_units(axes, a)
        return ("leaf", self.leaves.setdefault(key, len(self.leaves)))

    def _price(self, a: Atom, depth: int = 0) -> int:
        """Return bytes that must be there for a value that does not depend on the source: itself, or what it is
        made of.
        """
        if _compat.is_literal(a):
            return 0
        if a not in self._prices:
            eqn, own = self.program.made(a), aval_nbytes(a.aval)
            if eqn is not None and eqn.primitive.name == "iota":
                own = 0
            elif eqn is not None and depth < DEEPEST and (is_pointwise(eqn) or _is_relabelling(eqn)):
                own = min(own, sum(self._price(b, depth + 1) for b in eqn.invars))
            self._prices[a] = own
        return self._prices[a]

    def in_steps(self, leaves: int) -> tuple[Step, ...]:
        """Return the steps, with so many leaves in all."""
        first = {"source": 0, "leaf": 1, "step": 1 + leaves}

        def number(a: Reference | Scalar) -> int | Scalar:
            return a if isinstance(a, Scalar) else first[a[0]] + sum(a[1:])

        return tuple(
            Step(p, dict(params), tuple(map(number, of)), axis) for p, params, of, axis in self.steps
        )


class LinearReading(Reading):
    """The same of what is linear in the source."""

    def _check(self, eqn: jex.JaxprEqn) -> None:
        name = eqn.primitive.name
        depends = [self.depends(a) for a in eqn.invars]
        others = [a for a, is_so in zip(eqn.invars, depends, strict=True) if not is_so]
        linear = name in LINEAR and sum(depends) == 1 and not (name == "div" and depends[1])
        if name == "select_n":
            linear &= not depends[0] and all(constant(self.program, a) == 0 for a in others[1:])
        if not linear or not jax.numpy.issubdtype(shaped(eqn.outvars[0]).dtype, jax.numpy.floating):
            raise UnlikeError


def _is_relabelling(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in ("transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims")


def without_units(axes: Axes, a: Atom) -> Axes:
    return tuple(axis if n > 1 else None for axis, n in zip(axes, shaped(a).shape, strict=True))
