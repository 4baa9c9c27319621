"""Graph, budget -> the cheapest schedule of which the compiler says that it fits.

The loop: solve within what the model allows, compile, read the compiler's peak, correct the model's allowance by the
difference, solve again; within a budget, or within what is about the least memory that was compiled. The forms of the
step (its loops as they are, or in levels) and the two ways to cut the backward pass into stages compete; each has an
allowance of its own, because the model errs differently on each. A deeper form is made when no other promises to fit
for less than running the forward passes that it repeats.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .._emit._emit import FINISHED
from .._model._form import Form
from .._model._form_offers import Forms
from .._model._graph import Graph
from .._model._schedule import Schedule, check
from .._model._simulate import extra_seconds, rank, simulate
from .._solver import Solution, Solver, Sublinear
from .._solver._mincut import saving_less
from ._cuttings import CHEAP, EXACTLY, LEAST_SLACK, Cuttings
from ._effort import Effort
from ._solving import Solving
from ._trial import Attempt, Line, Trial, first, some, untried
from ._trial import allowance as next_allowance

HOPE = 1.25
"""A cutting that was not compiled yet is tried if the model expects it to cost at most this much of the best plan's."""

MORE_ROUNDS = 2
"""What is added to the rounds while nothing fits, before the least memory is looked for, and once more behind that."""

MORE_GAIN = 0.005
"""Or while a plan promises to save this share of the step's time, as each near the least memory must."""

UNLIKELY = 0.1
"""Schedules of least memory are not compiled where they need more than the least of them by this share of the plain
step's temporaries."""

LITTLE = 0.01
"""Nor, with a budget, where they promise no such share less than what was compiled, if the model errs as on others;
and what misses the budget by no more has further rounds."""

NEAR = 0.1
"""What misses it by no more than this share is corrected once even where the effort is exhausted, and once more where
it then misses by little: schedules of least memory are several times slower."""

WIDE = 0.5
"""Where a plan that fits takes longer than one that nearly does, by this share of the step's time, schedules between
the two are compiled."""

LEAST_MORE = 0.05
"""Of schedules of about the least memory the fastest is taken, if it needs no more than this share of the least
temporaries besides."""

MOST_OVERHEAD = 1.0
"""Dearer plans are nobody's wish: the least memory is looked for at no more than this overhead, and a plan within a
budget that costs more is the answer only after a search between it and the cheaper ones that do not fit."""


