"""Equations -> the same with copies of large values in fewer bits, from which the backward pass may restore them.

Encoding and decoding are equations after the one that computes the value, and all readers read the decoded value. The
planner treats these values like others: it saves the value whole, or saves its copy, or recomputes it. Only values that
are expensive to recompute have copies: results of contractions, carries of loops, and their sums. Pointwise results of
these cost about as much to recompute as to decode.

Invariant: while the value itself is in memory, nothing is decoded (see `_emit._emit`), so the forward pass computes the
same as without copies.

Masks of random words, such as dropout's, are always packed eight to a byte: this is exact, and the unpacked mask
replaces the original.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._program import _compat
from .._program._compat import Aval, DType, shaped
from .._program._flops import aval_nbytes
from .._program._primitives import (
    SUMS,
    is_fusion_root,
    is_light,
    is_pointwise,
    is_random,
    is_repeatable,
    on_host,
    on_mesh,
)
from .._program._splice import inlined
from .._runtime._mechanisms import mechanism
from ._backward_equations import backward_equations
from ._flat_program import Encoded, FlatProgram, Loop, with_eqns

LARGE = 1e-4
"""Values may have copies if they have at least this share of the bytes that the forward pass computes."""

SCALED = 128
"""The number of entries of the last dimension that share a scale, if it divides that dimension; else all do."""

LEAST_SCALED = 1e-30
"""The scale of groups whose largest entry is smaller; no arithmetic flushes it to zero."""

_FLOAT8 = jnp.float8_e4m3fn


@dataclass(frozen=True)
class Encoding:
    """A way to keep a value in fewer bits.

    **Fields:** `name` as in `jaxremat.optimize`'s `allow`; `code` in a `Variant`; `label` for people; `fits` returns
    whether a type has copies of this kind; `encode` returns the parts of a copy, `decode` the value, given its type and
    the parts; `entrywise` whether each entry has a separate copy, on its own device; `exact` whether decoding restores
    the value, which then is never in memory itself.
    """

    name: str
    code: int
    label: str
    fits: Callable[[Any], bool]
    encode: Callable[[jax.Array], tuple[jax.Array, ...]]
    decode: Callable[..., jax.Array]
    entrywise: bool = False
    exact: bool = False


def _scaled(x: jax.Array, most: float) -> tuple[jax.Array, jax.Array]:
    """Return entries in groups along the last dimension, divided by their group's scale; and the scales."""
    size = x.shape[-1]
    width = SCALED if size % SCALED == 0 else size
    groups = lax.reshape(x, (*x.shape[:-1], size // width, width))
    groups = lax.convert_element_type(groups, jnp.float32)
    largest = lax.reduce(lax.abs(groups), np.float32(-np.inf), lax.max, (groups.ndim - 1,))
    # NaN and infinities make their group's scale NaN or infinite, and all of it NaN.
    scale = lax.mul(lax.max(largest, np.float32(LEAST_SCALED)), np.float32(1 / most))
    return lax.div(groups, _spread(scale, groups.shape)), scale


def _spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(scale, shape, range(len(shape) - 1))


def _rescaled(aval: Aval | jax.Array, entries: jax.Array, scale: jax.Array) -> jax.Array:
    found = lax.mul(lax.convert_element_type(entries, jnp.float32), _spread(scale, entries.shape))
    return lax.convert_element_type(lax.reshape(found, aval.shape), aval.dtype)


def _to_int8(x: jax.Array) -> tuple[jax.Array, ...]:
    entries, scale = _scaled(x, 127.0)
    return lax.convert_element_type(lax.round(entries, lax.RoundingMethod.TO_NEAREST_EVEN), jnp.int8), scale


def _to_float8(x: jax.Array) -> tuple[jax.Array, ...]:
    entries, scale = _scaled(x, float(jnp.finfo(_FLOAT8).max))
    return lax.convert_element_type(entries, _FLOAT8), scale


def _bits_axis(aval: Aval | jax.Array) -> int | None:
    """Return the last axis along which entries fill whole bytes."""
    return next((d for d in reversed(range(aval.ndim)) if aval.shape[d] and aval.shape[d] % 8 == 0), None)


def _in_bytes(aval: Aval | jax.Array, axis: int) -> tuple[int, ...]:
    return (*aval.shape[:axis], aval.shape[axis] // 8, 8, *aval.shape[axis + 1 :])


def _to_bits(x: jax.Array) -> tuple[jax.Array, ...]:
    axis = _bits_axis(x)
    assert axis is not None
    bits = lax.convert_element_type(lax.reshape(x, _in_bytes(x, axis)), jnp.uint8)
    places = lax.broadcasted_iota(jnp.uint8, bits.shape, axis + 1)
    return (lax.reduce_or(lax.shift_left(bits, places), (axis + 1,)),)


def _of_bits(aval: Aval | jax.Array, packed: jax.Array) -> jax.Array:
    axis = _bits_axis(aval)
    assert axis is not None
    shape = _in_bytes(aval, axis)
    spread = lax.broadcast_in_dim(packed, shape, [d for d in range(len(shape)) if d != axis + 1])
    bit = lax.shift_right_logical(spread, lax.broadcasted_iota(jnp.uint8, shape, axis + 1))
    return lax.ne(lax.reshape(lax.bitwise_and(bit, np.uint8(1)), aval.shape), np.uint8(0))


def _is_float(aval: Aval | jax.Array, *sizes: int) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating)) and jnp.dtype(aval.dtype).itemsize in sizes


ENCODINGS = (
    Encoding(
        "bf16_residuals",
        1,
        "bfloat16",
        lambda a: _is_float(a, 4),
        lambda x: (lax.convert_element_type(x, jnp.bfloat16),),
        lambda aval, copy: lax.convert_element_type(copy, aval.dtype),
        entrywise=True,
    ),
    Encoding(
        "fp8_residuals", 2, "float8", lambda a: a.ndim > 0 and _is_float(a, 2, 4), _to_float8, _rescaled
    ),
    Encoding("int8_residuals", 3, "int8", lambda a: a.ndim > 0 and _is_float(a, 2, 4), _to_int8, _rescaled),
)
"""The ways to keep a value in fewer bits, the most precise first."""

MASK = Encoding(
    "",
    4,
    "bits",
    lambda a: a.dtype == jnp.bool_ and _bits_axis(a) is not None,
    _to_bits,
    _of_bits,
    entrywise=True,
    exact=True,
)
"""The encoding of masks of random words, which needs no permission."""

BY_CODE = {encoding.code: encoding for encoding in (*ENCODINGS, MASK)}

INEXACT = tuple(encoding.name for encoding in ENCODINGS)
"""The names in `allow` that change gradients."""


def allowed(names: Collection[str], devices: int) -> tuple[int, ...]:
    """Return the codes of the encodings with these names that are possible on this number of devices."""
    found = (each for each in ENCODINGS if each.name in names)
    return tuple(each.code for each in found if each.entrywise or devices == 1)


@cache
def _program(encoding: Encoding, shape: tuple[int, ...], dtype: DType) -> jex.ClosedJaxpr:
    """Return the equations that encode and decode such a value: their results are the parts of the copy and the decoded
    value.
    """

    def both(x: jax.Array) -> tuple[jax.Array, ...]:
        parts = encoding.encode(x)
        return *parts, encoding.decode(jax.ShapeDtypeStruct(shape, dtype), *parts)

    return jax.make_jaxpr(both)(jax.ShapeDtypeStruct(shape, dtype))


def with_copies(program: FlatProgram, codes: Sequence[int] = ()) -> FlatProgram:
    """Add copies of large values in these encodings, and of masks in bits, to a program with inlined loops."""
    able = _encodable(
        program.closed.jaxpr, program.loop_of, program.loops, [MASK, *(BY_CODE[code] for code in codes)]
    )
    if not able:
        return program
    eqns: list[Any] = []
    sources: list[int] = []
    loop_of: list[int] = []
    encoded: list[Encoded] = []
    rename: dict[Any, Any] = {}
    for i, (eqn, own) in enumerate(zip(program.eqns, program.loop_of, strict=True)):
        sources.append(i)
        eqns.append(_compat.renamed(eqn, rename))
        for v in eqn.outvars:
            if v in able:
                more, copy = _copied(eqn, v, able[v])
                eqns += more
                encoded.append(copy)
                rename[v] = copy.decoded
        sources += [-1] * (len(eqns) - len(sources))
        loop_of += [own] * (len(eqns) - len(loop_of))
    closed = with_eqns(program.closed, eqns)
    return program.moved(closed, sources, loop_of, encoded=(*program.encoded, *encoded))


def _copied(eqn: jex.JaxprEqn, v: jex.Var, encoding: Encoding) -> tuple[list[Any], Encoded]:
    program = _program(encoding, shaped(v).shape, shaped(v).dtype)
    info = _compat.in_scope(eqn, f"as_{encoding.label}").source_info
    eqns, (*parts, decoded) = inlined(program, [v], info)
    eqns = [each.replace(source_info=info) for each in eqns]
    return eqns, Encoded(v, tuple(parts), decoded, encoding.code, encoding.exact)


def decoders(jaxpr: jex.Jaxpr, encoded: Sequence[Encoded]) -> dict[int, int]:
    """Return for each equation of a value with an inexact copy the last of the equations that decode it."""
    maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    return {maker[each.whole]: maker[each.decoded] for each in encoded if not each.exact}


def _encodable(
    jaxpr: jex.Jaxpr, loop_of: Sequence[int], loops: Sequence[Loop], kinds: Sequence[Encoding]
) -> dict[Any, Encoding]:
    """Return the values that get copies, with their encodings: expensive values that the backward pass reads."""
    in_backward = backward_equations(jaxpr.eqns, loop_of, loops)
    forward = [eqn for eqn, is_late in zip(jaxpr.eqns, in_backward, strict=True) if not is_late]
    of_loop = [loops[i].length if i >= 0 else 1 for i in loop_of]
    lengths = [n for n, is_late in zip(of_loop, in_backward, strict=True) if not is_late]
    made = sum(n * aval_nbytes(v.aval) for eqn, n in zip(forward, lengths, strict=True) for v in eqn.outvars)
    masks = _random_masks(forward, lengths, LARGE * made)
    dear = masks if kinds == [MASK] else [*masks, *_dear(forward, lengths, LARGE * made)]
    returned = {a for a in jaxpr.outvars if not _compat.is_literal(a)}
    able = {
        v: kind
        for v in dear
        if v not in returned and not _compat.varying_axes(v)
        if (kind := next((kind for kind in kinds if kind.fits(v.aval)), None)) is not None
    }
    if not able:
        return {}
    read = {
        a
        for eqn, is_late in zip(jaxpr.eqns, in_backward, strict=True)
        if is_late
        for a in _compat.variables(eqn.invars)
    }
    # Pointwise values without copies are recomputed, so the backward pass also reads their operands.
    for eqn in reversed(forward):
        if (is_pointwise(eqn) or is_light(eqn)) and not read.isdisjoint(eqn.outvars):
            read.update(
                a for v in eqn.outvars if v in read and v not in able for a in _compat.variables(eqn.invars)
            )
    return {v: kind for v, kind in able.items() if v in read}


def fewer_nbytes(
    jaxpr: jex.Jaxpr, loop_of: Sequence[int], loops: Sequence[Loop], codes: Sequence[int]
) -> int:
    """Return the bytes that all possible copies save."""
    lengths = {
        v: loops[i].length if i >= 0 else 1
        for eqn, i in zip(jaxpr.eqns, loop_of, strict=True)
        for v in eqn.outvars
    }
    found = _encodable(jaxpr, loop_of, loops, [BY_CODE[code] for code in codes]).items()
    return sum(lengths[v] * (aval_nbytes(v.aval) - _copy_nbytes(kind, v.aval)) for v, kind in found)


def _copy_nbytes(encoding: Encoding, aval: Aval | jax.Array) -> int:
    *parts, _ = _program(encoding, aval.shape, aval.dtype).jaxpr.outvars
    return sum(aval_nbytes(v.aval) for v in parts)


@mechanism("masks in bits", off=lambda *_: [])
def _random_masks(forward: Sequence[jex.JaxprEqn], lengths: Sequence[int], large: float) -> list[jex.Var]:
    """Return the large masks that are computed entry by entry from random words, and from no other mask."""
    words: set[Any] = set()  # random words, and values that depend on them
    found: list[Any] = []
    for eqn, n in zip(forward, lengths, strict=True):
        simple = is_pointwise(eqn) or is_light(eqn)
        operands = [a for a in _compat.variables(eqn.invars) if n * aval_nbytes(a.aval) >= large]
        if not is_random(eqn) and not (simple and operands and words.issuperset(operands)):
            continue
        masks = {v for v in eqn.outvars if shaped(v).dtype == jnp.bool_ and n * aval_nbytes(v.aval) >= large}
        found += [v for v in eqn.outvars if v in masks and not on_host(v.aval)]
        words.update(v for v in eqn.outvars if v not in masks)
    return found


def _dear(forward: Sequence[jex.JaxprEqn], lengths: Sequence[int], large: float) -> list[jex.Var]:
    """Return the large values that are not computed entry by entry from a single large one."""
    roots: dict[Any, frozenset[Any]] = {}  # value -> the expensive values that it depends on entry by entry
    found: list[Any] = []
    for eqn, n in zip(forward, lengths, strict=True):
        simple = is_pointwise(eqn) or is_light(eqn)
        operands = (roots.get(a, frozenset()) for a in _compat.variables(eqn.invars))
        of: frozenset[Any] = frozenset().union(*operands) if simple else frozenset()
        own = (is_fusion_root(eqn) and is_repeatable(eqn)) or eqn.primitive.name == "scan_carry"
        own = own or (eqn.primitive.name in SUMS and len(of) > 1)
        for v in eqn.outvars:
            is_large = n * aval_nbytes(v.aval) >= large and not on_host(v.aval) and not on_mesh(v.aval)
            found += [v] if own and is_large else []
            roots[v] = frozenset({v}) if own and is_large else of
    return found
