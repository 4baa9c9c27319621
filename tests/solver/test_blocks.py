"""Blocks solved once and a budget spread over them: against brute force, and against the integer program."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from graphs import UNIT, Builder, blocks, chain, passes
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

from jaxremat import Graph, Milp, SaveAll, close_over_dependencies, simulate
from jaxremat._model._schedule import check
from jaxremat._model._simulate import extra_seconds, rank
from jaxremat._solver import _blocks, _milp
from jaxremat._solver._blocks import Blocks, frontier

NEVER = math.inf


def layers(count: int, per_stage: int = 1, *, names: bool = False) -> Graph:
    """A net of equal layers of six values each, expensive and cheap ones, with that many layers per stage."""
    build = Builder()
    stream = build.argument()
    made: list[list[int]] = []
    for i in range(count):
        a = build.node([stream], [3], seconds=4.0, primitive=f"op{i}" if names else "op")[0]
        b = build.node([a], [3], seconds=0.25, fusion_root=False)[0]
        c = build.node([b], [2], seconds=3.0)[0]
        d = build.node([a, c], [4], seconds=0.5, fusion_root=False)[0]
        e = build.node([d], [1], seconds=5.0)[0]
        stream, before = build.node([stream, e], [1], seconds=0.25, fusion_root=False)[0], stream
        made.append([before, a, b, c, d, e])
    cotangent: list[int] = []
    for i, values in enumerate(reversed(made)):
        if i % per_stage == 0:
            build.stage()
        for v in reversed(values):
            cotangent = list(build.node([v, *cotangent], [1], seconds=4.0))
        build.node(cotangent, [1], is_output=True, seconds=0.5)
    return build.graph(base=2)


def attention(count: int) -> Graph:
    """A net of equal layers in two stages each: what one stage reads, the other may recompute from."""
    build = Builder()
    stream = build.argument()
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        scores = build.node([stream], [6], seconds=6.0)[0]
        weights = build.node([scores], [8], seconds=0.5, fusion_root=False)[0]
        shares = build.node([weights], [8], seconds=0.5, fusion_root=False)[0]
        mixed = build.node([shares], [2], seconds=4.0)[0]
        made.append((stream, scores, weights, shares, mixed))
        stream = build.node([stream, mixed], [1], seconds=0.25, fusion_root=False)[0]
    cotangent: list[int] = []
    for before, scores, weights, shares, mixed in reversed(made):
        build.stage()
        for v in (mixed, shares):
            cotangent = list(build.node([v, *cotangent], [1], seconds=4.0))
        build.stage()
        for v in (weights, scores, before):
            cotangent = list(build.node([v, *cotangent], [1], seconds=4.0))
        build.node(cotangent, [1], is_output=True, seconds=0.5)
    return build.graph(base=2)


def test_what_two_stages_of_a_layer_want_is_no_bar() -> None:
    """They are one group: only the stream between layers is wanted by several."""
    graph = attention(12)
    found, shared = _blocks.blocks(graph)
    assert {graph.values[v].nbytes for v in shared} <= {UNIT, 2 * UNIT}
    assert max(len(block.values) for block in found) >= 4


def cheapest(block: Any) -> dict[int, float]:
    """By brute force, for each number of bytes saved the least seconds."""
    best: dict[int, float] = {}
    producer = {v: n for n, (_, _, _, makes) in enumerate(block.program) for v, *_ in makes}
    never = {m[0] for _, _, _, makes in block.program for m in makes if math.isinf(m[2])}
    for saved in itertools.product([False, True], repeat=len(block.values)):
        if any(saved[v] for v in never):
            continue
        again: set[tuple[int, int]] = set()
        stack = [
            (v, k)
            for _, _, _, makes in block.program
            for v, _, _, stages in makes
            for k in stages
            if not saved[v]
        ]
        while stack:
            v, k = stack.pop()
            if (producer[v], k) not in again:
                again.add((producer[v], k))
                stack.extend((u, k) for u in block.program[producer[v]][1] if not saved[u])
        seconds = sum(block.program[n][0] for n, _ in again)
        made = [m for _, _, _, makes in block.program for m in makes if saved[m[0]]]
        nbytes = sum(m[1] for m in made)
        best[nbytes] = min(best.get(nbytes, NEVER), seconds + sum(m[2] for m in made))
    return best


@pytest.mark.parametrize("most_enumerated", [0, 9])
@given(graph=graphs(most_nodes=9, most_stages=3))
def test_frontiers_are_those_of_brute_force(graph: Graph, most_enumerated: int) -> None:
    """By integer programs and by enumeration."""
    for block in _blocks.blocks(graph)[0]:
        if len(block.values) > 9:
            continue
        best = cheapest(block)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_blocks, "MOST_ENUMERATED", most_enumerated)
            points = _blocks._points(block, _blocks.POINTS)
        for point in points:
            at_most = min(seconds for nbytes, seconds in best.items() if nbytes <= point.nbytes)
            assert point.seconds == pytest.approx(at_most)


@given(graphs(most_nodes=12, most_stages=4), st.floats(0, 1))
def test_plans_hold_what_they_say(graph: Graph, share: float) -> None:
    """A plan fits wherever one of little memory does, and is never worse than that one."""
    least = Blocks().solve(graph, None, time_limit=60).schedule
    low, high = (
        simulate(graph, s).peak_nbytes
        for s in (check(graph, least), close_over_dependencies(graph, graph.residuals))
    )
    budget = int(low + share * max(high - low, 0))
    found = check(graph, Blocks().solve(graph, budget, time_limit=60).schedule)
    assert rank(graph, found, budget) <= rank(graph, least, budget)
    assert simulate(graph, found).peak_nbytes <= budget


def test_equal_blocks_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are and whatever they are called; but for those at the ends of groups."""
    solved = []

    def counting(block: Any, points: int) -> Any:
        solved.append(block.program)
        return frontier(block, points)

    monkeypatch.setattr(_blocks, "frontier", counting)
    counts = []
    for graph in (layers(16), layers(64), layers(64, names=True)):
        solved.clear()
        Blocks().solve(graph, graph.base_nbytes + 400 * UNIT, time_limit=60)
        counts.append(len(set(solved)))
    assert counts[1] == counts[2]
    assert max(counts) <= 5


