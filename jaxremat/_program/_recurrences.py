"""Carries of a loop that need one another -> recurrences, of which equal ones are one.

One that begins with a value that another had when it began its iteration `e`, and is the same function of the
iterations `e`, `e + 1`, ..., is the other. So is one that begins like another, and that is followed by what follows the
other if it is taken for that.

Law: two recurrences get one number only if each carry of one begins as that of the other, and is followed by the same
function of carries: then they are equal in all iterations, by induction.
"""

from itertools import islice, product
from typing import Any

from ._value_numbers import (
    FREE,
    Affine,
    CaptureError,
    Node,
    Recurrence,
    Values,
    alone,
    constant,
    deeper_bits,
    plus,
    symbol_bit,
)

Found = tuple[Recurrence, Any, tuple[int, ...], Affine]
"""A recurrence, its shape, the operands of its node, and the iteration of it that is the first."""


def ended(values: Values, root: Recurrence, like: Node) -> tuple[Any, ...]:
    """Return the operation, key, operands and type of the node of another recurrence, where such a node is."""
    shape, operands = canonical(values, root)
    return "Recurrence", (root.symbol, shape, like.key[2]), operands, values.type(root.root)


def valued(values: Values, found: Found, index: Affine) -> int:
    """Return what a carry is as an iteration begins."""
    recurrence, shape, operands, first = found
    values.remember(((recurrence.symbol, shape), operands), recurrence)
    index = plus(index, first)
    if index == constant(0):
        return recurrence.begin[recurrence.holes.index(recurrence.root)]
    key = recurrence.symbol, shape, index
    return values.make("Recurrence", key, operands, values.type(recurrence.root))


def again(values: Values, recurrence: Recurrence, index: Affine) -> int:
    """Return the carry of a recurrence of which parts have changed."""
    return valued(values, recurrences(values, recurrence)[recurrence.root], index)


def recurrences(values: Values, own: Recurrence) -> dict[int, Found]:
    """Return each carry of a set by its hole: that of another recurrence which this one goes on with, or its own."""
    own = own._replace(root=own.holes[0])
    if own not in values.sets:
        found = _recurrences(values, own)
        values.sets[own] = found  # behind those of the loops within
    return values.sets[own]


def _recurrences(values: Values, own: Recurrence) -> dict[int, Found]:
    if (found := _continued(values, own)) is not None:
        return found
    rooted = (own._replace(root=h) for h in own.holes)
    made: dict[int, Found] = {each.root: (each, *canonical(values, each), constant(0)) for each in rooted}
    _, shape, operands, _ = made[own.root]
    if ((own.symbol, shape), operands) in values.recurrences:
        return made
    return _joined(values, own) or made


MOST_JOINED = 8
"""So many ways are tried in which a set of carries may be others."""


def _joined(values: Values, own: Recurrence) -> dict[int, Found] | None:
    """Return carries that are those of other recurrences: they begin alike, and taken for those, are followed
    alike.
    """
    known = [values.alike.get((own.symbol, own.step, b), ()) for b in own.begin]
    index = alone(own.symbol)
    for keys in islice(product(*known), MOST_JOINED):
        found: dict[int, Found] = {}
        for h, (key, operands) in zip(own.holes, keys, strict=True):
            found[h] = values.recurrences[key, operands], key[1], operands, constant(0)
        if any(values.type(h) != values.type(other.root) for h, (other, *_) in found.items()):
            continue
        taken = {h: valued(values, each, index) for h, each in found.items()}
        try:
            with values.unbounded(own.symbol):
                after = values.rebuilt(own.next, taken, {})
                followed = [_followed(values, each) for each in found.values()]
        except CaptureError:
            continue
        if after == followed:
            return found
    return None


def _followed(values: Values, found: Found) -> int:
    """Return what follows a carry, made of the carries as they are."""
    own = found[0]
    rooted = [own._replace(root=h) for h in own.holes]
    every = {
        o.root: valued(values, (o, *canonical(values, o), constant(0)), alone(own.symbol)) for o in rooted
    }
    return values.rebuilt([own.next[own.holes.index(own.root)]], every, {})[0]


