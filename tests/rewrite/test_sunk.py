"""What grows out of little is made by each iteration that reads it, and stands in no memory before the loop."""

from typing import Any

import jax
import jax.numpy as jnp
from comparing import assert_computes
from forms import of_levels
from jax import lax
from test_loops import CPU, scans, traced
from zoo import Case, _normal, _sgd
from zoo_loops import LAYERS

from jaxremat import close_over_dependencies
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._program import _compat
from jaxremat._rewrite._sinking import grows, sunk_values

HEADS, LENGTH, DEPTH = 8, 32, 16
SCORES = (HEADS, LENGTH, LENGTH)


def attend(x: jax.Array, w: jax.Array, filled: jax.Array) -> jax.Array:
    """Causal attention of an array [heads, length, depth]; `filled` is added as a matrix product's operand."""
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    scores = jnp.where(seen, (x @ w) @ x.swapaxes(1, 2), jnp.finfo(x.dtype).min)
    return x + jax.nn.softmax(scores) @ x + filled @ w


def loss(params: Any, batch: Any) -> jax.Array:
    filled = jnp.full((HEADS, LENGTH, DEPTH), params["fill"])
    x, _ = lax.scan(lambda x, w: (attend(x, w, filled), None), batch, params["layers"])
    return jnp.mean(x**2)


def make_args() -> tuple[Any, Any]:
    layers = DEPTH**-0.5 * _normal((LAYERS, DEPTH, DEPTH), 1)
    return {"layers": layers, "fill": jnp.float32(0.1)}, _normal((HEADS, LENGTH, DEPTH), 2)


CASE = Case("attention", _sgd(loss), make_args)


def constants(scan: Any) -> list[tuple[int, ...]]:
    """Shapes of what a scan reads as it is in every iteration."""
    return [a.aval.shape for a in scan.invars[: _compat.scan_counts(scan)[0]]]


def test_masks_are_made_by_the_iterations_that_read_them() -> None:
    found = traced(CASE)
    assert any(SCORES in constants(scan) for scan in scans(found.closed))  # what JAX makes of it
    graph = lower(found, CPU, base_nbytes=0)
    for saved in ((), graph.residuals):
        planned = emit(found, graph, close_over_dependencies(graph, saved))
        assert scans(planned)
        assert not any({SCORES, SCORES[1:]} & set(constants(scan)) for scan in scans(planned))
        assert_computes(planned, CASE.step, CASE.make_args())


def test_masks_are_made_by_iterations_of_loops_in_levels() -> None:
    """Of their scans the outermost of the forward pass is not inlined, and read masks like any operand."""
    plain = traced(CASE)
    found = plain.in_form(of_levels((2, LAYERS // 2)))
    assert found.loops
    outside = [e for e, loop in zip(found.jaxpr.jaxpr.eqns, found.loop_of, strict=True) if loop < 0]
    assert not any(v.aval.shape == SCORES for eqn in outside for v in eqn.outvars)
    graph = lower(found, CPU, base_nbytes=0)
    planned = emit(found, graph, close_over_dependencies(graph, ()))
    assert not any({SCORES, SCORES[1:]} & set(constants(scan)) for scan in scans(planned))
    assert_computes(planned, CASE.step, CASE.make_args())


def test_what_a_product_reads_is_made_once() -> None:
    found = traced(CASE)
    eqns = found.jaxpr.jaxpr.eqns
    outside = {e.outvars[0] for e, loop in zip(eqns, found.loop_of, strict=True) if loop < 0 and grows(e)}
    sunk = sunk_values(eqns, found.loop_of, found.loops)
    assert {v.aval.shape for v in sunk} >= {SCORES}
    assert (HEADS, LENGTH, DEPTH) in {v.aval.shape for v in outside - sunk}


def test_they_take_no_memory_and_nothing_saves_them() -> None:
    found = traced(CASE)
    graph = lower(found, CPU, base_nbytes=0)
    sunk = sunk_values(found.jaxpr.jaxpr.eqns, found.loop_of, found.loops)
    made = {e.outvars[0]: n.outputs[0] for e, n in zip(found.jaxpr.jaxpr.eqns, graph.nodes, strict=True)}
    assert sunk
    assert not any(graph.values[made[v]].materialised for v in sunk)
    assert not {made[v] for v in sunk} & set(graph.residuals)
