"""CBC against HiGHS on the integer programs of real steps: seconds until each ends, and how good its schedule is.

    python -m examples.benchmarks.solvers gpt resnet50 --save

Programs are lowered by rules alone, nothing is compiled. Each is solved for shares of its predicted temporaries, by the
default planner with one solver as its only engine, the two in turn, in the time that a search gives it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import jax

from examples.benchmarks import records
from examples.benchmarks.networks import NAMES, Scale, program
from jaxremat import Milp, SaveAll, compiler_options, simulate
from jaxremat._compiler._devices import detect
from jaxremat._compiler._program import Program
from jaxremat._lower._lower import estimate_base, lower
from jaxremat._model._graph import Graph
from jaxremat._rewrite._trace import trace

FOLDER = "solvers"
ENGINES = ("CBC", "HIGHS")
SHARES = (0.5, 0.33)
SECONDS = 10.0


def graph_of(network: str, scale: Scale) -> Graph:
    """A network's step as the planner's graph."""
    own = program(network, scale=scale)
    options = tuple(sorted(compiler_options(jax.default_backend()).items()))
    planned = Program(own.step, donate_argnums=own.donate_argnums, compiler_options=options)
    traced = trace(planned.plain, own.abstract_args(), {})
    return lower(traced, detect(jax.devices()[0]), base_nbytes=estimate_base(traced))


def solved(graph: Graph, budget_nbytes: int, engine: str, seconds: float = SECONDS) -> records.Record:
    """What one engine finds."""
    with patch("jaxremat._solver._integer_program.ATTEMPTS", ((engine, True),)):
        began = time.perf_counter()
        found = Milp().solve(graph, budget_nbytes, time_limit=seconds)
        took = time.perf_counter() - began
    profile = simulate(graph, found.schedule)
    return {
        "seconds": took,
        "overhead": profile.extra_seconds / graph.step_seconds,
        "bound": found.lower_bound,
        "proven": found.proven,
        "fits": profile.peak_nbytes <= budget_nbytes,
    }


def run(
    network: str, scale: Scale, shares: Sequence[float], path: Path, *, fresh: bool = False
) -> records.Record:
    """Measure the rows that a network's file lacks."""
    graph = graph_of(network, scale)
    plain = simulate(graph, SaveAll().solve(graph, None, time_limit=SECONDS).schedule)

    def row(share: float, engine: str) -> records.Record:
        budget = int(graph.base_nbytes + share * (plain.peak_nbytes - graph.base_nbytes))
        return solved(graph, budget, engine)

    about = {
        "kind": "solvers",
        "environment": records.environment(),
        "library": records.library_version(),
        "network": network,
        "scale": scale,
        "residuals": len(graph.residuals),
        "stages": len(graph.stages),
    }
    wanted = {
        f"{share:g} {engine}": lambda share=share, engine=engine: row(share, engine)
        for share in shares
        for engine in ENGINES
    }
    return records.completed(path, about, wanted, fresh=fresh)


def markdown(found: Sequence[records.Record]) -> str:
    """All networks in one table, with its title."""
    lines = [
        "### CBC and HiGHS",
        "Integer programs of steps lowered for the CPU, for shares of the predicted temporaries: seconds until the\n"
        "solver ends (10 are allowed), overhead of the schedule and the bound on it, as shares of the step's time.",
        f"| step | values | share |{''.join(f' {e}, s | {e} | bound |' for e in ENGINES)}\n"
        f"|---|---:|---:|{'---:|' * 3 * len(ENGINES)}",
    ]
    for record in found:
        for share in dict.fromkeys(name.split()[0] for name in record["rows"]):
            cells = [
                f"{record['network']}, {record['scale']}",
                f"{record['residuals']:,}",
                f"{float(share):.0%}",
            ]
            for engine in ENGINES:
                row = record["rows"][f"{share} {engine}"]
                overhead = f"{row['overhead']:.2%}" if row["fits"] else "none"
                cells += [f"{row['seconds']:.1f}", overhead, f"{row['bound']:.2%}"]
            lines[-1] += f"\n| {' | '.join(cells)} |"
    return "\n\n".join(lines) if found else ""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without networks a tiny GPT, into ``out/``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="full")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--fresh", action="store_true", help="measure all rows anew")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    networks, scale = (given.networks, given.scale) if given.networks else (["gpt"], "tiny")
    folder = (records.RESULTS if given.save else records.OUT) / FOLDER
    paths = ((network, folder / f"{network}-{scale}.json") for network in networks)
    print(markdown([run(name, scale, given.shares, path, fresh=given.fresh) for name, path in paths]))


if __name__ == "__main__":
    main()
