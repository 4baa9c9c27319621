"""Budgets and byte counts as text: every spelling, every refusal with its words."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxremat import BudgetError, JaxrematError, format_nbytes
from jaxremat._runtime._budgets import OF_STEPS, parse_budget
from jaxremat._runtime._bytes import least_budget, parse_nbytes

SPELLINGS = {
    "1": 1,
    "123": 123,
    "123B": 123,
    "123 b": 123,
    "2kB": 2_000,
    "2KB": 2_000,
    "2KiB": 2_048,
    "500MB": 500_000_000,
    "500 MiB": 500 * 2**20,
    "500mib": 500 * 2**20,
    "24GB": 24 * 10**9,
    "24GiB": 24 * 2**30,
    "  24  GiB  ": 24 * 2**30,
    "24gib": 24 * 2**30,
    "24GIB": 24 * 2**30,
    "1.5GiB": 3 * 2**29,
    ".5GiB": 2**29,
    "0.5TB": 5 * 10**11,
    "2TiB": 2**41,
    "1PB": 10**15,
    "1PiB": 2**50,
    "1e9": 10**9,
    "1E9B": 10**9,
    "1.5e3MB": 1_500_000_000,
    "2e-3GB": 2_000_000,
    "1e+3": 1000,
}


@pytest.mark.parametrize(("text", "nbytes"), SPELLINGS.items())
def test_spellings(text: str, nbytes: int) -> None:
    for parsed in (parse_nbytes(text), parse_budget(text, None), parse_budget(text, 80 * 2**30)):
        assert parsed == nbytes
        assert type(parsed) is int


@pytest.mark.parametrize("number", [1, 123, 24 * 2**30, 10**15, 3.0, 1e9])
def test_numbers_are_bytes(number: float) -> None:
    assert parse_budget(number, None) == number
    assert type(parse_budget(number, None)) is int


@pytest.mark.parametrize("text", ["min", "MIN", " Min "])
def test_min(text: str) -> None:
    assert parse_budget(text, None) == "min"


def test_shares_are_of_the_device() -> None:
    assert parse_budget(0.5, 80 * 2**30) == 40 * 2**30
    assert parse_budget(0.9, 1000) == 900
    assert parse_budget(1.0, 1000) == 1000
    assert parse_budget(None, 1000) == 1000
    assert parse_budget(1, 1000) == 1  # an int is bytes


SHARES = {
    "0.5": 500,  # of the device's memory
    "50% of device": 500,
    "50%": 400,
    " 50 % of  Peak ": 400,
    "12.5% of peak": 100,
    "100% of peak": 800,
    "50% of temporaries": 500,
    ".5% of temporaries": 203,
}


@pytest.mark.parametrize(("text", "nbytes"), SHARES.items())
def test_shares_in_text(text: str, nbytes: int) -> None:
    """Of a device of 1000 bytes, and of a step whose arguments take 200, and whose temporaries 600."""
    assert parse_budget(text, 1000, lambda: (200, 600)) == nbytes


def test_shares_of_what_is_not_known() -> None:
    for text in ("0%", "101%", "150% of temporaries"):
        with pytest.raises(BudgetError, match=rf"is not a share between 0 and 100%\. {SPELLED}"):
            parse_budget(text, 1000, lambda: (200, 600))
    for text in ("-1%", "50% of memory", "50% of"):
        with pytest.raises(BudgetError, match=SPELLED):
            parse_budget(text, 1000, lambda: (200, 600))
    with pytest.raises(BudgetError, match="is for functions that are differentiated later"):
        parse_budget("40% of residuals", 1000, lambda: (200, 600))
    with pytest.raises(BudgetError, match="is a share of a step's memory, but there is no step here"):
        parse_budget("40%", 1000)


@pytest.mark.parametrize("budget", [None, 0.9, 1.0])
def test_a_share_of_an_unknown_device(budget: float | None) -> None:
    text = rf"The budget {re.escape(repr(budget))} is a share of the device's memory, and this device reports none\."
    with pytest.raises(
        BudgetError, match=text + r' Write the budget in bytes instead, for example "8GiB", or a share'
    ):
        parse_budget(budget, None)


SPELLED = re.escape(f"Write {OF_STEPS}")


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "24 GiBs", "24G", "24Gi", "twenty", "24GiB!", "1,5GB", "24 G iB", "-1GB", "+1GB", "0x10", "nan",
     "inf", "1 2", "1.GB", "1..5GB", "1e", "80 percent", "1_000"],
)  # fmt: skip
def test_text_that_is_no_number_of_bytes(text: str) -> None:
    shown = re.escape(repr(text))
    with pytest.raises(BudgetError, match=rf"The budget {shown} is not a number of bytes\. {SPELLED}"):
        parse_budget(text, 1000)


@pytest.mark.parametrize(
    "budget",
    [0, -1, -5.0, 0.0, 1.5, 10.25, float("nan"), float("inf"), float("-inf"), -0.5, "0", "0GiB", "0.4B", "1e-9MB",
     "1e999"],
)  # fmt: skip
def test_numbers_that_are_no_budget(budget: Any) -> None:
    text = rf"The budget {re.escape(repr(budget))} is not a positive whole number of bytes\. {SPELLED}"
    with pytest.raises(BudgetError, match=text):
        parse_budget(budget, 1000)


@pytest.mark.parametrize("budget", [True, False, [1], (1,), {"a": 1}, b"1GB", object(), 1j])
def test_types_that_are_no_budget(budget: Any) -> None:
    text = rf"A budget cannot be a {type(budget).__name__} \({re.escape(repr(budget))}\)\. {SPELLED}"
    with pytest.raises(BudgetError, match=text):
        parse_budget(budget, 1000)


def test_budget_errors_can_be_caught_as_value_errors() -> None:
    with pytest.raises(ValueError):
        parse_nbytes("much")
    assert issubclass(BudgetError, JaxrematError)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**10, "10.0 KiB"),
        (100 * 2**10, "100 KiB"),
        (2**20, "1.00 MiB"),
        (500 * 2**20, "500 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (24 * 2**30, "24.0 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (5000 * 2**30, "4.88 TiB"),
        (-(2**20), "-1.00 MiB"),
        (-1, "-1 B"),
        # Rounding must not leave four digits where three are promised.
        (10 * 2**20 - 1, "10.0 MiB"),
        (100 * 2**20 - 1, "100 MiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30 - 1, "1.00 GiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(1, 2**45))
def test_formatted_bytes_can_be_read_again(nbytes: int) -> None:
    """To the three digits that are shown."""
    assert abs(parse_nbytes(format_nbytes(nbytes)) - nbytes) <= max(nbytes * 0.006, 0)


@given(st.integers(1, 2**53))
def test_whole_bytes_are_read_exactly(nbytes: int) -> None:
    assert parse_nbytes(str(nbytes)) == parse_nbytes(f"{nbytes}B") == parse_nbytes(nbytes) == nbytes


@given(st.integers(1, 2**50))
def test_a_least_budget_may_be_written_as_it_is_shown(nbytes: int) -> None:
    exact, shown = re.fullmatch(r'(\d+) bytes \("(.+)"\)', least_budget(nbytes)).groups()  # type: ignore[union-attr]
    assert int(exact) == nbytes
    assert nbytes <= parse_nbytes(shown) <= 1.011 * nbytes + 1
