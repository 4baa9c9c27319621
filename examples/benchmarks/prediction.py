"""Predicted against compiled, of the first plans of steps of kinds that the nine networks lack.

    python -m examples.benchmarks.prediction --target h100 --save
    python -m examples.benchmarks.prediction highway --shares 0.5

Predictions are the model's, before a plan was compiled; overheads of the compiled programs are by a roofline. Unused is
what the plan leaves of its budget, in shares of the plain step's temporaries, as the budget is.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

from examples.benchmarks import records
from examples.benchmarks.ablation import CPU, PROGRAMS, measure
from examples.benchmarks.networks import KINDS, Scale, program

FOLDER = "prediction"
SHARES = (0.6, 0.4)

NAMES = (*KINDS, "loops in loops")
"""Of `ablation.PROGRAMS`."""


def run(
    names: Sequence[str], shares: Sequence[float], target: str | None, save: bool, scale: Scale = "full"
) -> records.Record:
    """Measure the rows that the file lacks."""
    path = (records.RESULTS if save else records.OUT) / FOLDER / f"{target or CPU}-{scale}.json"
    steps = {name: program(**{"name": name, **PROGRAMS[name]}, scale=scale) for name in names}
    wanted = {
        f"{name} | {share:g}": partial(measure, step, share, None, target)
        for name, step in steps.items()
        for share in shares
    }
    return records.completed(path, {"kind": FOLDER, "environment": records.environment(target)}, wanted)


def markdown(record: records.Record) -> str:
    """The table, and how far predictions are off."""
    lines = [
        f"### Kinds that the nine networks lack, {record['environment']['platform']}",
        "The model's first word on a step's peak, and its word on the overhead of the plan that was taken, against\n"
        "the compiled programs; peaks in points of the plain step's temporaries.",
        "| step | budget | overhead, predicted | overhead, roofline | first peak, points off | unused | planning |\n"
        f"|---|{'---:|' * 6}",
    ]
    overheads: list[float] = []
    for key, row in record["rows"].items():
        name, share = key.split(" | ")
        cells = [name, f"{float(share):.0%}"]
        if "least_nbytes" in row:
            more = (row["least_nbytes"] - row["budget_nbytes"]) / row["temporaries_nbytes"]
            cells += [f"none: {more:+.0%}", "", "", "", ""]
        else:
            overheads.append(100 * abs(row["compiled_overhead"] - row["overhead"]))
            unused = (row["budget_nbytes"] - row["peak_nbytes"]) / row["temporaries_nbytes"]
            cells += [f"{row['overhead']:+.1%}", f"{row['compiled_overhead']:+.1%}"]
            cells += [f"{100 * (row['first_prediction'] or 0.0):+.1f}", f"{unused:.1%}"]
            cells += [f"{row['planning_seconds']:.0f} s"]
        lines[-1] += f"\n| {' | '.join(cells)} |"
    if overheads:
        off = f"{statistics.median(overheads):.1f} in the median, {max(overheads):.1f} at worst"
        lines.append(f"Points that predicted overheads are off: {off}.")
    return "\n\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without programs all of them, or with neither target nor programs tiny ones, into ``out/``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("programs", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--scale", choices=("full", "small", "tiny"))
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--target", help="compile for this device instead of the one at hand")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    if unknown := {*given.programs} - {*NAMES}:
        parser.error(f"no program is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    scale = given.scale or ("full" if given.programs or given.target else "tiny")
    print(markdown(run(given.programs or list(NAMES), given.shares, given.target, given.save, scale)))


if __name__ == "__main__":
    main()
