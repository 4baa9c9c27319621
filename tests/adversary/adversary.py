"""Random steps -> whether what is made of them, for any schedule in any form, is a program and does the same.

    python tests/adversary/adversary.py --programs 10000 --jobs 2

For each seed `random_steps` makes a step, which is held against what the plain step gives (`judging`) in three ways:

- *emitted*: traced with its checkpoints undone or not, it takes forms as they come (its loops with nested checkpointing
  or parts, with updates absorbed, and inner ones inlined; its rows in chunks; copies of values, without loss), its
  backward pass is cut into stages anywhere, any of its residuals are saved and kept, and it is emitted for either kind
  of compiler with every kind of barrier. JAX's own checker looks at the program, which is evaluated operation by
  operation, rounded to the nearest and at random;
- *compiled*: the same, validated and compiled as the planner does;
- *planned*: as a whole at "min" and within a random budget, which the compiled peak has to keep.

What fails is shrunk to fewer parts, a simpler way and fewer rows. What has run is written after each step, so that a
run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import random
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from evaluation import evaluate
from grown_nets import GROWN, is_grown, smaller
from judging import Judge, called, is_reference, numbers
from random_nets import NETS, ROWS
from random_steps import WAYS, Step, random_parts, step_of

import jaxremat
from jaxremat import Graph, InfeasibleBudgetError, MemoryStats, MinCut, close_over_dependencies
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._overwritten_reads import overwritten_reads
from jaxremat._compiler._tags import Written
from jaxremat._emit._emit import FENCES, emit
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Pin
from jaxremat._model._loop_levels import choices
from jaxremat._model._stages import cuttings, uncut
from jaxremat._model._variant import COPIES, INNER, INSIDE, LOOP, Choice, Variant
from jaxremat._model._variant import ROWS as ROW_FORMS
from jaxremat._plan._step_compiler import OverwrittenReadError
from jaxremat._program._flops import aval_nbytes
from jaxremat._rewrite import _encodings, _row_regions
from jaxremat._rewrite._encodings import Encoding
from jaxremat._rewrite._inner_loops import inner_pairs
from jaxremat._rewrite._trace import Traced, trace

DEVICE = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
ROUNDING = 1e-3
"""Of the largest number of an array: chunks add up in another order, and some steps amplify that."""

EXACT = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11):  # later there are no others
    EXACT["xla_cpu_use_fusion_emitters"] = True
"""Numbers are rounded to narrow types where the step says so, and not where a fusion has to: else two programs of the
same step differ by units of the narrow type. Machine code is optimised, as users have it: kernels round differently.
"""

OPTIONS = jaxremat.compiler_options("cpu", EXACT)
EMITTED, COMPILED = 10, 2
"""Programs of each step that are evaluated operation by operation, and that are compiled, which takes four times as
long. What only compiled ones showed, kernels that disagree, is seen of evaluated ones that are rounded at random.
"""

COMPILED_OF, PLANNED_OF = 4, 20
"""One seed in so many is compiled, and two in so many are planned, which takes longer than all else."""

KINDS = ("emitted", "compiled", "planned", "failed")
OUT = Path(tempfile.gettempdir()) / "jaxremat-adversary.jsonl"
RENEWED = 40
"""Seeds that one process checks: it keeps what it compiles."""

Found = tuple[str, str]
"""In which form a program was made, and what is wrong with it, "" for nothing."""

COPIED = 0.3
"""The share of forms in which values have copies."""


@dataclass(frozen=True)
class Drawn:
    """One way to emit a step. **Fields:** its form; the graph with its stages; what is saved and kept; the barrier."""

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
        schedule = close_over_dependencies(self.graph, self.saved, self.kept)
        return self.traced.step(emit(self.traced, self.graph, schedule, self.fence))


def draw_form(rng: random.Random, traced: Traced) -> Variant:
    """A form of the step's loops and rows, often as they are."""

    def levels(length: int) -> tuple[int, ...]:
        able: list[tuple[int, ...]] = [(), (length,), *choices(length)]
        if length > 3:
            able += [(a, b) for a in (2, 3) for b in (2, 3) if a * b <= length and length - a * b != 1]
        return rng.choice(able)

    pairs = zip(traced.sites.lengths, traced.sites.cuttable, strict=True)
    own = [levels(n) if able and rng.random() < 0.7 else () for n, able in pairs]
    chunks = [(rng.choice(r.choices),) if rng.random() < 0.5 else () for r in traced.sites.regions]
    sites = [(LOOP, i, levels) for i, levels in enumerate(own)] + [
        (ROW_FORMS, i, n) for i, n in enumerate(chunks)
    ]
    inner = inner_pairs(traced.jaxpr.jaxpr.eqns, traced.loop_of, traced.loops)
    sites += [(INNER, 0, (1,))] if inner and rng.random() < 0.5 else []
    form = Variant.of(*(Choice(*site) for site in sites))
    if any(chunks) and rng.random() < 0.5:
        within = enumerate(traced.regions_inside(form))
        form = form.also(*(Choice(INSIDE, i, (rng.choice(r.choices),)) for i, r in within if r.choices))
    return form


