"""The whole zoo with its losses under `checkpoint`, by each emitter: what the steps compute stays what it was."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import assert_same
from jax import lax
from zoo import BY_NAME, Case
from zoo_calls import CALLS
from zoo_checkpoints import CHECKPOINTS
from zoo_loops import LOOPS

import jaxremat

EMITTERS = ("policy", "custom_vjp")
CASES: dict[str, Case] = {
    f"{kind}: {name}": case
    for kind, cases in {"step": BY_NAME, "loop": LOOPS, "call": CALLS, "checkpoint": CHECKPOINTS}.items()
    for name, case in cases.items()
}
NOT_BATCHED = {"call: callback", "call: foreign function", "call: foreign function with effects"}
"""Their plain steps, too, know no `vmap`."""
QUICK = {
    ("step: transformer", "jit", "policy"),
    ("step: masks", "batched in a loop", "custom_vjp"),
    ("loop: constants", "batched in a loop", "policy"),
    ("loop: constants", "jit", "custom_vjp"),
    ("call: cond", "jit", "policy"),
}


OPTIONS = jaxremat.compiler_options("cpu")


def jitted(step: Callable[..., Any]) -> Any:
    """What it is in practice."""
    return jax.jit(step, compiler_options=OPTIONS)


def looped(step: Callable[..., Any]) -> Any:
    """Two steps in a row, each from the state that the one before left."""

    def both(state: Any, *rest: Any) -> Any:
        def once(state: Any, _: None) -> Any:
            state, *others = step(state, *rest)
            return state, others

        return lax.scan(once, state, None, length=2)

    return jitted(both)


def batched(step: Callable[..., Any]) -> Any:
    """Two states and batches at a time."""
    return looped(jax.vmap(step))


def two(a: jax.Array) -> jax.Array:
    """An array, and another one beside it."""
    return jnp.stack([a, 0.9 * a if jnp.issubdtype(a.dtype, jnp.floating) else a])


def result_of(name: str, transformation: str) -> Any:
    """What the step computes under a transformation."""
    case = CASES[name]
    args = case.make_args()
    traced_before = inspect.unwrap(case.step)  # some are jitted, and would not be traced again

    def step(*args: Any) -> Any:
        return traced_before(*args)

    if transformation == "jit":
        return jitted(step)(*args)
    if name in NOT_BATCHED:
        return looped(step)(*args)
    return batched(step)(*jax.tree.map(two, args))


expected = cache(result_of)


@pytest.mark.parametrize(
    ("name", "transformation", "emit"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for name in CASES
        for transformation in ("jit", "batched in a loop")
        for each in ((name, transformation, emit) for emit in EMITTERS)
    ],
)
def test_gradients_are_the_plain_ones(
    name: str, transformation: str, emit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected(name, transformation)
    planned: list[jaxremat.Checkpointed] = []
    differentiate = jax.value_and_grad

    def of_planned(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        planned.append(
            jaxremat.checkpoint(fn, "min", emit=emit, planning=jaxremat.Planning(solver=jaxremat.MinCut()))
        )
        return differentiate(planned[-1], *args, **options)

    monkeypatch.setattr(jax, "value_and_grad", of_planned)
    assert_same(want, result_of(name, transformation), rounding=1e-4)
    assert planned
