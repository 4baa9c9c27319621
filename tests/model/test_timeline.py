"""Memory over the step's time, kept in few moments: what they show is what the simulator says."""

from dataclasses import replace
from typing import Any

import pytest
from graphs import UNIT, Builder, blocks, chain, peak_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import choices, graphs

from jaxremat import Graph, Stage, close_over_dependencies, simulate
from jaxremat._model._host_copies import HostMemory
from jaxremat._model._simulate import extra_seconds, play
from jaxremat._model._timeline import MOMENTS, Groups, module_path, numberless, timeline
from jaxremat._report._account import account, account_of_plain
from jaxremat._report._actions import actions


@given(graphs(), st.data())
def test_the_largest_moment_is_the_simulators_peak(graph: Graph, data: Any) -> None:
    schedule = close_over_dependencies(graph, *data.draw(choices(graph)))
    profile, groups = simulate(graph, schedule), Groups()
    run = timeline(graph, schedule, 1.0, groups)
    assert (run.peak.nbytes if run.peak else 0) == profile.peak_nbytes - graph.base_nbytes
    live = {event.live_nbytes for event in profile.events}
    assert {m.nbytes for m in run.moments} <= live
    assert [m.seconds for m in run.moments] == sorted(m.seconds for m in run.moments)
    scratch = {graph.nodes[n].workspace_nbytes for n in play(graph, schedule).nodes}
    listed = groups.listed()
    for m in run.moments:
        alive = sum(listed[group].nbytes * count for group, count in m.alive)
        assert alive <= m.forward_nbytes + m.recomputed_nbytes + m.backward_nbytes
        assert m.scratch_nbytes in scratch
    assert 0 <= run.forward_seconds <= run.seconds == 1.0


@given(graphs(loops=False), st.data())
def test_what_is_alive_at_the_peak_is_named(graph: Graph, data: Any) -> None:
    """Small graphs have few values: all that the simulator has alive is there by kind, less the smallest."""
    schedule = close_over_dependencies(graph, *data.draw(choices(graph)))
    profile, groups = simulate(graph, schedule), Groups()
    peak = timeline(graph, schedule, 1.0, groups).peak
    if peak is None:
        return
    sizes = {"forward": 0, "recomputed": 0, "backward": 0}
    for v, stage in profile.alive:
        node = graph.nodes[graph.values[v].producer]
        sizes["recomputed" if stage >= 0 else "forward" if node.forward else "backward"] += graph.values[
            v
        ].nbytes
    assert (peak.forward_nbytes, peak.recomputed_nbytes, peak.backward_nbytes) == tuple(sizes.values())


def test_a_long_step_has_few_moments() -> None:
    """A plan's file stays small however long the step is."""
    graph = chain(1000, size=3)
    run = timeline(graph, close_over_dependencies(graph, graph.residuals[::50]), 2.0, Groups())
    assert MOMENTS / 2 < len(run.moments) <= MOMENTS
    assert run.moments[-1].seconds < run.seconds == 2.0


def test_time_is_divided_by_the_nodes_own() -> None:
    graph = chain(4, size=2)
    slow = replace(graph, nodes=tuple(replace(n, seconds=10.0 if n.id == 2 else 0.1) for n in graph.nodes))
    run = timeline(slow, close_over_dependencies(slow, slow.residuals), 1.0, Groups())
    until = [*(m.seconds for m in run.moments[1:]), run.seconds]
    longest = max(zip(until, run.moments, strict=True), key=lambda pair: pair[0] - pair[1].seconds)
    assert longest[0] - longest[1].seconds > 0.8
    free = replace(graph, nodes=tuple(replace(n, seconds=0.0) for n in graph.nodes))
    assert timeline(
        free, close_over_dependencies(free, free.residuals), 0.0, Groups()
    ).moments  # without prices there is a picture


def test_forward_and_backward_are_told_apart() -> None:
    graph = blocks(4)
    groups = Groups()
    run = timeline(graph, close_over_dependencies(graph, graph.residuals[::4]), 1.0, groups)
    kinds = [groups.listed()[m.running].kind for m in run.moments]
    assert {"forward", "recomputed", "backward"} == set(kinds)
    assert all(
        kind == "forward"
        for kind, m in zip(kinds, run.moments, strict=True)
        if m.seconds < run.forward_seconds - 1 / MOMENTS
    )
    assert any(m.recomputed_nbytes for m in run.moments)
    saved = timeline(graph, close_over_dependencies(graph, graph.residuals), 1.0, Groups())
    assert not any(m.recomputed_nbytes for m in saved.moments)


