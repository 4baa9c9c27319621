"""Rules of `_value_numbers` for arrays: views, rows, indices, and for the masks and pooling gradients that JAX and this
library write in different ways (`_masks`, `_selections`, `_encodings`, `_pooling_places`).

Invariant: both sides of a rule have the same entries, bit by bit, except for the order in which overlapping windows add
up. The order in which a loop fills its rows does not matter.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import add

import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compat import DType
from ._index_rules import Operands, OperationKey, grid, grid_steps, scalar
from ._primitives import pointwise_names
from ._value_numbers import (
    FREE,
    Affine,
    CaptureError,
    Node,
    Type,
    Values,
    alone,
    constant,
    plus,
    rule,
    symbol_bit,
)

Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The key of a `slice`: its starts, limits and strides."""

# Views. Whatever only changes the shape is a `reshape`.


@rule("reshape")
def _reshaped(values: Values, key: object, operands: Operands, kind: Type) -> int | None:
    (operand,) = operands
    node = values.nodes[operand]
    if node.type == kind:
        return operand
    if node.op == "reshape":
        return values.make("reshape", None, node.operands, kind)
    if node.op == "Grid":
        steps = grid_steps(node.type[0], node.key[0], kind[0])
        return None if steps is None else grid(values, kind, steps, node.key[1])
    if node.op == "Stack" and kind[0][1:] == node.type[0][2:]:
        return _in_a_row(values, node, kind)
    if node.op == "slice" and kind[0] == node.type[0][1:] and node.type[0][:1] == (1,):
        (array,) = node.operands
        if _whole_but_first(node.key, values.type(array)[0]):
            return values.row(array, constant(node.key[0][0]))
    return None


def _in_a_row(values: Values, node: Node, kind: Type) -> int | None:
    """Return a stack of stacks as one with all rows of the inner stacks in order."""
    inner = values.nodes[node.operands[0]]
    if inner.op != "Stack":
        return None
    (outer,), (symbol,) = node.key, inner.key
    within = plus(alone(FREE), alone(outer), -inner.type[0][0])
    try:
        value = values.at(inner.operands[0], symbol, within)
        if values.free[value] & (symbol_bit(outer) | symbol_bit(symbol)):
            return None
        return values.make("Stack", (outer,), [values.at(value, FREE, alone(outer))], kind)
    except CaptureError:
        return None


def _whole_but_first(key: Window, shape: tuple[int, ...]) -> bool:
    start, stop, strides = key
    return all(
        (a, b, step) == (0, n, 1)
        for a, b, step, n in zip(start[1:], stop[1:], strides[1:], shape[1:], strict=True)
    )


@rule("squeeze", "expand_dims")
def _viewed(values: Values, key: object, operands: Operands, kind: Type) -> int | None:
    return values.make("reshape", None, operands, kind)


@rule("broadcast_in_dim")
def _broadcast(values: Values, key: tuple[int, ...], operands: Operands, kind: Type) -> int | None:
    operand = operands[0]
    node = values.nodes[operand]
    if len(operands) > 1:
        return None
    if math.prod(node.type[0]) == math.prod(kind[0]):
        return values.make("reshape", None, operands, kind)
    if 1 in node.type[0] and node.op != "Grid":
        kept = [(axis, n) for axis, n in zip(key, node.type[0], strict=True) if n != 1]
        inner = values.make("reshape", None, operands, (tuple(n for _, n in kept), node.type[1]))
        return values.make("broadcast_in_dim", tuple(axis for axis, _ in kept), [inner], kind)
    if node.op == "Grid":
        steps = [0] * len(kind[0])
        for axis, n, step in zip(key, node.type[0], node.key[0], strict=True):
            steps[axis] = step if n > 1 else 0
        return grid(values, kind, tuple(steps), node.key[1])
    return None


@rule("transpose")
def _transposed(values: Values, key: tuple[int, ...], operands: Operands, kind: Type) -> int | None:
    (operand,) = operands
    if key == tuple(range(len(key))):
        return operand
    node = values.nodes[operand]
    if node.op == "transpose":
        return values.make("transpose", tuple(node.key[axis] for axis in key), node.operands, kind)
    return None


@rule("convert_element_type")
def _narrowed(values: Values, key: object, operands: Operands, kind: Type) -> int | None:
    """Return the original of a value that was widened and narrowed again; a product of narrow numbers computed in a
    wide type and rounded is a narrow product that accumulates in the wide type.
    """
    node = values.nodes[operands[0]]
    of = {values.type(a)[1] for a in node.operands}
    if of != {kind[1]} or not _holds(node.type[1], kind[1]):
        return None
    if node.op == "convert_element_type":
        return node.operands[0]
    if node.op in ("dot_general", "conv_general_dilated") and jnp.issubdtype(kind[1], jnp.floating):
        return values.make(node.op, node.key, node.operands, kind)
    return None


