"""Weight gradients and updates in the order in memory that the weights have, barriers or not."""

import re
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxremat
from examples.benchmarks.networks import program
from jaxremat._emit import _emit

ADAM = optax.adamw(1e-3)


def step(weights: Any, state: Any, x: Any) -> Any:
    """Layers in bfloat16, parameters in float32; the last product is with the first's weights."""

    def loss(weights: Any) -> jax.Array:
        embedding, layers = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        h = x.astype(jnp.bfloat16) @ embedding
        for up, down in layers:
            h = h + jax.nn.gelu(h @ up) @ down
        return jnp.mean((h @ embedding.T).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    steps, state = ADAM.update(gradients, state, weights)
    return optax.apply_updates(weights, steps), state, value


def shapes(width: int, hidden: int, rows: int, layers: int = 4) -> Any:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights = shape(2 * width, width), [(shape(width, hidden), shape(hidden, width))] * layers
    return weights, jax.eval_shape(ADAM.init, weights), shape(rows, 2 * width)


def turned(text: str, width: int, hidden: int) -> int:
    """How many float32 arrays of a weight's shape a program copies into the other order."""
    sizes = {f"f32[{a},{b}]" for a in (width, hidden) for b in (width, hidden) if a != b}
    kernels = re.findall(r"%(\S*(?:copy|transpose)\S*) = (f32\[[\d,]*\])", text)
    return sum(shape in sizes for _, shape in kernels)


@pytest.mark.usefixtures("few_compilations")
@pytest.mark.jax_0_10("XLA turns the gradients of weights round")
def test_updates_stay_in_the_order_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a transformer with dropout; and not without it, by the same plan."""
    sizes: dict[str, Any] = {"layers": 2, "width": 768, "heads": 12, "vocabulary": 512, "context": 1024}
    made = program("dropout", scale="small", dtype=jnp.bfloat16, batch=8, length=1024, **sizes)
    args = made.abstract_args()
    common: dict[str, Any] = {"donate_argnums": made.donate_argnums, "target": "h100"}
    needs = jaxremat.memory(made.step, *args, **common)
    budget = needs.base_nbytes + int(0.6 * needs.temporaries_nbytes)
    allow = ("microbatches", "rows")  # so that it recomputes, behind barriers
    plan = jaxremat.plan(made.step, *args, budget=budget, cache=False, allow=allow, **common)
    assert not plan.drops_nothing

    def copies() -> int:
        planned = jaxremat.optimize(plan=plan, verify=False, **common)(lambda *args: made.step(*args))
        return turned(planned.compile(*args).as_text(), 768, 3072)

    ordered = copies()
    monkeypatch.setattr(_emit, "turned_gradients", lambda emitter: set())
    assert ordered == 0 < copies()


def test_it_changes_no_number() -> None:
    """The program that is written for a GPU, run here."""
    args = shapes(32, 96, 256)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    weights, x = jax.tree.map(lambda s: 0.1 * jax.random.normal(next(keys), s.shape), (args[0], args[2]))
    state = ADAM.init(weights)
    common: dict[str, Any] = {"donate_argnums": (0, 1), "target": "h100"}
    needs = jaxremat.memory(step, weights, state, x, **common)
    budget = needs.base_nbytes + int(0.7 * needs.temporaries_nbytes)
    planned = jaxremat.optimize(budget, cache=False, **common)(step)
    jitted = planned._plan_for((weights, state, x), {}).jitted
    jaxpr = jitted.trace(weights, state, x).jaxpr
    assert str(jaxpr).count("layout_constraint") == 10  # of the embedding's two, too
    expected = jax.jit(step)(weights, state, x)
    found = jax.jit(jex.jaxpr_as_fun(jaxpr))(*jax.tree.leaves((weights, state, x)))
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3)
