"""Benchmark scripts: rows that are written one at a time, command lines, and what each measures at small sizes."""

import json
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import make_step

import jaxremat
from examples.benchmarks import depth, jax_remat_tests, records, residuals, reversible, splitting
from examples.benchmarks.jax_remat_tests import BOTH, REASONS, RESULTS, failures, markdown, unexplained
from examples.benchmarks.joint import forms, recomputing, within
from examples.benchmarks.networks import program
from examples.benchmarks.networks.divisible import DIVISIBLE
from examples.benchmarks.runner import Rows, completed
from jaxremat._rewrite._reversed_chains import chains
from jaxremat._rewrite._reversed_loops import reversible_nbytes
from jaxremat._rewrite._trace import Traced, trace


def test_rows_that_are_there_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "net-full.json", []

    def row(name: str) -> records.Record:
        made.append(name)
        return {"name": name}

    def wanted(*names: str) -> Rows:
        return {name: partial(row, name) for name in names}

    completed(path, {"kind": "some"}, wanted("a"))
    found = completed(path, {"kind": "some"}, wanted("a", "b"))
    assert made == ["a", "b"]
    assert found == records.read(path) and found["kind"] == "some"
    assert {key: row["name"] for key, row in found["rows"].items()} == {"a": "a", "b": "b"}
    assert {row["library"] for row in found["rows"].values()} == {records.library_version()}
    assert "net-full b" in capsys.readouterr().out
    completed(path, {"kind": "some"}, wanted("a"), fresh=True)
    completed(path, {"kind": "some"}, wanted("a", "b"), stale=lambda row: row["name"] == "b")
    assert made == ["a", "b", "a", "b"]
    assert records.read(path)["rows"].keys() == {"a", "b"}


def test_the_command_line_says_what_is_measured_and_where_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = residuals.BENCHMARK
    quick = benchmark.asked([])
    assert (quick.names, quick.scale, quick.shares, quick.folder) == (["vit"], "tiny", [0.5], records.OUT)
    asked = benchmark.asked(["gpt", "unet", "--save", "--shares", "0.4", "--target", "l4"])
    assert (asked.names, asked.scale, asked.shares) == (["gpt", "unet"], "full", [0.4])
    assert benchmark.path(asked, "gpt") == records.RESULTS / "residuals" / "gpt-full-l4.json"
    assert benchmark.path(benchmark.asked(["gpt", "--results", str(tmp_path)]), "gpt").is_relative_to(
        tmp_path
    )
    assert len(benchmark.asked(["all"]).names) == 9
    with pytest.raises(SystemExit):
        benchmark.asked(["alexnet"])
    assert "nothing is called alexnet; there are resnet50" in capsys.readouterr().err


def planned(way: AbstractContextManager[dict[str, Any]], share: float) -> jaxremat.Plan:
    args = [jnp.ones((64, 64))] * 8, jnp.ones((4096, 64))
    with way as options:
        budget = f"{share:.0%} of temporaries"
        return jaxremat.plan(make_step(), *args, budget=budget, donate_argnums=0, **options)


def test_each_does_what_it_says() -> None:
    repeated, formed = planned(recomputing(), 0.6), planned(forms(), 0.6)
    assert not repeated.form
    assert not repeated.drops_nothing
    assert formed.form
    assert formed.drops_nothing
    assert planned(within(formed.form), 0.3).form == formed.form


@pytest.mark.parametrize("each", [7, 10, 33])
def test_the_deepest_net_is_found_by_a_few_compilations(each: int) -> None:
    """Peaks that grow by about the same for each block."""
    compiled = []

    def peak(blocks: int) -> int:
        compiled.append(blocks)
        return 100 + each * blocks + blocks // 10

    found = depth.deepest(peak, 5000, (20, 30))
    assert peak(found["blocks"]) == found["peak_nbytes"] <= 5000 < peak(found["blocks"] + 1)
    assert len(compiled) <= 10


def test_plans_that_use_all_of_the_budget_say_little_of_deeper_ones() -> None:
    """The deepest net is looked for in small steps then."""
    compiled = []

    def peak(blocks: int) -> int:
        compiled.append(blocks)
        return 5000 if blocks <= 44 else 120 * blocks

    assert depth.deepest(peak, 5000, (20, 30))["blocks"] == 44
    assert max(compiled) < 60


def test_levels_lower_the_compiled_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "ROWS", 1024)
    found = {row["form"]: row["peak_nbytes"] for row in depth.peaks(64)}
    assert list(found) == list(depth.FORMS)
    assert list(found.values()) == sorted(found.values(), reverse=True)


RECORD: dict[str, Any] = json.loads(RESULTS.read_text())


def test_each_failure_has_a_reason_and_each_reason_a_failure() -> None:
    found = RECORD["outcomes"]
    assert unexplained(found) == []
    for each in REASONS:
        assert all(test in failures(found, way) for way in each["emitters"] for test in each["tests"])


def test_a_failure_without_a_reason_is_seen() -> None:
    outcomes = {
        "test_a": "passed",
        "test_remat_eval_counter": "passed",
        "test_b": "skipped",
        "test_c": "failed",
    }
    lost = {
        "test_a": "TypeError: no",
        "test_remat_eval_counter": "3",
        "test_b": "skipped",
        "test_c": "failed",
    }
    found = {"jax": outcomes, "policy": lost, "custom_vjp": outcomes}
    assert unexplained(found) == [("policy", "test_a")]
    text = markdown({"jax": "9.9", "outcomes": found})
    assert "**unexplained**: TypeError: no" in text
    assert '| `emit="policy"` | 0 | 1 | 1 | 1 |' in text
    assert all(f'With `emit="{way}"`' in text for way in BOTH)
    assert jax_remat_tests.reason("custom_vjp", "test_remat_vmap") and not jax_remat_tests.reason(
        "policy", "x"
    )


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
