"""Variants of a step -> the `Candidate`s that compete: each is a graph of a variant, cut into stages.

A deeper variant is made when no other promises to fit for less than running the forward passes that it repeats. Where
it is known which values a variant has in parts, a sketch (the plain graph with these values small) says first whether
it is worth a graph of its own.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, takewhile
from typing import Protocol

from .._model._graph import Graph
from .._model._loop_levels import deep
from .._model._schedule import Schedule, close_over_dependencies, save_all
from .._model._simulate import simulate
from .._model._sites import Variants
from .._model._stages import cuttings
from .._model._variant import ROWS, Variant
from .._solver import MinCut, Solution, Solver
from .._solver._interface import Staged
from ._ledger import CompiledCandidate

CHEAP = 0.002
"""A plan of at most this overhead is not worth another round, nor is a gain of half of it: a thousandth of a day's
training is 86 s, about what another compilation of a large step takes."""

EXACTLY, INEXACTLY, HOST = range(3)
"""The turns in which variants are looked at, so that what may round, or needs a host, makes nothing worse."""

LEAST_SLACK = 0.02
"""About the least memory is what is within this share of the plain step's temporaries: the least itself may cost
several times the step."""

LARGE_SLACK = 0.25
"""Unless that is more than such a share of what a variant that was made needs without looking for a schedule: then it
is within `LEAST_SLACK` of that."""

SKETCHED = 4
"""A minimum cut within a budget recomputes up to so many times what the integer program does: 0.18 of the step where
that finds 0.04, in GPT of 4 layers within a third of its temporaries with its loss in 4 chunks."""

SKETCH_SLACK = 0.1
"""A sketch may need so much more than the variant, as a share of the plain step's temporaries: with its loss in 2
chunks that GPT fits a fifth of them, and its sketch needs 5 % more. So much more than estimated may it save, too."""

BOUNDED = 1.5
"""An integer program proves of a sketch up to so many times the seconds of recomputation in the variant: 1.37 times in
GPT of 12 layers with its loss in 2 chunks, within a third of its temporaries."""

TIME_SHARE = 0.25
"""Share of a solve's time limit for a bound, which is to take less than the graph that it may rule out."""


class Space(Protocol):
    """The graphs in which plans of a step are searched for."""

    @cached_property
    def plain(self) -> Graph:
        """The graph of the step as it is written."""
        ...

    @cached_property
    def variants(self) -> Variants:
        """The variants that the step may take."""
        ...

    def of(self, variant: Variant) -> Graph | None:
        """Return the graph of a variant, None where it cannot be made."""
        ...

    def known(self, graph: Graph) -> Schedule | None:
        """Return a schedule of a cutting of the plain graph that is known to be good, None where none is."""
        ...


