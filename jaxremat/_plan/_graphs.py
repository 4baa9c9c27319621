"""Problem -> the graphs of the step's forms: by rules alone, or by what the compiled step shows.

Invariant: the time of every graph is counted from that of the plain step.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from .._compiler._compiled_step import CompiledStep
from .._lower._form_graphs import FormGraphs
from .._model._form import ATTENTION, Form
from .._model._form_offers import Forms
from .._model._graph import Graph
from .._model._schedule import save_all
from .._rewrite._trace import Traced
from .._runtime._bytes import format_nbytes
from .._runtime._progress import phase
from ._forms import Sites, forms
from ._problem import Problem

logger = logging.getLogger("jaxremat")


@dataclass(frozen=True, eq=False)
class Graphs(ABC):
    """The graphs of a step's forms, each made once."""

    problem: Problem
    _made: dict[Form, Graph] = field(default_factory=dict, init=False)

    @cached_property
    def plain(self) -> Graph:
        """The graph of the step's loops as they are."""
        return self._plain()

    @abstractmethod
    def _plain(self) -> Graph:
        """The same, made."""

    @abstractmethod
    def _lowered(self, traced: Traced) -> Graph:
        """The graph of such a form, in whatever seconds."""

    def _longer(self, graph: Graph, promised: float) -> float:
        """What such a form takes longer than the plain step, of which its offer has `promised` so much."""
        return promised

    def forms(self, graph: Graph) -> Forms:
        """Those that the step may take, by this graph of the plain one."""
        problem = self.problem
        traced, there = problem.traced, problem.division.local(problem.traced)[0]
        decided = bool(problem.pins or traced.hints)
        here = problem.here if problem.device.platform != "cpu" else None
        return forms(Sites(traced, there, graph, problem.device, here, problem.allow, decided))

    @cached_property
    def _priced(self) -> Forms:
        return self.forms(self.plain)

    def of(self, form: Form) -> Graph:
        """The graph of such a form, its time counted from the plain step's."""
        if form not in self._made:
            plain, graph = self.plain, self._lowered(self.problem.form(form))
            more = self._longer(graph, plain.extra_seconds + self._priced.promise(form).more_seconds)
            self._made[form] = replace(
                graph, step_seconds=plain.step_seconds, extra_seconds=more, host=self.problem.usable_host
            )
        return self._made[form]


class EstimatedGraphs(Graphs):
    """Graphs by rules alone, without a compilation."""

    def _plain(self) -> Graph:
        return self.problem.estimated

    def _lowered(self, traced: Traced) -> Graph:
        return self.problem.estimate(traced, self.plain.base_nbytes)


@dataclass(frozen=True, eq=False)
class MeasuredGraphs(Graphs):
    """Graphs by what XLA writes to memory.

    **Fields:** `tagged` the compiled step with every equation tagged; `measured` gives the compiled step from whose
    time seconds are counted, for which others need not wait; `temporaries_nbytes` of the step as it is written.
    """

    tagged: CompiledStep
    measured: Callable[[], CompiledStep]
    temporaries_nbytes: int
    _around: dict[Form, float] = field(default_factory=dict, init=False)

    @cached_property
    def _lowering(self) -> FormGraphs:
        problem = self.problem
        return FormGraphs(
            plain=problem.traced,
            module=self.tagged.module,
            base_nbytes=self.tagged.memory.base_nbytes,
            temporaries_nbytes=self.temporaries_nbytes,
            program=problem.unoptimised_build,
            device=problem.device,
            profile=problem.profile,
            here=problem.here,
            options=problem.program.compiler_options,
            pins=problem.pins,
            division=problem.division,
        )

    def _plain(self) -> Graph:
        problem = self.problem
        graph = replace(self._lowered(problem.traced), host=problem.usable_host)
        measured = self.measured()
        logger.info(
            "plain step: peak %s, %d equations, %d residuals, %d stages",
            format_nbytes(measured.peak_nbytes), len(graph.nodes), len(graph.residuals), len(graph.stages),
        )  # fmt: skip
        if self._by_kernels:
            more = self._more_seconds(graph, graph.extra_seconds)
            return replace(graph, step_seconds=measured.seconds, extra_seconds=more)
        if problem.undoes:  # counted from the user's own step, which computes again what its checkpoints say
            own = graph.step_seconds * measured.seconds / self.tagged.seconds
            return replace(
                graph, step_seconds=own, extra_seconds=graph.extra_seconds + graph.step_seconds - own
            )
        return graph

    def _lowered(self, traced: Traced) -> Graph:
        return self._lowering.graph(traced)

    @property
    def _by_kernels(self) -> bool:
        """Whether the compiled kernels say what a step takes."""
        return self.problem.backend.fuses_reductions and self.problem.profile == "roofline"

    @property
    def _tagged_more(self) -> float:
        """What the tagged step takes longer than the plain one."""
        return self.tagged.seconds - self.measured().seconds

    def _longer(self, graph: Graph, promised: float) -> float:
        return self._more_seconds(graph, promised - self._tagged_more) if self._by_kernels else promised

    def _more_seconds(self, graph: Graph, otherwise: float) -> float:
        """What such a form of the tagged step takes longer than the plain step.

        **Arguments:** `otherwise` what it takes longer than the tagged one where its loops' time is not known.
        """
        own = self._lowering.looped_seconds(graph, self.problem.form(graph.form))
        more = otherwise if own is None else own
        return more + self._around_attention(graph.form) + self._tagged_more

    def _around_attention(self, form: Form) -> float:
        """What the compiled step takes longer with attention as in this form than its operations say, outside of loops:
        arrays that products of matrices want in another order are copied no more, which nothing else tells.
        """
        alone = Form.of_kind(ATTENTION, form.settings(ATTENTION))
        if not alone or self.problem.traced.loops:
            return 0.0
        if alone not in self._around:
            traced = self.problem.form(alone)
            graph = self._lowering.graph(traced)
            own = self._lowering.looped_seconds(graph, traced) or 0.0
            with phase("compiling attention's form", kind="compile"):
                compiled = self.problem.compile(self.problem.jitted(graph, save_all(graph)))
            self._around[alone] = compiled.seconds - self.tagged.seconds - own
        return self._around[alone]
