"""Steps on eight devices: planned per device, what they send each other, and how true the first prediction was.

    python -m examples.benchmarks.sharded                         # eight devices of this host
    python -m examples.benchmarks.sharded --target h100x8 --save  # by the compiler of eight H100s

*mlp* and *transformer* with their weights and batch over all devices (fsdp), heads and hidden units (tp), or both;
*resnet* with its batch, and statistics of all of it. Budgets are shares of the plain step's temporaries. Nothing is
timed: overheads are rooflines of the compiled programs, whose kernels run one after the other, collectives too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxremat
from examples.benchmarks import records
from examples.benchmarks.networks.resnet import ResNet
from jaxremat import format_nbytes
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._roofline import kernels

RESULTS = Path(__file__).parent / "results" / "sharded"
MESHES = {"fsdp": {"data": 8}, "tp": {"model": 8}, "both": {"data": 4, "model": 2}}
CASES = ("mlp fsdp", "transformer fsdp", "transformer tp", "transformer both", "resnet data")
SHARES = (0.75, 0.5)
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
    of = Layouts(MESHES["fsdp" if how == "data" else how], target, dtype)
    return {"mlp": mlp, "transformer": transformer, "resnet": resnet}[network](of, scale)


def sent(text: str) -> dict[str, int]:
    """How many arrays devices send each other, by kind."""
    counts: Counter[str] = Counter()
    for found in re.finditer(rf"= .*? ({KINDS})(?:-start)?\(([^)]*)\)", text):
        counts[found[1]] += found[2].count("%")
    return dict(sorted(counts.items()))


def sent_nbytes(text: str) -> int:
    """What a device sends to others in one run."""
    return sum(kernel.total_trips * kernel.sent_nbytes for kernel in kernels(parse(text)))


def measured(name: str, share: float, target: str | None, scale: int) -> dict[str, Any]:
    """What became of a step within a share of its temporaries."""
    step, args = case(name, target, scale)
    there: Any = {} if target is None else {"target": target}
    plain = jaxremat.memory(step, *args, donate_argnums=0, **there)
    budget = plain.base_nbytes + int(share * plain.temporaries_nbytes)
    row: dict[str, Any] = {
        "case": name,
        "share": share,
        "plain_nbytes": plain.peak_nbytes,
        "budget_nbytes": budget,
    }
    whole = jaxremat.optimize(2 * plain.peak_nbytes, donate_argnums=0, **there)(step)
    text = whole.compile(*args).as_text()
    row |= {"plain_sent": sent(text), "plain_sent_nbytes": sent_nbytes(text)}
    planned = jaxremat.optimize(budget, donate_argnums=0, cache=False, **there)(step)
    try:
        plan = planned.plan(*args)
    except jaxremat.InfeasibleBudgetError as error:
        return {**row, "least_nbytes": error.min_peak_nbytes}
    first = plan.rounds[0] if plan.rounds else None
    text = planned.compile(*args).as_text()
    return {
        **row,
        "peak_nbytes": plan.peak_nbytes,
        "used": plan.peak_nbytes / budget,
        "first_prediction": first and first.predicted_peak_nbytes / first.compiled_peak_nbytes - 1,
        "overhead": plan.overhead,
        "compiled_overhead": plan.compiled_overhead,
        "rounds": len(plan.rounds),
        "form": [choice.kind for choice in plan.form.choices],
        "gathered_again": plan.gathered_again,
        "sent": sent(text),
        "sent_nbytes": sent_nbytes(text),
    }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, help=f"of {', '.join(CASES)}")
    parser.add_argument("--target", help="devices to compile for, else this host's")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    rows = []
    for name in asked.cases:
        for share in asked.shares:
            rows.append(measured(name, share, asked.target, asked.scale))
            print(json.dumps(rows[-1]), flush=True)
    if asked.save:
        known = {"kind": "sharded", "date": records.today(), "jaxremat": records.library_version()}
        known |= {"jax": jax.__version__, "target": asked.target or "cpu", "scale": asked.scale}
        records.write(RESULTS / f"{asked.target or 'cpu'}.json", {**known, "rows": rows})


def markdown(record: records.Record) -> str:
    """What was saved, as a table with its title."""
    where = "of this host" if record["target"] == "cpu" else f"by the compiler for {record['target']}"
    lines = [
        f"### On eight devices {where}",
        "Bytes of one device. *First prediction* is of the peak, before anything but the plain step was compiled;\n"
        "overheads are rooflines of the compiled programs, collectives among their kernels; *sent* counts the arrays\n"
        "that collectives are of, in the plain step and in the planned one, and *bytes sent* what a device sends.",
        "| step | share | plain | budget | used | first prediction | overhead, predicted | compiled | sent "
        "| bytes sent |",
    ]
    lines[-1] += f"\n|---|{'---:|' * 9}"
    for row in record["rows"]:
        if "least_nbytes" in row:
            found = [
                f"at least {format_nbytes(row['least_nbytes'])}",
                "",
                "",
                "",
                str(sum(row["plain_sent"].values())),
                format_nbytes(row["plain_sent_nbytes"]),
            ]
        else:
            counts = (sum(row[each].values()) for each in ("plain_sent", "sent"))
            first = row["first_prediction"]
            found = [
                f"{row['used']:.1%}",
                "" if first is None else f"{first:+.1%}",
                f"{row['overhead']:.1%}",
                f"{row['compiled_overhead']:.1%}",
                " → ".join(map(str, counts)),
                " → ".join(format_nbytes(row[each]) for each in ("plain_sent_nbytes", "sent_nbytes")),
            ]
        sizes = [format_nbytes(row[each]) for each in ("plain_nbytes", "budget_nbytes")]
        cells = [row["case"], f"{row['share']:.0%}", *sizes, *found]
        lines[-1] += f"\n| {' | '.join(cells)} |"
    return "\n\n".join(lines)


if __name__ == "__main__":
    main()
