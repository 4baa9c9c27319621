"""The results of `monet`, `device` and `pytorch` as tables, and what they say together."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from examples.benchmarks import records
from jaxremat import format_nbytes
from jaxremat._model._device_specs import DEVICES

Row = dict[str, Any]

BY_HAND = {"block": "by hand, per block", "dots": "by hand, products kept"}
AT_BLOCK, KNAPSACK = "at block", "knapsack "
MONET_LEGEND = """\
Budgets are shares of the plain step's compiled peak: MONeT's budgets over what it says the plain step needs (VGG-16's
are those that it says it used), then less. *At per-block's peak* has as its budget what rematerialisation by
hand needs; *least* is `"min"`. *Knapsack* saves by the rule of torch.compile's `activation_memory_budget` on the same
graph (`examples/benchmarks/knapsack.py`), at the largest ratio that fits. **Nothing here was timed**:

- Measured: *peak* (by XLA's buffer assignment for that GPU); *solve* (seconds of all rounds).
- Counted in the compiled program: *extra FLOPs*, *extra traffic* (bytes that its kernels read and write).
- Modelled: *predicted* (what the plan expected of its target); *at P100's*, *at H100's rates* (rooflines of the kernels
  of the two compiled programs); *gap* (to the solver's own bound, as a share of the step).
- Published: *MONeT* (measured by its authors with PyTorch 1.5.1 on a P100).\
"""
MONET_HEADER = (
    "step",
    "budget",
    "peak",
    "predicted",
    "at P100's rates",
    "at H100's rates",
    "extra FLOPs",
    "extra traffic",
    "solve",
    "gap",
    "MONeT",
)
DEVICE_LEGEND = """\
Everything here was measured on the device: *peak, allocator* (the most that was in use while the step ran), *beyond*
(that less the device-less number: what `workspace_margin` is for), *step time* (medians of runs in turn, relative to
the plain step's), *difference* (of all results from the plain step's); but *predicted* and *roofline* are modelled.\
"""
DEVICE_HEADER = (
    "step",
    "budget",
    "peak, compiled",
    "peak, allocator",
    "beyond",
    "step time",
    "predicted",
    "roofline",
    "difference",
)


def monet_markdown(found: Sequence[records.Record]) -> str:
    """The tables of `monet`, one per subject and target; empty without results."""
    parts: list[str] = []
    for target, group in itertools.groupby(sorted(found, key=_place), key=_target):
        members = list(group)
        parts.append(f"### MONeT's networks and GPT-2, planned and compiled for the {_short(target)}")
        parts += [] if len(parts) > 1 else [MONET_LEGEND]
        parts.append("\n".join(f"- {line}" for line in monet_findings(members)))
        for record in members:
            size = f"{record['parameters'] / 1e6:.1f} M parameters"
            where = f"**{record['subject']}**: inputs `{record['inputs']}`, {size}"
            rows = [_monet_cells(name, row, record) for name, row in record["rows"].items()]
            parts += [where, _grid(MONET_HEADER, rows)]
    return "\n\n".join(parts)


def monet_findings(members: Sequence[records.Record]) -> list[str]:
    """What the records of one target say."""
    plans = {
        (record["subject"], name): row
        for record in members
        for name, row in record["rows"].items()
        if name not in ("plain", *BY_HAND) and not name.startswith(KNAPSACK)
    }
    made = {where: row for where, row in plans.items() if not row.get("infeasible")}
    lines = [f"{len(made)} plans of {len(plans)} budgets; infeasible: {_list(plans.keys() - made.keys())}"]
    lines.append(f"over budget: {_list(where for where, row in made.items() if not row['fits'])}")
    pairs = {
        (record["subject"], name): (record["rows"][name]["overhead_at"]["p100"], published)
        for record in members
        for name, published in record["published"].items()
        if (record["subject"], name) in made
    }
    if pairs:
        above = [where for where, (ours, theirs) in pairs.items() if ours >= theirs]
        half = sum(theirs > 0 and ours <= theirs / 2 for ours, theirs in pairs.values())
        lines.append(
            f"at P100's rates below MONeT's overhead at {len(pairs) - len(above)} of {len(pairs)} of its budgets, "
            f"at most half of it at {half}; not below it: {_list(above)}"
        )
    lines.append(
        f"dominated in peak and roofline by a step by hand: {_list(where for m in members for where in _dominated(m))}"
    )
    lines += _against_block(members)
    apart = {where: row["predicted_overhead"] - row["roofline_overhead"] for where, row in made.items()}
    if apart:
        worst = max(apart, key=lambda where: abs(apart[where]))
        lines.append(
            f"predicted and roofline overhead {100 * statistics.median(map(abs, apart.values())):.1f} points apart in "
            f"the median, {100 * abs(apart[worst]):.1f} at most ({_name(worst)})"
        )
        seconds = {where: row["solve_seconds"] for where, row in made.items()}
        slowest = max(seconds, key=lambda where: seconds[where])
        lines.append(
            f"solving took {statistics.median(seconds.values()):.1f} s in the median, {seconds[slowest]:.1f} s at most "
            f"({_name(slowest)})"
        )
    return [*lines, *_against_knapsack(members)]


def _dominated(record: records.Record) -> list[tuple[str, str]]:
    """Plans that need no less memory and no less time by roofline than a step by hand, and more of one."""
    rows, beaten = record["rows"], []
    for name, row in rows.items():
        if name in ("plain", *BY_HAND) or name.startswith(KNAPSACK) or row.get("infeasible"):
            continue
        for hand in BY_HAND.keys() & rows.keys():
            pairs = [(rows[hand][key], row[key]) for key in ("peak_nbytes", "roofline_seconds")]
            if all(a <= b for a, b in pairs) and any(a < b for a, b in pairs):
                beaten.append((record["subject"], name))
    return list(dict.fromkeys(beaten))


def _against_block(members: Sequence[records.Record]) -> list[str]:
    shares, without, above = {}, [], []
    for record in members:
        rows, subject = record["rows"], record["subject"]
        block, plan, least = rows.get("block"), rows.get(AT_BLOCK), rows.get("min")
        if block and plan and plan.get("infeasible"):
            without.append(subject)
        elif block and plan and block["roofline_overhead"] > 0:
            shares[subject] = plan["roofline_overhead"] / block["roofline_overhead"]
        if block and least and least["peak_nbytes"] >= block["peak_nbytes"]:
            above.append(subject)
    lines = []
    if shares or without:
        said = ", ".join(f"{subject} {share:.2f}" for subject, share in shares.items())
        lines.append(
            f"at per-block's peak, of its overhead by roofline: {said or 'none'}"
            + (f"; no plan: {', '.join(without)}" if without else "")
        )
    lines.append(f"least peak not below that of per-block rematerialisation: {', '.join(above) or 'none'}")
    return lines


def _against_knapsack(members: Sequence[records.Record]) -> list[str]:
    cheaper = dearer = unfit = 0
    for record in members:
        rows = record["rows"]
        for name, row in rows.items():
            plan = rows.get(name.removeprefix(KNAPSACK))
            if not name.startswith(KNAPSACK) or plan is None or plan.get("infeasible"):
                continue
            if row.get("infeasible"):
                unfit += 1
            elif plan["roofline_seconds"] <= row["roofline_seconds"]:
                cheaper += 1
            else:
                dearer += 1
    if not cheaper + dearer + unfit:
        return []
    return [
        f"against the knapsack at the same budget: no more expensive at {cheaper}, more expensive at {dearer}; "
        f"the knapsack has "
        f"nothing that fits at {unfit} more"
    ]


def _monet_cells(name: str, row: Row, record: records.Record) -> tuple[str, ...]:
    label, published = _label(name), record["published"].get(name)
    theirs = "" if published is None else f"{published:.1%}"
    if row.get("infeasible"):
        least = row["min_peak_nbytes"]
        said = "infeasible" + ("" if least is None else f": least {format_nbytes(least)}")
        return (label, format_nbytes(row["budget_nbytes"]), said, *("",) * 7, theirs)
    return (
        label,
        _show(row, "budget_nbytes", format_nbytes) if name != "min" else "",
        format_nbytes(row["peak_nbytes"]),
        _show(row, "predicted_overhead", "{:.1%}".format),
        *(_show(row.get("overhead_at", {}), rates, "{:.1%}".format) for rates in ("p100", "h100")),
        _show(row, "extra_flops", "{:.1%}".format),
        _show(row, "extra_traffic", "{:.1%}".format),
        _show(row, "solve_seconds", "{:.1f} s".format),
        _show(row, "gap", "{:.2%}".format),
        theirs,
    )


def device_markdown(found: Iterable[records.Record], torch: Iterable[records.Record]) -> str:
    """The tables of `device` and of `pytorch`; empty without results."""
    parts: list[str] = []
    for record in found:
        at = record["environment"]
        parts += [DEVICE_LEGEND] if not parts else []
        parts.append(
            f"**{record['subject']}** on {at['device']}"
            + (f", driver {at['driver']}" if at.get("driver") else "")
            + f", jax {at['jax']}: inputs `{record['inputs']}`"
        )
        rows = [_device_cells(name, row) for name, row in record["rows"].items()]
        parts.append(_grid(DEVICE_HEADER, rows))
        parts += [
            _kernels(name, row["kernel_kinds"])
            for name, row in record["rows"].items()
            if "kernel_kinds" in row
        ]
    for record in torch:
        at = record["environment"]
        parts.append(
            f"**{record['network']}**, {record['dtype']}, torch.compile {at['torch']} on {at['device']}, by "
            "`activation_memory_budget` (measured):"
        )
        plain = record["rows"][0]
        lines = [
            (
                f"{row['ratio']:g}",
                _show(row, "device_peak_nbytes", format_nbytes),
                f"{row['step_seconds'] / plain['step_seconds']:.3f}",
            )
            for row in record["rows"]
        ]
        parts.append(_grid(("ratio", "peak, allocator", "step time"), lines))
    return "\n\n".join([f"### Measured on devices\n\n{parts[0]}", *parts[1:]]) if parts else ""


def _kernels(name: str, kinds: dict[str, Row]) -> str:
    """The kernels of a row's step by kind."""
    lines = [
        (
            kind,
            str(row["kernels"]),
            f"{1e3 * row['seconds']:.2f}",
            f"{1e3 * row['roofline_seconds']:.2f}",
            f"{row['seconds'] / row['roofline_seconds']:.2f}",
        )
        for kind, row in kinds.items()
    ]
    table = _grid(("kernels", "launched", "measured, ms", "roofline, ms", "ratio"), lines)
    return f"The kernels of its step *{_label(name)}*, by JAX's profiler:\n\n{table}"


def _device_cells(name: str, row: Row) -> tuple[str, ...]:
    if row.get("infeasible"):
        return (_label(name), format_nbytes(row["budget_nbytes"]), "infeasible", *("",) * 6)
    time = "{:.4f} s".format if name == "plain" else "{:.3f}".format
    return (
        _label(name),
        _show(row, "budget_nbytes", format_nbytes),
        format_nbytes(row["peak_nbytes"]),
        _show(row, "device_peak_nbytes", format_nbytes),
        _show(row, "beyond_nbytes", format_nbytes),
        _show(row, "step_seconds" if name == "plain" else "time_ratio", time),
        _show(row, "predicted_overhead", "{:.1%}".format),
        _show(row, "roofline_overhead", "{:.1%}".format),
        _show(row, "difference", "{:.1g}".format),
    )


def _label(name: str) -> str:
    if name.startswith(KNAPSACK):
        return f"knapsack, {_label(name.removeprefix(KNAPSACK))}"
    if "/" not in name:
        return {**BY_HAND, AT_BLOCK: "at per-block's peak", "min": "least"}.get(name, name)
    part, whole = name.split("/")
    return f"{float(part) / float(whole):.0%}" + (f" ({name})" if "." in name else "")


def _grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ("---", *("---:",) * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _show(row: Mapping[str, Any], key: str, text: Any) -> str:
    return "" if row.get(key) is None else text(row[key])


def _target(record: records.Record) -> str:
    return record["environment"]["platform"]


def _short(target: str) -> str:
    return DEVICES[target].name


def _place(record: records.Record) -> tuple[bool, str, bool, str]:
    """MONeT's device first, and its networks first."""
    target = _target(record)
    return target != "p100", target, not record["published"], record["subject"]


def _name(where: tuple[str, str]) -> str:
    return f"{where[0]} {where[1]}"


def _list(where: Iterable[tuple[str, str]]) -> str:
    return ", ".join(sorted({_name(each) for each in where})) or "none"
