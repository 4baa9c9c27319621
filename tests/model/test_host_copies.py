"""Values in host memory meanwhile: where copies are placed, what the simulator makes of them, what is refused."""

from dataclasses import replace

import pytest
from graphs import UNIT, Builder

import jaxremat
from jaxremat import Graph, complete, simulate
from jaxremat._model._host_copies import HostCopy, HostMemory
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
    everything = complete(graph, graph.residuals)
    first = graph.nodes[0].outputs[0]
    away = complete(graph, graph.residuals, (), [first])
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
    exits = {copy.value: copy.gone for copy in complete(graph, graph.residuals, (), values).offloaded}
    assert [exits[v] for v in values] == [4, 6, 8]  # made at 1, 2, 3; over at 3, 5 and, as begun at 4, 7


def test_a_step_waits_for_what_comes_back_late() -> None:
    """Each copy back takes as long as four stages; the first, wanted in stage 5, begins with the backward pass."""
    graph = layers(8, link=0.5)
    values = [node.outputs[0] for node in graph.nodes[:3]]
    schedule = complete(graph, graph.residuals, (), values[:1])
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
    plain = replace(complete(graph, graph.residuals), offloaded=copies)
    again = replace(complete(graph, kept), offloaded=copies)
    assert again.recomputed[6] == (1,)
    # it is wanted a stage earlier now, before stage 6 makes the second value again
    assert sum(waits(graph, plain)) == pytest.approx(10.0)
    assert sum(waits(graph, again)) == pytest.approx(12.0)


def test_a_value_that_is_read_to_recompute_comes_back_for_that() -> None:
    graph = layers(8, link=4.0)
    first, second, third = (node.outputs[0] for node in graph.nodes[:3])
    kept = [v for v in graph.residuals if v not in (second, third)]
    (copy,) = complete(graph, kept, (), [first]).offloaded
    assert copy.begun < 5  # stage 5 recomputes the third value, of the first


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


def test_no_more_is_away_than_the_host_has_room_for() -> None:
    graph = layers(8, link=4.0, nbytes=9 * UNIT)
    schedule = complete(graph, graph.residuals, (), graph.residuals)
    assert len(schedule.offloaded) == 2


def test_what_is_not_saved_is_not_away() -> None:
    graph = layers(8, link=4.0)
    assert not complete(graph, (), (), graph.residuals).offloaded


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
    schedule = replace(complete(graph, graph.residuals), offloaded=frozenset({copy}))
    with pytest.raises(jaxremat.SolverError, match="in host memory"):
        check(graph, schedule)
