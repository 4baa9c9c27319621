"""What loops have in memory from their first iteration to their last: carries that begin alike are several arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import compile_plain
from jax import lax
from test_loops import CPU
from zoo import KEY, Case

from jaxremat import MemoryStats, simulate
from jaxremat._lower._lower import estimate_base, lower
from jaxremat._model._graph import Graph
from jaxremat._model._schedule import save_all
from jaxremat._rewrite._trace import trace

WIDTH, WEIGHTS, ROWS = 128, 8, 4
MATRIX = WIDTH * WIDTH * 4


def _accumulated(again: bool = False) -> Case:
    """Gradients of two small batches, which begin as zeros of one shape; `again` reads those zeros behind the loop."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.sin(x @ w)
        return jnp.mean(x**2)

    def step(params: list[jax.Array], batches: jax.Array) -> Any:
        zeros = jnp.zeros((WIDTH, WIDTH)) * batches[0, 0, 0]
        total, _ = lax.scan(
            lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None),
            [zeros] * WEIGHTS,
            batches,
        )
        return [p - 0.1 * g for p, g in zip(params, total, strict=True)], zeros if again else None

    def args() -> tuple[list[jax.Array], jax.Array]:
        keys = jax.random.split(KEY, WEIGHTS + 1)
        weights = [WIDTH**-0.5 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[1:]]
        return weights, jax.random.normal(keys[0], (2, ROWS, WIDTH))

    return Case("accumulated", step, args)


def graph_of(case: Case) -> Graph:
    traced = trace(jax.jit(case.step, donate_argnums=case.donate_argnums), case.make_args(), {})
    return lower(traced, CPU, base_nbytes=estimate_base(traced).base_nbytes)


@pytest.mark.parametrize("again", [False, True])
def test_carries_that_begin_with_the_same_zeros_are_there_from_the_first_iteration_on(again: bool) -> None:
    graph = graph_of(_accumulated(again))
    inside = [n for n in graph.nodes if n.loop >= 0]
    # The zeros themselves are one of them, if nobody reads them again.
    assert inside[0].workspace_nbytes >= (WEIGHTS - (not again)) * MATRIX
    assert inside[-1].workspace_nbytes < MATRIX


def test_the_predicted_peak_has_all_of_them() -> None:
    case = _accumulated()
    graph = graph_of(case)
    peak = simulate(graph, save_all(graph)).peak_nbytes
    compiled = MemoryStats.of(compile_plain(case, case.make_args())).peak_nbytes
    assert abs(peak - compiled) < MATRIX
