"""The pre-normalised transformer block that ViT and GPT share.

Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762), with the layer
normalisation at the start of each branch (Xiong et al. 2020, arXiv:2002.04745).
Attention is written out as matrix products around a softmax, so the scores are an array
like any other, for a rematerialisation policy to keep or to drop.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .rematerialisation import Remat

small_normal = nn.initializers.normal(0.02)
"""Initial weights as in GPT-2 and BERT."""


class Attention(nn.Module):
    """Multi-head self-attention."""

    heads: int
    causal: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        if width % self.heads:
            raise ValueError(f"width {width} is not divisible by {self.heads} heads")
        depth = width // self.heads
        qkv = nn.Dense(3 * width, kernel_init=small_normal, dtype=self.dtype, name="qkv")(x)
        qkv = qkv.reshape(batch, length, 3, self.heads, depth)
        query, key, value = (qkv[:, :, index] for index in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / depth**0.5
        scores = scores.astype(jnp.float32)
        if self.causal:
            seen = jnp.tril(jnp.ones((length, length), bool))
            scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        return nn.Dense(width, kernel_init=small_normal, dtype=self.dtype, name="project")(mixed)


class FeedForward(nn.Module):
    """A dense layer four times as wide, GELU, and a dense layer back."""

    exact_gelu: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = nn.Dense(4 * width, kernel_init=small_normal, dtype=self.dtype, name="widen")(x)
        x = nn.gelu(x, approximate=not self.exact_gelu)
        return nn.Dense(width, kernel_init=small_normal, dtype=self.dtype, name="narrow")(x)


class Block(nn.Module):
    """Attention, then the feed-forward layers, each added to its input."""

    heads: int
    causal: bool = False
    exact_gelu: bool = False
    epsilon: float = 1e-5
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(self.epsilon, dtype=self.dtype, name="attention_norm")(x)
        y = Attention(self.heads, self.causal, dtype=self.dtype, name="attention")(y)
        x = x + nn.Dropout(self.dropout, deterministic=False)(y)
        y = nn.LayerNorm(self.epsilon, dtype=self.dtype, name="feed_forward_norm")(x)
        y = FeedForward(self.exact_gelu, dtype=self.dtype, name="feed_forward")(y)
        return x + nn.Dropout(self.dropout, deterministic=False)(y)


def in_turn(block: partial[Any], count: int, x: Any, *, scanned: bool, remat: Remat = "none") -> Any:
    """Run ``count`` blocks one after the other, each a module of its own or all one loop over stacked weights.

    To be called within a compact module; ``block`` takes the name. With ``remat`` "scan" the loop is one of loops, of
    lengths as equal as can be.
    """
    if not scanned:
        for index in range(count):
            x = block(name=f"block{index}")(x)  # type: ignore[operator]
        return x
    if remat == "scan":
        outer = next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)
        loops: Any = nn.remat_scan(block.func, lengths=(outer, count // outer))  # type: ignore[arg-type]
        return loops(*block.args, **block.keywords, name="blocks")(x)
    loop = nn.scan(
        lambda layer, x, _: (layer(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=count,
    )
    x, _ = loop(block(name="blocks"), x, None)
    return x
