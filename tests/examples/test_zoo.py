"""Plans that come with the library: what they say of themselves, which programs they are of, how they are found."""

import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxremat
from examples.benchmarks import zoo as script
from examples.benchmarks.networks import NAMES, program
from jaxremat import ArgumentError, Plan, PlanMismatchError, zoo

ENTRIES = zoo.entries()
HERE = [e for e in ENTRIES if e.here]
QUICK = [e for e in HERE if e.network.endswith("_scanned")]
"""Few equations: traced in a second or two. The others are left to the slow tests."""
SMALL = [e for e in QUICK if e.scale == "small"]


def name(entry: zoo.Entry) -> str:
    return entry.name


def test_there_are_plans_and_they_say_what_they_are() -> None:
    assert len({(e.name, e.jax) for e in ENTRIES}) == len(ENTRIES) > 0
    for e in ENTRIES:
        assert e.network in NAMES and e.target in ("cpu", *jaxremat.targets())
        assert e.budget == "min" or 0 < float(e.budget.removesuffix("% of temporaries")) < 100
        assert {"jax", "jaxlib", "flax", "optax", "jaxremat"} == e.versions.keys()
        assert e.versions["jax"].startswith(f"{e.jax}.")
        assert (
            e.settings["program"] == f'examples.benchmarks.networks.program("{e.network}", scale="{e.scale}")'
        )
        assert e.settings["parameters"] > 0 and "[" in e.settings["inputs"]
        assert e.plan.compiled_peak_nbytes is not None
        assert e.plan.compiled_peak_nbytes <= e.plan.budget_nbytes < e.plan.baseline_peak_nbytes
        assert not (e.plan.drops_nothing and not e.plan.loops) and str(e.plan).startswith("Plan: peak")


def test_their_files_are_small_and_named_after_them() -> None:
    files = sorted(script.FOLDER.glob("*.json*"))
    names = {f"{e.network}-{e.scale}-{e.target}-jax{e.jax}{zoo.SUFFIX}" for e in ENTRIES}
    assert names == {f.name for f in files}
    assert sum(f.stat().st_size for f in files) < 800_000
    assert all(f.stat().st_size < 100_000 for f in files)


def test_quick_ones_are_of_todays_programs() -> None:
    if not QUICK:
        pytest.skip(f"the zoo has no plan for jax {zoo.JAX_MINOR} that is quick to trace")
    assert [name(e) for e in script.stale(QUICK)] == []


@pytest.mark.slow
def test_all_are_of_todays_programs() -> None:
    assert [name(e) for e in script.stale(HERE)] == []


@pytest.mark.slow
@pytest.mark.parametrize("entry", SMALL, ids=name)
def test_they_keep_their_peaks(entry: zoo.Entry) -> None:
    if entry.target == "cpu":
        pytest.skip("another processor may need a little more or less")
    assert script.applied(entry).compiled_peak_nbytes == entry.plan.compiled_peak_nbytes


def test_one_line_finds_a_plan() -> None:
    e = ENTRIES[0]
    if HERE:
        e = HERE[0]
        assert jaxremat.zoo.load(e.network, e.budget, target=e.target, scale=e.scale) == e.plan
    with pytest.raises(
        ArgumentError, match=r"The zoo has no plan `alexnet full 50% h100`. It has googlenet, gpt"
    ):
        zoo.load("alexnet", "50%")
    with pytest.raises(
        ArgumentError, match=f"no plan `{e.network} {e.scale} 1% {e.target}`. It has .*{e.name}"
    ):
        zoo.load(e.network, "1%", target=e.target, scale=e.scale)


def test_a_plan_for_another_jax_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "JAX_MINOR", "0.99")
    e = ENTRIES[0]
    assert not any(each.here for each in ENTRIES)
    with pytest.raises(PlanMismatchError, match=rf"`{e.name}` is for jax .*{e.jax}.*, and this is jax 0\.99"):
        zoo.load(e.network, e.budget, target=e.target, scale=e.scale)


