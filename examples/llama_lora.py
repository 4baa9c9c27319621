"""How much memory does an 8B language model need for LoRA, or to train all its weights, and which budget does it fit?

python examples/llama_lora.py                                  # LoRA on 8,192 tokens, for an H100, on a laptop
python examples/llama_lora.py --tokens 32768 --budget 74GiB
python examples/llama_lora.py --full                           # train all weights
python examples/llama_lora.py --full --offload --layers 80 --width 8192 --hidden 28672   # of a 70B model
python examples/llama_lora.py --offload --to-host --tokens 1048576 --budget 79GiB   # of an 8B model
python examples/llama_lora.py --layers 2 --tokens 256 --width 128 --hidden 384 --words 1024 --target cpu --budget 50%

This is plain JAX: a decoder with Llama 3's sizes, and a `lax.scan` over its layers. LoRA has frozen weights in bf16 and
adapters of rank 16 in f32 with Adam; `--full` trains the bf16 weights with Adam, or with `--float32` weights in f32,
which the layers read as bf16 copies. The code has no `jax.checkpoint`, no kernels and no microbatches. With `--offload`
the planner may use host memory for values, layers' weights and Adam's moments. `--to-host` puts weights and moments
there from the start, as frozen weights require. The arguments are only types and shapes, so nothing is allocated: XLA's
compiler reports the step's memory.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxremat

GROUPS, RANK = 8, 16
"""The heads of a layer that share keys and values are so many groups; the adapters' rank."""

LOW: Any = jnp.bfloat16
"""The type in which layers compute."""

ADAM = optax.adamw(1e-4)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192, help="length of the sequence")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--words", type=int, default=128256)
    parser.add_argument(
        "--budget", default="74GiB", help='such as "74GiB", "50%%" of the plain step\'s peak, or "min"'
    )
    parser.add_argument("--target", default="h100", help='device to compile for; "cpu" for this machine')
    parser.add_argument("--full", action="store_true", help="train all weights instead of adapters")
    parser.add_argument(
        "--float32", action="store_true", help="train float32 weights, which layers read as bf16"
    )
    parser.add_argument("--offload", action="store_true", help="allow the planner to use host memory")
    parser.add_argument(
        "--to-host", action="store_true", help="pass layers' weights and moments in host memory"
    )
    parser.add_argument("--recompute-only", action="store_true", help="allow only recomputation")
    parser.add_argument("--save", type=Path, help="add a row to this JSON file")
    return parser.parse_args()


def heads(width: int) -> int:
    """Llama 3's number of heads, of 128 numbers each; 32 of narrower layers."""
    return max(32, width // 128)


def shapes(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return types and shapes of the weights and of the adapters. Those of all layers are stacked."""
    width, hidden = options.width, options.hidden
    narrow = width // heads(width) * GROUPS

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
    size, shared = width // heads(width), heads(width) // GROUPS
    h = norm(x, frozen["before attention"])
    query = rotated(product("query", h).reshape(tokens, -1, size)).reshape(tokens, GROUPS, shared, size)
    key = rotated(product("key", h).reshape(tokens, GROUPS, size))
    value = product("value", h).reshape(tokens, GROUPS, size)
    scores = jnp.einsum("sgnd,tgd->gnst", query, key, preferred_element_type=jnp.float32) / size**0.5
    scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, -1e30)
    mixed = jnp.einsum("gnst,tgd->sgnd", jax.nn.softmax(scores).astype(x.dtype), value)
    x = x + product("out", mixed.reshape(tokens, width))
    h = norm(x, frozen["before mlp"])
    return x + product("down", jax.nn.silu(product("gate", h)) * product("up", h)), None


def loss_of(adapters: Any, weights: Any, tokens: jax.Array, by_hand: bool = False) -> jax.Array:
    """The mean cross entropy of the next token; `by_hand` with `jax.checkpoint` around each layer."""
    body = jax.checkpoint(layer) if by_hand else layer
    x, _ = jax.lax.scan(body, weights["words"][tokens[:-1]], (weights["layers"], adapters))
    logits = (norm(x, weights["before head"]) @ weights["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()


def updated(state: Any, gradients: Any) -> Any:
    """Trained arrays and Adam's moments after one update."""
    trained, moments = state
    updates, moments = ADAM.update(gradients, moments, trained)
    return optax.apply_updates(trained, updates), moments


def lora_step(state: Any, weights: Any, tokens: jax.Array, by_hand: bool = False) -> tuple[Any, jax.Array]:
    """One step of Adam for the adapters."""
    loss, gradients = jax.value_and_grad(loss_of)(state[0], weights, tokens, by_hand)
    return updated(state, gradients), loss


def full_step(state: Any, tokens: jax.Array, by_hand: bool = False) -> tuple[Any, jax.Array]:
    """One step of Adam for all weights."""

    def loss_of_trained(weights: Any) -> jax.Array:
        low = jax.tree.map(lambda a: a.astype(LOW), weights)  # of those in float32 copies
        return loss_of({}, low, tokens, by_hand)

    loss, gradients = jax.value_and_grad(loss_of_trained)(state[0])
    return updated(state, gradients), loss


def main() -> jaxremat.Plan:
    """Plan the step, and print the plan."""
    options = parse()
    weights, adapters = shapes(options)
    if options.float32:
        weights = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), weights)
    tokens = jax.ShapeDtypeStruct((options.tokens + 1,), jnp.int32)
    moments = jax.eval_shape(ADAM.init, weights if options.full else adapters)
    if options.to_host:
        weights["layers"], moments = jaxremat.to_host((weights["layers"], moments))
    state = weights if options.full else adapters, moments
    step, args = (full_step, (state, tokens)) if options.full else (lora_step, (state, weights, tokens))
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    what = "all trained" if options.full else "frozen, with adapters"
    print(
        f"{count / 1e9:.2f} billion weights, {what}; {options.tokens:,} tokens, within {options.budget}",
        flush=True,
    )
    forms: dict[str, Any] = {"allow": ()} if options.recompute_only else {}
    target = None if options.target == "cpu" else options.target
    began = time.monotonic()
    forms |= {"offload": "auto"} if options.offload else {}
    there = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args) if on_host(leaf))
    plan = jaxremat.plan(step, *args, budget=options.budget, donate_argnums=0, target=target, **forms)
    seconds = round(time.monotonic() - began)
    print(plan)
    print(f"planned in {seconds} s")
    if options.save:
        checkpointed = partial(step, by_hand=True)
        needs = jaxremat.memory(checkpointed, *args, donate_argnums=0, target=target)
        print(f"with jax.checkpoint around each layer it needs {jaxremat.format_nbytes(needs.peak_nbytes)}")
        save(options, plan, needs, count, seconds, there + plan.on_host_nbytes + plan.offloaded_nbytes)
    return plan


