"""What undoing reversible blocks is worth: plans of the least memory without it and with it.

    python -m examples.benchmarks.reversible --target h100 --save
    python -m examples.benchmarks.reversible revnet --scale small

Peaks are the compiler's, overheads rooflines of the compiled programs. The third row of a network is a plan that may
undo blocks within what plans that may not need at least. The file is written after every row: a run that was cut short
goes on there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks import records
from examples.benchmarks.networks import REVERSIBLE, Program, program
from jaxremat import EXACT, InfeasibleBudgetError, format_nbytes, plan

FOLDER = "reversible"
WITHOUT, WITH, AT = "least without", "least with", "with, at the least without"
UNDONE = (*EXACT, "reversible")


def measured(step: Program, budget: Any, allow: Sequence[str], target: str | None) -> records.Record:
    """One plan."""
    common = {"donate_argnums": step.donate_argnums, "target": target, "cache": False}
    try:
        made = plan(step.step, *step.abstract_args(), budget=budget, allow=tuple(allow), **common)
    except InfeasibleBudgetError as error:
        return {"least_nbytes": error.min_peak_nbytes, "library": records.library_version()}
    return {
        "plain_nbytes": made.baseline_peak_nbytes,
        "peak_nbytes": made.compiled_peak_nbytes,
        "overhead": made.overhead,
        "compiled_overhead": made.compiled_overhead,
        "undone": [str(form) for form in made.loops if form.undone],
        "planning_seconds": made.planning.seconds,
        "library": records.library_version(),
    }


def run(network: str, scale: str, target: str | None, path: Path, *, fresh: bool = False) -> records.Record:
    """Measure the rows of a network that its file lacks."""
    step = program(network, scale=scale)  # type: ignore[arg-type]
    about = {"kind": FOLDER, "network": network, "scale": scale, "environment": records.environment(target)}

    def within() -> records.Record:
        return measured(step, records.read(path)["rows"][WITHOUT]["peak_nbytes"], UNDONE, target)

    wanted = {
        WITHOUT: lambda: measured(step, "min", EXACT, target),
        WITH: lambda: measured(step, "min", UNDONE, target),
        AT: within,
    }
    return records.completed(path, about, wanted, fresh=fresh)


def markdown(found: Sequence[records.Record]) -> str:
    """All networks in one table, with its title."""
    lines = [
        "### Reversible blocks",
        "Peaks by the compiler, overheads by rooflines of the compiled programs, of plans of the least memory\n"
        'without `"reversible"` and with it, and with it within what plans without it need.',
        f"| step | device | plain | least without | overhead | with, within that | least with | overhead |\n"
        f"|---|---|{'---:|' * 6}",
    ]
    for record in found:
        rows = record["rows"]
        if not {WITHOUT, WITH, AT} <= rows.keys():
            continue
        cells = [f"{record['network']}, {record['scale']}", record["environment"]["platform"]]
        cells.append(format_nbytes(rows[WITHOUT]["plain_nbytes"]))
        for name in (WITHOUT, AT, WITH):
            peak = [] if name == AT else [format_nbytes(rows[name]["peak_nbytes"])]
            overhead = rows[name].get("compiled_overhead")
            cells += [*peak, "none" if overhead is None else f"{overhead:+.1%}"]
        lines[-1] += f"\n| {' | '.join(cells)} |"
    return "\n\n".join(lines) if found else ""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=REVERSIBLE, help=f"of {', '.join(REVERSIBLE)}")
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="full")
    parser.add_argument("--target", help="compile for this device instead of the one at hand")
    parser.add_argument("--fresh", action="store_true", help="measure all rows anew")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    folder = (records.RESULTS if given.save else records.OUT) / FOLDER
    for network in given.networks:
        path = folder / f"{network}-{given.scale}-{given.target or 'cpu'}.json"
        print(markdown([run(network, given.scale, given.target, path, fresh=given.fresh)]))


if __name__ == "__main__":
    main()
