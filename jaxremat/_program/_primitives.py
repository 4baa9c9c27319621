"""JAX's primitives by their treatment in XLA: contractions, loops, reductions, layout changes, pointwise work."""

from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.extend.core as jex
from jax.sharding import AxisType

from .._model._primitive_names import LOOP_EDGES, LOOP_SLICES
from . import _compat
from ._compat import AbstractValue, AnyJaxpr, shaped

SUMS = ("add", "add_any")
"""Additions of two arrays; `add_any` adds cotangents."""

PLACES = ("sharding", "out_sharding")
"""The parameters that give the devices and the memory of an equation's result."""

_CONTRACTIONS = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "ragged_dot",
        "ragged_dot_general",
        "scaled_matmul",
        "attention",
        "attention_gradient",
    }
)
_LOOPS = frozenset(
    {
        "scan",
        "while",
        "cond",
        "shard_map",
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "eval_jaxpr",
        "checkpoint",
        "remat2",
    }
)
_CALLS = frozenset(
    {
        "custom_call",
        "ffi_call",
        "pallas_call",
        "tpu_custom_call",
        "custom_vjp_call",
        "custom_jvp_call",
        "run_state",
        "pure_callback",
        "io_callback",
        "debug_callback",
    }
)
_LIBRARY = frozenset(
    {
        "sort", "top_k", "approx_top_k", "fft", "cholesky", "lu", "qr", "eig", "eigh", "svd", "schur",
        "triangular_solve", "tridiagonal_solve", "linear_solve", "custom_linear_solve", "householder_product",
        "select_and_scatter_add", "select_and_gather_add", "random_gamma", "rng_bit_generator",
        "rng_uniform",
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {
        "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "reduce",
        "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_window",
        "reduce_window_sum", "reduce_window_max", "reduce_window_min", "max_pool_places", "max_pool_gradient",
    }
)  # fmt: skip
_SCATTERS = frozenset(
    {
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter-mul",
        "scatter-min",
        "scatter-max",
        "dynamic_update_slice",
    }
)
_VIEWS = frozenset({*LOOP_SLICES, "reshape", "squeeze", "expand_dims", "bitcast_convert_type"})
_LIGHT = frozenset(
    {
        "broadcast_in_dim",
        "iota",
        "convert_element_type",
        "transpose",
        "rev",
        "slice",
        "split",
        "pad",
        "copy",
        "jaxremat_hint",
    }
)
_COSTLY = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "tanh", "sinh", "cosh", "erf", "erfc", "erf_inv",
        "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh", "pow", "cbrt", "lgamma",
        "digamma", "igamma", "igammac", "igamma_grad_a", "bessel_i0e", "bessel_i1e", "polygamma",
        "zeta", "random_bits", "threefry2x32",
    }
)  # fmt: skip
_POINTWISE = _COSTLY - {"random_bits", "threefry2x32"} | {
    "abs", "add", "add_any", "and", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "div",
    "eq", "eq_to", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "le_to", "lt", "lt_to", "max", "min",
    "mul", "mulhi", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "population_count", "real",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sqrt", "square", "stop_gradient", "sub", "xor",
}  # fmt: skip
_COLLECTIVES = frozenset(
    {
        "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_to_all",
        "ppermute",
        "reduce_scatter", "pbroadcast", "ragged_all_to_all", "psum_scatter",
    }
)  # fmt: skip
_UNREPEATABLE = frozenset(
    {"rng_uniform", "infeed", "outfeed", "io_callback", "pure_callback", "debug_callback", "create_token"}
)


