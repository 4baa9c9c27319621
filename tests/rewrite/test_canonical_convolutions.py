"""Convolutions in loops' bodies stand in the order for which XLA:CPU has kernels: the same sums, seen and proved."""

import re
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from chains import updating
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxremat
from jaxremat._rewrite._kernel_choice import (
    canonical,
    canonical_in_bodies,
    equivalence,
    is_transposed_convolution,
)

OPTIONS: dict[str, Any] = {"xla_disable_hlo_passes": "cse_barrier_expander"}


@st.composite
def convolved(draw: st.DrawFn) -> tuple[Any, Any]:
    """A convolution in any order of axes, strided, dilated, in groups, and its equation."""
    pixels = "WHD"[: draw(st.integers(1, 3))]
    lhs, out = (draw(st.permutations(f"NC{pixels}")) for _ in range(2))
    rhs = draw(st.permutations(f"IO{pixels}"))
    groups = draw(st.sampled_from((1, 2)))
    sizes = {"N": 2, "C": 4, "I": 4 // groups, "O": 6} | {axis: 5 + i for i, axis in enumerate(pixels)}
    kernel = sizes | {axis: 2 + i % 2 for i, axis in enumerate(pixels)}
    rng = np.random.default_rng(0)
    args = [
        rng.normal(size=[of[axis] for axis in order]).astype("float32")
        for of, order in ((sizes, lhs), (kernel, rhs))
    ]
    dilations = [draw(st.sampled_from((1, 2))) for _ in range(3)]

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        stride, of_lhs, of_rhs = ((n,) + (1,) * (len(pixels) - 1) for n in dilations)
        return lax.conv_general_dilated(
            x, w, stride, [(1, 0)] * len(pixels), of_lhs, of_rhs,
            dimension_numbers=("".join(lhs), "".join(rhs), "".join(out)), feature_group_count=groups,
        )  # fmt: skip

    return fn, args


@settings(max_examples=30, deadline=None)
@given(convolved())
def test_any_order_gives_the_same(drawn: tuple[Any, Any]) -> None:
    fn, args = drawn
    closed = jax.make_jaxpr(fn)(*args)
    (eqn,) = closed.jaxpr.eqns
    if not is_transposed_convolution(eqn):
        return
    other = jax.make_jaxpr(canonical(eqn))(*args)
    (found,) = jex.jaxpr_as_fun(other)(*args)
    np.testing.assert_allclose(found, fn(*args), rtol=1e-5, atol=1e-5)
    (inner,) = (e for e in other.jaxpr.eqns if e.primitive.name == "conv_general_dilated")
    assert not is_transposed_convolution(inner)
    assert equivalence(closed).difference(other) is None
    assert equivalence(other).difference(closed) is None
    mirrored = jax.make_jaxpr(lambda x, w: fn(x, jnp.flip(w, 0)))(*args)
    assert equivalence(closed).difference(mirrored) is not None or 1 in args[1].shape[:1]


STEPS = 2


def gradient(images: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The gradient of a 3 x 3 kernel."""
    channels = images.shape[-1]

    def convolved(kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    _, back = jax.vjp(convolved, jnp.zeros((3, 3, channels, channels), images.dtype))
    return back(cotangent)[0]


def outside(images: jax.Array) -> jax.Array:
    """Some gradients, one after the other."""
    total = jnp.zeros((3, 3, images.shape[-1], images.shape[-1]), images.dtype)
    for i in range(STEPS):
        total += jax.lax.optimization_barrier(gradient(images + i, images))
    return total


def within(images: jax.Array) -> jax.Array:
    """The same in a loop."""
    total = jnp.zeros((3, 3, images.shape[-1], images.shape[-1]), images.dtype)
    return jax.lax.fori_loop(0, STEPS, lambda i, total: total + gradient(images + i, images), total)


def in_order(images: jax.Array) -> jax.Array:
    """The same as planned steps have it."""
    closed = canonical_in_bodies(jax.make_jaxpr(within)(images))
    return jex.jaxpr_as_fun(closed)(images)[0]


def orders(compiled: Any) -> dict[bool, set[str]]:
    """The orders of convolutions in the entry computation, and elsewhere."""
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    found = {entry_too: set() for entry_too in (True, False)}
    for line in text.splitlines():
        if label := re.search(r"convolution\(.*dim_labels=([^,\s]+)", line):
            found[line in entry].add(label[1])
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_xla_orders_convolutions_of_the_entry_alone(dtype: str) -> None:
    """The reason for all of this: where it fails, XLA has mended it, and this rewriting can go."""
    images = jnp.ones((2, 8, 8, 4), dtype)
    (elsewhere,) = orders(jax.jit(within).lower(images).compile())[False]
    assert elsewhere != "b01f_01io->b01f"
    (entry,) = orders(jax.jit(outside).lower(images).compile())[True]
    assert entry == "b01f_01io->b01f"
    (ordered,) = orders(jax.jit(in_order).lower(images).compile())[False]
    assert ordered == entry
    np.testing.assert_allclose(in_order(images), within(images), rtol=1e-6)


def test_only_bodies_are_changed() -> None:
    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def branch(x: jax.Array) -> jax.Array:
            return jax.jit(gradient)(x, x)

        alone = gradient(x, x)
        return alone, lax.cond(x[0, 0, 0, 0] > 0, branch, lambda x: -branch(x), x)

    closed = jax.make_jaxpr(fn)(jnp.ones((2, 8, 8, 4)))
    made = canonical_in_bodies(closed)
    count = [sum(map(is_transposed_convolution, each.jaxpr.eqns)) for each in (closed, made)]
    assert count == [1, 1]
    assert str(made).count("transpose[") == str(closed).count("transpose[") + 6
    assert equivalence(closed).difference(made) is None
    assert canonical_in_bodies(made) is made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_depthwise_kernels_are_sums_in_bodies(dtype: str) -> None:
    """XLA:CPU convolves every channel with every other: 8 to 11 times slower in loops than outside."""

    def fn(images: jax.Array, kernels: jax.Array) -> jax.Array:
        def convolved(kernel: jax.Array) -> jax.Array:
            numbers = ("NHWC", "HWIO", "NHWC")
            made = lax.conv_general_dilated(
                images, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4
            )
            return jnp.sum(made.astype(jnp.float32) ** 2)

        return lax.map(jax.grad(convolved), kernels)

    rng = np.random.default_rng(0)
    args = [jnp.array(rng.normal(size=shape), dtype) for shape in ((2, 8, 8, 4), (3, 3, 3, 1, 4))]
    closed = jax.make_jaxpr(fn)(*args)
    made = canonical_in_bodies(closed)
    assert "batch_group_count=4" in str(closed) and "batch_group_count=4" not in str(made)
    assert equivalence(closed).difference(made) is None
    np.testing.assert_allclose(
        *(jnp.float32(found) for found in (jex.jaxpr_as_fun(made)(*args)[0], fn(*args))), rtol=2e-2, atol=1e-2
    )


@pytest.mark.jax_0_10("memory of a step on the CPU")
def test_planned_loops_have_no_other_order() -> None:
    @updating
    def step(weights: Any, x: jax.Array) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            made = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.tanh(made) + x, None

        return jnp.mean(lax.scan(layer, x, weights)[0] ** 2)

    args = jnp.full((6, 3, 3, 8, 8), 0.05), jnp.ones((8, 16, 16, 8))
    planned: Any = jaxremat.optimize("min")(step)
    assert orders(planned.compile(*args))[False] == {"b01f_01io->b01f"}
    assert orders(jax.jit(step).lower(*args).compile())[False] != {"b01f_01io->b01f"}
    np.testing.assert_allclose(planned(*args), step(*args), rtol=1e-5, atol=1e-6)