@dataclass
class CandidateSource:
    """Makes the candidates of a search, variant after variant.

    **Fields:** the `space`; `solver` and its `time_limit`; `temporaries_nbytes` of the plain step; the graphs `made` so
    far; the variants `left`, by whether they change numbers, those of most of the step by themselves, whose graphs
    take longest to make; `plain_nbytes` the least that the plain step needs, once it does not fit; variants in fewer
    microbatches, or rows in fewer chunks, than those of least memory, the `shallower` ones; the `sketches`
    of variants, minimum `cuts` of them by room in bytes, and `bounds` by the `id`s of graphs and room.
    """

    space: Space
    solver: Solver
    time_limit: float
    temporaries_nbytes: int
    plain_nbytes: int = 0
    shallower: list[Variant] = field(default_factory=list)
    sketches: dict[Variant, Graph | None] = field(default_factory=dict)
    cuts: dict[tuple[Variant, int], tuple[bool, float]] = field(default_factory=dict)
    bounds: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph, self.variants = self.space.plain, self.space.variants
        self.made = _with_and_without_host(self.graph)
        exact, of = self.variants.exact(), self.variants.estimate
        parts, whole = ([each for each in exact if of(each).whole == most] for most in (False, True))
        self.left: dict[bool, tuple[list[Variant], ...]] = {
            False: (parts, whole),
            True: ([*self.variants.inexact()],),
        }
        self.deepest = {False: exact[-1:], True: tuple(self.left[True][0][-1:])}
        # What rows in microbatches may do besides, see `_promises`.
        self.rows = [each for each in parts if {choice.rule for choice in each.choices} == {ROWS}]

    def turn(self, graph: Graph) -> int:
        """Return when a graph is looked at: those of exact variants first, then those of others, and those with the
        host's memory last.
        """
        inexact = self.variants.is_inexact(graph.form)
        return HOST if graph.host is not None else INEXACTLY if inexact else EXACTLY

    @property
    def turns(self) -> list[int]:
        """The turns in which there is something to look at."""
        return sorted({*map(self.turn, self.made), *([INEXACTLY] if self.left[True][0] else [])})

    @property
    def free_seconds(self) -> float:
        """What no plan goes below: it saves nothing in loops, as the plain step may, and recomputes nothing. Where
        the compiler refuses the plain step, what all plans do otherwise may take less.
        """
        least = min(self.variants.estimate(self.variants.required).more_seconds, 0.0)
        return min(self.graph.extra_seconds, 0.0) + least

    @property
    def cheap_seconds(self) -> float:
        """Plans of at most so many extra seconds are not worth another round."""
        return self.free_seconds + CHEAP * self.graph.step_seconds

    def make(self, variant: Variant) -> list[Graph]:
        """Add the graphs of a variant, if it can be made, and return them."""
        for left in chain(*self.left.values()):
            if variant in left:
                left.remove(variant)
        graph = self.space.of(variant)
        self.made += (made := _with_and_without_host(graph) if graph else [])
        if graph is not None:
            self._look_inside(variant)
        return made

    def _look_inside(self, variant: Variant) -> None:
        """Add what may be done besides in most of the step in chunks, behind all that is cheaper."""
        left = self.left[False][-1]
        for inside in self.variants.inside(variant):
            seconds = self.variants.estimate(inside).more_seconds
            cheaper = (i for i, e in enumerate(left) if self.variants.estimate(e).more_seconds <= seconds)
            left.insert(max(cheaper, default=-1) + 1, inside)

    def add_variant(self, seconds: float | None, budget: int, turn: int) -> bool:
        """Make the most promising variant of a turn that may fit, if none is known that takes less; return whether
        there was one.

        A graph takes as long as several solves: those that may fit only if their sketches need more than they do are
        made last, while nothing fits.

        **Arguments:** `seconds` that the best so far takes, None if nothing fits.
        """
        inexact = turn == INEXACTLY
        for slack in (0.0, SKETCH_SLACK) if seconds is None else (0.0,):
            for left in self.left[inexact]:
                able: Iterable[Variant] = self._able(left, seconds, budget, self.deepest[inexact])
                if turn != HOST:  # what host memory is worth, no sketch says
                    able = self._promising(able, seconds, budget + int(slack * self.temporaries_nbytes))
                if any(map(self.make, able)):
                    return True
        return False

    def _able(
        self, left: Sequence[Variant], seconds: float | None, budget: int, deepest: Collection[Variant]
    ) -> list[Variant]:
        """Return the variants that may fit, and are estimated to take less by themselves."""
        of = self.variants.estimate
        most = math.inf if seconds is None else seconds - self.graph.extra_seconds
        cheap = takewhile(lambda each: of(each).more_seconds < most, left)
        return [e for e in cheap if e in deepest or self.plain_nbytes - of(e).fewer_nbytes <= budget]

    def _promising(
        self, variants: Iterable[Variant], seconds: float | None, budget: int
    ) -> Iterator[Variant]:
        """Yield the variants that may win: what promises to take least first, since its graph may rule out the others.

        Of most of the step in chunks it is enough that it may win with rows in chunks inside: which these are is known
        when it is made, but in each microbatch they are about those of the plain step.
        """
        promised: dict[Variant, tuple[float, Variant]] = {}
        for variant in variants:
            rows = self.rows if self.variants.estimate(variant).whole else ()
            inside = (variant, *(variant.also(*each.choices) for each in rows))
            found = ((self._promised(each, seconds, budget), each) for each in inside)
            promised[variant] = min(found, key=lambda each: each[0])
        for variant, (least, best) in sorted(promised.items(), key=lambda each: each[1][0]):
            if least < math.inf and (seconds is None or self._may_win(best, seconds, budget)):
                yield variant

    def _promised(self, variant: Variant, seconds: float | None, budget: int) -> float:
        """Return how many seconds a variant takes by a minimum cut of its sketch, or by itself where there is none;
        infinitely many where that cannot win: it does not fit, or once something does, takes far longer.
        """
        # A sketch leaves out the sums that microbatches keep, but has whole what rows in chunks hand on.
        slack = SKETCH_SLACK * self.temporaries_nbytes
        slack *= seconds is not None and not self.variants.estimate(variant).whole
        fits, again = self._cut(variant, budget + int(slack))
        wins = fits if seconds is None else again <= SKETCHED * self._worthwhile(variant, seconds)
        return (
            self.graph.extra_seconds + self.variants.estimate(variant).more_seconds + again
            if wins
            else math.inf
        )

    def _worthwhile(self, variant: Variant, seconds: float) -> float:
        """Return for how many seconds a variant may recompute, if it is to take less than so many."""
        least = self.graph.extra_seconds + self.variants.estimate(variant).more_seconds
        return seconds - least - CHEAP / 2 * self.graph.step_seconds

    def _may_win(self, variant: Variant, seconds: float, budget: int) -> bool:
        """Return whether a variant may take less than so many seconds by what the solver proves: of its sketch, or
        where there is none, of the graph that was made of most of what it does, with as many bytes more as it saves
        besides. What it takes longer itself is not added then: the graph may recompute the same.
        """
        if (sketch := self._sketch(variant)) is not None:
            most = BOUNDED * self._worthwhile(variant, seconds)
            return (
                self._cut(variant, budget)[1] <= most
                or self._bound(sketch, budget) - sketch.extra_seconds < most
            )
        of = self.variants.estimate
        alike = (cut.form for cut in self.made if cut.form.is_part_of(variant))
        near = max(alike, key=lambda form: of(form).fewer_nbytes)
        room = budget + int(SKETCH_SLACK * self.temporaries_nbytes)
        room += max(of(variant).fewer_nbytes - of(near).fewer_nbytes, 0)
        most = seconds - CHEAP / 2 * self.graph.step_seconds
        return any(
            self._bound(cut, room) < most for cut in self.made if cut.form == near and cut.host is None
        )

    def _bound(self, graph: Graph, room: int) -> float:
        """Return what the solver proves that a graph takes at least within so many bytes; nothing where it does not
        fit.
        """
        if (id(graph), room) not in self.bounds:
            solve = self.solver.begin if isinstance(self.solver, Staged) else self.solver.solve
            found = solve(graph, room, time_limit=TIME_SHARE * self.time_limit)
            profile, bound = simulate(graph, found.schedule), found.lower_bound * graph.step_seconds
            fits = profile.peak_nbytes <= room
            self.bounds[id(graph), room] = min(bound, profile.extra_seconds) if fits else -math.inf
        return self.bounds[id(graph), room]

    def _sketch(self, variant: Variant) -> Graph | None:
        if variant not in self.sketches:
            self.sketches[variant] = self.variants.sketch(self.graph, variant)
        return self.sketches[variant]

    def _cut(self, variant: Variant, room: int) -> tuple[bool, float]:
        """Return whether a minimum cut of a variant's sketch fits, and how many seconds it recomputes for; none where
        there is no sketch.
        """
        if (sketch := self._sketch(variant)) is None:
            return True, 0.0
        if (variant, room) not in self.cuts:
            schedule = MinCut().solve(sketch, room, time_limit=self.time_limit).schedule
            profile = simulate(sketch, schedule)
            again = profile.extra_seconds - sketch.extra_seconds
            self.cuts[variant, room] = profile.peak_nbytes <= room, again
        return self.cuts[variant, room]

    def make_lowest(self, most_seconds: float) -> None:
        """Add the graphs of the variants that may need the least memory at an affordable overhead, of all that are not
        made yet: the first that is near the least of all, of those without levels, of these that divide no work, which
        are cheap where parts turn out to cost too much, of those that change numbers, of microbatches, and of these
        with rows in chunks inside; no others are made then.
        """
        most_seconds -= self.graph.extra_seconds
        of = self.variants.estimate
        known = [*chain(*self.left[False], *self.left[True])]
        able = [each for each in known if of(each).more_seconds <= most_seconds]
        parts = [each for each in able if not of(each).whole]
        exact = [each for each in parts if not self.variants.is_inexact(each)]
        shallow = [each for each in exact if not deep(each)]
        made: list[Variant] = []

        def make(among: list[Variant]) -> list[Variant]:
            """Make the one, and return those with rows in chunks inside of it."""
            slack = LEAST_SLACK * self.temporaries_nbytes
            while among:  # what cannot be made leaves the turn to the next
                enough = max(of(each).fewer_nbytes for each in among) - slack
                lowest = next(each for each in among if of(each).fewer_nbytes >= enough)
                if lowest not in made and not self.make(lowest):
                    among.remove(lowest)
                    continue
                made.append(lowest)
                left = self._temporaries_nbytes(lowest)
                if of(lowest).whole or slack <= LARGE_SLACK * left:
                    return [e for e in self.variants.inside(lowest) if of(e).more_seconds <= most_seconds]
                # Long sequences' scores are many times all else, of which a share of them would hide what is large.
                slack = LEAST_SLACK * left
            return []

        undivided = [each for each in shallow if not of(each).divided]
        for among in ([*shallow], undivided, exact, [each for each in parts if each not in exact]):
            make(among)
        make(make([each for each in able if of(each).whole]))
        simple = {*shallow, *(each for each in able if of(each).whole or not of(each).divided)}
        cheaper = (each for each in able if each in simple and each not in made)
        self.shallower = sorted(cheaper, key=lambda each: of(each).fewer_nbytes)
        self.end()

    def end(self) -> None:
        """Leave no variant to be made."""
        self.left = {False: ([], []), True: ([],)}

    def _temporaries_nbytes(self, variant: Variant) -> int:
        """Return what a variant that was made needs besides arguments, if it saves nothing that it need not, or drops
        nothing, whichever is less.
        """
        graph = next(cut for cut in self.made if cut.form == variant)
        schedules = save_all(graph), close_over_dependencies(graph, ())
        return min(simulate(graph, each).peak_nbytes for each in schedules) - graph.base_nbytes

    def make_shallower(self) -> list[Graph]:
        """Add the graphs of the deepest variant that is left of those in microbatches, without levels or with nothing
        in parts but for them, and return them: where the one that was made turns out to be slower than it promised.
        """
        return self.make(self.shallower.pop()) if self.shallower else []


