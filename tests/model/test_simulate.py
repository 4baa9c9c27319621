"""The simulator against an independent sweep, `close_over_dependencies` and its law, and the schedules that `check`
refuses.
"""

from dataclasses import replace
from typing import Any

import pytest
from graphs import UNIT, Builder, blocks, chain, diamond, forward_only, in_loops, unrepeatable
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import choices, graphs

from jaxremat import Graph, Schedule, SolverError, close_over_dependencies, simulate
from jaxremat._model._schedule import check, must_save
from jaxremat._model._simulate import extra_seconds, rank
from jaxremat._solver._frontiers import hold

EXAMPLES = [chain(5), chain(4, size=3), blocks(3), diamond(), unrepeatable()]


def operands(graph: Graph, values: tuple[int, ...]) -> set[int]:
    """The buffers behind these values: fused values stand for the buffers that their makers read."""
    found: set[int] = set()
    for v in values:
        value = graph.values[v]
        if value.producer >= 0:
            found |= {v} if value.materialised else operands(graph, graph.nodes[value.producer].inputs)
    return found


def runs(graph: Graph, n: int) -> bool:
    """Whether the node is a kernel."""
    node = graph.nodes[n]
    return node.fusion_root or any(graph.values[v].materialised for v in node.outputs)


def outside(graph: Graph, n: int, again: int, v: int) -> list[int]:
    """The loops around a reader, recomputed for a stage or not, but not around the maker of what it reads."""

    def around(loop: int) -> list[int]:
        return [] if loop < 0 else [loop, *around(graph.parents[loop])]

    node = graph.nodes[n]
    if again >= 0:
        loops = around(graph.nodes[graph.stages[again].start].loop)
    else:
        loops = around(node.loop)[int(node.primitive == "scan_carry") :]
    made = around(graph.nodes[graph.values[v].producer].loop)
    return [loop for loop in loops if loop not in made]


def play(graph: Graph, schedule: Schedule) -> list[tuple[int, int, set[Any], set[Any]]]:
    """Every kernel run in order: node, stage it is recomputed for or -1, buffers read and buffers written.

    A buffer is (value, stage that made it again or -1). Reading what is not there is an error.
    """
    timeline: list[tuple[int, int, set[Any], set[Any]]] = []
    written: set[Any] = set()
    first = graph.stages[0].start if graph.stages else len(graph.nodes)
    present: dict[int, Any] = {}  # value -> the buffer that the present stage reads; absent: the original

    def run(n: int, again: int) -> None:
        node = graph.nodes[n]
        read = {present.get(v, (v, -1)) for v in operands(graph, node.inputs)}
        assert read <= written, f"node {n} reads {read - written}, which nothing has written"
        made = {(v, again) for v in node.outputs if graph.values[v].materialised}
        written.update(made)
        timeline.append((n, again, read, made))

    for n in range(first):
        if runs(graph, n):
            run(n, -1)
    for k, stage in enumerate(graph.stages):
        present = {v: buffer for v, buffer in present.items() if (v, k) in schedule.kept}
        for n in schedule.recomputed[k]:
            run(n, k)
            present.update({v: (v, k) for v in graph.nodes[n].outputs if v not in schedule.saved})
        for n in range(stage.start, stage.stop):
            if runs(graph, n):
                run(n, -1)
    for n, again, read, _ in timeline:
        for v, clone in list(read):
            for loop in outside(graph, n, again, v) if clone < 0 else ():
                # Every iteration may read it: it is read at the end of the loop too.
                ends = max(
                    i for i, (m, k, _, _) in enumerate(timeline) if k < 0 and graph.nodes[m].loop == loop
                )
                timeline[ends][2].add((v, -1))
    return timeline


def overwrites(graph: Graph, timeline: list[tuple[int, int, set[Any], set[Any]]], i: int) -> bool:
    """Whether the run puts its one result in the place of an operand: a pointwise backward kernel, for which
    some operand of that size, made by the backward pass and no output, is read here for the last time.
    """
    n, again, read, _ = timeline[i]
    node = graph.nodes[n]
    if again >= 0 or node.forward or node.fusion_root or len(node.outputs) != 1:
        return False
    later = set().union(*(reads for _, _, reads, _ in timeline[i + 1 :]))
    repeated = [v for m in graph.nodes if m.forward for v in operands(graph, m.inputs) if runs(graph, m.id)]
    return any(
        not graph.nodes[graph.values[v].producer].forward
        and not graph.values[v].is_output
        and graph.values[v].nbytes == graph.values[node.outputs[0]].nbytes
        and v not in repeated
        for v, _ in read - later
    )


