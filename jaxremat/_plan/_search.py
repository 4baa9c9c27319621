"""Space of variants, compiler, clock -> the cheapest schedule that the compiler confirms to fit.

The loop: solve within an allowance (a predicted peak), compile, read the compiler's peak, correct the allowance by the
difference, solve again. The target is a budget, or about the least memory compiled so far. The variants of the step
and the ways to cut its backward pass into stages compete. Each has a separate allowance, because the model errs
differently on each.

This module is the policy: it picks the next candidate and decides when to stop. The `Ledger` records solves and
compilations, and the `CandidateSource` supplies candidates.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from .._emit._emit import COMBINED
from .._model._graph import Graph
from .._model._schedule import check, close_over_dependencies
from .._model._simulate import extra_seconds, rank, simulate
from .._model._variant import INSIDE, Variant
from .._solver import Solution, Solver, Sublinear
from .._solver._mincut import saving_less
from ._candidates import (
    CHEAP,
    EXACTLY,
    HOST,
    LEAST_SLACK,
    Candidate,
    CandidateSource,
    Space,
    cheapest,
    next_allowance,
)
from ._ledger import CompiledCandidate, Ledger, fastest

HOPE = 1.25
"""A candidate that was not compiled yet is tried if it is predicted to cost at most this multiple of the best plan's
cost. Chosen, not measured: above 1 because the model errs, and small because each try is a compilation."""

MORE_ROUNDS = 2
"""Extra rounds while nothing fits, before the search for the least memory, and again after it: the first round finds
the model's error, the second corrects it."""

MORE_GAIN = 0.005
"""A round beyond the requested ones, or near the least memory, needs a candidate that promises to save this share of
the step's time: more than `CHEAP`, since the requested rounds are over."""

MUCH_GAIN = 0.1
"""The same once the extra rounds, and the compilations of a search that has found a plan, are used up too. So much is
left to gain if the best plan is far below the budget, and one that missed by little is not corrected yet."""

UNLIKELY = 0.1
"""A least-memory schedule is not compiled if its predicted peak exceeds the least of them by this share of the plain
step's temporaries: the model would have to err by that much more on the least than on it."""

MANY_TIMES = 4
"""Nor if it exceeds the least by this multiple of the least one's temporaries: for long sequences, whose scores
dominate the plain step, half of the compilations were of schedules that need ten times the least memory."""

LITTLE = 0.01
"""Nor, with a budget, if it is expected to need no less than the compiled ones by this share. A schedule that misses
the budget by at most this share gets further rounds: the solver needs to drop only one or two more values."""

NEAR = 0.1
"""A candidate that misses the budget by at most this share gets one corrected solve even if the effort is exhausted,
and one more if it then misses by at most `LITTLE`: least-memory schedules are several times slower."""

WIDE = 0.5
"""If a plan that fits is slower than one that nearly fits, by this share of the step's time, schedules between the two
are compiled by bisection: a smaller difference is not worth the compilations."""

LEAST_MORE = 0.05
"""A schedule whose temporaries exceed the least by at most this share still counts as about the least memory."""

MOST_OVERHEAD = 1.0
"""A plan is affordable up to this overhead. The search for the least memory is limited to affordable plans. A plan
within a budget that costs more is returned only after a search between it and the cheaper ones that do not fit."""

WORTH_FEWER = 0.1
"""If the least memory is reached with microbatches and costs this share of the step's time, fewer microbatches are
tried: each takes a compilation."""

HOST_WORTH = 0.02
"""With `offload="auto"`, host memory is tried only if the best plan without it costs this share of the step's time."""

HOST_MORE = 0.3
"""The search then compiles one plan, or this share of the number compiled so far (the plain step counts as two)."""

COMBINED_ROUNDS = 3
"""Most corrections of a schedule for `combined` barriers, which leave sums over devices out and so change the peak."""


