"""The benchmarks of MONeT's networks and of devices, on networks small enough for a test."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_close
from test_benchmarks import Perceptron, perceptron

import jaxremat
from examples.benchmarks import bench, device, monet, records, table
from examples.benchmarks.networks import Program, program
from examples.benchmarks.networks.training import Images, make_program

pytestmark = pytest.mark.slow

SUBJECT = "gpt-small-unrolled-f32"
ROWS = ("plain", "block", "dots", "3/4", "at block", "knapsack 3/4")


def wide(name: str, *, remat: Any = "none", **_: Any) -> Program:
    """Takes the place of `networks.program` where nothing is run: cuBLAS's scratch memory is little beside it."""
    model = Perceptron(remat)
    return make_program(
        name, model, optax.sgd(0.1, momentum=0.9), Images(1 << 17, 4).maker(model, jnp.float32)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with one subject, planned for the H100 once."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "program", wide)
        patch.setattr(records, "OUT", folder / "out")
        monet.bench(SUBJECT, "h100", scale="tiny", folder=folder, say=lambda line: None).run(ROWS)
    return folder


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "monet" / f"{SUBJECT}-h100-tiny.json").read_text())


def test_rows_hold_what_was_planned_and_compiled(folder: Path) -> None:
    record = record_of(folder)
    assert list(record["rows"]) == list(ROWS)
    plain, block, _, most, at_block, knapsack = record["rows"].values()
    assert most["budget_nbytes"] == plain["peak_nbytes"] * 3 // 4
    assert at_block["budget_nbytes"] == block["peak_nbytes"] >= at_block["peak_nbytes"]
    assert knapsack["solver"] == "knapsack"
    for row in (block, most, at_block, knapsack):
        assert row["overhead_at"].keys() == {"p100", "h100"}
        assert row["overhead_at"]["h100"] == pytest.approx(row["roofline_overhead"])  # compiled for the H100
        assert row["overhead_at"]["p100"] != row["overhead_at"]["h100"]
        assert row["extra_traffic"] == pytest.approx(
            row["traffic_nbytes"] / plain["traffic_nbytes"] - 1, abs=1e-4
        )
    for row in (most, at_block, knapsack):
        assert row["fits"] and row["solve_seconds"] >= 0
    assert record["environment"]["device"].endswith("without the device")


def test_the_knapsack_is_credited_with_its_own_plans_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "program", wide)
    monkeypatch.setattr(records, "OUT", tmp_path / "out")
    monkeypatch.setattr(monet.Monet, "solver", lambda self, name: jaxremat.MinCut())
    of = monet.bench(SUBJECT, "h100", scale="tiny", folder=tmp_path, say=lambda line: None)
    row = of.run(["knapsack 3/4"])["rows"]["knapsack 3/4"]
    assert row["infeasible"] and row["min_peak_nbytes"] is None


def test_the_published_figures_are_rows() -> None:
    subjects = [subject for subject in monet.SUBJECTS.values() if subject.published]
    assert len(subjects) == 5
    for subject in subjects:
        rows = subject.published
        shares = [float(a) / float(b) for a, b in (name.split("/") for name in rows)]
        assert len(rows) == 6 and shares == sorted(shares, reverse=True)
        assert max(shares) < 0.72 and min(shares) > 0.33
        assert list(rows.values()) == sorted(rows.values())  # less memory, more time
        assert set(rows) <= set(monet.rows_of(subject))
    published = monet.SUBJECTS["resnet50"].published
    assert (published["10/15.06"], published["5/15.06"]) == (0.0322, 0.1195)


def test_the_sizes_are_monets() -> None:
    sizes = {
        name: subject.sizes.get("batch") for name, subject in monet.SUBJECTS.items() if subject.published
    }
    assert sizes == {"resnet50": 184, "googlenet": 320, "unet": 11, "mobilenet_v2": 272, "vgg16": 176}
    _, batch = program("unet", batch=11).abstract_args()
    assert batch["inputs"].shape == (11, 416, 608, 3)


