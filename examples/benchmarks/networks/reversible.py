"""Networks whose blocks can be undone: what goes into one follows from what comes out."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .layers import he_normal
from .rematerialisation import Remat
from .transformer import Attention, FeedForward, in_turn, small_normal


class Residual(nn.Module):
    """Normalisation, rectifier and 3x3 convolution, twice."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = x.shape[-1]
        for index in range(2):
            x = nn.BatchNorm(use_running_average=False, dtype=self.dtype, name=f"norm{index}")(x)
            x = nn.Conv(
                features,
                (3, 3),
                use_bias=False,
                kernel_init=he_normal,
                dtype=self.dtype,
                name=f"conv{index}",
            )(nn.relu(x))
        return x


class RevNet(nn.Module):
    """Reversible residual network on small images (Gomez et al. 2017, arXiv:1707.04585).

    Stages of blocks of two couplings each; what halves the image between them cannot be undone.
    """

    depths: tuple[int, ...] = (6, 6, 6)
    widths: tuple[int, ...] = (64, 128, 256)
    classes: int = 100
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

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


class Coupled(nn.Module):
    """Attention added to one stream, and a feed-forward layer of that to the other."""

    heads: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, streams: Any) -> Any:
        a, b = streams
        normed = nn.LayerNorm(dtype=self.dtype, name="norm_attention")(b)
        a = a + Attention(self.heads, causal=True, dtype=self.dtype, name="attention")(normed)
        normed = nn.LayerNorm(dtype=self.dtype, name="norm_feed")(a)
        return a, b + FeedForward(exact_gelu=False, dtype=self.dtype, name="feed")(normed)


class RevTransformer(nn.Module):
    """Causal transformer of reversible blocks in one loop, as the Reformer's (Kitaev et al. 2020, arXiv:2001.04451),
    with attention to all tokens.
    """

    layers: int = 24
    width: int = 1024
    heads: int = 16
    vocabulary: int = 8192
    context: int = 4096
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(
            self.vocabulary, self.width, embedding_init=small_normal, dtype=self.dtype, name="tokens"
        )
        places = self.param("positions", small_normal, (self.context, self.width))
        x = embed(tokens) + places[: tokens.shape[1]].astype(self.dtype)
        block = partial(Coupled, self.heads, dtype=self.dtype)
        a, b = in_turn(block, self.layers, (x, x), scanned=True, remat=self.remat)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(a + b)
        return embed.attend(x)
