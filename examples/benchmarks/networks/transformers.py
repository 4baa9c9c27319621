"""Transformers, and the pre-normalised block that they share.

Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762), with the layer normalisation at the start of each
branch (Xiong et al. 2020, arXiv:2002.04745). Attention is written out as matrix products around a softmax, so the
scores are an array like any other, for a rematerialisation policy to keep or to drop.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .training import Network, Remat, rematted, save_dots

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


class GPT(Network):
    """Causal transformer; the defaults are GPT-2 small (124.44 M parameters).

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; sizes and details as in
    github.com/openai/gpt-2.

    ``context`` is the most tokens that the network can be given; the token embedding is the last layer's weights too.
    Dropout is off unless asked for. With ``scanned`` the blocks are one loop over stacked weights.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    dropout: float = 0.0
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.context}")
        block = rematted(Block, self.remat, save_dots)
        embed = nn.Embed(
            self.vocabulary, self.width, embedding_init=small_normal, dtype=self.dtype, name="tokens"
        )
        places = self.param("positions", small_normal, (self.context, self.width))
        x = embed(tokens) + places[:length].astype(self.dtype)
        x = nn.Dropout(self.dropout, deterministic=False)(x)
        block = partial(block, self.heads, causal=True, dropout=self.dropout, dtype=self.dtype)
        x = in_turn(block, self.layers, x, scanned=self.scanned, remat=self.remat)
        x = nn.LayerNorm(1e-5, dtype=self.dtype, name="norm")(x)
        return embed.attend(x)


class ViT(Network):
    """Transformer on image patches; the defaults are ViT-B/16 (86.57 M parameters).

    Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", 2020
    (arXiv:2010.11929).

    With ``scanned`` the blocks are one loop over stacked weights.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 16
    classes: int = 1000
    scanned: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = rematted(Block, self.remat, save_dots)
        patches = (self.patch, self.patch)
        x = nn.Conv(self.width, patches, patches, "VALID", dtype=self.dtype, name="embed")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
        token = jnp.broadcast_to(token, (x.shape[0], 1, self.width))
        x = jnp.concatenate([token.astype(x.dtype), x], axis=1)
        places = self.param("positions", small_normal, (1, x.shape[1], self.width))
        x = x + places.astype(x.dtype)
        block = partial(block, self.heads, exact_gelu=True, epsilon=1e-6, dtype=self.dtype)
        x = in_turn(block, self.layers, x, scanned=self.scanned, remat=self.remat)
        x = nn.LayerNorm(1e-6, dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x[:, 0])


class EncoderDecoder(Network):
    """Transformer with an encoder, and a decoder that attends to it (Vaswani et al. 2017), with RMS normalisation.

    Takes sources and targets of one length, stacked: `[batch, 2, length]`. With `distances`, heads add to their scores
    a number that they learn for each of so many distances, the same in all layers, as in T5 (Raffel et al. 2019,
    arXiv:1910.10683).
    """

    layers: int = 4
    width: int = 768
    heads: int = 12
    vocabulary: int = 16384
    distances: int = 0

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(
            self.vocabulary, self.width, embedding_init=small_normal, dtype=self.dtype, name="tokens"
        )
        places = self.param("positions", small_normal, (tokens.shape[-1], self.width)).astype(self.dtype)
        source, target = embed(tokens[:, 0]) + places, embed(tokens[:, 1]) + places
        among_source, among_target = (self._bias(name, tokens.shape[-1]) for name in ("encoder", "decoder"))
        for index in range(self.layers):
            source = source + self._attend(f"encoder{index}_self", source, source, bias=among_source)
            source = source + self._feed(f"encoder{index}", source)
        source = nn.RMSNorm(dtype=self.dtype, name="encoded")(source)
        causal = nn.make_causal_mask(tokens[:, 1])
        for index in range(self.layers):
            target = target + self._attend(f"decoder{index}_self", target, target, causal, among_target)
            target = target + self._attend(f"decoder{index}_cross", target, source)
            target = target + self._feed(f"decoder{index}", target)
        return embed.attend(nn.RMSNorm(dtype=self.dtype, name="decoded")(target))

    def _bias(self, name: str, length: int) -> jax.Array | None:
        if not self.distances:
            return None
        table = self.param(f"{name}_distances", small_normal, (self.distances, self.heads))
        places = jnp.arange(length)
        apart = places[:, None] - places + self.distances // 2
        return table[jnp.clip(apart, 0, self.distances - 1)].transpose(2, 0, 1)[None]

    def _attend(
        self,
        name: str,
        x: jax.Array,
        to: jax.Array,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        attention = nn.MultiHeadDotProductAttention(
            self.heads,
            dtype=self.dtype,
            kernel_init=small_normal,
            use_bias=False,
            attention_fn=partial(nn.dot_product_attention, bias=bias),
            name=name,
        )
        y = nn.RMSNorm(dtype=self.dtype, name=f"{name}_norm")(x)
        return attention(y, y if to is x else to, mask=mask)

    def _feed(self, name: str, x: jax.Array) -> jax.Array:
        y = nn.RMSNorm(dtype=self.dtype, name=f"{name}_feed_norm")(x)
        return FeedForward(exact_gelu=False, dtype=self.dtype, name=f"{name}_feed")(y)


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


class RevTransformer(Network):
    """Causal transformer of reversible blocks in one loop, as the Reformer's (Kitaev et al. 2020, arXiv:2001.04451),
    with attention to all tokens.
    """

    layers: int = 24
    width: int = 1024
    heads: int = 16
    vocabulary: int = 8192
    context: int = 4096

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


class Highway(Network):
    """Layers that choose for each number between it and a new one (Srivastava et al. 2015, arXiv:1505.00387)."""

    layers: int = 12
    width: int = 2048
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width, dtype=self.dtype, name="stem")(x.reshape(x.shape[0], -1))
        for index in range(self.layers):
            both = nn.Dense(2 * self.width, dtype=self.dtype, name=f"layer{index}")(x)
            new, gate = jnp.split(both, 2, -1)
            gate = nn.sigmoid(gate)
            x = gate * nn.gelu(new) + (1 - gate) * x
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)
