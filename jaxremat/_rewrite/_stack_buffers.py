"""Scan that stacks results -> the same scan, whose buffers for them are not begun before its operands are there.

XLA:CPU makes the arrays that a loop stacks into of zeros, for which nothing has to wait: those of all loops at the
beginning of the step. Here they are carries, made of a zero that has passed a barrier with the scan's operands.
"""

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._program import _compat
from .._program._compat import shaped
from .._program._flops import aval_nbytes
from .._program._inline import Inliner
from .._program._primitives import on_mesh
from .._runtime._mechanisms import mechanism
from ._flat_program import FORWARD
from ._loop_closing import close_loops
from ._loop_inlining import STACK, Opener

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


def begun_late(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """Return the equations in place of such a scan: opened, and closed again with stacks that begin as that zero."""
    given = list(dict.fromkeys(_compat.variables(eqn.invars)))
    zero = _compat.new_var(_ZERO.aval)
    behind = {a: _compat.new_var(a.aval) for a in given}
    barrier = _compat.barrier([_ZERO, *given], [zero, *behind.values()], eqn.source_info)
    opener = Opener(Inliner(), {})
    opener.open(_compat.renamed(eqn, behind), FORWARD, None, -1)
    begun = [e.replace(invars=[*e.invars, zero]) if e.primitive is STACK else e for e in opener.eqns]
    return [barrier, *close_loops(begun, opener.loop_of, opener.loops)]
