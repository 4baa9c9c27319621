"""Known values, equations -> the values that follow: results from known operands, and operands from known results by
the inverse.

Couplings are undone in this way: from the results of `y1 = x1 + f(x2)` and `y2 = x2 + g(y1)` first `g(y1)` follows,
then `x2`, `f(x2)` and `x1`. So are steps of affine flows (`y = x * exp(s) + t`), and equations that split, join,
permute or squeeze arrays. No structure is searched for: each equation tells which of its values follow from others.

Invariant: in exact arithmetic, a value that follows equals the original. In floats sums are rounded, and a difference
is not exactly the summand.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._program import _compat
from .._program._compat import Atom, DType, shaped
from .._program._primitives import SUMS, is_repeatable
from ._loop_inlining import append

_SIGN_KEPT = frozenset(
    {
        "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "integer_pow", "reshape", "rev", "rsqrt",
        "slice", "split", "sqrt", "square", "squeeze", "transpose",
    }
)  # fmt: skip
"""Primitives with positive results for a positive operand."""

_OF_TWO = frozenset({*SUMS, "sub", "mul", "div"})

_OF_POSITIVE = frozenset({"add", "div", "mul", "min"})
"""Primitives with positive results for two positive operands."""


class Following:
    """The values that follow from known ones, by equations that are added one by one, in any order.

    **Arguments:** `maker` returns the equation of a variable, or None.

    **Fields:** `name` the new names of known variables; `eqns` the equations that compute them, in order.
    """

    def __init__(self, maker: Callable[[jex.Var], jex.JaxprEqn | None]):
        self.name: dict[Any, Any] = {}
        self.eqns: list[Any] = []
        self._maker = maker
        self._about: dict[Any, list[Any]] = {}
        self._slices: dict[Any, list[Any]] = {}

    def know(self, names: Mapping[jex.Var, Atom]) -> None:
        """Add known variables, with their names."""
        for v, name in names.items():
            self.name.setdefault(v, name)
        self._follow([eqn for v in names for eqn in self._about.get(v, ())])

    def learn(self, eqn: jex.JaxprEqn) -> None:
        """Add an equation."""
        if not is_repeatable(eqn):
            return
        for v in dict.fromkeys(_compat.variables([*eqn.invars, *eqn.outvars])):
            self._about.setdefault(v, []).append(eqn)
        if eqn.primitive.name == "slice":
            self._slices.setdefault(eqn.invars[0], []).append(eqn)
        self._follow([eqn])

    def needed(self, wanted: Iterable[Atom], start: int = 0) -> list[jex.JaxprEqn]:
        """Return those of the equations from `start` on that compute these variables."""
        needed = {self.name[v] for v in wanted}
        kept = []
        for eqn in reversed(self.eqns[start:]):
            if not needed.isdisjoint(eqn.outvars):
                kept.append(eqn)
                needed.update(_compat.variables(eqn.invars))
        return kept[::-1]

    def read(self, atom: Atom) -> Atom:
        """Return the name of a known variable; a literal unchanged."""
        return atom if _compat.is_literal(atom) else self.name[atom]

    def _is_known(self, atom: Atom) -> bool:
        return _compat.is_literal(atom) or atom in self.name

    def _follow(self, waiting: list[jex.JaxprEqn]) -> None:
        while waiting:
            eqn = waiting.pop()
            for v in self._forward(eqn) or self._backward(eqn):
                waiting.extend(self._about.get(v, ()))

    def _forward(self, eqn: jex.JaxprEqn) -> list[jex.Var]:
        """Return the results of an equation that become known."""
        new = [v for v in eqn.outvars if v not in self.name]
        if not new or not all(map(self._is_known, eqn.invars)):
            return []
        made = [_compat.new_var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=list(map(self.read, eqn.invars)), outvars=made))
        self.name.update((v, name) for v, name in zip(eqn.outvars, made, strict=True) if v in new)
        return new

    def _backward(self, eqn: jex.JaxprEqn) -> list[Atom]:
        """Return the operands of an equation that become known."""
        unknown = [i for i, a in enumerate(eqn.invars) if not self._is_known(a)]
        if not unknown or not any(v in self.name for v in eqn.outvars):
            return []
        if eqn.primitive.name == "concatenate":
            return self._parts(eqn, unknown)
        if eqn.primitive.name == "slice":
            return self._whole(eqn.invars[0])
        i, *more = unknown
        inverse = None if more or not all(map(self._is_known, eqn.outvars)) else self._inverse(eqn, i)
        if inverse is None:
            return []
        rest = [self.read(a) for j, a in enumerate(eqn.invars) if j != i]
        return [self._made(eqn, eqn.invars[i], inverse, [*map(self.read, eqn.outvars), *rest])]

    def _made(self, eqn: jex.JaxprEqn, v: Atom, fn: Callable[..., object], arguments: Sequence[Atom]) -> Atom:
        made = _compat.new_var(v.aval)
        self.name[v] = append(self.eqns, fn, arguments, eqn, made)
        return v

    def _parts(self, eqn: jex.JaxprEqn, unknown: Sequence[int]) -> list[Atom]:
        """Return the operands of a concatenation with a known result."""
        axis, (y,) = eqn.params["dimension"], eqn.outvars
        ends = np.cumsum([shaped(a).shape[axis] for a in eqn.invars])
        found = []
        for i in unknown:
            a = eqn.invars[i]
            if a in self.name:  # it is an operand twice
                continue
            start = int(ends[i]) - shaped(a).shape[axis]

            def part(y: jax.Array, start: int = start, end: int = int(ends[i])) -> jax.Array:
                return lax.slice_in_dim(y, start, end, axis=axis)

            found.append(self._made(eqn, a, part, [self.name[y]]))
        return found

    def _whole(self, x: Atom) -> list[Atom]:
        """Return an array if all of its slices along one dimension are known."""
        shape = shaped(x).shape
        known = [eqn for eqn in self._slices.get(x, ()) if eqn.outvars[0] in self.name]
        for axis, size in enumerate(shape):
            covered, parts = 0, []
            for eqn in sorted(known, key=lambda eqn: eqn.params["start_indices"][axis]):
                start, limit, strides = (
                    eqn.params[name] for name in ("start_indices", "limit_indices", "strides")
                )
                own = all(
                    d == axis or (at, end) == (0, n)
                    for d, (at, end, n) in enumerate(zip(start, limit, shape, strict=True))
                )
                if own and set(strides or (1,)) == {1} and start[axis] == covered < limit[axis]:
                    covered = limit[axis]
                    parts.append(eqn.outvars[0])
            if covered == size and len(parts) > 1:
                joined = lambda *parts, axis=axis: lax.concatenate(parts, axis)  # noqa: E731
                return [self._made(known[0], x, joined, [self.name[v] for v in parts])]
        return []

    def _inverse(self, eqn: jex.JaxprEqn, i: int) -> Callable[..., Any] | None:
        """Return the function from all results and the other operands, in order, to an operand; None if these do not
        determine it.
        """
        name, a, y = eqn.primitive.name, shaped(eqn.invars[i]), shaped(eqn.outvars[0])
        if name in _OF_TWO:
            alike = a.shape == y.shape and jnp.issubdtype(a.dtype, jnp.number)
            return self._of_two(eqn, name, i) if alike else None
        if name == "neg":
            return lax.neg
        if name == "convert_element_type" and _holds(y.dtype, a.dtype):
            return lambda y: lax.convert_element_type(y, a.dtype)
        if name == "transpose":
            back = [int(d) for d in np.argsort(eqn.params["permutation"])]
            return lambda y: lax.transpose(y, back)
        if name == "rev":
            return lambda y: lax.rev(y, eqn.params["dimensions"])
        if name == "split":
            return lambda *parts: lax.concatenate(parts, eqn.params["axis"])
        if name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim") and a.size == y.size:
            return lambda y: lax.reshape(y, a.shape)
        return None

    def _of_two(self, eqn: jex.JaxprEqn, name: str, i: int) -> Callable[..., Any] | None:
        """Return the same for a sum, a difference, a product or a ratio."""
        if name in SUMS:
            return _entrywise(lax.sub)
        if name == "sub":
            return _entrywise(lax.add) if i == 0 else _entrywise(lambda y, a: lax.sub(a, y))
        if not jnp.issubdtype(shaped(eqn.outvars[0]).dtype, jnp.inexact) or not self._is_positive(
            eqn.invars[1 - i]
        ):
            return None
        if name == "mul":
            return _entrywise(lax.div)
        return _entrywise(lax.mul) if i == 0 else _entrywise(lambda y, a: lax.div(a, y))

    def _is_positive(self, atom: Atom) -> bool:
        """Return whether all numbers of an array are positive, except for underflow."""
        if _compat.is_literal(atom):
            return bool(np.all(np.asarray(atom.val) > 0))
        if (eqn := self._maker(atom)) is None:
            return False
        name = eqn.primitive.name
        if name in ("exp", "exp2", "logistic"):
            return True
        if name == "max":
            return any(map(self._is_positive, eqn.invars))
        if name in _SIGN_KEPT:
            return self._is_positive(eqn.invars[0])
        return name in _OF_POSITIVE and all(map(self._is_positive, eqn.invars))


def _entrywise(fn: Callable[..., object]) -> Callable[..., Any]:
    """Return a function of two arrays that broadcasts the second to the shape of the first."""

    def spread(a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return lax.broadcast_in_dim(a, shape, range(len(shape) - a.ndim, len(shape)))

    return lambda y, a: fn(y, a if a.shape == y.shape else spread(a, y.shape))


def _holds(dtype: DType, other: DType) -> bool:
    """Return whether one type of floats can represent all numbers of another."""
    both = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(other, jnp.floating)
    return both and jnp.promote_types(dtype, other) == dtype