def sweep(graph: Graph, schedule: Schedule) -> tuple[list[int], list[set[Any]]]:
    """Live bytes and live buffers at each kernel run: after each run, drop every buffer that nothing reads later.

    Behind the loop that made it, an original is there once for each iteration.
    """
    timeline = play(graph, schedule)
    live: set[Any] = set()
    nbytes, alive = [], []
    for i, (n, _, _, made) in enumerate(timeline):
        new = {(v, again) for v, again in made if again >= 0 or not graph.values[v].is_output}
        over = overwrites(graph, timeline, i)
        live |= set() if over else new
        behind = n >= graph.forward_stop or timeline[i][1] >= 0
        sizes = (
            graph.values[v].nbytes * ((graph.values[v].length or 1) if behind and again < 0 else 1)
            for v, again in live
        )
        nbytes.append(sum(sizes) + graph.nodes[n].workspace_nbytes)
        alive.append(set(live))
        live |= new
        live = {
            b
            for b in live
            if any(b in read for _, _, read, _ in timeline[i + 1 :]) or waits(graph, timeline, i, b)
        }
    return nbytes, alive


def partner(graph: Graph, timeline: list[tuple[int, int, set[Any], set[Any]]], n: int, k: int) -> int:
    """The node with which one that stage k runs again is part of a kernel, -1 for none: a partner that is there in its
    own place, unless something else that the stage runs again reads it.
    """
    node = graph.nodes[n]
    there = sorted(set(node.fusable_into) & set(range(graph.stages[k].start, graph.stages[k].stop)))
    wanted = any((v, k) in read for _, other, read, _ in timeline if other == k for v in node.outputs)
    return there[0] if there and not wanted else -1


def waits(graph: Graph, timeline: list[tuple[int, int, set[Any], set[Any]]], i: int, buffer: Any) -> bool:
    """Whether a buffer was made again in a kernel that has not run yet behind the i-th run."""
    v, k = buffer
    n = graph.values[v].producer
    if k < 0 or (n, k) not in [(m, j) for m, j, _, _ in timeline]:
        return False
    until = partner(graph, timeline, n, k)
    stage = graph.stages[k]
    later = [m for m, j, _, _ in timeline[i + 1 :] if j < 0 and stage.start <= m < stage.stop]
    return any(m <= until for m in later)


def seconds_again(graph: Graph, timeline: list[tuple[int, int, set[Any], set[Any]]], n: int, k: int) -> float:
    """What a node takes that stage k runs again."""
    node = graph.nodes[n]
    return node.fused_seconds if partner(graph, timeline, n, k) >= 0 else node.seconds


def assert_equals_sweep(graph: Graph, schedule: Schedule) -> None:
    profile = simulate(graph, schedule)
    nbytes, alive = sweep(graph, schedule)
    timeline = play(graph, schedule)
    assert [(e.node, e.recomputed_for) for e in profile.events] == [(n, k) for n, k, _, _ in timeline]
    assert [e.live_nbytes for e in profile.events] == nbytes
    assert profile.peak_nbytes == graph.base_nbytes + max(nbytes, default=0)
    if nbytes:
        assert profile.peak_event == nbytes.index(max(nbytes))
        assert set(profile.alive) == alive[profile.peak_event]
        assert len(profile.alive) == len(set(profile.alive))
    sizes = [graph.values[v].saved_nbytes for v, _ in profile.alive]
    assert sizes == sorted(sizes, reverse=True)
    stacked = sum(graph.values[v].saved_seconds for v in schedule.saved)
    again = sum(seconds_again(graph, timeline, n, k) for n, k, _, _ in timeline if k >= 0)
    assert profile.extra_seconds == graph.extra_seconds + stacked + again


