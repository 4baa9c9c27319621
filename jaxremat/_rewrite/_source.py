"""A step as it was traced, and where it runs: what all its variants are made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from .._attention._pattern import Pattern
from .._attention._places import Places
from .._program._references import References
from ._gathered_operands import Gather
from ._shard_map_body import Around


@dataclass(frozen=True)
class Source:
    """**Fields:**

    - `closed`: the program as it was traced.
    - `in_tree`, `out_tree`: the structures of `(args, kwargs)` without static arguments, and of the result.
    - `donated`: per flat argument; () for none.
    - `respect_checkpoint`: whether what the user's checkpoints compute again is left as it is.
    - `keeps_scores`: whether attention may not be done without its scores, so that rows of these may be in chunks.
    - `apart`: whether the forward pass is a program of its own, so that all of it stands before the backward pass.
    - `turns`: see `_memory_order.memory_order`.
    - `gathers`: operands that are gathered by equations of their own.
    - `attention_places`: on several devices, where attention may be done without its scores; None on one.
    - `devices`: how many the step is on.
    - `around`: what is around the program of one device where all of the step is in a `shard_map`; arguments and types
      are those of its body then.
    - `references`: those that the step has from outside, whose values are arguments and results here.
    """

    closed: jex.ClosedJaxpr
    in_tree: Any = None
    out_tree: Any = None
    donated: tuple[bool, ...] = ()
    respect_checkpoint: bool = False
    keeps_scores: bool = False
    apart: bool = False
    turns: bool = True
    gathers: tuple[Gather, ...] = ()
    attention_places: Mapping[Pattern, Places] | None = None
    devices: int = 1
    around: Around | None = None
    references: References | None = None
