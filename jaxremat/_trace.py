"""Function and arguments -> `Traced`: one flat jaxpr of the whole step, forward and backward.

Laws: evaluating `Traced.jaxpr` gives what the function gives. It holds no call that could be inlined, no dead
equation and no two equal pure equations: merging equals undoes the user's own `jax.checkpoint`, so that the planner
starts from the whole truth. Its equations stand in the order of `_order.memory_order`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from . import _compat
from ._order import memory_order

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
}
_IDENTITIES = frozenset({"name", "stop_gradient", "copy", "copy_p"})


@dataclass(frozen=True)
class Traced:
    """A step as one flat jaxpr.

    **Fields:** `jaxpr` normalised and ordered; `flat` the same program merely inlined, in the user's order, which
    compiles to the plain step; `origin` for each equation of `flat` the index of the equation of `jaxpr` that computes
    the same, -1 where none does; `labels` the user's `checkpoint_name`s by variable; `in_tree` and `out_tree` the
    structures of `(args, kwargs)` without static arguments, and of the result; `donated` per flat argument;
    `rematted` whether the user's program has checkpoints of its own.
    """

    jaxpr: jex.ClosedJaxpr
    flat: jex.ClosedJaxpr
    origin: tuple[int, ...]
    labels: dict[Any, str]
    in_tree: Any
    out_tree: Any
    donated: tuple[bool, ...]
    rematted: bool


def trace(jitted: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Traced:
    """Trace a jitted step for these arguments (arrays or `jax.ShapeDtypeStruct`s) and normalise the result."""
    staged = jitted.trace(*args, **kwargs)  # type: ignore[attr-defined]
    infos, in_tree = jax.tree.flatten(staged.args_info)
    donated = tuple(bool(info.donated) for info in infos)
    out_tree = jax.tree.structure(staged.out_info)
    return normalise(staged.jaxpr, in_tree, out_tree, donated)


def normalise(
    closed: jex.ClosedJaxpr, in_tree: Any = None, out_tree: Any = None, donated: Sequence[bool] = ()
) -> Traced:
    """Inline, merge, prune and order a jaxpr."""
    flat, labels, rematted = _inline(closed)
    merged, merged_of = _merge(flat)
    kept = _alive(merged)
    order = memory_order(merged.jaxpr, kept)
    place = {old: new for new, old in enumerate(order)}
    jaxpr = _compat.new_jaxpr(
        merged.jaxpr.constvars,
        merged.consts,
        merged.jaxpr.invars,
        merged.jaxpr.outvars,
        [merged.jaxpr.eqns[i] for i in order],
    )
    _compat.check_jaxpr(jaxpr)
    return Traced(
        jaxpr=jaxpr,
        flat=flat,
        origin=tuple(place.get(i, -1) for i in merged_of),
        labels=labels,
        in_tree=in_tree,
        out_tree=out_tree,
        donated=tuple(donated) or (False,) * len(closed.jaxpr.invars),
        rematted=rematted,
    )


def _inline(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, dict[Any, str], bool]:
    """Replace calls by their bodies and identities by their operands."""
    eqns: list[Any] = []
    constvars: list[Any] = []
    consts: list[Any] = []
    const_of: dict[int, Any] = {}
    labels: dict[Any, str] = {}
    rematted = False

    def const_var(const: Any, aval: Any) -> Any:
        if id(const) not in const_of:
            const_of[id(const)] = _compat.new_var(aval)
            constvars.append(const_of[id(const)])
            consts.append(const)
        return const_of[id(const)]

    def walk(jaxpr: Any, operands: Sequence[Any], outer: Any) -> list[Any]:
        nonlocal rematted
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], operands, strict=True))

        def read(atom: Any) -> Any:
            return atom if _compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            invars = [read(a) for a in eqn.invars]
            info = eqn.source_info if outer is None else _compat.under(outer, eqn)
            name = eqn.primitive.name
            body = _body(eqn)
            if body is not None:
                rematted = rematted or name in ("remat2", "checkpoint")
                inner, inner_consts = body
                inner_constvars = [
                    const_var(c, v.aval) for c, v in zip(inner_consts, inner.constvars, strict=True)
                ]
                outs = walk(inner, [*inner_constvars, *invars], info)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            if _is_identity(eqn, invars):
                if name == "name" and not _compat.is_literal(invars[0]):
                    labels.setdefault(invars[0], eqn.params["name"])
                env[eqn.outvars[0]] = invars[0]
                continue
            outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=info))
        return [read(a) for a in jaxpr.outvars]

    jaxpr = closed.jaxpr
    top_consts = [const_var(c, v.aval) for c, v in zip(closed.consts, jaxpr.constvars, strict=True)]
    invars = [_compat.new_var(v.aval) for v in jaxpr.invars]
    outvars = walk(jaxpr, [*top_consts, *invars], None)
    return _compat.new_jaxpr(constvars, consts, invars, outvars, eqns), labels, rematted


def _body(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr and constants of a call that may be inlined."""
    key = _CALLS.get(eqn.primitive.name)
    if key is None or (eqn.primitive.name in ("jit", "pjit") and not _compat.is_plain_call(eqn.params)):
        return None
    body = eqn.params[key]
    jaxpr = getattr(body, "jaxpr", body)
    consts = getattr(body, "consts", ())
    if len(jaxpr.constvars) != len(consts) or len(jaxpr.invars) != len(eqn.invars):
        return None
    return jaxpr, consts


