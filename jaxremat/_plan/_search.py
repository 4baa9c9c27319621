"""Graph, budget -> the cheapest schedule of which the compiler says that it fits.

The loop: solve within what the model allows, compile, read the compiler's peak, correct the model's allowance by the
difference, solve again; within a budget, or within what is about the least memory that was compiled. The forms of the
step (its loops as they are, or in levels) and the two ways to cut the backward pass into stages compete; each has an
allowance of its own, because the model errs differently on each. A deeper form is made when no other promises to fit
for less than running the forward passes that it repeats.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .._model._graph import Graph, Segments
from .._model._loop_levels import Form, Pairs, deep
from .._model._schedule import Schedule, check
from .._model._simulate import Profile, extra_seconds, rank, simulate
from .._model._stages import cuttings
from .._runtime._bytes import format_nbytes
from .._runtime._errors import SolverError
from .._runtime._progress import phase
from .._solver import MinCut, Solution, Solver, Sublinear
from ._loop_division import uneven
from ._trial import Attempt, Line, Trial, first, some
from ._trial import allowance as next_allowance

SLACK = 0.02
"""A plan that leaves this share of the temporaries' budget unused, and costs something, is worth another round."""

CHEAP = 0.002
"""A plan of at most this overhead is not worth another round, nor is a gain of half of it."""

UNEVEN = 0.003
"""A loop is divided where that promises to save this share of the step's time."""

HOPE = 1.25
"""A cutting that was not compiled yet is tried if the model expects it to cost at most this much of the best plan's."""

MORE_ROUNDS = 2
"""What is added to the rounds while nothing fits, before the least memory is looked for, and once more behind that."""

MORE_GAIN = 0.005
"""Or while a plan promises to save this share of the step's time, as each near the least memory must."""

ASTRAY = 0.05
"""A plan that needs more than predicted by this share of the plain step's temporaries is tried again in order."""

UNLIKELY = 0.1
"""Schedules of least memory are not compiled where they need more than the least of them by this share of the plain
step's temporaries."""

LEAST_SLACK = 0.02
"""Of schedules of about the least memory, within this share of the plain step's temporaries, the fastest is taken,"""

LEAST_MORE = 0.05
"""if it needs no more than this share of the least temporaries besides."""

MOST_OVERHEAD = 1.0
"""Dearer plans are nobody's wish: the least memory is looked for at no more than this overhead, and a plan within a
budget that costs more is the answer only after a search between it and the cheaper ones that do not fit."""


