"""JAX's own tests of `jax.checkpoint`, with `jaxremat.checkpoint` in its place.

`git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax`, then

    python -m examples.benchmarks.jax_remat_tests jax/tests/api_test.py --save

runs the class `RematTest` three times: as it is, and with each emitter. A test that passes a policy or `concrete=` is
about those, which a plan replaces: there `jax.checkpoint` stays. `--save` keeps the outcomes, which `table` lists: each
test that does not pass with the reason that is given here.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax

import jaxremat
from examples.benchmarks import records, runner

RESULTS = records.RESULTS / "jax_remat_tests" / "outcomes.json"
WAYS = ("jax", "policy", "custom_vjp")
BOTH = ("policy", "custom_vjp")
REASONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["reasons"]
"""Why a test cannot pass: for which `emitters`, which `tests`, and `why`, in a clause."""


def pytest_configure() -> None:
    """As a plugin of pytest: put `jaxremat.checkpoint` in the place of `jax.checkpoint` before the tests are read."""
    import jax.ad_checkpoint

    emit, own = os.environ["JAXREMAT_EMIT"], jax.checkpoint
    if emit == "jax":
        return

    def checkpoint(fun: Any = None, **options: Any) -> Any:
        if fun is None:
            return lambda fn: checkpoint(fn, **options)
        if options.keys() - {"prevent_cse", "static_argnums"}:
            return own(fun, **options)
        return jaxremat.checkpoint(fun, "min", emit=emit, **options)

    for module in (jax, jax.ad_checkpoint):
        for name in ("checkpoint", "remat"):
            if hasattr(module, name):
                setattr(module, name, checkpoint)


def outcomes(tests: Path, way: str) -> dict[str, str]:
    """What became of each test: passed, skipped, or the first line of its failure."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.xml"
        plugin = ["-p", "examples.benchmarks.jax_remat_tests", "-p", "no:cacheprovider", "-c", os.devnull]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, f"--junitxml={log}", f"{tests}::RematTest"]
        env = {**os.environ, "JAXREMAT_EMIT": way, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
        subprocess.run(command, env=env, check=False, capture_output=True)
        found = {}
        for case in ElementTree.parse(log).iter("testcase"):
            failure = next((c for c in case if c.tag in ("failure", "error")), None)
            skipped = any(c.tag == "skipped" for c in case)
            said = "" if failure is None else (failure.get("message") or "").splitlines()[0][:200]
            found[str(case.get("name"))] = said or ("skipped" if skipped else "passed")
        return found


def reason(way: str, test: str) -> str | None:
    """Why a test cannot pass with an emitter, if anybody knows."""
    able = (each for each in REASONS if way in each["emitters"] and test in each["tests"])
    return next((each["why"] for each in able), None)


def failures(found: dict[str, dict[str, str]], way: str) -> dict[str, str]:
    """The tests that pass as they are and fail with an emitter, and what they say."""
    return {
        test: outcome
        for test, outcome in found[way].items()
        if outcome not in ("passed", "skipped") and found["jax"].get(test) == "passed"
    }


def unexplained(found: dict[str, dict[str, str]]) -> list[tuple[str, str]]:
    """The failures that nobody has given a reason for."""
    return [(way, test) for way in BOTH for test in failures(found, way) if reason(way, test) is None]


def markdown(record: dict[str, Any]) -> str:
    """How many pass, and all failures with their reasons."""
    found = record["outcomes"]
    rows = []
    for way, tests in found.items():
        lost = failures(found, way) if way != "jax" else {}
        unknown = sum(reason(way, test) is None for test in lost)
        outcomes = list(tests.values())
        counts = outcomes.count("passed"), outcomes.count("skipped"), len(lost) - unknown, unknown
        rows.append(("itself" if way == "jax" else f'`emit="{way}"`', *map(str, counts)))
    header = ("in the place of `jax.checkpoint`", "pass", "skipped by JAX", "cannot pass", "unexplained")
    lines = [
        "### JAX's own tests of `jax.checkpoint`",
        "",
        f'The class `RematTest` of jax {record["jax"]}, with `jaxremat.checkpoint(fn, "min")` in the place of '
        "`jax.checkpoint`, except where a test passes a policy (`examples/benchmarks/jax_remat_tests.py`).",
        "",
        runner.grid(header, rows),
    ]
    for way in BOTH:
        lines += ["", f'With `emit="{way}"` these cannot pass:', ""]
        said: dict[str, list[str]] = {}
        for test, outcome in failures(found, way).items():
            said.setdefault(reason(way, test) or f"**unexplained**: {outcome}", []).append(f"`{test}`")
        lines += [f"- {', '.join(tests)}: {why}." for why, tests in said.items()]
    return "\n".join(lines)


def main() -> None:
    """Run, print and perhaps save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tests", type=Path, nargs="?", help="JAX's tests/api_test.py, of the jax that is installed"
    )
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    if args.tests is None:
        print(__doc__)
        return
    found = {way: outcomes(args.tests.resolve(), way) for way in WAYS}
    for way, tests in found.items():
        print(f"{way}: {sum(o == 'passed' for o in tests.values())} of {len(tests)} pass")
        for name, outcome in failures(found, way).items() if way != "jax" else ():
            print(f"  {name}: {reason(way, name) or outcome}")
    if args.save:
        record = {"kind": "jax_remat_tests", "jax": jax.__version__, "outcomes": found}
        records.write(RESULTS, record)


if __name__ == "__main__":
    main()
