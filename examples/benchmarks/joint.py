"""What it is worth to choose forms of the step and what is recomputed together: four plans within each budget.

    python -m examples.benchmarks.joint "gpt of 4 layers" resnet50 --target h100 --save

*Recomputing alone* leaves the step as written (`allow=()`, loops as they are). *Forms alone* recompute nothing: rows in
chunks, microbatches, loops with nested checkpointing, and everything else saved. *One after the other* takes the form
that those choose (of least memory, if none of them fits) and recomputes within it. *Together* is what jaxremat does.
Overheads are by a roofline of the compiled programs, relative to the plain step; budgets are shares of its temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from examples.benchmarks import records
from examples.benchmarks.networks import NAMES, VARIANTS, Program, program
from examples.benchmarks.plans import PLANNING, measure
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid, key, percent
from jaxremat import SaveAll
from jaxremat._model._variant import Choice, Variant
from jaxremat._plan import _ledger
from jaxremat._plan._candidates import CandidateSource
from jaxremat._runtime._mechanisms import switched_off

WAYS = ("recomputing alone", "forms alone", "one after the other", "together")
RECOMPUTING, FORMS, IN_TURN, TOGETHER = WAYS


@contextmanager
def recomputing() -> Iterator[dict[str, Any]]:
    """The options of plans that leave the step as it is written."""
    with switched_off("loops with nested checkpointing, absorbed updates"):
        yield {"allow": ()}


@contextmanager
def forms() -> Iterator[dict[str, Any]]:
    """The options of plans that recompute nothing."""
    with patch.object(_ledger, "MinCut", SaveAll):
        yield {"planning": replace(PLANNING, solver=SaveAll())}


@contextmanager
def within(variant: Variant) -> Iterator[dict[str, Any]]:
    """The options of plans of this variant of the step alone."""
    begin = CandidateSource.__post_init__

    def begin_with(source: CandidateSource) -> None:
        begin(source)
        if variant:
            source.made = source.make(variant)
        source.end()

    with patch.object(CandidateSource, "__post_init__", begin_with):
        yield {}


def planned(step: Program, share: float | str, target: str | None, way: Any) -> Record:
    """One plan in one of the ways."""
    with way as options:
        return measure(step, share, target, **options)


def in_turn(step: Program, share: float | str, target: str | None, alone: Record) -> Record:
    """The form that forms alone choose, then what is recomputed."""
    if "form" not in alone:
        alone = planned(step, "min", target, forms())
    chosen = (Choice(kind, site, tuple(setting)) for kind, site, setting in alone.get("form", ()))
    return planned(step, share, target, within(Variant.of(*chosen)))


def rows(asked: Asked, name: str) -> Rows:
    """A plan in each way for each share."""
    step = program(name, scale=asked.scale)
    found: dict[str, Any] = {}
    for share in asked.shares:
        alone = key(name, share, FORMS)

        def after(share: float | str = share, alone: str = alone) -> Record:
            return in_turn(
                step, share, asked.target, records.read(BENCHMARK.path(asked, name))["rows"][alone]
            )

        plan = partial(planned, step, share, asked.target)
        found[key(name, share, RECOMPUTING)] = lambda plan=plan: plan(recomputing())
        found[alone] = lambda plan=plan: plan(forms())
        found[key(name, share, IN_TURN)] = after
        found[key(name, share, TOGETHER)] = lambda plan=plan: plan(nullcontext({}))
    return found


def markdown(found: Sequence[Record]) -> str:
    """The tables, one for each device."""
    return "\n\n".join(map(_of_platform, found))


def _of_platform(record: Record) -> str:
    rows = record["rows"]
    lines = []
    for name, share in dict.fromkeys(tuple(each.split(" | ")[:2]) for each in rows):
        cells = [_cell(rows[at]) if (at := key(name, share, way)) in rows else "" for way in WAYS]
        lines.append((name, percent(share), *cells))
    title = f"### Forms and recomputing, chosen together, {record['environment']['platform']}"
    return "\n\n".join([title, LEGEND, grid(("step", "budget", *WAYS), lines)])


LEGEND = """\
Compiled overhead within shares of the plain step's temporaries. If no plan fits, the memory that is missing.\
"""


def _cell(row: Record) -> str:
    if "least_nbytes" in row:
        more = (row["least_nbytes"] - row["budget_nbytes"]) / row["temporaries_nbytes"]
        return f"({more:+.0%})"
    return f"{row['compiled_overhead']:+.1%}"


BENCHMARK = Benchmark("joint", __doc__, (*NAMES, *VARIANTS), rows, markdown, shares=(0.5, 0.33), shared=True)

if __name__ == "__main__":
    BENCHMARK.main()