def _holds(wide: DType, narrow: DType) -> bool:
    """Return whether one type represents every number of another of the same kind."""
    if jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating):
        a, b = jnp.finfo(wide), jnp.finfo(narrow)
        return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp
    if jnp.issubdtype(narrow, jnp.integer) and jnp.issubdtype(wide, jnp.integer):
        a, b = jnp.iinfo(wide), jnp.iinfo(narrow)
        return a.min <= b.min and a.max >= b.max
    return False


@rule("rev")
def _reversed(values: Values, key: tuple[int, ...], operands: Operands, kind: Type) -> int | None:
    node = values.nodes[operands[0]]
    return node.operands[0] if node.op == "rev" and node.key == key else None


# Rows, and arrays that are written row by row.


@rule("Row")
def _row(values: Values, place: Affine, operands: Operands, kind: Type) -> int | None:
    (array,) = operands
    node = values.nodes[array]
    shape = node.type[0]
    if shape[0] == 1:
        return values.make("reshape", None, operands, kind)
    if node.op == "Stack":
        return _opened(values, node.operands[0], node.key[0], place)
    if node.op == "Grid":
        return grid(values, kind, node.key[0][1:], plus(node.key[1], place, node.key[0][0]))
    if node.op == "Put":
        return _beside(values, node.operands[0], node.operands[1], node.key, place)
    if node.op == "Filled":
        return _row_of_filled(values, node, place)
    if node.op == "Row":
        (inner,) = values.nodes[node.operands[0]].operands[:1] or (-1,)
        if values.nodes[node.operands[0]].op == "reshape":
            outer = values.type(node.operands[0])[0]
            if values.type(inner)[0] == (outer[0] * outer[1], *outer[2:]):
                return values.row(inner, plus(place, node.key, outer[1]))
        return None
    if node.op == "reshape":
        (inner,) = node.operands
        if values.type(inner)[0][:1] == shape[:1]:
            return values.make("reshape", None, [values.row(inner, place)], kind)
        return None
    if node.op == "slice":
        return _row_of_slice(values, node, place, kind)
    if node.op == "broadcast_in_dim" and len(node.operands) == 1:
        (inner,) = node.operands
        axes = tuple(axis - 1 for axis in node.key if axis)
        if 0 in node.key:
            inner = values.row(inner, constant(0) if values.type(inner)[0][0] == 1 else place)
        return values.make("broadcast_in_dim", axes, [inner], kind)
    if node.op == "transpose" and node.key[0] == 0:
        inner = values.row(node.operands[0], place)
        return values.make("transpose", tuple(axis - 1 for axis in node.key[1:]), [inner], kind)
    if node.op in _POINTWISE and (rows := _rows_of(values, node.operands, shape, place)) is not None:
        return values.make(node.op, node.key, rows, kind)
    return None


def _rows_of(
    values: Values, operands: Sequence[int], shape: tuple[int, ...], place: Affine
) -> list[int] | None:
    """Return the operands that pointwise work on arrays of this shape reads for one row of its result."""
    found = []
    for a in operands:
        own = values.type(a)[0]
        if own and (len(own) != len(shape) or own[0] not in (1, shape[0])):
            return None
        found.append(values.row(a, constant(0) if own[0] == 1 else place) if own else a)
    return found


_POINTWISE = pointwise_names()


def _opened(values: Values, value: int, symbol: int, place: Affine) -> int | None:
    try:
        return values.at(value, symbol, place)
    except CaptureError:
        return None


def _beside(values: Values, array: int, written: int, where: Affine, place: Affine) -> int | None:
    """Return the row of an array from which another was written, if they are the same."""
    apart = plus(place, where, -1)
    if apart == constant(0):
        return written
    reach = values.range(apart)
    return values.row(array, place) if reach and not reach[0] <= 0 <= reach[1] else None


def _row_of_filled(values: Values, node: Node, place: Affine) -> int | None:
    symbol, first, count = node.key
    array, value = node.operands
    reach = values.range(place)
    if reach is None:
        return None
    if first <= reach[0] and reach[1] < first + count:
        return _opened(values, value, symbol, place)
    return values.row(array, place) if reach[1] < first or first + count <= reach[0] else None


