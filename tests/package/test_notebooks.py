"""Every notebook, at sizes that take little time, with the library of the wheel and without this folder."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SMALLER = {
    "1_quickstart": [("layers: int = 3", "layers: int = 1"), ("(1024, 32)", "(256, 32)")],
    "2_double_the_batch": [
        ("LENGTH, BATCH = 6, 256, 4, 128, 8", "LENGTH, BATCH = 2, 16, 2, 16, 8"),
        ("for _ in range(2):", "for _ in range(1):"),
        ("run(fn, 6)", "run(fn, 2)"),
    ],
    "3_how_the_planner_thinks": [
        ("(64, 256, 384, 192, 512, 128, 384, 256, 512, 192, 320, 64)", "(64, 256, 384, 192, 128, 64)"),
        ("BATCH = 4096", "BATCH = 1024"),
        ("points=10", "points=3"),
    ],
    "4_fit_an_h100_from_a_laptop": [
        ("VOCABULARY = 24, 2048, 16, 1024, 50304", "VOCABULARY = 2, 128, 2, 128, 256"),
        ("for batch in (16, 32):", "for batch in (32,):"),
    ],
    "5_write_your_own_planner": [],
    "6_digits": [("STEPS = 256, 32, 4, 60", "STEPS = 64, 8, 2, 3")],
    "7_nnx": [("STEPS = 2048, 128, 4, 150", "STEPS = 256, 16, 2, 5"), ('"60% of peak"', '"min"')],
    "8_scan_with_remat": [("BATCH = 8, 128, 4, 128, 16", "BATCH = 3, 16, 2, 16, 4")],
}
"""What is replaced in each notebook, once."""

RUN = """
import sys
from pathlib import Path

root, notebook, library = map(Path, sys.argv[1:])
sys.path = [path for path in sys.path if Path(path).resolve() != root]
import jaxremat
from matplotlib import pyplot

assert Path(jaxremat.__file__).is_relative_to(library), jaxremat.__file__

pyplot.show = lambda: pyplot.close("all")
module = sys.modules["__main__"] = type(sys)("__main__")  # Flax looks there for the types of fields
exec(compile(notebook.read_text(), notebook.name, "exec"), vars(module))
"""
"""Run a notebook's code in an interpreter that does not know this folder."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "library")
    return folder / "library"


@pytest.mark.parametrize("stem", SMALLER)
def test_a_notebook_runs_from_the_wheel(stem: str, library: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    book = json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    source = "\n".join(cells)
    for old, new in SMALLER[stem]:
        assert source.count(old) == 1
        source = source.replace(old, new)
    script = tmp_path / f"{stem}.py"
    script.write_text(source)
    env = os.environ | {"PYTHONPATH": str(library), "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"}
    words = [sys.executable, "-P", "-c", RUN, str(ROOT), str(script), str(library)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
