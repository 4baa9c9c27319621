"""Program, arguments, device -> the step to plan, traced and rewritten, and what compiles its variants.

Invariant: all properties follow from the fields. Only methods that say so compile anything, and they count it.
"""

import logging
import math
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from .._compiler._compiled_step import CompiledStep
from .._compiler._devices import DeviceSpec
from .._compiler._gathers import gathers
from .._compiler._memory_stats import MemoryStats
from .._compiler._program import Compiled, Program, processes_of
from .._compiler._shardings import Division
from .._compiler._tags import numbered, tagged
from .._emit._detaching import Detached
from .._emit._emit import FINISHED, emit
from .._emit._validation import unproved
from .._lower._lower import as_stacked, estimate_base, lower
from .._model._graph import Backend, Graph, backend
from .._model._host_copies import HostMemory
from .._model._pins import Patterns
from .._model._schedule import Schedule, close_over_dependencies, save_all
from .._model._simulate import simulate
from .._model._sites import EXACT
from .._model._variant import Variant
from .._rewrite._fingerprint import fingerprint, structure
from .._rewrite._kernel_choice import replaced
from .._rewrite._pooling_places import is_by_place
from .._rewrite._trace import Traced, trace
from .._runtime._progress import phase
from ._defects import Defects

logger = logging.getLogger("jaxremat")


@dataclass
class Compilations:
    """The number of whole steps compiled for a problem so far."""

    count: int = 0


