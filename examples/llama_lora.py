"""How much memory does fine-tuning an 8B language model with LoRA take, and within which budget does it run?

python examples/llama_lora.py                                  # 8,192 tokens for an H100, asked on a laptop
python examples/llama_lora.py --tokens 32768 --budget 74GiB
python examples/llama_lora.py --layers 2 --tokens 256 --width 128 --hidden 384 --words 1024 --target cpu --budget 50%

Plain JAX: a decoder with Llama 3's sizes, a `lax.scan` over its layers, frozen weights in bf16 and adapters of rank 16
in f32 with Adam. No `jax.checkpoint`, no kernels, no microbatches are written here. Of the arguments only types and
shapes exist, so that nothing is allocated: XLA's compiler says what the step needs.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxremat

HEADS, SHARED, RANK = 32, 4, 16
"""Heads of a layer; how many of them share their keys and values; the adapters' rank."""

ADAM = optax.adamw(1e-4)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192, help="of the sequence in a step")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--words", type=int, default=128256)
    parser.add_argument(
        "--budget", default="74GiB", help='such as "74GiB", "50%%" of the plain step\'s peak, or "min"'
    )
    parser.add_argument(
        "--target", default="h100", help='the device to compile for; "cpu" for this machine\'s'
    )
    parser.add_argument("--recompute-only", action="store_true", help="no transformation but recomputation")
    return parser.parse_args()


def shapes(options: argparse.Namespace) -> tuple[Any, Any]:
    """The frozen weights and the adapters: types alone. Those of all layers are stacked."""
    width, hidden, narrow = options.width, options.hidden, options.width // SHARED

    def stacked(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((options.layers, *shape), dtype)

    sizes = {
        "query": (width, width), "key": (width, narrow), "value": (width, narrow), "out": (width, width),
        "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width),
    }  # fmt: skip
    layers = {name: stacked(*size) for name, size in sizes.items()}
    layers |= {name: stacked(width) for name in ("before attention", "before mlp")}
    ends = {"words": (options.words, width), "head": (width, options.words), "before head": (width,)}
    frozen = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in ends.items()} | {
        "layers": layers
    }
    adapters = {
        name: (
            stacked(sizes[name][0], RANK, dtype=jnp.float32),
            stacked(RANK, sizes[name][1], dtype=jnp.float32),
        )
        for name in ("query", "value", "gate", "down")
    }
    return frozen, adapters


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Each token divided by the root of its mean square."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-5).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Queries or keys, of which each pair of numbers is turned by an angle that grows with the token's place."""
    pairs = x.shape[-1] // 2
    angles = jnp.arange(x.shape[0])[:, None, None] * 500_000.0 ** (-jnp.arange(pairs) / pairs)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def layer(x: jax.Array, weights: tuple[Any, Any]) -> tuple[jax.Array, None]:
    """Attention and a gated MLP, with an adapter on some of the products."""
    frozen, adapters = weights

    def product(name: str, x: jax.Array) -> jax.Array:
        y = x @ frozen[name]
        if name not in adapters:
            return y
        down, up = (a.astype(x.dtype) for a in adapters[name])
        return y + x @ down @ up

    tokens, width = x.shape
    size, groups = width // HEADS, HEADS // SHARED
    h = norm(x, frozen["before attention"])
    query = rotated(product("query", h).reshape(tokens, HEADS, size)).reshape(tokens, groups, SHARED, size)
    key = rotated(product("key", h).reshape(tokens, groups, size))
    value = product("value", h).reshape(tokens, groups, size)
    scores = jnp.einsum("sgnd,tgd->gnst", query, key, preferred_element_type=jnp.float32) / size**0.5
    scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, -1e30)
    mixed = jnp.einsum("gnst,tgd->sgnd", jax.nn.softmax(scores).astype(x.dtype), value)
    x = x + product("out", mixed.reshape(tokens, width))
    h = norm(x, frozen["before mlp"])
    return x + product("down", jax.nn.silu(product("gate", h)) * product("up", h)), None


def train_step(state: Any, frozen: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """One step of Adam for the adapters."""
    adapters, moments = state

    def loss_of(adapters: Any) -> jax.Array:
        x, _ = jax.lax.scan(layer, frozen["words"][tokens[:-1]], (frozen["layers"], adapters))
        logits = (norm(x, frozen["before head"]) @ frozen["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(adapters)
    updates, moments = ADAM.update(gradients, moments, adapters)
    return (optax.apply_updates(adapters, updates), moments), loss


def main() -> jaxremat.Plan:
    """Plan the step, and print what the plan says."""
    options = parse()
    frozen, adapters = shapes(options)
    tokens = jax.ShapeDtypeStruct((options.tokens + 1,), jnp.int32)
    state = adapters, jax.eval_shape(ADAM.init, adapters)
    count = sum(leaf.size for leaf in jax.tree.leaves(frozen))
    print(
        f"{count / 1e9:.2f} billion frozen weights, {options.tokens:,} tokens, within {options.budget}",
        flush=True,
    )
    forms: dict[str, Any] = {"allow": ()} if options.recompute_only else {}
    target = None if options.target == "cpu" else options.target
    began = time.monotonic()
    plan = jaxremat.plan(
        train_step, state, frozen, tokens, budget=options.budget, donate_argnums=0, target=target, **forms
    )
    print(plan)
    print(f"planned in {time.monotonic() - began:.0f} s")
    return plan


if __name__ == "__main__":
    plan = main()