@given(st.data())
def test_simulator_equals_sweep(data: st.DataObject) -> None:
    graph = data.draw(graphs(most_nodes=10))
    assert_equals_sweep(graph, close_over_dependencies(graph, *data.draw(choices(graph))))


@pytest.mark.parametrize("graph", EXAMPLES)
def test_simulator_equals_sweep_on_known_graphs(graph: Graph) -> None:
    for saved in ((), graph.residuals, graph.residuals[::2], graph.residuals[1::2]):
        kept = {(v, k) for v in graph.residuals for k in range(2, len(graph.stages))}
        assert_equals_sweep(graph, close_over_dependencies(graph, saved))
        assert_equals_sweep(graph, close_over_dependencies(graph, saved, kept))


def test_a_step_without_backward_pass() -> None:
    graph = forward_only()
    assert graph.residuals == ()
    assert_equals_sweep(graph, Schedule(frozenset(), ()))
    assert simulate(graph, close_over_dependencies(graph, ())).peak_nbytes == 3 * UNIT


def test_an_empty_graph() -> None:
    graph = Graph((), (), (), base_nbytes=7, step_seconds=0.0)
    profile = simulate(graph, close_over_dependencies(graph, ()))
    assert (profile.peak_nbytes, profile.extra_seconds, profile.events, profile.alive) == (7, 0.0, (), ())