def test_frontiers_are_solved_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer points where there is less time, of which the ends are the same."""
    solves, own = [], _blocks._points

    def counting(block: Any, most: int) -> Any:
        solves.append(block)
        return own(block, most)

    monkeypatch.setattr(_blocks, "_points", counting)
    monkeypatch.setattr(_blocks, "_found", {})
    graph = layers(16)
    block = _blocks.blocks(graph)[0][0]
    few, whole = frontier(block, 2), frontier(block)
    assert len(few) < len(whole)
    assert (few[0], few[-1].nbytes) == (whole[0], whole[-1].nbytes)
    counts = []
    for share in (500, 400, 300):
        solves.clear()
        found = Blocks().solve(graph, graph.base_nbytes + share * UNIT, time_limit=60)
        counts.append(len(solves))
        with monkeypatch.context() as afresh:
            afresh.setattr(_blocks, "_found", {})
            assert Blocks().solve(graph, graph.base_nbytes + share * UNIT, time_limit=60) == found
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


def test_of_small_blocks_no_integer_program_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    own = _blocks.milp
    monkeypatch.setattr(_blocks, "milp", lambda *args, **options: asked.append(args) or own(*args, **options))
    monkeypatch.setattr(_blocks, "_found", {})
    graph = layers(16)
    assert max(len(block.values) for block in _blocks.blocks(graph)[0]) <= _blocks.MOST_ENUMERATED
    Blocks().solve(graph, graph.base_nbytes + 400 * UNIT, time_limit=60)
    assert not asked


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
@pytest.mark.parametrize(
    "graph",
    [layers(12), layers(12, per_stage=3), layers(24, per_stage=2), attention(12), blocks(10), chain(60)],
    ids=["layers", "three per stage", "two per stage", "attention", "blocks", "chain"],
)
def test_plans_of_large_graphs_are_as_good_as_the_integer_program(
    graph: Graph, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within two and a half hundredths of the step; were these graphs large, they would get the best of the others."""
    plain = simulate(graph, SaveAll().solve(graph, None, time_limit=1).schedule).peak_nbytes
    budget = int(graph.base_nbytes + share * (plain - graph.base_nbytes))
    flat = Milp().solve(graph, budget, time_limit=60).schedule
    monkeypatch.setattr(_milp, "MOST_RESIDUALS", 20)
    found = Milp().solve(graph, budget, time_limit=60)
    assert not found.proven
    assert simulate(graph, found.schedule).peak_nbytes <= budget
    assert extra_seconds(graph, found.schedule) <= extra_seconds(graph, flat) + 0.025 * graph.step_seconds


def test_without_time_there_is_a_plan() -> None:
    graph = replace(layers(6))
    found = Blocks().solve(graph, graph.base_nbytes + 60 * UNIT, time_limit=0.0)
    check(graph, found.schedule)


@pytest.mark.parametrize("share", [0.75, 0.5, 0.4])
def test_each_forward_pass_has_the_budget_to_itself(share: float) -> None:
    """What a later pass saves is not there in the backward pass before it, nor the other way round."""
    one, two = passes(1, 24, size=4), passes(2, 24, size=4)
    plain = simulate(one, close_over_dependencies(one, one.residuals)).peak_nbytes
    budget = one.base_nbytes + int(share * (plain - one.base_nbytes))
    alone, both = (Blocks().solve(graph, budget, time_limit=20.0).schedule for graph in (one, two))
    assert simulate(two, both).peak_nbytes <= budget
    assert extra_seconds(two, both) == 2 * extra_seconds(one, alone)
    assert {block.born for block in _blocks.blocks(two)[0]} == {-1, 23}
