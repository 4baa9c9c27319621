"""JAX's own tests of `jax.checkpoint`, with `jaxremat.checkpoint` in its place.

`git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax`, then

    python -m examples.benchmarks.jax_remat_tests jax/tests/api_test.py --save

runs the class `RematTest` three times: as it is, and with each emitter. A test that passes a policy or `concrete=` is
about those, which a plan replaces: there `jax.checkpoint` stays.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax

import jaxremat

RESULTS = Path(__file__).parent / "results" / "jax_remat_tests.json"
WAYS = ("jax", "policy", "custom_vjp")


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
        for name, outcome in tests.items():
            if outcome not in ("passed", "skipped") and found["jax"].get(name) == "passed":
                print(f"  {name}: {outcome}")
    if args.save:
        RESULTS.write_text(json.dumps({"jax": jax.__version__, "outcomes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
