"""Problem -> `Baseline`: the compiler's figures of the plain step, and the graphs of its variants.

Invariants: the programs behind a baseline's figures are chosen when it is measured, and do not depend on earlier
queries. The time of every graph is relative to the plain step's. If the compiler does not compile the plain step, its
figures are those of the estimated graph, and the compiler's facts are about the first form that compiles.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from jax.extend.core import Var

from .._compiler._compiled_step import CompiledStep
from .._compiler._memory_stats import MemoryStats
from .._compiler._program import Compiled
from .._lower._build import build_graph
from .._lower._facts import BaselineFacts
from .._model._graph import Graph
from .._model._schedule import Schedule, save_all
from .._model._sites import Variants
from .._model._variant import ATTENTION, Variant
from .._rewrite._regions import Region
from .._rewrite._trace import Traced
from .._runtime._bytes import format_nbytes
from .._runtime._errors import CompilationError, HintError
from .._runtime._progress import phase
from ._problem import Problem
from ._rules import PlainStep, variants

logger = logging.getLogger("jaxremat")

NEGLIGIBLE = 0.001
"""If the plain step does not compile, a variant that needs more memory than another is built only if it is faster by
more than this share of the step's time: the step is far too large, and each graph takes several compilations.
"""


@dataclass(frozen=True, eq=False)
class Graphs(ABC):
    """The graphs of a step's variants, each made once."""

    problem: Problem
    _made: dict[Variant, Graph | None] = field(default_factory=dict, init=False)
    _with_pins: dict[Variant, bool] = field(default_factory=dict, init=False)

    @cached_property
    def plain(self) -> Graph:
        """The graph of the plain step."""
        return self._plain()

    @abstractmethod
    def _plain(self) -> Graph:
        """Build the graph of the plain step."""

    @abstractmethod
    def _built(self, traced: Traced, estimated: float) -> Graph:
        """Return the graph of a variant, given its estimated extra seconds over the plain step."""

    def known(self, graph: Graph) -> Schedule | None:
        """Return the schedule of the user's own checkpoints for a cutting of the plain graph, None without any."""
        return self.problem.as_checkpointed(graph) if self.problem.undoes else None

    @cached_property
    def variants(self) -> Variants:
        """The variants that the step may take."""
        return self.variants_of(self.plain)

    def variants_of(self, plain: Graph) -> Variants:
        """Return the variants that the step may take, given a plain graph that may have other pins."""
        problem = self.problem
        traced, there = problem.traced, problem.division.local(problem.traced)[0]
        here = problem.here if problem.device.platform != "cpu" else None

        def inside(form: Variant) -> Sequence[Region] | None:
            make = partial(problem.traced.regions_inside, form)
            return problem.defects.attempted("rewriting", make, form)

        step = PlainStep(traced, there, plain, problem.device, here, problem.allow, inside)
        return variants(step)

    def of(self, variant: Variant) -> Graph | None:
        """Return the graph of a variant, its time relative to the plain step's; None if it cannot be built or lacks
        some of the user's pins.
        """
        if self.plain.pins:
            if variant not in self._with_pins:
                self._with_pins[variant] = self._has_pins(variant)
            if not self._with_pins[variant]:
                return None
        return self.whatever_is_pinned(variant)

    def _has_pins(self, variant: Variant) -> bool:
        """Return whether a variant has all of the user's pins, without a compilation."""
        make = partial(self.problem.bare, variant, pinned=True)
        try:
            graph = self.problem.defects.attempted("rewriting", make, variant)
        except HintError:  # a pattern matches nothing in this variant
            return False
        return graph is not None and _origins(self.problem.estimated) <= _origins(graph)

    def whatever_is_pinned(self, variant: Variant) -> Graph | None:
        """Return the graph of a variant, even if it lacks some of the user's pins; None if it cannot be built."""
        if variant not in self._made:
            make = partial(self._of, variant)
            self._made[variant] = self.problem.defects.attempted("rewriting", make, variant)
        return self._made[variant]

    def _of(self, variant: Variant) -> Graph:
        estimated = self.plain.extra_seconds + self.variants.estimate(variant).more_seconds
        graph = self._built(self.problem.form(variant), estimated)
        return replace(graph, step_seconds=self.plain.step_seconds, host=self.problem.usable_host)


def _origins(graph: Graph) -> Counter[str]:
    """Return the number of values and stages that each hint and pattern pins."""
    return Counter(pin.origin for pin in graph.pins)


class EstimatedGraphs(Graphs):
    """Graphs priced by rules, without a compilation."""

    def _plain(self) -> Graph:
        return self.problem.estimated

    def _built(self, traced: Traced, estimated: float) -> Graph:
        return replace(self.problem.estimate(traced, self.plain.base_nbytes), extra_seconds=estimated)


