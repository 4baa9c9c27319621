"""Loops and conditionals with draws: what is drawn with a key is drawn again like anything else, with nested
checkpointing and in branches; what is drawn from the device's state is drawn once, and the rest of the step is planned
around it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from evaluation import evaluated
from forms import of_levels
from jax import lax

import jaxremat
from jaxremat import Graph, close_over_dependencies
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._emit._emit import emit
from jaxremat._emit._validation import unproved
from jaxremat._lower._lower import lower
from jaxremat._rewrite._trace import Traced, trace

pytestmark = pytest.mark.usefixtures("few_compilations")

DEVICE = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
LAYERS, ROWS, WIDTH = 8, 64, 16
WEIGHTS = np.random.default_rng(0).normal(0, 0.2, (LAYERS, WIDTH, WIDTH)).astype("float32")
X = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype("float32")
KEY = jax.random.key(3)
ARGS = WEIGHTS, X, KEY


def dropped(key: Any, h: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)


def split(weights: Any, x: Any, key: Any) -> Any:
    def body(h: Any, each: Any) -> Any:
        w, own = each
        return dropped(own, jax.nn.gelu(h @ w)) + h, None

    return lax.scan(body, x, (weights, jax.random.split(key, LAYERS)))[0]


def carried(weights: Any, x: Any, key: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        h, key = carry
        key, own = jax.random.split(key)
        return (dropped(own, jax.nn.gelu(h @ w)) + h, key), None

    return lax.scan(body, (x, key), weights)[0][0]


def folded(weights: Any, x: Any, key: Any) -> Any:
    def body(h: Any, each: Any) -> Any:
        w, i = each
        return dropped(jax.random.fold_in(key, i), jax.nn.gelu(h @ w)) + h, None

    return lax.scan(body, x, (weights, jnp.arange(LAYERS)))[0]


def bit_generator(weights: Any, x: Any, key: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        h, state = carry
        state, bits = lax.rng_bit_generator(state, h.shape)
        return (jnp.where(bits > 2**29, jax.nn.gelu(h @ w), 0) + h, state), None

    state = jnp.tile(jax.random.key_data(key).reshape(-1)[:2], 2).astype(jnp.uint32)
    return lax.scan(body, (x, state), weights)[0][0]


def branches(weights: Any, x: Any, key: Any) -> Any:
    def body(h: Any, each: Any) -> Any:
        w, own = each
        return lax.cond(h[0, 0] > 0, lambda h: dropped(own, jax.nn.gelu(h @ w)), lambda h: h @ w, h) + h, None

    return lax.scan(body, x, (weights, jax.random.split(key, LAYERS)))[0]


def from_the_device(weights: Any, x: Any, key: Any) -> Any:
    def body(h: Any, w: Any) -> Any:
        drawn = lax.rng_uniform(0.0, 1.0 + 0 * lax.stop_gradient(h[0, 0]), h.shape)
        return jnp.where(drawn < 2.0, jax.nn.gelu(h @ w), 0) + h, None

    return lax.scan(body, x, weights)[0]


KEYED = (split, carried, folded, bit_generator, branches)


def step_of(layers: Callable[..., Any]) -> Callable[..., Any]:
    def step(weights: Any, x: Any, key: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(layers(w, x, key) ** 2))(weights)
        return weights - 0.1 * gradient

    return step


def traced(layers: Callable[..., Any]) -> Traced:
    return trace(jax.jit(step_of(layers)), ARGS, {})


@pytest.mark.parametrize("layers", KEYED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("levels", [(2, 4), (7,)], ids=str)
def test_loops_draw_again_with_their_keys(layers: Callable[..., Any], levels: tuple[int, ...]) -> None:
    step = traced(layers)
    assert step.sites.cuttable == (True,)
    form = step.in_form(of_levels(levels))
    graph: Graph = lower(form, DEVICE, base_nbytes=0)
    planned = emit(form, graph, close_over_dependencies(graph, ()))
    found = evaluated(jex.jaxpr_as_fun(planned))(*ARGS)[0]
    np.testing.assert_allclose(found, evaluated(step_of(layers))(*ARGS), rtol=1e-5, atol=1e-7)
    assert len(levels) > 1 or unproved(planned) == ()


def test_what_the_device_draws_is_drawn_once() -> None:
    assert traced(from_the_device).sites.cuttable == (False,)


def in_branches(draw: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A step of layers some of which are conditionals that draw."""

    def layers(weights: Any, x: Any, key: Any) -> Any:
        h = x
        for i in range(LAYERS):
            own = jax.random.fold_in(key, i)
            if i % 2:
                h = jnp.tanh(jax.nn.gelu(h @ weights[i])) + h
            else:
                h = h + lax.cond(
                    x[0, 0] > 0,
                    lambda h, w, own: draw(own, jax.nn.gelu(h @ w)),
                    lambda h, w, own: h @ w,
                    h,
                    weights[i],
                    own,
                )
        return h

    return layers


def keyless(key: Any, h: jax.Array) -> jax.Array:
    return jnp.where(lax.rng_uniform(0.0, 1.0 + 0 * lax.stop_gradient(h[0, 0]), h.shape) < 2.0, h / 0.8, 0)


@pytest.mark.parametrize("draw", [dropped, keyless], ids=lambda f: f.__name__)
def test_conditionals_with_draws_are_planned(draw: Callable[[Any, Any], Any]) -> None:
    """What draws with a key is made again; around what draws without one the rest of the step is."""
    step = step_of(in_branches(draw))
    args = WEIGHTS, np.tile(X, (16, 1)), KEY
    planned: Any = jaxremat.optimize("min")(step)
    plan = planned.plan(*args)
    assert plan.peak_nbytes < jaxremat.memory(step, *args).peak_nbytes
    assert not plan.drops_nothing
    again = {a.name for a in plan.actions if a.action == "recompute"}
    assert ("cond" in again) == (draw is dropped)
    np.testing.assert_allclose(planned(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-7)
