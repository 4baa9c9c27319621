"""Small twins of the longest contexts that one GPU takes (`examples/llama_lora.py`): weights, moments and the layers'
inputs in host memory, attention without its scores, all else in chunks. They run on the CPU."""

import argparse
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from evaluation import evaluated

import jaxremat
from examples import llama_lora as llama
from jaxremat import close_over_dependencies
from jaxremat._compiler._target import Target
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model import _host_copies
from jaxremat._model._host_copies import HostMemory
from jaxremat._model._variant import ATTENTION, LOOP, ROWS, Choice, Variant
from jaxremat._program._compat import shaped
from jaxremat._program._host_arguments import from_host
from jaxremat._rewrite._trace import Traced, trace

SIZES = argparse.Namespace(layers=3, tokens=640, width=192, hidden=576, words=1280)


def there(tree: Any) -> Any:
    return jaxremat.to_host(tree, least_nbytes=1000)


def arrays(shapes: Any) -> Any:
    """Random arrays in float32, in which results can be compared."""
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    made = [jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    return jax.tree.unflatten(tree, made)


def twin(trained: str) -> tuple[Any, tuple[Any, ...]]:
    """The step, and its arguments: what its layers read, and moments, in host memory."""
    weights, adapters = arrays(llama.shapes(SIZES))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, SIZES.words, SIZES.tokens + 1), jnp.int32)
    weights["layers"] = there(weights["layers"])
    if trained == "LoRA":
        return llama.lora_step, ((adapters, llama.ADAM.init(adapters)), weights, tokens)
    moments = llama.ADAM.init(jax.tree.map(jnp.zeros_like, jax.device_put(weights, jax.memory.Space.Device)))
    return llama.full_step, ((weights, there(moments)), tokens)


def in_form(step: Any, args: tuple[Any, ...]) -> Traced:
    """The step as a long sequence needs it: updates where gradients are made, everything in parts."""
    found = trace(jax.jit(from_host(step), donate_argnums=0), args, {})
    chunks = [Choice(ROWS, site, (4,)) for site, region in enumerate(found.sites.regions) if not region.whole]
    return found.in_form(Variant.of(Choice(ATTENTION, 0, (1,)), Choice(LOOP, 0, (SIZES.layers,)), *chunks))


@pytest.mark.parametrize("trained", ["LoRA", "all weights"])
def test_results_are_those_of_the_step(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "LOW", jnp.float32)
    monkeypatch.setattr(_host_copies, "LEAST_NBYTES", 1 << 16)  # of a row that is worth a copy
    step, args = twin(trained)
    traced = in_form(step, args)
    eqns = traced.jaxpr.jaxpr.eqns
    assert sum(eqn.primitive.name == "attention_gradient" for eqn in eqns) == 1
    assert all(
        shaped(v).size < SIZES.tokens**2 for eqn in eqns for v in eqn.outvars
    )  # neither scores nor logits
    graph = replace(lower(traced, Target("h100").spec, base_nbytes=0), host=HostMemory(1e13))
    inputs = [
        v for v in graph.away.stacked if graph.nodes[graph.values[v].producer].primitive == "scan_carry"
    ]
    schedule = close_over_dependencies(graph, inputs, (), inputs)
    assert len(inputs) == len(schedule.offloaded) == 1
    found = evaluated(jex.jaxpr_as_fun(emit(traced, graph, schedule)))(*jax.tree.leaves(args))
    wanted = evaluated(from_host(step))(*args)
    for a, b in zip(jax.tree.leaves(wanted), found, strict=True):
        scale = float(jnp.abs(a).max()) or 1.0
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=2e-4)
