"""A max-pooling in a planned function has the derivatives of JAX's own, and no index arrays."""

from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from jax.sharding import Mesh, PartitionSpec

import jaxremat
from jaxremat._emit._policy import MOST_PLACES, is_pooling, pooled_inline
from jaxremat._program import _compat

OPTIONS = jaxremat.compiler_options("cpu")


def pool(x: Any, window: Any = (1, 3, 3, 1), strides: Any = (1, 2, 2, 1), padding: Any = "SAME") -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)


def lowest(x: Any) -> Any:
    return jax.lax.reduce_window(x, jnp.inf, jax.lax.min, (1, 2, 3, 1), (1, 1, 2, 1), "VALID")


POOLS = {
    "usual": pool,
    "overlapping": partial(pool, strides=(1, 1, 1, 1)),
    "uneven": partial(
        pool, window=(1, 2, 4, 1), strides=(1, 3, 1, 1), padding=((0, 0), (2, 0), (0, 3), (0, 0))
    ),
    "apart": partial(pool, window=(1, 2, 2, 1), padding="VALID"),
    "across everything": partial(pool, window=(2, 2, 2, 2), strides=(2, 1, 1, 1)),
    "least": lowest,
}


def inputs(dtype: Any = jnp.float32) -> Any:
    """With many equal maxima."""
    return jnp.round(2 * jax.random.normal(jax.random.key(0), (4, 9, 11, 3))).astype(dtype)


def the_pooling(fn: Any, x: Any) -> Any:
    (eqn,) = (e for e in jax.make_jaxpr(fn)(x).jaxpr.eqns if e.primitive.name.startswith("reduce_window_m"))
    return eqn


def rewritten(fn: Any, x: Any) -> Any:
    eqn = the_pooling(fn, x)
    assert is_pooling(eqn)
    return lambda x: jex.jaxpr_as_fun(_compat.new_jaxpr((), (), eqn.invars, eqn.outvars, pooled_inline(eqn)))(
        x
    )[0]


@jax.jit
def random(x: Any) -> Any:
    return jax.random.normal(jax.random.key(1), x.shape)


def pulled(fn: Any, x: Any) -> Any:
    """The result and the cotangent of `x`."""

    def both(x: Any) -> Any:
        y, pull = jax.vjp(fn, x)
        return y, pull(random(y).astype(y.dtype))[0]

    return jax.jit(both)(x)


@pytest.mark.parametrize("name", POOLS)
def test_it_has_the_derivatives_of_the_original(name: str) -> None:
    x, fn = inputs(), POOLS[name]
    other = rewritten(fn, x)
    distinct = random(x)  # of equal maxima JAX's forward mode takes any
    found, expected = (jax.jit(lambda x, fn=fn: jax.jvp(fn, (x,), (x**2,)))(distinct) for fn in (other, fn))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert_close(pulled(other, x), pulled(fn, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("special", [jnp.nan, -jnp.inf, jnp.inf])
def test_numbers_that_are_none_are_chosen_as_by_the_original(special: float) -> None:
    x = inputs()
    x = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.4, x.shape), special, x)
    assert_close(pulled(rewritten(pool, x), x), pulled(pool, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_types_stay(dtype: Any) -> None:
    x = inputs(dtype)

    def small(x: Any) -> Any:
        return jax.lax.reduce_window(
            x, np.array(-np.inf, dtype), jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )

    found, expected = pulled(rewritten(small, x), x)[1], pulled(small, x)[1]
    assert found.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(found, expected)


def test_others_are_left_as_they_are() -> None:
    x = inputs()
    assert not is_pooling(the_pooling(partial(pool, window=(1, 9, 11, 3)), x))  # 297 places
    assert MOST_PLACES < 297
    spread = partial(jax.lax.reduce_window, window_dilation=(1, 2, 2, 1))
    assert not is_pooling(
        the_pooling(lambda x: spread(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID"), x)
    )


def net(x: Any, w: Any, v: Any) -> Any:
    x = jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME"))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME")
    return jnp.mean(jnp.tanh(jax.lax.conv(x, v, (1, 1), "SAME")) ** 2)


ARGS = (
    jax.random.normal(jax.random.key(4), (8, 3, 32, 32)),
    jax.random.normal(jax.random.key(5), (16, 3, 3, 3)) / 5,
    jax.random.normal(jax.random.key(6), (8, 16, 3, 3)) / 12,
)


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), found, expected)


@pytest.mark.parametrize("emit", ["policy", "custom_vjp"])
def test_a_planned_function_has_no_index_arrays(emit: str) -> None:
    def gradient(fn: Any) -> Any:
        return jax.jit(jax.grad(fn, (1, 2)), compiler_options=OPTIONS).lower(*ARGS).compile()

    planned = gradient(jaxremat.checkpoint(net, emit=emit))
    by_hand = gradient(jax.checkpoint(net))
    pooled_nbytes = 8 * 16 * 32 * 32 * 4
    assert planned.memory_analysis().temp_size_in_bytes < 5 * pooled_nbytes
    assert by_hand.memory_analysis().temp_size_in_bytes > 6 * pooled_nbytes
    close(planned(*ARGS), by_hand(*ARGS))


def second(fn: Any) -> Any:
    return lambda x, *ws: jax.grad(lambda x: jax.jvp(lambda x: fn(x, *ws), (x,), (x,))[1])(x)


def batched(fn: Any) -> Any:
    return lambda x, w, v: jax.vmap(jax.grad(fn, 1), (None, 0, None))(x, jnp.stack([w, 2 * w]), v)


def sharded(fn: Any) -> Any:
    mesh = Mesh(jax.devices()[:1], "d")
    specs = (PartitionSpec("d"), PartitionSpec(), PartitionSpec())
    part = jax.shard_map(
        lambda *args: fn(*args)[None], mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d")
    )
    return jax.grad(lambda *args: part(*args).sum(), (0, 1))


@pytest.mark.parametrize("transformed", [second, batched, sharded])
def test_it_works_under_every_transformation(transformed: Any) -> None:
    found, expected = (
        jax.jit(transformed(fn), compiler_options=OPTIONS)(*ARGS)
        for fn in (jaxremat.checkpoint(net, "min"), net)
    )
    close(found, expected)
