"""Every solver on every graph, the integer program against brute force, and schedules known from the literature."""

import math
from typing import Any

import pytest
from graphs import SOLVERS as ALL
from graphs import UNIT, Builder, blocks, chain, diamond, forward_only, peak_of, unrepeatable
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import choices, graphs, holdable

from jaxremat import (
    Chen,
    Graph,
    Greedy,
    MinCut,
    RecomputeAll,
    SaveAll,
    Schedule,
    Solution,
    Solver,
    close_over_dependencies,
    simulate,
)
from jaxremat._model._schedule import check, idle, must_save
from jaxremat._solver import _frontiers
from jaxremat._solver._blocks import Blocks
from jaxremat._solver._milp import Milp, _Model
from jaxremat._solver._moments import Moments, Terms
from jaxremat.testing import frontier, least_seconds

SOLVERS = {**ALL, "blocks": Blocks()}
GRAPHS = {
    "chain": chain(6),
    "uneven chain": chain(5, size=3, seconds=[8.0, 1.0, 4.0, 1.0, 2.0]),
    "blocks": blocks(3),
    "diamond": diamond(),
    "unrepeatable": unrepeatable(),
    "forward only": forward_only(),
}
# A solve that is right ends long before this, whatever the machine.
TIME_LIMIT = 10.0


def solve(solver: Solver, graph: Graph, budget_nbytes: int | None) -> Schedule:
    solution = solver.solve(graph, budget_nbytes, time_limit=TIME_LIMIT)
    assert isinstance(solution, Solution)
    assert 0.0 <= solution.lower_bound < math.inf
    assert solution.solver
    return check(graph, solution.schedule)


def free(graph: Graph) -> list[int]:
    """The residuals that there is a choice about."""
    return [v for v in graph.residuals if v not in must_save(graph)]


