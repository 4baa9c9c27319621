"""Steps, batch size, budget -> a report in the terminal: the same training, plainly and within the budget.

The runs go side by side, a step of each in turn on the same batch, so that whatever else the machine does
meets all of them. A third run, the plain step from weights that differ in their last bit, is the yardstick
for how far rounding alone drives two trainings apart.

Seed and sizes -> what the demo trains: a Flax ResNet, scikit-learn's digits enlarged, and the train step.

Nothing here knows of jaxremat: it is the code of somebody who is about to run out of memory.
He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2015 (arXiv:1512.03385); basic blocks.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._api._optimize import optimize
from .._api._planning import memory
from .._compiler._memory_stats import MemoryStats
from .._compiler._program import compiler_options
from .._plan._plan import Plan
from .._plan._request import Planning
from .._runtime._budgets import parse_budget, read_budget
from .._runtime._bytes import format_nbytes

Batch = tuple[jax.Array, jax.Array]


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = partial(nn.Conv, self.features, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.8)
        y = nn.relu(norm()(conv((3, 3), self.stride)(x)))
        y = norm()(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv((1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network for small images; the defaults are a ResNet-14."""

    blocks: tuple[int, ...] = (2, 2, 2)
    width: int = 16
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.8)(x))
        for stage, repeats in enumerate(self.blocks):
            for index in range(repeats):
                x = Block(self.width * 2**stage, 2 if stage and not index else 1)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class State(train_state.TrainState):
    """Flax's train state and the running statistics of batch norm."""

    batch_stats: Any


def initial_state(net: ResNet, side: int, steps: int) -> State:
    """Parameters from seed 0, and AdamW with a one-cycle learning rate for so many steps."""
    # One program of XLA's own random bits compiles several times faster than threefry, one by one.
    init = jax.jit(net.init, static_argnums=2)
    variables = init(jax.random.key(0, impl="rbg"), jnp.zeros((1, side, side, 1)), True)
    rate = optax.cosine_onecycle_schedule(max(steps, 4), 5e-3)
    return State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.adamw(rate),
        batch_stats=variables["batch_stats"],
    )


def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    """Return one step of AdamW on the cross-entropy: the new state and the loss."""
    images, labels = batch

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, images, True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


@jax.jit
def correct(state: State, batch: Batch) -> jax.Array:
    """Return how many images of the batch the network classifies correctly."""
    images, labels = batch
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, images, False)
    return (logits.argmax(-1) == labels).sum()


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits, standardised, and their labels; a fifth is kept for testing."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    test_count: int

    @classmethod
    def load(cls, side: int) -> "Digits":
        """scikit-learn's 1,797 digits of 8 x 8 pixels, shuffled (seed 0) and enlarged to `side` x `side`."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = (images - images.mean()) / images.std()
        order = np.random.default_rng(0).permutation(len(labels))
        small = images[order].reshape(-1, 8, 8, 1).astype(np.float32)
        large = jax.image.resize(small, (len(labels), side, side, 1), "linear")
        return cls(np.asarray(large), labels[order].astype(np.int32), len(labels) // 5)

    @property
    def train_count(self) -> int:
        """The number of training images."""
        return len(self.labels) - self.test_count

    def batches(self, size: int, count: int) -> Iterator[Batch]:
        """Yield so many batches of training images; every epoch in a new order, the same on every run."""
        rng = np.random.default_rng(1)
        ahead = np.empty(0, np.int64)
        for _ in range(count):
            while len(ahead) < size:
                ahead = np.concatenate([ahead, self.test_count + rng.permutation(self.train_count)])
            chosen, ahead = ahead[:size], ahead[size:]
            yield jnp.asarray(self.images[chosen]), jnp.asarray(self.labels[chosen])

    def accuracy(self, state: State) -> float:
        """Return the share of the test images that the network classifies correctly."""
        test = self.images[: self.test_count], self.labels[: self.test_count]
        return int(correct(state, test)) / self.test_count


TrainStep = Callable[[State, Batch], tuple[State, jax.Array]]


_BAR_WIDTH = 24


@dataclass
class Run:
    """One of the trainings. **Fields:** `name`, `step`, `state`, the step's `memory`, `losses`, `seconds`."""

    name: str
    step: TrainStep
    state: State
    memory: MemoryStats
    losses: list[jax.Array] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self, batch: Batch) -> None:
        """Train on one batch, and time it until the results are there."""
        began = time.perf_counter()
        self.state, loss = jax.block_until_ready(self.step(self.state, batch))
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss)


