"""Plan a step of very many equations without compiling it: seconds of each phase, memory of the process.

    python -m examples.benchmarks.chain 100000 --save

The program is a multilayer perceptron of as many small layers as it takes, its backward pass and a gradient step,
budgeted at half of what its temporaries are expected to need.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from examples.benchmarks import records
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, key
from jaxremat import Milp, SaveAll, compiler_options, format_nbytes, simulate
from jaxremat._compiler._devices import detect
from jaxremat._compiler._program import Program
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import estimate_base, lower
from jaxremat._model._schedule import check
from jaxremat._rewrite._trace import trace

BATCH, WIDTH = 1024, 64
SECONDS = 10.0
"""The time limit of the solve."""


def chain(layers: int) -> tuple[Program, tuple[Any, ...]]:
    """A train step of that many layers as the planner is given it, and its arguments as shapes and types."""

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss_of(weights: list[jax.Array]) -> jax.Array:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return jnp.mean(y * y)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)], loss

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    options = tuple(sorted(compiler_options(jax.default_backend()).items()))
    program = Program(step, donate_argnums=(0,), compiler_options=options)
    return program, ([weight] * layers, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def layers_for(equations: int) -> int:
    """The least number of layers with that many equations."""
    counts = []
    for layers in (2, 3):
        program, args = chain(layers)
        counts.append(len(trace(program.plain, args, {}).jaxpr.jaxpr.eqns))
    each = counts[1] - counts[0]
    return max(2, 2 + -(-(equations - counts[0]) // each))


def measure(equations: int, share: float) -> Record:
    """Plan a chain of at least that many equations for a share of its predicted temporaries, phase by phase."""
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began
        print(f"  {name}: {seconds[name]:.2f} s", flush=True)

    program, args = chain(layers_for(equations))
    with phase("jax"):  # its own tracing and differentiation, which `trace` finds done
        program.plain.trace(*args)
    with phase("trace"):
        traced = trace(program.plain, args, {})
    with phase("lower"):
        graph = lower(traced, detect(jax.devices()[0]), base_nbytes=estimate_base(traced).base_nbytes)
    with phase("simulate"):
        plain = simulate(graph, SaveAll().solve(graph, None, time_limit=SECONDS).schedule)
        budget = int(graph.base_nbytes + share * (plain.peak_nbytes - graph.base_nbytes))
    with phase("solve"):
        solution = Milp().solve(graph, budget, time_limit=SECONDS)
    with phase("emit"):
        emit(traced, graph, check(graph, solution.schedule))
    profile = simulate(graph, solution.schedule)
    overhead = profile.extra_seconds / graph.step_seconds
    return {
        "equations": len(graph.nodes),
        "residuals": len(graph.residuals),
        "stages": len(graph.stages),
        "budget_nbytes": budget,
        "plain_nbytes": plain.peak_nbytes,
        "predicted_nbytes": profile.peak_nbytes,
        "fits": profile.peak_nbytes <= budget,
        "overhead": overhead,
        "gap": max(overhead - solution.lower_bound, 0.0),
        "seconds": seconds,
        "peak_process_nbytes": records.peak_process_nbytes(),
    }


def rows(asked: Asked, equations: str) -> Rows:
    """A plan for each share."""
    return {key(equations, share): partial(measure, int(equations), share) for share in asked.shares}


def markdown(found: Sequence[Record]) -> str:
    """A sentence about each chain."""
    return "\n\n".join(_sentence(row) for record in found for row in record["rows"].values())


def _sentence(row: Record) -> str:
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in row["seconds"].items())
    size = {name: format_nbytes(value) for name, value in row.items() if name.endswith("_nbytes")}
    verdict = "within" if row["fits"] else "which does not fit"
    return (
        f"Planning a chain of {row['equations']:,} equations takes {sum(row['seconds'].values()):.0f} s ({phases}) and "
        f"{size['peak_process_nbytes']} of memory. The predicted peak is {size['predicted_nbytes']}, {verdict} "
        f"{size['budget_nbytes']}, instead of {size['plain_nbytes']}, at a predicted overhead of {row['overhead']:.1%}."
    )


BENCHMARK = Benchmark(
    "chain", __doc__, ("2000", "10000", "100000"), rows, markdown, ("2000",), (0.5,), shared=True
)

if __name__ == "__main__":
    BENCHMARK.main()
