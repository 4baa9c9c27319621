"""What each mechanism of the planner is worth: plans of the same budgets with one of them switched off at a time.

    python -m examples.benchmarks.ablation gpt resnet50 --target h100 --save
    python -m examples.benchmarks.ablation gpt --only "memory order" "loops in levels"

A mechanism is switched off by putting something that does nothing in its place; what that does on a compiler that
never meets it is not measured. Budgets are shares of the plain step's temporaries. Worth is how much longer, by a
roofline of the compiled programs, the step takes without the mechanism (or that no plan is found), how much further the
first prediction of the peak is off, and how much longer planning takes. The file is written after every row: a run that
was cut short goes on there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import jaxremat
from examples.benchmarks import records
from examples.benchmarks.networks import Program, Scale, program
from jaxremat import InfeasibleBudgetError
from jaxremat._emit._constraints import without as without_rules
from jaxremat._model._loop_levels import LoopOffers, nested
from jaxremat._model._stages import cuttings
from jaxremat._rewrite._passes import without

FOLDER = "ablation"
SHARES = (0.5, 0.33)
PLANNING_SECONDS = 300.0
"""So that no search is cut short by a busy machine."""

PROGRAMS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 4},
    "gpt_scanned": {},
    "resnet50": {},
    "unet": {},
    "resnet50 bf16": {"name": "resnet50", "dtype": "bfloat16"},
    "googlenet": {},
    "vit_scanned": {},
    "mobilenet_v2": {},
    "vgg16": {},
    "vit": {},
    "dropout": {"dtype": "bfloat16"},
    "depthwise": {},
    "encoder_decoder": {},
    "distances": {},
    "highway": {},
    "sharpness": {},
    "loops in loops": {"name": "gpt_scanned", "remat": "scan"},
}
"""Networks of full size, with what is other here."""

ALL_ON = "all on"

CPU, GPU = "cpu", "gpu"
Platform = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Mechanism:
    """One that can be switched off.

    **Fields:** `name`; `passes` and `rules` of barriers that are left out, by name; `instead` what is put in place of
    functions by where they are looked up; `options` of `plan`; `on` whose compilers it is for.
    """

    name: str
    instead: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    on: tuple[Platform, ...] = (CPU, GPU)
    passes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Plans that are made inside are made without it."""
        with ExitStack() as stack:
            stack.enter_context(without(*self.passes))
            stack.enter_context(without_rules(*self.rules))
            for place, other in self.instead.items():
                stack.enter_context(patch(f"jaxremat.{place}", other))
            yield


def always(result: Any) -> Callable[..., Any]:
    """A function that says this whatever it is asked."""
    return lambda *args, **kwargs: result


def given(place: int) -> Callable[..., Any]:
    """A function that returns one of its arguments as it is."""
    return lambda *args, **kwargs: args[place]


_rungs = LoopOffers.rungs
_levels_of_one = wraps(_rungs)(
    lambda loops: [rung for rung in _rungs(loops) if not any(nested(choice.setting) for choice in rung)]
)

