"""`Planning`: its fields are checked where they are written, and arguments that moved into it say so."""

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxremat.flax
from jaxremat import ArgumentError, Graph, Greedy, Milp, Planning, Solution

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


WRONG: dict[str, tuple[Any, str]] = {
    "solver": (Milp, "Pass an instance, such as `jaxremat.Milp()`"),
    "time_limit": ("10", "`time_limit='10'` is not a positive number of seconds"),
    "planning_seconds": (0, "`planning_seconds=0` is not a positive number of seconds"),
    "on_interrupt": ("ask", '`on_interrupt=\'ask\'` is unknown. Write "stop" or "best"'),
    "effort": ("heroic", '`effort=\'heroic\'` is unknown. Write "normal" or "thorough"'),
    "verify": ("no", "`verify='no'` is unknown. Write True or False"),
    "profile": ("fast", '`profile=\'fast\'` is unknown. Write "roofline" or "measure"'),
    "workspace_margin": ("much", "`workspace_margin='much'` is not a number of bytes"),
    "cache": (None, "`cache=None` is unknown. Write True or False"),
    "respect_checkpoint": ("all", "`respect_checkpoint='all'` is unknown. Write True or False"),
    "progress": ("bars", "`progress='bars'` is unknown. Write True, False or None"),
}


def test_every_field_is_checked_and_described() -> None:
    names = {field.name for field in fields(Planning)}
    assert names == WRONG.keys()
    assert all(f"- `{name}`:" in (Planning.__doc__ or "") for name in names)
    for name, (given, message) in WRONG.items():
        with pytest.raises(
            ValueError if name == "workspace_margin" else ArgumentError, match=re.escape(message)
        ):
            Planning(**{name: given})
    with pytest.raises(FrozenInstanceError):
        Planning().verify = False  # type: ignore[misc]


CALLS = {
    "optimize": lambda **options: jaxremat.optimize("1GiB", **options),
    "plan": lambda **options: jaxremat.plan(step, W, X, budget="1GiB", **options),
    "search_plan": lambda **options: jaxremat.search_plan(step, W, X, **options),
    "sweep": lambda **options: jaxremat.sweep(step, W, X, **options),
    "checkpoint": lambda **options: jaxremat.checkpoint(step, "dots", **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_moved_say_what_to_write(name: str) -> None:
    said = f"Write `{name}(..., planning=jaxremat.Planning(time_limit=5, verify=False))`."
    with pytest.raises(ArgumentError, match=re.escape(said)):
        CALLS[name](time_limit=5, verify=False)
    with pytest.raises(ArgumentError, match=r"is a dict. Write `planning=jaxremat.Planning\(...\)`"):
        CALLS[name](planning={"verify": False})


def test_a_signature_shows_few_arguments() -> None:
    assert len(inspect.signature(jaxremat.optimize).parameters) <= 15


class Asked:
    """A solver that keeps the time limits of its questions."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        self.limits.append(time_limit)
        return Greedy().solve(graph, budget_nbytes, time_limit=time_limit)


ANSWERED = {**CALLS, "optimize": lambda **options: jaxremat.optimize("min", **options)(step).plan(W, X)}
ANSWERED |= {
    "plan": lambda **options: jaxremat.plan(step, W, X, budget="min", **options),
    "checkpoint": lambda **options: jaxremat.checkpoint(step, "min", **options).plan(W, X),
    "flax.remat": lambda **options: jax.grad(
        lambda w: jnp.sum(jaxremat.flax.remat(lambda w: jnp.sin(jnp.sin(w)), "min", **options)(w))
    )(W),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_one_object_for_every_function(name: str) -> None:
    solver = Asked()
    ANSWERED[name](planning=Planning(solver=solver, verify=False, time_limit=0.1))
    assert solver.limits and max(solver.limits) <= 0.1


def test_plans_show_themselves_in_one_line() -> None:
    plan = jaxremat.plan(step, W, X, budget="1GiB")
    assert re.fullmatch(
        r"<jaxremat.Plan of step: peak .* \(compiled\) within 1.00 GiB, overhead 0.00%>", repr(plan)
    )
    held = jaxremat.checkpoint(step, "dots").plan(W, X)
    assert re.fullmatch(r"<jaxremat.HeldPlan: holds .* of .*, overhead .*%>", repr(held))
