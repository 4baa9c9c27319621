"""Names for values, and plans as policies by name: for code that keeps its own `jax.checkpoint` or `nn.remat`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from ._arguments import as_tuple
from ._bodies import numbered
from ._errors import ArgumentError
from ._held_plan import HeldPlan
from ._joint import called
from ._naming import named
from ._plan import Plan
from ._program import Program


def name_values(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """The function with a `checkpoint_name` on every value that it computes, also within the bodies of its scans.

    The names follow from the program alone: the same function, called with the same types, names its values alike. So
    `jaxremat.policy` of a plan for a step that uses `name_values(fn)` means the same values in
    `jax.checkpoint(name_values(fn), policy=...)`.

    **Arguments:** `static_argnums`, `static_argnames` as in `jax.jit`.
    """
    if not callable(fn):
        raise ArgumentError(f"`name_values` takes a function; it was given a {type(fn).__name__}.")
    program = Program(fn, as_tuple(static_argnums), as_tuple(static_argnames))

    @functools.wraps(fn)
    def naming(*args: Any, **kwargs: Any) -> Any:
        function, leaves, _ = called(program, args, kwargs)
        results = jex.jaxpr_as_fun(numbered(function.body, named))(*function.consts, *leaves)
        return jax.tree.unflatten(function.out_tree, results)

    return naming


def policy(plan: Plan | HeldPlan) -> Callable[..., bool]:
    """A policy for `jax.checkpoint`, `flax.linen.remat`, `nnx.remat` or `nn.remat_scan` that saves what the plan saves.

    Policies know values by the names that `jax.ad_checkpoint.checkpoint_name` gave them, so the plan must be of a
    program that names its values, itself or by `jaxremat.name_values`. Of values that share a name, all are saved if
    the plan saves at least half of their bytes.

    **Raises:** `ArgumentError` where the plan knows no names.
    """
    if not isinstance(plan, (Plan, HeldPlan)):
        raise ArgumentError(f"`policy` takes a plan; it was given a {type(plan).__name__}.")
    balance: dict[str, int] = {}
    for action in plan.actions:
        if action.named:
            sign = 1 if action.action == "save" else -1
            balance[action.name] = balance.get(action.name, 0) + sign * max(action.nbytes, 1)
    if not balance:
        raise ArgumentError(
            "The plan is of a program without names, and a policy knows values by nothing else. Name what may be "
            'saved with `jax.ad_checkpoint.checkpoint_name(x, "...")`, or all of it with `jaxremat.name_values(fn)`, '
            "and plan again."
        )
    return jax.checkpoint_policies.save_only_these_names(*sorted(n for n, b in balance.items() if b >= 0))
