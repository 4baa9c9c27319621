"""What each mechanism of the planner is worth: plans of the same budgets with one of them switched off at a time.

    python -m examples.benchmarks.ablation "gpt of 4 layers" resnet50 --target h100 --save
    python -m examples.benchmarks.ablation gpt_scanned --only "memory order" "loops with nested checkpointing"

Mechanisms are switched off by name (`jaxremat._runtime._mechanisms`), by leaving out a pass of the step's rewriting
(`jaxremat._rewrite._passes`), or by an option of `jaxremat.plan`. Budgets are shares of the plain step's temporaries,
or "min". Worth is how much longer, by a roofline of the compiled programs, the step takes without the mechanism (or
that no plan is found; at "min" how much more memory it needs), and how much further the first prediction is off.

A mechanism is switched off only where it acted: where it changed something while the plan with all of them was made, or
is in that plan, if it is a form of the step. Elsewhere its row says that it did not act. It is an error if it acts
while it is switched off. Rows are compared with others of the same version of the library alone: those of another
version are measured again.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from examples.benchmarks import records, sharded
from examples.benchmarks.networks import program
from examples.benchmarks.plans import PLANNING, measure_of
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid, key, listed, percent
from jaxremat import EXACT, to_host
from jaxremat._model._loop_levels import nested
from jaxremat._model._variant import ATTENTION, COPIES, INNER, LOOP, REVERSED
from jaxremat._rewrite._flat_program import FlatProgram
from jaxremat._rewrite._passes import Pass, watched, without
from jaxremat._runtime._mechanisms import recorded, switched_off

ON_HOST = ", state in host memory"
"""How programs are called whose optimizer's state is in host memory."""

PROGRAMS: dict[str, Mapping[str, Any]] = {
    **{
        name: {}
        for name in (
            *("gpt of 4 layers", "gpt_scanned", "resnet50", "resnet50 bf16", "unet", "googlenet"),
            *("mobilenet_v2", "vgg16", "vit_scanned", "dropout bf16", "loops in loops", "mlp mapped"),
            *("depthwise", "encoder_decoder", "distances", "highway", "sharpness"),
        )
    },
    "vit": {"allow": (*EXACT, "bf16_residuals")},
    "gpt_medium": {"offload": True},
    f"gpt_scanned{ON_HOST}": {},
    "revnet": {"allow": (*EXACT, "reversible")},
    "revtransformer": {"allow": (*EXACT, "reversible")},
}
"""Networks, and cases of `sharded`, with what their plans may do besides what all may."""

ALL_ON = "all on"
CPU, GPU = "cpu", "gpu"
Platform = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Mechanism:
    """One that can be switched off, by its name if nothing else is said.

    **Fields:** `name`; `passes` that are left out, by name; `denied` what is no longer in `allow`; `options` of `plan`;
    `in_plan` how much of it the row of a plan has, where that is not what was recorded; `on` whose compilers it is for.
    """

    name: str
    passes: tuple[str, ...] = ()
    denied: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    in_plan: Callable[[Record], int] | None = None
    on: tuple[Platform, ...] = (CPU, GPU)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Do without it in plans that are made inside."""
        by_name = not (self.passes or self.denied or self.options)
        with without(*self.passes), switched_off(*([self.name] if by_name else [])):
            yield

    def of(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a plan without it."""
        allow = tuple(kind for kind in options.get("allow", EXACT) if kind != self.denied)
        return {**options, "allow": allow, **self.options}

    def acted(self, row: Record) -> int:
        """How often it changed something while a plan with all mechanisms was made, or what that plan has of it."""
        if self.in_plan is not None:
            return self.in_plan(row)
        return sum(row["acted"].get(name, 0) for name in self.passes or [self.name])


def choices(kind: str, wanted: Callable[[Sequence[int]], bool] = bool) -> Callable[[Record], int]:
    """How many sites of a kind a plan's form does otherwise, of those whose setting is wanted."""
    return lambda row: sum(each == kind and wanted(setting) for each, _, setting in row.get("form", ()))


def said(words: str) -> Callable[[Record], int]:
    """How many lines about a plan's form have these words."""
    return lambda row: sum(words in line for line in row.get("loops", ()))


