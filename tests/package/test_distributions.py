"""The wheel and the sdist: what is in them, what they say of themselves, and that what is installed runs.

`make package` tries the wheel in an empty environment besides, with the quick tests.
"""

import ast
import email
import email.message
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from fresh_environment import QUICK

import jaxremat

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = jaxremat.__version__
OTHER_NAMES = {"sklearn": "scikit-learn", "markupsafe": "jinja2"}
"""Packages that are imported by another name than they are installed by, or that come with another."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, the wheel that is built from it, and in `direct/` the wheel of the folder itself."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    for words in ([str(folder), str(ROOT)], [str(folder / "direct"), "--wheel", str(ROOT)]):
        done = subprocess.run([*build, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    assert path.name == f"jaxremat-{VERSION}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.message_from_bytes(wheel.read(f"jaxremat-{VERSION}.dist-info/METADATA"))


def sources() -> set[str]:
    """The files of the package here, but for what Python has compiled."""
    paths = (path for path in (ROOT / "jaxremat").rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in paths if path.parent.name != "__pycache__"}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == sources()
    assert {f"jaxremat/{name}" for name in ("py.typed", "_report/report.css", "_report/report.html")} <= names
    assert sum(name.startswith("jaxremat/zoo/") and name.endswith(".json.xz") for name in names) >= 10
    assert f"jaxremat-{VERSION}.dist-info/licenses/LICENSE" in wheel.namelist()
    entry = wheel.read(f"jaxremat-{VERSION}.dist-info/entry_points.txt").decode()
    assert "jaxremat = jaxremat.__main__:main" in entry


def test_the_metadata_say_what_it_is_and_needs(metadata: email.message.Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("jaxremat", VERSION)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.13"} <= set(
        metadata.get_all("Classifier", [])
    )
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).startswith("# jaxremat")


def test_there_is_one_version_in_one_place() -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_the_sdist_is_whole_and_builds_the_same_wheel(dist: Path, wheel: zipfile.ZipFile) -> None:
    (path,) = dist.glob("*.tar.gz")
    assert path.name == f"jaxremat-{VERSION}.tar.gz"
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert sources() <= names
    beside = {
        "pyproject.toml",
        "requirements.lock",
        "README.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "PKG-INFO",
    }
    assert beside <= names
    assert all(
        any(name.startswith(each) for name in names)
        for each in (*QUICK, "examples/quickstart.py", "notebooks/")
    )
    assert not any(
        part.startswith((".pytest", ".venv", "__pycache__")) for name in names for part in name.split("/")
    )
    (direct,) = (dist / "direct").glob("*.whl")
    assert direct.read_bytes() == Path(str(wheel.filename)).read_bytes()


def test_what_is_in_the_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import jaxremat, pathlib, sys; from jaxremat import zoo\n"
        f"assert pathlib.Path(jaxremat.__file__).is_relative_to({str(tmp_path)!r}), jaxremat.__file__\n"
        "entry = next(e for e in zoo.entries() if e.here)\n"
        "entry.plan.report().save('report.html')\n"
        "print(jaxremat.__version__, entry.plan.baseline_peak_nbytes)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{VERSION} ")
    assert "<style>" in (tmp_path / "report.html").read_text()


def test_everything_that_is_imported_is_asked_for() -> None:
    lines = [
        *PROJECT["dependencies"],
        *(x for each in PROJECT["optional-dependencies"].values() for x in each),
    ]
    asked = {re.split(r"[^\w-]", line)[0] for line in lines}
    imported = set()
    for path in (ROOT / "jaxremat").rglob("*.py"):
        tree = ast.parse(path.read_text())
        checks = (
            n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
        )
        typing_only = {inner for each in checks for inner in ast.walk(each)}
        for node in ast.walk(tree):
            if node in typing_only:
                continue
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).partition(".")[0])
    imported -= {"jaxremat", *sys.stdlib_module_names}
    assert {"jax", "mip", "sklearn"} <= imported
    assert {OTHER_NAMES.get(name, name) for name in imported} <= asked


def test_every_extra_that_a_text_names_is_there() -> None:
    """In the README, notebooks, examples, docstrings and errors alike: `pip install ".[...]"`."""
    kinds = ("*.md", "jaxremat/**/*.py", "examples/**/*.py", "notebooks/*.ipynb", "docs/**/*.md")
    texts = {path: path.read_text() for kind in kinds for path in ROOT.glob(kind)}
    named = {
        (path.name, extra)
        for path, text in texts.items()
        for found in re.findall(r"(?:jaxremat|\"\.|'\.)\[([a-z]+(?:,[a-z]+)*)\]", text)
        for extra in found.split(",")
    }
    assert len(named) > 5
    assert [each for each in sorted(named) if each[1] not in PROJECT["optional-dependencies"]] == []
