"""Forms and recomputing by themselves, one after the other and together: what is switched off, and the table."""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxremat
from examples.benchmarks import joint
from examples.benchmarks.joint import WAYS, forms, recomputing, within


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


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        ({"compiled_overhead": 0.013}, "+1.3%"),
        ({"least_nbytes": 70, "budget_nbytes": 50, "temporaries_nbytes": 100}, "(+20%)"),
    ],
)
def test_table(row: dict[str, Any], cell: str) -> None:
    record = {
        "environment": {"platform": "h100"},
        "rows": {f"gpt | 0.5 | {way}": row for way in WAYS},
    }
    assert joint.markdown([record]).splitlines()[-1] == f"| gpt | 50% | {' | '.join([cell] * 4)} |"
