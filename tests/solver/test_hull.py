"""The convex hull of memory against time, found by pricing memory, against brute force."""

import math
from itertools import pairwise

import pytest
from graphs import blocks, chain, diamond
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import graphs
from test_solvers import TIME_LIMIT, free

from jaxremat import Graph, MinCut, Solution, close_over_dependencies, simulate
from jaxremat._model._schedule import check
from jaxremat._solver._hull import Lagrangian, Priced, cheapest, hull, vertex
from jaxremat._solver._milp import Milp
from jaxremat.testing import frontier, subsets

NEAR = 1e-7


def corners(best: dict[int, float]) -> list[tuple[int, float]]:
    """The lower convex hull of all (peak, seconds), by rising peak, as far as seconds fall."""
    points: list[tuple[int, float]] = []
    for peak, seconds in sorted(best.items()):
        if points and seconds >= points[-1][1]:
            continue
        while len(points) > 1:
            (p, s), (q, t) = points[-2:]
            if (t - s) * (peak - p) < (seconds - s) * (q - p):
                break
            points.pop()
        points.append((peak, seconds))
    return points


def ends(graph: Graph) -> tuple[Solution, Solution]:
    least = Milp(gap=0.0).solve(graph, None, time_limit=TIME_LIMIT)
    return Solution(close_over_dependencies(graph, graph.residuals)), least


@given(graphs(most_nodes=6), st.floats(-3, 3))
def test_at_a_price_milp_equals_brute_force(graph: Graph, power: float) -> None:
    assume(1 <= len(free(graph)) <= 6)
    best = frontier(graph)
    price = 10.0**power * graph.step_seconds / max(best)
    optimum = min(seconds + price * peak for peak, seconds in best.items())
    start = close_over_dependencies(graph, graph.residuals)
    solution = Milp(gap=0.0).priced(graph, price, start, time_limit=TIME_LIMIT)
    cost = Lagrangian(graph, price).order(check(graph, solution.schedule))[1]
    slack = NEAR * optimum + 128 * price  # the program overlooks 64 bytes
    assert solution.proven
    assert cost == pytest.approx(optimum, abs=slack)
    assert optimum - slack <= solution.lower_bound * graph.step_seconds <= cost + slack


@pytest.mark.parametrize(
    "graph", [chain(6), chain(5, seconds=[8.0, 1.0, 4.0, 1.0, 2.0]), blocks(3), diamond()]
)
def test_the_hull_of_known_graphs(graph: Graph) -> None:
    """With solves enough, every corner is found, and no schedule lies below a bound."""
    solver, best = Milp(gap=0.0), frontier(graph)
    schedules = [close_over_dependencies(graph, saved) for saved in subsets(free(graph))]
    order = Lagrangian(graph, 1e3).order
    plain, least = (
        vertex(graph, Solution(s))
        for s in (close_over_dependencies(graph, graph.residuals), min(schedules, key=order))
    )
    found, bounds = hull(
        (plain, least), lambda price, edge: cheapest([graph], solver, price, edge, TIME_LIMIT), 20
    )
    want = [(peak, pytest.approx(seconds)) for peak, seconds in corners(best)]
    assert [(v.peak_nbytes, v.seconds) for v in found] == want[::-1]
    for price, seconds in bounds:
        assert all(s >= seconds - price * (peak + 128) - NEAR for peak, s in best.items())
    for a, b in pairwise(found):
        assert a.peak_nbytes > b.peak_nbytes


@settings(max_examples=15)
@given(graphs(most_nodes=6))
def test_no_solution_within_a_budget_lies_below_the_bounds(graph: Graph) -> None:
    assume(1 <= len(free(graph)) <= 6)
    solver = Milp(gap=0.0)
    plain, least = (vertex(graph, solution) for solution in ends(graph))
    assume(least.peak_nbytes < plain.peak_nbytes)
    found, bounds = hull(
        (plain, least), lambda price, edge: cheapest([graph], solver, price, edge, TIME_LIMIT), 6
    )
    slopes = [(b.seconds - a.seconds) / (a.peak_nbytes - b.peak_nbytes) for a, b in pairwise(found)]
    assert all(a <= b * (1 + NEAR) + 1e-12 for a, b in pairwise(slopes)), "the vertices are not convex"
    for i in range(5):
        budget = least.peak_nbytes + (plain.peak_nbytes - least.peak_nbytes) * i // 4
        solution = solver.solve(graph, budget, time_limit=TIME_LIMIT)
        profile = simulate(graph, solution.schedule)
        if not solution.schedule.kept:
            for price, seconds in bounds:
                assert profile.extra_seconds >= seconds - price * (profile.peak_nbytes + 128) - NEAR


def test_a_cut_is_priced_without_a_proof() -> None:
    graph = chain(8)
    start = close_over_dependencies(graph, graph.residuals)
    for solver in (MinCut(), Milp()):
        assert isinstance(solver, Priced)
    costs = []
    for price in (0.0, 1e-7, 1e-6, 1e-5):
        solution = MinCut().priced(graph, price, start, time_limit=TIME_LIMIT)
        order = Lagrangian(graph, price).order
        assert order(check(graph, solution.schedule)) <= order(start)
        assert solution.lower_bound == 0.0 and not solution.proven
        costs.append(order(start)[1] - order(solution.schedule)[1])
    assert costs[0] == 0.0 < costs[-1] < math.inf
