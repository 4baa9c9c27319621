"""Train a Flax NNX model within a budget, with a train step written for `nnx.jit`.

    python examples/nnx_mlp.py --steps 20

Modules, optimizers, metrics and random streams are updated in place, as by `nnx.jit`.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxremat


class MLP(nnx.Module):
    """Dense layers with batch norm, dropout and GELU: parameters, statistics and random state."""

    def __init__(self, layers: int, width: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(32, width, rngs=rngs)
        self.layers = nnx.List(nnx.Linear(width, width, rngs=rngs) for _ in range(layers))
        self.norms = nnx.List(nnx.BatchNorm(width, rngs=rngs) for _ in range(layers))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(nnx.gelu(norm(layer(x))))
        return self.last(x)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="20MiB", help='bytes, such as "24MiB", or "min"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    model = MLP(args.layers, args.width, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    def train_step(model, optimizer, metrics, x, y):
        def loss_fn(model):
            logits = model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss, logits=logits, labels=y)

    def batch(step: int) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(jax.random.key(step), (args.batch, 32))
        return x, (x @ jax.random.normal(jax.random.key(-1), (32, 10))).argmax(-1)

    plain = jaxremat.memory(train_step, model, optimizer, metrics, *batch(0), donate_argnums=(0, 1))
    print(f"plain step: compiled peak {jaxremat.format_nbytes(plain.peak_nbytes)}")

    step = jaxremat.optimize(args.budget, donate_argnums=(0, 1))(train_step)  # was: nnx.jit(train_step)
    print(step.plan(model, optimizer, metrics, *batch(0)))
    for number in range(args.steps):
        step(model, optimizer, metrics, *batch(number))
        if number % 5 == 0 or number == args.steps - 1:
            found = metrics.compute()
            print(f"step {number}: loss {found['loss']:.3f}, accuracy {found['accuracy']:.1%}")
            metrics.reset()

    model.eval()
    x, y = batch(args.steps)
    print(f"accuracy on new points: {jnp.mean(model(x).argmax(-1) == y):.1%}")


if __name__ == "__main__":
    main()
