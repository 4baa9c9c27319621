"""Forms and recomputing by themselves, one after the other and together: what is switched off, and the table."""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

import jaxremat
from examples.benchmarks.joint import forms, recomputing, within


def step(weights: list[jax.Array], x: jax.Array) -> Any:
    def loss_fn(weights: list[jax.Array]) -> jax.Array:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


def planned(way: AbstractContextManager[dict[str, Any]], share: float) -> jaxremat.Plan:
    args = [jnp.ones((64, 64))] * 8, jnp.ones((4096, 64))
    needs = jaxremat.memory(step, *args, donate_argnums=0)
    budget = needs.base_nbytes + int(share * needs.temporaries_nbytes)
    with way as options:
        return jaxremat.plan(
            lambda *args: step(*args),
            *args,
            budget=budget,
            donate_argnums=0,
            **options,
        )


def test_each_does_what_it_says() -> None:
    repeated, formed = planned(recomputing(), 0.6), planned(forms(), 0.6)
    assert not repeated.form
    assert not repeated.drops_nothing
    assert formed.form
    assert formed.drops_nothing
    assert planned(within(formed.form), 0.3).form == formed.form
