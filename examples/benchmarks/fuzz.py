"""Random steps -> whether what is emitted for them, for any schedule in any form, is a program and does the same.

    python -m examples.benchmarks.fuzz --examples 10000 --jobs 2 --save

For each seed `random_steps` makes a step. It is traced with its checkpoints undone or not, takes forms as they come
(its loops in levels or parts, with updates absorbed, and inner ones laid open; its rows in chunks; copies of values,
without loss), its backward pass is cut into stages anywhere, any of its residuals are saved and kept, and it is emitted
for either kind of compiler with every kind of fence. Each emitted program is one example: JAX's own checker looks at
it, it runs, and gives what the step gives. A share of the steps is planned as a whole within random budgets besides,
and held against them.

What has run is written after each step, so that a run that was stopped goes on where it was. `--save` puts the sums
among the published results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

import jaxremat
from examples.benchmarks import records
from examples.benchmarks.evaluation import evaluate
from examples.benchmarks.random_steps import WAYS, Step, random_step
from jaxremat import Graph, InfeasibleBudgetError, MemoryStats, MinCut, complete
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._compiler._tags import Written
from jaxremat._emit._emit import FENCES, emit
from jaxremat._lower._lower import lower
from jaxremat._model._form import COPIES, INNER, LOOP, ROWS, Choice, Form
from jaxremat._model._graph import Pin
from jaxremat._model._loop_levels import choices
from jaxremat._model._stages import cuttings, uncut
from jaxremat._program._flops import aval_nbytes
from jaxremat._rewrite import _encodings, _row_regions
from jaxremat._rewrite._encodings import Encoding
from jaxremat._rewrite._inner_loops import inner_pairs
from jaxremat._rewrite._trace import Traced, trace

DEVICE = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
ROUNDING = 1e-3
"""Of the largest number of an array: chunks add up in another order, and some steps amplify that."""

EMITTED = 16
"""Programs that are emitted for each step."""

COPIED = 0.3
"""The share of forms in which values have copies."""

QUICKLY = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
"""Machine code that is written in little time: most of it runs once."""

PLANNED = 20
"""One step in so many is planned as a whole."""

SAVED = records.RESULTS / "fuzz.json"


@dataclass(frozen=True)
class Drawn:
    """One way to emit a step. **Fields:** its form; the graph with its stages; what is saved and kept; the fence."""

    traced: Traced
    graph: Graph
    saved: frozenset[int]
    kept: frozenset[tuple[int, int]]
    fence: str

    @property
    def form(self) -> str:
        """In words."""
        rematted = ", checkpoints respected" if self.traced.source.respect_checkpoint else ""
        stages = len(self.graph.stages)
        return f"{self.graph.platform}, {self.traced.form}, {stages} stages, {self.fence}{rematted}"

    def emit(self) -> jex.ClosedJaxpr:
        """The program, which JAX's checker has seen."""
        schedule = complete(self.graph, self.saved, self.kept)
        return self.traced.step(emit(self.traced, self.graph, schedule, self.fence))


def draw_form(rng: random.Random, traced: Traced) -> Form:
    """A form of the step's loops and rows, often as they are."""

    def levels(length: int) -> tuple[int, ...]:
        able: list[tuple[int, ...]] = [(), (length,), *choices(length)]
        if length > 3:
            first = rng.randint(2, length - 1)
            able += [(first,), (2, -1)]
            able += [(a, b) for a in (2, 3) for b in (2, 3) if a * b <= length and length - a * b != 1]
        return rng.choice(able)

    pairs = zip(traced.lengths, traced.cuttable, strict=True)
    own = [levels(n) if able and rng.random() < 0.7 else () for n, able in pairs]
    chunks = [(rng.choice(r.choices),) if rng.random() < 0.5 else () for r in traced.regions]
    sites = [(LOOP, i, levels) for i, levels in enumerate(own)] + [(ROWS, i, n) for i, n in enumerate(chunks)]
    inner = inner_pairs(traced.jaxpr.jaxpr.eqns, traced.loop_of, traced.loops)
    sites += [(INNER, 0, (1,))] if inner and rng.random() < 0.5 else []
    return Form.of(*(Choice(*site) for site in sites))


