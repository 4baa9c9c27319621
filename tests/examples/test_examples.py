"""Every example and notebook runs, at tiny sizes, and says what it promises."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import jaxremat

ROOT = Path(__file__).parents[2]
TINY = {
    "quickstart.py": "--layers 2 --width 16 --batch 256 --budget min --steps 2",
    "gpt.py": "--layers 2 --width 32 --length 64 --batch 2 --steps 2",
    "nnx_mlp.py": "--layers 2 --width 16 --batch 512 --budget min --steps 2",
    "deep_resnet.py": "--blocks 2 3 7 2 --width 8 --batch 2 --size 32 --classes 10 --budget min --steps 2",
    "equinox_mlp.py": "--layers 2 --width 16 --batch 512 --steps 2",
    "haiku_mlp.py": "--layers 2 --width 16 --batch 512 --steps 2",
    "own_solver.py": "--layers 3 --batch 4 --share 0.75 --steps 1",
}
TRAINERS = {"imagenet.py": 250, "llm.py": 250}
"""The lines that scripts for real data may have; what they do is tested in `test_trainers`."""

OF_SHAPES = {"llama_70b.py": 218, "llama_lora.py": 284}
"""The lines that scripts may have in which no step runs."""


def test_every_example_is_listed_here() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert scripts == TINY.keys() | TRAINERS.keys() | OF_SHAPES.keys()


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


@pytest.mark.parametrize("script", OF_SHAPES)
def test_an_example_of_shapes_is_short(script: str) -> None:
    assert len((ROOT / "examples" / script).read_text().splitlines()) <= OF_SHAPES[script]


@pytest.mark.slow
def test_the_step_of_many_gpus_is_planned_and_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = "--hosts 2 --devices 2 --layers 3 --width 256 --hidden 512 --heads 4 --groups 2 --length 512"
    saved = tmp_path / "table.json"
    line += f" --words 2048 --batches 8 --budget 64MiB --save {saved}"
    monkeypatch.setattr(sys, "argv", ["llama_70b.py", *line.split()])
    script = runpy.run_path(str(ROOT / "examples" / "llama_70b.py"), run_name="__main__")
    assert "on h100:2x2" in capsys.readouterr().out
    record = json.loads(saved.read_text())
    (row,) = record["rows"]
    assert row["planned"] <= 64 * 2**20 < row["plain"]
    assert f"{row['overhead']:+.1%}" in script["markdown"](record)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["LoRA", "all weights"])
def test_the_step_of_an_8b_model_is_planned_and_saved(
    trained: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "rows.json"
    line = "--layers 2 --tokens 256 --width 128 --hidden 384 --words 1024 --target cpu --budget 50%"
    line += f" --save {saved}" + (" --full" if trained == "all weights" else "")
    monkeypatch.setattr(sys, "argv", ["llama_lora.py", *line.split()])
    script = runpy.run_path(str(ROOT / "examples" / "llama_lora.py"), run_name="__main__")
    plan = script["plan"]
    assert plan.budget_nbytes == plan.baseline_peak_nbytes // 2
    assert 0 < plan.compiled_peak_nbytes <= plan.budget_nbytes
    assert "256 tokens, within 50%" in capsys.readouterr().out
    record = json.loads(saved.read_text())
    (row,) = record["rows"]
    assert row["planned"] == plan.compiled_peak_nbytes < row["by hand"] <= row["plain"]
    by_hand, planned = (jaxremat.format_nbytes(row[name]) for name in ("by hand", "planned"))
    assert f"| {trained} | 256 | " in script["markdown"](record)
    assert f" | {by_hand} | {planned} | 50% |" in script["markdown"](record)


@pytest.mark.parametrize("script", TRAINERS)
def test_a_trainer_is_one_file_that_says_how_to_start_it(script: str) -> None:
    text = (ROOT / "examples" / script).read_text()
    assert len(text.splitlines()) <= TRAINERS[script]
    assert "import examples" not in text and "from ." not in text and "from examples" not in text
    stated = text.split('"""')[1]
    flags = set(re.findall(r"--[a-z]+", stated))
    assert {"--data", "--run", "--budget", "--coordinator", "--processes", "--process"} <= flags
    assert all(f'add_argument("{flag}"' in text for flag in flags)


def test_a_planner_of_your_own_is_as_short_as_promised() -> None:
    text = (ROOT / "examples" / "own_solver.py").read_text()
    planner = re.search(r"@dataclass.*?(?=\n\n\n)", text, re.DOTALL)
    assert planner is not None and len(planner[0].splitlines()) <= 40


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SAY = {
    "1_quickstart": ("Plan: peak", "cannot be met"),
    "2_double_the_batch": ("does not fit", "Plan: peak", "planned  "),
    "3_how_the_planner_thinks": (
        "residuals: made by the forward pass",
        "proven to be at least",
        "Frontier: 10 budgets",
    ),
    "4_fit_an_h100_from_a_laptop": (
        "1.31 billion parameters",
        "batch 32\nPlan: peak",
        "At the compiled peak of",
    ),
    "5_write_your_own_planner": ("PeakShaver: no rule broken", 'Careless breaks the rule "budget"', "milp: "),
    "6_digits": ("Plan: peak", "planned  last loss"),
    "7_nnx": ("Plan: peak", "optimize  first loss"),
    "8_scan_with_remat": ("nn.remat", "planned: same memory"),
}
"""What notebooks print, where more than running is asked of them."""


def printed(book: Any) -> str:
    """All text that the cells of a notebook have put out."""
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    return "\n".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    book = nbformat.read(path, as_version=4)
    kept = printed(book)
    client = NotebookClient(
        book, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises where a cell does
    for said in SAY.get(path.stem, ()):
        assert said in printed(book) and said in kept


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_fit_to_be_opened_anywhere(path: Path) -> None:
    """Numbered, installs the library first, and keeps what it has put out, pictures too, in a file of moderate size."""
    assert re.match(r"\d_[a-z0-9_]+$", path.stem)
    assert f"notebooks/{path.name}" in (ROOT / "README.md").read_text()
    assert f"notebooks/{path.stem}.md" in (ROOT / "docs" / "mkdocs.yml").read_text()
    assert path.stat().st_size < 700_000
    book = nbformat.read(path, as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert '"pip", "install"' in cells[0].source
    (source,) = (line for line in cells[0].source.splitlines() if line.startswith("JAXREMAT = "))
    first = nbformat.read(NOTEBOOKS[0], as_version=4)
    assert source in next(cell.source for cell in first.cells if cell.cell_type == "code"), "one constant"
    last = [out for cell in cells[-3:] for out in cell.outputs]
    assert any({"image/png", "text/html"} & set(out.get("data", {})) for out in last), "it ends in a picture"
    assert all(cell.execution_count for cell in cells), "run it, and save it with its outputs"
    assert not any(
        out.output_type == "error" or out.get("name") == "stderr" for cell in cells for out in cell.outputs
    )
    assert "/home/" not in path.read_text() and "/tmp/" not in path.read_text()
