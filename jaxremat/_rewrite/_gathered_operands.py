"""Equations with gathered operands -> the same with each gather as a separate equation.

A product needs an operand whole if it is sharded along an axis along which the result is not. The compiler gathers it
once for all products that read it, and keeps the gathered array until the last of them has run. As a value of the
program, a plan can keep it or gather it again. Invariant: the same results, by the same collectives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding

from .._program import _compat
from .._program._compat import shaped
from ._flat_program import with_eqns

_PLACING = ("sharding_constraint", "reshard")


@dataclass(frozen=True, slots=True)
class Gather:
    """**Fields:** `eqn` the index of the equation that needs a gathered operand; `operand` its position; `sharding`
    that the equation needs.
    """

    eqn: int
    operand: int
    sharding: NamedSharding


def gathered(flat: jex.ClosedJaxpr, gathers: Sequence[Gather]) -> jex.ClosedJaxpr:
    """Return flat equations that read operands gathered by separate equations."""
    wanted: dict[int, list[Gather]] = {}
    for gather in gathers:
        wanted.setdefault(gather.eqn, []).append(gather)
    known: dict[Any, Any] = {}
    eqns: list[Any] = []
    for i, eqn in enumerate(flat.jaxpr.eqns):
        invars = list(eqn.invars)
        for gather in wanted.get(i, ()):
            var = invars[gather.operand]
            if (var, gather.sharding) not in known:
                made = _made(var, gather.sharding, eqn)
                eqns.append(made)
                known[var, gather.sharding] = made.outvars[0]
            invars[gather.operand] = known[var, gather.sharding]
        eqns.append(eqn.replace(invars=invars) if i in wanted else eqn)
    return with_eqns(flat, eqns)


def _made(var: jex.Var, sharding: NamedSharding, reader: jex.JaxprEqn) -> jex.JaxprEqn:
    """Return the equation that gathers a variable."""
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    of = var.aval if explicit else jax.ShapeDtypeStruct(shaped(var).shape, shaped(var).dtype)
    place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    (eqn,) = jax.make_jaxpr(lambda x: place(x, sharding))(of).jaxpr.eqns
    info = _compat.under(_compat.root_source(reader), reader)
    return eqn.replace(invars=[var], outvars=[_compat.new_var(eqn.outvars[0].aval)], source_info=info)


def is_gather(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation gathers its operand, by the types that one device has of both."""
    if eqn.primitive.name not in _PLACING:
        return False
    return math.prod(shaped(eqn.outvars[0]).shape) > math.prod(shaped(eqn.invars[0]).shape)
