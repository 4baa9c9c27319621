"""Gradient of max-pooling -> the same work in a form in which XLA does not fill memory long before it runs.

The compiler makes index arrays of it, several times the size of the pooled values, and adds the gradients up from an
array of zeros. Its windows do not cross the batch: *sliced*, a loop over slices of the batch computes the same with the
index arrays of one slice; on several devices, of a slice of each device's part of the batch. *Held*, its zeros pass a
barrier together with the cotangent: XLA:GPU otherwise fills them in the forward pass, shares them with every activation
that compares with zero, and keeps both.
"""

from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.core import ShapedArray

from .._program import _compat
from .._program._splice import inlined

ZERO = ShapedArray((), jax.numpy.float32)
"""The type of the first argument of `sliced`."""

SLICES = 8
"""At least so many slices, if the batch can be divided."""


def expands(eqn: Any, devices: int = 1) -> bool:
    """Whether `sliced` needs less memory than the equation itself."""
    if not is_pooling_gradient(eqn):
        return False
    params = eqn.params
    batch, *rest = (a.aval.shape[0] for a in (*eqn.invars, *eqn.outvars))
    crossed = params["window_dimensions"][0] > 1 or params["window_strides"][0] > 1
    even = batch % devices == 0 and _slices(batch // devices) > 1
    return even and all(n == batch for n in rest) and not crossed


def sliced(eqn: Any, devices: int = 1) -> jex.ClosedJaxpr:
    """The equation as a loop over slices of the first dimension of its operands and result.

    The first argument is a scalar zero, from which the result is filled at first: what depends on constants alone, the
    compiler may run at any time. A slice has as much of the part of each of so many devices, whether or not the
    dimension is divided among them, so that nothing is sent.
    """
    made = eqn.outvars[0].aval
    size = eqn.invars[0].aval.shape[0] // devices
    width = size // _slices(size)

    def apart(a: jax.Array) -> jax.Array:
        return a.reshape(devices, -1, *a.shape[1:]) if devices > 1 else a

    def together(a: jax.Array) -> jax.Array:
        return a.reshape(-1, *a.shape[2:]) if devices > 1 else a

    def run(zero: jax.Array, *operands: jax.Array) -> jax.Array:
        axis = int(devices > 1)

        def step(i: Any, result: jax.Array) -> jax.Array:
            parts = [
                together(jax.lax.dynamic_slice_in_dim(apart(a), i * width, width, axis)) for a in operands
            ]
            part = eqn.primitive.bind(*parts, **eqn.params)
            return jax.lax.dynamic_update_slice_in_dim(result, apart(part), i * width, axis)

        start = apart(jax.lax.broadcast(zero.astype(made.dtype), made.shape))
        return together(jax.lax.fori_loop(0, size // width, step, start))

    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
        for a in (ZERO, *(v.aval for v in eqn.invars))
    ]
    return jax.make_jaxpr(run)(*types)


def is_pooling_gradient(eqn: Any) -> bool:
    """Whether it is the gradient of a max-pooling."""
    return eqn.primitive.name == "select_and_scatter_add"


def held(eqn: Any) -> jex.ClosedJaxpr:
    """The equation with zeros that are not there before its cotangent is."""

    def run(source: jax.Array, operand: jax.Array) -> jax.Array:
        zero, source = jax.lax.optimization_barrier((jax.numpy.zeros((), source.dtype), source))
        padding = eqn.params["padding"]
        lowest = eqn.params["select_prim"] is jax.lax.ge_p
        outside = extreme(operand.dtype, lowest=lowest)
        padded = jax.lax.pad(operand, outside, [(low, high, 0) for low, high in padding])
        made = _compat.select_and_scatter(padded, source, zero, eqn.params)
        start = [low for low, _ in padding]
        return jax.lax.slice(made, start, [low + n for low, n in zip(start, operand.shape, strict=True)])

    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
    return jax.make_jaxpr(run)(*types)


def extreme(dtype: Any, *, lowest: bool) -> jax.Array:
    """What no other number of the type is below (above)."""
    inexact = jax.numpy.issubdtype(dtype, jax.numpy.inexact)
    if inexact and np.isinf(np.array(np.inf).astype(dtype)):
        return jax.numpy.array(-np.inf if lowest else np.inf, dtype)
    info = jax.numpy.finfo(dtype) if inexact else jax.numpy.iinfo(dtype)
    return jax.numpy.array(info.min if lowest else info.max, dtype)


def sliced_inline(eqn: Any, zero: Any, devices: int) -> list[Any]:
    """The equations of `sliced` in place of the equation, with a variable that is zero."""
    return inlined(sliced(eqn, devices), [zero, *eqn.invars], eqn.source_info, eqn.outvars)[0]


def _slices(size: int) -> int:
    return next((n for n in range(SLICES, size) if size % n == 0), size)
