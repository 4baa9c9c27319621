"""Two losses in one step, the second of parameters that the loops of the first have written over."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import assert_close
from evaluation import evaluate
from forms import of_levels

from jaxremat import SaveAll
from jaxremat._compiler._devices import detect
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._rewrite._trace import trace

LAYERS, WIDTH = 6, 8


def step(weights: Any, entry: Any, x: Any, y: Any) -> Any:
    """As a critic and its generator: an update, and another of other parameters through what that gave."""

    def loss(weights: Any, entry: Any, x: Any) -> jax.Array:
        out, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ entry, weights)
        return jnp.mean(out**2)

    first, gradient = jax.value_and_grad(loss)(weights, entry, x)
    weights = weights - 0.5 * gradient
    second, gradient = jax.value_and_grad(loss, 1)(weights, entry, y)
    return weights, entry - 0.5 * gradient, first, second


@pytest.mark.parametrize("materialises_eagerly", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("first", [(6,), (2, -1), (3, 2)], ids=str)
@pytest.mark.parametrize("second", [(), (2,)], ids=str)
def test_a_loop_reads_what_another_has_written(
    first: tuple[int, ...], second: tuple[int, ...], materialises_eagerly: bool
) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((LAYERS, WIDTH, WIDTH), (WIDTH, WIDTH), (16, WIDTH), (16, WIDTH))
    args = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    traced = trace(jax.jit(step, donate_argnums=(0, 1)), args, {}).in_form(form := of_levels(first, second))
    assert traced.form == form and traced.over
    device = detect(jax.devices()[0])
    graph = replace(lower(traced, device, base_nbytes=0), platform="cpu" if materialises_eagerly else "gpu")
    schedule = SaveAll().solve(graph, None, time_limit=1.0).schedule
    found = evaluate(emit(traced, graph, schedule), args)
    assert_close(step(*args), found, rtol=1e-4, atol=1e-5)
