"""Flat equations -> the same with equal equations computed once, also those that loops of the backward pass repeat.

Two pure equations are equal if primitive, operands, parameters and types are. An equation that may run only once equals
no other.

A scan or a `cond` of the backward pass that repeats one of the forward pass, as under the user's own `jax.checkpoint`,
has another body, because it also returns residuals. It is *joined* to the earlier one, which then returns both sets of
results, if

- its operands are the other's, or values that the other stacks, or are computed as early, or can be recomputed from
  constants, or from values that can, within its body;
- each of its carries equals one of the other's: both have equal initial values and, assuming that they are equal at the
  start of an iteration, are equal at its end;
- it adds no contraction to the other's body.

Invariant: every variable keeps its value, and no contraction is computed more often than before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core as jex
import numpy as np

from . import _compat
from ._compat import Atom, SourceInfo
from ._inline import Inliner
from ._primitives import (
    is_barrier,
    is_contraction,
    is_fusion_root,
    is_light,
    is_loop_edge,
    is_loop_slice,
    runs_once,
)
from ._splice import inlined


@dataclass
class Equals:
    """Merges equal equations, which are added in execution order. **Fields:** `eqns` the remaining equations; `scopes`
    of each; `merged_of` for each added equation the index of the one that now computes it.
    """

    inliner: Inliner
    eqns: list[Any] = field(default_factory=list)
    scopes: list[int] = field(default_factory=list)
    merged_of: list[int] = field(default_factory=list)
    _rename: dict[Any, Any] = field(default_factory=dict)
    _seen: dict[Any, tuple[int, Sequence[Any]]] = field(default_factory=dict)
    _maker: dict[Any, int] = field(default_factory=dict)
    _joinable: dict[tuple[Any, int], list[int]] = field(
        default_factory=dict
    )  # of the forward pass, by kind and scope
    # of variables that are made of constants alone: the equation, and the first variable of the same, of any scope;
    # of names what they are names of
    _constants: dict[Any, Any] = field(default_factory=dict)
    _alike: dict[Any, Any] = field(default_factory=dict)
    _firsts: dict[Any, Sequence[Any]] = field(
        default_factory=dict
    )  # what makes such equations equal -> results

    def read(self, atom: Atom) -> Atom:
        """Return the present name of an operand or a result."""
        return atom if _compat.is_literal(atom) else self._rename.get(atom, atom)

    def add(self, eqn: jex.JaxprEqn, scope: int = -1, in_backward: bool | None = None) -> None:
        """Add the next equation. **Arguments:** `scope` within which equals are merged; `in_backward` whether it
        belongs to the backward pass, by default as its name stack says.
        """
        once = runs_once(eqn)
        joins = eqn.primitive.name in _JOINED and not once
        if joins and in_backward is None:
            in_backward = "transpose(" in _compat.name_stack_text(eqn)
        invars = [self.read(a) for a in eqn.invars]
        edge = is_loop_edge(eqn) and not is_loop_slice(eqn)
        pure = not once and not is_barrier(eqn) and not edge
        if eqn.primitive.name == "name":  # what a checkpoint computes again under `jax_remat3` has no names
            self._alike[eqn.outvars[0]] = self.first(invars[0])
        key = _key(eqn, list(map(self.first, invars))) if pure else None
        twin = None
        if key is not None and (key, scope) in self._seen:
            twin, results = self._seen[key, scope]
            self._rename.update(zip(eqn.outvars, results, strict=True))
        elif joins and in_backward:
            twin = self._join(eqn.replace(invars=invars), scope)
        if twin is None:
            twin = len(self.eqns)
            self.eqns.append(eqn.replace(invars=invars))
            self.scopes.append(scope)
            if joins and not in_backward:
                self._joinable.setdefault((eqn.primitive, scope), []).append(twin)
            self._maker.update(dict.fromkeys(eqn.outvars, twin))
            if pure and not is_fusion_root(eqn) and all(a in self._constants for a in _variables(invars)):
                self._constants.update(dict.fromkeys(eqn.outvars, self.eqns[twin]))
                if key is not None:
                    firsts = self._firsts.setdefault(key, eqn.outvars)
                    self._alike.update(zip(eqn.outvars, firsts, strict=True))
            if key is not None:
                self._seen[key, scope] = twin, eqn.outvars  # others may join it, with more results
        self.merged_of.append(twin)

    def value(self, atom: Atom) -> Atom:
        """Return a key that is equal for equal operands in any scope: the name, or for constants the way they are
        computed.
        """
        return _atom(self.first(atom))

    def first(self, atom: Atom) -> Atom:
        """Return the first variable that is computed from the same constants in the same way; other variables are
        returned unchanged.
        """
        return atom if _compat.is_literal(atom) else self._alike.get(atom, atom)

    def body(
        self,
        closed: jex.ClosedJaxpr,
        operands: Sequence[Atom],
        info: SourceInfo,
        into: list[jex.JaxprEqn],
        at: int | None = None,
    ) -> list[Any]:
        """Return as `Inliner.body`, with operands that depend on constants alone recomputed.

        **Arguments:** `at` the index of an equation: cheap operands that are computed after it are recomputed, too.
        """
        made: dict[Any, Any] = {}

        def maker(atom: Atom) -> Any | None:
            if _compat.is_literal(atom):
                return None
            if atom not in self._constants and at is not None and self._maker.get(atom, -1) > at:
                eqn = self.eqns[self._maker[atom]]
                return eqn if is_light(eqn) and not eqn.effects and not is_loop_edge(eqn) else None
            return self._constants.get(atom)

        def anew(atom: Atom) -> Atom:
            if (eqn := maker(atom)) is None:
                return atom
            if atom not in made:
                outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
                into.append(eqn.replace(invars=list(map(anew, eqn.invars)), outvars=outvars))
                made.update(zip(eqn.outvars, outvars, strict=True))
            return made[atom]

        return self.inliner.body(closed, list(map(anew, operands)), info, into, marks=True)

    def together(self, first: Sequence[jex.JaxprEqn], second: Sequence[jex.JaxprEqn]) -> "Equals | None":
        """Return two bodies as one, None if the second adds contractions."""
        both = Equals(
            self.inliner,
            _constants=dict(self._constants),
            _alike=dict(self._alike),
            _firsts=dict(self._firsts),
        )
        for in_backward, eqns in ((False, first), (True, second)):
            for eqn in eqns:
                both.add(eqn, in_backward=in_backward)
        more = sum(map(is_contraction, both.eqns)) > sum(map(is_contraction, first))
        return None if more else both

    def _join(self, again: jex.JaxprEqn, scope: int) -> int | None:
        """Join the equation to an earlier one, and return that one's index."""
        for i in self._joinable.get((again.primitive, scope), ()):
            eqn = self.eqns[i]
            joined = _JOINED[eqn.primitive.name](eqn, again, self, i)
            if joined is not None and all(self._maker.get(a, -1) < i for a in _variables(joined.eqn.invars)):
                self.eqns[i] = joined.eqn
                self._rename.update(joined.results)
                self._maker.update(dict.fromkeys(joined.eqn.outvars, i))
                return i
        return None


