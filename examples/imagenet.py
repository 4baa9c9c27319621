"""Train a ResNet or ViT on a folder of images, within a budget, on one device or many, and resume where it stopped.

    python examples/imagenet.py --data imagenet/train --val imagenet/val --run runs/r50 --budget 24GiB

The data is a folder per class. Needs `pip install grain orbax-checkpoint pillow`. On several machines that share
`--data` and `--run`, start the same line on each, with its number and the first machine's address and a free port:

    python examples/imagenet.py ... --coordinator host0:1234 --processes 2 --process 0     # on the other --process 1

Without `--budget` the step is a plain `jax.jit`. The folder `--run` holds the training state, the position in the data
and the plan: the same line continues from there, without planning again.
"""

import argparse
import contextlib
import math
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
from flax import linen as nn
from grain.checkpoint import CheckpointRestore, CheckpointSave
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from PIL import Image

import jaxremat

HALF: Any = {"dtype": jnp.bfloat16}  # what layers compute in; their parameters are float32


class ResNet(nn.Module):
    """Stages of so many residual blocks, each after the first at half the resolution and twice the width."""

    classes: int
    blocks: tuple[int, ...]
    bottleneck: bool = False
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def normed(x: jax.Array, width: int, size: int, stride: int = 1, scale: float = 1.0) -> jax.Array:
            x = nn.Conv(width, (size, size), stride, use_bias=False, **HALF)(x)
            return nn.BatchNorm(not train, momentum=0.9, scale_init=nn.initializers.constant(scale), **HALF)(
                x
            )

        x = nn.max_pool(nn.relu(normed(x, self.width, 7, 2)), (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.blocks):
            for place in range(count):
                width, stride = self.width * 2**stage, 2 if stage > 0 and place == 0 else 1
                if self.bottleneck:
                    y = nn.relu(normed(nn.relu(normed(x, width, 1)), width, 3, stride))
                    y = normed(y, 4 * width, 1, scale=0.0)
                else:
                    y = normed(nn.relu(normed(x, width, 3, stride)), width, 3, scale=0.0)
                shortcut = x if x.shape == y.shape else normed(x, y.shape[-1], 1, stride)
                x = nn.relu(shortcut + y)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class ViT(nn.Module):
    """A transformer on image patches, of which the mean is classified."""

    classes: int
    width: int
    layers: int = 12
    patch: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.width, (self.patch, self.patch), self.patch, **HALF)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        x += self.param("positions", nn.initializers.normal(0.02), (x.shape[1], self.width)).astype(x.dtype)
        for _ in range(self.layers):
            x += nn.MultiHeadDotProductAttention(self.width // 64, **HALF)(nn.LayerNorm(**HALF)(x))
            y = nn.Dense(4 * self.width, **HALF)(nn.LayerNorm(**HALF)(x))
            x += nn.Dense(self.width, **HALF)(nn.gelu(y))
        return nn.Dense(self.classes)(nn.LayerNorm(**HALF)(x).mean(1))


NETS: dict[str, Any] = {
    "resnet10": partial(ResNet, blocks=(1, 1, 1, 1)),
    "resnet18": partial(ResNet, blocks=(2, 2, 2, 2)),
    "resnet50": partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True),
    "vit-s": partial(ViT, width=384),
    "vit-b": partial(ViT, width=768),
}


def listed(root: Path, labels: dict[str, int]) -> list[tuple[str, int]]:
    """Paths and labels of the images in a folder per class."""
    return [(str(path), labels[path.parent.name]) for path in sorted(root.glob("*/*"))]


def crop(item: tuple[str, int], rng: np.random.Generator | None, size: int) -> Any:
    """A random part of an image or of its mirror image; without `rng` its middle."""
    path, label = item
    image = Image.open(path).convert("RGB") if path else Image.new("RGB", (size, size))
    wide = high = 0.875 * min(image.size)
    x, y = (image.width - wide) / 2, (image.height - high) / 2
    if rng is not None:
        area, ratio = rng.uniform(0.08, 1) * image.width * image.height, math.exp(rng.uniform(-0.29, 0.29))
        wide, high = min(image.width, (area * ratio) ** 0.5), min(image.height, (area / ratio) ** 0.5)
        x, y = rng.uniform(0, image.width - wide), rng.uniform(0, image.height - high)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, (x, y, x + wide, y + high)))
    return (pixels[:, ::-1] if rng is not None and rng.random() < 0.5 else pixels), np.int32(label)


