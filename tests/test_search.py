"""Which of several compiled plans is taken."""

from dataclasses import replace
from typing import Any

import pytest
from graphs import chain

from jaxremat import Graph, Milp, Solution, complete, simulate
from jaxremat._search import MORE_ROUNDS, Search
from jaxremat._trial import Trial
from jaxremat._verify import dear


def a_trial(graph: Graph, saved: set[int], compiled_overhead: float) -> Trial:
    schedule = complete(graph, saved)
    profile = simulate(graph, schedule)
    compiled: Any = None
    return Trial(
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
    """The plan that the model takes for the cheaper one has the dearer kernels."""
    graph = replace(chain(6), platform=platform)
    search = Search(graph, Milp(), 1.0, a_trial, 0)  # type: ignore[arg-type]  # nothing is compiled here
    by_model = a_trial(graph, set(graph.residuals[:4]), 0.3)
    by_kernels = a_trial(graph, set(graph.residuals[:2]), 0.1)
    assert by_model.profile.extra_seconds < by_kernels.profile.extra_seconds
    search.trials += [by_model, by_kernels]
    assert search.best(10**12) is (by_kernels if platform == "gpu" else by_model)


class Prefixes:
    """Saves as many of the first residuals as the allowance has room for."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        del time_limit
        found = complete(graph, ())
        for k in range(1, len(graph.residuals) + 1 if budget_nbytes is not None else 0):
            more = complete(graph, graph.residuals[:k])
            if simulate(graph, more).peak_nbytes <= (budget_nbytes or 0):
                found = more
        return Solution(found)


def compiled_dearly(graph: Graph, solution: Solution, fence: str) -> Trial:
    """What saves nothing takes four times as long; the others need more memory than the model says."""
    del fence
    saved = set(solution.schedule.saved)
    trial = a_trial(graph, saved, 0.1 if saved else 3.0)
    return replace(trial, solution=solution, peak_nbytes=trial.peak_nbytes + (150 if saved else 0))


def test_a_plan_that_costs_several_steps_is_not_the_answer_where_there_is_another() -> None:
    graph = replace(chain(12), platform="gpu")
    least, most = (simulate(graph, complete(graph, v)).peak_nbytes for v in ((), graph.residuals))
    budget = (least + most) // 2 + 150
    search = Search(graph, Prefixes(), 1.0, compiled_dearly, 0)
    trial = search.within(budget, -MORE_ROUNDS)  # nothing but the schedules of least memory at first
    assert search.trials[0].compiled_overhead == 3.0
    assert search.trials[0].peak_nbytes <= budget
    assert trial is not None
    assert trial.compiled_overhead == 0.1
    assert trial.peak_nbytes <= budget
    assert dear(search, trial) == ""


def test_it_is_the_answer_where_there_is_none_and_says_so() -> None:
    graph = replace(chain(12), platform="gpu")
    search = Search(graph, Prefixes(), 1.0, compiled_dearly, 0)
    budget = simulate(graph, complete(graph, ())).peak_nbytes
    assert simulate(graph, complete(graph, graph.residuals[:1])).peak_nbytes + 150 > budget
    trial = search.within(budget, 3)
    assert trial is not None
    assert trial.compiled_overhead == 3.0
    assert "takes 4.0 times the plain step's time" in dear(search, trial)
    search.trials.append(a_trial(graph, set(graph.residuals), 0.1))
    assert "1.1 times with" in dear(search, trial)
    assert search.within(budget - 1, 0) is None


def test_what_all_need_beyond_their_prediction_is_kept_free_by_those_not_compiled_yet() -> None:
    """Of three cuttings into stages the two others begin within what the first one's error leaves."""
    graph = chain(12)
    least, most = (simulate(graph, complete(graph, v)).peak_nbytes for v in ((), graph.residuals))
    budget, beyond = (least + most) // 2, (most - least) // 8

    def compiled(graph: Graph, solution: Solution, fence: str) -> Trial:
        trial = compiled_dearly(graph, solution, fence)
        return replace(trial, peak_nbytes=trial.profile.peak_nbytes + beyond)

    search = Search(graph, Prefixes(), 1.0, compiled, 0)
    search.cuttings = [replace(graph, small_nbytes=n) for n in range(3)]
    lines: list[Any] = []
    first = search._next(lines, budget)
    assert first is not None
    assert [line.allowance for line in lines] == [budget] * 3
    search._advance(first, budget)
    search._next(lines, budget)
    assert [line.allowance for line in lines if line is not first] == [budget - beyond] * 2


def test_compiled_peaks_that_follow_slowly_are_not_given_up_for_the_least_memory() -> None:
    """A quarter of what a prediction is lowered by comes off the compiled peak, and there are few rounds."""
    graph = replace(chain(40), step_seconds=2000.0)  # so that even the least memory is bearable
    least, most = (simulate(graph, complete(graph, v)).peak_nbytes for v in ((), graph.residuals))

    def compiled(graph: Graph, solution: Solution, fence: str) -> Trial:
        trial = compiled_dearly(graph, solution, fence)
        return replace(trial, peak_nbytes=(trial.profile.peak_nbytes + 3 * most) // 4)

    budget = least + (most - least) * 7 // 8
    best = Search(graph, Prefixes(), 1.0, compiled, 0).within(budget, 3)
    assert best is not None and best.peak_nbytes <= budget
    assert best.peak_nbytes > budget - (most - least) // 10, "more is recomputed than the budget asks for"
