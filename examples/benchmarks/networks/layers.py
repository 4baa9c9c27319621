"""Layers that the convolutional networks share.

Images are laid out as batch, height, width, channels. The networks exist to be trained,
so normalisation always uses the batch's own statistics (and updates the running ones),
and dropout is always on.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

Activation = Callable[[jax.Array], jax.Array]

he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")
"""Initial weights for layers with rectifiers (He et al. 2015, arXiv:1502.01852)."""


def identity(x: jax.Array) -> jax.Array:
    """The activation of a layer that has none."""
    return x


class ConvNorm(nn.Module):
    """Convolution without bias, batch normalisation (arXiv:1502.03167), activation.

    Padding is ``kernel // 2`` on every side, as in the usual PyTorch definitions.
    """

    features: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    activation: Activation = nn.relu
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(
            self.features,
            (self.kernel, self.kernel),
            strides=self.stride,
            padding=self.kernel // 2,
            feature_group_count=self.groups,
            use_bias=False,
            kernel_init=he_normal,
            dtype=self.dtype,
            name="conv",
        )(x)
        x = nn.BatchNorm(
            use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=self.dtype, name="norm"
        )(x)
        return self.activation(x)


def max_pool(x: jax.Array, window: int, stride: int, padding: int = 0) -> jax.Array:
    """The largest value in each square window."""
    sides = ((padding, padding), (padding, padding))
    return nn.pool(x, -jnp.inf, lax.max, (window, window), (stride, stride), sides)


def global_mean(x: jax.Array) -> jax.Array:
    """Mean over height and width."""
    return jnp.mean(x, axis=(1, 2))
