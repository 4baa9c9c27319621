"""Train steps: a network, an optimiser and a batch of random data put together, and what is recomputed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

Batch = dict[str, jax.Array]
"""``inputs`` and integer ``labels``."""

MakeBatch = Callable[[jax.Array], Batch]
"""Makes a batch from a random key."""

State = dict[str, Any]
"""``params`` and ``opt_state``, with ``batch_stats`` and ``step`` where needed."""

Step = Callable[[State, Batch], tuple[State, jax.Array]]
Loss = Callable[[Any, State, Batch], tuple[jax.Array, State]]


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
    """Random tokens, each labelled with the one that follows it; if ``pairs``, sources and targets of them."""

    batch: int
    length: int
    pairs: bool = False

    def maker(self, model: Any, dtype: DTypeLike) -> MakeBatch:
        """How to make a batch for ``model``; ``dtype`` does not change tokens."""
        del dtype

        def make(key: jax.Array) -> Batch:
            shape = (self.batch, *([2] if self.pairs else []), self.length + 1)
            tokens = jax.random.randint(key, shape, 0, model.vocabulary)
            target = tokens[:, 1] if self.pairs else tokens
            return {"inputs": tokens[..., :-1], "labels": target[:, 1:]}

        return make


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


class Network(nn.Module):
    """What all networks have: what is recomputed by hand, and the type that they compute in."""

    remat: Remat = "none"
    dtype: DTypeLike = jnp.float32


@dataclass(frozen=True)
class Program:
    """One train step and the arguments to call it with."""

    name: str
    step: Step
    """``(state, batch) -> (state, loss)``, not compiled."""
    initialise: Callable[[jax.Array], tuple[State, Batch]]
    """The step's arguments, as a pure function of a random key."""
    loss: Loss
    """``(params, rest of the state, batch) -> (loss, what of the rest is updated)``, which the step differentiates."""
    donate_argnums: tuple[int, ...] = (0,)

    def make_args(self, seed: int = 0) -> tuple[State, Batch]:
        """The state to start from and a batch, as concrete random arrays."""
        return jax.jit(self.initialise)(jax.random.key(seed))

    def abstract_args(self) -> tuple[State, Batch]:
        """Like ``make_args``, as shapes and types only: nothing is allocated."""
        return jax.eval_shape(self.initialise, jax.eval_shape(jax.random.key, 0))

    def parameter_count(self) -> int:
        """How many trained numbers the network has."""
        state, _ = self.abstract_args()
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state["params"]))


def make_program(
    name: str,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    make_batch: MakeBatch,
    sharpness: float = 0.0,
) -> Program:
    """Train ``model`` with ``optimizer`` on batches like those of ``make_batch``.

    A model with a field ``dropout`` above 0 draws new masks at each step, from a count
    of steps that the state then carries. With ``sharpness`` gradients are those of the
    parameters that far uphill (SAM, Foret et al. 2021, arXiv:2010.01412).
    """
    drops = getattr(model, "dropout", 0.0) > 0.0

    def initialise(key: jax.Array) -> tuple[State, Batch]:
        params_key, dropout_key, batch_key = jax.random.split(key, 3)
        batch = make_batch(batch_key)
        keys = {"params": params_key, "dropout": dropout_key}
        state: State = dict(model.init(keys, batch["inputs"]))
        state["opt_state"] = optimizer.init(state["params"])
        if drops:
            state["step"] = jnp.zeros((), jnp.int32)
        return state, batch

    def loss(params: Any, rest: State, batch: Batch) -> tuple[jax.Array, State]:
        keys = {"dropout": jax.random.fold_in(jax.random.key(0), rest["step"])} if drops else {}
        collections = {k: v for k, v in rest.items() if k == "batch_stats"}
        outputs, updated = model.apply(
            {"params": params, **collections}, batch["inputs"], rngs=keys, mutable=list(collections)
        )
        return cross_entropy(outputs, batch["labels"]), dict(updated)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        rest = {k: v for k, v in state.items() if k in ("batch_stats", "step")}
        counted = {"step": state["step"] + 1} if drops else {}
        params = state["params"]
        if sharpness:
            uphill, _ = jax.grad(loss, has_aux=True)(params, rest, batch)
            far = sharpness / optax.tree.norm(uphill)
            params = jax.tree.map(lambda p, g: p + far * g, params, uphill)
        (value, updated), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, **updated, **counted}, value

    return Program(name, step, initialise, loss)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
