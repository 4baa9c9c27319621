"""Rules of `_value_numbers` for indices: integers that are sums of symbols, and arrays that count along their axes.

They are `Grid` nodes, whose key is the increment along each axis and the first entry.
"""

import jax.numpy as jnp
import numpy as np

from ._value_numbers import Affine, Node, Type, Values, constant, plus, rule

Operands = tuple[int, ...]

OperationKey = tuple[str, tuple[object, ...], *tuple[object, ...]]
"""The key of an operation without rules of its own: its name, its primitive and parameters, and its results' types."""


def grid(values: Values, kind: Type, steps: tuple[int, ...], first: Affine) -> int:
    """Return an array of integers that starts with `first`."""
    return values.node("Grid", (steps, first), (), kind)


def scalar(values: Values, value: int) -> Affine | None:
    """Return the place that a number is, None for other numbers."""
    node = values.nodes[value]
    return node.key[1] if node.op == "Grid" and not node.type[0] else None


@rule("iota")
def _iota(values: Values, key: object, operands: Operands, kind: Type) -> int | None:
    if operands or not np.issubdtype(kind[1], np.integer):
        return None
    steps = tuple(int(axis == key) for axis in range(len(kind[0])))
    return grid(values, kind, steps, constant(0))


@rule("add_any")
def _of_cotangents(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int:
    return values.make("add", key, operands, kind)


@rule("add", "sub")
def _sum(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    return _combined(values, operands, kind, 1 if key[0] == "add" else -1)


def _combined(values: Values, operands: Operands, kind: Type, times: int) -> int | None:
    first, second = (values.nodes[a] for a in operands)
    if first.op != "Grid" or second.op != "Grid":
        return None
    rank = len(kind[0])
    one, two = (node.key[0] or (0,) * rank for node in (first, second))
    steps = tuple(a + times * b for a, b in zip(one, two, strict=True))
    return grid(values, kind, steps, plus(first.key[1], second.key[1], times))


@rule("mul")
def _product(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    nodes = [values.nodes[a] for a in operands]
    if any(node.op != "Grid" for node in nodes):
        return None
    rank = len(kind[0])
    for number, other in (nodes, nodes[::-1]):
        if not number.key[1][0] and not any(number.key[0]):
            times = number.key[1][1]
            steps = tuple(times * step for step in other.key[0] or (0,) * rank)
            return grid(values, kind, steps, plus(constant(0), other.key[1], times))
    return None


@rule("convert_element_type")
def _converted(values: Values, key: object, operands: Operands, kind: Type) -> int | None:
    node = values.nodes[operands[0]]
    if node.type[1] == kind[1]:
        return operands[0]
    if _is_number(node) and jnp.issubdtype(kind[1], jnp.inexact):
        number = np.asarray(node.key[1][1], kind[1])
        same = complex(number.astype(np.complex128)) == node.key[1][1]
        return values.node("Literal", (number.tobytes(),), (), kind) if same else None
    if node.op != "Grid" or not np.issubdtype(kind[1], np.integer):
        return None
    if (reach := _reach(values, node)) is None:
        return None
    least, most = reach
    fits = all(np.iinfo(each).min <= least and most <= np.iinfo(each).max for each in (node.type[1], kind[1]))
    return grid(values, kind, *node.key) if fits else None


@rule("lt")
def _less(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    """Return whether indices are negative, as indexing tests, if the answer is the same for all."""
    apart = _combined(values, operands, kind, -1)
    reach = None if apart is None else _reach(values, values.nodes[apart])
    if reach is None or reach[0] < 0 <= reach[1]:
        return None
    found = values.node("Literal", (np.bool_(reach[1] < 0).tobytes(),), (), ((), kind[1]))
    return values.make("broadcast_in_dim", (), [found], kind) if kind[0] else found


def _reach(values: Values, node: Node) -> tuple[int, int] | None:
    """Return the smallest and the largest number of a grid."""
    if (first := values.range(node.key[1])) is None:
        return None
    over = [step * (n - 1) for step, n in zip(node.key[0], node.type[0], strict=True)]
    return first[0] + sum(min(0, n) for n in over), first[1] + sum(max(0, n) for n in over)


@rule("max", "min")
def _limited(values: Values, key: OperationKey, operands: Operands, kind: Type) -> int | None:
    """Return the maximum or minimum of two indices, if one of them is always the larger."""
    first, second = (scalar(values, a) for a in operands)
    if first is None or second is None or (reach := values.range(plus(first, second, -1))) is None:
        return None
    if reach[0] >= 0:
        return operands[0 if key[0] == "max" else 1]
    return operands[1 if key[0] == "max" else 0] if reach[1] <= 0 else None


@rule("select_n")
def _selected(values: Values, key: object, operands: Operands, kind: Type) -> int | None:
    node = values.nodes[operands[0]]
    if node.op != "Literal" or node.type[0] or node.type[1] != np.bool_:
        return None
    return operands[2 if np.frombuffer(node.key[0], np.bool_)[0] else 1]


def _is_number(node: Node) -> bool:
    return node.op == "Grid" and not node.type[0] and not node.key[1][0]


def grid_steps(
    shape: tuple[int, ...], steps: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the increments of a grid after a reshape, None if it has none."""
    sized = [(n, step) for n, step in zip(shape, steps, strict=True) if n != 1]
    found = []
    for n in reversed(wanted):
        if n == 1:
            found.append(0)
            continue
        if not sized:
            return None
        size, step = sized.pop()
        while size < n and sized and sized[-1][1] == step * size:  # axes that count as one
            size *= sized.pop()[0]
        if size % n:
            return None
        if size > n:
            sized.append((size // n, step * n))
        found.append(step)
    return None if sized else tuple(reversed(found))
