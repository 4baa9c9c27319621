"""Equation -> equations that compile to better kernels, for equations that are known to compile to poor ones.

Invariant: the same result, up to rounding. The replacements are in every planned step, whatever its plan, forward and
backward.

- XLA:CPU computes the gradient of a depthwise convolution as one of all channels with all, see `summed`.
- XLA:CPU recomputes a cotangent that is pointwise in others in each kernel that reads it, see `_cotangent_chains`.
- Compilers recompute pointwise operands both in a kernel that selects and in one that compares, see `_selections`.
- XLA:GPU recognises a transposed convolution by its reversed kernel, as automatic differentiation writes it. Without
  that it writes the operand to memory with zeros between its entries, and convolves those too.
- XLA:GPU scatters the gradient of reading one entry of each row into a copy of the rest, see `compared`; also in loop
  bodies that are compiled unchanged.

Gradient of reading one entry of each row -> a comparison of positions instead of a scatter.

A cross entropy reads one entry of each row of logits, at its label. JAX's gradient of that read scatters into zeros,
and XLA:GPU scatters into the other part of the logits' cotangent, in a separate array that it copies first. If the
position of each entry is compared with the label, the gradient is pointwise, and its readers absorb it: on an H100 a
head of 128,256 words and 8,192 tokens in bf16 needs a third of the memory and 15 % less time, whatever the plan.

Invariant: the same values, bit by bit. A position outside its row is ignored or clipped, as the scatter's mode says.

Gradient of a depthwise convolution's kernel -> sums over the batch, one for each position in the kernel.

XLA:CPU has no kernel for it: it convolves every channel with every other, in memory of channels squared times the
result's size, and takes the diagonal. Each position of the kernel is a sum of products of a window of the operand with
the cotangent. XLA:CPU copies the window for that; if the sums are separate equations, it copies all windows first, so
they run in a loop.

Convolutions in bodies of loops and branches -> the same with the batch first and the channels last, or as sums.

XLA:CPU has fast kernels on several threads for convolutions in that order only. It transposes the operands of others
into it, but in the program's entry computation only (`ConvCanonicalization`). In a loop's body the gradient of a
convolution's kernel, which convolves with batch and channels exchanged, was 7 to 95 times slower than outside: 51 to 55
times for sixteen images of 32 x 32 x 16, and 1.3 times in this order (jax 0.10.2, 2 cores of an AMD EPYC). Gradients of
depthwise kernels are sums in bodies too (see `summed`).

Invariant: the same sums of the same products. Operands and result are transposed, as XLA does it outside loops.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._model._graph import Backend
from .._program import _compat
from .._program._axes import is_scattered
from .._program._compat import shaped
from .._program._equivalence import Equivalence
from .._program._primitives import inner_jaxprs, is_backward, on_mesh
from .._program._splice import BODIES, in_place_of, typed, with_bodies
from .._runtime._mechanisms import mechanism
from ._cotangent_chains import in_memory, is_named
from ._flat_program import with_each
from ._selections import is_marked


def replaced(backend: Backend) -> Callable[[Any], bool]:
    """Return a function that tells which equations this compiler needs replaced."""
    return partial(_is_replaced, backend.fuses_reductions)


@mechanism("kernel choice", off=lambda *_: False)
def _is_replaced(fuses_reductions: bool, eqn: jex.JaxprEqn) -> bool:
    if fuses_reductions:
        return is_transposed(eqn) or is_marked(eqn) or has_entry_gradient(eqn)
    return is_depthwise_gradient(eqn) or is_named(eqn) or is_marked(eqn)


def inline(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """Return the equations that replace one."""
    if is_named(eqn) or is_marked(eqn):
        return in_memory(eqn)
    if is_depthwise_gradient(eqn):
        return in_place_of(eqn, summed(eqn))
    return in_place_of(eqn, reversed_twice(eqn)) if is_transposed(eqn) else by_comparison(eqn)


def with_bodies_replaced(eqn: jex.JaxprEqn, backend: Backend) -> jex.JaxprEqn:
    """Return an equation that is compiled by itself, with the replacements in its bodies."""
    made = inline(eqn) if replaced(backend)(eqn) else [eqn]
    return made[0] if len(made) == 1 else eqn


def equivalence(closed: jex.ClosedJaxpr) -> Equivalence:
    """Return the proof that programs compute the same as this one, with these replacements taken into account."""

    def meant(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
        own = compared(eqn) if is_of_entries(eqn) else implementation(eqn)
        return own and jax.make_jaxpr(own)(*map(typed, eqn.invars))

    return Equivalence(closed, meant)


def is_transposed(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a transposed convolution of the forward pass."""
    if eqn.primitive.name != "conv_general_dilated" or is_backward(eqn):
        return False
    params = eqn.params
    groups = max(params["feature_group_count"], params["batch_group_count"])
    strided = max(*params["window_strides"], *params["rhs_dilation"], 1) > 1
    return max(params["lhs_dilation"], default=1) > 1 and groups == 1 and not strided


