"""Form of a step + what the compiled plain step shows of it -> `Graph`, by what XLA writes to memory.

Law: what a form shares with the plain step is read off the plain step's program; only what it has besides (iterations
of its loops, work in chunks) is compiled, alone, and once.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .._attention._operations import attends
from .._compiler._hlo import Module
from .._compiler._measured_times import measure
from .._compiler._program import Program
from .._compiler._roofline import roofline
from .._compiler._scratch import Scratch, scratch
from .._compiler._shardings import Division
from .._compiler._tags import Written, written
from .._compiler._workspace import alone_seconds, workspaces
from .._model._backend import Backend, backend
from .._model._device_specs import DeviceSpec
from .._model._graph import Graph
from .._model._loop_levels import deep
from .._model._pins import Patterns
from .._model._variant import PLAIN, REVERSED, Variant
from .._rewrite._encodings import decoders
from .._rewrite._flat_program import ALONE
from .._rewrite._row_chunks import is_in_chunks
from .._rewrite._trace import Traced
from .._runtime._progress import phase
from ._iteration import Iteration, backward, forward, repeated
from ._kernel_prices import always_stacked_seconds
from ._loop_memory import is_whole
from ._loop_seconds import known, looped_seconds, moved_seconds, plain_seconds
from ._lower import lower

_WORKSPACE_SHARE = 1 / 200
"""Equations with an operand above this share of the temporaries are compiled alone for their scratch memory."""

_MEASURED_SHARE = 1 / 1000
"""Equations with an operand above this share of them are timed where `profile="measure"`."""


@dataclass
class FormGraphs:
    """Lowers the forms of one step.

    **Fields:** `plain` the step as it is; `module` what its tagged program was compiled to; `base_nbytes` and
    `temporaries_nbytes` of that; `program` to compile parts of the step as, to be read; `device`; `profile` as in
    `jaxremat.optimize`; `here` the device to measure on and compiler `options` to do that with; `pins`; its
    `division` over devices.
    """

    plain: Traced
    module: Module
    base_nbytes: int
    temporaries_nbytes: int
    program: Program
    device: DeviceSpec
    profile: str
    here: Any
    options: tuple[tuple[str, Any], ...]
    pins: Patterns
    division: Division
    _iterations: dict[str, Module] = field(default_factory=dict)
    _looped: dict[Variant, dict[int, Module]] = field(default_factory=dict)

    @property
    def backend(self) -> Backend:
        """What the device's compiler does."""
        return backend(self.device.platform)

    def graph(self, traced: Traced) -> Graph:
        """The graph of a form, in seconds of the tagged plain step."""
        there, flops = self.division.local(traced)
        workspace = self._workspace(traced, int(self.temporaries_nbytes * _WORKSPACE_SHARE))
        seconds = self._measured(traced, self.temporaries_nbytes)
        again = {i: self._written_alone(each) for i, each in repeated(traced, self.backend).items()}

        def lowered(iterations: Mapping[int, Iteration]) -> Graph:
            return lower(
                there,
                self.device,
                base_nbytes=self.base_nbytes,
                written=self._written(traced, iterations, again),
                workspace=workspace | self._scratch_of(there, iterations.values()),
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
        if self.backend.fuses:
            self._looped[traced.form] = {i: self._alone(each) for i, each in iterations.items()}
        return graph

    def _scratch_of(self, traced: Traced, iterations: Iterable[Iteration]) -> dict[int, Scratch]:
        """Return the scratch memory of equations in loops, as iterations show it.

        Where the compiler does not fuse, programs do not say what it is for: equations are compiled alone.
        """
        found: dict[int, Scratch] = {}
        for iteration in iterations if self.backend.fuses else ():
            places = dict(enumerate(iteration.places))
            eqns = [traced.jaxpr.jaxpr.eqns[i] for i in iteration.places]
            shown = scratch(self._alone(iteration), eqns)
            found |= {places[j]: each.renumbered(places) for j, each in shown.items()}
        return found

    @cached_property
    def _plainly_written(self) -> Written:
        """What the compiled plain step writes."""
        return written(self.module)

    def _written(
        self, traced: Traced, iterations: Mapping[int, Iteration], again: Mapping[int, Written]
    ) -> Written:
        """What the compiled plain step writes, and what iterations of loops do that are compiled alone.

        Of pairs of loops, a compiler that does not fuse reductions writes what the rules say, and some more.

        **Arguments:** `again` by loop with both passes of its own.
        """
        found = self._plainly_written.renumbered(self.plain.places(traced)).decoded(
            decoders(traced.jaxpr.jaxpr, traced.encoded)
        )
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
            with phase("compiling an iteration", kind="compile"):
                self._iterations[iteration.key] = iteration.compiled(
                    self.program, self.division.named, self.plain
                )
        return self._iterations[iteration.key]

    def looped_seconds(self, graph: Graph, traced: Traced) -> float | None:
        """What the loops of this form take longer than the plain step's where they stack nothing and find all saved;
        None where that is not known.
        """
        if traced.form.settings(REVERSED):
            return None
        there, _ = self.division.local(traced)
        both = zip(there.jaxpr.jaxpr.eqns, traced.loop_of, strict=True)
        apart = [eqn for eqn, loop in both if is_in_chunks(eqn) or (attends(eqn) and loop < 0)]
        if deep(traced.form):  # whose forward passes are counted by their iterations
            apart = [eqn for eqn in apart if eqn.primitive.name != "scan" or is_in_chunks(eqn)]
        in_chunks = math.fsum(alone_seconds(apart, self.program, self.device))
        looped = known(traced.loops, traced.form) and known(self.plain.loops, PLAIN)
        if not (in_chunks or looped or traced.microbatches):
            return None
        places, most = self.plain.places(traced), traced.microbatches > 0
        moved = moved_seconds(self.module, places, self.device, most=most)
        if traced.microbatches:
            in_chunks += traced.microbatches * math.fsum(self._microbatch_seconds(traced))
            looped = bool(self.plain.loops)
        if not looped:
            return in_chunks - moved
        taken = looped_seconds(graph, traced, self._looped[traced.form], self.device)
        stacked = always_stacked_seconds(graph, self.device)
        return in_chunks + taken + stacked - moved - plain_seconds(self.module, self.device)

    def _microbatch_seconds(self, traced: Traced) -> Iterator[float]:
        """What a microbatch takes in each of the loops that do it, but for the pairs of loops in it."""
        for i, iteration in repeated(traced, self.backend).items():
            loop = traced.loops[i]
            if loop.parent < 0 and loop.length == traced.microbatches:
                module = self._alone(iteration)
                once = roofline(module, self.device).seconds + self.device.launch_seconds
                yield once - plain_seconds(module, self.device)

    @cached_property
    def _shown(self) -> dict[int, Scratch]:
        """Scratch memory of the plain form's equations, as its program shows it."""
        return scratch(self.module, self.division.local(self.plain)[0].jaxpr.jaxpr.eqns)

    def _workspace(self, traced: Traced, least: int) -> dict[int, Scratch]:
        """Scratch memory by equation: what the program shows, and of the bodies of loops what they need alone."""
        platform, among = self.device.platform, None
        there, _ = self.division.local(traced)
        if self.backend.fuses:
            own = (i for i, loop in enumerate(traced.loop_of) if loop >= 0)
            among = {i for i in own if traced.loops[traced.loop_of[i]].role == ALONE}
            among.update(i for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns) if is_whole(eqn))
        alone = workspaces(there, self.program, platform, least, among)
        found = {i: Scratch(nbytes) for i, nbytes in alone.items()}
        if among is not None:
            places = self.plain.places(traced)
            found |= {j: self._shown[i].renumbered(places) for i, j in places.items() if i in self._shown}
        return found

    def _measured(self, traced: Traced, temporaries_nbytes: int) -> dict[int, float]:
        """Seconds of equations that ran alone, on the device at hand where that is asked for, else of attention without
        its scores, as its kernels take them.
        """
        if self.profile != "measure":
            eqns = self.division.local(traced)[0].jaxpr.jaxpr.eqns
            own = [i for i, eqn in enumerate(eqns) if attends(eqn)]
            alone = alone_seconds([eqns[i] for i in own], self.program, self.device)
            return dict(zip(own, alone, strict=True))
        least = int(temporaries_nbytes * _MEASURED_SHARE)
        return measure(self.division.local(traced)[0], self.here, self.options, least)
