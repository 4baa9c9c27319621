"""CBC against HiGHS on the integer programs of real steps: seconds until each ends, and how good its schedule is.

    python -m examples.benchmarks.solvers gpt resnet50 --save

Programs are lowered by rules alone, nothing is compiled. Each is solved for shares of its predicted temporaries, by the
default planner with one solver as its only engine, the two in turn, in the time that a search gives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax

from examples.benchmarks.networks import NAMES, program
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid
from jaxremat import Graph, Milp, SaveAll, compiler_options, simulate
from jaxremat._compiler._devices import detect
from jaxremat._compiler._program import Program
from jaxremat._lower._lower import estimate_base, lower
from jaxremat._rewrite._trace import Traced, trace
from jaxremat._solver import _integer_program

ENGINES = ("CBC", "HIGHS")
SECONDS = 10.0


def jitted(step: Callable[..., Any], donate_argnums: tuple[int, ...]) -> Program:
    """A step as the planner is given it."""
    options = tuple(sorted(compiler_options(jax.default_backend()).items()))
    return Program(step, donate_argnums=donate_argnums, compiler_options=options)


def lowered(traced: Traced) -> Graph:
    """A traced step as the planner's graph, by rules alone."""
    return lower(traced, detect(jax.devices()[0]), base_nbytes=estimate_base(traced))


def budget_of(graph: Graph, share: float) -> int:
    """A share of the temporaries that the model predicts of the plain step."""
    plain = simulate(graph, SaveAll().solve(graph, None, time_limit=SECONDS).schedule)
    return int(graph.base_nbytes + share * (plain.peak_nbytes - graph.base_nbytes))


@cache
def graph_of(network: str, scale: Any) -> Graph:
    """A network's step as the planner's graph."""
    own = program(network, scale=scale)
    return lowered(trace(jitted(own.step, own.donate_argnums).plain, own.abstract_args(), {}))


@contextmanager
def only(engine: str) -> Iterator[None]:
    """Let the planner's integer programs be solved by one engine."""
    attempts = _integer_program.ATTEMPTS
    _integer_program.ATTEMPTS = ((engine, True),)
    try:
        yield
    finally:
        _integer_program.ATTEMPTS = attempts


def solved(network: str, scale: str, share: float, engine: str) -> Record:
    """What one engine finds."""
    graph = graph_of(network, scale)
    budget_nbytes = budget_of(graph, share)
    with only(engine):
        began = time.perf_counter()
        found = Milp().solve(graph, budget_nbytes, time_limit=SECONDS)
        took = time.perf_counter() - began
    profile = simulate(graph, found.schedule)
    return {
        "seconds": took,
        "overhead": profile.extra_seconds / graph.step_seconds,
        "bound": found.lower_bound,
        "proven": found.proven,
        "fits": profile.peak_nbytes <= budget_nbytes,
    }


def rows(asked: Asked, network: str) -> Rows:
    """Each share by each engine."""
    return {
        f"{share:g} {engine}": partial(solved, network, asked.scale, share, engine)
        for share in asked.shares
        for engine in ENGINES
    }


def about(asked: Asked, network: str) -> Record:
    """The size of the integer programs."""
    graph = graph_of(network, asked.scale)
    return {"residuals": len(graph.residuals), "stages": len(graph.stages)}


def markdown(found: Sequence[Record]) -> str:
    """All networks in one table, with its title."""
    lines = []
    for record in found:
        for share in dict.fromkeys(name.split()[0] for name in record["rows"]):
            title = f"{record['network']}, {record['scale']}", f"{record['residuals']:,}"
            cells = [*title, f"{float(share):.0%}"]
            for row in (record["rows"][f"{share} {engine}"] for engine in ENGINES):
                overhead = f"{row['overhead']:.2%}" if row["fits"] else "none"
                cells += [f"{row['seconds']:.1f}", overhead, f"{row['bound']:.2%}"]
            lines.append(cells)
    header = ("step", "values", "share", *(cell for e in ENGINES for cell in (f"{e}, s", e, "bound")))
    return f"{TITLE}\n\n{grid(header, lines)}" if found else ""


TITLE = """\
### CBC and HiGHS

Integer programs of steps lowered for the CPU, for shares of the predicted temporaries: seconds until the
solver ends (10 are allowed), overhead of the schedule and the bound on it, as shares of the step's time.\
"""

BENCHMARK = Benchmark("solvers", __doc__, NAMES, rows, markdown, shares=(0.5, 0.33), about=about)

if __name__ == "__main__":
    BENCHMARK.main()
