"""Parts of a cotangent that are read at different times: the whole is not kept for the last of them."""

from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from test_optimize import assert_same

from jaxremat import close_over_dependencies
from jaxremat._compiler._devices import DEVICES
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._rewrite._trace import trace

LAYERS, ROWS, WIDTH = 6, 8, 16


def loss(weights: Any, x: jax.Array) -> jax.Array:
    """What skips the layers, two of them, and what comes out, side by side, as in a U-Net."""
    *layers, last = weights
    made = [x]
    for w in layers:
        made.append(jnp.tanh(made[-1] @ w))
    return jnp.mean((jnp.concatenate([made[1], made[2], made[-1]], axis=1) @ last) ** 2)


def step(weights: Any, x: jax.Array) -> Any:
    """One of gradient descent, whose barriers wait for weights' gradients."""
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def planned() -> tuple[Any, list[Any]]:
    """The emitted step that recomputes all it can, and its barriers."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 3)
    shapes = [(WIDTH, WIDTH)] * (LAYERS + 1) + [(3 * WIDTH, WIDTH)]
    weights = [0.5 * jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=False)]
    args = weights, jax.random.normal(keys[-1], (ROWS, WIDTH))
    traced = trace(jax.jit(step, donate_argnums=0), args, {})
    graph = lower(traced, DEVICES["p100"], base_nbytes=0)
    graph = replace(graph, small_nbytes=0)
    parts = {v for n in graph.nodes if n.primitive in ("split", "slice") and not n.forward for v in n.outputs}
    assert len(parts) == 3
    values = tuple(replace(v, materialised=v.materialised or v.id in parts) for v in graph.values)
    graph = replace(graph, values=values)
    assert len(graph.stages) > 2
    jaxpr = emit(traced, graph, close_over_dependencies(graph, ()))
    plain = jex.jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves(args))
    assert_same(plain, jex.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args)))
    return jaxpr, [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "optimization_barrier"]


def test_what_is_read_late_passes_the_next_fence() -> None:
    """Compilers for GPUs would cut it off in the kernel that reads it."""
    jaxpr, barriers = planned()
    eqns = jaxpr.jaxpr.eqns
    *skips, rest = (v for e in eqns if e.primitive.name in ("split", "slice") for v in e.outvars)
    made = next(i for i, e in enumerate(eqns) if skips[0] in e.outvars)
    (through,) = [e for e in barriers if not set(skips).isdisjoint(e.invars)]
    assert through is next(e for i, e in enumerate(eqns) if e in barriers and i > made)
    assert set(skips) <= set(through.invars)
    assert not any(rest in e.invars for e in barriers)  # which its own stage reads
    for skip in skips:
        behind_barrier = through.outvars[through.invars.index(skip)]
        assert [e.primitive.name for e in eqns if behind_barrier in e.invars] == ["add_any"]
        assert all(e is through for e in eqns if skip in e.invars)
