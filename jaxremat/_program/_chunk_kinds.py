"""Values of a loop over chunks of rows -> their kinds, and the facts about the loop's operands. See `_chunk_loops`.

Invariant: a stack counts as rows only if it consists of their chunks in order.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _compat
from ._axes import BILINEAR, LINEAR, BatchingRule
from ._compat import AbstractValue, DType, shaped
from ._value_numbers import Affine, Values


class OtherLoopError(Exception):
    """The loop is not known to be a loop over chunks."""


class Wanted(Exception):  # noqa: N818 (it asks)
    """A requirement on a body's operand: to have rows in a dimension, or to be a sum if none is given. **Arguments:**
    `ratio` the number of all rows for each row of a chunk, None if all chunks together have them.
    """

    def __init__(self, place: int, dimension: int | None, ratio: Fraction | None = None):
        super().__init__()
        self.place, self.dimension, self.ratio = place, dimension, ratio


Number = Callable[[Any, list[int]], Sequence[int]]
"""An equation and its operands' numbers -> its results' numbers."""


class Whole(NamedTuple):
    atom: Any


class Rows(NamedTuple):
    atom: Any
    dimension: int
    parts: int = 1


class Slab(NamedTuple):
    atom: Any
    dimension: int
    step: int
    before: int
    fill: float | None = None
    also: tuple[Any, ...] = ()  # which other slabs it is
    adds: bool = False  # to the value, in these rows; a chunk of its own rows is what it adds, too


class Sum(NamedTuple):
    atom: Any


class Joined(NamedTuple):
    atom: Any
    by: str


class Index(NamedTuple):
    number: int


class Carry(NamedTuple):
    place: int


class Written(NamedTuple):
    place: int
    atom: Any


class Added(NamedTuple):
    place: int
    atom: Any


Kind = Whole | Rows | Slab | Sum | Joined | Index | Carry | Written | Added


class Inside(NamedTuple):
    """A mask of indices that count along a dimension from a start: those not below one number and below another, where
    given.
    """

    dimension: int
    begin: Affine
    least: int | None = None
    below: int | None = None


@dataclass(frozen=True)
class Places:
    """The known facts about numbers in the loop.

    **Fields:** `number` of an equation's results; `literal` of a literal; `place` that a number is, None for others;
    `is_index` whether a number depends on indices alone; `is_all` whether all entries equal a number; `symbol` of the
    loop; `of_all` the number of an equation's results outside of the loop; `counted` the start of indices that count;
    `inside` the limits of a mask; `known` whether the program under comparison has an equation with these operands;
    `sizes` the sizes known for an equation's result along an axis, and a pad's padding in front.
    """

    number: Number
    literal: Callable[[Any], int]
    place: Callable[[int], Affine | None]
    is_index: Callable[[int], bool]
    is_all: Callable[[int, int], bool]
    symbol: int
    of_all: Number
    counted: Callable[[int], Affine | None]
    inside: Callable[[int], Inside | None]
    known: Callable[[Any, list[int]], bool]
    sizes: Callable[[Any, int], Collection[tuple[int, int | None]]]


@dataclass(frozen=True)
class AllRows:
    """The value that a stack of chunks holds. **Fields:** its `number`, its number of `rows`, and their `dimension`."""

    number: int
    dimension: int
    rows: int


def stacked(x: jax.Array, dimension: int, count: int, size: int) -> jax.Array:
    """Return a stack of this many chunks; if no rows are left for the last, it repeats rows."""
    shape = x.shape
    if beyond := count * size - shape[dimension]:
        x = lax.concatenate([x, lax.slice_in_dim(x, -beyond, None, axis=dimension)], dimension)
    parts = lax.reshape(x, (*shape[:dimension], count, size, *shape[dimension + 1 :]))
    return lax.transpose(parts, (dimension, *(d for d in range(parts.ndim) if d != dimension)))


def all_rows(values: Values, stack: int, count: int) -> AllRows | None:
    """Return the value of which a stack of this many chunks holds the rows, None if a chunk has no dimension for rows.

    Any stack holds the rows of its chunks one behind the other, or those of a stack from which its chunks follow.
    """
    node, d = values.nodes[stack], 0
    if node.op == "transpose" and node.key[0]:
        order, d = node.key, node.key[0]
        if list(order[1:]) != [i for i in range(len(order)) if i != d]:
            return None
        (stack,) = node.operands
    shape, dtype = values.type(stack)
    if len(shape) < d + 2:
        return None
    rows = count * shape[d + 1]
    whole = values.make("reshape", None, [stack], ((*shape[:d], rows, *shape[d + 2 :]), dtype))
    node = values.nodes[whole]
    if node.op == "concatenate" and node.key == d and len(node.operands) == 2:
        (own, _), (again, _) = map(values.type, node.operands)
        start = tuple((n - again[d]) * (i == d) for i, n in enumerate(own))
        last = values.make("slice", (start, own, (1,) * len(own)), node.operands[:1], (again, dtype))
        if last == node.operands[1] and again[d] < shape[d + 1]:
            return AllRows(node.operands[0], d, own[d])
    return AllRows(whole, d, rows)


def place_of(kind: Kind) -> tuple[Any, ...]:
    """Return the properties in which alike kinds must agree."""
    if isinstance(kind, Slab):
        return type(kind), kind.dimension, kind.step, kind.before, kind.adds, kind.atom.aval.shape
    return type(kind), *((kind.dimension, kind.parts) if isinstance(kind, Rows) else ())


def is_rule(
    rule: BatchingRule,
    operands: Sequence[int | None],
    results: Sequence[int | None],
    sizes: Sequence[tuple[str, int | None]],
) -> bool:
    """Return whether a rule fits the rows' dimensions of operands and results, and the sizes that rows divide."""
    same = rule.operands == operands and rule.results == tuple(results) and set(rule.sizes) == set(sizes)
    return same and (rule.summed or None not in rule.results)


