"""Arguments that several public functions take: checked where they are written."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .._model._sites import EXACT, REVERSIBLE
from .._rewrite._encodings import INEXACT
from .._runtime._bytes import Budget, parse_nbytes
from .._runtime._errors import ArgumentError, BudgetError
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


def check_choice(name: str, given: object, *choices: str) -> None:
    """**Raises:** `ArgumentError` where an argument is none of these."""
    if given not in choices:
        known = " or ".join(f'"{choice}"' for choice in choices)
        raise ArgumentError(f"`{name}={given!r}` is unknown. Write {known}.")


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return one number or name, or several, as `jax.jit` takes them."""
    return (value,) if isinstance(value, (int, str, np.integer)) else tuple(value)


def parse_forms(allow: object) -> tuple[str, ...]:
    """Return the forms that a plan may use. **Raises:** `ArgumentError`."""
    given = (allow,) if isinstance(allow, str) else allow
    known = (*EXACT, REVERSIBLE, *INEXACT)
    if not isinstance(given, Iterable) or not set(given) <= set(known):
        known = ", ".join(f'"{name}"' for name in known)
        raise ArgumentError(f"`allow={allow!r}` is unknown. Write some of {known}, or `()` for none of them.")
    return tuple(sorted(set(given)))


def check_host_memory(offload: object, host_budget: Budget) -> None:
    """**Raises:** `ArgumentError` or `BudgetError` for what `optimize` cannot take."""
    if not isinstance(offload, bool) and offload != "auto":
        raise ArgumentError(f'`offload={offload!r}` is no choice. Write True, False or "auto".')
    if host_budget is None:
        return
    if not offload:
        raise ArgumentError(
            f"`host_budget={host_budget!r}` is for values in host memory, and nothing is moved there without "
            '`offload=True` or `offload="auto"`. Write both, or neither.'
        )
    try:
        parse_nbytes(host_budget)
    except BudgetError:
        raise BudgetError(
            f"`host_budget={host_budget!r}` is no number of bytes. Write an int of bytes, or text such as "
            '"64GiB"; None is half of the machine\'s memory.'
        ) from None
