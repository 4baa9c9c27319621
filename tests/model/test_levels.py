"""Loops with nested checkpointing: how many carries they keep, and which forms of a step are worth making."""

from dataclasses import replace
from math import log2, prod, sqrt

import pytest
from forms import of_chunks, of_levels
from graphs import chain, in_loops
from hypothesis import given
from hypothesis import strategies as st

from jaxremat import Graph
from jaxremat._model._attention_offers import AttentionOffers
from jaxremat._model._copy_offers import CopyOffers
from jaxremat._model._form import ATTENTION, COPIES, LOOP, PLAIN, ROWS, Choice, Form, Worth
from jaxremat._model._form_offers import Forms, Promise
from jaxremat._model._graph import Pin
from jaxremat._model._loop_levels import LoopOffers, carries, choices, nested, parts
from jaxremat._model._row_offers import RowOffers
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
    two, three = Forms(LoopOffers.of(graph, [64])).deeper()
    assert (two.form, three.form) == (of_levels((8, 8)), of_levels((4, 4, 4)))
    assert (two.fewer_nbytes, three.fewer_nbytes) == ((64 - 16) * carry, (64 - 12) * carry)
    assert (two.more_seconds, three.more_seconds) == (seconds, 2 * seconds)


def test_a_rest_is_not_run_again() -> None:
    graph = looped(97)
    found, *_ = Forms(LoopOffers.of(graph, [97])).deeper()
    seconds = sum(n.seconds for n in graph.nodes if n.loop == 0)
    assert found.form == of_levels((8, 11))
    assert found.more_seconds == pytest.approx(seconds * 88 / 97)


def test_the_loop_that_saves_most_is_cut_first() -> None:
    """Of two equal loops the longer one."""
    graph = looped(64)
    shifted = tuple(replace(n, loop=n.loop + 2) for n in graph.nodes)
    both = replace(
        graph, nodes=graph.nodes + shifted, parents=(-1,) * 4, groups=(0, 0, 2, 2), loop_lengths=(8,) * 4
    )
    first, *_ = Forms(LoopOffers.of(both, [16, 100])).deeper()
    assert first.form == of_levels((), (10, 10))


def test_a_loop_that_must_stay_is_not_cut() -> None:
    forms = Forms(LoopOffers.of(looped(64), [64], [False]))
    assert forms.deeper() == ()
    assert forms.divided(PLAIN, 0, 0.5) == []


def test_a_loop_some_of_which_must_be_saved_is_divided_but_has_no_levels() -> None:
    graph = looped(64)
    pinned = replace(graph, pins=(Pin("save", graph.nodes[0].outputs[0], "a test"),))
    forms = Forms(LoopOffers.of(pinned, [64]))
    assert forms.deeper() == ()
    assert forms.divided(PLAIN, 0, 0.5)


@given(st.integers(1, 100), st.floats(0, 1))
def test_a_divided_loop_has_parts_of_several_iterations_and_the_last(length: int, share: float) -> None:
    """One form has the last iteration apart, another has not; in both the same of the others have the share."""
    forms = Forms(LoopOffers.of(looped(length), [length])).divided(PLAIN, 0, share)
    assert bool(forms) == (length >= 4)
    for form, apart in zip(forms, (True, False), strict=False):
        first, *others = form.form.settings(LOOP)[0]
        levels, behind = parts(length, (first, *others))
        assert levels == (first,) and sum((*levels, *behind)) == length
        assert (behind[-1] == 1) == apart
        assert min(first, *behind[: len(behind) - apart], length) >= 2
        assert abs(first + apart - share * length) < 3 + 1e-9 or length == 4  # whose first part is always 3
        assert (form.fewer_nbytes, form.more_seconds) == (0, 0.0)


def test_parts_behind_levels() -> None:
    assert parts(12, (12,)) == ((12,), ())
    assert parts(12, (2, 5)) == ((2, 5), (2,))
    assert parts(12, (7, -4)) == ((7,), (4, 1))
    assert parts(12, (7, -5)) == ((7,), (5,))
    assert [nested(lengths) for lengths in ((), (12,), (2, 5), (7, -4))] == [False, False, True, False]
    assert carries(12, (7, -4)) == 12


