"""The benchmark scripts on a network small enough for a test: what they measure, keep and print."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jaxremat
from examples.benchmarks import bench as bench_module
from examples.benchmarks import chain, records, step_table, steps, table
from examples.benchmarks.networks.training import Images, Program, Remat, make_program, rematted, save_dots
from jaxremat._compiler._devices import detect

pytestmark = pytest.mark.slow

ROWS = ("plain", "block", "0.75")


class Layers(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(nn.Dense(32)(jnp.tanh(nn.Dense(32)(x))))


class Perceptron(nn.Module):
    """Pairs of dense layers, with much larger activations than weights."""

    remat: Remat = "none"
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for index in range(3):
            x = rematted(Layers, self.remat, save_dots)(name=f"block{index}")(x)
        return nn.Dense(self.classes)(x)


def perceptron(name: str, *, remat: Remat = "none", scale: str, **_: Any) -> Program:
    """Takes the place of `networks.program`."""
    assert scale == "tiny"
    model = Perceptron(remat)
    return make_program(name, model, optax.sgd(0.1, momentum=0.9), Images(1024, 4).maker(model, jnp.float32))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "program", perceptron)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with one network, measured once."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module, "program", perceptron)
        bench(folder).run(ROWS, runs=2, check=True)
    return folder


@pytest.fixture
def folder(measured: Path, tmp_path: Path) -> Path:
    """That folder, for the test to change."""
    return shutil.copytree(measured, tmp_path / "results")


def bench(folder: Path) -> bench_module.Bench:
    path = folder / jax.default_backend() / "vgg16-tiny.json"
    plans = folder / "plans" / path.stem
    return bench_module.Bench("vgg16", "tiny", path, time_limit=2.0, plans=plans, say=lambda line: None)


def test_rows_hold_what_was_measured(folder: Path) -> None:
    record = json.loads(bench(folder).path.read_text())
    assert list(record["rows"]) == list(ROWS)
    assert {"python", "jax", "jaxlib", "device", "cores", "platform"} <= record["environment"].keys()
    plain, block, plan = (record["rows"][name] for name in ROWS)
    assert plain["peak_nbytes"] == plain["base_nbytes"] + plain["temporaries_nbytes"]
    assert block["peak_nbytes"] < plain["peak_nbytes"] and block["extra_flops"] > 0.1
    assert plan["budget_nbytes"] == int(plain["base_nbytes"] + 0.75 * plain["temporaries_nbytes"])
    assert plan["fits"] and plan["peak_nbytes"] <= plan["budget_nbytes"]
    assert [plan["first_predicted_nbytes"], plan["first_compiled_nbytes"]] == plan["rounds"][0]
    assert plan["extra_flops"] > 0 and plan["recomputed"] > 0 and 0 < plan["compile_count"] <= 8
    assert 0 < plan["planning_seconds"] < plan["total_seconds"]
    for row in (block, plan):
        assert row["runs"] == 2 and row["time_ratio"] > 0
        assert row["difference"] < 1e-5


def test_a_second_run_measures_nothing_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bench(folder).path.read_text()
    with monkeypatch.context() as patch:
        patch.delattr(bench_module.Bench, "_compile")
        bench(folder).run(ROWS, runs=2, check=True)
    assert bench(folder).path.read_text() == before


def test_a_row_gets_the_measure_that_it_lacks(folder: Path) -> None:
    path = bench(folder).path
    record = records.read(path)
    row = record["rows"]["block"]
    found = row.pop("difference")
    records.write(path, record)
    bench(folder).run(["block"], check=True)
    assert records.read(path)["rows"]["block"] == {**row, "difference": found}


def test_a_kept_plan_is_used_only_where_it_gives_the_measured_peak(folder: Path) -> None:
    again = bench(folder)
    again.record = records.read(again.path)
    row = again.record["rows"]["0.75"]
    step = again._again("0.75")
    assert step is None or jaxremat.MemoryStats.of(step).peak_nbytes == row["peak_nbytes"]
    row["peak_nbytes"] -= 1
    assert again._again("0.75") is None
    assert again._again("0.5") is None


def test_an_infeasible_budget_is_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise jaxremat.InfeasibleBudgetError("no", budget_nbytes=1, min_peak_nbytes=123)

    monkeypatch.setattr(jaxremat, "optimize", refuse)
    row = bench(folder).run(["0.01"])["rows"]["0.01"]
    assert row["infeasible"] and row["min_peak_nbytes"] == 123
    assert "infeasible: least 123 B" in step_table.markdown([records.read(bench(folder).path)])
    assert list(records.read(bench(folder).path)["rows"]) == [*ROWS, "0.01"]


def test_rows_of_another_machine_are_not_mixed_in(folder: Path) -> None:
    path = bench(folder).path
    record = records.read(path)
    record["environment"]["device"] = "abacus"
    records.write(path, record)
    with pytest.raises(SystemExit, match=r"measured elsewhere \(device 'abacus', now .*--fresh"):
        bench(folder).run(["0.5"])


def test_differences_are_relative_to_each_array() -> None:
    def step(factor: float) -> jax.stages.Compiled:
        jitted = jax.jit(lambda state, batch: ({"a": factor * state["a"], "b": state["b"]}, batch.sum()))
        return jitted.lower(*args).compile()

    args = ({"a": jnp.array([1.0, 1e3]), "b": jnp.zeros(2)}, jnp.arange(3))
    found = bench_module.largest_differences(
        {"plain": step(1.0), "same": step(1.0), "other": step(1.25)}, args
    )
    assert found["same"][0] == 0.0
    assert found["other"] == (0.25, "[0]['a']")
    with pytest.raises(FloatingPointError, match="not finite"):
        bench_module.largest_differences({"plain": step(1.0), "other": step(jnp.inf)}, args)


def test_shares_are_read_as_rows() -> None:
    assert [steps._share(text) for text in ("0.50", "min", "1")] == ["0.5", "min", "1.0"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"1\.5 is no 'min', .* or share in"):
        steps._share("1.5")


def test_the_tables_replace_what_is_between_the_markers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "page.md"
    for path in (readme, page):
        path.write_text(f"above\n\n{table.BEGIN}\nold\n{table.END}\n\nbelow\n")
    command = ["--results", str(folder), "--readme", str(readme), "--page", str(page)]
    assert table.main([*command, "--check"]) == 1
    assert table.main(command) == 0
    assert "first prediction of the peak off by" in capsys.readouterr().out
    assert table.main([*command, "--check"]) == 0
    assert "old" not in readme.read_text()
    text = page.read_text()
    assert text.startswith("above\n\n") and text.endswith("\n\nbelow\n") and "old" not in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    labels = [line.split(" | ")[0] for line in lines]
    assert labels == ["| step", "| ---", "| plain", "| by hand, per block", "| 75% of temporaries"]
    assert {line.count("|") for line in lines} == {len(step_table.COLUMNS) + 3}


def test_tables_need_a_place(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    both = ["--readme", str(readme), "--page", str(readme)]
    assert table.main(["--results", str(folder), *both]) == 1
    assert f"Put these two lines into it: {table.BEGIN}" in capsys.readouterr().out
    assert table.main(["--results", str(tmp_path / "none"), *both, "--check"]) == 0


def test_networks_of_a_loop_have_one_more_step_by_hand() -> None:
    assert bench_module.by_hand("gpt") == ("block", "dots")
    assert bench_module.by_hand("gpt_scanned") == ("block", "dots", "scan")


def test_a_step_by_hand_gives_its_peak_as_a_budget(tmp_path: Path) -> None:
    bench = bench_module.Bench("gpt_scanned", "tiny", tmp_path / "x.json")
    bench.record = {"rows": {"scan": {"peak_nbytes": 900}}}
    assert bench.budget("at scan") == 900
    names = ["plain", "block", "dots", "scan", "0.5", "0.33", "min", "at block", "at scan"]
    assert sorted(set(names), key=bench.place) == names


def test_a_chain_is_planned_without_compiling() -> None:
    detect(jax.devices()[0])  # measures the processor by compiling, once
    with bench_module.compile_stopwatch() as compiled:
        record = chain.measure(300, 0.5)
    assert compiled == []
    assert 300 <= record["equations"] < 320
    assert list(record["seconds"]) == ["jax", "trace", "lower", "simulate", "solve", "emit"]
    assert record["fits"] and record["predicted_nbytes"] <= record["budget_nbytes"] < record["plain_nbytes"]
    json.dumps(record, allow_nan=False)
    assert "A chain of 30" in chain.markdown([{"rows": {"300 | 0.5": record}}])
