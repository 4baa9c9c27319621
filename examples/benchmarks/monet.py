"""The networks of MONeT at its sizes, and GPT-2: plans against rematerialisation by hand, a knapsack and MONeT itself.

    python -m examples.benchmarks.monet resnet50 --target p100 --save

MONeT (Shah et al., "Memory Optimization for Deep Networks", ICLR 2021) reports the compute overhead of PyTorch 1.5 on a
P100 with 16 GB at budgets of 10 to 5 GB. Here each network's budgets are the same *shares* of its plain peak, then
a quarter, a fifth, the least, and the peak of rematerialisation by hand. Steps are compiled for a target, and planned
with its rates; every compiled program is then priced by roofline at the rates of the H100 and of MONeT's P100.
Nothing is timed.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp

import jaxremat
from examples.benchmarks import records, runner, steps
from examples.benchmarks.bench import BY_HAND, Bench
from examples.benchmarks.knapsack import Knapsack
from examples.benchmarks.monet_table import AT_BLOCK, KNAPSACK

RATES = ("p100", "h100")
"""The devices at whose rates the compiled programs are priced."""

AT_BLOCK_HOST = "at block and host"
"""That row with values in host memory, where the plan is cheaper for it."""

BEYOND = ("1/4", "1/5", AT_BLOCK, "min")


@dataclass(frozen=True)
class Subject:
    """A network at one size.

    **Fields:** `network` its name in `networks`; `sizes` what the published size has other than the default, at scale
    "full" alone; `variant` what this subject has other than the default at any scale; `published` MONeT's overheads, as
    shares of the step, by the name of the row with that share of the plain peak.
    """

    network: str
    sizes: dict[str, Any] = field(default_factory=dict)
    variant: dict[str, Any] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)


_GPTS = {
    "gpt-small": {"batch": 8, "length": 1024},
    "gpt-medium": {"batch": 8, "length": 1024, "layers": 24, "width": 1024, "heads": 16},
}
_KINDS: dict[str, dict[str, Any]] = {"unrolled": {}, "scanned": {"scanned": True}}
_TYPES: dict[str, dict[str, Any]] = {"bf16": {"dtype": jnp.bfloat16}, "f32": {}}
_PUBLISHED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

SUBJECTS: dict[str, Subject] = {
    **{
        name: Subject(
            name,
            {"batch": said["batch"]},
            published={f"{gb}/{said['plain']}": percent / 100 for gb, percent in said["overheads"].items()},
        )
        for name, said in _PUBLISHED.items()
    },
    **{
        f"{size}-{kind}-{dtype}": Subject("gpt", _GPTS[size], {**variant, **computed})
        for size in _GPTS
        for dtype, computed in _TYPES.items()
        for kind, variant in _KINDS.items()
    },
}
QUICK = "gpt-small-unrolled-f32"
"""The subject of a quick look."""

PLAIN_SHARES = ("2/3", "1/2", "1/3")
"""The shares of the plain peak for networks that MONeT does not have."""


def rows_of(subject: Subject) -> list[str]:
    """The names of a subject's own rows; those by hand first, because a plan's budget is the peak of one."""
    shares = list(subject.published or PLAIN_SHARES)
    plans = [*shares, *BEYOND]
    return ["plain", *BY_HAND, *plans, *(KNAPSACK + name for name in (*shares[::2], "1/4"))]


@dataclass
class Monet(Bench):
    """The measurements of one subject for one target.

    **Arguments:** those of `Bench`, and the name of the `subject`.
    """

    kind: ClassVar[str] = "monet"
    subject: str = ""

    def _describe(self) -> records.Record:
        published = SUBJECTS[self.subject].published
        return {**super()._describe(), "subject": self.subject, "published": published}

    def budget(self, name: str) -> int | str:
        """The bytes that a row's name says: a share of the plain peak, or what per-block rematerialisation needs."""
        name = name.removeprefix(KNAPSACK)
        if name == "min":
            return name
        if name in (AT_BLOCK, AT_BLOCK_HOST):
            return self.record["rows"]["block"]["peak_nbytes"]
        return int(self.plain["peak_nbytes"] * share(name))

    def options(self, name: str) -> dict[str, Any]:
        """The knapsack where the row is about it, or copies of values in host memory."""
        solver = {"planning": replace(self.planning, solver=Knapsack())} if name.startswith(KNAPSACK) else {}
        return solver | ({"offload": True} if name == AT_BLOCK_HOST else {})

    def refused(self, name: str, plan: jaxremat.Plan) -> bool:
        """Plans of the planner's last resort are not the knapsack's."""
        return name.startswith(KNAPSACK) and plan.solver not in ("knapsack", "none")

    def place(self, name: str) -> tuple[float, ...]:
        """By hand first, then plans by the share of the plain peak, then those by other budgets, the knapsack last."""
        first = ("plain", *BY_HAND)
        if name in first:
            return (0.0, float(first.index(name)))
        plan = name.removeprefix(KNAPSACK)
        late = 3.0 * name.startswith(KNAPSACK)
        last = (AT_BLOCK, AT_BLOCK_HOST, "min")
        return (2.0 + late, float(last.index(plan))) if plan in last else (1.0 + late, -share(plan))


def share(name: str) -> float:
    """The number that a row's name like `10/15.06` stands for. **Raises:** ValueError for other names."""
    part, whole = (float(text) for text in name.split("/"))
    if not 0 < part <= whole:
        raise ValueError(name)
    return part / whole


def a_row(text: str) -> str:
    """A row's name, as it is written on the command line."""
    if text not in ("plain", *BY_HAND, AT_BLOCK, AT_BLOCK_HOST, "min"):
        try:
            share(text.removeprefix(KNAPSACK))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no row: write a share of the plain peak like 1/2, {AT_BLOCK!r}, 'min', 'plain', "
                f"{BY_HAND[0]!r} or {BY_HAND[1]!r}"
            ) from None
    return text


def bench(subject: str, target: str, *, scale: str, folder: Path, **options: Any) -> Monet:
    """The measurements of a subject, kept below a folder."""
    what = SUBJECTS[subject]
    name = f"{subject}-{target}" if scale == "full" else f"{subject}-{target}-{scale}"
    return Monet(
        what.network,
        scale,
        folder / "monet" / f"{name}.json",
        sizes={**(what.sizes if scale == "full" else {}), **what.variant},
        plans=records.OUT / "plans" / "monet" / name,
        target=target,
        rates=RATES,
        subject=subject,
        **options,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without subjects the smallest GPT, tiny, anew, at one share, into ``out/``."""
    parser = runner.parser_of(__doc__, SUBJECTS)
    parser.add_argument("--rows", nargs="+", type=a_row, metavar="ROW", help="instead of the subject's own")
    parser.add_argument("--only", choices=("plans", "knapsack"), help="of the subject's own rows")
    steps.add_planning(parser)
    asked = runner.parse(parser, argv, SUBJECTS, quick=(QUICK,))
    target = asked.target or "p100"
    for subject in asked.names:
        plans = asked.rows or (["1/2"] if asked.quick else rows_of(SUBJECTS[subject]))
        if asked.only:
            plans = [row for row in plans if row.startswith(KNAPSACK) == (asked.only == "knapsack")]
        rows = list(dict.fromkeys(["plain", *BY_HAND, *plans]))
        print(f"{subject} for {target}:", flush=True)
        of = bench(subject, target, scale=asked.scale, folder=asked.folder, time_limit=asked.time_limit)
        of.run(rows, fresh=asked.fresh or asked.quick)
        print(f"  in {of.path}")


if __name__ == "__main__":
    main()
