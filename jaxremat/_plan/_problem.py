"""Program, arguments, device -> the step to plan, traced and rewritten, and what compiles its variants.

Invariant: everything here follows from the fields. Nothing is compiled but by the methods that say so, which count it.
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
    """How many whole steps were compiled for a problem so far."""

    count: int = 0


@dataclass(frozen=True, eq=False)
class Problem:
    """A step to plan, for its arguments on a device.

    **Fields:** `program`, `args`, `kwargs`; `device`; `profile` as in `jaxremat.optimize`; `here` the `jax.Device` to
    measure on, None for a target; `respect_checkpoint`, `pins` and `allow` as in `jaxremat.optimize`; `host` the memory
    in which plans may keep values meanwhile, if any; `rewritten` the step as it is traced, None where that is to be
    done; `written_seconds` that compiling it as it is written may take; `compilations` counts what is compiled.
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
        """The step as it is."""
        if self.rewritten is not None:
            return self.rewritten
        what = self.program.plain, self.args, self.kwargs
        keep = {"respect_checkpoint": self.respect_checkpoint, "keeps_scores": "attention" not in self.allow}
        with phase("tracing the step", kind="trace"):
            self.program.plain.trace(*self.args, **self.kwargs)  # what the user's code raises is the user's
            found = self.defects.attempted("rewriting", lambda: trace(*what, **keep))
            traced = trace(*what, **keep, inlined=True) if found is None else found
        if (count := self.division.devices) == 1 or traced.around:
            return traced
        found = gathers(traced, self.program, self.args, self.kwargs)
        gathered = self.division.with_parts(traced.gathered(found, count))
        return self.division.with_attention(gathered, traced if found else gathered)

    @cached_property
    def defects(self) -> Defects:
        """The defects that planning has met."""
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
        """The same with the equations in their order of before, see `Traced.ordered_before`."""
        return replace(self, rewritten=self.traced.ordered_before())

    def form(self, form: Variant) -> Traced:
        """Return the step in this form, whose sites need no names; each is made once."""
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
        """The graph by rules alone, without a compilation."""
        return self.estimate(self.traced, self._base.base_nbytes)

    @cached_property
    def _base(self) -> MemoryStats:
        return estimate_base(self.division.local(self.traced)[0])

    def estimate(self, traced: Traced, base_nbytes: int) -> Graph:
        """Return the graph of a form by rules alone, with so many bytes of arguments and outputs."""
        there, flops = self.division.local(traced)
        graph = lower(there, self.device, base_nbytes=base_nbytes, flops=flops, patterns=self.pins)
        return replace(graph, host=self.usable_host)

    def bare(self, form: Variant, *, pinned: bool = False) -> Graph:
        """Return the graph of such a form that plans made before are laid out on: of what one device has, as when
        they were made, for what is small by a plan is saved by it.

        **Arguments:** `pinned` whether it has all that another schedule of it must keep to.
        """
        there, flops = self.division.local(self.form(form))
        patterns = self.pins if pinned else ()
        graph = lower(there, self.device, base_nbytes=0, flops=flops, patterns=patterns)
        return replace(graph, host=self.usable_host) if pinned else graph

    def bare_plain(self, graph: Graph) -> Graph:
        """Return the same of the step as it is written, with as many bytes of arguments and outputs as another."""
        return replace(self.bare(self.traced.form), base_nbytes=graph.base_nbytes)

    @property
    def usable_host(self) -> HostMemory | None:
        """Host memory, as far as values of this step can be there."""
        return None if self.traced.around else self.host

    @property
    def must_plan(self) -> bool:
        """Whether the user wants something recomputed, or in host memory, that the plain step saves."""
        pinned = self.estimated.pinned
        return bool(pinned["recompute"] or pinned["offload"].intersection(self.estimated.away.alone))

    @cached_property
    def estimated_peak_nbytes(self) -> int:
        """The plain step's peak by the estimated graph."""
        stacked = as_stacked(self.estimated)
        return simulate(stacked, save_all(stacked)).peak_nbytes

    def modelled_memory(self, why: str) -> MemoryStats:
        """Return the parts of that, and why they are not the compiler's."""
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
        """Return the schedule of this graph of the plain form that saves what the user's own checkpoints save."""
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
        """Return what of a step that was made here was not proved to be the step."""
        return self._unproved.get(jitted, ())

    @cached_property
    def unfused_build(self) -> Program:
        """The program as it is compiled to be read."""
        return self.program.unfused_build(self.device.platform, shared=len(self.processes) > 1)

    @cached_property
    def unoptimised_build(self) -> Program:
        """The program as it is compiled to see what it writes to memory alone."""
        return self.program.unoptimised_build(self.device.platform, shared=len(self.processes) > 1)

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """Those of this job on whose devices the step runs."""
        return processes_of(self.program, self.args, self.kwargs)

    @property
    def unfused_builds(self) -> bool:
        """Whether the program that will run is compiled once more."""
        return self.program.target is None and self.unfused_build != self.program

    @property
    def compiles_to_run(self) -> bool:
        """Whether a program compiled by this process alone can run."""
        return self.program.target is None and len(self.processes) == 1

    @property
    def compiles_apart(self) -> bool:
        """Whether several programs may be compiled at a time: not if kernels are autotuned on the device."""
        return self.unfused_builds or self.program.target is not None

    def compile(self, jitted: jax.stages.Wrapped) -> CompiledStep:
        """Compile a variant of the step for the device, to be read: its memory, its kernels."""
        self.compilations.count += 1
        return CompiledStep(self.unfused_build.compile(jitted, self.args, self.kwargs), self.device)

    def finished(self, jitted: jax.stages.Wrapped) -> CompiledStep:
        """Compile the variant as it will run."""
        self.compilations.count += 1
        with phase("compiling the planned step", kind="compile"):
            return CompiledStep(self.program.compile(jitted, self.args, self.kwargs), self.device)

    def begin_plain(self, *, to_run: bool = False) -> Future[tuple[Compiled, float]]:
        """Begin to compile the step as the user wrote it, to be read or to run: in another thread where possible."""
        self.compilations.count += 1
        program = self.program if to_run else self.unfused_build
        with phase("compiling the plain step", kind="compile"):
            return program.begin(
                self.program.plain, self.args, self.kwargs, self.written_seconds, apart=self.compiles_apart
            )

    def compile_tagged(self, form: Variant, *, timed: bool) -> CompiledStep:
        """Compile the step in a form with every equation tagged, and replaced what every plan replaces. Of another form
        than that of the step as it is written those in loops have no tags.

        **Arguments:** `timed` whether its peak or its time counts; else a sketch does.

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
