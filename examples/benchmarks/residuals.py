"""What keeping values in fewer bits is worth: plans of the same budgets without it and with it, by a GPU's compiler.

    python -m examples.benchmarks.residuals vit resnet50 --shares 0.5 0.33 --save

Budgets are shares of the plain step's temporaries, overheads rooflines of the compiled programs; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from examples.benchmarks.networks import NAMES, program
from examples.benchmarks.plans import measure
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid, overhead, percent
from jaxremat import EXACT, format_nbytes

ROUNDED = "bf16_residuals"


def rows(asked: Asked, network: str) -> Rows:
    """Each share with exact values alone, and with copies."""
    step = program(network, scale=asked.scale)
    return {
        f"{share:g} {' '.join(kinds) or 'exact'}": partial(
            measure, step, share, asked.target, allow=(*EXACT, *kinds)
        )
        for share in asked.shares
        for kinds in ((), (ROUNDED,))
    }


def markdown(found: Sequence[Record]) -> str:
    """All networks in one table, with its title."""
    lines = []
    for record in found:
        for name in (name for name in record["rows"] if name.endswith("exact")):
            share = name.split()[0]
            rounded = record["rows"].get(f"{share} {ROUNDED}")
            if rounded is not None:
                sizes = [format_nbytes(rounded.get(f"{which}_nbytes", 0)) for which in ("whole", "copied")]
                title = f"{record['network']}, {record['scale']}", percent(share)
                lines.append((*title, overhead(record["rows"][name]), overhead(rounded), *sizes))
    header = ("step", "share", "exact", "with copies", "of values", "copies")
    return f"{TITLE}\n\n{grid(header, lines)}" if found else ""


TITLE = """\
### Values in fewer bits

Compiled for the H100, in single precision. Budgets are shares of the plain step's temporaries. Overheads are rooflines
of the compiled programs: of plans that round nothing, and of plans with `"bf16_residuals"`.\
"""

BENCHMARK = Benchmark(
    "residuals", __doc__, NAMES, rows, markdown, quick=("vit",), shares=(0.5, 0.33), target="h100"
)

if __name__ == "__main__":
    BENCHMARK.main()
