"""What a planned step returns has the plain step's types, weak ones too, so that it goes into the next as it is."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxremat

LAYERS, WIDTH, ROWS = 8, 32, 256


def step(state: Any, x: jax.Array) -> Any:
    """Layers with a scale that is weakly typed, as what is made of Python's numbers is."""

    def loss(params: Any) -> jax.Array:
        def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ own["w"]) * own["scale"], None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def test_weak_types_stay_weak_and_nothing_is_planned_twice() -> None:
    scale = jnp.log(2.0 + jnp.arange(LAYERS))[:, None]
    state = {"scale": scale, "w": jnp.tile(jnp.eye(WIDTH), (LAYERS, 1, 1))}
    x = jnp.ones((ROWS, WIDTH))
    planned = jaxremat.optimize("50% of temporaries")(step)
    after, _ = planned(state, x)
    plain, _ = jax.jit(step)(state, x)
    assert planned.plan(state, x).rounds
    assert scale.aval.weak_type and plain["scale"].aval.weak_type
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, plain)
    assert planned.plan(after, x) is planned.plan(state, x)
