"""Which sums stand in memory in place of the matrix product that they add to."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import updating
from test_loops import CPU

from jaxremat._compiler._devices import DEVICES
from jaxremat._compiler._tags import Written
from jaxremat._lower._kernel_prices import written_sums
from jaxremat._lower._lower import lower
from jaxremat._rewrite._trace import trace

X = jax.ShapeDtypeStruct((32, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
B = jax.ShapeDtypeStruct((16,), jnp.float32)


@pytest.mark.parametrize(
    ("net", "sums"),
    [
        (lambda x, w, b: jnp.sin(x + x @ w), 1),
        (lambda x, w, b: jnp.sin((x @ w + b) + x), 1),
        (lambda x, w, b: jnp.sin(x + (x.reshape(4, 8, 16) @ w + b).reshape(32, 16)), 1),
        (lambda x, w, b: jnp.sin(x @ w + b), 0),  # only a bias: as large as the product, which stands for it
        (lambda x, w, b: jnp.sin(x + jnp.tanh(x @ w)), 0),
        (lambda x, w, b: (lambda y: jnp.sin(x + y) * y)(x @ w), 0),  # the product itself is wanted, too
    ],
)
def test_sums_in_place_of_products(net: Callable[..., Any], sums: int) -> None:
    found = trace(jax.jit(net), (X, W, B), {})
    graph = lower(found, CPU, base_nbytes=0)
    chosen = written_sums(found.jaxpr.jaxpr.eqns, graph.nodes, graph.values)
    assert len(chosen) == sums
    assert all(graph.nodes[graph.values[v].producer].primitive == "add" for v in chosen)


def test_a_residual_stream_is_in_memory_where_kernels_have_the_products_names() -> None:
    """Without it every layer's readers would read the products of all layers before it."""

    @updating
    def step(ws: Any, x: Any) -> Any:
        y = x
        for w in ws:
            y = y + jnp.tanh(y) @ w
        return (y**2).mean()

    found = trace(jax.jit(step, donate_argnums=0), ([W] * 6, X), {})
    eqns = found.jaxpr.jaxpr.eqns
    products = {
        i: (v.aval.size * 4,)
        for i, e in enumerate(eqns)
        for v in e.outvars
        if e.primitive.name == "dot_general"
    }
    gpu = lower(found, DEVICES["h100"], base_nbytes=0, written=Written(products, ()))
    stream = [
        n.outputs[0]
        for n in gpu.nodes
        if n.forward and n.primitive == "add" and gpu.values[n.outputs[0]].nbytes
    ]
    assert all(gpu.values[v].materialised for v in stream[:6])
    most = max(len(gpu.reads[n.id]) for n in gpu.nodes)
    cpu = lower(found, replace(CPU, platform="cpu"), base_nbytes=0, written=Written(products, ()))
    assert most < max(len(cpu.reads[n.id]) for n in cpu.nodes)
