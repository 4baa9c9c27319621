"""Plan a residual network of ten thousand layers to train within 12 GB. Nothing is allocated on this machine.

python examples/deep_resnet.py                  # compiled for this machine
python examples/deep_resnet.py --target h100    # compiled for another GPU
python examples/deep_resnet.py --blocks 2 5 7 2 --width 8 --size 32 --batch 2 --classes 10 --budget min --steps 2

Four stages of bottleneck blocks in the proportions of "SuperNeurons: Dynamic GPU Memory Management for Training Deep
Neural Networks" (Wang et al., 2018), which lets the third stage grow: 3 * (6 + 32 + n + 6) + 2 convolutions, and
batches of 16 images of 224 x 224. Its deepest net has 2,500 convolutions. All but the first block of a stage are one
scan over stacked weights, so a thousand blocks are traced and compiled as quickly as ten.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxremat


class Bottleneck(nn.Module):
    """Three convolutions, each normalised; the input, projected where sizes differ, is added."""

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=False)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.stride)(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if y.shape != x.shape:
            x = norm()(conv(4 * self.width, (1, 1), self.stride)(x))
        return nn.relu(x + y), None


class DeepResNet(nn.Module):
    """Stages of so many blocks, each after the first at half the resolution and twice the width."""

    blocks: tuple[int, ...]
    width: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (7, 7), 2, use_bias=False)(x)
        x = nn.max_pool(nn.relu(nn.BatchNorm(use_running_average=False)(x)), (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.blocks):
            x, _ = Bottleneck(self.width * 2**stage, 1 if stage == 0 else 2)(x)
            x = self.loop(self.width * 2**stage, count - 1, x)
        return nn.Dense(self.classes)(x.mean((1, 2)))

    def loop(self, width: int, count: int, x: jax.Array, block: Any = Bottleneck) -> jax.Array:
        """So many equal blocks, as one loop over stacked weights."""
        stacked: dict[Any, Any] = {"params": 0, "batch_stats": 0}
        return nn.scan(block, stacked, split_rngs={"params": True}, length=count)(width)(x, None)[0]


def step_of(net: nn.Module) -> Callable[..., Any]:
    """A train step of a network with BatchNorm: `(state, images, labels) -> (state, loss)`."""
    tx = optax.sgd(0.01)

    def train_step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> Any:
            logits, changed = net.apply({**state, "params": params}, images, mutable="batch_stats")
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, _ = tx.update(grads, tx.init(state["params"]))
        return {"params": optax.apply_updates(state["params"], updates), **changed}, loss

    return train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="number of training steps on random images")
    parser.add_argument("--blocks", type=int, nargs=4, default=(6, 32, 956, 6), help="per stage, 2 or more")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="pixels per side of an image")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--budget", default="12GB")
    parser.add_argument("--target", choices=jaxremat.targets(), help="plan for this GPU")
    args = parser.parse_args()

    net = DeepResNet(tuple(args.blocks), args.width, args.classes)
    images = jax.ShapeDtypeStruct((args.batch, args.size, args.size, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((args.batch,), jnp.int32)
    state = jax.eval_shape(net.init, jax.random.key(0), images)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    count = sum(args.blocks)
    print(f"{3 * count + 2:,} convolutions, with norms, activations and sums {10 * count + 14:,} layers")
    print(f"{parameters / 1e6:,.0f} M parameters: {jaxremat.format_nbytes(4 * parameters)}")

    began = time.perf_counter()
    step = jaxremat.optimize(args.budget, donate_argnums=0, target=args.target)(step_of(net))
    plan = step.plan(state, images, labels)
    print(f"plain: {jaxremat.format_nbytes(plan.baseline_peak_nbytes)}\n{plan}")
    print(f"{plan.form}; planned and compiled in {time.perf_counter() - began:.0f} s")
    if not args.steps:
        return
    state = jax.jit(net.init)(jax.random.key(0), jnp.zeros(images.shape))
    for number in range(args.steps):
        keys = jax.random.split(jax.random.key(number))
        x = jax.random.normal(keys[0], images.shape)
        state, loss = step(state, x, jax.random.randint(keys[1], labels.shape, 0, args.classes))
        print(f"step {number}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
