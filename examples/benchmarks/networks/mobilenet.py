"""MobileNet-V2.

Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted Residuals and Linear
Bottlenecks", 2018 (arXiv:1801.04381).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .layers import ConvNorm, global_mean, identity
from .rematerialisation import Remat, rematted, save_convolutions


class Stage(NamedTuple):
    """One row of the paper's table 2."""

    expansion: int
    features: int
    repeats: int
    stride: int


STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Widen, convolve each channel on its own, narrow; add the input where it fits."""

    features: int
    expansion: int
    stride: int = 1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        inner = channels * self.expansion
        y = x
        if self.expansion > 1:
            y = ConvNorm(inner, 1, activation=nn.relu6, dtype=self.dtype, name="expand")(y)
        y = ConvNorm(
            inner, 3, self.stride, groups=inner, activation=nn.relu6, dtype=self.dtype, name="depthwise"
        )(y)
        y = ConvNorm(self.features, 1, activation=identity, dtype=self.dtype, name="project")(y)
        return x + y if self.stride == 1 and channels == self.features else y


class MobileNetV2(nn.Module):
    """Mobile network; the defaults are width 1.0 (3.50 M parameters)."""

    stages: tuple[Stage, ...] = STAGES
    stem: int = 32
    last: int = 1280
    dropout: float = 0.2
    classes: int = 1000
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = rematted(InvertedResidual, self.remat, save_convolutions)
        x = ConvNorm(self.stem, 3, 2, activation=nn.relu6, dtype=self.dtype, name="stem")(x)
        for row, stage in enumerate(self.stages):
            for index in range(stage.repeats):
                x = block(
                    stage.features,
                    stage.expansion,
                    stage.stride if index == 0 else 1,
                    dtype=self.dtype,
                    name=f"stage{row}_block{index}",
                )(x)
        x = ConvNorm(self.last, 1, activation=nn.relu6, dtype=self.dtype, name="last")(x)
        x = nn.Dropout(self.dropout, deterministic=False)(global_mean(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)