def _row_of_slice(values: Values, node: Node, place: Affine, kind: Type) -> int:
    start, stop, strides = node.key
    inner = values.row(node.operands[0], plus(constant(start[0]), place, strides[0]))
    return values.make("slice", (start[1:], stop[1:], strides[1:]), [inner], kind)


@rule("slice")
def _slice(values: Values, key: Window, operands: Operands, kind: Type) -> int | None:
    if values.type(operands[0]) == kind:
        return operands[0]
    node = values.nodes[operands[0]]
    if set(key[2]) - {1}:
        return None
    if node.op == "slice" and set(node.key[2]) == {1}:
        start, stop = (tuple(map(add, node.key[0], own)) for own in key[:2])
        return values.make("slice", (start, stop, key[2]), node.operands, kind)
    if node.op == "pad":
        inner = values.type(node.operands[0])[0]
        start, stop = (
            tuple(n - low for n, (low, _, _) in zip(own, node.key, strict=True)) for own in key[:2]
        )
        within = all(a >= 0 and b <= n for a, b, n in zip(start, stop, inner, strict=True))
        apart = any(interior for _, _, interior in node.key)
        return (
            values.make("slice", (start, stop, key[2]), node.operands[:1], kind)
            if within and not apart
            else None
        )
    if node.op != "concatenate":
        return None
    axis, first = node.key, 0
    for a in node.operands:
        size = values.type(a)[0][axis]
        if first <= key[0][axis] and key[1][axis] <= first + size:
            start, stop = (tuple(n - first * (d == axis) for d, n in enumerate(own)) for own in key[:2])
            return values.make("slice", (start, stop, key[2]), [a], kind)
        first += size
    return None


@rule("dynamic_slice")
def _dynamic_slice(values: Values, key: object, operands: Operands, kind: Type) -> int | None:
    array, *indices = operands
    shape = values.type(array)[0]
    if kind[0] == shape:
        return array
    place = _first_place(values, array, indices)
    if place is None or kind[0] != (1, *shape[1:]):
        return None
    return values.make("reshape", None, [values.row(array, place)], kind)


@rule("dynamic_update_slice")
def _dynamic_update(values: Values, key: object, operands: Operands, kind: Type) -> int | None:
    array, update, *indices = operands
    shape = kind[0]
    place = _first_place(values, array, indices)
    if place is None or values.type(update)[0] != (1, *shape[1:]):
        return None
    row = values.make("reshape", None, [update], (shape[1:], kind[1]))
    return values.make("Put", place, [array, row], kind)


def _first_place(values: Values, array: int, indices: list[int]) -> Affine | None:
    """Return the row at which a slice starts, if no index is out of bounds."""
    shape = values.type(array)[0]
    places = [scalar(values, i) for i in indices]
    if not places or places[0] is None or any(place != constant(0) for place in places[1:]):
        return None
    reach = values.range(places[0])
    return places[0] if reach and reach[0] >= 0 and reach[1] < shape[0] else None


@rule("Stack")
def _stacked(values: Values, key: tuple[int], operands: Operands, kind: Type) -> int | None:
    (value,) = operands
    (symbol,) = key
    length = kind[0][0]
    if length == 1:
        row = _opened(values, value, symbol, constant(0))
        return None if row is None else values.make("reshape", None, [row], kind)
    node = values.nodes[value]
    if not values.free[value] & symbol_bit(symbol):
        return values.make("broadcast_in_dim", tuple(range(1, len(kind[0]))), operands, kind)
    if node.op == "Row" and node.key == alone(symbol):
        (array,) = node.operands
        if values.type(array)[0][0] == length and not values.free[array] & symbol_bit(symbol):
            return array
    if node.op == "Grid":
        factors = dict(node.key[1][0])
        step = factors.pop(symbol)
        return grid(values, kind, (step, *node.key[0]), (tuple(sorted(factors.items())), node.key[1][1]))
    return None


@rule("Filled")
def _filled(values: Values, key: tuple[int, int, int], operands: Operands, kind: Type) -> int | None:
    symbol, first, count = key
    array, value = operands
    node = values.nodes[array]
    if first == 0 and count == kind[0][0]:
        return values.make("Stack", (symbol,), [value], kind)
    if node.op == "Filled" and node.key[0] == symbol and node.operands[1] == value:
        _, other, more = node.key
    elif node.op == "Put" and not node.key[0] and _is_at(values, node.operands[1], value, symbol, node.key):
        other, more = node.key[1], 1
    else:
        return None
    if other + more != first and first + count != other:
        return None
    whole = (symbol, min(first, other), count + more)
    return values.make("Filled", whole, [node.operands[0], value], kind)


