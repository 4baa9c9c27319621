"""Copies of weights in a library's layout: on the CPU each is made where it is read, not all when the step begins."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from test_optimize import assert_same

import jaxremat
from jaxremat import MemoryStats, compiler_options

LAYERS, WIDTH = 8, 96
WEIGHT_NBYTES = 4 * 9 * WIDTH**2


def step(weights: Any, x: jax.Array) -> Any:
    """A train step of convolutions with large kernels over small images, in PyTorch's layout."""

    def loss(weights: Any) -> jax.Array:
        y = x
        for kernel in weights:
            y = y + jnp.tanh(lax.conv_general_dilated(y, kernel, (1, 1), "SAME"))
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def args() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [0.05 * jax.random.normal(key, (WIDTH, WIDTH, 3, 3)) for key in keys[1:]]
    return weights, jax.random.normal(keys[0], (2, WIDTH, 4, 4))


def test_they_are_not_all_there_at_once() -> None:
    plain = jax.jit(step, donate_argnums=0).lower(*args()).compile(compiler_options=compiler_options())
    stats = MemoryStats.of(plain)
    assert stats.temporaries_nbytes > LAYERS * WEIGHT_NBYTES  # or XLA has learnt it, and this can go
    planned = jaxremat.optimize("min", donate_argnums=0)(step)
    found = MemoryStats.of(planned.compile(*args()))
    # A gradient, the update that it waits for, and a copy of a kernel, turned for the gradient before it.
    assert found.temporaries_nbytes < 4.5 * WEIGHT_NBYTES
    assert planned.plan(*args()).compiled_peak_nbytes == found.peak_nbytes
    assert_same(plain(*args()), planned(*args()))


def test_kernels_of_all_kinds() -> None:
    """Turned, cast, parts of one array, shared, convolved with each other, of a single channel."""
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "parts": 0.1 * jax.random.normal(keys[0], (2 * WIDTH, WIDTH, 3, 3)),
        "turned": 0.1 * jax.random.normal(keys[1], (3, 3, WIDTH, WIDTH)),
        "deep": 0.1 * jax.random.normal(keys[2], (WIDTH, 1, 3, 3)),
    }
    x = jax.random.normal(keys[3], (2, WIDTH, 4, 4))

    def train(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = x
            first, second = jnp.split(weights["parts"], 2)
            turned = weights["turned"].transpose(3, 2, 0, 1)
            for kernel in (
                first,
                turned,
                second.astype(jnp.bfloat16).astype(jnp.float32),
                turned,
                first[:, ::-1],
            ):
                y = y + jnp.tanh(lax.conv_general_dilated(y, kernel, (1, 1), "SAME"))
                y = y + lax.conv_general_dilated(
                    y, weights["deep"], (1, 1), "SAME", feature_group_count=WIDTH
                )
            mixed = lax.conv_general_dilated(first, second, (1, 1), "SAME")
            return jnp.mean(y**2) + jnp.mean(mixed**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    planned = jaxremat.optimize("min", donate_argnums=0)(train)
    want = jax.jit(train)(weights, x)
    assert_same(want, planned(jax.tree.map(jnp.copy, weights), x))
    assert not planned.plan(weights, x).drops_nothing


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_the_first_prediction_counts_on_it(share: float) -> None:
    stats = jaxremat.memory(step, *args(), donate_argnums=0)
    budget = stats.base_nbytes + int(share * stats.temporaries_nbytes)
    plan = jaxremat.plan(step, *args(), budget=budget, donate_argnums=0)
    assert plan.rounds[0].compiled_peak_nbytes <= budget
    assert plan.compiled_peak_nbytes == plan.rounds[0].compiled_peak_nbytes
