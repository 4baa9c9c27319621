"""One plan in all processes of a job: made by one, followed by the others, or an error in every one."""

from typing import Any

import pytest
from processes import BUDGET, SMALLEST, ask

LAW = "alone,checkpoint,plan,shapes,given,memories,infeasible,other program,other budget,failing,compiler,absent"


@pytest.fixture(scope="module")
def said() -> list[dict[str, dict[str, Any]]]:
    """What each of two processes says of each case."""
    return [{each["case"]: each for each in one} for one in ask(LAW)]


def same(first: dict[str, Any], *others: dict[str, Any]) -> None:
    for other in others:
        for name in ("form", "saved", "kept", "stages", "budget", "peak", "losses"):
            assert first[name] == other[name], name


def test_all_have_the_plan_of_the_first(said: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (each["plan"] for each in said)
    same(first, second)
    assert first["peak"] <= BUDGET
    assert not first["left_alone"]
    assert first["losses"] == pytest.approx(first["plain"], rel=1e-6)
    assert first["cached"] > 0 == second["cached"]


def test_each_shape_has_a_plan(said: list[dict[str, dict[str, Any]]]) -> None:
    for which in ("first", "second"):
        same(*(each["shapes"][which] for each in said))
    assert said[0]["shapes"]["first"]["saved"] != said[0]["shapes"]["second"]["saved"]


def test_a_plan_that_is_given_is_followed(said: list[dict[str, dict[str, Any]]]) -> None:
    same(*(each["given"] for each in said), said[0]["plan"])


def test_the_smallest_memory_rules(said: list[dict[str, dict[str, Any]]]) -> None:
    same(*(each["memories"] for each in said))
    assert said[0]["memories"]["budget"] == SMALLEST // 2


def test_a_step_of_one_process_is_its_own_affair(said: list[dict[str, dict[str, Any]]]) -> None:
    assert said[0]["alone"]["peak"] <= 2 * BUDGET


def test_functions_follow_what_was_found_first(said: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (each["checkpoint"] for each in said)
    assert first == second
    assert first["dots"]


def test_a_refusal_is_the_same_everywhere(said: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (each["infeasible"] for each in said)
    assert first["type"] == "InfeasibleBudgetError"
    assert first["min_peak_nbytes"] > first["budget_nbytes"]
    assert first == second


@pytest.mark.parametrize(
    "case, words",
    [
        ("other program", "another version of the step"),
        ("other budget", f"budget {BUDGET + 1}, here {BUDGET}"),
    ],
)
def test_what_differs_is_said_in_all(said: list[dict[str, dict[str, Any]]], case: str, words: str) -> None:
    for each in said:
        assert (each[case]["type"], each[case]["process"]) == ("ProcessError", 1)
        assert words in each[case]["message"]


@pytest.mark.parametrize(
    "case, own, words",
    [("failing", "ZeroDivisionError", "the user's own"), ("compiler", "RuntimeError", "out of luck")],
)
def test_the_failure_of_one_is_that_of_all(
    said: list[dict[str, dict[str, Any]]], case: str, own: str, words: str
) -> None:
    first, second = (each[case] for each in said)
    assert (second["type"], second["message"]) == (own, words)
    assert (first["type"], first["process"]) == ("ProcessError", 1)
    assert f"{own}: {words}" in first["message"]


def test_nobody_waits_for_one_that_does_not_come(said: list[dict[str, dict[str, Any]]]) -> None:
    absent = said[0]["absent"]
    assert (absent["type"], absent["process"]) == ("ProcessError", 1)
    assert "did not join" in absent["message"]


def test_nobody_waits_for_one_that_was_killed() -> None:
    first, _ = ask("killed 1", ended=(1,))
    assert (first[0]["type"], first[0]["process"]) == ("ProcessError", 1)


def test_nobody_waits_for_the_first_where_it_was_killed() -> None:
    """JAX ends a process whose coordinator is gone; where it does not, we say so."""
    assert all(each["type"] == "ProcessError" for each in ask("killed 0", ended=(0, 1))[1])


@pytest.mark.slow
def test_four_processes() -> None:
    everyone = ask("plan,shapes", count=4)
    for case in range(2):
        first, *others = (each[case] if case == 0 else each[case]["first"] for each in everyone)
        same(first, *others)
    ended = ask("killed 2", count=4, ended=(2,))
    assert [each[0]["process"] for i, each in enumerate(ended) if i != 2] == [2, 2, 2]
