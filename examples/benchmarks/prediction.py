"""Predicted against compiled, of the first plans of steps of kinds that the nine networks lack.

    python -m examples.benchmarks.prediction all --target h100 --save
    python -m examples.benchmarks.prediction highway --shares 0.5

Predictions are the model's, before a plan was compiled; overheads of the compiled programs are by a roofline. Unused is
what the plan leaves of its budget, in shares of the plain step's temporaries, as the budget is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

from examples.benchmarks.networks import KINDS, program
from examples.benchmarks.plans import measure
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid

NAMES = (*KINDS, "loops in loops")


def rows(asked: Asked, name: str) -> Rows:
    """A plan for each share."""
    step = program(name, scale=asked.scale)
    return {f"{name} | {share:g}": partial(measure, step, share, asked.target) for share in asked.shares}


def markdown(found: Sequence[Record]) -> str:
    """The tables, and how far predictions are off."""
    return "\n\n".join(map(_of_platform, found))


def _of_platform(record: Record) -> str:
    lines, overheads = [], [0.0]
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
        lines.append(cells)
    known = overheads[1:] or overheads
    off = f"{statistics.median(known):.1f} in the median, {max(known):.1f} at worst"
    parts = [f"### Kinds that the nine networks lack, {record['environment']['platform']}", LEGEND]
    return "\n\n".join([*parts, grid(HEADER, lines), f"Points that predicted overheads are off: {off}."])


HEADER = (
    *("step", "budget", "overhead, predicted", "overhead, roofline"),
    *("first peak, points off", "unused", "planning"),
)
LEGEND = """\
The model's first word on a step's peak, and its word on the overhead of the plan that was taken, against
the compiled programs; peaks in points of the plain step's temporaries.\
"""

BENCHMARK = Benchmark("prediction", __doc__, NAMES, rows, markdown, NAMES, (0.6, 0.4), shared=True)

if __name__ == "__main__":
    BENCHMARK.main()
