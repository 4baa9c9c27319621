"""GoogLeNet (Inception v1) with batch normalisation.

Szegedy et al., "Going Deeper with Convolutions", 2014 (arXiv:1409.4842), table 1, with
batch normalisation in place of local response normalisation, as is now usual.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .layers import ConvNorm, global_mean, max_pool
from .rematerialisation import Remat, rematted, save_convolutions


class Branches(NamedTuple):
    """Channels of one inception module's convolutions: a row of the paper's table 1."""

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    pool: int

    def narrowed(self, divisor: int) -> Branches:
        """The same row with ``divisor`` times fewer channels."""
        return Branches(*(features // divisor for features in self))


STAGES = (
    (Branches(64, 96, 128, 16, 32, 32), Branches(128, 128, 192, 32, 96, 64)),
    (
        Branches(192, 96, 208, 16, 48, 64),
        Branches(160, 112, 224, 24, 64, 64),
        Branches(128, 128, 256, 24, 64, 64),
        Branches(112, 144, 288, 32, 64, 64),
        Branches(256, 160, 320, 32, 128, 128),
    ),
    (Branches(256, 160, 320, 32, 128, 128), Branches(384, 192, 384, 48, 128, 128)),
)


class Inception(nn.Module):
    """Convolutions of three sizes and a pool, side by side."""

    branches: Branches
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        to, dtype = self.branches, self.dtype
        one = ConvNorm(to.one, 1, dtype=dtype, name="one")(x)
        three = ConvNorm(to.three_reduce, 1, dtype=dtype, name="three_reduce")(x)
        three = ConvNorm(to.three, 3, dtype=dtype, name="three")(three)
        five = ConvNorm(to.five_reduce, 1, dtype=dtype, name="five_reduce")(x)
        five = ConvNorm(to.five, 5, dtype=dtype, name="five")(five)
        pool = max_pool(x, 3, 1, padding=1)
        pool = ConvNorm(to.pool, 1, dtype=dtype, name="pool")(pool)
        return jnp.concatenate([one, three, five, pool], axis=-1)


class AuxiliaryHead(nn.Module):
    """A classifier on the way, whose loss helps to train the layers before it."""

    classes: int
    dropout: float = 0.7
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        window = min(5, x.shape[1], x.shape[2])
        x = nn.avg_pool(x, (window, window), (3, 3))
        x = ConvNorm(128, 1, dtype=self.dtype, name="reduce")(x)
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(1024, dtype=self.dtype, name="dense")(x))
        x = nn.Dropout(self.dropout, deterministic=False)(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


class GoogLeNet(nn.Module):
    """Inception network; the defaults are GoogLeNet (7.0 M parameters).

    With ``auxiliary``, also returns the logits of a head after the first and one after
    the last but one module of the middle stage (the paper's 4a and 4d).
    """

    stages: tuple[tuple[Branches, ...], ...] = STAGES
    stem: int = 64
    dropout: float = 0.4
    classes: int = 1000
    auxiliary: bool = False
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        block = rematted(Inception, self.remat, save_convolutions)
        middle = len(self.stages) // 2
        heads: list[jax.Array] = []
        x = ConvNorm(self.stem, 7, 2, dtype=self.dtype, name="stem")(x)
        x = max_pool(x, 3, 2, padding=1)
        x = ConvNorm(self.stem, 1, dtype=self.dtype, name="stem_reduce")(x)
        x = ConvNorm(3 * self.stem, 3, dtype=self.dtype, name="stem_spatial")(x)
        for row, stage in enumerate(self.stages):
            x = max_pool(x, 3, 2, padding=1)
            for index, branches in enumerate(stage):
                name = f"stage{row}_block{index}"
                x = block(branches, dtype=self.dtype, name=name)(x)
                if self.auxiliary and row == middle and index in (0, len(stage) - 2):
                    head = AuxiliaryHead(
                        self.classes,
                        0.7 if self.dropout else 0.0,
                        dtype=self.dtype,
                        name=f"auxiliary{len(heads)}",
                    )
                    heads.append(head(x))
        x = nn.Dropout(self.dropout, deterministic=False)(global_mean(x))
        logits = nn.Dense(self.classes, dtype=self.dtype, name="head")(x)
        return (logits, *heads) if self.auxiliary else logits
