"""Space of variants, compiler, clock -> the cheapest schedule that the compiler confirms to fit.

The loop: solve within the model's allowance, compile, read the compiler's peak, correct the allowance by the
difference, solve again; within a budget, or within about the least memory that was compiled. The variants of the step
and the ways to cut its backward pass into stages compete; each has a separate allowance, because the model errs
differently on each.

This is the policy: which candidate is next, and when to stop. The `Ledger` records what was solved and compiled, and
the `CandidateSource` supplies candidates.
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
"""A candidate that was not compiled yet is tried if the model expects it to cost at most this much of the best plan's.
Chosen, not measured: above 1 because the model errs, and small because each try is a compilation."""

MORE_ROUNDS = 2
"""Extra rounds while nothing fits, before the search for the least memory, and again after it: the first round finds
the model's error, the second corrects it."""

MORE_GAIN = 0.005
"""Further rounds need a plan that promises to save this share of the step's time, as does each near the least memory:
more than `CHEAP`, since the requested rounds are over."""

MUCH_GAIN = 0.1
"""The same once these rounds, and the compilations of a search that has found a plan, are over too: the plan that fits
is far below the budget, and a plan that missed by little is not corrected yet."""

UNLIKELY = 0.1
"""Schedules of least memory are not compiled if they need more than the least of them by this share of the plain step's
temporaries: the model would have to err by that much more on the least than on them."""

MANY_TIMES = 4
"""Nor if they need more by this multiple of the least one's temporaries: for long sequences, whose scores dominate the
plain step, half of the compilations were of schedules that need ten times the least memory."""

LITTLE = 0.01
"""Nor, with a budget, if they promise less than this share below what was compiled, given the model's error on others.
A schedule that misses the budget by no more gets further rounds: the solver must drop only one more value or two."""

NEAR = 0.1
"""A candidate that misses the budget by at most this share gets one corrected solve even if the effort is exhausted,
and one more if it then misses by little: schedules of least memory are several times slower."""

WIDE = 0.5
"""If a plan that fits takes longer than one that nearly fits, by this share of the step's time, schedules between the
two are compiled by bisection: a smaller difference is not worth the compilations."""

LEAST_MORE = 0.05
"""The fastest schedule whose temporaries exceed the least by at most this share counts as of about the least memory."""

MOST_OVERHEAD = 1.0
"""The least memory is searched at no more than this overhead. A plan within a budget that costs more is returned only
after a search between it and the cheaper ones that do not fit."""

WORTH_FEWER = 0.1
"""If the least memory is reached with microbatches and costs this share of the step's time, fewer microbatches are
tried: each takes a compilation."""

HOST_WORTH = 0.02
"""With `offload="auto"`, host memory is tried only if the best plan without it costs this share of the step's time."""

HOST_MORE = 0.3
"""It then compiles one plan, or this share of the number compiled so far, the plain step counted twice."""

COMBINED_ROUNDS = 3
"""Schedules compiled for the budget with barriers that keep sums over devices separate, which changes the memory."""


