"""Function and arguments -> `Traced`: one flat jaxpr of the whole step, forward and backward.

Invariants: `Traced.jaxpr`, with its loops closed again, computes what the function computes. It has no call that could
be inlined, no dead equation and no two equal pure equations in one loop. Merging equal equations undoes the user's own
`jax.checkpoint`, so the planner may also keep values that these drop. With `respect_checkpoint`, each region that a
checkpoint recomputes in the backward pass is a single equation instead. The equations are in the order of
`_memory_order.memory_order`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex

from .._attention._operations import ATTENTION as ATTEND
from .._attention._operations import runs_in_kernels
from .._attention._pattern import Pattern
from .._attention._places import Places
from .._model._variant import INSIDE, PLAIN, ROWS, Variant
from .._program import _compat
from .._program._compat import Kwargs
from .._program._hints import Hint, hidden
from .._program._inline import Inliner
from .._program._primitives import inner_eqns
from .._program._references import of_values
from .._runtime._errors import warn
from .._runtime._garbage import uncollected
from ._backward_equations import backward_equations
from ._flat_program import BACKWARD, FORWARD, FlatProgram, Loop
from ._gathered_operands import Gather
from ._passes import (
    FORM_PASSES,
    MERGING_PASSES,
    PLAIN_PASSES,
    Sites,
    Task,
    find_sites,
    pair_forms,
    regions_inside,
    run,
)
from ._regions import Region
from ._reversed_chains import block_of
from ._shard_map_body import Around
from ._source import Source


@dataclass(frozen=True)
class Merged:
    """A step inlined, with equal equations merged: the common start of all of its variants.

    **Fields:** `flat` the plain program with calls inlined, in the user's order; it compiles to the plain step except
    for the gradients of `_pooling_places` and masks saved as bits. `program` the same with equal equations merged;
    `sites` the parts of it that may take another form; `inliner` the one that produced it.
    """

    flat: jex.ClosedJaxpr
    program: FlatProgram
    sites: Sites
    inliner: Inliner


@dataclass(frozen=True)
class Traced:
    """A step in a form.

    **Fields:**

    - `source`: the step as it was traced; `merged` the common start of its variants; `form` the sites that take another
      form, and which.
    - `program`: the step in this form, normalised and ordered, with its loops inlined.
    - `origin`: for each equation of `flat`, the index of the equation of `program` that computes the same, or -1.
    - `labels`: the user's `checkpoint_name`s by variable; `hints` the marks of `jaxremat.hint`.
    - `rematted`: whether the user's program has checkpoints of its own; `again` the equations of `program` that the
      user's checkpoints outside loops, which are undone, would compute a second time.
    """

    source: Source
    merged: Merged
    form: Variant
    program: FlatProgram
    origin: tuple[int, ...]
    labels: dict[Any, str]
    hints: tuple[Hint, ...]
    rematted: bool
    again: frozenset[int]

    @property
    def flat(self) -> jex.ClosedJaxpr:
        """The plain program with calls inlined, see `Merged`."""
        return self.merged.flat

    @property
    def sites(self) -> Sites:
        """The parts of the step that may take another form."""
        return self.merged.sites

    @property
    def jaxpr(self) -> jex.ClosedJaxpr:
        """The equations of the step in this form."""
        return self.program.closed

    @property
    def loop_of(self) -> tuple[int, ...]:
        """For each equation the index in `loops` of its loop, or -1."""
        return self.program.loop_of

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The inlined loops."""
        return self.program.loops

    @cached_property
    def in_backward(self) -> Sequence[bool]:
        """For each equation, whether it is part of the backward pass or comes after it."""
        return backward_equations(self.jaxpr.jaxpr.eqns, self.loop_of, self.loops)

    @property
    def over(self) -> frozenset[Any]:
        """The arguments that loops overwrite."""
        return frozenset(self.program.over.values())

    @property
    def row_places(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each region its values that have rows, as (equation, result, dimension of the rows)."""
        return tuple(
            tuple((self.origin[i], k, d) for i, k, d in rules if self.origin[i] >= 0)
            for rules in self.sites.found.rules
        )

    @property
    def closed(self) -> jex.ClosedJaxpr:
        """The program as it was traced."""
        return self.source.closed

    @property
    def donated(self) -> tuple[bool, ...]:
        """Whether each flat argument is donated."""
        return self.source.donated or (False,) * len(self.closed.jaxpr.invars)

    @property
    def around(self) -> Around | None:
        """The program around that of one device, see `Source`."""
        return self.source.around

    def step(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """Return the whole program of a flat program of this step, which may be only the body for one device."""
        return self.around.step(closed) if self.around else closed

    def alone(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """Return a part of this step as a separate program."""
        return self.around.alone(closed) if self.around else closed

    def in_form(self, form: Variant) -> "Traced":
        """Return the same step in another form."""
        return in_form(self.source, self.merged, form)

    def named(self, form: Variant) -> Variant:
        """Return the form, with names for its sites if it has none, see `Variant.unnamed`."""
        return form if form.is_named else form.named(len(self.sites.lengths), len(self.sites.regions))

    def gathered(self, gathers: tuple[Gather, ...], devices: int) -> "Traced":
        """Return the same step on several devices, with separate equations that gather operands, given by index in
        `flat`.
        """
        source = replace(self.source, devices=devices)
        if not gathers:
            return replace(self, source=source)
        return normalise(replace(source, gathers=gathers))

    def with_regions_on_devices(self, parts: Sequence[int], share: float) -> "Traced":
        """Return the same step with the rows of each region divided into this many parts, see `Region.on_devices`."""
        laid = (region.on_devices(n, share) for region, n in zip(self.sites.regions, parts, strict=True))
        found = self.sites.found._replace(regions=tuple(laid))
        sites = replace(self.sites, look=lambda: found)
        return replace(self, merged=replace(self.merged, sites=sites))

    def ordered_before(self) -> "Traced":
        """Return the same step in the order of older plans, from before forward passes had `turns`."""
        return in_form(replace(self.source, turns=False), self.merged, self.form)

    def attending(self, places: Mapping[Pattern, Places]) -> "Traced":
        """Return the same step on several devices, with the places where attention may run without its scores."""
        return replace(self, source=replace(self.source, attention_places=places))

    @property
    def microbatches(self) -> int:
        """The number of microbatches that most of the step runs in, or 0."""
        found = ((self.sites.regions[site], count) for site, (count,) in self.form.settings(ROWS).items())
        return next((count for region, count in found if region.whole and region.loop < 0), 0)

    def regions_inside(self, form: Variant) -> tuple[Region, ...]:
        """Return the regions of rows that exist within the chunks of a form."""
        task = Task(self.source, form, self.merged.inliner.branch(), self.sites)
        return regions_inside(self.merged.program.anew(pairs=pair_forms(task)), task)

    @property
    def rows(self) -> list[tuple[int, str, bool, bool, bool, bool]]:
        """For each region the number of rows, the user's line, and whether it covers most of the step, repeats
        equations in its chunks, is within a loop, and is windowed.
        """
        return [_told(region) for region in self.sites.regions]

    @property
    def rows_inside(self) -> list[tuple[int, str, bool, bool, bool, bool]]:
        """The same for the regions within microbatches, if the form runs some of these in chunks."""
        return list(map(_told, self.regions_inside(self.form))) if self.form.settings(INSIDE) else []

    @property
    def inner(self) -> list[tuple[int, str]]:
        """The length and the user's line of each forward loop that is inlined within a backward loop."""
        within = (each for each in self.loops if each.parent >= 0 and each.role == FORWARD)
        found = [each for each in within if self.loops[each.parent].role == BACKWARD]
        return [(each.length, _compat.user_line(each.eqn)) for each in found]

    @property
    def attention(self) -> list[tuple[str, bool, bool]]:
        """For each attention that runs without its matrix of scores the user's line, whether it runs in kernels, and
        whether its gradient does if it has one.
        """
        eqns = [each for eqn in self.jaxpr.jaxpr.eqns for each in (eqn, *inner_eqns(eqn))]
        return [(_compat.user_line(e), *runs_in_kernels(e)) for e in eqns if e.primitive is ATTEND]

    @property
    def chain(self) -> str:
        """The user's line of the first block that the backward pass undoes."""
        undone = (eqn for eqn in reversed(self.jaxpr.jaxpr.eqns) if block_of(eqn) is not None)
        return next((line for line in map(_compat.user_line, undone) if line), "")

    def places(self, other: "Traced") -> dict[int, int]:
        """Return a map from this form's equations to those of another form that compute the same, where both exist."""
        return {i: j for i, j in zip(self.origin, other.origin, strict=True) if i >= 0 and j >= 0}


@uncollected
def trace(
    jitted: jax.stages.Wrapped,
    args: Sequence[object],
    kwargs: Kwargs,
    *,
    respect_checkpoint: bool = False,
    keeps_scores: bool = False,
    inlined: bool = False,
) -> Traced:
    """Trace a jitted step for these arguments (arrays or `jax.ShapeDtypeStruct`s) and normalise the result.

    **Arguments:** `respect_checkpoint` and `keeps_scores` as in `Source`; `inlined` only inlines calls, without any
    other pass.
    """
    staged = jitted.trace(*args, **kwargs)  # type: ignore[attr-defined]
    infos, in_tree = jax.tree.flatten(staged.args_info)
    donated = tuple(bool(info.donated) for info in infos)
    out_tree = jax.tree.structure(staged.out_info)
    (closed, references), around = of_values(staged.jaxpr), None
    donated = references.donated(donated) if references else donated
    if not inlined and (around := Around.of(closed, respect_checkpoint=respect_checkpoint)):
        closed, donated = around.body, around.donated(donated)
    source = Source(
        closed,
        in_tree,
        out_tree,
        donated,
        respect_checkpoint=respect_checkpoint,
        keeps_scores=keeps_scores,
        around=around,
        references=references,
    )
    traced = (_inlined if inlined else normalise)(source)
    found = {hint.origin for hint in traced.hints}
    for origin, primitive in hidden(traced.jaxpr.jaxpr.eqns).items():
        if origin in found:
            continue
        warn(
            f"{origin} has no effect inside a `{primitive}`, which is saved or recomputed as a whole. "
            "Mark its operands or results instead."
        )
    return traced


def normalise(source: Source) -> Traced:
    """Inline calls and loops, merge, prune and order a step."""
    inliner = Inliner(respect_checkpoint=source.respect_checkpoint)
    task = Task(source, PLAIN, inliner)
    written = run(PLAIN_PASSES, FlatProgram.of(inliner.program(source.closed)), task)
    flat = written.closed
    # Origins of equations refer to the plain program, so counting starts here.
    program = run(MERGING_PASSES, FlatProgram.of(flat).anew(encoded=written.encoded), task)
    return in_form(
        source, Merged(flat, program, find_sites(program, source, inliner.branch()), inliner), PLAIN
    )


def in_form(source: Source, merged: Merged, form: Variant) -> Traced:
    """Return a step in a form, by running the passes that depend on the form."""
    inliner = merged.inliner.branch()
    task = Task(source, form, inliner, merged.sites)
    program = run(FORM_PASSES, merged.program.anew(pairs=pair_forms(task)), task)
    origin = program.places(len(merged.flat.jaxpr.eqns))
    again = (
        origin[i]
        for i, eqn in enumerate(merged.flat.jaxpr.eqns)
        if inliner.rematted and _compat.has_scope(eqn, _compat.REMATTED)
    )
    hints = (replace(hint, variable=program.read(hint.variable)) for hint in inliner.hints)
    return Traced(
        source,
        merged,
        form,
        program,
        tuple(origin),
        task.labels(program),
        tuple(dict.fromkeys(hints)),
        inliner.rematted,
        frozenset(place for place in again if place >= 0),
    )


def _told(region: Region) -> tuple[int, str, bool, bool, bool, bool]:
    of = region.whole, bool(region.repeated), region.loop >= 0, region.windowed
    return region.rows, region.source, *of


def _inlined(source: Source) -> Traced:
    """Return a step with calls inlined, and no sites that may take another form."""
    inliner = Inliner(respect_checkpoint=source.respect_checkpoint)
    program = FlatProgram.of(inliner.program(source.closed))
    return Traced(
        source,
        Merged(program.closed, program, Sites(), inliner),
        PLAIN,
        program,
        tuple(range(len(program.eqns))),
        dict(inliner.labels),
        tuple(inliner.hints),
        inliner.rematted,
        frozenset(),
    )
