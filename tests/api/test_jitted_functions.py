"""A jitted function hands `optimize` what `jax.jit` was given with it, or is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import assert_same
from jax.sharding import NamedSharding, PartitionSpec

import jaxremat
from jaxremat import ArgumentError, MinCut

P, X = jnp.eye(16) + 0.1, jnp.ones((32, 16)) / 16
planning = jaxremat.Planning(solver=MinCut(), verify=False)
optimize = partial(jaxremat.optimize, "1GiB", planning=planning)


def step(p: jax.Array, x: jax.Array, layers: int = 4) -> Any:
    def loss(p: jax.Array) -> jax.Array:
        h = x
        for _ in range(layers):
            h = jnp.tanh(h @ p)
        return (h**2).mean()

    value, gradient = jax.value_and_grad(loss)(p)
    return p - gradient, value


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": "p"}], ids=str)
def test_donation_is_handed_over(options: Any) -> None:
    own = optimize()(jax.jit(step, **options))
    p = P + 0
    want = jax.jit(step)(P, X)
    assert_same(want, own(p, X))
    assert p.is_deleted()


def test_static_arguments_are_handed_over() -> None:
    own = optimize()(jax.jit(step, static_argnames="layers"))
    for layers in (2, 3):
        assert_same(jax.jit(step, static_argnums=2)(P, X, layers), own(P, X, layers=layers))


def test_shardings_and_options_are_handed_over() -> None:
    sharding = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec("x"))
    jitted = jax.jit(
        step,
        in_shardings=sharding,
        out_shardings=(None, None),
        compiler_options={"xla_embed_ir_in_executable": True},
    )
    own = optimize()(jitted)
    made, _ = own.compile(P, X).input_shardings
    assert made[0].is_equivalent_to(sharding, 2)
    assert_same(jitted(P, X), own(P, X))
    options = dict(own._program.compiler_options)
    assert options["xla_embed_ir_in_executable"]


def test_what_is_said_twice_alike_is_taken() -> None:
    own = optimize(donate_argnums=0, static_argnums=2)(jax.jit(step, donate_argnums=0))
    p = P + 0
    own(p, X, 2)
    assert p.is_deleted()


def test_contradictions_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"`donate_argnums=1`.*jitted with `donate_argnums=\(0,\)`"):
        optimize(donate_argnums=1)(jax.jit(step, donate_argnums=0))


def test_options_of_an_inner_function_are_refused() -> None:
    with pytest.raises(ArgumentError, match="partial of a function that is jitted with `donate_argnums`"):
        optimize()(partial(jax.jit(step, donate_argnums=0), P))

    class Model:
        @partial(jax.jit, static_argnums=0, donate_argnums=1)
        def donating(self, p: jax.Array) -> Any:
            return step(p, X)

        @partial(jax.jit, static_argnums=0)
        def plain(self, p: jax.Array) -> Any:
            return step(p, X)

    with pytest.raises(ArgumentError, match="method of a function that is jitted with `donate_argnums`"):
        optimize()(Model().donating)
    assert_same(Model().plain(P), optimize()(Model().plain)(P))


def test_a_function_that_is_wrapped_as_a_jitted_one_is_itself() -> None:
    """`functools.wraps` copies all attributes of a jitted function."""
    from functools import wraps

    jitted = jax.jit(step, static_argnums=2)

    @wraps(jitted)
    def doubled(p: jax.Array, x: jax.Array) -> Any:
        return jax.tree.map(lambda a: 2 * a, jitted(p, x, 2))

    assert_same(jax.jit(lambda p, x: doubled(p, x))(P, X), optimize()(doubled)(P, X))


def test_a_python_number_that_decides_is_named() -> None:
    def deciding(p: jax.Array, x: jax.Array, layers: int, doubled: bool = False) -> Any:
        return step(p, 2 * x if doubled else x, layers)

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        optimize(static_argnums=2)(deciding)(P, X, 2, doubled=True)
    assert any(
        "`doubled` is True" in note and "static_argnames='doubled'" in note for note in caught.value.__notes__
    )
    with pytest.raises(jax.errors.TracerIntegerConversionError) as counted:
        optimize()(step)(P, X, 2)
    assert any("`layers` is 2" in note for note in counted.value.__notes__)
    assert_same(
        jax.jit(step)(P, 2 * X), optimize(static_argnames=("layers", "doubled"))(deciding)(P, X, 4, True)
    )
