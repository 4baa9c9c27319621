"""What equations cost as calls into a library, read off the whole program as XLA's GPU compiler makes it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxremat
from jaxremat._compiler._library_kernels import library_seconds
from jaxremat._compiler._program import Program
from jaxremat._compiler._target import Target
from jaxremat._model._device_specs import DEVICES
from jaxremat._plan._baseline import Baseline, measure_baseline
from jaxremat._plan._problem import Problem
from jaxremat._program._flops import alone_seconds

NUMBERS = ("NHWC", "HWIO", "NHWC")
CHANNELS, IMAGE, BATCH, GROUPS = 64, 64, 32, 2


def twice_as_large(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A transposed convolution in groups, for which nothing better than XLA's own form is known."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), [(1, 1)] * 2, (2, 2), dimension_numbers=NUMBERS, feature_group_count=GROUPS
    )


def step(weights: Any, x: jax.Array) -> Any:
    """A train step with two transposed convolutions, as in a decoder."""

    def loss(weights: Any) -> jax.Array:
        y = x
        for up, same in weights:
            y = jnp.tanh(twice_as_large(y, up))
            y = lax.conv_general_dilated(y, same, (1, 1), "SAME", dimension_numbers=NUMBERS)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = (
    [(struct(2, 2, CHANNELS // GROUPS, CHANNELS), struct(3, 3, CHANNELS, CHANNELS))] * 2,
    struct(BATCH, IMAGE, IMAGE, CHANNELS),
)


@pytest.fixture(scope="module")
def plain() -> Baseline:
    program = Program(step, donate_argnums=(0,), target=Target("p100"))
    problem = Problem(program, ARGS, {}, DEVICES["p100"], "roofline")
    return measure_baseline(problem, plain=False, tagged=True)


def test_a_transposed_convolution_costs_what_the_library_computes(plain: Baseline) -> None:
    """XLA writes zeros between the operand's elements, and has cuDNN multiply them too."""
    eqns = plain.problem.traced.jaxpr.jaxpr.eqns
    called = library_seconds(plain.tagged.module, eqns, plain.problem.device)
    convolutions = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "conv_general_dilated"]
    assert set(convolutions) <= set(called)
    slower = {i: called[i] / alone_seconds(plain.problem.device, eqns[i]) for i in convolutions}
    forward = [i for i in convolutions if plain.graphs.plain.nodes[i].forward]
    transposed = [i for i in forward if eqns[i].params["lhs_dilation"] == (2, 2)]
    assert len(transposed) == 2 and len(forward) == 4
    for i in transposed:
        assert slower[i] > 3
    for i in set(forward) - set(transposed):
        assert 0.9 < slower[i] < 1.3
    for i in forward:
        assert plain.graphs.plain.nodes[i].seconds == pytest.approx(called[i], rel=0.1)


def test_the_overhead_of_recomputing_one_is_the_compiled_programs() -> None:
    planned = jaxremat.plan(step, *ARGS, budget="min", donate_argnums=0, target="p100", allow=())
    again = [a for a in planned.actions if a.stages and a.name == "conv_general_dilated"]
    assert again
    assert planned.compiled_overhead is not None
    assert planned.overhead == pytest.approx(planned.compiled_overhead, abs=0.02)
