"""Convolutions in bodies of loops and branches -> the same with the batch first and the channels last, or as sums.

XLA:CPU has fast kernels on several threads for convolutions in that order alone. It transposes the operands of others
into it, but in the program's entry computation only (`ConvCanonicalization`). In a loop's body the gradient of a
convolution's kernel, which convolves with batch and channels exchanged, was 7 to 95 times slower than outside: 51 to 55
times for sixteen images of 32 x 32 x 16, and 1.3 times in this order (jax 0.10.2, 2 cores of an AMD EPYC). Gradients
of depthwise kernels are sums in bodies too (see `_depthwise_gradient`).

Invariant: the same sums of the same products. Operands and result are transposed, as XLA does it outside of loops.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.extend.core as jex

from .._program._compat import shaped
from .._program._splice import BODIES, in_place_of, with_bodies
from ._depthwise_gradient import is_depthwise_gradient, summed
from ._flat_program import with_each

_TYPES = ("bfloat16", "float16", "float32")
"""Of the numbers that XLA:CPU has such kernels for."""


def canonical_in_bodies(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Return the program, or the same one where there is no such convolution."""
    return _rewritten(closed, inside=False)


def _rewritten(closed: jex.ClosedJaxpr, *, inside: bool) -> jex.ClosedJaxpr:
    def change(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
        if inside and (made := implementation(eqn)) is not None:
            return in_place_of(eqn, made)
        return [with_bodies(eqn, partial(_rewritten, inside=inside or eqn.primitive.name in BODIES))]

    return with_each(closed, change)


def implementation(eqn: jex.JaxprEqn) -> Callable[..., jax.Array] | None:
    """Return the function that does a convolution with XLA:CPU's fast kernels, None where it needs none."""
    if is_depthwise_gradient(eqn):
        return summed(eqn)
    return canonical(eqn) if is_transposed_convolution(eqn) else None


def is_transposed_convolution(eqn: jex.JaxprEqn) -> bool:
    """Return whether it is a convolution in another order that XLA:CPU has a kernel for in its own."""
    if eqn.primitive.name != "conv_general_dilated" or eqn.params["batch_group_count"] != 1:
        return False
    rank = shaped(eqn.invars[0]).ndim
    known = 3 <= rank <= 5 and all(str(shaped(a).dtype) in _TYPES for a in (*eqn.invars, *eqn.outvars))
    return known and tuple(map(tuple, eqn.params["dimension_numbers"])) != _order(rank)


def _order(rank: int) -> tuple[tuple[int, ...], ...]:
    """Return XLA:CPU's order, as `ConvDimensionNumbers` have it: batch, channels, pixels."""
    images = (0, rank - 1, *range(1, rank - 1))
    return images, (rank - 1, rank - 2, *range(rank - 2)), images


def canonical(eqn: jex.JaxprEqn) -> Callable[..., jax.Array]:
    """Return the convolution's function in XLA:CPU's order, with transposes around it."""
    numbers = eqn.params["dimension_numbers"]
    order = _order(shaped(eqn.invars[0]).ndim)

    def run(operand: jax.Array, kernel: jax.Array) -> jax.Array:
        # the axis that is to stand at `there` is the one that is meant by the number in the same place
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
