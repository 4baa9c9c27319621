"""Operands -> a barrier that may itself be differentiated, for backward passes that are programs of their own.

JAX's rule for `lax.optimization_barrier` gives every result a tangent, integers too, and a `cond` behind the barrier
takes an index with a tangent for a mistake. So where integers pass through, the barrier is a `custom_jvp` function, and
tangents pass by it.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .._program import _compat
from .._program._splice import inlined
from ._joint import is_inexact


def fence(operands: Sequence[Any], outvars: Sequence[Any], source_info: Any) -> Any:
    """As `_compat.barrier`."""
    if all(is_inexact(a.aval) for a in operands) or any(map(_compat.varying_axes, operands)):
        return _compat.barrier(operands, outvars, source_info)

    @jax.custom_jvp
    def fenced(*primals: Any) -> Any:
        return jax.lax.optimization_barrier(primals)

    @fenced.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return fenced(*primals), tangents

    closed = jax.make_jaxpr(fenced)(*(a.aval for a in operands))
    return inlined(closed, operands, source_info, outvars)[0][0]