def parts_place(kind: Rows, shape: Sequence[int], result: Sequence[int]) -> tuple[int, int] | None:
    """Return the dimension of rows, and the number of parts, after a reshape that merges the axis of parts with that of
    rows or splits it.
    """
    d = kind.dimension
    if kind.parts == 1 and d and result == (*shape[: d - 1], shape[d - 1] * shape[d], *shape[d + 1 :]):
        return d - 1, shape[d - 1]
    if kind.parts > 1 and result == (*shape[:d], kind.parts, shape[d] // kind.parts, *shape[d + 1 :]):
        return d + 1, 1
    return None


def linear_in(eqn: jex.JaxprEqn, sums: Sequence[bool]) -> range | None:
    """Return the operands in which an equation of these sums is linear and which must all be sums; none for one that is
    linear in each; None if it is not linear, as when an index or a selecting operand is a sum.
    """
    name, types = eqn.primitive.name, [shaped(a).dtype for a in (*eqn.invars, *eqn.outvars)]
    if name in BILINEAR:
        able = sum(sums) == 1 and (name != "div" or (sums[0] and _are(jnp.inexact, types)))
    elif name == "convert_element_type":
        able = _are(jnp.number, types) and jnp.promote_types(*types) == types[1]
    else:
        able = name in LINEAR
    linear = range(len(sums))[LINEAR.get(name, slice(0, 0))]
    others = (is_sum for i, is_sum in enumerate(sums) if i not in linear)
    return linear if able and not (name in LINEAR and any(others)) else None


def _are(kind: Any, types: Sequence[DType]) -> bool:
    return all(jnp.issubdtype(each, kind) for each in types)


def variable(aval: AbstractValue) -> jex.Var:
    """Return a new variable of a type, without regard to the devices over which its values vary."""
    return _compat.new_var(_compat.unvaried(aval))


def neutral(name: str, dtype: DType) -> int:
    """Return the neutral element of such a reduction."""
    return 0 if name == "reduce_or" else 1 if dtype == np.bool_ else -1


SIZES = ("shape", "new_sizes", "limit_indices", "slice_sizes")
"""Parameters that hold the size of each dimension."""
