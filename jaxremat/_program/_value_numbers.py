"""Programs' values -> numbers such that equal numbers mean equal values: hash-consing with a few rules for arrays.

A *node* is an operation on numbered operands. Making a node that exists already returns its number. `RULES` simplify
nodes: an identity is its operand, a row of a stack is the value that was stacked there.

Loops need two more notions. A *symbol*, one for each depth of nesting, is the row that an iteration works on;
iterations read rows of arrays at *affine* places such as `2 * symbol + 1`. A *hole* stands for a carry until `_carries`
has determined what the carry is.

Invariant: nodes with one number have the same value for all values of their symbols and holes, except for rounding
where a rule says so. Each rule covers one operation and knows nothing of whole programs.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Affine = tuple[tuple[tuple[int, int], ...], int]
"""A sum of symbols and a constant: pairs of symbol and factor, sorted, and the constant."""

Type = tuple[tuple[int, ...], Any]
"""A shape and a dtype."""

FREE = -1
"""A symbol that no loop has, for values that are being moved from one loop to another."""

BINDERS = frozenset({"Stack", "Filled", "Recurrence", "Until"})
"""Operations that bind a symbol of their own, the first entry of their key."""


class Node(NamedTuple):
    """An operation. **Fields:** `op` its name, capitalised if it is no primitive of JAX; `key` the parameters that
    distinguish operations of that name; `operands` numbers; `type` of the result.
    """

    op: str
    key: Any
    operands: tuple[int, ...]
    type: Type


class CaptureError(Exception):
    """Substituting a place for a symbol would make it refer to another loop's row."""


class UndecidedError(Exception):
    """Comparing two programs would take too long."""


class Recurrence(NamedTuple):
    """The carries of a loop that depend on one another.

    **Fields:** `symbol` the iteration, counted from 0; `step` 1 or -1, the direction; `holes` that stand for the
    carries in their `next` values; `begin` their initial values; `root` the carry in question.
    """

    symbol: int
    step: int
    holes: tuple[int, ...]
    begin: tuple[int, ...]
    next: tuple[int, ...]
    root: int


Rule = Callable[["Values", Any, tuple[int, ...], Type], int | None]
"""Key, operands and type of a new node -> the existing node with the same value, None if the rule does not apply."""

