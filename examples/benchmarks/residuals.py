"""What keeping values in fewer bits is worth: plans of the same budgets without it and with it, by a GPU's compiler.

    python -m examples.benchmarks.residuals vit resnet50 --shares 0.5 0.33 --save

Budgets are shares of the plain step's temporaries, overheads rooflines of the compiled programs; nothing is timed. The
file is written after every row: a run that was cut short goes on there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from examples.benchmarks import records
from examples.benchmarks.bench import Bench
from examples.benchmarks.networks import NAMES, Program
from jaxremat import EXACT, InfeasibleBudgetError, format_nbytes, memory, plan

FOLDER = "residuals"
SHARES = (0.5, 0.33)
TARGET = "h100"
ROUNDED = "bf16_residuals"


def measured(step: Program, share: float, kinds: Sequence[str]) -> records.Record:
    """One plan."""
    args = step.abstract_args()
    common = {"donate_argnums": step.donate_argnums, "target": TARGET}
    needs = memory(step.step, *args, **common)
    budget = needs.base_nbytes + int(share * needs.temporaries_nbytes)
    row = {"plain_nbytes": needs.peak_nbytes, "budget_nbytes": budget, "library": records.library_version()}
    try:
        made = plan(step.step, *args, budget=budget, allow=(*EXACT, *kinds), cache=False, **common)
    except InfeasibleBudgetError as error:
        return {**row, "least_nbytes": error.min_peak_nbytes}
    return row | {
        "peak_nbytes": made.compiled_peak_nbytes,
        "overhead": made.overhead,
        "compiled_overhead": made.compiled_overhead,
        "whole_nbytes": sum(copied.whole_nbytes for copied in made.copies),
        "copied_nbytes": sum(copied.nbytes for copied in made.copies),
        "planning_seconds": made.planning.seconds,
    }


def run(
    network: str, scale: str, shares: Sequence[float], path: Path, kind: str, *, fresh: bool = False
) -> records.Record:
    """Measure the rows of a network that its file lacks."""
    about = {"kind": FOLDER, "network": network, "scale": scale, "environment": records.environment(TARGET)}

    def row(share: float, kinds: Sequence[str]) -> records.Record:
        return measured(Bench(network, scale, path, target=TARGET).program(), share, kinds)

    wanted = {
        f"{share:g} {' '.join(kinds) or 'exact'}": partial(row, share, kinds)
        for share in shares
        for kinds in ((), (kind,))
    }
    return records.completed(path, about, wanted, fresh=fresh)


def markdown(found: Sequence[records.Record]) -> str:
    """All networks in one table, with its title."""
    lines = [
        "### Values in fewer bits",
        "By the compiler for the H100, in single precision. Budgets are shares of the plain step's temporaries;\n"
        'overheads are rooflines of the compiled programs, of plans that round nothing and with `"bf16_residuals"`.',
        f"| step | share | exact | with copies | of values | copies |\n|---|{'---:|' * 5}",
    ]
    for record in found:
        for name in (name for name in record["rows"] if name.endswith("exact")):
            share = name.split()[0]
            rounded = record["rows"].get(f"{share} {ROUNDED}")
            if rounded is None:
                continue
            sizes = [format_nbytes(rounded.get(f"{which}_nbytes", 0)) for which in ("whole", "copied")]
            cells = [_overhead(record["rows"][name]), _overhead(rounded), *sizes]
            title = f"{record['network']}, {record['scale']}"
            lines[-1] += f"\n| {' | '.join([title, f'{float(share):.0%}', *cells])} |"
    return "\n\n".join(lines) if found else ""


def _overhead(row: records.Record) -> str:
    if "least_nbytes" in row:
        return f"at least {format_nbytes(row['least_nbytes'])}"
    return f"{row['compiled_overhead']:+.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=("vit",), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="full")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--kind", default=ROUNDED, help=f"as in `allow`, besides what is exact; {ROUNDED}")
    parser.add_argument("--fresh", action="store_true", help="measure all rows anew")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    folder = (records.RESULTS if given.save else records.OUT) / FOLDER
    for network in given.networks:
        path = folder / f"{network}-{given.scale}.json"
        print(markdown([run(network, given.scale, given.shares, path, given.kind, fresh=given.fresh)]))


if __name__ == "__main__":
    main()
