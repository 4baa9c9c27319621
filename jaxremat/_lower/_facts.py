"""Compiled plain step, tagged -> `BaselineFacts`: its kernels and memory, and the separately compiled parts of
variants.

Invariant: facts on equations that a variant shares with the plain step are read off the plain step's program; only its
other parts (iterations of its loops, attention without its scores, work in chunks) are compiled, separately, and once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.extend.core as jex

from .._attention._operations import attends
from .._compiler._hlo import Module
from .._compiler._measured_times import measure
from .._compiler._program import Program
from .._compiler._scratch import Scratch, scratch
from .._compiler._shardings import Division
from .._compiler._single_equation import alone_seconds, workspaces
from .._compiler._tags import Written, written
from .._model._device_specs import DeviceSpec
from .._model._graph import Backend, backend
from .._model._pins import Patterns
from .._rewrite._encodings import decoders
from .._rewrite._flat_program import UNPAIRED
from .._rewrite._trace import Traced
from .._runtime._progress import phase
from ._iteration import Iteration
from ._loop_memory import is_whole

_WORKSPACE_SHARE = 1 / 200
"""Equations with an operand above this share of the temporaries are compiled separately for their scratch memory."""

_MEASURED_SHARE = 1 / 1000
"""Equations with an operand above this share of the temporaries are timed with `profile="measure"`."""


@dataclass(frozen=True, eq=False)
class BaselineFacts:
    """The facts from which the graphs of all variants of a step are built.

    **Fields:** `plain` the step as written, or in the first form that compiles; `module` its compiled, tagged program;
    `base_nbytes` and `temporaries_nbytes` of that; `program` the template for compiling parts of the step, only to be
    read; `device`; `profile` as in `jaxremat.optimize`; `here` the device for measurements, and `options` of the
    compiler for them; `pins`; its `division` over devices.
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
    _compiled: dict[str, Module] = field(default_factory=dict, init=False)
    _without: dict[frozenset[int], dict[int, Scratch]] = field(default_factory=dict, init=False)

    @property
    def backend(self) -> Backend:
        """The properties of the device's compiler."""
        return backend(self.device.platform)

    @property
    def by_kernels(self) -> bool:
        """Whether the compiled kernels determine a step's time."""
        return self.backend.fuses_reductions and self.profile == "roofline"

    @cached_property
    def _written(self) -> Written:
        return written(self.module)

    def _scratch(self, gone: frozenset[int]) -> dict[int, Scratch]:
        """Return the scratch memory that the program shows, for a form without these equations."""
        if gone not in self._without:
            eqns = self.division.local(self.plain)[0].jaxpr.jaxpr.eqns
            self._without[gone] = scratch(self.module, eqns, gone)
        return self._without[gone]

    def compiled(self, iteration: Iteration) -> Module:
        """Compile an iteration of a loop separately, once."""
        if iteration.key not in self._compiled:
            with phase("compiling an iteration", kind="compile"):
                self._compiled[iteration.key] = iteration.compiled(
                    self.program, self.division.named, self.plain
                )
        return self._compiled[iteration.key]

    def alone_seconds(self, eqns: Sequence[jex.JaxprEqn]) -> list[float]:
        """Return the seconds of each equation, compiled separately."""
        return alone_seconds(eqns, self.program, self.device)

    def written(self, traced: Traced) -> Written:
        """Return the plain step's facts on the equations of a variant."""
        found = self._written.renumbered(self.plain.places(traced))
        return found.decoded(decoders(traced.jaxpr.jaxpr, traced.program.encoded))

    def written_in(self, iteration: Iteration) -> Written:
        """Return the values that a separately compiled iteration writes."""
        return written(self.compiled(iteration)).renumbered(dict(enumerate(iteration.places)))

    def workspace(self, traced: Traced) -> dict[int, Scratch]:
        """Return scratch memory by equation: as the program shows it, and for loop bodies from compiling them
        separately.
        """
        there, among = self.division.local(traced)[0], None
        if self.backend.fuses_reductions:
            own = (i for i, loop in enumerate(traced.loop_of) if loop >= 0)
            among = {i for i in own if traced.loops[traced.loop_of[i]].role == UNPAIRED}
            among.update(i for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns) if is_whole(eqn))
        least = int(self.temporaries_nbytes * _WORKSPACE_SHARE)
        alone = workspaces(there, self.program, self.device.platform, least, among)
        found = {i: Scratch(nbytes) for i, nbytes in alone.items()}
        if among is not None:
            places = self.plain.places(traced)
            gone = frozenset(self.plain.places(self.plain)).difference(places)
            shown = self._scratch(gone)
            found |= {j: shown[i].renumbered(places) for i, j in places.items() if i in shown}
        return found

    def workspace_in(self, traced: Traced, iterations: Iterable[Iteration]) -> dict[int, Scratch]:
        """Return the scratch memory of equations in loops, as iterations show it.

        Without fusion, programs do not attribute it to equations: these are compiled separately instead.
        """
        found: dict[int, Scratch] = {}
        eqns = self.division.local(traced)[0].jaxpr.jaxpr.eqns
        for iteration in iterations if self.backend.fuses_reductions else ():
            places = dict(enumerate(iteration.places))
            shown = scratch(self.compiled(iteration), [eqns[i] for i in iteration.places])
            found |= {places[j]: each.renumbered(places) for j, each in shown.items()}
        return found

    def seconds(self, traced: Traced) -> dict[int, float]:
        """Return the seconds of equations that ran separately on the device at hand, if measuring is requested;
        otherwise of attention without its scores, as its kernels take them.
        """
        there = self.division.local(traced)[0]
        if self.profile == "measure":
            return measure(there, self.here, self.options, int(self.temporaries_nbytes * _MEASURED_SHARE))
        own = {i: eqn for i, eqn in enumerate(there.jaxpr.jaxpr.eqns) if attends(eqn)}
        return dict(zip(own, self.alone_seconds(list(own.values())), strict=True))
