"""Forms of a step -> cuttings of them into stages, which compete; a form is made when it promises something.

A deeper form is made when no other promises to fit for less than running the forward passes that it repeats, one with a
loop in parts where that promises to save a good deal of the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .._model._graph import Graph, Segments
from .._model._host_copies import HostMemory
from .._model._loop_levels import Form, Pairs, deep
from .._model._simulate import extra_seconds
from .._model._stages import cuttings
from .._runtime._progress import phase
from .._solver import Solution, Solver
from ._loop_division import uneven
from ._trial import Line

CHEAP = 0.002
"""A plan of at most this overhead is not worth another round, nor is a gain of half of it."""

UNEVEN = 0.003
"""A loop is divided where that promises to save this share of the step's time."""

EXACTLY, COPIED, HOST = range(3)
"""The turns in which forms are looked at, so that what may round, or needs a host, makes nothing worse."""

LEAST_SLACK = 0.02
"""About the least memory is what is within this share of the plain step's temporaries."""


@dataclass
class Cuttings:
    """**Fields:** `graph` of the plain step's form; `solver` and its `time_limit`; `temporaries_nbytes` of
    the plain step; the step's `pairs` of loops and the `graph_of` other forms; `made` so far, the forms that are
    `left`, by whether their values have copies in fewer bits, and those that were `passed` over; `divided` the forms,
    with the host's memory that they had, that were looked at for what dividing a loop would gain; `plain_nbytes` the
    least that the plain form needs, once it does not fit.
    """

    graph: Graph
    solver: Solver
    time_limit: float
    temporaries_nbytes: int
    pairs: Pairs | None
    graph_of: Callable[[Segments], Graph | None] | None
    passed: list[Form] = field(default_factory=list)
    divided: set[tuple[Segments, HostMemory | None]] = field(default_factory=set)
    plain_nbytes: int = 0

    def __post_init__(self) -> None:
        self.made = _with_and_without_host(self.graph)
        self.left: dict[bool, list[Form]] = {False: [], True: []}
        if self.pairs is not None:
            self.left = {False: [*self.pairs.deeper()], True: [*self.pairs.copied()]}

    def turn(self, graph: Graph) -> int:
        """When a form's cuttings are looked at: those without copies in fewer bits first, then those with them, and
        those with the host's memory last.
        """
        copied = self.pairs is not None and self.pairs.has_copies(graph.segments)
        return HOST if graph.host is not None else COPIED if copied else EXACTLY

    @property
    def turns(self) -> list[int]:
        """The turns in which there is something to look at."""
        return sorted({*map(self.turn, self.made), *([COPIED] if self.left[True] else [])})

    @property
    def free_seconds(self) -> float:
        """What no plan goes below: it saves nothing in loops, which the plain step may do, and recomputes nothing."""
        return min(self.graph.extra_seconds, 0.0)

    @property
    def cheap_seconds(self) -> float:
        """Plans of at most so many extra seconds are not worth another round."""
        return self.free_seconds + CHEAP * self.graph.step_seconds

    def make(self, form: Form) -> list[Graph]:
        """Add the cuttings of a form, if it can be made, and return them; the shallower ones are passed over."""
        assert self.graph_of is not None
        for left in self.left.values():
            if form in left:
                at = left.index(form)
                self.passed += left[:at]
                del left[: at + 1]
        if form in self.passed:
            self.passed.remove(form)
        graph = self.graph_of(form.segments)
        self.made += (made := _with_and_without_host(graph) if graph else [])
        return made

    def divide(self, solutions: Sequence[tuple[Graph, Solution]], allowance: int) -> list[Graph]:
        """Add the cuttings of a form with one of its loops in parts, and return them, if the best of these solutions of
        its cuttings, which fit, is a good deal dearer than such a form promises to be. No form is looked at twice.
        """
        seconds = min(extra_seconds(graph, solution.schedule) for graph, solution in solutions)
        segments, host = solutions[0][0].segments, solutions[0][0].host
        if self.pairs is None or (segments, host) in self.divided or seconds <= self.cheap_seconds:
            return []
        self.divided.add((segments, host))
        if not self.pairs.whole(segments):
            return []
        with phase("looking for a loop to divide", kind="solve"):
            looked = (uneven(*each, allowance, self.solver, self.time_limit) for each in solutions)
            found = min(filter(None, looked), key=lambda each: each.seconds, default=None)
        if found is None or seconds - found.seconds < UNEVEN * self.graph.step_seconds:
            return []
        forms = self.pairs.divided(segments, found.pair, found.share)
        return [cut for form in forms for cut in self.make(form)]

    def divide_best(self, known: Sequence[Line]) -> list[Graph]:
        """The same of the form of the best of these lines."""
        if not known:
            return []
        best = min(known, key=lambda line: line.expected)
        alike = [line for line in known if line.graph.alike(best.graph)]
        solutions = [(line.graph, line.pending) for line in alike if line.pending is not None]
        return self.divide(solutions, min(line.allowance for line in alike))

    def make_lowest(self, most_seconds: float) -> None:
        """Add the cuttings of the forms that may need the least memory at a bearable overhead, of all that are not made
        yet: the first that is near the least of all, of those without levels, and of microbatches; no others are made
        then.
        """
        most_seconds -= self.graph.extra_seconds
        known = [*self.passed, *self.left[False], *self.left[True]]
        able = [form for form in known if form.more_seconds <= most_seconds]
        parts = [form for form in able if not form.whole]
        made: list[Form] = []
        for forms in (
            [form for form in parts if not deep(form)],
            parts,
            [form for form in able if form.whole],
        ):
            slack = LEAST_SLACK * self.temporaries_nbytes
            enough = max((form.fewer_nbytes for form in forms), default=0) - slack
            lowest = next((form for form in forms if form.fewer_nbytes >= enough), None)
            if lowest is not None and lowest not in made:
                made.append(lowest)
                self.make(lowest)
        self.passed, self.left = [], {False: [], True: []}

    def deepen(self, seconds: float | None, budget: int, turn: int) -> bool:
        """Make the next form of a turn that may fit, if none is known that takes less; whether there was one.

        **Arguments:** `seconds` that the best so far takes, None if nothing fits.
        """
        for form in [*(left := self.left[turn == COPIED])]:
            if seconds is not None and seconds <= self.graph.extra_seconds + form.more_seconds:
                return False
            last = bool(left) and form is left[-1]
            if (self.plain_nbytes - form.fewer_nbytes <= budget or last) and self.make(form):
                return True
        return False


def _with_and_without_host(graph: Graph) -> list[Graph]:
    """The cuttings of a form; where values may be in host memory and none must, also those where none are. What copies
    cost besides is for the compiler to say, and both compete.
    """
    made = cuttings(graph)
    if graph.host is None or graph.pinned["offload"]:
        return made
    return [*made, *(replace(cut, host=None) for cut in made)]
