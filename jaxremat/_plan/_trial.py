"""Schedule -> the same emitted and compiled, with what the compiler says of it; and what that says of the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from .._compiler._compiled_step import CompiledStep
from .._model._graph import Graph
from .._model._schedule import Passing
from .._model._simulate import Profile, simulate
from .._report._outcome import Round
from .._solver import Solution

T = TypeVar("T")

SLACK = 0.02
"""A plan that leaves this share of the temporaries' budget unused, and costs something, is worth another round,"""

UNPROVEN = 0.1
"""and so is one that uses it, where the solver was left as far, as a share of the step, from its own bound."""

DOUBT = 0.05
"""Where the model's seconds count, extra ones of the compiled kernels are believed as far as they are over this share
of a step."""


@dataclass(frozen=True)
class Trial:
    """One emitted and compiled schedule, of a graph with some cutting into stages.

    **Fields:** `detached` as of `_emit.emit`; `ended_seconds` since planning began when it was there.
    """

    graph: Graph
    solution: Solution
    fence: str
    profile: Profile
    jitted: Any
    compiled: CompiledStep
    peak_nbytes: int
    compiled_overhead: float
    compile_seconds: float
    detached: tuple[Passing, ...] = ()
    solve_seconds: float = 0.0
    ended_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Extra seconds of a step: of the compiled kernels where they say it, else by the model, unless those are
        many: what the compiler makes of a form may be another program than the model has in mind.
        """
        if self.graph.backend.fuses:
            return self.compiled_overhead * self.graph.step_seconds
        believed = (self.compiled_overhead - DOUBT) * self.graph.step_seconds
        return max(self.profile.extra_seconds, believed) if believed > 0 else self.profile.extra_seconds

    def fills(self, budget: int) -> bool:
        """Whether it uses the budget, and is about the cheapest that would."""
        room = budget - self.peak_nbytes
        return 0 <= room <= SLACK * (budget - self.graph.base_nbytes) and self.round.gap <= UNPROVEN

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
            form=self.graph.form,
            fence=self.fence,
            solve_seconds=self.solve_seconds,
            compile_seconds=self.compile_seconds,
        )


class NoProgramError(Exception):
    """No form of a step could be emitted and compiled, which is a defect; not for the user to see."""


def some(found: T | None) -> T:
    """What was found. **Raises:** `NoProgramError` where that is nothing."""
    if not found:
        raise NoProgramError
    return found


@dataclass
class Line:
    """One cutting into stages: what was compiled of it; the predicted peak to ask for next, and the solution for that
    with its rank; by how many seconds the model erred on the last of its form, with the host's memory; whether no more
    is to be gained of it.
    """

    graph: Graph
    trials: Sequence[Trial] = ()
    allowance: int = -1
    pending: Solution | None = None
    order: tuple[float, ...] = ()
    error_seconds: float = 0.0
    closed: bool = False

    @property
    def expected(self) -> tuple[float, ...]:
        """The rank if the model errs as it did on the last, where that is known."""
        fits, seconds, *more = self.order
        return (fits, seconds + self.error_seconds, *more) if not fits else self.order

    def gain(self, seconds: float, best: Trial) -> float:
        """What a solution that takes so long may save, if the model errs as it did on the last."""
        last = self.trials[-1] if self.trials else best
        return best.seconds - seconds - (last.seconds - last.profile.extra_seconds)

    def may_fit(self, trials: Sequence[Trial], budget: int) -> bool:
        """Whether the pending solution may, for all that these trials say of how the model errs."""
        assert self.pending is not None
        predicted = simulate(self.graph, self.pending.schedule).peak_nbytes
        more = min((t.peak_nbytes - t.profile.peak_nbytes for t in trials), default=0)
        return predicted + more <= budget


def first(lines: Sequence[Line], alike_seconds: float) -> Line | None:
    """The cheapest of these lines; of those that fit about as cheaply one that leaves the host's memory alone, and that
    of the fewest stages: where fences divide what the compiler would make one kernel of, the model does not see it.
    """
    best = min(lines, key=lambda line: line.expected, default=None)
    if best is None or best.order[0] != 0.0:
        return best
    cheap = [line for line in lines if line.expected[:2] <= (0.0, best.expected[1] + alike_seconds)]

    def order(line: Line) -> tuple[Any, ...]:
        copies = line.pending is not None and bool(line.pending.schedule.offloaded)
        return copies, len(line.graph.stages), line.expected

    return min(cheap, key=order)


def untried(trials: Sequence[Trial], graph: Graph) -> bool:
    """Whether none of these is of this form: one that may fit is not refused for want of time."""
    return all(trial.graph.form != graph.form for trial in trials)


Attempt = Callable[[Graph, Solution, str], Trial | None]
"""Emits a solution with a kind of barriers (see `_emit.FENCES`), compiles it and reads its peak; None where no program
came.
"""


def allowance(trials: Sequence[Trial], budget: int) -> int:
    """The predicted peak to ask for next: where predicted against compiled peaks so far meet the budget, and nearer to
    what fits with each trial in a row that does not, for compiled peaks may follow slowly.

    Where none fits, less by what is missing, and with each trial twice as much. Where none above one that fits exceeds
    it, more by what is left, or the budget itself: far below it the model may err as it does not near it.
    """
    fits = [t for t in trials if t.peak_nbytes <= budget]
    exceeds = [t for t in trials if t.peak_nbytes > budget]
    if fits:
        low = max(fits, key=lambda t: t.profile.peak_nbytes)
        above = [t for t in exceeds if t.profile.peak_nbytes > low.profile.peak_nbytes]
        if not above:
            return max(budget, *(t.profile.peak_nbytes + budget - t.peak_nbytes for t in fits))
        high = min(above, key=lambda t: t.profile.peak_nbytes)
        reach = high.profile.peak_nbytes - low.profile.peak_nbytes
        share = (budget - low.peak_nbytes) / (high.peak_nbytes - low.peak_nbytes)
        in_a_row = sum(1 for _ in takewhile(lambda t: t.peak_nbytes > budget, reversed(trials)))
        share /= 2 ** max(in_a_row - 1, 0)
        return low.profile.peak_nbytes + int(min(share, 0.95) * reach)
    room = budget - trials[-1].peak_nbytes
    return trials[-1].profile.peak_nbytes + int(1.1 * 2 ** len(exceeds[1:]) * room)