def budgets(best: dict[int, float], most: int = 3) -> list[int]:
    """Budgets that are met exactly and budgets just missed, around the peaks where the optimum changes."""
    corners = [p for p in sorted(best) if best[p] < least_seconds(best, p - 1)]
    corners = corners[:: math.ceil(len(corners) / most)]
    return [budget for peak in corners for budget in (peak, peak - UNIT // 2)]


# ---- every solver on every graph


@pytest.mark.parametrize("solver", [Greedy(), MinCut(), Milp(gap=0.0)], ids=["greedy", "mincut", "milp"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_nothing_is_dropped_where_the_plain_step_fits(solver: Solver, graph: Graph) -> None:
    plain = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes
    assert solve(solver, graph, plain).drops_nothing
    assert solve(solver, graph, 10 * plain).drops_nothing


@pytest.mark.parametrize("name", ["chen", "greedy", "mincut", "milp"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_a_budget_that_cannot_be_met_gives_a_peak_above_it(name: str, graph: Graph) -> None:
    least = simulate(graph, solve(SOLVERS[name], graph, None)).peak_nbytes
    for budget in (least - 1, graph.base_nbytes, 1):
        peak = simulate(graph, solve(SOLVERS[name], graph, budget)).peak_nbytes
        assert peak > budget if name == "milp" else peak == least


@given(
    graphs(most_nodes=8), st.sampled_from(["chen", "chen of 3", "greedy", "mincut", "milp"]), st.floats(0, 1)
)
def test_solvers_on_random_graphs(graph: Graph, name: str, share: float) -> None:
    """Whatever the budget: a schedule that can be emitted, and the same one the second time."""
    low = simulate(graph, close_over_dependencies(graph, ())).peak_nbytes
    high = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes
    budget = int(low + share * (high - low))
    schedule = solve(SOLVERS[name], graph, budget)
    assert schedule == solve(SOLVERS[name], graph, budget)
    assert solve(SOLVERS[name], graph, None) == solve(SOLVERS[name], graph, None)


def test_the_two_ends() -> None:
    graph = chain(6)
    assert solve(SaveAll(), graph, 1) == close_over_dependencies(graph, graph.residuals)
    everything = solve(RecomputeAll(), graph, None)
    assert everything.saved == frozenset()
    assert everything.recomputed == tuple(tuple(range(6 - k)) for k in range(6))


# ---- the integer program against brute force


@given(graphs(most_nodes=6))
def test_milp_equals_brute_force_over_saved_sets(graph: Graph) -> None:
    """Never worse than the best schedule that holds nothing, and equal to it unless holding is what makes it better."""
    assume(1 <= len(free(graph)) <= 6)
    best = frontier(graph)
    for budget in budgets(best):
        solution = Milp(gap=0.0).solve(graph, budget, time_limit=TIME_LIMIT)
        profile = simulate(graph, check(graph, solution.schedule))
        optimum = least_seconds(best, budget)
        assert solution.proven
        if optimum < math.inf:
            assert profile.peak_nbytes <= budget
            assert profile.extra_seconds <= optimum + 1e-9
        if not solution.schedule.kept and profile.peak_nbytes <= budget:
            assert profile.extra_seconds >= optimum


@given(graphs(most_nodes=5))
def test_milp_equals_brute_force_over_saved_and_kept(graph: Graph) -> None:
    """With values held from stage to stage: it fits where anything fits, and nothing is cheaper than it claims."""
    pairs = [(v, k) for v, k in holdable(graph) if v in free(graph)]
    assume(1 <= len(free(graph)) <= 5)
    assume(1 <= len(pairs) <= 5)
    best, alone = frontier(graph, pairs), frontier(graph)
    for budget in budgets(best):
        solution = Milp(gap=0.0).solve(graph, budget, time_limit=TIME_LIMIT)
        profile = simulate(graph, check(graph, solution.schedule))
        assert solution.proven
        if (optimum := least_seconds(best, budget)) < math.inf:
            assert profile.peak_nbytes <= budget
            assert optimum - 1e-9 <= profile.extra_seconds <= least_seconds(alone, budget) + 1e-9
        if min(alone) > budget:
            assert profile.extra_seconds <= optimum + 1e-9


@settings(max_examples=25)
@given(graphs(most_nodes=6))
def test_the_lower_bound_is_never_above_the_optimum(graph: Graph) -> None:
    assume(1 <= len(free(graph)) <= 6)
    best = frontier(graph)
    for budget in budgets(best, most=2):
        for gap in (0.002, 0.05):
            solution = Milp(gap=gap).solve(graph, budget, time_limit=TIME_LIMIT)
            profile = simulate(graph, solution.schedule)
            bound = solution.lower_bound * graph.step_seconds
            assert bound <= least_seconds(best, budget) + 1e-6
            if profile.peak_nbytes <= budget:
                assert bound <= profile.extra_seconds + 1e-6
                assert profile.extra_seconds <= bound + gap * graph.step_seconds + 1e-6


@given(graphs(most_nodes=6))
def test_without_a_budget_milp_reaches_the_least_peak(graph: Graph) -> None:
    assume(1 <= len(free(graph)) <= 6)
    best = frontier(graph)
    profile = simulate(graph, solve(Milp(gap=0.0), graph, None))
    assert profile.peak_nbytes <= min(best)
    if profile.peak_nbytes == min(best):
        assert profile.extra_seconds <= best[min(best)]


@pytest.mark.parametrize("graph", [chain(6, size=2), blocks(3), diamond(), unrepeatable()])
def test_more_memory_never_costs_more_time(graph: Graph) -> None:
    best = frontier(graph)
    seconds = [
        simulate(graph, solve(Milp(gap=0.0), graph, budget)).extra_seconds
        for budget in range(min(best), max(best) + 2 * UNIT, UNIT)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0.0 < seconds[0]


@settings(max_examples=15)
@given(graphs(most_nodes=6))
def test_more_memory_never_costs_more_time_on_random_graphs(graph: Graph) -> None:
    plain = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes
    least = simulate(graph, solve(Milp(gap=0.0), graph, None)).peak_nbytes
    assume(least < plain)
    seconds = [
        simulate(graph, solve(Milp(gap=0.0), graph, least + (plain - least) * i // 4)).extra_seconds
        for i in range(5)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("graph", [chain(6, size=2), blocks(3), diamond(), unrepeatable()])
def test_a_budget_missed_by_one_byte_is_missed(graph: Graph) -> None:
    """The integer program's arithmetic has tolerances; bytes have none."""
    best = frontier(graph)
    for peak in best:
        budget = peak - 1
        if (optimum := least_seconds(best, budget)) < math.inf:
            profile = simulate(graph, solve(Milp(gap=0.0), graph, budget))
            assert profile.peak_nbytes <= budget
            assert profile.extra_seconds <= optimum


def test_a_wider_gap_stops_within_it() -> None:
    graph = blocks(3)
    best = frontier(graph)
    for budget in budgets(best):
        optimum = least_seconds(best, budget)
        if optimum < math.inf:
            seconds = simulate(graph, solve(Milp(gap=0.05), graph, budget)).extra_seconds
            assert seconds <= optimum + 0.05 * graph.step_seconds


# ---- golden schedules


@pytest.mark.parametrize("root", [2, 3, 4, 5, 6])
def test_chen_saves_square_root_many_checkpoints(root: int) -> None:
    """`n = root**2` equal stages: `root - 1` checkpoints, peak `2 root`, less than one extra forward pass."""
    n = root**2
    graph = chain(n)
    schedule = solve(Chen(), graph, None)
    assert schedule == solve(Chen(segments=root), graph, None)
    assert schedule.saved == {root * i for i in range(1, root)}
    profile = simulate(graph, schedule)
    assert profile.peak_nbytes == 2 * root * UNIT
    assert profile.extra_seconds == n - (root - 1)
    assert simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes == (n + 1) * UNIT


def test_chen_on_sixteen_stages() -> None:
    """Checkpoints x4, x8 and x12; each segment is recomputed once, before the first of its four stages."""
    graph = chain(16)
    schedule = solve(Chen(), graph, None)
    assert schedule.saved == {4, 8, 12}
    made = {k: nodes for k, nodes in enumerate(schedule.recomputed) if nodes}  # node i makes value i + 1
    assert made == {0: (12, 13, 14, 15), 4: (8, 9, 10), 8: (4, 5, 6), 12: (0, 1, 2)}


def test_chen_fills_the_budget_with_whole_segments() -> None:
    """Four segments need 8 units and recompute 13 values; what room they leave saves the last of them whole."""
    graph = chain(16)
    profiles = [simulate(graph, solve(Chen(), graph, units * UNIT)) for units in range(7, 18)]
    assert [p.extra_seconds for p in profiles] == [13.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert [p.peak_nbytes // UNIT for p in profiles] == [8, *range(8, 18)]


@pytest.mark.parametrize(("name", "seconds"), [("greedy", 1.0), ("mincut", 2.0), ("milp", 1.0)])
def test_what_is_cheap_to_make_again_is_dropped(name: str, seconds: float) -> None:
    """Four values of equal size, one of which must go: one that costs a tenth of the others.

    To a minimum cut both cheap ones are alike: it drops both.
    """
    build = Builder()
    x = build.argument()
    values = [build.node([x], [4], seconds=price)[0] for price in (10.0, 1.0, 10.0, 1.0)]
    c = build.argument(0)
    for v in reversed(values):
        build.stage()
        (c,) = build.node([v, c], [0])
    build.node([c], [1], is_output=True)
    graph = build.graph()
    assert simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes == 16 * UNIT
    schedule = solve(SOLVERS[name], graph, 12 * UNIT)
    assert simulate(graph, schedule).peak_nbytes <= 12 * UNIT
    assert simulate(graph, schedule).extra_seconds == seconds
    assert {values[0], values[2]} <= schedule.saved


def test_milp_on_a_diamond_by_hand() -> None:
    """Where both branches are read, they, two cotangents and the scratch memory are 9 units; the root makes 11.

    So with less than 11 the root goes, for 4 seconds, and nothing fits into less than 9.
    """
    graph = diamond()
    seconds = {
        units: simulate(graph, solve(Milp(gap=0.0), graph, units * UNIT)).extra_seconds
        for units in (9, 10, 11, 12)
    }
    assert seconds == {9: 4.0, 10: 4.0, 11: 0.0, 12: 0.0}
    assert simulate(graph, solve(Milp(gap=0.0), graph, None)).peak_nbytes == 9 * UNIT
    solution = Milp(gap=0.0).solve(graph, int(8.5 * UNIT), time_limit=TIME_LIMIT)
    assert solution.proven  # that it cannot be met


def test_saved_values_that_only_recomputation_reads_count() -> None:
    """The callback's result (4) may not be made twice: it lives as long as what is recomputed from it needs it."""
    graph = unrepeatable()
    best = frontier(graph)
    solution = Milp(gap=0.0).solve(graph, None, time_limit=TIME_LIMIT)
    assert solution.proven
    assert simulate(graph, solution.schedule).peak_nbytes == min(best)


def test_a_saved_result_beside_a_recomputed_one() -> None:
    """One node makes two values of size 4: saving the second alone is best, and it is read in the original.

    Stage 0 reads the second beside 10 units of scratch, stage 1 both beside 6: 14 is enough for one recomputation.
    """
    build = Builder()
    (a, b) = build.node([build.argument()], [4, 4])
    build.stage()
    (c,) = build.node([b], [0], workspace=10)
    build.stage()
    build.node([a, b, c], [1], is_output=True, workspace=6)
    graph = build.graph()
    assert frontier(graph) == {18 * UNIT: 0.0, 14 * UNIT: 1.0}
    schedule = solve(Milp(gap=0.0), graph, 14 * UNIT)
    assert schedule == close_over_dependencies(graph, {b})


def test_the_classic_trade_of_one_checkpoint_on_a_chain() -> None:
    """Eight equal values in six units: brute force over 256 schedules is the judge, and Chen needs more time."""
    graph = chain(8)
    best = frontier(graph)
    budget = 6 * UNIT
    profile = simulate(graph, solve(Milp(gap=0.0), graph, budget))
    assert profile.extra_seconds <= least_seconds(best, budget)
    assert profile.peak_nbytes <= budget
    chen = simulate(graph, solve(Chen(), graph, budget))
    assert chen.peak_nbytes > budget or chen.extra_seconds >= profile.extra_seconds


# ---- a solver of one's own


class EverySecond:
    """Saves every second residual."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        assert budget_nbytes is None or budget_nbytes > 0
        assert time_limit > 0
        return Solution(close_over_dependencies(graph, graph.residuals[::2]))


def test_a_solver_of_ones_own() -> None:
    solver = EverySecond()
    assert isinstance(solver, Solver)
    schedule = check(chain(6), solver.solve(chain(6), None, time_limit=1.0).schedule)
    assert schedule.saved == {1, 3, 5}


def test_what_has_no_solve_is_no_solver() -> None:
    assert not isinstance(object(), Solver)
    assert not isinstance(Milp, type(None))


def bound_nbytes(graph: Graph, moments: Moments, window: list[set[int]], terms: Terms, at: Schedule) -> int:
    """The bound where the variables are as the schedule has them."""
    again = {(n, k) for k, nodes in enumerate(at.recomputed) for n in nodes}
    last = {u: k for k, nodes in enumerate(at.recomputed) for n in nodes for u in graph.reads[n]}
    variables: dict[str, dict[tuple[int, ...], bool]] = {
        "s": {(v,): v in at.saved for v in moments.free},
        "e": {(v, k): v in at.saved and last.get(v, -1) >= k for v in moments.free for k in moments.extra[v]},
        "r": {(n, k): (n, k) in again for k, nodes in enumerate(window) for n in nodes},
        "h": {(v, k): (v, k) in at.kept for v in graph.residuals for k in range(len(graph.stages))},
    }
    total = terms.constant_nbytes
    for keys, nbytes in terms.parts:
        found = [variables[kind].get(tuple(ids)) for kind, *ids in keys]
        if all(x is not None for x in found):
            total += nbytes * (sum(map(bool, found)) - (len(found) - 1))
    return total


def handed_on(graph: Graph, schedule: Schedule, value: int, stage: int) -> bool:
    """Whether a kept value has a reader in the stage that it is kept for, or is kept for the next one too."""
    again = (v for n in schedule.recomputed[stage] for v in graph.reads[n])
    return value in {*graph.needs(stage), *again} or (value, stage + 1) in schedule.kept


@given(st.data(), graphs(most_nodes=7))
def test_bounds_cut_off_what_violates_them_and_nothing_else(data: st.DataObject, graph: Graph) -> None:
    """Else the integer program finds the same schedule again and again, or misses one that fits."""
    window = _Model(graph, Milp()).window
    moments = Moments(graph, must_save(graph), window)

    def within_the_window() -> Schedule:
        schedule = close_over_dependencies(graph, *data.draw(choices(graph)))
        assume(not idle(graph, schedule) and all(handed_on(graph, schedule, v, k) for v, k in schedule.kept))
        assume(all(nodes.issuperset(again) for nodes, again in zip(window, schedule.recomputed, strict=True)))
        return schedule

    schedule = within_the_window()
    profile = simulate(graph, schedule)
    allowed = data.draw(st.sampled_from(sorted({0, *profile.runs[2]})))
    violated = moments.violated(schedule, profile, graph.base_nbytes + allowed)
    if profile.peak_nbytes > graph.base_nbytes + allowed:
        assert violated
    for terms in violated:
        assert bound_nbytes(graph, moments, window, terms, schedule) > allowed
    for _ in range(3):
        other = within_the_window()
        live_nbytes = simulate(graph, other).peak_nbytes - graph.base_nbytes
        for terms in (*violated, *moments.initial()):
            assert bound_nbytes(graph, moments, window, terms, other) <= live_nbytes


def test_what_is_no_longer_recomputed_is_not_tried_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 66 pairs of a value and a stage are recomputed at first, but for what is held nothing before it is."""
    graph, tried = chain(12), list[Schedule]()

    def close(*args: Any) -> Schedule:
        tried.append(close_over_dependencies(*args))
        return tried[-1]

    monkeypatch.setattr(_frontiers, "close_over_dependencies", close)
    schedule = close_over_dependencies(graph, ())
    held = _frontiers.hold(graph, schedule, peak_of(graph, graph.residuals))
    assert simulate(graph, held).extra_seconds < 0.6 * simulate(graph, schedule).extra_seconds
    assert len(tried) == 36
