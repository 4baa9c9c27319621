"""Loops with nested checkpointing: how many carries they keep, and which forms of a step are worth making."""

from dataclasses import replace
from math import log2, prod, sqrt

import pytest
from forms import of_chunks, of_levels
from graphs import chain, in_loops
from hypothesis import given
from hypothesis import strategies as st

from jaxremat import Graph
from jaxremat._model._graph import Pin
from jaxremat._model._loop_levels import Loops, carries, choices, may_have
from jaxremat._model._sites import Sites, Variants
from jaxremat._model._variant import ATTENTION, COPIES, LOOP, PLAIN, ROWS, Choice, Estimate, Variant
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
    found = Variants(Loops.of(graph, [64]))
    assert found.exact() == (of_levels((8, 8)), of_levels((4, 4, 4)))
    two, three = map(found.estimate, found.exact())
    assert two == Estimate((64 - 16) * carry, seconds)
    assert three == Estimate((64 - 12) * carry, 2 * seconds)


def test_a_rest_is_not_run_again() -> None:
    graph = looped(97)
    found = Variants(Loops.of(graph, [97]))
    first, *_ = found.exact()
    seconds = sum(n.seconds for n in graph.nodes if n.loop == 0)
    assert first == of_levels((8, 11))
    assert found.estimate(first).more_seconds == pytest.approx(seconds * 88 / 97)


def test_the_loop_that_saves_most_is_cut_first() -> None:
    """Of two equal loops the longer one."""
    graph = looped(64)
    shifted = tuple(replace(n, loop=n.loop + 2) for n in graph.nodes)
    both = replace(
        graph, nodes=graph.nodes + shifted, parents=(-1,) * 4, groups=(0, 0, 2, 2), loop_lengths=(8,) * 4
    )
    first, *_ = Variants(Loops.of(both, [16, 100])).exact()
    assert first == of_levels((), (10, 10))


def test_a_loop_that_must_stay_is_not_cut() -> None:
    forms = Variants(Loops.of(looped(64), [64], [False]))
    assert forms.exact() == ()


def test_a_loop_some_of_which_must_be_saved_has_no_levels() -> None:
    graph = looped(64)
    pinned = replace(graph, pins=(Pin("save", graph.nodes[0].outputs[0], "a test"),))
    forms = Variants(Loops.of(pinned, [64]))
    assert forms.exact() == ()


def test_a_loop_may_have_one_level_of_all_its_iterations_or_several_within_it() -> None:
    able = {levels: may_have(12, levels) for levels in ((12,), (2, 5), (3, 4), (7,), (7, -4), (3, 5), ())}
    assert able == {
        (12,): True,
        (2, 5): True,
        (3, 4): True,
        (7,): False,
        (7, -4): False,
        (3, 5): False,
        (): False,
    }


def test_kinds_are_combined_with_what_saves_most_of_those_before_and_most_of_the_step_comes_last() -> None:
    loops = Loops((64,), (((), (8, 8)),), (1,), (4.0,), ((0, 0.0),))
    chunks = {2: Estimate(10, 1.0), 4: Estimate(15, 2.0), 8: Estimate(14, 3.0)}
    most = {(1, (2,)): Estimate(90, 0.5, whole=True)}
    rows = Sites(ROWS, {(0, (n,)): each for n, each in chunks.items()} | most)
    copies = Sites(COPIES, {(0, (1, 2)): Estimate(7)}, exact=False)
    forms = Variants(loops, (rows, copies))
    two, four, levels = of_chunks(2), of_chunks(4), of_levels((8, 8))
    both, copied = four.also(*levels.choices), Choice(COPIES, 0, (1, 2))
    assert {each: forms.estimate(each)[:3] for each in forms.exact()} == {
        of_chunks(0, 2): (90, 0.5, True),
        two: (10, 1.0, False),
        four: (15, 2.0, False),
        levels: (48, 4.0, False),
        both: (63, 6.0, False),
    }
    assert forms.exact() == (of_chunks(0, 2), two, four, levels, both)
    inexact = forms.inexact()
    assert list(inexact) == [each.also(copied) for each in (PLAIN, two, four, levels, both)]
    assert [forms.estimate(each).fewer_nbytes for each in inexact] == [7, 17, 22, 55, 70]
    assert [forms.is_inexact(each) for each in (inexact[-1], both)] == [True, False]


