"""Schedule -> the same emitted and compiled, with what the compiler says of it; and what that says of the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._graph import Graph
from ._outcome import Round
from ._program import Compiled
from ._simulate import Profile
from ._solver import Solution


@dataclass(frozen=True)
class Trial:
    """One emitted and compiled schedule, of a graph with some cutting into stages."""

    graph: Graph
    solution: Solution
    fence: str
    profile: Profile
    jitted: Any
    compiled: Compiled
    peak_nbytes: int
    compiled_overhead: float
    compile_seconds: float
    solve_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Extra seconds of a step: of the compiled kernels where they say it, else by the model."""
        if self.graph.backend.fuses:
            return self.compiled_overhead * self.graph.step_seconds
        return self.profile.extra_seconds

    @property
    def round(self) -> Round:
        """What a plan tells of it."""
        overhead = self.profile.extra_seconds / (self.graph.step_seconds or 1.0)
        return Round(
            predicted_peak_nbytes=self.profile.peak_nbytes,
            compiled_peak_nbytes=self.peak_nbytes,
            overhead=overhead,
            compiled_overhead=self.compiled_overhead,
            gap=max(overhead - self.solution.lower_bound, 0.0),
            solver=self.solution.solver,
            stages=len(self.graph.stages),
            segments=self.graph.segments,
            fence=self.fence,
            solve_seconds=self.solve_seconds,
            compile_seconds=self.compile_seconds,
        )


Attempt = Callable[[Graph, Solution, str], Trial]
"""Emits a solution with a form of fences (see `_emit.FENCES`), compiles it and reads its peak."""


def allowance(trials: Sequence[Trial], budget: int) -> int:
    """The predicted peak to ask for next: where predicted against compiled peaks so far meet the budget; where none
    fits, less by what is missing, and with each trial twice as much, for compiled peaks may follow slowly.
    """
    fits = [t for t in trials if t.peak_nbytes <= budget]
    exceeds = [t for t in trials if t.peak_nbytes > budget]
    room = budget - trials[-1].peak_nbytes
    if fits and exceeds:
        low = max(fits, key=lambda t: t.profile.peak_nbytes)
        high = min(exceeds, key=lambda t: t.profile.peak_nbytes)
        reach = high.profile.peak_nbytes - low.profile.peak_nbytes
        if reach > 0:
            share = (budget - low.peak_nbytes) / (high.peak_nbytes - low.peak_nbytes)
            return low.profile.peak_nbytes + int(min(share, 0.95) * reach)
    return trials[-1].profile.peak_nbytes + (room if room > 0 else int(1.1 * 2 ** len(exceeds[1:]) * room))
