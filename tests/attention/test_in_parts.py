"""Steps without the matrix of scores of their attention: the same numbers, of a fraction of the memory."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import BATCH, FOUND, HEADS, LENGTH, SHORT, Attend, assert_close, attending, masked
from test_trace import runnable

from jaxremat._attention._operations import division, is_attention
from jaxremat._model._form import ATTENTION, Choice, Form
from jaxremat._rewrite._trace import Traced, trace

IN_PARTS = Form.of(Choice(ATTENTION, 0, (1,)))


def in_parts(step: Any, *args: Any) -> Traced:
    """The step with attention in parts."""
    return trace(jax.jit(step), args, {}).in_form(IN_PARTS)


@pytest.mark.parametrize("attend", FOUND.values(), ids=FOUND)
def test_the_same_numbers(attend: Attend) -> None:
    scanned = attend not in (FOUND["plain"], FOUND["grouped"], FOUND["dropout"])
    case = attending(attend, layers=2, scanned=scanned)
    changed = in_parts(case.step, *case.args)
    done = [eqn for eqn in changed.jaxpr.jaxpr.eqns if is_attention(eqn)]
    assert len(done) == (2 if scanned else 4)
    (pattern,) = {eqn.params["pattern"] for eqn in done}  # layers, forward and backward are alike
    axis, count = division(pattern)
    assert axis != pattern.key
    assert count > 1
    assert pattern.sizes[axis] % count == 0
    wanted = jax.jit(case.step)(*case.args)
    found = jax.jit(jex.jaxpr_as_fun(runnable(changed)))(*jax.tree.leaves(case.args))
    assert_close(found, jax.tree.leaves(wanted), 5e-2 if attend in SHORT else 2e-5)


@pytest.mark.parametrize("attend", FOUND.values(), ids=FOUND)
def test_no_value_is_as_large_as_the_scores(attend: Attend) -> None:
    """But for what dropout makes of random words, and what is made of places alone."""
    case = attending(attend)
    plain = trace(jax.jit(case.step), case.args, {})
    changed = plain.in_form(IN_PARTS)
    keys = LENGTH // 2 if attend is FOUND["crossed"] else LENGTH
    large = [
        [
            v
            for eqn in traced.jaxpr.jaxpr.eqns
            for v in eqn.outvars
            if v.aval.size >= BATCH * HEADS * keys * LENGTH and jnp.issubdtype(v.aval.dtype, jnp.floating)
        ]
        for traced in (plain, changed)
    ]
    assert len(large[0]) >= 8
    assert "random" in str(changed.jaxpr) or not large[1]


def test_a_row_that_sees_nothing() -> None:
    """Minus infinity everywhere is not a number, as it is in the step."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        x = jnp.where((jnp.arange(LENGTH) > 3)[:, None], x, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), v)

    case = attending(attend)
    changed = in_parts(case.step, *case.args)
    wanted = jax.jit(case.step)(*case.args)
    found = jax.jit(jex.jaxpr_as_fun(runnable(changed)))(*jax.tree.leaves(case.args))
    for got, expected in zip(found, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    assert np.isnan(found[0]).all()


def test_under_checkpoints_of_the_users() -> None:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.checkpoint(masked)(q, k, v)

    for scanned in (False, True):
        case = attending(attend, layers=2, scanned=scanned)
        changed = in_parts(case.step, *case.args)
        assert sum(map(is_attention, changed.jaxpr.jaxpr.eqns)) == (2 if scanned else 4)
        found = jax.jit(jex.jaxpr_as_fun(runnable(changed)))(*jax.tree.leaves(case.args))
        assert_close(found, jax.tree.leaves(jax.jit(case.step)(*case.args)), 2e-5)


def test_several_examples_at_once() -> None:
    """A step that is mapped over a batch of its own."""
    case = attending(masked)
    changed = in_parts(case.step, *case.args)
    run = jex.jaxpr_as_fun(runnable(changed))
    leaves = [jnp.stack([a, 2 * a]) for a in jax.tree.leaves(case.args)]
    found = jax.jit(jax.vmap(run))(*leaves)
    for i in range(2):
        assert_close([a[i] for a in found], jax.jit(run)(*(a[i] for a in leaves)), 1e-5)
