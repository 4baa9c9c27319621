"""Steps in parts as people write them, and the table of what plans make of them."""

from pathlib import Path

import jax
import numpy as np
import pytest

from examples.benchmarks import records, splitting
from examples.benchmarks.networks.divisible import DIVISIBLE


@pytest.mark.parametrize("name", DIVISIBLE)
def test_steps_by_hand_compute_the_plain_step(name: str) -> None:
    step = DIVISIBLE[name]("tiny")
    args = step.args()
    wanted = jax.jit(step.plain)(*args)
    assert step.by_hand
    for each in step.by_hand.values():
        # The moments, which are linear in the gradients; weights move by Adam's signs.
        for a, b in zip(
            jax.tree.leaves(wanted[0][1]), jax.tree.leaves(jax.jit(each)(*args)[0][1]), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(np.abs(a).max()) + 1e-9)


def test_a_step_by_hand_needs_less_and_does_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = []

    class Planned:
        def __init__(self, budget: object):
            budgets.append(budget)

        def __call__(self, step: object) -> "Planned":
            return self

        def compile(self, *args: object) -> None:
            raise splitting.InfeasibleBudgetError("no", budget_nbytes=1, min_peak_nbytes=7)

    monkeypatch.setattr(splitting.jaxremat, "optimize", lambda budget, **_: Planned(budget))
    splitting.BENCHMARK.main(["pinn", "--scale", "tiny", "--results", str(tmp_path)])
    (record,) = records.read_all(tmp_path, "splitting")
    plain, parts = (record["rows"][name] for name in (splitting.PLAIN, "parts"))
    assert parts["peak_nbytes"] < plain["peak_nbytes"] / 2
    assert 0 < parts["flops"] < 1.2 * plain["flops"]  # an iteration's products, as often as it runs
    assert "at least 7 B" in splitting.markdown([record])
    assert budgets == ["min", parts["peak_nbytes"]]
