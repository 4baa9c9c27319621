"""Scanned against unrolled: plans of a network whose blocks are one loop, and of the same with each block written out.

    python -m examples.benchmarks.unrolled gpt_scanned vit_scanned --scale full

For each plan that `steps` has measured of the scanned network, the unrolled one is planned with that plan's compiled
peak as its budget. Extra FLOPs are each in terms of its own plain step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax

from examples.benchmarks import records
from examples.benchmarks.bench import Bench
from examples.benchmarks.networks import NAMES
from jaxremat import format_nbytes

SCANNED = tuple(name for name in NAMES if name.endswith("_scanned"))


@dataclass
class Unrolled(Bench):
    """The unrolled network at the peaks of the scanned one's plans, whose record is `scanned`."""

    kind: ClassVar[str] = "unrolled"

    scanned: records.Record = field(default_factory=dict)

    def budget(self, name: str) -> int | str:
        """What the scanned network's plan needs."""
        return self.scanned["rows"][name]["peak_nbytes"]


def plans_of(scanned: records.Record) -> list[str]:
    """The rows of a record that are plans."""
    return [
        name for name, row in scanned["rows"].items() if "budget_nbytes" in row and not row.get("infeasible")
    ]


def excess(scanned: records.Record, unrolled: records.Record) -> dict[str, float]:
    """By how much the scanned plans' extra FLOPs are above the unrolled ones', where there are both."""
    ours, theirs = scanned["rows"], unrolled["rows"]
    both = [name for name in plans_of(scanned) if name in theirs and not theirs[name].get("infeasible")]
    return {name: ours[name]["extra_flops"] - theirs[name]["extra_flops"] for name in both}


def markdown(scanned: records.Record, unrolled: records.Record) -> str:
    """The table of one network."""
    ours, theirs = scanned["rows"], unrolled["rows"]
    above = excess(scanned, unrolled)
    lines = [
        "| scanned: peak | extra FLOPs | unrolled: peak | extra FLOPs | scanned above unrolled |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in plans_of(scanned):
        if name not in theirs:
            continue
        row = theirs[name]
        cells = [format_nbytes(ours[name]["peak_nbytes"]), f"{ours[name]['extra_flops']:.2%}"]
        if row.get("infeasible"):
            cells += [f"infeasible: least {format_nbytes(row['min_peak_nbytes'])}", "", ""]
        else:
            cells += [
                format_nbytes(row["peak_nbytes"]),
                f"{row['extra_flops']:.2%}",
                f"{100 * above[name]:+.2f} points",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Plan unrolled networks at the peaks of the scanned ones' plans."
    )
    parser.add_argument("networks", nargs="*", metavar="network", help=f"{', '.join(SCANNED)}; default: all")
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="full")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="of the scanned network; default: all plans")
    parser.add_argument("--fresh", action="store_true", help="measure rows anew that are there")
    parser.add_argument("--results", type=Path, help="folder of the JSON files")
    given = parser.parse_args(argv)
    if unknown := set(given.networks) - set(SCANNED):
        parser.error(
            f"no scanned network is called {', '.join(sorted(unknown))}; there are {', '.join(SCANNED)}"
        )
    folder = (
        given.results or (records.OUT if given.scale == "tiny" else records.RESULTS)
    ) / jax.default_backend()
    for network in given.networks or SCANNED:
        scanned = records.read(folder / f"{network}-{given.scale}.json")
        if not scanned:
            parser.error(
                f"there are no rows of {network} in {folder}: python -m examples.benchmarks.steps {network}"
            )
        run(network, given.scale, folder, scanned, given.rows, fresh=given.fresh)


def run(
    network: str,
    scale: str,
    folder: Path,
    scanned: records.Record,
    rows: Sequence[str] | None = None,
    **options: Any,
) -> records.Record:
    """Measure one network, and print its table."""
    path = folder / f"{network}-unrolled-{scale}.json"
    bench = Unrolled(network, scale, path, sizes={"scanned": False}, scanned=scanned)
    found = bench.run(["plain", *(rows or plans_of(scanned))], **options)
    print(markdown(scanned, found))
    print(f"in {path}")
    return found


if __name__ == "__main__":
    main()
