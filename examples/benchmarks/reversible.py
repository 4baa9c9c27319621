"""What undoing reversible blocks is worth: plans of the least memory without it and with it.

    python -m examples.benchmarks.reversible all --target h100 --save
    python -m examples.benchmarks.reversible revnet --scale small

Peaks are the compiler's, overheads rooflines of the compiled programs. The third row of a network is a plan that may
undo blocks within what plans that may not need at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from examples.benchmarks import records
from examples.benchmarks.networks import REVERSIBLE, program
from examples.benchmarks.plans import measure
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid
from jaxremat import EXACT, format_nbytes

WITHOUT, WITH, AT = "least without", "least with", "with, at the least without"


def rows(asked: Asked, network: str) -> Rows:
    """Plans of the least memory, and one of a budget that the first of them gives."""
    plan = partial(measure, program(network, scale=asked.scale), target=asked.target)
    undone = (*EXACT, "reversible")

    def within() -> Record:
        known = records.read(BENCHMARK.path(asked, network))["rows"]
        return plan(known[WITHOUT]["peak_nbytes"], allow=undone)

    return {WITHOUT: partial(plan, "min", allow=EXACT), WITH: partial(plan, "min", allow=undone), AT: within}


def markdown(found: Sequence[Record]) -> str:
    """All networks in one table, with its title."""
    lines = []
    for record in (record for record in found if {WITHOUT, WITH, AT} <= record["rows"].keys()):
        rows = record["rows"]
        cells = [f"{record['network']}, {record['scale']}", record["environment"]["platform"]]
        cells.append(format_nbytes(rows[WITHOUT]["plain_nbytes"]))
        for name in (WITHOUT, AT, WITH):
            peak = [] if name == AT else [format_nbytes(rows[name]["peak_nbytes"])]
            more = rows[name].get("compiled_overhead")
            cells += [*peak, "none" if more is None else f"{more:+.1%}"]
        lines.append(cells)
    header = (
        "step",
        "device",
        "plain",
        "least without",
        "overhead",
        "with, within that",
        "least with",
        "overhead",
    )
    return f"{TITLE}\n\n{grid(header, lines, 2)}" if found else ""


TITLE = """\
### Reversible blocks

Peaks by the compiler, overheads by rooflines of the compiled programs. There are three plans: of least memory without
`"reversible"`, of least memory with it, and with it within the memory of the first.\
"""

BENCHMARK = Benchmark("reversible", __doc__, REVERSIBLE, rows, markdown, quick=REVERSIBLE)

if __name__ == "__main__":
    BENCHMARK.main()
