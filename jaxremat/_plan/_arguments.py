"""Arguments that several public functions take: checked where they are written."""

from typing import Any

import numpy as np

from .._runtime._errors import ArgumentError
from .._solver import Solver


def check_planning(solver: Solver | None, time_limit: float, planning_seconds: float | None = None) -> None:
    """**Raises:** `ArgumentError` where one of them cannot be used."""
    if not time_limit > 0:
        raise ArgumentError(f"`time_limit={time_limit!r}` is no positive number of seconds.")
    if planning_seconds is not None and not planning_seconds > 0:
        raise ArgumentError(f"`planning_seconds={planning_seconds!r}` is no positive number of seconds.")
    if solver is not None and (isinstance(solver, type) or not isinstance(solver, Solver)):
        raise ArgumentError(
            f"`solver={solver!r}` has no method `solve(graph, budget_nbytes, *, time_limit)`. "
            "Pass an instance, such as `jaxremat.Milp()` or `jaxremat.Greedy()`."
        )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One number or name, or several, as `jax.jit` takes them."""
    return (value,) if isinstance(value, (int, str, np.integer)) else tuple(value)
