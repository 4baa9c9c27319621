"""The results of `monet` and `device` as tables, and what they say together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from examples.benchmarks.records import Record
from examples.benchmarks.runner import grid, listed
from examples.benchmarks.step_table import (
    DIFFERENCE,
    PERCENT,
    ROW_LABELS,
    SECONDS,
    Column,
    dominated,
    figure,
    plans_of,
    spread,
    table_of,
    time_of,
)
from jaxremat import format_nbytes
from jaxremat._model._device_specs import DEVICES

AT_BLOCK, KNAPSACK = "at block", "knapsack "
MONET_LEGEND = """\
Budgets are shares of the plain step's compiled peak: MONeT's budgets over its published plain peak (for
VGG-16, its published use), then smaller ones. The budget of *at per-block's peak* is the peak of rematerialisation by
hand; *least* is `"min"`. *Knapsack* saves by the rule of torch.compile's `activation_memory_budget` on the same
graph (`examples/benchmarks/knapsack.py`), at the largest ratio that fits. **Nothing here was timed**:

- Compiled: *peak* (by XLA's buffer assignment for that GPU).
- Measured: *solve* (seconds of all rounds).
- Counted in the compiled program: *extra FLOPs*, *extra traffic* (bytes that its kernels read and write).
- Modelled: *predicted* (by the plan, for its target); *at P100's*, *at H100's rates* (rooflines of the kernels
  of the two compiled programs); *gap* (to the solver's own bound, as a share of the step).
- Published: *MONeT* (measured by its authors with PyTorch 1.5.1 on a P100).\
"""


def _at(rates: str) -> Column:
    return f"at {rates.upper()}'s rates", lambda row: figure(rates, PERCENT)(row.get("overhead_at", {}))


PEAK = figure("peak_nbytes", format_nbytes)
MONET_COLUMNS: tuple[Column, ...] = (
    ("peak", PEAK),
    ("predicted", figure("predicted_overhead", PERCENT)),
    _at("p100"),
    _at("h100"),
    ("extra FLOPs", figure("extra_flops", PERCENT)),
    ("extra traffic", figure("extra_traffic", PERCENT)),
    ("solve", figure("solve_seconds", SECONDS)),
    ("gap", figure("gap", "{:.2%}".format)),
    ("MONeT", figure("published", PERCENT)),
)
DEVICE_LEGEND = """\
Measured on the device: *peak, allocator* (the most in use while the step ran), *beyond* (how much more this is than
the figure compiled without the device: the reason for `workspace_margin`), *step time* (medians of alternating runs,
relative to the plain step's), *difference* (of all results from the plain step's). Modelled: *predicted*, *roofline*.\
"""
DEVICE_COLUMNS: tuple[Column, ...] = (
    ("peak, compiled", PEAK),
    ("peak, allocator", figure("device_peak_nbytes", format_nbytes)),
    ("beyond", figure("beyond_nbytes", format_nbytes)),
    ("step time", time_of("{:.3f}", "{:.4f} s")),
    ("predicted", figure("predicted_overhead", PERCENT)),
    ("roofline", figure("roofline_overhead", PERCENT)),
    ("difference", figure("difference", DIFFERENCE)),
)


def monet_markdown(found: Sequence[Record]) -> str:
    """The tables of `monet`, one per subject and target; empty without results."""
    parts: list[str] = []
    for target, group in itertools.groupby(
        sorted(found, key=_place), key=lambda record: record["environment"]["platform"]
    ):
        members = list(group)
        parts.append(f"### MONeT's networks and GPT-2, planned and compiled for the {DEVICES[target].name}")
        parts += [] if len(parts) > 1 else [MONET_LEGEND]
        parts.append("\n".join(f"- {line}" for line in monet_findings(members)))
        for record in members:
            size = f"{record['parameters'] / 1e6:.1f} M parameters"
            parts.append(f"**{record['subject']}**: inputs `{record['inputs']}`, {size}")
            published = record["published"]
            rows = {name: {**row, "published": published.get(name)} for name, row in record["rows"].items()}
            parts.append(table_of(rows, MONET_COLUMNS, _label, "peak"))
    return "\n\n".join(parts)


def monet_findings(members: Sequence[Record]) -> list[str]:
    """What the records of one target say."""
    every = plans_of(members, "subject").items()
    plans = {name: row for name, row in every if f" {KNAPSACK}" not in name}
    made = {where: row for where, row in plans.items() if not row.get("infeasible")}
    lines = [f"{len(made)} plans of {len(plans)} budgets; infeasible: {listed(plans.keys() - made.keys())}"]
    lines.append(f"over budget: {listed(where for where, row in made.items() if not row['fits'])}")
    pairs = {
        where: (made[where]["overhead_at"]["p100"], published)
        for record in members
        for name, published in record["published"].items()
        if (where := f"{record['subject']} {name}") in made
    }
    if pairs:
        above = [where for where, (ours, theirs) in pairs.items() if ours >= theirs]
        half = sum(theirs > 0 and ours <= theirs / 2 for ours, theirs in pairs.values())
        lines.append(
            f"at P100's rates, the overhead is below MONeT's for {len(pairs) - len(above)} of {len(pairs)} budgets, "
            f"and at most half of MONeT's for {half}; not below: {listed(above)}"
        )
    beaten = [
        f"{record['subject']} {name}"
        for record in members
        for name in dominated(record, "roofline_seconds")
        if not name.startswith(KNAPSACK)
    ]
    lines += [
        f"plans beaten by a step by hand in peak and roofline: {listed(beaten)}",
        *_against_block(members),
    ]
    lines += spread(
        "difference between predicted and roofline overhead, in points:",
        made,
        "{:.1f}".format,
        lambda row: 100 * abs(row["predicted_overhead"] - row["roofline_overhead"]),
    )
    lines += spread("solving took", made, SECONDS, lambda row: row["solve_seconds"])
    return [*lines, *_against_knapsack(members)]


def _against_block(members: Sequence[Record]) -> list[str]:
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
            f"at the peak of per-block rematerialisation, overhead as a multiple of its overhead: {said or 'none'}"
            + (f"; no plan: {', '.join(without)}" if without else "")
        )
    lines.append(f"least peak not below that of per-block rematerialisation: {', '.join(above) or 'none'}")
    return lines


def _against_knapsack(members: Sequence[Record]) -> list[str]:
    cheaper = dearer = unfit = 0
    for rows in (record["rows"] for record in members):
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
        f"compared with the knapsack at the same budget: cheaper or equal for {cheaper} plans, more expensive for "
        f"{dearer}; for {unfit} others, nothing that the knapsack chooses fits"
    ]


def device_markdown(found: Iterable[Record]) -> str:
    """The tables of `device`; empty without results."""
    parts: list[str] = []
    for record in found:
        at = record["environment"]
        parts += [] if parts else [f"### Measured on devices\n\n{DEVICE_LEGEND}"]
        driver = f", driver {at['driver']}" if at.get("driver") else ""
        where = f"**{record['subject']}** on {at['device']}{driver}, jax {at['jax']}"
        parts.append(f"{where}: inputs `{record['inputs']}`")
        parts.append(table_of(record["rows"], DEVICE_COLUMNS, _label))
        kinds = {name: row["kernel_kinds"] for name, row in record["rows"].items() if "kernel_kinds" in row}
        parts += [_kernels(name, found) for name, found in kinds.items()]
    return "\n\n".join(parts)


def _kernels(name: str, kinds: dict[str, Record]) -> str:
    """The kernels of a row's step by kind."""
    lines = []
    for kind, row in kinds.items():
        both = row["seconds"], row["roofline_seconds"]
        times = (f"{1e3 * seconds:.2f}" for seconds in both)
        lines.append((kind, str(row["kernels"]), *times, f"{both[0] / both[1]:.2f}"))
    table = grid(("kernels", "launched", "measured, ms", "roofline, ms", "ratio"), lines)
    return f"Kernels of the step *{_label(name)}*, by JAX's profiler:\n\n{table}"


def _label(name: str) -> str:
    if name.startswith(KNAPSACK):
        return f"knapsack, {_label(name.removeprefix(KNAPSACK))}"
    if "/" not in name:
        return "at per-block's peak" if name == AT_BLOCK else ROW_LABELS.get(name, name)
    part, whole = name.split("/")
    return f"{float(part) / float(whole):.0%}" + (f" ({name})" if "." in name else "")


def _place(record: Record) -> tuple[bool, str, bool, str]:
    """MONeT's device first, and its networks first."""
    target = record["environment"]["platform"]
    return target != "p100", target, not record["published"], record["subject"]