@dataclass
class Search:
    """**Fields:** `graph` of the plain step's form, with coarse stages; `temporaries_nbytes` of the plain step; the
    `forms` that it may take, and the `graph_of` each; the `effort` that the search takes; `written_nbytes` what the
    step needs as the user wrote it, None where that is no plan; a schedule that is `known` for each cutting of the
    plain form; `trials` in order. Seconds are counted from those of the step as it is written.
    """

    graph: Graph
    solver: Solver
    time_limit: float
    attempt: Attempt
    temporaries_nbytes: int
    forms: Forms | None = None
    graph_of: Callable[[Form], Graph | None] | None = None
    effort: Effort = field(default_factory=Effort)
    written_nbytes: int | None = None
    known: Callable[[Graph], Schedule] | None = None
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cuttings = Cuttings(
            self.graph, self.solver, self.time_limit, self.temporaries_nbytes, self.forms, self.graph_of
        )
        self.solving = Solving(self.solver, self.time_limit, self.effort)
        self.turns = self.cuttings.turns
        self.effort.turns, self.effort.equations = len(self.turns), len(self.graph.nodes)
        self.corrections = 0  # beyond the effort
        self.failed: set[int] = set()  # `id`s of cuttings of which no program came
        if self.known is not None:
            for cut in self.cuttings.made:
                self.solving.know(cut, self.known(cut))

    def within(self, budget: int, rounds: int) -> Trial | None:
        """The cheapest compiled schedule within the budget after that many rounds, or more if none fits; None if none
        does then.
        """
        lines: list[Line] = []
        self._approach(lines, lambda: budget, rounds, MORE_ROUNDS)
        if not self._bearable(self.best(budget)):
            self._least(budget)
            if self.best(budget) is not None:  # now between what fits and what is cheap
                self._approach(lines, lambda: budget, 0, MORE_ROUNDS)
                self._bisect(budget)
        return self.best(budget) if some(self.trials) else None

    def _bisect(self, budget: int) -> None:
        """Compile schedules between a slow one that fits and a fast one that misses the budget by little, and whose
        allowance the solver cannot lower: those that save ever less of what the fast one saves.
        """
        slow, near = self.best(budget), budget + NEAR * self.temporaries_nbytes
        missed = (t for t in self.trials if budget < t.peak_nbytes <= near)
        fast = min(missed, key=lambda t: t.peak_nbytes, default=None)
        if slow is None or fast is None or slow.seconds - fast.seconds < WIDE * self.graph.step_seconds:
            return
        most = slow.seconds - (fast.seconds - fast.profile.extra_seconds)  # by the model
        less = saving_less(fast.graph, fast.solution.schedule)
        between = [schedule for schedule in less if extra_seconds(fast.graph, schedule) < most]
        low, high = -1, len(between)
        while high - low > 1 and self._allows(self.best(budget), budget):
            middle = (low + high) // 2
            trial = self._attempt(fast.graph, replace(fast.solution, schedule=between[middle]))
            fits = trial is not None and trial.peak_nbytes <= budget
            low, high = (low, middle) if fits else (middle, high)

    def faster(self, budget: int, rounds: int) -> Trial | None:
        """A compiled schedule within the budget that is faster than the step as it is written, by the model and by its
        kernels, after that many rounds; None if there is none.
        """
        self.effort.fits = True  # as it is written
        self._approach([], lambda: budget, rounds, 0)
        faster = [
            t for t in self.trials if t.peak_nbytes <= budget and t.seconds < 0 and t.compiled_overhead <= 0
        ]
        return min(faster, key=lambda t: (t.seconds, t.peak_nbytes), default=None)

    def _approach(self, lines: list[Line], budget: Callable[[], int], rounds: int, more: int) -> None:
        """Compile what promises most within the budget, that many times, and so many more while nothing fits or there
        is much to be gained: in each turn as many, so that a later one makes nothing worse. The budget may follow what
        was compiled.
        """
        for number, turn in enumerate(self.turns, 1):
            self.effort.turn = number
            for i in range(rounds + more + MORE_ROUNDS):
                line = self._next(lines, budget(), turn)
                if line is None or line.pending is None:
                    break
                best = self.best(budget())
                if i >= rounds and not self._worth_more(line, best):
                    break
                if i >= rounds + more and not self._misses(budget(), LITTLE):
                    break
                if not self._allows(best, budget()):
                    break
                self._attempt(line.graph, line.pending)
                line.pending = None

    def _allows(self, best: Trial | None, budget: int) -> bool:
        """Return whether another plan may be compiled: the first in any case, and those that correct what misses."""
        if not (self.trials or self.effort.fits) or self.effort.allows(self._bearable(best)):
            return True
        share = LITTLE if self.corrections else NEAR
        corrects = not self.effort.fits and self.corrections < MORE_ROUNDS and self._misses(budget, share)
        self.corrections += corrects
        return corrects

    def _misses(self, budget: int, share: float) -> bool:
        """Whether nothing bearable fits, but a plan misses the budget by so small a share of the plain step's
        temporaries that the next round, which knows how the model errs, is worth its time rather than the least memory.
        """
        if self._bearable(self.best(budget)):
            return False
        missed = (t.peak_nbytes - budget for t in self.trials if self._bearable(t))
        return any(0 < nbytes <= share * self.temporaries_nbytes for nbytes in missed)

    def _bearable(self, trial: Trial | None) -> bool:
        return trial is not None and trial.seconds <= self.most_seconds()

    def lowest(self) -> Trial:
        """The compiled schedule of least peak, however dear. **Raises:** `NoProgramError`."""
        self._least(0)
        return min(some(self.trials), key=lambda t: t.peak_nbytes)

    def least(self, rounds: int) -> Trial | None:
        """Of the compiled schedules of about the least peak at a bearable overhead the fastest, after that many rounds
        near the least, or fewer where not much is to be gained; None where the step as it is written is that.

        **Raises:** `NoProgramError`.
        """
        self._least(None)
        self._bear()
        self._approach([], self._about_least, 0, rounds)
        most = self._about_least()
        trial = self.best(most)
        if self.written_nbytes is not None and self.written_nbytes <= most:
            return trial if trial is not None and trial.seconds < 0 else None
        assert trial is not None  # the least itself
        return trial

    def _bear(self) -> None:
        """Where the schedule of least memory costs too much, look for one in fewer microbatches that does not."""
        lowest = min(some(self.trials), key=lambda t: t.peak_nbytes)
        while not self._bearable(lowest) and (made := self.cuttings.make_shallower()):
            attempts = (self._attempt(cut, self._lowest(cut)) for cut in made)
            lowest = min(filter(None, attempts), key=lambda t: t.peak_nbytes, default=lowest)

    def _about_least(self) -> int:
        """How much memory is about the least that was found."""
        least = min(t.peak_nbytes for t in [t for t in self.trials if self._bearable(t)] or some(self.trials))
        if self.written_nbytes is not None:
            least = min(least, self.written_nbytes)
        more = min(LEAST_SLACK * self.temporaries_nbytes, LEAST_MORE * (least - self.graph.base_nbytes))
        return least + int(more)

    def best(self, budget: int) -> Trial | None:
        """The cheapest trial that fits so far."""
        fitting = [t for t in self.trials if t.peak_nbytes <= budget]
        return min(fitting, key=lambda t: (t.seconds, t.peak_nbytes), default=None)

    def follow(self, graph: Graph, solution: Solution) -> Trial:
        """Compile a solution that was found elsewhere. **Raises:** `NoProgramError`."""
        check(graph, solution.schedule)
        self._attempt(graph, solution)
        return some(self.trials)[-1]

    def most_seconds(self) -> float:
        """What the least memory may cost."""
        if isinstance(self.solver, Sublinear):
            return self.solver.most_seconds(self.graph) * (1 + 1e-9)
        return MOST_OVERHEAD * self.graph.step_seconds

    def rank(self, graph: Graph, solution: Solution, allowance: int | None) -> tuple[float, ...]:
        order = rank(graph, solution.schedule, allowance)
        if graph.form == self.graph.form and order[0]:
            self.cuttings.plain_nbytes = int(order[1])
        return order

    def _next(self, lines: list[Line], budget: int, turn: int = EXACTLY) -> Line | None:
        """The line of a turn to try next, with its pending solution; None where no further round promises anything."""
        best, cheap = self.best(budget), self.cuttings.cheap_seconds
        if best is not None and best.seconds <= cheap:
            return None
        ready: list[Line] = []
        known: list[Line] = []  # with what was compiled already
        for i in itertools.count():
            if i == len(self.cuttings.made):
                seconds = [line.expected[1] for line in ready] + ([best.seconds] if best else [])
                fastest = min(seconds, default=None)
                if not self.cuttings.deepen(fastest, budget, turn) and not self.cuttings.divide_best(known):
                    break
            if i == len(lines):
                lines.append(Line(self.cuttings.made[i]))
            line = lines[i]
            if self.cuttings.turn(line.graph) != turn:
                continue
            self._aim(line, budget)
            if line.closed or any(other.expected[1] <= line.graph.extra_seconds for other in ready):
                continue
            if line.pending is None:
                line.pending = self.solving.within(line.graph, line.allowance)
            line.order = self.rank(line.graph, line.pending, line.allowance)
            tried = self._tried(line.graph, line.pending)
            if line.order[0] == 0.0 and (tried or self._promises(line, line.order[1], best)):
                known.append(line)
                if not tried:
                    ready.append(line)
                    if line.order[1] <= cheap:
                        break
        if not ready and best is None:
            for line in lines:
                if id(line.graph) in self.failed or self.cuttings.turn(line.graph) != turn:
                    continue
                line.pending = self._lowest(line.graph)
                if line.may_fit(self.trials, budget) and not self._tried(line.graph, line.pending):
                    line.order = rank(line.graph, line.pending.schedule, None)
                    ready.append(line)
        return first(ready, CHEAP / 2 * self.graph.step_seconds)

    def _aim(self, line: Line, budget: int) -> None:
        """Say what to ask for next, by what was compiled so far of this cutting, else of others of its form."""
        alike = [t for t in self.trials if t.graph.alike(line.graph)]
        own = [t for t in alike if t.graph is line.graph]
        line.trials = own
        line.closed = bool(line.trials) and self._enough(line.trials[-1], budget)
        line.closed |= id(line.graph) in self.failed
        last = (own or alike)[-1:] if line.graph.host is not None else []  # of copies the model is least sure
        line.error_seconds = sum(t.seconds - t.profile.extra_seconds for t in last)
        known = own or alike
        allowance = next_allowance(known, budget) if known else budget
        if line.allowance != allowance:
            line.allowance, line.pending = allowance, None

    def _enough(self, trial: Trial, budget: int) -> bool:
        """Whether a plan leaves nothing to be gained within the budget by others of its cutting."""
        free = trial.peak_nbytes <= budget and trial.seconds <= self.cuttings.free_seconds
        return free or trial.fills(budget)

    def _promises(self, line: Line, seconds: float, best: Trial | None) -> bool:
        if best is None:
            return True
        if not line.trials and best.seconds > 0 and line.graph.host is None:
            return seconds <= HOPE * best.seconds
        return line.gain(seconds, best) >= CHEAP / 2 * self.graph.step_seconds

    def _worth_more(self, line: Line, best: Trial | None) -> bool:
        """Whether a line's pending solution is worth more compilations than are asked for."""
        if best is None or line.pending is None:
            return best is None
        seconds = extra_seconds(line.graph, line.pending.schedule)
        return line.gain(seconds, best) >= MORE_GAIN * self.graph.step_seconds

    def _least(self, budget: int | None) -> None:
        """Compile the schedules of least predicted peak; with a budget, until one fits at a bearable overhead, and
        without one, the least first, only those that promise to be bearable, if there are any. Where the effort is
        exhausted only the least of all, and forms of which none was compiled and one promises to fit.
        """
        fits = budget is not None and self.best(budget) is not None
        if not fits or self.effort.allows(fits):
            self.cuttings.make_lowest(self.most_seconds())
        least = math.inf
        for solver in self.solving.of_least:
            known = [(cut, self._lowest(cut, solver)) for cut in self.cuttings.made]
            if budget is None:
                most = self.most_seconds()
                cheap = [each for each in known if extra_seconds(each[0], each[1].schedule) <= most]
                known = cheap or ([] if self.trials else known)
            peaks = [simulate(cut, found.schedule).peak_nbytes for cut, found in known]
            likely = min(peaks, default=0) + UNLIKELY * self.temporaries_nbytes
            order = range(len(known)) if budget else sorted(range(len(known)), key=peaks.__getitem__)
            for (cut, solution), peak in ((known[i], peaks[i]) for i in order):
                is_least, least = peak == min(peaks) < least, min(peak, least)
                if peak > likely or (budget and self._no_lower(cut, solution, solver, peak, budget)):
                    continue
                fits = budget is not None and self._bearable(self.best(budget))
                tried = any(self.solving.is_lowest(trial.solution) for trial in self.trials)
                promised = budget is not None and peak <= budget and untried(self.trials, cut)
                if tried and not (promised or is_least) and not self.effort.allows(fits):
                    continue
                if not self._tried(cut, solution):
                    self._attempt(cut, solution)
                if budget is not None and self._bearable(self.best(budget)):
                    return

    def _no_lower(self, graph: Graph, solution: Solution, solver: Solver, peak: int, budget: int) -> bool:
        """Whether a schedule of this solver's of least memory would neither fit nor need less than what was compiled,
        if the model errs on it no less than on others of them of its form that recompute no more.
        """
        most = extra_seconds(graph, solution.schedule) + CHEAP * graph.step_seconds
        alike = (t for t in self.trials if t.graph.alike(graph) and t.profile.extra_seconds <= most)
        own = [t for t in alike if self.solving.is_lowest(t.solution, solver)]
        if not own:
            return False
        expected = peak + min(t.peak_nbytes - t.profile.peak_nbytes for t in own)
        least = min(t.peak_nbytes for t in self.trials)
        return expected > max(budget, least - LITTLE * self.temporaries_nbytes)

    def _attempt(self, graph: Graph, solution: Solution) -> Trial | None:
        """Compile a solution, and note the seconds of solving since the trial before; None where no program came."""
        if id(graph) in self.failed or (trial := self.attempt(graph, solution, FINISHED)) is None:
            return self.failed.add(id(graph))
        self.effort.compiled(trial.compile_seconds)
        before = sum(t.solve_seconds for t in self.trials)
        self.trials.append(replace(trial, solve_seconds=self.solving.seconds - before))
        return self.trials[-1]

    def _tried(self, graph: Graph, solution: Solution) -> bool:
        """Return whether the same schedule of this form was compiled."""
        same = (t for t in self.trials if t.solution.schedule == solution.schedule)
        return any(t.graph.form == graph.form for t in same)

    def _lowest(self, graph: Graph, solver: Solver | None = None) -> Solution:
        """The solution of least predicted peak."""
        return self.solving.lowest(graph, solver)
