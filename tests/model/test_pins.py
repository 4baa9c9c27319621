"""Pins in the graph: honoured by every solver, counted by the simulator, refused where they contradict something."""

import re
from dataclasses import replace
from typing import Any

import pytest
from graphs import SOLVERS, UNIT, Builder, blocks, chain, unrepeatable
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import graphs

from jaxremat import (
    Graph,
    HintError,
    Pin,
    SolverError,
    close_over_dependencies,
    simulate,
)
from jaxremat._model._pins import matching, parse_pins, with_pins
from jaxremat._model._schedule import check, must_save
from jaxremat._model._stages import cut_stages
from jaxremat._solver._milp import Milp
from jaxremat.testing import frontier, least_seconds


def pinned(graph: Graph, **at: list[int]) -> Graph:
    graph = with_pins(
        graph, [Pin(action, i, f"hint {action} {i}") for action, ids in at.items() for i in ids]
    )
    return replace(graph, stages=cut_stages(graph)) if "stage" in at else graph


def draw_pins(data: st.DataObject, graph: Graph) -> Graph:
    able = [v.id for v in graph.values if graph.recomputable(v.id)]
    chosen = data.draw(st.lists(st.sampled_from(able), unique=True, max_size=4)) if able else []
    pins = [
        Pin(data.draw(st.sampled_from(["save", "recompute", "offload"])), v, f"pin of {v}") for v in chosen
    ]
    return with_pins(graph, pins)


def assert_honoured(graph: Graph, solver: Any, budget: int | None) -> None:
    schedule = check(graph, solver.solve(graph, budget, time_limit=10.0).schedule)
    again = {n for nodes in schedule.recomputed for n in nodes}
    for pin in graph.pins:
        assert (pin.at in schedule.saved) == (pin.action != "recompute")
        if pin.action == "recompute":
            assert graph.values[pin.at].producer in again or not read_late(graph, pin.at)


def read_late(graph: Graph, value: int) -> bool:
    return any(value in graph.needs(k) for k in range(len(graph.stages)))


