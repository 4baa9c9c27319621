"""Problem -> `Baseline`: what the compiler says of the step before anything is planned, where every plan starts.

Invariant: which programs a baseline's figures are of is decided when it is measured. They do not depend on what was
asked of it before.
"""

from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from .._compiler._compiled_step import CompiledStep
from .._compiler._program import Compiled
from .._runtime._progress import phase
from ._graphs import MeasuredGraphs
from ._problem import Problem


def measure_baseline(problem: Problem, *, plain: bool, tagged: bool) -> "Baseline":
    """Compile what plans of a step start from.

    **Arguments:**

    - `plain`: whether the step is compiled as the user wrote it, as where that may fit the budget. It is in any case
      where it differs in time or memory from the tagged one: plans replace equations, undo checkpoints and run loops in
      another way.
    - `tagged`: whether the tagged step is likely to be needed. It is then compiled while the plain one is, where two
      programs may be compiled at a time; else when it is asked for.
    """
    traced = problem.traced
    differs = bool(problem.replaces or traced.rematted or traced.loops)
    baseline = Baseline(problem, problem.begin_plain() if plain or differs else None)
    if problem.undoes or (tagged and plain and problem.compiles_apart):
        with suppress(Exception):  # it fails again where it is wanted
            _ = baseline.tagged
    return baseline


@dataclass(frozen=True, eq=False)
class Baseline:
    """A step before it is planned, as `measure_baseline` makes it.

    Two facts take a compilation that not every plan needs: `tagged` is compiled when it is first asked for, since a
    step that fits as it is written needs none; `plain` is begun by `measure_baseline` or not at all.

    **Fields:** `problem`; `compiling` the step as the user wrote it, with the seconds that this takes, None where only
    the tagged one is compiled; `compiled_tagged` the tagged step where it is compiled already.
    """

    problem: Problem
    compiling: Future[tuple[Compiled, float]] | None = None
    compiled_tagged: CompiledStep | None = None

    @cached_property
    def plain(self) -> CompiledStep:
        """The step as the user wrote it. Waits until it is compiled. **Raises:** ValueError where none is."""
        if self.compiling is None:
            raise ValueError("The plain step was not compiled: measure the baseline with `plain=True`.")
        with phase("compiling the plain step", kind="compile"):
            compiled, seconds = self.compiling.result()
        return CompiledStep(compiled, self.problem.device, compile_seconds=seconds)

    @cached_property
    def tagged(self) -> CompiledStep:
        """The step with every equation tagged, and replaced what every plan replaces; compiled when first asked for. It
        is a sketch where the plain step says what is needed, and nobody asks how long this one takes.
        """
        if self.compiled_tagged is not None:
            return self.compiled_tagged
        timed = self.compiling is None or self.problem.undoes or self.problem.backend.fuses_reductions
        return self.problem.compile_tagged(timed=timed)

    @property
    def measured(self) -> CompiledStep:
        """The program whose figures are the step's: as the user wrote it, where that is compiled."""
        return self.tagged if self.compiling is None else self.plain

    @property
    def peak_nbytes(self) -> int:
        """The step's compiled peak."""
        return self.measured.peak_nbytes

    @property
    def temporaries_nbytes(self) -> int:
        """What of it is not there all the time."""
        return self.peak_nbytes - self.tagged.memory.base_nbytes

    @property
    def seconds(self) -> float:
        """The step's time by a roofline of its kernels."""
        return self.measured.seconds

    @cached_property
    def graphs(self) -> MeasuredGraphs:
        """The graphs of the step's forms by what XLA writes to memory; each is made when it is asked for."""
        problem, tagged = self.problem, self.tagged
        differs = problem.traced.rematted or problem.replaces
        # Else as many as the plain step's, which is still being compiled.
        nbytes = self.temporaries_nbytes if differs else tagged.memory.temporaries_nbytes
        return MeasuredGraphs(problem, tagged, lambda: self.measured, nbytes)

    def with_plain(self, tagged: CompiledStep | None = None) -> "Baseline":
        """Return this with the plain step compiled too, of which all figures are then.

        **Arguments:** `tagged` the tagged step, where that is compiled.
        """
        if self.compiling is not None:
            return self
        return Baseline(self.problem, self.problem.begin_plain(), tagged)
