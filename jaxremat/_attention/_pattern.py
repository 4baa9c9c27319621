"""An attention as plain data: products, operations on scores before and after the softmax, layouts.

    scores = query x key                       axes of scores, in the order that `value` is multiplied by them:
    weights = after(softmax(before(scores)))   numbers from 0; one of them, `key`, is summed over
    result = weights x value                   axes beside them: higher numbers

Of every array the axes are known by number, so that any layout is an attention, and any part of it along an axis of
the scores but for `key` is one by itself. What else `before` and `after` read (masks, biases) are *leaves*; what is
made of few numbers, as a causal mask is, is made anew wherever it is wanted.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._program._compat import DType

Axes = tuple[int | None, ...]
"""The axis of each dimension; None for a dimension of size 1 without an axis."""


@dataclass(frozen=True)
class Scalar:
    """A number. **Fields:** `value`, and its `dtype`."""

    value: Any
    dtype: Any

    def __repr__(self) -> str:
        return f"{self.value!r}:{self.dtype}"


@dataclass(frozen=True)
class Step:
    """One operation on every entry, or places along an axis. **Fields:** `primitive` with its `params`; `operands` by
    number (the source is 0, leaves and earlier steps follow) or as `Scalar`; `axis` that a result counts, if it does.
    """

    primitive: Any
    params: Mapping[str, Any]
    operands: tuple[int | Scalar, ...]
    axis: int | None = None

    def __repr__(self) -> str:
        params = sorted((name, str(value)) for name, value in self.params.items())
        return f"{self.primitive.name}{params}{self.operands}@{self.axis}"


@dataclass(frozen=True)
class Product:
    """A `dot_general`. **Fields:** its `params`; axes of its operands, `rows` those of queries or weights and `columns`
    those of keys or values, and of its `result`; `swapped` where columns come first.
    """

    params: Mapping[str, Any]
    rows: Axes
    columns: Axes
    result: Axes
    swapped: bool

    def __call__(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        operands = (columns, rows) if self.swapped else (rows, columns)
        return lax.dot_general_p.bind(*operands, **self.params)

    def __repr__(self) -> str:
        params = sorted((name, str(value)) for name, value in self.params.items())
        return f"{params}{self.rows}{self.columns}{self.result}{self.swapped}"


@dataclass(frozen=True, eq=False)
class Pattern:
    """**Fields:** `sizes` of the axes of scores; `key` the axis that the softmax is along; the products `scores` and
    `mixed`; the steps `before` and `after` the softmax; the axes of its `leaves`; `types` of what the softmax is of,
    and of the result; `widths` how many numbers a query and a value has; the `learned` leaves by number, of which the
    gradient is wanted too.
    """

    sizes: tuple[int, ...]
    key: int
    scores: Product
    mixed: Product
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    leaves: tuple[Axes, ...]
    types: tuple[Any, Any]
    widths: tuple[int, int]
    learned: tuple[int, ...] = ()

    @cached_property
    def _text(self) -> str:
        fields = (
            self.sizes,
            self.key,
            self.scores,
            self.mixed,
            self.before,
            self.after,
            self.leaves,
            self.widths,
            self.learned,
        )
        return repr((*fields, tuple(map(str, self.types))))

    def __repr__(self) -> str:
        return f"Pattern({self._text})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @property
    def rows(self) -> tuple[int, ...]:
        """The axes of scores along which parts are independent, but for sums over them."""
        return tuple(axis for axis in range(len(self.sizes)) if axis != self.key)

    @property
    def scores_count(self) -> int:
        """How many scores there are."""
        return math.prod(self.sizes)

    @property
    def scores_nbytes(self) -> int:
        """Bytes of all scores, in the type that the softmax is of."""
        return self.scores_count * jnp.dtype(self.types[0]).itemsize

    def axes(self, *, gradient: bool, of_result: bool = False) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
        """Return those of the operands but for leaves, and of the results, of attention or of its gradient.

        **Arguments:** `of_result` whether the gradient reads the result.
        """
        sums = tuple(axis if axis != self.key else None for axis in range(len(self.sizes)))
        read, result = (self.scores.rows, self.scores.columns, self.mixed.columns), self.mixed.result
        if not gradient:
            return read, (result, sums, sums)
        made = (*read, *(self.leaves[i] for i in self.learned))
        return (*read, *((result,) if of_result else ()), sums, sums, result), made

    def flops(self, *, gradient: bool, kernels: bool) -> float:
        """Return floating-point operations of its products: two, or their five in the gradient, for which kernels
        make the scores and what is passed back to them twice, and once more for each learned leaf.
        """
        query, value = self.widths
        again = 1 + len(self.learned) if kernels else 0
        of_query, of_value = (3 + again, 2 + again) if gradient else (1, 1)
        return 2.0 * self.scores_count * (of_query * query + of_value * value)


def with_origins(pattern: Pattern, axes: Collection[int]) -> tuple[Pattern, tuple[tuple[int, DType], ...]]:
    """Return a pattern for parts along these axes, where places are counted from numbers that are further leaves; and
    the axis and the type of each.
    """
    counting = [step for step in (*pattern.before, *pattern.after) if step.axis in axes]
    kinds = dict.fromkeys((step.axis or 0, np.dtype(step.params["dtype"])) for step in counting)
    first = 1 + len(pattern.leaves)
    leaf = {kind: first + i for i, kind in enumerate(kinds)}

    def moved(steps: Sequence[Step]) -> tuple[Step, ...]:
        number = {i: i for i in range(first)}  # of the source, of leaves, and of steps by what they were
        found: list[Step] = []
        for i, step in enumerate(steps):
            found.append(
                replace(
                    step, operands=tuple(a if isinstance(a, Scalar) else number[a] for a in step.operands)
                )
            )
            number[first + i] = first + len(kinds) + len(found) - 1
            if step.axis in axes:
                kind = step.axis or 0, np.dtype(step.params["dtype"])
                found.append(Step(lax.add_p, {}, (number[first + i], leaf[kind])))
                number[first + i] += 1
        return tuple(found)

    own = replace(
        pattern,
        before=moved(pattern.before),
        after=moved(pattern.after),
        leaves=(*pattern.leaves, *(((),) * len(kinds))),
    )
    return own, tuple(kinds)


def results_of(pattern: Pattern, values: jax.Array | jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
    """Return the types of the result, of the largest scores and of the totals; the latter as of the softmax, f32 at
    least.
    """
    rank, columns = len(pattern.sizes), pattern.mixed.columns
    beside = {
        axis: n for axis, n in zip(columns, values.shape, strict=True) if axis is not None and axis >= rank
    }
    sizes = dict(enumerate(pattern.sizes)) | beside
    shape = tuple(1 if axis is None else sizes[axis] for axis in pattern.mixed.result)
    sums = tuple(1 if axis == pattern.key else n for axis, n in enumerate(pattern.sizes))
    kind = jnp.promote_types(pattern.types[0], jnp.float32)
    return [jax.ShapeDtypeStruct(shape, pattern.types[1]), *[jax.ShapeDtypeStruct(sums, kind)] * 2]


def delta(pattern: Pattern, result: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Return for each query the sum of its result times its cotangent, in f32, with a dimension for each axis of
    scores: the mean of what is passed back to its weights.
    """
    rank, axes = len(pattern.sizes), pattern.mixed.result
    both = result.astype(jnp.float32) * cotangent.astype(jnp.float32)
    inner = tuple(d for d, axis in enumerate(axes) if axis is not None and axis >= rank)
    return canonical(both.sum(inner), tuple(axis for d, axis in enumerate(axes) if d not in inner), rank)


