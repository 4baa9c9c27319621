"""Carries of a loop -> their values, independent of their names, their order and the number of loops.

The holes that stand for carries in a body are filled in this order:

- a carry that no iteration changes is its initial value; one that grows by a constant is an index;
- a loop that only runs an inner loop, which continues where its last run ended, is one loop over all their iterations:
  `c -> scan(f, c, X[q])` over `q` is `f` over the rows `M * q + r`;
- an array of which each iteration writes its own row is a stack of those rows;
- carries with equal initial values that stay equal, assuming that they are, are one;
- the remaining carries are *recurrences*, in sets of carries that depend on one another.

Recurrences with equal values get one number. One that starts with the value that another had at the start of its
iteration `e`, and is the same function of the iterations `e`, `e + 1`, ..., is the other. So is one with the other's
initial value whose next value equals the other's, assuming that the carries are equal.

Invariant: a carry's value is that at the start of each iteration. Two recurrences get one number only if their carries
have equal initial values and equal next values as functions of the carries: then they are equal in all iterations, by
induction.
"""

from collections.abc import Sequence
from itertools import islice, product
from typing import Any

from ._index_rules import scalar
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
"""A recurrence, its shape, its node's operands, and the iteration at which it starts."""


def ended(values: Values, root: Recurrence, like: Node) -> tuple[Any, ...]:
    """Return the operation, key, operands and type of another recurrence's node, if it has one."""
    shape, operands = canonical(values, root)
    return "Recurrence", (root.symbol, shape, like.key[2]), operands, values.type(root.root)


def valued(values: Values, found: Found, index: Affine) -> int:
    """Return a carry's value at the start of an iteration."""
    recurrence, shape, operands, first = found
    values.remember(((recurrence.symbol, shape), operands), recurrence)
    index = plus(index, first)
    if index == constant(0):
        return recurrence.begin[recurrence.holes.index(recurrence.root)]
    key = recurrence.symbol, shape, index
    return values.make("Recurrence", key, operands, values.type(recurrence.root))


def again(values: Values, recurrence: Recurrence, index: Affine) -> int:
    """Return the carry of a recurrence after parts of it have changed."""
    return valued(values, recurrences(values, recurrence)[recurrence.root], index)


def recurrences(values: Values, own: Recurrence) -> dict[int, Found]:
    """Return each carry of a set by its hole: the carry of another recurrence that it equals, or a new one."""
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
"""The number of ways tried to match a set of carries with others."""


def _joined(values: Values, own: Recurrence) -> dict[int, Found] | None:
    """Return carries as those of other recurrences with equal initial and, assuming equality, equal next values."""
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
    """Return a carry's next value as a function of the carries."""
    own = found[0]
    rooted = [own._replace(root=h) for h in own.holes]
    every = {
        o.root: valued(values, (o, *canonical(values, o), constant(0)), alone(own.symbol)) for o in rooted
    }
    return values.rebuilt([own.next[own.holes.index(own.root)]], every, {})[0]


def _continued(values: Values, own: Recurrence) -> dict[int, Found] | None:
    """Return carries as those of other recurrences from a later iteration on."""
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
    """Return the recurrences, with their iterations, that are known to take a value."""
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
    """Return a carry's value after an iteration, None if it cannot be expressed there."""
    try:
        return values.at(_followed(values, found), found[0].symbol, index)
    except CaptureError:
        return None


def once_more(values: Values, begin: int, after: int, step: int) -> int:
    """Return a carry after a loop of one iteration; if it continues another recurrence, that one's next value."""
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
    """Return a shape and the operands in it, which are equal exactly for equal recurrences."""
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