@settings(max_examples=60)
@given(st.data())
def test_pins_are_honoured_whatever_the_solver(data: st.DataObject) -> None:
    graph = draw_pins(data, data.draw(graphs(most_nodes=6)))
    assume(graph.pins)
    plain = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes
    solver = SOLVERS[data.draw(st.sampled_from(sorted(SOLVERS)))]
    for budget in (None, 1, plain, 2 * plain, (plain + graph.base_nbytes) // 2):
        assert_honoured(graph, solver, budget)


@settings(max_examples=25)
@given(st.data())
def test_milp_with_pins_equals_brute_force(data: st.DataObject) -> None:
    graph = draw_pins(data, data.draw(graphs(most_nodes=6)))
    free = [v for v in graph.residuals if v not in must_save(graph)]
    assume(graph.pins and 1 <= len(free) <= 6)
    best = frontier(graph)
    for budget in (*sorted(best)[:3], min(best) - 1):
        solution = Milp(gap=0.0).solve(graph, budget, time_limit=10.0)
        profile = simulate(graph, check(graph, solution.schedule))
        optimum = least_seconds(best, budget)
        assert solution.proven
        if optimum < float("inf"):
            assert profile.peak_nbytes <= budget
            assert profile.extra_seconds <= optimum + 1e-9
            assert solution.lower_bound * graph.step_seconds <= optimum + 1e-6


def test_small_values_and_results_are_recomputed_where_pinned() -> None:
    graph = pinned(replace(chain(5), small_nbytes=UNIT), recompute=[2, 4])
    assert must_save(graph) == {1, 3, 5}
    assert close_over_dependencies(graph, graph.residuals).saved == {1, 3, 5}
    assert close_over_dependencies(graph, graph.residuals).recomputed == ((), (3,), (), (1,), ())


def test_a_fused_value_that_is_saved_is_in_memory() -> None:
    """The second of a block's inner values lives inside kernels, and counts its own bytes once it is pinned."""
    graph = blocks(2)
    fused = next(v.id for v in graph.values if not v.materialised)
    assert fused not in graph.residuals
    saving = pinned(graph, save=[fused])
    assert saving.values[fused].materialised and fused in close_over_dependencies(saving, ()).saved
    assert_honoured(saving, Milp(), None)


def test_a_pin_on_what_nothing_needs_changes_nothing() -> None:
    build = Builder()
    (a,) = build.node([build.argument()], [4])
    (fused,) = build.node([a], [4], materialised=False, fusion_root=False)
    (loss,) = build.node([fused], [1], is_output=True)
    build.stage()
    build.node([a], [1], is_output=True)
    graph = build.graph()
    assert pinned(graph, save=[fused], recompute=[loss]) == graph
    assert pinned(graph, recompute=[0]) == graph  # an argument of the step


def test_a_window_too_narrow_still_reaches_what_is_never_saved() -> None:
    """With a window of one node the values that are recomputed are there only if they are recomputed themselves."""
    graph = pinned(chain(6), recompute=[1, 2, 3, 4, 5, 6])
    for budget in (None, 100 * UNIT):
        schedule = check(graph, Milp(variables=1).solve(graph, budget, time_limit=10.0).schedule)
        assert not schedule.saved


def test_a_stage_begins_where_it_is_pinned() -> None:
    plain = blocks(3)
    free = replace(plain, stages=cut_stages(plain))
    starts = {s.start for s in free.stages}
    inside = next(n for n in range(plain.forward_stop + 1, len(plain.nodes)) if n not in starts)
    graph = pinned(plain, stage=[inside])
    assert inside in {s.start for s in graph.stages}
    assert inside in {s.start for s in cut_stages(graph, fine=True)}
    check(graph, close_over_dependencies(graph, ()))
    with pytest.raises(
        SolverError, match=f"No stage begins at node {inside}, but hint stage {inside} asks for one"
    ):
        check(
            replace(graph, stages=free.stages),
            close_over_dependencies(replace(graph, stages=free.stages), ()),
        )


def test_a_solver_that_ignores_a_pin_is_refused() -> None:
    graph = pinned(chain(3), save=[1], recompute=[2])
    free = chain(3)
    with pytest.raises(
        SolverError, match=r"saves value 2, which contradicts hint recompute 2.*honours all pins"
    ):
        check(graph, close_over_dependencies(free, (1, 2, 3)))
    with pytest.raises(SolverError, match="does not save value 1, which contradicts hint save 1"):
        check(graph, close_over_dependencies(free, ()))


def test_pins_that_contradict_each_other_or_the_graph() -> None:
    with pytest.raises(
        HintError, match=r"hint save 2 contradicts hint recompute 2: .* u8\[1\] from dot_general"
    ):
        pinned(chain(3), save=[2], recompute=[2])
    with pytest.raises(
        HintError, match="hint recompute 2 cannot be honoured: `pure_callback` may run only once"
    ):
        pinned(unrepeatable(), recompute=[2])


def test_globs_stand_anywhere_in_a_path_and_end_within_a_component() -> None:
    graph = chain(3)
    scopes = ["jvp(Net)/Block_0/Dense_0", "jvp(Net)/Block_1/Dense_0", "jvp(jit(f))/Block_10"]
    nodes = tuple(
        replace(n, scope=scopes[n.id] if n.id < 3 else "transpose(jvp(Net))/Block_1") for n in graph.nodes
    )
    graph = replace(graph, nodes=nodes)

    def hit(pattern: Any, action: str = "save") -> list[int]:
        return [pin.at for pin in matching(graph, parse_pins({pattern: action}), True)]

    assert hit("Block_1") == [2]
    assert hit("Block_*") == [1, 2, 3]
    assert hit("Net/*/Dense_0") == [1, 2]
    assert hit("Net/Block_0/Dense_0/dot_general") == [1]
    assert hit("f/Block_10") == [3]
    assert hit(re.compile("Block_1$|Block_0")) == [1]
    assert hit(re.compile("Block_1/")) == [2]
    assert hit("Block_1", "stage") == [3]
    with pytest.raises(HintError, match="Similar names are"):
        hit("Net/Dense_0")
