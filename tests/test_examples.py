"""Every example, the README's code and the notebook run, at tiny sizes, and say what they promise."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import jaxremat

ROOT = Path(__file__).parent.parent
TINY = {
    "quickstart.py": "--layers 2 --width 16 --batch 256 --budget min --steps 2",
    "gpt.py": "--layers 2 --width 32 --length 64 --batch 2 --steps 2",
    "nnx_mlp.py": "--layers 2 --width 16 --batch 512 --budget min --steps 2",
    "own_solver.py": "--layers 3 --batch 4 --share 0.75 --steps 1",
}


def test_every_example_is_listed_here() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert scripts == set(TINY)


@pytest.mark.slow
@pytest.mark.parametrize("script", TINY)
def test_an_example_runs(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *TINY[script].split()])
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    out = capsys.readouterr().out
    assert "plain" in out and re.search(r"\d (KiB|MiB|B)\b", out)
    assert re.search(r"loss \d", out)


@pytest.mark.parametrize("script", TINY)
def test_an_example_is_short_and_can_be_sized(script: str) -> None:
    text = (ROOT / "examples" / script).read_text()
    assert len(text.splitlines()) <= 120
    assert '"--steps"' in text


def test_a_planner_of_your_own_is_as_short_as_promised() -> None:
    text = (ROOT / "examples" / "own_solver.py").read_text()
    planner = re.search(r"@dataclass.*?(?=\n\n\n)", text, re.DOTALL)
    assert planner is not None and len(planner[0].splitlines()) <= 40


@pytest.mark.slow
def test_the_readmes_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, on_a_target = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(first, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Plan: peak ")
    exec(compile(on_a_target, "README.md", "exec"), {})
    assert "\nPlan: peak " in capsys.readouterr().out
    assert jaxremat.Plan.load("plan.json").budget_nbytes == 8 * 2**30


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    book = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text())
    scope: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(book["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), scope)
    out = capsys.readouterr().out
    assert "Plan: peak" in out and "cannot be met" in out


def test_the_notebook_is_small() -> None:
    assert (ROOT / "notebooks" / "quickstart.ipynb").stat().st_size < 50_000
