"""Function and arguments -> `Traced`: one flat jaxpr of the whole step, forward and backward.

Laws: evaluating `Traced.jaxpr`, its loops closed again, gives what the function gives. It holds no call that could be
inlined, no dead equation and no two equal pure equations of one loop: merging equals undoes the user's own
`jax.checkpoint`, so that the planner starts from the whole truth. With `respect_checkpoint` the regions that these
compute again in the backward pass are single equations instead. Its equations stand in the order of
`_memory_order.memory_order`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import jax
import jax.extend.core as jex

from .._attention._operations import ATTENTION as ATTEND
from .._attention._operations import runs_in_kernels
from .._attention._pattern import Pattern
from .._attention._places import Places
from .._model._form import ATTENTION, COPIES, INNER, LOOP, PLAIN, REVERSED, ROWS, Form
from .._program import _compat
from .._program._hints import Hint, hidden
from .._program._inline import Inliner
from .._program._primitives import inner_eqns
from .._program._references import References, of_values
from .._runtime._errors import JaxrematWarning
from .._runtime._garbage import uncollected
from ._cotangent_chains import with_names
from ._encodings import Encoded, with_copies
from ._gathered_operands import Gather, gathered
from ._laid_open import alive, attended, in_reverse, laid_open, merged_equals
from ._loop_opening import BACKWARD, FORWARD, Loop
from ._loop_segments import backward_of, cuttable, segmented
from ._masks import with_results
from ._memory_order import memory_order
from ._microbatches import microbatches
from ._passes import behind_backward
from ._pooling_places import pooled_by_place
from ._reversed_chains import block_of
from ._reversed_loops import loops_in_reverse
from ._row_chunks import chunked
from ._row_regions import Region, regions
from ._selections import marked
from ._shard_map_body import Around
from ._streamed_copies import streamed
from ._undone_checkpoints import forward_again
from ._update_absorption import Gain, absorbed


@dataclass(frozen=True)
class Traced:
    """A step as one flat jaxpr.

    **Fields:** `jaxpr` normalised and ordered, with the loops of `_loop_opening` laid open; `loop_of` for each of its
    equations the index in `loops` of the loop it is of, -1 for none; `flat` the same program merely inlined, in the
    user's order, which compiles to the plain step but for the gradients of `_pooling_places` and masks in bits;
    `origin` for each equation of `flat` the index of the equation of `jaxpr` that computes the same, -1 where none
    does; `labels` the user's `checkpoint_name`s by variable, and `hints` the marks of `jaxremat.hint`; `in_tree` and
    `out_tree` the structures of `(args, kwargs)` without static arguments, and of the result; `donated` per flat
    argument; `rematted` whether the user's program has checkpoints of its own; `closed` the program as it was traced;
    `lengths` and `sources` (the user's lines) of its pairs of scans, outside of other loops, and which of them are
    `cuttable`, `gains` what absorbing updates saves in each, and `over` the arguments that loops write over here;
    `regions` what may be done in chunks of rows, and of each the `row_places` of values with rows in `jaxpr`: equation,
    result, and dimension of the rows; `form` which of these are done otherwise here, and how; `respect_checkpoint`
    whether what the user's checkpoints compute again is left as it is; `again` the equations of `jaxpr` that
    checkpoints outside of loops, which are undone here, compute once more in the user's program; `gathers` the operands
    that equations of their own gather, `encoded` the values that have copies in fewer bits, `devices` how many it is
    on; `around` what is around the program of one device where all of this is in a `shard_map`, whose flat arguments
    and types these are then; `references` that the step has from outside, whose values are arguments and results of all
    these programs; `turns` as in `memory_order`; `masked` the equations of `jaxpr` that read a result in place of what
    it is made of, and that; `attention_places` as of `attending`.
    """

    jaxpr: jex.ClosedJaxpr
    loop_of: tuple[int, ...]
    loops: tuple[Loop, ...]
    flat: jex.ClosedJaxpr
    origin: tuple[int, ...]
    labels: dict[Any, str]
    hints: tuple[Hint, ...]
    in_tree: Any
    out_tree: Any
    donated: tuple[bool, ...]
    rematted: bool
    closed: jex.ClosedJaxpr
    lengths: tuple[int, ...]
    sources: tuple[str, ...]
    cuttable: tuple[bool, ...]
    form: Form
    gains: tuple[Gain, ...]
    over: frozenset[Any]
    regions: tuple[Region, ...]
    row_places: tuple[tuple[tuple[int, int, int], ...], ...]
    respect_checkpoint: bool
    again: frozenset[int]
    gathers: tuple[Gather, ...] = ()
    encoded: tuple[Encoded, ...] = ()
    devices: int = 1
    around: Around | None = None
    references: References | None = None
    turns: bool = True
    masked: Mapping[int, Any] = field(default_factory=dict)
    attention_places: Mapping[Pattern, Places] | None = None

    def step(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """The whole program that a flat one of this step is, or is the body of."""
        return self.around.step(closed) if self.around else closed

    def alone(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """Some part of this step as a program by itself."""
        return self.around.alone(closed) if self.around else closed

    def in_form(self, form: Form) -> "Traced":
        """The same step in another form."""
        return self._again(form, self.regions, self.gathers)

    def named(self, form: Form) -> Form:
        """The form, with names for its sites where it has none, see `Form.unnamed`."""
        return form.named(len(self.lengths), len(self.regions))

    def gathered(self, gathers: tuple[Gather, ...], devices: int) -> "Traced":
        """The same step on several devices, with the gathering of operands in equations of its own, by index in
        `flat`.
        """
        return replace(self._again(PLAIN, None, gathers) if gathers else self, devices=devices)

    def with_regions_on_devices(self, parts: Sequence[int], share: float) -> "Traced":
        """The same step, of whose regions the rows lie in so many parts, see `Region.on_devices`."""
        laid = (region.on_devices(n, share) for region, n in zip(self.regions, parts, strict=True))
        return replace(self, regions=tuple(laid))

    def ordered_before(self) -> "Traced":
        """The same step in the order that plans made before forward passes had `turns` know it in."""
        return replace(self, turns=False)._again(self.form, self.regions, self.gathers)

    def _again(self, form: Form, known: Sequence[Region] | None, gathers: tuple[Gather, ...]) -> "Traced":
        again = normalise(
            self.closed,
            self.in_tree,
            self.out_tree,
            self.donated,
            form,
            known,
            gathers,
            self.attention_places,
            respect_checkpoint=self.respect_checkpoint,
            turns=self.turns,
        )
        return replace(again, devices=self.devices, around=self.around, references=self.references)

    def attending(self, places: Mapping[Pattern, Places]) -> "Traced":
        """The same step on several devices, of which it is known where attention may be done without its scores."""
        return replace(self, attention_places=places)

    @property
    def microbatches(self) -> int:
        """How many of these most of the step is done in, 0 where it is done at once."""
        chunks = self.form.settings(ROWS).items()
        return next((count for site, (count,) in chunks if self.regions[site].whole), 0)

    @property
    def rows(self) -> list[tuple[int, str, bool]]:
        """Of each region how many rows there are, the user's line, and whether it is most of the step."""
        return [(region.rows, region.source, region.whole) for region in self.regions]

    @property
    def inner(self) -> list[tuple[int, str]]:
        """Of each forward loop that is laid open within a backward loop the length, and the user's line."""
        within = (each for each in self.loops if each.parent >= 0 and each.role == FORWARD)
        found = [each for each in within if self.loops[each.parent].role == BACKWARD]
        return [(each.length, _compat.user_line(each.eqn)) for each in found]

    @property
    def attention(self) -> list[tuple[str, bool, bool]]:
        """Of each attention that is done without its matrix of scores the user's line, whether it is in kernels, and
        whether its gradient is if it has one.
        """
        eqns = [each for eqn in self.jaxpr.jaxpr.eqns for each in (eqn, *inner_eqns(eqn))]
        return [(_compat.user_line(e), *runs_in_kernels(e)) for e in eqns if e.primitive is ATTEND]

    @property
    def chain(self) -> str:
        """The user's line of the first block that the way back undoes."""
        undone = (eqn for eqn in reversed(self.jaxpr.jaxpr.eqns) if block_of(eqn) is not None)
        return next((line for line in map(_compat.user_line, undone) if line), "")

    def places(self, other: "Traced") -> dict[int, int]:
        """For this form's equations those of another form that compute the same, as far as there are any."""
        return {i: j for i, j in zip(self.origin, other.origin, strict=True) if i >= 0 and j >= 0}


@uncollected
def trace(
    jitted: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    respect_checkpoint: bool = False,
    inlined: bool = False,
) -> Traced:
    """Trace a jitted step for these arguments (arrays or `jax.ShapeDtypeStruct`s) and normalise the result.

    **Arguments:** `inlined` leaves the program as it is but for that.
    """
    staged = jitted.trace(*args, **kwargs)  # type: ignore[attr-defined]
    infos, in_tree = jax.tree.flatten(staged.args_info)
    donated = tuple(bool(info.donated) for info in infos)
    out_tree = jax.tree.structure(staged.out_info)
    (closed, references), around = of_values(staged.jaxpr), None
    donated = references.donated(donated) if references else donated
    if not inlined and (around := Around.of(closed, respect_checkpoint=respect_checkpoint)):
        closed, donated = around.body, around.donated(donated)
    make = _inlined if inlined else normalise
    traced = make(closed, in_tree, out_tree, donated, respect_checkpoint=respect_checkpoint)
    traced = replace(traced, around=around, references=references)
    found = {hint.origin for hint in traced.hints}
    for origin, primitive in hidden(traced.jaxpr.jaxpr.eqns).items():
        if origin in found:
            continue
        warnings.warn(
            f"{origin} has no effect: it stands in a `{primitive}`, which is saved or recomputed whole. "
            "Mark what goes in or comes out instead.",
            JaxrematWarning,
            stacklevel=2,
        )
    return traced


def normalise(
    closed: jex.ClosedJaxpr,
    in_tree: Any = None,
    out_tree: Any = None,
    donated: Sequence[bool] = (),
    form: Form = PLAIN,
    known: Sequence[Region] | None = None,
    gathers: tuple[Gather, ...] = (),
    attention_places: Mapping[Pattern, Places] | None = None,
    *,
    respect_checkpoint: bool = False,
    apart: bool = False,
    turns: bool = True,
) -> Traced:
    """Inline, lay open, merge, prune and order a jaxpr, in this form: kinds of sites are rewritten one after the other,
    rows before loops are laid open, attention and copies behind that.

    **Arguments:** `known` the regions, if they have been looked for; `gathers` operands that are gathered by equations
    of their own; `attention_places` as of `attending`; `apart`: the forward pass is a program of its own, so that all
    of it stands before the backward pass, and nothing is of both.
    """
    inliner = Inliner(respect_checkpoint=respect_checkpoint)
    written = pooled_by_place(inliner.program(closed), early=not apart)
    in_bits = with_copies(written, (-1,) * len(written.jaxpr.eqns), ())
    flat = with_names(gathered(in_bits.closed, gathers))
    once, once_of, _, first = merged_equals(flat, inliner)
    if inliner.rematted:
        once, once_of = _undone(once, once_of)
    scans = [once.jaxpr.eqns[i] for i in backward_of(once.jaxpr.eqns)]
    lengths = tuple(scan.params["length"] for scan in scans)
    if known is None:
        known = () if apart else (*regions(once), *(() if respect_checkpoint else microbatches(once)))
    site, (count,) = next(iter(form.settings(ROWS).items()), (-1, (0,)))
    region = known[site] if site >= 0 else None
    undone = [pair + 1 in form.settings(REVERSED) for pair in range(len(lengths))]
    levels = [form.settings(LOOP).get(pair, ()) for pair in range(len(lengths))]
    labels = {first(v): name for v, name in reversed(inliner.labels.items())}
    parted, of_parted = chunked(once, region, count, labels)
    if region is not None and region.whole:  # which loops are within then
        outside = [
            i not in region.ways and not region.ways.keys() >= set(own)
            for i, own in backward_of(once.jaxpr.eqns).items()
        ]
        levels, undone = list(compress(levels, outside)), list(compress(undone, outside))
    inside = absorbed(parted, donated, [bool(own) or so for own, so in zip(levels, undone, strict=True)])
    back = loops_in_reverse(inside.closed, inliner, [pair for pair, so in enumerate(undone) if so])
    levels = [own for pair, own in enumerate(levels) if pair not in back.numbers]
    cut, of_inside = segmented(back.closed, inliner, levels, inside.over)
    of_inside = [back.origin[i] if i >= 0 else -1 for i in of_inside]
    of_once = [of_parted[j] if i >= 0 and (j := inside.origin[i]) >= 0 else -1 for i in of_inside]
    opened = laid_open(cut, inliner, inside.over, inner=bool(form.settings(INNER)))
    opened = attended(opened, attention_places, *form.settings(ATTENTION).get(0, ()))
    again = opened.read
    if 0 in form.settings(REVERSED):
        opened = in_reverse(opened)
    whole = marked(opened.closed, alive(opened.closed))
    copied = with_copies(whole, opened.loop_of, opened.loops, form.settings(COPIES).get(0, ()))
    merged, loop_of = copied.closed, copied.loop_of
    place_of = [copied.place[i] if i >= 0 else -1 for i in opened.merged_of]
    kept = alive(merged)
    order = memory_order(merged.jaxpr, kept, loop_of, opened.loops, turns=turns)
    if apart:
        late = behind_backward(merged.jaxpr.eqns, loop_of, opened.loops)
        order.sort(key=lambda i: late[i])
    else:
        order = streamed(merged.jaxpr, order, loop_of, opened.loops)
    place = {old: new for new, old in enumerate(order)}
    packed = (each.renamed(lambda v: again(first(v))) for each in in_bits.encoded)
    made = {v for i in order for v in merged.jaxpr.eqns[i].outvars}
    found = {of_once[i]: place.get(new, -1) for i, new in zip(opened.origin, place_of, strict=True) if i >= 0}
    again_of = (i for i, eqn in enumerate(flat.jaxpr.eqns) if _compat.has_scope(eqn, _compat.REMATTED))
    rematted = again_of if inliner.rematted else ()
    jaxpr = _compat.new_jaxpr(
        merged.jaxpr.constvars,
        merged.consts,
        merged.jaxpr.invars,
        merged.jaxpr.outvars,
        [merged.jaxpr.eqns[i] for i in order],
    )
    loop_of = [loop_of[i] for i in order]
    # Copies in fewer bits are of what masks read: a result would be kept whole for them.
    plainly = apart or bool(form.settings(COPIES))
    jaxpr, masked = (jaxpr, {}) if plainly else with_results(jaxpr, loop_of, opened.loops)
    return Traced(
        jaxpr=jaxpr,
        loop_of=tuple(loop_of),
        loops=opened.loops,
        flat=flat,
        origin=tuple(found.get(i, -1) for i in once_of),
        labels={again(first(v)): name for v, name in reversed(inliner.labels.items())},
        hints=tuple(dict.fromkeys(replace(h, variable=again(first(h.variable))) for h in inliner.hints)),
        in_tree=in_tree,
        out_tree=out_tree,
        donated=tuple(donated) or (False,) * len(closed.jaxpr.invars),
        rematted=inliner.rematted,
        closed=closed,
        lengths=lengths,
        sources=tuple(map(_compat.user_line, scans)),
        cuttable=cuttable(once.jaxpr.eqns),
        form=form,
        gains=inside.gains,
        over=frozenset(inside.over.values()),
        regions=tuple(known),
        row_places=tuple(_row_places(region, found) for region in known),
        respect_checkpoint=respect_checkpoint,
        again=frozenset(j for i in rematted if (j := found.get(once_of[i], -1)) >= 0),
        gathers=gathers,
        turns=turns,
        masked=masked,
        attention_places=attention_places,
        encoded=tuple(
            each
            for each in (*dict.fromkeys(packed), *copied.encoded)
            if made.issuperset((each.whole, *each.parts, each.decoded))
        ),
    )


def _inlined(
    closed: jex.ClosedJaxpr, in_tree: Any, out_tree: Any, donated: Sequence[bool], *, respect_checkpoint: bool
) -> Traced:
    """A jaxpr merely inlined, which may take no other form."""
    inliner = Inliner(respect_checkpoint=respect_checkpoint)
    flat = inliner.program(closed)
    count = len(flat.jaxpr.eqns)
    return Traced(
        jaxpr=flat,
        loop_of=(-1,) * count,
        loops=(),
        flat=flat,
        origin=tuple(range(count)),
        labels=dict(inliner.labels),
        hints=tuple(inliner.hints),
        in_tree=in_tree,
        out_tree=out_tree,
        donated=tuple(donated),
        rematted=inliner.rematted,
        closed=closed,
        lengths=(),
        sources=(),
        cuttable=(),
        form=PLAIN,
        gains=(),
        over=frozenset(),
        regions=(),
        row_places=(),
        respect_checkpoint=respect_checkpoint,
        again=frozenset(),
    )


def _row_places(region: Region, found: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Where the results of a region are that have rows."""
    return tuple(
        (place, k, d)
        for i, way in region.ways.items()
        if (place := found.get(i, -1)) >= 0
        for k, d in enumerate(way.results)
        if d is not None
    )


def _undone(once: jex.ClosedJaxpr, once_of: Sequence[int]) -> tuple[jex.ClosedJaxpr, list[int]]:
    """The program with what its checkpoints make again in the forward pass; for each older equation the index."""
    eqns, order = forward_again(once.jaxpr.eqns)
    place = {old: new for new, old in enumerate(order)}
    own = once.jaxpr
    moved = _compat.new_jaxpr(own.constvars, once.consts, own.invars, own.outvars, eqns)
    return moved, [place[i] for i in once_of]
