"""Which of several compiled plans is taken."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
from forms import of_chunks, of_levels
from graphs import UNIT, chain, peak_of
from test_host_copies import layers

from jaxremat import (
    Graph,
    Milp,
    RecomputeAll,
    SaveAll,
    Schedule,
    Solution,
    Solver,
    close_over_dependencies,
    simulate,
)
from jaxremat._model._loop_levels import Loops
from jaxremat._model._sites import Sites, Variants
from jaxremat._model._stages import uncut
from jaxremat._model._variant import ATTENTION, COPIES, INSIDE, PLAIN, ROWS, Choice, Estimate, Variant
from jaxremat._plan import _ledger
from jaxremat._plan._candidates import Candidate, CandidateSource, cheapest, next_allowance
from jaxremat._plan._ledger import UNPROVEN, CompiledCandidate, Effort, Ledger
from jaxremat._plan._refusal import slow
from jaxremat._plan._search import HOST_MORE, HOST_WORTH, MORE_ROUNDS, Search
from jaxremat._plan._verify import Gap

NONE = Variants(Loops((), (), (), (), ()))
"""No variants but the plain step."""


@dataclass
class Space:
    """The graphs of a step, and what may be `made` of it."""

    graph: Graph
    able: Variants = NONE
    made: Mapping[Variant, Graph] = field(default_factory=dict)

    @cached_property
    def plain(self) -> Graph:
        return self.graph

    @cached_property
    def variants(self) -> Variants:
        return self.able

    def of(self, variant: Variant) -> Graph | None:
        return self.made.get(variant)

    def known(self, graph: Graph) -> Schedule | None:
        return None


Compile = Callable[[Graph, Solution, str], CompiledCandidate]


@dataclass
class Compiler:
    """Compiles as a function does."""

    make: Compile

    def compile(self, graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        return self.make(graph, solution, fence)


def searching(
    graph: Graph | Space,
    solver: Solver,
    compile: Compile,
    temporaries_nbytes: int = 0,
    effort: Effort | None = None,
) -> Search:
    space = Space(graph) if isinstance(graph, Graph) else graph
    return Search(space, Ledger(solver, effort or Effort(), 1.0, Compiler(compile)), temporaries_nbytes)


def a_trial(graph: Graph, saved: set[int], compiled_overhead: float | None) -> CompiledCandidate:
    schedule = close_over_dependencies(graph, saved)
    profile = simulate(graph, schedule)
    compiled: Any = None
    return CompiledCandidate(
        graph,
        Solution(schedule),
        "finished",
        profile,
        None,
        compiled,
        profile.peak_nbytes,
        compiled_overhead,
        compile_seconds=0.0,
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_on_a_gpu_the_compiled_kernels_decide(platform: str) -> None:
    """The plan that the model takes for the cheaper one has the more expensive kernels."""
    graph = replace(chain(6), platform=platform)
    search = searching(graph, Milp(), compiled_dearly)
    by_model = a_trial(graph, set(graph.residuals[:4]), 0.3)
    by_kernels = a_trial(graph, set(graph.residuals[:2]), 0.1)
    assert by_model.profile.extra_seconds < by_kernels.profile.extra_seconds
    search.ledger.compiled += [by_model, by_kernels]
    assert search.ledger.best(10**12) is (by_kernels if platform == "gpu" else by_model)


@pytest.mark.parametrize(("compiled", "believed"), [(-0.2, 0.0), (0.04, 0.0), (0.3, 0.25)])
def test_where_the_model_decides_kernels_far_dearer_are_believed(compiled: float, believed: float) -> None:
    graph = replace(chain(6), platform="cpu")
    trial = a_trial(graph, set(graph.residuals), compiled)
    assert trial.profile.extra_seconds == 0
    assert trial.seconds == pytest.approx(believed * graph.step_seconds)


class Prefixes:
    """Saves as many of the first residuals as the allowance has room for."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        del time_limit
        for k in range(len(graph.residuals) if budget_nbytes is not None else 0, 0, -1):
            found = close_over_dependencies(graph, graph.residuals[:k])
            if simulate(graph, found).peak_nbytes <= (budget_nbytes or 0):
                return Solution(found)
        return Solution(close_over_dependencies(graph, ()))


