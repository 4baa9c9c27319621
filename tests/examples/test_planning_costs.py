"""The benchmark of what planning costs: its counts, which no clock changes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from chains import make_step

from examples.benchmarks import planning
from examples.benchmarks.planning import BENCHMARK, FEWER, POINTS, Step, plain, planned, swept


def chain(name: str, scale: str, examples: float = 1.0) -> Step:
    """Takes the place of `step_of`."""
    x = jax.ShapeDtypeStruct((int(1024 * examples), 64), jnp.float32)
    return make_step(), ([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, x), (0,)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(planning, "step_of", chain)


def test_a_plan_from_the_cache_takes_one_compilation_and_no_solve() -> None:
    needs = plain("chain", "tiny", None)
    budget = needs["base_nbytes"] + int(0.8 * needs["temporaries_nbytes"])
    first = planned("chain", "tiny", None, budget)
    again = planned("chain", "tiny", None, budget)
    assert first["solves"] > 0 and first["compilations"] > 2
    assert 0 < first["first_cpu_seconds"] <= first["cpu_seconds"]
    assert (again["compilations"], again["other_compilations"], again["solves"]) == (1, 0, 0)
    assert again["peak_nbytes"] == first["peak_nbytes"] <= budget
    nearby = planned("chain", "tiny", None, budget, FEWER)
    assert nearby["like"] and nearby["compilations"] <= 2 and nearby["solves"] <= 1
    assert nearby["peak_nbytes"] <= budget
    row = {"plain": needs, "planned": first, "again": again, "nearby": nearby, "budget_nbytes": budget}
    text = BENCHMARK.markdown([{"environment": {"platform": "cpu"}, "rows": {"chain | 0.8": row}}])
    assert (
        f"| {first['compilations']} ({first['other_compilations']}) | 1 (0) | {nearby['compilations']} (0) "
        in text
    )


def test_a_sweep_is_told() -> None:
    found = swept("chain", "tiny", None)
    assert 2 < found["points"] <= POINTS and found["compilations"] < 3 * POINTS
    row = {"plain": plain("chain", "tiny", None), "planned": found}
    text = BENCHMARK.markdown([{"environment": {"platform": "cpu"}, "rows": {"chain | sweep": row}}])
    assert "| chain | sweep |" in text


def test_a_budget_that_nothing_fits_is_told() -> None:
    found = planned("chain", "tiny", None, 1 << 18)
    assert found["least_nbytes"] > 1 << 18 and found["first_cpu_seconds"] is None
    needs = plain("chain", "tiny", None)
    record = {"environment": {"platform": "cpu"}, "rows": {"chain | 0.1": {"plain": needs, "planned": found}}}
    assert "| chain | 10% |" in BENCHMARK.markdown([record])
