"""Seconds of planning by kind -> what a plan tells of them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanningTime:
    """What planning took, in seconds of the clock.

    **Fields:** `seconds` in all; of these `trace_seconds` to trace and normalise the step, `compile_seconds` for all
    compilations, `solve_seconds` in solvers; the rest is reading compiled modules, simulating and writing.
    `first_seconds` when the first plan that fits was compiled, 0 where none was. `cut_short` whether the deadline ended
    the search before it had tried what it would have.
    """

    seconds: float = 0.0
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    solve_seconds: float = 0.0
    first_seconds: float = 0.0
    cut_short: bool = False

    @classmethod
    def of(cls, seconds: float, spent: Mapping[str, float], first: float, cut_short: bool) -> "PlanningTime":
        """By a stopwatch."""
        kinds = (spent.get(kind, 0.0) for kind in ("trace", "compile", "solve"))
        return cls(*(round(each, 3) for each in (seconds, *kinds, first)), cut_short=cut_short)

    def __str__(self) -> str:
        rest = self.seconds - self.trace_seconds - self.compile_seconds - self.solve_seconds
        first = f" (the first that fits after {self.first_seconds:.1f})" if self.first_seconds else ""
        text = (
            f"planned in {self.seconds:.1f} s{first}: tracing {self.trace_seconds:.1f}, compiling "
            f"{self.compile_seconds:.1f}, solving {self.solve_seconds:.1f}, the rest {max(rest, 0.0):.1f}"
        )
        return f"{text}; the deadline cut the search short" if self.cut_short else text


UNTIMED = PlanningTime()
"""Of plans that were made before planning was timed."""