def _halves(x: jax.Array) -> tuple[jax.Array, ...]:
    """The higher and the lower half of each number's bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return (bits >> 16).astype(jnp.uint16), bits.astype(jnp.uint16)


def _of_halves(aval: Any, high: jax.Array, low: jax.Array) -> jax.Array:
    bits = (high.astype(jnp.uint32) << 16) | low.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, aval.dtype)


IN_HALVES = Encoding("halves", 0, "halves", lambda aval: aval.dtype == jnp.float32, _halves, _of_halves)
"""Copies of which the very value can be made again."""

_encodings.BY_CODE[IN_HALVES.code] = IN_HALVES


def draw_graph(rng: random.Random, traced: Traced) -> Graph:
    """The step's graph for either kind of compiler, which writes what it likes, with stages anywhere."""
    eqns = traced.jaxpr.jaxpr.eqns
    sizes = {i: tuple(aval_nbytes(v.aval) for v in eqn.outvars) for i, eqn in enumerate(eqns)}
    share = rng.random()
    some = {i: each for i, each in sizes.items() if rng.random() < share}
    loops = frozenset(loop.id for loop in traced.loops if rng.random() < 0.5)
    written = Written(some, (), loops) if rng.random() < 0.5 else None
    device = replace(DEVICE, platform=rng.choice(["cpu", "gpu"]))
    graph = lower(traced, device, base_nbytes=0, written=written)
    how = rng.random()
    if how < 0.4:
        return rng.choice(cuttings(graph))
    later = [n.id for n in graph.nodes[graph.forward_stop + 1 :]]
    at = rng.sample(later, min(len(later), rng.randint(0, 12))) if how < 0.9 else later
    pinned = replace(graph, pins=tuple(Pin("stage", n, "") for n in at))
    return replace(pinned, stages=uncut(pinned))


def draw(rng: random.Random, traced: Traced) -> Drawn:
    """Any schedule of a graph of a form."""
    graph = draw_graph(rng, traced)
    share, often = rng.choice([0.0, rng.random(), 1.0]), rng.choice([0.0, 0.1, 0.5])
    saved = frozenset(v for v in graph.residuals if rng.random() < share)
    stages = range(1, len(graph.stages))
    able = ((v, k) for v in graph.residuals if graph.recomputable(v) for k in stages)
    stage_of = graph.stage_of
    kept = {(v, k) for v, k in able if stage_of[graph.values[v].producer] < k - 1 and rng.random() < often}
    return Drawn(traced, graph, saved, frozenset(kept), rng.choice(FENCES))


