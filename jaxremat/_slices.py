"""Equation -> the same work slice by slice, where XLA would expand the whole into arrays far larger than its operands.

The gradient of max-pooling becomes index arrays over the whole padded input, several times its size. Its windows do
not cross the batch, so that a loop over slices of the batch computes the same with the index arrays of one slice.
"""

from typing import Any

import jax
import jax.extend.core as jex
from jax.core import ShapedArray

from . import _compat

ZERO = ShapedArray((), jax.numpy.float32)
"""The type of the first argument of `sliced`."""

SLICES = 8
"""At least so many slices, if the batch can be divided."""


def expands(eqn: Any) -> bool:
    """Whether `sliced` needs less memory than the equation itself."""
    if eqn.primitive.name != "select_and_scatter_add":
        return False
    params = eqn.params
    batch, *rest = (a.aval.shape[0] for a in (*eqn.invars, *eqn.outvars))
    crossed = params["window_dimensions"][0] > 1 or params["window_strides"][0] > 1
    return _slices(batch) > 1 and all(n == batch for n in rest) and not crossed


def sliced(eqn: Any) -> jex.ClosedJaxpr:
    """The equation as a loop over slices of the first dimension of its operands and result.

    The first argument is a scalar zero, from which the result is filled at first: what depends on constants alone, the
    compiler may run at any time.
    """
    size, made = eqn.invars[0].aval.shape[0], eqn.outvars[0].aval
    width = size // _slices(size)

    def run(zero: jax.Array, *operands: jax.Array) -> jax.Array:
        def step(i: Any, result: jax.Array) -> jax.Array:
            parts = [jax.lax.dynamic_slice_in_dim(a, i * width, width) for a in operands]
            part = eqn.primitive.bind(*parts, **eqn.params)
            return jax.lax.dynamic_update_slice_in_dim(result, part, i * width, 0)

        start = jax.lax.broadcast(zero.astype(made.dtype), made.shape)
        return jax.lax.fori_loop(0, size // width, step, start)

    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
        for a in (ZERO, *(v.aval for v in eqn.invars))
    ]
    return jax.make_jaxpr(run)(*types)


def sliced_inline(eqn: Any, zero: Any) -> list[Any]:
    """The equations of `sliced` in place of the equation, with a variable that is zero."""
    body = sliced(eqn).jaxpr
    rename: dict[Any, Any] = dict(zip(body.invars, [zero, *eqn.invars], strict=True))
    rename.update(zip(body.outvars, eqn.outvars, strict=True))
    eqns = []
    for step in body.eqns:
        invars = [a if _compat.is_literal(a) else rename[a] for a in step.invars]
        outvars = [rename.setdefault(v, _compat.new_var(v.aval)) for v in step.outvars]
        info = _compat.under(eqn.source_info, step)
        eqns.append(step.replace(invars=invars, outvars=outvars, source_info=info))
    return eqns


def _slices(size: int) -> int:
    return next((n for n in range(SLICES, size) if size % n == 0), size)
