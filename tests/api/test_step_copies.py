"""Steps are pickled and copied, before and after calls: plans go along, and nothing is solved again."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import assert_same

import jaxremat
from jaxremat import Graph, MinCut, Solution

P, X = jnp.eye(16) + 0.1, jnp.ones((32, 16)) / 16
SOLVED: list[int] = []


class Counting:
    """A solver that counts how often it is asked, in this process."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        SOLVED.append(1)
        return MinCut().solve(graph, budget_nbytes, time_limit=time_limit)


def function(p: jax.Array, x: jax.Array) -> Any:
    def loss(p: jax.Array) -> jax.Array:
        h = x
        for _ in range(4):
            h = jnp.tanh(h @ p) + jnp.sin(h)
        return (h**2).mean()

    return jax.value_and_grad(loss)(p)


def planned(fn: Callable[..., Any]) -> jaxremat.Step:
    return jaxremat.optimize("min", planning=jaxremat.Planning(solver=Counting()))(fn)


@planned
def decorated(p: jax.Array, x: jax.Array) -> Any:
    return function(p, x)


def pickled(step: Any) -> Any:
    return pickle.loads(pickle.dumps(step))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_copies_follow_the_plan(copied: Callable[[Any], Any]) -> None:
    step = planned(function)
    early = copied(step)
    assert isinstance(early, jaxremat.Step) and early is not step
    want = step(P, X)
    assert_same(want, early(P, X))
    SOLVED.clear()
    late = copied(step)
    assert_same(want, late(P, X))
    assert not SOLVED
    assert late.plan(P, X).fingerprint == step.plan(P, X).fingerprint
    assert late.plan(P, X).saved == step.plan(P, X).saved
    late(P, X[:16])  # and plans for other arguments
    assert SOLVED


def test_a_decorated_step_is_found_by_its_name() -> None:
    decorated(P, X)
    assert pickled(decorated) is decorated
    again = copy.deepcopy(decorated)
    assert again is not decorated
    assert_same(decorated(P, X), again(P, X))


def test_plans_of_a_decorated_step_go_along() -> None:
    """As into another process, where it has made none."""
    want = decorated(P, X)
    text = pickle.dumps(decorated)
    decorated._planned.clear()
    decorated._recent = None
    SOLVED.clear()
    assert_same(want, pickle.loads(text)(P, X))
    assert not SOLVED


def test_what_cannot_be_pickled_says_so_itself() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(planned(lambda p, x: function(p, x)))
