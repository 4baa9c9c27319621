"""Measure train steps plainly, with rematerialisation by hand and planned: peaks, work, time and results.

    python -m examples.benchmarks.steps resnet50 --shares 0.5 0.33 min --time --check --save

Each network and scale has one JSON file, written after every row, so that a run that was cut short goes on
where it stopped. Its rows: the plain step; rematerialisation by hand, of whole blocks, of all but the
products in them, or of a loop of loops (`nn.remat_scan`); and plans at shares of the plain step's *temporaries*,
on top of its arguments and outputs, at "min", or at the peak of a step by hand ("at block").
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jaxremat
from examples.benchmarks import records, runner
from examples.benchmarks.bench import AT, BY_HAND, SCAN, SHARES, Bench, by_hand
from examples.benchmarks.networks import KINDS, NAMES, REVERSIBLE, VARIANTS

NETWORKS = (*NAMES, *KINDS, *REVERSIBLE, *VARIANTS)


def _share(text: str) -> str:
    if text == "min" or text in (AT + hand for hand in (*BY_HAND, SCAN)):
        return text
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(
            f"{text} is no 'min', 'at block', 'at dots', 'at scan' or share in (0, 1]"
        )
    return repr(float(text))


def add_planning(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts that plan row by row."""
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each solve (default: 10)")
    parser.add_argument(
        "--target",
        choices=jaxremat.targets(),
        help="compile for this device, which this machine need not have",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without networks a tiny GPT anew, by hand and at one share, into ``out/``."""
    parser = runner.parser_of(__doc__, NETWORKS)
    parser.add_argument(
        "--shares",
        nargs="+",
        type=_share,
        metavar="S",
        help=f"shares of the plain step's temporaries (default: {' '.join(SHARES)}; without networks: 0.5)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=("plain", *BY_HAND, SCAN, "plans"), help="kinds of rows to measure"
    )
    parser.add_argument("--time", action="store_true", help="time the steps, alternately")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each step (default: 5)")
    parser.add_argument(
        "--check", action="store_true", help="compare all results after one step with the plain step's"
    )
    add_planning(parser)
    asked = runner.parse(parser, argv, NETWORKS, quick=("gpt",))
    if asked.target and (asked.time or asked.check):
        parser.error("--time and --check run the steps; with --target they are only compiled")
    platform = records.platform(asked.target)
    for network in asked.names:
        name = f"{network}-{asked.scale}"
        first = ["plain", *by_hand(network)]
        rows = [*first, *(asked.shares or (("0.5",) if asked.quick else SHARES))]
        if asked.only:
            rows = [row for row in rows if (row if row in first else "plans") in asked.only]
        print(f"{name}:")
        bench = Bench(
            network,
            asked.scale,
            asked.folder / platform / f"{name}.json",
            time_limit=asked.time_limit,
            plans=records.OUT / "plans" / platform / name,
            target=asked.target,
        )
        runs = asked.runs if asked.time else 0
        bench.run(rows, runs=runs, check=asked.check, fresh=asked.fresh or asked.quick)
        print(f"  in {bench.path}")


if __name__ == "__main__":
    main()
