"""Equations -> the same, with gradients of max-pooling computed from the positions of the maxima in their windows.

JAX's gradient of a max-pooling reads the pooled operand, searches for the maxima again, and scatters: for this the
compilers create index arrays of several times the size of the pooled values, or fill zeros long before it runs. The
position of a maximum in its window is one byte. It is computed next to the pooling, which reads the same windows, and
the gradient needs nothing else but its cotangent: each entry of the gradient is a sum over the windows that contain it.

Invariant: the same values up to the order in which overlapping windows add up; of equal maxima the first counts, as in
XLA. The positions are computed right after the pooling if it is in the program, else before the gradient.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from .._program import _compat
from .._program._compat import Atom, Aval, DType, SourceInfo, shaped
from .._program._splice import inlined
from .._runtime._mechanisms import mechanism

MOST_PLACES = 256
"""The most positions of a window; gradients with larger windows stay unchanged."""

Window = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]
"""For each dimension the size of a window, the stride from one to the next, and the padding on both sides."""

WINDOW = ("window_dimensions", "window_strides", "padding")
"""The parameters with these."""

PLACES: Any = jex.Primitive("max_pool_places")
GRADIENT: Any = jex.Primitive("max_pool_gradient")


def places(
    x: jax.Array,
    *,
    window_dimensions: tuple[int, ...],
    window_strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    largest: bool,
) -> jax.Array:
    """Return the position of the largest (smallest) value in each window, counted along its last dimension first, in
    uint8.
    """
    edges = [(low, high, 0) for low, high in padding]
    padded = jax.lax.pad(x, extreme(x.dtype, lowest=largest), edges)
    better = operator.ge if largest else operator.le
    each = [*windows(padded, window_dimensions, window_strides)]
    best, chosen = each[0], jnp.zeros(each[0].shape, jnp.uint8)
    for i, other in enumerate(each[1:], 1):
        keeps = better(best, other)
        best, chosen = jnp.where(keeps, best, other), jnp.where(keeps, chosen, jnp.uint8(i))
    return chosen


def gradient(
    cotangent: jax.Array,
    chosen: jax.Array,
    *,
    window_dimensions: tuple[int, ...],
    window_strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    sizes: tuple[int, ...],
) -> jax.Array:
    """Return the gradient of the operand: each entry gets the cotangents of the windows whose maximum it is.

    **Arguments:** `sizes` of the operand, None for those of the cotangent.
    """
    pooled, zero = cotangent.shape, jnp.zeros((), cotangent.dtype)
    whole = [size or n for size, n in zip(sizes, pooled, strict=True)]
    full = [low + n + high for n, (low, high) in zip(whole, padding, strict=True)]
    sides = [*zip(pooled, full, window_dimensions, window_strides, strict=True)]
    # Compilers fuse all positions into one kernel or, if the cotangent is a sum itself, write one array per position.
    # If windows overlap, arrays are spread once before positions are compared; else one kernel reads them.
    if any(window > stride for _, _, window, stride in sides):
        edges = [(window - 1, f - (n - 1) * stride - 1, stride - 1) for n, f, window, stride in sides]
        spread, places = lax.pad(cotangent, zero, edges), lax.pad(chosen, jnp.uint8(0), edges)

        def found(i: int, place: tuple[int, ...]) -> jax.Array:
            """Return the cotangents of the windows with their maximum at this position."""
            start = [
                low + w - 1 - p for p, w, (low, _) in zip(place, window_dimensions, padding, strict=True)
            ]
            stop = [s + n for s, n in zip(start, whole, strict=True)]
            return jnp.where(lax.slice(places, start, stop) == i, lax.slice(spread, start, stop), zero)

        return functools.reduce(
            operator.add, itertools.starmap(found, enumerate(_each_place(window_dimensions)))
        )
    cotangent = lax.optimization_barrier(cotangent)

    def alone(i: int, place: tuple[int, ...]) -> jax.Array:
        """Return the same if windows do not overlap."""
        edges = [
            (p, f - p - (n - 1) * stride - 1, stride - 1)
            for p, (n, f, _, stride) in zip(place, sides, strict=True)
        ]
        return lax.pad(jnp.where(chosen == i, cotangent, zero), zero, edges)

    total = functools.reduce(
        operator.add, itertools.starmap(alone, enumerate(_each_place(window_dimensions)))
    )
    start = [low for low, _ in padding]
    return lax.slice(total, start, [low + n for low, n in zip(start, whole, strict=True)])


def windows(padded: jax.Array, dimensions: Sequence[int], strides: Sequence[int]) -> Iterator[jax.Array]:
    """Yield for each position in a window the values of all windows there."""
    pooled = [(n - w) // s + 1 for n, w, s in zip(padded.shape, dimensions, strides, strict=True)]
    for place in _each_place(dimensions):
        stop = [p + (n - 1) * s + 1 for p, n, s in zip(place, pooled, strides, strict=True)]
        yield jax.lax.slice(padded, place, stop, strides)


def extreme(dtype: DType, *, lowest: bool) -> jax.Array:
    """Return the lowest (highest) number of a type."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    if inexact and np.isinf(np.array(np.inf).astype(dtype)):
        return jnp.array(-np.inf if lowest else np.inf, dtype)
    info = jnp.finfo(dtype) if inexact else jnp.iinfo(dtype)
    return jnp.array(info.min if lowest else info.max, dtype)


