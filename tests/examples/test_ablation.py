"""Mechanisms that are switched off one at a time: that each is there to be, and what its rows say."""

from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import ablation, records
from examples.benchmarks.ablation import ALL_ON, MECHANISMS, Mechanism


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_each_is_in_the_library_under_the_name_by_which_it_is_switched_off(mechanism: Mechanism) -> None:
    with mechanism.off():
        pass
    assert mechanism.instead or mechanism.options or mechanism.passes
    assert set(mechanism.on) <= {"cpu", "gpu"}


def test_names_are_told_apart() -> None:
    assert len({mechanism.name for mechanism in MECHANISMS}) == len(MECHANISMS)


def record(**rows: Any) -> records.Record:
    measured = {"compiled_overhead": 0.1, "first_prediction": -0.01, "planning_seconds": 4.0}
    return {
        "kind": "ablation",
        "environment": {"platform": "h100"},
        "rows": {f"gpt | 0.5 | {name}": measured | row for name, row in rows.items()},
    }


def test_worth_is_what_a_step_loses() -> None:
    off = {"compiled_overhead": 0.13, "first_prediction": 0.03, "planning_seconds": 3.0}
    found = ablation.worth(record(**{ALL_ON: {}, "triggers": off, "levels": {"least_nbytes": 7}}))
    (triggers,), (levels,) = found["triggers"], found["levels"]
    assert (triggers.where, round(triggers.points, 6), round(triggers.unsure, 6)) == ("gpt, 50%", 3.0, 2.0)
    assert triggers.seconds == -1.0
    assert levels.points == float("inf")


def test_the_table_begins_with_what_matters_most() -> None:
    off = {"compiled_overhead": 0.13, "first_prediction": 0.03}
    text = ablation.markdown(
        record(**{ALL_ON: {}, "nothing": {}, "triggers": off, "levels": {"least_nbytes": 7}})
    )
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| levels | no plan | gpt, 50% |  | +0.0 | gpt, 50% |  |",
        "| triggers | +3.0 | gpt, 50% | +3.0 | +2.0 | gpt, 50% | +2.0 |",
        "| nothing | +0.0 | gpt, 50% | +0.0 | +0.0 | gpt, 50% | +0.0 |",
    ]


@pytest.mark.slow
def test_a_mechanism_that_is_off_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stages' barriers' triggers the compiler computes again when it likes, which costs memory."""
    monkeypatch.setattr(ablation, "PLANNING_SECONDS", 20.0)
    path = tmp_path / "cpu.json"
    found = ablation.run(["gpt"], [0.6], None, path, ["triggers of barriers"], "tiny")
    on, off = (found["rows"][f"gpt | 0.6 | {name}"] for name in (ALL_ON, "triggers of barriers"))
    assert on["peak_nbytes"] <= on["budget_nbytes"] == off["budget_nbytes"]
    assert off != on
    assert records.read(path)["rows"].keys() == found["rows"].keys()
