"""Operations that hold others are saved or recomputed whole, and hand over no more than the plan wants."""

from typing import Any

import jax.extend.core as jex
import pytest
from test_checkpoints import counts
from test_loops import CPU, LITTLE, check_budget, traced
from test_trace import runnable
from zoo_calls import CALLS

from jaxremat import complete
from jaxremat._emit import emit
from jaxremat._lower import lower

HOLDING = {"cond": "cond", "switch": "cond", "cond in cond": "cond", "shard_map": "shard_map"}


def emitted(name: str, saving: bool) -> jex.ClosedJaxpr:
    """The step that saves everything, or as little as may be."""
    found = traced(CALLS[name])
    graph = lower(found, CPU, base_nbytes=0)
    return emit(found, graph, complete(graph, graph.residuals if saving else ()))


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


def test_nothing_unread_is_left() -> None:
    closed = emitted("switch", saving=False)
    read = {a for eqn in closed.jaxpr.eqns for a in eqn.invars if not isinstance(a, jex.Literal)}
    read.update(a for a in closed.jaxpr.outvars if not isinstance(a, jex.Literal))
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "cond":
            assert all(v in read for v in eqn.outvars)


def test_callbacks_are_never_repeated() -> None:
    found = traced(CALLS["callback"])
    plain = counts(runnable(found).jaxpr)["pure_callback"]
    assert plain == 6
    assert counts(emitted("callback", saving=False).jaxpr)["pure_callback"] == plain


@pytest.mark.parametrize("name", ["while", "pallas", "custom rule with a loop"])
def test_what_cannot_be_opened_is_repeated_whole(name: str) -> None:
    """A plan that saves everything has as many as the step, one that saves little has more."""
    primitive = {"while": "while", "pallas": "pallas_call"}.get(name, "scan")
    saved, least = (counts(emitted(name, saving).jaxpr)[primitive] for saving in (True, False))
    assert saved == counts(runnable(traced(CALLS[name])).jaxpr)[primitive]
    assert least > saved


@pytest.mark.parametrize("name", ["cond", "switch in loop", "shard_map", "callback"])
def test_half_the_memory(name: str) -> None:
    if name not in LITTLE:
        check_budget(CALLS[name], 0.6)


OPEN = pytest.mark.xfail(strict=True, reason="a fence lets a variable pass before it is made")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=OPEN) if name == "custom rule with a loop" else name for name in CALLS],
)
def test_the_least_memory(name: str) -> None:
    check_budget(CALLS[name], None)