MECHANISMS = (
    Mechanism("attention without its scores", options={"allow": ("microbatches", "rows")}),
    Mechanism("rows in chunks", options={"allow": ("attention", "microbatches")}),
    Mechanism("microbatches", options={"allow": ("attention", "rows")}),
    Mechanism("loops in levels", {"_model._loop_levels.LoopOffers.rungs": _levels_of_one}),
    Mechanism("loops in levels, absorbed updates", {"_model._loop_levels.LoopOffers.rungs": always([])}),
    Mechanism("loops in parts", {"_plan._cuttings.Cuttings.divide": always([])}),
    Mechanism("fine stages", {"_plan._cuttings.cuttings": lambda graph: cuttings(graph)[:1]}),
    Mechanism(
        "memory order",
        {"_rewrite._passes.memory_order": lambda jaxpr, alive, *_: [i for i, a in enumerate(alive) if a]},
    ),
    Mechanism(
        "updates behind a later fence", {"_model._stages.past_updates": lambda graph, cuts: list(cuts)}
    ),
    Mechanism("operands' memory taken over", {"_model._graph.in_place": always(frozenset())}),
    Mechanism("triggers of fences", rules=("triggers",)),
    Mechanism("updates behind the last read", rules=("last reads",), on=(GPU,)),
    Mechanism("images' axes in memory order", {"_lower._lower.axes_in_memory": always({})}, on=(GPU,)),
    Mechanism(
        "sums in place of products",
        {"_lower._lower.written_sums": always(set()), "_lower._lower.sums_of_scattered": always({})},
        on=(GPU,),
    ),
    Mechanism("library kernels' times", {"_lower._form_graphs.library_seconds": always({})}, on=(GPU,)),
    Mechanism("scratch memory as compiled", {"_lower._form_graphs.scratch": always({})}, on=(GPU,)),
    Mechanism("iterations' other buffers", {"_lower._form_graphs.with_beside": given(0)}, on=(GPU,)),
    Mechanism("iterations' times", {"_lower._form_graphs.with_seconds": given(0)}, on=(GPU,)),
    Mechanism(
        "kernels of its own choice",
        {
            f"{room}.replaced": always(lambda eqn: False)
            for room in (
                "_compiler._tags",
                "_lower._iteration",
                "_plan._problem",
                "_emit._emit",
                "_emit._writer",
            )
        },
    ),
    Mechanism(
        "every backward pass for itself",
        {
            f"{module}.later_passes": always(())
            for module in (
                "_model._stages",
                "_model._optimizer_updates",
                "_emit._analysis",
                "_solver._block_frontiers",
            )
        },
    ),
    Mechanism("stacks begun late", {"_emit._writer.stacked_nbytes": always(0)}, on=(CPU,)),
    Mechanism("chained cotangents in memory", passes=("cotangents",), on=(CPU,)),
    Mechanism("pairs of loops in loops laid open", {"_plan._forms.inner_pairs": always({})}),
    Mechanism("what waits in loops", {"_lower._lower.with_waiting": given(1)}),
    Mechanism("masks of results", passes=("masks",)),
    Mechanism("results of masks behind fences", rules=("masks",)),
    Mechanism("weights' copies behind fences", rules=("weights",), on=(CPU,)),
    Mechanism("what is made early", {"_emit._hoisting.Hazards.early": always(False)}, on=(CPU,)),
    Mechanism("rows read late", {"_rewrite._in_place_stacks.read_late": always(None)}, on=(CPU,)),
    Mechanism(
        "rows written together", {"_rewrite._in_place_stacks._written_together": always({})}, on=(CPU,)
    ),
    Mechanism(
        "pooling's gradient by place",
        {"_rewrite._loop_opening.by_place": list},
        passes=("pooling",),
    ),
    Mechanism("masks in bits", {"_rewrite._encodings._random_masks": always([])}),
    Mechanism(
        "what iterations make themselves",
        {
            "_lower._lower.sunk_values": always(frozenset()),
            "_emit._analysis.sunk_values": always(frozenset()),
            "_emit._emit.sink": lambda eqns, loop_of, loops: (list(eqns), list(loop_of)),
            "_lower._iteration.sink": lambda eqns, loop_of, loops: (list(eqns), list(loop_of)),
        },
    ),
    Mechanism(
        "copies of rows",
        {"_model._unnamed_buffers.rows": lambda graph: ((),) * len(graph.nodes)},
        on=(CPU,),
    ),
    Mechanism(
        "buffers that are there early",
        {"_model._unnamed_buffers.early": lambda graph: (0,) * len(graph.nodes)},
        on=(CPU,),
    ),
    Mechanism(
        "fused work in iterations", {"_lower._form_graphs.FormGraphs._beside": always(None)}, on=(CPU,)
    ),
)
"""In the order in which a step meets them: forms, stages, fences, the model."""


def forgotten(step: Program) -> Callable[..., Any]:
    """The step as a function of which nothing is remembered."""
    return lambda *args: step.step(*args)


def measure(step: Program, share: float, mechanism: Mechanism | None, target: str | None) -> records.Record:
    """One plan."""
    common: dict[str, Any] = {"donate_argnums": step.donate_argnums, "target": target}
    args = step.abstract_args()

    fresh = forgotten(step)

    needs = jaxremat.memory(step.step, *args, **common)
    budget = needs.base_nbytes + int(share * needs.temporaries_nbytes)
    row: records.Record = {"budget_nbytes": budget, "temporaries_nbytes": needs.temporaries_nbytes}
    row["library"] = records.library_version()
    options = {"planning_seconds": PLANNING_SECONDS, "cache": False, **common}
    with ExitStack() as stack:
        if mechanism is not None:
            stack.enter_context(mechanism.off())
            options |= mechanism.options
        try:
            made = jaxremat.plan(fresh, *args, budget=budget, **options)
        except InfeasibleBudgetError as error:
            return row | {"least_nbytes": error.min_peak_nbytes}
    first = made.rounds[0] if made.rounds else None
    missed = first and first.predicted_peak_nbytes - first.compiled_peak_nbytes
    return row | {
        "form": made.form.choices,
        "peak_nbytes": made.compiled_peak_nbytes,
        "overhead": made.overhead,
        "compiled_overhead": made.compiled_overhead,
        "first_prediction": missed and missed / needs.temporaries_nbytes,
        "rounds": len(made.rounds),
        "planning_seconds": made.planning.seconds,
    }


