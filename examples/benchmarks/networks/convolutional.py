"""Convolutional networks, and layers that they share.

Images are laid out as batch, height, width, channels. The networks exist to be trained, so normalisation always uses
the batch's own statistics (and updates the running ones), and dropout is always on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from .training import Network, rematted, save_convolutions

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


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the output is four times as wide as what is between."""

    features: int
    stride: int = 1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(ConvNorm, dtype=self.dtype)
        width, out = self.features, 4 * self.features
        y = conv(width, 1, name="reduce")(x)
        y = conv(width, 3, self.stride, name="spatial")(y)
        y = conv(out, 1, activation=identity, name="expand")(y)
        if x.shape != y.shape:
            x = conv(out, 1, self.stride, activation=identity, name="shortcut")(x)
        return nn.relu(x + y)


class ResNet(Network):
    """Residual network; the defaults are ResNet-50 (25.56 M parameters).

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2015 (arXiv:1512.03385), with the stride on
    the 3x3 convolution ("v1.5") as in torchvision.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = partial(rematted(Bottleneck, self.remat, save_convolutions), dtype=self.dtype)
        x = ConvNorm(self.width, 7, 2, dtype=self.dtype, name="stem")(x)
        x = max_pool(x, 3, 2, padding=1)
        for stage, repeats in enumerate(self.blocks):
            for index in range(repeats):
                stride = 2 if stage > 0 and index == 0 else 1
                x = block(self.width * 2**stage, stride, name=f"stage{stage}_block{index}")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x.mean((1, 2)))


class Group(nn.Module):
    """Equally wide 3x3 convolutions, then a pool that halves the image."""

    features: int
    convolutions: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, padding=1, kernel_init=he_normal, dtype=self.dtype)
        for index in range(self.convolutions):
            x = nn.relu(conv(self.features, (3, 3), name=f"conv{index}")(x))
        return max_pool(x, 2, 2)


class VGG(Network):
    """Plain convolutional network with three dense layers; the defaults are VGG-16 (138.36 M parameters).

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2014
    (arXiv:1409.1556), configuration D.
    """

    convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)
    features: tuple[int, ...] = (64, 128, 256, 512, 512)
    hidden: int = 4096
    dropout: float = 0.5
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        group = rematted(Group, self.remat, save_convolutions)
        sizes = zip(self.features, self.convolutions, strict=True)
        for index, (features, convolutions) in enumerate(sizes):
            x = group(features, convolutions, dtype=self.dtype, name=f"group{index}")(x)
        x = x.reshape(x.shape[0], -1)
        for index in range(2):
            x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, name=f"dense{index}")(x))
            x = nn.Dropout(self.dropout, deterministic=False)(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


class InvertedResidual(nn.Module):
    """Widen, convolve each channel on its own, narrow; add the input where it fits."""

    features: int
    expansion: int
    stride: int = 1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(ConvNorm, activation=nn.relu6, dtype=self.dtype)
        channels = x.shape[-1]
        inner = channels * self.expansion
        y = conv(inner, 1, name="expand")(x) if self.expansion > 1 else x
        y = conv(inner, 3, self.stride, groups=inner, name="depthwise")(y)
        y = conv(self.features, 1, activation=identity, name="project")(y)
        return x + y if self.stride == 1 and channels == self.features else y


class MobileNetV2(Network):
    """Mobile network; the defaults are width 1.0 (3.50 M parameters).

    Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018
    (arXiv:1801.04381). Stages are expansion, features, repeats and stride: the rows of its table 2.
    """

    stages: tuple[tuple[int, int, int, int], ...] = (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    )
    stem: int = 32
    last: int = 1280
    dropout: float = 0.2
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = partial(rematted(InvertedResidual, self.remat, save_convolutions), dtype=self.dtype)
        conv = partial(ConvNorm, activation=nn.relu6, dtype=self.dtype)
        x = conv(self.stem, 3, 2, name="stem")(x)
        for row, (expansion, features, repeats, stride) in enumerate(self.stages):
            for index in range(repeats):
                name = f"stage{row}_block{index}"
                x = block(features, expansion, stride if index == 0 else 1, name=name)(x)
        x = conv(self.last, 1, name="last")(x)
        x = nn.Dropout(self.dropout, deterministic=False)(x.mean((1, 2)))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


class Branches(NamedTuple):
    """Channels of one inception module's convolutions: a row of table 1 of GoogLeNet's paper."""

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    pool: int


INCEPTIONS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


class Inception(nn.Module):
    """Convolutions of three sizes and a pool, side by side."""

    branches: Branches
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        to, conv = self.branches, partial(ConvNorm, dtype=self.dtype)
        one = conv(to.one, 1, name="one")(x)
        three = conv(to.three_reduce, 1, name="three_reduce")(x)
        three = conv(to.three, 3, name="three")(three)
        five = conv(to.five_reduce, 1, name="five_reduce")(x)
        five = conv(to.five, 5, name="five")(five)
        pool = conv(to.pool, 1, name="pool")(max_pool(x, 3, 1, padding=1))
        return jnp.concatenate([one, three, five, pool], axis=-1)


class GoogLeNet(Network):
    """Inception network; the defaults are GoogLeNet (7.0 M parameters).

    Szegedy et al., "Going Deeper with Convolutions", 2014 (arXiv:1409.4842), table 1, without the auxiliary heads, and
    with batch normalisation in place of local response normalisation, as is now usual.
    """

    stages: tuple[tuple[tuple[int, ...], ...], ...] = INCEPTIONS
    narrower: int = 1
    """By which all channels of the stages are divided."""
    stem: int = 64
    dropout: float = 0.4
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = partial(rematted(Inception, self.remat, save_convolutions), dtype=self.dtype)
        conv = partial(ConvNorm, dtype=self.dtype)
        x = conv(self.stem, 7, 2, name="stem")(x)
        x = max_pool(x, 3, 2, padding=1)
        x = conv(self.stem, 1, name="stem_reduce")(x)
        x = conv(3 * self.stem, 3, name="stem_spatial")(x)
        for row, stage in enumerate(self.stages):
            x = max_pool(x, 3, 2, padding=1)
            for index, channels in enumerate(stage):
                branches = Branches(*(features // self.narrower for features in channels))
                x = block(branches, name=f"stage{row}_block{index}")(x)
        x = nn.Dropout(self.dropout, deterministic=False)(x.mean((1, 2)))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


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


class UNet(Network):
    """Encoder and decoder with skips between them; by default 31.04 M parameters.

    Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015
    (arXiv:1505.04597), with padded convolutions and batch normalisation as in the common PyTorch version
    (github.com/milesial/Pytorch-UNet). Papers on rematerialisation take it at 416x608 (Checkmate, arXiv:1910.02653;
    MONeT, arXiv:2010.14501). Height and width must be divisible by ``2**depth``.
    """

    depth: int = 4
    width: int = 64
    classes: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = rematted(Convolutions, self.remat, save_convolutions)
        down = rematted(Down, self.remat, save_convolutions)
        up = rematted(Up, self.remat, save_convolutions)
        x = first(self.width, dtype=self.dtype, name="input")(x)
        skips: list[jax.Array] = []
        for level in range(1, self.depth + 1):
            skips.append(x)
            x = down(self.width * 2**level, dtype=self.dtype, name=f"down{level}")(x)
        for level in reversed(range(self.depth)):
            x = up(self.width * 2**level, dtype=self.dtype, name=f"up{level}")(x, skips.pop())
        return nn.Conv(self.classes, (1, 1), dtype=self.dtype, name="head")(x)


class SqueezeExcite(nn.Module):
    """Each channel times a number between 0 and 1, made of all channels' means (Hu et al. 2018, arXiv:1709.01507)."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        gate = x.mean((1, 2), keepdims=True)
        gate = nn.silu(nn.Dense(width // 4, dtype=self.dtype, name="squeeze")(gate))
        return x * nn.sigmoid(nn.Dense(width, dtype=self.dtype, name="excite")(gate))


class Depthwise(Network):
    """Blocks of a depthwise convolution, group normalisation and gated channels, between strided convolutions.

    Blocks as ConvNeXt has them (Liu et al. 2022, arXiv:2201.03545), with squeeze and excitation.
    """

    depths: tuple[int, ...] = (2, 2, 4, 2)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = partial(nn.Dense, dtype=self.dtype)
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            patch = (4, 4) if stage == 0 else (2, 2)
            x = nn.Conv(width, patch, patch, dtype=self.dtype, name=f"down{stage}")(x)
            conv = partial(nn.Conv, width, (7, 7), feature_group_count=width, dtype=self.dtype)
            for index in range(depth):
                each = f"stage{stage}_{index}"
                y = conv(name=f"{each}_depthwise")(x)
                y = nn.GroupNorm(8, dtype=self.dtype, name=f"{each}_norm")(y)
                y = nn.gelu(dense(4 * width, name=f"{each}_widen")(y))
                y = SqueezeExcite(dtype=self.dtype, name=f"{each}_gate")(y)
                x = x + dense(width, name=f"{each}_narrow")(y)
        return dense(self.classes, name="head")(x.mean((1, 2)))


class Residual(nn.Module):
    """Normalisation, rectifier and 3x3 convolution, twice."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, x.shape[-1], (3, 3), use_bias=False, kernel_init=he_normal, dtype=self.dtype)
        for index in range(2):
            x = nn.BatchNorm(use_running_average=False, dtype=self.dtype, name=f"norm{index}")(x)
            x = conv(name=f"conv{index}")(nn.relu(x))
        return x


class RevNet(Network):
    """Reversible residual network on small images (Gomez et al. 2017, arXiv:1707.04585).

    Stages of blocks of two couplings each; what halves the image between them cannot be undone.
    """

    depths: tuple[int, ...] = (6, 6, 6)
    widths: tuple[int, ...] = (64, 128, 256)
    classes: int = 100

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            strides = 1 if stage == 0 else 2
            x = nn.Conv(width, (3, 3), strides, dtype=self.dtype, name=f"down{stage}")(x)
            a, b = jnp.split(x, 2, -1)
            for index in range(depth):
                a = a + Residual(dtype=self.dtype, name=f"stage{stage}_{index}_f")(b)
                b = b + Residual(dtype=self.dtype, name=f"stage{stage}_{index}_g")(a)
            x = nn.relu(jnp.concatenate([a, b], -1))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x.mean((1, 2)))
