"""`jaxremat.flax.remat` changes what a module keeps for its backward pass, and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from flax import linen as nn
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals

import jaxremat
import jaxremat.flax

x = jax.random.normal(jax.random.key(0), (64, 32))


class Block(nn.Module):
    """A block with a normalisation, dropout and statistics."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        h = nn.gelu(nn.Dense(64)(x))
        h = nn.BatchNorm(use_running_average=not train)(h)
        return x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(32)(jnp.tanh(h)))


class Net(nn.Module):
    """Three blocks."""

    block: Any = Block

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        for i in range(3):
            x = self.block(name=f"block_{i}")(x, train)
        return x


def loss_of(net: nn.Module) -> Any:
    def loss(params: Any, rest: Any, x: Any) -> Any:
        key = {"dropout": jax.random.key(3)}
        y, updated = net.apply({"params": params, **rest}, x, rngs=key, mutable=["batch_stats"])
        return jnp.mean(y**2), updated

    return loss


def kept_nbytes(fn: Any, *args: Any) -> int:
    avals: list[Any] = [a for a, where in saved_residuals(fn, *args) if not where.startswith("from")]
    return sum(a.size * a.dtype.itemsize for a in avals)


def test_unnamed_linen_modules_are_called_as_without_it() -> None:
    class Unnamed(nn.Module):
        block: Any = Block

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return self.block()(self.block()(x, False), False)

    plain, planned = Unnamed(), Unnamed(jaxremat.flax.remat(Block, static_argnums=2))
    variables = plain.init(jax.random.key(1), x)
    found, expected = (jnp.asarray(net.apply(variables, x)) for net in (planned, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(planned.init(jax.random.key(1), x)) == jax.tree.structure(variables)


def test_a_flag_that_is_not_static_is_named() -> None:
    net = Net(jaxremat.flax.remat(Block))
    variables = Net().init(jax.random.key(1), x)
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        net.apply(variables, x)
    said = "`train` is True: an argument that Python code branches on must be static. Write `flax.remat("
    assert any(note == f"{said}..., static_argnums=2)`." for note in error.value.__notes__)


@pytest.mark.parametrize("emit", ["policy", "custom_vjp"])
def test_linen_modules_keep_their_names_results_and_statistics(emit: str) -> None:
    plain = Net()
    planned = Net(jaxremat.flax.remat(Block, "min", static_argnums=2, emit=emit))
    variables = plain.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)
    ours = planned.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)
    assert jax.tree.structure(variables) == jax.tree.structure(ours)
    params = variables["params"]
    rest = {"batch_stats": variables["batch_stats"]}
    expected = jax.jit(jax.value_and_grad(loss_of(plain), has_aux=True))(params, rest, x)
    options = jaxremat.compiler_options()
    step = jax.jit(jax.value_and_grad(loss_of(planned), has_aux=True), compiler_options=options)
    found = step(params, rest, x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(found, expected, rtol=1e-3, atol=1e-6)

    def value(net: nn.Module) -> Any:
        return lambda params: loss_of(net)(params, rest, x)[0]

    assert kept_nbytes(value(planned), params) < 0.5 * kept_nbytes(value(plain), params)


def test_methods_of_linen_modules() -> None:
    class Small(nn.Module):
        @jaxremat.flax.remat
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(nn.Dense(8)(jnp.tanh(nn.Dense(64)(x))))

    net = Small()
    params = net.init(jax.random.key(0), x)
    grads = jax.grad(lambda p: jnp.sum(net.apply(p, x)))(params)  # type: ignore[arg-type]
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


class Part(nnx.Module):
    """A block with statistics and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """As the plain block."""
        return x + self.second(self.dropout(jnp.tanh(self.norm(nnx.gelu(self.first(x))))))


@pytest.mark.parametrize("emit", ["policy", "custom_vjp"])
def test_nnx_modules_are_updated_as_they_are_plainly(emit: str) -> None:
    def run(cls: Any) -> Any:
        module = cls(nnx.Rngs(0, dropout=1))

        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(m(x)) ** 2))(module)
        return loss, nnx.state(grads), nnx.state(module)

    expected, found = run(Part), run(jaxremat.flax.remat(Part, "min", emit=emit))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_other_things_are_refused() -> None:
    with pytest.raises(jaxremat.ArgumentError, match="Flax module class"):
        jaxremat.flax.remat(dict)
    with pytest.raises(jaxremat.ArgumentError, match="Flax module class"):
        jaxremat.flax.remat("Block")
    with pytest.raises(jaxremat.ArgumentError, match="given a Dense, which is already a module"):
        jaxremat.flax.remat(nn.Dense(3))
