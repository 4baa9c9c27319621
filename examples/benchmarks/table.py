"""Write the results of the benchmarks as tables: all of them beside this file, one that sums them up into the README.

python -m examples.benchmarks.table            # rewrite both READMEs between their markers, print a summary
python -m examples.benchmarks.table --check    # only look: exit status 1 if one of them is not up to date
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples import llama_70b
from examples.benchmarks import (
    ablation,
    depth,
    emitters,
    host_memory,
    jax_remat_tests,
    joint,
    monet_table,
    prediction,
    records,
    residuals,
    reversible,
    sharded,
    solvers,
    unrolled,
)
from examples.benchmarks.bench import AT
from examples.benchmarks.overview import FEW, NAMES, overview
from jaxremat import format_nbytes

README = records.HERE.parents[1] / "README.md"
PAGE = records.HERE / "README.md"
BEGIN = "<!-- benchmark table: begin -->"
END = "<!-- benchmark table: end -->"

Row = dict[str, Any]

BY_HAND = {"block": "per block", "dots": "products kept", "scan": "`nn.remat_scan`"}
LABELS = {
    "plain": "plain",
    **{name: f"by hand, {how}" for name, how in BY_HAND.items()},
    "min": "least",
    **{AT + name: f"at the peak of by hand, {how}" for name, how in BY_HAND.items()},
}
HEADER = (
    "step",
    "budget",
    "peak, predicted",
    "peak, compiled",
    "extra FLOPs",
    "overhead, predicted",
    "overhead, roofline",
    "step time",
    "solve",
    "gap",
    "difference",
)
LEGEND = """\
Budgets are the plain step's arguments and outputs plus a share of its temporaries; *least* is `"min"`.
*By hand* is `nn.remat` on every block, with no policy or with one that keeps the results of matrix products
and convolutions, or `nn.remat_scan` in place of `nn.scan` (two levels of loops, as equal as can be).