@rule("Put")
def _put(values: Values, place: Affine, operands: Operands, kind: Type) -> int | None:
    array, row = operands
    node = values.nodes[array]
    if place[0] or node.op != "Filled":
        return None
    symbol, first, count = node.key
    if place[1] not in (first - 1, first + count) or not _is_at(values, row, node.operands[1], symbol, place):
        return None
    return values.make("Filled", (symbol, min(first, place[1]), count + 1), node.operands, kind)


def _is_at(values: Values, row: int, value: int, symbol: int, place: Affine) -> bool:
    """Return whether a row is a value's at a place."""
    return row == _opened(values, value, symbol, place)


@rule("concatenate")
def _concatenated(values: Values, axis: int, operands: Operands, kind: Type) -> int | None:
    """Return a stack of one value's chunks as one stack of its rows, and adjacent slices as one slice."""
    if len(operands) == 1:
        return operands[0]
    slices = [values.nodes[a] for a in operands]
    if all(node.op == "slice" and set(node.key[2]) == {1} for node in slices):
        start, stop, ones = slices[0].key[0], slices[-1].key[1], slices[0].key[2]
        behind = [start, *(node.key[1] for node in slices)]
        alike = (
            node.operands == slices[0].operands
            and all(
                (a, b) == ((before[d], b) if d == axis else (start[d], stop[d]))
                for d, (a, b) in enumerate(zip(node.key[0], node.key[1], strict=True))
            )
            for node, before in zip(slices, behind, strict=False)
        )
        if all(alike):
            return values.make("slice", (start, stop, ones), slices[0].operands, kind)
    if axis:
        return None
    starts = list(accumulate((values.type(a)[0][0] for a in operands), initial=0))
    stacks = [i for i, a in enumerate(operands) if values.nodes[a].op == "Stack"]
    if not stacks:
        return None
    (symbol,), (body,) = values.nodes[operands[stacks[0]]][1:3]
    value = _opened(values, body, symbol, plus(alone(symbol), constant(-starts[stacks[0]])))
    for start, a in zip(starts, operands, strict=False):
        shape = values.type(a)[0]
        place = plus(alone(symbol), constant(start)) if shape[0] > 1 else constant(start)
        row = None if value is None else _opened(values, value, symbol, place)
        if row is None or values.make("Stack", (symbol,), [row], values.type(a)) != a:
            return None
    return None if value is None else values.make("Stack", (symbol,), [value], kind)


