"""Loops in levels: how many carries they keep, and which forms of a step are worth making."""

from dataclasses import replace
from math import log2, prod, sqrt

import pytest
from graphs import chain, in_loops
from hypothesis import given
from hypothesis import strategies as st

from jaxremat import Graph
from jaxremat._model._graph import Pin
from jaxremat._model._loop_levels import Form, Pairs, carries, choices, nested, parts
from jaxremat._report._loop_forms import loop_forms

UNIT = 2**20


def at_once(length: int, levels: tuple[int, ...]) -> int:
    """The most carries in memory while the loop is played: what each level that is entered has stacked."""
    if not levels:
        return length
    rest = length - prod(levels)
    most = levels[0] + rest  # the outer level's, while the rest runs forward and backward

    def enter(level: int, held: int) -> None:
        nonlocal most
        held += levels[level]
        most = max(most, held)
        if level + 1 < len(levels):
            enter(level + 1, held)

    enter(0, 0)
    return most


@given(st.integers(1, 3000))
def test_choices_are_within_the_loop_and_need_ever_fewer_carries(length: int) -> None:
    found = choices(length)
    assert found[0] == ()
    needed = [carries(length, levels) for levels in found]
    assert needed == [at_once(length, levels) for levels in found]
    assert needed == sorted(set(needed), reverse=True)
    for depth, levels in enumerate(found[1:], 2):
        assert len(levels) == depth
        assert min(levels) >= 2
        assert length - prod(levels) in {0, *range(2, length)}


@pytest.mark.parametrize("length", [97, 100, 997, 1000, 4096, 9973, 10000])
def test_two_levels_need_the_square_root_and_many_the_logarithm(length: int) -> None:
    """Prime lengths too."""
    found = choices(length)
    assert carries(length, found[1]) <= 2.1 * sqrt(length)
    assert carries(length, found[-1]) <= 3.5 * log2(length)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_short_loops_stay_as_they_are(length: int) -> None:
    assert choices(length) == ((),)


def looped(length: int) -> Graph:
    """A chain of two kernels as the body of a loop, and the loop that runs back."""
    graph = in_loops(chain(2), length)
    edge = replace(graph.nodes[0], primitive="scan_carry")
    return replace(graph, nodes=(edge, *graph.nodes[1:]))


def test_forms_count_what_they_save_and_repeat() -> None:
    graph = looped(64)
    carry = graph.values[graph.nodes[0].outputs[0]].nbytes
    seconds = sum(n.seconds for n in graph.nodes if n.loop == 0)
    two, three = Pairs.of(graph, [64]).deeper()
    assert (two.segments, three.segments) == (((8, 8),), ((4, 4, 4),))
    assert (two.fewer_nbytes, three.fewer_nbytes) == ((64 - 16) * carry, (64 - 12) * carry)
    assert (two.more_seconds, three.more_seconds) == (seconds, 2 * seconds)


def test_a_rest_is_not_run_again() -> None:
    graph = looped(97)
    form, *_ = Pairs.of(graph, [97]).deeper()
    seconds = sum(n.seconds for n in graph.nodes if n.loop == 0)
    assert form.segments == ((8, 11),)
    assert form.more_seconds == pytest.approx(seconds * 88 / 97)


def test_the_loop_that_saves_most_is_cut_first() -> None:
    """Of two equal loops the longer one."""
    graph = looped(64)
    shifted = tuple(replace(n, loop=n.loop + 2) for n in graph.nodes)
    both = replace(graph, nodes=graph.nodes + shifted, parents=(-1,) * 4, groups=(0, 0, 2, 2), trips=(8,) * 4)
    first, *_ = Pairs.of(both, [16, 100]).deeper()
    assert first.segments == ((), (10, 10))


def test_a_loop_that_must_stay_is_not_cut() -> None:
    pairs = Pairs.of(looped(64), [64], [False])
    assert pairs.deeper() == ()
    assert pairs.divided(((),), 0, 0.5) == []


def test_a_loop_some_of_which_must_be_saved_is_divided_but_has_no_levels() -> None:
    graph = looped(64)
    pinned = replace(graph, pins=(Pin("save", graph.nodes[0].outputs[0], "a test"),))
    pairs = Pairs.of(pinned, [64])
    assert pairs.deeper() == ()
    assert pairs.divided(((),), 0, 0.5)


@given(st.integers(1, 100), st.floats(0, 1))
def test_a_divided_loop_has_parts_of_several_iterations_and_the_last(length: int, share: float) -> None:
    """One form has the last iteration apart, another has not; in both the same of the others have the share."""
    forms = Pairs.of(looped(length), [length]).divided(((),), 0, share)
    assert bool(forms) == (length >= 4)
    for form, apart in zip(forms, (True, False), strict=False):
        ((first, *others),) = form.segments
        levels, behind = parts(length, (first, *others))
        assert levels == (first,) and sum((*levels, *behind)) == length
        assert (behind[-1] == 1) == apart
        assert min(first, *behind[: len(behind) - apart], length) >= 2
        assert abs(first + apart - share * length) < 3 + 1e-9
        assert (form.fewer_nbytes, form.more_seconds) == (0, 0.0)


def test_parts_behind_levels() -> None:
    assert parts(12, (12,)) == ((12,), ())
    assert parts(12, (2, 5)) == ((2, 5), (2,))
    assert parts(12, (7, -4)) == ((7,), (4, 1))
    assert parts(12, (7, -5)) == ((7,), (5,))
    assert [nested(lengths) for lengths in ((), (12,), (2, 5), (7, -4))] == [False, False, True, False]
    assert carries(12, (7, -4)) == 12


def test_only_one_loop_is_divided() -> None:
    pairs = Pairs((8, 8), (((),), ((), (2, 4))), (True, True), (1, 1), (1.0, 1.0), ((5, 0.5), (7, 0.25)))
    assert [pairs.whole(s) for s in (((), ()), ((8,), (8,)), ((6,), ()), ((), (2, 4)))] == [
        True,
        True,
        False,
        False,
    ]
    assert pairs.divided(((), (8,)), 0, 0.5) == [
        Form(((3, -4), (8,)), 12, 0.75),
        Form(((4,), (8,)), 12, 0.75),
    ]


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ((6, 4), "2 levels, 6 x 4"),
        ((4, 5), "2 levels, 4 x 5, and 4 behind them"),
        ((2, 3, 4), "3 levels, 2 x 3 x 4"),
        ((17,), "divided into 17 and 7, each with a plan of its own"),
        ((17, -6), "divided into 17, 6 and 1, each with a plan of its own"),
        ((24,), "makes the updates of what it stacks"),
    ],
)
def test_what_becomes_of_a_loop_in_words(levels: tuple[int, ...], said: str) -> None:
    (form,) = loop_forms((9, 24), ((), levels), ("", "Model.py:12 (f)"))
    assert str(form) == f"loop of 24 iterations at Model.py:12 (f): {said}"


def test_rows_that_would_be_in_chunks_on_one_device_are_named_on_several() -> None:
    rows = [(4096, "Model.py:40 (head)", False)]
    (form,) = loop_forms((9,), ((), ()), ("",), rows, devices=8)
    assert str(form) == "rows at Model.py:40 (head): not in chunks, because they are on several devices"
    assert loop_forms((9,), ((), ()), ("",), rows) == ()
