"""Plan a step of very many equations without compiling it: seconds of each phase, memory of the process.

    python -m examples.benchmarks.chain --equations 100000 --save

The program is a multilayer perceptron of as many small layers as it takes, its backward pass and a gradient
step, budgeted at half of what its temporaries are expected to need.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.benchmarks import records
from jaxremat import Milp, SaveAll, compiler_options, format_nbytes, simulate
from jaxremat._compiler._devices import detect
from jaxremat._compiler._program import Program
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import estimate_base, lower
from jaxremat._model._schedule import check
from jaxremat._rewrite._trace import trace

BATCH, WIDTH = 1024, 64


def chain(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A train step of that many layers, and its arguments as shapes and types."""

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss_of(weights: list[jax.Array]) -> jax.Array:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return jnp.mean(y * y)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)], loss

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return step, ([weight] * layers, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def jitted(layers: int) -> tuple[Program, tuple[Any, ...]]:
    """The chain as the planner is given it."""
    step, args = chain(layers)
    options = tuple(sorted(compiler_options(jax.default_backend()).items()))
    return Program(step, donate_argnums=(0,), compiler_options=options), args


def layers_for(equations: int) -> int:
    """The least number of layers with that many equations."""
    counts = []
    for layers in (2, 3):
        program, args = jitted(layers)
        counts.append(len(trace(program.plain, args, {}).jaxpr.jaxpr.eqns))
    each = counts[1] - counts[0]
    return max(2, 2 + -(-(equations - counts[0]) // each))


def measure(equations: int, *, share: float = 0.5, time_limit: float = 10.0) -> records.Record:
    """Plan a chain of at least that many equations, phase by phase.

    **Arguments:** `share` of the predicted temporaries to plan for; `time_limit` of the solver in seconds.
    """
    layers = layers_for(equations)
    device = detect(jax.devices()[0])
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began
        print(f"  {name}: {seconds[name]:.2f} s", flush=True)

    program, args = jitted(layers)
    with phase("jax"):  # its own tracing and differentiation, which `trace` finds done
        program.plain.trace(*args)
    with phase("trace"):
        traced = trace(program.plain, args, {})
    with phase("lower"):
        graph = lower(traced, device, base_nbytes=estimate_base(traced))
    with phase("simulate"):
        plain = simulate(graph, SaveAll().solve(graph, None, time_limit=time_limit).schedule)
        budget = int(graph.base_nbytes + share * (plain.peak_nbytes - graph.base_nbytes))
    with phase("solve"):
        solution = Milp().solve(graph, budget, time_limit=time_limit)
    with phase("emit"):
        emit(traced, graph, check(graph, solution.schedule))
    profile = simulate(graph, solution.schedule)
    overhead = profile.extra_seconds / graph.step_seconds
    return {
        "kind": "chain",
        "date": records.today(),
        "library": records.library_version(),
        "environment": records.environment(),
        "layers": layers,
        "equations": len(graph.nodes),
        "residuals": len(graph.residuals),
        "stages": len(graph.stages),
        "share": share,
        "budget_nbytes": budget,
        "plain_nbytes": plain.peak_nbytes,
        "predicted_nbytes": profile.peak_nbytes,
        "fits": profile.peak_nbytes <= budget,
        "overhead": overhead,
        "gap": max(overhead - solution.lower_bound, 0.0),
        "seconds": seconds,
        "peak_process_nbytes": records.peak_process_nbytes(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without arguments a chain of 2,000 equations, into ``out/``."""
    parser = argparse.ArgumentParser(description="Plan a very long chain without compiling it.")
    parser.add_argument("--equations", type=int, default=2000)
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the predicted temporaries (default: 0.5)"
    )
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the solve (default: 10)")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    folder: Path = records.RESULTS if given.save else records.OUT
    path = folder / jax.default_backend() / f"chain-{given.equations}.json"
    print(f"chain of {given.equations:,} equations:")
    record = measure(given.equations, share=given.share, time_limit=given.time_limit)
    records.write(path, record)
    size = {key: format_nbytes(value) for key, value in record.items() if key.endswith("_nbytes")}
    verdict = "fits" if record["fits"] else "does not fit"
    print(
        f"  {record['equations']:,} equations, {record['residuals']:,} residuals, {record['stages']} stages\n"
        f"  {sum(record['seconds'].values()):.1f} s in a process of {size['peak_process_nbytes']} at most\n"
        f"  peak {size['predicted_nbytes']} of {size['plain_nbytes']}, {verdict} {size['budget_nbytes']}, "
        f"overhead {record['overhead']:.2%}, gap {record['gap']:.2%}\n  in {path}"
    )


if __name__ == "__main__":
    main()
