"""Train a small GPT with twice the batch, in the memory that the plain step needs for the single batch.

python examples/gpt.py --steps 20
"""

import argparse
import time
from pydoc_data.topics import topics  # English text that every Python brings along
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxremat


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each normalised first and added."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width)(nn.LayerNorm()(x)).reshape(batch, length, 3, self.heads, -1)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        x = x + nn.Dense(width)(mixed.reshape(x.shape))
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    """A language model over bytes."""

    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, self.width)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--batch", type=int, default=4, help="sequences of the plain step; the planned step has twice as many"
    )
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    net = GPT(args.layers, args.width, heads=4)
    tx = optax.adamw(1e-3)

    def train_step(params, opt_state, tokens):
        def loss_fn(params):
            logits: Any = net.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)

    def tokens(batch: int, seed: int = 0) -> jax.Array:
        starts = np.random.default_rng(seed).integers(0, len(text) - args.length - 1, batch)
        return jnp.asarray(text[starts[:, None] + np.arange(args.length + 1)])

    params = jax.jit(net.init)(jax.random.key(0), tokens(1)[:, :-1])
    opt_state = tx.init(params)

    small, large = tokens(args.batch), tokens(2 * args.batch)
    budget_nbytes = jaxremat.memory(train_step, params, opt_state, small, donate_argnums=(0, 1)).peak_nbytes
    needed_nbytes = jaxremat.memory(train_step, params, opt_state, large, donate_argnums=(0, 1)).peak_nbytes
    print(f"plain, {args.batch} sequences: {jaxremat.format_nbytes(budget_nbytes)}")
    print(f"plain, {2 * args.batch} sequences: {jaxremat.format_nbytes(needed_nbytes)}")

    step = jaxremat.optimize(budget_nbytes, donate_argnums=(0, 1))(train_step)
    planned_nbytes = jaxremat.memory(step, params, opt_state, large).peak_nbytes
    print(f"planned, {2 * args.batch} sequences: {jaxremat.format_nbytes(planned_nbytes)}")
    print(step.plan(params, opt_state, large))

    began = time.perf_counter()
    for number in range(args.steps):
        params, opt_state, loss = step(params, opt_state, tokens(2 * args.batch, number))
        if number % 5 == 0 or number == args.steps - 1:
            print(f"step {number}: loss {loss:.3f} nats per byte")
    print(f"{(time.perf_counter() - began) / max(args.steps, 1):.3f} s per step")


if __name__ == "__main__":
    main()