@dataclass(frozen=True)
class _Joined:
    """An equation that returns the results of two, and which of its results are the second's."""

    eqn: Any
    results: Mapping[Any, Any]


def _variables(atoms: Sequence[Atom]) -> list[jex.Var]:
    return list(dict.fromkeys(a for a in atoms if not _compat.is_literal(a)))


def _extra(
    outvars: Sequence[jex.Var],
    made: Sequence[Sequence[Atom]],
    own: Sequence[jex.Var],
    own_made: Sequence[Sequence[Atom]],
) -> tuple[dict[Any, Any], dict[Any, Sequence[Any]]]:
    """Return the second equation's results in terms of the first's, and those that the first lacks, by name.

    **Arguments:** `made` for each of the first's `outvars` its key in the body, `own_made` for the second's.
    """
    known = {tuple(map(_atom, atoms)): v for v, atoms in zip(outvars, made, strict=True)}
    found: dict[Any, Any] = {}
    extra: dict[Any, Sequence[Any]] = {}
    for v, atoms in zip(own, own_made, strict=True):
        if (key := tuple(map(_atom, atoms))) in known:
            found[v] = known[key]
        else:
            known[key] = v
            extra[v] = atoms
    return found, extra


def _joined_scans(eqn: jex.JaxprEqn, again: jex.JaxprEqn, around: Equals, at: int) -> _Joined | None:
    length = eqn.params["length"]
    if any(eqn.params[name] != again.params[name] for name in ("length", "reverse")):
        return None
    consts, init, scanned = _compat.scan_operands(eqn)
    carries = [_compat.new_var(a.aval) for a in init]
    slices = {a: _slice(length, a) for a in scanned}
    first: list[Any] = []
    operands = [*consts, *carries, *(slices[a] for a in scanned)]
    results = around.body(eqn.params["jaxpr"], operands, eqn.source_info, first)
    stacked = dict(zip(eqn.outvars[len(init) :], results[len(init) :], strict=True))
    own_consts, own_init, own_scanned = _compat.scan_operands(again)
    more = {a: _slice(length, a) for a in own_scanned if a not in stacked and a not in slices}
    parts = {**more, **slices, **stacked}
    begun = [[j for j, b in enumerate(init) if around.value(a) == around.value(b)] for a in own_init]
    while all(begun):
        alike = [js[0] for js in begun]
        second: list[Any] = []
        operands = [*own_consts, *(carries[j] for j in alike), *(parts[a] for a in own_scanned)]
        own_results = around.body(again.params["jaxpr"], operands, eqn.source_info, second, at)
        if (both := around.together(first, second)) is None:
            return None
        ends, own_ends = ([both.read(a) for a in made] for made in (results, own_results))
        wrong = [i for i, j in enumerate(alike) if both.value(own_ends[i]) != both.value(ends[j])]
        if not wrong:
            break
        begun[next((i for i in wrong if len(begun[i]) > 1), wrong[0])].pop(0)
    else:
        return None
    lasts, stacks = eqn.outvars[: len(init)], eqn.outvars[len(init) :]
    found, extra = _extra(
        stacks,
        [[both.first(a)] for a in ends[len(init) :]],
        again.outvars[len(own_init) :],
        [[both.first(a)] for a in own_ends[len(own_init) :]],
    )
    found.update((v, lasts[j]) for v, j in zip(again.outvars, alike, strict=False))
    results = [*ends, *(a for (a,) in extra.values())]
    arrays = {v: a for a, v in (*slices.items(), *more.items())}
    inside = {*carries, *arrays, *(v for e in both.eqns for v in e.outvars)}
    read = _variables([*(a for e in both.eqns for a in e.invars), *results])
    outside = [a for a in read if a not in inside]
    body = _compat.new_jaxpr((), (), [*outside, *carries, *arrays], results, both.eqns)
    operands = outside, init, list(arrays.values())
    return _Joined(_compat.scan_like(eqn, body, length, operands, (lasts, [*stacks, *extra])), found)


