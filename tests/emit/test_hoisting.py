"""What the compiler makes again in kernels that read it: on the CPU those read what has passed a barrier."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from chains import updating
from comparing import assert_same
from jax import lax

import jaxremat
from jaxremat import MemoryStats, close_over_dependencies, compiler_options
from jaxremat._compiler._devices import CPU
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._rewrite._trace import trace

LAYERS, CHANNELS = 6, 16
SHAPE = 8, CHANNELS, 32, 32


@updating
def step(weights: Any, x: jax.Array) -> Any:
    """A train step of convolutions in PyTorch's layout, each with its channels' mean and variance taken out.

    Its residuals are differences to means: a kernel that reads one may as well read the convolution's result, which is
    there in the library's layout.
    """
    y = x
    for kernel, scale in weights:
        y = lax.conv_general_dilated(y, kernel, (1, 1), "SAME")
        y = y - y.mean((0, 2, 3), keepdims=True)
        y = jax.nn.relu(scale * y / jnp.sqrt((y**2).mean((0, 2, 3), keepdims=True) + 1e-5))
    return jnp.mean(y**2)


def args() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [
        (0.1 * jax.random.normal(k, (CHANNELS, CHANNELS, 3, 3)), jnp.ones((CHANNELS, 1, 1))) for k in keys[1:]
    ]
    return weights, jax.random.normal(keys[0], SHAPE)


def check_prediction(step: Any, args: Any) -> None:
    """Of the peak of half of the temporaries; results are equal."""
    plain = jax.jit(step, donate_argnums=0).lower(*args).compile(compiler_options=compiler_options())
    stats = MemoryStats.of(plain)
    budget = stats.peak_nbytes - stats.temporaries_nbytes // 2
    planned = jaxremat.optimize(budget, donate_argnums=0, allow=())(step)
    first = planned.plan(*args).rounds[0]
    assert abs(first.predicted_peak_nbytes - first.compiled_peak_nbytes) < 0.05 * stats.temporaries_nbytes
    assert_same(plain(*jax.tree.map(jnp.copy, args)), planned(*args))


def test_what_differences_were_made_of_is_not_kept_beside_them() -> None:
    check_prediction(step, args())


@updating
def gelu_step(weights: Any, x: jax.Array) -> Any:
    """A train step whose backward pass wants an exponential of each product, which no one keeps."""
    y = x
    for up, down in weights:
        y = y + jax.nn.gelu(y @ up, approximate=False) @ down
    return jnp.mean(y**2)


def test_costly_results_within_kernels_of_both_passes_are_not_kept_for_the_later() -> None:
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    pairs = zip(keys[::2], keys[1::2], strict=True)
    weights = [
        (0.1 * jax.random.normal(k, (64, 256)), 0.1 * jax.random.normal(j, (256, 64))) for k, j in pairs
    ]
    check_prediction(gelu_step, (weights, jnp.ones((2048, 64))))


def pooled_step(weights: Any, x: jax.Array) -> Any:
    """A train step of convolutions on halved images, each of which reads a pooling of a ReLU."""

    def loss(weights: Any) -> jax.Array:
        y = x
        for kernel in weights:
            y = jax.nn.relu(lax.conv_general_dilated(y, kernel, (1, 1), "SAME"))
            y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def test_the_zeros_of_recomputed_relus_that_are_pooled_pass_their_stages_barrier() -> None:
    """XLA:CPU keeps zeros that all ReLUs of one size share from the beginning, for a pooling's kernel to read."""
    kernel, x = jnp.ones((16, 16, 3, 3)), jnp.ones((8, 16, 128, 128))
    found = trace(jax.jit(pooled_step), ([kernel] * 2, x), {})
    graph = lower(found, CPU, base_nbytes=0)
    program = emit(found, graph, close_over_dependencies(graph, ())).jaxpr
    pooled = {v for eqn in program.eqns if "reduce_window" in eqn.primitive.name for v in eqn.invars}
    relus = [eqn for eqn in program.eqns if eqn.primitive.name == "max" and eqn.outvars[0] in pooled]
    recomputed = [eqn for eqn in relus if "recompute" in str(eqn.source_info.name_stack)]
    assert len(relus) > len(recomputed) > 0
    assert not any(isinstance(a, jex.Literal) for eqn in recomputed for a in eqn.invars)
