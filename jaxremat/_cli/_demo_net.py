"""Seed and sizes -> what the demo trains: a Flax ResNet, scikit-learn's digits enlarged, and the train step.

Nothing here knows of jaxremat: it is the code of somebody who is about to run out of memory.
He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2015 (arXiv:1512.03385); basic blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

Batch = tuple[jax.Array, jax.Array]


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = partial(nn.Conv, self.features, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.8)
        y = nn.relu(norm()(conv((3, 3), self.stride)(x)))
        y = norm()(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv((1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network for small images; the defaults are a ResNet-14."""

    blocks: tuple[int, ...] = (2, 2, 2)
    width: int = 16
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.8)(x))
        for stage, repeats in enumerate(self.blocks):
            for index in range(repeats):
                x = Block(self.width * 2**stage, 2 if stage and not index else 1)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class State(train_state.TrainState):
    """Flax's train state and the running statistics of batch norm."""

    batch_stats: Any


def initial_state(net: ResNet, side: int, steps: int) -> State:
    """Parameters from seed 0, and AdamW with a one-cycle learning rate for so many steps."""
    # One program of XLA's own random bits compiles several times faster than threefry, one by one.
    init = jax.jit(net.init, static_argnums=2)
    variables = init(jax.random.key(0, impl="rbg"), jnp.zeros((1, side, side, 1)), True)
    rate = optax.cosine_onecycle_schedule(max(steps, 4), 5e-3)
    return State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.adamw(rate),
        batch_stats=variables["batch_stats"],
    )


def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    """Return one step of AdamW on the cross-entropy: the new state and the loss."""
    images, labels = batch

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, images, True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


@jax.jit
def correct(state: State, batch: Batch) -> jax.Array:
    """Return how many images of the batch the network classifies correctly."""
    images, labels = batch
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, images, False)
    return (logits.argmax(-1) == labels).sum()


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits, standardised, and their labels; a fifth is kept for testing."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    test_count: int

    @classmethod
    def load(cls, side: int) -> "Digits":
        """scikit-learn's 1,797 digits of 8 x 8 pixels, shuffled (seed 0) and enlarged to `side` x `side`."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = (images - images.mean()) / images.std()
        order = np.random.default_rng(0).permutation(len(labels))
        small = images[order].reshape(-1, 8, 8, 1).astype(np.float32)
        large = jax.image.resize(small, (len(labels), side, side, 1), "linear")
        return cls(np.asarray(large), labels[order].astype(np.int32), len(labels) // 5)

    @property
    def train_count(self) -> int:
        """The number of training images."""
        return len(self.labels) - self.test_count

    def batches(self, size: int, count: int) -> Iterator[Batch]:
        """Yield so many batches of training images; every epoch in a new order, the same on every run."""
        rng = np.random.default_rng(1)
        ahead = np.empty(0, np.int64)
        for _ in range(count):
            while len(ahead) < size:
                ahead = np.concatenate([ahead, self.test_count + rng.permutation(self.train_count)])
            chosen, ahead = ahead[:size], ahead[size:]
            yield jnp.asarray(self.images[chosen]), jnp.asarray(self.labels[chosen])

    def accuracy(self, state: State) -> float:
        """Return the share of the test images that the network classifies correctly."""
        test = self.images[: self.test_count], self.labels[: self.test_count]
        return int(correct(state, test)) / self.test_count


TrainStep = Callable[[State, Batch], tuple[State, jax.Array]]
