"""A plan of the zoo, a graph and a small step -> the pictures of `docs/pages/pictures`, as the library draws them now.

python docs/pictures.py    # half a minute
"""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import optax
from flax import linen as nn
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import jaxremat
from jaxremat import Graph, Schedule, testing

HERE = Path(__file__).parent / "pages" / "pictures"


def memory() -> Figure:
    """Memory over one step of GPT-2 small on an H100, plain and planned, as the plan of the zoo models it."""
    asked = ("gpt", "full", "50% of temporaries", "h100")
    plan = next(e.plan for e in jaxremat.zoo.entries() if (e.network, e.scale, e.budget, e.target) == asked)
    account, gib = plan.account, 2**30
    figure, axes = pyplot.subplots(1, 2, figsize=(8.0, 3.0), sharex=True, sharey=True, layout="constrained")
    peaks = plan.baseline_peak_nbytes, plan.peak_nbytes
    for ax, run, name, peak in zip(axes, account.runs, ("plain step", "planned"), peaks, strict=True):
        at = [1e3 * moment.seconds for moment in (*run.moments, run.moments[-1])]
        at[-1] = 1e3 * run.seconds
        floor = [account.base_nbytes / gib] * len(at)
        ax.fill_between(at, floor, step="post", color="0.8", lw=0, label="parameters and other arguments")
        layers = (
            ("C0", "forward pass", "forward_nbytes"),
            ("C1", "recomputed", "recomputed_nbytes"),
            ("C2", "backward pass", "backward_nbytes"),
        )
        for colour, label, field in layers:
            heights = [getattr(moment, field) / gib for moment in run.moments]
            tops = [low + more for low, more in zip(floor, [*heights, heights[-1]], strict=True)]
            ax.fill_between(at, floor, tops, step="post", color=colour, lw=0, label=label)
            floor = tops
        ax.axhline(plan.budget_nbytes / gib, color="C3", lw=1, ls="--", label="budget")
        ax.set_title(f"{name}: {jaxremat.format_nbytes(peak)} (compiled)", loc="left", fontsize="medium")
        ax.set_xlabel("ms")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[0].set_ylabel("memory in use, GiB")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize="small",
    )
    return figure


def schedules() -> Figure:
    """Memory over one graph's step in three ways: all saved, nothing saved, planned for a budget between."""
    graph = testing.graphs()["more blocks"]
    everything = jaxremat.close_over_dependencies(graph, graph.residuals)
    least = jaxremat.RecomputeAll().solve(graph, None, time_limit=1.0).schedule
    peaks = [jaxremat.simulate(graph, schedule).peak_nbytes for schedule in (everything, least)]
    planned = jaxremat.Milp().solve(graph, sum(peaks) // 2, time_limit=10.0).schedule
    figure, axes = pyplot.subplots(3, 1, figsize=(8.0, 5.4), sharex=True, sharey=True, layout="constrained")
    rows: list[tuple[str, Schedule]] = [
        ("everything saved", everything),
        ("planned for a budget in between", planned),
        ("nothing saved", least),
    ]
    for ax, (name, schedule) in zip(axes, rows, strict=True):
        play(ax, graph, name, schedule)
    axes[-1].set_xlabel("kernels of the step, in the order in which they run")
    axes[1].set_ylabel("memory in use, MiB")
    return figure


def play(ax: Axes, graph: Graph, name: str, schedule: Schedule) -> None:
    """One run: a bar for each kernel, as high as what is alive while it runs."""
    profile = jaxremat.simulate(graph, schedule)
    colours = [
        "C1" if event.recomputed_for >= 0 else "C0" if event.node < graph.forward_stop else "C2"
        for event in profile.events
    ]
    heights = [(graph.base_nbytes + event.live_nbytes) / 2**20 for event in profile.events]
    ax.bar(range(len(heights)), heights, width=1.0, color=colours)
    ax.axhline(profile.peak_nbytes / 2**20, color="C3", lw=1)
    ax.set_title(
        f"{name}: {profile.peak_nbytes >> 20} MiB, {profile.extra_seconds / graph.step_seconds:.0%} longer",
        loc="left",
    )
    for colour, what in (("C0", "forward"), ("C1", "recomputed"), ("C2", "backward")):
        if colour in colours:
            ax.bar([0], [0], color=colour, label=what)
    ax.legend(loc="upper right", frameon=False, ncols=3)


def frontier() -> Figure:
    """What each budget costs a small network of dense layers."""
    net = nn.Sequential([layer for _ in range(6) for layer in (nn.Dense(512), nn.gelu)] + [nn.Dense(10)])

    def train_step(params, x, y):
        def loss_fn(params):
            logits: Any = net.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params))

    x, y = jnp.zeros((2048, 64)), jnp.zeros(2048, int)
    params = net.init(jax.random.key(0), x)
    figure, ax = pyplot.subplots(figsize=(8.0, 4.6), layout="constrained")
    jaxremat.sweep(train_step, params, x, y, points=8, donate_argnums=0).plot(ax)
    return figure


def draw(picture: Callable[[], Figure]) -> None:
    """Write a picture as SVG, with its text as text."""
    with matplotlib.rc_context({"svg.hashsalt": "jaxremat", "svg.fonttype": "none"}):
        figure = picture()
        path = HERE / f"{picture.__name__}.svg"
        figure.savefig(path, metadata={"Date": None})
        text = re.sub(r"(?<=\d\.\d\d)\d+", "", path.read_text())  # a hundredth of a point is enough
        path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def main() -> None:
    """Draw all, of plans made now."""
    HERE.mkdir(exist_ok=True)
    matplotlib.use("svg")
    with tempfile.TemporaryDirectory() as cache:  # a sweep would go on from what one before it has kept
        os.environ["JAXREMAT_CACHE"] = cache
        for picture in (memory, schedules, frontier):
            draw(picture)


if __name__ == "__main__":
    main()