def test_most_of_the_step_in_chunks_may_have_what_chunks_may_have() -> None:
    attention = Sites(ATTENTION, {(0, (2,)): Estimate(50, -1.0)})
    rows = Sites(ROWS, {(0, (2,)): Estimate(90, 0.5, whole=True), (0, (4,)): Estimate(95, 0.7, whole=True)})
    loops = Loops((), (), (), (), ())
    (within,) = attention.rungs()
    alone = Variants(loops, (attention, rows)).exact()
    assert alone == (Variant.of(*within), of_chunks(2), of_chunks(4))
    able = Variants(loops, (attention, rows), in_chunks=(ATTENTION,))
    found = able.exact()
    both = [of_chunks(n).also(*within) for n in (2, 4)]
    assert set(found) == {*alone, *both}
    assert [able.estimate(each)[:3:2] for each in found if each in both] == [(140, True), (145, True)]


def test_a_form_names_only_what_is_otherwise() -> None:
    form = Variant.of(Choice(ROWS, 1, (4,)), Choice(LOOP, 0, (2, 3)), Choice(LOOP, 1, ()))
    assert form == Variant.of(Choice(LOOP, 0, (2, 3)), Choice(ROWS, 1, (4,)))
    assert form.settings(LOOP) == {0: (2, 3)} and form.settings(COPIES) == {}
    assert form.also(Choice(LOOP, 0, ()), Choice(ROWS, 1, ())) == PLAIN
    assert (str(form), str(PLAIN)) == ("loop 0: 2 x 3, rows 1: 4", "as written")


def test_settings_in_a_row_are_those_of_loops_then_rows_then_copies() -> None:
    """As plans once had them: with the numbers of a step's loops and regions they are named."""
    unnamed = Variant.unnamed(((), (2, 3), (4,), (), (1, 2)))
    named = [Choice(LOOP, 1, (2, 3)), Choice(ROWS, 0, (4,)), Choice(COPIES, 0, (1, 2))]
    assert unnamed.named(2, 2) == Variant.of(*named)
    assert Variant.of(*named).named(2, 2) == Variant.of(*named)
    assert Variant.unnamed(((), ())).named(1, 1) == PLAIN


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ((6, 4), "2 levels, 6 x 4"),
        ((4, 5), "2 levels, 4 x 5, and 4 after them"),
        ((2, 3, 4), "3 levels, 2 x 3 x 4"),
        ((24,), "updates its stacked parameters in the backward pass"),
    ],
)
def test_what_becomes_of_a_loop_in_words(levels: tuple[int, ...], said: str) -> None:
    (form,) = loop_forms((9, 24), of_levels((), levels), ("", "Model.py:12 (f)"))
    assert str(form) == f"loop of 24 iterations at Model.py:12 (f): {said}"


def test_rows_that_would_be_in_chunks_on_one_device_are_named_on_several() -> None:
    rows = [(4096, "Model.py:40 (head)", False, False, False, False)]
    (form,) = loop_forms((9,), PLAIN, ("",), rows, devices=8)
    assert str(form) == "rows at Model.py:40 (head): not in chunks, because they are on several devices"
    assert loop_forms((9,), PLAIN, ("",), rows) == ()


def test_microbatches_say_what_they_are_of() -> None:
    rows = [(64, "Model.py:40 (head)", True, False, True, False)]
    (form,) = loop_forms((), of_chunks(4), (), rows)
    assert str(form).startswith("an iteration: in 4 microbatches")


def test_parts_of_images_say_that_they_have_rows_around() -> None:
    (form,) = loop_forms((), of_chunks(4), (), [(64, "Model.py:40 (net)", True, False, False, True)])
    assert str(form).startswith("the step: in 4 parts of an image's rows, each with the rows around it")


def test_where_something_is_required_the_others_are_left_out() -> None:
    """The compiler takes no step with all scores; of numbers of chunks that take as long the one that saves most is
    enough."""
    scores = Sites(ATTENTION, {(0, (2,)): Estimate(1000, -5.0)})
    rows = Sites(ROWS, {(0, (n,)): Estimate(100 - 100 // n, 0.01 * n) for n in (2, 4, 8)})
    found = Variants(Loops.of(chain(2), []), (scores, rows))
    attention, deepest = found.deepest()
    assert len(found.exact()) == 7 and {attention, deepest} < set(found.exact())
    required = replace(found, required=attention)
    assert len(required.exact()) == 4 and all(each.settings(ATTENTION) for each in required.exact())
    assert replace(required, negligible_seconds=0.2).exact() == (deepest,)
    assert len(replace(required, negligible_seconds=0.03).exact()) == 2
