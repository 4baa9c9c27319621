"""Program, arguments -> the plain step, traced, compiled and lowered: what every plan of it starts from.

Law: each part is made when it is first asked for, and once, however many budgets are planned for.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from .._compiler._devices import DeviceSpec
from .._compiler._gathers import gathers
from .._compiler._hlo import Module, parse
from .._compiler._library_kernels import library_seconds
from .._compiler._measured_times import measure
from .._compiler._memory_stats import MemoryStats
from .._compiler._program import Compiled, Program
from .._compiler._roofline import roofline
from .._compiler._scratch import Scratch, scratch
from .._compiler._shardings import Division
from .._compiler._tags import Beside, Written, borrowed, constants, tagged, written
from .._compiler._workspace import alone_seconds, workspaces
from .._emit._emit import FENCES, emit
from .._lower._iteration import Iteration, backward, forward, recomputing, repeated
from .._lower._iteration_buffers import with_beside
from .._lower._kernel_prices import always_stacked_seconds
from .._lower._loop_seconds import Alone, known, looped_seconds, moved_seconds, plain_seconds, with_seconds
from .._lower._lower import as_stacked, estimate_base, lower
from .._model._backend import Backend, backend
from .._model._graph import Graph, Segments
from .._model._loop_levels import Chunking, Pairs
from .._model._pins import Patterns
from .._model._schedule import Schedule
from .._model._simulate import simulate
from .._model._unnamed_buffers import borrows
from .._program._primitives import is_relabelling
from .._rewrite._fingerprint import fingerprint
from .._rewrite._kernel_choice import replaced
from .._rewrite._loop_opening import ALONE
from .._rewrite._row_chunks import is_in_chunks
from .._rewrite._trace import Traced, trace
from .._runtime._bytes import format_nbytes
from .._runtime._progress import phase

logger = logging.getLogger("jaxremat")

_WORKSPACE_SHARE = 1 / 200
"""Equations with an operand above this share of the temporaries are compiled alone for their scratch memory."""

_MEASURED_SHARE = 1 / 1000
"""Equations with an operand above this share of them are timed where `profile="measure"`."""

ROW_COPIES = 2
"""How often a row that is written over another is written and read for that alone."""


@dataclass
class Baseline:
    """The plain step.

    **Fields:** `program`, `args`, `kwargs`; `device`; `profile` as in `jaxremat.optimize`; `here` the `jax.Device` to
    measure on, None for a target; `respect_checkpoint` and `pins` as in `jaxremat.optimize`; `compile_count` of whole
    steps so far; `forms` of the step that were made, by levels.
    """

    program: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: DeviceSpec
    profile: str
    here: Any = None
    respect_checkpoint: bool = False
    pins: Patterns = ()
    compile_count: int = 0
    forms: dict[Segments, Traced] = field(default_factory=dict)
    _iterations: dict[str, Module] = field(default_factory=dict)
    _looped: dict[Segments, Alone] = field(default_factory=dict)
    _graphs: dict[tuple[bool, Segments], Graph] = field(default_factory=dict)

    @property
    def backend(self) -> Backend:
        """What the device's compiler does."""
        return backend(self.device.platform)

    @cached_property
    def traced(self) -> Traced:
        """The step as it is."""
        keep = self.respect_checkpoint
        with phase("tracing the step"):
            traced = trace(self.program.plain, self.args, self.kwargs, respect_checkpoint=keep)
        if (count := self.division.devices) == 1:
            return traced
        return traced.gathered(gathers(traced, self.program, self.args, self.kwargs), count)

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

    def form(self, segments: Segments) -> Traced:
        """The step with its loops in these levels, and its rows in these chunks; plans of before may not name those."""
        segments = (*segments, *((),) * (len(self.traced.segments) - len(segments)))
        if segments == self.traced.segments:
            return self.traced
        if segments not in self.forms:
            self.forms[segments] = self.traced.in_segments(segments)
        return self.forms[segments]

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
        return lower(there, self.device, base_nbytes=base_nbytes, flops=flops, patterns=self.pins)

    @property
    def must_recompute(self) -> bool:
        """Whether the user wants something recomputed that the plain step saves."""
        return bool(self.rough.pinned["recompute"])

    @cached_property
    def rough_peak_nbytes(self) -> int:
        """The plain step's peak by that graph."""
        stacked = as_stacked(self.rough)
        return simulate(stacked, everything(stacked)).peak_nbytes

    @cached_property
    def plain(self) -> Compiled:
        """The user's own step."""
        with phase("compiling the plain step"):
            return self.compile(self.program.plain)

    @cached_property
    def witness(self) -> Compiled:
        """The plain step with every equation tagged, and replaced what every plan replaces."""
        with phase("compiling the plain step, tagged"):
            return self.compile(self.program.evaluating(tagged(self.traced, self.backend), self.traced))

    @cached_property
    def _module(self) -> Module:
        return parse(text_of(self.witness))

    @property
    def peak_nbytes(self) -> int:
        """The plain step's compiled peak: of the user's own step if that is compiled already or differs from the tagged
        one (which has no checkpoints, and replaces equations); else of that one.
        """
        own = "plain" in self.__dict__ or self.traced.rematted or self._replaces
        return MemoryStats.of(self.plain if own else self.witness).peak_nbytes

    @property
    def temporaries_nbytes(self) -> int:
        """What of it is not there all the time."""
        return self.peak_nbytes - MemoryStats.of(self.witness).base_nbytes

    @cached_property
    def _replaces(self) -> bool:
        return any(map(replaced(self.backend), self.traced.flat.jaxpr.eqns))

    @cached_property
    def witness_seconds(self) -> float:
        """The tagged step's time by a roofline of its kernels."""
        return roofline(self._module, self.device).seconds

    @cached_property
    def seconds(self) -> float:
        """The plain step's."""
        if not (self._replaces or self.traced.rematted or self.traced.loops):
            return self.witness_seconds
        return roofline(parse(text_of(self.plain)), self.device).seconds

    @cached_property
    def graph(self) -> Graph:
        """The graph by what XLA writes to memory."""
        graph = self._lowered(self.traced)
        logger.info(
            "plain step: peak %s, %d equations, %d residuals, %d stages",
            format_nbytes(self.peak_nbytes), len(graph.nodes), len(graph.residuals), len(graph.stages),
        )  # fmt: skip
        if graph.backend.fuses and self.profile == "roofline":
            more = self._more_seconds(graph, graph.extra_seconds)
            return replace(graph, step_seconds=self.seconds, extra_seconds=more)
        return graph

    def _lowered(self, traced: Traced) -> Graph:
        base = MemoryStats.of(self.witness).base_nbytes
        there, flops = self.division.local(traced)
        workspace = self._workspace(traced, int(self.temporaries_nbytes * _WORKSPACE_SHARE))
        seconds = self._measured(traced, self.temporaries_nbytes)
        again = {i: self._written_alone(each) for i, each in repeated(traced, self.backend).items()}

        def lowered(iterations: Mapping[int, Iteration], beside: Beside | None = None) -> Graph:
            return lower(
                there,
                self.device,
                base_nbytes=base,
                written=self._written(traced, iterations, again),
                workspace=workspace,
                beside=beside,
                seconds=seconds,
                flops=flops,
                patterns=self.pins,
            )

        iterations = forward(traced, self.backend)
        graph = lowered(iterations)
        if not traced.loops:
            return graph
        iterations |= backward(traced, graph, self.backend)
        graph = lowered(iterations)
        if not self.backend.fuses:
            return lowered(iterations, self._beside(traced, graph))
        alone = {i: (each, self._alone(each)) for i, each in iterations.items()}
        self._looped[traced.segments] = alone
        graph = with_beside(graph, alone)
        return with_seconds(graph, traced, alone, self.device) if self.profile == "roofline" else graph

    def _beside(self, traced: Traced, graph: Graph) -> Beside:
        """What iterations of backward loops write of the forward pass's fused work where they recompute all of it, and
        of constants.
        """
        shared: dict[int, int] = {}
        borrowing: set[tuple[int, int]] = set()
        fixed: dict[int, int] = {}
        eqns = traced.jaxpr.jaxpr.eqns
        fused = {n.id for n in graph.nodes if n.forward and not graph.kernel[n.id]}
        for iteration in recomputing(traced, graph, self.backend).values():
            module, place = self._alone(iteration), dict(enumerate(iteration.places))
            sizes = self._written_alone(iteration).sizes
            shared.update(
                (i, sum(own)) for i, own in sizes.items() if i in fused and not is_relabelling(eqns[i])
            )
            borrowing.update((place[i], place[j]) for i, j in borrowed(module) if {i, j} <= place.keys())
            fixed.update((place[i], nbytes) for i, nbytes in constants(module).items() if i in place)
        return Beside(shared, borrows(graph, borrowing, shared), fixed)

    @cached_property
    def _plainly_written(self) -> Written:
        """What the compiled plain step writes."""
        return written(self._module)

    def _written(
        self, traced: Traced, iterations: Mapping[int, Iteration], again: Mapping[int, Written]
    ) -> Written:
        """What the compiled plain step writes, and what iterations of loops do that are compiled alone.

        Of pairs of loops, a compiler that does not fuse reductions writes what the rules say, and some more.

        **Arguments:** `again` by loop with both passes of its own.
        """
        found = self._plainly_written.renumbered(self.traced.places(traced))
        for loop, iteration in iterations.items():
            alone = self._written_alone(iteration)
            found = found.also(loop, alone) if self.backend.fuses else found.with_(alone)
        for loop, alone in again.items():
            found = found.also(loop, alone)
        return found

    def _written_alone(self, iteration: Iteration) -> Written:
        return written(self._alone(iteration)).renumbered(dict(enumerate(iteration.places)))

    def _alone(self, iteration: Iteration) -> Module:
        """An iteration of a loop, compiled by itself."""
        if iteration.key not in self._iterations:
            with phase("compiling an iteration"):
                self._iterations[iteration.key] = iteration.compiled(self.program, self.division.named)
        return self._iterations[iteration.key]

    def _looped_seconds(self, graph: Graph) -> float | None:
        """What the loops of this form take longer than the plain step's where they stack nothing and find all saved;
        None where that is not known.
        """
        traced = self.form(graph.segments)
        in_chunks = alone_seconds(traced, self.program, self.device, is_in_chunks)
        looped = known(traced.loops, traced.segments) and known(self.traced.loops, ())
        if not (in_chunks or looped):
            return None
        moved = moved_seconds(self._module, self.traced.places(traced), self.device)
        if not looped:
            return in_chunks - moved
        taken = looped_seconds(graph, traced, self._looped[traced.segments], self.device)
        stacked = always_stacked_seconds(graph, traced.loops, self.device)
        return in_chunks + taken + stacked - moved - plain_seconds(self._module, self.device)

    def _more_seconds(self, graph: Graph, otherwise: float) -> float:
        """What such a form of the tagged step takes longer than the plain step.

        **Arguments:** `otherwise` what it takes longer than the tagged one where its loops' time is not known.
        """
        own = self._looped_seconds(graph)
        return (otherwise if own is None else own) + self.witness_seconds - self.seconds

    def plain_graph(self, *, rough: bool = False) -> Graph:
        """The graph of the step's loops as they are."""
        return self.rough if rough else self.graph

    def pairs(self, graph: Graph) -> Pairs:
        """The pairs of loops of this graph of the plain form, which may take other forms."""
        absorbing = [
            (gain.fewer_nbytes, ROW_COPIES * gain.written_nbytes / self.device.bandwidth)
            for gain in self.traced.gains
        ]
        chunkings = [
            [Chunking(n, region.fewer_nbytes(n), region.more_seconds(n, self.device)) for n in region.choices]
            if self._may_chunk
            else []
            for region in self.traced.regions
        ]
        return Pairs.of(graph, self.traced.lengths, self.traced.cuttable, absorbing, chunkings)

    @cached_property
    def _may_chunk(self) -> bool:
        """Whether rows may be done in chunks: not where the user decides about values, nor on several devices."""
        decided = self.pins or self.traced.hints
        return not decided and self.division.devices == 1

    def graph_of(self, segments: Segments, *, rough: bool = False) -> Graph:
        """The graph of such a form, its time counted from the plain step's."""
        key = rough, segments
        if key not in self._graphs:
            plain, traced = self.plain_graph(rough=rough), self.form(segments)
            graph = self._roughly(traced, plain.base_nbytes) if rough else self._lowered(traced)
            more = plain.extra_seconds + self.pairs(plain).form(segments).more_seconds
            if not rough and self.backend.fuses and self.profile == "roofline":
                more = self._more_seconds(graph, more - (self.witness_seconds - self.seconds))
            self._graphs[key] = replace(graph, step_seconds=plain.step_seconds, extra_seconds=more)
        return self._graphs[key]

    @cached_property
    def _shown(self) -> dict[int, Scratch]:
        """Scratch memory of the plain form's equations, as its program shows it."""
        return scratch(self._module, self.division.local(self.traced)[0].jaxpr.jaxpr.eqns)

    @cached_property
    def _called(self) -> dict[int, float]:
        """Seconds of those that are library calls in its program."""
        return library_seconds(self._module, self.traced.jaxpr.jaxpr.eqns, self.device)

    def _workspace(self, traced: Traced, least: int) -> dict[int, Scratch]:
        """Scratch memory by equation: what the program shows, and of the bodies of loops what they need alone."""
        platform, among = self.device.platform, None
        there, _ = self.division.local(traced)
        if self.backend.fuses:
            own = (i for i, loop in enumerate(traced.loop_of) if loop >= 0)
            among = {i for i in own if traced.loops[traced.loop_of[i]].role == ALONE}
            among.update(i for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns) if is_in_chunks(eqn))
        alone = workspaces(there, self.program, platform, least, among)
        found = {i: Scratch(nbytes) for i, nbytes in alone.items()}
        if among is not None:
            places = self.traced.places(traced)
            found |= {j: self._shown[i].renumbered(places) for i, j in places.items() if i in self._shown}
        return found

    def _measured(self, traced: Traced, temporaries_nbytes: int) -> dict[int, float] | None:
        """Seconds of equations that ran alone: on the device at hand where that is asked for, else of library calls, as
        the plain step has them.
        """
        if self.profile != "measure":
            if not self.backend.fuses:
                return None
            return {j: self._called[i] for i, j in self.traced.places(traced).items() if i in self._called}
        least = int(temporaries_nbytes * _MEASURED_SHARE)
        return measure(self.division.local(traced)[0], self.here, self.program.compiler_options, least)

    def jitted(self, graph: Graph, schedule: Schedule, fence: str = FENCES[0]) -> Any:
        """The step that follows a schedule of one of its graphs."""
        traced = self.form(graph.segments)
        return self.program.evaluating(emit(traced, graph, schedule, fence), traced)

    def compile(self, jitted: Any) -> Compiled:
        """A variant of the step, compiled for the device."""
        self.compile_count += 1
        return self.program.lower(jitted, self.args, self.kwargs).compile()


def everything(graph: Graph) -> Schedule:
    """The plain step's schedule."""
    return Schedule(frozenset(graph.residuals), ((),) * len(graph.stages))


def text_of(compiled: Compiled) -> str:
    """The optimised, scheduled HLO."""
    return compiled.as_text() or ""