RULES: dict[str, list[Rule]] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register the decorated rule for nodes of these operations."""

    def add(fn: Rule) -> Rule:
        for op in ops:
            RULES.setdefault(op, []).append(fn)
        return fn

    return add


@dataclass
class Values:
    """The nodes made so far.

    **Fields:** `free` for each node the symbols and holes that it depends on, as bits; `lengths` of the surrounding
    loops, None where unknown; `recurrences` by their nodes' keys and operands, and those with `alike` initial values;
    `after_one` carries after the only iteration of a loop, with their initial values; `sets` the results for sets of
    carries; `again` builds a recurrence from changed parts; `left` the number of nodes that may still be requested.
    """

    nodes: list[Node] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    lengths: list[int | None] = field(default_factory=list)
    recurrences: dict[tuple[Any, tuple[int, ...]], Recurrence] = field(default_factory=dict)
    alike: dict[Any, list[tuple[Any, tuple[int, ...]]]] = field(default_factory=dict)
    again: Callable[[Recurrence, Affine], int] = field(default=lambda *_: -1)
    after_one: dict[int, list[int]] = field(default_factory=dict)
    sets: dict[Recurrence, Any] = field(default_factory=dict)
    left: int = 0
    _known: dict[Node, int] = field(default_factory=dict)

    def make(self, op: str, key: Hashable, operands: Iterable[int], kind: Type) -> int:
        """Return the number of a node, or of the node that a rule says it equals."""
        operands = tuple(operands)
        self.left -= 1
        if self.left < 0:
            raise UndecidedError
        if 0 in kind[0]:
            return self.node("Empty", None, (), kind)
        for each in RULES.get(op, ()):
            if (found := each(self, key, operands, kind)) is not None:
                return found
        return self.node(op, key, operands, kind)

    def node(self, op: str, key: Any, operands: tuple[int, ...], kind: Type) -> int:
        """Return the number of a node without asking the rules."""
        node = Node(op, key, operands, kind)
        if (found := self._known.get(node)) is not None:
            return found
        bits = 0
        for a in operands:
            bits |= self.free[a]
        if op in BINDERS:
            bits &= ~symbol_bit(key[0])
        self.nodes.append(node)
        self.free.append(bits | _own_bits(node))
        self._known[node] = len(self.nodes) - 1
        return len(self.nodes) - 1

    @property
    def mark(self) -> tuple[int, int, int]:
        """The state to which `forget` returns."""
        return len(self.nodes), len(self.recurrences), len(self.sets)

    def forget(self, mark: tuple[int, int, int]) -> None:
        """Forget all nodes made since a mark."""
        nodes, recurrences, sets = mark
        kept = {a: begun for a, begun in self.after_one.items() if a < nodes}
        self.after_one = {a: [b for b in begun if b < nodes] for a, begun in kept.items()}
        while len(self.sets) > sets:
            self.sets.popitem()
        for node in self.nodes[nodes:]:
            del self._known[node]
        del self.nodes[nodes:], self.free[nodes:]
        while len(self.recurrences) > recurrences:
            key, last = self.recurrences.popitem()
            self.alike[_begun(last)].remove(key)

    def remember(self, key: tuple[Hashable, tuple[int, ...]], recurrence: Recurrence) -> None:
        """Record the value of nodes with this key, except for its place, and these operands."""
        if key not in self.recurrences:
            self.recurrences[key] = recurrence
            self.alike.setdefault(_begun(recurrence), []).append(key)

    def type(self, value: int) -> Type:
        """Shape and dtype of a node."""
        return self.nodes[value].type

    def row(self, array: int, place: Affine) -> int:
        """Return the row of an array at a place inside its bounds."""
        shape, dtype = self.type(array)
        return self.make("Row", place, (array,), (shape[1:], dtype))

    def range(self, place: Affine) -> tuple[int, int] | None:
        """Return the smallest and the largest value of a place over the surrounding loops."""
        least = most = place[1]
        for symbol, factor in place[0]:
            length = self.lengths[symbol] if 0 <= symbol < len(self.lengths) else None
            if length is None:
                return None
            ends = (0, factor * (length - 1))
            least, most = least + min(ends), most + max(ends)
        return least, most

    @contextmanager
    def unbounded(self, symbol: int) -> Iterator[None]:
        """Make places unbounded in the loop at this depth while the context is open."""
        around = self.lengths
        self.lengths = [None if i == symbol else length for i, length in enumerate(around)]
        try:
            yield
        finally:
            self.lengths = around

    def at(self, value: int, symbol: int, place: Affine) -> int:
        """Return a value with a place substituted for a symbol. **Raises:** `CaptureError`."""
        return value if place == alone(symbol) else self.rebuilt([value], {}, {symbol: place})[0]

    def rebuilt(
        self, values: Sequence[int], swapped: Mapping[int, int], placed: Mapping[int, Affine]
    ) -> list[int]:
        """Return values with some nodes and symbols substituted. **Raises:** `CaptureError`."""
        return _Rebuilding(self, swapped).values(values, dict(placed))


@dataclass
class _Rebuilding:
    own: Values
    swapped: Mapping[int, int]
    made: dict[Any, dict[int, int]] = field(default_factory=dict)

    def values(self, values: Sequence[int], placed: dict[int, Affine], bound: int = 0) -> list[int]:
        nodes, free = self.own.nodes, self.own.free
        mask = 0
        for a in self.swapped:
            mask |= free[a]
        bound &= mask
        mask &= ~bound
        for symbol in placed:
            mask |= symbol_bit(symbol)
        made = self.made.setdefault((tuple(sorted(placed.items())), bound), {})
        stack, found = list(values), set()
        while stack:
            a = stack.pop()
            if a in made or a in found or not free[a] & mask:
                continue
            found.add(a)
            if a not in self.swapped and nodes[a].op not in BINDERS:
                stack.extend(nodes[a].operands)
        for a in sorted(found):  # operands have smaller numbers
            made[a] = self.swapped[a] if a in self.swapped else self._made(a, placed, made, bound)
        return [made.get(a, a) for a in values]

    def _made(self, a: int, placed: dict[int, Affine], made: dict[int, int], bound: int) -> int:
        own = self.own
        node = own.nodes[a]
        if node.op not in BINDERS:
            key = replaced_in_key(node, placed)
            return own.make(node.op, key, [made.get(b, b) for b in node.operands], node.type)
        symbol, old = node.key[0], None
        body = node.operands[-1:]
        if node.op == "Recurrence":
            old = own.recurrences[node.key[:2], node.operands]
            body = old.next
        elif node.op == "Until":
            body = node.operands
        bits = 0
        for b in body:
            bits |= own.free[b]
        inside = {s: place for s, place in placed.items() if s != symbol and symbol_bit(s) & bits}
        if any(affine_bits(place) & symbol_bit(symbol) for place in inside.values()):
            raise CaptureError
        if old is not None:
            holes = sum({own.free[h] for h in old.holes})
            if any(own.free[b] & holes for b in self.swapped.values()):
                raise CaptureError
            begin = self.values(old.begin, placed, bound)
            with own.unbounded(symbol):
                after = self.values(old.next, inside, bound | holes)
            new = old._replace(begin=tuple(begin), next=tuple(after))
            return own.again(new, substituted(node.key[2], placed))
        with own.unbounded(symbol):
            made_inside = self.values(body, inside, bound)
        outside = node.operands[: len(node.operands) - len(body)]
        return own.make(node.op, node.key, [*self.values(outside, placed, bound), *made_inside], node.type)


def _begun(recurrence: Recurrence) -> tuple[int, int, int]:
    begin = recurrence.begin[recurrence.holes.index(recurrence.root)]
    return recurrence.symbol, recurrence.step, begin


def replaced_in_key(node: Node, placed: Mapping[int, Affine]) -> Any:
    """Return a node's key with places substituted for symbols."""
    if node.op in ("Row", "Put"):
        return substituted(node.key, placed)
    if node.op == "Grid":
        return node.key[0], substituted(node.key[1], placed)
    return node.key


