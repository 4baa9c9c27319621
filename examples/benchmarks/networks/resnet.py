"""ResNet with bottleneck blocks.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2015
(arXiv:1512.03385), with the stride on the 3x3 convolution ("v1.5") as in torchvision.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .layers import ConvNorm, global_mean, identity, max_pool
from .rematerialisation import Remat, rematted, save_convolutions

EXPANSION = 4
"""How many times wider a block's output is than its inner convolutions."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    features: int
    stride: int = 1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, out = self.features, self.features * EXPANSION
        y = ConvNorm(width, 1, dtype=self.dtype, name="reduce")(x)
        y = ConvNorm(width, 3, self.stride, dtype=self.dtype, name="spatial")(y)
        y = ConvNorm(out, 1, activation=identity, dtype=self.dtype, name="expand")(y)
        if x.shape != y.shape:
            x = ConvNorm(out, 1, self.stride, activation=identity, dtype=self.dtype, name="shortcut")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Residual network; the defaults are ResNet-50 (25.56 M parameters)."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = rematted(Bottleneck, self.remat, save_convolutions)
        x = ConvNorm(self.width, 7, 2, dtype=self.dtype, name="stem")(x)
        x = max_pool(x, 3, 2, padding=1)
        for stage, repeats in enumerate(self.blocks):
            for index in range(repeats):
                stride = 2 if stage > 0 and index == 0 else 1
                x = block(self.width * 2**stage, stride, dtype=self.dtype, name=f"stage{stage}_block{index}")(
                    x
                )
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(global_mean(x))