def on_host(leaf: jax.ShapeDtypeStruct) -> bool:
    """Return whether an array is in host memory."""
    return leaf.sharding is not None and leaf.sharding.memory_kind == "pinned_host"


def save(
    options: argparse.Namespace,
    plan: jaxremat.Plan,
    by_hand: jaxremat.MemoryStats,
    count: int,
    seconds: int,
    host_nbytes: int,
) -> None:
    """Add a row to a file of results, or replace the row of the same step.

    **Arguments:** `count` of the weights; `seconds` that planning took; `host_nbytes` of what is in host memory.
    """
    asked = {"trained": "all weights" if options.full else "LoRA", "tokens": options.tokens}
    asked |= {name: True for name in ("offload", "float32") if getattr(options, name)}
    row = {
        **asked,
        "on host": host_nbytes,
        "budget": options.budget,
        "plain": plan.baseline_peak_nbytes,
        "modelled": plan.baseline_modelled,
        "by hand": by_hand.peak_nbytes,
        "by hand modelled": by_hand.modelled,
        "planned": plan.peak_nbytes,
        "overhead": plan.overhead,
        "step seconds": plan.account.step_seconds * (1.0 + (plan.compiled_overhead or plan.overhead)),
        "compiler": plan.compiler,
        "seconds": seconds,
    }
    head = {"kind": "lora", "target": options.target, "weights": count, "rows": []}
    record = json.loads(options.save.read_text()) if options.save.exists() else head
    rows = [
        each
        for each in record["rows"]
        if any(each.get(n) != asked.get(n) for n in (*asked, "offload", "float32"))
    ]
    rows = sorted([*rows, row], key=lambda each: (each["trained"], each["tokens"], "offload" in each))
    options.save.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def markdown(record: dict[str, Any]) -> str:
    """Return the saved rows as a table."""
    lines = [
        f"| trained, of {record['weights'] / 1e9:.0f} billion weights | tokens | as written | "
        "`jax.checkpoint` on each layer | planned | within | in host memory | a step takes (modelled) |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        sizes = _size(row["plain"], row["modelled"]), _size(row["by hand"], row["by hand modelled"])
        cells = (
            row["trained"] + (" and Adam in float32" if row.get("float32") else ""),
            f"{row['tokens']:,}",
            *sizes,
            _size(row["planned"]),
            row["budget"].replace("GiB", " GiB"),
            _size(row["on host"]) if row.get("on host") else "nothing",
            _duration(row["step seconds"]) if "step seconds" in row else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{float(f'{seconds:.3g}'):,g} s"


def _size(nbytes: int, refused: str = "") -> str:
    return (
        f"refused ({jaxremat.format_nbytes(nbytes)} by the model)"
        if refused
        else jaxremat.format_nbytes(nbytes)
    )


if __name__ == "__main__":
    plan = main()