def reversed_twice(eqn: jex.JaxprEqn) -> Callable[..., jax.Array]:
    """Return the convolution's function with its kernel reversed twice, with a barrier between: the compiler must not
    cancel the two.
    """

    def run(operand: jax.Array, kernel: jax.Array) -> jax.Array:
        axes = eqn.params["dimension_numbers"].rhs_spec[2:]
        kernel = jax.lax.optimization_barrier(jax.lax.rev(kernel, axes))
        return eqn.primitive.bind(operand, jax.lax.rev(kernel, axes), **eqn.params)

    return run


def has_entry_gradient(eqn: jex.JaxprEqn, *, late: bool = False) -> bool:
    """Return whether an equation is such a gradient, or has one in its bodies.

    A forward pass may scatter one entry of each row into an existing array: this stays a scatter.

    **Arguments:** `late` whether it is in a body of the backward pass: names within bodies do not tell.
    """
    late = late or is_backward(eqn)
    inner = (each for jaxpr in inner_jaxprs(eqn) for each in jaxpr.eqns)
    return (late and is_of_entries(eqn)) or any(has_entry_gradient(each, late=late) for each in inner)


def by_comparison(eqn: jex.JaxprEqn, *, late: bool = False) -> list[jex.JaxprEqn]:
    """Return such a gradient as a comparison, and any other equation with those in its bodies replaced."""
    late = late or is_backward(eqn)
    if late and is_of_entries(eqn):
        return in_place_of(eqn, compared(eqn))
    change = partial(by_comparison, late=late)
    return [with_bodies(eqn, partial(with_each, change=change))]