MECHANISMS = (
    Mechanism("attention without its scores", denied="attention", in_plan=choices(ATTENTION)),
    Mechanism("rows in chunks", denied="rows", in_plan=said("operations that make and read them")),
    Mechanism("microbatches", denied="microbatches", in_plan=said("microbatches")),
    Mechanism("values in fewer bits", denied="bf16_residuals", in_plan=choices(COPIES)),
    Mechanism("reversible blocks", denied="reversible", in_plan=choices(REVERSED)),
    Mechanism(
        "copies in host memory",
        options={"offload": False},
        in_plan=lambda row: row.get("offloaded_nbytes", 0),
    ),
    Mechanism("loops with nested checkpointing", in_plan=choices(LOOP, nested)),
    Mechanism("loops with nested checkpointing, absorbed updates", in_plan=choices(LOOP)),
    Mechanism("inner loops inlined", in_plan=choices(INNER)),
    Mechanism("chained cotangents in memory", passes=("cotangents",), on=(CPU,)),
    Mechanism("masks of results", passes=("masks",)),
    *map(Mechanism, ("steps within a shard_map", "fine stages", "memory order", "barriers: triggers")),
    *map(Mechanism, ("in-place results", "kernel choice", "loop scratch memory")),
    *map(Mechanism, ("separate backward passes", "barriers: masks", "masks in bits")),
    *map(Mechanism, ("barriers: operands", "barriers: fetches", "barriers: updates", "barriers: blocks")),
    *map(
        Mechanism,
        ("pooling's gradient by place", "rows as batch dimensions", "sinking into loops"),
    ),
    *(
        Mechanism(name, on=(GPU,))
        for name in (
            *("barriers: last reads", "barriers: pieces", "image layouts"),
            *("sums in place of products", "compiled scratch memory", "row copies in turn"),
        )
    ),
    *(
        Mechanism(name, on=(CPU,))
        for name in (
            *("stacks begun late", "hoisting"),
            *("rows read late", "rows written together"),
        )
    ),
)


def measured(name: str, share: float | str, mechanism: Mechanism | None, asked: Asked) -> Record:
    """One plan of a program, with what acted while it was made; without a mechanism, if one is given."""
    options: dict[str, Any] = {"planning": PLANNING, **PROGRAMS[name]}
    if name in sharded.CASES:
        target = asked.target and f"{asked.target}x{sharded.DEVICES}"
        (step, args), donated = sharded.case(name, target, 4 if asked.scale == "full" else 1), (0,)
    else:
        made, target = program(name.removesuffix(ON_HOST), scale=asked.scale), asked.target
        step, (state, batch), donated = made.step, made.abstract_args(), made.donate_argnums
        if name.endswith(ON_HOST):
            state = state | {"opt_state": to_host(state["opt_state"])}
        args = state, batch
    plan = partial(measure_of, step, args, share, target, donate_argnums=donated)
    changed: Counter[str] = Counter()

    def watch(each: Pass, before: FlatProgram, after: FlatProgram) -> None:
        same = len(before.eqns) == len(after.eqns)
        changed[each.name] += not (same and all(a is b for a, b in zip(before.eqns, after.eqns, strict=True)))

    off = nullcontext() if mechanism is None else mechanism.off()
    with off, recorded() as acted, watched(watch):
        row = plan(**(options if mechanism is None else mechanism.of(options)))
    return row | {"acted": dict(sorted((acted + changed).items()))}


def rows(asked: Asked, name: str) -> Rows:
    """For each share the plan with all mechanisms, and those without one that acted in it."""
    platform: Platform = CPU if asked.target is None else GPU
    found: dict[str, Callable[[], Record]] = {}
    for share in asked.shares:
        all_on = key(name, share, ALL_ON)
        found[all_on] = partial(measured, name, share, None, asked)

        def off(mechanism: Mechanism, share: float | str = share, all_on: str = all_on) -> Record:
            acted = mechanism.acted(records.read(BENCHMARK.path(asked, name))["rows"][all_on])
            row = measured(name, share, mechanism, asked) if acted else {}
            if row and mechanism.acted(row):
                raise RuntimeError(f"{mechanism.name!r} acted in {name} while it was switched off")
            return row | {"acted": acted}

        wanted = (m for m in MECHANISMS if m.name in asked.only and platform in m.on)
        found |= {key(name, share, mechanism.name): partial(off, mechanism) for mechanism in wanted}
    return found


