"""Scan that stacks results -> the same scan, whose buffers for them are not begun before its operands are there.

XLA:CPU makes the arrays that a loop stacks into of zeros, for which nothing has to wait: those of all loops at the
beginning of the step. Here they are carries, made of a zero that has passed a barrier with the scan's operands.
"""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._program import _compat
from .._program._compat import shaped
from .._program._flops import aval_nbytes
from .._program._primitives import on_mesh
from .._program._splice import inlined
from .._runtime._mechanisms import mechanism
from ._loop_inlining import operands, row_written

_ZERO = _compat.literal(np.float32(0))


@mechanism("stacks begun late", off=lambda _: 0)
def stacked_nbytes(eqn: jex.JaxprEqn) -> int:
    """Return the bytes that a scan fills slice by slice; 0 of others, and where they cannot be carries."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return 0
    stacks = list(map(shaped, eqn.outvars[_compat.scan_counts(eqn)[1] :]))
    plain = all(jnp.issubdtype(a.dtype, jnp.number) or a.dtype == jnp.bool_ for a in stacks)
    untyped = not any(_compat.varying_axes(a) for a in eqn.invars) and not any(map(on_mesh, stacks))
    return sum(map(aval_nbytes, stacks)) if plain and untyped and _compat.variables(eqn.invars) else 0


def begun_late(eqn: jex.JaxprEqn) -> list[Any]:
    """Return the equations in place of such a scan."""
    given = list(dict.fromkeys(_compat.variables(eqn.invars)))
    zero = _compat.new_var(_ZERO.aval)
    behind = {a: _compat.new_var(a.aval) for a in given}
    barrier = _compat.barrier([_ZERO, *given], [zero, *behind.values()], eqn.source_info)
    invars = [zero, *(a if _compat.is_literal(a) else behind[a] for a in eqn.invars)]
    return [barrier, *inlined(_carrying(eqn), invars, eqn.source_info, eqn.outvars)[0]]


def _carrying(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Return a zero and the scan's operands -> its results."""
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    consts, init, _ = map(len, operands(eqn))
    stacks = list(map(shaped, eqn.outvars[init:]))

    def run(zero: jax.Array, *given: Any) -> Any:
        known = given[:consts]

        def iteration(carry: Any, rows: Any) -> Any:
            place, state, filled = carry
            made = _evaluated(eqn.params["jaxpr"], [*known, *state, *rows])
            filled = [row_written(a, row, place) for a, row in zip(filled, made[init:], strict=True)]
            return (place + (-1 if reverse else 1), made[:init], filled), None

        empty = [jax.lax.broadcast(zero.astype(a.dtype), a.shape) for a in stacks]
        begun = jnp.int32(length - 1 if reverse else 0), list(given[consts : consts + init]), empty
        options = {"reverse": reverse, "unroll": eqn.params["unroll"]}
        (_, last, filled), _ = jax.lax.scan(iteration, begun, given[consts + init :], length, **options)
        return [*last, *filled]

    types = [
        jax.ShapeDtypeStruct(shaped(a).shape, shaped(a).dtype, weak_type=shaped(a).weak_type)
        for a in eqn.invars
    ]
    return jax.make_jaxpr(run)(jax.ShapeDtypeStruct((), jnp.float32), *types)


def _evaluated(closed: jex.ClosedJaxpr, given: list[Any]) -> list[Any]:
    """Return the results of a body."""
    if not hasattr(closed, "consts"):
        closed = _compat.new_jaxpr((), (), closed.invars, closed.outvars, closed.eqns)
    return jex.jaxpr_as_fun(closed)(*given)
