"""Schedule -> the compiled step that follows it, in which XLA overwrites no array that is still read.

Invariant: every planned step that runs has passed `overwritten_reads`. If that reports a kernel, the array that the
kernel reads twice gets a separate barrier, and the step is compiled again.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jax.extend.core import Var

from .._compiler._compiled_step import CompiledStep
from .._compiler._overwritten_reads import OverwrittenRead
from .._emit._detaching import SCOPE, Detached
from .._model._graph import Graph
from .._model._schedule import Passing, Schedule
from .._model._simulate import simulate
from .._model._variant import Variant
from .._runtime._bytes import format_nbytes
from .._runtime._progress import Stopwatch, phase
from .._solver import Solution
from ._ledger import CompiledCandidate
from ._problem import Problem

logger = logging.getLogger("jaxremat")

ROUNDS = 3
"""Most compilations. More than two, because a barrier splits kernels, and others may then read one array twice."""


class OverwrittenReadError(RuntimeError):
    """The compiled step of a schedule has kernels that may overwrite arrays that they still read."""

    def __init__(self, first: OverwrittenRead, *others: OverwrittenRead) -> None:
        super().__init__(
            f"the compiler lets the kernel `{first.kernel}` write over an array that it still reads through a barrier "
            f"({first.barrier or 'none'}, operand {first.position}), and {len(others)} more kernels"
        )


@dataclass(frozen=True)
class CompiledSchedule:
    """A `jitted` step and the `compiled` one. **Fields:** `detached` as in `_emit.emit`."""

    jitted: Any
    compiled: CompiledStep
    detached: tuple[Passing, ...]


def compile_schedule(
    problem: Problem,
    graph: Graph,
    schedule: Schedule,
    fence: str,
    detached: Sequence[Passing] = (),
    *,
    arrays: set[Var] | None = None,
    to_run: bool = False,
) -> CompiledSchedule:
    """Emit and compile a schedule of one of a problem's graphs.

    **Arguments:** `detached` operands that are known to be read twice; `arrays` the same for earlier schedules of the
    form, to which this schedule's are added; `to_run` compiles it to run, not only to read its figures.

    **Raises:** `OverwrittenReadError` if such kernels remain.
    """
    known = Detached(tuple(detached), set() if arrays is None else arrays)
    attempt = 0
    while True:
        attempt += 1
        jitted = problem.jitted(graph, schedule, fence, known)
        compiled = problem.finished(jitted) if to_run else problem.compile(jitted)
        reads = compiled.overwritten_reads
        if not reads:
            return CompiledSchedule(jitted, compiled, known.passing)
        more = {(name, read.position) for read in reads for name in SCOPE.findall(read.barrier)[-1:]}
        if attempt == ROUNDS or more <= set(known.passing):
            raise OverwrittenReadError(*reads)
        known.passing = tuple(sorted({*known.passing, *more}))


Compiled = dict[tuple[Any, ...], CompiledCandidate]
"""Compiled plans, by form, stages, schedule and barriers."""


@dataclass
class StepCompiler:
    """Compiler of one step's solutions, each at most once.

    **Fields:** `problem`; `stopwatch` since planning began; `plain_seconds` returns the plain step's time, for
    overheads, None if unknown; `to_run`, `detached`, and `arrays` by form, as in `compile_schedule`; `count` of
    attempts; `known` compiled candidates, which plans for other budgets may share.
    """

    problem: Problem
    stopwatch: Stopwatch
    plain_seconds: Callable[[], float | None] = lambda: None
    to_run: bool = False
    arrays: defaultdict[Variant, set[Var]] = field(default_factory=lambda: defaultdict(set))
    detached: Sequence[Passing] = ()
    count: int = 0
    known: Compiled = field(default_factory=dict)

    def compile(self, graph: Graph, solution: Solution, fence: str) -> CompiledCandidate | None:
        """Return a solution compiled with a kind of barriers, None if it could not be built."""
        stages = tuple(stage.start for stage in graph.stages)
        key = graph.form, stages, solution.schedule, fence, tuple(self.detached), self.to_run
        if key in self.known:
            ended = self.stopwatch.seconds
            return replace(self.known[key], graph=graph, solution=solution, ended_seconds=ended)
        make = partial(self._compiled, graph, solution, fence)
        found = self.problem.defects.attempted(f"barrier {fence!r}", make, graph.form, graph, solution)
        if found is not None:
            self.known[key] = found
        return found

    def _compiled(self, graph: Graph, solution: Solution, fence: str) -> CompiledCandidate:
        schedule, profile = solution.schedule, simulate(graph, solution.schedule)
        self.count += 1
        began = time.monotonic()
        with phase(f"compiling plan {self.count}", kind="compile"):
            made = compile_schedule(
                self.problem, graph, schedule, fence, self.detached,
                arrays=self.arrays[graph.form], to_run=self.to_run,
            )  # fmt: skip
        plain, overhead = self.plain_seconds(), None
        if plain is not None:
            overhead = made.compiled.seconds / plain - 1 if plain else 0.0  # 0 for an empty step
        found = CompiledCandidate(
            graph=graph,
            solution=solution,
            fence=fence,
            profile=profile,
            jitted=made.jitted,
            compiled=made.compiled,
            detached=made.detached,
            peak_nbytes=made.compiled.peak_nbytes,
            compiled_overhead=overhead,
            compile_seconds=time.monotonic() - began,
            ended_seconds=self.stopwatch.seconds,
        )
        logger.info(
            "predicted %s, compiled %s, overhead predicted %.2f %%, compiled %s",
            format_nbytes(profile.peak_nbytes), format_nbytes(found.peak_nbytes),
            100 * profile.extra_seconds / (graph.step_seconds or 1.0),
            "unknown" if overhead is None else f"{overhead:.2%}",
        )  # fmt: skip
        return found
