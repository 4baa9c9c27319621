"""Loop, conditional, or function with its own derivative -> the rule by which its work splits into rows: that of its
bodies' equations, the same in every iteration and every branch.

A row of a carry has the same position in all iterations. A sum over rows may be stacked, or be added to a carry that
starts as zeros: a part of the rows then gives a part of the sum. Within the body such a sum may only be scaled,
reshaped or converted. All rows take the same branch, and the same number of iterations; if one branch computes a sum,
the others compute one too, or zeros. The `custom_jvp` function of a part has the derivative of the whole function,
restricted to that part: rows of tangents are where those of values are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from math import gcd
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._program import _compat
from .._program._axes import OF_SUMS, BatchingRule, Parts, agree, rules
from .._program._compat import Atom, shaped
from .._program._inline import Inliner
from .._program._primitives import is_relabelling, runs_once
from .._program._splice import with_bodies

_ADDING = ("add", "add_any", "sub")
_SCALING = {"mul": ([True, False], [False, True]), "div": ([True, False],)}
_LINEAR = ("neg", "convert_element_type", "broadcast_in_dim", "reduce_sum", "copy")


@dataclass(frozen=True)
class Around:
    """The context of an equation.

    **Fields:** `dimension` of the rows of values, None for one that is read whole; `maker` returns a value's equation,
    if any; `differentiable` whether it is in a function that is differentiated later; `inner` whether within a
    derivative.
    """

    dimension: Mapping[Any, int | None]
    maker: Callable[[Any], Any]
    differentiable: bool = False
    inner: bool = False

    def is_zero(self, atom: Atom) -> bool:
        """Return whether a value is known to be zeros."""
        if _compat.is_literal(atom):
            return not shaped(atom).shape and atom.val == 0
        eqn = self.maker(atom)
        if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        return len(eqn.invars) == 1 and self.is_zero(eqn.invars[0])


@dataclass(frozen=True)
class PartBody:
    """**Fields:** a flat body, the `inner` rules of its equations, by index, and the `dimension` of rows there."""

    closed: jex.ClosedJaxpr
    inner: Mapping[int, BatchingRule]
    dimension: Mapping[Any, int]

    def of(self, parts: Parts) -> jex.ClosedJaxpr:
        """Return the body of a part."""
        rename: dict[Any, Any] = {}

        def renamed(v: jex.Var) -> Any:
            if _compat.is_literal(v):
                return v
            if v not in rename:
                shape = list(shaped(v).shape)
                if v in self.dimension:
                    shape[self.dimension[v]] = parts.of(shape[self.dimension[v]])
                rename[v] = _compat.new_var(v.aval.update(shape=tuple(shape)))
            return rename[v]

        jaxpr, eqns = self.closed.jaxpr, []
        for i, inner in enumerate(jaxpr.eqns):
            rule = self.inner.get(i)
            params = inner.params if rule is None else rule.in_chunk(inner, parts, widens=False)
            invars, outvars = list(map(renamed, inner.invars)), list(map(renamed, inner.outvars))
            eqns.append(inner.replace(invars=invars, outvars=outvars, params=params))
        constvars, invars, outvars = (
            [renamed(v) for v in each] for each in (jaxpr.constvars, jaxpr.invars, jaxpr.outvars)
        )
        return _compat.new_jaxpr(constvars, self.closed.consts, invars, outvars, eqns)


@dataclass(frozen=True)
class BodyBatchingRule(BatchingRule):
    """**Fields:** the `bodies`; `adding` which results are sums. Others without rows are the same for all rows."""

    bodies: tuple[PartBody, ...] = ()
    adding: tuple[bool, ...] = ()

    @property
    def sums(self) -> tuple[bool, ...]:
        return self.adding

    def in_chunk(self, eqn: jex.JaxprEqn, parts: Parts, *, widens: bool = True) -> dict[str, Any]:
        del widens  # sums within the body keep their type
        made = iter([body.of(parts) for body in self.bodies])
        return with_bodies(eqn, lambda _: next(made)).params


@dataclass(frozen=True)
class _FunctionBatchingRule(BodyBatchingRule):
    """**Fields:** `tangents` returns the rule of the function from values and tangents to both, or None."""

    tangents: Callable[[], BodyBatchingRule | None] = lambda: None

    def in_chunk(self, eqn: jex.JaxprEqn, parts: Parts, *, widens: bool = True) -> dict[str, Any]:
        del eqn, widens
        evaluate = jex.jaxpr_as_fun(body := self.bodies[0].of(parts))

        @jax.custom_jvp
        def part(*primals: jax.Array) -> list[Any]:
            return evaluate(*primals)

        @part.defjvp
        def _(primals: jax.Array, tangents: jax.Array) -> Any:
            if (rule := self.tangents()) is None:
                return jax.jvp(evaluate, primals, tangents)
            made = jex.jaxpr_as_fun(rule.bodies[0].of(parts))(*primals, *tangents)
            return made[: len(made) // 2], made[len(made) // 2 :]

        (made,) = jax.make_jaxpr(part)(*(v.aval for v in body.jaxpr.invars)).jaxpr.eqns
        return made.params


def has_bodies(eqn: jex.JaxprEqn) -> bool:
    """Return whether the rules of an equation depend on its context."""
    return eqn.primitive.name in _OF_BODIES


def ways(eqn: jex.JaxprEqn, around: Around) -> Iterable[BatchingRule]:
    """Return the rules of an equation; for one with bodies, the one that agrees with its context."""
    if (rule := _OF_BODIES.get(eqn.primitive.name)) is None:
        return rules(eqn)
    found = None if runs_once(eqn) else rule(eqn, around)
    return () if found is None else (found,)


def _scan_batching_rule(eqn: jex.JaxprEqn, around: Around) -> BodyBatchingRule | None:
    """Return the rule of a scan that agrees with its context, or None."""
    closed = _flat(eqn.params["jaxpr"], derivatives=around.differentiable)
    edges, begin = (eqn.invars, eqn.outvars), _compat.scan_operands(eqn)[1]
    body = _Body(closed, edges, _compat.scan_counts(eqn), begin, around)
    return body.rule() if body.settled() else None


def _while_batching_rule(eqn: jex.JaxprEqn, around: Around) -> BodyBatchingRule | None:
    """Return the rule of a loop with the same number of iterations for all rows."""
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carries = eqn.invars[first + second :]
    closed = _flat(eqn.params["body_jaxpr"], derivatives=around.differentiable)
    body = _Body(closed, (eqn.invars[first:], eqn.outvars), (second, len(carries)), carries, around)
    if not body.settled() or any(
        around.dimension.get(a) is not None for a in _compat.variables(eqn.invars[:first])
    ):
        return None
    goes_on = _flat(eqn.params["cond_jaxpr"])
    both = zip(goes_on.jaxpr.invars[first:], body.begun, strict=True)
    moved = {
        v: body.dimension.get(carry) for v, carry in both if carry in body.dimension or carry in body.sums
    }
    if any(not moved.keys().isdisjoint(_compat.variables(each.invars)) for each in goes_on.jaxpr.eqns):
        return None
    rule, dimension = body.rule(), {v: d for v, d in moved.items() if d is not None}
    operands = (*[None] * first, *rule.operands)
    return replace(rule, operands=operands, bodies=(PartBody(goes_on, {}, dimension), *rule.bodies))


def _cond_batching_rule(eqn: jex.JaxprEqn, around: Around) -> BodyBatchingRule | None:
    """Return the rule of a conditional with the same branch for all rows."""
    closed = [_flat(branch, derivatives=around.differentiable) for branch in eqn.params["branches"]]
    choice, *_ = eqn.invars
    edges = _compat.variables((*eqn.invars, *eqn.outvars))
    known = {a: around.dimension[a] for a in edges if a in around.dimension}
    if _compat.is_literal(choice) or known.setdefault(choice, None) is not None:
        return None
    if (found := _agreed(eqn, closed, known, around)) is None:
        return None
    for v in [v for v in eqn.outvars if v not in known]:
        # A result that depends on no rows, such as a mask, may still be read as rows in the backward pass.
        sizes = {(d, shaped(a).shape[d]) for a, d in _placed(eqn, found) if d is not None}
        for d, size in sizes if found.results[eqn.outvars.index(v)] is None else ():
            if shaped(v).shape[d : d + 1] == (size,):
                other = _agreed(eqn, closed, {**known, v: d}, around)
                if other is not None and other.operands == found.operands:
                    found, known = other, {**known, v: d}
    return found


def _agreed(
    eqn: jex.JaxprEqn, closed: Sequence[jex.ClosedJaxpr], known: Mapping[Any, int | None], around: Around
) -> BodyBatchingRule | None:
    """Return the rule of a conditional with these branches: operands and results have the same rows in all of them."""
    known, operands = dict(known), eqn.invars[1:]
    while True:
        inner = replace(around, dimension=known)
        edges, counts = (operands, eqn.outvars), (len(operands), 0)
        bodies = [_Body(each, edges, counts, (), inner, stacks=False) for each in closed]
        if not all(body.settled() for body in bodies):
            return None
        alone = [body.rule() for body in bodies]
        found = [replace(rule, operands=(None, *rule.operands)) for rule in alone]
        more = {a: d for rule in found for a, d in _placed(eqn, rule) if d is not None}
        if all(known.get(a) == d for a, d in more.items()):
            break
        known |= more
    adding = tuple(map(any, zip(*(rule.adding for rule in found), strict=True)))
    if not all(is_sum <= body.is_sum(k) for body in bodies for k, is_sum in enumerate(adding)):
        return None
    parts = tuple(body for rule in found for body in rule.bodies)
    return replace(found[0], groups=gcd(*(rule.groups for rule in found)), bodies=parts, adding=adding)


def _placed(eqn: jex.JaxprEqn, rule: BatchingRule) -> list[tuple[Any, int | None]]:
    both = zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True)
    return [(a, d) for a, d in both if not _compat.is_literal(a)]


def _function_batching_rule(eqn: jex.JaxprEqn, around: Around) -> _FunctionBatchingRule | None:
    """Return the rule of a `custom_jvp` function of real numbers that agrees with its context, and with its tangents;
    None if there is none, or if results are sums: a part of the function would be another function.

    Derivatives often call the function itself, which has derivatives again: their rules are computed on demand.
    """
    edges = (*eqn.invars, *eqn.outvars)
    if not all(jnp.issubdtype(shaped(a).dtype, jnp.inexact) for a in edges):
        return None
    closed = _flat(eqn.params["call_jaxpr"], derivatives=True)
    body = _Body(closed, (eqn.invars, eqn.outvars), (len(eqn.invars), 0), (), around, stacks=False)
    if not body.settled() or any((rule := body.rule()).adding):
        return None
    tangents = cache(partial(_of_tangents, eqn, rule))
    if not around.inner and tangents() is None:
        return None
    known = {each.name: getattr(rule, each.name) for each in fields(rule)}
    return _FunctionBatchingRule(**known, tangents=tangents)


def _of_tangents(eqn: jex.JaxprEqn, rule: BodyBatchingRule) -> BodyBatchingRule | None:
    """Return the rule of the function from values and tangents to both, if its rows are those of the function."""
    invars = [_compat.new_var(shaped(a)) for a in eqn.invars]
    outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
    alone = _compat.new_jaxpr((), (), invars, outvars, [eqn.replace(invars=[*invars], outvars=outvars)])

    def both(*operands: jax.Array) -> Any:
        half = len(operands) // 2
        return jax.jvp(jex.jaxpr_as_fun(alone), operands[:half], operands[half:])

    closed = _flat(jax.make_jaxpr(both)(*(v.aval for v in (*invars, *invars))), derivatives=True)
    edges, wanted = (closed.jaxpr.invars, closed.jaxpr.outvars), (2 * rule.operands, 2 * rule.results)
    placed = zip((*edges[0], *edges[1]), (*wanted[0], *wanted[1]), strict=True)
    known = {a: d for a, d in placed if not _compat.is_literal(a)}
    around = Around(known, lambda _: None, differentiable=True, inner=True)
    body = _Body(closed, edges, (len(edges[0]), 0), (), around, stacks=False)
    found = body.rule() if body.settled() else None
    alike = (
        found is not None
        and (found.operands, found.results) == wanted
        and rule.groups % (found.groups or 1) == 0
    )
    return found if alike else None


class _Body:
    """The rows and sums of a body, as far as they are known.

    **Arguments:** `edges` the operands and results of the equation with this body; `counts` of a scan's constants and
    carries, and the values with which these `begin`; `stacks` whether other operands and results are stacks outside.
    """

    def __init__(
        self,
        closed: jex.ClosedJaxpr,
        edges: tuple[Sequence[Atom], Sequence[Atom]],
        counts: tuple[int, int],
        begin: Sequence[Atom],
        around: Around,
        *,
        stacks: bool = True,
    ):
        self.around, self.closed, self.edges, self.begin, self.stacks = around, closed, edges, begin, stacks
        jaxpr = self.closed.jaxpr
        self.consts, self.carries = counts
        self.lasts = jaxpr.outvars[: self.carries]
        self.begun = jaxpr.invars[self.consts : self.consts + self.carries]
        self.dimension: dict[Any, int] = {}
        self.whole: set[Any] = set(jaxpr.constvars)
        self.sums: set[Any] = set()
        self.inner: dict[int, BatchingRule] = {}
        self.makers = {v: each for each in jaxpr.eqns for v in each.outvars}

    def settled(self) -> bool:
        """Return whether the rows and sums of all values in the body follow from the known ones."""
        if not all(map(self._found, *zip(*self._edges(), strict=True))):
            return False
        known = -1
        while known < (known := len(self.inner) + len(self.dimension) + len(self.sums)):
            for i, eqn in enumerate(self.closed.jaxpr.eqns):
                if i not in self.inner and self._touched(eqn) and not self._add(i, eqn):
                    return False
            if not all(map(self._tied, self.begun, self.lasts)):
                return False
        zeros = (a for a, v in zip(self.begin, self.begun, strict=True) if v in self.sums)
        return self._is_consistent() and all(map(self.around.is_zero, zeros))

    def rule(self) -> BodyBatchingRule:
        """Return the resulting rule."""
        jaxpr = self.closed.jaxpr
        first = self.consts + self.carries
        operands = [
            None if d is None else d + (i >= first)
            for i, d in enumerate(map(self.dimension.get, jaxpr.invars))
        ]
        results = [
            None
            if _compat.is_literal(a) or (d := self.dimension.get(a)) is None
            else d + (self.stacks and i >= self.carries)
            for i, a in enumerate(jaxpr.outvars)
        ]
        inner = {i: rule for i, rule in self.inner.items() if not rule.linear}
        adding = tuple(not _compat.is_literal(a) and a in self.sums for a in jaxpr.outvars)
        sizes = [v.aval.shape[d] for v, d in self.dimension.items()]
        return BodyBatchingRule(
            tuple(operands),
            tuple(results),
            groups=gcd(*sizes, *(rule.groups for rule in inner.values())),
            bodies=(PartBody(self.closed, inner, dict(self.dimension)),),
            adding=adding,
        )

    def is_sum(self, place: int) -> bool:
        """Return whether a result is a sum over rows; zeros are one."""
        last = self.closed.jaxpr.outvars[place]
        return (not _compat.is_literal(last) and last in self.sums) or replace(
            self.around, maker=self.makers.get
        ).is_zero(last)

    def _edges(self) -> list[tuple[Any, Any, bool]]:
        """Return operands and results of the equation, their names in the body, and whether they are stacks outside."""
        first, jaxpr = self.consts + self.carries, self.closed.jaxpr
        inner, outer = (*jaxpr.invars, *jaxpr.outvars), (*self.edges[0], *self.edges[1])
        stacks = [i >= first for i in range(len(jaxpr.invars))]
        stacks += [self.stacks and i >= self.carries for i in range(len(jaxpr.outvars))]
        return list(zip(outer, inner, stacks, strict=True))

    def _found(self, outer: Atom, inner: jex.Var, stacked: bool) -> bool:
        """Adopt the known rows of an operand or a result; return whether that is possible."""
        if _compat.is_literal(outer) or outer not in self.around.dimension:
            return True
        d = self.around.dimension[outer]
        if d is None:
            if not (inner in self.begun and self.around.is_zero(outer)):  # a sum may start as zeros
                self.whole.update(_compat.variables([inner]))
            return True
        return not (stacked and d == 0) and self._is_row(inner, d - stacked)

    def _is_row(self, atom: Atom, d: int) -> bool:
        if _compat.is_literal(atom) or atom in self.sums or atom in self.whole:
            return False
        return self.dimension.setdefault(atom, d) == d

    def _touched(self, eqn: jex.JaxprEqn) -> bool:
        atoms = _compat.variables((*eqn.invars, *eqn.outvars))
        return any(a in self.dimension or a in self.sums for a in atoms)

    def _add(self, i: int, eqn: jex.JaxprEqn) -> bool:
        """Find the way of an equation of the body."""
        if any(a in self.dimension for a in _compat.variables((*eqn.invars, *eqn.outvars))):
            return self._add_rows(i, eqn)
        return self._add_sums(i, eqn)

    def _add_rows(self, i: int, eqn: jex.JaxprEqn) -> bool:
        if any(a in self.sums for a in _compat.variables(eqn.invars)):
            return False
        known: dict[Any, int | None] = {**dict.fromkeys(self.whole), **self.dimension}
        for rule in ways(eqn, replace(self.around, dimension=known, maker=self.makers.get)):
            placed = _placed(eqn, rule)
            if all(known.get(a, d) == d for a, d in placed) and agree(placed):
                break
        else:
            return False
        self.inner[i] = rule
        self.sums.update(v for v, is_sum in zip(eqn.outvars, rule.sums, strict=True) if is_sum)
        self.dimension.update((a, d) for a, d in placed if d is not None)
        self.whole.update(a for a, d in placed if d is None and a not in self.sums)
        return True

    def _add_sums(self, i: int, eqn: jex.JaxprEqn) -> bool:
        """Return whether an equation of sums computes a sum, and add it."""
        if eqn.primitive.name in _ADDING:  # to a carry
            begun = {a for a in _compat.variables(eqn.invars) if a in self.begun}
            self.sums.update(begun - self.whole)
        if not self._is_linear(eqn):
            return False
        self.sums.update(eqn.outvars)
        self.inner[i] = OF_SUMS
        return True

    def _is_linear(self, eqn: jex.JaxprEqn) -> bool:
        """Return whether an equation computes a sum from one sum, or two, as far as is known."""
        name = eqn.primitive.name
        summed = [not _compat.is_literal(a) and a in self.sums for a in eqn.invars]
        kept = [jnp.issubdtype(shaped(v).dtype, jnp.inexact) for v in (*eqn.invars, *eqn.outvars)]
        if name in _ADDING:
            return summed == [True, True]
        if name in _SCALING:
            return summed in _SCALING[name] and all(kept)
        alike = name in _LINEAR or is_relabelling(eqn)
        return alike and summed == [True] and kept[0] <= kept[-1]  # parts rounded to integers do not add up

    def _is_consistent(self) -> bool:
        """Return whether later findings contradict no earlier ones."""
        jaxpr = self.closed.jaxpr
        others = {*jaxpr.constvars, *jaxpr.invars}.difference(self.begun)
        if not self.sums.isdisjoint(others | self.whole | self.dimension.keys()):
            return False
        return all(
            self._is_linear(eqn) if rule.linear else self.sums.isdisjoint(_compat.variables(eqn.invars))
            for i, rule in self.inner.items()
            for eqn in (jaxpr.eqns[i],)
        )

    def _tied(self, begun: jex.Var, last: Atom) -> bool:
        """Return whether a carry has the same rows at the beginning and the end of an iteration."""
        if begun in self.dimension:
            return self._is_row(last, self.dimension[begun])
        if _compat.is_literal(last):
            return begun not in self.sums
        if last in self.dimension:
            return self._is_row(begun, self.dimension[last])
        if begun in self.sums or last in self.sums:
            self.sums.update((begun, last))
            return begun not in self.whole
        return True


_OF_BODIES: dict[str, Callable[[Any, Around], BodyBatchingRule | None]] = {
    "scan": _scan_batching_rule,
    "while": _while_batching_rule,
    "cond": _cond_batching_rule,
    "custom_jvp_call": _function_batching_rule,
}


def _flat(body: jex.ClosedJaxpr, *, derivatives: bool = False) -> jex.ClosedJaxpr:
    """Return the body with calls inlined, except the user's names, and functions with their own `derivatives`."""
    inliner, eqns = Inliner(derivatives=derivatives), list[Any]()
    invars = [_compat.new_var(v.aval) for v in body.jaxpr.invars]
    results = inliner.body(body, invars, None, eqns, marks=True)
    return _compat.new_jaxpr(inliner.constvars, inliner.consts, invars, results, eqns)
