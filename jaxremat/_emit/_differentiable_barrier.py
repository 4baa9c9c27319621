"""Operands -> a barrier that may itself be differentiated, for backward passes that are programs of their own.

JAX's rule for `lax.optimization_barrier` gives every result a tangent, integers too, and a `cond` behind the barrier
takes an index with a tangent for a mistake. So where integers pass through, the barrier is a `custom_jvp` function, and
tangents pass by it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom, SourceInfo
from .._program._splice import inlined
from ._joint import is_inexact


def differentiable_barrier(
    operands: Sequence[Atom], outvars: Sequence[jex.Var], source_info: SourceInfo
) -> Any:
    """Return what `_compat.barrier` does, differentiable."""
    if all(is_inexact(a.aval) for a in operands) or any(map(_compat.varying_axes, operands)):
        return _compat.barrier(operands, outvars, source_info)

    @jax.custom_jvp
    def passing(*primals: jax.Array) -> Any:
        return jax.lax.optimization_barrier(primals)

    @passing.defjvp
    def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        return passing(*primals), tangents

    closed = jax.make_jaxpr(passing)(*(a.aval for a in operands))
    return inlined(closed, operands, source_info, outvars)[0][0]
