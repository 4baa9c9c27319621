"""What splitting work into parts is worth: the least memory of plans beside that of the same parts written by hand.

    python -m examples.benchmarks.splitting all --save
    python -m examples.benchmarks.splitting pinn --scale tiny

Peaks are the compiler's. Operations are those of matrix products and convolutions in the compiled programs, loops as
often as they run, as a multiple of the plain step's. The last row of a step is a plan within the peak by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

import jaxremat
from examples.benchmarks import records, runner
from examples.benchmarks.networks.divisible import DIVISIBLE
from examples.benchmarks.plans import PLANNING
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid
from jaxremat import InfeasibleBudgetError, MemoryStats, compiler_options, format_nbytes
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._roofline import kernels

PLAIN, LEAST, AT = "plain", "least", "at the peak by hand"


def rows(asked: Asked, name: str) -> Rows:
    """The plain step, those by hand, and plans of the least memory and within the least by hand."""
    step = DIVISIBLE[name](asked.scale)
    args = jax.eval_shape(step.initialise, jax.random.key(0))

    def written(fn: Callable[..., Any]) -> Record:
        # A new function each time, for what is donated is that of its first call.
        jitted = jax.jit(lambda *args: fn(*args), donate_argnums=0)
        return of(jitted.lower(*args).compile(compiler_options=compiler_options()))

    def planned(budget: int | str) -> Record:
        optimized = jaxremat.optimize(budget, donate_argnums=0, planning=PLANNING)(step.plain)
        try:
            made = optimized.compile(*args)
        except InfeasibleBudgetError as error:
            return {"least_nbytes": error.min_peak_nbytes}
        plan = optimized.plan(*args)
        return of(made) | {"overhead": plan.compiled_overhead, "loops": [str(form) for form in plan.loops]}

    def at_hand() -> Record:
        known = records.read(BENCHMARK.path(asked, name))["rows"]
        return planned(min(known[each]["peak_nbytes"] for each in step.by_hand))

    by_hand = {each: partial(written, fn) for each, fn in step.by_hand.items()}
    return {PLAIN: partial(written, step.plain), **by_hand, LEAST: partial(planned, "min"), AT: at_hand}


def of(compiled: Any) -> Record:
    """Return what a compiled step needs and does."""
    found = kernels(parse(compiled.as_text()))
    flops = sum(kernel.total_trips * n for kernel in found for _, n in kernel.flops)
    return {"peak_nbytes": MemoryStats.of(compiled).peak_nbytes, "flops": flops}


def markdown(found: Sequence[Record]) -> str:
    """All steps in one table, with its title."""
    lines = []
    for record in (record for record in found if {PLAIN, LEAST, AT} <= record["rows"].keys()):
        rows = dict(record["rows"])
        plain, least, at = (rows.pop(name) for name in (PLAIN, LEAST, AT))
        name, hand = min(rows.items(), key=lambda each: each[1]["peak_nbytes"])

        def times(row: Record, plain: Record = plain) -> str:
            return f"{row['flops'] / plain['flops']:.2f}" if "flops" in row else "none"

        sizes = [format_nbytes(plain["peak_nbytes"]), format_nbytes(hand["peak_nbytes"])]
        lowest = runner.least(least) or format_nbytes(least["peak_nbytes"])
        lines.append([record["network"], name, *sizes, times(hand), times(at), lowest, times(least)])
    header = (
        "step",
        "by hand",
        "plain",
        "by hand",
        "operations",
        "planned within that",
        "least",
        "operations",
    )
    return f"{TITLE}\n\n{grid(header, lines, 2)}" if lines else ""


TITLE = """\
### Work in parts

Peaks by XLA's compiler for the CPU, of steps that run in parts of their examples, points or pairs, by hand and
planned. Operations are multiples of the plain step's.\
"""

BENCHMARK = Benchmark("splitting", __doc__, DIVISIBLE, rows, markdown, quick=("clouds",))

if __name__ == "__main__":
    BENCHMARK.main()
