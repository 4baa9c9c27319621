"""Variants of a step -> the `Candidate`s that compete: each is a graph of a variant, cut into stages.

A deeper variant is built only if no other promises to fit for less than the forward passes that it repeats. If the
values that a variant splits into parts are known, a sketch (the plain graph with these values small) first estimates
whether the variant is worth a graph.
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
training is 86 s, about the time of another compilation of a large step."""

EXACTLY, INEXACTLY, HOST = range(3)
"""The order in which variants are tried, so that rounding or host memory never makes a plan worse."""

LEAST_SLACK = 0.02
"""Schedules within this share (of the plain step's temporaries) of the least memory count as least: the least itself
may cost several times the step."""

LARGE_SLACK = 0.25
"""If that slack exceeds this share of the temporaries of a built variant (without a schedule), `LEAST_SLACK` is
relative to the latter."""

SKETCHED = 4
"""A minimum cut within a budget recomputes up to this multiple of the integer program's time: 0.18 of the step instead
of 0.04, for GPT of 4 layers within a third of its temporaries, with its loss in 4 chunks."""

SKETCH_SLACK = 0.1
"""A sketch may exceed the variant by this share of the plain step's temporaries: with its loss in 2 chunks, that GPT
fits a fifth of them, and its sketch needs 5 % more."""

SKETCH_SHARE = 0.5
"""But by at most this share of the temporaries that the budget allows: for 3 % of the plain step's temporaries, a tenth
of them is no limit."""


Kin = tuple[tuple[str, ...], bool]
"""The rules of a variant, and whether it changes most of the step."""


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
        """Return the graph of a variant, None if it cannot be built."""
        ...

    def known(self, graph: Graph) -> Schedule | None:
        """Return a schedule for a cutting of the plain graph that is known to be good, or None."""
        ...


