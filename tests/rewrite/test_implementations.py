"""Equations in a form of which XLA's GPU compiler makes better kernels: the same numbers, less work and memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import updating
from jax import lax

import jaxremat
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._program import Program
from jaxremat._compiler._roofline import roofline
from jaxremat._compiler._target import Target
from jaxremat._model._device_specs import DEVICES
from jaxremat._model._graph import backend
from jaxremat._plan._baseline import measure_baseline
from jaxremat._plan._problem import Problem
from jaxremat._rewrite._kernel_choice import inline, is_transposed, replaced, reversed_twice

NUMBERS = ("NHWC", "HWIO", "NHWC")


def enlarged(window: int, stride: int, padding: Any, dtype: Any, rank: int = 2) -> Any:
    """The equation of a transposed convolution, and its operands."""
    numbers = {1: ("NWC", "WIO", "NWC"), 2: NUMBERS, 3: ("NDHWC", "DHWIO", "NDHWC")}[rank]

    def up(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_transpose(x, kernel, (stride,) * rank, padding, dimension_numbers=numbers)

    x = jax.random.normal(jax.random.key(0), (2, *(5, 4, 3)[:rank], 3), dtype)
    kernel = jax.random.normal(jax.random.key(1), (*(window,) * rank, 3, 4), dtype)
    (eqn,) = jax.make_jaxpr(up)(x, kernel).jaxpr.eqns
    return eqn, (x, kernel)


@pytest.mark.parametrize(
    ("window", "stride", "padding", "rank"),
    [
        (2, 2, "SAME", 1),
        (3, 2, "SAME", 2),
        (4, 2, "SAME", 3),
        (2, 3, "SAME", 2),
        (2, 2, "VALID", 3),
        (3, 2, "VALID", 1),
        (4, 2, "VALID", 2),
        (2, 3, "VALID", 2),
    ],
)
def test_the_same_numbers(window: int, stride: int, padding: str, rank: int) -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        eqn, operands = enlarged(window, stride, padding, dtype, rank)
        assert is_transposed(eqn)
        better = reversed_twice(eqn)(*operands)
        np.testing.assert_array_equal(
            np.asarray(eqn.primitive.bind(*operands, **eqn.params), np.float32),
            np.asarray(better, np.float32),
        )


@updating
def step(weights: Any, x: jax.Array) -> Any:
    """A train step of a small decoder."""
    y = x
    for up, same in weights:
        y = jnp.tanh(lax.conv_transpose(y, up, (2, 2), "SAME", dimension_numbers=NUMBERS))
        y = lax.conv_general_dilated(y, same, (2, 2), "SAME", dimension_numbers=NUMBERS)
    return jnp.mean(y**2)


def test_only_transposed_convolutions_of_the_forward_pass_are_replaced() -> None:
    """The others' kernels are reversed already, or their windows are as large as images."""
    x, weights = jnp.ones((2, 8, 8, 3)), [(jnp.ones((2, 2, 3, 4)), jnp.ones((3, 3, 4, 3)))] * 2
    eqns = jax.make_jaxpr(step)(weights, x).eqns
    spread = [
        e for e in eqns if e.primitive.name == "conv_general_dilated" and max(e.params["lhs_dilation"]) > 1
    ]
    assert len(spread) > 4
    assert len([e for e in spread if is_transposed(e)]) == 2
    assert not any(map(replaced(backend("cpu")), eqns))
    needs_replacement = [e for e in eqns if replaced(backend("gpu"))(e)]
    assert len(needs_replacement) == 2
    assert [e.primitive.name for e in inline(needs_replacement[0])] == [
        "rev",
        "optimization_barrier",
        "rev",
        "conv_general_dilated",
    ]
    assert inline(needs_replacement[0])[-1].outvars == needs_replacement[0].outvars


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("target", ["p100", "h100"])
def test_a_planned_step_convolves_no_zeros(target: str) -> None:
    """A plan that drops nothing is faster than the plain step, and its model knows.

    The model does not know what barriers cost two layers, which are made again at once here.
    """
    args = ([(struct(2, 2, 64, 64), struct(3, 3, 64, 64))] * 2, struct(16, 96, 96, 64))
    program = Program(step, donate_argnums=(0,), target=Target(target))
    problem = Problem(program, args, {}, DEVICES[target], "roofline")
    plain = measure_baseline(problem, plain=True, tagged=True)
    before = roofline(parse(plain.plain.executable.as_text() or ""), problem.device)
    after = roofline(plain.tagged.module, problem.device)
    assert after.flops < 0.9 * before.flops
    assert after.seconds < 0.97 * before.seconds
    budget = int(0.95 * plain.peak_nbytes)
    plan = jaxremat.plan(step, *args, budget=budget, donate_argnums=0, target=target)
    first = plan.rounds[0]
    assert first.compiled_overhead is not None
    assert first.compiled_overhead < -0.05
    assert first.overhead == pytest.approx(first.compiled_overhead, abs=0.02)
    assert plan.overhead == pytest.approx(plan.compiled_overhead, abs=0.07)
