"""Train a language model on the bytes of a text, within a budget, on one device or a mesh, and resume where it stopped.

    python examples/llm.py --data corpus.txt --run runs/small --budget 24GiB
    python examples/llm.py --data corpus.txt --run runs/large --budget 60GiB --layers 48 --width 4096 --heads 32 --tp 8

Needs `pip install grain orbax-checkpoint`. Groups of `--tp` devices share each layer's heads and hidden units, `--fsdp`
such groups (all, by default) the parameters, and all groups the batch. On several machines that share `--data` and
`--run`, start the same line on each, with its number and the first machine's address and a free port:

    python examples/llm.py ... --coordinator host0:1234 --processes 2 --process 0     # on the other --process 1

Without `--budget` the step is a plain `jax.jit`. The folder `--run` holds the training state, the position in the data
and the plan: the same line continues from there, without planning again.
"""

import argparse
import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from grain.checkpoint import CheckpointRestore, CheckpointSave
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxremat

HALF: Any = {"dtype": jnp.bfloat16}  # what layers compute in; their parameters are float32
AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("tp", "fsdp"),  # bytes, width
    "head": ("fsdp", "tp"),
    "query": (None, "fsdp", "tp", None),  # layer, width, head, its width
    "key": (None, "fsdp", "tp", None),
    "value": (None, "fsdp", "tp", None),
    "project": (None, "tp", None, "fsdp"),
    "gate": (None, "fsdp", "tp"),  # layer, width, hidden units
    "up": (None, "fsdp", "tp"),
    "down": (None, "tp", "fsdp"),
}
"""Over which axes of the mesh each weight is divided, and what the optimizer has of it. Norms are everywhere."""
ROWS = PartitionSpec(("data", "fsdp"))
"""Over which ones batches are."""