def _continued(values: Values, own: Recurrence) -> dict[int, Found] | None:
    """Return carries that are those of other recurrences from a later iteration on."""
    known = [_begun_as(values, b, own.step) for b in own.begin]
    if not all(known):
        return None
    index = known[0][0][2]
    keys = [each[:2] for some in known for each in [*(one for one in some if one[2] == index)][:1]]
    others = [values.recurrences[key] for key in keys]
    if len(keys) < len(known) or any((o.symbol, o.step) != (others[0].symbol, own.step) for o in others):
        return None
    symbol = others[0].symbol
    within = plus(alone(FREE), index, -1)
    try:
        after = values.rebuilt(own.next, {}, {own.symbol: within})
        if any(values.free[a] & (symbol_bit(own.symbol) | symbol_bit(symbol)) for a in after):
            return None
        with values.unbounded(symbol):
            after = values.rebuilt(after, {}, {FREE: alone(symbol)})
    except CaptureError:
        return None
    begin = tuple(o.begin[o.holes.index(o.root)] for o in others)
    whole = Recurrence(symbol, own.step, own.holes, begin, tuple(after), own.root)
    found: dict[int, Found] = {}
    for h, (key, operands), other in zip(own.holes, keys, others, strict=True):
        if (key[1], operands) != canonical(values, whole._replace(root=h)):
            return None
        found[h] = other, key[1], operands, index
    return found


def _begun_as(values: Values, begin: int, step: int) -> list[tuple[Any, tuple[int, ...], Affine]]:
    """Return which recurrences a value is of, and in which of their iterations, by what is known of it."""
    node = values.nodes[begin]
    if node.op == "Recurrence":
        return [(node.key[:2], node.operands, node.key[2])]
    found = []
    for start in values.after_one.get(begin, ()):
        same = (each for (_, *own), keys in values.alike.items() if own == [step, start] for each in keys)
        for key, operands in [*islice(same, MOST_JOINED)]:  # what follows may find more
            own = values.recurrences[key, operands], key[1], operands, constant(0)
            if _at(values, own, constant(0)) == begin:
                found.append((key, operands, constant(step)))
    return found


def _at(values: Values, found: Found, index: Affine) -> int | None:
    """Return what a carry is behind an iteration; None where that cannot be said there."""
    try:
        return values.at(_followed(values, found), found[0].symbol, index)
    except CaptureError:
        return None


def once_more(values: Values, begin: int, after: int, step: int) -> int:
    """Return what a loop of one iteration makes of a carry: where it goes on with another recurrence, the next of that
    one's values.
    """
    values.after_one.setdefault(after, []).append(begin)
    for key, operands, index in _begun_as(values, begin, step):
        other = values.recurrences[key, operands]
        if other.step != step or index[0]:
            continue
        found = other, key[1], operands, constant(0)
        if _at(values, found, index) == after:
            return valued(values, found, plus(index, constant(step)))
    return after


def canonical(values: Values, own: Recurrence) -> tuple[Any, tuple[int, ...]]:
    """Return what is the same of two recurrences exactly if they are: a shape, and the operands in it."""
    free, nodes = values.free, values.nodes
    mask = deeper_bits(own.symbol)  # what stacks within bind is no operand
    for h in own.holes:
        mask |= free[h]
    begin, after = (dict(zip(own.holes, each, strict=True)) for each in (own.begin, own.next))
    carries = {own.root: 0}  # in the order in which they are met
    places: dict[int, int] = {}
    operands: dict[int, int] = {}
    entries: list[Any] = []

    def name(a: int) -> tuple[str, int]:
        if a in after:
            return "carry", carries.setdefault(a, len(carries))
        if not free[a] & mask:
            return "operand", operands.setdefault(a, len(operands))
        return "made", places[a]

    done = 0
    while done < len(carries):
        hole = list(carries)[done]
        done += 1
        stack = [after[hole]]
        while stack:
            a = stack[-1]
            if a in places or a in after or not free[a] & mask:
                stack.pop()
                continue
            node = nodes[a]
            waiting = [b for b in node.operands if b not in places and b not in after and free[b] & mask]
            if waiting:
                stack.append(waiting[0])
                continue
            stack.pop()
            entries.append((node.op, node.key, tuple(map(name, node.operands)), node.type))
            places[a] = len(places)
        entries.append((name(begin[hole]), name(after[hole])))
    return (own.step, tuple(entries)), tuple(operands)
