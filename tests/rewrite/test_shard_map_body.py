"""A step in a `shard_map` is planned as the program of one device; what stands around it stays."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxremat._rewrite._fingerprint import fingerprint
from jaxremat._rewrite._trace import trace

MESH = Mesh(np.array(jax.devices()[:1]), ("data",))
W, X = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.linspace(-1, 2, 32).reshape(4, 8)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def mapped(fn: Any, checked: bool = True) -> Any:
    return jax.shard_map(fn, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=checked)


def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.pmean(jax.grad(loss)(jax.lax.pcast(w, "data", to="varying"), x), "data")


def inside(w: jax.Array, x: jax.Array) -> jax.Array:
    return mapped(lambda w, x: w - 0.1 * gradient(w, x))(w, x)


def beside(w: jax.Array, x: jax.Array) -> jax.Array:
    """The update is outside, and so is some work on the batch."""
    return w - 0.1 * jnp.clip(mapped(gradient)(w, 2.0 * x), -1, 1)


def unchecked(w: jax.Array, x: jax.Array) -> jax.Array:
    return mapped(lambda w, x: w - 0.1 * jax.lax.pmean(jax.grad(loss)(w, x), "data"), checked=False)(w, x)


def through(w: jax.Array, x: jax.Array, checked: bool = True) -> jax.Array:
    """A loss whose passes are a `shard_map` each when it is differentiated."""
    return mapped(lambda w, x: jax.lax.pmean(loss(w, x), "data"), checked=checked)(w, x)


def across(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(through)(w, x)


def across_unchecked(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(through)(w, x, False)


def across_scalars(w: jax.Array, x: jax.Array) -> jax.Array:
    """What goes back depends on what came out: the square's factor is moved inside."""
    return w - 0.1 * jax.grad(lambda w: jnp.sin(through(w, x)) ** 2)(w)


def across_arrays(w: jax.Array, x: jax.Array) -> jax.Array:
    """Not arithmetic on scalars: what each device has is reduced between the passes."""
    rows = jax.shard_map(
        lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data")
    )
    return w - 0.1 * jax.grad(lambda w: jnp.mean(rows(w, x) ** 2))(w)


def halved(w: jax.Array, x: jax.Array) -> jax.Array:
    """The backward pass of something else is outside."""
    return inside(w, x) - 0.1 * jax.grad(loss)(w, x)


@pytest.mark.parametrize("step", [inside, beside, unchecked, across, across_unchecked, across_scalars])
def test_its_body_is_the_program(step: Any) -> None:
    found = trace(jax.jit(step, donate_argnums=0), (W, X), {})
    assert found.around is not None
    assert all(eqn.primitive.name != "shard_map" for eqn in found.jaxpr.jaxpr.eqns)
    for program in (found.closed, found.flat, found.jaxpr):
        evaluate = jax.jit(jex.jaxpr_as_fun(found.step(program)))
        assert_same(jax.jit(step)(W, X), evaluate(W, X)[0])


@pytest.mark.parametrize("step", [across_arrays, halved])
def test_where_a_pass_is_outside_it_is_an_equation(step: Any) -> None:
    found = trace(jax.jit(step), (W, X), {})
    assert found.around is None
    assert any(eqn.primitive.name == "shard_map" for eqn in found.jaxpr.jaxpr.eqns)


def test_what_else_is_read_is_not_written_over() -> None:
    for step, donated in ((inside, (True, False)), (beside, (False, True))):  # `2.0 * x` is nobody else's
        assert trace(jax.jit(step, donate_argnums=0), (W, X), {}).donated == donated
    assert trace(jax.jit(inside), (W, X), {}).donated == (False, False)


def test_what_is_around_tells_steps_apart() -> None:
    def otherwise(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.2 * jnp.clip(mapped(gradient)(w, 2.0 * x), -1, 1)

    first, again, other = (
        fingerprint(trace(jax.jit(step), (W, X), {})) for step in (beside, beside, otherwise)
    )
    assert first == again != other