def test_a_scanned_gpt_is_the_unrolled_one() -> None:
    unrolled, scanned = (program("gpt", scale="tiny", scanned=scanned) for scanned in (False, True))
    state, batch = unrolled.make_args()

    def stacked(tree: Any) -> Any:
        """The blocks' leaves one on top of the other, wherever there are blocks."""
        if not isinstance(tree, dict):
            return tree
        names = sorted(name for name in tree if name.startswith("block"))
        rest = {name: leaf for name, leaf in tree.items() if name not in names}
        return {**rest, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree[n] for n in names))}

    start, _ = scanned.make_args()
    params = stacked(state["params"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, start["params"])
    (after, loss), (wanted, expected) = (
        jax.jit(step.step)({**begin, "params": weights}, batch)
        for step, begin, weights in ((scanned, start, params), (unrolled, state, state["params"]))
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    flat, flat_wanted = jax.tree.leaves(after["params"]), jax.tree.leaves(stacked(wanted["params"]))
    assert_close(flat, flat_wanted, rtol=1e-3, atol=1e-5)


def test_a_device_is_measured_in_processes_of_its_own(tmp_path: Path) -> None:
    """The CPU reports no memory, so that its figures stay empty."""
    rows = ["plain", "9/10"]
    given = [SUBJECT, "--scale", "tiny", "--runs", "2", "--results", str(tmp_path), "--rows", *rows]
    device.main([*given, "--kernels", "plain"])
    record = json.loads((tmp_path / "device" / f"{SUBJECT}-cpu-tiny.json").read_text())
    assert list(record["rows"]) == rows
    for name, row in record["rows"].items():
        assert row["runs"] == 2 and row["step_seconds"] > 0
        assert row["device_peak_nbytes"] is row["device_before_nbytes"] is row["beyond_nbytes"] is None
        assert name == "plain" or row["difference"] < 1e-3
    kinds = record["rows"]["plain"]["kernel_kinds"].values()
    assert sum(kind["seconds"] for kind in kinds) > 0 and sum(kind["kernels"] for kind in kinds) > 10
    text = table.everything(tmp_path)
    assert "Everything here was measured on the device" in text
    assert {line.count(" | ") for line in text.splitlines() if line.startswith("| ")} == {4, 8}


def test_plans_made_elsewhere_need_no_solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "program", perceptron)
    monkeypatch.setattr(records, "OUT", tmp_path / "here")
    said: list[str] = []
    of = device.bench(
        SUBJECT, scale="tiny", folder=tmp_path, plans=tmp_path / "elsewhere", profile="roofline"
    )
    of.say = said.append
    assert of.given is not None
    of.given.mkdir(parents=True)
    plain = perceptron("gpt", scale="tiny")
    stats = jaxremat.memory(plain.step, *plain.abstract_args(), donate_argnums=0)
    plan = jaxremat.plan(
        plain.step, *plain.abstract_args(), budget=int(0.8 * stats.peak_nbytes), donate_argnums=0
    )
    plan.save(of.given / of.plan_path("2/3").name)
    plan.save(of.given / of.plan_path("1/2").name)
    monkeypatch.setattr("jaxremat._plan._plan_cache.make_plan", None)  # nothing is planned here
    rows = of.run(["plain", "2/3", "1/3"], check=True)["rows"]
    assert rows.keys() == {"plain", "2/3"}
    assert rows["2/3"]["peak_nbytes"] == plan.compiled_peak_nbytes and rows["2/3"]["difference"] < 1e-5
    assert any("no plan in" in line for line in said)
    other = json.loads(plan.to_json()) | {"fingerprint": "another"}
    (of.given / of.plan_path("1/2").name).write_text(json.dumps(other))
    assert of.run(["1/2"])["rows"].keys() == {"plain", "2/3"}
    assert any("was made for the program another" in line for line in said)


def test_only_the_steps_own_peak_is_taken_for_it() -> None:
    shown = device.of_allocator(1000, None, before=200, after=1500)
    assert (shown["device_peak_nbytes"], shown["beyond_nbytes"]) == (1500, 500)
    assert device.of_allocator(1000, 900, before=200, after=1500)["beyond_nbytes"] == 600
    for before, after in ((1500, 1500), (None, None)):
        hidden = device.of_allocator(1000, 900, before, after)
        assert hidden["device_peak_nbytes"] is hidden["beyond_nbytes"] is None
