"""Steps of gradient descent, and the step that is planned where any will do: of a chain of equal layers."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

Train = Callable[[list[jax.Array], jax.Array], list[jax.Array]]


def descent(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The step that moves the first argument of a loss against its gradient, and gives the loss before it too."""

    @wraps(loss)
    def step(weights: Any, *batch: Any, **options: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, *batch, **options)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def updating(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The same without the loss."""

    @wraps(loss)
    def step(weights: Any, *batch: Any) -> Any:
        gradients = jax.grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def make_step(activation: Callable[[jax.Array], jax.Array] = jnp.tanh) -> Train:
    """The step of a chain, a new function on each call as in a new process."""

    @updating
    def train(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        y = x
        for w in weights:
            y = activation(y @ w)
        return jnp.mean(y**2)

    return train


train = make_step()