class Search:
    """A search for one plan, in a space of graphs. Seconds are extra seconds over the plain step.

    **Arguments:** the `space`; the `ledger`; `temporaries_nbytes` of the plain step; `written_nbytes` the peak of the
    step as the user wrote it, None if it may not run unplanned.
    """

    def __init__(
        self, space: Space, ledger: Ledger, temporaries_nbytes: int, written_nbytes: int | None = None
    ) -> None:
        self.graph, self.ledger, self.effort = space.plain, ledger, ledger.effort
        self.temporaries_nbytes, self.written_nbytes = temporaries_nbytes, written_nbytes
        self.source = CandidateSource(space, ledger.solver, ledger.time_limit, temporaries_nbytes)
        self.turns = self.source.turns
        self.effort.turns, self.effort.equations = len(self.turns), len(self.graph.nodes)
        self.candidates: list[Candidate] = []
        self.corrections = 0  # compilations beyond the effort
        for cut in self.source.made:
            if (known := space.known(cut)) is not None:
                self.ledger.know(cut, known)

    def within(self, budget: int, rounds: int, *, briefly: bool = False) -> CompiledCandidate | None:
        """Return the fastest compiled schedule within the budget after `rounds` rounds, or more if none fits; None if
        none fits then. **Raises:** `NoProgramError`. **Arguments:** `briefly` skips least-memory ones if none fits.
        """
        with self._interruptible(budget):
            self.approach(lambda: budget, rounds, MORE_ROUNDS)
            if briefly and self.ledger.best(budget) is None:
                return None
            if not self._affordable(self.ledger.best(budget)):
                self._least(budget)
                if self.ledger.best(budget) is not None:  # now between it and the cheap ones
                    self.approach(lambda: budget, 0, MORE_ROUNDS)
                    self._bisect(budget)
        return self.ledger.best(budget) if self.ledger.some() else None

    def least_known(self, among: Sequence[Graph] = ()) -> tuple[Graph, Solution]:
        """Return the solution of least predicted peak among some graphs, or all built so far, and its graph."""
        known = self.ledger.lowest_of(among or self._near_least())
        return min(known, key=lambda each: simulate(each[0], each[1].schedule).peak_nbytes)

    def faster(self, budget: int, rounds: int) -> CompiledCandidate | None:
        """Return a compiled schedule within the budget that is faster than the plain step, by the model and by its
        kernels, after `rounds` rounds; None if there is none.
        """
        self.effort.fits = True  # the plain step does
        with self._interruptible(budget):
            self.approach(lambda: budget, rounds, 0)
        fitting = (each for each in self.ledger.compiled if each.peak_nbytes <= budget)
        return fastest(each for each in fitting if each.seconds < 0 and (each.compiled_overhead or 0.0) <= 0)

    def lowest(self) -> CompiledCandidate:
        """Return the compiled schedule of least peak, however expensive. **Raises:** `NoProgramError`."""
        self._least(0)
        return min(self.ledger.some(), key=lambda each: each.peak_nbytes)

    def least(self, rounds: int) -> CompiledCandidate | None:
        """Return the fastest compiled schedule of about the least peak at an affordable overhead, after at most
        `rounds` rounds near the least; None if that is the plain step. **Raises:** `NoProgramError`.
        """
        with self._interruptible(math.inf):
            self._least(None)
            found = self.ledger.some()
            lowest = min([*filter(self._affordable, found)] or found, key=lambda each: each.peak_nbytes)
            # If the least-memory schedule costs too much, one with fewer microbatches may be affordable.
            while not self._affordable(lowest) and (made := self.source.make_shallower()):
                compiled = (self.ledger.compile(cut, self.ledger.lowest(cut)) for cut in made)
                lowest = min(filter(None, compiled), key=lambda each: each.peak_nbytes, default=lowest)
            lowest = self._affordable_least(lowest)
            self._fewer_microbatches(lowest)
            self.approach(self._about_least, 0, rounds)
        most = self._about_least()
        found = self.ledger.best(most)
        if self.written_nbytes is not None and self.written_nbytes <= most:
            return found if found is not None and found.seconds < 0 else None
        assert found is not None  # the least itself
        return found

    def _affordable_least(self, lowest: CompiledCandidate) -> CompiledCandidate:
        """Compile the schedule of least predicted peak at an affordable overhead, for the variant that needs least or a
        shallower one. Return it, or the lowest so far if that is better.
        """
        affordable = self._affordable(lowest)
        graph, found = self.least_known() if affordable else (lowest.graph, lowest.solution)
        if affordable and any(each.graph.form == graph.form for each in self.ledger.compiled):
            return lowest
        while graph.extra_seconds > self.most_seconds() and (made := self.source.make_shallower()):
            graph, found = self.least_known(made)
        everything = close_over_dependencies(graph, graph.residuals)
        low, high = (simulate(graph, each).peak_nbytes for each in (found.schedule, everything))
        best: Solution | None = None
        # Bisect for the least allowance whose schedule is affordable.
        while high - low > max(LEAST_SLACK * self.temporaries_nbytes, 1):
            middle = (low + high) // 2
            found = self.ledger.within(graph, middle)
            cheap = extra_seconds(graph, found.schedule) <= self.most_seconds()
            low, high, best = (low, middle, found) if cheap else (middle, high, best)
        made = best and self.ledger.compile(graph, best)
        return made if made and not (affordable and made.peak_nbytes >= lowest.peak_nbytes) else lowest

    def _fewer_microbatches(self, lowest: CompiledCandidate) -> None:
        """Compile least-memory schedules with fewer microbatches than the lowest one, by bisection: if sums of
        gradients fill the memory, a quarter as many microbatches may need no more.
        """
        of, form = self.source.variants.estimate, lowest.graph.form
        worthwhile = lowest.seconds > WORTH_FEWER * self.graph.step_seconds
        if not (worthwhile and of(form).whole) or form.settings(INSIDE):
            return
        most, known = of(form).fewer_nbytes, self.source.shallower
        fewer = [each for each in known if of(each).whole and of(each).fewer_nbytes < most]
        low, high = -1, len(fewer)
        while high - low > 1 and self._allows(lowest, 0):
            middle = (low + high) // 2
            made = ((cut, self.ledger.lowest(cut)) for cut in self.source.make(fewer[middle]))
            hopeful = (each for each in made if not self._hopeless(*each, self.ledger.solver))
            compiled = (self.ledger.compile(*each) for each in hopeful)
            peak = min((each.peak_nbytes for each in compiled if each), default=math.inf)
            low, high = (low, middle) if peak <= self._about_least() else (middle, high)

    def follow(self, graph: Graph, solution: Solution) -> CompiledCandidate:
        """Compile a solution from elsewhere. **Raises:** `NoProgramError`."""
        check(graph, solution.schedule)
        self.ledger.compile(graph, solution)
        return self.ledger.some()[-1]

    def combined(self, found: CompiledCandidate, budget: int) -> CompiledCandidate:
        """Return the candidate, or its schedule (or one that uses the budget) with barriers that leave out sums over
        devices, if that fits and its kernels, including collectives, take no longer.
        """
        graph, solution, best = found.graph, found.solution, found
        tried: list[CompiledCandidate] = []
        with self._interruptible(budget):
            for _ in range(1 + COMBINED_ROUNDS):
                if (made := self.ledger.compile(graph, solution, COMBINED)) is None:
                    break
                tried.append(made)
                slower = (made.compiled_overhead or 0.0) > (best.compiled_overhead or 0.0)
                if made.peak_nbytes <= budget and not slower:
                    best = made
                if made.fills(budget) or (made.peak_nbytes <= budget and made.profile.extra_seconds <= 0):
                    break
                solution = self.ledger.within(graph, next_allowance(tried, budget))
                if any(solution.schedule == each.solution.schedule for each in tried):
                    break
        return best

    @contextmanager
    def _interruptible(self, budget: float) -> Iterator[None]:
        """Let Ctrl-C end the body of the `with`, if the user allows that and a program that fits is known."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.effort.interruptible or not (self.effort.fits or self.ledger.best(budget)):
                raise
            self.effort.stopwatch.interrupted = True

    def predicted(self, allowance: int | None) -> tuple[Graph, Solution]:
        """Return the best solution by the model, and its graph, without compiling.

        **Arguments:** `allowance` the predicted peak, None for the least memory.
        """
        found: list[tuple[tuple[float, ...], Graph, Solution]] = []
        if allowance is None:
            self.source.make_lowest(self.most_seconds())
        while True:
            for cut in self.source.made[len(found) :]:
                solution = self.ledger.within(cut, allowance)
                found.append((self._rank(cut, solution, allowance), cut, solution))
                if found[-1][0][:2] <= (0.0, self.source.cheap_seconds):
                    return cut, solution
            order, cut, solution = min(found, key=lambda each: each[0])
            seconds = order[1] if order[0] == 0.0 else None
            add = partial(self.source.add_variant, seconds, lambda _: allowance or 0)
            if allowance is None or not any(map(add, self.turns)):
                return cut, solution

    def most_seconds(self) -> float:
        """Return the most extra seconds that an affordable plan takes."""
        solver = self.ledger.solver
        if isinstance(solver, Sublinear):
            return solver.most_seconds(self.graph) * (1 + 1e-9)
        return MOST_OVERHEAD * self.graph.step_seconds

    def approach(self, budget: Callable[[], int], rounds: int, more: int = 0) -> None:
        """Compile the most promising candidates within the budget, `rounds` in each turn, and up to `more` while
        nothing fits or the gain is large. Turns do not share rounds: a later turn cannot take any from an earlier one.

        **Arguments:** `budget` returns the bytes, which may change with each compilation.
        """
        for number, turn in enumerate(self.turns, 1):
            self.effort.turn = number
            most = self._most_compilations(turn, budget())
            for i in range(rounds + more + MORE_ROUNDS):
                if self.effort.compilations >= most:
                    break
                room = budget()
                candidate = self._next(room, turn)
                if candidate is None or candidate.pending is None:
                    break
                best = self.ledger.best(room)
                if i >= rounds and not self._worth_more(candidate, best, MORE_GAIN):
                    break
                much = best is not None and self._worth_more(candidate, best, MUCH_GAIN)
                if i >= rounds + more and not (much or self._misses(room, LITTLE)):
                    break
                # Least-memory schedules, which take several times the step, may have used up all compilations.
                least = much and budget == self._about_least
                if not self._allows(None if much else best, room, MORE_ROUNDS * least):
                    break
                self.ledger.compile(candidate.graph, candidate.pending)
                candidate.pending = None

    def _most_compilations(self, turn: int, budget: int) -> float:
        """Return the total number of compilations at which a turn ends."""
        if (best := self._best_without_host(turn, budget)) is None:
            return math.inf
        worth = best.seconds - self.source.free_seconds > HOST_WORTH * self.graph.step_seconds
        more = max(int(HOST_MORE * (self.effort.compilations + 2)), 1)
        return self.effort.compilations + worth * more

    def _best_without_host(self, turn: int, budget: int) -> CompiledCandidate | None:
        """Return the best plan without host memory, in the host turn of a search that should use it sparingly: that
        turn considers only this plan's variant. None if the turn is not limited so.
        """
        if turn != HOST or self.graph.host is None or not self.graph.host.sparing:
            return None
        without = (each for each in self.ledger.compiled if each.graph.host is None)
        best = fastest(each for each in without if each.peak_nbytes <= budget)
        return best if self._affordable(best) else None

    def _next(self, budget: int, turn: int = EXACTLY) -> Candidate | None:
        """Return the candidate of a turn to compile next, with its pending solution; None if no round promises more."""
        best, cheap = self.ledger.best(budget), self.source.cheap_seconds
        if best is not None and best.seconds <= cheap:
            return None
        ready: list[Candidate] = []
        only = self._best_without_host(turn, budget)
        for i in itertools.count():
            if i == len(self.source.made):
                if only is not None:
                    break
                seconds = [each.expected[1] for each in ready] + ([best.seconds] if best else [])
                fastest = min(seconds, default=None)
                if not self.source.add_variant(fastest, partial(self._likely_allowance, budget), turn):
                    break
            if i == len(self.candidates):
                self.candidates.append(Candidate(self.source.made[i]))
            candidate = self.candidates[i]
            if self.source.turn(candidate.graph) != turn or (
                only and candidate.graph.form != only.graph.form
            ):
                continue
            self._aim(candidate, budget)
            faster = any(each.expected[1] <= candidate.graph.extra_seconds for each in ready)
            if candidate.closed or faster:  # another is faster than any schedule of this one
                continue
            if candidate.pending is None:
                candidate.pending = self.ledger.within(candidate.graph, candidate.allowance, begin=True)
            candidate.open_seconds = self.ledger.open_seconds(
                candidate.graph, candidate.allowance, candidate.pending
            )
            candidate.order = self._rank(candidate.graph, candidate.pending, candidate.allowance)
            tried = self._tried(candidate)
            self.source.learn(candidate)
            if candidate.order[0] == 0.0 and not tried and self._promises(candidate, best):
                ready.append(candidate)
                if candidate.order[1] <= cheap:
                    break
        # The solver's last stage takes as long as the others and rarely gains, so only the winner gets it.
        while (chosen := self._cheapest(ready)) is not None and self._finish(chosen):
            if self._tried(chosen) or not self._promises(chosen, best):
                ready.remove(chosen)
        if chosen is None and best is None:
            chosen = self._cheapest([c for c in self.candidates if self._may_fit(c, budget, turn)])
        return chosen

    def _cheapest(self, ready: Sequence[Candidate]) -> Candidate | None:
        """Return the cheapest candidate, or an unfinished one that may become cheaper when finished."""
        chosen = cheapest(ready, CHEAP / 2 * self.graph.step_seconds)
        if chosen is None or not self.ledger.has_finished(chosen.graph, chosen.allowance):
            return chosen
        most = chosen.expected[1]
        cheaper = (
            each for each in ready if each.open_seconds and each.expected[1] - each.open_seconds < most
        )
        return min(cheaper, key=lambda each: each.expected[1] - each.open_seconds, default=chosen)

    def _finish(self, candidate: Candidate) -> bool:
        """Let the solver finish a candidate's pending solution; return whether it was unfinished."""
        graph, allowance = candidate.graph, candidate.allowance
        if candidate.pending is None or self.ledger.has_finished(graph, allowance):
            return False
        candidate.pending = self.ledger.finished(graph, allowance, candidate.pending)
        candidate.order, candidate.open_seconds = self._rank(graph, candidate.pending, allowance), 0.0
        return True

    def _tried(self, candidate: Candidate) -> bool:
        """Return whether the pending solution was compiled already, even after it is finished."""

        def knows() -> bool:
            return candidate.pending is not None and self.ledger.knows(candidate.graph, candidate.pending)

        return knows() and (not self._finish(candidate) or knows())

    def _may_fit(self, candidate: Candidate, budget: int, turn: int) -> bool:
        """Make a candidate's least-memory solution pending; return whether it may fit and was not compiled yet."""
        graph = candidate.graph
        if id(graph) in self.ledger.failed or self.source.turn(graph) != turn:
            return False
        candidate.pending, candidate.open_seconds = self.ledger.lowest(graph), 0.0
        candidate.order = rank(graph, candidate.pending.schedule, None)
        beyond = min((each.beyond_nbytes for each in self.ledger.compiled), default=0)
        fits = simulate(graph, candidate.pending.schedule).peak_nbytes + beyond <= budget
        return fits and not self.ledger.knows(graph, candidate.pending)

    def _aim(self, candidate: Candidate, budget: int) -> None:
        """Set a candidate's next allowance by the compilations of its graph, else of other cuttings of its variant."""
        alike = [each for each in self.ledger.compiled if each.graph.alike(candidate.graph)]
        own = [each for each in alike if each.graph is candidate.graph]
        candidate.compiled = own
        enough = bool(own) and self._enough(own[-1], budget)
        candidate.closed = enough or id(candidate.graph) in self.ledger.failed
        # The model's times of host copies are its least certain.
        last = (own or alike)[-1:] if candidate.graph.host is not None else []
        candidate.error_seconds = sum(each.seconds - each.profile.extra_seconds for each in last)
        if alike:
            allowance = next_allowance(own or alike, budget)
        elif self._best_without_host(self.source.turn(candidate.graph), budget) is not None:
            # Few plans with host memory are compiled, so the first one should fit.
            of_form = (each for each in self.ledger.compiled if each.graph.form == candidate.graph.form)
            allowance = budget - max(each.beyond_nbytes for each in of_form)
        else:
            allowance = self._likely_allowance(budget, candidate.graph.form)
        if candidate.allowance != allowance:
            candidate.allowance, candidate.pending = allowance, None

    def _likely_allowance(self, budget: int, form: Variant) -> int:
        """Return the first allowance of a variant with no compilation yet, by the model's error on similar ones."""
        known = self.ledger.beyond_nbytes(form, budget, NEAR * self.temporaries_nbytes)
        likely = self.ledger.likely_beyond_nbytes(form) or 0
        much = likely > LITTLE * self.temporaries_nbytes  # a small correction is not worth another solve
        return budget - (max(known, likely) if much else known)

    def _enough(self, compiled: CompiledCandidate, budget: int) -> bool:
        """Return whether other schedules of this plan's graph cannot be better within the budget."""
        free = compiled.peak_nbytes <= budget and compiled.seconds <= self.source.free_seconds
        return free or compiled.fills(budget)

    def _promises(self, candidate: Candidate, best: CompiledCandidate | None) -> bool:
        """Return whether a candidate's pending solution is worth a compilation."""
        if best is None:
            return True
        seconds = candidate.order[1] - candidate.open_seconds
        if not candidate.compiled and best.seconds > 0 and candidate.graph.host is None:
            return seconds <= HOPE * best.seconds
        return candidate.gain(seconds, best) >= CHEAP / 2 * self.graph.step_seconds

    def _worth_more(self, candidate: Candidate, best: CompiledCandidate | None, share: float) -> bool:
        """Return whether a pending solution promises to save this share of the step's time."""
        if best is None or candidate.pending is None:
            return best is None
        seconds = extra_seconds(candidate.graph, candidate.pending.schedule)
        return candidate.gain(seconds, best) >= share * self.graph.step_seconds

    def _allows(self, best: CompiledCandidate | None, budget: int, more: int = 0) -> bool:
        """Return whether another plan may be compiled. The first always may, and so may corrections of near misses.

        **Arguments:** `more` compilations in addition to the effort's.
        """
        first = not (self.ledger.compiled or self.effort.fits)
        if first or self.effort.allows(self._affordable(best), more):
            return True
        share = LITTLE if self.corrections else NEAR
        corrects = not self.effort.fits and self.corrections < MORE_ROUNDS and self._misses(budget, share)
        self.corrections += corrects
        return corrects

    def _misses(self, budget: int, share: float) -> bool:
        """Return whether no affordable plan fits but one misses the budget by at most this share of the plain step's
        temporaries. The next round then corrects for the model's error, which beats a least-memory schedule.
        """
        if self._affordable(self.ledger.best(budget)):
            return False
        missed = (each.peak_nbytes - budget for each in self.ledger.compiled if self._affordable(each))
        return any(0 < nbytes <= share * self.temporaries_nbytes for nbytes in missed)

    def _affordable(self, compiled: CompiledCandidate | None) -> bool:
        return compiled is not None and compiled.seconds <= self.most_seconds()

    def _about_least(self) -> int:
        """Return the most memory that counts as about the least compiled so far."""
        found = self.ledger.some()
        least = min(each.peak_nbytes for each in [*filter(self._affordable, found)] or found)
        return self._about(least if self.written_nbytes is None else min(least, self.written_nbytes))

    def _about(self, least: int) -> int:
        more = min(LEAST_SLACK * self.temporaries_nbytes, LEAST_MORE * (least - self.graph.base_nbytes))
        return least + int(more)

    def _rank(self, graph: Graph, solution: Solution, allowance: int | None) -> tuple[float, ...]:
        order = rank(graph, solution.schedule, allowance)
        if graph.form == self.graph.form and order[0]:
            self.source.plain_nbytes = int(order[1])
        return order

    def _least(self, budget: int | None) -> None:
        """Compile the schedules of least predicted peak. With a budget, those that may fit come first, then the others
        from the least up, until one fits at an affordable overhead. Without one, only affordable ones are compiled, or
        all if none is affordable and nothing was compiled yet. If the effort is exhausted, only each solver's least one
        is compiled, and those of variants that promise to fit and were not compiled yet.
        """
        fits = budget is not None and self.ledger.best(budget) is not None
        if not fits or self.effort.allows(fits):
            self.source.make_lowest(self.most_seconds())
        for solver in self.ledger.of_least:
            least = math.inf
            known = self.ledger.lowest_of(self._near_least(budget or 0), solver)
            if budget is None:
                most = self.most_seconds()
                if all(extra_seconds(cut, found.schedule) > most for cut, found in known):
                    known = self.ledger.lowest_of(self.source.made, solver)
                cheap = [each for each in known if extra_seconds(each[0], each[1].schedule) <= most]
                known = cheap or ([] if self.ledger.compiled else known)
            peaks = [simulate(cut, found.schedule).peak_nbytes for cut, found in known]
            lowest = min(peaks, default=0)
            beside = max(lowest - self.graph.base_nbytes, 0)
            likely = lowest + min(UNLIKELY * self.temporaries_nbytes, MANY_TIMES * beside)
            beyond = min((each.beyond_nbytes for each in self.ledger.compiled), default=0)
            may_fit = [budget is not None and peak + beyond <= budget for peak in peaks]
            order = sorted(range(len(known)), key=lambda i: (not may_fit[i], not may_fit[i] and peaks[i]))
            for (cut, solution), peak in ((known[i], peaks[i]) for i in order):
                is_least, least = peak == min(peaks) < least, min(peak, least)
                hopeless = partial(self._no_lower, budget, is_least) if budget else self._hopeless
                if peak > likely or self.ledger.knows(cut, solution) or hopeless(cut, solution, solver):
                    continue
                fits = budget is not None and self._affordable(self.ledger.best(budget))
                tried = any(self.ledger.is_lowest(each.solution) for each in self.ledger.compiled)
                # A variant that may fit gets a compilation even if the effort is exhausted.
                untried = all(each.graph.form != cut.form for each in self.ledger.compiled)
                promised = budget is not None and peak <= budget and untried
                if tried and not (promised or is_least) and not self.effort.allows(fits):
                    continue
                self.ledger.compile(cut, solution)
                if budget is not None and self._affordable(self.ledger.best(budget)):
                    return

    def _near_least(self, budget: int = 0) -> list[Graph]:
        return self.ledger.near_least(self.source.made, budget, LEAST_SLACK * self.temporaries_nbytes)

    def _no_lower(
        self, budget: int, is_least: bool, graph: Graph, solution: Solution, solver: Solver
    ) -> bool:
        """Return whether a least-memory schedule is expected neither to fit nor to need less than the compiled ones: by
        the solver's least error on such schedules of the variant that recompute no more. Without any of these, the
        least of all is never ruled out, and for others the error is the least on any candidate, at most 0.
        """
        profile, alike = simulate(graph, solution.schedule), self.ledger.lowest_compiled(graph, solver)
        most = profile.extra_seconds + CHEAP * graph.step_seconds
        own = [each.beyond_nbytes for each in alike if each.profile.extra_seconds <= most]
        if not own and (is_least or not self.ledger.compiled):
            return False
        others = (each.beyond_nbytes for each in self.ledger.compiled)
        little = LITTLE * self.temporaries_nbytes
        expected = profile.peak_nbytes + (min(own) if own else min(0, *others) - little)
        return expected > max(budget, min(each.peak_nbytes for each in self.ledger.compiled) - little)

    def _hopeless(self, graph: Graph, solution: Solution, solver: Solver) -> bool:
        """Return whether a least-memory schedule is expected to need more than about the least, or about as much as a
        faster compiled one: by the solver's least error on such schedules of the variant, in as many stages or more,
        because with fewer barriers the compiler needs more than predicted. Without any of these, the error is the least
        on variants that share some of its forms, else on any, at most 0. A cutting with equal figures is hopeless too.
        """
        if self.ledger.has_like(graph, solution):
            return True
        if not any(map(self._affordable, self.ledger.compiled)):
            return False
        profile, alike = simulate(graph, solution.schedule), self.ledger.lowest_compiled(graph, solver)
        own = [each.beyond_nbytes for each in alike if len(each.graph.stages) >= len(graph.stages)]
        likely = min(own) if own else self.ledger.likely_beyond_nbytes(graph.form)
        if likely is None:
            likely = min(0, *(each.beyond_nbytes for each in self.ledger.compiled))
        expected = profile.peak_nbytes + likely
        faster = (e for e in self.ledger.compiled if e.profile.extra_seconds <= profile.extra_seconds)
        taken = any(each.peak_nbytes <= self._about(expected) for each in faster)
        return taken or expected > self._about_least()

    def _bisect(self, budget: int) -> None:
        """Compile schedules between a slow one that fits and a fast one that nearly fits: each saves fewer of the
        values that the fast one saves. The solver found nothing between the two.
        """
        slow, near = self.ledger.best(budget), budget + NEAR * self.temporaries_nbytes
        missed = (each for each in self.ledger.compiled if budget < each.peak_nbytes <= near)
        fast = min(missed, key=lambda each: each.peak_nbytes, default=None)
        if slow is None or fast is None or slow.seconds - fast.seconds < WIDE * self.graph.step_seconds:
            return
        most = slow.seconds - (fast.seconds - fast.profile.extra_seconds)  # by the model
        less = saving_less(fast.graph, fast.solution.schedule)
        between = [schedule for schedule in less if extra_seconds(fast.graph, schedule) < most]
        low, high = -1, len(between)
        while high - low > 1 and self._allows(self.ledger.best(budget), budget):
            middle = (low + high) // 2
            made = self.ledger.compile(fast.graph, replace(fast.solution, schedule=between[middle]))
            fits = made is not None and made.peak_nbytes <= budget
            low, high = (low, middle) if fits else (middle, high)
