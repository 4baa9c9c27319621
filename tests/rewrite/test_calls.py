"""Operations that hold others are saved or recomputed whole, and hand over no more than the plan wants."""

from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from comparing import assert_close
from test_checkpoints import counts
from test_loops import CPU, check_budget, often, traced
from test_trace import runnable
from zoo_calls import CALLS

from jaxremat import close_over_dependencies
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Pin
from jaxremat._model._stages import uncut
from jaxremat._rewrite._trace import trace

pytestmark = pytest.mark.usefixtures("few_compilations")

HOLDING = {"cond": "cond", "switch": "cond", "shard_map": "shard_map"}


def emitted(name: str, saving: bool) -> jex.ClosedJaxpr:
    """The step that saves everything, or as little as may be."""
    found = traced(CALLS[name])
    graph = lower(found, CPU, base_nbytes=0)
    return emit(found, graph, close_over_dependencies(graph, graph.residuals if saving else ()))


def results(closed: Any, primitive: str) -> list[int]:
    """How many results each of these equations has, in order."""
    return [len(eqn.outvars) for eqn in closed.jaxpr.eqns if eqn.primitive.name == primitive]


@pytest.mark.parametrize("name", HOLDING)
def test_the_backward_pass_runs_what_was_dropped_again(name: str) -> None:
    """The forward pass hands over less then, and clones make but what is read of them."""
    saved, least = (results(emitted(name, saving), HOLDING[name]) for saving in (True, False))
    assert len(saved) == 12
    assert len(least) > len(saved)
    assert sum(least[:6]) < sum(saved[:6])
    assert max(least[6:]) <= max(saved)


def test_a_branch_in_which_numbers_choose_another_runs_once() -> None:
    """Results of two runs might be of two choices."""
    saved, least = (results(emitted("cond in cond", saving), "cond") for saving in (True, False))
    assert len(least) == len(saved) == 12


def test_nothing_unread_is_left() -> None:
    closed = emitted("switch", saving=False)
    read = {a for eqn in closed.jaxpr.eqns for a in eqn.invars if not isinstance(a, jex.Literal)}
    read.update(a for a in closed.jaxpr.outvars if not isinstance(a, jex.Literal))
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "cond":
            assert all(v in read for v in eqn.outvars)


@pytest.mark.parametrize(
    ("name", "primitive"), [("callback", "pure_callback"), ("foreign function with effects", "ffi_call")]
)
def test_what_has_effects_is_never_repeated(name: str, primitive: str) -> None:
    plain = counts(runnable(traced(CALLS[name])).jaxpr)[primitive]
    assert plain == 6
    assert counts(emitted(name, saving=False).jaxpr)[primitive] == plain


@pytest.mark.parametrize("name", ["while", "pallas", "foreign function", "custom rule with a loop"])
def test_what_cannot_be_opened_is_repeated_whole(name: str) -> None:
    """A plan that saves everything has as many as the step, one that saves little has more."""
    known = {"while": "while", "pallas": "pallas_call", "foreign function": "ffi_call"}
    primitive = known.get(name, "scan")
    saved, least = (counts(emitted(name, saving).jaxpr)[primitive] for saving in (True, False))
    assert saved == counts(runnable(traced(CALLS[name])).jaxpr)[primitive]
    assert least > saved


@pytest.mark.parametrize(
    "name", often(["cond", "switch in loop", "shard_map", "callback"], {"switch in loop"})
)
def test_half_the_memory(name: str) -> None:
    check_budget(CALLS[name], 0.6)


def test_what_waits_for_a_fence_is_read_behind_it() -> None:
    """A stage of its own for each contraction cuts softmax's gradients off from the sums that finish before."""
    found = traced(CALLS["custom rule with a loop"])
    graph = lower(found, CPU, base_nbytes=0)
    late = graph.nodes[graph.forward_stop + 1 :]
    pinned = replace(graph, pins=tuple(Pin("stage", n.id, "") for n in late if n.contraction))
    cut = replace(pinned, stages=uncut(pinned))
    assert any(stage.deferred for stage in cut.stages)
    emit(found, cut, close_over_dependencies(cut, ()))  # which checks that all is made before it is read


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_least_memory(name: str) -> None:
    check_budget(CALLS[name], None)


def test_branches_that_are_sure_to_be_taken_are_looked_into() -> None:
    """`jnp.diag` chooses by platform between two ways, the first of which is for kernels on a TPU alone."""

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            h = x
            for w in weights:
                h = jax.lax.cond(True, jnp.tanh, jnp.sin, h @ w)
            return -jnp.diag(jax.nn.log_softmax(h @ h.T)).mean()

        return jax.value_and_grad(loss)(weights)

    args = [jnp.ones((16, 16))] * 3, jnp.ones((16, 16))
    found = trace(jax.jit(step), args, {})
    names = {eqn.primitive.name for eqn in found.jaxpr.jaxpr.eqns}
    assert names.isdisjoint({"cond", "platform_index", "sin"})
    assert {"gather", "tanh"} <= names
    assert_close(step(*args), jex.jaxpr_as_fun(runnable(found))(*jax.tree.leaves(args)), rtol=1e-6)


def test_a_choice_by_platform_stays_one() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    found = trace(jax.jit(step), (jnp.ones(3),), {})
    assert "cond" in {eqn.primitive.name for eqn in found.jaxpr.jaxpr.eqns}