@rule(*_POINTWISE)
def _of_repeated(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    """Return pointwise work on values that repeat along an axis as work on one entry there."""
    found = [_once(values, a, kind[0]) for a in operands]
    shapes = [own for a in found if (own := values.type(a)[0])]
    spanned = tuple(n if any(own[axis] > 1 for own in shapes) else 1 for axis, n in enumerate(kind[0]))
    if kind[0] and math.prod(kind[0]) == 1:
        rows = [values.make("reshape", None, [a], ((), values.type(a)[1])) for a in operands]
        return values.make("reshape", None, [values.make(key[0], key, rows, ((), kind[1]))], kind)
    if found and spanned != kind[0]:
        inner = spanned if any(n > 1 for n in spanned) else ()
        made = values.make(key[0], key, found, (inner, kind[1]))
        return values.make("broadcast_in_dim", tuple(range(len(inner))), [made], kind)
    return None if found == list(operands) else values.make(key[0], key, found, kind)


def _once(values: Values, value: int, shape: tuple[int, ...]) -> int:
    node = values.nodes[value]
    own = node.type[0]
    if own and math.prod(own) == 1 < math.prod(shape):
        return values.make("reshape", None, [value], ((), node.type[1]))
    if node.op != "broadcast_in_dim" or len(node.operands) != 1 or len(own) != len(shape):
        return value
    places = dict(zip(node.key, values.type(node.operands[0])[0], strict=True))
    kept = tuple(places.get(axis, 1) for axis in range(len(shape)))
    return _once(values, values.make("reshape", None, node.operands, (kept, node.type[1])), shape)


@rule(*_POINTWISE)
def _of_stacks(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    """Return pointwise work on a stack as a stack of such work."""
    stacks = [values.nodes[a] for a in operands if values.nodes[a].op == "Stack"]
    if not stacks:
        return None
    symbol = stacks[0].key[0]
    if any(values.free[a] & symbol_bit(symbol) for a in operands):
        return None
    values.lengths, around = [*values.lengths[:symbol], kind[0][0]], values.lengths
    rows = _rows_of(values, operands, kind[0], alone(symbol))
    made = None if rows is None else values.make(key[0], key, rows, (kind[0][1:], kind[1]))
    values.lengths = around
    return None if made is None else values.make("Stack", (symbol,), [made], kind)


_MIRRORED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}


def _number(values: Values, value: int) -> float | None:
    node = values.nodes[value]
    if node.op == "Literal" and not node.type[0] and not np.issubdtype(node.type[1], np.complexfloating):
        return float(np.frombuffer(node.key[0], node.type[1])[0])
    place = scalar(values, value)
    return None if place is None or place[0] else float(place[1])


@rule(*_MIRRORED)
def _of_clamped(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    """Return a comparison of a clamped value with a number inside the limits as one of the value itself."""
    numbers = [_number(values, a) for a in operands]
    if (numbers[0] is None) == (numbers[1] is None):
        return None
    at = 0 if numbers[0] is None else 1
    number, name = numbers[1 - at], key[0] if at == 0 else _MIRRORED[key[0]]
    node = values.nodes[operands[at]]
    if number is None or node.op not in ("max", "min", "clamp"):
        return None
    limits = [_number(values, a) for a in node.operands]
    if node.op == "clamp":
        low, high, inner = limits[0], limits[2], node.operands[1]
        if low is None or high is None or low > high:
            return None
    elif (limits[0] is None) == (limits[1] is None):
        return None
    else:
        inner = node.operands[limits.index(None)]
        limit = next(each for each in limits if each is not None)
        low, high = (limit, math.inf) if node.op == "max" else (-math.inf, limit)
    above, below = (low <= number, number < high) if name in ("gt", "le") else (low < number, number <= high)
    if name in ("eq", "ne"):
        above, below = low < number, number < high
    if not (above and below):
        return None
    pair = (inner, operands[1]) if at == 0 else (operands[0], inner)
    return values.make(key[0], key, pair, kind)


@rule("eq")
def _of_larger(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    """Return whether one of two values is the larger, as whether it is not smaller than the other."""
    for one, result in (operands, operands[::-1]):
        node = values.nodes[result]
        if node.op in ("max", "min") and one in node.operands:
            other = node.operands[1] if one == node.operands[0] else node.operands[0]
            name, primitive = ("ge", lax.ge_p) if node.op == "max" else ("le", lax.le_p)
            own = name, (primitive, *key[1][1:]), *key[2:]
            return values.make(name, own, (one, other), kind)
    return None


@rule("ne")
def _of_bits(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    """Return the original of a mask that was packed, eight entries to a byte, and unpacked."""
    found = operands[0]
    if _number(values, operands[1]) != 0 or values.type(found)[1] != np.uint8:
        return None
    chain = {}
    for op in ("and", "shift_right_logical", "reshape", "reduce_or", "shift_left"):
        node = values.nodes[found]
        if not chain and node.op == "reshape":
            found = node.operands[0]
            node = values.nodes[found]
        if node.op != op:
            return None
        chain[op] = node
        found = node.operands[0]
    node = values.nodes[found]
    if node.op != "convert_element_type":
        return None
    bits = node.operands[0]
    inner = values.nodes[bits]
    mask = inner.operands[0] if inner.op == "reshape" and values.type(inner.operands[0]) == kind else bits
    left, right, spread = (chain[op] for op in ("shift_left", "shift_right_logical", "reshape"))
    places = values.nodes[left.operands[1]]
    shape = left.type[0]
    axes = chain["reduce_or"].key[1]
    if places.op != "Grid" or places.key[1] != constant(0) or len(axes) != 1 or shape[axes[0]] > 8:
        return None
    (axis,) = axes
    counted = tuple(int(i == axis) for i in range(len(shape)))
    same = left.operands[1] == right.operands[1] and places.key[0] == counted
    once = tuple(1 if i == axis else n for i, n in enumerate(shape))
    one = _number(values, chain["and"].operands[1]) == 1
    whole = values.type(mask) == kind and values.type(bits) == (shape, kind[1]) and spread.type[0] == once
    return mask if same and one and whole else None


@rule("max_pool_gradient")
def _of_pooling(values: Values, key: tuple[object, ...], operands: Operands, kind: Type) -> int | None:
    """Return JAX's own gradient of a max-pooling, up to the order in which overlapping windows add up."""
    node = values.nodes[operands[1]]
    if node.op != "max_pool_places" or node.key[:3] != key or values.type(node.operands[0])[0] != kind[0]:
        return None
    return values.make("select_and_scatter_add", node.key, [operands[0], node.operands[0]], kind)