def spread(pattern: Pattern, sums: jax.Array) -> jax.Array:
    """Return a number for each query, with a dimension for each axis of scores, as one for each of its result."""
    axes, rank = pattern.mixed.result, len(pattern.sizes)
    own = [axis for axis in axes if axis is not None and axis < rank]
    kept = sorted(own)
    sums = lax.squeeze(sums, [axis for axis in range(rank) if axis not in own])
    sums = lax.transpose(sums, [kept.index(axis) for axis in own])
    return jnp.expand_dims(sums, [d for d, axis in enumerate(axes) if axis is None or axis >= rank])


def in_order(leaves: Sequence[jax.Array], pattern: Pattern) -> list[jax.Array]:
    """Return leaves with a dimension for each axis of scores, see `canonical`."""
    return [canonical(a, axes, len(pattern.sizes)) for a, axes in zip(leaves, pattern.leaves, strict=True)]


def canonical(array: jax.Array, axes: Axes, rank: int) -> jax.Array:
    """Return an array with a dimension for each axis of scores, in order, of size 1 along those that it has not."""
    order = sorted((axis, d) for d, axis in enumerate(axes) if axis is not None)
    kept = [d for d, axis in enumerate(axes) if axis is not None]
    array = lax.reshape(array, [array.shape[d] for d in kept]) if len(kept) < array.ndim else array
    array = lax.transpose(array, [kept.index(d) for _, d in order]) if len(order) > 1 else array
    have = dict(zip((axis for axis, _ in order), array.shape, strict=True))
    shape = [have.get(axis, 1) for axis in range(rank)]
    return lax.reshape(array, shape) if tuple(shape) != array.shape else array


def as_it_was(array: jax.Array, axes: Axes, shape: Sequence[int]) -> jax.Array:
    """Return the inverse of `canonical`, for an array that was of this shape."""
    kept = [d for d, axis in enumerate(axes) if axis is not None]
    order = sorted(range(len(kept)), key=lambda i: axes[kept[i]] or 0)
    array = lax.reshape(array, [shape[kept[i]] for i in order])
    array = lax.transpose(array, [order.index(i) for i in range(len(kept))]) if len(kept) > 1 else array
    return lax.reshape(array, shape) if array.shape != tuple(shape) else array


def run(
    steps: Sequence[Step],
    source: jax.Array,
    leaves: Sequence[jax.Array],
    counted: Callable[[int, DType], jax.Array],
    *,
    wide: bool = False,
) -> jax.Array:
    """Return what steps make of a part of the scores, and of the same part of the leaves.

    **Arguments:** `counted` the places along an axis, in this type, of the part's shape or one that broadcasts to it;
    `wide` whether what is in fewer bits than f32 is in f32 meanwhile.
    """

    def typed(dtype: DType) -> Any:
        short = wide and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
        return jnp.float32 if short else dtype

    values: list[jax.Array] = [a.astype(typed(a.dtype)) for a in (source, *leaves)]
    for step in steps:
        if step.axis is not None:
            values.append(counted(step.axis, typed(step.params["dtype"])))
            continue
        operands = [
            jnp.full(source.shape, a.value, typed(a.dtype))
            if isinstance(a, Scalar)
            else jnp.broadcast_to(values[a], source.shape)
            for a in step.operands
        ]
        params = dict(step.params)
        if "new_dtype" in params:
            params["new_dtype"] = typed(params["new_dtype"])
        values.append(step.primitive.bind(*operands, **params))
    return values[-1] if steps else values[0]
