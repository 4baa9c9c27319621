"""Write the results of the benchmarks as tables: all of them into this folder's README, an excerpt into the root's.

python -m examples.benchmarks.table            # rewrite both READMEs between their markers, print a summary
python -m examples.benchmarks.table --check    # write nothing: exit status 1 if one of them is out of date
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples import llama_70b, llama_lora
from examples.benchmarks import (
    ablation,
    chain,
    depth,
    host_memory,
    jax_remat_tests,
    joint,
    monet_table,
    planning,
    records,
    residuals,
    reversible,
    runner,
    sharded,
    splitting,
    step_table,
)
from examples.benchmarks.monet_table import AT_BLOCK, monet_findings
from examples.benchmarks.networks import LABELS
from examples.benchmarks.runner import grid
from examples.benchmarks.step_table import by_group
from jaxremat import EXACT, format_nbytes
from jaxremat._model._device_specs import DEVICES

README = records.HERE.parents[1] / "README.md"
PAGE = records.HERE / "README.md"
BEGIN = "<!-- benchmark table: begin -->"
END = "<!-- benchmark table: end -->"

SUMMED = """\
### All networks in one table

Compiled peaks of whole train steps, and the extra time by a roofline of the compiled programs.\
"""

LORA = """\
### Models of 8B and 70B on one GPU

[`llama_lora`](examples/llama_lora.py) is plain JAX: Llama 3's sizes, 32 scanned layers, no kernels. These are the peaks
that XLA's compiler reports for one H100, which has 79 GiB. Nothing in these tables was timed. Only the planned steps
compute attention in kernels. With cuDNN's attention, `jax.checkpoint` needs less, but JAX cannot compile that without
cuDNN. Where both fit, as with LoRA on 8,192 tokens, the plan uses more of the budget and recomputes less. Where the
last column has a figure, the plan may use host memory: it copies weights and Adam's moments layer by layer.\
"""

TIMED_ON_GPU = """\
### Timed on a GPU

Measured extra time of a step relative to the plain step. In brackets: the roofline's estimate.\
"""

CERTIFIED = """\
### Memory, certified by the compiler

Peaks of whole train steps, as reported by XLA's compiler for the device. A budget is the step's arguments and outputs
plus a share of its temporaries.\
"""

MODELLED = """\
### Time, modelled

Extra time of the same plans, by a roofline of the compiled programs: nothing in this table was timed. Negative means
estimated to be faster than the plain step. Large negative figures have two causes. The plan replaces XLA's unfused
attention by kernels, at the rates measured on an H200; a step that already has fused attention does not gain this.
And the plain scan copies more values into stacks.\
"""


COLUMNS = {
    "block": "`nn.remat` on every block",
    "0.5": "planned: half of the temporaries",
    "0.33": "a third",
    "min": "least",
}
"""Rows of a record by name, and how they are headed."""

FEW = ("resnet50", "unet", "gpt", "gpt_scanned")
"""A network of each kind: convolutions, skip connections, a transformer in blocks and one in a scan."""


def overview(
    steps: Sequence[records.Record],
    monet: Sequence[records.Record],
    networks: Collection[str] = tuple(LABELS),
    device: Sequence[records.Record] = (),
) -> str:
    """The table of some networks, and what was timed and what MONeT says; empty without results."""
    ordered = [record for members in by_group(steps) for record in members]
    full = [record for record in ordered if record["scale"] == "full" and record["network"] in networks]
    if not full:
        return ""
    head = ("step", "XLA for", "plain", *COLUMNS.values())
    table = grid(head, map(_cells, full), 2)
    published = _published(monet)
    parts = [table, *filter(None, map(_timed, device))]
    return "\n\n".join([*parts, f"MONeT's networks: {published}."] if published else parts)


