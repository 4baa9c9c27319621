"""The results of `steps` and `monet` in one table, a row for each network and compiler; some of it is in the README."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from examples.benchmarks import records
from examples.benchmarks.monet_table import AT_BLOCK, monet_findings
from examples.benchmarks.networks import LABELS
from examples.benchmarks.runner import grid
from examples.benchmarks.step_table import by_group
from jaxremat import EXACT, format_nbytes
from jaxremat._model._device_specs import DEVICES

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
    p100 = [record for record in monet if record["environment"]["platform"] == "p100"]
    said = next((line for line in monet_findings(p100) if "below MONeT's" in line), "")
    published = said.partition("; ")[0]
    parts = [table, *filter(None, map(_timed, device))]
    return "\n\n".join([*parts, f"MONeT's networks, {published}."] if published else parts)


TIMED = {
    "1/2": "half of its peak",
    "1/3": "a third",
    AT_BLOCK: "what that needs",
    "block": "`nn.remat` on every block",
}
"""Rows of `device` by name, and how they are called."""


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
        f"{TIMED['1/2']}, {longer['1/3']} at {TIMED['1/3']}. With {TIMED['block']} {longer['block']}, planned for "
        f"{TIMED[AT_BLOCK]} {longer[AT_BLOCK]}."
    )


def _but(record: records.Record) -> str:
    """What the plans of a record could not do yet."""
    allowed = record["environment"].get("allow", EXACT)
    return ", attention as it is written" if "gpt" in record["network"] and "attention" not in allowed else ""


def _cells(record: records.Record) -> tuple[str, ...]:
    rows, network = record["rows"], str(record["network"])
    platform = str(record["environment"]["platform"])
    where = "CPU" if platform == "cpu" else DEVICES[platform].name.removeprefix("NVIDIA ")
    plain = format_nbytes(rows["plain"]["peak_nbytes"])
    found = (_cell(rows.get(name)) for name in COLUMNS)
    return LABELS.get(network, network), where, plain, *found


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row.get("infeasible"):
        return "infeasible"
    return f"{format_nbytes(row['peak_nbytes'])}, {row['roofline_overhead']:+.1%}"