class Search:
    """A search for one plan, in a space of graphs. Seconds are counted from those of the step as it is written.

    **Arguments:** the `space`; the `ledger`; `temporaries_nbytes` of the plain step; `written_nbytes` what the step
    needs as the user wrote it, None where that is no plan.
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
        self.corrections = 0  # beyond the effort
        for cut in self.source.made:
            if (known := space.known(cut)) is not None:
                self.ledger.know(cut, known)

    def within(self, budget: int, rounds: int, *, briefly: bool = False) -> CompiledCandidate | None:
        """Return the cheapest compiled schedule within the budget after that many rounds, or more if none fits; None if
        none does then. **Raises:** `NoProgramError`.

        **Arguments:** `briefly` without the schedules of least memory that do not promise to fit.
        """
        with self._interruptible(budget):
            self.approach(lambda: budget, rounds, MORE_ROUNDS)
            if briefly and self.ledger.best(budget) is None:
                return None
            if not self._affordable(self.ledger.best(budget)):
                self._least(budget)
                if self.ledger.best(budget) is not None:  # now between what fits and what is cheap
                    self.approach(lambda: budget, 0, MORE_ROUNDS)
                    self._bisect(budget)
        return self.ledger.best(budget) if self.ledger.some() else None

    def least_known(self, among: Sequence[Graph] = ()) -> tuple[Graph, Solution]:
        """Return the solution of least predicted peak of some graphs, or of all that were made."""
        known = ((cut, self.ledger.lowest(cut)) for cut in among or self.source.made)
        return min(known, key=lambda each: simulate(each[0], each[1].schedule).peak_nbytes)

    def faster(self, budget: int, rounds: int) -> CompiledCandidate | None:
        """Return a compiled schedule within the budget that is faster than the step as it is written, by the model and
        by its kernels, after that many rounds; None if there is none.
        """
        self.effort.fits = True  # as it is written
        with self._interruptible(budget):
            self.approach(lambda: budget, rounds, 0)
        fitting = (each for each in self.ledger.compiled if each.peak_nbytes <= budget)
        return fastest(each for each in fitting if each.seconds < 0 and (each.compiled_overhead or 0.0) <= 0)

    def lowest(self) -> CompiledCandidate:
        """Return the compiled schedule of least peak, however expensive. **Raises:** `NoProgramError`."""
        self._least(0)
        return min(self.ledger.some(), key=lambda each: each.peak_nbytes)

    def least(self, rounds: int) -> CompiledCandidate | None:
        """Return the fastest compiled schedule of about the least peak at an affordable overhead, after at most that
        many rounds near the least; None if that is the step as it is written. **Raises:** `NoProgramError`.
        """
        with self._interruptible(math.inf):
            self._least(None)
            found = self.ledger.some()
            lowest = min([*filter(self._affordable, found)] or found, key=lambda each: each.peak_nbytes)
            # Where the schedule of least memory costs too much, fewer microbatches may not.
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
        """Compile the schedule of least predicted peak at an affordable overhead, of the variant that needs least or of
        a shallower one. Return it, or the lowest so far if that is better.
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
        while high - low > max(LEAST_SLACK * self.temporaries_nbytes, 1):
            middle = (low + high) // 2
            found = self.ledger.within(graph, middle)
            cheap = extra_seconds(graph, found.schedule) <= self.most_seconds()
            low, high, best = (low, middle, found) if cheap else (middle, high, best)
        made = best and self.ledger.compile(graph, best)
        return made if made and not (affordable and made.peak_nbytes >= lowest.peak_nbytes) else lowest

    def _fewer_microbatches(self, lowest: CompiledCandidate) -> None:
        """Compile schedules of least memory in fewer microbatches than the lowest is in, by bisection: where sums of
        gradients are what fills the memory, a quarter as many may need no more.
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
        """Compile a solution that was found elsewhere. **Raises:** `NoProgramError`."""
        check(graph, solution.schedule)
        self.ledger.compile(graph, solution)
        return self.ledger.some()[-1]

    def combined(self, found: CompiledCandidate, budget: int) -> CompiledCandidate:
        """Return what was found, or a schedule with barriers that leave what devices add up alone, if that fits and its
        kernels, the collectives among them, take no longer: the same one, or another that uses the budget so.
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
        """Let Ctrl-C end what happens inside, if that is asked for and a program is known that fits."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.effort.interruptible or not (self.effort.fits or self.ledger.best(budget)):
                raise
            self.effort.stopwatch.interrupted = True

    def predicted(self, allowance: int | None) -> tuple[Graph, Solution]:
        """Return the solution that is best by the model alone, with the graph that it is of; nothing is compiled.

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
        """Return what the least memory may cost."""
        solver = self.ledger.solver
        if isinstance(solver, Sublinear):
            return solver.most_seconds(self.graph) * (1 + 1e-9)
        return MOST_OVERHEAD * self.graph.step_seconds

    def approach(self, budget: Callable[[], int], rounds: int, more: int = 0) -> None:
        """Compile what promises most within the budget, that many times, and so many more while nothing fits or there
        is much to be gained: in each turn as many, so that a later one makes nothing worse.

        **Arguments:** `budget` returns the bytes, which may follow what is compiled.
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
                # Schedules of least memory may have taken all compilations, and cost several times the step.
                least = much and budget == self._about_least
                if not self._allows(None if much else best, room, MORE_ROUNDS * least):
                    break
                self.ledger.compile(candidate.graph, candidate.pending)
                candidate.pending = None

    def _most_compilations(self, turn: int, budget: int) -> float:
        """Return how many plans may have been compiled when a turn ends."""
        if (best := self._best_without_host(turn, budget)) is None:
            return math.inf
        worth = best.seconds - self.source.free_seconds > HOST_WORTH * self.graph.step_seconds
        more = max(int(HOST_MORE * (self.effort.compilations + 2)), 1)
        return self.effort.compilations + worth * more

    def _best_without_host(self, turn: int, budget: int) -> CompiledCandidate | None:
        """Return what the variants of a turn are limited to where host memory is to be spared: another schedule of the
        best without it; None where they are not.
        """
        if turn != HOST or self.graph.host is None or not self.graph.host.sparing:
            return None
        without = (each for each in self.ledger.compiled if each.graph.host is None)
        best = fastest(each for each in without if each.peak_nbytes <= budget)
        return best if self._affordable(best) else None

    def _next(self, budget: int, turn: int = EXACTLY) -> Candidate | None:
        """Return the candidate of a turn to compile next, with its pending solution; None where no further round
        promises anything.
        """
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
            if candidate.closed or faster:  # its least extra seconds are more than another's
                continue
            if candidate.pending is None:
                candidate.pending = self.ledger.within(candidate.graph, candidate.allowance, begin=True)
            candidate.open_seconds = self.ledger.open_seconds(
                candidate.graph, candidate.allowance, candidate.pending
            )
            candidate.order = self._rank(candidate.graph, candidate.pending, candidate.allowance)
            tried = self._tried(candidate)
            if candidate.order[0] == 0.0 and not tried and self._promises(candidate, best):
                ready.append(candidate)
                if candidate.order[1] <= cheap:
                    break
        while (chosen := self._cheapest(ready)) is not None and self._finish(chosen):
            if self._tried(chosen) or not self._promises(chosen, best):
                ready.remove(chosen)
        if chosen is None and best is None:
            chosen = self._cheapest([c for c in self.candidates if self._may_fit(c, budget, turn)])
        return chosen

    def _cheapest(self, ready: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate that is chosen of these, or one that is not finished and may be cheaper then."""
        chosen = cheapest(ready, CHEAP / 2 * self.graph.step_seconds)
        if chosen is None or not self.ledger.has_finished(chosen.graph, chosen.allowance):
            return chosen
        most = chosen.expected[1]
        cheaper = (
            each for each in ready if each.open_seconds and each.expected[1] - each.open_seconds < most
        )
        return min(cheaper, key=lambda each: each.expected[1] - each.open_seconds, default=chosen)

    def _finish(self, candidate: Candidate) -> bool:
        """Let the solver finish what it has begun; return whether it had not."""
        graph, allowance = candidate.graph, candidate.allowance
        if candidate.pending is None or self.ledger.has_finished(graph, allowance):
            return False
        candidate.pending = self.ledger.finished(graph, allowance, candidate.pending)
        candidate.order, candidate.open_seconds = self._rank(graph, candidate.pending, allowance), 0.0
        return True

    def _tried(self, candidate: Candidate) -> bool:
        """Return whether what is pending was compiled, and cannot become something else."""

        def knows() -> bool:
            return candidate.pending is not None and self.ledger.knows(candidate.graph, candidate.pending)

        return knows() and (not self._finish(candidate) or knows())

    def _may_fit(self, candidate: Candidate, budget: int, turn: int) -> bool:
        """Return whether the least memory of a candidate may fit, for all that was compiled; it is pending then."""
        graph = candidate.graph
        if id(graph) in self.ledger.failed or self.source.turn(graph) != turn:
            return False
        candidate.pending, candidate.open_seconds = self.ledger.lowest(graph), 0.0
        candidate.order = rank(graph, candidate.pending.schedule, None)
        beyond = min((each.beyond_nbytes for each in self.ledger.compiled), default=0)
        fits = simulate(graph, candidate.pending.schedule).peak_nbytes + beyond <= budget
        return fits and not self.ledger.knows(graph, candidate.pending)

    def _aim(self, candidate: Candidate, budget: int) -> None:
        """Say what to ask for next, by what was compiled so far of this graph, else of others of its variant."""
        alike = [each for each in self.ledger.compiled if each.graph.alike(candidate.graph)]
        own = [each for each in alike if each.graph is candidate.graph]
        candidate.compiled = own
        enough = bool(own) and self._enough(own[-1], budget)
        candidate.closed = enough or id(candidate.graph) in self.ledger.failed
        # Of copies the model is least sure.
        last = (own or alike)[-1:] if candidate.graph.host is not None else []
        candidate.error_seconds = sum(each.seconds - each.profile.extra_seconds for each in last)
        if alike:
            allowance = next_allowance(own or alike, budget)
        elif self._best_without_host(self.source.turn(candidate.graph), budget) is not None:
            # Few are compiled with host memory, so that the first should fit.
            of_form = (each for each in self.ledger.compiled if each.graph.form == candidate.graph.form)
            allowance = budget - max(each.beyond_nbytes for each in of_form)
        else:
            allowance = self._likely_allowance(budget, candidate.graph.form)
        if candidate.allowance != allowance:
            candidate.allowance, candidate.pending = allowance, None

    def _likely_allowance(self, budget: int, form: Variant) -> int:
        """Return what to ask of a variant of which nothing was compiled, by what was of others like it."""
        known = self.ledger.beyond_nbytes(form, budget, NEAR * self.temporaries_nbytes)
        likely = self.ledger.likely_beyond_nbytes(form) or 0
        much = likely > LITTLE * self.temporaries_nbytes  # else solving once more gains little
        return budget - (max(known, likely) if much else known)

    def _enough(self, compiled: CompiledCandidate, budget: int) -> bool:
        """Return whether a plan leaves nothing to be gained within the budget by others of its graph."""
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
        """Return whether a candidate's pending solution is worth more compilations than are asked for: it promises to
        save this share of the step's time.
        """
        if best is None or candidate.pending is None:
            return best is None
        seconds = extra_seconds(candidate.graph, candidate.pending.schedule)
        return candidate.gain(seconds, best) >= share * self.graph.step_seconds

    def _allows(self, best: CompiledCandidate | None, budget: int, more: int = 0) -> bool:
        """Return whether another plan may be compiled: the first in any case, and those that correct what misses.

        **Arguments:** `more` compilations than the effort has.
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
        temporaries: then the next round, which knows how the model errs, is worth its time rather than the least
        memory.
        """
        if self._affordable(self.ledger.best(budget)):
            return False
        missed = (each.peak_nbytes - budget for each in self.ledger.compiled if self._affordable(each))
        return any(0 < nbytes <= share * self.temporaries_nbytes for nbytes in missed)

    def _affordable(self, compiled: CompiledCandidate | None) -> bool:
        return compiled is not None and compiled.seconds <= self.most_seconds()

    def _about_least(self) -> int:
        """Return how much memory is about the least that was found."""
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
        """Compile the schedules of least predicted peak; with a budget, until one fits at an affordable overhead, those
        that may fit first, then the least first, as without one, only those that promise to be affordable, if there are
        any. Where the effort is exhausted only the least of all that each solver has, and variants of which none was
        compiled and one promises to fit.
        """
        fits = budget is not None and self.ledger.best(budget) is not None
        if not fits or self.effort.allows(fits):
            self.source.make_lowest(self.most_seconds())
        for solver in self.ledger.of_least:
            least = math.inf
            known = [(cut, self.ledger.lowest(cut, solver)) for cut in self.source.made]
            if budget is None:
                most = self.most_seconds()
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
                # A variant that may fit is not refused for want of time.
                untried = all(each.graph.form != cut.form for each in self.ledger.compiled)
                promised = budget is not None and peak <= budget and untried
                if tried and not (promised or is_least) and not self.effort.allows(fits):
                    continue
                self.ledger.compile(cut, solution)
                if budget is not None and self._affordable(self.ledger.best(budget)):
                    return

    def _no_lower(
        self, budget: int, is_least: bool, graph: Graph, solution: Solution, solver: Solver
    ) -> bool:
        """Return whether a schedule of this solver's of least memory would neither fit nor need less than what was
        compiled, if the model errs on it no less than on others of them of its variant that recompute no more; where
        none was compiled and it is not the least of all, if the model is about right, or errs as far as on any.
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
        """Return whether a schedule of this solver's of least memory needs more than about the least, or whether
        something faster that was compiled would be taken in its place, unless the model errs in its favour as never
        before on what this solver makes of its variant, in as many stages or more: between fewer barriers the compiler
        needs more than predicted. Where nothing of that was compiled, on variants that do some of the same, and without
        these, if it is right, or errs as far as on any. Of a cutting with the same figures nothing else is expected.
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
        """Compile schedules between a slow one that fits and a fast one that misses the budget by little, and whose
        allowance the solver cannot lower: those that save ever less of what the fast one saves.
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
