"""Networks whose blocks can be undone, and the table of what that is worth."""

from pathlib import Path

import jax
import pytest

from examples.benchmarks import records, reversible
from examples.benchmarks.networks import program
from jaxremat._rewrite._reversed_chains import chains
from jaxremat._rewrite._reversed_loops import reversible_nbytes
from jaxremat._rewrite._trace import Traced, trace


def traced(network: str) -> Traced:
    step = program(network, scale="tiny")
    return trace(jax.jit(step.step, donate_argnums=step.donate_argnums), step.abstract_args(), {})


def test_each_stage_of_the_residual_network_can_be_undone() -> None:
    step = traced("revnet")
    found = chains(step.jaxpr, step.loop_of, step.loops)
    assert len(found) == 2
    assert all(len(chain) >= 3 for chain in found)


def test_the_transformer_s_loop_carries_both_streams_back() -> None:
    forward, backward = traced("revtransformer").loops
    tokens, width = 2 * 16, 32
    assert reversible_nbytes(forward.eqn, backward.eqn) == 2 * 4 * tokens * width


def test_rows_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def measure(step: object, budget: object, **_: object) -> records.Record:
        budgets.append(budget)
        return {"peak_nbytes": 7, "plain_nbytes": 9, "compiled_overhead": 0.0}

    monkeypatch.setattr(reversible, "measure", measure)
    for _ in range(2):
        reversible.BENCHMARK.main(["revnet", "--scale", "tiny", "--results", str(tmp_path)])
    assert budgets == ["min", "min", 7]