def _slice(length: int, array: Atom) -> jex.Var:
    return _compat.new_var(jex.mapped_aval(length, 0, array.aval))


def _joined_conds(eqn: jex.JaxprEqn, again: jex.JaxprEqn, around: Equals, at: int) -> _Joined | None:
    branches = eqn.params["branches"]
    if around.value(eqn.invars[0]) != around.value(again.invars[0]) or len(branches) != len(
        again.params["branches"]
    ):
        return None
    bodies: list[Equals] = []
    ends: list[list[Any]] = []
    own_ends: list[list[Any]] = []
    for branch, own_branch in zip(branches, again.params["branches"], strict=True):
        first: list[Any] = []
        second: list[Any] = []
        results = around.body(branch, eqn.invars[1:], eqn.source_info, first)
        own_results = around.body(own_branch, again.invars[1:], eqn.source_info, second, at)
        if (both := around.together(first, second)) is None:
            return None
        bodies.append(both)
        ends.append([both.read(a) for a in results])
        own_ends.append([both.read(a) for a in own_results])
    found, extra = _extra(
        eqn.outvars, list(zip(*ends, strict=True)), again.outvars, list(zip(*own_ends, strict=True))
    )
    results = [[*own, *(atoms[i] for atoms in extra.values())] for i, own in enumerate(ends)]
    read = _variables([a for both, made in zip(bodies, results, strict=True)
                       for a in (*(a for e in both.eqns for a in e.invars), *made)])  # fmt: skip
    inside = {v for both in bodies for e in both.eqns for v in e.outvars}
    outside = [a for a in read if a not in inside]
    closed = []
    for both, made in zip(bodies, results, strict=True):
        copies = [_compat.new_var(a.aval) for a in outside]
        body = _compat.new_jaxpr((), (), outside, made, both.eqns)
        eqns, atoms = inlined(body, copies, _compat.root_source(eqn))
        closed.append(_compat.new_jaxpr((), (), copies, atoms, eqns))
    outvars = [*eqn.outvars, *extra]
    return _Joined(_compat.cond_like(eqn, closed, [eqn.invars[0], *outside], outvars), found)


