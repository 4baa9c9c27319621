"""The hand-placed rematerialisation that the networks offer as points of comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
from flax import linen as nn
from jax import lax

Remat = Literal["none", "block", "dots", "scan"]
"""What a network recomputes in its backward pass.

- ``"none"``: nothing; every residual is saved.
- ``"block"``: all of each block, from the block's inputs.
- ``"dots"``: all of each block but the results of its matrix products or convolutions.
- ``"scan"``: of blocks that are one loop, all but what two levels of loops carry (``nn.remat_scan``).
"""

Policy = Callable[..., Any]
Block = TypeVar("Block", bound=type[nn.Module])

save_dots: Policy = jax.checkpoint_policies.dots_saveable
"""Saves the results of matrix products: the usual choice for transformers."""

_CONTRACTIONS = (lax.conv_general_dilated_p, lax.dot_general_p)


def save_convolutions(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save the results of convolutions and matrix products.

    The counterpart of ``dots_saveable`` for convolutional networks: JAX's own policies
    count only ``dot_general``, and so would recompute every convolution.
    """
    return primitive in _CONTRACTIONS


def rematted(block: Block, remat: Remat, policy: Policy) -> Block:
    """Wrap the module class ``block`` as ``remat`` says; ``policy`` serves "dots"; "scan" is for who makes the loop.

    The wrapped class has another name, so whoever builds it should name each instance:
    parameters, and the random numbers they start from, then do not depend on ``remat``.
    """
    match remat:
        case "none" | "scan":
            return block
        case "block":
            return nn.remat(block)
        case "dots":
            return nn.remat(block, policy=policy)
        case _:
            raise ValueError(f"remat is {remat!r}, not 'none', 'block', 'dots' or 'scan'")
