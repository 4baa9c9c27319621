"""Flat step with both passes within one `shard_map` -> the program of one device, and the program around it.

The program of one device is planned like a step on one device: its types have the sizes that one device has. The
program around it, such as an optimizer's update, stays unchanged.

Invariant: with a body that computes the same as the old one, `Around.step` computes the same as the step.

Flat program -> the same with a forward `shard_map` and the backward one that reads its results merged into one.

A gradient taken outside a `shard_map` leaves such a pair. Equations between the two move before the pair if they read
no result of the first, else behind it; arithmetic on scalars that are the same on all devices moves inside.

Invariant: the merged program computes the same, and each device computes and sends the same.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
from jax.sharding import PartitionSpec

from .._program import _compat
from .._program._compat import Atom, Aval, shaped
from .._program._flops import eqn_flops
from .._program._inline import Inliner
from .._program._primitives import inner_jaxprs, is_backward, is_pointwise, runs_once
from .._runtime._mechanisms import mechanism

_VARYING = frozenset({"pvary", "pcast"})
"""Primitives that declare that a value may differ between devices."""

_INVARIANT = {"psum_invariant": jax.lax.psum_p}
"""Primitives whose results no longer differ between devices, and their replacements without such checks."""

_CHECKED_ALONE = re.compile("invariant|reduced|^shard_map$")
"""Other primitives that exist only with such checks."""


@dataclass(frozen=True)
class Around:
    """A program with one of its equations, a `shard_map`.

    **Fields:** `flat` the program; `at` the index of the equation.
    """

    flat: jex.ClosedJaxpr
    at: int

    @classmethod
    @mechanism("steps within a shard_map", off=lambda *_, **__: None)
    def of(cls, closed: jex.ClosedJaxpr, *, respect_checkpoint: bool) -> "Around | None":
        """Return the `shard_map` that does most of the work, if it contains both passes and nothing outside is
        backward.

        If each pass is a separate `shard_map`, the two are merged first.
        """
        if "shard_map" not in _names(closed.jaxpr):
            return None
        flat = Inliner(respect_checkpoint=respect_checkpoint).program(closed)
        candidates = chain((flat,), merged_shard_maps(flat))
        return next(filter(None, map(cls._in, candidates)), None)

    @classmethod
    def _in(cls, flat: jex.ClosedJaxpr) -> "Around | None":
        """Return the equation, in a program that is used unchanged."""
        eqns = flat.jaxpr.eqns
        at = max(range(len(eqns)), key=lambda i: eqn_flops(eqns[i]), default=0)
        if (
            not eqns
            or eqns[at].primitive.name != "shard_map"
            or any(is_backward(e) for e in eqns if e is not eqns[at] and not is_of_scalars(e))
        ):
            return None
        found = cls(_with_unchecked(flat, at), at)
        inside = Inliner().program(found.body).jaxpr.eqns
        return found if any(map(is_backward, inside)) else None

    @property
    def body(self) -> jex.ClosedJaxpr:
        """The program of one device."""
        return jex.ClosedJaxpr(self._eqn.params["jaxpr"], ())

    def donated(self, donated: Sequence[bool]) -> tuple[bool, ...]:
        """Return which arguments of the body may be overwritten, given those of the program: arguments with no other
        reader.
        """
        jaxpr = self.flat.jaxpr
        readers = Counter(a for eqn in jaxpr.eqns for a in _compat.variables(eqn.invars))
        readers.update(_compat.variables(jaxpr.outvars))
        kept = {v for v, given in zip(jaxpr.invars, donated, strict=True) if not given} | {*jaxpr.constvars}
        return tuple(
            not _compat.is_literal(a) and readers[a] == 1 and a not in kept for a in self._eqn.invars
        )

    def step(self, body: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """Return the program with another body."""
        own = self.flat.jaxpr
        consts = [_compat.new_var(v.aval) for v in body.jaxpr.constvars]
        eqn = self._mapped(body, [*consts, *self._eqn.invars], self._eqn.params["in_specs"])
        eqns = [*own.eqns[: self.at], eqn.replace(outvars=self._eqn.outvars), *own.eqns[self.at + 1 :]]
        return _compat.new_jaxpr(
            [*own.constvars, *consts], [*self.flat.consts, *body.consts], own.invars, own.outvars, eqns
        )

    def alone(self, part: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """Return a part of the body as a separate program, which every device runs on its own arrays."""
        invars = [_compat.new_var(_compat.unvaried(v.aval)) for v in part.jaxpr.invars]
        consts = [_compat.new_var(v.aval) for v in part.jaxpr.constvars]
        outvars = [_compat.new_var(_compat.unvaried(v.aval)) for v in part.jaxpr.outvars]
        everywhere = (PartitionSpec(),)
        eqn = self._mapped(part, [*consts, *invars], everywhere * len(invars))
        params = {**eqn.params, "out_specs": everywhere * len(outvars), "check_vma": False}
        return _compat.new_jaxpr(
            consts, part.consts, invars, outvars, [eqn.replace(outvars=outvars, params=params)]
        )

    @property
    def words(self) -> str:
        """The text that identifies it."""
        own, empty = self.flat.jaxpr, _compat.new_jaxpr((), (), (), (), ()).jaxpr
        eqns = [*own.eqns]
        eqns[self.at] = self._eqn.replace(params={**self._eqn.params, "jaxpr": empty})
        return str(_compat.new_jaxpr(own.constvars, self.flat.consts, own.invars, own.outvars, eqns).jaxpr)

    @property
    def _eqn(self) -> jex.JaxprEqn:
        return self.flat.jaxpr.eqns[self.at]

    def _mapped(
        self, body: jex.ClosedJaxpr, operands: Sequence[Atom], specs: Sequence[jax.sharding.PartitionSpec]
    ) -> jex.JaxprEqn:
        """Return the equation with another body, whose constants are its first operands."""
        jaxpr = body.jaxpr
        opened = _compat.new_jaxpr((), (), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns).jaxpr
        whole = (PartitionSpec(),) * len(jaxpr.constvars)
        params = {**self._eqn.params, "jaxpr": opened, "in_specs": (*whole, *specs)}
        return self._eqn.replace(invars=[*operands], params=params)


def _with_unchecked(flat: jex.ClosedJaxpr, at: int) -> jex.ClosedJaxpr:
    """Return the program with a `shard_map` that does not check which values differ between devices. They were checked
    when it was traced, and equations such as sums of gradients are already in the body. Without the checks it can be
    rewritten like any program of one device.
    """
    own, eqn = flat.jaxpr, flat.jaxpr.eqns[at]
    if any(_CHECKED_ALONE.search(name) and name not in _INVARIANT for name in _names(eqn.params["jaxpr"])):
        return flat
    params = {**eqn.params, "jaxpr": _unchecked(eqn.params["jaxpr"]), "check_vma": False}
    eqns = [*own.eqns[:at], eqn.replace(params=params), *own.eqns[at + 1 :]]
    return _compat.new_jaxpr(own.constvars, flat.consts, own.invars, own.outvars, eqns)


def _unchecked(jaxpr: jex.Jaxpr) -> Any:
    """Return the equations without types that record which values differ between devices."""
    if not any(map(_compat.varying_axes, _variables(jaxpr))):
        return jaxpr
    env: dict[Any, Any] = {}

    def named(variables: Sequence[jex.Var]) -> list[Any]:
        env.update((v, _compat.new_var(_compat.unvaried(v.aval))) for v in variables)
        return [env[v] for v in variables]

    def read(atoms: Sequence[Atom]) -> list[Any]:
        return [a if _compat.is_literal(a) else env[a] for a in atoms]

    def inner(param: object) -> Any:
        if isinstance(param, (tuple, list)):
            return type(param)(map(inner, param)) if any(hasattr(p, "jaxpr") for p in param) else param
        if isinstance(param, jex.ClosedJaxpr):
            return jex.ClosedJaxpr(_unchecked(param.jaxpr), param.consts)
        return _unchecked(param) if isinstance(param, jex.Jaxpr) else param

    constvars, invars = named(jaxpr.constvars), named(jaxpr.invars)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        operands = read(eqn.invars)
        # Without checks, such a declaration is the identity.
        if eqn.primitive.name in _VARYING:
            env.update(zip(eqn.outvars, operands, strict=True))
            continue
        params = {name: inner(param) for name, param in eqn.params.items()}
        if (unchecked := _INVARIANT.get(eqn.primitive.name)) is not None:
            eqn, params = eqn.replace(primitive=unchecked), {**params, "axis_index_groups": None}
        eqns.append(eqn.replace(invars=operands, outvars=named(eqn.outvars), params=params))
    return jaxpr.replace(constvars=constvars, invars=invars, outvars=read(jaxpr.outvars), eqns=eqns)


def _names(jaxpr: jex.Jaxpr) -> Iterator[str]:
    """Yield the primitives of the equations, including inner ones."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        yield from chain.from_iterable(map(_names, inner_jaxprs(eqn)))