@dataclass(frozen=True, eq=False)
class Problem:
    """A step to plan, for its arguments on a device.

    **Fields:** `program`, `args`, `kwargs`; `device`; `profile` as in `jaxremat.optimize`; `here` the `jax.Device` to
    measure on, None for a target; `respect_checkpoint`, `pins` and `allow` as in `jaxremat.optimize`; `host` memory to
    which plans may offload values, if any; `rewritten` the traced step, None to trace it on first use;
    `written_seconds` that compiling the step as written may take; `compilations` counts compiled steps.
    """

    program: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: DeviceSpec
    profile: str
    here: Any = None
    respect_checkpoint: bool = False
    pins: Patterns = ()
    host: HostMemory | None = None
    allow: tuple[str, ...] = EXACT
    rewritten: Traced | None = None
    written_seconds: float = math.inf
    compilations: Compilations = field(default_factory=Compilations)
    _in_form: dict[Variant, Traced] = field(default_factory=dict, init=False)
    _unproved: dict[Any, tuple[str, ...]] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        """The name of the user's function."""
        return getattr(self.program.fn, "__name__", "step")

    @property
    def backend(self) -> Backend:
        """The properties of the device's compiler."""
        return backend(self.device.platform)

    @property
    def compiler(self) -> str:
        """The compiler, and the device that it compiles for."""
        name = "the CPU" if self.device.platform == "cpu" else self.device.name
        there = "" if self.program.target is None else ", without the device"
        return f"XLA of jax {jax.__version__} for {name}{there}"

    @cached_property
    def traced(self) -> Traced:
        """The step as traced, without other forms."""
        if self.rewritten is not None:
            return self.rewritten
        what = self.program.plain, self.args, self.kwargs
        keep = {"respect_checkpoint": self.respect_checkpoint, "keeps_scores": "attention" not in self.allow}
        with phase("tracing the step", kind="trace"):
            self.program.plain.trace(*self.args, **self.kwargs)  # errors of the user's code are no defects
            found = self.defects.attempted("rewriting", lambda: trace(*what, **keep))
            traced = trace(*what, **keep, inlined=True) if found is None else found
        if (count := self.division.devices) == 1 or traced.around:
            return traced
        found = gathers(traced, self.program, self.args, self.kwargs)
        gathered = self.division.with_parts(traced.gathered(found, count))
        return self.division.with_attention(gathered, traced if found else gathered)

    @cached_property
    def defects(self) -> Defects:
        """The defects met during planning."""
        return Defects(self.program, self.args, self.kwargs, self.compiler)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the program."""
        return fingerprint(self.traced)

    @cached_property
    def structure(self) -> str:
        """A fingerprint that ignores shapes and their consequences."""
        return structure(self.traced)

    @cached_property
    def ordered_before(self) -> "Problem":
        """The same problem with equations in the order of earlier versions, see `Traced.ordered_before`."""
        return replace(self, rewritten=self.traced.ordered_before())

    def form(self, form: Variant) -> Traced:
        """Return the step in a form, whose sites may be unnamed; each is built once."""
        form = self.traced.named(form)
        if form == self.traced.form:
            return self.traced
        if form not in self._in_form:
            self._in_form[form] = self.traced.in_form(form)
        return self._in_form[form]

    @cached_property
    def division(self) -> Division:
        """The shardings of the step's values."""
        return Division(self.program, self.args, self.kwargs)

    @cached_property
    def estimated(self) -> Graph:
        """The plain graph priced by rules, without a compilation."""
        return self.estimate(self.traced, self._base.base_nbytes)

    @cached_property
    def _base(self) -> MemoryStats:
        return estimate_base(self.division.local(self.traced)[0])

    def estimate(self, traced: Traced, base_nbytes: int) -> Graph:
        """Return the graph of a form priced by rules, with `base_nbytes` of arguments and outputs."""
        there, flops = self.division.local(traced)
        graph = lower(there, self.device, base_nbytes=base_nbytes, flops=flops, patterns=self.pins)
        return replace(graph, host=self.usable_host)

    def bare(self, form: Variant, *, pinned: bool = False) -> Graph:
        """Return the graph of a form to which existing plans are applied. Its bytes are per device, as they were for
        the plan: a value that was small then must be small now, since small values are always saved.

        **Arguments:** `pinned` adds pins and host memory, which a new schedule must respect.
        """
        there, flops = self.division.local(self.form(form))
        patterns = self.pins if pinned else ()
        graph = lower(there, self.device, base_nbytes=0, flops=flops, patterns=patterns)
        return replace(graph, host=self.usable_host) if pinned else graph

    def bare_plain(self, graph: Graph) -> Graph:
        """Return the bare graph of the plain step, with the arguments' and outputs' bytes of another graph."""
        return replace(self.bare(self.traced.form), base_nbytes=graph.base_nbytes)

    @property
    def usable_host(self) -> HostMemory | None:
        """Host memory, None if values of this step cannot be offloaded."""
        return None if self.traced.around else self.host

    @property
    def must_plan(self) -> bool:
        """Whether the user pins values to be recomputed or offloaded that the plain step saves."""
        pinned = self.estimated.pinned
        return bool(pinned["recompute"] or pinned["offload"].intersection(self.estimated.away.alone))

    @cached_property
    def estimated_peak_nbytes(self) -> int:
        """The plain step's peak by the estimated graph."""
        stacked = as_stacked(self.estimated)
        return simulate(stacked, save_all(stacked)).peak_nbytes

    def modelled_memory(self, why: str) -> MemoryStats:
        """Return the parts of `estimated_peak_nbytes`. **Arguments:** `why` they are not the compiler's."""
        temporaries = self.estimated_peak_nbytes - self._base.base_nbytes
        return replace(self._base, temporaries_nbytes=temporaries, modelled=why)

    @property
    def undoes(self) -> bool:
        """Whether the user's step has checkpoints, which plans undo."""
        return self.traced.rematted and not self.respect_checkpoint

    @cached_property
    def replaces(self) -> bool:
        """Whether plans replace equations of the step by others of the same value."""
        better = replaced(self.backend)
        packed = any(each.exact for each in self.traced.program.encoded)
        return packed or any(better(eqn) or is_by_place(eqn) for eqn in self.traced.flat.jaxpr.eqns)

    def as_checkpointed(self, graph: Graph) -> Schedule:
        """Return the schedule of a plain graph that saves the values that the user's own checkpoints save."""
        again, made = self.traced.again, graph.values
        return close_over_dependencies(graph, [v for v in graph.residuals if made[v].producer not in again])

    def jitted(
        self, graph: Graph, schedule: Schedule, fence: str = FINISHED, detached: Detached | None = None
    ) -> Any:
        """Return the step that follows a schedule of one of its graphs."""
        traced = self.form(graph.form)
        planned = emit(traced, graph, schedule, fence, detached)
        jitted = self.program.evaluating(planned, traced)
        self._unproved[jitted] = unproved(planned)
        return jitted

    def unproved(self, jitted: jax.stages.Wrapped) -> tuple[str, ...]:
        """Return the parts of a step from `jitted` that were not proved to compute the user's step."""
        return self._unproved.get(jitted, ())

    @cached_property
    def unfused_build(self) -> Program:
        """The program with the compiler options for reading a step's memory and kernels."""
        return self.program.unfused_build(self.device.platform, shared=len(self.processes) > 1)

    @cached_property
    def unoptimised_build(self) -> Program:
        """The program with the compiler options for reading only which values a step writes to memory."""
        return self.program.unoptimised_build(self.device.platform, shared=len(self.processes) > 1)

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes of this job on whose devices the step runs."""
        return processes_of(self.program, self.args, self.kwargs)

    @property
    def unfused_builds(self) -> bool:
        """Whether the chosen plan is compiled once more to run, with other compiler options."""
        return self.program.target is None and self.unfused_build != self.program

    @property
    def compiles_to_run(self) -> bool:
        """Whether this process can run a program that it compiled without other processes."""
        return self.program.target is None and len(self.processes) == 1

    @property
    def compiles_apart(self) -> bool:
        """Whether several programs may be compiled at a time: not if the device autotunes kernels."""
        return self.unfused_builds or self.program.target is not None

    def compile(self, jitted: jax.stages.Wrapped) -> CompiledStep:
        """Compile a variant of the step for the device, to read its memory and kernels."""
        self.compilations.count += 1
        return CompiledStep(self.unfused_build.compile(jitted, self.args, self.kwargs), self.device)

    def finished(self, jitted: jax.stages.Wrapped) -> CompiledStep:
        """Compile a variant of the step to run."""
        self.compilations.count += 1
        with phase("compiling the planned step", kind="compile"):
            return CompiledStep(self.program.compile(jitted, self.args, self.kwargs), self.device)

    def begin_plain(self, *, to_run: bool = False) -> Future[tuple[Compiled, float]]:
        """Start to compile the step as the user wrote it, to read its figures or to run: in a thread where possible."""
        self.compilations.count += 1
        program = self.program if to_run else self.unfused_build
        with phase("compiling the plain step", kind="compile"):
            return program.begin(
                self.program.plain, self.args, self.kwargs, self.written_seconds, apart=self.compiles_apart
            )

    def compile_tagged(self, form: Variant, *, timed: bool) -> CompiledStep:
        """Compile the step in a form, with every equation tagged and with the replacements that every plan makes. In
        other forms than the plain one, equations in loops have no tags.

        **Arguments:** `timed` whether its peak or time is used; if not, an unoptimised build is enough.

        **Raises:** `CompilationError`.
        """
        self.compilations.count += 1
        program = self.unfused_build if timed else self.unoptimised_build
        began, traced = time.monotonic(), self.form(form)
        with phase("compiling the plain step, tagged", kind="compile"):
            if traced is self.traced:
                closed, seconds = tagged(traced, self.backend), self.written_seconds
            else:
                traced = numbered(traced)
                graph = self.estimate(traced, self.estimated.base_nbytes)
                closed, seconds = emit(traced, graph, save_all(graph)), math.inf
            jitted = program.evaluating(closed, traced)
            compiled = program.compile(jitted, self.args, self.kwargs, seconds)
        return CompiledStep(compiled, self.device, True, time.monotonic() - began)
