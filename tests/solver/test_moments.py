"""Bounds on the bytes alive at a moment: true of every schedule, and above the budget for the one they cut off."""

from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import choices, graphs

from jaxremat import Graph, Schedule, close_over_dependencies, simulate
from jaxremat._model._schedule import idle, must_save
from jaxremat._solver._milp import Milp, _Model
from jaxremat._solver._moments import Moments, Terms


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
