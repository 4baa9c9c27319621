"""Values of a loop over chunks of rows -> what they are of all rows, and what is known of those that loop is given.

See `_chunk_loops`. Law: a stack is said to be of rows only where it is chunk after chunk of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax

from ._axes import BatchingRule
from ._value_numbers import Affine, Values


class OtherLoopError(Exception):
    """This is no loop over chunks, for all that is known."""


Number = Callable[[Any, list[int]], Sequence[int]]
"""An equation, the numbers of its operands -> those of its results."""


class Whole(NamedTuple):
    atom: Any


class Rows(NamedTuple):
    atom: Any
    dimension: int
    parts: int = 1
    once: bool = False


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


Kind = Whole | Rows | Sum | Joined | Index | Carry | Written | Added


@dataclass(frozen=True)
class Places:
    """What is known of numbers in the loop. **Fields:** `number` of an equation's results; `literal` of a literal's;
    `place` that a number is, None of others; `is_index` whether a number is made of indices alone; `is_all` whether all
    its entries are a number; `reaches` where an index along a dimension, which counts from zero, is as large as a
    place; `symbol` of the loop.
    """

    number: Number
    literal: Callable[[Any], int]
    place: Callable[[int], Affine | None]
    is_index: Callable[[int], bool]
    is_all: Callable[[int, int], bool]
    reaches: Callable[[int], tuple[int, Affine] | None]
    symbol: int


@dataclass(frozen=True)
class AllRows:
    """What a stack of chunks is of. **Fields:** the `number` of a value of so many `rows` in a `dimension`."""

    number: int
    dimension: int
    rows: int


def stacked(x: jax.Array, dimension: int, count: int, size: int) -> jax.Array:
    """Return a stack of so many chunks, those of the last with rows of the one before where the size does not divide
    the rows.
    """
    shape = x.shape
    if (rows := shape[dimension]) != count * size:
        ends = ((0, (count - 1) * size), (rows - size, rows))
        x = lax.concatenate([lax.slice_in_dim(x, *each, axis=dimension) for each in ends], dimension)
    parts = lax.reshape(x, (*shape[:dimension], count, size, *shape[dimension + 1 :]))
    return lax.transpose(parts, (dimension, *(d for d in range(parts.ndim) if d != dimension)))


def all_rows(values: Values, stack: int, count: int) -> AllRows | None:
    """Return what a stack of so many chunks is of; None where a chunk has no dimension for rows.

    Any stack is one of the rows that its chunks make one behind the other; where the last two share some, it is one of
    fewer.
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
    size, rows = shape[d + 1], count * shape[d + 1]
    whole = values.make("reshape", None, [stack], ((*shape[:d], rows, *shape[d + 2 :]), dtype))
    node = values.nodes[whole]
    if node.op == "concatenate" and len(node.operands) == 2 and values.nodes[node.operands[0]].op == "slice":
        (array,) = values.nodes[node.operands[0]].operands
        own = values.type(array)[0][d]
        ends = [_between(values, array, d, *each) for each in ((0, rows - size), (own - size, own))]
        if ends == list(node.operands):
            return AllRows(array, d, own)
    return AllRows(whole, d, rows)


def _between(values: Values, array: int, axis: int, start: int, stop: int) -> int:
    """Return a slice of an array along one axis."""
    shape, dtype = values.type(array)
    begin, end, size = [0] * len(shape), [*shape], [*shape]
    begin[axis], end[axis], size[axis] = start, stop, stop - start
    key = tuple(begin), tuple(end), (1,) * len(shape)
    return values.make("slice", key, [array], (tuple(size), dtype))


def place_of(kind: Kind) -> tuple[Any, ...]:
    """Return what kinds have to have in common to be alike."""
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