def rotated(x: jax.Array) -> jax.Array:
    """Queries or keys of (batch, length, heads, width), turned by an angle that grows with their place."""
    frequencies = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (
        first * jnp.cos(angles) - second * jnp.sin(angles),
        first * jnp.sin(angles) + second * jnp.cos(angles),
    )
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Layer(nnx.Module):
    """Causal attention and a gated feed-forward network, each normalised first and added."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        dense: Any = partial(nnx.LinearGeneral, use_bias=False, **HALF, rngs=rngs)
        self.norms = nnx.List(nnx.RMSNorm(width, **HALF, rngs=rngs) for _ in range(2))
        self.query, self.key, self.value = (dense(width, (heads, width // heads)) for _ in range(3))
        self.project = dense((heads, width // heads), width, axis=(-2, -1))
        self.gate, self.up, self.down = (
            dense(width, 4 * width),
            dense(width, 4 * width),
            dense(4 * width, width),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[0](x)
        query, key = rotated(self.query(y)), rotated(self.key(y))
        x += self.project(jax.nn.dot_product_attention(query, key, self.value(y), is_causal=True))
        y = self.norms[1](x)
        x += self.down(nnx.silu(self.gate(y)) * self.up(y))
        return jax.lax.with_sharding_constraint(x, ROWS)


class Decoder(nnx.Module):
    """Layers of stacked weights, scanned, between an embedding of bytes and a head."""

    def __init__(self, layers: int, width: int, heads: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, width, **HALF, rngs=rngs)
        stack = nnx.vmap(lambda rngs: Layer(width, heads, rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=layers)(stack)(rngs)
        self.norm = nnx.RMSNorm(width, **HALF, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, **HALF, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        through = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(self.norm(through(self.embed(tokens), self.layers))).astype(jnp.float32)


class Text(grain.sources.RandomAccessDataSource):
    """A file as sequences of bytes, none left out between; each ends with the first byte of the next."""

    def __init__(self, path: Path, length: int):
        self.bytes, self.length = np.memmap(path, np.uint8, "r"), length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self.bytes[index * self.length : (index + 1) * self.length + 1])


def planned(train_step: Any, args: argparse.Namespace, like: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The step within a budget: as this run planned it before, if it is still the same step, else planned now."""
    saved = args.run / f"plan-{args.budget}.json"
    if saved.exists():
        step = jaxremat.optimize(plan=jaxremat.Plan.load(saved), **options)(train_step)
        with contextlib.suppress(jaxremat.PlanMismatchError, jaxremat.InfeasibleBudgetError):
            step.plan(*like)
            return step
    step = jaxremat.optimize(args.budget, **options)(train_step)
    plan = step.plan(*like)
    sync_global_devices("planned")  # all have looked for the file
    if jax.process_index() == 0:
        print(plan)
        plan.save(saved)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a text file; every byte is a token")
    parser.add_argument("--run", type=Path, required=True, help="folder for checkpoints and the plan")
    parser.add_argument("--budget", help='bytes per device, such as "24GiB", or "min"')
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step, on all devices together")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=6e-4, help="learning rate")
    parser.add_argument("--tp", type=int, default=1, help="devices that share a layer")
    parser.add_argument("--fsdp", type=int, help="groups of `--tp` devices that share the parameters")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--save-every", type=int, default=1000, help="steps")
    parser.add_argument("--coordinator", help="host:port of the first of several processes")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    if args.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    say = partial(print, flush=True) if jax.process_index() == 0 else lambda _: None
    devices = np.array(jax.devices()).reshape(-1, args.fsdp or jax.device_count() // args.tp, args.tp)
    mesh = Mesh(devices, ("data", "fsdp", "tp"))
    jax.set_mesh(mesh)

    # This process reads the rows of a batch that are on its devices.
    rows = NamedSharding(mesh, ROWS)
    parts = rows.addressable_devices_indices_map((args.batch,)).values()
    held = sorted({part[0].indices(args.batch)[:2] for part in parts if part})
    count = sum(stop - start for start, stop in held)
    shuffled = grain.MapDataset.source(Text(args.data, args.length)).seed(0).shuffle()
    share = shuffled[: len(shuffled) // args.batch * args.batch][held[0][0] // count :: args.batch // count]
    batches = iter(share.repeat().batch(count).to_iter_dataset())

    schedule = optax.warmup_cosine_decay_schedule(0, args.rate, args.steps // 20, args.steps, args.rate / 10)
    tx = optax.adamw(schedule, b2=0.95, weight_decay=0.1)

    def new() -> Any:
        model = Decoder(args.layers, args.width, args.heads, nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def train_step(state: Any, text: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        tokens = text.astype(jnp.int32)

        def loss_fn(model: Decoder) -> Any:
            logits = model(tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean(), (logits.argmax(-1) == tokens[:, 1:]).mean()

        metrics, grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), metrics

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        axes = [AXES[name] for key in path if (name := str(getattr(key, "key", ""))) in AXES]
        return NamedSharding(mesh, PartitionSpec(*axes[0] if axes else ()))

    graph, abstract = nnx.split(nnx.eval_shape(new))
    shardings = jax.tree.map_with_path(sharding_of, abstract)
    create = jax.jit(lambda: nnx.state(new()), out_shardings=shardings)
    like = create.eval_shape()  # of the state, with shardings
    keeper = ocp.CheckpointManager(args.run.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))
    options = {"donate_argnums": 0, "out_shardings": (shardings, NamedSharding(mesh, PartitionSpec()))}
    step = jax.jit(train_step, **options)
    if args.budget:
        text = jax.ShapeDtypeStruct((args.batch, args.length + 1), jnp.uint8, sharding=rows)
        step = planned(train_step, args, (like, text), options)

    done = keeper.latest_step() or 0
    if done:
        parts = {"state": ocp.args.StandardRestore(like), "batches": CheckpointRestore(batches)}
        state = keeper.restore(done, args=ocp.args.Composite(**parts))["state"]
        say(f"resumed after step {done}")
    else:
        state = create()
    recent, began = [], time.perf_counter()
    for number in range(done + 1, args.steps + 1):
        local = next(batches)
        text = jax.make_array_from_process_local_data(rows, local, (args.batch, args.length + 1))
        state, metrics = step(state, text)
        recent.append(metrics)
        if number % args.log_every == 0 or number == args.steps:
            loss, accuracy = np.mean(jax.device_get(recent), axis=0)
            speed = len(recent) * args.batch * args.length / (time.perf_counter() - began)
            place = f"step {number} of {args.steps}"
            say(f"{place}: loss {loss:.4f} nats per byte, accuracy {accuracy:.1%}, {speed:.0f} tokens/s")
            recent, began = [], time.perf_counter()
        if number % args.save_every == 0 or number == args.steps:
            parts = {"state": ocp.args.StandardSave(state), "batches": CheckpointSave(batches)}
            keeper.save(number, args=ocp.args.Composite(**parts), force=True)
    keeper.close()


if __name__ == "__main__":
    main()
