"""What the user asks for -> `Request`: a budget, what a plan may do, and how to look for one (`Planning`)."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from .._model._pins import Patterns
from .._model._sites import EXACT
from .._runtime._budgets import Budget, parse_margin
from .._runtime._errors import ArgumentError
from .._solver import Milp, Solver
from ._plan import Plan

WRITTEN_SHARE = 0.5
"""What compiling the step as it is written may take of `planning_seconds`: the rest is for a plan."""

Offload = bool | int | str
"""Whether host memory is used; "auto" for where there is one; or how much of it, as bytes or text."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How a plan is looked for and checked: `planning=` of every function that plans.

    **Fields:**

    - `solver`: a `jaxremat.Solver`, such as `jaxremat.Greedy()`.
    - `time_limit`: the work of each solve, in seconds of a usual machine (nodes are counted, so that plans are the same
      on all); the incumbent and its honest gap are used when it ends.
    - `planning_seconds`: when a clock stops the search, counted from the first call; what is begun is finished, what it
      cut short is improved when asked for again. By default work is counted: once a plan fits, 2 compilations and one
      for each time that the step goes into 6,000 equations, 8 at most; twice as many while none does, as many again
      for inexact forms or host memory; no limit where `effort="thorough"`. Where compiling the step as it is written
      takes half of it, for a `target`, that is ended, and plans start from another form. See `Plan.planning`.
    - `on_interrupt`: what Ctrl-C does: `"stop"` ends planning at once, `"best"` returns the best plan certified so far,
      if there is one; it is marked as cut short, and improved when asked for again.
    - `effort`: `"thorough"` allows more rounds.
    - `verify`: compile, compare with the budget, correct and plan again at most twice. False trusts the model.
    - `profile`: where the planner's times come from: `"roofline"` from the device's figures, `"measure"` from running
      each distinct operation alone on the device at hand, once (kept in the cache folder).
    - `workspace_margin`: what the compiled peak leaves free below the budget, for memory that the compiler does not
      count (workspaces that libraries allocate while they run): bytes, text, or a share of the budget such as 0.05
      or `"5%"`. A plan carries its own.
    - `cache`: keep the plan on disk (`$JAXREMAT_CACHE`, else `~/.cache/jaxremat`) and follow it the next time that the
      same step is planned within the same budget for the same device; it is compiled and verified then as any other.
      Plans of solvers of your own are not kept. The environment variable `JAXREMAT_PLAN_CACHE=0` is False everywhere.
    - `respect_checkpoint`: leave your own `jax.checkpoint`s and `nn.remat`s as they are: what they compute again, they
      do, as one piece, and the planner plans around them. By default they are undone, and all is planned afresh. A
      plan carries its own.
    - `progress`: show bars for tracing, compiling and solving. By default on a terminal, but
      not in tests and continuous integration; True there too, and a line for each phase where there is no terminal, as
      in notebooks and batch jobs; False never. The environment variable `JAXREMAT_PROGRESS=0` is False everywhere.

    **Raises:** `ArgumentError`; `BudgetError` for `workspace_margin`.

    ```python
    quick = jaxremat.Planning(solver=jaxremat.Greedy(), planning_seconds=60)
    plan = jaxremat.plan(train_step, params, batch, budget="24GiB", planning=quick)
    ```
    """

    solver: Solver = field(default_factory=Milp)
    time_limit: float = 10.0
    planning_seconds: float | None = None
    on_interrupt: Literal["stop", "best"] = "stop"
    effort: Literal["normal", "thorough"] = "normal"
    verify: bool = True
    profile: Literal["roofline", "measure"] = "roofline"
    workspace_margin: int | float | str = 0
    cache: bool = True
    respect_checkpoint: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.solver, type) or not isinstance(self.solver, Solver):
            raise ArgumentError(
                f"`solver={self.solver!r}` has no method `solve(graph, budget_nbytes, *, time_limit)`. "
                "Pass an instance, such as `jaxremat.Milp()` or `jaxremat.Greedy()`."
            )
        seconds = {"time_limit": self.time_limit}
        if self.planning_seconds is not None:
            seconds["planning_seconds"] = self.planning_seconds
        for name, given in seconds.items():
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
                raise ArgumentError(f"`{name}={given!r}` is no positive number of seconds.")
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                *others, last = (f'"{each}"' if isinstance(each, str) else repr(each) for each in choices)
                raise ArgumentError(f"`{name}={given!r}` is unknown. Write {', '.join(others)} or {last}.")
        parse_margin(self.workspace_margin, None)

    @property
    def written_seconds(self) -> float:
        """What compiling the step as it is written may take."""
        return math.inf if self.planning_seconds is None else WRITTEN_SHARE * self.planning_seconds


_CHOICES: dict[str, tuple[object, ...]] = {
    "on_interrupt": ("stop", "best"),
    "effort": ("normal", "thorough"),
    "profile": ("roofline", "measure"),
    **dict.fromkeys(("verify", "cache", "respect_checkpoint"), (True, False)),
    "progress": (True, False, None),
}

DEFAULT = Planning()


@dataclass(frozen=True)
class Request:
    """What to plan for.

    **Fields:** `budget`, `planning`, `pins`, `offload` and `allow` as the arguments of `jaxremat.optimize`; so is
    `like`, None for False; `device_nbytes` the memory that the device reports; `nbytes` the budget in bytes, None until
    it is known (see `_sizes`); `neighbours` plans of steps that may be nearly the same, None where the step is to be
    planned without any.
    """

    budget: Budget
    planning: Planning = DEFAULT
    pins: Patterns = ()
    offload: Offload = False
    allow: tuple[str, ...] = EXACT
    like: tuple[Plan, ...] | None = ()
    device_nbytes: int | None = None
    nbytes: int | Literal["min"] | None = None
    neighbours: tuple[Plan, ...] | None = ()


F = TypeVar("F", bound=Callable[..., Any])


def takes_planning(fn: F) -> F:
    """Return the function, which refuses the fields of `planning` as arguments of its own, as it once took them."""
    names = {f.name for f in fields(Planning)}

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if moved := {name: given for name, given in kwargs.items() if name in names}:
            told = ", ".join(f"{name}={given!r}" for name, given in moved.items())
            known = ", ".join(f"`{name}`" for name in moved)
            raise ArgumentError(
                f"`{fn.__name__}` takes {known} within `planning`. "
                f"Write `{fn.__name__}(..., planning=jaxremat.Planning({told}))`."
            )
        if (given := kwargs.get("host_budget")) is not None:
            raise ArgumentError(
                f"`{fn.__name__}` takes `host_budget` as `offload`. Write `{fn.__name__}(..., offload={given!r})`."
            )
        if not isinstance(given := kwargs.get("planning", DEFAULT), Planning):
            raise ArgumentError(
                f"`planning={given!r:.80}` is a {type(given).__name__}. Write `planning=jaxremat.Planning(...)`."
            )
        return fn(*args, **kwargs)

    return checked  # type: ignore[return-value]