- Measured: *peak, compiled* (by buffer assignment); *step time* (medians of runs in turn, relative
  to the plain step's); *solve* (seconds of all rounds); *difference* (of all results after one step from the
  plain step's, the largest relative to the largest entry of its array).
- Counted in the compiled program: *extra FLOPs*.
- Modelled: *peak, predicted* (in parentheses how far the first prediction was off, before any correction);
  *overhead, predicted*; *overhead, roofline* (of the kernels of the two compiled programs); *gap* (to the
  solver's own bound, as a share of the step).\
"""


def is_plan(name: str) -> bool:
    """Whether a row is a plan's."""
    return name not in ("plain", *BY_HAND)


def markdown(steps: Sequence[records.Record], chains: Sequence[records.Record]) -> str:
    """All tables, with what their columns mean; empty without results."""
    parts = [LEGEND] if steps else []
    for _, group in itertools.groupby(sorted(steps, key=_place), key=_group):
        members = list(group)
        parts.append(f"### {members[0]['environment']['platform'].upper()}, {members[0]['scale']} size")
        parts.append(f"On {machines(members)}:")
        parts.append("\n".join(f"- {line}" for line in findings(members)))
        for record in members:
            parts += [title(record), grid(record)]
    parts += [chain_line(record) for record in chains]
    return "\n\n".join(parts)


def everything(steps: Sequence[records.Record], results: Path) -> str:
    """All tables of a folder of results."""
    monet, device, torch, chains = (
        list(records.read_all(results, kind)) for kind in ("monet", "device", "torch", "chain")
    )
    pairs = _unrolled(results)
    deep = [depth.markdown(record) for record in records.read_all(results, "depth")]
    emitted = list(records.read_all(results, "emitters"))
    summed = overview(steps, monet, device=device)
    parts = [
        f"{SUMMED}\n\n{summed}" if summed else "",
        monet_table.monet_markdown(monet),
        monet_table.device_markdown(device, torch),
        markdown(steps, chains),
        *([UNROLLED] if pairs else []),
        *pairs,
        *deep,
        *map(sharded.markdown, records.read_all(results, "sharded")),
        *map(llama_70b.markdown, records.read_all(results, "llama")),
        host_memory.markdown(list(records.read_all(results, "host_memory"))),
        residuals.markdown(list(records.read_all(results, residuals.FOLDER))),
        reversible.markdown(list(records.read_all(results, reversible.FOLDER))),
        solvers.markdown(list(records.read_all(results, solvers.FOLDER))),
        emitters.markdown(emitted),
        *map(jax_remat_tests.markdown, jax_tests(results)),
        *map(joint.markdown, records.read_all(results, joint.FOLDER)),
        *map(prediction.markdown, records.read_all(results, prediction.FOLDER)),
        *map(ablation.markdown, records.read_all(results, "ablation")),
    ]
    return "\n\n".join(part for part in parts if part)


SUMMED = """\
### All networks in one table

Compiled peaks of whole train steps, and the extra time by a roofline of the compiled programs.\
"""

UNROLLED = """\
### Scanned against unrolled

The same network with its blocks written out, planned with the compiled peak of each of the scanned network's plans
as its budget (`examples/benchmarks/unrolled.py`). Extra FLOPs, counted in the compiled programs, are each in terms of
its own plain step. What no plan of a loop lowers is the stack of its parameters' gradients, which is there from the
backward loop's first iteration to the optimizer; gradients of blocks that are written out go into their updates one
by one. Where budgets are small that is much of them (1.1 GiB of GPT-2 medium's).\
"""


def _unrolled(results: Path) -> list[str]:
    steps = {(r["network"], r["scale"]): r for r in records.read_all(results, "step") if _on_cpu(r)}
    parts = []
    for record in records.read_all(results, "unrolled"):
        scanned = steps.get((record["network"], record["scale"]))
        if scanned:
            both = (r["rows"]["plain"]["equations"] for r in (scanned, record))
            network: str = record["network"]
            name = NAMES.get(network, network).removesuffix(", scanned")
            parts.append("**{}**: {:,} equations scanned, {:,} unrolled".format(name, *both))
            parts.append(unrolled.markdown(scanned, record))
    return parts


def jax_tests(results: Path) -> list[records.Record]:
    """What became of JAX's own tests, if a folder of results has it."""
    path = results / jax_remat_tests.RESULTS.name
    return [records.read(path)] if path.exists() else []


def title(record: records.Record) -> str:
    """One line that says which program a table is about."""
    equations = record["rows"].get("plain", {}).get("equations", 0)
    return (
        f"**{NAMES.get(record['network'], record['network'])}**: inputs `{record['inputs']}`, "
        f"{record['parameters'] / 1e6:.1f} M parameters, {equations:,} equations"
    )


def grid(record: records.Record) -> str:
    """One network's table."""
    lines = [HEADER, ("---", *("---:",) * (len(HEADER) - 1))]
    lines += [cells(name, row) for name, row in record["rows"].items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(name: str, row: Row) -> tuple[str, ...]:
    """One row of a table, as text."""
    label = LABELS.get(name) or f"{float(name):.0%} of temporaries"
    if row.get("infeasible"):
        least = f"infeasible: least {format_nbytes(row['min_peak_nbytes'])}"
        return (label, format_nbytes(row["budget_nbytes"]), "", least, *("",) * 7)
    predicted = _show(row, "predicted_nbytes", format_nbytes)
    if row.get("first_predicted_nbytes"):
        predicted += f" ({records.prediction_error(row):+.1%})"
    return (
        label,
        _show(row, "budget_nbytes", format_nbytes) if name != "min" else "",
        predicted,
        format_nbytes(row["peak_nbytes"]),
        _show(row, "extra_flops", "{:.1%}".format),
        _show(row, "predicted_overhead", "{:.1%}".format),
        _show(row, "roofline_overhead", "{:.1%}".format),
        _show(row, "time_ratio", "{:.2f}".format)
        if name != "plain"
        else _show(row, "step_seconds", "{:.2f} s".format),
        _show(row, "solve_seconds", "{:.1f} s".format),
        _show(row, "gap", "{:.2%}".format),
        _show(row, "difference", "{:.1g}".format),
    )


def _show(row: Row, key: str, text: Any) -> str:
    return "" if row.get(key) is None else text(row[key])


def _group(record: records.Record) -> tuple[str, int]:
    return record["environment"]["platform"], ("full", "small", "tiny").index(record["scale"])


def _place(record: records.Record) -> tuple[tuple[str, int], int, str]:
    names = [*NAMES, record["network"]]
    return _group(record), names.index(record["network"]), record["network"]


def machines(all_records: Iterable[records.Record]) -> str:
    """Where and when, once for each machine."""
    dates: dict[str, set[str]] = {}
    for record in all_records:
        at = record["environment"]
        where = ", ".join(
            [
                at["device"],
                *([f"{at['cores']} cores", f"Python {at['python']}"] if "cores" in at else []),
                f"jax {at['jax']}",
            ]
        )
        dates.setdefault(where, set()).update(row["date"] for row in record["rows"].values())
    spans = {where: sorted(days) for where, days in dates.items()}
    return "; ".join(
        f"{where}, {' to '.join(dict.fromkeys((d[0], d[-1])))}" for where, d in spans.items() if d
    )


def dominated(record: records.Record) -> list[str]:
    """Plans that need no less memory and work than a step by hand, and more of one.

    Work is FLOPs on the CPU, and the roofline's seconds on GPUs, where FLOPs are not the price.
    """
    rows = record["rows"]
    work = "flops" if _on_cpu(record) else "roofline_seconds"
    return [
        f"{record['network']} {name}"
        for name, row in rows.items()
        for hand in BY_HAND
        if is_plan(name) and not row.get("infeasible") and hand in rows and _beats(rows[hand], row, work)
    ]


def _on_cpu(record: records.Record) -> bool:
    return record["environment"]["platform"] == "cpu"


def _beats(one: Row, other: Row, work: str) -> bool:
    pairs = [(one[key], other[key]) for key in ("peak_nbytes", work)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def findings(steps: Sequence[records.Record]) -> list[str]:
    """What all rows together say."""
    plans = {
        f"{record['network']} {name}": row
        for record in steps
        for name, row in record["rows"].items()
        if is_plan(name)
    }
    found = {name: row for name, row in plans.items() if not row.get("infeasible")}
    over = [name for name, row in found.items() if not row["fits"]]
    beaten = [name for record in steps for name in dominated(record)]
    above = [record["network"] for record in steps if _least_above_block(record["rows"])]
    lines = [
        f"{len(found)} plans of {len(plans)} budgets"
        + (f", infeasible: {_list(plans.keys() - found.keys())}" if len(found) < len(plans) else ""),
        f"over budget: {_list(over)}",
        f"dominated in peak and {'FLOPs' if _on_cpu(steps[0]) else 'roofline'} by a step by hand: {_list(beaten)}",
        f"least peak above that of per-block rematerialisation: {_list(above)}",
    ]
    lines += _spread(
        "first prediction of the peak off by", found, "{:.1%}", lambda row: abs(records.prediction_error(row))
    )
    lines += _spread("solving took", found, "{:.1f} s", lambda row: row["solve_seconds"])
    lines += _spread(
        "planning without compiling took", found, "{:.1f} s", lambda row: row["planning_seconds"]
    )
    lines += _spread("largest relative difference of results", found, "{:.1e}", lambda row: row["difference"])
    return lines


def _least_above_block(rows: Mapping[str, Row]) -> bool:
    return {"min", "block"} <= rows.keys() and rows["min"]["peak_nbytes"] > rows["block"]["peak_nbytes"]


def _spread(
    what: str, rows: Mapping[str, Row], text: str, measure: Callable[[Row], float | None]
) -> list[str]:
    """Median and largest of a measure of the rows that have it, as a line of text, or no line."""
    values: dict[str, float] = {}
    for name, row in rows.items():
        with contextlib.suppress(KeyError, TypeError):  # not measured, or null: a plan that needed no round
            if (value := measure(row)) is not None:
                values[name] = value
    if not values:
        return []
    worst = max(values, key=lambda name: values[name])
    median = text.format(statistics.median(values.values()))
    return [f"{what} {median} in the median, {text.format(values[worst])} at most ({worst})"]


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"


def chain_line(record: records.Record) -> str:
    """One sentence about a long chain."""
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record["seconds"].items())
    size = {key: format_nbytes(value) for key, value in record.items() if key.endswith("_nbytes")}
    verdict = "within" if record["fits"] else "which does not fit"
    return (
        f"A chain of {record['equations']:,} equations is planned in {sum(record['seconds'].values()):.0f} s "
        f"({phases}), in a process of {size['peak_process_nbytes']} at most, to a predicted peak of "
        f"{size['predicted_nbytes']}, {verdict} {size['budget_nbytes']}, rather than {size['plain_nbytes']}, "
        f"at a predicted overhead of {record['overhead']:.1%}."
    )


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
        "--check", action="store_true", help="do not write; exit with 1 if one is not up to date"
    )
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the JSON files")
    parser.add_argument("--readme", type=Path, default=README, help="for the table that sums up")
    parser.add_argument("--page", type=Path, default=PAGE, help="for all tables")
    given = parser.parse_args(argv)
    steps = sorted(records.read_all(given.results, "step"), key=_place)
    monet, device = (list(records.read_all(given.results, kind)) for kind in ("monet", "device"))
    stale = False
    for path, tables in (
        (given.readme, overview(steps, monet, FEW, device)),
        (given.page, everything(steps, given.results)),
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
    print(summary(steps) if steps else f"there are no results in {given.results}")
    return 0


def summary(steps: Sequence[records.Record]) -> str:
    """What `findings` says of each platform and scale, for a terminal."""
    lines: list[str] = []
    for _, group in itertools.groupby(steps, key=_group):
        members = list(group)
        lines.append(f"{members[0]['environment']['platform']}, {members[0]['scale']}:")
        lines += [f"  {line}" for line in findings(members)]
    libraries = {row["library"] for record in steps for row in record["rows"].values()}
    if libraries != {records.library_version()}:
        lines.append(
            f"measured with {_list(libraries)} of the library, which now is {records.library_version()}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