def compiled_dearly(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
    """What saves nothing takes four times as long; the others need more memory than the model says."""
    del fence
    saved = set(solution.schedule.saved)
    trial = a_trial(graph, saved, 0.1 if saved else 3.0)
    return replace(trial, solution=solution, peak_nbytes=trial.peak_nbytes + (150 if saved else 0))


def test_a_plan_that_costs_several_steps_is_not_the_answer_where_there_is_another() -> None:
    graph = replace(chain(12), platform="gpu")
    least, most = peak_of(graph), peak_of(graph, graph.residuals)
    budget = (least + most) // 2 + 150
    search = searching(graph, Prefixes(), compiled_dearly)
    trial = search.within(budget, -MORE_ROUNDS)  # nothing but the schedules of least memory at first
    assert search.ledger.compiled[0].compiled_overhead == 3.0
    assert search.ledger.compiled[0].peak_nbytes <= budget
    assert trial is not None
    assert trial.compiled_overhead == 0.1
    assert trial.peak_nbytes <= budget
    assert slow(search, trial) == ""


def test_it_is_the_answer_where_there_is_none_and_says_so() -> None:
    graph = replace(chain(12), platform="gpu")
    search = searching(graph, Prefixes(), compiled_dearly)
    budget = peak_of(graph)
    assert peak_of(graph, graph.residuals[:1]) + 150 > budget
    trial = search.within(budget, 3)
    assert trial is not None
    assert trial.compiled_overhead == 3.0
    assert "takes 4.0 times the plain step's time" in slow(search, trial)
    search.ledger.compiled.append(a_trial(graph, set(graph.residuals), 0.1))
    assert "it takes 1.1 times" in slow(search, trial)
    assert search.within(budget - 1, 0) is None


def beyond_prediction() -> tuple[Graph, Search, int, int]:
    """A search all of whose schedules need more than predicted, a budget in the middle, and how much more that is."""
    graph = chain(12)
    least, most = peak_of(graph), peak_of(graph, graph.residuals)
    budget, beyond = (least + most) // 2, (most - least) // 8

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        trial = compiled_dearly(graph, solution, fence)
        return replace(trial, peak_nbytes=trial.profile.peak_nbytes + beyond)

    search = searching(graph, Prefixes(), compiled)
    return graph, search, budget, beyond


@pytest.mark.parametrize("little", [True, False])
def test_what_misses_the_budget_by_little_is_corrected_however_late_it_is(little: bool) -> None:
    """What misses by more makes room for the schedule of least memory, which is sure to be expensive."""
    graph, search, budget, beyond = beyond_prediction()
    graph = replace(graph, platform="gpu")
    assert isinstance(search.ledger.compiler, Compiler)
    search = searching(graph, Prefixes(), search.ledger.compiler.make, beyond * (25 if little else 5))
    search.effort.compilations = 1000
    trial = search.within(budget, 3)
    assert trial is not None
    assert trial.peak_nbytes <= budget
    assert search.ledger.compiled[0].peak_nbytes > budget
    assert bool(trial.solution.schedule.saved) is little


@pytest.mark.parametrize("little", [True, False])
def test_what_misses_by_little_has_more_rounds_rather_than_a_dear_plan(little: bool) -> None:
    """Plans that save something miss by a little again and again, and then fit; the least memory costs three steps."""
    graph = replace(chain(100), platform="gpu")
    least, most = peak_of(graph), peak_of(graph, graph.residuals)
    budget, rounds = (least + most) // 2, 3
    missed = 0

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        nonlocal missed
        trial = compiled_dearly(graph, solution, fence)
        if not solution.schedule.saved:
            return replace(trial, peak_nbytes=least)
        missed += 1
        return replace(trial, peak_nbytes=budget + (UNIT if missed <= rounds + MORE_ROUNDS else 0))

    search = searching(graph, Prefixes(), compiled, (100 if little else 10) * UNIT)
    trial = search.within(budget, rounds)
    assert trial is not None
    assert trial.peak_nbytes <= budget
    assert trial.compiled_overhead == 0.1
    assert any(t.compiled_overhead == 3.0 for t in search.ledger.compiled) is not little


@pytest.mark.parametrize(("compilations", "tried"), [(1000, 0), (0, 1)])
def test_something_faster_than_what_fits_is_looked_for_within_the_effort_or_not_at_all(
    compilations: int, tried: int
) -> None:
    graph = replace(chain(6), extra_seconds=-1.0)
    effort = Effort(compilations=compilations)
    search = searching(graph, Prefixes(), compiled_dearly, 0, effort=effort)
    search.faster(10**12, 3)
    assert len(search.ledger.compiled) == tried


def test_what_misses_by_little_is_corrected_beyond_the_effort() -> None:
    """Each plan needs a little more than the budget, as if the model knew nothing."""
    graph = replace(chain(12), step_seconds=10000.0)
    budget = peak_of(graph, graph.residuals[:6])

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        return replace(compiled_dearly(graph, solution, fence), peak_nbytes=budget + UNIT)

    def tries(effort: Effort, temporaries: int = 1000) -> int:
        search = searching(graph, Prefixes(), compiled, temporaries * UNIT, effort=effort)
        search.approach(lambda: budget, 3)
        return len(search.ledger.compiled)

    assert tries(Effort()) > 3
    assert tries(Effort(compilations=1000)) == 3
    assert tries(Effort(compilations=1000), temporaries=50) == 2, (
        "and once more only by less than a hundredth"
    )


def test_what_all_need_beyond_their_prediction_is_kept_free_by_those_not_compiled_yet() -> None:
    """Of three cuttings into stages the two others begin within what the first one's error leaves."""
    graph, search, budget, beyond = beyond_prediction()
    search.source.made = [replace(graph, small_nbytes=n) for n in range(3)]
    first = search._next(budget)
    assert first is not None
    assert [each.allowance for each in search.candidates] == [budget] * 3
    assert first.pending is not None
    search.ledger.compile(first.graph, first.pending)
    search._next(budget)
    assert {each.allowance for each in search.candidates} == {first.allowance}
    assert budget - 1.2 * beyond < first.allowance <= budget - beyond


def test_compiled_peaks_that_follow_slowly_are_not_given_up_for_the_least_memory() -> None:
    """A quarter of what a prediction is lowered by comes off the compiled peak, and there are few rounds."""
    graph = replace(chain(40), step_seconds=2000.0)  # so that even the least memory is bearable
    least, most = peak_of(graph), peak_of(graph, graph.residuals)

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        trial = compiled_dearly(graph, solution, fence)
        return replace(trial, peak_nbytes=(trial.profile.peak_nbytes + 3 * most) // 4)

    budget = least + (most - least) * 7 // 8
    best = searching(graph, Prefixes(), compiled).within(budget, 3)
    assert best is not None and best.peak_nbytes <= budget
    assert best.peak_nbytes > budget - (most - least) // 10, "more is recomputed than the budget asks for"


Peak = Callable[[int], float]
"""Of the number of values that a plan saves, the compiled peak in units."""


def near_the_least(
    peak: Peak, *, step_seconds: float = 2000.0, solver: Any = None, platform: str = "cpu"
) -> Search:
    """Of a chain of forty, whose values all take one unit, and whose model says nothing but that of the peak."""
    graph = replace(chain(40), step_seconds=step_seconds, platform=platform)

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        saved = set(solution.schedule.saved)
        trial = a_trial(graph, saved, simulate(graph, solution.schedule).extra_seconds / step_seconds)
        nbytes = graph.base_nbytes + round(peak(len(saved)) * UNIT)
        return replace(trial, solution=solution, fence=fence, peak_nbytes=nbytes)

    return searching(graph, solver or Prefixes(), compiled, 1000 * UNIT)


def bound_nbytes(search: Search) -> float:
    """What is about the least of what was compiled: a twentieth more."""
    base = search.graph.base_nbytes
    return base + 1.05 * (min(t.peak_nbytes for t in search.ledger.compiled) - base)


def test_errors_at_the_least_memory_are_not_taken_for_those_near_it() -> None:
    """Compiled peaks hardly follow the predicted ones: all is saved, after two more compilations."""
    search = near_the_least(lambda saved: 200 + saved / 40)
    trial = search.least(3)
    assert trial is not None
    assert len(trial.solution.schedule.saved) == 40 and trial.profile.extra_seconds == 0
    assert len(search.ledger.compiled) == 3


@pytest.mark.parametrize("power", [0.5, 1, 2, 3])
def test_the_least_memory_is_approached_as_a_budget_is(power: float) -> None:
    """Nothing recomputed exceeds what is about the least, so that the next predictions lie between."""
    search = near_the_least(lambda saved: 200 + 20 * (saved / 40) ** power)
    trial = search.least(3)
    assert trial is not None
    assert trial.peak_nbytes <= bound_nbytes(search)
    fitting = int(40 * 0.5 ** (1 / power))  # as many values may be saved
    assert 0.6 * fitting <= len(trial.solution.schedule.saved) <= fitting
    assert len(search.ledger.compiled) <= 4


@pytest.mark.parametrize("share", [1, 0])
def test_where_the_least_memory_takes_twice_the_step_the_least_that_does_not_is_the_answer(
    share: int,
) -> None:
    """Of a step without temporaries to a byte."""
    graph = chain(40)
    graph = replace(
        graph, step_seconds=0.7 * simulate(graph, close_over_dependencies(graph, ())).extra_seconds
    )
    tried: list[CompiledCandidate] = []

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        trial = a_trial(graph, set(solution.schedule.saved), None)
        tried.append(replace(trial, solution=solution))
        return tried[-1]

    found = searching(graph, Prefixes(), compiled, share * peak_of(graph)).least(0)
    assert found is not None
    assert tried[0].profile.extra_seconds > graph.step_seconds >= found.profile.extra_seconds
    assert found.profile.extra_seconds > 0.8 * graph.step_seconds


def test_a_lower_peak_on_the_way_is_the_least_from_there_on() -> None:
    search = near_the_least(lambda saved: 200 + (saved - 10) ** 2 / 20)
    trial = search.least(7)
    assert trial is not None
    least = min(search.ledger.compiled, key=lambda t: t.peak_nbytes)
    assert least.peak_nbytes < search.ledger.compiled[0].peak_nbytes
    assert least.peak_nbytes <= trial.peak_nbytes <= bound_nbytes(search)
    assert 17 <= len(trial.solution.schedule.saved) <= 24


def test_nothing_is_compiled_near_the_least_memory_where_little_is_to_be_gained() -> None:
    search = near_the_least(lambda saved: 200 + saved / 40, step_seconds=200_000.0)
    assert search.least(3) is search.ledger.compiled[0]
    overhead = search.ledger.compiled[0].compiled_overhead
    assert overhead is not None and 0.003 < overhead < 0.005
    assert len(search.ledger.compiled) == 1


def test_near_the_least_memory_the_search_goes_on_where_much_is_to_be_gained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The schedules of least memory have taken all compilations that there were."""
    monkeypatch.setattr(_ledger, "COMPILATIONS", 1)
    monkeypatch.setattr(_ledger, "MORE_COMPILATIONS", 0)
    found = [near_the_least(lambda saved: 200 + saved / 3, step_seconds=s) for s in (2000.0, 20_000.0)]
    much, little = (search.least(3) for search in found)
    assert much is not None and len(much.solution.schedule.saved) > 20
    assert little is not None and not little.solution.schedule.saved, "a twentieth of the step is not"


def test_of_two_cuttings_in_which_the_least_memory_is_the_same_one_is_compiled() -> None:
    graph = replace(chain(12), step_seconds=100.0)
    *stages, last = graph.stages
    halves = replace(last, stop=last.stop - 1, finished=()), replace(last, start=last.stop - 1)
    search = searching(graph, RecomputeAll(), compiled_dearly, 1000 * UNIT)
    search.source.made.append(replace(graph, stages=(*stages, *halves)))
    search.lowest()
    first, *others = search.ledger.compiled
    assert all(each.solution.solver != first.solution.solver for each in others), "both need the same"


class Bearable(Prefixes):
    """Takes half of what may be saved for the least memory."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        if budget_nbytes is None:
            return Solution(close_over_dependencies(graph, graph.residuals[:20]))
        return super().solve(graph, budget_nbytes, time_limit=time_limit)


def test_for_the_least_memory_nothing_is_compiled_that_cannot_be_the_answer() -> None:
    """What saves nothing, as a price of memory alone would have it, takes longer than the plain step."""
    least, lowest = (
        near_the_least(lambda saved: saved + 2, step_seconds=500.0, solver=Bearable()) for _ in range(2)
    )
    fastest = least.least(3)
    assert fastest is not None and fastest.profile.extra_seconds < 500
    assert all(t.profile.extra_seconds < 500 for t in least.ledger.compiled)
    assert lowest.lowest().profile.extra_seconds > 500, "that is asked for apart"


def test_a_refusal_compiles_the_form_of_least_memory_alone() -> None:
    """Each of 6 forms needs twice the budget by the model, and more than the one before."""
    graph = chain(12)
    peak, tried = peak_of(graph), list[Variant]()

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        tried.append(graph.form)
        trial = a_trial(graph, set(), 0.1)
        return replace(trial, solution=solution, peak_nbytes=trial.peak_nbytes + 1000)

    search = searching(graph, Prefixes(), compiled, 10 * peak)
    search.source.made = [
        replace(graph, form=of_chunks(2 + n), base_nbytes=graph.base_nbytes + n * UNIT)
        for n in range(5, -1, -1)
    ]
    assert search.within(peak // 2, -MORE_ROUNDS) is None
    assert tried == [of_chunks(2)]


@pytest.mark.parametrize("expensive", [False, True])
def test_what_recomputes_much_does_not_say_how_the_model_errs_on_what_recomputes_less(
    expensive: bool,
) -> None:
    """Of two cuttings whose least the model takes for the same memory the first is compiled and exceeds the budget."""
    graph = chain(12)
    most = graph.residuals[: 2 if expensive else 6]
    peak = peak_of(graph, graph.residuals[:6])
    tried: list[int] = []

    class Given:
        def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
            return Solution(
                close_over_dependencies(graph, most if graph.small_nbytes == 0 else graph.residuals[:6])
            )

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        tried.append(graph.small_nbytes)
        trial = a_trial(graph, set(), 0.1)
        profile = simulate(graph, solution.schedule)
        return replace(trial, solution=solution, profile=profile, peak_nbytes=profile.peak_nbytes + 5 * UNIT)

    search = searching(graph, Given(), compiled, 1000 * UNIT)
    search.source.made = [replace(graph, small_nbytes=n) for n in range(2)]
    search.ledger.of_least = search.ledger.of_least[:1]
    assert search.within(peak - 1, -MORE_ROUNDS) is None
    assert tried == ([0, 1] if expensive else [0])


def test_a_plan_that_uses_the_budget_is_not_the_last_where_the_solver_was_far_from_its_bound() -> None:
    graph = chain(12)
    trial = a_trial(graph, set(graph.residuals[:3]), 0.0)
    overhead = trial.profile.extra_seconds / graph.step_seconds
    assert overhead > UNPROVEN
    assert not trial.fills(trial.peak_nbytes)
    proven = replace(trial, solution=replace(trial.solution, lower_bound=overhead - UNPROVEN / 2))
    assert proven.fills(trial.peak_nbytes)
    assert not proven.fills(trial.peak_nbytes - 1)
    assert not proven.fills(2 * trial.peak_nbytes)


def test_errors_of_one_form_are_not_taken_for_those_of_another() -> None:
    graph, search, budget, beyond = beyond_prediction()
    search.source.made = [
        replace(graph, small_nbytes=n, form=s) for s in (PLAIN, of_chunks(4)) for n in (0, 1)
    ]
    first = search._next(budget)
    assert first is not None and first is search.candidates[0]
    assert first.pending is not None
    search.ledger.compile(first.graph, first.pending)
    search._next(budget)
    assert search.candidates[0].allowance == search.candidates[1].allowance <= budget - beyond
    assert [each.allowance for each in search.candidates[2:]] == [budget, budget]


@dataclass
class InStages(Prefixes):
    """Saves nothing at first, and what there is room for where it may `finish`."""

    finished: list[int] = field(default_factory=list)

    def begin(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        return super().solve(graph, None, time_limit=time_limit)

    def finish(self, graph: Graph, budget_nbytes: int, begun: Solution, *, time_limit: float) -> Solution:
        self.finished.append(graph.small_nbytes)
        return super().solve(graph, budget_nbytes, time_limit=time_limit)


@pytest.mark.parametrize(
    ("more", "repeats", "finished"), [(3, False, [0]), (100, True, [0]), (3, True, [0, 1])]
)
def test_only_a_schedule_that_wins_or_may_win_is_finished(
    more: float, repeats: bool, finished: list[int]
) -> None:
    """The second of two cuttings takes so many seconds more, and may save what stages in a row recompute."""
    solver = InStages()
    graph = replace(chain(12), step_seconds=1000.0)
    graph = graph if repeats else replace(graph, stages=uncut(graph))
    search = searching(graph, solver, compiled_dearly)
    search.source.made = [replace(graph, small_nbytes=n, extra_seconds=n * more) for n in range(2)]
    chosen = search._next(peak_of(graph) + 4 * UNIT)
    assert chosen is not None and chosen is search.candidates[0]
    assert chosen.pending is not None and chosen.pending.schedule.saved
    assert solver.finished == finished


class Starved(Prefixes):
    """Has no time left for more than what recomputes all, but at first."""

    calls = 0

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        self.calls += 1
        return super().solve(graph, budget_nbytes if self.calls == 1 else None, time_limit=time_limit)


@pytest.mark.parametrize("alike", [True, False])
def test_the_least_is_not_looked_for_where_another_of_the_form_needs_more(alike: bool) -> None:
    """Two cuttings of which the model says the same, and that exceed the budget: of one form the second is not
    compiled, of two it is.
    """
    graph = chain(12)
    peak = peak_of(graph)
    ids: list[int] = []

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        ids.append(graph.small_nbytes)
        trial = a_trial(graph, set(), 0.1)
        return replace(trial, solution=solution, fence=fence, peak_nbytes=peak + 500)

    search = searching(graph, Prefixes(), compiled, 10 * peak)
    search.source.made = [
        replace(graph, small_nbytes=n, form=of_chunks(2 if alike else 2 + n)) for n in range(2)
    ]
    search.ledger.of_least = search.ledger.of_least[:1]
    search.ledger.knows = lambda *_: False  # type: ignore[method-assign]  # they are alike for this test alone
    assert search.within(peak, -MORE_ROUNDS) is None
    assert ids == ([0] if alike else [0, 1])


def test_nothing_is_refused_for_want_of_work_while_a_form_promises_to_fit() -> None:
    """The plain form needs more than the model says, and the effort is exhausted: the other is compiled even so."""
    graph = chain(12)
    peak = peak_of(graph, graph.residuals)
    other = of_chunks(4)
    rows = Sites(ROWS, {(0, (4,)): Estimate(peak // 2, graph.step_seconds)})

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        more = 0 if graph.form == other else 10 * peak
        trial = a_trial(graph, set(solution.schedule.saved), 0.1)
        return replace(trial, solution=solution, fence=fence, peak_nbytes=trial.peak_nbytes + more)

    space = Space(graph, replace(NONE, others=(rows,)), {other: replace(graph, form=other)})
    search = searching(space, Prefixes(), compiled, 10 * peak)
    search.effort.compilations = 1000
    trial = search.within(peak - 1, 3)
    assert trial is not None
    assert trial.graph.form == other
    assert search.effort.exhausted


@pytest.mark.parametrize("least", [False, True])
def test_rows_inside_of_microbatches_are_tried_where_these_alone_need_more(least: bool) -> None:
    graph = chain(12)
    peak = peak_of(graph, graph.residuals)
    whole = of_chunks(4)
    (rung,) = Sites(INSIDE, {(0, (2,)): Estimate(peak // 4, graph.step_seconds / 100)}).rungs()
    inside = whole.also(*rung)
    rows = Sites(ROWS, {(0, (4,)): Estimate(peak // 2, graph.step_seconds / 100, whole=True)})

    def looked_for(choice: Choice) -> Sites:
        assert (choice,) == whole.choices
        return Sites(INSIDE, {(0, (2,)): Estimate(peak // 4, graph.step_seconds / 100)})

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        more = 0 if graph.form == inside else 10 * peak
        trial = a_trial(graph, set(solution.schedule.saved), 0.1)
        return replace(trial, solution=solution, fence=fence, peak_nbytes=trial.peak_nbytes + more)

    able = replace(NONE, others=(rows,), sites_inside=looked_for)
    assert able.estimate(inside)[:3] == (peak // 2 + peak // 4, graph.step_seconds / 50, True)
    made = {form: replace(graph, form=form) for form in (whole, inside)}
    search = searching(Space(graph, able, made), Prefixes(), compiled, 10 * peak)
    trial = search.least(3) if least else search.within(peak - 1, 3)
    assert trial is not None
    assert trial.graph.form == inside


def graphs_asked_for(
    gone: Mapping[int, int], more: float = 1e-3, made: Mapping[int, int] | None = None, share: float = 0.5
) -> list[Variant]:
    """Return the variants that a search builds for a `share` of the plain step's peak, in order.

    **Arguments:** `gone` the number of residuals that each number of chunks does without; `more` the extra time of each
    chunk as a share of the step; `made` the same as `gone` for the graphs, by default as their sketches say.
    """
    graph = chain(12)
    peak = peak_of(graph, graph.residuals)
    estimates = {
        (0, (n,)): Estimate(
            peak + n, n * more * graph.step_seconds, divided=tuple((v, 0) for v in graph.residuals[:count])
        )
        for n, count in gone.items()
    }
    space = Space(graph, replace(NONE, others=(Sites(ROWS, estimates),)))
    for n in gone:
        values = [*graph.values]
        for v in graph.residuals[: (made or gone)[n]]:
            values[v] = replace(values[v], nbytes=0)
        of = replace(
            graph, values=tuple(values), form=of_chunks(n), extra_seconds=n * more * graph.step_seconds
        )
        space.made = {**space.made, of_chunks(n): of}
    asked: list[Variant] = []
    space.of = lambda variant: asked.append(variant) or space.made.get(variant)  # type: ignore[method-assign]

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        return replace(a_trial(graph, set(), 0.0), solution=solution, fence=fence, graph=graph)

    assert searching(space, Milp(), compiled, peak)._next(int(share * peak)) is not None
    return asked


@pytest.mark.parametrize(("gone", "wanted"), [((1, 12), [4]), ((6, 1), [2]), ((6, 7), [2, 4])])
def test_no_graph_is_made_of_a_variant_that_a_sketch_rules_out(
    gone: tuple[int, int], wanted: list[int]
) -> None:
    """Both promise to save everything. Without so many of its values the step cannot fit, or takes far longer than the
    variant that is known, or about as long.
    """
    assert graphs_asked_for(dict(zip((2, 4), gone, strict=True))) == [of_chunks(n) for n in wanted]


def test_where_nothing_affordable_fits_the_variant_of_the_fastest_sketch_is_built_first() -> None:
    assert graphs_asked_for({2: 6, 4: 6, 8: 12}, share=0.3) == [of_chunks(8)]


def test_variants_like_one_that_takes_longer_than_its_sketch_are_expected_to_do_so() -> None:
    longer = graphs_asked_for({2: 6, 4: 6, 8: 6}, 1e-2, made={2: 4, 4: 4, 8: 4})
    assert longer == [of_chunks(2)]


def test_the_solver_is_not_asked_for_the_least_of_graphs_that_need_far_more() -> None:
    graph = chain(12)
    space = Space(graph, replace(NONE, others=(Sites(ROWS, {(0, (2,)): Estimate(UNIT)}),)))
    values = tuple(replace(v, nbytes=v.nbytes // 8) for v in graph.values)
    space.made = {of_chunks(2): replace(graph, values=values, form=of_chunks(2))}
    asked: list[Variant] = []

    class Asked(Prefixes):
        def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
            asked.extend([graph.form] * (budget_nbytes is None))
            return super().solve(graph, budget_nbytes, time_limit=time_limit)

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        return replace(a_trial(graph, set(solution.schedule.saved), 0.1), solution=solution, fence=fence)

    searching(space, Asked(), compiled, peak_of(graph)).lowest()
    assert set(asked) == {of_chunks(2)}


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_no_graph_is_made_of_a_variant_that_one_like_it_rules_out(share: float) -> None:
    """Its sketch fits the budget, but not with what the compiler adds to the like."""
    graph = chain(12)
    peak = peak_of(graph, graph.residuals)
    divided = tuple((v, 0) for v in graph.residuals[:6])
    estimates = {
        (0, (n,)): Estimate(peak + n, n * 1e-3 * graph.step_seconds, divided=divided) for n in (2, 4)
    }
    space = Space(graph, replace(NONE, others=(Sites(ROWS, estimates),)))
    asked: list[Variant] = []
    space.of = lambda variant: asked.append(variant)  # type: ignore[method-assign, assignment]
    search = searching(space, Milp(), compiled_dearly, peak)
    like = a_trial(replace(graph, form=of_chunks(2)), set(), 0.1)
    search.ledger.compiled = [replace(like, peak_nbytes=like.profile.peak_nbytes + int(share * peak))]
    search._next(like.profile.peak_nbytes - 1)
    assert (of_chunks(4) in asked) == (not share)


def test_about_the_least_memory_is_in_as_few_microbatches_as_have_it() -> None:
    graph = replace(chain(12), platform="gpu")
    peak = peak_of(graph, graph.residuals)
    share = {2: 0.02, 4: 0.03, 8: 0.05, 16: 0.1, 32: 0.2}
    estimates = {
        (0, (n,)): Estimate(peak - peak // n, each * graph.step_seconds, whole=True)
        for n, each in share.items()
    }
    made = {
        of_chunks(n): replace(graph, form=of_chunks(n), extra_seconds=each * graph.step_seconds)
        for n, each in share.items()
    }
    compiled_forms = []

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        compiled_forms.append(graph.form)
        trial = a_trial(graph, set(solution.schedule.saved), 0.2 + graph.extra_seconds / graph.step_seconds)
        needs = peak if graph.form in (of_chunks(n) for n in (8, 16, 32)) else 3 * peak
        return replace(trial, solution=solution, fence=fence, peak_nbytes=needs)

    space = Space(graph, replace(NONE, others=(Sites(ROWS, estimates),)), made)
    trial = searching(space, Prefixes(), compiled, peak).least(3)
    assert trial is not None
    assert trial.graph.form == of_chunks(8)
    assert of_chunks(2) not in compiled_forms


def test_of_variants_that_do_some_of_the_same_the_error_is_expected_that_was_seen() -> None:
    """One needs 500 bytes more than predicted: another of its choices is not compiled for less than is known."""
    graph = replace(chain(12), platform="gpu", form=of_chunks(4))
    search = searching(chain(12), Prefixes(), compiled_dearly)
    trial = a_trial(graph, set(), 0.1)
    search.ledger.compiled = [replace(trial, peak_nbytes=trial.peak_nbytes + 500)]
    for form, hopeless in ((of_chunks(2).also(Choice(ATTENTION, 0, (1,))), True), (PLAIN, False)):
        other = replace(graph, form=form, base_nbytes=graph.base_nbytes + 1)
        assert search._hopeless(other, trial.solution, search.ledger.solver) == hopeless
        search._aim(candidate := Candidate(other), 10**9)
        assert candidate.allowance == 10**9 - 500 * hopeless


def test_fewer_chunks_are_not_looked_at_where_an_affordable_plan_needs_little() -> None:
    """The least memory of all costs three times the step; the least that costs less is known."""
    graph = replace(chain(12), platform="gpu")
    peak = peak_of(graph, graph.residuals)
    made = {of_chunks(n): replace(graph, form=of_chunks(n)) for n in (2, 4)}
    estimates = {(0, (n,)): Estimate(n * peak // 8) for n in (2, 4)}
    tried: list[Variant] = []

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        tried.append(graph.form)
        trial = a_trial(graph, set(solution.schedule.saved), 3.0 if graph.form else 0.1)
        return replace(
            trial, solution=solution, fence=fence, peak_nbytes=trial.peak_nbytes + (not graph.form)
        )

    space = Space(graph, replace(NONE, others=(Sites(ROWS, estimates),)), made)
    trial = searching(space, Prefixes(), compiled).least(3)
    assert trial is not None and not trial.graph.form
    assert of_chunks(4) in tried and of_chunks(2) not in tried


def test_what_divides_no_work_is_the_least_where_parts_turn_out_to_cost_too_much() -> None:
    """By the estimates parts need less, and are affordable; by their graph they are not."""
    graph = replace(chain(12), platform="gpu")
    peak = peak_of(graph, graph.residuals)
    parts, cheap = of_chunks(4), PLAIN.also(Choice(COPIES, 0, (1,)))
    values = tuple((v, 0) for v in graph.residuals)
    rows = Sites(ROWS, {(0, (4,)): Estimate(peak, 0.1 * graph.step_seconds, divided=values)})
    copies = Sites(COPIES, {(0, (1,)): Estimate(peak // 2)})

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        trial = a_trial(graph, set(solution.schedule.saved), graph.extra_seconds / graph.step_seconds)
        needs = peak if graph.form in (parts, cheap) else 3 * peak
        return replace(trial, solution=solution, fence=fence, peak_nbytes=needs)

    made = {
        parts: replace(graph, form=parts, extra_seconds=9 * graph.step_seconds),
        cheap: replace(graph, form=cheap),
    }
    space = Space(graph, replace(NONE, others=(rows, copies)), made)
    trial = searching(space, Prefixes(), compiled, peak).least(3)
    assert trial is not None
    assert trial.graph.form == cheap


@pytest.mark.parametrize(("saved", "seconds", "compilations"), [(0, 0.5, 1), (-1, 0.05, 0)])
def test_a_search_goes_on_where_much_is_to_be_gained(saved: int, seconds: float, compilations: int) -> None:
    """Its compilations are over, and a plan fits that takes longer than another promises to."""
    graph = replace(chain(12), platform="gpu")
    peak = peak_of(graph, graph.residuals)

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        return replace(a_trial(graph, set(solution.schedule.saved), 0.01), solution=solution, fence=fence)

    search = searching(graph, Prefixes(), compiled, 10 * peak)
    search.ledger.compiled.append(a_trial(graph, set(graph.residuals[:saved]), seconds))
    before = search.effort.compilations = search.effort.most(fits=True)
    trial = search.within(peak, 3)
    assert trial is not None
    assert trial.compiled_overhead == (0.01 if compilations else seconds)
    assert search.effort.compilations - before == compilations


class Price(Prefixes):
    """Saves the first residual, where the least memory is asked for."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        del budget_nbytes, time_limit
        return Solution(close_over_dependencies(graph, graph.residuals[:1]), solver="price")


def test_nothing_is_refused_before_what_each_solver_takes_for_the_least() -> None:
    """The effort is exhausted, and what the second solver takes for the least fits, though the model says that it needs
    more than what the first one does.
    """
    graph = chain(12)
    peak = peak_of(graph, graph.residuals)

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        more = 0 if solution.solver == "price" else 10 * peak
        trial = a_trial(graph, set(solution.schedule.saved), 0.1)
        return replace(trial, solution=solution, fence=fence, peak_nbytes=trial.peak_nbytes + more)

    search = searching(graph, Prefixes(), compiled, 10 * peak)
    search.ledger.of_least = (search.ledger.solver, Price())
    search.effort.compilations = 1000
    trial = search.within(peak - 1, 0)
    assert trial is not None
    assert trial.solution.solver == "price"


def test_a_solver_that_runs_out_of_time_does_no_worse_than_before() -> None:
    graph = chain(12)
    least, most = peak_of(graph), peak_of(graph, graph.residuals)
    low, high = least + (most - least) // 4, least + (most - least) // 2
    ledger = Ledger(Starved(), Effort(), 1.0)

    def saved(graph: Graph, allowance: int) -> frozenset[int]:
        return ledger.within(graph, allowance).schedule.saved

    first = saved(graph, low)
    assert 0 < len(first) < 12
    assert saved(graph, high) == first
    assert not saved(graph, least), "that fits no longer"
    assert not saved(replace(graph), high), "that is another graph's"


def test_the_next_prediction_lies_between_what_fits_and_what_exceeds_the_budget() -> None:
    """What exceeds it though it was predicted to need less than something that fits says nothing of larger plans."""

    def tried(predicted: int, compiled: int) -> CompiledCandidate:
        trial = a_trial(chain(2), set(), 0.0)
        return replace(trial, profile=replace(trial.profile, peak_nbytes=predicted), peak_nbytes=compiled)

    assert next_allowance([tried(100, 110)], 90) == 78
    assert next_allowance([tried(100, 110), tried(78, 95)], 90) == 67
    assert next_allowance([tried(80, 85)], 90) == 90
    assert next_allowance([tried(88, 85)], 90) == 93
    assert next_allowance([tried(60, 80), tried(100, 100)], 90) == 80
    assert next_allowance([tried(60, 80), tried(100, 100), tried(80, 96)], 90) == 66
    assert next_allowance([tried(70, 110), tried(80, 85)], 90) == 90
    assert next_allowance([tried(80, 85), tried(70, 110)], 90) == 90


def test_of_plans_that_cost_about_the_same_that_of_the_fewest_stages_is_tried() -> None:
    """Its kernels may be fewer; that it needs more memory says nothing where both fit, and decides where none does."""
    graph = chain(6)
    fine, coarse = Candidate(graph), Candidate(replace(graph, stages=uncut(graph)))
    assert len(fine.graph.stages) > len(coarse.graph.stages)
    for seconds, peak, fits, found in (
        (1.0, 12, 0.0, coarse), (1.05, 12, 0.0, coarse), (1.2, 8, 0.0, fine), (1.05, 8, 1.0, fine),
    ):  # fmt: skip
        fine.order, coarse.order = (0.0, 1.0, 10), (fits, seconds, peak)
        assert cheapest([fine, coarse], 0.1) is cheapest([coarse, fine], 0.1) is found
    fine.order, coarse.order = (1.0, 10, 1.0), (1.0, 12, 0.5)
    assert cheapest([fine, coarse], 0.1) is fine
    assert cheapest([], 0.1) is None


@pytest.mark.parametrize("more", [0, 10**12], ids=["slower than predicted", "and larger"])
def test_what_host_memory_gives_is_never_worse_than_what_is_found_without(more: int) -> None:
    """By the model what is away costs nothing; the compiler says a step's time, and here more memory too."""
    graph = replace(layers(8, link=64.0), platform="gpu")
    tried: list[tuple[bool, int]] = []
    plain = peak_of(graph, graph.residuals)

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        away = bool(solution.schedule.offloaded)
        tried.append((away, len(graph.stages)))
        profile = simulate(graph, solution.schedule)
        trial = a_trial(graph, set(), profile.extra_seconds / graph.step_seconds + away)
        peak = profile.peak_nbytes + more * away
        return replace(trial, solution=solution, profile=profile, fence=fence, peak_nbytes=peak)

    trial = searching(graph, Milp(), compiled).within(int(0.7 * plain), 3)
    assert trial is not None
    assert not trial.solution.schedule.offloaded
    assert trial.compiled_overhead is not None and trial.compiled_overhead < 1.0
    assert tried == sorted(
        tried, key=lambda each: each[0]
    )  # those without come first, as if there were no others
    with_it, tried = tried, []
    bare = searching(replace(graph, host=None), Milp(), compiled).within(int(0.7 * plain), 3)
    assert bare is not None and bare.seconds == trial.seconds
    assert tried == [each for each in with_it if not each[0]]


@pytest.mark.parametrize(("share", "dear"), [(0.98, False), (0.6, True)])
def test_where_host_memory_is_spared_few_plans_with_it_are_tried_and_only_where_others_take_longer(
    share: float, dear: bool
) -> None:
    """Copies hide behind the kernels."""
    graph = replace(layers(24, link=64.0), platform="gpu")
    plain = peak_of(graph, graph.residuals)
    assert graph.host is not None

    def searched(graph: Graph) -> tuple[CompiledCandidate, int, int]:
        tried: list[bool] = []

        def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
            tried.append(graph.host is not None)
            profile = simulate(graph, solution.schedule)
            trial = a_trial(graph, set(), profile.extra_seconds / graph.step_seconds)
            return replace(
                trial, solution=solution, profile=profile, fence=fence, peak_nbytes=profile.peak_nbytes
            )

        found = searching(graph, Milp(), compiled).within(int(share * plain), 3)
        assert found is not None
        return found, sum(tried), len(tried) - sum(tried)

    without, _, others = searched(replace(graph, host=None))
    assert ((without.compiled_overhead or 0.0) > HOST_WORTH) == dear
    found, with_host, known = searched(replace(graph, host=graph.host._replace(sparing=True)))
    assert known == others and with_host <= max(HOST_MORE * (known + 2), 1)
    assert bool(with_host) == bool(found.solution.schedule.offloaded) == dear
    assert found.seconds < without.seconds if dear else found.seconds == without.seconds


def test_a_brief_search_compiles_no_schedule_of_least_memory_that_cannot_fit() -> None:
    graph = chain(12)
    least = peak_of(graph)
    tried: list[int] = []

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        tried.append(simulate(graph, solution.schedule).peak_nbytes)
        return replace(a_trial(graph, set(), 0.0), solution=solution, fence=fence, graph=graph)

    search = searching(graph, Milp(), compiled, least)
    assert search.within(least // 2, 3, briefly=True) is None and not tried
    known, solution = search.least_known()
    assert simulate(known, solution.schedule).peak_nbytes <= least
    assert search.within(least // 2, 3) is None and tried


@pytest.mark.parametrize("more", [0, 10**12], ids=["slower than predicted", "and larger"])
def test_what_copies_in_fewer_bits_give_is_never_worse_than_what_is_found_without(more: int) -> None:
    """By the model a copy takes a quarter of the memory; the compiler says a step's time, and here more memory too."""
    graph, codes = replace(chain(8), platform="gpu"), (1,)
    form = Variant.of_rule(COPIES, {0: codes})
    smaller = [replace(v, nbytes=v.nbytes // 4) for v in graph.values]
    copied = replace(graph, form=form, values=tuple(smaller))
    able = replace(NONE, others=(Sites(COPIES, {(0, codes): Estimate(10**6)}, exact=False),))
    tried: list[bool] = []
    least, plain = peak_of(graph), peak_of(graph, graph.residuals)
    budget = (least + plain) // 2

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        rounds = bool(graph.form)
        tried.append(rounds)
        profile = simulate(graph, solution.schedule)
        trial = a_trial(graph, set(), profile.extra_seconds / graph.step_seconds + rounds)
        peak = profile.peak_nbytes + more * rounds
        return replace(trial, solution=solution, profile=profile, fence=fence, peak_nbytes=peak)

    def search(able: Variants) -> CompiledCandidate | None:
        return searching(Space(graph, able, {form: copied}), Milp(), compiled).within(budget, 3)

    trial = search(able)
    assert trial is not None
    assert not trial.graph.form
    assert True in tried
    assert tried == sorted(tried)  # those without come first, as if there were no others
    with_them, tried = tried, []
    bare = search(NONE)
    assert bare is not None and bare.seconds == trial.seconds
    assert tried == [each for each in with_them if not each]


class Stubborn:
    """Saves the first 30 residuals within any allowance, and nothing for the least memory."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        del time_limit
        return Solution(close_over_dependencies(graph, () if budget_nbytes is None else graph.residuals[:30]))


def test_between_a_slow_plan_and_one_that_nearly_fits_the_search_goes_on() -> None:
    """What saves more than 20 values misses by one byte, whatever is asked for; the least memory costs three steps."""
    graph = replace(chain(40), platform="gpu")
    graph = replace(  # so that minimum cuts drop one after the other
        graph, nodes=tuple(replace(n, seconds=n.seconds * (1 + 0.5 * (n.id % 7))) for n in graph.nodes)
    )
    budget = peak_of(graph, graph.residuals[:30])

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        trial = compiled_dearly(graph, solution, fence)
        return replace(trial, peak_nbytes=budget + (1 if len(solution.schedule.saved) > 20 else -1))

    search = searching(graph, Stubborn(), compiled, 10**6 * UNIT)
    trial = search.within(budget, 1)
    assert any(t.compiled_overhead == 3.0 for t in search.ledger.compiled)
    assert trial is not None and trial.peak_nbytes <= budget
    assert trial.compiled_overhead == 0.1
    assert trial.solution.schedule.saved < search.ledger.compiled[0].solution.schedule.saved


@pytest.mark.parametrize("temporaries, scores, logits, deeper", [(1000, 990, 8, True), (10, 5, 0.1, False)])
def test_scores_of_long_sequences_hide_no_logits(
    temporaries: int, scores: int, logits: float, deeper: bool
) -> None:
    """About the least memory is what is within a share of what the plain step needs, unless that is a large part of
    what is left: attention's scores of long sequences are hundreds of times all else.
    """
    graph = chain(4)
    attention = Sites(ATTENTION, {(0, (2,)): Estimate(scores * UNIT, 0.0)})
    rows = Sites(ROWS, {(0, (8,)): Estimate(int(logits * UNIT), 0.1)})
    able = Variants(NONE.loops, (attention, rows))
    without, both = able.deepest()
    made = {variant: replace(graph, form=variant) for variant in (without, both)}
    source = CandidateSource(Space(graph, able, made), Milp(), 10.0, temporaries * UNIT)
    source.make_lowest(1.0)
    assert {each.form for each in source.made} == {PLAIN, without, *([both] if deeper else [])}


def test_levels_alone_are_left_where_those_with_rows_in_chunks_turn_out_slow() -> None:
    graph = chain(4)
    loops = Loops((64,), (((), (8, 8), (4, 4, 4)),), (UNIT,), (0.1,), ((0, 0.0),))
    rows = Sites(ROWS, {(0, (8,)): Estimate(500 * UNIT, 0.1, divided=((0, 8),))})
    able = Variants(loops, (rows,))
    made = {variant: replace(graph, form=variant) for variant in able.deepest()}
    source = CandidateSource(Space(graph, able, made), Milp(), 10.0, 1000 * UNIT)
    source.make_lowest(1.0)
    assert of_levels((4, 4, 4)).also(*of_chunks(8).choices) in {each.form for each in source.made}
    source.shallower = source.shallower[-1:]
    assert source.shallower == [of_levels((4, 4, 4))]


@pytest.mark.parametrize("apart", [True, False])
def test_schedules_of_many_times_the_least_memory_are_not_compiled(apart: bool) -> None:
    """However large the plain step is: scores of long sequences are hundreds of times all else. The model errs by more
    than all on what it takes for the least.
    """
    large, small = chain(80), replace(chain(2 if apart else 60), form=of_chunks(4))
    compiled_forms = []

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        compiled_forms.append(graph.form)
        trial = a_trial(graph, set(solution.schedule.saved), 0.1)
        more = 0 if graph.form == PLAIN else 100 * UNIT
        return replace(trial, solution=solution, fence=fence, peak_nbytes=trial.peak_nbytes + more)

    search = searching(large, SaveAll(), compiled, 10**6 * UNIT)
    search.source.made = [large, small]
    search.ledger.of_least = (SaveAll(),)
    assert (search.lowest().graph.form == small.form) == apart
    assert (PLAIN in compiled_forms) != apart


@pytest.mark.parametrize("error", [-2, 0, 10])
def test_for_the_least_memory_nothing_is_compiled_that_is_less_only_by_errors_as_never_before(
    error: int,
) -> None:
    """All need as much more than predicted. The model may be right of another variant, and of more stages, but not of
    fewer.
    """
    sizes = {PLAIN: 20, of_chunks(2): 25, of_chunks(4): 40}
    graphs = [replace(chain(n), form=form, platform="gpu", step_seconds=1000.0) for form, n in sizes.items()]
    first, *others = graphs
    coarse = replace(chain(22), platform="gpu", step_seconds=1000.0)
    coarse = replace(coarse, stages=uncut(coarse))
    fine = replace(chain(24), platform="gpu", step_seconds=1000.0)
    assert len(coarse.stages) < len(first.stages) < len(fine.stages)
    tried: list[int] = []

    def compiled(graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        trial = a_trial(graph, set(solution.schedule.saved), 0.1)
        tried.append(len(graph.residuals))
        peak = trial.peak_nbytes + error * UNIT
        return replace(trial, solution=solution, fence=fence, peak_nbytes=peak)

    search = searching(first, SaveAll(), compiled, 10**6 * UNIT)
    search.source.made = [first, coarse, fine, *others]
    search.ledger.of_least = (search.ledger.solver,)
    assert search.lowest().graph is first
    assert tried == [20, *([24, 25] if error > 0 else [])]


def test_a_slower_form_is_compiled_only_if_nothing_faster_would_be_taken_beside_it() -> None:
    """It promises less than what was compiled, but not so much less that the faster is about the least no more."""
    graph = replace(chain(12), step_seconds=10000.0)
    search = searching(graph, Prefixes(), compiled_dearly, 10**9)
    trial = a_trial(graph, set(), None)
    search.ledger.compiled = [replace(trial, peak_nbytes=trial.peak_nbytes + 100)]
    much = (trial.peak_nbytes - graph.base_nbytes) // 2
    for less, slower, hopeless in ((0, 0.1, True), (much, 0.1, False), (0, -0.1, False)):
        other = replace(graph, form=of_chunks(4), base_nbytes=graph.base_nbytes - less)
        other = replace(other, extra_seconds=slower * graph.step_seconds)
        assert search._hopeless(other, trial.solution, search.ledger.solver) == hopeless


def test_a_schedule_closes_a_gap_as_far_as_it_needs_less_and_takes_less() -> None:
    """Of 100 bytes and half a step's time: halfway on a straight line a quarter, and what is as slow as the smaller
    plan, or as large as the larger one, nothing.
    """
    graph = replace(chain(6), platform="gpu")
    gap = Gap(100, 0.75, 200, 0.25)
    assert gap.middle_nbytes == 150
    closed = {
        (150, 0.5): 0.25,
        (120, 0.25): 0.8,
        (90, 0.5): 0.55,
        (150, 0.75): 0,
        (200, 0.3): 0,
        (250, 0.9): 0,
    }
    for (nbytes, overhead), share in closed.items():
        made = replace(a_trial(graph, set(), overhead), peak_nbytes=nbytes)
        assert gap.closed_by(made) == pytest.approx(share * gap.size)


def test_between_others_the_error_of_the_nearest_on_either_side_is_expected() -> None:
    graph = chain(6)
    made = a_trial(graph, set(), 0.1).round
    sides = ((1000, 40), (1300, 100), (5000, 0))
    rounds = [replace(made, compiled_peak_nbytes=n, predicted_peak_nbytes=n - more) for n, more in sides]
    ledger = Ledger(Prefixes(), Effort(), 1.0, rounds=rounds)
    expected = {1000: 40, 1100: 60, 1200: 80, 900: 40, 1600: 100, 3000: 0}
    assert {n: ledger.beyond_nbytes(graph.form, n, 500) for n in expected} == expected
    assert ledger.beyond_nbytes(of_chunks(2), 1100, 500) == 0
