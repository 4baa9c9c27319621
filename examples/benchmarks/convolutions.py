"""Measure convolutions' kernel gradients on the CPU: outside of a loop, in its body, and there in XLA:CPU's order.

    python -m examples.benchmarks.convolutions

Measured with jax 0.10.2 on 2 cores of an AMD EPYC, images of 32 x 32 x 16: one takes 6.6 to 8.0 times as long in the
body as outside, and 1.3 times in XLA:CPU's order; sixteen take 51 to 55 times as long, and 1.3 times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxremat._rewrite._canonical_convolutions import canonical_in_bodies

STEPS = 8
Gradient = Callable[[jax.Array, jax.Array], jax.Array]


def gradient(images: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The gradient of a 3 x 3 kernel."""
    channels = images.shape[-1]

    def convolved(kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    _, back = jax.vjp(convolved, jnp.zeros((3, 3, channels, channels)))
    return back(cotangent)[0]


def outside(images: jax.Array) -> jax.Array:
    """Some gradients, one after the other."""
    total = jnp.zeros((3, 3, images.shape[-1], images.shape[-1]))
    for i in range(STEPS):
        total += jax.lax.optimization_barrier(gradient(images + i, images))
    return total


def within(images: jax.Array) -> jax.Array:
    """The same in a loop."""
    total = jnp.zeros((3, 3, images.shape[-1], images.shape[-1]))
    return jax.lax.fori_loop(0, STEPS, lambda i, total: total + gradient(images + i, images), total)


def in_order(images: jax.Array) -> jax.Array:
    """The same as planned steps have it."""
    closed = canonical_in_bodies(jax.make_jaxpr(within)(images))
    return jex.jaxpr_as_fun(closed)(images)[0]


def seconds(fn: Callable[[jax.Array], jax.Array], images: jax.Array, repeats: int) -> float:
    """The least of some runs."""
    options: dict[str, str | bool] = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    compiled = jax.jit(fn).lower(images).compile(compiler_options=options)
    jax.block_until_ready(compiled(images))

    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready(compiled(images))
        return time.perf_counter() - began

    return min(once() for _ in range(repeats))


def main(count: int, width: int, channels: int, repeats: int = 7) -> str:
    """A line for so many images."""
    images = jnp.ones((count, width, width, channels))
    taken = partial(seconds, images=images, repeats=repeats)
    plain, looped, ordered = map(taken, (outside, within, in_order))
    shape = f"{count} x {width} x {width} x {channels}"
    return (
        f"{shape}: {1e3 * plain:.1f} ms, in a loop x {looped / plain:.1f}, in order x {ordered / plain:.1f}"
    )


if __name__ == "__main__":
    for case in ((1, 32, 16), (16, 32, 16), (4, 32, 32), (8, 16, 64)):
        print(main(*case))
