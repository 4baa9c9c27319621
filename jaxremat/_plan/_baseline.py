"""Program, arguments -> the plain step, traced, compiled and lowered: what every plan of it starts from.

Law: each part is made when it is first asked for, and once, however many budgets are planned for.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from .._compiler._compiled_step import CompiledStep
from .._compiler._devices import DeviceSpec
from .._compiler._gathers import gathers
from .._compiler._program import Compiled, Program, processes_of
from .._compiler._shardings import Division
from .._compiler._tags import tagged
from .._emit._emit import FENCES, emit
from .._lower._form_graphs import FormGraphs
from .._lower._lower import as_stacked, estimate_base, lower
from .._model._backend import Backend, backend
from .._model._form import ATTENTION, Form
from .._model._form_offers import EXACT, Forms
from .._model._graph import Graph
from .._model._host_copies import HostMemory
from .._model._pins import Patterns
from .._model._schedule import Passing, Schedule, complete, everything
from .._model._simulate import simulate
from .._rewrite._fingerprint import fingerprint
from .._rewrite._kernel_choice import replaced
from .._rewrite._pooling_places import is_by_place
from .._rewrite._trace import Traced, trace
from .._runtime._bytes import format_nbytes
from .._runtime._progress import phase
from ._defects import Defects
from ._forms import Sites, forms

logger = logging.getLogger("jaxremat")


@dataclass
class Baseline:
    """The plain step.

    **Fields:** `program`, `args`, `kwargs`; `device`; `profile` as in `jaxremat.optimize`; `here` the `jax.Device` to
    measure on, None for a target; `respect_checkpoint` and `pins` as in `jaxremat.optimize`; `host` the memory in
    which plans may keep values meanwhile, if any; `compile_count` of whole steps so far.
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
    compile_count: int = 0
    _witness_seconds: float = 0.0
    _traced: dict[Form, Traced] = field(default_factory=dict)
    _graphs: dict[tuple[bool, Form], Graph] = field(default_factory=dict)
    _priced: dict[bool, Forms] = field(default_factory=dict)
    _around: dict[Form, float] = field(default_factory=dict)

    @property
    def backend(self) -> Backend:
        """What the device's compiler does."""
        return backend(self.device.platform)

    @cached_property
    def traced(self) -> Traced:
        """The step as it is."""
        keep, what = self.respect_checkpoint, (self.program.plain, self.args, self.kwargs)
        with phase("tracing the step", kind="trace"):
            self.program.plain.trace(*self.args, **self.kwargs)  # what the user's code raises is the user's
            found = self.defects.attempted("rewriting", lambda: trace(*what, respect_checkpoint=keep))
            traced = trace(*what, respect_checkpoint=keep, inlined=True) if found is None else found
        if (count := self.division.devices) == 1 or traced.around:
            return traced
        found = gathers(traced, self.program, self.args, self.kwargs)
        return self.division.with_attention(self.division.with_parts(traced.gathered(found, count)))

    @cached_property
    def defects(self) -> Defects:
        """What goes wrong with it and should not."""
        return Defects(self.program, self.args, self.kwargs, self.compiler)

    @cached_property
    def fingerprint(self) -> str:
        """What tells the program from others."""
        return fingerprint(self.traced)

    @property
    def compiler(self) -> str:
        """The compiler, and the device that it compiles for."""
        name = "the CPU" if self.device.platform == "cpu" else self.device.name
        there = "" if self.program.target is None else ", without the device"
        return f"XLA of jax {jax.__version__} for {name}{there}"

    @cached_property
    def ordered_before(self) -> "Baseline":
        """The same with the equations in their order of before, see `Traced.ordered_before`."""
        before = replace(self, _traced={}, _graphs={}, _priced={}, _around={})
        before.traced = self.traced.ordered_before()
        return before

    def form(self, form: Form) -> Traced:
        """The step in this form, whose sites need no names."""
        form = self.traced.named(form)
        if form == self.traced.form:
            return self.traced
        if form not in self._traced:
            self._traced[form] = self.traced.in_form(form)
        return self._traced[form]

    @cached_property
    def division(self) -> Division:
        """Where the step's values are."""
        return Division(self.program, self.args, self.kwargs)

    @cached_property
    def rough(self) -> Graph:
        """The graph by rules alone, without a compilation."""
        return self._roughly(self.traced, estimate_base(self.division.local(self.traced)[0]))

    def _roughly(self, traced: Traced, base_nbytes: int) -> Graph:
        there, flops = self.division.local(traced)
        graph = lower(there, self.device, base_nbytes=base_nbytes, flops=flops, patterns=self.pins)
        return replace(graph, host=self._host)

    def bare(self, form: Form) -> Graph:
        """The graph of such a form that plans made before are laid out on: of what one device has, as when they were
        made, for what is small by a plan is saved by it.
        """
        there, flops = self.division.local(self.form(form))
        return lower(there, self.device, base_nbytes=0, flops=flops)

    @property
    def _host(self) -> HostMemory | None:
        return None if self.traced.around else self.host

    @property
    def must_plan(self) -> bool:
        """Whether the user wants something recomputed, or in host memory, that the plain step saves."""
        pinned = self.rough.pinned
        return bool(pinned["recompute"] or pinned["offload"].intersection(self.rough.away.alone))

    @cached_property
    def rough_peak_nbytes(self) -> int:
        """The plain step's peak by that graph."""
        stacked = as_stacked(self.rough)
        return simulate(stacked, everything(stacked)).peak_nbytes

    @cached_property
    def plain(self) -> CompiledStep:
        """The user's own step, as a draft."""
        begun = self._plain_begun
        if self.undoes:
            self.foresee()
        with phase("compiling the plain step", kind="compile"):
            return CompiledStep(begun.result()[0], self.device)

    def foresee(self) -> None:
        """Make what plans start from while the plain step is compiled, where that is in another thread or process."""
        if self._apart or self.undoes:
            _ = self._plain_begun
            with suppress(Exception):  # it fails again where it is wanted
                _ = self.witness

    @cached_property
    def _plain_begun(self) -> Future[tuple[Compiled, float]]:
        self.compile_count += 1
        with phase("compiling the plain step", kind="compile"):
            return self.draft.begin(self.program.plain, self.args, self.kwargs, apart=self._apart)

    @property
    def _apart(self) -> bool:
        """Whether several programs may be compiled at a time: not where kernels are tried out on the device."""
        return self.drafts or self.program.target is not None

    @cached_property
    def witness(self) -> CompiledStep:
        """The plain step with every equation tagged, and replaced what every plan replaces: a sketch where the plain
        step itself says what it needs, and nobody asks how long this one takes.
        """
        if self._own_seconds:
            _ = self._plain_begun
        timed = self.undoes or self.backend.fuses
        program = self.sketch if self._plain_is_begun and not timed else self.draft
        self.compile_count += 1
        began = time.monotonic()
        with phase("compiling the plain step, tagged", kind="compile"):
            jitted = self.program.evaluating(tagged(self.traced, self.backend), self.traced)
            compiled = program.compile(jitted, self.args, self.kwargs)
        self._witness_seconds = time.monotonic() - began
        return CompiledStep(compiled, self.device, keep_module=True)

    @property
    def plain_seconds(self) -> float:
        """What compiling the plain step to be read took, the tagged one where only that is."""
        return self._plain_begun.result()[1] if self._plain_is_begun else self._witness_seconds

    @property
    def peak_nbytes(self) -> int:
        """The plain step's compiled peak: of the user's own step if that is compiled or differs from the tagged one
        (which has no checkpoints, and replaces equations); else of that one.
        """
        own = self._plain_is_begun or self.traced.rematted or self._replaces
        return (self.plain if own else self.witness).peak_nbytes

    @property
    def temporaries_nbytes(self) -> int:
        """What of it is not there all the time."""
        return self.peak_nbytes - self.witness.memory.base_nbytes

    @property
    def _plain_is_begun(self) -> bool:
        return "_plain_begun" in self.__dict__

    @cached_property
    def _replaces(self) -> bool:
        better = replaced(self.backend)
        packed = any(each.exact for each in self.traced.encoded)
        return packed or any(better(eqn) or is_by_place(eqn) for eqn in self.traced.flat.jaxpr.eqns)

    @property
    def _own_seconds(self) -> bool:
        """Whether the plain step's time is another than the tagged one's."""
        return bool(self._replaces or self.traced.rematted or self.traced.loops)

    @cached_property
    def witness_seconds(self) -> float:
        """The tagged step's time by a roofline of its kernels, which no sketch tells."""
        return self.witness.seconds

    @cached_property
    def seconds(self) -> float:
        """The plain step's."""
        if not (self._own_seconds or self._plain_is_begun):
            return self.witness_seconds
        return self.plain.seconds

    @cached_property
    def _form_graphs(self) -> FormGraphs:
        return FormGraphs(
            plain=self.traced,
            module=self.witness.module,
            base_nbytes=self.witness.memory.base_nbytes,
            temporaries_nbytes=self.temporaries_nbytes
            if self.traced.rematted or self._replaces
            else self.witness.memory.temporaries_nbytes,  # as many, while the plain step is compiled
            program=self.sketch,
            device=self.device,
            profile=self.profile,
            here=self.here,
            options=self.program.compiler_options,
            pins=self.pins,
            division=self.division,
        )

    @cached_property
    def graph(self) -> Graph:
        """The graph by what XLA writes to memory."""
        graph = replace(self._form_graphs.graph(self.traced), host=self._host)
        logger.info(
            "plain step: peak %s, %d equations, %d residuals, %d stages",
            format_nbytes(self.peak_nbytes), len(graph.nodes), len(graph.residuals), len(graph.stages),
        )  # fmt: skip
        if graph.backend.fuses and self.profile == "roofline":
            more = self._more_seconds(graph, graph.extra_seconds)
            return replace(graph, step_seconds=self.seconds, extra_seconds=more)
        if self.undoes:  # counted from the user's own step, which computes again what its checkpoints say
            own = graph.step_seconds * self.seconds / self.witness_seconds
            return replace(
                graph, step_seconds=own, extra_seconds=graph.extra_seconds + graph.step_seconds - own
            )
        return graph

    @property
    def undoes(self) -> bool:
        """Whether the user's step has checkpoints, which plans undo."""
        return self.traced.rematted and not self.respect_checkpoint

    def as_checkpointed(self, graph: Graph) -> Schedule:
        """The schedule of this graph of the plain form that saves what the user's own checkpoints save."""
        again, made = self.traced.again, graph.values
        return complete(graph, [v for v in graph.residuals if made[v].producer not in again])

    def _more_seconds(self, graph: Graph, otherwise: float) -> float:
        """What such a form of the tagged step takes longer than the plain step.

        **Arguments:** `otherwise` what it takes longer than the tagged one where its loops' time is not known.
        """
        own = self._form_graphs.looped_seconds(graph, self.form(graph.form))
        more = otherwise if own is None else own
        return more + self._around_attention(graph.form) + self.witness_seconds - self.seconds

    def _around_attention(self, form: Form) -> float:
        """What the compiled step takes longer with attention as in this form than its operations say, outside of loops:
        arrays that products of matrices want in another order are copied no more, which nothing else tells.
        """
        alone = Form.of_kind(ATTENTION, form.settings(ATTENTION))
        if not alone or self.traced.loops:
            return 0.0
        if alone not in self._around:
            graph = self._form_graphs.graph(self.form(alone))
            own = self._form_graphs.looped_seconds(graph, self.form(alone)) or 0.0
            with phase("compiling attention's form", kind="compile"):
                compiled = self.compile(self.jitted(graph, everything(graph)))
            self._around[alone] = compiled.seconds - self.witness_seconds - own
        return self._around[alone]

    def plain_graph(self, *, rough: bool = False) -> Graph:
        """The graph of the step's loops as they are."""
        return self.rough if rough else self.graph

    def forms(self, graph: Graph) -> Forms:
        """Those that the step may take, by this graph of the plain one."""
        traced, there = self.traced, self.division.local(self.traced)[0]
        decided = bool(self.pins or traced.hints)
        here = self.here if self.device.platform != "cpu" else None
        return forms(Sites(traced, there, graph, self.device, here, self.allow, decided))

    def graph_of(self, form: Form, *, rough: bool = False) -> Graph:
        """The graph of such a form, its time counted from the plain step's."""
        key = rough, form
        if key not in self._graphs:
            plain, traced = self.plain_graph(rough=rough), self.form(form)
            graph = self._roughly(traced, plain.base_nbytes) if rough else self._form_graphs.graph(traced)
            if rough not in self._priced:
                self._priced[rough] = self.forms(plain)
            more = plain.extra_seconds + self._priced[rough].promise(form).more_seconds
            if not rough and self.backend.fuses and self.profile == "roofline":
                more = self._more_seconds(graph, more - (self.witness_seconds - self.seconds))
            self._graphs[key] = replace(
                graph, step_seconds=plain.step_seconds, extra_seconds=more, host=self._host
            )
        return self._graphs[key]

    def jitted(
        self, graph: Graph, schedule: Schedule, fence: str = FENCES[0], detached: Sequence[Passing] = ()
    ) -> Any:
        """The step that follows a schedule of one of its graphs."""
        traced = self.form(graph.form)
        return self.program.evaluating(emit(traced, graph, schedule, fence, detached), traced)

    @cached_property
    def draft(self) -> Program:
        """The program as it is compiled to be read."""
        return self.program.draft(self.device.platform, shared=len(self.processes) > 1)

    @cached_property
    def sketch(self) -> Program:
        """The program as it is compiled to see what it writes to memory alone."""
        return self.program.sketch(self.device.platform, shared=len(self.processes) > 1)

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """Those of this job on whose devices the step runs."""
        return processes_of(self.program, self.args, self.kwargs)

    @property
    def drafts(self) -> bool:
        """Whether what will run is compiled once more."""
        return self.program.target is None and self.draft != self.program

    def compile(self, jitted: Any) -> CompiledStep:
        """A variant of the step, compiled for the device, to be read: its memory, its kernels."""
        self.compile_count += 1
        return CompiledStep(self.draft.compile(jitted, self.args, self.kwargs), self.device)

    def finished(self, jitted: Any) -> CompiledStep:
        """The variant as it will run."""
        self.compile_count += 1
        with phase("compiling what will run", kind="compile"):
            compiled = self.program.compile(jitted, self.args, self.kwargs)
        return CompiledStep(compiled, self.device)