def stale(row: Record) -> bool:
    """Whether a row is of another version of the library: then it has no counterpart among those of this one."""
    return row["library"] != records.library_version()


@dataclass(frozen=True)
class Worth:
    """What a step loses without a mechanism.

    **Fields:** `where` program and share; `points` of a step's time, infinite where no plan is found, or at "min" of
    the plain step's temporaries that it needs more; `unsure` how much further off, in points of the temporaries, the
    first prediction of the peak is.
    """

    where: str
    points: float
    unsure: float = 0.0


def worth(record: Record) -> dict[str, list[Worth]]:
    """By mechanism, in all programs and at all shares where it acted; nothing where it did not."""
    found: dict[str, list[Worth]] = {}
    rows = record["rows"]
    for each, row in rows.items():
        name, share, mechanism = each.split(" | ")
        on = rows.get(key(name, share, ALL_ON), {})
        if mechanism == ALL_ON or "least_nbytes" in on or on.get("library") != row["library"]:
            continue
        where = found.setdefault(mechanism, [])
        if not row["acted"]:
            continue
        place = f"{name}, {percent(share)}"
        if "least_nbytes" in row:
            where.append(Worth(place, float("inf")))
            continue
        if share == "min":
            points = 100 * (row["peak_nbytes"] - on["peak_nbytes"]) / on["temporaries_nbytes"]
        else:
            points = 100 * (row["compiled_overhead"] - on["compiled_overhead"])
        unsure = 100 * (abs(row["first_prediction"] or 0.0) - abs(on["first_prediction"] or 0.0))
        where.append(Worth(place, points, unsure))
    return found


def markdown(found: Sequence[Record]) -> str:
    """The tables, one for each device."""
    return "\n\n".join(_of_platform(record) for record in found if worth(record))


def _of_platform(record: Record) -> str:
    found = worth(record)
    acted = {name: own for name, own in found.items() if own}
    lines = []
    for name in sorted(acted, key=lambda name: -max(max(w.points, w.unsure) for w in acted[name])):
        own = acted[name]
        slower, unsure = max(own, key=lambda w: w.points), max(own, key=lambda w: w.unsure)
        fits = [w for w in own if w.points < float("inf")]
        most = "no plan" if slower not in fits else f"{slower.points:+.1f}"
        cells = [name, str(len(own)), most, slower.where, _mean([w.points for w in fits])]
        cells += [f"{unsure.unsure:+.1f}", unsure.where, _mean([w.unsure for w in fits])]
        lines.append(cells)
    programs = ", ".join(dict.fromkeys(each.split(" | ")[0] for each in record["rows"]))
    parts = [f"### What each mechanism is worth, {record['environment']['platform']}", LEGEND]
    parts += [f"Programs: {programs}.", grid(HEADER, lines)]
    idle = f"Did not act in any of these plans: {listed(found.keys() - acted.keys())}."
    return "\n\n".join([*parts, *([idle] if len(acted) < len(found) else [])])


HEADER = ("without", "plans", "most", "where", "mean", "prediction, most", "where", "mean")
LEGEND = """\
Plans at shares of the plain step's temporaries, with one mechanism switched off at a time, where it acted. The columns
are the number of such plans; the extra time without the mechanism, in points of the step's time (by roofline; at *min*
the extra memory, in points of the temporaries); and the extra error of the first prediction of the peak, in points of
the temporaries; each as maximum and mean.\
"""


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):+.1f}" if values else ""


BENCHMARK = Benchmark(
    "ablation",
    __doc__,
    tuple(PROGRAMS),
    rows,
    markdown,
    quick=("gpt of 4 layers",),
    shares=(0.5, 0.33),
    only=tuple(mechanism.name for mechanism in MECHANISMS),
    shared=True,
    stale=stale,
)

if __name__ == "__main__":
    BENCHMARK.main()
