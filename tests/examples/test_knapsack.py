"""The knapsack of the benchmarks: as good as trying every set, and a solver like the others."""

import itertools
from dataclasses import replace

import pytest
from graphs import UNIT, Builder, blocks, chain, peak_of

from examples.benchmarks.knapsack import RATIOS, Knapsack, chosen
from jaxremat import Graph, Solver, close_over_dependencies, simulate
from jaxremat._model._schedule import check


def uneven() -> Graph:
    """Seven residuals of several sizes and prices, each read by a backward node of its own."""
    made = Builder()
    x = made.argument()
    values = []
    for size, seconds in ((1, 2.0), (3, 4.0), (4, 5.0), (5, 7.0), (9, 1.0), (2, 2.5), (6, 6.0)):
        (x,) = made.node([x], [size], seconds=seconds)
        values.append(x)
    made.stage()
    (g,) = made.node([x])
    for v in reversed(values):
        (g,) = made.node([v, g])
    return made.graph()


def worth(graph: Graph, saved: list[int]) -> float:
    return sum(graph.nodes[graph.values[v].producer].seconds for v in saved)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
def test_no_set_of_values_within_the_ratio_is_worth_more(ratio: float) -> None:
    graph = uneven()
    sizes = {v: graph.values[v].nbytes for v in graph.residuals}
    # Bytes are counted in ten thousandths, rounded up: what fits exactly may be out of reach by that much.
    room = ratio * sum(sizes.values())
    saved = chosen(graph, ratio)
    assert sum(sizes[v] for v in saved) <= room
    within = [
        list(some)
        for count in range(len(sizes) + 1)
        for some in itertools.combinations(sizes, count)
        if sum(sizes[v] for v in some) <= room * (1 - (ratio < 1) * len(sizes) / 10_000)
    ]
    assert len(within) > (ratio > 0)
    assert worth(graph, saved) >= max(worth(graph, some) for some in within)


def test_the_ends_are_everything_and_nothing() -> None:
    graph = uneven()
    assert sorted(chosen(graph, 1.0)) == list(graph.residuals)
    assert chosen(graph, 0.0) == []


@pytest.mark.parametrize("graph", [uneven(), blocks(3), chain(12)], ids=["uneven", "blocks", "chain"])
def test_the_largest_ratio_that_fits_is_taken(graph: Graph) -> None:
    solver: Solver = Knapsack()
    peaks = [peak_of(graph, chosen(graph, ratio)) for ratio in RATIOS]
    for budget in {*peaks, max(peaks) + UNIT}:
        solution = solver.solve(graph, budget, time_limit=1.0)
        check(graph, solution.schedule)
        assert solution.solver == "knapsack"
        first = next(i for i, peak in enumerate(peaks) if peak <= budget)
        assert solution.schedule == close_over_dependencies(graph, chosen(graph, RATIOS[first]))
    least = solver.solve(graph, None, time_limit=1.0)
    assert simulate(graph, least.schedule).peak_nbytes == min(peaks)
    assert solver.solve(graph, min(peaks) - 1, time_limit=1.0) == least


def test_a_given_ratio_is_taken_whatever_the_budget() -> None:
    graph = uneven()
    for budget in (None, 1, 2**40):
        schedule = Knapsack(0.5).solve(graph, budget, time_limit=1.0).schedule
        assert schedule == close_over_dependencies(graph, chosen(graph, 0.5))


def test_values_that_may_run_only_once_are_no_items() -> None:
    graph = uneven()
    once = graph.values[graph.residuals[0]].producer
    nodes = tuple(replace(n, repeatable=n.id != once) for n in graph.nodes)
    graph = replace(graph, nodes=nodes)
    assert graph.residuals[0] not in chosen(graph, 1.0)
    assert graph.residuals[0] in Knapsack(0.0).solve(graph, None, time_limit=1.0).schedule.saved
