"""Train a Flax network within a budget of bytes: write `optimize` in place of `jax.jit`.

python examples/quickstart.py --steps 20
"""

import argparse
from typing import Any

import jax
import optax
from flax import linen as nn

import jaxremat


class Network(nn.Module):
    """A chain of dense layers with residual connections."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width)(x)
        for _ in range(self.layers):
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="24MiB", help='bytes, such as "24MiB", or "min"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    network = Network(args.layers, args.width)
    tx = optax.adamw(1e-3)

    # The whole train step, as you would write it for `jax.jit`.
    def train_step(params, opt_state, batch):
        def loss_fn(params):
            logits: Any = network.apply(params, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def batch(step: int) -> dict[str, jax.Array]:
        """Points, labelled by which of ten fixed directions they lie furthest along."""
        x = jax.random.normal(jax.random.key(step), (args.batch, 32))
        return {"x": x, "y": (x @ jax.random.normal(jax.random.key(-1), (32, 10))).argmax(-1)}

    params = jax.jit(network.init)(jax.random.key(0), batch(0)["x"])
    opt_state = tx.init(params)

    plain = jaxremat.memory(train_step, params, opt_state, batch(0), donate_argnums=(0, 1))
    print(f"plain step: compiled peak {jaxremat.format_nbytes(plain.peak_nbytes)}")

    train_step = jaxremat.optimize(args.budget, donate_argnums=(0, 1))(train_step)  # or as a decorator
    print(train_step.plan(params, opt_state, batch(0)))
    for step in range(args.steps):
        params, opt_state, loss = train_step(params, opt_state, batch(step))
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
