"""The benchmark of what planning costs: its counts, which no clock changes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from chains import make_step

from examples.benchmarks import planning
from examples.benchmarks.planning import BENCHMARK, Step, plain, planned

ARGS = ([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((1024, 64), jnp.float32))


def chain(name: str, scale: str) -> Step:
    """Takes the place of `step_of`."""
    return make_step(), ARGS, (0,)


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
    row = {"plain": needs, "planned": first, "again": again, "budget_nbytes": budget}
    text = BENCHMARK.markdown([{"environment": {"platform": "cpu"}, "rows": {"chain | 0.8": row}}])
    assert f"| {first['compilations']} ({first['other_compilations']}) | 1 (0) | {first['solves']} |" in text


def test_a_budget_that_nothing_fits_is_told() -> None:
    found = planned("chain", "tiny", None, 1 << 18)
    assert found["least_nbytes"] > 1 << 18 and found["first_cpu_seconds"] is None
    needs = plain("chain", "tiny", None)
    record = {"environment": {"platform": "cpu"}, "rows": {"chain | 0.1": {"plain": needs, "planned": found}}}
    assert "| chain | 10% |" in BENCHMARK.markdown([record])