@dataclass(frozen=True, eq=False)
class MeasuredGraphs(Graphs):
    """Graphs with the values that XLA writes to memory. **Fields:** `baseline` of the step."""

    baseline: "Baseline"
    _in_form: dict[Variant, Graph] = field(default_factory=dict, init=False)
    _around: dict[Variant, float] = field(default_factory=dict, init=False)

    @cached_property
    def _facts(self) -> BaselineFacts:
        problem, baseline = self.problem, self.baseline
        assert baseline.tagged_form is not None
        form, tagged = baseline.tagged_form
        differs = problem.traced.rematted or problem.replaces
        # Otherwise the tagged step has the same temporaries as the plain one, which is still being compiled.
        measured = baseline.temporaries_nbytes if differs else tagged.memory.temporaries_nbytes
        return BaselineFacts(
            plain=problem.form(form),
            module=tagged.module,
            base_nbytes=tagged.memory.base_nbytes,
            temporaries_nbytes=measured,
            program=problem.unoptimised_build,
            device=problem.device,
            profile=problem.profile,
            here=problem.here,
            options=problem.program.compiler_options,
            pins=problem.pins,
            division=problem.division,
        )

    def variants_of(self, plain: Graph) -> Variants:
        """Return the variants that the step may take. If the plain step does not compile, all of them include the first
        form that compiles: others, such as one with all scores of a long sequence, would not compile either.
        """
        found = super().variants_of(plain)
        if self._facts.plain is self.problem.traced:
            return found
        negligible = NEGLIGIBLE * plain.step_seconds
        return replace(found, required=self._facts.plain.form, negligible_seconds=negligible)

    def _plain(self) -> Graph:
        problem, baseline = self.problem, self.baseline
        if self._facts.plain is not problem.traced:
            graph = problem.estimate(problem.traced, baseline.base_nbytes)
            return replace(graph, step_seconds=baseline.seconds)
        graph = replace(self._lowered(problem.traced), host=problem.usable_host)
        logger.info(
            "plain step: peak %s, %d equations, %d residuals, %d stages",
            format_nbytes(baseline.peak_nbytes), len(graph.nodes), len(graph.residuals), len(graph.stages),
        )  # fmt: skip
        if self._facts.by_kernels:
            more = graph.extra_seconds + self._tagged_more
            return replace(graph, step_seconds=baseline.seconds, extra_seconds=more)
        if problem.undoes:  # relative to the user's own step, whose checkpoints recompute
            own = graph.step_seconds * baseline.seconds / baseline.tagged.seconds
            return replace(
                graph, step_seconds=own, extra_seconds=graph.extra_seconds + graph.step_seconds - own
            )
        return graph

    def _built(self, traced: Traced, estimated: float) -> Graph:
        if not self._facts.by_kernels:
            return replace(self._lowered(traced), extra_seconds=estimated)
        graph = self._lowered(traced, estimated - self._tagged_more)
        more = self._around_attention(traced.form) + self._tagged_more
        return replace(graph, extra_seconds=graph.extra_seconds + more)

    def _lowered(self, traced: Traced, otherwise: float | None = None) -> Graph:
        """Return the graph in seconds of the tagged step; `otherwise` as in `build_graph`."""
        if traced.form not in self._in_form:
            self._in_form[traced.form] = build_graph(traced, self._facts, otherwise)
        return self._in_form[traced.form]

    @property
    def _tagged_more(self) -> float:
        """The extra seconds of the tagged step over the plain one."""
        return self.baseline.tagged.seconds - self.baseline.seconds

    def _around_attention(self, form: Variant) -> float:
        """Return the extra seconds of the compiled step with this variant's attention that its operations do not
        explain, outside of loops. For example, XLA no longer copies arrays into another layout for matrix products.
        """
        alone = Variant.of_rule(ATTENTION, form.settings(ATTENTION))
        if not alone or self.problem.traced.loops:
            return 0.0
        if alone not in self._around:
            traced = self.problem.form(alone)
            graph = self._lowered(traced, 0.0)
            with phase("compiling attention's form", kind="compile"):
                compiled = self.problem.compile(self.problem.jitted(graph, save_all(graph)))
            self._around[alone] = compiled.seconds - self.baseline.tagged.seconds - graph.extra_seconds
        return self._around[alone]


def measure_baseline(problem: Problem, *, plain: bool, tagged: bool, to_run: bool = False) -> "Baseline":
    """Compile the baseline of a step's plans.

    **Arguments:**

    - `plain`: whether to compile the step as the user wrote it, because it may fit the budget. It is always compiled if
      the tagged one differs in time or memory: plans replace equations, undo checkpoints and run loops in another way.
    - `tagged`: whether the tagged step is likely to be needed. If two programs may be compiled at a time, it is then
      compiled together with the plain one; otherwise on first use.
    - `to_run`: whether the step is likely to run as the user wrote it. It is then compiled to run, if possible.
    """
    traced = problem.traced
    differs = bool(problem.replaces or traced.rematted or traced.loops)
    to_run = to_run and problem.compiles_to_run
    begun = problem.begin_plain(to_run=to_run) if plain or differs else None
    baseline = Baseline(problem, begun, to_run=to_run)
    if problem.undoes or (tagged and plain and problem.compiles_apart):
        with suppress(Exception):  # it is raised again on first use
            _ = baseline.tagged
    return baseline