def test_only_one_loop_is_divided() -> None:
    loops = LoopOffers((8, 8), (((),), ((), (2, 4))), (True, True), (1, 1), (1.0, 1.0), ((5, 0.5), (7, 0.25)))
    settings = ((), ()), ((8,), (8,)), ((6,), ()), ((), (2, 4))
    assert [loops.undivided(of_levels(*s)) for s in settings] == [True, True, False, False]
    assert Forms(loops).divided(of_levels((), (8,)), 0, 0.5) == [
        Promise(of_levels((3, -4), (8,)), 12, 0.75),
        Promise(of_levels((4,), (8,)), 12, 0.75),
    ]


def test_kinds_are_combined_with_what_saves_most_of_those_before_and_most_of_the_step_comes_last() -> None:
    loops = LoopOffers((64,), (((), (8, 8)),), (True,), (1,), (4.0,), ((0, 0.0),))
    rows = RowOffers(
        ({2: Worth(10, 1.0), 4: Worth(15, 2.0), 8: Worth(14, 3.0)}, {2: Worth(90, 0.5, whole=True)})
    )
    copies = CopyOffers((1, 2), 7)
    forms = Forms(loops, (rows, copies))
    two, four, levels = of_chunks(2), of_chunks(4), of_levels((8, 8))
    both, copied = four.also(*levels.choices), Choice(COPIES, 0, (1, 2))
    assert forms.deeper() == (
        Promise(of_chunks(0, 2), 90, 0.5, whole=True),
        Promise(two, 10, 1.0),
        Promise(four, 15, 2.0),
        Promise(levels, 48, 4.0),
        Promise(both, 63, 6.0),
    )
    inexact = forms.inexact()
    assert [each.form for each in inexact] == [f.also(copied) for f in (PLAIN, two, four, levels, both)]
    assert [each.fewer_nbytes for each in inexact] == [7, 17, 22, 55, 70]
    assert [forms.is_inexact(form) for form in (inexact[-1].form, both)] == [True, False]


def test_most_of_the_step_in_chunks_may_have_what_chunks_may_have() -> None:
    attention = AttentionOffers(2, 50, -1.0)
    rows = RowOffers(({2: Worth(90, 0.5, whole=True), 4: Worth(95, 0.7, whole=True)},))
    loops = LoopOffers((), (), (), (), (), ())
    (within,) = attention.rungs()
    alone = [rung.form for rung in Forms(loops, (attention, rows)).deeper()]
    assert alone == [Form.of(*within), of_chunks(2), of_chunks(4)]
    found = Forms(loops, (attention, rows), in_chunks=(ATTENTION,)).deeper()
    both = [of_chunks(n).also(*within) for n in (2, 4)]
    assert {rung.form for rung in found} == {*alone, *both}
    assert [rung.fewer_nbytes for rung in found if rung.form in both] == [140, 145]
    assert all(rung.whole for rung in found if rung.form in both)


def test_a_form_names_only_what_is_otherwise() -> None:
    form = Form.of(Choice(ROWS, 1, (4,)), Choice(LOOP, 0, (2, 3)), Choice(LOOP, 1, ()))
    assert form == Form.of(Choice(LOOP, 0, (2, 3)), Choice(ROWS, 1, (4,)))
    assert form.settings(LOOP) == {0: (2, 3)} and form.settings(COPIES) == {}
    assert form.also(Choice(LOOP, 0, ()), Choice(ROWS, 1, ())) == PLAIN
    assert (str(form), str(PLAIN)) == ("loop 0: 2 x 3, rows 1: 4", "as written")


def test_settings_in_a_row_are_those_of_loops_then_rows_then_copies() -> None:
    """As plans once had them: with the numbers of a step's loops and regions they are named."""
    unnamed = Form.unnamed(((), (2, 3), (4,), (), (1, 2)))
    named = [Choice(LOOP, 1, (2, 3)), Choice(ROWS, 0, (4,)), Choice(COPIES, 0, (1, 2))]
    assert unnamed.named(2, 2) == Form.of(*named)
    assert Form.of(*named).named(2, 2) == Form.of(*named)
    assert Form.unnamed(((), ())).named(1, 1) == PLAIN


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
    (form,) = loop_forms((9, 24), of_levels((), levels), ("", "Model.py:12 (f)"))
    assert str(form) == f"loop of 24 iterations at Model.py:12 (f): {said}"


def test_rows_that_would_be_in_chunks_on_one_device_are_named_on_several() -> None:
    rows = [(4096, "Model.py:40 (head)", False, False)]
    (form,) = loop_forms((9,), PLAIN, ("",), rows, devices=8)
    assert str(form) == "rows at Model.py:40 (head): not in chunks, because they are on several devices"
    assert loop_forms((9,), PLAIN, ("",), rows) == ()
