"""This folder -> `dist/`, whose wheel passes the quick tests in an environment that has nothing else of the project.

    python tests/package/fresh_environment.py        # `make package`

Law: what is tried is what `pip install` gives a stranger. The environment is new, it and the tests lie outside of this
folder, and packages are those of `requirements.lock`. The sdist is tried by its wheel, which has to be the same file.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

QUICK = (
    "tests/test_structure.py",
    "tests/model",
    "tests/program",
    "tests/runtime",
    "tests/solver/test_integer_program.py",
    "tests/solver/test_check_solver.py",
    "tests/plan/test_plan_json.py",
    "tests/report/test_report.py",
    "tests/cli",
)
"""Tests of what a package may lack: modules, data files, requirements, commands, processes of their own."""

EXTRAS = "demo,tools,targets"


def main() -> None:
    """Build, install, try. Ends with another exit status than 0 where something of it fails."""
    with tempfile.TemporaryDirectory(prefix="jaxremat-") as folder:
        work = Path(folder)
        wheel = build(work)
        python = environment(work)
        _say(f"{wheel.name} alone: the library works, the command line says what it needs")
        install(python, str(wheel))
        alone(python, work)
        _say(f"with [{EXTRAS}]: the doctor, the packages' metadata, the quick tests, and the notebooks")
        install(
            python,
            f"{wheel}[{EXTRAS}]",
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "nbclient",
            "ipykernel",
            "twine",
        )
        with_extras(python, work)
        notebooks(python, work)
    _say("the packages in dist/ work")


def build(work: Path) -> Path:
    """An sdist and its wheel in `dist/`, and whether this folder's own wheel is the same. Returns the wheel."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    build = [sys.executable, "-m", "build", "--no-isolation"]  # with the lock's hatchling
    _run([*build, "--outdir", str(ROOT / "dist"), str(ROOT)])
    _run([*build, "--wheel", "--outdir", str(work / "direct"), str(ROOT)])
    (wheel,), (direct,) = (sorted(each.glob("*.whl")) for each in (ROOT / "dist", work / "direct"))
    if wheel.read_bytes() != direct.read_bytes():
        raise SystemExit(
            "make package: the sdist's wheel is not the one of the folder: does the sdist lack a file?"
        )
    return wheel


def environment(work: Path) -> Path:
    """A new environment with nothing in it. Returns its Python."""
    if uv := shutil.which("uv"):
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(work / "venv")])
    else:
        _run([sys.executable, "-m", "venv", str(work / "venv")])
    return work / "venv" / "bin" / "python"


def install(python: Path, *what: str) -> None:
    """Install packages, in the versions of the lock."""
    quiet = ["--quiet", "--constraint", str(ROOT / "requirements.lock"), *what]
    if uv := shutil.which("uv"):
        _run([uv, "pip", "install", "--python", str(python), *quiet])
    else:
        _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *quiet])


ALONE = """
import jax, jax.numpy as jnp, jaxremat, pathlib, sys
assert pathlib.Path(jaxremat.__file__).is_relative_to(sys.prefix), jaxremat.__file__

def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)
    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights))]

args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
plan = jaxremat.plan(step, *args, budget="min", donate_argnums=0)
assert plan.compiled_peak_nbytes < 0.8 * plan.baseline_peak_nbytes
print(str(plan).splitlines()[0])
print(f"{len(jaxremat.zoo.entries())} plans in the zoo")
"""


def alone(python: Path, work: Path) -> None:
    """Try the library without its extras."""
    _run([str(python), "-c", ALONE], cwd=work)
    _run([str(python.with_name("jaxremat")), "--version"], cwd=work)
    done = subprocess.run(
        [python.with_name("jaxremat"), "doctor"], cwd=work, env=_env(work), capture_output=True
    )
    if done.returncode != 4 or b'pip install ".[tools]"' not in done.stderr:
        raise SystemExit(f"make package: without its extras `jaxremat` says {done.stderr.decode()!r}")


def with_extras(python: Path, work: Path) -> None:
    """Try the command line, and run the quick tests."""
    _run([str(python.with_name("jaxremat")), "doctor"], cwd=work)
    _run([str(python), "-m", "twine", "check", "--strict", *map(str, (ROOT / "dist").iterdir())], cwd=work)
    shutil.copytree(ROOT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", work)  # pytest's settings
    _run([str(python), "-P", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *QUICK], cwd=work)


RUN = """
import sys, nbformat, nbclient
for path in sys.argv[1:]:
    print(path, flush=True)
    nbclient.NotebookClient(nbformat.read(path, as_version=4), timeout=900, kernel_name="python3").execute()
"""


def notebooks(python: Path, work: Path) -> None:
    """Run every notebook from top to bottom, outside of this folder: each raises where a cell does."""
    shutil.copytree(ROOT / "notebooks", work / "notebooks")
    names = sorted(path.name for path in (work / "notebooks").glob("*.ipynb"))
    _run([str(python), "-c", RUN, *names], cwd=work / "notebooks")


def _env(work: Path) -> dict[str, str]:
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "JAX", "VIRTUAL_ENV"))
    }
    return {**ours, "JAX_PLATFORMS": "cpu", "JAXREMAT_CACHE": str(work / "cache")}


def _run(words: list[str], cwd: Path = ROOT) -> None:
    env = None if cwd == ROOT else _env(cwd)
    done = subprocess.run(words, cwd=cwd, env=env)
    if done.returncode:
        line = " ".join([Path(words[0]).name, *words[1:]]).splitlines()[0]
        raise SystemExit(f"make package: `{line}` ended with {done.returncode}")


def _say(line: str) -> None:
    print(f"== {line}", flush=True)


if __name__ == "__main__":
    main()