def _each_place(dimensions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, dimensions))


def _define(primitive: jex.Primitive, fn: Callable[..., jax.Array], differentiated: int | None) -> None:
    """Define a primitive by a function, differentiable in one operand, or None."""

    def typed(*avals: Aval, **params: object) -> Any:
        return jax.make_jaxpr(functools.partial(fn, **params))(*avals).out_avals[0]

    def batched(
        operands: Sequence[jax.Array], axes: Sequence[int | None], **params: object
    ) -> tuple[jax.Array, int]:
        return jax.vmap(functools.partial(fn, **params), in_axes=axes)(*operands), 0

    def jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array], **params: object) -> tuple[Any, Any]:
        made = primitive.bind(*primals, **params)
        if differentiated is None or type(tangents[differentiated]) is ad.Zero:
            return made, ad.Zero(jax.typeof(made).to_tangent_aval())
        others = [*primals]
        others[differentiated] = tangents[differentiated]  # in which it is linear
        return made, fn(*others, **params)

    primitive.def_impl(lambda *operands, **params: jax.jit(functools.partial(fn, **params))(*operands))
    primitive.def_abstract_eval(typed)
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = jvp


_define(PLACES, places, None)
_define(GRADIENT, gradient, 0)


def pooled_by_place(flat: jex.ClosedJaxpr, *, early: bool) -> jex.ClosedJaxpr:
    """Return a program with `by_place` applied to its equations."""
    own = flat.jaxpr
    return _compat.new_jaxpr(
        own.constvars, flat.consts, own.invars, own.outvars, by_place(own.eqns, early=early)
    )


@mechanism("pooling's gradient by place", off=lambda eqns, **_: list(eqns))
def by_place(eqns: Sequence[jex.JaxprEqn], *, early: bool = True) -> list[jex.JaxprEqn]:
    """Return the equations of one body, with such gradients.

    **Arguments:** `early` whether positions are computed right after the pooling, instead of before their gradients.
    """
    gradients = {i: eqn for i, eqn in enumerate(eqns) if is_pooling_gradient(eqn)}
    if not gradients:
        return list(eqns)
    poolings = {
        (eqn.invars[0], *pooling): i for i, eqn in enumerate(eqns) if (pooling := _pooling(eqn)) is not None
    }
    chosen: dict[Any, Any] = {}
    behind: dict[int, list[Any]] = {}
    for i, eqn in gradients.items():
        operand, window = eqn.invars[1], _window(eqn)
        key = operand, *window, eqn.params["select_prim"] is jax.lax.ge_p
        if key in chosen:
            continue
        # The pooling reads the same windows.
        at = poolings.get(key, i) if early else i
        params = {**_named(window), "largest": key[-1]}
        made, (chosen[key],) = _placed(PLACES, [operand], params, eqns[at].source_info)
        behind.setdefault(at if at in gradients else at + 1, []).extend(made)
    found: list[Any] = []
    for i, eqn in enumerate(eqns):
        found += behind.get(i, ())
        if i not in gradients:
            found.append(eqn)
            continue
        (cotangent, operand), window = eqn.invars, _window(eqn)
        key = operand, *window, eqn.params["select_prim"] is jax.lax.ge_p
        rows = zip(window[0], window[1], window[2], shaped(operand).shape, strict=True)
        sizes = tuple(None if (w, s, *pad) == (1, 1, 0, 0) else n for w, s, pad, n in rows)
        params = {**_named(window), "sizes": sizes}
        found += _placed(GRADIENT, [cotangent, chosen[key]], params, eqn.source_info, eqn.outvars)[0]
    return found


def is_by_place(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is such a gradient."""
    return eqn.primitive is GRADIENT


def is_pooling_gradient(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is JAX's gradient of a max-pooling, with windows that are not too large."""
    if eqn.primitive.name != "select_and_scatter_add" or _compat.is_literal(eqn.invars[1]):
        return False
    known = eqn.params["select_prim"] in (jax.lax.ge_p, jax.lax.le_p)
    return known and math.prod(eqn.params["window_dimensions"]) <= MOST_PLACES


def _pooling(eqn: jex.JaxprEqn) -> tuple[Any, ...] | None:
    """Return the windows of a max-pooling, and whether it takes the largest; None for another equation."""
    largest = {"reduce_window_max": True, "reduce_window_min": False}.get(eqn.primitive.name)
    if largest is None or max(*eqn.params["base_dilation"], *eqn.params["window_dilation"], 1) > 1:
        return None
    return (*_window(eqn), largest)


def _window(eqn: jex.JaxprEqn) -> Window:
    params = eqn.params
    edges = tuple((int(low), int(high)) for low, high in params["padding"])
    return tuple(params["window_dimensions"]), tuple(params["window_strides"]), edges


def _named(window: Window) -> dict[str, Any]:
    return dict(zip(WINDOW, window, strict=True))


def _placed(
    primitive: jex.Primitive,
    operands: list[Atom],
    params: dict[str, object],
    info: SourceInfo,
    results: Sequence[jex.Var] = (),
) -> tuple[list[Any], list[Any]]:
    closed = jax.make_jaxpr(functools.partial(primitive.bind, **params))(*(a.aval for a in operands))
    return inlined(closed, operands, info, results)