def _signed(x: jax.Array) -> tuple[jax.Array, ...]:
    """The sign and the bits of the size of each number: both stay what they were where the number is made again, up to
    rounding. Its higher and its lower bits do not.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.lt(bits, jnp.zeros_like(bits)), jax.lax.bitcast_convert_type(jax.lax.abs(x), jnp.int32)


def _of_signed(aval: Any, negative: jax.Array, bits: jax.Array) -> jax.Array:
    size = jax.lax.bitcast_convert_type(bits, aval.dtype)
    return jax.lax.select(negative, jax.lax.neg(size), size)


SIGNED = Encoding("signed", 0, "signed", lambda aval: aval.dtype == jnp.float32, _signed, _of_signed)
"""Copies of which the very value can be made again."""

_encodings.BY_CODE[SIGNED.code] = SIGNED


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


def check_emitted(step: Step, seed: int, count: int = EMITTED) -> Iterator[Found]:
    """For so many programs that are emitted for a step: in which form, and what is wrong with it, "" for nothing."""
    rng, copying = random.Random(f"forms of {seed}"), random.Random(f"copies of {seed}")
    jitted = jax.jit(step.fn, donate_argnums=0)
    traced = trace(jitted, step.args, {}, respect_checkpoint=rng.random() < 0.1)
    args = jax.tree.leaves(step.args)
    closed = traced.step(traced.closed)
    want = evaluate(closed, args)
    form, judge = traced, None
    shaking = np.random.default_rng(seed)

    def plain(*args: Any) -> list[Any]:
        return evaluate(closed, args)

    def shaken(*args: Any) -> list[Any]:
        return evaluate(closed, args, shaking)

    shaken_judge = Judge(shaken, tuple(args), at_random=True)

    for i in range(count):
        said = f"{traced.sites.lengths} loops"
        try:
            if i % 2 == 0:
                drawn_form = draw_form(rng, traced)
                if copying.random() < COPIED:
                    drawn_form = drawn_form.also(Choice(COPIES, 0, (SIGNED.code,)))
                if drawn_form != form.form:
                    said = str(drawn_form)
                    form = traced.in_form(drawn_form)
            drawn = draw(rng, form)
            said = drawn.form
            program = drawn.emit()
            got = evaluate(program, args)
            if (wrong := difference(want, got)) and "off by" in wrong:
                judge = judge or Judge(plain, tuple(args))
                wrong = judge.wrong(numbers(got))
            if not wrong and (wrong := shaken_judge.wrong(numbers(evaluate(program, args, shaking)))):
                wrong = f"rounded at random: {wrong}"
            yield said, wrong
        except Exception:
            yield said, traceback.format_exc()


@contextmanager
def defects() -> Iterator[list[str]]:
    """Errors that the library reports of itself, and warnings that say so; of the compiler's faults none."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("jaxremat")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yield said
        if not any(OverwrittenReadError.__name__ in each for each in said):
            said += [str(each.message) for each in heard if "defect" in str(each.message)]
        said[:] = [each for each in said if OverwrittenReadError.__name__ not in each]
    finally:
        logger.removeHandler(handler)