def _with_and_without_host(graph: Graph) -> list[Graph]:
    """Return the cuttings of a graph into stages; where values may be in host memory and none must, also those where
    none are. What copies cost besides is for the compiler to say, and both compete.
    """
    made = cuttings(graph)
    if graph.host is None or graph.pinned["offload"]:
        return made
    return [*made, *(replace(cut, host=None) for cut in made)]


@dataclass
class Candidate:
    """One graph, cut into stages: what was `compiled` of it; the predicted peak to ask for next (`allowance`), and the
    `pending` solution for that, with its rank (`order`), and the `open_seconds` that it may save once it is finished;
    by how many seconds the model erred on the last of its variant, with host memory; whether no more is to be gained of
    it (`closed`).
    """

    graph: Graph
    compiled: Sequence[CompiledCandidate] = ()
    allowance: int = -1
    pending: Solution | None = None
    order: tuple[float, ...] = ()
    open_seconds: float = 0.0
    error_seconds: float = 0.0
    closed: bool = False

    @property
    def expected(self) -> tuple[float, ...]:
        """The rank if the model errs as it did on the last, where that is known."""
        fits, seconds, *more = self.order
        return (fits, seconds + self.error_seconds, *more) if not fits else self.order

    def gain(self, seconds: float, best: CompiledCandidate) -> float:
        """Return what a solution that takes so long may save, if the model errs as it did on the last."""
        last = self.compiled[-1] if self.compiled else best
        return best.seconds - seconds - (last.seconds - last.profile.extra_seconds)


