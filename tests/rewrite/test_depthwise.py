"""The gradient of a depthwise convolution as sums: the same numbers, and no memory for channels squared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import updating
from comparing import assert_same
from jax import lax

import jaxremat
from jaxremat import MemoryStats, compiler_options
from jaxremat._model._graph import backend
from jaxremat._rewrite._kernel_choice import MOST_PLACES, inline, is_depthwise_gradient, replaced, summed

CHANNELS = 5
LAYOUTS = (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"))


def gradients(
    kernel: tuple[int, int], groups: int, multiplier: int, layout: Any, dtype: Any, **how: Any
) -> list[Any]:
    """The equations of the gradient of a convolution in groups."""
    first = layout[0] == "NHWC"
    x = jnp.ones((2, 9, 11, CHANNELS) if first else (2, CHANNELS, 9, 11), dtype)
    inner, outer = CHANNELS // groups, CHANNELS * multiplier
    weights = jnp.ones((*kernel, inner, outer) if first else (outer, inner, *kernel), dtype)

    def loss(weights: Any) -> jax.Array:
        made = lax.conv_general_dilated(
            x, weights, dimension_numbers=layout, feature_group_count=groups, **how
        )
        return jnp.sum(made.astype(jnp.float32) ** 2)

    return [
        e for e in jax.make_jaxpr(jax.grad(loss))(weights).eqns if e.primitive.name == "conv_general_dilated"
    ]


@pytest.mark.parametrize(
    ("padding", "layout"), [("SAME", LAYOUTS[0]), ("VALID", LAYOUTS[1]), ([(2, 0), (-1, 3)], LAYOUTS[0])]
)
def test_the_same_numbers(padding: Any, layout: Any) -> None:
    low = padding == "SAME"
    dtype, rounding = (jnp.bfloat16, 2e-2) if low else (jnp.float32, 1e-5)
    kernel = (1, 4) if low else (3, 3)
    for stride, dilation, multiplier in ((1, 1, 1), (2, 1, 2), (1, 2, 2)):
        eqns = gradients(
            kernel, CHANNELS, multiplier, layout, dtype,
            window_strides=(stride, stride), rhs_dilation=(dilation, dilation), padding=padding,
        )  # fmt: skip
        (eqn,) = filter(is_depthwise_gradient, eqns)
        operands = [
            jax.random.normal(jax.random.key(i), v.aval.shape, v.aval.dtype) for i, v in enumerate(eqn.invars)
        ]
        want = eqn.primitive.bind(*operands, **eqn.params)
        found = jax.jit(summed(eqn))(*operands)
        assert (found.shape, found.dtype) == (want.shape, want.dtype)
        scale = float(jnp.abs(want.astype(jnp.float32)).max())
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(want, np.float32), rtol=0, atol=rounding * scale
        )


def test_what_is_left_as_it_is() -> None:
    """Convolutions without groups, and kernels of very many places."""
    how: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME"}
    assert not any(map(is_depthwise_gradient, gradients((3, 3), 1, 1, LAYOUTS[0], jnp.float32, **how)))
    assert MOST_PLACES < 9 * 9
    assert not any(map(is_depthwise_gradient, gradients((9, 9), CHANNELS, 1, LAYOUTS[0], jnp.float32, **how)))
    eqns = gradients((3, 3), CHANNELS, 1, LAYOUTS[0], jnp.float32, **how)
    assert [is_depthwise_gradient(e) for e in eqns] == [replaced(backend("cpu"))(e) for e in eqns]
    assert not any(map(replaced(backend("gpu")), eqns))
    (eqn,) = filter(is_depthwise_gradient, eqns)
    assert inline(eqn)[-1].outvars == eqn.outvars


def test_one_window_at_a_time() -> None:
    """Of a kernel of many places too: the operand with its edges, a window, and the operands themselves."""
    how: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME"}
    (eqn,) = filter(is_depthwise_gradient, gradients((7, 7), CHANNELS, 1, LAYOUTS[0], jnp.float32, **how))
    types = [v.aval for v in eqn.invars]

    def of_made(*operands: jax.Array) -> Any:
        return [summed(eqn)(*map(jnp.tanh, operands))]

    compiled = jax.jit(of_made).lower(*types).compile(compiler_options=compiler_options())
    padded = 2 * (9 + 6) * (11 + 6) * CHANNELS * 4
    window = 2 * 9 * 11 * CHANNELS * 4
    assert MemoryStats.of(compiled).temporaries_nbytes < 1.25 * (padded + 2 * window)


@updating
def step(weights: Any, x: jax.Array) -> Any:
    """A train step of separable convolutions."""
    y = x
    for deep, point in weights:
        how: dict[str, Any] = {"dimension_numbers": LAYOUTS[0], "feature_group_count": y.shape[-1]}
        y = jnp.tanh(lax.conv_general_dilated(y, deep, (1, 1), "SAME", **how)) @ point
    return jnp.mean(y**2)


def test_a_planned_step_needs_no_channels_squared() -> None:
    keys = iter(jax.random.split(jax.random.key(0), 9))
    width = 128
    weights = [
        (jax.random.normal(next(keys), (3, 3, 1, width)), 0.1 * jax.random.normal(next(keys), (width, width)))
        for _ in range(4)
    ]
    args = weights, jax.random.normal(next(keys), (2, 8, 8, width))
    plain = jax.jit(step, donate_argnums=0).lower(*args).compile(compiler_options=compiler_options())
    stats = MemoryStats.of(plain)
    squared = 4 * 9 * width * width
    assert stats.temporaries_nbytes > squared  # or XLA has learnt it, and this can go
    planned = jaxremat.optimize(stats.peak_nbytes - squared, donate_argnums=0)(step)
    plan = planned.plan(*args)
    assert plan.compiled_overhead is not None and plan.compiled_overhead < 0
    before, after = plain.cost_analysis(), planned.compile(*args).cost_analysis()
    assert before is not None and after is not None
    assert after["flops"] < 0.3 * before["flops"]
    assert after["bytes accessed"] < 0.6 * before["bytes accessed"]
    assert_same(plain(*jax.tree.map(jnp.copy, args)), planned(*args))
