"""Flat program -> the same with a forward `shard_map` and the backward one that reads its results as one.

Such a pair is what a gradient taken outside of a `shard_map` leaves. What stands between them moves before the pair if
it reads no result of the first, else behind it; arithmetic on scalars that are the same on all devices moves inside.

Law: the merged program gives what the program gave, and each device does and sends what it did.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
from jax.sharding import PartitionSpec

from .._program import _compat
from .._program._compat import Atom, Aval, shaped
from .._program._primitives import is_backward, is_pointwise, runs_once

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_OWN = frozenset({"jaxpr", "in_specs", "out_specs"})


def merged_shard_maps(flat: jex.ClosedJaxpr) -> Iterator[jex.ClosedJaxpr]:
    """Yield the program with one pair merged, for each pair that may be."""
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
    """The merged body as far as it is written.

    **Fields:** `atoms` its operands, `specs` how they are divided, `invars` their variables in the body; `eqns`.
    """

    def __init__(self) -> None:
        self.atoms: list[Any] = []
        self.specs: list[Any] = []
        self.invars: list[Any] = []
        self.eqns: list[Any] = []

    def operand(self, atom: Atom, spec: jax.sharding.PartitionSpec, aval: Aval) -> Atom:
        """Return the body's variable for an operand: one for all who read it alike."""
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
        """Write an equation on the body's own values; returns its results."""
        outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=[*operands], outvars=outvars))
        return outvars

    def of(self, mapped: jex.JaxprEqn, known: dict[int, Atom] | None = None) -> list[Atom]:
        """Write the body of a `shard_map`, with some operands known; returns its results."""
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
    """Return what reads no result of the first, what the second reads of the others, and what it does not."""
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
    """Return whether all that an equation reads and makes is scalars."""
    return not any(a.aval.shape for a in [*eqn.invars, *eqn.outvars])


def _is_in(atom: Atom, values: Mapping[jex.Var, object]) -> "TypeIs[jex.Var]":
    """Return whether an atom is one of these variables."""
    return not _compat.is_literal(atom) and atom in values


def _common(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """Return what two that are merged have in common: the mesh, its axes and whether they are checked."""
    return {key: value for key, value in eqn.params.items() if key not in _OWN}
