"""Equation -> equations of which the compiler makes better kernels, where it is known to make poor ones.

Law: the same result, up to rounding. They stand in every planned step, whatever its plan, forward and backward.

- XLA:CPU computes the gradient of a depthwise convolution as one of all channels with all, see `_depthwise_gradient`.
- XLA:CPU makes a cotangent that is pointwise work on others in each kernel that reads it, see `_cotangent_chains`.
- Compilers make pointwise work anew in a kernel that selects and in one that compares with that, see `_selections`.
- XLA:GPU recognises a transposed convolution by its reversed kernel, as automatic differentiation writes it; without
  that it spreads the operand out between zeros, in memory, and convolves those too.
- XLA:GPU scatters the gradient of reading one entry of each row into a copy of the rest, see `_entry_gradients`: in
  bodies of loops that are compiled as they stand too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from .._model._backend import Backend
from .._program._equivalence import Equivalence
from .._program._primitives import is_backward
from .._program._splice import in_place_of, typed
from .._runtime._mechanisms import mechanism
from ._canonical_convolutions import implementation
from ._cotangent_chains import in_memory, is_named
from ._depthwise_gradient import is_depthwise_gradient, summed
from ._entry_gradients import by_comparison, compared, has_entry_gradient, is_of_entries
from ._selections import is_marked


def replaced(backend: Backend) -> Callable[[Any], bool]:
    """Return which equations have such an implementation for this compiler."""
    return partial(_is_replaced, backend.fuses_reductions)


@mechanism("kernels of its own choice", off=lambda *_: False)
def _is_replaced(fuses_reductions: bool, eqn: jex.JaxprEqn) -> bool:
    if fuses_reductions:
        return is_transposed(eqn) or is_marked(eqn) or has_entry_gradient(eqn)
    return is_depthwise_gradient(eqn) or is_named(eqn) or is_marked(eqn)


def inline(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """Return the equations in place of one that is to be replaced."""
    if is_named(eqn) or is_marked(eqn):
        return in_memory(eqn)
    if is_depthwise_gradient(eqn):
        return in_place_of(eqn, summed(eqn))
    return in_place_of(eqn, reversed_twice(eqn)) if is_transposed(eqn) else by_comparison(eqn)


def with_bodies_replaced(eqn: jex.JaxprEqn, backend: Backend) -> jex.JaxprEqn:
    """Return an equation that is compiled alone, with these implementations in its bodies."""
    made = inline(eqn) if replaced(backend)(eqn) else [eqn]
    return made[0] if len(made) == 1 else eqn


def equivalence(closed: jex.ClosedJaxpr) -> Equivalence:
    """Return the proof that programs compute what this one does, which knows these implementations."""

    def meant(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
        own = compared(eqn) if is_of_entries(eqn) else implementation(eqn)
        return own and jax.make_jaxpr(own)(*map(typed, eqn.invars))

    return Equivalence(closed, meant)


def is_transposed(eqn: jex.JaxprEqn) -> bool:
    """Return whether it is a transposed convolution of the forward pass."""
    if eqn.primitive.name != "conv_general_dilated" or is_backward(eqn):
        return False
    params = eqn.params
    groups = max(params["feature_group_count"], params["batch_group_count"])
    strided = max(*params["window_strides"], *params["rhs_dilation"], 1) > 1
    return max(params["lhs_dilation"], default=1) > 1 and groups == 1 and not strided


def reversed_twice(eqn: jex.JaxprEqn) -> Callable[..., jax.Array]:
    """Return the convolution's function with a kernel that is reversed, and in a way that the compiler cannot undo was
    so before.
    """

    def run(operand: jax.Array, kernel: jax.Array) -> jax.Array:
        axes = eqn.params["dimension_numbers"].rhs_spec[2:]
        kernel = jax.lax.optimization_barrier(jax.lax.rev(kernel, axes))
        return eqn.primitive.bind(operand, jax.lax.rev(kernel, axes), **eqn.params)

    return run
