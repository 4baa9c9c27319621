"""Equation -> its cost: arithmetic, and the time of a kernel on a device."""

import math
from functools import cache

import jax.extend.core as jex
import numpy as np

from .._model._device_specs import DeviceSpec
from . import _compat
from ._compat import AbstractValue, DType, shaped
from ._primitives import inner_jaxprs, is_light, is_threefry, is_write, on_host

THREEFRY_OPERATIONS = 200.0
"""Integer operations for each random word: twenty rounds on two words, whose exclusive or is the result."""

THREEFRY_PASSES = 55.0
"""How often a compiler that keeps the rounds in a loop, such as XLA:CPU, moves the bytes of the result: each of five
iterations copies, reads and writes two words for each. Counted in the compiled program.
"""


def aval_nbytes(aval: AbstractValue) -> int:
    """Return the bytes on the device of an array type; 0 for one in host memory."""
    return 0 if on_host(aval) else array_nbytes(aval)


def array_nbytes(aval: AbstractValue) -> int:
    """Return the bytes of an array type in any memory; a random key counts its words, a token nothing."""
    shape = getattr(aval, "shape", None)
    dtype = getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.ceil(math.prod(shape) * _item_nbytes(dtype))


def body_nbytes(eqn: jex.JaxprEqn) -> int:
    """Return the bytes that one run of a loop's body, or of the largest branch of a choice, computes and keeps inside;
    0 for an equation without a body, and for a kernel, whose values are not in memory.
    """
    bodies = inner_jaxprs(eqn) if eqn.primitive.name != "pallas_call" else ()

    def inner(body: jex.Jaxpr) -> int:
        made = {v for each in body.eqns for v in each.outvars}.difference(_compat.variables(body.outvars))
        return sum(aval_nbytes(v.aval) for v in made) + sum(map(body_nbytes, body.eqns))

    return max(map(inner, bodies), default=0)


@cache
def _item_nbytes(dtype: DType) -> float:
    return {"int4": 0.5, "uint4": 0.5, "int2": 0.25, "uint2": 0.25}.get(
        str(dtype), getattr(dtype, "itemsize", 8)
    )


def eqn_flops(eqn: jex.JaxprEqn) -> float:
    """Return the floating-point operations of one run; loops count every iteration."""
    name = eqn.primitive.name
    out = math.prod(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0
    if name in ("dot_general", "scaled_matmul"):
        ((lhs_contracting, _), _) = eqn.params["dimension_numbers"]
        return 2.0 * out * math.prod(shaped(eqn.invars[0]).shape[d] for d in lhs_contracting)
    if name == "conv_general_dilated":
        return _conv_flops(eqn)
    if name in ("attention", "attention_gradient"):
        return eqn.params["pattern"].flops(gradient=name != "attention", kernels=eqn.params["kernels"])
    if name == "scan":
        return eqn.params["length"] * sum(eqn_flops(e) for j in inner_jaxprs(eqn) for e in j.eqns)
    if bodies := inner_jaxprs(eqn):
        per_body = [sum(eqn_flops(e) for e in body.eqns) for body in bodies]
        return max(per_body) if name == "cond" else sum(per_body)
    if is_light(eqn) or is_write(eqn):
        return 0.0
    if is_threefry(eqn):
        return THREEFRY_OPERATIONS * out
    return float(max([out, *(math.prod(getattr(a.aval, "shape", ())) for a in eqn.invars)]))


def _conv_flops(eqn: jex.JaxprEqn) -> float:
    lhs, rhs = shaped(eqn.invars[0]).shape, shaped(eqn.invars[1]).shape
    out = shaped(eqn.outvars[0]).shape
    numbers = eqn.params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    total = 2.0 * lhs[lhs_spec[0]] * out[out_spec[1]] * rhs[rhs_spec[1]]
    total /= eqn.params["batch_group_count"]
    for axis, (low, _) in enumerate(eqn.params["padding"]):
        total *= _taps(
            lhs[lhs_spec[2 + axis]],
            rhs[rhs_spec[2 + axis]],
            out[out_spec[2 + axis]],
            eqn.params["window_strides"][axis],
            low,
            eqn.params["lhs_dilation"][axis],
            eqn.params["rhs_dilation"][axis],
        )
    return total


def _taps(
    size: int, window: int, out: int, stride: int, low: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Return pairs (output position, window element) along one axis that read data rather than padding or dilation
    holes.
    """
    start = np.arange(out)[:, None] * stride - low + np.arange(window)[None, :] * rhs_dilation
    inside = (start >= 0) & (start <= (size - 1) * lhs_dilation) & (start % lhs_dilation == 0)
    return int(inside.sum())


def in_rounds(device: DeviceSpec, eqn: jex.JaxprEqn) -> bool:
    """Return whether the compiler turns the equation into a loop with buffers in memory: random words on the CPU."""
    return device.platform == "cpu" and is_threefry(eqn)


def kernel_seconds(device: DeviceSpec, dtype: str, flops: float, nbytes: float) -> float:
    """Return the roofline time of one kernel: the longer of arithmetic and traffic, plus the launch."""
    return max(flops / device.peak(dtype), nbytes / device.bandwidth) + device.launch_seconds


def alone_seconds(device: DeviceSpec, eqn: jex.JaxprEqn, flops: float | None = None) -> float:
    """Return the roofline time of an equation that is a kernel with nothing fused into it.

    **Arguments:** `flops` its arithmetic on this device, if it is not all of it.
    """
    atoms = [eqn.invars[1]] * 2 if is_write(eqn) else [*eqn.invars, *eqn.outvars]
    nbytes = sum(aval_nbytes(a.aval) for a in atoms)
    if in_rounds(device, eqn):
        nbytes = THREEFRY_PASSES * aval_nbytes(eqn.outvars[0].aval)
    return kernel_seconds(device, flops_dtype(eqn), eqn_flops(eqn) if flops is None else flops, nbytes)


def flops_dtype(eqn: jex.JaxprEqn) -> str:
    """Return the type at whose arithmetic rate the equation runs: that of its widest floating-point operand."""
    for atom in (*eqn.invars, *eqn.outvars):
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is not None and str(dtype) in _SHORT:
            return _SHORT[str(dtype)]
    return "f32"


_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "complex64": "f32"}