@dataclass(frozen=True)
class Made:
    """A step of which programs are made. **Fields:** its way, parts, seed and rows."""

    way: str
    parts: tuple[str, ...]
    seed: int
    rows: int = ROWS

    def __str__(self) -> str:
        return f"step_of({self.way!r}, {list(self.parts)}, {self.seed}, {self.rows})"

    def step(self) -> Step:
        """It and its arguments."""
        return step_of(self.way, self.parts, self.seed, self.rows)

    def simpler(self) -> Iterator[Made]:
        """The same with one thing less."""
        if len(self.parts) > 1:
            yield from (
                replace(self, parts=self.parts[:i] + self.parts[i + 1 :]) for i in range(len(self.parts))
            )
        for i, name in enumerate(self.parts):
            for less in smaller(name) if is_grown(name) else ():
                yield replace(self, parts=(*self.parts[:i], less, *self.parts[i + 1 :]))
        if self.way != "plain":
            yield replace(self, way="plain")
        if self.rows > 4:
            yield replace(self, rows=self.rows // 2)


def judge_of(step: Step) -> tuple[Judge, Any]:
    """What judges results of a step, and the plain step compiled."""
    compiled = jax.jit(step.fn, donate_argnums=0).lower(*step.args).compile(OPTIONS)
    referring = any(map(is_reference, jax.tree.leaves(step.args)))

    @functools.cache
    def closed() -> jex.ClosedJaxpr:
        return jax.jit(step.fn).trace(*step.args).jaxpr

    def evaluated(rounding: np.random.Generator | None) -> list[Any]:
        return evaluate(closed(), jax.tree.leaves(step.args), rounding)

    return Judge(compiled, step.args, None if referring else evaluated), compiled


def check_compiled(step: Step, seed: int, judge: Judge, count: int) -> Iterator[Found]:
    """The same for so many programs that are compiled."""
    rng = random.Random(f"compiled of {seed}")
    traced = trace(jax.jit(step.fn, donate_argnums=0), step.args, {}, respect_checkpoint=rng.random() < 0.1)
    leaves = jax.tree.leaves(step.args)
    for i in range(count):
        said = "compiled"
        try:
            form = traced.in_form(draw_form(rng, traced)) if i % 2 else traced
            drawn = draw(rng, form)
            said = f"compiled {drawn.form}"
            closed = drawn.emit()
            run = jax.jit(jex.jaxpr_as_fun(closed), compiler_options=OPTIONS).lower(*leaves).compile()
            wrong = judge.wrong(called(run, leaves))
            if wrong and overwritten_reads(parse(run.as_text() or "")):
                wrong = ""  # the compiler's fault, for which the planner takes no such program
            yield said, wrong
        except Exception:
            yield said, traceback.format_exc()


def check_planned(step: Step, seed: int, judge: Judge, compiled: Any) -> Iterator[Found]:
    """The same for a plan of the step: at "min" for an even seed, else within a random budget."""
    rng = random.Random(f"budget of {seed}")
    stats = MemoryStats.of(compiled)
    share = rng.uniform(0.3, 1.0)
    for budget in ("min" if seed % 2 == 0 else stats.base_nbytes + int(share * stats.temporaries_nbytes),):
        options: dict[str, Any] = {"solver": MinCut()} if rng.random() < 0.5 else {"time_limit": 1.0}
        planning = jaxremat.Planning(cache=False, respect_checkpoint=rng.random() < 0.1, **options)
        said = (
            f"planned within {budget if budget == 'min' else f'{share:.2f} of the temporaries'}, {planning}"
        )
        try:
            with defects() as reported:
                planned = jaxremat.optimize(
                    budget,
                    donate_argnums=0,
                    planning=planning,
                    compiler_options=EXACT,
                )(step.fn)
                try:
                    peak = MemoryStats.of(planned.compile(*step.args)).peak_nbytes
                except InfeasibleBudgetError:
                    wrong = ""
                else:
                    most = stats.peak_nbytes if budget == "min" else budget
                    wrong = (
                        f"{peak} bytes of {most}" if peak > most else judge.wrong(called(planned, step.args))
                    )
            yield said, "; ".join([*reported, *([wrong] if wrong else [])])
        except Exception:
            yield said, traceback.format_exc()


def check(
    made: Made, emitted: int = EMITTED, compiled: int = COMPILED, planned: bool = True
) -> dict[str, list[Found]]:
    """All that is done with one step, by how its programs are run."""
    found: dict[str, list[Found]] = {}
    with warnings.catch_warnings(), small_values():
        warnings.simplefilter("ignore", jaxremat.JaxrematWarning)
        try:
            step = made.step()
            referring = any(map(is_reference, jax.tree.leaves(step.args)))
            found["emitted"] = [] if referring else list(check_emitted(step, made.seed, emitted))
            if not compiled and not planned:
                return found
            judge, plain = judge_of(step)
            found["compiled"] = [] if referring else list(check_compiled(step, made.seed, judge, compiled))
            found["planned"] = list(check_planned(step, made.seed, judge, plain)) if planned else []
        except Exception:
            found["failed"] = [("before any form", traceback.format_exc())]
    return found


@contextmanager
def small_values() -> Iterator[None]:
    """Let values of any size take other forms: these steps have no large ones."""
    before = _row_regions.LEAST_NBYTES, _encodings.LARGE
    _row_regions.LEAST_NBYTES, _encodings.LARGE = 1, 0.0
    try:
        yield
    finally:
        _row_regions.LEAST_NBYTES, _encodings.LARGE = before


def wrong(found: dict[str, list[Found]]) -> list[Found]:
    """Those of which something is wrong."""
    return [each for some in found.values() for each in some if each[1]]


def shrunk(made: Made, **counts: Any) -> Made:
    """The simplest step of which programs are still wrong."""
    for less in made.simpler():
        if wrong(check(less, **counts)):
            return shrunk(less, **counts)
    return made


def made_of(seed: int) -> Made:
    """The step of a seed, of few rows or many."""
    rows = random.Random(f"rows of {seed}").choice([ROWS, ROWS, 4 * ROWS])
    return Made(*random_parts(seed), seed, rows)


def check_seed(seed: int) -> dict[str, Any]:
    """All that is done with the step of a seed, as a row."""
    made = made_of(seed)
    found = check(made, compiled=COMPILED * (seed % COMPILED_OF == 0), planned=seed % PLANNED_OF < 2)
    failed = wrong(found)
    return {
        "seed": seed,
        "step": str(made),
        "way": made.way,
        "parts": made.parts,
        **{kind: len(each) for kind, each in found.items()},
        "wrong": [{"form": form, "what": what} for form, what in failed],
        "shrunk": str(shrunk(made)) if failed else "",
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums of what has run."""
    kinds = {kind: sum(row.get(kind, 0) for row in rows) for kind in KINDS}
    ways, parts = Counter[str](), Counter[str]()
    for row in rows:
        count = sum(row.get(kind, 0) for kind in KINDS)
        ways[row["way"]] += count
        parts.update(dict.fromkeys((GROWN if is_grown(part) else part for part in row["parts"]), count))
    return {
        "steps": len(rows),
        **kinds,
        "wrong": sum(len(row["wrong"]) for row in rows),
        "ways": {way: ways[way] for way in WAYS},
        "parts": {part: parts[part] for part in (*NETS, GROWN)},
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What has run already; a line that was cut short did not."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def answer(connection: Connection) -> None:
    """Check seeds as they come."""
    for seed in iter(connection.recv, None):
        connection.send(check_seed(seed))


def run(seeds: Sequence[int], jobs: int) -> Iterator[dict[str, Any]]:
    """Rows of these seeds, by so many processes; one that a program ends is replaced, and its seed is wrong."""
    context = multiprocessing.get_context("spawn")
    ahead = list(reversed(seeds))
    busy: dict[Any, tuple[Any, int, int]] = {}  # by connection: the process, its seed and how many it has had

    def give(connection: Any, process: Any, before: int) -> None:
        busy[connection] = process, ahead.pop(), before + 1
        connection.send(busy[connection][1])

    def begin() -> None:
        here, there = context.Pipe()
        process = context.Process(target=answer, args=(there,), daemon=False)
        process.start()
        there.close()
        give(here, process, 0)

    for _ in range(min(jobs, len(ahead))):
        begin()
    while busy:
        for ready in wait(list(busy)):
            connection: Any = ready
            process, seed, count = busy.pop(connection)
            try:
                yield connection.recv()
                over = count >= RENEWED
                if over:
                    connection.send(None)
            except EOFError:
                made = made_of(seed)
                process.join()
                what = f"the process ended with {process.exitcode}"
                yield {
                    "seed": seed, "step": str(made), "way": made.way, "parts": made.parts, "failed": 1,
                    "wrong": [{"form": "process", "what": what}], "shrunk": "",
                }  # fmt: skip
                over = True
            if ahead:
                begin() if over else give(connection, process, count)
            elif not over:
                connection.send(None)


def main() -> None:
    """Run until there are so many programs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--programs", type=int, default=200, help="to be made, of all runs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first step")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=OUT, help="what has run, by line")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    rows = read_rows(options.out)
    last = options.first + -(-options.programs // EMITTED)
    left = sorted(set(range(options.first, last)) - {row["seed"] for row in rows})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with open(options.out, "a", encoding="utf-8") as out:
        for row in run(left, options.jobs):
            out.write(json.dumps(row) + "\n")
            out.flush()
            rows.append(row)
            for each in row["wrong"]:
                why = each["what"].strip().splitlines()[-1]
                print(f"{row['step']}, {each['form']}: {why}; {row['shrunk']}", flush=True)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