def _variables(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Yield all variables of the equations, including inner ones."""
    yield from (*jaxpr.constvars, *jaxpr.invars)
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        yield from chain.from_iterable(map(_variables, inner_jaxprs(eqn)))


if TYPE_CHECKING:
    from typing_extensions import TypeIs

_OWN = frozenset({"jaxpr", "in_specs", "out_specs"})


def merged_shard_maps(flat: jex.ClosedJaxpr) -> Iterator[jex.ClosedJaxpr]:
    """Yield the program with one pair merged, for each pair that can be."""
    eqns = flat.jaxpr.eqns
    mapped = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "shard_map"]
    for first, second in combinations(mapped, 2):
        if is_backward(eqns[first]) or not is_backward(eqns[second]):
            continue
        if (found := _merged(flat.jaxpr, first, second)) is not None:
            own = flat.jaxpr
            yield _compat.new_jaxpr(own.constvars, flat.consts, own.invars, own.outvars, found)


def _merged(jaxpr: jex.Jaxpr, first: int, second: int) -> list[Any] | None:
    """Return the equations with two of them merged."""
    eqns = jaxpr.eqns
    one, other = eqns[first], eqns[second]
    # Merging reorders equations, but those that run once must keep their order.
    if _common(one) != _common(other) or any(map(runs_once, eqns[first : second + 1])):
        return None
    before, inside, behind = _between(eqns[first + 1 : second], one, other)
    results = dict(zip(one.outvars, one.params["out_specs"], strict=True))
    if not all(is_pointwise(eqn) and is_of_scalars(eqn) for eqn in inside):
        return None
    body = _Body()
    made = body.of(one)
    values: dict[Any, Any] = dict(zip(one.outvars, made, strict=True))
    for eqn in inside:
        if any(results.get(a, PartitionSpec()) != PartitionSpec() for a in _compat.variables(eqn.invars)):
            return None
        operands = [
            values[a] if _is_in(a, values) else body.operand(a, PartitionSpec(), a.aval) for a in eqn.invars
        ]
        values.update(zip(eqn.outvars, body.append(eqn, operands), strict=True))
        results.update(dict.fromkeys(eqn.outvars, PartitionSpec()))
    known: dict[int, Any] = {}
    for k, (atom, spec) in enumerate(zip(other.invars, other.params["in_specs"], strict=True)):
        if not _is_in(atom, values):
            continue
        wanted = other.params["jaxpr"].invars[k].aval
        if results[atom] != spec or values[atom].aval.shape != wanted.shape:
            return None
        if _compat.varying_axes(values[atom]) != _compat.varying_axes(other.params["jaxpr"].invars[k]):
            return None
        known[k] = values[atom]
    made_late = body.of(other, known)
    rest = [*eqns[:first], *before, *behind, *eqns[second + 1 :]]
    read = {a for eqn in rest for a in _compat.variables(eqn.invars)} | {*_compat.variables(jaxpr.outvars)}
    given = [v for v in values if v in read]
    eqn = one.replace(
        invars=body.atoms,
        outvars=[*given, *other.outvars],
        params={
            **one.params,
            "jaxpr": _compat.new_jaxpr(
                (), (), body.invars, [*(values[v] for v in given), *made_late], body.eqns
            ).jaxpr,
            "in_specs": tuple(body.specs),
            "out_specs": (*(results[v] for v in given), *other.params["out_specs"]),
        },
    )
    return [*eqns[:first], *before, eqn, *behind, *eqns[second + 1 :]]


class _Body:
    """The merged body while it is built.

    **Fields:** `atoms` its operands, `specs` their partitioning, `invars` their variables in the body; `eqns`.
    """

    def __init__(self) -> None:
        self.atoms: list[Any] = []
        self.specs: list[Any] = []
        self.invars: list[Any] = []
        self.eqns: list[Any] = []

    def operand(self, atom: Atom, spec: jax.sharding.PartitionSpec, aval: Aval) -> Atom:
        """Return the body's variable for an operand: one for all readers with the same partitioning."""
        if _compat.is_literal(atom) and not shaped(atom).shape and spec == PartitionSpec():
            return atom
        for known, own, var in zip(self.atoms, self.specs, self.invars, strict=True):
            if known is atom and own == spec:
                return var
        self.atoms.append(atom)
        self.specs.append(spec)
        self.invars.append(_compat.new_var(aval))
        return self.invars[-1]

    def append(self, eqn: jex.JaxprEqn, operands: Sequence[Atom]) -> list[jex.Var]:
        """Append an equation on the body's own values; return its results."""
        outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=[*operands], outvars=outvars))
        return outvars

    def of(self, mapped: jex.JaxprEqn, known: dict[int, Atom] | None = None) -> list[Atom]:
        """Append the body of a `shard_map`, with some operands known; return its results."""
        known, jaxpr = known or {}, mapped.params["jaxpr"]
        env: dict[Any, Any] = {}
        for k, (var, atom, spec) in enumerate(
            zip(jaxpr.invars, mapped.invars, mapped.params["in_specs"], strict=True)
        ):
            env[var] = known[k] if k in known else self.operand(atom, spec, var.aval)
        for eqn in jaxpr.eqns:
            operands = [a if _compat.is_literal(a) else env[a] for a in eqn.invars]
            moved = eqn.replace(source_info=_compat.under(mapped.source_info, eqn))
            env.update(zip(eqn.outvars, self.append(moved, operands), strict=True))
        return [a if _compat.is_literal(a) else env[a] for a in jaxpr.outvars]