def is_contraction(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a contraction, a loop or an opaque call, which take most of a step's time."""
    name = eqn.primitive.name
    return name in _CONTRACTIONS or name in _LOOPS or name in _CALLS or name in _LIBRARY or bool(eqn.effects)


def contracts(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a contraction; for a choice, or a function with its derivative, whether any inside
    is.
    """
    if eqn.primitive.name in ("cond", "custom_jvp_call"):
        return any(contracts(inner) for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns)
    return is_contraction(eqn)


def is_product(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a product or convolution. If both operands are divided alike, each device has a
    partial sum.
    """
    return eqn.primitive.name in _CONTRACTIONS


def is_fusion_root(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a kernel of its own, which no reader absorbs and whose results are in memory."""
    name = eqn.primitive.name
    return (
        is_contraction(eqn)
        or name in ("scan_last", "scan_stack")
        or name in _REDUCTIONS
        or name in _SCATTERS
        or name in _COLLECTIVES
        or name == "gather"
        or is_fetch(eqn)
    )


def reads_memory(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation's operands must be in memory, because it cannot absorb their producers."""
    name = eqn.primitive.name
    return is_contraction(eqn) or name in _COLLECTIVES or is_barrier(eqn)


def is_barrier(eqn: jex.JaxprEqn) -> bool:
    """Return whether XLA cannot move or merge work across an equation."""
    return eqn.primitive.name == "optimization_barrier"


def on_host(aval: AbstractValue) -> bool:
    """Return whether arrays of this type are in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def on_mesh(aval: AbstractValue) -> bool:
    """Return whether a type gives the devices of its values."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types)


def is_fetch(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation copies from host memory to the device."""
    return _copies(eqn) and on_host(eqn.invars[0].aval) and not on_host(eqn.outvars[0].aval)


def is_put(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation copies from the device to host memory."""
    return _copies(eqn) and not on_host(eqn.invars[0].aval) and on_host(eqn.outvars[0].aval)


def _copies(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name == "device_put" and not _compat.is_literal(eqn.invars[0])


def is_view(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation only changes the shape: the result shares its operand's memory."""
    return eqn.primitive.name in _VIEWS


def is_relabelling(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a view or a transposition, which contractions absorb into the reading of an
    operand.
    """
    return is_view(eqn) or eqn.primitive.name == "transpose"


IN_CHUNKS = "in_chunks"
"""The name of the call for rows in chunks. Nothing inside it is planned."""


def is_in_chunks(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a call for rows in chunks."""
    return eqn.params.get("name") == IN_CHUNKS


def is_light(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is data movement that kernels absorb without arithmetic."""
    return eqn.primitive.name in _LIGHT or is_view(eqn)


def is_window(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation reads a part of an array, and no more than its result has."""
    return eqn.primitive.name in ("slice", "dynamic_slice")


def is_placed(eqn: jex.JaxprEqn) -> bool:
    """Return whether the result's type gives its devices, by axes of a mesh."""
    meshes = (each.mesh for name in PLACES if (each := eqn.params.get(name)) is not None)
    return any(kind != AxisType.Auto for mesh in meshes if not mesh.empty for kind in mesh.axis_types)


def is_placing(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation only moves or places a value."""
    return eqn.primitive.name == "sharding_constraint"


def is_write(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation overwrites a part of an array."""
    return eqn.primitive.name == "dynamic_update_slice"


def is_loop_edge(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation is one of `LOOP_EDGES`."""
    return eqn.primitive.name in LOOP_EDGES


def is_loop_slice(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation is one of `LOOP_SLICES`."""
    return eqn.primitive.name in LOOP_SLICES


def is_backward(eqn: jex.JaxprEqn) -> bool:
    """Return whether automatic differentiation created the equation for the backward pass, as the outermost
    transformation.

    An equation that is transposed below a `jvp` belongs to a gradient that is itself differentiated, in its forward
    pass.
    """
    stack = _compat.name_stack_text(eqn)
    transposed = stack.find("transpose(")
    return transposed >= 0 and not 0 <= stack.find("jvp(") < transposed


def is_pointwise(eqn: jex.JaxprEqn) -> bool:
    """Return whether each entry of the result depends on the same entry of the operands, and on scalars."""
    return eqn.primitive.name in _POINTWISE


def pointwise_names() -> frozenset[str]:
    """Return the names of pointwise primitives."""
    return _POINTWISE


def is_costly(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is pointwise work of many operations per entry, which XLA does not repeat in each
    kernel that reads the result.
    """
    return eqn.primitive.name in _COSTLY


def is_threefry(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation draws random words with JAX's default generator, at several hundred operations a
    word.
    """
    name = eqn.primitive.name
    return name == "threefry2x32" or (name == "random_bits" and "fry" in str(shaped(eqn.invars[0]).dtype))


def is_random(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation draws random words, with any generator."""
    return eqn.primitive.name in ("threefry2x32", "random_bits", "rng_bit_generator")


def is_draw(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation creates keys of a generator, or draws random words."""
    return is_random(eqn) or eqn.primitive.name.startswith("random_")


def is_repeatable(eqn: jex.JaxprEqn) -> bool:
    """Return whether running the equation twice cannot be observed: no effects, no callbacks, no collectives. Effects
    on references of its own, as in kernels, do not count.
    """
    return not runs_once(eqn) and not _holds(eqn, _COLLECTIVES | (LOOP_EDGES - LOOP_SLICES))


def runs_once(eqn: jex.JaxprEqn) -> bool:
    """Return whether another run of the equation could be observed, by its results or otherwise: it has effects, calls
    the host, draws from a device's state, or reads an infeed.

    Such an equation is neither repeated, nor merged with an equal one, nor moved past another of these. If nothing
    reads its results and it has no effects, it is removed, as `jax.jit` does.
    """
    return bool(eqn.effects) or runs_in_order(eqn)


def runs_in_order(eqn: jex.JaxprEqn) -> bool:
    """Return whether another order of equations, or another run of one, changes results. Collectives do not: they run
    once because they take time.
    """
    return _compat.has_effects(eqn) or _holds(eqn, _UNREPEATABLE)


def _holds(eqn: jex.JaxprEqn, names: frozenset[str]) -> bool:
    """Return whether the equation, or an equation of its bodies, is one of these primitives."""
    return eqn.primitive.name in names or any(
        not names.isdisjoint(_names_inside(jaxpr)) for jaxpr in inner_jaxprs(eqn)
    )


_INSIDE: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()


def _names_inside(jaxpr: AnyJaxpr) -> frozenset[str]:
    """Return the names of a body's primitives, and of those in its own bodies; cached."""
    if (found := _INSIDE.get(jaxpr)) is None:
        deeper = (_names_inside(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn))
        found = frozenset(eqn.primitive.name for eqn in jaxpr.eqns).union(*deeper)
        _INSIDE[jaxpr] = found
    return found


def inner_jaxprs(eqn: jex.JaxprEqn) -> list[jex.Jaxpr]:
    """Return the open jaxprs among an equation's parameters (bodies of loops, branches, calls)."""
    found = []
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found


def inner_eqns(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """Return the equations of an equation's bodies, and of the bodies in those."""
    found = [inner for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns]
    return found + [deeper for inner in found for deeper in inner_eqns(inner)]