def demo(
    console: Console,
    steps: int = 40,
    batch_size: int = 48,
    budget: str | None = None,
    *,
    blocks: tuple[int, ...] = (2, 2, 2),
    side: int = 32,
) -> Plan:
    """Run the demo and describe it on the console.

    **Arguments:** `budget` as text (`"min"` too), or None for half of the plain step's peak; `blocks` per stage of the
    network and the images' `side` in pixels.

    **Returns:** the plan that the second run followed.

    **Raises:** `BudgetError` and `InfeasibleBudgetError`, as `jaxremat.optimize` does.
    """
    asked = budget or "50% of peak"
    read_budget(asked)  # one that cannot be read is refused before anything is compiled
    digits = Digits.load(side)
    state = _copied(initial_state(ResNet(blocks), side, steps))
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    platform = jax.default_backend()
    console.print(
        f"[bold]Flax ResNet-{2 + 2 * sum(blocks)}[/], {weights:,} parameters, AdamW, "
        f"{side} x {side} digits, batch {batch_size}, {platform.upper()}",
        highlight=False,
    )
    example = next(digits.batches(batch_size, 1))

    with console.status("compiling the plain step"):
        began = time.perf_counter()
        jitted = jax.jit(train_step, donate_argnums=0, compiler_options=compiler_options(platform) or None)
        compiled = jitted.lower(state, example).compile()
        plain = Run("plain", compiled, _copied(state), MemoryStats.of(compiled))
        control = Run("control", compiled, _nudged(state), plain.memory)
    _did(console, f"plain step compiled: peak {format_nbytes(plain.memory.peak_nbytes)}", began)

    wanted = parse_budget(asked, None, lambda: (plain.memory.base_nbytes, plain.memory.temporaries_nbytes))
    within = "the least memory" if wanted == "min" else format_nbytes(wanted)
    began = time.perf_counter()
    step = optimize(wanted, donate_argnums=0, planning=Planning(time_limit=5.0))(train_step)
    plan = step.plan(state, example)  # shows its progress itself
    planned = Run("planned", step, _copied(state), memory(step, state, example))
    peak = format_nbytes(planned.memory.peak_nbytes)
    _did(console, f"planned and compiled within {within}: peak {peak}", began)

    _train(console, (plain, planned, control), digits, batch_size, steps)
    _report(console, plain, planned, control, digits, platform)
    console.print()
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    return plan


@jax.jit
def _copied(state: State) -> State:
    """Return the state in buffers of its own, which a step may overwrite."""
    return jax.tree.map(jnp.copy, state)


def _nudged(state: State) -> State:
    """Return the same with every weight moved to a neighbouring float."""
    nearby = jax.jit(lambda params: jax.tree.map(lambda x: jnp.nextafter(x, jnp.inf), params))
    return _copied(state).replace(params=nearby(state.params))


def _did(console: Console, what: str, began: float) -> None:
    console.print(f"  {what}  [dim]({time.perf_counter() - began:.1f} s)[/]", highlight=False)


def _train(console: Console, runs: tuple[Run, Run, Run], digits: Digits, batch_size: int, steps: int) -> None:
    """Train all, with a bar in a terminal and a few lines elsewhere."""
    columns = (
        TextColumn("  training in turn"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    marks = {max(1, round(steps * quarter / 4)) for quarter in range(1, 5)}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps, loss="")
        for number, batch in enumerate(digits.batches(batch_size, steps), 1):
            for run in (
                *runs[number % 3 :],
                *runs[: number % 3],
            ):  # none is always the first
                run.advance(batch)
            loss = " | ".join(f"{float(run.losses[-1]):.4f}" for run in runs[:2])
            progress.update(task, advance=1, loss=loss)
            if not console.is_terminal and number in marks:
                console.print(
                    f"  step {number:>3} of {steps}: loss {loss}  [dim](plain | planned)[/]", highlight=False
                )


def _report(console: Console, plain: Run, planned: Run, control: Run, digits: Digits, platform: str) -> None:
    """Memory, time, losses and accuracy of the two, beside each other."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column()
    table.add_column("plain", justify="right")
    table.add_column("planned", justify="right", style="bold")
    table.add_column()

    def row(name: str, one: str, two: str, note: str = "") -> None:
        table.add_row(name, one, two, f"[dim]{note}[/]")

    for name, one, two in (
        ("compiled peak", plain.memory.peak_nbytes, planned.memory.peak_nbytes),
        ("  of it temporaries", plain.memory.temporaries_nbytes, planned.memory.temporaries_nbytes),
    ):
        row(name, format_nbytes(one), format_nbytes(two), f"{two / max(one, 1):.0%} of plain")
    before, after = (median(run.seconds[1:] or run.seconds) for run in (plain, planned))
    row(
        "step time (median)",
        f"{1e3 * before:.0f} ms",
        f"{1e3 * after:.0f} ms",
        f"{after / before:.2f} x plain",
    )
    row("last loss", f"{float(plain.losses[-1]):.4f}", f"{float(planned.losses[-1]):.4f}")
    right = f"{digits.accuracy(plain.state):.1%}", f"{digits.accuracy(planned.state):.1%}"
    row("test accuracy", right[0], right[1], f"of {digits.test_count} images")
    console.print(table)
    largest = max(plain.memory.peak_nbytes, planned.memory.peak_nbytes)
    for run, style in ((plain, "red"), (planned, "green")):
        filled = round(2 * _BAR_WIDTH * run.memory.peak_nbytes / largest)
        size = format_nbytes(run.memory.peak_nbytes)
        console.print(f"  {run.name:<8}[{style}]{'█' * filled}[/] {size}", highlight=False)
    apart, scale = _furthest(plain, planned), _furthest(plain, control)
    console.print(
        f"\nThe loss curves differ by {apart:.1e} at most. For scale: the plain step's\nown curve moves by "
        f"{scale:.1e} when the last bit of its initial weights changes.",
        highlight=False,
    )
    if platform == "cpu":
        console.print(
            "On a CPU, fewer temporaries also mean fewer page faults, which can pay for the\nrecomputation. Do "
            "not expect that on an accelerator.",
            style="dim",
            highlight=False,
        )


def _furthest(one: Run, other: Run) -> float:
    """Return the largest distance between two loss curves."""
    return max(abs(float(a) - float(b)) for a, b in zip(one.losses, other.losses, strict=True))