def cheapest(candidates: Sequence[Candidate], alike_seconds: float) -> Candidate | None:
    """Return the cheapest candidate; of those that fit about as cheaply one that leaves host memory alone, and
    that of the fewest stages: where barriers divide what the compiler would make one kernel of, the model does not see
    it.
    """
    best = min(candidates, key=lambda each: each.expected, default=None)
    if best is None or best.order[0] != 0.0:
        return best
    cheap = [each for each in candidates if each.expected[:2] <= (0.0, best.expected[1] + alike_seconds)]

    def order(candidate: Candidate) -> tuple[bool, int, tuple[float, ...]]:
        copies = candidate.pending is not None and bool(candidate.pending.schedule.offloaded)
        return copies, len(candidate.graph.stages), candidate.expected

    return min(cheap, key=order)


def next_allowance(compiled: Sequence[CompiledCandidate], budget: int) -> int:
    """Return the predicted peak to ask for next: where predicted against compiled peaks so far meet the budget, and
    nearer to what fits with each in a row that does not, for compiled peaks may follow slowly.

    Where none fits, less by what is missing, and with each one twice as much. Where none above one that fits exceeds
    it, more by what is left, and with each one four times as much, or the budget itself where more is left than it
    errs by: far below it the model may err as it does not near it.
    """
    fits = [each for each in compiled if each.peak_nbytes <= budget]
    exceeds = [each for each in compiled if each.peak_nbytes > budget]
    if not fits:
        last = compiled[-1]
        # A tenth more than is missing, so that the next one does not miss by rounding.
        return last.profile.peak_nbytes + int(1.1 * 2 ** len(exceeds[1:]) * (budget - last.peak_nbytes))
    low = max(fits, key=lambda each: each.profile.peak_nbytes)
    above = [each for each in exceeds if each.profile.peak_nbytes > low.profile.peak_nbytes]
    if not above:
        most, left = max(budget, *(budget - each.beyond_nbytes for each in fits)), budget - low.peak_nbytes
        near = low.profile.peak_nbytes + 4 ** len(fits[1:]) * left
        return most if left >= low.beyond_nbytes else min(most, near)
    high = min(above, key=lambda each: each.profile.peak_nbytes)
    reach = high.profile.peak_nbytes - low.profile.peak_nbytes
    share = (budget - low.peak_nbytes) / (high.peak_nbytes - low.peak_nbytes)
    in_a_row = sum(1 for _ in takewhile(lambda each: each.peak_nbytes > budget, reversed(compiled)))
    share /= 2 ** max(in_a_row - 1, 0)
    return low.profile.peak_nbytes + int(min(share, 0.95) * reach)
