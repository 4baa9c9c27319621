"""The user's options -> `Request`: a budget, the forms that a plan may use, and how to search for it (`Planning`)."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from .._model._pins import Patterns
from .._model._sites import EXACT
from .._program import _compat
from .._runtime._budgets import Budget, parse_margin
from .._runtime._errors import ArgumentError
from .._solver import Milp, Solver
from ._plan import Plan

WRITTEN_SHARE = 0.5
"""Share of `planning_seconds` that compiling the plain step may take: the rest is for a plan."""

Offload = bool | int | str
"""Whether host memory is used; "auto" if the device has one; or the most of it, as bytes or text."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How to search for a plan and check it: the argument `planning=` of every function that plans.

    **Fields:**

    - `solver`: a `jaxremat.Solver`, such as `jaxremat.Greedy()`.
    - `time_limit`: the work of each solve, in seconds on a typical machine. Nodes of the search are counted, so plans
      are the same on all machines. At the limit, the solver returns its best schedule, with its proven gap.
    - `planning_seconds`: seconds after which the search stops, counted from the first call. It starts no compilation
      that it cannot finish in time, except for the first plan and, before it refuses a budget, for the plans of least
      memory. A search that was cut short continues the next time. By default work is counted: once
      a plan fits, 2 compilations plus one for each 6,000 equations of the step, 8 at most; twice as many while no plan
      fits, and as many again for inexact forms and for host memory. For a `target`, compiling the plain step may take
      half of the seconds; after that, plans start from another form. See `Plan.planning`.
    - `on_interrupt`: what Ctrl-C does: `"stop"` ends planning at once; `"best"` returns the best plan certified so far,
      if there is one, marked as cut short.
    - `effort`: `"thorough"` lifts the limits of the search.
    - `verify`: compile the plan, compare its peak with the budget, and correct it at most twice. False trusts the
      model.
    - `profile`: the source of operations' times: `"roofline"` uses the device's datasheet, `"measure"` runs each
      distinct operation once on this machine's device (kept in the cache folder).
    - `workspace_margin`: memory to leave free below the budget, for workspaces that libraries allocate at run time,
      which the compiler does not count: bytes, text, or a share of the budget such as 0.05 or `"5%"`. An existing plan
      keeps its margin.
    - `cache`: keep the plan on disk (`$JAXREMAT_CACHE`, else `~/.cache/jaxremat`), and apply it the next time that the
      same step is planned within the same budget for the same device. It is compiled and verified like any other plan.
      Plans of your own solvers are not kept. The environment variable `JAXREMAT_PLAN_CACHE=0` turns the cache off.
    - `respect_checkpoint`: keep your own `jax.checkpoint`s and `nn.remat`s: each still recomputes its values, as one
      piece, and the planner plans around it. By default they are undone and planned again. An existing plan keeps its
      setting.
    - `progress`: show progress bars for tracing, compiling and solving. By default they appear on a terminal, but not
      in tests and continuous integration. True shows them there too, and writes a line for each phase where there is no
      terminal, as in notebooks and batch jobs. The environment variable `JAXREMAT_PROGRESS=0` turns them off.

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
                raise ArgumentError(f"`{name}={given!r}` is not a positive number of seconds.")
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                *others, last = (f'"{each}"' if isinstance(each, str) else repr(each) for each in choices)
                raise ArgumentError(f"`{name}={given!r}` is unknown. Write {', '.join(others)} or {last}.")
        parse_margin(self.workspace_margin, None)

    @property
    def written_seconds(self) -> float:
        """The seconds that compiling the plain step may take; infinite without `planning_seconds`."""
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
    """A request for a plan.

    **Fields:** `budget`, `planning`, `pins`, `offload` and `allow` as the arguments of `jaxremat.optimize`; so is
    `like`, None for False; `device_nbytes` the memory that the device reports; `nbytes` the budget in bytes, None until
    known (see `_plan_cache`); `neighbours` plans of steps that may be nearly the same, None to plan without any;
    `briefly` skips the search for the least memory if nothing fits, because the caller then tries something else.
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
    briefly: bool = False


F = TypeVar("F", bound=Callable[..., Any])


def takes_planning(fn: F) -> F:
    """Return the function with errors that show only the user's frames. It rejects the fields of `planning` as
    arguments, which earlier versions took.
    """
    names = {f.name for f in fields(Planning)}

    @functools.wraps(fn)
    def checked(*args: object, **kwargs: object) -> Any:
        if moved := {name: given for name, given in kwargs.items() if name in names}:
            told = ", ".join(f"{name}={given!r}" for name, given in moved.items())
            known = ", ".join(f"`{name}`" for name in moved)
            raise ArgumentError(
                f"`{fn.__name__}` takes {known} as part of `planning`. "
                f"Write `{fn.__name__}(..., planning=jaxremat.Planning({told}))`."
            )
        if (given := kwargs.get("host_budget")) is not None:
            raise ArgumentError(
                f"`{fn.__name__}` no longer takes `host_budget`. Write `{fn.__name__}(..., offload={given!r})`."
            )
        if not isinstance(given := kwargs.get("planning", DEFAULT), Planning):
            raise ArgumentError(
                f"`planning={given!r:.80}` is a {type(given).__name__}. Write `planning=jaxremat.Planning(...)`."
            )
        return fn(*args, **kwargs)

    return _compat.api_boundary(checked)  # type: ignore[return-value]
