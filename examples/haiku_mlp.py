"""Train a Haiku model within a budget: `hk.transform` returns plain functions of trees, so it needs nothing special.

python examples/haiku_mlp.py --steps 10
"""

import argparse

import haiku as hk
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

    def forward(x):
        for _ in range(args.layers):
            x = jax.nn.gelu(hk.Linear(args.width)(x))
            x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return hk.Linear(10)(x)

    net = hk.transform(forward)
    optimizer = optax.adamw(1e-3)

    def train_step(params, opt_state, rng, x, y):
        def loss_fn(params):
            logits = net.apply(params, rng, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def batch(step: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = jax.random.normal(jax.random.key(step), (args.batch, 32))
        y = (x @ jax.random.normal(jax.random.key(-1), (32, 10))).argmax(-1)
        return jax.random.key(1000 + step), x, y

    params = net.init(jax.random.key(0), batch(0)[1])
    opt_state = optimizer.init(params)
    plain = jaxremat.memory(train_step, params, opt_state, *batch(0), donate_argnums=(0, 1))
    print(f"plain step: compiled peak {jaxremat.format_nbytes(plain.peak_nbytes)}")
    step = jaxremat.optimize(args.budget, donate_argnums=(0, 1))(train_step)
    print(step.plan(params, opt_state, *batch(0)))
    for number in range(args.steps):
        params, opt_state, loss = step(params, opt_state, *batch(number))
        if number % 5 == 0 or number == args.steps - 1:
            print(f"step {number}: loss {loss:.3f}")

    rng, x, y = batch(args.steps)
    print(f"accuracy on new points: {jnp.mean(net.apply(params, rng, x).argmax(-1) == y):.1%}")


if __name__ == "__main__":
    main()
