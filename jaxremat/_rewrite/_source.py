"""A step as it was traced, and where it runs: the common source of its variants."""

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
    - `respect_checkpoint`: whether the user's checkpoints recompute the same as without a plan.
    - `keeps_scores`: whether attention must keep its scores, so that rows of these may run in chunks.
    - `apart`: whether the forward pass is a separate program, with all of its equations before the backward pass.
    - `turns`: see `_memory_order.memory_order`.
    - `gathers`: operands that separate equations gather.
    - `attention_places`: on several devices, where attention may run without its scores; None on one.
    - `devices`: the number of devices of the step.
    - `around`: the program around that of one device if the whole step is in a `shard_map`; arguments and types are
      then those of its body.
    - `references`: those that the step gets from outside; their values are arguments and results here.
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