def difference(want: Any, got: Any) -> str:
    """What is different about two results; "" where nothing is."""
    if jax.tree.structure(want) != jax.tree.structure(got):
        return "another structure"
    for i, (a, b) in enumerate(zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"result {i}: {b.dtype}{b.shape} in place of {a.dtype}{a.shape}"
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return f"result {i}: other numbers are not finite"
        error = np.abs(x - y).max(initial=0, where=np.isfinite(x))
        most = np.abs(x).max(initial=1e-3, where=np.isfinite(x))
        if error > (ROUNDING if jnp.issubdtype(a.dtype, jnp.floating) else 0) * most:
            return f"result {i}: off by {error:.3g} of {most:.3g}"
    return ""


def check_emitted(step: Step, seed: int, count: int = EMITTED) -> Iterator[tuple[str, str]]:
    """For so many programs that are emitted for a step: in which form, and what is wrong with it, "" for nothing."""
    rng, copying = random.Random(f"forms of {seed}"), random.Random(f"copies of {seed}")
    jitted = jax.jit(step.fn, donate_argnums=0)
    traced = trace(jitted, step.args, {}, respect_checkpoint=rng.random() < 0.1)
    args = jax.tree.leaves(step.args)
    want = evaluate(traced.step(traced.closed), args)
    form = traced
    for i in range(count):
        said = f"{traced.lengths} loops"
        try:
            if i % 2 == 0:
                drawn_form = draw_form(rng, traced)
                if copying.random() < COPIED:
                    drawn_form = drawn_form.also(Choice(COPIES, 0, (IN_HALVES.code,)))
                if drawn_form != form.form:
                    said = str(drawn_form)
                    form = traced.in_form(drawn_form)
            drawn = draw(rng, form)
            said = drawn.form
            yield said, difference(want, evaluate(drawn.emit(), args))
        except Exception:
            yield said, traceback.format_exc()


def check_planned(step: Step, seed: int) -> tuple[str, str]:
    """The same for a plan of the step within a random budget."""
    rng = random.Random(f"budget of {seed}")
    share = rng.uniform(0.3, 1.0)
    said = f"planned within {share:.2f} of the temporaries"
    try:
        plain = jax.jit(step.fn, donate_argnums=0)
        compiled = plain.lower(*step.args).compile(jaxremat.compiler_options("cpu"))
        stats = MemoryStats.of(compiled)
        budget = stats.base_nbytes + int(share * stats.temporaries_nbytes)
        planned = jaxremat.optimize(budget, donate_argnums=0, solver=MinCut(), cache=False)(step.fn)
        try:
            made = planned.compile(*step.args)
        except InfeasibleBudgetError:
            return said, ""
        if (peak := MemoryStats.of(made).peak_nbytes) > budget:
            return said, f"{peak} bytes of {budget}"
        copies = [jax.tree.map(jnp.copy, step.args) for _ in range(2)]
        return said, difference(compiled(*copies[0]), planned(*copies[1]))
    except Exception:
        return said, traceback.format_exc()


def check_seed(seed: int) -> records.Record:
    """All that is done with one step."""
    warnings.simplefilter("ignore", jaxremat.JaxrematWarning)
    _row_regions.LEAST_NBYTES = 1  # these steps have no large values
    _encodings.LARGE = 0.0
    step = random_step(seed)
    try:
        found = list(check_emitted(step, seed))
        planned = [check_planned(step, seed)] if seed % PLANNED == 0 else []
    except Exception:
        found, planned = [("before any form", traceback.format_exc())], []
    wrong = [{"form": form, "what": what} for form, what in (*found, *planned) if what]
    return {
        "seed": seed,
        "step": step.name,
        "emitted": len(found),
        "planned": len(planned),
        "wrong": wrong,
    }


def summary(rows: list[records.Record]) -> records.Record:
    """The sums of what has run."""
    ways = Counter[str]()
    parts = Counter[str]()
    for row in rows:
        way, _, names = row["step"].partition(": ")
        ways[way] += row["emitted"] + row["planned"]
        parts.update(dict.fromkeys(names.split(", "), row["emitted"] + row["planned"]))
    return {
        "kind": "fuzz",
        "date": records.today(),
        "jaxremat": records.library_version(),
        "environment": records.environment(),
        "steps": len(rows),
        "emitted": sum(row["emitted"] for row in rows),
        "planned": sum(row["planned"] for row in rows),
        "mismatches": sum(len(row["wrong"]) for row in rows),
        "wrong": [row for row in rows if row["wrong"]],
        "ways": {way: ways[way] for way in WAYS},
        "parts": dict(sorted(parts.items())),
    }


def read_rows(path: Path) -> list[records.Record]:
    """What has run already; a line that was cut short did not."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def main() -> None:
    """Run until there are so many examples."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--examples", type=int, default=64, help="programs to be emitted, of all runs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first step")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=records.OUT / "fuzz.jsonl", help="what has run, by line")
    parser.add_argument("--save", action="store_true", help=f"write the sums to {SAVED.name}")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", QUICKLY)
    rows = read_rows(options.out)
    last = options.first + -(-options.examples // EMITTED)
    left = sorted(set(range(options.first, last)) - {row["seed"] for row in rows})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(options.jobs, maxtasksperchild=200) as pool,
        open(options.out, "a", encoding="utf-8") as out,
    ):
        for row in pool.imap_unordered(check_seed, left):
            out.write(json.dumps(row) + "\n")
            out.flush()
            rows.append(row)
            for each in row["wrong"]:
                why = each["what"].strip().splitlines()[-1]
                print(f"seed {row['seed']} ({row['step']}), {each['form']}: {why}", flush=True)
    found = summary(rows)
    print(f"{found['steps']} steps, {found['emitted']} emitted, {found['planned']} planned, ", end="")
    print(f"{found['mismatches']} mismatches")
    if options.save:
        records.write(SAVED, found)


if __name__ == "__main__":
    main()