def _is_identity(eqn: Any, invars: Sequence[Any]) -> bool:
    if len(invars) != 1 or len(eqn.outvars) != 1 or invars[0].aval != eqn.outvars[0].aval:
        return False
    if eqn.primitive.name == "reduce_precision":
        info = jax.numpy.finfo(invars[0].aval.dtype)
        return eqn.params["exponent_bits"] == info.nexp and eqn.params["mantissa_bits"] == info.nmant
    return eqn.primitive.name in _IDENTITIES


def _merge(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[int]]:
    """Common subexpressions computed once; also, for each old equation, the index of the new one."""
    seen: dict[Any, int] = {}
    rename: dict[Any, Any] = {}
    eqns: list[Any] = []
    merged_of: list[int] = []
    for eqn in closed.jaxpr.eqns:
        invars = [a if _compat.is_literal(a) else rename.get(a, a) for a in eqn.invars]
        key = None if eqn.effects or eqn.primitive.name == "optimization_barrier" else _key(eqn, invars)
        if key is not None and key in seen:
            twin = eqns[seen[key]]
            rename.update(zip(eqn.outvars, twin.outvars, strict=True))
            merged_of.append(seen[key])
            continue
        if key is not None:
            seen[key] = len(eqns)
        merged_of.append(len(eqns))
        eqns.append(eqn.replace(invars=invars))
    outvars = [a if _compat.is_literal(a) else rename.get(a, a) for a in closed.jaxpr.outvars]
    jaxpr = closed.jaxpr
    return _compat.new_jaxpr(jaxpr.constvars, closed.consts, jaxpr.invars, outvars, eqns), merged_of


def _key(eqn: Any, invars: Sequence[Any]) -> Any:
    """What makes two pure equations the same; None where parameters cannot be compared."""

    def atom(a: Any) -> Any:
        if not _compat.is_literal(a):
            return a
        value = np.asarray(a.val)
        return (str(value.dtype), value.shape, value.tobytes(), str(a.aval))

    try:
        params = tuple(sorted((k, _hashable(v)) for k, v in eqn.params.items()))
        key = (eqn.primitive, tuple(map(atom, invars)), params, eqn.ctx, tuple(v.aval for v in eqn.outvars))
        hash(key)
    except (TypeError, ValueError):
        return None
    return key


class _Typed(tuple):
    """A parameter with its type, ordered by name alone, so that `1`, `1.0` and `True` stay different."""

    __slots__ = ()

    def __lt__(self, other: Any) -> bool:
        return False


def _hashable(value: Any) -> Any:
    return _Typed((type(value), value))


def _alive(closed: jex.ClosedJaxpr) -> list[bool]:
    """For each equation whether an output or an effect needs it."""
    needed = {a for a in closed.jaxpr.outvars if not _compat.is_literal(a)}
    alive = [False] * len(closed.jaxpr.eqns)
    for i in reversed(range(len(alive))):
        eqn = closed.jaxpr.eqns[i]
        if eqn.effects or any(v in needed for v in eqn.outvars):
            alive[i] = True
            needed.update(a for a in eqn.invars if not _compat.is_literal(a))
    return alive
