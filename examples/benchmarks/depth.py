"""Peak memory against depth, at fixed recomputation, and the deepest residual network within a budget.

    python -m examples.benchmarks.depth peaks --save
    python -m examples.benchmarks.depth plain body scan planned --save

*Peaks*: a scan over 64 to 10,000 residual layers, which saves only the carries of loops in one level (each layer's
forward pass runs twice in all), in two (three times) and in as many as pay off, each compiled.

*plain*, *body*, *scan*, *planned*: how many bottleneck blocks the third stage of `examples/deep_resnet.py` may have
within 12 GB, plainly, by hand with `nn.remat` on the body of `nn.scan` or with `nn.remat_scan`, and planned. The peak
grows by nearly the same for each block, so that a few compilations find the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

import jaxremat
from examples.benchmarks import records, runner
from examples.deep_resnet import Bottleneck, DeepResNet, step_of
from jaxremat import MemoryStats, close_over_dependencies, compiler_options, format_nbytes
from jaxremat._compiler._devices import detect
from jaxremat._compiler._program import Program
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._loop_levels import carries, choices
from jaxremat._model._variant import LOOP, Choice, Variant
from jaxremat._rewrite._trace import trace
from jaxremat._runtime._budgets import parse_budget

DEPTHS = (64, 211, 701, 2311, 10000)
"""Three of them prime."""

ROWS, WIDTH = 16384, 32
FORMS = ("plain", "one level", "two levels", "all levels")
BUDGET = "12GB"
FIRST = (60, 90)
"""Blocks of the third stage that are compiled first; from their peaks the most is guessed."""

MOST = 8
"""Nets that are compiled."""

ALIKE = 1.05
"""Two peaks that differ by less say little of deeper nets, as those of plans that use all of the budget, ..."""

GROWTH = 1.25
"""... so that the next net is at most this much deeper than the deepest so far."""


def layers(depth: int) -> tuple[Program, tuple[Any, ...]]:
    """A train step of that many layers, and its arguments as shapes and types."""

    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss_of(weights: jax.Array) -> jax.Array:
            y, _ = lax.scan(lambda y, weight: (y + jnp.tanh(y @ weight), None), x, weights)
            return jnp.mean(y * y)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return weights - 0.01 * gradients, loss

    options = tuple(sorted(compiler_options(jax.default_backend()).items()))
    program = Program(step, donate_argnums=(0,), compiler_options=options)
    shapes = (depth, WIDTH, WIDTH), (ROWS, WIDTH)
    return program, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def peaks(depth: int) -> list[records.Record]:
    """The compiled peaks of all forms of a net of that depth."""
    program, args = layers(depth)
    traced = trace(program.plain, args, {})
    levels = choices(depth)
    rows = []
    for form, chosen in zip(FORMS, (None, (), levels[1], levels[-1]), strict=True):
        jitted = program.plain
        if chosen is not None:
            cut = traced.in_form(Variant.of(Choice(LOOP, 0, chosen))) if chosen else traced
            graph = lower(cut, detect(jax.devices()[0]), base_nbytes=0)
            jitted = program.evaluating(emit(cut, graph, close_over_dependencies(graph, ())), cut)
        stats = MemoryStats.of(program.lower(jitted, args, {}).compile())
        row = {"depth": depth, "form": form, "levels": chosen, "peak_nbytes": stats.peak_nbytes}
        row |= {"carries": None if chosen is None else carries(depth, chosen)}
        rows.append({**row, "base_nbytes": stats.base_nbytes, "temporaries_nbytes": stats.temporaries_nbytes})
        print(f"  {depth:>6} {form:>10}: {format_nbytes(stats.peak_nbytes)}", flush=True)
    return rows


def slope(rows: Sequence[records.Record], form: str) -> float:
    """By which power of the depth the peak grows, by least squares on logarithmic axes."""
    points = [(math.log(r["depth"]), math.log(r["peak_nbytes"])) for r in rows if r["form"] == form]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


class ByHand(DeepResNet):
    """That network with its loops rematerialised by hand: their *body*, or in two levels (*scan*)."""

    remat: str = "body"

    def loop(self, width: int, count: int, x: jax.Array, block: Any = Bottleneck) -> jax.Array:
        """So many equal blocks, as one loop over stacked weights or two, the second over the rest."""
        if self.remat == "body":
            return super().loop(width, count, x, nn.remat(block, prevent_cse=False))
        root = math.isqrt(count)
        for lengths in ((root, count // root), (1, count % root)):
            if math.prod(lengths):
                x = nn.remat_scan(_Alone, lengths=lengths)(width)(x)
        return x


class _Alone(nn.Module):
    """A block as `nn.remat_scan` wants it, from a carry to a carry."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Bottleneck(self.width)(x)[0]


