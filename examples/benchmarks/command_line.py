"""Words of a command line -> what to measure: the options that the benchmarks of train steps share."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Sequence
from pathlib import Path


def parser(description: str, known: Collection[str]) -> argparse.ArgumentParser:
    """A parser that takes any of these names, or "all", and ``--results``."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("names", nargs="*", metavar="name", help=f"{', '.join(known)}, or all")
    made.add_argument(
        "--results", type=Path, help="folder of the JSON files (default: results, for tiny sizes out)"
    )
    return made


def add_planning(parser: argparse.ArgumentParser) -> None:
    """Options of scripts that plan row by row."""
    parser.add_argument("--fresh", action="store_true", help="measure rows anew that are there")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each solve (default: 10)")
    parser.add_argument("--verbose", action="store_true", help="log each planning round")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, known: Collection[str], quick: str
) -> argparse.Namespace:
    """What was typed, with `names` spelled out; without any it is a `quick` look at the one of that name."""
    given = parser.parse_args(argv)
    if unknown := set(given.names) - {*known, "all"}:
        parser.error(f"nothing is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    given.quick = not given.names
    given.names = list(known) if "all" in given.names else given.names or [quick]
    if getattr(given, "verbose", False):
        logging.basicConfig(format="    %(message)s")
        logging.getLogger("jaxremat").setLevel(logging.INFO)
    return given
