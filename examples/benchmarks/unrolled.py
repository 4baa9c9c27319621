"""Scanned against unrolled: plans of a network whose blocks are one loop, and of the same with each block written out.

    python -m examples.benchmarks.unrolled gpt_scanned vit_scanned --save

For each plan that `steps` has measured of the scanned network, the unrolled one is planned with that plan's compiled
peak as its budget. Extra FLOPs are each in terms of its own plain step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from examples.benchmarks import records, runner
from examples.benchmarks.bench import Bench, is_plan, on_cpu
from examples.benchmarks.networks import LABELS, NAMES
from examples.benchmarks.records import Record
from examples.benchmarks.runner import grid
from jaxremat import format_nbytes

SCANNED = tuple(name for name in NAMES if name.endswith("_scanned"))


@dataclass
class Unrolled(Bench):
    """The unrolled network at the peaks of the scanned one's plans, whose record is `scanned`."""

    kind: ClassVar[str] = "unrolled"

    scanned: Record = field(default_factory=dict)

    def budget(self, name: str) -> int | str:
        """What the scanned network's plan needs."""
        return self.scanned["rows"][name]["peak_nbytes"]


def plans_of(scanned: Record) -> list[str]:
    """The rows of a record that are plans."""
    return [name for name, row in scanned["rows"].items() if is_plan(name) and not row.get("infeasible")]


def excess(scanned: Record, unrolled: Record) -> dict[str, float]:
    """By how much the scanned plans' extra FLOPs are above the unrolled ones', where there are both."""
    ours, theirs = scanned["rows"], unrolled["rows"]
    both = [name for name in plans_of(scanned) if name in theirs and not theirs[name].get("infeasible")]
    return {name: ours[name]["extra_flops"] - theirs[name]["extra_flops"] for name in both}


def table(scanned: Record, unrolled: Record) -> str:
    """The table of one network."""
    ours, theirs = scanned["rows"], unrolled["rows"]
    above = excess(scanned, unrolled)
    lines = []
    for name in (name for name in plans_of(scanned) if name in theirs):
        row = theirs[name]
        cells = [format_nbytes(ours[name]["peak_nbytes"]), f"{ours[name]['extra_flops']:.2%}"]
        if row.get("infeasible"):
            cells += [f"infeasible: least {format_nbytes(row['min_peak_nbytes'])}", "", ""]
        else:
            cells += [format_nbytes(row["peak_nbytes"]), f"{row['extra_flops']:.2%}"]
            cells += [f"{100 * above[name]:+.2f} points"]
        lines.append(cells)
    header = ("scanned: peak", "extra FLOPs", "unrolled: peak", "extra FLOPs", "scanned above unrolled")
    return grid(header, lines, 0)


def markdown(found: Sequence[Record], steps: Sequence[Record]) -> str:
    """All tables, with what they say; `steps` are the records of the scanned networks."""
    scanned = {(r["network"], r["scale"]): r for r in filter(on_cpu, steps)}
    parts = []
    for record in found:
        ours = scanned.get((record["network"], record["scale"]))
        if ours:
            both = (r["rows"]["plain"]["equations"] for r in (ours, record))
            name = LABELS.get(str(record["network"]), str(record["network"])).removesuffix(", scanned")
            parts.append("**{}**: {:,} equations scanned, {:,} unrolled".format(name, *both))
            parts.append(table(ours, record))
    return "\n\n".join([LEGEND, *parts]) if parts else ""


LEGEND = """\
### Scanned against unrolled

The same network with its blocks written out, planned with the compiled peak of each of the scanned network's plans
as its budget (`examples/benchmarks/unrolled.py`). Extra FLOPs, counted in the compiled programs, are each in terms of
its own plain step. What no plan of a loop lowers is the stack of its parameters' gradients, which is there from the
backward loop's first iteration to the optimizer; gradients of blocks that are written out go into their updates one
by one. Where budgets are small that is much of them (1.1 GiB of GPT-2 medium's).\
"""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = runner.parser_of(__doc__, SCANNED)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="of the scanned network; default: all plans")
    asked = runner.parse(parser, argv, SCANNED, quick=SCANNED[:1])
    folder = asked.folder / records.platform()
    for network in asked.names:
        scanned = records.read(folder / f"{network}-{asked.scale}.json")
        if not scanned:
            parser.error(
                f"there are no rows of {network} in {folder}: python -m examples.benchmarks.steps {network}"
            )
        options: Any = {"sizes": {"scanned": False}, "scanned": scanned}
        bench = Unrolled(network, asked.scale, folder / f"{network}-unrolled-{asked.scale}.json", **options)
        found = bench.run(["plain", *(asked.rows or plans_of(scanned))], fresh=asked.fresh)
        print(table(scanned, found))
        print(f"in {bench.path}")


if __name__ == "__main__":
    main()