def _between(
    eqns: Sequence[jex.JaxprEqn], one: jex.JaxprEqn, other: jex.JaxprEqn
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the equations that read no result of the first; those of the rest that the second needs; all others."""
    reached, wanted = {*one.outvars}, {*_compat.variables(other.invars)}
    before: list[Any] = []
    reading: list[Any] = []
    for eqn in eqns:
        if reached.isdisjoint(_compat.variables(eqn.invars)):
            before.append(eqn)
        else:
            reading.append(eqn)
            reached.update(eqn.outvars)
    inside: list[Any] = []
    behind: list[Any] = []
    for eqn in reversed(reading):
        if wanted.isdisjoint(eqn.outvars):
            behind.append(eqn)
        else:
            inside.append(eqn)
            wanted.update(_compat.variables(eqn.invars))
    return before, inside[::-1], behind[::-1]


def is_of_scalars(eqn: jex.JaxprEqn) -> bool:
    """Return whether all operands and results of an equation are scalars."""
    return not any(a.aval.shape for a in [*eqn.invars, *eqn.outvars])


def _is_in(atom: Atom, values: Mapping[jex.Var, object]) -> "TypeIs[jex.Var]":
    """Return whether an atom is one of these variables."""
    return not _compat.is_literal(atom) and atom in values


def _common(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """Return the parameters that two must share to be merged: the mesh, its axes and whether they are checked."""
    return {key: value for key, value in eqn.params.items() if key not in _OWN}
