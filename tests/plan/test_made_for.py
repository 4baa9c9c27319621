"""What a plan was made for, and how what it is followed with differs, is said by name."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from forms import of_levels
from jax import lax

import jaxremat
from jaxremat import PlanMismatchError
from jaxremat._plan._plan import MadeFor


def train(params: dict[str, jax.Array], x: jax.Array, power: int = 2) -> dict[str, jax.Array]:
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** power))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


ARGS = {"w": jnp.ones((8, 8))}, jnp.ones((4, 8))


@pytest.fixture(scope="module")
def plan() -> jaxremat.Plan:
    return jaxremat.optimize("1GiB", static_argnames="power")(train).plan(*ARGS, power=2)


def refused(plan: jaxremat.Plan, step: jaxremat.Step, *args: object, **kwargs: object) -> str:
    with pytest.raises(PlanMismatchError) as caught:
        step.plan(*args, **kwargs)
    return str(caught.value)


def test_each_difference_is_named(plan: jaxremat.Plan) -> None:
    def step(**options: object) -> jaxremat.Step:
        return jaxremat.optimize(plan=plan, static_argnames="power", **options)(train)  # type: ignore[arg-type]

    wider = refused(plan, step(), ARGS[0], jnp.ones((6, 8)), power=2)
    assert "argument 1 was float32[4,8] and is float32[6,8]" in wider
    assert "argument 0" not in wider
    assert "static argument power was 2 and is 3" in refused(plan, step(), *ARGS, power=3)
    assert "argument 0['w'] was not donated and is" in refused(plan, step(donate_argnums=0), *ARGS, power=2)


def test_another_program_is_said_to_be_one(plan: jaxremat.Plan) -> None:
    def other(params: dict[str, jax.Array], x: jax.Array, power: int = 2) -> dict[str, jax.Array]:
        return jax.tree.map(jnp.sin, train(params, x, power))

    step = jaxremat.optimize(plan=plan, static_argnames="power")(other)
    assert "its code differs" in refused(plan, step, *ARGS, power=2)


@pytest.mark.parametrize("levels", [(4,), (3, -3)])
def test_a_loop_in_parts_of_an_earlier_version_is_refused(levels: tuple[int, ...]) -> None:
    def scanned(params: jax.Array, x: jax.Array) -> jax.Array:
        def loss(params: jax.Array) -> jax.Array:
            return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    args = jnp.ones((6, 8, 8)), jnp.ones((1024, 8))
    made = jaxremat.optimize("min", allow=())(scanned).plan(*args)
    step = jaxremat.optimize(plan=replace(made, form=of_levels(levels)))(scanned)
    assert "splits a loop into separately planned parts" in refused(made, step, *args)


def test_versions_meshes_and_many_arguments() -> None:
    arguments = tuple((f"0[{i}]", "float32[8]") for i in range(9))
    before = MadeFor("0.10.1", "data=8", arguments, (), ())
    now = replace(before, jax="0.10.2", mesh="", arguments=tuple((p, "bfloat16[8]") for p, _ in arguments))
    jax_said, mesh, *types = before.differences(now)
    assert jax_said == "jax was 0.10.1 and is 0.10.2"
    assert mesh == "the mesh was data=8 and is none"
    assert types[0] == "argument 0[0] was float32[8] and is bfloat16[8]"
    assert types[-1] == "and 6 more"
    assert before.differences(before) == []


def test_plans_of_before_are_followed_and_refused_as_then(plan: jaxremat.Plan) -> None:
    old = replace(plan, made_for=None)
    step = jaxremat.optimize(plan=old, static_argnames="power")(train)
    assert step.plan(*ARGS, power=2).fingerprint == plan.fingerprint
    assert "its static or donated arguments" in refused(old, step, *ARGS, power=3)