def test_timeline_of_a_chain_by_hand() -> None:
    """`f, f, f | b, b, b + update` with `x[1]` alone saved."""
    graph = chain(3, size=2)
    x1, x2, x3 = 1, 2, 3
    saved = simulate(graph, close_over_dependencies(graph, graph.residuals))
    assert [e.live_nbytes // UNIT for e in saved.events] == [2, 4, 6, 7, 6, 4, 1]
    assert saved.alive == ((x1, -1), (x2, -1), (x3, -1), (4, -1))
    profile = simulate(graph, close_over_dependencies(graph, {x1}))
    assert [(e.node, e.recomputed_for) for e in profile.events] == [
        (0, -1), (1, -1), (2, -1),  # forward: x1, x2, x3
        (1, 0), (2, 0), (3, -1),  # stage 0 needs x3, from x2 from x1
        (1, 1), (4, -1),  # stage 1 needs x2
        (5, -1), (6, -1),  # x1 is there
    ]  # fmt: skip
    assert [e.live_nbytes // UNIT for e in profile.events] == [2, 4, 6, 4, 6, 5, 5, 6, 4, 1]
    assert profile.extra_seconds == 3.0


def test_the_base_counts_once_and_outputs_within_it() -> None:
    build = Builder()
    x = build.argument(100)
    (loss,) = build.node([x], [50], is_output=True)
    (a,) = build.node([x], [3])
    build.stage()
    build.node([a, loss], [70], is_output=True)
    graph = build.graph(base=220)
    profile = simulate(graph, close_over_dependencies(graph, graph.residuals))
    assert [e.live_nbytes for e in profile.events] == [0, 3 * UNIT, 3 * UNIT]
    assert profile.peak_nbytes == 223 * UNIT
    assert (
        simulate(replace(graph, base_nbytes=0), close_over_dependencies(graph, graph.residuals)).peak_nbytes
        == 3 * UNIT
    )


def test_workspace_counts_while_its_kernel_runs_and_each_time_it_runs() -> None:
    build = Builder()
    x = build.argument()
    (a,) = build.node([x], [2], workspace=10)
    (b,) = build.node([a], [2])
    build.stage()
    (c,) = build.node([b], [1])
    build.node([c, a], [1], is_output=True, workspace=5)
    graph = build.graph()
    plain = simulate(graph, close_over_dependencies(graph, (a, b)))
    assert [e.live_nbytes // UNIT for e in plain.events] == [12, 4, 5, 8]
    again = simulate(graph, close_over_dependencies(graph, (b,)))
    assert [e.live_nbytes // UNIT for e in again.events] == [12, 4, 14, 5, 8]
    assert [(e.node, e.recomputed_for) for e in again.events][2] == (0, 0)


def test_the_clone_of_an_output_is_no_part_of_the_base() -> None:
    build = Builder()
    x = build.argument()
    (a, out) = build.node([x], [4, 2], is_output=[False, True])
    (b,) = build.node([a], [1])
    build.stage()
    build.node([a, b], [1], is_output=True)
    graph = build.graph()
    assert out in must_save(graph) or out not in graph.residuals
    events = simulate(graph, close_over_dependencies(graph, ())).events
    assert [(e.node, e.recomputed_for, e.live_nbytes // UNIT) for e in events][2:4] == [(0, 0, 6), (1, 0, 5)]


def test_pointwise_results_are_written_over_operands_that_die() -> None:
    """`g -> h` in place, `h -> i` not: a heavy kernel reads its operand while it writes."""
    build = Builder()
    (a,) = build.node([build.argument()], [4])
    build.stage()
    (g,) = build.node([a], [4])
    (h,) = build.node([g], [4], fusion_root=False)
    (i,) = build.node([h], [4])
    (j,) = build.node([i, h], [3], fusion_root=False)
    build.node([j], [3], fusion_root=False, is_output=True)
    graph = build.graph()
    assert graph.in_place == {2, 5}
    events = simulate(graph, close_over_dependencies(graph, graph.residuals)).events
    assert [e.live_nbytes // UNIT for e in events] == [4, 8, 4, 8, 11, 3]


def test_a_kernel_writes_over_no_operand_that_a_reduction_fused_into_it_reads() -> None:
    """`p, q -> r` where a hidden reduction reads `p`, or something else: only then `p` may be written over."""
    for hidden, in_place in (("p", set()), ("a", {3})):
        build = Builder()
        (a,) = build.node([build.argument()], [4])
        build.stage()
        (p,) = build.node([a], [4])
        (q,) = build.node([p if hidden == "p" else a], [1], materialised=False)
        (r,) = build.node([p, q], [4], fusion_root=False)
        build.node([r], [3], is_output=True)
        assert build.graph().in_place == in_place


def test_a_carry_is_in_the_memory_of_what_it_begins_with() -> None:
    """In the forward pass too, but not where that is read again."""
    for again in (False, True):
        build = Builder()
        (zeros,) = build.node([build.argument()], [4])
        (carry,) = build.node([zeros], [4], primitive="scan_carry")
        build.node([carry, *[zeros] * again], [1])
        build.stage()
        build.node([carry], [1], is_output=True)
        assert build.graph().in_place == (set() if again else {1})


def test_a_fused_value_holds_its_sources() -> None:
    """`a -> fused -> reader`: no bytes of its own, but `a` lives until the fused value's last reader."""
    build = Builder()
    x = build.argument()
    (a,) = build.node([x], [4])
    (fused,) = build.node([a], [100], materialised=False, fusion_root=False, seconds=0.0)
    build.stage()
    (g,) = build.node([x], [1])
    build.node([fused, g], [1], is_output=True)
    graph = build.graph()
    assert (graph.sources[fused], graph.residuals) == ((a,), (a,))
    profile = simulate(graph, close_over_dependencies(graph, graph.residuals))
    assert [e.live_nbytes // UNIT for e in profile.events] == [4, 5, 5]


@given(st.data())
def test_complete_makes_available_whatever_a_stage_reads(data: st.DataObject) -> None:
    graph = data.draw(graphs(most_nodes=10))
    saved, kept = data.draw(choices(graph))
    schedule = close_over_dependencies(graph, saved, kept)
    assert check(graph, schedule) is schedule
    assert schedule.saved == saved | must_save(graph)
    assert schedule.kept <= kept
    assert not any(v in schedule.saved for v, _ in schedule.kept)
    assert len(schedule.recomputed) == len(graph.stages)
    for k, (stage, nodes) in enumerate(zip(graph.stages, schedule.recomputed, strict=True)):
        there = schedule.saved | {v for v, j in schedule.kept if j == k}
        for n in nodes:
            node = graph.nodes[n]
            assert node.repeatable and node.forward
            assert n < stage.start
            residuals = {v for v in operands(graph, node.inputs) if graph.is_residual(v)}
            assert residuals <= there
            there |= set(node.outputs)
        for n in range(stage.start, stage.stop):
            there |= set(graph.nodes[n].outputs)
            if runs(graph, n):
                assert {v for v in operands(graph, graph.nodes[n].inputs) if graph.is_residual(v)} <= there
        assert list(nodes) == sorted(set(nodes))


@given(st.data())
def test_complete_recomputes_nothing_in_vain(data: st.DataObject) -> None:
    """Without kept values: leaving out any one recomputed node breaks the schedule."""
    graph = data.draw(graphs())
    schedule = close_over_dependencies(graph, data.draw(choices(graph))[0])
    assume(not schedule.drops_nothing)
    for k, nodes in enumerate(schedule.recomputed):
        for n in nodes:
            fewer = list(schedule.recomputed)
            fewer[k] = tuple(m for m in nodes if m != n)
            with pytest.raises(SolverError, match=f"Stage {k} (reads|recomputes)"):
                check(graph, replace(schedule, recomputed=tuple(fewer)))


@given(graphs(most_nodes=8))
def test_saving_everything_is_the_plain_step(graph: Graph) -> None:
    plain = close_over_dependencies(graph, graph.residuals)
    assert plain.drops_nothing
    assert simulate(graph, plain).extra_seconds == sum(graph.values[v].saved_seconds for v in plain.saved)
    everything = close_over_dependencies(graph, range(len(graph.values)))
    assert everything == plain  # ids that are no residuals are ignored


@given(st.data())
def test_saving_more_never_recomputes_more(data: st.DataObject) -> None:
    graph = data.draw(graphs(loops=False))
    saved, _ = data.draw(choices(graph))
    extra, _ = data.draw(choices(graph))
    fewer, more = close_over_dependencies(graph, saved), close_over_dependencies(graph, saved | extra)
    for a, b in zip(more.recomputed, fewer.recomputed, strict=True):
        assert set(a) <= set(b)
    assert simulate(graph, more).extra_seconds <= simulate(graph, fewer).extra_seconds


def test_must_save() -> None:
    """What runs only once, what is small, and what the step returns anyway."""
    graph = unrepeatable()
    a, b, c, d, e = range(1, 6)
    assert graph.residuals == (a, b, c, d, e)
    assert must_save(graph) == {b, e}
    assert must_save(replace(graph, small_nbytes=0)) == {b}
    assert must_save(replace(graph, small_nbytes=4 * UNIT)) == {a, b, c, d, e}
    values = tuple(replace(v, is_output=v.id == c) for v in graph.values)
    assert must_save(replace(graph, values=values)) == {b, c, e}
    assert close_over_dependencies(graph, ()).recomputed == ((2, 3), (2,), (0,))


@pytest.mark.parametrize("ids", [[99], [-1], [1, 99], [-7, 1]])
def test_complete_refuses_ids_that_the_graph_does_not_have(ids: list[int]) -> None:
    wrong = next(v for v in ids if not 0 <= v < 12)
    with pytest.raises(SolverError, match=rf"names value {wrong}, but .* values 0 to 11"):
        close_over_dependencies(chain(5), ids)


BROKEN = {
    "stages": (
        Schedule(frozenset({1, 2, 3}), ((),)),
        r"has 1 stages, but the graph has 3.*close_over_dependencies\(graph, saved\)",
    ),
    "not recomputed": (Schedule(frozenset({1, 2}), ((), (), ())), r"Stage 0 reads values \[3\], which are neither"),
    "too late": (Schedule(frozenset({1, 2}), ((), (2,), ())), r"Stage 0 reads values \[3\]"),
    "from nothing": (Schedule(frozenset({1}), ((2,), (1,), ())), r"node 2 \(dot_general\) from values \[2\], which"),
    "wrong order": (Schedule(frozenset({1}), ((2, 1), (1,), ())), r"node 2 \(dot_general\) from values \[2\]"),
    "dropped again": (Schedule(frozenset({1}), ((1, 2), (), ())), r"Stage 1 reads values \[2\]"),
    "kept, never there": (
        Schedule(frozenset({1, 3}), ((), (), ()), frozenset({(2, 1)})),
        r"Stage 1 keeps values \[2\] that stage 0 does not have",
    ),
    "backward again": (Schedule(frozenset({1, 2, 3}), ((), (3,), ())), r"node 3 \(dot_general\), which may run only"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_check_refuses(name: str) -> None:
    schedule, text = BROKEN[name]
    with pytest.raises(SolverError, match=text):
        check(chain(3), schedule)


def test_check_refuses_what_may_run_only_once() -> None:
    graph = unrepeatable()
    schedule = Schedule(frozenset({1, 3, 5}), ((1, 3), (), ()))
    with pytest.raises(SolverError, match=r"Stage 0 recomputes node 1 \(pure_callback\), which may run only"):
        check(graph, schedule)


def test_a_value_kept_through_stages_is_made_once() -> None:
    graph = chain(4, size=2)
    kept = {(v, k) for v in (1, 2, 3) for k in range(1, 5 - v)}
    schedule = close_over_dependencies(graph, (), kept)
    assert schedule.recomputed == ((0, 1, 2, 3), (), (), ())
    assert schedule.kept == kept
    assert_equals_sweep(graph, schedule)
    assert simulate(graph, schedule).extra_seconds == 4.0
    assert simulate(graph, close_over_dependencies(graph, ())).extra_seconds == 10.0


@st.composite
def raw_schedules(draw: st.DrawFn, graph: Graph) -> Schedule:
    """Any values saved, any earlier kernels recomputed, any values kept: mostly broken."""
    closed = close_over_dependencies(graph, *draw(choices(graph)))
    recomputed = []
    for stage, nodes in zip(graph.stages, closed.recomputed, strict=True):
        flips = {n for n in draw(st.sets(st.integers(0, stage.start - 1), max_size=1)) if runs(graph, n)}
        recomputed.append(tuple(sorted(set(nodes) ^ flips)))
    values = st.integers(0, len(graph.values) - 1)
    saved = closed.saved ^ (draw(st.sets(values, max_size=1)) & set(graph.residuals))
    kept = closed.kept ^ draw(st.sets(st.tuples(values, st.integers(1, len(graph.stages))), max_size=1))
    return Schedule(saved, tuple(recomputed), frozenset(kept))


def gone(graph: Graph, schedule: Schedule) -> bool:
    """Whether a stage reads an original of the forward pass that is not saved, or runs what may run only once."""
    if any(k >= len(graph.stages) for _, k in schedule.kept):
        return True
    previous: set[int] = set()
    for k, (stage, nodes) in enumerate(zip(graph.stages, schedule.recomputed, strict=True)):
        clones = {v for v, j in schedule.kept if j == k}
        if not clones <= previous:
            return True
        for n in (*nodes, *range(stage.start, stage.stop)):
            node = graph.nodes[n]
            if n < stage.start and not (node.forward and node.repeatable):
                return True
            for v in operands(graph, node.inputs) if runs(graph, n) else ():
                before = graph.values[v].producer < stage.start
                if v not in schedule.saved | clones and before and graph.is_residual(v):
                    return True
            if n < stage.start:
                clones |= set(node.outputs)
        previous = clones
    return False


@given(st.data())
def test_check_agrees_with_playing_the_schedule(data: st.DataObject) -> None:
    """`check` accepts any mix of saved, recomputed and kept values exactly if no stage reads what is gone."""
    graph = data.draw(graphs(late_forward=False))
    schedule = data.draw(raw_schedules(graph))
    if gone(graph, schedule):
        with pytest.raises(SolverError):
            check(graph, schedule)
    else:
        assert check(graph, schedule) is schedule
        assert_equals_sweep(graph, schedule)


def test_an_iteration_of_its_own_lets_go_of_what_was_saved_for_it() -> None:
    """What a loop reads from outside is there until it ends, unless it has no other iteration."""
    graph = in_loops(chain(4, size=2), 3)
    once = replace(
        graph, loop_lengths=(1, 1), values=tuple(replace(v, length=min(v.length, 1)) for v in graph.values)
    )
    saved = close_over_dependencies(graph, graph.residuals)
    many = [e.live_nbytes for e in simulate(graph, saved).events]
    one = [e.live_nbytes for e in simulate(once, saved).events]
    assert one[-1] < one[graph.forward_stop]
    assert many[-1] >= 3 * 4 * 2 * UNIT > one[-1]


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
