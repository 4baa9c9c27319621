"""Two programs -> whether they compute the same: translation validation by value numbers.

Barriers and copies count as their operands, equal equations as one, and loops as recurrences. Each output then has a
number (see `_value_numbers`), and equal numbers mean equal values. An equation that may run only once is numbered by
its turn; such equations of one kind must run in the same order in both programs.

Invariant: different programs are never accepted as equal. Equal programs may be rejected.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax.extend.core as jex
import numpy as np

from . import (
    _array_rules,  # noqa: F401 (it adds its rules)
    _compat,
)
from ._carries import Carries, again, once_more
from ._chunk_kinds import AllRows, Inside, Places, all_rows
from ._chunk_loops import of_all_rows
from ._compat import Atom, shaped
from ._index_rules import grid, scalar
from ._inline import followed, index_on_every_platform
from ._operation_keys import KEYS
from ._primitives import PLACES, inner_eqns, is_in_chunks, runs_in_order
from ._row_indices import by_row, is_indexing
from ._value_numbers import Affine, Node, Type, Values, alone, constant, symbol_bit

Expansion = Callable[[Any], jex.ClosedJaxpr | None]
"""Equation -> the program that replaces it in the comparison, None if it is compared as it is."""

MOST, MOST_PER_EQUATION = 100_000, 100
"""The largest number of nodes for a program, and for each of its equations."""


_OF_TYPES = frozenset({*PLACES, "preferred_element_type"})
"""Parameters that do not affect values, or only repeat their type."""


class Equivalence:
    """A program with which others are compared. **Arguments:** `expansion` replaces some equations of all programs."""

    def __init__(self, closed: jex.ClosedJaxpr, expansion: Expansion = lambda _: None):
        self._numbers = _Numbers(expansion)
        self._own = self._numbers.program(closed)
        self._mark = self._numbers.values.mark

    def difference(self, other: jex.ClosedJaxpr) -> str | None:
        """Return the first difference from a program with the same arguments, in words, None if none is found."""
        try:
            return self._difference(*self._numbers.program(other))
        finally:
            self._numbers.forget(self._mark)

    def _difference(self, outputs: Sequence[int], turns: dict[str, list[int]]) -> str | None:
        own, own_turns = self._own
        if len(outputs) != len(own):
            return f"{len(own)} results became {len(outputs)}"
        for i, (a, b) in enumerate(zip(own, outputs, strict=True)):
            if a != b:
                return f"result {i} differs: {self._numbers.compared(a, b)}"
        for kind in {**own_turns, **turns}:
            if own_turns.get(kind) != turns.get(kind):
                return f"operations that must run once ({kind}) differ in number or order"
        return None


def counted(closed: jex.ClosedJaxpr) -> list[int | None]:
    """Return for each result the axis along which it counts from zero, None if it is not known to count."""
    numbers = _Numbers(lambda _: None)
    return list(map(numbers.axis_counted, numbers.program(closed)[0]))


class _Numbers:
    """The numbers of programs' values."""

    def __init__(self, expansion: Expansion):
        self.values = Values()
        self.values.again = partial(again, self.values)
        self.expansion = expansion
        self.holes = 0  # so many stand for carries of the loops around
        self.bodies = 0  # so many opaque bodies are around
        self.scope: tuple[Any, ...] = ()  # what is around, of what runs in order
        self.turns: dict[str, list[int]] = {}
        self.meant: dict[int, list[Any]] = {}  # by the `id`s of loops what is taken for them, in turn
        self._keys: dict[
            int, tuple[Any, Any, int]
        ] = {}  # id of parameters -> those, what makes them equal, when
        self._constants: dict[int, tuple[Any, int]] = {}
        self._kept: list[Any] = []  # what numbers are made of the ids of

    def program(self, closed: jex.ClosedJaxpr) -> tuple[list[int], dict[str, list[int]]]:
        """Return the numbers of a program's results, and of the equations that run in order by their kind."""
        self.turns, self.holes, self.bodies, self.scope, self.values.lengths = {}, 0, 0, (), []
        self.values.left = MOST + MOST_PER_EQUATION * len(closed.jaxpr.eqns)
        given = [
            self.values.node("Argument", (0, i), (), _type(v)) for i, v in enumerate(closed.jaxpr.invars)
        ]
        return self._body(closed, given), self.turns

    def forget(self, mark: tuple[int, int, int]) -> None:
        """Forget all nodes made since a mark."""
        self.values.forget(mark)
        self._constants = {i: each for i, each in self._constants.items() if each[1] < mark[0]}
        self._keys = {i: each for i, each in self._keys.items() if not each[2] > mark[0]}

    def _body(self, closed: _compat.AnyJaxpr, operands: Sequence[int]) -> list[int]:
        jaxpr, consts = _compat.opened(closed)
        known = [self._constant(c, v) for c, v in zip(consts, jaxpr.constvars, strict=False)]
        env: dict[Any, int] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*known, *operands], strict=True))

        return followed(jaxpr, env, self._literal, self._body, self._results)

    def _results(self, eqn: jex.JaxprEqn, operands: list[int]) -> Sequence[int]:
        name = eqn.primitive.name
        if (own := _STRUCTURED.get(name)) is not None and (found := own(self, eqn, operands)) is not None:
            return found
        if is_indexing(eqn):
            eqn, operands = self._by_row(eqn, operands)
        if (meant := self.expansion(eqn)) is not None:
            return self._body(meant, operands)
        key = self._key(eqn)
        if runs_in_order(eqn):
            kind = "+".join(sorted({type(e).__name__ for e in eqn.effects})) or name
            key = key, self.scope, len(self.turns.setdefault(kind, []))
            made = self.values.node("Turn", key, tuple(operands), ((), None))
            self.turns[kind].append(made)
            return self._each(eqn, made)
        if len(eqn.outvars) == 1:
            return [self.values.make(name, key, operands, _type(eqn.outvars[0]))]
        return self._each(eqn, self.values.node(name, key, tuple(operands), ((), None)))

    def axis_counted(self, value: int) -> int | None:
        """Return the axis along which an array counts from zero, None if it is not known to count."""
        node = self.values.nodes[value]
        along = [axis for axis, step in enumerate(node.key[0]) if step] if node.op == "Grid" else []
        counts = len(along) == 1 and node.key[0][along[0]] == 1 and node.key[1] == constant(0)
        return along[0] if counts else None

    def _by_row(self, eqn: jex.JaxprEqn, operands: list[int]) -> tuple[jex.JaxprEqn, list[int]]:
        """Return a gather or scatter, and its operands, with rows as batch dimensions, see `_row_indices`."""
        node, shape = self.values.nodes[operands[1]], shaped(eqn.invars[1]).shape
        if (node.op, node.key) != ("concatenate", len(shape) - 1) or len(node.operands) != shape[-1]:
            return eqn, operands
        if (found := by_row(eqn, list(map(self.axis_counted, node.operands)))) is None:
            return eqn, operands
        params, column = found
        indices = _compat.new_var(eqn.invars[1].aval.update(shape=(*shape[:-1], 1)))
        invars = [eqn.invars[0], indices, *eqn.invars[2:]]
        return eqn.replace(invars=invars, params=params), [operands[0], node.operands[column], *operands[2:]]

    def _each(self, eqn: jex.JaxprEqn, made: int) -> list[int]:
        return [self.values.node("Result", i, (made,), _type(v)) for i, v in enumerate(eqn.outvars)]

    def _literal(self, atom: jex.Literal) -> int:
        kind = _type(atom)
        value = np.asarray(atom.val, kind[1])
        if not kind[0] and np.issubdtype(kind[1], np.integer):
            return grid(self.values, kind, (), constant(int(value)))
        return self.values.node("Literal", (value.tobytes(),), (), kind)

    def _constant(self, const: object, var: jex.Var) -> int:
        if id(const) not in self._constants:
            made = self.values.node("Constant", id(const), (), _type(var))
            self._constants[id(const)] = const, made
        return self._constants[id(const)][1]

    def _key(self, eqn: jex.JaxprEqn) -> Any:
        """Return the parameters that distinguish an equation's operation from others of that name."""
        name, params = eqn.primitive.name, eqn.params
        if (own := KEYS.get(name)) is not None:
            return own(params)
        if (known := self._keys.get(id(params))) is None:
            named = {k: v for k, v in params.items() if k not in _OF_TYPES}
            known = params, self._hashable(named), len(self.values.nodes)
            self._keys[id(params)] = known
        ctx, own = eqn.ctx, (eqn.primitive, *known[1])
        if name.startswith("reduce_") and "axes" in params:
            return name, tuple(params["axes"]), own
        return (
            name,
            own,
            getattr(ctx, "threefry_partitionable", None),
            getattr(ctx, "compute_type", None),
        )

    def _hashable(self, value: Any) -> tuple[Any, ...]:
        """Return a hashable stand-in for parameters that also distinguishes types: `1`, `1.0` and `True` differ."""
        if isinstance(value, dict):
            return type(value), *(
                (k, self._hashable(v)) for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))
            )
        if isinstance(value, (tuple, list)):
            return type(value), *map(self._hashable, value)
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            return "body", *self._opaque(value)
        if isinstance(value, np.ndarray):
            return "array", value.dtype, value.shape, value.tobytes()
        try:
            hash(value)
        except TypeError:
            self._kept.append(value)
            return "id", id(value)
        return type(value), value

    def _opaque(self, closed: jex.ClosedJaxpr) -> tuple[Any, ...]:
        """Return the numbers of a body with arguments of its own."""
        jaxpr = _compat.opened(closed)[0]
        own, self.turns = self.turns, {}
        lengths, self.values.lengths = self.values.lengths, []
        self.bodies += 1
        variables = jaxpr.invars if hasattr(closed, "jaxpr") else [*jaxpr.constvars, *jaxpr.invars]
        given = [
            self.values.node("Argument", (self.bodies, i), (), _type(v)) for i, v in enumerate(variables)
        ]
        results = self._body(closed, given)
        found = tuple(map(_type, variables)), tuple(results), *((k, *v) for k, v in self.turns.items())
        self.bodies -= 1
        self.turns, self.values.lengths = own, lengths
        return found

    @contextmanager
    def _inside(self, *scope: Any) -> Iterator[dict[str, list[int]]]:
        """Number a body's equations in this context; it yields those that run in order."""
        own, around = self.turns, self.scope
        self.turns, self.scope = {}, (*around, len(own.get("body", ())), *scope)
        yield self.turns
        self.turns, self.scope = own, around

    def _turn_of(
        self, key: tuple[object, ...], turns: Sequence[dict[str, list[int]]], operands: Sequence[int]
    ) -> None:
        """Record that a loop or a choice runs in order if its bodies contain equations that do."""
        if any(turns):
            kinds = tuple(tuple((k, len(v)) for k, v in each.items()) for each in turns)
            inside = [a for each in turns for v in each.values() for a in v]
            made = self.values.node("Turn", (*key, kinds), (*operands, *inside), ((), None))
            self.turns.setdefault("body", []).append(made)

    def _scan(self, eqn: jex.JaxprEqn, operands: list[int]) -> list[int]:
        length, backward, values = eqn.params["length"], eqn.params["reverse"], self.values
        counts = _compat.scan_counts(eqn)
        consts, begin, arrays = (
            operands[: counts[0]],
            operands[counts[0] : sum(counts)],
            operands[sum(counts) :],
        )
        if length == 0:
            return [*begin, *(values.make("Empty", None, (), _type(v)) for v in eqn.outvars[len(begin) :])]
        body, symbol = eqn.params["jaxpr"], len(values.lengths)
        meant = self._of_chunks(eqn, operands, symbol)
        unstacked = meant is not None and len(meant[1]) == sum(counts)  # stacks are read as something else
        self.meant.setdefault(id(eqn), []).append(meant[0] if meant and unstacked else None)
        if meant is not None:
            return self._body(*meant)
        if length == 1 and not runs_in_order(eqn):
            rows = [values.row(a, constant(0)) for a in arrays]
            made = self._body(body, [*consts, *begin, *rows])
            whole = zip(made[counts[1] :], eqn.outvars[counts[1] :], strict=True)
            step = -1 if backward else 1
            lasts = (once_more(values, a, b, step) for a, b in zip(begin, made, strict=False))
            return [*lasts, *(values.make("reshape", None, [a], _type(v)) for a, v in whole)]
        values.lengths.append(length)
        rows = [values.row(a, alone(symbol)) for a in arrays]
        with self._carried(begin) as holes, self._inside() as turns:
            made = self._body(body, [*consts, *holes, *rows])
        inside = [a for each in turns.values() for a in each]
        after, results = made[: len(begin)], [*made[len(begin) :], *inside]
        loop = Carries(values, symbol, length, holes, begin, after, results, backward=backward)
        loop.resolve()
        lasts = list(map(loop.last, holes))
        values.lengths.pop()
        stacks = zip(loop.results, eqn.outvars[len(begin) :], strict=False)
        stacked = [values.make("Stack", (symbol,), [a], _type(v)) for a, v in stacks]
        if turns:
            done = iter(loop.results[len(stacked) :])
            filled = {kind: [next(done) for _ in each] for kind, each in turns.items()}
            self._turn_of(("scan", symbol, length, backward), [filled], ())
        return [*lasts, *stacked]

    def _of_chunks(
        self, eqn: jex.JaxprEqn, operands: list[int], symbol: int
    ) -> tuple[jex.ClosedJaxpr, list[int]] | None:
        """Return the equations that compute all rows at once in place of a loop over chunks, with their operands, if it
        is such a loop.
        """
        length, count, values = eqn.params["length"], sum(_compat.scan_counts(eqn)), self.values
        given, arrays = operands[:count], operands[count:]
        if length < 2 or not any(values.nodes[a].op == "Grid" for a in arrays):
            return None
        values.lengths.append(length)
        scanned = [
            values.row(a, alone(symbol)) if values.nodes[a].op == "Grid" else all_rows(values, a, length)
            for a in arrays
        ]
        known = [each for each in scanned if each is not None]
        places = Places(
            self._results,
            self._literal,
            partial(scalar, values),
            lambda a: values.nodes[a].op == "Grid",
            self._is_all,
            symbol,
            self._of_all,
            self._places,
            self._inside_of,
            self._is_known,
            self._sizes,
        )
        found = of_all_rows(eqn, given, known, places) if len(known) == len(scanned) else None
        if found is None and any(map(is_in_chunks, inner_eqns(eqn))):
            other = eqn.replace(params={**eqn.params, "jaxpr": self._without_chunks(eqn, operands, symbol)})
            found = of_all_rows(other, given, known, places) if len(known) == len(scanned) else None
        values.lengths.pop()
        rows = [each.number for each in known if isinstance(each, AllRows)]
        return None if found is None else (found, [*given, *rows])

    def _without_chunks(self, eqn: jex.JaxprEqn, operands: list[int], symbol: int) -> jex.ClosedJaxpr:
        """Return a loop's body with loops over chunks replaced by equations that compute all rows at once."""
        consts, carries = _compat.scan_counts(eqn)
        rows = [self.values.row(a, alone(symbol)) for a in operands[consts + carries :]]
        around, self.meant = self.meant, {}
        with self._carried(operands[consts : consts + carries]) as holes, self._inside():
            self._body(eqn.params["jaxpr"], [*operands[:consts], *holes, *rows])
        meant, self.meant = self.meant, around
        eqns: list[jex.JaxprEqn] = []
        fixed: list[tuple[Any, Any]] = []

        def body(closed: _compat.AnyJaxpr, atoms: Sequence[Atom]) -> list[Any]:
            jaxpr, own = _compat.opened(closed)
            known = [v for v, _ in zip(jaxpr.constvars, own, strict=False)]  # others are operands
            fixed.extend(zip(known, own, strict=True))
            env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*known, *atoms), strict=True))
            return followed(jaxpr, env, lambda a: a, body, made)

        def made(inner: jex.JaxprEqn, atoms: list[Any]) -> list[Any]:
            if found := meant.get(id(inner), [None]).pop(0):
                return body(found, atoms[: sum(_compat.scan_counts(inner))])
            outvars = [_compat.new_var(v.aval) for v in inner.outvars]
            eqns.append(inner.replace(invars=atoms, outvars=outvars))
            return outvars

        invars = [_compat.new_var(v.aval) for v in _compat.opened(eqn.params["jaxpr"])[0].invars]
        results = body(eqn.params["jaxpr"], invars)
        known = dict(fixed)
        return _compat.new_jaxpr([*known], [*known.values()], invars, results, eqns)

    def _places(self, value: int) -> Affine | None:
        """Return the first entry of a column of indices that counts."""
        node = self.values.nodes[value]
        return (
            node.key[1]
            if node.op == "Grid" and node.key[0][:1] == (1,) and node.type[0][1:] == (1,)
            else None
        )

    def _inside_of(self, value: int) -> Inside | None:
        """Return the limits of a mask of counting indices, None for other masks."""
        node = self.values.nodes[value]
        if node.op == "and":
            first, second = (self._inside_of(a) for a in node.operands)
            if first is None or second is None or first[:2] != second[:2] or second.least is not None:
                return None
            return second._replace(least=first.least) if first.below is None else None
        if node.op not in ("ge", "lt"):
            return None
        index, limit = (self.values.nodes[a] for a in node.operands)
        if index.op != "Grid" or limit.op != "Grid" or any(limit.key[0]) or limit.key[1][0]:
            return None
        along = [d for d, step in enumerate(index.key[0]) if step]
        if len(along) != 1 or index.key[0][along[0]] != 1:
            return None
        found = Inside(along[0], index.key[1])
        number = limit.key[1][1]
        return found._replace(least=number) if node.op == "ge" else found._replace(below=number)

    def _is_known(self, eqn: jex.JaxprEqn, operands: list[int]) -> bool:
        """Return whether the program already has such results."""
        mark = self.values.mark
        found = self._of_all(eqn, operands)
        self.forget(mark)
        return all(a < mark[0] for a in found)

    def _of_all(self, eqn: jex.JaxprEqn, operands: list[int]) -> Sequence[int]:
        """Return an equation's results outside of the innermost surrounding loop."""
        around, self.values.lengths = self.values.lengths, self.values.lengths[:-1]
        found = self._results(eqn, operands)
        self.values.lengths = around
        return found

    def _sizes(self, eqn: jex.JaxprEqn, axis: int) -> set[tuple[int, int | None]]:
        """Return the sizes that known values of an otherwise equal type have along an axis. For pads, whose width
        nothing else bounds, only results of pads count, each with its padding in front.
        """
        name, (shape, dtype) = eqn.primitive.name, _type(eqn.outvars[0])
        found, others = set[tuple[int, int | None]](), (*shape[:axis], *shape[axis + 1 :])
        for node in self.values.nodes:
            own, kind = node.type
            if kind == dtype and len(own) == len(shape) and (*own[:axis], *own[axis + 1 :]) == others:
                if name != "pad":
                    found.add((own[axis], None))
                elif node.op == "pad":
                    found.add((own[axis], node.key[axis][0]))
        return found

    def _is_all(self, value: int, number: int) -> bool:
        node = self.values.nodes[value]
        if node.op in ("broadcast_in_dim", "convert_element_type", "reshape"):
            return self._is_all(node.operands[0], number)
        if node.op == "Literal":
            return node.key[0] == np.asarray(number, node.type[1]).tobytes()
        return node.op == "Grid" and not any(node.key[0]) and node.key[1] == constant(number)

    def _while(self, eqn: jex.JaxprEqn, operands: list[int]) -> list[int]:
        params, values = eqn.params, self.values
        first, second = params["cond_nconsts"], params["body_nconsts"]
        begin, symbol = operands[first + second :], len(values.lengths)
        values.lengths.append(None)
        with self._carried(begin) as holes:
            with self._inside("goes on") as early:
                (goes_on,) = self._body(params["cond_jaxpr"], [*operands[:first], *holes])
            with self._inside("iteration") as turns:
                after = self._body(params["body_jaxpr"], [*operands[first : first + second], *holes])
        inside = [a for each in (early, turns) for v in each.values() for a in v]
        loop = Carries(values, symbol, None, holes, begin, after, [goes_on, *inside])
        loop.resolve()
        values.lengths.pop()
        goes_on, *inside = loop.results
        done = iter(inside)
        filled = [{kind: [next(done) for _ in v] for kind, v in each.items()} for each in (early, turns)]
        self._turn_of(("while", symbol), filled, [goes_on])
        found = []
        for h in holes:
            value = loop.known[h]
            varies = values.free[value] & symbol_bit(symbol)
            found.append(
                values.make("Until", (symbol,), [goes_on, value], values.type(h)) if varies else value
            )
        return found

    @contextmanager
    def _carried(self, begin: Sequence[int]) -> Iterator[list[int]]:
        own = range(self.holes, self.holes + len(begin))
        self.holes += len(begin)
        yield [self.values.node("Hole", i, (), self.values.type(a)) for i, a in zip(own, begin, strict=True)]
        self.holes -= len(begin)

    def _cond(self, eqn: jex.JaxprEqn, operands: list[int]) -> list[int]:
        index, *given = operands
        branches = eqn.params["branches"]
        node = self.values.nodes[index]
        if node.op == "Grid" and not node.key[1][0]:
            return self._body(branches[min(max(node.key[1][1], 0), len(branches) - 1)], given)
        made, turns = [], []
        for i, branch in enumerate(branches):
            with self._inside(i) as own:
                made.append(self._body(branch, given))
            turns.append(own)
        self._turn_of(("cond",), turns, [index])
        return [
            ways[0] if len(set(ways)) == 1 else self.values.node("cond", None, (index, *ways), _type(v))
            for v, *ways in zip(eqn.outvars, *made, strict=True)
        ]

    def _shard_map(self, eqn: jex.JaxprEqn, operands: list[int]) -> list[int]:
        params, values = eqn.params, self.values
        jaxpr = params["jaxpr"]
        mesh = params["mesh"], params.get("manual_axes")
        given = [
            values.node("Sharded", (mesh, spec), (a,), _type(v))
            for a, v, spec in zip(operands, _compat.opened(jaxpr)[0].invars, params["in_specs"], strict=True)
        ]
        given = [self._same(a, "Gathered") for a in given]
        made = self._body(jaxpr, given)
        return [
            self._same(values.node("Gathered", (mesh, spec), (a,), _type(v)), "Sharded")
            for a, v, spec in zip(made, eqn.outvars, params["out_specs"], strict=True)
        ]

    def _same(self, value: int, undone: str) -> int:
        """Return the original value for one that was divided among devices and reassembled, or the reverse."""
        node = self.values.nodes[value]
        inner = self.values.nodes[node.operands[0]]
        return inner.operands[0] if inner.op == undone and inner.key == node.key else value

    def _split(self, eqn: jex.JaxprEqn, operands: list[int]) -> list[int]:
        axis, start, found = eqn.params["axis"], 0, []
        shape = self.values.type(operands[0])[0]
        for v in eqn.outvars:
            size = shaped(v).shape[axis]
            begin = tuple(start if i == axis else 0 for i in range(len(shape)))
            end = tuple(start + size if i == axis else n for i, n in enumerate(shape))
            found.append(self.values.make("slice", (begin, end, (1,) * len(shape)), operands, _type(v)))
            start += size
        return found

    def _platform(self, eqn: jex.JaxprEqn, operands: list[int]) -> list[int] | None:
        index = index_on_every_platform(eqn)
        return None if index is None else [grid(self.values, _type(eqn.outvars[0]), (), constant(index))]

    def compared(self, first: int, second: int) -> str:
        """Return the operations in which two values differ, starting from their results."""
        nodes, path = self.values.nodes, []
        while True:
            one, two = nodes[first], nodes[second]
            path.append(one.op)
            pairs = list(zip(one.operands, two.operands, strict=False))
            other = [(a, b) for a, b in pairs if a != b]
            if one.op != two.op or one.key != two.key or len(one.operands) != len(two.operands) or not other:
                return " of ".join(path[-8:]) + f": {_said(one)} for {_said(two)}"
            first, second = other[0]


def _said(node: Node) -> str:
    return f"{node.op} {str(node.key)[:160]} {node.type[0]}"


_STRUCTURED: dict[str, Callable[[_Numbers, Any, list[int]], Sequence[int] | None]] = {
    "scan": _Numbers._scan,
    "while": _Numbers._while,
    "cond": _Numbers._cond,
    "shard_map": _Numbers._shard_map,
    "split": _Numbers._split,
    "platform_index": _Numbers._platform,
}


def _type(atom: Atom) -> Type:
    aval = atom.aval
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None) or str(aval)
