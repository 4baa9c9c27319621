"""What waits for a later barrier: weight gradients and the updates behind them, and what XLA then need not copy."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_same
from graphs import UNIT, Builder
from zoo import ZOO

import jaxremat
from jaxremat import Graph, close_over_dependencies, simulate
from jaxremat._compiler._devices import detect
from jaxremat._compiler._hlo import Module, parse
from jaxremat._lower._lower import lower
from jaxremat._model._optimizer_updates import with_updates
from jaxremat._rewrite._trace import trace

ADAM = optax.adamw(1e-3)
ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


def deferred(graph: Graph) -> dict[int, int]:
    return {n: graph.released[k] for k, stage in enumerate(graph.stages) for n in stage.deferred}


def two_layers(*, donated: bool, update_heavy: bool = False) -> Graph:
    """Forward `a -> b`; stage 0 makes b's weight gradient and then the cotangent that reads weight 0; stage 1 a's."""
    build = Builder()
    weight, x = build.argument(2), build.argument(8)
    (a,) = build.node([x], [8])
    (b,) = build.node([a, weight], [8])
    build.stage()
    (gradient,) = build.node([b], [2], contraction=True)
    build.node([gradient, weight], [2], fusion_root=update_heavy, is_output=True)
    (cotangent,) = build.node([b, weight], [8], contraction=True)
    build.stage()
    (last,) = build.node([cotangent, a], [2], contraction=True)
    build.node([last], [2], fusion_root=False, is_output=True)
    graph = build.graph()
    donate = frozenset({weight}) if donated else frozenset()
    graph = Graph(graph.nodes, graph.values, graph.stages, 0, 1.0, donated=donate)
    return Graph(graph.nodes, graph.values, with_updates(graph, [2, 5, 7]), 0, 1.0, donated=donate)


@pytest.mark.parametrize("donated", [False, True])
def test_an_update_waits_for_the_next_barrier(donated: bool) -> None:
    graph = two_layers(donated=donated)
    assert graph.stages[0].finished == (4,)
    assert deferred(graph) == {3: 1, 6: 2}
    assert graph.lingering == {4: 1, 7: 2}


def test_heavy_work_is_not_deferred() -> None:
    assert deferred(two_layers(donated=True, update_heavy=True)) == {6: 2}


def on_a_gpu(graph: Graph) -> Graph:
    gpu = replace(graph, platform="gpu")
    cuts = [*(stage.start for stage in graph.stages), len(graph.nodes)]
    return replace(gpu, stages=with_updates(gpu, cuts))


@pytest.mark.parametrize("donated", [False, True])
def test_on_a_gpu_an_update_runs_at_once_and_holds_the_next_fence_back(donated: bool) -> None:
    graph = on_a_gpu(two_layers(donated=donated))
    assert [stage.finished for stage in graph.stages] == [(5,), (8,)]  # what the updates return
    assert deferred(graph) == {}
    assert graph.lingering == {}


def test_on_a_gpu_a_gradient_whose_update_cannot_run_at_once_holds_the_fence_back_itself() -> None:
    graph = on_a_gpu(two_layers(donated=True, update_heavy=True))
    assert [stage.finished for stage in graph.stages] == [(4,), (8,)]


def test_what_lingers_counts() -> None:
    graph = two_layers(donated=True)
    events = simulate(graph, close_over_dependencies(graph, graph.residuals)).events
    live = {e.node: e.live_nbytes // UNIT for e in events}
    assert live[4] == 8 + 8 + 8 + 2  # a, b, the cotangent, and the first gradient that waits


def copied_arguments(module: Module) -> int:
    """Bytes of large arguments that a program copies before it starts."""
    entry = module.computations[module.entry].instructions
    parameters = {i.name for i in entry if i.opcode == "parameter"}
    copies = [i for i in entry if i.opcode == "copy" and i.operands[0] in parameters]
    return sum(shape.nbytes for i in copies for shape in i.shapes if shape.nbytes > 2**12)


def train(state: Any, batch: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights, moments = state
    value, grads = jax.value_and_grad(loss)(weights)
    updates, moments = ADAM.update(grads, moments, weights)
    return (optax.apply_updates(weights, updates), moments), value


def state() -> Any:
    weights = [jnp.eye(64) * 0.9 + 0.01 * i for i in range(8)]
    return weights, ADAM.init(weights)


@pytest.mark.slow
def test_donated_weights_are_not_copied() -> None:
    batch = jnp.ones((1024, 64))
    step = jaxremat.optimize("75% of temporaries", donate_argnums=0)(train)
    options = jaxremat.compiler_options("cpu")
    jitted = jax.jit(train, donate_argnums=0).lower(state(), batch).compile(compiler_options=options)
    assert copied_arguments(parse(str(jitted.as_text()))) > 0
    assert copied_arguments(parse(str(step.compile(state(), batch).as_text()))) == 0
    want, got = jax.jit(train)(state(), batch), step(state(), batch)
    assert_same(want, got)
    np.testing.assert_array_equal(want[1], got[1])


def clipped_step(state: Any, batch: jax.Array) -> Any:
    """The gradient's norm is read at once, its update only when all norms are known."""

    def loss(weights: Any) -> jax.Array:
        x = batch
        for w in weights:
            x = jnp.tanh(jnp.einsum("bi,io->bo", x, w))
        return jnp.mean(x**2)

    weights, moments = state
    value, grads = jax.value_and_grad(loss)(weights)
    updates, moments = CLIPPED.update(grads, moments, weights)
    return (optax.apply_updates(weights, updates), moments), value


@pytest.mark.parametrize("case", [*ZOO, clipped_step], ids=lambda case: getattr(case, "name", "clipped"))
def test_what_reads_a_deferred_result_comes_after_it(case: Any) -> None:
    """The law of `_updates`, on real steps with every argument donated."""
    if case is clipped_step:
        weights = [jnp.eye(64)] * 6
        fn, args = clipped_step, ((weights, CLIPPED.init(weights)), jnp.ones((512, 64)))
    else:
        fn, args = case.step, case.make_args()
    traced = trace(jax.jit(fn, donate_argnums=0), args, {})
    graph = lower(traced, detect(jax.devices("cpu")[0]), base_nbytes=0)
    waits = deferred(graph)
    for n, k in waits.items():
        assert not graph.nodes[n].fusion_root
        made = set(graph.nodes[n].outputs)
        for reader in graph.nodes[n + 1 :]:
            if made.intersection(reader.inputs):
                assert waits.get(reader.id, -1) == k
