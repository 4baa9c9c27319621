"""Measure train steps plainly, with rematerialisation by hand and planned: peaks, work, time and results.

    python -m examples.benchmarks.steps resnet50 --scale full --shares 0.5 0.33 min --time --check

Each network and scale has one JSON file, written after every row, so that a run that was cut short goes on
where it stopped. Its rows: the plain step; rematerialisation by hand, of whole blocks, of all but the
products in them, or of a loop of loops (`nn.remat_scan`); and plans at shares of the plain step's *temporaries*,
on top of its arguments and outputs, at "min", or at the peak of a step by hand ("at block"). Every step is compiled
with the options that `jaxremat.optimize` uses: by default XLA:CPU would merge what is recomputed by hand with the
original.

Tiny sizes go to ``out/``, which git ignores; the others to ``results/``, which `table` puts into the README.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax

import jaxremat
from examples.benchmarks import command_line, records
from examples.benchmarks.bench import AT, BY_HAND, SCAN, SHARES, Bench, by_hand
from examples.benchmarks.networks import NAMES


def _share(text: str) -> str:
    if text == "min" or text in (AT + hand for hand in (*BY_HAND, SCAN)):
        return text
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(
            f"{text} is no 'min', 'at block', 'at dots', 'at scan' or share in (0, 1]"
        )
    return repr(float(text))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without networks a tiny GPT anew, by hand and at one share, into ``out/``."""
    parser = command_line.parser("Measure train steps plain, by hand and planned.", NAMES)
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="tiny")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=_share,
        metavar="S",
        help=f"of the plain step's temporaries (default: {' '.join(SHARES)}; without networks: 0.5)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=("plain", *BY_HAND, SCAN, "plans"), help="kinds of rows to measure"
    )
    parser.add_argument("--target", choices=jaxremat.targets(), help="compile for this device, here or not")
    parser.add_argument("--time", action="store_true", help="time the steps, in turn")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each step (default: 5)")
    parser.add_argument(
        "--check", action="store_true", help="compare all results after one step with the plain step's"
    )
    command_line.add_planning(parser)
    given = command_line.parse(parser, argv, NAMES, quick="gpt")
    if given.target and (given.time or given.check):
        parser.error("--time and --check run the steps; with --target they are only compiled")
    platform = given.target or jax.default_backend()
    folder = (given.results or (records.OUT if given.scale == "tiny" else records.RESULTS)) / platform
    for network in given.names:
        name = f"{network}-{given.scale}"
        first = ["plain", *by_hand(network)]
        rows = [*first, *(given.shares or (("0.5",) if given.quick else SHARES))]
        if given.only:
            rows = [row for row in rows if (row if row in first else "plans") in given.only]
        print(f"{name}:")
        bench = Bench(
            network,
            given.scale,
            folder / f"{name}.json",
            time_limit=given.time_limit,
            plans=records.OUT / "plans" / platform / name,
            target=given.target,
        )
        bench.run(
            rows, runs=given.runs if given.time else 0, check=given.check, fresh=given.fresh or given.quick
        )
        print(f"  in {bench.path}")


if __name__ == "__main__":
    main()
