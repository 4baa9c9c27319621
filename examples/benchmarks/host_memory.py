"""What host memory is worth: plans of the same budgets without it and with it, by a GPU's compiler.

    python -m examples.benchmarks.host_memory gpt_scanned resnet50 --shares 0.5 0.33 --save
    python -m examples.benchmarks.host_memory gpt_medium --shares block 0.12 --save
    python -m examples.benchmarks.host_memory resnet50 --shares block --target gh200 --save
    python -m examples.benchmarks.host_memory gpt --only state --state 0.5 0.35 --save

Budgets are shares of the plain step's temporaries, or the peak of the step that recomputes each block by hand
(`block`); with `--state`, shares of the plain peak, for plans with the optimizer's state in host memory and on the
device. Overheads are rooflines of the compiled programs, including waits for copies; nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from examples.benchmarks.networks import NAMES, Program, Remat, program
from examples.benchmarks.plans import measure, measure_of
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid, least, overhead, percent
from jaxremat import format_nbytes, memory, to_host

BLOCK = "block"
"""The budget that is the peak of rematerialisation by hand, of whole blocks."""

VARIANTS = ("gpt_medium", "gpt_1b", "deep")
"""What can be measured besides the networks."""


def rows(asked: Asked, network: str) -> Rows:
    """Each share without host memory and with it; each share of the peak with the state here and there."""

    def make(remat: Remat) -> Program:
        return program(network, scale=asked.scale, remat=remat)

    def planned(share: float | str, offload: bool) -> Record:
        step, budget = make("none"), share
        if share == BLOCK:
            args = step.abstract_args()
            needs = memory(make("block").step, *args, donate_argnums=(0, 1), target=asked.target)
            budget = needs.peak_nbytes
        return measure(step, budget, asked.target, offload=offload, donate_argnums=(0, 1))

    def with_state(share: float, there: bool) -> Record:
        step = make("none")
        state, batch = step.abstract_args()
        needs = memory(step.step, state, batch, donate_argnums=(0,), target=asked.target)
        if there:
            state = state | {"opt_state": to_host(state["opt_state"])}
        budget = int(share * needs.peak_nbytes)
        return measure_of(step.step, (state, batch), budget, asked.target, donate_argnums=(0,))

    shares = asked.shares if "offload" in asked.only else ()
    found = {
        f"{share if share == BLOCK else f'{share:g}'} {'with' if offload else 'without'}": partial(
            planned, share, offload
        )
        for share in shares
        for offload in (False, True)
    }
    for share in asked.state if "state" in asked.only else ():
        for there in (False, True):
            name = f"{share:g} of the peak, state {'there' if there else 'here'}"
            found[name] = partial(with_state, share, there)
    return found


def markdown(found: Sequence[Record]) -> str:
    """All networks in one table, with its title."""
    lines = []
    for record in found:
        for name in (name for name in record["rows"] if name.endswith("without")):
            share = name.split()[0]
            with_it = record["rows"].get(f"{share} with")
            if with_it is not None:
                both = [*_cells(record["rows"][name]), *_cells(with_it)]
                title = f"{record['network']}, {record['scale']}", record["environment"]["platform"].upper()
                budget = "per block's peak" if share == BLOCK else percent(share)
                lines.append((*title, budget, *both, format_nbytes(with_it.get("offloaded_nbytes", 0))))
    header = ("step", "GPU", "share", "without it", "overhead", "with it", "overhead", "on the host")
    parts = [TITLE, grid(header, lines, 2), *_states(found)]
    return "\n\n".join(parts) if found else ""


def _cells(row: Record) -> tuple[str, str]:
    return (least(row), "") if least(row) else (format_nbytes(row["peak_nbytes"]), overhead(row))


def _states(found: Sequence[Record]) -> list[str]:
    """Return the table of where the optimizer's state is, with its title, if there are rows of it."""
    lines = []
    for record in found:
        for name in (name for name in record["rows"] if name.endswith("state here")):
            here, there = record["rows"][name], record["rows"].get(name.replace("here", "there"))
            if there is not None:
                cells = [f"{record['network']}, {record['scale']}", format_nbytes(here["budget_nbytes"])]
                for row in (here, there):
                    time = f"{1e3 * row['seconds']:.1f} ms" if "seconds" in row else ""
                    cells += [_cells(row)[0], time]
                lines.append(cells)
    header = ("step", "budget", "state on the device", "a step", "on the host", "a step")
    return [STATES, grid(header, lines)] if lines else []


TITLE = """\
### Host memory

Peaks by the compilers for these GPUs. Copies at the rates of the H100's PCIe link, and of the GH200's host memory.
Budgets are shares of the plain step's temporaries. Overheads are rooflines of the compiled programs, including the
time for which kernels wait for copies.\
"""
STATES = """\
The optimizer's state on the device, and in host memory with `jaxremat.to_host`; milliseconds by the same roofline.
These steps have few tokens per parameter, so copies take longer than kernels.\
"""


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", nargs="+", type=float, default=(), help="shares of the peak")


BENCHMARK = Benchmark(
    "host_memory",
    __doc__,
    (*NAMES, *VARIANTS),
    rows,
    markdown,
    quick=("gpt_scanned",),
    shares=(0.5, 0.33),
    only=("offload", "state"),
    target="h100",
    options=_options,
)

if __name__ == "__main__":
    BENCHMARK.main()
