"""Gradient of a depthwise convolution's kernel -> sums over the batch, one for each place in the kernel.

XLA:CPU has no kernel for it: it convolves every channel with every other, in memory channels squared times the size of
the result, and takes the diagonal. Each place of the kernel is a sum of products of a window of the operand with the
cotangent, which needs no memory at all.
"""

import math
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

MOST_PLACES = 64
"""Kernels of more are left as they are; 7 x 7 has 49."""


def is_depthwise_gradient(eqn: Any) -> bool:
    """Whether it is a convolution of as many groups as its operand has in the batch, with a small result."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    params, shape = eqn.params, eqn.invars[0].aval.shape
    groups = params["batch_group_count"]
    places = (eqn.outvars[0].aval.shape[axis] for axis in params["dimension_numbers"].out_spec[2:])
    alone = groups > 1 and groups == shape[params["dimension_numbers"].lhs_spec[0]]
    return alone and max(params["lhs_dilation"], default=1) == 1 and math.prod(places) <= MOST_PLACES


def summed(eqn: Any) -> jex.ClosedJaxpr:
    """The equation as such sums."""
    params, out = eqn.params, eqn.outvars[0].aval
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
        aligned = aligned.reshape(shape)
        others = tuple(axis for axis in range(len(shape)) if axis not in (groups_axis, groups_axis + 1))
        sums = []
        for place in np.ndindex(*places):
            start, stop, step = [0] * operand.ndim, list(padded.shape), [1] * operand.ndim
            for i, axis in enumerate(lhs_spec[2:]):
                step[axis] = params["rhs_dilation"][i]
                start[axis] = place[i] * params["window_strides"][i]
                stop[axis] = start[axis] + (kernel.shape[rhs_spec[2 + i]] - 1) * step[axis] + 1
            window = jnp.expand_dims(jax.lax.slice(padded, start, stop, step), groups_axis + 1)
            sums.append(jnp.sum(window.astype(wide) * aligned.astype(wide), axis=others))
        found = jnp.stack(sums, axis=-1).reshape(1, -1, *places).astype(out.dtype)
        return jnp.transpose(found, np.argsort(out_spec).tolist())

    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
    return jax.make_jaxpr(run)(*types)
