"""Mechanisms that are switched off one at a time: that each is there to be, where it acted, and what its rows say."""

from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import ablation, records
from examples.benchmarks.ablation import ALL_ON, BENCHMARK, MECHANISMS, PROGRAMS, Mechanism
from examples.benchmarks.runner import key
from jaxremat import EXACT
from jaxremat._runtime._mechanisms import known


def test_each_is_in_the_library_under_the_name_by_which_it_is_switched_off() -> None:
    names = [mechanism.name for mechanism in MECHANISMS]
    assert len({*names}) == len(names)
    assert {*names} >= known() - {"doubling"}  # of a test
    for mechanism in MECHANISMS:
        with mechanism.off():
            pass
        assert set(mechanism.on) <= {"cpu", "gpu"}
        # What is denied is what some program may do.
        allowed = {kind for options in PROGRAMS.values() for kind in (*EXACT, *options.get("allow", ()))}
        assert mechanism.denied in {"", *allowed}


def test_a_plan_of_whom_something_is_denied_may_do_all_else() -> None:
    copies = next(m for m in MECHANISMS if m.denied == "bf16_residuals")
    assert copies.of({"allow": (*EXACT, "bf16_residuals")}) == {"allow": EXACT}
    host = next(m for m in MECHANISMS if m.options)
    assert host.of({"offload": True}) == {"allow": EXACT, "offload": False}


def test_a_form_acted_where_it_is_in_the_plan_and_all_else_where_it_was_recorded() -> None:
    row = {
        "acted": {"memory order": 3, "masks": 1},
        "form": [["loop", 0, [4, 6]], ["loop", 1, [8]], ["copies", 0, [1]]],
        "loops": ["the step: in 2 microbatches, with accumulated gradients"],
        "offloaded_nbytes": 12,
    }
    acted = {m.name: m.acted(row) for m in MECHANISMS}
    assert {name: count for name, count in acted.items() if count} == {
        "microbatches": 1,
        "values in fewer bits": 1,
        "copies in host memory": 12,
        "loops with nested checkpointing": 1,
        "loops with nested checkpointing, absorbed updates": 2,
        "memory order": 3,
        "masks of results": 1,
    }


def record(share: float | str = 0.5, **rows: Any) -> records.Record:
    measured = {
        "library": "new",
        "acted": 1,
        "compiled_overhead": 0.1,
        "first_prediction": -0.01,
    }
    return {
        "kind": "ablation",
        "environment": {"platform": "h100"},
        "rows": {key("gpt", share, name): measured | row for name, row in rows.items()},
    }


OFF = {"compiled_overhead": 0.13, "first_prediction": 0.03}


def test_worth_is_what_a_step_loses() -> None:
    found = ablation.worth(record(**{ALL_ON: {}, "triggers": OFF, "levels": {"least_nbytes": 7}}))
    (triggers,), (levels,) = found["triggers"], found["levels"]
    assert (triggers.where, round(triggers.points, 6), round(triggers.unsure, 6)) == ("gpt, 50%", 3.0, 2.0)
    assert levels.points == float("inf")


def test_at_the_least_memory_it_is_what_a_step_needs_more() -> None:
    rows = {ALL_ON: {"peak_nbytes": 60, "temporaries_nbytes": 50}, "triggers": OFF | {"peak_nbytes": 65}}
    found = record("min", **rows)
    (triggers,) = ablation.worth(found)["triggers"]
    assert (triggers.where, triggers.points) == ("gpt, min", 10.0)
    assert "| triggers | 1 | +10.0 | gpt, min |" in ablation.markdown([found])


def test_rows_of_another_version_and_of_what_did_not_act_are_not_compared() -> None:
    idle = {"library": "new", "acted": 0}
    found = ablation.worth(record(**{ALL_ON: {}, "triggers": OFF | {"library": "old"}, "levels": idle}))
    assert found == {"levels": []}


def test_a_mechanism_is_switched_off_only_where_it_acted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Mechanism | None] = []

    def measured(name: str, share: float, mechanism: Mechanism | None, asked: Any) -> records.Record:
        made.append(mechanism)
        return {"acted": {} if mechanism else {"memory order": 2}}

    monkeypatch.setattr(ablation, "measured", measured)
    line = ["unet", "--only", "memory order", "fine stages", "--shares", "min", "--results", str(tmp_path)]
    found = BENCHMARK.run(BENCHMARK.asked(line), "unet")["rows"]
    assert BENCHMARK.run(BENCHMARK.asked(line), "unet")["rows"] == found
    assert [mechanism and mechanism.name for mechanism in made] == [None, "memory order"]
    assert found["unet | min | memory order"]["acted"] == 2
    assert found["unet | min | fine stages"]["acted"] == 0
    monkeypatch.setattr(records, "library_version", lambda: "another")
    BENCHMARK.run(BENCHMARK.asked(line), "unet")
    assert len(made) == 4


def test_a_mechanism_that_acts_while_it_is_switched_off_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "measured", lambda *_: {"acted": {"memory order": 2}})
    asked = BENCHMARK.asked(["unet", "--only", "memory order", "--results", str(tmp_path)])
    with pytest.raises(RuntimeError, match="'memory order' acted in unet while it was switched off"):
        BENCHMARK.run(asked, "unet")


@pytest.mark.slow
def test_a_mechanism_that_is_off_does_nothing(tmp_path: Path) -> None:
    """Without stages' barriers' triggers the compiler computes again when it likes, which costs memory."""
    line = ["gpt_scanned", "--scale", "tiny", "--only", "barriers: triggers", "--shares", "0.6"]
    asked = BENCHMARK.asked([*line, "--results", str(tmp_path)])
    rows = BENCHMARK.run(asked, "gpt_scanned")["rows"]
    on, off = (rows[key("gpt_scanned", 0.6, name)] for name in (ALL_ON, "barriers: triggers"))
    assert on["peak_nbytes"] <= on["budget_nbytes"] == off["budget_nbytes"]
    assert on["acted"]["barriers: triggers"] == off["acted"] > 0
    assert any(off.get(key) != on[key] for key in ("peak_nbytes", "compiled_overhead"))


@pytest.mark.slow
def test_a_step_in_a_shard_map_is_planned_within_it(tmp_path: Path) -> None:
    asked = BENCHMARK.asked(["mlp mapped", "--scale", "tiny", "--shares", "0.5", "--results", str(tmp_path)])
    row = ablation.measured("mlp mapped", 0.5, None, asked)
    assert row["acted"]["steps within a shard_map"]
    assert row["peak_nbytes"] <= row["budget_nbytes"]
