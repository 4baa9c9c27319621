"""Values in host memory meanwhile: where copies are placed, what the simulator makes of them, what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
from graphs import SOLVERS, UNIT, Builder, in_loops

import jaxremat
from jaxremat import Graph, Pin, close_over_dependencies, simulate
from jaxremat._model._host_copies import AT_ONCE, HostCopy, HostMemory
from jaxremat._model._pins import staying, with_pins
from jaxremat._model._schedule import check
from jaxremat._model._simulate import waits


def layers(
    count: int, link: float, *, size: int = 4, seconds: float = 1.0, nbytes: int | None = None
) -> Graph:
    """A chain of products, each of whose results the backward pass reads in a stage of its own."""
    build = Builder()
    x = build.argument()
    made = []
    for _ in range(count):
        (x,) = build.node([x], [size], seconds=seconds, contraction=True)
        made.append(x)
    cotangent = x
    for v in reversed(made):
        build.stage()
        (cotangent,) = build.node([v, cotangent], [1], seconds=2 * seconds, contraction=True)
    return replace(build.graph(), host=HostMemory(link * UNIT, nbytes))


def test_a_value_is_not_there_from_its_exit_to_the_stage_of_its_way_back() -> None:
    graph = layers(8, link=4.0)  # a copy takes a second, as a layer does
    everything = close_over_dependencies(graph, graph.residuals)
    first = graph.nodes[0].outputs[0]
    away = close_over_dependencies(graph, graph.residuals, (), [first])
    (copy,) = away.offloaded
    assert copy.value == first and copy.gone == 3 and copy.begun == 6  # of eight stages the last reads it
    with_it = [live for _, _, live in simulate(graph, everything).events]
    without = [live for _, _, live in simulate(graph, away).events]
    begun = 8 + copy.begun
    assert [a - b for a, b in zip(with_it, without, strict=True)] == [
        4 * UNIT * (copy.gone <= event < begun) for event in range(16)
    ]
    assert simulate(graph, away).extra_seconds == 0.0


def test_copies_wait_for_one_another_to_leave() -> None:
    graph = layers(8, link=2.0)  # a copy takes two layers
    values = [node.outputs[0] for node in graph.nodes[:3]]
    exits = {
        copy.value: copy.gone
        for copy in close_over_dependencies(graph, graph.residuals, (), values).offloaded
    }
    assert [exits[v] for v in values] == [4, 6, 8]  # made at 1, 2, 3; over at 3, 5 and, as begun at 4, 7


def test_a_step_waits_for_what_comes_back_late() -> None:
    """Each copy back takes as long as four stages; the first, wanted in stage 5, begins with the backward pass."""
    graph = layers(8, link=0.5)
    values = [node.outputs[0] for node in graph.nodes[:3]]
    schedule = close_over_dependencies(graph, graph.residuals, (), values[:1])
    assert not any(waits(graph, schedule))
    assert simulate(graph, schedule).extra_seconds == 0.0
    slow = replace(graph, host=HostMemory(0.25 * UNIT))
    schedule = replace(schedule, offloaded=frozenset({HostCopy(values[0], 0, 1, 4)}))
    # wanted at second 8 + 14 of stage 7; begun at second 8 + 8, and 16 seconds long
    assert waits(slow, schedule) == [0, 0, 0, 0, 0, 0, 0, 10.0]
    assert simulate(slow, schedule).extra_seconds == pytest.approx(10.0)


def test_recomputing_gives_copies_time() -> None:
    graph = replace(layers(8, link=4.0), host=HostMemory(0.25 * UNIT))
    first, second = (node.outputs[0] for node in graph.nodes[:2])
    kept = [v for v in graph.residuals if v not in (second,)]
    copies = frozenset({HostCopy(first, 0, 1, 4)})
    plain = replace(close_over_dependencies(graph, graph.residuals), offloaded=copies)
    again = replace(close_over_dependencies(graph, kept), offloaded=copies)
    assert again.recomputed[6] == (1,)
    # it is wanted a stage earlier now, before stage 6 makes the second value again
    assert sum(waits(graph, plain)) == pytest.approx(10.0)
    assert sum(waits(graph, again)) == pytest.approx(12.0)


def test_a_value_that_is_read_to_recompute_comes_back_for_that() -> None:
    graph = layers(8, link=4.0)
    first, second, third = (node.outputs[0] for node in graph.nodes[:3])
    kept = [v for v in graph.residuals if v not in (second, third)]
    (copy,) = close_over_dependencies(graph, kept, (), [first]).offloaded
    assert copy.begun < 5  # stage 5 recomputes the third value, of the first


def test_few_copies_are_on_their_way_back_at_once() -> None:
    """What one stage reads comes back before two."""
    build = Builder()
    x = build.argument()
    made = []
    for _ in range(16):
        (x,) = build.node([x], [4], contraction=True)
        made.append(x)
    cotangent = x
    for last in (15, 11, 7, 3):
        build.stage()
        read = made[last - 3 : last + 1]
        (cotangent,) = build.node([*read, cotangent], [1], seconds=8.0, contraction=True)
    graph = replace(build.graph(), host=HostMemory(16.0 * UNIT))
    away = [v for v in made[:8] if v in graph.away.alone]
    assert len(away) == 8 and {graph.away.alone[v].begun for v in made[:4]} == {2}
    begun = {
        copy.value: copy.begun for copy in close_over_dependencies(graph, graph.residuals, (), away).offloaded
    }
    assert sorted(begun[v] for v in made[:4]) == [1, 1, 2, 2]
    # what is read before that is over by then
    assert sorted(begun[v] for v in made[4:8]) == [0, 0, 1, 1]
    over = {
        copy.value: copy.over for copy in close_over_dependencies(graph, graph.residuals, (), away).offloaded
    }
    assert all(over[v] == begun[v] + 1 for v in made[:8])


def test_small_values_outputs_and_what_is_pinned_stay() -> None:
    graph = layers(6, link=4.0)
    values = list(graph.values)
    first, second = graph.nodes[0].outputs[0], graph.nodes[1].outputs[0]
    values[first] = replace(values[first], nbytes=UNIT // 2)
    values[second] = replace(values[second], is_output=True)
    graph = replace(graph, values=tuple(values))
    assert not {first, second} & graph.away.alone.keys()
    assert graph.away.alone
    assert not replace(graph, host=None).away.alone


def test_values_stay_of_which_a_copy_takes_longer_than_it_is_begun_ahead() -> None:
    graph = layers(6, link=4.0)
    values = list(graph.values)
    first = graph.nodes[0].outputs[0]
    values[first] = replace(values[first], nbytes=2 * values[first].nbytes)
    graph = replace(graph, values=tuple(values))
    assert first in graph.away.alone
    ahead = replace(graph, host=HostMemory(4.0 * UNIT, ahead_seconds=1.0))
    assert ahead.away.alone.keys() == graph.away.alone.keys() - {first}


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_is_pinned_to_it_is_away_whatever_the_solver(solver: str) -> None:
    """With every budget, though nothing asks for it; and what is pinned to be saved is not."""
    free = layers(6, link=4.0)
    away, here = free.nodes[1].outputs[0], free.nodes[0].outputs[0]
    graph = with_pins(free, [Pin("offload", away, "one"), Pin("save", here, "two")])
    assert not staying(graph, close_over_dependencies(graph, ()))
    least = simulate(graph, close_over_dependencies(graph, ())).peak_nbytes
    for budget in (None, least - UNIT, 100 * UNIT):
        schedule = check(graph, SOLVERS[solver].solve(graph, budget, time_limit=10.0).schedule)
        assert {here, away} <= schedule.saved
        assert away in schedule.away and here not in schedule.away


def test_where_a_pinned_value_stays_it_is_said_why() -> None:
    graph = layers(6, link=4.0)
    values = list(graph.values)
    small, returned, long, last = (graph.nodes[i].outputs[0] for i in (0, 1, 2, 5))
    values[small] = replace(values[small], nbytes=UNIT // 2)
    values[returned] = replace(values[returned], is_output=True)
    values[long] = replace(values[long], nbytes=100 * UNIT)
    host = HostMemory(4.0 * UNIT, ahead_seconds=2.0)
    graph = replace(graph, values=tuple(values), host=host)
    graph = with_pins(graph, [Pin("offload", v, f"pin {v}") for v in (small, returned, long, last)])
    said = staying(graph, close_over_dependencies(graph, ()))
    for v, why in ((small, "smaller than"), (returned, "returns"), (long, "2000 ms"), (last, "no time")):
        assert re.search(rf"pin {v}: [^|]*: [^:]*{why}", said.replace(". pin", "|pin"))
    assert not staying(replace(graph, host=None), close_over_dependencies(replace(graph, host=None), ()))


def test_no_more_is_away_than_the_host_has_room_for() -> None:
    graph = layers(8, link=4.0, nbytes=9 * UNIT)
    schedule = close_over_dependencies(graph, graph.residuals, (), graph.residuals)
    assert len(schedule.offloaded) == 2


def test_what_is_not_saved_is_not_away() -> None:
    graph = layers(8, link=4.0)
    assert not close_over_dependencies(graph, (), (), graph.residuals).offloaded


@pytest.mark.parametrize(
    "copy",
    [
        HostCopy(3, 2, 3, 9),
        HostCopy(3, 1, 2, 6),
        HostCopy(3, 2, 9, 0),
        HostCopy(3, 2, 5, 6),
        HostCopy(0, 0, 2, 3),
    ],
    ids=["no such stage", "not made by then", "back before it is gone", "read before", "an argument"],
)
def test_impossible_copies_are_refused(copy: HostCopy) -> None:
    graph = layers(8, link=4.0)
    schedule = replace(close_over_dependencies(graph, graph.residuals), offloaded=frozenset({copy}))
    with pytest.raises(jaxremat.SolverError, match="in host memory"):
        check(graph, schedule)


def looped(count: int, link: float, *, length: int = 8, **options: Any) -> Graph:
    """The same as a loop of so many iterations, each with all of these layers, and the loop that runs back."""
    return in_loops(layers(count, link, **options), length)


def test_of_a_stack_two_slices_are_there() -> None:
    graph = looped(3, link=64.0)
    first = graph.nodes[0].outputs[0]
    everything, away = (
        close_over_dependencies(graph, graph.residuals),
        close_over_dependencies(graph, graph.residuals, (), [first]),
    )
    assert [copy.value for copy in away.offloaded] == [first]
    with_it = [live for _, _, live in simulate(graph, everything).events]
    without = [live for _, _, live in simulate(graph, away).events]
    slice_nbytes = graph.values[first].nbytes
    # eight slices are there behind the loop otherwise
    assert [a - b for a, b in zip(with_it, without, strict=True)] == [0, 0, 0, *[6 * slice_nbytes] * 3]
    assert simulate(graph, away).extra_seconds == pytest.approx(4 / 64)  # the first slice comes back


def test_loops_wait_for_copies_that_take_longer_than_an_iteration() -> None:
    graph = looped(3, link=8.0)  # a slice of four units takes half a second, of eight iterations four
    first, second, third = (graph.values[node.outputs[0]].id for node in graph.nodes[:3])
    stacks = graph.away.stacks
    assert stacks.copy_seconds(first) == pytest.approx(4.0)
    # the forward loop's nodes take a second each in all; the loop that runs back takes two for each, six
    assert graph.away.starts[:4] == pytest.approx((0.0, 1.0, 2.0, 3.0))
    again = [0.0] * len(graph.stages)
    assert stacks.waits([first], again)[0] == pytest.approx(4.0 - 2.0 + 0.5)  # made behind a second of three
    assert stacks.waits([third], again)[0] == pytest.approx(4.0 + 0.5)
    # the second begins at four seconds, when the first is over, and the way back takes eight of six seconds
    assert stacks.waits([first, second], again)[0] == pytest.approx(8.0 - 2.0 + 1.0 + 2.0)
    assert stacks.waits([first, second], [1.5, 0.0, 0.0])[0] == pytest.approx(8.0 - 2.0 + 1.0 + 0.5)


def test_no_more_than_two_stacks_of_a_loop_are_away() -> None:
    graph = looped(4, link=64.0)
    assert len(graph.away.stacked) == 4
    assert len(close_over_dependencies(graph, graph.residuals, (), graph.residuals).offloaded) == AT_ONCE


def test_stacks_of_short_loops_and_small_slices_stay() -> None:
    assert not looped(3, link=64.0, length=2).away.alone
    assert looped(3, link=64.0, length=3).away.alone
    small = looped(3, link=64.0)
    values = tuple(replace(v, nbytes=v.nbytes // 8) for v in small.values)
    assert not replace(small, values=values).away.alone


def test_the_host_has_room_for_whole_stacks() -> None:
    graph = looped(3, link=64.0, nbytes=32 * UNIT)  # of eight slices of four units each
    assert len(close_over_dependencies(graph, graph.residuals, (), graph.residuals).offloaded) == 1


def test_a_stack_that_leaves_at_another_time_is_refused() -> None:
    graph = looped(3, link=64.0)
    schedule = close_over_dependencies(graph, graph.residuals, (), graph.residuals)
    check(graph, schedule)
    copy = min(schedule.offloaded)
    wrong = replace(schedule, offloaded=frozenset({copy._replace(begun=1)}))
    with pytest.raises(jaxremat.SolverError, match="in host memory"):
        check(graph, wrong)
