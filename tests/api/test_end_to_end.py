"""One small step through the whole pipeline: budget kept by the compiler's own number, results equal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxremat

OPTIMIZER = optax.adamw(1e-3)


def step(weights, moments, batch):
    def loss(weights):
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(weights)
    updates, moments = OPTIMIZER.update(grads, moments, weights)
    return optax.apply_updates(weights, updates), moments, value


def test_a_deep_network_in_half_of_its_temporaries() -> None:
    weights = [jnp.eye(64) * 0.9 + 0.01 * i for i in range(12)]
    args = (weights, OPTIMIZER.init(weights), jnp.ones((4096, 64)))
    plain = jaxremat.memory(step, *args)
    budget = plain.base_nbytes + plain.temporaries_nbytes // 2
    planned = jaxremat.optimize(budget)(step)
    plan = planned.plan(*args)
    compiled = jaxremat.MemoryStats.of(planned.compile(*args))
    assert compiled.peak_nbytes == plan.compiled_peak_nbytes
    assert compiled.peak_nbytes <= budget < plain.peak_nbytes
    assert plan.loops or not plan.drops_nothing
    for want, got in zip(jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(planned(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert jaxremat.Plan.from_json(plan.to_json()) == plan


def test_a_step_that_fits_is_left_alone() -> None:
    weights = [jnp.eye(16)] * 3
    args = (weights, OPTIMIZER.init(weights), jnp.ones((32, 16)))
    plan = jaxremat.plan(step, *args, budget="1GiB")
    assert plan.drops_nothing
    assert plan.overhead == 0
    assert plan.compiled_peak_nbytes == plan.baseline_peak_nbytes