_JOINED = {"scan": _joined_scans, "cond": _joined_conds}


def _atom(a: Atom) -> Any:
    """Return a key that is equal for equal operands."""
    if not _compat.is_literal(a):
        return a
    value = np.asarray(a.val)
    return (str(value.dtype), value.shape, value.tobytes(), str(a.aval))


def _key(eqn: jex.JaxprEqn, invars: Sequence[Atom]) -> Any:
    """Return a key that is equal for equal pure equations, None if parameters cannot be compared."""
    try:
        key = _like(eqn, tuple(map(_atom, invars)))
        hash(key)
    except (TypeError, ValueError):
        return None
    return key


def _like(eqn: jex.JaxprEqn, invars: Sequence[Atom]) -> tuple[object, ...]:
    params = tuple(sorted((k, _hashable(v)) for k, v in eqn.params.items()))
    return (eqn.primitive, invars, params, eqn.ctx, tuple(v.aval for v in eqn.outvars))


class _Typed(tuple):
    """A parameter with its type, ordered by name alone, so that `1`, `1.0` and `True` stay different."""

    __slots__ = ()

    def __lt__(self, other: object) -> bool:
        return False


def _hashable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return _Typed((type(value), tuple(map(_hashable, value))))
    if hasattr(getattr(value, "jaxpr", value), "eqns"):
        return _Typed((type(value), _structure(value)))
    return _Typed((type(value), value))


def _structure(closed: jex.ClosedJaxpr) -> Any:
    """Return a key that is equal for equal bodies, independent of their variables' names."""
    jaxpr, consts = _compat.opened(closed)
    place: dict[Any, int] = {}
    for v in (*jaxpr.constvars, *jaxpr.invars):
        place[v] = len(place)

    def atom(a: Atom) -> Any:
        return _atom(a) if _compat.is_literal(a) else place[a]

    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append((_like(eqn, tuple(map(atom, eqn.invars))), frozenset(eqn.effects)))
        for v in eqn.outvars:
            place[v] = len(place)
    types = tuple(v.aval for v in (*jaxpr.constvars, *jaxpr.invars))
    return types, tuple(map(id, consts)), tuple(eqns), tuple(map(atom, jaxpr.outvars))
