"""Rules of `_value_numbers` for masks that `_masks`, `_selections` and `_encodings` write otherwise, and for the
gradient of max-pooling that `_pooling_places` does.

Law: both sides of a rule are the same, bit by bit, but for the order in which overlapping windows add up.
"""

import math

import numpy as np
from jax import lax

from ._index_rules import Operands, OperationKey, scalar
from ._value_numbers import Type, Values, constant, rule

_MIRRORED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}


def _number(values: Values, value: int) -> float | None:
    node = values.nodes[value]
    if node.op == "Literal" and not node.type[0] and not np.issubdtype(node.type[1], np.complexfloating):
        return float(np.frombuffer(node.key[0], node.type[1])[0])
    place = scalar(values, value)
    return None if place is None or place[0] else float(place[1])


@rule(*_MIRRORED)
def _of_clamped(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    """Return a comparison of what is clamped with a number within the limits is one of what it was before."""
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
    """Return whether one of two is the larger one: whether it is not smaller than the other one."""
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
    """Return a mask that was packed, eight entries to a byte, and unpacked."""
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
    """JAX's own gradient of a max-pooling, up to the order in which overlapping windows add up."""
    node = values.nodes[operands[1]]
    if node.op != "max_pool_places" or node.key[:3] != key or values.type(node.operands[0])[0] != kind[0]:
        return None
    return values.make("select_and_scatter_add", node.key, [operands[0], node.operands[0]], kind)
