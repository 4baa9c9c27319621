"""Collect the plans that come with the library, and report which of them are stale.

    python -m examples.benchmarks.steps resnet50 --target h100 --shares 0.75 0.5 0.33 min
    python -m examples.benchmarks.zoo resnet50 --scale full --target h100
    python -m examples.benchmarks.zoo --check

The plans are those that `steps` kept, so that the zoo and the tables of results have the same figures.

A plan follows from the network's code, from the versions of jax, Flax and Optax, and from how jaxremat normalises a
traced step. When one of them changes a step's jaxpr, its plans must be made again: `--check` traces every program that
has plans for the installed jax, and compares fingerprints; `--check --compile` applies the plans too, and compares
peaks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import jax

import jaxremat
from examples.benchmarks import records
from examples.benchmarks.networks import NAMES, program
from jaxremat import zoo
from jaxremat._rewrite._fingerprint import fingerprint
from jaxremat._rewrite._trace import trace

FOLDER = Path(zoo.__file__).parent
SHARES = ("0.75", "0.5", "0.33", "min")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "jaxremat")


def make(network: str, scale: str, target: str, kept: Path, folder: Path = FOLDER) -> Path:
    """Write or replace a network's file, of the plans in the folder `kept`.

    Shares that nothing fits have no plan there, and those for which nothing has to be dropped are left out.
    """
    step = program(network, scale=scale)  # type: ignore[arg-type]
    args = step.abstract_args()
    plans: dict[str, jaxremat.Plan] = {}
    for share in SHARES:
        path = kept / f"{share}.json"
        if not path.exists():
            print(f"  {share}: no plan in {path}")
            continue
        plan = jaxremat.Plan.load(path)
        if plan.drops_nothing and not plan.form.choices:
            print(f"  {share}: nothing has to be dropped, no plan is needed")
            continue
        name = share if share == "min" else f"{float(share):.0%}"
        plans[name] = replace(plan, alive=())  # which is read off the program again when the plan is applied
        print(f"  {name}: {str(plan).splitlines()[0]}")
    if not plans:
        raise SystemExit(
            f"No plan of {network} is kept: make some with `python -m examples.benchmarks.steps`."
        )
    inputs = args[1]["inputs"]
    shared = {
        "network": network,
        "scale": scale,
        "target": target,
        "jax": zoo.JAX_MINOR,
        "versions": {name: version(name) for name in PACKAGES},
        "settings": {
            "program": f'examples.benchmarks.networks.program("{network}", scale="{scale}")',
            "inputs": f"{inputs.dtype}[{','.join(map(str, inputs.shape))}]",
            "parameters": step.parameter_count(),
            "donate_argnums": list(step.donate_argnums),
        },
    }
    path = folder / zoo.file_name(network, scale, target)
    path.write_bytes(zoo.to_bytes(shared, plans))
    return path


def stale(entries: Sequence[zoo.Entry]) -> Iterator[zoo.Entry]:
    """Those whose program is another by now."""
    known: dict[tuple[str, str], str] = {}
    for entry in entries:
        key = entry.network, entry.scale
        if key not in known:
            step = program(entry.network, scale=entry.scale)  # type: ignore[arg-type]
            jitted = jax.jit(step.step, donate_argnums=step.donate_argnums)
            known[key] = fingerprint(trace(jitted, step.abstract_args(), {}))
        if known[key] != entry.plan.fingerprint:
            yield entry


def applied(entry: zoo.Entry) -> jaxremat.Plan:
    """The plan as this compiler sees it. **Raises:** as `jaxremat.optimize` does with a plan."""
    step = program(entry.network, scale=entry.scale)  # type: ignore[arg-type]
    target = None if entry.target == "cpu" else entry.target
    decorate = jaxremat.optimize(plan=entry.plan, donate_argnums=step.donate_argnums, target=target)
    return decorate(step.step).plan(*step.abstract_args())


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without arguments it checks the smallest network's plans."""
    parser = argparse.ArgumentParser(description="Collect or check the plans that come with the library.")
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(NAMES))
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="small")
    parser.add_argument("--target", choices=("cpu", *jaxremat.targets()), default="h100")
    parser.add_argument("--check", action="store_true", help="collect nothing; say which plans are stale")
    parser.add_argument("--compile", action="store_true", help="with --check: apply and compile them too")
    given = parser.parse_args(argv)
    if unknown := set(given.networks) - set(NAMES):
        parser.error(f"no network is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if given.networks and not given.check:
        for network in given.networks:
            print(f"{network}, {given.scale}, {given.target}:")
            kept = records.OUT / "plans" / given.target / f"{network}-{given.scale}"
            print(f"  in {make(network, given.scale, given.target, kept)}")
        return
    networks = given.networks or (NAMES if given.check else ("gpt_scanned",))
    entries = [e for e in zoo.entries() if e.here and e.network in networks]
    wrong = list(stale(entries))
    for entry in entries:
        said = "of another program: make it anew" if entry in wrong else "of this program"
        if given.compile and entry not in wrong:
            try:
                peak = applied(entry).compiled_peak_nbytes or 0
            except jaxremat.InfeasibleBudgetError as error:
                wrong.append(entry)
                said += f", which needs {jaxremat.format_nbytes(error.min_peak_nbytes)} now: make it anew"
            else:
                same = "" if peak == entry.plan.compiled_peak_nbytes else ", not as it was made"
                said += f", peak {jaxremat.format_nbytes(peak)}{same}"
        print(f"{entry.name}: {said}", flush=True)
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(entries)} plans are stale.")


if __name__ == "__main__":
    main()
