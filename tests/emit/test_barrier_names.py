"""What has passed a barrier is read behind it by its barrier name: it is in memory once, in one layout."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from comparing import assert_same

import jaxremat
from examples.benchmarks.networks import program
from jaxremat import close_over_dependencies
from jaxremat._compiler._devices import DEVICES
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._program import _compat
from jaxremat._program._primitives import is_relabelling
from jaxremat._rewrite._trace import trace

BATCH, LENGTH, HEADS, DEPTH = 2, 16, 2, 8
WIDTH = HEADS * DEPTH


def loss(weights: Any, x: jax.Array) -> jax.Array:
    """Layers of attention."""
    for qkv, out in weights:
        parts = (x @ qkv).reshape(BATCH, LENGTH, 3, HEADS, DEPTH)
        query, key, value = (parts[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        x = x + mixed.reshape(x.shape) @ out
    return jnp.mean(x**2)


def both(platform: str) -> tuple[Any, Any, Any, Any]:
    """The step, its graph and the plan that saves queries, keys and values, but no scores and no weights."""
    keys = jax.random.split(jax.random.key(0), 7)
    weights = [
        (
            jax.random.normal(keys[2 * i], (WIDTH, 3 * WIDTH)) * 0.2,
            jax.random.normal(keys[2 * i + 1], (WIDTH, WIDTH)) * 0.2,
        )
        for i in range(3)
    ]
    args = weights, jax.random.normal(keys[6], (BATCH, LENGTH, WIDTH))
    traced = trace(jax.jit(jax.value_and_grad(loss)), args, {})
    graph = lower(traced, DEVICES[platform], base_nbytes=0)
    square = f"{BATCH},{HEADS},{LENGTH},{LENGTH}]"
    saved = [v for v in graph.residuals if square not in graph.values[v].shape]
    return args, traced, graph, close_over_dependencies(graph, saved)


def root(var: Any, made_by: Any) -> Any:
    """What a variable is a view of."""
    while var in made_by and is_relabelling(made_by[var]):
        (var,) = _compat.variables(made_by[var].invars)
    return var


def test_contractions_read_it_by_its_fenced_name_from_then_on() -> None:
    args, traced, graph, schedule = both("h100")
    assert any(schedule.recomputed)
    jaxpr = emit(traced, graph, schedule)
    made_by = {v: e for e in jaxpr.jaxpr.eqns for v in e.outvars}
    index = {v: i for i, v in enumerate((*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars))}
    forward = {v for e in traced.jaxpr.jaxpr.eqns[: graph.forward_stop] for v in e.outvars}
    passed: set[Any] = set()
    again = 0
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            passed.update(a for a in eqn.invars if a in forward and a not in index)
        if eqn.primitive.name == "dot_general":
            roots = {root(a, made_by) for a in eqn.invars}
            assert passed.isdisjoint(roots)
            behind_barrier = (
                made_by.get(a) for a in roots if "recompute" not in str(eqn.source_info.name_stack)
            )
            again += sum(e is not None and e.primitive.name == "optimization_barrier" for e in behind_barrier)
    assert passed
    assert again >= 2  # the gradients of queries and keys, by what is multiplied anew
    plain = jex.jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves(args))
    assert_same(plain, jex.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args)))


def gated(weights: Any, x: jax.Array) -> jax.Array:
    """Layers whose activations are made of products, as their gradients are."""
    for up, down in weights:
        y = x @ up
        x = x + (y * jnp.tanh(y)) @ down
    return jnp.mean(x**2)


def test_what_a_stage_makes_again_and_its_own_work_read_a_source_by_one_name() -> None:
    """One kernel does both, and is to load it once."""
    keys = jax.random.split(jax.random.key(0), 7)
    weights = [
        (jax.random.normal(keys[2 * i], (WIDTH, 64)), jax.random.normal(keys[2 * i + 1], (64, WIDTH)))
        for i in range(3)
    ]
    args = weights, jax.random.normal(keys[6], (32, WIDTH))
    traced = trace(jax.jit(jax.value_and_grad(gated)), args, {})
    graph = lower(traced, DEVICES["h100"], base_nbytes=0)
    products = [
        v for v in graph.residuals if graph.nodes[graph.values[v].producer].primitive == "dot_general"
    ]
    schedule = close_over_dependencies(graph, products)
    assert sum(map(bool, schedule.recomputed)) > 1
    jaxpr = emit(traced, graph, schedule)
    saved = {traced.jaxpr.jaxpr.eqns[graph.values[v].producer].outvars[0] for v in products}
    passed: set[Any] = set()
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            passed.update(saved.intersection(_compat.variables(eqn.invars)))
        else:
            assert passed.isdisjoint(_compat.variables(eqn.invars)), eqn
    assert len(passed) > 1
    plain = jex.jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves(args))
    assert_same(plain, jex.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args)))


@pytest.mark.slow
def test_what_products_read_is_kept_in_one_layout() -> None:
    """ViT's products are cuBLAS's, because Triton has no tiling for its length; those want layouts of their own.

    Attention in kernels has none of those products, and what its kernels write is copied for the next one.
    """
    step = program("vit", scale="full", layers=3, batch=8)
    options: Any = {"donate_argnums": step.donate_argnums, "target": "h100", "allow": ()}
    plan = jaxremat.plan(step.step, *step.abstract_args(), budget="40% of temporaries", **options)
    first = plan.rounds[0]
    assert first.predicted_peak_nbytes == pytest.approx(first.compiled_peak_nbytes, rel=0.015)
