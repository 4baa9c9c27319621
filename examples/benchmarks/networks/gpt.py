"""GPT-2.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; sizes and
details as in github.com/openai/gpt-2.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .rematerialisation import Remat, rematted, save_dots
from .transformer import Block, in_turn, small_normal


class GPT(nn.Module):
    """Causal transformer; the defaults are GPT-2 small (124.44 M parameters).

    ``context`` is the most tokens that the network can be given; ``tied`` uses the
    token embedding as the last layer's weights too. Dropout is off unless asked for.
    With ``scanned`` the blocks are one loop over stacked weights.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    tied: bool = True
    dropout: float = 0.0
    scanned: bool = False
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

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
        if self.tied:
            return embed.attend(x)
        return nn.Dense(
            self.vocabulary, use_bias=False, kernel_init=small_normal, dtype=self.dtype, name="head"
        )(x)
