"""The equations of an attention -> those of its gradient, looked up among the others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._inline import Inliner
from .._program._splice import inlined
from ._reading import Program


@dataclass(frozen=True)
class Gradient:
    """**Fields:** the `cotangent` of the result; for queries, keys and values, and other operands, the variable that is
    their gradient, None where there is none; `at` the first of the equations that make these.
    """

    cotangent: Any
    results: tuple[Any, ...]
    at: int


def between(program: Program, result: jex.Var, operands: Sequence[Atom]) -> tuple[list[int], list[Any]]:
    """Return the equations that make a result of these operands, in order, and what else they read."""
    depends: dict[Any, bool] = dict.fromkeys(operands, True)
    first = min(program.maker.get(a, -1) for a in operands)

    def follow(a: Atom) -> bool:
        if a not in depends:
            i = program.maker.get(a, -1)
            read = _compat.variables(program.eqns[i].invars) if i > first else []
            each = [follow(b) for b in read]  # all of them, to know of each
            depends[a] = any(each)
        return depends[a]

    follow(result)
    made = {program.maker[a] for a, is_so in depends.items() if is_so and a not in operands}
    read = dict.fromkeys(a for i in sorted(made) for a in _compat.variables(program.eqns[i].invars))
    return sorted(made), [a for a in read if not depends.get(a, False)]


def gradient_of(
    program: Program,
    forward: Sequence[int],
    operands: Sequence[jex.Var],
    fixed: Sequence[jex.Var],
    result: jex.Var,
    scope: int,
) -> tuple[Gradient | None, set[int]]:
    """Return the gradient, and the equations that compute it."""
    best: tuple[Gradient | None, set[int]] = None, set()
    most = 0
    for cotangent in _cotangents(program, operands[2], result, scope):
        for differentiated in _differentiated(program, forward, operands, fixed, result):
            info = program.eqns[forward[-1]].source_info
            eqns, made = inlined(differentiated, [*operands, *fixed, cotangent], info)
            start = len(program.equals.merged_of)
            for eqn in eqns:
                program.equals.add(eqn, scope)
            looked_up = (program.equals.eqns[i] for i in program.equals.merged_of[start:])
            known = {program.maker[v] for eqn in looked_up for v in eqn.outvars if v in program.maker}
            own = {i for i in known if program.alive[i]}
            results = tuple(
                v if not _compat.is_literal(v) and program.maker.get(v) in own else None
                for v in map(program.equals.read, made)
            )
            makers = [program.maker[v] for v in results if v is not None]
            if len(makers) > most:
                most = len(makers)
                best = Gradient(cotangent, results, min(makers)), own - set(forward)
    return best


def _cotangents(program: Program, values: jex.Var, result: jex.Var, scope: int) -> list[jex.Var]:
    """Return what may be the cotangent of a result: what values are multiplied by, of the same type."""
    found: dict[Any, None] = {}
    for i in program.readers.get(values, ()):
        eqn = program.eqns[i]
        if eqn.primitive.name == "dot_general" and program.scopes[i] == scope:
            for a in _compat.variables(eqn.invars):
                alike = (shaped(a).shape, shaped(a).dtype) == (shaped(result).shape, shaped(result).dtype)
                if a is not values and a is not result and alike:
                    found[a] = None
    return list(found)


def _differentiated(
    program: Program,
    forward: Sequence[int],
    operands: Sequence[jex.Var],
    fixed: Sequence[jex.Var],
    result: jex.Var,
) -> Iterable[jex.ClosedJaxpr]:
    """Operands, what is `fixed`, cotangent -> gradients, with the maxima as constants, and as they are."""
    eqns = [program.eqns[i] for i in forward]
    closed = _compat.new_jaxpr((), (), [*operands, *fixed], [result], eqns)
    text = f"{len(operands)} of {closed}"
    if text not in program.gradients:
        count = len(operands)
        program.gradients[text] = [_pulled(closed, count, constant=constant) for constant in (True, False)]
    return program.gradients[text]


def _pulled(closed: jex.ClosedJaxpr, count: int, *, constant: bool) -> jex.ClosedJaxpr:
    jaxpr = closed.jaxpr

    def run(*operands: jax.Array) -> Any:
        env = dict(zip(jaxpr.invars, operands, strict=True))
        for eqn in jaxpr.eqns:
            made = eqn.primitive.bind(
                *(a.val if _compat.is_literal(a) else env[a] for a in eqn.invars), **eqn.params
            )
            if constant and eqn.primitive.name == "reduce_max":
                made = lax.stop_gradient(made)
            env[eqn.outvars[0]] = made
        return env[jaxpr.outvars[0]]

    def pulled(*arguments: jax.Array) -> Any:
        *operands, cotangent = arguments
        fixed = operands[count:]
        _, pull = jax.vjp(lambda *of: run(*of, *fixed), *operands[:count])
        return pull(cotangent)

    types = [_typed(v) for v in (*jaxpr.invars, jaxpr.outvars[0])]
    flat = Inliner().program(jax.make_jaxpr(pulled)(*types))
    assert not flat.consts
    return flat


def _typed(v: jex.Var) -> Any:
    weak = bool(getattr(v.aval, "weak_type", False))
    sharding = getattr(v.aval, "sharding", None)
    named = sharding if sharding is not None and not sharding.mesh.empty else None
    return jax.ShapeDtypeStruct(shaped(v).shape, shaped(v).dtype, weak_type=weak, sharding=named)
