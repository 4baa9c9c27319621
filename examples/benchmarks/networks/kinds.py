"""Networks of kinds that the others lack: channels that are gated and convolved apart, cross attention, highways.

They are here to be measured, not to be known: what a planner is right about on nine famous networks it may have learnt
from them alone.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .rematerialisation import Remat
from .transformer import FeedForward, small_normal


class SqueezeExcite(nn.Module):
    """Each channel times a number between 0 and 1, made of all channels' means (Hu et al. 2018, arXiv:1709.01507)."""

    ratio: int = 4
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        gate = x.mean((1, 2), keepdims=True)
        gate = nn.silu(nn.Dense(width // self.ratio, dtype=self.dtype, name="squeeze")(gate))
        return x * nn.sigmoid(nn.Dense(width, dtype=self.dtype, name="excite")(gate))


class Depthwise(nn.Module):
    """Blocks of a depthwise convolution, group normalisation and gated channels, between strided convolutions.

    Blocks as ConvNeXt has them (Liu et al. 2022, arXiv:2201.03545), with squeeze and excitation.
    """

    depths: tuple[int, ...] = (2, 2, 4, 2)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    classes: int = 1000
    groups: int = 8
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = partial(nn.Dense, dtype=self.dtype)
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            patch = (4, 4) if stage == 0 else (2, 2)
            x = nn.Conv(width, patch, patch, dtype=self.dtype, name=f"down{stage}")(x)
            for index in range(depth):
                each = f"stage{stage}_{index}"
                y = nn.Conv(
                    width, (7, 7), feature_group_count=width, dtype=self.dtype, name=f"{each}_depthwise"
                )(x)
                y = nn.GroupNorm(self.groups, dtype=self.dtype, name=f"{each}_norm")(y)
                y = nn.gelu(dense(4 * width, name=f"{each}_widen")(y))
                y = SqueezeExcite(dtype=self.dtype, name=f"{each}_gate")(y)
                x = x + dense(width, name=f"{each}_narrow")(y)
        return dense(self.classes, name="head")(x.mean((1, 2)))


class EncoderDecoder(nn.Module):
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
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

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


class Highway(nn.Module):
    """Layers that choose for each number between it and a new one (Srivastava et al. 2015, arXiv:1505.00387)."""

    layers: int = 12
    width: int = 2048
    classes: int = 1000
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width, dtype=self.dtype, name="stem")(x.reshape(x.shape[0], -1))
        for index in range(self.layers):
            both = nn.Dense(2 * self.width, dtype=self.dtype, name=f"layer{index}")(x)
            new, gate = jnp.split(both, 2, -1)
            gate = nn.sigmoid(gate)
            x = gate * nn.gelu(new) + (1 - gate) * x
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)
