"""Stages within a loop's iterations: each waits for the one before, and reads the rows that it needs, not before."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from comparing import assert_same
from jax import lax
from test_loops import CPU, scans

import jaxremat
from jaxremat import MemoryStats, close_over_dependencies, simulate
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Graph
from jaxremat._program import _compat
from jaxremat._rewrite._trace import Traced, trace

LAYERS, ROWS, WIDTH, WIDE, PARTS = 6, 256, 64, 512, 3


def step(params: Any, x: jax.Array) -> Any:
    """A train step of layers of several wide branches; the backward pass stops between them."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        for part in range(PARTS):
            y = jnp.tanh(x @ p["in"][part] + p["bias"][part])
            x = x + y @ p["out"][part]
            x = jaxremat.hint(x, "stage") if part < PARTS - 1 else x
        return x, None

    def loss(params: Any) -> jax.Array:
        return (lax.scan(layer, x, params)[0] ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def arguments() -> Any:
    def drawn(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape) / 30

    params = {
        "in": [drawn(part, LAYERS, WIDTH, WIDE) for part in range(PARTS)],
        "bias": [drawn(part, LAYERS, WIDE) for part in range(PARTS)],
        "out": [drawn(part, LAYERS, WIDE, WIDTH) for part in range(PARTS)],
    }
    return params, drawn(9, ROWS, WIDTH)


@pytest.fixture(scope="module")
def planned() -> tuple[Traced, Graph, jex.ClosedJaxpr]:
    """The step that saves nothing but carries, with its graph."""
    found = trace(jax.jit(step, donate_argnums=0), arguments(), {})
    graph = lower(found, CPU, base_nbytes=0)
    return found, graph, emit(found, graph, close_over_dependencies(graph, ()))


def body(closed: jex.ClosedJaxpr) -> Any:
    """The iteration of the backward loop."""
    return scans(closed)[-1].params["jaxpr"].jaxpr


def test_stages_of_an_iteration_wait_for_each_other(planned: Any) -> None:
    """Each barrier has a gradient among its operands that the stage before it made, and that is read behind it."""
    iteration = body(planned[-1])
    barriers = [i for i, eqn in enumerate(iteration.eqns) if eqn.primitive.name == "optimization_barrier"]
    assert len(barriers) >= PARTS - 1
    for begin, end in zip([0, *barriers], barriers, strict=False):
        made = {v for eqn in iteration.eqns[begin + 1 : end] for v in eqn.outvars}
        read = {a for eqn in iteration.eqns[end + 1 :] for a in _compat.variables(eqn.invars)}
        fence = iteration.eqns[end]
        held = [
            v.aval.shape for a, v in zip(fence.invars, fence.outvars, strict=True) if a in made and v in read
        ]
        assert (WIDE, WIDTH) in held or (WIDTH, WIDE) in held


def test_rows_are_read_behind_the_fence_of_their_stage(planned: Any) -> None:
    """No row passes a barrier; each stage reads those that it needs at an index that has passed its own."""
    iteration = body(planned[-1])
    index = next(v for v in iteration.invars if v.aval.dtype == jnp.int32)
    there, read = (
        [index],
        [[]],
    )  # the index by the names that it has behind barriers, and the rows read at each
    for eqn in iteration.eqns:
        if eqn.primitive.name == "optimization_barrier":
            assert {a for a in eqn.invars if a in iteration.invars or a in there} == {there[-1]}
            there.append(eqn.outvars[eqn.invars.index(there[-1])])
            read.append([])
        elif eqn.params.get("name") == "dynamic_index_in_dim":
            assert eqn.invars[1] is there[-1]
            read[-1].append(eqn.outvars[0].aval.shape)
    assert len(there) >= PARTS
    assert sum((WIDTH, WIDE) in rows for rows in read) == PARTS


def test_what_is_held_waits_for_the_next_stage(planned: Any) -> None:
    """A stage reads what the one before recomputed, and handed on, behind the barrier between them."""
    found, graph, _ = planned
    stages = range(1, len(graph.stages))
    streams = [v for v in graph.residuals if graph.nodes[graph.values[v].producer].primitive == "add"]
    held = [(v, k) for v in streams for k in stages if graph.holdable(v, k)]
    schedule = close_over_dependencies(graph, (), held)
    assert schedule.kept
    iteration = body(emit(found, graph, schedule))
    made: set[Any] = set()  # what is recomputed
    behind_barrier: set[Any] = set()  # and what of that has passed a barrier
    for eqn in iteration.eqns:
        if eqn.primitive.name == "optimization_barrier":
            behind_barrier.update(v for a, v in zip(eqn.invars, eqn.outvars, strict=True) if a in made)
        elif "recompute_" in _compat.name_stack_text(eqn):
            made.update(eqn.outvars)
    again = [eqn for eqn in iteration.eqns if "recompute_" in _compat.name_stack_text(eqn)]
    assert any(behind_barrier.intersection(_compat.variables(eqn.invars)) for eqn in again)


def test_the_peak_is_that_of_one_stage(planned: Any) -> None:
    """The compiled program has no more than one stage's rows and recomputed values in memory, and the same results."""
    found, graph, closed = planned
    args = arguments()
    leaves = jax.tree.leaves(args)
    options = jaxremat.compiler_options("cpu")
    jitted = jax.jit(jex.jaxpr_as_fun(closed), donate_argnums=range(3 * PARTS), compiler_options=options)
    compiled = jitted.lower(*leaves).compile()
    predicted = simulate(graph, close_over_dependencies(graph, ())).peak_nbytes
    assert MemoryStats.of(compiled).temporaries_nbytes < 1.06 * predicted
    assert_same(jax.jit(step)(*args), jax.tree.unflatten(found.source.out_tree, jitted(*leaves)))
