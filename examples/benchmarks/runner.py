"""A benchmark -> its command line, its JSON files and its table: all that scripts of this folder share.

A script defines what can be measured, the rows, and their table:

    BENCHMARK = Benchmark("residuals", __doc__, NAMES, rows, markdown, shares=(0.5, 0.33))

    if __name__ == "__main__":
        BENCHMARK.main()

Existing rows are not measured again. The file is written after every row, so an interrupted run continues where it
stopped. Without names a script makes a quick, tiny run into ``out/``; `--save` writes into ``results/``.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.benchmarks import records
from examples.benchmarks.records import Record
from jaxremat import format_nbytes

Asked = argparse.Namespace
"""What was typed: `names`, `scale`, `target`, `shares`, `only`, `fresh`, `folder`, and whether it is a `quick` look."""

Rows = Mapping[str, Callable[[], Record]]
"""How to measure each row, by the name that it has in its file."""


@dataclass(frozen=True)
class Benchmark:
    """**Fields:** `name` of the records (their `kind`) and of their folder; `doc` for the command line; `names` of what
    can be measured; `rows` of one of them, as asked; `markdown` of all records, empty without any.

    `quick` are the names of a quick look; `shares` the default of `--shares`, of which it takes the first; `only` the
    kinds of rows that can be asked for; `target` the default of `--target`; `options` adds more; `shared` whether
    there is one file for all names; `stale` whether a row has to be measured again.
    """

    name: str
    doc: str | None
    names: Collection[str]
    rows: Callable[[Asked, str], Rows]
    markdown: Callable[[Sequence[Record]], str]
    quick: Sequence[str] = ("gpt",)
    shares: Sequence[Any] = ()
    only: Collection[str] = ()
    target: str | None = None
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    shared: bool = False
    about: Callable[[Asked, str], Record] = lambda asked, name: {}
    stale: Callable[[Record], bool] = lambda row: False

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Run the command line, and print the table."""
        asked = self.asked(argv)
        found = {self.path(asked, name): self.run(asked, name) for name in asked.names}
        print(self.markdown(list(found.values())))
        print(f"in {', '.join(map(str, found))}")

    def run(self, asked: Asked, name: str) -> Record:
        """Measure the rows of a name that its file lacks, and return what is in it then."""
        about = {} if self.shared else {"network": name, "scale": asked.scale}
        about = {"kind": self.name, **about, "environment": records.environment(asked.target)}
        about |= self.about(asked, name)
        path, wanted = self.path(asked, name), self.rows(asked, name)
        return completed(path, about, wanted, fresh=asked.fresh, stale=self.stale)

    def path(self, asked: Asked, name: str) -> Path:
        """Return the file of a name."""
        whose = f"{asked.scale}" if self.shared else f"{name}-{asked.scale}"
        return asked.folder / self.name / f"{whose}-{records.platform(asked.target)}.json"

    def asked(self, argv: Sequence[str] | None = None) -> Asked:
        """Return what was typed."""
        parser = parser_of(self.doc, self.names)
        parser.add_argument(
            "--target", default=self.target, help="compile for this device, which this machine need not have"
        )
        if self.shares:
            default = " ".join(map(str, self.shares))
            parser.add_argument(
                "--shares", nargs="+", help=f"shares of the plain step's temporaries (default: {default})"
            )
        if self.only:
            parser.add_argument("--only", nargs="+", metavar="X", help="rows to measure; by default all")
        self.options(parser)
        asked = parse(parser, argv, self.names, self.quick)
        asked.shares = (
            asked.shares if self.shares and asked.shares else self.shares[: 1 if asked.quick else None]
        )
        asked.shares = [share if str(share).isalpha() else float(share) for share in asked.shares]
        asked.only = asked.only if self.only and asked.only else self.only
        if unknown := set(asked.only) - set(self.only):
            parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(self.only)}")
        return asked


def parser_of(doc: str | None, names: Collection[str]) -> argparse.ArgumentParser:
    """Return a parser of what all scripts understand."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"{', '.join(names)}, or all")
    parser.add_argument(
        "--scale", choices=("full", "small", "tiny"), help="default: full; without names tiny"
    )
    parser.add_argument("--fresh", action="store_true", help="measure existing rows again")
    parser.add_argument("--verbose", action="store_true", help="log each planning round")
    parser.add_argument("--save", action="store_true", help="write into results/ instead of out/")
    parser.add_argument("--results", type=Path, help="folder of the JSON files, instead of both")
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, known: Collection[str], quick: Sequence[str]
) -> Asked:
    """Return what was typed, with `names` spelled out, `scale` and `folder` chosen; without names it is `quick`."""
    asked = parser.parse_args(argv)
    if unknown := set(asked.names) - {*known, "all"}:
        parser.error(f"nothing is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    asked.quick = not asked.names
    asked.names = list(known) if "all" in asked.names else asked.names or list(quick)
    asked.scale = asked.scale or ("tiny" if asked.quick else "full")
    asked.folder = asked.results or (records.RESULTS if asked.save else records.OUT)
    if asked.verbose:
        logging.basicConfig(format="    %(message)s")
        logging.getLogger("jaxremat").setLevel(logging.INFO)
    return asked


def completed(
    path: Path,
    about: Record,
    wanted: Rows,
    *,
    fresh: bool = False,
    stale: Callable[[Record], bool] = lambda row: False,
) -> Record:
    """Return a file's record with the rows that are wanted; those that it lacks are measured, and written one by one.

    **Arguments:** `about` what it says besides; `fresh` to measure all that is wanted anew; `stale` says of a row that
    is there whether it has to be.
    """
    rows: dict[str, Record] = dict(records.read(path).get("rows", {}))
    record = {**about, "rows": rows}
    for name, measure in wanted.items():
        if fresh or name not in rows or stale(rows[name]):
            row = {"date": records.today(), "library": records.library_version()}
            rows[name] = row | measure()
            print(path.stem, name, rows[name], flush=True)
            records.write(path, record)
    return record


def key(*parts: float | str) -> str:
    """Return the name of a row in its file, of names and shares; `" | "` separates them."""
    return " | ".join(part if isinstance(part, str) else f"{part:g}" for part in parts)


def percent(share: str) -> str:
    """Return a share as tables tell it; words such as "min" are told as they are."""
    return share if share.isalpha() else f"{float(share):.0%}"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table in Markdown, of whose columns the first `left` hold words."""
    lines = [header, (*("---",) * left, *("---:",) * (len(header) - left)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(row: Mapping[str, Any], key: str, text: Callable[[Any], str]) -> str:
    """Return a figure as text, empty where it was not measured."""
    return "" if row.get(key) is None else text(row[key])


def least(row: Record) -> str:
    """Return what is said in place of a plan where none fits, empty where one does."""
    return f"at least {format_nbytes(row['least_nbytes'])}" if "least_nbytes" in row else ""


def overhead(row: Record) -> str:
    """Return the overhead of a plan by the roofline of its compiled program, or what it would need at least."""
    return least(row) or f"{row['compiled_overhead']:+.1%}"


def listed(names: Iterable[str]) -> str:
    """Return names in one line."""
    return ", ".join(sorted(set(names))) or "none"
