"""Steps on eight devices: plans per device, the bytes sent between devices, and the error of the first prediction.

    python -m examples.benchmarks.sharded all                         # eight devices of this host
    python -m examples.benchmarks.sharded all --target h100x8 --save  # by the compiler of eight H100s

*mlp* and *transformer* with their weights and batch over all devices (fsdp), heads and hidden units (tp), or both;
*resnet* with its batch, and statistics of all of it; *mlp mapped* with both passes in a `shard_map`. Budgets are shares
of the plain step's temporaries. Nothing is timed: overheads are rooflines of the compiled programs, whose kernels run
one after the other, collectives too.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

if __name__ == "__main__":  # before JAX starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxremat
from examples.benchmarks.networks.convolutional import ResNet
from examples.benchmarks.plans import of_plan
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid, key, least, percent
from jaxremat import format_nbytes
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._roofline import kernels

DEVICES = 8
MESHES = {"fsdp": {"data": DEVICES}, "tp": {"model": DEVICES}, "both": {"data": DEVICES // 2, "model": 2}}
CASES = ("mlp fsdp", "mlp mapped", "transformer fsdp", "transformer tp", "transformer both", "resnet data")
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"

Case = tuple[Callable[..., Any], tuple[Any, ...]]


class Layouts:
    """Types of arguments on a mesh: of the host's devices, or of a target's, which are not here."""

    def __init__(self, axes: dict[str, int], target: str | None, dtype: Any):
        names, sizes = tuple(axes), tuple(axes.values())
        kinds = (AxisType.Auto,) * len(axes)
        if target is None:
            self.mesh: Any = Mesh(np.array(jax.devices()).reshape(sizes), names, axis_types=kinds)
        else:
            self.mesh = AbstractMesh(sizes, names, axis_types=kinds)
        self.dtype = dtype
        self.data = "data" if "data" in axes else None
        self.model = "model" if "model" in axes else None

    def on(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*axes))

    def __call__(self, shape: tuple[int, ...], *axes: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype, sharding=self.on(*axes))


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(weights: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), weights, gradients), value

    return step


def mlp(of: Layouts, scale: int, layers: int = 6) -> Case:
    """Residual layers of two products."""

    def loss(weights: Any, x: Any) -> Any:
        for a, b in weights:
            x = jax.nn.gelu(x @ a) @ b + x
        return (x.astype(jnp.float32) ** 2).mean()

    width, rows = 256 * scale, 4096 * scale
    pair = of((width, 4 * width), of.data, of.model), of((4 * width, width), of.model or of.data, None)
    return trained(loss), ([pair] * layers, of((rows, width), of.data, None))


def mapped(of: Layouts, scale: int) -> Case:
    """The same perceptron, with its batch divided and both passes in a `shard_map`, as it is written by hand."""
    whole, (weights, x) = mlp(of, scale)

    def local(weights: Any, x: Any) -> Any:
        return jax.tree.map(partial(jax.lax.pmean, axis_name="data"), whole(weights, x))

    step = jax.shard_map(
        local, mesh=of.mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=False
    )
    return step, (jax.tree.map(lambda a: of(a.shape), weights), x)


def transformer(of: Layouts, scale: int, layers: int = 4) -> Case:
    """A decoder; attention over `model` by heads."""
    width, heads, rows, length, words = 256 * scale, 8, 16 * scale, 256 * scale, 512 * scale
    data, model = of.data, of.model

    def normed(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def block(p: Any, x: Any) -> Any:
        h = normed(x)
        q, k, v = (jnp.einsum("btd,dhk->bhtk", h, p[name]) for name in ("q", "k", "v"))
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / (width // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bhtk,hkd->btd", mixed, p["o"])
        return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]

    def loss(p: Any, tokens: Any) -> Any:
        x = jax.lax.with_sharding_constraint(p["embedding"][tokens], of.on(data, None, None))
        for layer in p["blocks"]:
            x = block(layer, x)
        logits = (normed(x) @ p["head"]).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    inner = {name: of((width, heads, width // heads), data, model, None) for name in ("q", "k", "v")}
    inner["o"] = of((heads, width // heads, width), model, None, data)
    inner |= {"up": of((width, 4 * width), data, model), "down": of((4 * width, width), model, data)}
    weights = {
        "embedding": of((words, width), None, data),
        "head": of((width, words), data, model),
        "blocks": [inner] * layers,
    }
    return trained(loss), (weights, of((rows, length), data, None, dtype=jnp.int32))


def resnet(of: Layouts, scale: int) -> Case:
    """A residual network whose weights every device has."""
    net = ResNet(blocks=(1, 1, 1, 1), width=16 * scale, classes=100)
    images = of((16 * 8 * scale, 64, 64, 3), "data", dtype=jnp.float32)
    shapes = jax.eval_shape(net.init, jax.random.key(0), images)
    weights = jax.tree.map(lambda a: of(a.shape, dtype=a.dtype), shapes)

    def loss(weights: Any, images: Any, labels: Any) -> Any:
        made, _ = net.apply(weights, images, mutable=["batch_stats"])
        scores = jax.nn.log_softmax(made)
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    return trained(loss), (weights, images, of(images.shape[:1], "data", dtype=jnp.int32))


def case(name: str, target: str | None, scale: int) -> Case:
    """A step and the types of its arguments."""
    network, how = name.split()
    dtype = jnp.float32 if target is None else jnp.bfloat16
    axes = MESHES.get(how, MESHES["fsdp"])
    if how == "mapped" and target is None:
        axes = {
            "data": len(jax.devices())
        }  # any number will do, also the one of a process that asked for no more
    of = Layouts(axes, target, dtype)
    made = {"mlp": mapped if how == "mapped" else mlp, "transformer": transformer, "resnet": resnet}
    return made[network](of, scale)


def sent(text: str) -> dict[str, int]:
    """How many arrays devices send each other, by kind."""
    counts: Counter[str] = Counter()
    for found in re.finditer(rf"= .*? ({KINDS})(?:-start)?\(([^)]*)\)", text):
        counts[found[1]] += found[2].count("%")
    return dict(sorted(counts.items()))


def sent_nbytes(text: str) -> int:
    """What a device sends to others in one run."""
    return sum(kernel.total_trips * kernel.sent_nbytes for kernel in kernels(parse(text)))


def measured(name: str, share: float, target: str | None, scale: int) -> Record:
    """What became of a step within a share of its temporaries."""
    step, args = case(name, target, scale)
    there: Any = {} if target is None else {"target": target}
    plain = jaxremat.memory(step, *args, donate_argnums=0, **there)
    budget = plain.base_nbytes + int(share * plain.temporaries_nbytes)
    whole = jaxremat.optimize(2 * plain.peak_nbytes, donate_argnums=0, **there)(step)
    text = whole.compile(*args).as_text()
    row: Record = {"plain_nbytes": plain.peak_nbytes, "budget_nbytes": budget}
    row |= {"plain_sent": sent(text), "plain_sent_nbytes": sent_nbytes(text)}
    planned = jaxremat.optimize(budget, donate_argnums=0, planning=jaxremat.Planning(cache=False), **there)(
        step
    )
    try:
        plan = planned.plan(*args)
    except jaxremat.InfeasibleBudgetError as error:
        return {**row, "least_nbytes": error.min_peak_nbytes}
    text = planned.compile(*args).as_text()
    first = plan.rounds[0] if plan.rounds else None
    row |= of_plan(plan, plain.temporaries_nbytes)
    row["first_prediction"] = first and first.predicted_peak_nbytes / first.compiled_peak_nbytes - 1
    row |= {"gathered_again": plan.gathered_again, "sent": sent(text), "sent_nbytes": sent_nbytes(text)}
    return row


def rows(asked: Asked, name: str) -> Rows:
    """A plan for each share."""
    return {
        key(name, share): partial(measured, name, share, asked.target, asked.times) for share in asked.shares
    }


def markdown(found: Sequence[Record]) -> str:
    """The tables, one for each device."""
    return "\n\n".join(map(_of_platform, found))


def _of_platform(record: Record) -> str:
    lines = []
    for each, row in record["rows"].items():
        name, share = each.split(" | ")
        cells = [
            name,
            percent(share),
            *(format_nbytes(row[f"{w}_nbytes"]) for w in ("plain", "budget")),
        ]
        both = [where for where in ("plain_sent", "sent") if where in row]
        if least(row):
            cells += [least(row), "", "", ""]
        else:
            first = row["first_prediction"]
            cells += [
                f"{row['peak_nbytes'] / row['budget_nbytes']:.1%}",
                "" if first is None else f"{first:+.1%}",
            ]
            cells += [f"{row['overhead']:.1%}", f"{row['compiled_overhead']:.1%}"]
        cells.append(" → ".join(str(sum(row[where].values())) for where in both))
        cells.append(" → ".join(format_nbytes(row[f"{where}_nbytes"]) for where in both))
        lines.append(cells)
    platform = record["environment"]["platform"]
    where = "of this host" if platform == "cpu" else f"by the compiler for {platform}"
    return "\n\n".join([f"### On eight devices {where}", LEGEND, grid(HEADER, lines)])


HEADER = (
    *("step", "share", "plain", "budget", "used", "first prediction", "overhead, predicted", "compiled"),
    *("sent", "bytes sent"),
)
LEGEND = """\
Bytes are per device. *First prediction* is the predicted peak when only the plain step was compiled. Overheads are
rooflines of the compiled programs, with their collectives. *Sent* counts the arrays of collectives in the plain and in
the planned step, *bytes sent* the bytes that one device sends.\
"""


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=1, help="multiple of width and length (default: 1)")


BENCHMARK = Benchmark(
    "sharded", __doc__, CASES, rows, markdown, ("mlp fsdp",), (0.75, 0.5), options=_options, shared=True
)

if __name__ == "__main__":
    BENCHMARK.main()
