"""Pooling gradients slice by slice, or held back: the same numbers, less memory."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxremat
from jaxremat import MemoryStats
from jaxremat._rewrite._max_pool_gradient import SLICES, expands, held, sliced


def pooled(
    batch: int, window: tuple[int, ...] = (1, 3, 3, 1), padding: str = "SAME", dtype: Any = jnp.float32
) -> Any:
    """The equation of a max-pooling gradient, its operands and its closed jaxpr."""

    def pool(x: jax.Array) -> jax.Array:
        strides = tuple(min(w, 2) for w in window)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

    x = jax.random.normal(jax.random.key(0), (batch, 16, 18, 3), dtype)
    cotangent = jax.random.normal(jax.random.key(1), jax.eval_shape(pool, x).shape, dtype)
    jaxpr = jax.make_jaxpr(lambda c: jax.vjp(pool, x)[1](c)[0])(cotangent)
    (eqn,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "select_and_scatter_add")
    return eqn, (cotangent, x)


def run(eqn: Any, operands: Any, devices: int = 1) -> tuple[jax.Array, jax.Array]:
    whole = eqn.primitive.bind(*operands, **eqn.params)
    (parts,) = jex.jaxpr_as_fun(sliced(eqn, devices))(jnp.float32(0), *operands)
    return whole, parts


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("batch", [2, 3, 8, 11, 24])
def test_the_same_numbers(batch: int, padding: str, dtype: Any) -> None:
    eqn, operands = pooled(batch, padding=padding, dtype=dtype)
    assert expands(eqn)
    whole, parts = run(eqn, operands)
    assert whole.dtype == parts.dtype
    np.testing.assert_array_equal(np.asarray(whole, np.float32), np.asarray(parts, np.float32))


@pytest.mark.parametrize(("batch", "devices"), [(8, 2), (8, 4), (24, 2)])
def test_the_same_numbers_of_each_device_s_part(batch: int, devices: int) -> None:
    eqn, operands = pooled(batch)
    assert expands(eqn, devices)
    np.testing.assert_array_equal(*run(eqn, operands, devices))


def test_parts_that_are_uneven_or_single_are_not_sliced() -> None:
    eqn, _ = pooled(8)
    assert not expands(eqn, 3) and not expands(eqn, 8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("batch", [1, 6])
def test_the_same_numbers_held_back(batch: int, padding: str, dtype: Any) -> None:
    eqn, (cotangent, x) = pooled(batch, padding=padding, dtype=dtype)
    whole = eqn.primitive.bind(cotangent, -abs(x), **eqn.params)  # below what padding with zeros would choose
    (later,) = jex.jaxpr_as_fun(held(eqn))(cotangent, -abs(x))
    assert whole.dtype == later.dtype
    np.testing.assert_array_equal(np.asarray(whole, np.float32), np.asarray(later, np.float32))


def test_the_least_of_windows_held_back() -> None:
    def pool(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, jnp.inf, lax.min, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    x = jax.random.normal(jax.random.key(0), (2, 7, 8, 3))
    cotangent = jnp.ones(jax.eval_shape(pool, x).shape)
    jaxpr = jax.make_jaxpr(lambda c: jax.vjp(pool, x)[1](c)[0])(cotangent)
    (eqn,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "select_and_scatter_add")
    np.testing.assert_array_equal(
        eqn.primitive.bind(cotangent, x, **eqn.params), jex.jaxpr_as_fun(held(eqn))(cotangent, x)[0]
    )


def test_less_scratch_memory() -> None:
    eqn, operands = pooled(8 * SLICES)
    options = jaxremat.compiler_options("cpu")

    def temporaries(fn: Any, *args: Any) -> int:
        return MemoryStats.of(jax.jit(fn).lower(*args).compile(compiler_options=options)).temporaries_nbytes

    whole = temporaries(lambda *a: eqn.primitive.bind(*a, **eqn.params), *operands)
    parts = temporaries(jex.jaxpr_as_fun(sliced(eqn)), jnp.float32(0), *operands)
    assert parts < whole / 3


def test_what_crosses_the_batch_or_is_one_example_stays_whole() -> None:
    assert not expands(pooled(1)[0])
    assert not expands(pooled(8, window=(2, 3, 3, 1))[0])
    (other,) = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns
    assert not expands(other)
