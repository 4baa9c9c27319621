"""Variants of a step -> the `Candidate`s that compete: each is a graph of a variant, cut into stages.

A deeper variant is built when no other promises to fit for less than the forward passes that it repeats. If it is known
which values a variant has in parts, a sketch (the plain graph with these values small) first estimates whether it is
worth a graph.
"""

from collections.abc import Callable, Sequence
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
from ._ledger import CompiledCandidate

CHEAP = 0.002
"""A plan of at most this overhead is not worth another round, nor is a gain of half of it: a thousandth of a day's
training is 86 s, about what another compilation of a large step takes."""

EXACTLY, INEXACTLY, HOST = range(3)
"""The order in which variants are tried, so that rounding or host memory never makes a plan worse."""

LEAST_SLACK = 0.02
"""Schedules within this share (of the plain step's temporaries) of the least memory count as least: the least itself
may cost several times the step."""

LARGE_SLACK = 0.25
"""If that exceeds this share of what a built variant needs without any schedule, `LEAST_SLACK` is relative to the
latter."""

SKETCHED = 4
"""A minimum cut within a budget recomputes up to this multiple of the integer program's time: 0.18 of the step instead
of 0.04, in GPT of 4 layers within a third of its temporaries with its loss in 4 chunks."""

SKETCH_SLACK = 0.1
"""A sketch may exceed the variant by this share of the plain step's temporaries: with its loss in 2 chunks, that GPT
fits a fifth of them, and its sketch needs 5 % more."""

SKETCH_SHARE = 0.5
"""But by no more than this share of the budget's own temporaries: within 3 % of a plain step's a tenth is no limit."""


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
    microbatches, or rows in fewer chunks, than those of least memory, the `shallower` ones; by variant and room in
    bytes whether what was `sketched` fits, and what it costs.
    """

    space: Space
    solver: Solver
    time_limit: float
    temporaries_nbytes: int
    plain_nbytes: int = 0
    shallower: list[Variant] = field(default_factory=list)
    sketched: dict[tuple[Variant, int], tuple[bool, float] | None] = field(default_factory=dict)

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

    def add_variant(self, seconds: float | None, allowance: Callable[[Variant], int], turn: int) -> bool:
        """Make the next variant of a turn that may fit, if none is known that takes less; return whether there was one.

        A graph takes as long as several solves: those that may fit only if their sketches need more than they do are
        made last, while nothing fits.

        **Arguments:** `seconds` that the best so far takes, None if nothing fits; `allowance` returns the predicted
        peak to ask of a variant.
        """
        inexact = turn == INEXACTLY
        for sketched in (False, True) if seconds is None else (False,):
            for left in self.left[inexact]:
                for variant in [*left]:
                    estimate = self.variants.estimate(variant)
                    if seconds is not None and seconds <= self.graph.extra_seconds + estimate.more_seconds:
                        break
                    budget = allowance(variant)
                    may_fit = self.plain_nbytes - estimate.fewer_nbytes <= budget
                    if not (may_fit or variant in self.deepest[inexact]):
                        continue
                    room = self._sketch_room(budget) if sketched else budget
                    # What host memory is worth, no sketch says.
                    if (turn == HOST or self._promises(variant, seconds, room)) and self.make(variant):
                        return True
        return False

    def _promises(self, variant: Variant, seconds: float | None, budget: int) -> bool:
        """Return whether a variant may win, by a sketch of its graph: whether that fits, and once something does,
        whether it may take less. Of most of the step in chunks it is enough that it may with rows in chunks inside:
        which these are is known when it is made, but in each microbatch they are about those of the plain step.
        """
        whole = self.variants.estimate(variant).whole
        return any(
            self._may_win(each, seconds, budget)
            for each in (variant, *(variant.also(*rows.choices) for rows in (self.rows if whole else ())))
        )

    def _may_win(self, variant: Variant, seconds: float | None, budget: int) -> bool:
        estimate = self.variants.estimate(variant)
        if seconds is None:
            sketch = self._sketch(variant, budget)
            return sketch is None or sketch[0]
        worthwhile = seconds - self.graph.extra_seconds - estimate.more_seconds
        worthwhile -= CHEAP / 2 * self.graph.step_seconds
        if worthwhile < 0:
            return False
        # A sketch leaves out the sums that microbatches keep, but has whole what rows in chunks hand on.
        sketch = self._sketch(variant, budget if estimate.whole else self._sketch_room(budget))
        return sketch is None or sketch[1] <= SKETCHED * worthwhile

    def _sketch_room(self, budget: int) -> int:
        """Return what the sketch of a variant may need that fits a budget."""
        beside = max(budget - self.graph.base_nbytes, 0)
        return budget + int(min(SKETCH_SLACK * self.temporaries_nbytes, SKETCH_SHARE * beside))

    def _sketch(self, variant: Variant, room: int) -> tuple[bool, float] | None:
        """Return whether a sketch of a variant's graph fits, and what its values cost then, None where there is
        none.
        """
        if (variant, room) not in self.sketched:
            sketch = self.variants.sketch(self.graph, variant)
            found = None
            if sketch is not None:
                schedule = MinCut().solve(sketch, room, time_limit=self.time_limit).schedule
                profile = simulate(sketch, schedule)
                found = profile.peak_nbytes <= room, profile.extra_seconds - sketch.extra_seconds
            self.sketched[variant, room] = found
        return self.sketched[variant, room]

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
