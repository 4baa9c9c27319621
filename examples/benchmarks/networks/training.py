"""Train steps: a network, an optimiser and a batch of random data put together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from .data import Batch, MakeBatch

State = dict[str, Any]
"""``params`` and ``opt_state``, with ``batch_stats`` and ``step`` where needed."""

Step = Callable[[State, Batch], tuple[State, jax.Array]]
Loss = Callable[[Any, State, Batch], tuple[jax.Array, State]]
AUXILIARY_WEIGHT = 0.3
"""Weight of the loss of each auxiliary head (GoogLeNet's paper, section 5)."""


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


def cross_entropy(outputs: jax.Array | tuple[jax.Array, ...], labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in float32; logits after the first are auxiliary heads'."""
    logits, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = _mean_cross_entropy(logits, labels)
    for head in auxiliary:
        loss = loss + AUXILIARY_WEIGHT * _mean_cross_entropy(head, labels)
    return loss


def _mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