def is_of_entries(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation adds one number to each row of an array, along one dimension."""
    if not is_scattered(eqn):
        return False
    if any(_compat.is_literal(a) or on_mesh(a.aval) or _compat.varying_axes(a) for a in eqn.invars):
        return False
    numbers, shape = eqn.params["dimension_numbers"], shaped(eqn.invars[0]).shape
    axes = tuple(map(int, numbers.scatter_dims_to_operand_dims))
    rows = tuple(d for d in range(len(shape)) if d not in axes)
    batched = tuple(map(int, numbers.operand_batching_dims)) == rows
    ordered = sorted(numbers.scatter_indices_batching_dims) == list(numbers.scatter_indices_batching_dims)
    once = shaped(eqn.invars[2]).size == math.prod(shape[d] for d in rows)
    return len(axes) == 1 and bool(rows) and batched and ordered and once and shaped(eqn.invars[0]).size > 0


def compared(eqn: jex.JaxprEqn) -> Callable[..., jax.Array]:
    """Return the equation's function, as a selection at each position."""
    (axis,) = map(int, eqn.params["dimension_numbers"].scatter_dims_to_operand_dims)
    clipped = eqn.params["mode"] == lax.GatherScatterMode.CLIP

    def run(operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        shape = operand.shape
        rows = [d for d in range(len(shape)) if d != axis]
        places, added = (lax.reshape(a, [shape[d] for d in rows]) for a in (indices, updates))
        if jnp.iinfo(places.dtype).max < shape[axis]:
            places = lax.convert_element_type(places, jnp.int32)
        if clipped:
            first, last = (jnp.asarray(end, places.dtype) for end in (0, shape[axis] - 1))
            places = lax.clamp(first, places, last)
        there = lax.eq(
            lax.broadcast_in_dim(places, shape, rows), lax.broadcasted_iota(places.dtype, shape, axis)
        )
        return lax.select(there, operand + lax.broadcast_in_dim(added, shape, rows), operand)

    return run


MOST_PLACES = 64
"""The most positions of a kernel that is replaced; 7 x 7 has 49."""


def is_depthwise_gradient(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a convolution with as many groups as its operand's batch, and a small result."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    params, shape = eqn.params, shaped(eqn.invars[0]).shape
    groups = params["batch_group_count"]
    places = (shaped(eqn.outvars[0]).shape[axis] for axis in params["dimension_numbers"].out_spec[2:])
    alone = groups > 1 and groups == shape[params["dimension_numbers"].lhs_spec[0]]
    return alone and max(params["lhs_dilation"], default=1) == 1 and math.prod(places) <= MOST_PLACES


def summed(eqn: jex.JaxprEqn) -> Callable[..., jax.Array]:
    """Return the equation's function as a loop over such sums."""
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

        # A loop copies one window at a time.
        sums = jax.lax.map(at, jnp.arange(math.prod(places)))
        found = jnp.moveaxis(sums, 0, -1).reshape(1, -1, *places).astype(out.dtype)
        return jnp.transpose(found, np.argsort(out_spec).tolist())

    return run


_TYPES = ("bfloat16", "float16", "float32")
"""The types for which XLA:CPU has such kernels."""


def canonical_in_bodies(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Return the program with such convolutions replaced; the same object if it has none."""
    return _rewritten(closed, inside=False)


def _rewritten(closed: jex.ClosedJaxpr, *, inside: bool) -> jex.ClosedJaxpr:
    def change(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
        if inside and (made := implementation(eqn)) is not None:
            return in_place_of(eqn, made)
        return [with_bodies(eqn, partial(_rewritten, inside=inside or eqn.primitive.name in BODIES))]

    return with_each(closed, change)


def implementation(eqn: jex.JaxprEqn) -> Callable[..., jax.Array] | None:
    """Return the function that computes a convolution with XLA:CPU's fast kernels, or None if it needs none."""
    if is_depthwise_gradient(eqn):
        return summed(eqn)
    return canonical(eqn) if is_transposed_convolution(eqn) else None


def is_transposed_convolution(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a convolution that XLA:CPU has a kernel for, but in another order."""
    if eqn.primitive.name != "conv_general_dilated" or eqn.params["batch_group_count"] != 1:
        return False
    rank = shaped(eqn.invars[0]).ndim
    known = 3 <= rank <= 5 and all(str(shaped(a).dtype) in _TYPES for a in (*eqn.invars, *eqn.outvars))
    return known and tuple(map(tuple, eqn.params["dimension_numbers"])) != _order(rank)


def _order(rank: int) -> tuple[tuple[int, ...], ...]:
    """Return XLA:CPU's preferred order as in `ConvDimensionNumbers`: batch, channels, pixels."""
    images = (0, rank - 1, *range(1, rank - 1))
    return images, (rank - 1, rank - 2, *range(rank - 2)), images


def canonical(eqn: jex.JaxprEqn) -> Callable[..., jax.Array]:
    """Return the convolution's function in XLA:CPU's preferred order, with transposes around it."""
    numbers = eqn.params["dimension_numbers"]
    order = _order(shaped(eqn.invars[0]).ndim)

    def run(operand: jax.Array, kernel: jax.Array) -> jax.Array:
        # `axis` comes from the axis that is at its position of `there` in `own`
        operand, kernel = (
            jax.lax.transpose(array, [own[there.index(axis)] for axis in range(len(own))])
            for array, own, there in zip((operand, kernel), numbers, order, strict=False)
        )
        made = eqn.primitive.bind(
            operand, kernel, **{**eqn.params, "dimension_numbers": type(numbers)(*order)}
        )
        back = [order[2][numbers.out_spec.index(axis)] for axis in range(made.ndim)]
        return jax.lax.transpose(made, back)

    return run
