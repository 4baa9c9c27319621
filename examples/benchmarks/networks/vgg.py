"""VGG with three dense layers.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", 2014 (arXiv:1409.1556), configuration D.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .layers import he_normal, max_pool
from .rematerialisation import Remat, rematted, save_convolutions


class Group(nn.Module):
    """Equally wide 3x3 convolutions, then a pool that halves the image."""

    features: int
    convolutions: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(self.convolutions):
            conv = nn.Conv(
                self.features, (3, 3), padding=1, kernel_init=he_normal, dtype=self.dtype, name=f"conv{index}"
            )
            x = nn.relu(conv(x))
        return max_pool(x, 2, 2)


class VGG(nn.Module):
    """Plain convolutional network; the defaults are VGG-16 (138.36 M parameters)."""

    convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)
    features: tuple[int, ...] = (64, 128, 256, 512, 512)
    hidden: int = 4096
    dropout: float = 0.5
    classes: int = 1000
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        group = rematted(Group, self.remat, save_convolutions)
        sizes = zip(self.features, self.convolutions, strict=True)
        for index, (features, convolutions) in enumerate(sizes):
            x = group(features, convolutions, dtype=self.dtype, name=f"group{index}")(x)
        x = x.reshape(x.shape[0], -1)
        for index in range(2):
            dense = nn.Dense(self.hidden, dtype=self.dtype, name=f"dense{index}")
            x = nn.relu(dense(x))
            x = nn.Dropout(self.dropout, deterministic=False)(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)
