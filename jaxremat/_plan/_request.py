"""What the user asks for -> `Request`: a budget, and how to plan for it."""

from dataclasses import dataclass
from typing import Literal

from .._model._pins import Patterns
from .._model._sites import EXACT
from .._runtime._bytes import Budget
from .._solver import Solver

Offload = bool | Literal["auto"]


@dataclass(frozen=True)
class Options:
    """How to plan. **Fields** as the arguments of `jaxremat.optimize`."""

    solver: Solver
    time_limit: float
    verify: bool
    effort: str
    profile: str
    workspace_margin: int | float | str
    cache: bool = True
    respect_checkpoint: bool = False
    progress: bool | None = None
    pins: Patterns = ()
    planning_seconds: float | None = None
    offload: Offload = False
    host_budget: Budget = None
    allow: tuple[str, ...] = EXACT


@dataclass(frozen=True)
class Request:
    """What to plan for.

    **Fields:** `budget`; `options`; `device_nbytes` the memory that the device reports.
    """

    budget: Budget
    options: Options
    device_nbytes: int | None
