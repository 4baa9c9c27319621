"""Find the batch with which a step of a 70B language model fits 64 H100s, and its overhead, on a laptop.

python examples/llama_70b.py                                # the table in the docs; some minutes for each batch
python examples/llama_70b.py --batches 16 --budget 70GiB
python examples/llama_70b.py --layers 126 --width 16384 --hidden 53248 --heads 128 --length 8192 --batches 8 --offload
python examples/llama_70b.py --layers 8 --width 1024 --hidden 4096 --heads 16 --words 8192 --batches 16 --budget 4GiB

The decoder has Llama 3's sizes: 80 scanned layers of 8,192 numbers, 64 heads that share 8 keys and values, 28,672
hidden units, 128,256 words. Weights are in bf16; their copies in f32 and Adam's two moments are divided over all
devices. The mesh divides batch and weights over 8 hosts (FSDP), and heads, hidden units and words over the 8 devices of
each (TP). Nothing is allocated here: XLA's GPU compiler partitions the step and reports one device's memory.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxremat

Step = Callable[..., Any]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--hosts", type=int, default=8, help="hosts that share the batch and the weights")
    parser.add_argument(
        "--devices", type=int, default=8, help="devices per host, which share heads and hidden units"
    )
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=28672)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--groups", type=int, default=8, help="groups of heads that share keys and values")
    parser.add_argument("--words", type=int, default=128256)
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64], help="sequences per step")
    parser.add_argument("--budget", default="72GiB", help="bytes per device")
    parser.add_argument("--offload", action="store_true", help="allow the planner to use host memory")
    parser.add_argument("--save", type=Path, help="write the table to this file, as JSON")
    return parser.parse_args()


def shapes(options: argparse.Namespace, mesh: AbstractMesh) -> Any:
    """The weights: types with shardings. Those of all layers are stacked."""

    def of(shape: tuple[int, ...], *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))

    n, d, f, heads, groups = options.layers, options.width, options.hidden, options.heads, options.groups
    size = d // heads
    return {
        "embedding": of((options.words, d), "devices", "hosts"),
        "layers": {
            "attention norm": of((n, d)),
            "query": of((n, d, heads, size), None, "hosts", "devices"),
            "key": of((n, d, groups, size), None, "hosts", "devices"),
            "value": of((n, d, groups, size), None, "hosts", "devices"),
            "output": of((n, heads, size, d), None, "devices", None, "hosts"),
            "mlp norm": of((n, d)),
            "gate": of((n, d, f), None, "hosts", "devices"),
            "up": of((n, d, f), None, "hosts", "devices"),
            "down": of((n, f, d), None, "devices", "hosts"),
        },
        "norm": of((d,)),
        "head": of((d, options.words), "hosts", "devices"),
    }


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divided by its root mean square."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def turned(x: jax.Array) -> jax.Array:
    """Queries or keys, turned by their place in the sequence (rotary embedding)."""
    length, size = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] / 500_000 ** (jnp.arange(0, size, 2) / size)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """Attention and a gated MLP, each added to what comes in."""
    h = normed(x, w["attention norm"])
    q, k, v = (jnp.einsum("btd,dhs->bths", h, w[name]) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
    x = x + jnp.einsum("bths,hsd->btd", mixed, w["output"])
    h = normed(x, w["mlp norm"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def train_step(remat: bool, sharding: NamedSharding, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """One step of AdamW on next tokens.

    **Arguments:** `remat` whether each layer is in a `jax.checkpoint`; `sharding` of the residual stream; `state` the
    weights, their copies in f32 and Adam's moments.
    """
    weights, copies, moments = state
    block = jax.checkpoint(layer, policy=None) if remat else layer

    def loss_of(weights: Any) -> jax.Array:
        x = jax.lax.with_sharding_constraint(weights["embedding"][tokens], sharding)
        x, _ = jax.lax.scan(block, x, weights["layers"])
        logits = (normed(x, weights["norm"]) @ weights["head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    updates, moments = optax.adamw(1e-4).update(gradients, moments, copies)
    copies = optax.apply_updates(copies, updates)
    return (jax.tree.map(lambda w, c: c.astype(w.dtype), weights, copies), copies, moments), loss


def main() -> None:
    """Print the table."""
    options = parse()
    target = f"h100:{options.hosts}x{options.devices}"
    mesh = AbstractMesh(
        (options.hosts, options.devices), ("hosts", "devices"), axis_types=(AxisType.Auto,) * 2
    )
    weights = shapes(options, mesh)
    copies = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=w.sharding), weights)
    like = {w.shape: w.sharding for w in jax.tree.leaves(copies)}
    moments = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(
            m.shape, m.dtype, sharding=like.get(m.shape, NamedSharding(mesh, P()))
        ),
        jax.eval_shape(optax.adamw(1e-4).init, copies),
    )
    state = (weights, copies, moments)
    count = sum(w.size for w in jax.tree.leaves(weights))
    print(f"{count / 1e9:.1f} billion weights on {target}, within {options.budget} of each device")
    stream = NamedSharding(mesh, P("hosts", None, None))
    rows = []
    for batch in options.batches:
        tokens = jax.ShapeDtypeStruct(
            (batch, options.length), jnp.int32, sharding=NamedSharding(mesh, P("hosts", None))
        )
        plain, by_hand = (partial(train_step, remat, stream) for remat in (False, True))
        row: dict[str, Any] = {"batch": batch}
        for name, step in (("plain", plain), ("by hand", by_hand)):
            row[name] = jaxremat.memory(step, state, tokens, donate_argnums=0, target=target).peak_nbytes
        began = time.monotonic()
        try:
            plan = jaxremat.plan(
                plain,
                state,
                tokens,
                budget=options.budget,
                donate_argnums=0,
                target=target,
                offload=options.offload,
            )
            row |= {"planned": plan.peak_nbytes, "overhead": plan.compiled_overhead}
        except jaxremat.InfeasibleBudgetError as error:
            row |= {"least": error.min_peak_nbytes}
        row["seconds"] = round(time.monotonic() - began)
        rows.append(row)
        print(said(row), flush=True)
    if options.save:
        asked = {"kind": "llama", "target": target, "budget": options.budget, "weights": count}
        asked |= {"offload": True} if options.offload else {}
        options.save.write_text(json.dumps({**asked, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def markdown(record: dict[str, Any]) -> str:
    """What was saved, as a table with its title."""
    size = jaxremat.format_nbytes
    weights, each = (
        f"{record['weights'] / 1e9:.0f} billion weights",
        f"within {record['budget']} of each device",
    )
    lines = [
        f"### {weights}{', with host memory,' if record.get('offload') else ''} on {record['target']}, {each}",
        "The peak of one device for a number of sequences: of the step as written, with `jax.checkpoint` around\n"
        "each layer, and planned. The planned step's time is a roofline's, relative to the step as written\n"
        "(`examples/llama_70b.py`).",
        "| sequences | as written | by hand | planned | time | planned in |\n|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        planned = (
            (f"at least {size(row['least'])}", "")
            if "least" in row
            else (size(row["planned"]), f"{row['overhead']:+.1%}")
        )
        cells = (str(row["batch"]), size(row["plain"]), size(row["by hand"]), *planned, f"{row['seconds']} s")
        lines[-1] += f"\n| {' | '.join(cells)} |"
    return "\n\n".join(lines)


def said(row: dict[str, Any]) -> str:
    """A row in words."""
    size = jaxremat.format_nbytes
    words = f"{row['batch']:4d} sequences: plain {size(row['plain'])}, by hand {size(row['by hand'])}, "
    if "least" in row:
        return words + f"planned: needs at least {size(row['least'])} ({row['seconds']} s)"
    return words + f"planned {size(row['planned'])} at {row['overhead']:+.1%} ({row['seconds']} s)"


if __name__ == "__main__":
    main()
