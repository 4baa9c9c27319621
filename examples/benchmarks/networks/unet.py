"""U-Net for segmentation.

Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image
Segmentation", 2015 (arXiv:1505.04597), with padded convolutions and batch normalisation
as in the common PyTorch version (github.com/milesial/Pytorch-UNet). Papers on
rematerialisation take it at 416x608 (Checkmate, arXiv:1910.02653; MONeT,
arXiv:2010.14501).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .layers import ConvNorm, he_normal, max_pool
from .rematerialisation import Remat, rematted, save_convolutions


class Convolutions(nn.Module):
    """Two equally wide 3x3 convolutions."""

    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = ConvNorm(self.features, dtype=self.dtype, name="first")(x)
        return ConvNorm(self.features, dtype=self.dtype, name="second")(x)


class Down(nn.Module):
    """Halve the image, then convolve."""

    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = max_pool(x, 2, 2)
        return Convolutions(self.features, dtype=self.dtype, name="convolutions")(x)


class Up(nn.Module):
    """Double the image, join it to the encoder's image of that size, then convolve."""

    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, skip: jax.Array) -> jax.Array:
        x = nn.ConvTranspose(
            self.features, (2, 2), strides=(2, 2), kernel_init=he_normal, dtype=self.dtype, name="upsample"
        )(x)
        x = jnp.concatenate([skip, x], axis=-1)
        return Convolutions(self.features, dtype=self.dtype, name="convolutions")(x)


class UNet(nn.Module):
    """Encoder and decoder with skips between them; by default 31.04 M parameters.

    Height and width must be divisible by ``2**depth``.
    """

    depth: int = 4
    width: int = 64
    classes: int = 2
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = rematted(Convolutions, self.remat, save_convolutions)
        down = rematted(Down, self.remat, save_convolutions)
        up = rematted(Up, self.remat, save_convolutions)
        x = first(self.width, dtype=self.dtype, name="input")(x)
        skips: list[jax.Array] = []
        for level in range(1, self.depth + 1):
            skips.append(x)
            features = self.width * 2**level
            x = down(features, dtype=self.dtype, name=f"down{level}")(x)
        for level in reversed(range(self.depth)):
            features = self.width * 2**level
            x = up(features, dtype=self.dtype, name=f"up{level}")(x, skips.pop())
        return nn.Conv(self.classes, (1, 1), dtype=self.dtype, name="head")(x)
