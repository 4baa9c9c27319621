"""Flat step whose passes are both within one `shard_map` -> the program of one device, and what stands around it.

That program is planned as a step on one device is: its types are those of what one device has. What stands around it,
such as an optimizer's update, stays as it is.

Law: with a body that gives what the old one gave, `Around.step` gives what the step gave.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import PartitionSpec

from .._program import _compat
from .._program._compat import Atom
from .._program._flops import eqn_flops
from .._program._inline import Inliner
from .._program._primitives import inner_jaxprs, is_backward
from .._runtime._mechanisms import mechanism
from ._shard_map_merging import is_of_scalars, merged_shard_maps

_VARYING = frozenset({"pvary", "pcast"})
"""Equations that say that a value may differ between devices."""

_INVARIANT = {"psum_invariant": jax.lax.psum_p}
"""Those whose results differ no more, and what they are where nothing checks that."""

_CHECKED_ALONE = re.compile("invariant|reduced|^shard_map$")
"""Others that are to be had with such checks alone."""


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
        """Return the equation that does most of the work, if both passes are in it and the backward pass nowhere
        else.

        Where each pass is a `shard_map` of its own, the two are merged first.
        """
        if "shard_map" not in _names(closed.jaxpr):
            return None
        flat = Inliner(respect_checkpoint=respect_checkpoint).program(closed)
        candidates = chain((flat,), merged_shard_maps(flat))
        return next(filter(None, map(cls._in, candidates)), None)

    @classmethod
    def _in(cls, flat: jex.ClosedJaxpr) -> "Around | None":
        """Return the equation, in a program that is taken as it is."""
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
        """Return which arguments of the body may be written over, by those of the program: what nothing
        else reads.
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
        """Return some part of the body as a program by itself, which every device runs on arrays of its own."""
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
        """What tells it from others."""
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
        """Return the equation with another body, whose constants come first among the operands."""
        jaxpr = body.jaxpr
        opened = _compat.new_jaxpr((), (), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns).jaxpr
        whole = (PartitionSpec(),) * len(jaxpr.constvars)
        params = {**self._eqn.params, "jaxpr": opened, "in_specs": (*whole, *specs)}
        return self._eqn.replace(invars=[*operands], params=params)


def _with_unchecked(flat: jex.ClosedJaxpr, at: int) -> jex.ClosedJaxpr:
    """Return the program whose `shard_map` does not check what differs between devices: it was checked when it was
    traced, and what follows from it, such as sums of gradients, stands in the equations. So all that is done with
    programs of one device can be done with it.
    """
    own, eqn = flat.jaxpr, flat.jaxpr.eqns[at]
    if any(_CHECKED_ALONE.search(name) and name not in _INVARIANT for name in _names(eqn.params["jaxpr"])):
        return flat
    params = {**eqn.params, "jaxpr": _unchecked(eqn.params["jaxpr"]), "check_vma": False}
    eqns = [*own.eqns[:at], eqn.replace(params=params), *own.eqns[at + 1 :]]
    return _compat.new_jaxpr(own.constvars, flat.consts, own.invars, own.outvars, eqns)


def _unchecked(jaxpr: jex.Jaxpr) -> Any:
    """Return the equations without types that say what differs between devices."""
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
        if eqn.primitive.name in _VARYING:
            env.update(zip(eqn.outvars, operands, strict=True))
            continue
        params = {name: inner(param) for name, param in eqn.params.items()}
        if (unchecked := _INVARIANT.get(eqn.primitive.name)) is not None:
            eqn, params = eqn.replace(primitive=unchecked), {**params, "axis_index_groups": None}
        eqns.append(eqn.replace(invars=operands, outvars=named(eqn.outvars), params=params))
    return jaxpr.replace(constvars=constvars, invars=invars, outvars=read(jaxpr.outvars), eqns=eqns)


def _names(jaxpr: jex.Jaxpr) -> Iterator[str]:
    """Yield the primitives of its equations, and of the inner ones."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        yield from chain.from_iterable(map(_names, inner_jaxprs(eqn)))


def _variables(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Yield all variables of its equations, of the inner ones too."""
    yield from (*jaxpr.constvars, *jaxpr.invars)
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        yield from chain.from_iterable(map(_variables, inner_jaxprs(eqn)))