@dataclass(frozen=True, eq=False)
class Baseline:
    """A step before it is planned, as `measure_baseline` returns it.

    Two compilations are not needed by every plan: `tagged` is compiled on first use, since a step that fits as written
    does not need it; `plain` is started by `measure_baseline` or never. If the plain step does not compile, `refused`
    says why, and its figures are the model's.

    **Fields:** `problem`; `compiling` the step as the user wrote it, with its seconds, None if only the tagged one is
    compiled; `compiled_tagged` the tagged step if compiled already; `to_run` whether the step as the user wrote it is
    compiled to run, not only to read its figures; `detached`, by form, the arrays that XLA overwrote too early in plans
    on this baseline: the next plan detaches them at once, and needs one compilation less.
    """

    problem: Problem
    compiling: Future[tuple[Compiled, float]] | None = None
    compiled_tagged: CompiledStep | None = None
    to_run: bool = False
    detached: defaultdict[Variant, set[Var]] = field(default_factory=lambda: defaultdict(set), init=False)

    @cached_property
    def plain(self) -> CompiledStep:
        """The step as the user wrote it. Waits until it is compiled.

        **Raises:** ValueError if its compilation was never started; `CompilationError`.
        """
        if self.compiling is None:
            raise ValueError("The plain step was not compiled: measure the baseline with `plain=True`.")
        with phase("compiling the plain step", kind="compile"):
            compiled, seconds = self.compiling.result()
        return CompiledStep(compiled, self.problem.device, compile_seconds=seconds)

    @cached_property
    def tagged_form(self) -> tuple[Variant, CompiledStep] | None:
        """The first form that compiles, with every equation tagged and with the replacements that every plan makes;
        compiled on first use, None if no form compiles. The plain form is tried first. The build is unoptimised if only
        the values that it writes to memory are needed, because the plain step gives peak and time.
        """
        problem = self.problem
        if self.compiled_tagged is not None:
            return problem.traced.form, self.compiled_tagged
        timed = self.compiling is None or problem.undoes or problem.backend.fuses_reductions
        waiting = [problem.traced.form]
        while waiting:
            form = waiting.pop(0)
            try:
                return form, problem.compile_tagged(form, timed=timed)
            except CompilationError as error:
                problem.defects.note(form, error)
                if form == problem.traced.form:
                    waiting += EstimatedGraphs(problem).variants.deepest()
        return None

    @property
    def tagged(self) -> CompiledStep:
        """The compiled step of `tagged_form`. **Raises:** ValueError if there is none."""
        if self.tagged_form is None:
            raise ValueError(
                "No form of the step compiles as written: use `graphs`, which are then estimated."
            )
        return self.tagged_form[1]

    @cached_property
    def measured(self) -> CompiledStep | None:
        """The program whose figures count as the plain step's: the step as the user wrote it if its compilation was
        started, else the tagged one. None if it does not compile.
        """
        written = self.problem.traced.form
        if self.compiling is None:
            return self.tagged if self.tagged_form and self.tagged_form[0] == written else None
        try:
            return self.plain
        except CompilationError as error:
            self.problem.defects.note(written, error)
            return None

    @property
    def refused(self) -> CompilationError | None:
        """The error of compiling the plain step, None if it compiles."""
        return None if self.measured else self.problem.defects.uncompiled[self.problem.traced.form]

    @property
    def memory(self) -> MemoryStats:
        """The step's memory, by the model if it does not compile."""
        if self.measured is not None:
            return self.measured.memory
        return self.problem.modelled_memory(self.refused.why if self.refused else "")

    @property
    def peak_nbytes(self) -> int:
        """The step's peak."""
        return self.memory.peak_nbytes

    @property
    def written_nbytes(self) -> int | None:
        """The step's peak if the plain step may run unplanned, else None."""
        return None if self.measured is None or self.problem.must_plan else self.peak_nbytes

    @property
    def base_nbytes(self) -> int:
        """The bytes of arguments and outputs, in use all the time."""
        return self.tagged.memory.base_nbytes if self.tagged_form else self.problem.estimated.base_nbytes

    @property
    def temporaries_nbytes(self) -> int:
        """The peak without `base_nbytes`. If the plain step does not compile, that of the first form that does: shares
        of the plain step's would be too coarse to tell plans apart.
        """
        if self.measured is None and self.tagged_form:
            return self.tagged.memory.temporaries_nbytes
        return self.peak_nbytes - self.base_nbytes

    @property
    def seconds(self) -> float:
        """The step's time by a roofline of its kernels, or by the model."""
        return self.problem.estimated.step_seconds if self.measured is None else self.measured.seconds

    @cached_property
    def graphs(self) -> Graphs:
        """The graphs of the step's forms, with the values that XLA writes to memory, or by rules if no form compiles.
        Each is built on first use.
        """
        return MeasuredGraphs(self.problem, self) if self.tagged_form else EstimatedGraphs(self.problem)

    def with_plain(self, tagged: CompiledStep | None = None) -> "Baseline":
        """Return this baseline with the plain step compiled too, which then gives all figures.

        **Arguments:** `tagged` the tagged step, if compiled already.
        """
        if self.compiling is not None or self.measured is None:
            return self
        return Baseline(self.problem, self.problem.begin_plain(), tagged)
