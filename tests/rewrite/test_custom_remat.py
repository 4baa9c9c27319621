"""Rules of `jax.custom_remat` are followed: what they save and compute again stands in the step as they say."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import assert_same

import jaxremat

pytestmark = pytest.mark.skipif(not hasattr(jax, "custom_remat"), reason="jax 0.11 brings it")


@pytest.fixture(autouse=True)
def under_remat3() -> Iterator[None]:
    """The rules ask for the flag."""
    before = jax.config.jax_remat3  # type: ignore[attr-defined]
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def forward(policy: Any, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Save eight bits of each result."""
    y = layer(x, w)
    return y, (127 * y).astype(jnp.int8)


def rematerialise(res: jax.Array, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    y = res.astype(jnp.float32) / 127
    return y, (y, x, w)


def backward(res: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Three times the weights' gradient: who computes something else did not follow the rule."""
    y, x, w = res
    d = cotangent * (1 - y**2)
    return d @ w.T, 3 * (x.T @ d)


def ruled(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.custom_remat(layer, forward, rematerialise, backward)(x, w)  # type: ignore[attr-defined]


def loss(ws: list[jax.Array], x: jax.Array, block: Callable[..., jax.Array] = ruled) -> jax.Array:
    for w in ws:
        x = x + block(x, w)
    return jnp.mean(x**2)


def checkpointed(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """Layer by layer: within a checkpoint of more, layers would read what the rule before them rounds."""
    return loss(ws, x, jax.checkpoint(ruled))


def step(ws: list[jax.Array], x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(checkpointed)(ws, x)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value


def make_args() -> tuple[list[jax.Array], jax.Array]:
    ws = [jax.random.normal(jax.random.key(i), (32, 32)) / 6 for i in range(3)]
    return ws, jax.random.normal(jax.random.key(9), (256, 32))


@pytest.mark.parametrize("respect_checkpoint", [False, True])
def test_a_planned_step_follows_the_rules(respect_checkpoint: bool) -> None:
    planned = jaxremat.optimize("min", planning=jaxremat.Planning(respect_checkpoint=respect_checkpoint))(
        step
    )
    assert_same(jax.jit(step)(*make_args()), planned(*make_args()))


@pytest.mark.parametrize("emit", ["policy", "custom_vjp"])
@pytest.mark.parametrize("fn", [loss, checkpointed])
def test_a_planned_function_follows_the_rules(fn: Any, emit: str) -> None:
    """Also one without a `jax.checkpoint` around, where JAX itself has no derivative."""
    planned = jaxremat.checkpoint(fn, "min", emit=emit)
    grads = jax.jit(jax.grad(planned), compiler_options=jaxremat.compiler_options())(*make_args())
    assert_same(jax.jit(jax.grad(checkpointed))(*make_args()), grads)