def train_step(blocks: int, remat: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step with that many blocks in the third stage, and its arguments as shapes and types."""
    sizes = {"blocks": (6, 32, blocks, 6), "width": 64, "classes": 1000}
    net = DeepResNet(**sizes) if remat == "plain" else ByHand(**sizes, remat=remat)
    images = jax.ShapeDtypeStruct((16, 224, 224, 3), jnp.float32)
    state = jax.eval_shape(net.init, jax.random.key(0), images)
    return step_of(net), (state, images, jax.ShapeDtypeStruct((16,), jnp.int32))


def peak_of(remat: str, budget: int, target: str | None, blocks: int) -> int:
    """The compiled peak with that many blocks: of a plan one that fits, or the least that was found."""
    if remat != "planned":
        step, args = train_step(blocks, remat)
        return jaxremat.memory(step, *args, donate_argnums=0, target=target).peak_nbytes
    step, args = train_step(blocks, "plain")
    try:
        plan = jaxremat.plan(step, *args, budget=budget, donate_argnums=0, target=target)
    except jaxremat.InfeasibleBudgetError as error:
        return error.min_peak_nbytes
    return plan.compiled_peak_nbytes or plan.predicted_peak_nbytes


def deepest(
    peak: Callable[[int], int], budget: int, first: Sequence[int], most: int = MOST
) -> records.Record:
    """The most blocks whose step fits, by compiling at most so many: the largest that is known to, and what is known
    of more.
    """
    known: dict[int, int] = {}
    wanted = list(first)
    while wanted:
        blocks = wanted.pop(0)
        known[blocks] = peak(blocks)
        print(f"    {blocks} blocks: {format_nbytes(known[blocks])}", flush=True)
        if wanted or len(known) < 2:
            continue
        (a, low), (b, high) = (
            sorted(known.items())[:: len(known) - 1] if len(known) == 2 else _nearest(known, budget)
        )
        guess = a + int((budget - low) / max((high - low) / (b - a), 1))
        fitting = max((n for n, nbytes in known.items() if nbytes <= budget), default=0)
        exceeding = min((n for n, nbytes in known.items() if nbytes > budget), default=10**6)
        if high <= ALIKE * low:
            guess = int(GROWTH * max(known))
        guess = min(max(guess, fitting + 1), exceeding - 1)
        if exceeding - fitting > 1 and guess not in known and len(known) < most:
            wanted.append(guess)
    fitting = {n: nbytes for n, nbytes in known.items() if nbytes <= budget}
    best = max(fitting, default=0)
    return {"blocks": best, "peak_nbytes": fitting.get(best), "known": sorted(known.items())}


def _nearest(known: dict[int, int], budget: int) -> list[tuple[int, int]]:
    return sorted(sorted(known.items(), key=lambda item: abs(item[1] - budget))[:2])


def markdown(record: records.Record) -> str:
    """The tables of one file of results."""
    parts = []
    if rows := record.get("peaks"):
        lines = []
        for depth in sorted({row["depth"] for row in rows}):
            own = {row["form"]: format_nbytes(row["peak_nbytes"]) for row in rows if row["depth"] == depth}
            lines.append((f"{depth:,}", *(own[form] for form in FORMS)))
        lines.append(("slope on logarithmic axes", *(f"{slope(rows, form):.2f}" for form in FORMS)))
        parts += [PEAKS, runner.grid(("layers", *FORMS), lines, 0)]
    if found := record.get("deepest"):
        lines = []
        for name, row in sorted(found.items(), key=lambda item: item[1]["blocks"]):
            tried = max(blocks for blocks, _ in row["known"]) > row["blocks"]
            label = STEPS[name] + ("" if tried else ", none larger tried")
            depth = 3 * (44 + row["blocks"]) + 2
            lines.append((label, f"{row['blocks']:,}", f"{depth:,}", format_nbytes(row["peak_nbytes"] or 0)))
        parts += [
            f"**The deepest residual network within {record['budget']}**: 16 images of 224 x 224, stages of 6, 32, n "
            "and 6 bottleneck blocks, SGD; the largest n that was compiled and fits.",
            runner.grid(("step", "blocks of the third stage", "convolutions", "peak"), lines),
        ]
    return "\n\n".join(parts)


STEPS = {
    "plain": "plain",
    "body": "by hand, `nn.remat` on the body",
    "scan": "by hand, `nn.remat_scan`",
    "planned": "planned",
}
PEAKS = """\
**Peak against depth**: a scan over residual layers with carries of 2 MiB (`examples/benchmarks/depth.py`), \
which saves only the carries of its levels. One level runs each layer's forward pass twice, two levels \
three times. Parameters and gradients, 8 KiB a layer, count too. Peaks by XLA's buffer assignment.\
"""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without names two small depths, into ``out/``."""
    parser = runner.parser_of(__doc__, ("peaks", *STEPS))
    parser.add_argument("--depths", type=int, nargs="+", help="numbers of layers, at least 5")
    parser.add_argument("--budget", default=BUDGET)
    parser.add_argument(
        "--first",
        type=int,
        nargs="+",
        default=FIRST,
        help="blocks to compile first; a single number compiles no others",
    )
    parser.add_argument("--most", type=int, default=MOST, help=f"nets to compile (default: {MOST})")
    parser.add_argument("--target", choices=jaxremat.targets(), help="compile the nets for this GPU")
    asked = runner.parse(parser, argv, ("peaks", *STEPS), quick=("peaks",))
    path = asked.folder / records.platform(asked.target) / "depth.json"
    record = {**records.read(path), "kind": "depth", "environment": records.environment(asked.target)}
    record |= {"date": records.today(), "library": records.library_version()}
    for name in asked.names:
        print(f"  {name}:")
        if name == "peaks":
            depths = asked.depths or (DEPTHS[:2] if asked.quick else DEPTHS)
            record["peaks"] = [row for depth in depths for row in peaks(depth)]
        else:
            budget = parse_budget(asked.budget, None)
            assert isinstance(budget, int)
            found = deepest(partial(peak_of, name, budget, asked.target), budget, asked.first, asked.most)
            record |= {"budget": asked.budget, "deepest": {**record.get("deepest", {}), name: found}}
        records.write(path, record)
    print(markdown(record))
    print(f"in {path}")


if __name__ == "__main__":
    main()
