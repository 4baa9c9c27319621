"""Records of `bench` -> tables, and what their rows say together."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from examples.benchmarks import records
from examples.benchmarks.bench import AT, BY_HAND, SCAN, is_plan, on_cpu
from examples.benchmarks.networks import LABELS, NAMES
from examples.benchmarks.records import Record
from examples.benchmarks.runner import grid, listed, shown
from jaxremat import format_nbytes

HOW = {"block": "per block", "dots": "products kept", SCAN: "`nn.remat_scan`"}
ROW_LABELS = {
    "plain": "plain",
    **{name: f"by hand, {how}" for name, how in HOW.items()},
    "min": "least",
    **{AT + name: f"at the peak of by hand, {how}" for name, how in HOW.items()},
}
LEGEND = """\
Budgets are the plain step's arguments and outputs plus a share of its temporaries; *least* is `"min"`.
*By hand* is `nn.remat` on every block, with no policy or with one that keeps the results of matrix products
and convolutions, or `nn.remat_scan` in place of `nn.scan` (two levels of loops of about equal length).

- Compiled: *peak, compiled* (by buffer assignment).
- Measured: *step time* (medians of alternating runs, relative to the plain step's); *solve* (seconds of all rounds);
  *difference* (the largest difference of a result after one step from the plain step's, relative to the largest
  entry of its array).
- Counted in the compiled program: *extra FLOPs*.
- Modelled: *peak, predicted* (in parentheses how far the first prediction was off, before any correction);
  *overhead, predicted*; *overhead, roofline* (of the kernels of the two compiled programs); *gap* (to the
  solver's own bound, as a share of the step).\
"""

Column = tuple[str, Callable[[Record], str]]
"""What heads a column, and what it says of a row."""


def figure(key: str, text: Callable[[Any], str]) -> Callable[[Record], str]:
    """What a column says that tells one figure, nothing of rows that lack it."""
    return lambda row: shown(row, key, text)


PERCENT, SECONDS, DIFFERENCE = "{:.1%}".format, "{:.1f} s".format, "{:.1g}".format


def _predicted(row: Record) -> str:
    first = f" ({records.prediction_error(row):+.1%})" if row.get("first_predicted_nbytes") else ""
    return shown(row, "predicted_nbytes", format_nbytes) + first


def time_of(ratio: str, own: str) -> Callable[[Record], str]:
    """A step's time relative to the plain step's; its own in seconds."""
    relative, seconds = figure("time_ratio", ratio.format), figure("step_seconds", own.format)
    return lambda row: (relative if "extra_flops" in row else seconds)(row)


BUDGET: Column = ("budget", figure("budget_nbytes", format_nbytes))
COLUMNS: tuple[Column, ...] = (
    ("peak, predicted", _predicted),
    ("peak, compiled", figure("peak_nbytes", format_nbytes)),
    ("extra FLOPs", figure("extra_flops", PERCENT)),
    ("overhead, predicted", figure("predicted_overhead", PERCENT)),
    ("overhead, roofline", figure("roofline_overhead", PERCENT)),
    ("step time", time_of("{:.2f}", "{:.2f} s")),
    ("solve", figure("solve_seconds", SECONDS)),
    ("gap", figure("gap", "{:.2%}".format)),
    ("difference", figure("difference", DIFFERENCE)),
)


def table_of(
    rows: Mapping[str, Record],
    columns: Sequence[Column],
    label: Callable[[str], str],
    peak: str = "peak, compiled",
) -> str:
    """A table of rows. Of infeasible ones the column of the peak says what is needed at least."""
    heads = [head for head, _ in columns]
    lines = []
    for name, row in rows.items():
        if row.get("infeasible"):
            cells = [""] * len(columns)
            needed = row["min_peak_nbytes"]
            cells[heads.index(peak)] = "infeasible" + (
                "" if needed is None else f": least {format_nbytes(needed)}"
            )
        else:
            cells = [text(row) for _, text in columns]
        lines.append((label(name), BUDGET[1](row) if name != "min" else "", *cells))
    return grid(("step", BUDGET[0], *heads), lines)


def label(name: str) -> str:
    """What a row is called."""
    return ROW_LABELS.get(name) or f"{float(name):.0%} of temporaries"


def markdown(steps: Sequence[Record]) -> str:
    """The tables of all networks by device and scale, with what their columns mean; empty without results."""
    parts = [LEGEND] if steps else []
    for members in by_group(steps):
        parts.append(f"### {members[0]['environment']['platform'].upper()}, {members[0]['scale']} size")
        parts.append(f"On {machines(members)}:")
        parts.append("\n".join(f"- {line}" for line in findings(members)))
        for record in members:
            parts += [title(record), table_of(record["rows"], COLUMNS, label)]
    return "\n\n".join(parts)


def by_group(steps: Sequence[Record]) -> list[list[Record]]:
    """The records of each device and scale, in the order of their networks."""
    ordered = sorted(steps, key=_place)
    return [list(members) for _, members in itertools.groupby(ordered, key=_group)]


def _group(record: Record) -> tuple[str, int]:
    return record["environment"]["platform"], ("full", "small", "tiny").index(record["scale"])


def _place(record: Record) -> tuple[tuple[str, int], int, str]:
    names = [*NAMES, record["network"]]
    return _group(record), names.index(record["network"]), record["network"]


def title(record: Record) -> str:
    """One line that says which program a table is about."""
    equations = record["rows"].get("plain", {}).get("equations", 0)
    return (
        f"**{LABELS.get(record['network'], record['network'])}**: inputs `{record['inputs']}`, "
        f"{record['parameters'] / 1e6:.1f} M parameters, {equations:,} equations"
    )


def machines(all_records: Iterable[Record]) -> str:
    """Where and when, once for each machine."""
    dates: dict[str, set[str]] = {}
    for record in all_records:
        at = record["environment"]
        cores = [f"{at['cores']} cores", f"Python {at['python']}"] if "cores" in at else []
        where = ", ".join([at["device"], *cores, f"jax {at['jax']}"])
        dates.setdefault(where, set()).update(row["date"] for row in record["rows"].values())
    spans = {where: sorted(days) for where, days in dates.items()}
    return "; ".join(
        f"{where}, {' to '.join(dict.fromkeys((d[0], d[-1])))}" for where, d in spans.items() if d
    )


def dominated(record: Record, work: str) -> list[str]:
    """Plans that need no less memory and work than a step by hand, and more of one."""
    rows = record["rows"]
    beaten = []
    for name, row in rows.items():
        for hand in BY_HAND if is_plan(name) and not row.get("infeasible") else ():
            pairs = [(rows[hand][key], row[key]) for key in ("peak_nbytes", work)] if hand in rows else []
            if all(a <= b for a, b in pairs) and any(a < b for a, b in pairs):
                beaten.append(name)
    return list(dict.fromkeys(beaten))


def findings(steps: Sequence[Record]) -> list[str]:
    """What all rows together say. Work is FLOPs on the CPU, and the roofline's seconds on GPUs."""
    plans = plans_of(steps, "network")
    found = {name: row for name, row in plans.items() if not row.get("infeasible")}
    over = [name for name, row in found.items() if not row["fits"]]
    work, called = ("flops", "FLOPs") if on_cpu(steps[0]) else ("roofline_seconds", "roofline")
    beaten = [f"{record['network']} {name}" for record in steps for name in dominated(record, work)]
    above = [record["network"] for record in steps if _least_above_block(record["rows"])]
    lines = [
        f"{len(found)} plans of {len(plans)} budgets"
        + (f", infeasible: {listed(plans.keys() - found.keys())}" if len(found) < len(plans) else ""),
        f"over budget: {listed(over)}",
        f"plans beaten by a step by hand in peak and {called}: {listed(beaten)}",
        f"least peak above that of per-block rematerialisation: {listed(above)}",
    ]
    for what, text, measure in (
        ("first prediction of the peak off by", PERCENT, lambda row: abs(records.prediction_error(row))),
        ("solving took", SECONDS, lambda row: row["solve_seconds"]),
        ("planning without compiling took", SECONDS, lambda row: row["planning_seconds"]),
        ("largest relative difference of results", "{:.1e}".format, lambda row: row["difference"]),
    ):
        lines += spread(what, found, text, measure)
    return lines


def plans_of(members: Sequence[Record], key: str) -> dict[str, Record]:
    """The rows of all plans, by network (or what `key` names) and row."""
    return {
        f"{record[key]} {name}": row
        for record in members
        for name, row in record["rows"].items()
        if is_plan(name)
    }


def _least_above_block(rows: Mapping[str, Record]) -> bool:
    return {"min", "block"} <= rows.keys() and rows["min"]["peak_nbytes"] > rows["block"]["peak_nbytes"]


def spread(
    what: str,
    rows: Mapping[str, Record],
    text: Callable[[float], str],
    measure: Callable[[Record], float | None],
) -> list[str]:
    """Median and largest of a measure of the rows that have it, as a line of text, or no line."""
    values: dict[str, float] = {}
    for name, row in rows.items():
        try:
            value = measure(row)
        except (KeyError, TypeError):  # not measured, or null: a plan that needed no round
            continue
        if value is not None:
            values[name] = value
    if not values:
        return []
    worst = max(values, key=lambda name: values[name])
    median = text(statistics.median(values.values()))
    return [f"{what} {median} (median), at most {text(values[worst])} ({worst})"]
