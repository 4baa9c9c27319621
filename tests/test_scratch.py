"""Scratch memory of equations, read off the whole program as XLA's GPU compiler makes it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxremat
from jaxremat import Milp
from jaxremat._baseline import Baseline
from jaxremat._cost import aval_nbytes
from jaxremat._hlo import parse
from jaxremat._program import Program
from jaxremat._scratch import scratch
from jaxremat._simulate import simulate
from jaxremat._specs import DEVICES
from jaxremat._target import Target
from jaxremat._workspace import workspaces


def conv(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def inverted(weights: Any, x: jax.Array) -> Any:
    """A train step of MobileNet's block with a stride."""

    def loss(weights: Any) -> jax.Array:
        wide, depth, narrow = weights
        y = jnp.tanh(conv(jnp.tanh(conv(x, wide)), depth, stride=2, groups=96))
        return jnp.mean(conv(y, narrow) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def vgg(weights: Any, x: jax.Array) -> Any:
    """A train step of two of VGG's groups."""

    def loss(weights: Any) -> jax.Array:
        y = x
        for first, second in weights:
            y = jax.nn.relu(conv(jax.nn.relu(conv(y, first)), second))
            y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


STEPS = {
    "inverted": (inverted, ((struct(1, 1, 4, 96), struct(3, 3, 1, 96), struct(1, 1, 96, 24)), struct(32, 56, 56, 4))),
    "vgg": (
        vgg,
        (
            [(struct(3, 3, 3, 32), struct(3, 3, 32, 32)), (struct(3, 3, 32, 64), struct(3, 3, 64, 64))],
            struct(16, 128, 128, 3),
        ),
    ),
}  # fmt: skip


def baseline(name: str, target: str) -> Baseline:
    step, args = STEPS[name]
    program = Program(step, donate_argnums=(0,), target=Target(target))
    return Baseline(program, args, {}, DEVICES[target], "roofline")


def test_copies_that_only_the_equation_alone_needs_are_not_counted() -> None:
    """In the program the producers of a convolution's operands write them as it wants them, but for the padding."""
    plain = baseline("inverted", "p100")
    eqns = plain.traced.jaxpr.jaxpr.eqns
    shown = scratch(parse(plain.witness.as_text() or ""), eqns)
    alone = workspaces(plain.traced, plain.program, "gpu", 2**20)
    (gradient,) = (
        i for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "conv_general_dilated" and eqn.params["lhs_dilation"] == (2, 2)
    )  # fmt: skip
    wide = aval_nbytes(eqns[gradient].outvars[0].aval)
    assert alone[gradient] > 1.9 * wide  # in the other layout, and padded
    assert 1.0 * wide < shown[gradient].nbytes < 1.3 * wide  # padded, and a copy of the input
    products = [i for i in alone if eqns[i].params["padding"] == ((0, 0), (0, 0))]
    assert len(products) == 5
    assert sum(shown[i].nbytes for i in products) < 0.1 * sum(alone[i] for i in products)


def test_index_arrays_of_a_pooling_gradient_are_counted() -> None:
    plain = baseline("vgg", "p100")
    eqns = plain.traced.jaxpr.jaxpr.eqns
    shown = scratch(parse(plain.witness.as_text() or ""), eqns)
    pools = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "select_and_scatter_add"]
    assert len(pools) == 2
    for i in pools:
        assert 4 <= shown[i].nbytes / aval_nbytes(eqns[i].invars[0].aval) < 8


@pytest.mark.parametrize("target", ["p100", "h100"])
def test_zeros_of_a_pooling_gradient_wait_for_it(target: str) -> None:
    """The plain program fills them in the forward pass, and keeps them; a plan that drops nothing does not."""
    plain = baseline("vgg", target)
    spared = plain.peak_nbytes - jaxremat.MemoryStats.of(plain.witness).peak_nbytes
    assert spared > 0.15 * plain.peak_nbytes
    assert plain.seconds >= plain.witness_seconds
    step, args = STEPS["vgg"]
    plan = jaxremat.plan(step, *args, budget=plain.peak_nbytes - spared // 2, donate_argnums=0, target=target)
    assert plan.drops_nothing
    assert plan.baseline_peak_nbytes == plain.peak_nbytes
    assert plan.compiled_overhead is not None
    assert plan.compiled_overhead <= 0.001
    assert plan.overhead == pytest.approx(plan.compiled_overhead, abs=0.01)


def test_the_model_of_a_network_with_pools_meets_the_compiler() -> None:
    plain = baseline("vgg", "p100")
    step, args = STEPS["vgg"]
    plan = jaxremat.plan(step, *args, budget=plain.peak_nbytes // 2, donate_argnums=0, target="p100")
    peak = plan.rounds[-1].compiled_peak_nbytes
    assert plan.rounds[-1].predicted_peak_nbytes == pytest.approx(peak, rel=0.15)
    assert plan.overhead < 0.1


def test_weight_gradients_of_what_is_recomputed_are_not_put_off() -> None:
    """XLA joins the recomputed activation with the next gradients, and keeps five arrays where three do."""
    plain = baseline("vgg", "p100")
    graph = plain.graph
    solution = Milp().solve(graph, None, time_limit=5.0)
    peaks = {
        fence: jaxremat.MemoryStats.of(
            plain.compile(plain.jitted(graph, solution.schedule, fence))
        ).peak_nbytes
        for fence in ("finished", "ordered")
    }
    predicted = simulate(graph, solution.schedule).peak_nbytes
    assert peaks["finished"] > 1.2 * predicted
    assert peaks["ordered"] < 1.05 * predicted
    step, args = STEPS["vgg"]
    plan = jaxremat.plan(step, *args, budget=int(1.1 * predicted), donate_argnums=0, target="p100")
    assert {each.fence for each in plan.rounds} == {"finished", "ordered"}
    assert plan.fence == "ordered"
