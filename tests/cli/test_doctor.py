"""`jaxremat doctor`: what works is tried, and every fault that is put there is found, with what mends it."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax
import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import jaxremat
from jaxremat._cli import _doctor, application
from jaxremat._cli._doctor import Finding, Requirement, package, packages_of, requirements, within
from jaxremat._compiler import _target
from jaxremat._solver import _integer_program

LINES = [
    "jax<0.12,>=0.10",
    "optax",
    "rich>=13.9; extra == 'demo'",
    "scikit-learn; extra == 'demo'",
    "jax[cuda12-local]<0.12,>=0.10; (sys_platform == 'linux') and extra == 'targets'",
]


def doctor(*words: str) -> tuple[int, dict[str, Finding], str]:
    """The exit code, the findings by subject, and the text for people."""
    run = CliRunner().invoke
    text = run(application(), ["doctor", *words], prog_name="jaxremat", env={"COLUMNS": "200"})
    found = run(application(), ["doctor", "--json"], prog_name="jaxremat")
    assert found.exit_code == text.exit_code
    data = json.loads(found.stdout)
    assert data["ok"] == (found.exit_code == 0)
    return found.exit_code, {each["subject"]: Finding(**each) for each in data["findings"]}, text.stdout


def only(monkeypatch: pytest.MonkeyPatch, *kept: str) -> None:
    """Leave out the checks that start processes, but for these."""
    for name in {"solver", "target_compiler"} - set(kept):
        monkeypatch.setattr(_doctor, name, lambda *words, name=name: Finding(name, "ok", "left out"))


def test_what_is_installed_here_works() -> None:
    code, found, text = doctor()
    assert code == 0, text
    assert text.rstrip().splitlines()[-1].startswith("Everything required works.")
    assert found["jaxremat"].found.startswith(jaxremat.__version__)
    for subject in ("devices", "solver CBC", "solver HIGHS", "cache"):
        assert found[subject].state == "ok" and subject in text
    assert found["target compiler"].state in ("ok", "absent")
    if found["target compiler"].state == "ok":
        assert found["target compiler"].found.startswith("compiles for h100, jax-cuda1")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path / "file" / "cache"))
    code, found, text = doctor()
    assert code == 1 and "1 of " in text and "BROKEN" in text
    assert found["cache"].state == "broken" and found["cache"].found.startswith("Not a directory: ")
    assert found["cache"].remedy == "set JAXREMAT_CACHE to a writable folder"


def test_the_size_of_the_cache_and_nothing_left_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "a.json").write_text("x" * 2048)
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    assert _doctor.cache().found == f"{tmp_path}, 2.00 KiB in 1 file"
    assert [path.name for path in tmp_path.rglob("*.*")] == ["a.json"]


WORKERS = {
    "import mip_is_not_here\n": "ModuleNotFoundError: No module named 'mip_is_not_here'",
    "import os\nos.abort()\n": "SIGABRT",
    "def answer(request):\n    raise ValueError('no licence')\n": "ValueError: no licence",
    "def answer(request):\n    return 'OPTIMAL', 0.0, [0.0, 0.0, 0.0]\n": "returned [0.0, 0.0, 0.0] (OPTIMAL)",
}


@pytest.mark.parametrize("worker", WORKERS)
def test_solvers_that_are_missing_crash_refuse_or_err(
    worker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, "solver")
    script = tmp_path / "worker.py"
    script.write_text(worker)
    monkeypatch.setattr(_integer_program, "WORKER", script)
    code, found, _ = doctor()
    assert code == 1
    for engine, name in (("CBC", "mip"), ("HIGHS", "highsbox")):
        assert found[f"solver {engine}"].state == "broken"
        assert WORKERS[worker] in found[f"solver {engine}"].found
        assert found[f"solver {engine}"].remedy == f'pip install --force-reinstall "{name}"'


def test_the_compiler_of_targets_is_missing_of_another_version_or_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, "target_compiler")
    monkeypatch.setattr(_target, "version_of", lambda name: None)
    code, found, text = doctor()
    assert code == 0 and "are optional" in text
    assert found["target compiler"].state == "absent"
    assert ".[targets]" in text  # which is not taken for markup
    monkeypatch.setattr(_doctor.sys, "platform", "darwin")
    assert (
        _doctor.target_compiler().remedy == ""
        and "not available for this system" in _doctor.target_compiler().found
    )

    monkeypatch.setattr(_target, "version_of", lambda name: "0.9.0")
    code, found, _ = doctor()
    assert code == 1 and found["target compiler"].state == "broken"
    assert "0.9.0 is installed with jaxlib" in found["target compiler"].found
    assert "pip install" in found["target compiler"].found and not found["target compiler"].remedy

    monkeypatch.setattr(_target, "version_of", lambda name: importlib.metadata.version("jaxlib"))
    (tmp_path / "worker.py").write_text("import libnvptxcompiler\n")
    monkeypatch.setattr(_target, "WORKER", tmp_path / "worker.py")
    _target._compile.cache_clear()
    code, found, _ = doctor()
    assert code == 1 and "No module named 'libnvptxcompiler'" in found["target compiler"].found
    reinstall = f'pip install --force-reinstall "jax[cuda12-local]=={jax.__version__}" nvidia-cuda-nvcc-cu12'
    assert found["target compiler"].remedy == reinstall


def test_devices_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)

    def none() -> Any:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", none)
        patch.setenv("JAX_PLATFORMS", "tpu")
        code, found, _ = doctor()
    assert code == 1 and found["devices"].state == "broken"
    assert found["devices"].remedy.startswith("unset JAX_PLATFORMS, or see https://")
    assert found["devices"].found == "RuntimeError: Unable to initialize backend 'tpu'"
    monkeypatch.setattr(_doctor, "has_gpu", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert _doctor.devices().state == "absent" and 'pip install "jax[cuda12]"' in _doctor.devices().remedy


def test_packages_that_are_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: LINES)
    needed = requirements()
    assert needed[0] == Requirement("jax", "<0.12,>=0.10", "")
    assert [each.extra for each in needed] == ["", "", "demo", "demo", "targets"]
    assert needed[4] == Requirement("jax", "<0.12,>=0.10", "targets")
    assert package(needed[0]).state == "ok"
    missing = package(Requirement("no-such-package", ">=1.0", ""))
    assert (missing.state, missing.remedy) == ("broken", 'pip install "no-such-package>=1.0"')
    old = package(Requirement("jax", ">=9.0", ""))
    assert old.state == "broken" and old.found == f"{jax.__version__}, but must be >=9.0"
    extra = packages_of("demo", [Requirement("no-such-package", "", "demo"), needed[1]])
    assert (extra.state, extra.remedy) == ("absent", 'pip install ".[demo]"')
    assert packages_of("demo", [Requirement("jax", ">=9.0", "demo")]).state == "broken"


def test_a_package_that_is_missing_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["no-such-package>=1"])
    code, found, text = doctor()
    assert code == 1 and found["no-such-package"].found == "not installed"
    assert 'pip install "no-such-package>=1"' in text


def test_a_folder_that_is_not_installed_has_no_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    only(monkeypatch)
    monkeypatch.setattr(importlib.metadata, "requires", missing)
    code, found, _ = doctor()
    assert code == 0 and found["jaxremat"].found.endswith("imported from a folder")


@pytest.mark.parametrize(
    ("version", "range_", "inside"),
    [
        ("0.10.2", "<0.12,>=0.10", True),
        ("0.12.0", "<0.12,>=0.10", False),
        ("0.9.9", ">=0.10", False),
        ("0.12.8", ">=0.12", True),
        ("15", ">=13.9", True),
        ("2.0.0rc1", ">=2.0", True),
        ("1.0", "", True),
    ],
)
def test_ranges_of_versions(version: str, range_: str, inside: bool) -> None:
    assert within(version, range_) == inside
