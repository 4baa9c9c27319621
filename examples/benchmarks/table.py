"""Write the results of the benchmarks as tables: all of them beside this file, one that sums them up into the README.

python -m examples.benchmarks.table            # rewrite both READMEs between their markers, print a summary
python -m examples.benchmarks.table --check    # only look: exit status 1 if one of them is not up to date
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples import llama_70b
from examples.benchmarks import (
    ablation,
    chain,
    depth,
    host_memory,
    jax_remat_tests,
    joint,
    monet_table,
    records,
    residuals,
    reversible,
    runner,
    sharded,
    step_table,
)
from examples.benchmarks.overview import FEW, overview

README = records.HERE.parents[1] / "README.md"
PAGE = records.HERE / "README.md"
BEGIN = "<!-- benchmark table: begin -->"
END = "<!-- benchmark table: end -->"

SUMMED = """\
### All networks in one table

Compiled peaks of whole train steps, and the extra time by a roofline of the compiled programs.\
"""


def everything(results: Path) -> str:
    """All tables of a folder of results."""

    def of(kind: str) -> list[records.Record]:
        return list(records.read_all(results, kind))

    def told(benchmark: runner.Benchmark) -> str:
        return benchmark.markdown(of(benchmark.name))

    steps, monet, device = of("step"), of("monet"), of("device")
    summed = overview(steps, monet, device=device)
    parts = [
        f"{SUMMED}\n\n{summed}" if summed else "",
        monet_table.monet_markdown(monet),
        monet_table.device_markdown(device),
        step_table.markdown(steps),
        told(chain.BENCHMARK),
        *map(depth.markdown, of("depth")),
        told(sharded.BENCHMARK),
        *map(llama_70b.markdown, of("llama")),
        *(told(each.BENCHMARK) for each in (host_memory, residuals, reversible)),
        *map(jax_remat_tests.markdown, of("jax_remat_tests")),
        *(told(each.BENCHMARK) for each in (joint, ablation)),
    ]
    return "\n\n".join(part for part in parts if part)


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
    steps, monet, device = (
        list(records.read_all(given.results, kind)) for kind in ("step", "monet", "device")
    )
    stale = False
    for path, tables in (
        (given.readme, overview(steps, monet, FEW, device)),
        (given.page, everything(given.results)),
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
    print(step_table.summary(steps) if steps else f"there are no results in {given.results}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
