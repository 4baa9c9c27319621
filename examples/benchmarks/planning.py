"""What planning costs: CPU seconds, compilations, solves and memory of the process, without and with cached plans.

    python -m examples.benchmarks.planning demo "gpt of 4 layers" --save

Each step is compiled plainly, planned for a share of its temporaries, and planned again from the plan cache, in three
processes that share only that cache; JAX's own is off. A fourth process plans the step for fewer examples, starting
from the cached plan. `--shares sweep` plans eight budgets in one process. *To a plan* is when the first plan that fits
was certified, *to run* when the program that runs is compiled. Seconds are CPU seconds of all cores, with the solver's
process, so a busy machine matters little; compilations are those of the whole step, and in brackets of single
operations.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax

import jaxremat
from examples.benchmarks import records
from examples.benchmarks.networks import KINDS, NAMES, VARIANTS, program
from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid, key, percent, shown
from jaxremat import InfeasibleBudgetError, format_nbytes
from jaxremat._cli._demo import ResNet, initial_state, train_step
from jaxremat._compiler._program import Program
from jaxremat._plan._ledger import Ledger

FEWER, POINTS = 0.9, 8
"""How many examples of a batch another batch has, and the budgets of a sweep."""

DEMO = "demo"
"""The ResNet-14 of `jaxremat demo`."""

Step = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A step, its arguments as shapes and types, and which of them it donates."""


def step_of(name: str, scale: str, examples: float = 1.0) -> Step:
    """The step of a name, a new function on each call. **Arguments:** `examples` the share of its batch."""
    if name != DEMO:
        made = program(name, scale=scale)  # type: ignore[arg-type]
        if examples != 1:
            batch = jax.tree.leaves(made.abstract_args()[1])[0].shape[0]
            made = program(name, scale=scale, batch=max(int(examples * batch), 1))  # type: ignore[arg-type]
        return made.step, made.abstract_args(), made.donate_argnums
    side, batch = (32, 48) if scale == "full" else (16, 16)
    batch = int(examples * batch)
    state = jax.eval_shape(lambda: initial_state(ResNet(), side, 40))
    images = jax.ShapeDtypeStruct((batch, side, side, 1), "float32")
    return lambda *args: train_step(*args), (state, (images, jax.ShapeDtypeStruct((batch,), "int32"))), (0,)


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it started, whether they ended or not."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = time.process_time() + ended.ru_utime + ended.ru_stime
    for file in Path("/proc/self/task").glob("*/children"):
        for child in file.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


@dataclass
class Work:
    """What is done from now on.

    **Fields:** the `step`; `room_nbytes` that its plans may take; the `compilations` of it and those of `others`;
    `solves`; the CPU seconds when it `began`, and `first_seconds` from then on until a plan that fits was compiled.
    """

    step: Callable[..., Any]
    room_nbytes: float
    compilations: int = 0
    others: int = 0
    solves: int = 0
    first_seconds: float | None = None
    began: float = field(default_factory=cpu_seconds)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is compiled and solved inside."""
        compiling, within, compiled = Program._compiled, Ledger.within, Ledger.compile

        def compile_program(program: Program, *args: Any) -> Any:
            self.compilations += program.fn is self.step
            self.others += program.fn is not self.step
            return compiling(program, *args)

        def solve(*args: Any, **kwargs: Any) -> Any:
            self.solves += 1
            return within(*args, **kwargs)

        def compile_plan(*args: Any, **kwargs: Any) -> Any:
            found = compiled(*args, **kwargs)
            if self.first_seconds is None and found is not None and found.peak_nbytes <= self.room_nbytes:
                self.first_seconds = cpu_seconds() - self.began
            return found

        with (
            patch.object(Program, "_compiled", compile_program),
            patch.object(Ledger, "within", solve),
            patch.object(Ledger, "compile", compile_plan),
        ):
            yield

    def told(self) -> Record:
        """Return what was done so far."""
        return {
            "cpu_seconds": cpu_seconds() - self.began,
            "first_cpu_seconds": self.first_seconds,
            "compilations": self.compilations,
            "other_compilations": self.others,
            "solves": self.solves,
            "peak_process_nbytes": records.peak_process_nbytes(),
        }


def plain(name: str, scale: str, target: str | None) -> Record:
    """Compile the step as it is written."""
    step, args, donated = step_of(name, scale)
    began = cpu_seconds()
    needs = jaxremat.memory(step, *args, donate_argnums=donated, target=target)
    return {
        "cpu_seconds": cpu_seconds() - began,
        "peak_process_nbytes": records.peak_process_nbytes(),
        "base_nbytes": needs.base_nbytes,
        "temporaries_nbytes": needs.temporaries_nbytes,
    }


def planned(name: str, scale: str, target: str | None, budget: int | str, examples: float = 1.0) -> Record:
    """Plan the step, or find its plan in the cache, and compile what runs."""
    step, args, donated = step_of(name, scale, examples)
    work = Work(step, budget if isinstance(budget, int) else math.inf)
    made = jaxremat.optimize(budget, donate_argnums=donated, target=target)(step)
    try:
        with work.counted():
            made.compile(*args)
    except InfeasibleBudgetError as error:
        return work.told() | {"least_nbytes": error.min_peak_nbytes}
    plan = made.plan(*args)
    return work.told() | {
        "peak_nbytes": plan.compiled_peak_nbytes,
        "compiled_overhead": plan.compiled_overhead,
        "overhead": plan.overhead,
        "like": bool(plan.like),
    }


def swept(name: str, scale: str, target: str | None) -> Record:
    """Plan the step for several budgets."""
    step, args, donated = step_of(name, scale)
    work = Work(step, math.inf)
    with work.counted():
        frontier = jaxremat.sweep(step, *args, points=POINTS, donate_argnums=donated, target=target)
    return work.told() | {"points": len(frontier)}


def alone(folder: str, measure: Callable[..., Record], *args: Any) -> Record:
    """Return what is measured in a process of its own. **Arguments:** `folder` its cache of plans."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, fresh) as process:
        return process.submit(_begun, folder, measure, *args).result()


