"""Steps whose arguments' classes hold nothing but arrays: `jax.jit` can call them, and not lower them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close

import jaxremat


@partial(jax.tree_util.register_dataclass, data_fields=["scale", "count"], meta_fields=[])
@dataclass(frozen=True)
class LossScale:
    scale: Any
    count: Any

    def __post_init__(self) -> None:
        for each in (self.scale, self.count):
            if not isinstance(each, jax.Array | np.ndarray):
                raise TypeError(f"a {type(each).__name__} is not an array")


@partial(jax.tree_util.register_dataclass, data_fields=["scale", "count"], meta_fields=[])
@dataclass(frozen=True)
class OtherScale(LossScale):
    """Of the same leaves, and another class."""


def _step(state: dict[str, Any], x: jax.Array, *, power: int = 2) -> tuple[dict[str, Any], jax.Array]:
    def loss_fn(weights: list[jax.Array]) -> jax.Array:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w) + jnp.sin(h)
        return (h**power).mean() * state["loss"].scale

    loss, gradients = jax.value_and_grad(loss_fn)(state["weights"])
    weights = [w - 0.1 * g / state["loss"].scale for w, g in zip(state["weights"], gradients, strict=True)]
    return {"weights": weights, "loss": type(state["loss"])(loss * 2, state["loss"].count + 1)}, loss


def _args(of: type[LossScale] = LossScale) -> tuple[dict[str, Any], jax.Array]:
    weights = [jax.random.normal(k, (32, 32)) * 0.2 for k in jax.random.split(jax.random.key(0), 6)]
    return {"weights": weights, "loss": of(jnp.float32(8.0), jnp.int32(0))}, jnp.ones((2048, 32))


def test_jit_cannot_lower_it() -> None:
    with pytest.raises(TypeError, match="is not an array"):
        jax.jit(_step).lower(*_args())


def test_budget_and_results() -> None:
    step = jaxremat.optimize("50% of temporaries", donate_argnums=0, allow=())(_step)
    expected = jax.jit(_step)(*_args())
    for _ in range(2):  # the second time by the compiled step
        found = step(*_args())
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert_close(found, expected, rtol=1e-5, atol=1e-7)
    plan = step.plan(*_args())
    assert not plan.drops_nothing
    assert plan.peak_nbytes <= plan.budget_nbytes
    assert step.compile(*_args()).memory_analysis().temp_size_in_bytes <= plan.budget_nbytes


def test_structures_with_the_same_leaves_are_told_apart() -> None:
    step = jaxremat.optimize("1GiB")(_step)
    for of in (LossScale, OtherScale, LossScale):
        assert type(step(*_args(of))[0]["loss"]) is of


def test_static_and_named_arguments() -> None:
    step = jaxremat.optimize("1GiB", static_argnames="power")(_step)
    state, x = _args()
    for power in (2, 4):
        found, expected = (
            step(state, x=x, power=power),
            jax.jit(_step, static_argnames="power")(state, x, power=power),
        )
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


def test_sweep_and_compare() -> None:
    assert jaxremat.compare(jaxremat.optimize("50% of temporaries")(_step), *_args()).agrees
    planning = jaxremat.Planning(solver=jaxremat.Greedy(), verify=False)
    frontier = jaxremat.sweep(_step, *_args(), points=2, donate_argnums=0, planning=planning)
    assert len(frontier.points) >= 2


def test_what_the_users_code_raises_is_the_users() -> None:
    def fails(state: dict[str, Any], x: jax.Array) -> Any:
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        jaxremat.optimize("1GiB")(fails)(*_args())