def symbol_bit(symbol: int) -> int:
    """Return the bit of a symbol."""
    return 1 << 2 * (symbol + 1)


_SYMBOLS = sum(1 << 2 * depth for depth in range(64))
"""The bits of all symbols. Loops are never nested deeper than this."""


def deeper_bits(symbol: int) -> int:
    """Return the bits of the symbols of all loops inside a symbol's loop."""
    return _SYMBOLS & -symbol_bit(symbol + 1)


def _own_bits(node: Node) -> int:
    if node.op == "Hole":
        return 1 << 2 * node.key + 1
    if node.op in ("Row", "Put"):
        return affine_bits(node.key)
    if node.op == "Grid":
        return affine_bits(node.key[1])
    return affine_bits(node.key[2]) if node.op == "Recurrence" else 0


def affine_bits(place: Affine) -> int:
    """Return the symbols of a place, as bits."""
    return sum(symbol_bit(symbol) for symbol, _ in place[0])


def alone(symbol: int) -> Affine:
    """Return the place that is just a symbol."""
    return ((symbol, 1),), 0


def constant(number: int) -> Affine:
    """Return the place that is just a number."""
    return (), number


def plus(first: Affine, second: Affine, times: int = 1) -> Affine:
    """Return the sum of a place and a multiple of another."""
    factors = dict(first[0])
    for symbol, factor in second[0]:
        factors[symbol] = factors.get(symbol, 0) + times * factor
    return tuple(sorted((s, f) for s, f in factors.items() if f)), first[1] + times * second[1]


def substituted(place: Affine, placed: Mapping[int, Affine]) -> Affine:
    """Return a place with other places substituted for its symbols."""
    found: Affine = ((), place[1])
    for symbol, factor in place[0]:
        found = plus(found, placed.get(symbol, alone(symbol)), factor)
    return found
