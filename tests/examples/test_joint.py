"""Forms and recomputing by themselves, one after the other and together: what is switched off, and the table."""

from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp
from chains import make_step

import jaxremat
from examples.benchmarks.joint import forms, recomputing, within


def planned(way: AbstractContextManager[dict[str, Any]], share: float) -> jaxremat.Plan:
    args = [jnp.ones((64, 64))] * 8, jnp.ones((4096, 64))
    with way as options:
        budget = f"{share:.0%} of temporaries"
        return jaxremat.plan(make_step(), *args, budget=budget, donate_argnums=0, **options)


def test_each_does_what_it_says() -> None:
    repeated, formed = planned(recomputing(), 0.6), planned(forms(), 0.6)
    assert not repeated.form
    assert not repeated.drops_nothing
    assert formed.form
    assert formed.drops_nothing
    assert planned(within(formed.form), 0.3).form == formed.form