@dataclass
class CandidateSource:
    """Source of a search's candidates, one variant at a time.

    **Fields:** the `space`; `solver` and its `time_limit`; `temporaries_nbytes` of the plain step; the graphs `made` so
    far; the variants `left`, by whether they change results, with those of most of the step in a separate list, because
    their graphs take longest to build; `plain_nbytes`, the least peak of the plain step, set once it does not fit;
    `shallower` variants, with fewer microbatches or chunks of rows than those of least memory; `beyond`, for each graph
    that fits, its kin, its allowance, and the seconds by which graphs alike exceed their sketches; `sketched`, by
    variant and room in bytes: whether the sketch fits, and its extra seconds.
    """

    space: Space
    solver: Solver
    time_limit: float
    temporaries_nbytes: int
    plain_nbytes: int = 0
    shallower: list[Variant] = field(default_factory=list)
    beyond: list[tuple[Kin, int, float]] = field(default_factory=list)
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
        # Rows in chunks, which microbatches may have inside, see `_promises`.
        self.rows = [each for each in parts if {choice.rule for choice in each.choices} == {ROWS}]

    def turn(self, graph: Graph) -> int:
        """Return the turn of a graph: exact variants first, then inexact ones, and graphs with host memory last."""
        inexact = self.variants.is_inexact(graph.form)
        return HOST if graph.host is not None else INEXACTLY if inexact else EXACTLY

    @property
    def turns(self) -> list[int]:
        """The turns that have candidates."""
        return sorted({*map(self.turn, self.made), *([INEXACTLY] if self.left[True][0] else [])})

    @property
    def free_seconds(self) -> float:
        """A lower bound on the extra seconds of plans: of one that recomputes nothing, in loops too. If the plain step
        does not compile, the forms that all plans must use instead may take less.
        """
        least = min(self.variants.estimate(self.variants.required).more_seconds, 0.0)
        return min(self.graph.extra_seconds, 0.0) + least

    @property
    def cheap_seconds(self) -> float:
        """The extra seconds up to which a plan is not worth another round."""
        return self.free_seconds + CHEAP * self.graph.step_seconds

    def make(self, variant: Variant) -> list[Graph]:
        """Build the graphs of a variant, add them, and return them; none if the variant cannot be built."""
        for left in chain(*self.left.values()):
            if variant in left:
                left.remove(variant)
        graph = self.space.of(variant)
        self.made += (made := _with_and_without_host(graph) if graph else [])
        if graph is not None:
            self._look_inside(variant)
        return made

    def _look_inside(self, variant: Variant) -> None:
        """Add the variants with further forms inside the chunks of this one, behind all cheaper variants."""
        left = self.left[False][-1]
        for inside in self.variants.inside(variant):
            seconds = self.variants.estimate(inside).more_seconds
            cheaper = (i for i, e in enumerate(left) if self.variants.estimate(e).more_seconds <= seconds)
            left.insert(max(cheaper, default=-1) + 1, inside)

    def add_variant(self, seconds: float | None, allowance: Callable[[Variant], int], turn: int) -> bool:
        """Build the next variant of a turn that may fit and be faster than the best so far; return whether one was
        built.

        A graph takes as long as several solves. So variants that fit only if their sketches overestimate them are built
        last, and only while nothing fits.

        **Arguments:** `seconds` extra of the best so far, None if nothing fits; `allowance` returns the predicted peak
        allowed for a variant.
        """
        inexact = turn == INEXACTLY
        affordable = seconds is not None and seconds <= self.graph.step_seconds
        for sketched in (False, True) if seconds is None else (False,):
            for left in self.left[inexact] if affordable else [self._by_sketch(inexact, allowance)]:
                for variant in [*left]:
                    estimate = self.variants.estimate(variant)
                    if seconds is not None and seconds <= self.graph.extra_seconds + estimate.more_seconds:
                        if affordable:
                            break
                        continue
                    budget = allowance(variant)
                    may_fit = self.plain_nbytes - estimate.fewer_nbytes <= budget
                    if not (may_fit or variant in self.deepest[inexact]):
                        continue
                    room = self._sketch_room(budget) if sketched else budget
                    # Sketches have no host memory, so they cannot rule out variants that use it.
                    if (turn == HOST or self._promises(variant, seconds, room)) and self.make(variant):
                        return True
        return False

    def _by_sketch(self, inexact: bool, allowance: Callable[[Variant], int]) -> list[Variant]:
        """Return the variants left by the time that their sketches take within their allowances. If all that fits takes
        twice the step or more, most variants of small estimates are as slow, and the sketches tell which are not.
        """
        of = self.variants.estimate
        left = [*chain(*self.left[inexact])]
        sketches = {each: self._sketch(each, allowance(each)) for each in left}

        def seconds(variant: Variant) -> float:
            sketch = sketches[variant]
            return of(variant).more_seconds + (sketch[1] if sketch else 0.0)

        return sorted(left, key=seconds)

    def _promises(self, variant: Variant, seconds: float | None, budget: int) -> bool:
        """Return whether a variant may win, by a sketch of its graph: whether it fits, and once a plan fits, whether it
        may be faster. A variant with most of the step in chunks may also win with rows in chunks inside. The exact rows
        are known only once it is built, but in each microbatch they are about those of the plain step.
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
        sketch = self._sketch(variant, self._room_of_sketch(variant, budget))
        if sketch is None:
            return True
        kin = self._kin(variant)
        beyond = min(
            (more for like, room, more in self.beyond if like == kin and room >= budget), default=0.0
        )
        return sketch[1] <= SKETCHED * worthwhile and sketch[1] + beyond <= worthwhile

    def learn(self, candidate: "Candidate") -> None:
        """Compare a candidate that is predicted to fit with the sketch of its variant. Variants alike are built if they
        win even with half of the least error seen on these with as much room: with more room they err less.
        """
        variant, allowance = candidate.graph.form, candidate.allowance
        if not variant.choices or candidate.graph.host is not None or candidate.order[0] != 0.0:
            return
        if sketch := self._sketch(variant, self._room_of_sketch(variant, allowance)):
            more = self.graph.extra_seconds + self.variants.estimate(variant).more_seconds + sketch[1]
            error = candidate.order[1] - candidate.open_seconds - more
            self.beyond.append((self._kin(variant), allowance, error / 2))

    def _kin(self, variant: Variant) -> Kin:
        return tuple(choice.rule for choice in variant.choices), self.variants.estimate(variant).whole

    def _room_of_sketch(self, variant: Variant, budget: int) -> int:
        """Return the room for a sketch: more for chunks of rows, because it overestimates what they pass on."""
        return budget if self.variants.estimate(variant).whole else self._sketch_room(budget)

    def _sketch_room(self, budget: int) -> int:
        """Return the largest peak of a sketch whose variant may still fit a budget."""
        beside = max(budget - self.graph.base_nbytes, 0)
        return budget + int(min(SKETCH_SLACK * self.temporaries_nbytes, SKETCH_SHARE * beside))

    def _sketch(self, variant: Variant, room: int) -> tuple[bool, float] | None:
        """Return whether a sketch of a variant's graph fits, and the seconds of its recomputation; None if it has no
        sketch.
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
        """Build the variants that may need the least memory at an affordable overhead, and leave no others to build.

        One each, the first that is near the least of its group: exact variants without levels; those of them that split
        no work, which stay cheap if parts turn out to cost too much; all exact variants; inexact ones; microbatches;
        and rows in chunks inside the latter.
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
            """Build the variant of a group, and return the variants with rows in chunks inside it."""
            slack = LEAST_SLACK * self.temporaries_nbytes
            while among:  # if a variant cannot be built, try the next
                enough = max(of(each).fewer_nbytes for each in among) - slack
                lowest = next(each for each in among if of(each).fewer_nbytes >= enough)
                if lowest not in made and not self.make(lowest):
                    among.remove(lowest)
                    continue
                made.append(lowest)
                left = self._temporaries_nbytes(lowest)
                if of(lowest).whole or slack <= LARGE_SLACK * left:
                    return [e for e in self.variants.inside(lowest) if of(e).more_seconds <= most_seconds]
                # The scores of long sequences dwarf all other values: a share of them would hide large differences.
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
        """Drop all variants that are not built yet."""
        self.left = {False: ([], []), True: ([],)}

    def _temporaries_nbytes(self, variant: Variant) -> int:
        """Return the predicted temporaries of a built variant that saves everything, or only the values that it must,
        whichever is less.
        """
        graph = next(cut for cut in self.made if cut.form == variant)
        schedules = save_all(graph), close_over_dependencies(graph, ())
        return min(simulate(graph, each).peak_nbytes for each in schedules) - graph.base_nbytes

    def make_shallower(self) -> list[Graph]:
        """Build the variant of least memory of the `shallower` ones left, and return its graphs: for when the variant
        of least memory turns out to be slower than estimated.
        """
        return self.make(self.shallower.pop()) if self.shallower else []


def _with_and_without_host(graph: Graph) -> list[Graph]:
    """Return the cuttings of a graph into stages. If host memory is optional, each is returned also without it: only
    the compiled step gives the full cost of copies, so both compete.
    """
    made = cuttings(graph)
    if graph.host is None or graph.pinned["offload"]:
        return made
    return [*made, *(replace(cut, host=None) for cut in made)]


@dataclass
class Candidate:
    """One graph, cut into stages.

    **Fields:** its `compiled` candidates; the predicted peak to solve for next (`allowance`); the `pending` solution
    for that, its rank (`order`), and the `open_seconds` that finishing it may save; `error_seconds` of the model on the
    last candidate of its variant, with host memory only; `closed` if no better schedule is expected.
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
        """The rank corrected by `error_seconds`."""
        fits, seconds, *more = self.order
        return (fits, seconds + self.error_seconds, *more) if not fits else self.order

    def gain(self, seconds: float, best: CompiledCandidate) -> float:
        """Return the seconds that a solution may save, if the model errs as it did on the last compiled candidate."""
        last = self.compiled[-1] if self.compiled else best
        return best.seconds - seconds - (last.seconds - last.profile.extra_seconds)


def cheapest(candidates: Sequence[Candidate], alike_seconds: float) -> Candidate | None:
    """Return the cheapest candidate. Among about equally cheap ones that fit, prefer no copies to host memory, then
    fewer stages: the model does not see where barriers split a kernel.
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
    """Return the predicted peak to solve for next, by interpolation between the compiled schedules around the budget.
    Each further miss in a row halves the distance to the one that fits, because compiled peaks may follow slowly.

    If none fits, lower the last predicted peak by the excess, doubled with each miss. If none above the fitting ones
    exceeds the budget, raise it by the unused room, four times as much with each fit; or go to the budget itself if
    more room is unused than the model errs by, since its error far below the budget may differ from that near it.
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
