"""Equation + name for a result -> equations that name it so that its derivative reads it by that name, too.

Many derivatives read their own result: that of `tanh` is `1 - y**2`. They do not read a name that is put behind the
equation, so a policy that saves the name would keep an unused value, and `y` would be recomputed all the same. For such
equations, the equation becomes a `custom_jvp` function whose rule is the equation's own, reading the named result.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .._program import _compat
from .._program._compat import Atom, SourceInfo
from .._program._inline import Inliner
from .._program._primitives import runs_once
from .._program._splice import inlined


def named(eqn: jex.JaxprEqn, names: dict[int, str]) -> list[jex.JaxprEqn]:
    """Return equations that compute the equation's results, some of them under names. **Arguments:** `names` by the
    position of a result.
    """
    return _self_reading(eqn, names) or named_behind(eqn, names, _in_parts)


def _whole(value: Atom, result: jex.Var, name: str, source_info: SourceInfo) -> list[jex.JaxprEqn]:
    """Return equations that give a value its name, under which it is the result."""
    return [_compat.name_eqn(value, result, name, source_info)]


def _in_parts(value: Atom, result: jex.Var, name: str, source_info: SourceInfo) -> list[jex.JaxprEqn]:
    """Return the same with both parts of a complex number named: `jax.checkpoint` fails if it saves the whole."""
    if not jnp.issubdtype(getattr(value.aval, "dtype", np.int32), np.complexfloating):
        return _whole(value, result, name, source_info)
    closed = jax.make_jaxpr(lambda x: _put_together(x, name))(value.aval)
    return inlined(closed, [value], source_info, [result])[0]


def _put_together(x: jax.Array, name: str) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return checkpoint_name(x, name)
    return jax.lax.complex(checkpoint_name(jnp.real(x), name), checkpoint_name(jnp.imag(x), name))


def named_behind(
    eqn: jex.JaxprEqn,
    names: dict[int, str],
    give: Callable[[Atom, jex.Var, str, SourceInfo], list[jex.JaxprEqn]] = _whole,
) -> list[jex.JaxprEqn]:
    """Return the equation, followed by equations that give its results their names."""
    outvars = list(eqn.outvars)
    after = []
    for i, name in names.items():
        outvars[i] = _compat.new_var(eqn.outvars[i].aval)
        after.extend(give(outvars[i], eqn.outvars[i], name, eqn.source_info))
    return [eqn.replace(outvars=outvars), *after]


def _self_reading(eqn: jex.JaxprEqn, names: dict[int, str]) -> list[Any] | None:
    """Return the equation as a `custom_jvp` function, None if its derivative reads none of the named results, or if it
    may run only once.
    """
    if runs_once(eqn):
        return None
    operands = list(dict.fromkeys(a for a in eqn.invars if names and not _compat.is_literal(a)))
    smooth = [jnp.issubdtype(getattr(v.aval, "dtype", np.int32), np.inexact) for v in operands]
    results = [jnp.issubdtype(getattr(v.aval, "dtype", np.int32), np.inexact) for v in eqn.outvars]
    if not any(smooth) or not all(results) or eqn.primitive.name.startswith("custom_vjp"):
        return None
    alone = _compat.new_jaxpr((), (), operands, eqn.outvars, [eqn])
    plain = jex.jaxpr_as_fun(alone)

    def pushed(primals: list[jax.Array], tangents: list[jax.Array]) -> tuple[Any, Any]:
        def of(chosen: list[jax.Array]) -> Any:
            taken = iter(chosen)
            return plain(*(next(taken) if s else p for p, s in zip(primals, smooth, strict=True)))

        return jax.jvp(of, ([p for p, s in zip(primals, smooth, strict=True) if s],), (tangents,))

    types = [v.aval for v in operands]
    rule = Inliner(derivatives=True).program(
        jax.make_jaxpr(pushed)(types, [t for t, s in zip(types, smooth, strict=True) if s])
    )
    reading = _reading_names(rule, {rule.jaxpr.outvars[i]: name for i, name in names.items()})
    if reading is None:
        return None
    evaluate = jex.jaxpr_as_fun(reading)
    fixed = dict(names)

    @jax.custom_jvp
    def function(*primals: jax.Array) -> list[Any]:
        made = plain(*primals)
        return [_put_together(y, fixed[i]) if i in fixed else y for i, y in enumerate(made)]

    @function.defjvp
    def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[list[Any], list[Any]]:
        made = evaluate(*primals, *(t for t, s in zip(tangents, smooth, strict=True) if s))
        return made[: len(results)], made[len(results) :]

    return inlined(jax.make_jaxpr(function)(*types), operands, eqn.source_info, eqn.outvars)[0]


def _reading_names(rule: jex.ClosedJaxpr, names: dict[jex.Var, str]) -> jex.ClosedJaxpr | None:
    """Return the rule with these of its variables named, None if no equation reads them."""
    jaxpr = rule.jaxpr
    if not any(a in names for eqn in jaxpr.eqns for a in eqn.invars if not _compat.is_literal(a)):
        return None
    rename: dict[Any, Any] = {}
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        eqns.append(_compat.renamed(eqn, rename))
        for v in eqn.outvars:
            if v in names:
                rename[v] = _compat.new_var(v.aval)
                eqns.extend(_in_parts(v, rename[v], names[v], eqn.source_info))
    outvars = [a if _compat.is_literal(a) else rename.get(a, a) for a in jaxpr.outvars]
    return _compat.new_jaxpr(jaxpr.constvars, rule.consts, jaxpr.invars, outvars, eqns)
