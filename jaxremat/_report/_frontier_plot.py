"""Frontier -> a plot of memory against time, on matplotlib axes."""

import math
from typing import TYPE_CHECKING, Any

from .._runtime._bytes import format_nbytes
from .._runtime._extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS = 200
"""Places at which the lower bound is drawn."""

IN_PICTURE = 1.5
"""Hand-written rules above this multiple of the most expensive point's overhead are drawn at the edge."""

_ROOM = 1.15
"""Space shown above the most expensive point; hand-written rules beyond it are at the edge, with their figure."""


def plot(frontier: Any, ax: "Axes | None" = None) -> "Axes":
    """Draw a frontier, see `Frontier.plot`."""
    require("Drawing a frontier", "tools", "matplotlib")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, MultipleLocator, PercentFormatter

    if ax is None:
        ax = pyplot.subplots(figsize=(8.0, 5.0), layout="constrained")[1]
    points = sorted(frontier, key=lambda p: (p.peak_nbytes, p.budget_nbytes))
    most = max(frontier.cost(p) for p in points) or 0.01
    top = _ROOM * max([most, *(c for c in map(frontier.cost, frontier.policies) if c <= IN_PICTURE * most)])
    if frontier.judged == "compiled":  # the bound is on the model's figures, so these are drawn too
        top = max(top, _ROOM * max(p.overhead for p in points))
        ax.plot(
            [p.peak_nbytes for p in points], [p.overhead for p in points], ".:",
            color="0.5", lw=1, zorder=1, label="the same plans, by the model",
        )  # fmt: skip
    _bound(frontier, ax, points[0].peak_nbytes, top)
    # Between two points, the plan of the smaller budget is the best known one that fits.
    ax.step(
        [p.peak_nbytes for p in points], [frontier.cost(p) for p in points], where="post",
        color="C0", lw=1.5, zorder=2,
    )  # fmt: skip
    for kind, marker, label in (("budget", "o", "planned for a budget"), ("hull", "D", "vertex of the hull")):
        chosen = [p for p in points if p.kind == kind or (kind == "budget" and p.kind == "least")]
        if chosen:
            ax.plot(
                [p.peak_nbytes for p in chosen], [frontier.cost(p) for p in chosen], marker,
                color="C0", ms=6, label=label, zorder=3,
            )  # fmt: skip
    plain, knee = frontier.plain, frontier.knee
    ax.plot(plain.peak_nbytes, frontier.cost(plain), "s", color="black", ms=8, label="plain step", zorder=4)
    if knee not in (plain, frontier.least):
        ax.plot(
            knee.peak_nbytes, frontier.cost(knee), "o", ms=15, mfc="none", mec="C3", mew=1.8, zorder=4,
            label=f"knee: {format_nbytes(knee.peak_nbytes)} at {frontier.cost(knee):.1%}",
        )  # fmt: skip
    for policy, marker in zip(frontier.policies, "^vPX*", strict=False):
        cost = frontier.cost(policy)
        label = f"by rule: {policy.name}" + (f" ({cost:.0%}, above)" if cost > top else "")
        if policy.compiled_peak_nbytes is None and plain.compiled_peak_nbytes is not None:
            label += ", predicted"
        ax.plot(
            policy.peak_nbytes, min(cost, top), marker, ms=8, color="C1", mec="white", label=label,
            clip_on=False, zorder=5,
        )  # fmt: skip
    ax.axvline(points[0].peak_nbytes, color="0.6", lw=0.8, ls=":", zorder=1)
    ax.set_ylim(-0.03 * top, top)
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(MultipleLocator(_tick(high - low)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: format_nbytes(nbytes)))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xlabel("peak memory" + ("" if plain.compiled_peak_nbytes else " (predicted)"))
    how = "compiled kernels, by a roofline" if frontier.judged == "compiled" else "by the planner's model"
    ax.set_ylabel(f"extra time of a step ({how})")
    ax.set_title(f"What memory costs on {frontier.device}", fontsize="medium")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(fontsize="small", frameon=False)
    return ax


def _tick(span_nbytes: float) -> float:
    """Return a distance between ticks, round in binary units, for at most eight ticks."""
    unit = 2.0 ** (10 * max((int(span_nbytes).bit_length() - 1) // 10, 0))
    power = 10.0 ** math.floor(math.log10(span_nbytes / unit / 8))
    return unit * next(n * power for n in (1, 2, 5, 10) if 8 * n * power >= span_nbytes / unit)


def _bound(frontier: Any, ax: "Axes", low: int, top: float) -> None:
    """Draw the region below the lower bound, if there is one."""
    high = frontier.plain.peak_nbytes
    if not frontier.bounds or high <= low:
        return
    # The bound is on predicted peaks; compiled ones differ by the model's error.
    places = [low + (high - low) * i / _STEPS for i in range(_STEPS + 1)]
    heights = [min(max(frontier.lower_bound(int(x)), 0.0), top) for x in places]
    ax.fill_between(places, heights, color="0.88", lw=0, zorder=0, label="below the model's proven bound")
