"""Names for values, and plans as policies by name: for code that keeps its own `jax.checkpoint` or `nn.remat`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from .._compiler._program import Program
from .._emit._bodies import numbered
from .._emit._joint import called
from .._emit._naming import named
from .._plan._arguments import as_tuple
from .._plan._plan import HeldPlan, Plan
from .._runtime._errors import ArgumentError


def name_values(
    fn: Callable[..., object],
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Return the function with a `checkpoint_name` on every value that it computes, also in the bodies of its scans.

    The names follow from the program alone: the same function, called with the same types, gets the same names. So
    `jaxremat.policy` of a plan for a step that uses `name_values(fn)` applies to the same values in
    `jax.checkpoint(name_values(fn), policy=...)`.

    **Arguments:** `static_argnums`, `static_argnames` as in `jax.jit`.
    """
    if not callable(fn):
        raise ArgumentError(f"`name_values` takes a function; it was given a {type(fn).__name__}.")
    program = Program(
        fn, as_tuple(static_argnums, "static_argnums"), as_tuple(static_argnames, "static_argnames")
    )

    @functools.wraps(fn)
    def naming(*args: object, **kwargs: object) -> Any:
        function, leaves, _ = called(program, args, kwargs)
        results = jex.jaxpr_as_fun(numbered(function.body, named))(*function.consts, *leaves)
        return jax.tree.unflatten(function.out_tree, results)

    return naming


def policy(plan: Plan | HeldPlan) -> Callable[..., bool]:
    """Return `plan.policy()`: a policy by name for `jax.checkpoint`, `flax.linen.remat`, `nnx.remat` or
    `nn.remat_scan`.

    **Raises:** `ArgumentError` if this is not a plan, or a plan without names.
    """
    if not isinstance(plan, (Plan, HeldPlan)):
        raise ArgumentError(f"`policy` takes a plan; it was given a {type(plan).__name__}.")
    return plan.policy()
