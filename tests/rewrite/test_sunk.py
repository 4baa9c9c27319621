"""What grows out of little is made by iterations of loops that are not inlined, and stands in no memory before them."""

from dataclasses import replace
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
from jaxremat._model._variant import ATTENTION, Choice
from jaxremat._program import _compat
from jaxremat._program._compat import shaped
from jaxremat._program._primitives import inner_eqns
from jaxremat._runtime._mechanisms import switched_off

HEADS, LENGTH, DEPTH = 8, 32, 16
SCORES = (HEADS, LENGTH, LENGTH)
LEVELS = of_levels((2, LAYERS // 2))


def attend(x: jax.Array, w: jax.Array) -> jax.Array:
    """Causal attention of an array [heads, length, depth]."""
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    scores = jnp.where(seen, (x @ w) @ x.swapaxes(1, 2), jnp.finfo(x.dtype).min)
    return x + jax.nn.softmax(scores) @ x


def loss(layers: jax.Array, batch: Any) -> jax.Array:
    x, _ = lax.scan(lambda x, w: (attend(x, w), None), batch, layers)
    return jnp.mean(x**2)


def make_args() -> tuple[Any, Any]:
    return DEPTH**-0.5 * _normal((LAYERS, DEPTH, DEPTH), 1), _normal((HEADS, LENGTH, DEPTH), 2)


CASE = Case("attention", _sgd(loss), make_args)


def constants(scan: Any) -> list[tuple[int, ...]]:
    """Shapes of what a scan reads as it is in every iteration."""
    return [a.aval.shape for a in scan.invars[: _compat.scan_counts(scan)[0]]]


def test_masks_are_made_by_iterations_of_loops_in_levels() -> None:
    """Of their scans the outermost of the forward pass is not inlined, and read masks like any operand."""
    plain = traced(CASE)
    found = plain.in_form(LEVELS)
    assert found.loops
    outside = [e for e, loop in zip(found.jaxpr.jaxpr.eqns, found.loop_of, strict=True) if loop < 0]
    assert not any(v.aval.shape == SCORES for eqn in outside for v in eqn.outvars)
    graph = lower(found, CPU, base_nbytes=0)
    planned = emit(found, graph, close_over_dependencies(graph, ()))
    assert not any({SCORES, SCORES[1:]} & set(constants(scan)) for scan in scans(planned))
    assert_computes(planned, CASE.step, CASE.make_args())


def test_attention_reads_no_mask_in_levels() -> None:
    """The mask is made where its rows are read, so that nothing is as large as the scores."""
    plain = traced(CASE)
    form = replace(LEVELS, choices=(*LEVELS.choices, Choice(ATTENTION, 0, (1,))))

    def made() -> set[tuple[int, ...]]:
        eqns = plain.in_form(form).jaxpr.jaxpr.eqns
        return {shaped(v).shape[-3:] for eqn in eqns for e in (eqn, *inner_eqns(eqn)) for v in e.outvars}

    assert SCORES not in made()
    with switched_off("sinking into loops"):
        assert SCORES in made()
