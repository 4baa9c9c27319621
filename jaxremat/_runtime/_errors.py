"""Every error and warning raised on purpose, each saying what was given, what is true and what to write."""

import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Literal


class JaxrematError(Exception):
    """Base class of all errors of this library."""


class BudgetError(JaxrematError, ValueError):
    """A budget that cannot be read, or that has no meaning on this device."""


class ArgumentError(JaxrematError, TypeError):
    """An argument that a compiled step cannot take, such as a string leaf in the parameters."""


class PlanMismatchError(JaxrematError, ValueError):
    """A plan that was made for another program, another set of shapes or another format version."""


class SolverError(JaxrematError, RuntimeError):
    """A solver that ended without an answer, or whose answer is not a schedule of the given graph."""


class SolverRuleError(SolverError):
    """A solver that breaks a rule which `jaxremat.testing.check_solver` holds it to.

    **Attributes:** `rule` its name; `graph` the name of the graph on which it was broken; `budget_nbytes` the budget
    asked for, None for the least memory.
    """

    def __init__(self, message: str, *, rule: str, graph: str, budget_nbytes: int | None):
        super().__init__(message)
        self.rule = rule
        self.graph = graph
        self.budget_nbytes = budget_nbytes


class TargetError(JaxrematError, RuntimeError):
    """A device that is unknown, that this machine cannot compile for, or that is not in this machine."""


class HostMemoryError(TargetError):
    """Host memory that a plan or `jaxremat.to_host` needs, but that a device lacks or cannot allocate."""


Reason = Literal["refused", "memory", "time", "lost"]


class CompilationError(JaxrematError, RuntimeError):
    """A program that the compiler does not compile.

    **Attributes:** `reason`: `"refused"` if the compiler refuses the program, or fails one of its own checks;
    `"memory"` if it needs more memory than this machine has; `"time"` if it takes longer than allowed; `"lost"` if its
    process ended otherwise.
    """

    def __init__(self, message: str, *, reason: Reason):
        super().__init__(message)
        self.reason: Reason = reason

    @property
    def why(self) -> str:
        """The first line of the message, without its final full stop."""
        return str(self).splitlines()[0].rstrip(".")


class ProcessError(JaxrematError, RuntimeError):
    """Another process of the job, with which this one has to agree on a plan, failed, stopped, or runs other code.

    **Attributes:** `process`, its index, as `jax.process_index()` returns it there.
    """

    def __init__(self, message: str, *, process: int):
        super().__init__(message)
        self.process = process


class InstallError(JaxrematError, ImportError):
    """A missing optional package."""


class InfeasibleBudgetError(JaxrematError, MemoryError):
    """No plan fits the budget.

    **Attributes:**

    - `budget_nbytes`: the budget asked for, in bytes.
    - `min_peak_nbytes`: the smallest peak that was reached, in bytes; compiled unless `verify=False`.
    - `least_plan`: the `jaxremat.Plan` that reached it, for `optimize(plan=...)`. None if that is the plain step or an
      earlier plan, if nothing was compiled, or if another process planned.
    - `step_seconds`: the plain step's time by the model; 0 if unknown.
    """

    _least_plan: Any = None  # private: it stays in its process

    def __init__(self, message: str, *, budget_nbytes: int, min_peak_nbytes: int, step_seconds: float = 0.0):
        super().__init__(message)
        self.budget_nbytes = budget_nbytes
        self.min_peak_nbytes = min_peak_nbytes
        self.step_seconds = step_seconds

    @property
    def least_plan(self) -> Any:
        """The plan that reached `min_peak_nbytes`; see the class."""
        return self._least_plan

    @least_plan.setter
    def least_plan(self, plan: object) -> None:
        self._least_plan = plan


class HintError(JaxrematError, ValueError):
    """A hint or a pin that is unknown, matches nothing, or contradicts another or the program."""


class InfeasibleHintError(InfeasibleBudgetError):
    """A budget that could be met without the hints in the model, or without `pins`.

    **Attributes:** as of `InfeasibleBudgetError`, where `min_peak_nbytes` is the least peak with the hints; and

    - `free_min_peak_nbytes`: the least peak found without them, in bytes.
    - `hints`: their places, as in `hint(..., "save") at model.py:12 (f)`, the most expensive first.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_nbytes: int,
        min_peak_nbytes: int,
        free_min_peak_nbytes: int,
        hints: tuple[str, ...],
        step_seconds: float = 0.0,
    ):
        super().__init__(
            message, budget_nbytes=budget_nbytes, min_peak_nbytes=min_peak_nbytes, step_seconds=step_seconds
        )
        self.free_min_peak_nbytes = free_min_peak_nbytes
        self.hints = hints


class JaxrematWarning(UserWarning):
    """A step that runs, but probably not as intended."""


for _each in list(globals().values()):
    if isinstance(_each, type) and issubclass(_each, (JaxrematError, JaxrematWarning)):
        _each.__module__ = "jaxremat"  # what tracebacks show, and users catch


def warn(message: str) -> None:
    """Warn at the line of the user's code that led here: neither this library's, nor JAX's."""
    jax: Any = sys.modules.get("jax")
    ours = [f"{Path(__file__).parents[1]}{os.sep}", str(functools.__file__)]
    ours += [f"{Path(jax.__file__).parent}{os.sep}"] if jax is not None else []
    level, frame = 1, sys._getframe(0)
    while frame.f_back and frame.f_code.co_filename.startswith(tuple(ours)):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, JaxrematWarning, stacklevel=level)