def test_repeated_modules_are_one_group() -> None:
    graph = chain(6, size=2)
    nodes = tuple(
        replace(n, scope=f"jvp(Net)/Dense_{n.id}", source="net.py:7 (Net.__call__)") for n in graph.nodes
    )
    groups = Groups()
    run = timeline(replace(graph, nodes=nodes), close_over_dependencies(graph, graph.residuals), 1.0, groups)
    named = [(groups.listed()[group].module, count) for m in run.moments for group, count in m.alive]
    assert ("Net/Dense_*", 6) in named
    assert run.peak is not None


def test_modules_of_name_stacks() -> None:
    assert module_path("transpose(jvp(Net))/Dense_0") == ("Net", "Dense_0")
    assert module_path("jvp()/checkpoint/recompute_3") == ()
    assert module_path("jvp(Net)/while/body/closed_call/Net/blocks.<lambda>/mlp") == ("Net", "blocks", "mlp")
    assert module_path("jvp(Net)/Net/mlp") == ("Net", "Net", "mlp")
    assert module_path("jit(step)/jvp(vmap(Net))/a.b") == ("step", "Net", "a.b")
    assert module_path("") == ()
    assert numberless("stage0_block12/conv") == "stage*_block*/conv"


@given(graphs(), st.data())
def test_the_modules_shares_are_the_actions(graph: Graph, data: Any) -> None:
    schedule = close_over_dependencies(graph, *data.draw(choices(graph)))
    found, told = account(graph, graph, schedule), actions(graph, schedule)
    assert sum(s.saved_nbytes for s in found.shares) == sum(a.nbytes for a in told if a.action == "save")
    assert sum(s.recomputed_nbytes for s in found.shares) == sum(
        a.nbytes for a in told if a.action == "recompute" and a.stages
    )
    assert sum(s.dropped_nbytes for s in found.shares) == sum(
        a.nbytes for a in told if a.action == "recompute" and not a.stages
    )
    stacked = sum(graph.values[v].saved_seconds for v in schedule.saved)
    again = extra_seconds(graph, schedule) - stacked - graph.extra_seconds
    assert abs(sum(s.extra_seconds for s in found.shares) - again) <= 1e-4 * again
    assert found.planned is not None and found.planned.seconds >= 0


def test_the_plain_step_has_one_timeline() -> None:
    graph = blocks(3)
    found = account_of_plain(graph)
    assert found.planned is None and not sum(s.recomputed_nbytes for s in found.shares)
    assert found.plain.peak is not None
    whole = replace(graph, stages=(Stage(graph.forward_stop, len(graph.nodes)),))
    assert found.plain.peak.nbytes == peak_of(whole, whole.residuals) - graph.base_nbytes
    none = replace(graph, nodes=(), values=(), stages=())
    assert account_of_plain(none).plain.moments == ()


def test_copies_are_beside_the_kernels_that_run_meanwhile() -> None:
    """Eight layers of a second, each read in a stage of two; copies take two layers, one comes back late."""
    build = Builder()
    x = build.argument()
    made = []
    for _ in range(8):
        (x,) = build.node([x], [4], seconds=1.0, contraction=True)
        made.append(x)
    cotangent = x
    for v in reversed(made):
        build.stage()
        (cotangent,) = build.node([v, cotangent], [1], seconds=2.0, contraction=True)
    graph = replace(build.graph(), host=HostMemory(2.0 * UNIT))
    first, second = made[:2]
    schedule = close_over_dependencies(graph, graph.residuals, (), [first, second])
    groups = Groups()
    run = timeline(graph, schedule, 24.0 + extra_seconds(graph, schedule), groups)
    out = [copy for copy in run.copies if not copy.back]
    back = [copy for copy in run.copies if copy.back]
    assert [(c.begin, c.end) for c in out] == [(1.0, 3.0), (3.0, 5.0)]
    assert len(back) == 2 and all(c.end - c.begin == pytest.approx(2.0) for c in back)
    assert {groups.listed()[c.group].nbytes for c in run.copies} == {4 * UNIT}
    assert not timeline(graph, close_over_dependencies(graph, graph.residuals), 24.0, Groups()).copies

    # where the link is slow a stage waits, and the picture's time with it: all stays within the run
    slow = replace(graph, host=HostMemory(0.5 * UNIT))
    late = close_over_dependencies(slow, slow.residuals, (), [first])
    run = timeline(slow, late, 24.0 + extra_seconds(slow, late), Groups())
    (gone, returned) = run.copies
    assert 0 <= gone.begin < gone.end <= returned.begin < returned.end <= run.seconds