def _begun(folder: str, measure: Callable[..., Record], *args: Any) -> Record:
    os.environ |= {"JAXREMAT_CACHE": folder, "JAXREMAT_PLAN_CACHE": "1"}
    jax.config.update("jax_enable_compilation_cache", False)
    jax.devices()  # what it takes to begin is nobody's
    return measure(*args)


SWEEP = "sweep"


def measured(name: str, scale: str, target: str | None, share: float | str) -> Record:
    """Return what the plain step, its plan and the same plan from the cache take."""
    with tempfile.TemporaryDirectory() as folder:
        run = partial(alone, folder)
        row = {"plain": run(plain, name, scale, target)}
        if share == SWEEP:
            return row | {"planned": run(swept, name, scale, target)}
        budget: int | str = "min"
        if not isinstance(share, str):
            budget = row["plain"]["base_nbytes"] + int(share * row["plain"]["temporaries_nbytes"])
        row["planned"] = run(planned, name, scale, target, budget)
        if "least_nbytes" not in row["planned"]:
            row["again"] = run(planned, name, scale, target, budget)
            if budget != "min":
                row["nearby"] = run(planned, name, scale, target, budget, FEWER)
    return row | {"budget_nbytes": budget}


def rows(asked: Asked, name: str) -> Rows:
    """A plan for each share."""
    return {
        key(name, share): partial(measured, name, asked.scale, asked.target, share) for share in asked.shares
    }


def markdown(found: Sequence[Record]) -> str:
    """Return a table for each device."""
    return "\n\n".join(map(_of_platform, found))


def _of_platform(record: Record) -> str:
    header = ("step", "budget", "plain", "to a plan", "to run", "from the cache", "other batch")
    header += ("compilations", "from the cache", "other batch", "solves", "memory")
    lines = []
    for each, row in record["rows"].items():
        name, share, *before = each.split(" | ")
        made, again, nearby = row["planned"], row.get("again", {}), row.get("nearby", {})
        seconds = [
            shown(run, field, lambda seconds: f"{seconds:.1f} s")
            for run, field in (
                (row["plain"], "cpu_seconds"),
                (made, "first_cpu_seconds"),
                (made, "cpu_seconds"),
                (again, "cpu_seconds"),
                (nearby, "cpu_seconds"),
            )
        ]
        counts = [
            f"{run['compilations']} ({run['other_compilations']})" if run else ""
            for run in (made, again, nearby)
        ]
        memory = format_nbytes(made["peak_process_nbytes"])
        within = ", ".join((percent(share), *before))
        lines.append((name, within, *seconds, *counts, str(made["solves"]), memory))
    title = f"### What planning costs, {record['environment']['platform']}"
    return "\n\n".join([title, LEGEND, grid(header, lines)])


LEGEND = """\
CPU seconds of all cores. *From the cache*: a second process loads the first one's plan. *Other batch*: a process starts
from that plan for nine tenths of the examples. *Sweep*: eight budgets. Rows marked *before* are from a version whose
sweeps shared no compilations, and whose plans for other shapes needed the same chunks.\
"""

NETWORKS = (DEMO, *NAMES, *KINDS, *VARIANTS)
BENCHMARK = Benchmark("planning", __doc__, NETWORKS, rows, markdown, (DEMO,), (0.5, 0.33), shared=True)

if __name__ == "__main__":
    BENCHMARK.main()
