"""Train an Equinox model within a budget: its arrays are arguments of the step, the rest is closed over.

    python examples/equinox_mlp.py --steps 10

Equinox modules are trees whose leaves need not be arrays (activation functions, for one). `eqx.partition` separates
them, and `optimize` gets only the arrays.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxremat


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="min", help='bytes, such as "24MiB", or "min"')
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    model = eqx.nn.MLP(32, 10, args.width, args.layers, jax.nn.gelu, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.adamw(1e-3)

    def train_step(arrays, opt_state, x, y):
        def loss_fn(arrays):
            model = eqx.combine(arrays, static)
            return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(arrays)
        updates, opt_state = optimizer.update(grads, opt_state, arrays)
        return eqx.apply_updates(arrays, updates), opt_state, loss

    def batch(step: int) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(jax.random.key(step), (args.batch, 32))
        return x, (x @ jax.random.normal(jax.random.key(-1), (32, 10))).argmax(-1)

    opt_state = optimizer.init(arrays)
    plain = jaxremat.memory(train_step, arrays, opt_state, *batch(0), donate_argnums=(0, 1))
    print(f"plain step: compiled peak {jaxremat.format_nbytes(plain.peak_nbytes)}")
    step = jaxremat.optimize(args.budget, donate_argnums=(0, 1))(train_step)
    print(step.plan(arrays, opt_state, *batch(0)))
    for number in range(args.steps):
        arrays, opt_state, loss = step(arrays, opt_state, *batch(number))
        if number % 5 == 0 or number == args.steps - 1:
            print(f"step {number}: loss {loss:.3f}")

    model = eqx.combine(arrays, static)
    x, y = batch(args.steps)
    print(f"accuracy on new points: {jnp.mean(jax.vmap(model)(x).argmax(-1) == y):.1%}")


if __name__ == "__main__":
    main()
