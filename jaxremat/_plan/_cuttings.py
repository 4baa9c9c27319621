"""Forms of a step -> cuttings of them into stages, which compete; a form is made when it promises something.

A deeper form is made when no other promises to fit for less than running the forward passes that it repeats, one with a
loop in parts where that promises to save a good deal of the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .._model._form import Form
from .._model._form_offers import Forms, Promise
from .._model._graph import Graph
from .._model._host_copies import HostMemory
from .._model._loop_levels import deep
from .._model._simulate import extra_seconds
from .._model._stages import cuttings
from .._runtime._mechanisms import mechanism
from .._runtime._progress import phase
from .._solver import Solution, Solver
from ._loop_division import uneven
from ._trial import Line

CHEAP = 0.002
"""A plan of at most this overhead is not worth another round, nor is a gain of half of it."""

UNEVEN = 0.003
"""A loop is divided where that promises to save this share of the step's time."""

EXACTLY, INEXACTLY, HOST = range(3)
"""The turns in which forms are looked at, so that what may round, or needs a host, makes nothing worse."""

LEAST_SLACK = 0.02
"""About the least memory is what is within this share of the plain step's temporaries."""


@dataclass
class Cuttings:
    """**Fields:** `graph` of the plain step's form; `solver` and its `time_limit`; `temporaries_nbytes` of the plain
    step; the `forms` that the step may take and the `graph_of` each; `made` so far, what those promise that are `left`,
    by whether they change numbers, and those that were `passed` over; `divided` the forms, with the host's memory that
    they had, that were looked at for what dividing a loop would gain; `plain_nbytes` the least that the plain form
    needs, once it does not fit; forms in fewer microbatches than that of least memory, the `shallower` ones.
    """

    graph: Graph
    solver: Solver
    time_limit: float
    temporaries_nbytes: int
    forms: Forms | None
    graph_of: Callable[[Form], Graph | None] | None
    passed: list[Promise] = field(default_factory=list)
    divided: set[tuple[Form, HostMemory | None]] = field(default_factory=set)
    plain_nbytes: int = 0
    shallower: list[Promise] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made = _with_and_without_host(self.graph)
        self.left: dict[bool, list[Promise]] = {False: [], True: []}
        if self.forms is not None:
            self.left = {False: [*self.forms.deeper()], True: [*self.forms.inexact()]}

    def turn(self, graph: Graph) -> int:
        """When a form's cuttings are looked at: those of exact forms first, then those of others, and those with the
        host's memory last.
        """
        inexact = self._is_inexact(graph.form)
        return HOST if graph.host is not None else INEXACTLY if inexact else EXACTLY

    def _is_inexact(self, form: Form) -> bool:
        return self.forms is not None and self.forms.is_inexact(form)

    @property
    def turns(self) -> list[int]:
        """The turns in which there is something to look at."""
        return sorted({*map(self.turn, self.made), *([INEXACTLY] if self.left[True] else [])})

    @property
    def free_seconds(self) -> float:
        """What no plan goes below: it saves nothing in loops, which the plain step may do, and recomputes nothing."""
        return min(self.graph.extra_seconds, 0.0)

    @property
    def cheap_seconds(self) -> float:
        """Plans of at most so many extra seconds are not worth another round."""
        return self.free_seconds + CHEAP * self.graph.step_seconds

    def make(self, promise: Promise) -> list[Graph]:
        """Add the cuttings of a form, if it can be made, and return them; the shallower ones are passed over."""
        assert self.graph_of is not None
        for left in self.left.values():
            if promise in left:
                at = left.index(promise)
                self.passed += left[:at]
                del left[: at + 1]
        if promise in self.passed:
            self.passed.remove(promise)
        graph = self.graph_of(promise.form)
        self.made += (made := _with_and_without_host(graph) if graph else [])
        return made

    @mechanism("loops in parts", off=lambda *_: [])
    def divide(self, solutions: Sequence[tuple[Graph, Solution]], allowance: int) -> list[Graph]:
        """Add the cuttings of a form with one of its loops in parts, and return them, if the best of these solutions of
        its cuttings, which fit, is a good deal dearer than such a form promises to be. No form is looked at twice.
        """
        seconds = min(extra_seconds(graph, solution.schedule) for graph, solution in solutions)
        form, host = solutions[0][0].form, solutions[0][0].host
        if self.forms is None or (form, host) in self.divided or seconds <= self.cheap_seconds:
            return []
        self.divided.add((form, host))
        if not self.forms.loops.undivided(form):
            return []
        with phase("looking for a loop to divide", kind="solve"):
            looked = (uneven(*each, allowance, self.solver, self.time_limit) for each in solutions)
            found = min(filter(None, looked), key=lambda each: each.seconds, default=None)
        if found is None or seconds - found.seconds < UNEVEN * self.graph.step_seconds:
            return []
        promises = self.forms.divided(form, found.pair, found.share)
        return [cut for promise in promises for cut in self.make(promise)]

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
        yet: the first that is near the least of all, of those without levels, of those that change numbers, and of
        microbatches; no others are made then.
        """
        most_seconds -= self.graph.extra_seconds
        known = [*self.passed, *self.left[False], *self.left[True]]
        able = [promise for promise in known if promise.more_seconds <= most_seconds]
        parts = [promise for promise in able if not promise.whole]
        made: list[Promise] = []
        exact = [promise for promise in parts if not self._is_inexact(promise.form)]
        for promises in (
            [promise for promise in exact if not deep(promise.form)],
            exact,
            [promise for promise in parts if promise not in exact],
            [promise for promise in able if promise.whole],
        ):
            slack = LEAST_SLACK * self.temporaries_nbytes
            enough = max((promise.fewer_nbytes for promise in promises), default=0) - slack
            lowest = next((each for each in promises if each.fewer_nbytes >= enough), None)
            if lowest is not None and lowest not in made:
                made.append(lowest)
                self.make(lowest)
        cheaper = (each for each in able if each.whole and each not in made)
        self.shallower = sorted(cheaper, key=lambda each: each.fewer_nbytes)
        self.passed, self.left = [], {False: [], True: []}

    def make_shallower(self) -> list[Graph]:
        """Add the cuttings of the deepest form in microbatches that is left, and return them: where the one that was
        made of these turns out to be dearer than it promised.
        """
        return self.make(self.shallower.pop()) if self.shallower else []

    def deepen(self, seconds: float | None, budget: int, turn: int) -> bool:
        """Make the next form of a turn that may fit, if none is known that takes less; whether there was one.

        **Arguments:** `seconds` that the best so far takes, None if nothing fits.
        """
        for promise in [*(left := self.left[turn == INEXACTLY])]:
            if seconds is not None and seconds <= self.graph.extra_seconds + promise.more_seconds:
                return False
            last = bool(left) and promise is left[-1]
            if (self.plain_nbytes - promise.fewer_nbytes <= budget or last) and self.make(promise):
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
