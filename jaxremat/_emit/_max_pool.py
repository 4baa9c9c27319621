"""Max-pooling -> the same, with a derivative that reads off the place of each window's maximum.

JAX's derivative of a max-pooling is one operation, and the compiler makes index arrays of it, several times the size of
what is pooled, before anything else runs: they are made of constants, which no `jax.checkpoint` holds back. Here the
places of the maxima, a byte each, are found by comparing what is recomputed, and the tangents there are picked out.

Law: the same values, and the same derivatives up to the order in which overlapping windows add up. As in XLA, the first
of equal maxima counts.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._program._splice import inlined
from .._rewrite._pooling_places import MOST_PLACES, WINDOW, places, windows
from ._joint import is_inexact


def is_pooling(eqn: jex.JaxprEqn) -> bool:
    """Return whether it is a max-pooling (or min-pooling) that has a derivative, with windows that are not too
    large.
    """
    if eqn.primitive.name not in ("reduce_window_max", "reduce_window_min"):
        return False
    params = eqn.params
    spread = max(*params["base_dilation"], *params["window_dilation"], 1) > 1
    small = math.prod(params["window_dimensions"]) <= MOST_PLACES
    return is_inexact(eqn.invars[0].aval) and small and not spread


def pooled_inline(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """Return equations in place of a max-pooling."""
    plain = functools.partial(eqn.primitive.bind, **eqn.params)

    @jax.custom_jvp
    def pooled(x: jax.Array) -> jax.Array:
        return plain(x)

    @pooled.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
        return plain(*primals), _tangent(eqn, *primals, *tangents)

    closed = jax.make_jaxpr(pooled)(eqn.invars[0].aval)
    return inlined(closed, eqn.invars, eqn.source_info, eqn.outvars)[0]


def _tangent(eqn: jex.JaxprEqn, x: jax.Array, dx: jax.Array) -> jax.Array:
    """Return in each window the tangent of its first extreme value."""
    params = eqn.params
    largest = eqn.primitive.name == "reduce_window_max"
    edges = [(low, high, 0) for low, high in params["padding"]]
    tangents = jax.lax.pad(dx, jnp.zeros((), dx.dtype), edges)
    there = windows(tangents, params["window_dimensions"], params["window_strides"])
    chosen = places(x, **{name: params[name] for name in WINDOW}, largest=largest)
    return functools.reduce(operator.add, (jnp.where(chosen == i, at, 0) for i, at in enumerate(there)))
