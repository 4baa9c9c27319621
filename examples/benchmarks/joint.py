"""What it is worth to choose forms of the step and what is recomputed together: four plans within each budget.

    python -m examples.benchmarks.joint gpt resnet50 --target h100 --save

*Recomputing alone* leaves the step as it is written (`allow=()`, loops as they are). *Forms alone* recompute nothing:
rows and microbatches in chunks, loops in levels and parts, with all saved that is left. *One after the other* takes the
form that those choose (of least memory, where none of them fits) and recomputes within it. *Together* is what jaxremat
does. Overheads are by a roofline of the compiled programs, against the step as it is written; budgets are shares of its
temporaries. The file is written after every row: a run that was cut short goes on there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jaxremat
from examples.benchmarks import ablation, records
from examples.benchmarks.ablation import CPU, PROGRAMS, SHARES, Mechanism, always, measure
from examples.benchmarks.networks import Program, Scale, program
from jaxremat import InfeasibleBudgetError, SaveAll
from jaxremat._model._variant import PLAIN, Choice, Variant
from jaxremat._plan._candidates import CandidateSource

FOLDER = "joint"

_UNDIVIDED = {"_plan._candidates.CandidateSource.split_loop": always([])}
RECOMPUTING = Mechanism(
    "recomputing alone", {**_UNDIVIDED, "_model._loop_levels.Loops.rungs": always([])}, {"allow": ()}
)
FORMS = Mechanism("forms alone", {"_plan._ledger.MinCut": SaveAll}, {"solver": SaveAll()})
IN_TURN, TOGETHER = "one after the other", "together"
WAYS = (RECOMPUTING.name, FORMS.name, IN_TURN, TOGETHER)

_begin = CandidateSource.__post_init__


def within(form: Variant) -> Mechanism:
    """Planning in this form of the step alone."""

    def begin(source: CandidateSource) -> None:
        _begin(source)
        if form:
            source.made = source.make(form)
        source.left = {False: [], True: []}

    return Mechanism(IN_TURN, {**_UNDIVIDED, "_plan._candidates.CandidateSource.__post_init__": begin})


def in_turn(step: Program, share: float, target: str | None, forms: records.Record) -> records.Record:
    """The form that forms alone choose, then what is recomputed."""
    if "form" in forms:
        form = Variant.of(*(Choice(kind, site, tuple(setting)) for kind, site, setting in forms["form"]))
    else:
        options: dict[str, Any] = {"donate_argnums": step.donate_argnums, "target": target, "cache": False}
        try:
            fresh, args = ablation.forgotten(step), step.abstract_args()
            with FORMS.off():
                form = jaxremat.plan(fresh, *args, budget="min", **options, **FORMS.options).form
        except InfeasibleBudgetError:
            form = PLAIN
    return measure(step, share, within(form), target)


def run(
    names: Sequence[str], shares: Sequence[float], target: str | None, save: bool, scale: Scale = "full"
) -> records.Record:
    """Measure the rows that the file lacks."""
    path = (records.RESULTS if save else records.OUT) / FOLDER / f"{target or CPU}-{scale}.json"
    record: records.Record = {}
    for name in names:
        sizes: dict[str, Any] = {"name": name} | PROGRAMS[name]
        step = program(**sizes, scale=scale)
        for share in shares:
            begin = f"{name} | {share:g} | "

            def after(begin: str = begin, step: Program = step, share: float = share) -> Any:
                return in_turn(step, share, target, records.read(path)["rows"][begin + FORMS.name])

            ways: dict[str, Callable[[], Any]] = {
                begin + way.name: partial(measure, step, share, way, target) for way in (RECOMPUTING, FORMS)
            }
            ways |= {begin + IN_TURN: after, begin + TOGETHER: partial(measure, step, share, None, target)}
            about = {"kind": "joint", "environment": records.environment(target)}
            record = records.completed(path, about, ways)
    return record


def markdown(record: records.Record) -> str:
    """The table."""
    lines = [
        f"### Forms and recomputing, chosen together, {record['environment']['platform']}",
        "Compiled overhead within shares of the plain step's temporaries; where no plan fits, how much more is needed.",
        f"| step | budget | {' | '.join(WAYS)} |\n|---|---:|{'---:|' * len(WAYS)}",
    ]
    rows = record["rows"]
    for name, share in dict.fromkeys(tuple(key.split(" | ")[:2]) for key in rows):
        cells = [_cell(rows[key]) if (key := f"{name} | {share} | {way}") in rows else "" for way in WAYS]
        lines[-1] += f"\n| {name} | {float(share):.0%} | {' | '.join(cells)} |"
    return "\n\n".join(lines)


def _cell(row: records.Record) -> str:
    if "least_nbytes" in row:
        more = (row["least_nbytes"] - row["budget_nbytes"]) / row["temporaries_nbytes"]
        return f"({more:+.0%})"
    return f"{row['compiled_overhead']:+.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without programs a tiny GPT, into ``out/``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("programs", nargs="*", help=", ".join(PROGRAMS))
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--target", help="compile for this device instead of the one at hand")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    if unknown := {*given.programs} - {*PROGRAMS}:
        parser.error(f"no program is called {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    if not given.programs:
        return print(markdown(run(["gpt"], (0.75,), given.target, save=False, scale="tiny")))
    print(markdown(run(given.programs, given.shares, given.target, given.save)))


if __name__ == "__main__":
    main()