class Carries:
    """The carries of a loop whose iterations are being numbered.

    **Arguments:** `symbol` of its rows; `length`, None if unknown; `backward` whether it starts with the last row;
    `holes` of its carries, their initial values `begin` and their `next` values; `results` other values of its body.
    """

    def __init__(
        self,
        values: Values,
        symbol: int,
        length: int | None,
        holes: Sequence[int],
        begin: Sequence[int],
        next_: Sequence[int],
        results: Sequence[int],
        *,
        backward: bool = False,
    ):
        self.values, self.symbol, self.length = values, symbol, length
        self.step = -1 if backward else 1
        self.first = (length or 1) - 1 if backward else 0
        self.holes = list(holes)
        self.begin = dict(zip(holes, begin, strict=True))
        self.next = dict(zip(holes, next_, strict=True))
        self.results = list(results)
        self.filled: dict[
            int, int
        ] = {}  # hole of an array -> place among the results of the row that is written
        self.places: dict[int, int] = {}  # and of its first row that is written
        self.within: dict[
            int, tuple[Carries, int]
        ] = {}  # hole of an array that one loop of all iterations fills
        self.open_ended: set[int] = (
            set()
        )  # holes of carries of which it is not known what the last iteration leaves
        self.known: dict[int, int] = {}

    def resolve(self) -> None:
        """Fill all holes; `results` and `last` then contain none."""
        while found := self._simple():
            self._fill(found)
        self._prefetched()
        while (found := self._nested()) is not None:
            self._fill(found)
        self._arrays()
        self._alike()
        for some in self._sets():
            found = recurrences(self.values, self._recurrence(some))
            index = plus(alone(self.symbol), constant(-self.first))
            self._fill({h: self._value(found[h], index) for h in some})

    def last(self, hole: int) -> int:
        """Return a carry's final value, for a loop of known length."""
        assert self.length is not None
        values = self.values
        if hole in self.open_ended:
            return values.node("Unknown", len(values.nodes), (), values.type(hole))
        if hole in self.within:
            whole, inner = self.within[hole]
            return whole.last(inner)
        if hole in self.filled:
            row, first = self.results[self.filled[hole]], self.places[hole]
            row = values.at(row, self.symbol, plus(alone(self.symbol), constant(-first)))
            key = (self.symbol, first, self.length)
            return values.make("Filled", key, (self.begin[hole], row), values.type(hole))
        return values.at(self.known[hole], self.symbol, constant(self.first + self.step * self.length))

    @property
    def _open(self) -> list[int]:
        return [h for h in self.holes if h in self.next]

    def _fill(self, found: dict[int, int]) -> None:
        self.known.update(found)
        for h in found:
            del self.next[h]
        self._swap(found)

    def _swap(self, found: dict[int, int]) -> None:
        known = list(self.known)
        every = [*self.next.values(), *self.results, *(self.known[h] for h in known)]
        made = self.values.rebuilt(every, found, {})
        self.next = dict(zip(self.next, made, strict=False))
        count = len(self.next)
        self.results = made[count : count + len(self.results)]
        self.known = dict(zip(known, made[count + len(self.results) :], strict=True))

    def _simple(self) -> dict[int, int]:
        """Return the carries that do not change, and the indices."""
        found = {}
        for h in self._open:
            begin, after = self.begin[h], self.next[h]
            if after in (h, begin):
                found[h] = begin
            elif (more := self._increment(h, after)) and (start := scalar(self.values, begin)) is not None:
                iteration = plus(constant(-self.step * self.first), alone(self.symbol), self.step)
                key = (), plus(start, iteration, more)
                found[h] = self.values.node("Grid", key, (), self.values.type(h))
        return found

    def _increment(self, hole: int, after: int) -> int | None:
        """Return the constant by which a carry grows."""
        node = self.values.nodes[after]
        if node.op not in ("add", "sub") or hole not in node.operands or node.operands[0] == node.operands[1]:
            return None
        other = node.operands[1 if node.operands[0] == hole else 0]
        number = scalar(self.values, other)
        if number is None or number[0] or (node.op == "sub" and node.operands[0] != hole):
            return None
        return number[1] if node.op == "add" else -number[1]

    def _prefetched(self) -> None:
        """Return the carries that an iteration reads for the next one: rows, and indices that the last iteration keeps
        in range.
        """
        while found := next(filter(None, map(self._foreseen, self._open)), None):
            (hole,) = found
            self.open_ended.add(hole)
            self._fill(found)

    def _foreseen(self, hole: int) -> dict[int, int]:
        """Return a carry whose value each iteration but the last computes for the next one, and which starts with it:
        an index, or a value that does not depend on this carry.
        """
        values, symbol, begin = self.values, self.symbol, self.begin[hole]
        if self.length is None or self.length < 2 or values.free[begin] & symbol_bit(symbol):
            return {}
        row = plus(alone(symbol), constant(int(self.step < 0)))  # of iterations but the last
        guess, start = None, scalar(values, begin)
        if start is not None:
            place = plus(plus(start, constant(-self.first)), alone(symbol))
            guess = values.node("Grid", ((), place), (), values.type(hole))
        elif values.free[self.next[hole]] & values.free[hole]:
            return {}
        swapped = {} if guess is None else {hole: values.at(guess, symbol, row)}
        around, values.lengths = values.lengths, [*values.lengths[:symbol], self.length - 1]
        (left,) = values.rebuilt([self.next[hole]], swapped, {symbol: row})
        values.lengths = around
        if any(values.free[left] & values.free[h] for h in self._open):
            return {}
        before = plus(alone(symbol), constant(-row[1] - self.step))
        made = values.at(left, symbol, before)
        begins = values.at(made, symbol, constant(self.first)) == begin
        return {hole: made} if begins and guess in (None, made) else {}

    def _nested(self) -> dict[int, int] | None:
        """Return the carries that an inner loop continues where its last run ended."""
        for h in self._open:
            node = self.values.nodes[self.next[h]]
            if node.op == "Recurrence" and (found := self._as_one(node)) is not None:
                return found
        return None

    def _as_one(self, node: Node) -> dict[int, int] | None:
        values = self.values
        inner = values.recurrences[node.key[:2], node.operands]
        (symbol, *_), step = node.key, inner.step
        trips = plus(node.key[2], constant(0))
        if step != self.step or trips[0] or step * trips[1] < 1 or self.length is None:
            return None
        count = step * trips[1]
        outer = dict(zip(inner.begin, inner.holes, strict=True))  # this loop's hole -> that within
        if len(outer) < len(inner.holes) or not outer.keys() <= set(self._open):
            return None
        roots = {b: self._rooted(inner, b) for b in outer}
        if any(values.make(*ended(values, root, node)) != self.next[b] for b, root in roots.items()):
            return None
        # Iteration r within iteration q is iteration count * q + r of all.
        index = plus(constant(-self.first), alone(self.symbol))
        length = count * self.length
        first = length - 1 if step < 0 else 0
        try:
            after = values.rebuilt(inner.next, {}, {symbol: plus(alone(FREE), index, -count)})
            if any(values.free[a] & (symbol_bit(symbol) | symbol_bit(self.symbol)) for a in after):
                return None
            with values.unbounded(self.symbol):
                after = values.rebuilt(after, {}, {FREE: plus(alone(self.symbol), constant(-first))})
        except CaptureError:
            return None
        begin = [self.begin[b] for b in inner.begin]
        whole = Carries(values, self.symbol, length, inner.holes, begin, after, [], backward=step < 0)
        values.lengths[self.symbol] = length
        whole.resolve()
        values.lengths[self.symbol] = self.length
        place = plus(constant(first), index, count)
        known = {
            b: values.at(whole.known[h], self.symbol, place) for b, h in outer.items() if h in whole.known
        }
        written = [b for b in outer if b not in known]
        bits = sum({values.free[b] for b in written})
        every = [*self.results, *(self.next[o] for o in self._open if o not in outer)]
        if any(values.free[a] & bits for a in values.rebuilt(every, known, {})):
            return None
        for b in written:
            self.within[b] = whole, outer[b]
            del self.next[b]
        return known

    @staticmethod
    def _rooted(inner: Recurrence, begin: int) -> Recurrence:
        return inner._replace(root=inner.holes[inner.begin.index(begin)])

    def _arrays(self) -> None:
        """Return the arrays of which each iteration writes one row and reads no other."""
        values = self.values
        for h in self._open:
            node = values.nodes[self.next[h]]
            if self.length is None or node.op != "Put" or node.operands[0] != h:
                continue
            factors, first = node.key
            if factors != ((self.symbol, 1),) or not 0 <= first <= values.type(h)[0][0] - self.length:
                continue
            row = values.node("Row", node.key, (h,), (values.type(h)[0][1:], values.type(h)[1]))
            swapped = {row: values.row(self.begin[h], node.key)}
            others = [o for o in self.next if o != h]
            every = [node.operands[1], *(self.next[o] for o in others), *self.results, *self.known.values()]
            made = values.rebuilt(every, swapped, {})
            if any(values.free[a] & values.free[h] for a in made):
                continue
            self.filled[h], self.places[h] = len(self.results), first
            self._swap(swapped)
            self.results.append(made[0])
            del self.next[h]

    def _alike(self) -> None:
        """Return carries that are equal as one."""
        groups: dict[Any, list[int]] = {}
        for h in self._open:
            groups.setdefault((self.begin[h], self.values.type(h)), []).append(h)
        classes = [group for group in groups.values() if len(group) > 1]
        while classes:
            first = {h: group[0] for group in classes for h in group[1:]}
            members = [h for group in classes for h in group]
            made = self.values.rebuilt([self.next[h] for h in members], first, {})
            after = dict(zip(members, made, strict=True))
            split: list[list[int]] = []
            for group in classes:
                parts: dict[int, list[int]] = {}
                for h in group:
                    parts.setdefault(after[h], []).append(h)
                split.extend(parts.values())
            if len(split) == len(classes):
                self._fill(first)
                return
            classes = [group for group in split if len(group) > 1]

    def _sets(self) -> list[list[int]]:
        """Return the holes in sets of carries that depend on one another, in the order in which they can be filled."""
        free = self.values.free
        holes = self._open
        needs = {h: free[self.next[h]] for h in holes}
        for via in holes:
            needs = {h: n | needs[via] if n & free[via] else n for h, n in needs.items()}
        sets: list[list[int]] = []
        for h in holes:
            if not any(h in some for some in sets):
                sets.append([o for o in holes if o == h or (needs[h] & free[o] and needs[o] & free[h])])
        wanted = {id(some): sum(bool(needs[some[0]] & free[o]) for o in holes) for some in sets}
        return sorted(sets, key=lambda some: wanted[id(some)])

    def _recurrence(self, some: Sequence[int]) -> Recurrence:
        after = [self.next[h] for h in some]
        if self.first:
            shifted = plus(alone(self.symbol), constant(self.first))
            with self.values.unbounded(self.symbol):
                after = self.values.rebuilt(after, {}, {self.symbol: shifted})
        begin = tuple(self.begin[h] for h in some)
        return Recurrence(self.symbol, self.step, tuple(some), begin, tuple(after), some[0])

    def _value(self, found: Found, index: Affine) -> int:
        return valued(self.values, found, index)