def run(
    names: Sequence[str],
    shares: Sequence[float],
    target: str | None,
    path: Path,
    only: Sequence[str] = (),
    scale: Scale = "full",
) -> records.Record:
    """Measure the rows that a file lacks."""
    known = {"kind": "ablation", "environment": records.environment(target)}
    record = {**known, "rows": records.read(path).get("rows", {})}
    platform: Platform = CPU if target is None else GPU
    wanted = [m for m in MECHANISMS if platform in m.on and (not only or m.name in only)]
    for name in names:
        sizes: dict[str, Any] = {"name": name} | PROGRAMS[name]
        step = program(**sizes, scale=scale)
        for mechanism in (None, *wanted):
            for share in shares:
                key = f"{name} | {share:g} | {mechanism.name if mechanism else ALL_ON}"
                if key not in record["rows"]:
                    record["rows"][key] = measure(step, share, mechanism, target)
                    print(key, record["rows"][key], flush=True)
                    records.write(path, record)
    return record


@dataclass(frozen=True)
class Worth:
    """What a step loses without a mechanism.

    **Fields:** `where` program and share; `points` of a step's time, infinite where no plan is found; `unsure` how much
    further off, in points of the plain step's temporaries, the first prediction of the peak is; `seconds` of planning.
    """

    where: str
    points: float
    unsure: float
    seconds: float


def worth(record: records.Record) -> dict[str, list[Worth]]:
    """By mechanism, in all programs and at all shares that were measured."""
    found: dict[str, list[Worth]] = {}
    rows = record["rows"]
    for key, row in rows.items():
        name, share, mechanism = key.split(" | ")
        on = rows.get(f"{name} | {share} | {ALL_ON}")
        if mechanism == ALL_ON or on is None or "least_nbytes" in on:
            continue
        where = f"{name}, {float(share):.0%}"
        if "least_nbytes" in row:
            found.setdefault(mechanism, []).append(Worth(where, float("inf"), 0.0, 0.0))
            continue
        points = 100 * (row["compiled_overhead"] - on["compiled_overhead"])
        unsure = 100 * (abs(row["first_prediction"] or 0.0) - abs(on["first_prediction"] or 0.0))
        seconds = row["planning_seconds"] - on["planning_seconds"]
        found.setdefault(mechanism, []).append(Worth(where, points, unsure, seconds))
    return found


def markdown(record: records.Record) -> str:
    """The table, what matters most first."""
    lines = [
        f"### What each mechanism is worth, {record['environment']['platform']}",
        "Plans at shares of the plain step's temporaries, with one mechanism switched off at a time: how many points\n"
        "of the step's time (by roofline) it takes more without it, and how many points of the temporaries the first\n"
        "prediction of the peak is further off; where that is most, and in the mean.\n"
        f"Programs: {', '.join(dict.fromkeys(key.split(' | ')[0] for key in record['rows']))}.",
        f"| without | most | where | mean | prediction, most | where | mean |\n|---|{'---:|---|---:|' * 2}",
    ]
    found = worth(record)
    for name in sorted(found, key=lambda name: -max(max(w.points, w.unsure) for w in found[name])):
        own = found[name]
        slower, unsure = max(own, key=lambda w: w.points), max(own, key=lambda w: w.unsure)
        fits = [w for w in own if w.points < float("inf")]
        most = "no plan" if slower not in fits else f"{slower.points:+.1f}"
        cells = [most, slower.where, _mean([w.points for w in fits])]
        cells += [f"{unsure.unsure:+.1f}", unsure.where, _mean([w.unsure for w in fits])]
        lines[-1] += f"\n| {' | '.join([name, *cells])} |"
    return "\n\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):+.1f}" if values else ""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without programs one mechanism of a tiny GPT, into ``out/``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("programs", nargs="*", help=f"{', '.join(PROGRAMS)}, or all")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--target", help="compile for this device instead of the one at hand")
    parser.add_argument("--only", nargs="*", default=(), help="mechanisms by name")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    if unknown := {*given.programs} - {*PROGRAMS, "all"}:
        parser.error(f"no program is called {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    if unknown := {*given.only} - {m.name for m in MECHANISMS}:
        parser.error(f"no mechanism is called {', '.join(sorted(unknown))}")
    platform = given.target or CPU
    if not given.programs:
        path = records.OUT / FOLDER / f"{platform}-tiny.json"
        only = given.only or ["triggers of fences"]
        return print(markdown(run(["gpt"], (0.75,), given.target, path, only, "tiny")))
    names = list(PROGRAMS) if "all" in given.programs else given.programs
    path = (records.RESULTS if given.save else records.OUT) / FOLDER / f"{platform}.json"
    print(markdown(run(names, given.shares, given.target, path, given.only)))


if __name__ == "__main__":
    main()