def reader(images: list[tuple[str, int]], args: argparse.Namespace, epochs: int) -> Any:
    """This process's share of each batch, in another order every epoch; for 0 epochs of all images, filled up."""
    rest, share = len(images) % args.batch, slice(jax.process_index(), None, jax.process_count())
    if epochs:
        items = grain.MapDataset.source(images).seed(0).shuffle()[: len(images) - rest]
        items = items[share].repeat(epochs).random_map(partial(crop, size=args.size))
    else:
        items = grain.MapDataset.source(images + [("", -1)] * (-rest % args.batch))
        items = items[share].map(partial(crop, rng=None, size=args.size))
    batches = items.batch(args.batch // jax.process_count()).to_iter_dataset()
    return iter(batches.mp_prefetch(grain.MultiprocessingOptions(args.workers)) if args.workers else batches)


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
    parser.add_argument("--data", type=Path, required=True, help="training images, a folder per class")
    parser.add_argument("--val", type=Path, help="images to evaluate on after every epoch")
    parser.add_argument("--run", type=Path, required=True, help="folder for checkpoints and the plan")
    parser.add_argument("--budget", help='bytes per device, such as "24GiB", or "min"')
    parser.add_argument("--model", choices=NETS, default="resnet50")
    parser.add_argument("--width", type=int, help="width, by default the model's")
    parser.add_argument("--size", type=int, default=224, help="pixels per side of an image")
    parser.add_argument("--batch", type=int, default=256, help="images per step, on all devices together")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--rate", type=float, help="learning rate; 0.1 for 256 images, ViTs 0.001 for 1,024")
    parser.add_argument("--fsdp", action="store_true", help="shard the state over devices")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--save-every", type=int, default=1000, help="steps")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images; else threads")
    parser.add_argument("--coordinator", help="host:port of the first of several processes")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    if args.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    say = partial(print, flush=True) if jax.process_index() == 0 else lambda _: None
    labels = {path.name: label for label, path in enumerate(sorted(args.data.glob("*/")))}
    images, others = listed(args.data, labels), listed(args.val, labels) if args.val else []
    epoch = len(images) // args.batch
    total = args.epochs * epoch
    net = NETS[args.model](len(labels), **({"width": args.width} if args.width else {}))
    vit = args.model.startswith("vit")
    rate = args.rate or args.batch * (0.001 / 1024 if vit else 0.1 / 256)
    schedule = optax.warmup_cosine_decay_schedule(0, rate, total // 20, total)
    sgd = optax.chain(optax.add_decayed_weights(5e-5), optax.sgd(schedule, 0.9, nesterov=True))
    tx = optax.adamw(schedule, weight_decay=0.05) if vit else sgd

    def logits_of(state: Any, images: jax.Array, train: bool) -> Any:
        variables = {"params": state["params"], "batch_stats": state["batch_stats"]}
        images = (images.astype(jnp.bfloat16) - 120) / 60
        return net.apply(variables, images, train, mutable=["batch_stats"])

    def new_state() -> Any:
        variables = net.init(jax.random.key(0), jnp.zeros((1, args.size, args.size, 3), jnp.bfloat16), True)
        return {"batch_stats": {}, **variables, "opt": tx.init(variables["params"])}

    def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, changed = logits_of({**state, "params": params}, images, True)
            wanted = optax.smooth_labels(jax.nn.one_hot(labels, net.classes), 0.1)
            return optax.softmax_cross_entropy(logits, wanted).mean(), (logits, changed)

        (loss, (logits, changed)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        state = {**state, **changed, "params": optax.apply_updates(state["params"], updates), "opt": opt}
        return state, (loss, (logits.argmax(-1) == labels).mean())

    right = jax.jit(lambda state, x, labels: (logits_of(state, x, False)[0].argmax(-1) == labels).sum())
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows, copied = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    on_devices = partial(jax.make_array_from_process_local_data, rows)

    def sharding_of(leaf: Any) -> NamedSharding:
        axis = int(np.argmax(leaf.shape)) if leaf.ndim else 0
        divided = args.fsdp and leaf.size >= 1024 and leaf.shape[axis] % mesh.size == 0
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data")) if divided else copied

    shardings = jax.tree.map(sharding_of, jax.eval_shape(new_state))
    create = jax.jit(new_state, out_shardings=shardings)
    like = create.eval_shape()  # of the state, with shardings
    keeper = ocp.CheckpointManager(args.run.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))
    options = {"donate_argnums": 0, "out_shardings": (shardings, copied)}
    step = jax.jit(train_step, **options)
    if args.budget:
        pixels = jax.ShapeDtypeStruct((args.batch, args.size, args.size, 3), jnp.uint8, sharding=rows)
        numbers = jax.ShapeDtypeStruct((args.batch,), jnp.int32, sharding=rows)
        step = planned(train_step, args, (like, pixels, numbers), options)

    batches, done = reader(images, args, args.epochs), keeper.latest_step() or 0
    if done:
        parts = {"state": ocp.args.StandardRestore(like), "batches": CheckpointRestore(batches)}
        state = keeper.restore(done, args=ocp.args.Composite(**parts))["state"]
        say(f"resumed after step {done}")
    else:
        state = create()
    recent, began = [], time.perf_counter()
    for number in range(done + 1, total + 1):
        state, metrics = step(state, *map(on_devices, next(batches)))
        recent.append(metrics)
        if number % args.log_every == 0 or number % epoch == 0:
            loss, accuracy = np.mean(jax.device_get(recent), axis=0)
            speed = len(recent) * args.batch / (time.perf_counter() - began)
            place = f"epoch {math.ceil(number / epoch)}, step {number} of {total}"
            say(f"{place}: loss {loss:.4f}, accuracy {accuracy:.1%}, {speed:.0f} images/s")
            if number % epoch == 0 and others:
                count = sum(int(right(state, *map(on_devices, batch))) for batch in reader(others, args, 0))
                say(f"epoch {number // epoch}: {count / len(others):.1%} of other images right")
            recent, began = [], time.perf_counter()
        if number % args.save_every == 0 or number == total:
            parts = {"state": ocp.args.StandardSave(state), "batches": CheckpointSave(batches)}
            keeper.save(number, args=ocp.args.Composite(**parts), force=True)
    keeper.close()


if __name__ == "__main__":
    main()
