"""What host memory is worth: plans of the same budgets without it and with it, by a GPU's compiler.

    python -m examples.benchmarks.host_memory gpt_scanned resnet50 --shares 0.5 0.33 --save
    python -m examples.benchmarks.host_memory gpt_medium --shares block 0.12 --save
    python -m examples.benchmarks.host_memory resnet50 --shares block --target gh200 --save
    python -m examples.benchmarks.host_memory gpt --shares --state 0.5 0.35 --save

Budgets are shares of the plain step's temporaries, or what the step needs that recomputes each block by hand (`block`);
with `--state` shares of its peak, and plans with the optimizer's state in
host memory stand beside those with it on the device. Overheads are rooflines of the compiled programs, with what
kernels wait for copies; nothing is timed. The file is written after every row: a run that was cut short goes on there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from examples.benchmarks import records
from examples.benchmarks.networks import NAMES, Program, Remat, Scale, program
from jaxremat import InfeasibleBudgetError, Plan, format_nbytes, memory, plan, to_host

FOLDER = "host_memory"
SHARES = ("0.5", "0.33")
TARGETS = ("h100", "gh200")
"""GPUs whose links to the host differ: PCIe, and NVLink-C2C, six times as fast."""
PLANNING_SECONDS = 300.0
"""So long that no row depends on how busy this machine is."""
Make = Callable[[Remat], Program]
BLOCK = "block"
"""The budget that is the peak of rematerialisation by hand, of whole blocks."""

PROGRAMS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in NAMES},
    "gpt_medium": {"name": "gpt_scanned", "batch": 8, "length": 1024},
    "gpt_1b": {"name": "gpt_scanned", "layers": 80},
    "deep": {"name": "gpt_scanned", "layers": 100, "width": 768, "heads": 12, "batch": 8},
}
"""What can be measured besides the networks: GPT-2 medium with tokens for a GPU to work on, with three times the
parameters, and a hundred layers."""


def measured(make: Make, share: str, *, target: str, offload: bool) -> records.Record:
    """One plan."""
    step = make("none")
    args = step.abstract_args()
    common: dict[str, Any] = {"donate_argnums": (0, 1), "target": target}
    needs = memory(step.step, *args, **common)
    if share == BLOCK:
        budget = memory(make("block").step, *args, **common).peak_nbytes
    else:
        budget = needs.base_nbytes + int(float(share) * needs.temporaries_nbytes)
    row = {"plain_nbytes": needs.peak_nbytes, "budget_nbytes": budget, "library": records.library_version()}
    planning = common | {"planning_seconds": PLANNING_SECONDS, "cache": False}
    try:
        made = plan(step.step, *args, budget=budget, offload=offload, **planning)
    except InfeasibleBudgetError as error:
        return {**row, "least_nbytes": error.min_peak_nbytes}
    return row | _figures(made)


def with_state(make: Make, share: float, *, target: str, there: bool) -> records.Record:
    """One plan within a share of the plain step's peak, with the optimizer's state in host memory or not."""
    step = make("none")
    state, batch = step.abstract_args()
    common: dict[str, Any] = {"donate_argnums": (0,), "target": target}
    needs = memory(step.step, state, batch, **common)
    budget = int(share * needs.peak_nbytes)
    row = {
        "plain_nbytes": needs.peak_nbytes,
        "arguments_nbytes": needs.arguments_nbytes,
        "budget_nbytes": budget,
        "library": records.library_version(),
    }
    if there:
        state = state | {"opt_state": to_host(state["opt_state"])}
    try:
        made = plan(step.step, state, batch, budget=budget, cache=False, **common)
    except InfeasibleBudgetError as error:
        return {**row, "least_nbytes": error.min_peak_nbytes}
    assert made.compiled_overhead is not None
    return row | _figures(made) | {"seconds": made.account.step_seconds * (1 + made.compiled_overhead)}


def _figures(made: Plan) -> records.Record:
    first = made.rounds[0] if made.rounds else None
    return {
        "peak_nbytes": made.compiled_peak_nbytes,
        "overhead": made.overhead,
        "compiled_overhead": made.compiled_overhead,
        "offloaded_nbytes": made.offloaded_nbytes,
        "offloaded": len(made.offloaded),
        "first_prediction": first and first.predicted_peak_nbytes / first.compiled_peak_nbytes - 1,
        "planning_seconds": made.planning.seconds,
    }


def run(
    network: str,
    scale: Scale,
    shares: Sequence[str],
    path: Path,
    *,
    target: str = TARGETS[0],
    state: Sequence[float] = (),
    fresh: bool = False,
) -> records.Record:
    """Measure the rows of a network that its file lacks."""
    about = {
        "kind": "host_memory",
        "network": network,
        "scale": scale,
        "environment": records.environment(target),
    }

    def make(remat: Remat) -> Program:
        return program(**PROGRAMS[network], scale=scale, remat=remat)

    wanted = {
        f"{share} {'with' if offload else 'without'}": partial(
            measured, make, share, target=target, offload=offload
        )
        for share in shares
        for offload in (False, True)
    }
    for share in state:
        for there in (False, True):
            name = f"{share:g} of the peak, state {'there' if there else 'here'}"
            wanted[name] = partial(with_state, make, share, target=target, there=there)
    return records.completed(path, about, wanted, fresh=fresh)


def markdown(found: Sequence[records.Record]) -> str:
    """All networks in one table, with its title."""
    lines = [
        "### Host memory",
        "By the compilers for these GPUs; copies at the rates of the H100's PCIe link, and of the memory behind the\n"
        "GH200's NVLink-C2C. Budgets are shares of the plain step's temporaries; overheads are rooflines of the\n"
        "compiled programs, with what kernels wait for copies.",
        f"| step | GPU | share | without it | overhead | with it | overhead | on the host |\n|---|---|{'---:|' * 6}",
    ]
    for record in found:
        for name in (name for name in record["rows"] if name.endswith("without")):
            share = name.split()[0]
            with_it = record["rows"].get(f"{share} with")
            if with_it is None:
                continue
            there = format_nbytes(with_it.get("offloaded_nbytes", 0))
            cells = [*_peak_and_overhead(record["rows"][name]), *_peak_and_overhead(with_it), there]
            title = [f"{record['network']}, {record['scale']}", record["environment"]["platform"].upper()]
            budget = "per block's peak" if share == BLOCK else f"{float(share):.0%}"
            lines[-1] += f"\n| {' | '.join([*title, budget, *cells])} |"
    return "\n\n".join([*lines, *_states(found)]) if found else ""


def _states(found: Sequence[records.Record]) -> list[str]:
    """The table of where the optimizer's state is, with its title, if there are rows of it."""
    rows: list[str] = []
    for record in found:
        for name in (name for name in record["rows"] if name.endswith("state here")):
            here, there = record["rows"][name], record["rows"].get(name.replace("here", "there"))
            if there is None:
                continue
            cells = [f"{record['network']}, {record['scale']}", format_nbytes(here["budget_nbytes"])]
            for row in (here, there):
                needs = "peak_nbytes" if "peak_nbytes" in row else "least_nbytes"
                cells.append(("" if needs == "peak_nbytes" else "at least ") + format_nbytes(row[needs]))
                cells.append(f"{1e3 * row['seconds']:.1f} ms" if "seconds" in row else "")
            rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    head = f"| step | budget | state on the device | a step | on the host | a step |\n|---|{'---:|' * 5}"
    return [
        "The optimizer's state on the device, and in host memory with `jaxremat.to_host`; milliseconds by the\n"
        "same roofline. These steps have few tokens for their parameters: copies take longer than kernels.",
        "\n".join([head, *rows]),
    ]


def _peak_and_overhead(row: records.Record) -> tuple[str, str]:
    if "least_nbytes" in row:
        return f"at least {format_nbytes(row['least_nbytes'])}", ""
    return format_nbytes(row["peak_nbytes"]), f"{row['compiled_overhead']:+.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=("gpt_scanned",), help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="full")
    parser.add_argument("--shares", nargs="*", default=SHARES, help=f"of the temporaries, or {BLOCK}")
    parser.add_argument("--state", nargs="*", type=float, default=())
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0])
    parser.add_argument("--fresh", action="store_true", help="measure all rows anew")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    folder = (records.RESULTS if given.save else records.OUT) / FOLDER
    for network in given.networks:
        name = (
            f"{network}-{given.scale}"
            if given.target == TARGETS[0]
            else f"{network}-{given.scale}-{given.target}"
        )
        path = folder / f"{name}.json"
        found = run(
            network,
            given.scale,
            given.shares,
            path,
            target=given.target,
            state=given.state,
            fresh=given.fresh,
        )
        print(markdown([found]))


if __name__ == "__main__":
    main()
