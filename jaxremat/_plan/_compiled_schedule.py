"""Schedule -> the step that follows it, compiled, in which XLA overwrites nothing that is still read.

Invariant: every planned step that runs has passed `overwritten_reads`. Where that finds a kernel, the array that it
reads twice is put behind a barrier of its own, and the step is compiled once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._compiler._compiled_step import CompiledStep
from .._compiler._overwritten_reads import OverwrittenRead
from .._emit._detaching import SCOPE
from .._model._graph import Graph
from .._model._schedule import Passing, Schedule
from ._problem import Problem

ROUNDS = 3
"""Compilations at most. Putting an array behind a barrier divides kernels, so that others may read two names then."""


class OverwrittenReadError(RuntimeError):
    """A schedule of which the compiler makes kernels that may overwrite what they still read."""

    def __init__(self, first: OverwrittenRead, *others: OverwrittenRead) -> None:
        super().__init__(
            f"the compiler lets the kernel `{first.kernel}` write over an array that it still reads through a barrier "
            f"({first.barrier or 'none'}, operand {first.position}), and {len(others)} more kernels"
        )


@dataclass(frozen=True)
class CompiledSchedule:
    """**Fields:** `jitted` the step, and what it is `compiled` to; `detached` as of `_emit.emit`."""

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
    to_run: bool = False,
) -> CompiledSchedule:
    """Emit and compile a schedule of one of a problem's graphs.

    **Arguments:** `detached` what is known to be read twice; `to_run` whether it is compiled to run, not to be read.

    **Raises:** `OverwrittenReadError` where the compiler makes such kernels all the same.
    """
    known = tuple(detached)
    attempt = 0
    while True:
        attempt += 1
        jitted = problem.jitted(graph, schedule, fence, known)
        compiled = problem.finished(jitted) if to_run else problem.compile(jitted)
        reads = compiled.overwritten_reads
        if not reads:
            return CompiledSchedule(jitted, compiled, known)
        more = {(name, read.position) for read in reads for name in SCOPE.findall(read.barrier)[-1:]}
        if attempt == ROUNDS or more <= set(known):
            raise OverwrittenReadError(*reads)
        known = tuple(sorted({*known, *more}))
