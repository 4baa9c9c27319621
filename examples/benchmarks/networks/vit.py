"""Vision Transformer.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition
at Scale", 2020 (arXiv:2010.11929).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from .rematerialisation import Remat, rematted, save_dots
from .transformer import Block, in_turn, small_normal


class ViT(nn.Module):
    """Transformer on image patches; the defaults are ViT-B/16 (86.57 M parameters).

    With ``scanned`` the blocks are one loop over stacked weights.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 16
    dropout: float = 0.0
    classes: int = 1000
    scanned: bool = False
    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32

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
        x = nn.Dropout(self.dropout, deterministic=False)(x)
        block = partial(
            block, self.heads, exact_gelu=True, epsilon=1e-6, dropout=self.dropout, dtype=self.dtype
        )
        x = in_turn(block, self.layers, x, scanned=self.scanned, remat=self.remat)
        x = nn.LayerNorm(1e-6, dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x[:, 0])
