"""Values of a loop over chunks of rows -> what they are of all rows, and what is known of those that loop is given.

See `_chunk_loops`. Law: a stack is said to be of rows only where it is chunk after chunk of them.
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
    """This is no loop over chunks, for all that is known."""


class Wanted(Exception):  # noqa: N818 (it asks)
    """An operand of a body has to have rows, or to be a sum where no dimension of these is named.

    **Arguments:** `ratio` of all rows to those of a chunk, None for as many as all chunks have.
    """

    def __init__(self, place: int, dimension: int | None, ratio: Fraction | None = None):
        super().__init__()
        self.place, self.dimension, self.ratio = place, dimension, ratio


Number = Callable[[Any, list[int]], Sequence[int]]
"""An equation, the numbers of its operands -> those of its results."""


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
    """A mask of indices along a dimension, which count from a place on: those that are no less than a number, and below
    another, where there are these.
    """

    dimension: int
    begin: Affine
    least: int | None = None
    below: int | None = None


@dataclass(frozen=True)
class Places:
    """What is known of numbers in the loop. **Fields:** `number` of an equation's results; `literal` of a literal's;
    `place` that a number is, None of others; `is_index` whether a number is made of indices alone; `is_all` whether all
    its entries are a number; `symbol` of the loop; `of_all` the number of an equation's results outside of the loop;
    `counted` where indices, one behind the other, begin; `inside` what a mask is; `known` whether the program that the
    loop is compared with has an equation of these operands; `sizes` that there are of an equation's result along an
    axis, and how much a pad pads before.
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
    """What a stack of chunks is of. **Fields:** the `number` of a value of so many `rows` in a `dimension`."""

    number: int
    dimension: int
    rows: int


def stacked(x: jax.Array, dimension: int, count: int, size: int) -> jax.Array:
    """Return a stack of so many chunks, the last with rows of its own again where there are none left."""
    shape = x.shape
    if beyond := count * size - shape[dimension]:
        x = lax.concatenate([x, lax.slice_in_dim(x, -beyond, None, axis=dimension)], dimension)
    parts = lax.reshape(x, (*shape[:dimension], count, size, *shape[dimension + 1 :]))
    return lax.transpose(parts, (dimension, *(d for d in range(parts.ndim) if d != dimension)))


def all_rows(values: Values, stack: int, count: int) -> AllRows | None:
    """Return what a stack of so many chunks is of; None where a chunk has no dimension for rows.

    Any stack is one of the rows that its chunks make one behind the other, or of those that others of them follow.
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
    """Return what kinds have to have in common to be alike."""
    if isinstance(kind, Slab):
        return type(kind), kind.dimension, kind.step, kind.before, kind.adds, kind.atom.aval.shape
    return type(kind), *((kind.dimension, kind.parts) if isinstance(kind, Rows) else ())


def is_rule(
    rule: BatchingRule,
    operands: Sequence[int | None],
    results: Sequence[int | None],
    sizes: Sequence[tuple[str, int | None]],
) -> bool:
    """Return whether a rule says where the rows of operands and results are, and which sizes they divide."""
    same = rule.operands == operands and rule.results == tuple(results) and set(rule.sizes) == set(sizes)
    return same and (rule.summed or None not in rule.results)


def parts_place(kind: Rows, shape: Sequence[int], result: Sequence[int]) -> tuple[int, int] | None:
    """Return where rows of several parts are once they have another shape, in which an axis of these and the rows of
    one become one axis, or the other way round, and how many parts there are then.
    """
    d = kind.dimension
    if kind.parts == 1 and d and result == (*shape[: d - 1], shape[d - 1] * shape[d], *shape[d + 1 :]):
        return d - 1, shape[d - 1]
    if kind.parts > 1 and result == (*shape[:d], kind.parts, shape[d] // kind.parts, *shape[d + 1 :]):
        return d + 1, 1
    return None


def linear_in(eqn: jex.JaxprEqn, sums: Sequence[bool]) -> range | None:
    """Return the operands in which an equation of these sums is linear, all of which have to be sums; none where it is
    linear in that which is one. None where it is not linear, as where a place, or what selects, is a sum.
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
    """Return a variable of a type; over which devices its values vary is not looked at."""
    return _compat.new_var(_compat.unvaried(aval))


def neutral(name: str, dtype: DType) -> int:
    """Return what such a reduction joins with anything to just that."""
    return 0 if name == "reduce_or" else 1 if dtype == np.bool_ else -1


SIZES = ("shape", "new_sizes", "limit_indices", "slice_sizes")
"""Parameters with the size of each dimension."""
