"""The integer program with values in host memory: against brute force, and against itself without."""

import itertools
from dataclasses import replace

import pytest
from graphs import in_loops
from test_host_copies import layers, looped

from jaxremat import Graph, Milp, close_over_dependencies, simulate
from jaxremat._model._schedule import check
from jaxremat._solver._host_link import HostFirst, only_needed


def cheapest(graph: Graph) -> dict[int, float]:
    """For each peak the least seconds of the schedules that have it, of all that hold nothing across stages."""
    best: dict[int, float] = {}
    for count in range(len(graph.residuals) + 1):
        for saved in itertools.combinations(graph.residuals, count):
            for away_count in range(count + 1):
                for away in itertools.combinations(saved, away_count):
                    profile = simulate(graph, close_over_dependencies(graph, saved, (), away))
                    seconds = best.get(profile.peak_nbytes, profile.extra_seconds)
                    best[profile.peak_nbytes] = min(seconds, profile.extra_seconds)
    return best


@pytest.mark.parametrize("link", [0.5, 1.0, 2.0, 4.0])
def test_the_integer_program_is_near_the_best_of_all_choices(link: float) -> None:
    """Near: copies end a little later than the rows know, so that a budget's last bytes may be left."""
    graph = layers(5, link)
    best = cheapest(graph)
    alone = replace(graph, host=None)
    for budget in sorted(best)[1::2]:
        solution = Milp(gap=0.0).solve(graph, budget, time_limit=10.0)
        profile = simulate(graph, check(graph, solution.schedule))
        assert profile.peak_nbytes <= budget
        least = min(seconds for peak, seconds in best.items() if peak <= budget)
        without = simulate(alone, Milp(gap=0.0).solve(alone, budget, time_limit=10.0).schedule)
        assert profile.extra_seconds <= least + 1.0 + 1e-9  # one layer
        if without.peak_nbytes <= budget:
            assert profile.extra_seconds <= without.extra_seconds + 1e-9
        assert solution.lower_bound * graph.step_seconds <= least + 1e-9


def test_what_is_away_costs_nothing_where_the_link_is_fast() -> None:
    graph = layers(8, link=8.0)
    plain = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes
    for solver in (Milp(), HostFirst()):
        schedule = solver.solve(graph, int(0.6 * plain), time_limit=10.0).schedule
        profile = simulate(graph, schedule)
        assert schedule.offloaded and not any(schedule.recomputed)
        assert profile.peak_nbytes <= 0.6 * plain and profile.extra_seconds == 0.0


def test_the_host_has_no_more_than_its_room() -> None:
    graph = layers(8, link=8.0, nbytes=8 * 2**20)
    plain = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes
    schedule = Milp().solve(graph, int(0.6 * plain), time_limit=10.0).schedule
    assert simulate(graph, schedule).peak_nbytes <= 0.6 * plain
    assert sum(graph.values[v].nbytes for v in schedule.away) <= 8 * 2**20


def test_the_host_makes_nothing_worse() -> None:
    graph = layers(8, link=8.0)
    alone = replace(graph, host=None)
    least = Milp().solve(graph, None, time_limit=10.0).schedule
    without = Milp().solve(alone, None, time_limit=10.0).schedule
    assert simulate(graph, least).peak_nbytes <= simulate(alone, without).peak_nbytes
    budget = simulate(alone, without).peak_nbytes + 2**20  # of the simulator's, not of the least's slack
    fast, slow = (simulate(g, Milp().solve(g, budget, time_limit=10.0).schedule) for g in (graph, alone))
    assert fast.extra_seconds == 0.0 < slow.extra_seconds


@pytest.mark.parametrize("link", [4.0, 8.0, 64.0])
@pytest.mark.parametrize("saved_seconds", [0.0, 0.25])
def test_stacks_of_loops_are_chosen_with_what_is_recomputed(link: float, saved_seconds: float) -> None:
    """Against all choices that hold nothing from one stage to the next: waits in loops are exact, nothing is left."""
    graph = in_loops(layers(4, link), 8, saved_seconds)
    best = cheapest(graph)
    assert any(close_over_dependencies(graph, graph.residuals, (), [v]).offloaded for v in graph.residuals)
    for budget in sorted(best)[::3]:
        solution = Milp(gap=0.0).solve(graph, budget, time_limit=10.0)
        profile = simulate(graph, check(graph, solution.schedule))
        assert profile.peak_nbytes <= budget
        least = min(seconds for peak, seconds in best.items() if peak <= budget)
        assert profile.extra_seconds <= least + 1e-6
        assert solution.lower_bound * graph.step_seconds <= least + 1e-6


def test_what_must_be_saved_of_a_loop_can_be_away() -> None:
    """What an iteration begins with may not be made again; the least memory has it in the host's."""
    graph = looped(4, link=64.0)
    fixed = replace(graph, nodes=tuple(replace(n, repeatable=n.id != 0) for n in graph.nodes))
    least = Milp().solve(fixed, None, time_limit=10.0).schedule
    without = Milp().solve(replace(fixed, host=None), None, time_limit=10.0).schedule
    assert fixed.nodes[0].outputs[0] in least.away
    assert simulate(fixed, least).peak_nbytes < simulate(fixed, without).peak_nbytes


def test_nothing_is_away_that_could_as_well_stay() -> None:
    graph = layers(8, link=64.0)
    everything = close_over_dependencies(graph, graph.residuals, (), graph.residuals)
    plain = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes
    assert not only_needed(graph, everything, plain).away
    needed = only_needed(graph, everything, plain - 1)
    assert len(needed.away) == 1 and simulate(graph, needed).peak_nbytes < plain
    assert not Milp().solve(graph, plain, time_limit=10.0).schedule.away
