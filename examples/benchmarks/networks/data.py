"""Batches of random data to train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

Batch = dict[str, jax.Array]
"""``inputs`` and integer ``labels``."""

MakeBatch = Callable[[jax.Array], Batch]
"""Makes a batch from a random key."""


@dataclass(frozen=True)
class Images:
    """Random images with a label each or, if ``dense``, a label for every pixel."""

    batch: int
    pixels: int | tuple[int, int]
    """Height and width; one number stands for both."""
    dense: bool = False

    def maker(self, model: Any, dtype: DTypeLike) -> MakeBatch:
        """How to make a batch for ``model``."""
        pixels = self.pixels
        height, width = (pixels, pixels) if isinstance(pixels, int) else pixels

        def make(key: jax.Array) -> Batch:
            image_key, label_key = jax.random.split(key)
            shape = (self.batch, height, width)
            labelled = shape if self.dense else shape[:1]
            return {
                "inputs": jax.random.normal(image_key, (*shape, 3), dtype),
                "labels": jax.random.randint(label_key, labelled, 0, model.classes),
            }

        return make


@dataclass(frozen=True)
class Tokens:
    """Random tokens, each labelled with the one that follows it."""

    batch: int
    length: int

    def maker(self, model: Any, dtype: DTypeLike) -> MakeBatch:
        """How to make a batch for ``model``; ``dtype`` does not change tokens."""
        del dtype

        def make(key: jax.Array) -> Batch:
            shape = (self.batch, self.length + 1)
            tokens = jax.random.randint(key, shape, 0, model.vocabulary)
            return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}

        return make


@dataclass(frozen=True)
class Pairs:
    """Random sources and targets of tokens, each of the target's labelled with the one that follows it."""

    batch: int
    length: int

    def maker(self, model: Any, dtype: DTypeLike) -> MakeBatch:
        """How to make a batch for ``model``; ``dtype`` does not change tokens."""
        del dtype

        def make(key: jax.Array) -> Batch:
            shape = (self.batch, 2, self.length + 1)
            tokens = jax.random.randint(key, shape, 0, model.vocabulary)
            return {"inputs": tokens[..., :-1], "labels": tokens[:, 1, 1:]}

        return make