def test_a_file_is_read_as_it_was_written() -> None:
    e = ENTRIES[0]
    shared = {k: getattr(e, k) for k in ("network", "scale", "target", "jax", "versions", "settings")}
    text = zoo.to_json(shared, {"50%": e.plan, "min": e.plan})
    assert list(zoo.parse(text, "x.json")) == [replace(e, budget=b) for b in ("50% of temporaries", "min")]
    for wrong in (
        "",
        "[]",
        "{}",
        text.replace('"zoo_format": 1', '"zoo_format": 2'),
        text.replace('"scale"', '"size"'),
    ):
        with pytest.raises(PlanMismatchError, match=r"x\.json is not a file of the zoo"):
            list(zoo.parse(wrong, "x.json"))
    with pytest.raises(PlanMismatchError, match="reads format"):
        list(zoo.parse(text.replace('"format":', '"format":9'), "x.json"))


@pytest.mark.slow
def test_the_script_collects_plans_and_finds_stale_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="No plan of gpt_scanned is kept"):
        script.make("gpt_scanned", "tiny", "cpu", tmp_path)
    step = program("gpt_scanned", scale="tiny")
    plan = jaxremat.plan(step.step, *step.abstract_args(), budget="min", donate_argnums=step.donate_argnums)
    plan.save(tmp_path / "min.json")
    path = script.make("gpt_scanned", "tiny", "cpu", tmp_path, tmp_path)
    assert path.name == f"gpt_scanned-tiny-cpu-jax{zoo.JAX_MINOR}.json.xz"
    assert "0.33: no plan in" in capsys.readouterr().out
    (entry,) = zoo.parse(lzma.decompress(path.read_bytes()).decode(), path.name)
    assert entry.budget == "min" and entry.here and not entry.plan.alive
    assert script.applied(entry).compiled_peak_nbytes == entry.plan.compiled_peak_nbytes
    other = replace(entry, plan=replace(entry.plan, fingerprint="another"))
    assert list(script.stale([entry, other])) == [other]
    monkeypatch.setattr(zoo, "entries", lambda: (entry,))
    script.main(["--check", "--compile"])
    assert "gpt_scanned tiny min cpu: of this program, peak" in capsys.readouterr().out
    monkeypatch.setattr(zoo, "entries", lambda: (entry, other))
    with pytest.raises(SystemExit, match="1 of 2 plans are stale"):
        script.main(["--check"])


def test_the_command_line_lists_shows_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from jaxremat._cli import application

    def run(*words: str) -> Any:
        return CliRunner().invoke(application(), ["zoo", *words], prog_name="jaxremat")

    said = json.loads(run("list", "--json").stdout)
    assert [(e["network"], e["budget"], e["here"]) for e in said] == [
        (e.network, e.budget, e.here) for e in ENTRIES
    ]
    listed = run("list").stdout
    assert all(e.network in listed for e in ENTRIES)
    e = ENTRIES[0]
    monkeypatch.setattr(zoo, "JAX_MINOR", e.jax)
    words = (e.network, e.budget, "--target", e.target, "--scale", e.scale)
    found = run("show", *words)
    assert found.exit_code == 0
    assert str(e.plan) in found.stdout and e.settings["inputs"] in found.stdout and "flax: " in found.stdout
    found = run("export", *words, str(tmp_path / "plan.json"))
    assert found.exit_code == 0 and Plan.load(tmp_path / "plan.json") == e.plan
    for wrong, code in ((("show", "alexnet", "50%"), 2), (("show",), 2), ((), 2)):
        found = run(*wrong)
        assert found.exit_code == code
        assert found.stderr.count("\n") == 1 or "Usage" in found.output
    monkeypatch.setattr(zoo, "JAX_MINOR", "0.99")
    found = run("show", *words)
    assert found.exit_code == 3 and "this is jax 0.99" in found.stderr and found.stderr.count("\n") == 1
