"""The laws of handing recomputed values on."""

from graphs import UNIT, blocks
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

from jaxremat import Graph, close_over_dependencies, simulate
from jaxremat._model._schedule import check
from jaxremat._model._simulate import extra_seconds, rank
from jaxremat._solver._frontiers import hold


@given(graphs(most_nodes=10), st.floats(0, 1))
def test_holding_never_costs_time_and_never_breaks_the_budget(graph: Graph, share: float) -> None:
    schedule = close_over_dependencies(graph, ())
    least = simulate(graph, schedule).peak_nbytes
    budget = int(least + share * 4 * UNIT)
    held = check(graph, hold(graph, schedule, budget))
    assert held.saved == schedule.saved
    assert rank(graph, held, budget) <= rank(graph, schedule, budget)


def test_holding_saves_what_two_stages_recompute() -> None:
    graph = blocks(3)
    schedule = close_over_dependencies(graph, ())
    ample = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes * 2
    assert extra_seconds(graph, hold(graph, schedule, ample)) < extra_seconds(graph, schedule)
