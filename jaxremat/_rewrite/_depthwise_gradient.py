"""Gradient of a depthwise convolution's kernel -> sums over the batch, one for each place in the kernel.

XLA:CPU has no kernel for it: it convolves every channel with every other, in memory channels squared times the size of
the result, and takes the diagonal. Each place of the kernel is a sum of products of a window of the operand with the
cotangent. XLA:CPU copies the window for that, and where the sums stand one behind the other it copies all windows
first: a loop has one at a time.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._program._compat import shaped

MOST_PLACES = 64
"""Kernels of more are left as they are; 7 x 7 has 49."""


def is_depthwise_gradient(eqn: jex.JaxprEqn) -> bool:
    """Return whether it is a convolution of as many groups as its operand has in the batch, with a small result."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    params, shape = eqn.params, shaped(eqn.invars[0]).shape
    groups = params["batch_group_count"]
    places = (shaped(eqn.outvars[0]).shape[axis] for axis in params["dimension_numbers"].out_spec[2:])
    alone = groups > 1 and groups == shape[params["dimension_numbers"].lhs_spec[0]]
    return alone and max(params["lhs_dilation"], default=1) == 1 and math.prod(places) <= MOST_PLACES


def summed(eqn: jex.JaxprEqn) -> Callable[..., jax.Array]:
    """Return the equation's function as a loop of such sums."""
    params, out = eqn.params, shaped(eqn.outvars[0])
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    groups_axis, groups = lhs_spec[0], params["batch_group_count"]
    places = [out.shape[axis] for axis in out_spec[2:]]
    wide = jnp.promote_types(out.dtype, jnp.float32)

    def run(operand: jax.Array, kernel: jax.Array) -> jax.Array:
        edges = [(0, 0, 0)] * operand.ndim
        for axis, (low, high) in zip(lhs_spec[2:], params["padding"], strict=True):
            edges[axis] = (low, high, 0)
        padded = jax.lax.pad(operand, jnp.zeros((), operand.dtype), edges)
        order = [rhs_spec[lhs_spec.index(axis)] for axis in range(operand.ndim)]
        aligned = jnp.transpose(kernel, order)
        shape = list(aligned.shape)
        shape[groups_axis : groups_axis + 1] = [groups, shape[groups_axis] // groups]
        others = tuple(axis for axis in range(len(shape)) if axis not in (groups_axis, groups_axis + 1))
        reach, start, step = list(padded.shape), [0] * operand.ndim, [1] * operand.ndim
        for i, axis in enumerate(lhs_spec[2:]):
            step[axis] = params["rhs_dilation"][i]
            reach[axis] = (kernel.shape[rhs_spec[2 + i]] - 1) * step[axis] + 1

        def at(place: jax.Array) -> jax.Array:
            here: list[Any] = [*start]
            for i, axis in reversed([*enumerate(lhs_spec[2:])]):
                here[axis] = jax.lax.rem(place, places[i]) * params["window_strides"][i]
                place = jax.lax.div(place, places[i])
            window = jax.lax.dynamic_slice(padded, here, reach, allow_negative_indices=False)
            window = jnp.expand_dims(jax.lax.slice(window, start, reach, step), groups_axis + 1)
            return jnp.sum(window.astype(wide) * aligned.reshape(shape).astype(wide), axis=others)

        sums = jax.lax.map(at, jnp.arange(math.prod(places)))
        found = jnp.moveaxis(sums, 0, -1).reshape(1, -1, *places).astype(out.dtype)
        return jnp.transpose(found, np.argsort(out_spec).tolist())

    return run
