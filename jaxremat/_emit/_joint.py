"""Function that is differentiated later + argument types -> `Joint`: its forward and its backward pass as one program.

The function becomes a flat jaxpr whose constants are arguments too, so that the values that it closes over, tracers
included, are differentiated as well. Only calls without a meaning for differentiation are inlined; `custom_jvp` and
`custom_vjp` functions stay.

Invariant: the joint program maps (primals, cotangents of the differentiable results) to (results, cotangents of the
differentiated primals), as `jax.vjp` does.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._compiler._program import Program
from .._program import _compat
from .._program._compat import AbstractValue, Args, Aval, Kwargs
from .._program._flops import aval_nbytes
from .._program._inline import Inliner
from .._program._primitives import is_backward
from .._program._references import of_values
from .._rewrite._function_parts import Division, divided
from .._rewrite._source import Source
from .._rewrite._trace import Traced, normalise
from .._runtime._errors import ArgumentError
from ._bodies import Body, bodies, numbered


@dataclass(frozen=True)
class Function:
    """A function for arguments of certain types. **Fields:** `body` its flat jaxpr without constants and without the
    user's own checkpoints; its first arguments are `consts`, the values that it closes over; `out_tree` of its result.
    """

    body: Body
    consts: tuple[Any, ...]
    out_tree: Any

    @property
    def closed(self) -> jex.ClosedJaxpr:
        """The function's jaxpr."""
        return self.body.closed

    @property
    def inexact(self) -> tuple[bool, ...]:
        """Whether each primal has a cotangent."""
        return tuple(is_inexact(v.aval) for v in self.closed.jaxpr.invars)

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Whether each result has a cotangent."""
        return tuple(is_inexact(v.aval) for v in self.closed.jaxpr.outvars)


@dataclass(frozen=True)
class Joint:
    """A function's joint program.

    **Fields:** `body` the function; `traced` the joint program; `primals` the number of its arguments that are the
    function's, constants first; `results` the number of its outputs that are; `plain_nbytes` the residuals that plain
    JAX keeps.
    """

    body: Body
    traced: Traced
    primals: int
    results: int
    plain_nbytes: int

    @property
    def called(self) -> dict[str, str]:
        """Return the user's names of values by their names here."""
        return self.body.called()


class NotReversibleError(ArgumentError):
    """JAX cannot differentiate the function in reverse mode."""


def is_inexact(aval: AbstractValue) -> bool:
    """Return whether values of this type have cotangents of the same type."""
    return hasattr(aval, "dtype") and jnp.issubdtype(cast(Aval, aval).dtype, np.inexact)


def flattened(fn: Callable[..., object], leaves: Sequence[object]) -> Function:
    """Return a function of flat arguments, for arguments of these types; it may close over tracers."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*leaves)
    closed, references = of_values(closed)
    if references is not None and (references.held or references.places):
        raise ArgumentError(
            "The function reads or writes a reference (`jax.new_ref`) that it takes or closes over, but only "
            "functions of values can be planned here. Create the reference inside the function; or read it "
            "before the call, pass the value, return the new value, and write it after the call."
        )
    inliner = Inliner(derivatives=True)
    flat = inliner.program(closed)
    jaxpr = flat.jaxpr
    opened = _compat.new_jaxpr((), (), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
    return Function(bodies(opened, inliner.labels), tuple(flat.consts), jax.tree.structure(shape))


def in_parts(function: Function, division: Division) -> Function:
    """Return the function with its work split into these parts."""
    labels = function.body.labels
    return replace(function, body=bodies(divided(function.closed, division, labels), labels))


def called(
    program: Program, args: Args, kwargs: Kwargs, known: dict[Hashable, Function] | None = None
) -> tuple[Function, list[Any], tuple[Any, ...]]:
    """Return a function for these arguments, the traced ones among them, and a key that identifies such calls.

    **Arguments:** `known` the functions of earlier calls, to which this one's is added: Python runs once for each kind
    of arguments, as under `jax.checkpoint`.
    """
    known = {} if known is None else known
    leaves, tree = jax.tree.flatten(program.dynamic(args, kwargs))

    def flat(*leaves: object) -> Any:
        args_, kwargs_ = program.refilled(jax.tree.unflatten(tree, leaves), args, kwargs)
        return program.fn(*args_, **kwargs_)

    static = program.static(args, kwargs)
    try:
        hash(static)
    except TypeError as error:
        raise ArgumentError(
            f"A static argument of {getattr(program.fn, '__qualname__', program.fn)!s} cannot be hashed "
            f"({error}). Pass a tuple instead of a list, or leave the argument out of `static_argnums` and "
            "`static_argnames`."
        ) from error
    key = (tree, tuple(map(jax.typeof, leaves)), static, _compat.trace_context())
    function = known.get(key) or flattened(flat, leaves)
    if not any(isinstance(const, Tracer) for const in function.consts):  # they are of this call alone
        known[key] = function
    return function, leaves, key


def differentiated(function: Function, wanted: Sequence[bool]) -> Joint:
    """Return the joint program of a function, with values named as in `_bodies`, for the cotangents of the wanted
    primals. **Raises:** `NotReversibleError` if JAX cannot differentiate the function in reverse mode.
    """
    evaluate = jex.jaxpr_as_fun(numbered(function.body))
    known = function.differentiable

    def both(primals: list[jax.Array], cotangents: list[jax.Array]) -> tuple[list[Any], list[Any]]:
        def results_of(chosen: list[jax.Array]) -> tuple[list[Any], list[Any]]:
            taken = iter(chosen)
            results = evaluate(*(next(taken) if w else p for p, w in zip(primals, wanted, strict=True)))
            parts = [
                [r for r, d in zip(results, known, strict=True) if d is which] for which in (True, False)
            ]
            return parts[0], parts[1]

        chosen = [p for p, w in zip(primals, wanted, strict=True) if w]
        smooth, pull, others = jax.vjp(results_of, chosen, has_aux=True)
        taken = {True: iter(smooth), False: iter(others)}
        return [next(taken[d]) for d in known], pull(cotangents)[0]

    jaxpr = function.closed.jaxpr
    primals = [v.aval for v in jaxpr.invars]
    cotangents = [v.aval for v, d in zip(jaxpr.outvars, known, strict=True) if d]
    try:
        closed = jax.make_jaxpr(both)(primals, cotangents)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise NotReversibleError(
            "The function cannot be differentiated in reverse mode, so there is no backward pass to plan: "
            f"{error}"
        ) from error
    traced = normalise(Source(closed, apart=True))
    return Joint(function.body, traced, len(primals), len(known), _kept_nbytes(traced.flat))


def _kept_nbytes(flat: jex.ClosedJaxpr) -> int:
    """Return the bytes of the values that the forward pass computes and the backward pass reads."""
    made: set[Any] = set()
    read: set[Any] = set()
    for eqn in flat.jaxpr.eqns:
        if is_backward(eqn):
            read.update(a for a in eqn.invars if not _compat.is_literal(a))
        else:
            made.update(eqn.outvars)
    return sum(aval_nbytes(v.aval) for v in made & read)
