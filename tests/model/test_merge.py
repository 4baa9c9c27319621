"""The laws of merging stages that recompute nothing, and of handing recomputed values on."""

from graphs import UNIT, blocks, chain
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

from jaxremat import Graph, close_over_dependencies, simulate
from jaxremat._model._schedule import check
from jaxremat._model._simulate import extra_seconds, rank
from jaxremat._model._stage_merging import merged
from jaxremat._solver._frontiers import hold


@given(graphs(most_nodes=10), st.data())
def test_merging_changes_neither_what_is_saved_nor_what_is_recomputed(
    graph: Graph, data: st.DataObject
) -> None:
    saved = data.draw(st.sets(st.sampled_from(graph.residuals))) if graph.residuals else set()
    schedule = close_over_dependencies(graph, saved)
    fewer, same = merged(graph, schedule)
    assert same.saved == schedule.saved
    assert [nodes for nodes in same.recomputed if nodes] == [nodes for nodes in schedule.recomputed if nodes]
    assert extra_seconds(fewer, same) <= extra_seconds(graph, schedule)  # more joins what is in its stage
    if not any(node.fusable_into for node in graph.nodes):
        assert extra_seconds(fewer, same) == extra_seconds(graph, schedule)
    if schedule.drops_nothing and not graph.loop_stop:
        assert fewer.stages == ()
    else:
        check(fewer, same)
        assert fewer.stages[0].start == graph.stages[0].start
        assert fewer.stages[-1].stop == len(graph.nodes)
        assert all(a.stop == b.start for a, b in zip(fewer.stages, fewer.stages[1:], strict=False))
        assert all(nodes for nodes in same.recomputed[1:])


def test_kept_values_stay_kept() -> None:
    graph = chain(6)
    schedule = close_over_dependencies(
        graph, (), {(v, k) for v in graph.residuals for k in range(1, len(graph.stages))}
    )
    assert schedule.kept
    fewer, same = merged(graph, schedule)
    check(fewer, same)
    assert simulate(fewer, same).extra_seconds == simulate(graph, schedule).extra_seconds


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
