"""Seconds of planning by kind -> what a plan tells of them."""

from dataclasses import dataclass

from .._runtime._progress import Stopwatch


@dataclass(frozen=True, slots=True)
class PlanningTime:
    """What planning took, in seconds of the clock.

    **Fields:** `seconds` in all; of these `trace_seconds` to trace and normalise the step, `compile_seconds` for all
    compilations, `solve_seconds` in solvers; the rest is reading compiled modules, simulating and writing.
    `first_seconds` when the first plan that fits was compiled, 0 where none was. `cut_short` whether a clock or
    Ctrl-C ended the search before its work was done: another run may find a better plan.
    Its work: `plans_compiled` and `solves`.
    """

    seconds: float = 0.0
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    solve_seconds: float = 0.0
    first_seconds: float = 0.0
    cut_short: bool = False
    plans_compiled: int = 0
    solves: int = 0

    @classmethod
    def of(cls, stopwatch: Stopwatch, first: float, compiled: int, solves: int) -> "PlanningTime":
        """Return the times by a stopwatch."""
        kinds = (stopwatch.spent.get(kind, 0.0) for kind in ("trace", "compile", "solve"))
        seconds = (round(each, 3) for each in (stopwatch.seconds, *kinds, first))
        return cls(*seconds, cut_short=stopwatch.interrupted, plans_compiled=compiled, solves=solves)

    @property
    def work(self) -> str:
        """Return what the search did, which no clock changes, in words."""
        plans, solves = ("" if count == 1 else "s" for count in (self.plans_compiled, self.solves))
        return f"{self.plans_compiled} plan{plans} compiled and {self.solves} solve{solves}"

    def __str__(self) -> str:
        rest = self.seconds - self.trace_seconds - self.compile_seconds - self.solve_seconds
        first = f" (first plan that fits after {self.first_seconds:.1f})" if self.first_seconds else ""
        text = (
            f"planned in {self.seconds:.1f} s{first}: tracing {self.trace_seconds:.1f}, compiling "
            f"{self.compile_seconds:.1f}, solving {self.solve_seconds:.1f}, the rest {max(rest, 0.0):.1f}"
        )
        text += f"; {self.work}" if self.solves else ""
        return f"{text}; the search was cut short" if self.cut_short else text


UNTIMED = PlanningTime()
"""Of plans that were made before planning was timed."""
