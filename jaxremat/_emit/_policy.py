"""Bodies + segmentation + names -> a callable of nothing but `jax.checkpoint`s, one for each segment.

Law: it computes what the function computes; differentiated, it keeps the named values and the arguments of each
segment. Since each part of it is a `jax.checkpoint`, it works under every transformation that those do.

Max-pooling -> the same, with a derivative that reads off the place of each window's maximum.

JAX's derivative of a max-pooling is one operation, and the compiler makes index arrays of it, several times the size of
what is pooled, before anything else runs: they are made of constants, which no `jax.checkpoint` holds back. Here the
places of the maxima, a byte each, are found by comparing what is recomputed, and the tangents there are picked out.

Law: the same values, and the same derivatives up to the order in which overlapping windows add up. As in XLA, the first
of equal maxima counts.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import checkpoint

from .._program import _compat
from .._program._compat import Atom
from .._program._splice import inlined
from .._rewrite._pooling_places import MOST_PLACES, WINDOW, places, windows
from ._bodies import Body, copied
from ._joint import is_inexact
from ._naming import named, named_behind
from ._segmentation import Segment, Segmentation


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


def checkpointed(
    body: Body, cut: Segmentation, names: frozenset[str], prevent_cse: bool | tuple[bool, ...]
) -> Callable[..., list[Any]]:
    """Return the function of flat operands. **Arguments:** `prevent_cse` as in `jax.checkpoint`, or for each
    operand.
    """
    return lambda *operands: _evaluated(body, operands, cut, names, prevent_cse)


def _evaluated(
    body: Body,
    operands: Sequence[Atom],
    cut: Segmentation,
    names: frozenset[str],
    prevent_cse: bool | tuple[bool, ...],
) -> list[Any]:
    jaxpr = body.jaxpr
    known = [*body.closed.consts, *operands]
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], known, strict=True))

    def read(atom: Atom) -> Atom:
        return atom.val if _compat.is_literal(atom) else env[atom]

    segments = cut.segments[body.numbers[0]] if body.numbers else ()
    wanted = _read_later(body, segments)
    each = (
        prevent_cse if isinstance(prevent_cse, tuple) else (prevent_cse or len(segments) > 1,) * len(operands)
    )
    prevented = dict(
        zip(jaxpr.invars, each, strict=True)
    )  # what one segment hands on to another is, in any case
    for segment in segments:
        at = segment.own[0]
        eqn = jaxpr.eqns[at]
        if body.numbers[at] in cut.opened:
            results = _scanned(eqn, [read(a) for a in eqn.invars], body.inner[at], cut, names)
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        made = [v for i in segment.own for v in jaxpr.eqns[i].outvars if v in wanted[segment]]
        with _compat.staging_checkpoints():
            closed = _piece(body, segment, made, names)
            piece = jex.jaxpr_as_fun(closed)
            if body.numbers[at] not in cut.alone:
                policy = jax.checkpoint_policies.save_only_these_names(*sorted(names))
                flags = tuple(prevented.get(a, len(segments) > 1) for a in closed.jaxpr.invars)
                one = all(flags) if len(set(flags)) <= 1 else flags
                piece = checkpoint(piece, policy=policy, prevent_cse=one)
        results = piece(*(env[a] for a in closed.jaxpr.invars))
        env.update(zip(made, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _read_later(body: Body, segments: Sequence[Segment]) -> dict[Segment, set[Any]]:
    """Return for each segment the variables that those behind it or the body's results read."""
    needed = {a for a in body.jaxpr.outvars if not _compat.is_literal(a)}
    later: dict[Segment, set[Any]] = {}
    for segment in reversed(segments):
        later[segment] = set(needed)
        read = (a for i in segment.positions for a in body.jaxpr.eqns[i].invars)
        needed.update(a for a in read if not _compat.is_literal(a))
    return later


def _piece(body: Body, segment: Segment, made: Sequence[Atom], names: frozenset[str]) -> jex.ClosedJaxpr:
    """Return a segment as a jaxpr from the body's own variables to those of its own that are `made` for others."""
    rename: dict[Any, Any] = {}
    eqns = copied(body, segment.positions, rename, names.__contains__, _written)
    inner = {v for eqn in eqns for v in eqn.outvars}
    outer = dict.fromkeys(
        a for eqn in eqns for a in eqn.invars if not _compat.is_literal(a) and a not in inner
    )
    return _compat.new_jaxpr((), (), list(outer), [rename[v] for v in made], eqns)


def _written(eqn: jex.JaxprEqn, names: dict[int, str]) -> list[jex.JaxprEqn]:
    """Return the equation as it stands in a segment, its results under names."""
    if not is_pooling(eqn):
        return named(eqn, names)
    pooling, *after = named_behind(eqn, names)
    return [*pooled_inline(pooling), *after]


def _scanned(
    eqn: jex.JaxprEqn, values: Sequence[Atom], inner: Body, cut: Segmentation, names: frozenset[str]
) -> list[Any]:
    """Return a scan whose body is in segments."""
    before, carries = _compat.scan_counts(eqn)
    consts, init, scanned = values[:before], values[before : before + carries], values[before + carries :]

    # The forward and the backward pass of a loop are loops of their own, which nothing merges.
    def once(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
        results = _evaluated(inner, [*consts, *carry, *slices], cut, names, prevent_cse=False)
        return results[:carries], results[carries:]

    options = {
        k: eqn.params[k] for k in ("length", "reverse", "unroll", "_split_transpose") if k in eqn.params
    }
    carry, stacked = jax.lax.scan(once, init, scanned, **options)
    return [*carry, *stacked]