@dataclass
class Search:
    """**Fields:** `graph` of the plain step's form, with coarse stages; `temporaries_nbytes` of the plain step; its
    `pairs` of loops and the `graph_of` other forms, see `_loop_levels`; `trials` in order.
    """

    graph: Graph
    solver: Solver
    time_limit: float
    attempt: Attempt
    temporaries_nbytes: int
    pairs: Pairs | None = None
    graph_of: Callable[[Segments], Graph | None] | None = None
    trials: list[Trial] = field(default_factory=list)
    solve_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.cuttings = cuttings(self.graph)
        self.left = list(self.pairs.deeper()) if self.pairs else []  # forms that are not made yet
        self.divided: set[Segments] = set()  # forms that were looked at for what dividing a loop would gain
        self.plain_nbytes = 0  # the least that the plain form needs, once it does not fit
        self.failed: set[int] = set()  # `id`s of cuttings of which no program came
        self.solved: list[tuple[Graph, Schedule, Profile]] = []  # by the solver, within other allowances too

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
        return self.best(budget) if some(self.trials) else None

    def _approach(self, lines: list[Line], budget: Callable[[], int], rounds: int, more: int) -> None:
        """Compile what promises most within the budget, that many times, and so many more while nothing fits or there
        is much to be gained. The budget may follow what was compiled.
        """
        for i in range(rounds + more):
            line = self._next(lines, budget())
            if line is None or line.pending is None:
                break
            if i >= rounds and not self._worth_more(line, self.best(budget())):
                break
            self._attempt(line.graph, line.pending, line.fence)
            line.pending = None

    def _bearable(self, trial: Trial | None) -> bool:
        return trial is not None and trial.seconds <= self._most_seconds()

    def lowest(self) -> Trial:
        """The compiled schedule of least peak, however dear. **Raises:** `NoProgramError`."""
        self._make_lowest()
        self._least(0)
        return min(some(self.trials), key=lambda t: t.peak_nbytes)

    def least(self, rounds: int) -> Trial:
        """Of the compiled schedules of about the least peak at a bearable overhead the fastest, after that many rounds
        near the least, or fewer where not much is to be gained. **Raises:** `NoProgramError`.
        """
        self._make_lowest()
        self._least(None)
        self._approach([], self._about_least, 0, rounds)
        trial = self.best(self._about_least())
        assert trial is not None  # the least itself
        return trial

    def _about_least(self) -> int:
        """How much memory is about the least that was found."""
        least = min(t.peak_nbytes for t in [t for t in self.trials if self._bearable(t)] or some(self.trials))
        more = min(LEAST_SLACK * self.temporaries_nbytes, LEAST_MORE * (least - self.graph.base_nbytes))
        return least + int(more)

    def best(self, budget: int) -> Trial | None:
        """The cheapest trial that fits so far."""
        fitting = [t for t in self.trials if t.peak_nbytes <= budget]
        return min(fitting, key=lambda t: (t.seconds, t.peak_nbytes), default=None)

    def reform(self, trial: Trial, fence: str) -> None:
        """Compile a trial's schedule with another form of fences."""
        self._attempt(trial.graph, trial.solution, fence)

    def follow(self, graph: Graph, solution: Solution) -> Trial:
        """Compile a solution that was found elsewhere. **Raises:** `NoProgramError`."""
        check(graph, solution.schedule)
        self._attempt(graph, solution, "finished")
        return some(self.trials)[-1]

    def predict(self, allowance: int | None) -> tuple[Graph, Solution]:
        """The solution that is best by the model alone, with the graph that it is of."""
        found: list[tuple[tuple[float, ...], Graph, Solution]] = []
        if allowance is None:
            self._make_lowest()
        while True:
            for cut in self.cuttings[len(found) :]:
                solution = self._solution(cut, allowance, self.solver)
                found.append((self._rank(cut, solution, allowance), cut, solution))
                if found[-1][0][:2] <= (0.0, self._cheap_seconds()):
                    return cut, solution
            order, cut, solution = min(found, key=lambda each: each[0])
            fits = order[0] == 0.0
            alike = [(g, s) for o, g, s in found if o[0] == 0.0 and g.segments == cut.segments]
            if allowance is None or not (
                self._deepen(order[1] if fits else None, allowance)
                or (fits and self._divide(alike, allowance))
            ):
                return cut, solution

    def _free_seconds(self) -> float:
        """What no plan goes below: it saves nothing in loops, which the plain step may do, and recomputes nothing."""
        return min(self.graph.extra_seconds, 0.0)

    def _cheap_seconds(self) -> float:
        return self._free_seconds() + CHEAP * self.graph.step_seconds

    def _most_seconds(self) -> float:
        """What the least memory may cost."""
        if isinstance(self.solver, Sublinear):
            return self.solver.most_seconds(self.graph) * (1 + 1e-9)
        return MOST_OVERHEAD * self.graph.step_seconds

    def _make(self, form: Form) -> list[Graph]:
        """Add the cuttings of a form, if it can be made, and return them; the shallower ones are passed over."""
        assert self.graph_of is not None
        if form in self.left:
            self.left = self.left[self.left.index(form) + 1 :]
        self.cuttings += (made := cuttings(graph) if (graph := self.graph_of(form.segments)) else [])
        return made

    def _divide(self, solutions: Sequence[tuple[Graph, Solution]], allowance: int) -> list[Graph]:
        """Add the cuttings of a form with one of its loops in parts, and return them, if the best of these solutions of
        its cuttings, which fit, is a good deal dearer than such a form promises to be. No form is looked at twice.
        """
        seconds = min(extra_seconds(graph, solution.schedule) for graph, solution in solutions)
        segments = solutions[0][0].segments
        if self.pairs is None or segments in self.divided or seconds <= self._cheap_seconds():
            return []
        self.divided.add(segments)
        if not self.pairs.whole(segments):
            return []
        with phase("looking for a loop to divide"):
            looked = (uneven(*each, allowance, self.solver, self.time_limit) for each in solutions)
            found = min(filter(None, looked), key=lambda each: each.seconds, default=None)
        if found is None or seconds - found.seconds < UNEVEN * self.graph.step_seconds:
            return []
        forms = self.pairs.divided(segments, found.pair, found.share)
        return [cut for form in forms for cut in self._make(form)]

    def _divide_best(self, known: Sequence[Line]) -> list[Graph]:
        """The same of the form of the best of these lines."""
        if not known:
            return []
        best = min(known, key=lambda line: line.order)
        alike = [line for line in known if line.graph.segments == best.graph.segments]
        solutions = [(line.graph, line.pending) for line in alike if line.pending is not None]
        return self._divide(solutions, min(line.allowance for line in alike))

    def _make_lowest(self) -> None:
        """Add the cuttings of the forms that may need the least memory at a bearable overhead: the first that is near
        the least of all, and of those without levels; no others are made then.
        """
        most = self._most_seconds()
        able = [form for form in self.left if self.graph.extra_seconds + form.more_seconds <= most]
        for forms in ([form for form in able if not deep(form)], able):
            slack = LEAST_SLACK * self.temporaries_nbytes
            enough = max((form.fewer_nbytes for form in forms), default=0) - slack
            lowest = next((form for form in forms if form.fewer_nbytes >= enough), None)
            if lowest in self.left:
                self._make(lowest)
        self.left = []

    def _deepen(self, seconds: float | None, budget: int) -> bool:
        """Make the next form that may fit, if none is known that takes less; whether there was one.

        **Arguments:** `seconds` that the best so far takes, None if nothing fits.
        """
        for form in self.left:
            if seconds is not None and seconds <= self.graph.extra_seconds + form.more_seconds:
                return False
            last = bool(self.left) and form is self.left[-1]
            if (self.plain_nbytes - form.fewer_nbytes <= budget or last) and self._make(form):
                return True
        return False

    def _rank(self, graph: Graph, solution: Solution, allowance: int | None) -> tuple[float, ...]:
        order = rank(graph, solution.schedule, allowance)
        if graph.segments == self.graph.segments and order[0]:
            self.plain_nbytes = int(order[1])
        return order

    def _next(self, lines: list[Line], budget: int) -> Line | None:
        """The line to try next, with its pending solution; None where no further round promises anything."""
        best, cheap = self.best(budget), self._cheap_seconds()
        if best is not None and best.seconds <= cheap:
            return None
        ready: list[Line] = []
        known: list[Line] = []  # with what was compiled already
        for i in itertools.count():
            if i == len(self.cuttings):
                seconds = [line.order[1] for line in ready] + ([best.seconds] if best else [])
                if not self._deepen(min(seconds, default=None), budget) and not self._divide_best(known):
                    break
            if i == len(lines):
                lines.append(Line(self.cuttings[i]))
            line = lines[i]
            self._aim(line, budget)
            if line.closed or any(other.order[1] <= line.graph.extra_seconds for other in ready):
                continue
            if line.pending is None:
                line.pending = self._solution(line.graph, line.allowance, self.solver)
            line.order = self._rank(line.graph, line.pending, line.allowance)
            tried = self._tried(line.pending, line.fence)
            if line.order[0] == 0.0 and (tried or self._promises(line, line.order[1], best)):
                known.append(line)
                if not tried:
                    ready.append(line)
                    if line.order[1] <= cheap:
                        break
        if not ready and best is None:
            for line in (line for line in lines if id(line.graph) not in self.failed):
                line.pending = self._solution(line.graph, None, self.solver)
                if not self._tried(line.pending, line.fence):
                    line.order = rank(line.graph, line.pending.schedule, None)
                    ready.append(line)
        return first(ready, CHEAP / 2 * self.graph.step_seconds)

    def _aim(self, line: Line, budget: int) -> None:
        """Say what to ask for next, by what was compiled so far of this cutting, else of others of its form."""
        alike = [t for t in self.trials if t.graph.segments == line.graph.segments]
        own = [t for t in alike if t.graph is line.graph]
        astray = any(t.fence == "finished" and self._astray(t, budget) for t in own)
        if astray or (not own and self._mended(line.graph)):
            line.fence = "ordered"
        line.trials = [t for t in own if t.fence == line.fence or not self._astray(t, budget)]
        line.closed = bool(line.trials) and self._enough(line.trials[-1], budget)
        line.closed |= id(line.graph) in self.failed
        known = line.trials or [t for t in alike if not self._astray(t, budget)]
        allowance = next_allowance(known, budget) if known else budget
        if line.allowance != allowance:
            line.allowance, line.pending = allowance, None

    def _enough(self, trial: Trial, budget: int) -> bool:
        """Whether a plan leaves nothing to be gained within the budget by others of its cutting."""
        room = budget - trial.peak_nbytes
        little = room <= SLACK * (budget - self.graph.base_nbytes) or trial.seconds <= self._free_seconds()
        return room >= 0 and little

    def _promises(self, line: Line, seconds: float, best: Trial | None) -> bool:
        if best is None:
            return True
        if not line.trials and best.seconds > 0:
            return seconds <= HOPE * best.seconds
        return line.gain(seconds, best) >= CHEAP / 2 * self.graph.step_seconds

    def _worth_more(self, line: Line, best: Trial | None) -> bool:
        """Whether a line's pending solution is worth more compilations than are asked for."""
        if best is None or line.pending is None:
            return best is None
        seconds = extra_seconds(line.graph, line.pending.schedule)
        return line.gain(seconds, best) >= MORE_GAIN * self.graph.step_seconds

    def _astray(self, trial: Trial, budget: int) -> bool:
        """Whether a plan misses the budget because the compiler keeps what the model takes to be done with."""
        more = trial.peak_nbytes - trial.profile.peak_nbytes
        return (
            trial.graph.backend.fuses
            and trial.peak_nbytes > budget
            and more > ASTRAY * self.temporaries_nbytes
        )

    def _mended(self, graph: Graph) -> bool:
        """Whether plans of this form do not go astray in order, where that was tried because another did."""
        alike = (t for t in self.trials if t.graph.segments == graph.segments)
        return any(t.fence == "ordered" and not self._astray(t, 0) for t in alike)

    def _least(self, budget: int | None) -> None:
        """Compile the schedules of least predicted peak; with a budget, until one fits at a bearable overhead, and
        without one only those that promise to be bearable, if there are any.
        """
        # The model is least sure where memory is least: a mere price of memory, which leans on it less, is tried too.
        for solver in (self.solver, MinCut()):
            known = [(cut, self._solution(cut, None, solver)) for cut in self.cuttings]
            if budget is None:
                most = self._most_seconds()
                cheap = [each for each in known if extra_seconds(each[0], each[1].schedule) <= most]
                known = cheap or ([] if self.trials else known)
            peaks = [simulate(cut, found.schedule).peak_nbytes for cut, found in known]
            likely = min(peaks, default=0) + UNLIKELY * self.temporaries_nbytes
            for (cut, solution), peak in zip(known, peaks, strict=True):
                if peak > likely:
                    continue
                for fence in ("ordered",) if self._mended(cut) else ("finished", "ordered"):
                    trial = self._tried(solution, fence) or self._attempt(cut, solution, fence)
                    if budget is not None and self._bearable(self.best(budget)):
                        return
                    if trial is None or not self._astray(trial, budget or 0):
                        break

    def _attempt(self, graph: Graph, solution: Solution, fence: str) -> Trial | None:
        """Compile a solution, and note the seconds of solving since the trial before; None where no program came."""
        if id(graph) in self.failed or (trial := self.attempt(graph, solution, fence)) is None:
            return self.failed.add(id(graph))
        before = sum(t.solve_seconds for t in self.trials)
        self.trials.append(replace(trial, solve_seconds=self.solve_seconds - before))
        return self.trials[-1]

    def _tried(self, solution: Solution, fence: str) -> Trial | None:
        alike = (t for t in self.trials if t.solution.schedule == solution.schedule and t.fence == fence)
        return next(alike, None)

    def _solution(self, graph: Graph, allowance: int | None, solver: Solver) -> Solution:
        began = time.monotonic()
        within = "for the least memory" if allowance is None else f"within {format_nbytes(allowance)}"
        with phase(f"solving {within}"):
            solution = solver.solve(graph, allowance, time_limit=self.time_limit)
        self.solve_seconds += time.monotonic() - began
        if not isinstance(solution, Solution):
            raise SolverError(
                f"The solver {solver!r} returned a {type(solution).__name__}. "
                "Its method `solve` must return a `jaxremat.Solution`, for example `Solution(complete(graph, saved))`."
            )
        check(graph, solution.schedule)
        return self._never_worse(graph, allowance, solution) if solver is self.solver else solution

    def _never_worse(self, graph: Graph, allowance: int | None, solution: Solution) -> Solution:
        """The solution, with the best schedule that the solver has found before in place of its own, if that is better:
        it may have run out of time.
        """
        self.solved.append((graph, solution.schedule, simulate(graph, solution.schedule)))
        if allowance is None:
            return solution
        alike = [each for each in self.solved if each[0] is graph and each[2].peak_nbytes <= allowance]
        best = min(reversed(alike), key=lambda each: each[2].extra_seconds, default=self.solved[-1])
        return replace(solution, schedule=best[1])