def proof(
    steps: Sequence[records.Record],
    monet: Sequence[records.Record],
    device: Sequence[records.Record],
    lora: Sequence[records.Record],
) -> str:
    """Return the README's figures: what was timed, what a compiler certified and what is modelled, each apart."""
    ordered = [record for members in by_group(steps) for record in members]
    few = [
        record
        for record in ordered
        if record["scale"] == "full"
        and record["network"] in FEW
        and record["environment"]["platform"] != "cpu"
    ]
    timed = [row for record in device if (row := _timed_cells(record))]
    head = ("step", "GPU", *STOPPED.values())
    where, rules = ("step", "XLA for"), tuple(COLUMNS.values())
    published = _published(monet)
    parts = [
        *([LORA, *map(llama_lora.markdown, lora)] if lora else []),
        f"{TIMED_ON_GPU}\n\n{grid(head, timed, 2)}" if timed else "",
        f"{CERTIFIED}\n\n{grid((*where, 'plain', *rules), map(_peaks, few), 2)}" if few else "",
        f"{MODELLED}\n\n{grid((*where, *rules), map(_overheads, few), 2)}" if few else "",
        f"Plans of MONeT's networks, modelled; MONeT's own overheads were measured with PyTorch 1.5: {published}."
        if published
        else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _published(monet: Sequence[records.Record]) -> str:
    """Return how many of MONeT's budgets are met below MONeT's overhead, in words."""
    p100 = [record for record in monet if record["environment"]["platform"] == "p100"]
    said = next((line for line in monet_findings(p100) if "MONeT's" in line), "")
    return said.partition("; ")[0]


def _timed_cells(record: records.Record) -> tuple[str, ...]:
    """Return a row of what a stopwatch said; nothing where not all of it is there."""
    rows = record["rows"]
    if not all("time_ratio" in rows.get(name, {}) for name in TIMED):
        return ()
    inputs = record["inputs"].partition("[")[2].partition(",")[0]
    step = f"{LABELS[record['network']]}, batch {inputs}{_but(record)}"
    found = (
        f"{rows[name]['time_ratio'] - 1:+.1%} ({rows[name]['roofline_overhead']:+.1%})" for name in STOPPED
    )
    return step, record["environment"]["device"].removeprefix("NVIDIA "), *found


TIMED = {
    "1/2": "half of its peak",
    "1/3": "a third",
    AT_BLOCK: "with a plan at the same peak",
    "block": "`nn.remat` on every block",
}
"""Rows of `device` by name, and how they are called."""


STOPPED = {
    "1/2": "planned: half of the peak",
    "1/3": "a third",
    "block": COLUMNS["block"],
    AT_BLOCK: "planned: at that peak",
}
"""The same rows, as columns of the README's table."""


def _timed(record: records.Record) -> str:
    """What a stopwatch on a device said of a network, in a sentence; empty where not all rows are there."""
    rows = record["rows"]
    if not all("time_ratio" in rows.get(name, {}) for name in TIMED):
        return ""
    longer = {
        name: f"{rows[name]['time_ratio'] - 1:.1%} (roofline {rows[name]['roofline_overhead']:.1%})"
        for name in TIMED
    }
    network, at = LABELS[record["network"]], record["environment"]["device"]
    inputs = record["inputs"].partition("[")[2].partition(",")[0]
    return (
        f"**Timed** on an {at}{_but(record)}: {network}, batch {inputs}, takes {longer['1/2']} longer at "
        f"{TIMED['1/2']}, {longer['1/3']} at {TIMED['1/3']}. With {TIMED['block']} {longer['block']}, "
        f"{TIMED[AT_BLOCK]} {longer[AT_BLOCK]}."
    )


def _but(record: records.Record) -> str:
    """What the plans of a record could not do yet."""
    allowed = record["environment"].get("allow", EXACT)
    return ", attention as written" if "gpt" in record["network"] and "attention" not in allowed else ""


def _of(record: records.Record) -> tuple[str, str]:
    platform = str(record["environment"]["platform"])
    where = "CPU" if platform == "cpu" else DEVICES[platform].name.removeprefix("NVIDIA ")
    network = str(record["network"])
    return LABELS.get(network, network), where


def _cells(record: records.Record) -> tuple[str, ...]:
    found = (_cell(record["rows"].get(name)) for name in COLUMNS)
    return *_of(record), format_nbytes(record["rows"]["plain"]["peak_nbytes"]), *found


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row.get("infeasible"):
        return "infeasible"
    return f"{format_nbytes(row['peak_nbytes'])}, {row['roofline_overhead']:+.1%}"


def _peaks(record: records.Record) -> tuple[str, ...]:
    found = (_cell(record["rows"].get(name)).partition(", ")[0] for name in COLUMNS)
    return *_of(record), format_nbytes(record["rows"]["plain"]["peak_nbytes"]), *found


def _overheads(record: records.Record) -> tuple[str, ...]:
    return *_of(record), *(_cell(record["rows"].get(name)).rpartition(", ")[2] for name in COLUMNS)


def everything(results: Path) -> str:
    """All tables of a folder of results."""

    def of(kind: str) -> list[records.Record]:
        return list(records.read_all(results, kind))

    def told(benchmark: runner.Benchmark) -> str:
        return benchmark.markdown(of(benchmark.name))

    steps, monet, device = of("step"), of("monet"), of("device")
    summed = overview(steps, monet, device=device)
    parts = [
        f"{SUMMED}\n\n{summed}" if summed else "",
        monet_table.monet_markdown(monet),
        monet_table.device_markdown(device),
        step_table.markdown(steps),
        told(chain.BENCHMARK),
        told(planning.BENCHMARK),
        *map(depth.markdown, of("depth")),
        told(sharded.BENCHMARK),
        *map(llama_70b.markdown, of("llama")),
        *(["### Models of 8B and 70B on one H100"] if of("lora") else []),
        *map(llama_lora.markdown, of("lora")),
        *(told(each.BENCHMARK) for each in (host_memory, residuals, reversible, splitting)),
        *map(jax_remat_tests.markdown, of("jax_remat_tests")),
        *(told(each.BENCHMARK) for each in (joint, ablation)),
    ]
    return "\n\n".join(part for part in parts if part)


def inserted(page: str, tables: str) -> str:
    """A page's text with the tables between its markers.

    **Raises:** ValueError where there are tables but no place for them.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if begin and end:
        return f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}" if tables else f"{head}{BEGIN}\n{END}{tail}"
    if tables:
        raise ValueError(f"has no place for the tables. Put these two lines into it: {BEGIN} and {END}")
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write benchmark results into the READMEs.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if one is out of date"
    )
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the JSON files")
    parser.add_argument("--readme", type=Path, default=README, help="file for the summary tables")
    parser.add_argument("--page", type=Path, default=PAGE, help="file for all tables")
    given = parser.parse_args(argv)
    steps, monet, device, lora = (
        list(records.read_all(given.results, kind)) for kind in ("step", "monet", "device", "lora")
    )
    stale = False
    for path, tables in (
        (given.readme, proof(steps, monet, device, lora)),
        (given.page, everything(given.results)),
    ):
        old = path.read_text(encoding="utf-8")
        try:
            new = inserted(old, tables)
        except ValueError as problem:
            print(f"{path} {problem}")
            return 1
        stale |= new != old
        if given.check:
            print(f"{path} is {'up to date' if new == old else 'stale: python -m examples.benchmarks.table'}")
        elif new != old:
            path.write_text(new, encoding="utf-8")
    if given.check:
        return int(stale)
    for members in step_table.by_group(steps):
        print(f"{members[0]['environment']['platform']}, {members[0]['scale']}:")
        print("\n".join(f"  {line}" for line in step_table.findings(members)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
