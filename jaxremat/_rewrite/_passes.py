"""The passes that make a step's program in a form, in the order in which they run.

`PLAIN_PASSES` keep a program that compiles to the plain step. In what `MERGING_PASSES` make of it, sites are looked for
that may take another form, and `FORM_PASSES` make what is planned. Each pass takes a `FlatProgram` and returns one. To
see what they do, or to do without one:

    with watched(lambda each, before, after: print(each.name, len(before.eqns), len(after.eqns))):
        trace(jitted, args, {})
    with without("masks"):
        trace(jitted, args, {})

Invariant: a pass keeps its `law`. `check` proves of a pass, where it can, that it changed nothing that is computed.

Flat equations, checkpoints among them inlined -> the same with the forward pass of these where forward passes are.

A checkpoint runs its forward pass again in the backward pass, and there makes what the derivative is made of besides.
The repetition merges with the forward pass (`_common_subexpressions`), but what is made besides (`2 * x` of a square,
`1 - y**2` of `tanh`) keeps a place and a name stack of the backward pass. It reads no cotangent: without the checkpoint
it would stand in the forward pass, as a residual that a plan may save or compute again. So there it goes.

Law: the same equations in a topological order; none that reads a cotangent moves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax.extend.core as jex

from .._model._variant import ATTENTION, COPIES, INNER, INSIDE, LOOP, REVERSED, ROWS, Variant
from .._program import _compat
from .._program._inline import Inliner
from .._program._primitives import is_backward, runs_once
from .._runtime._garbage import uncollected
from ._backward_equations import behind_backward
from ._cotangent_chains import with_names
from ._encodings import with_copies
from ._flat_program import FlatProgram, PairForm, with_eqns
from ._gathered_operands import gathered
from ._inlined_loops import attended, inline_loops, merged_equals
from ._kernel_choice import equivalence
from ._loop_closing import close_loops, without_unread
from ._masks import with_results
from ._memory_order import memory_order
from ._microbatches import microbatches
from ._nested_checkpointing import backward_of, cuttable, segmented
from ._optimizer_in_backward import with_optimizer_in_backward
from ._pooling_places import pooled_by_place
from ._program_readers import Readers
from ._regions import Region
from ._regions_in_loops import chunked_in_loops, regions_in_loops
from ._reversed_chains import chains_in_reverse
from ._reversed_loops import loops_in_reverse
from ._row_batches import with_row_batches
from ._row_chunks import chunked
from ._row_regions import regions
from ._selections import marked
from ._source import Source
from ._streamed_copies import streamed
from ._streamed_stacks import with_streamed_stacks


def forward_again(eqns: Sequence[jex.JaxprEqn]) -> tuple[list[Any], list[int]]:
    """Return the equations in their new order, under the names of a forward pass where they have moved; and for
    each of them its index before.
    """
    anchor: list[int] = []  # behind which equation of its own place each stands
    maker: dict[Any, int] = {}
    in_backward: set[Any] = set()  # what is made of cotangents
    moved: set[int] = set()
    for i, eqn in enumerate(eqns):
        operands = _compat.variables(eqn.invars)
        of_late = any(a in in_backward for a in operands)
        if (
            is_backward(eqn)
            and not of_late
            and not runs_once(eqn)
            and _compat.has_scope(eqn, _compat.REMATTED)
        ):
            moved.add(i)
            anchor.append(max((anchor[maker[a]] for a in operands if a in maker), default=-1))
        else:
            anchor.append(i)
            if of_late or is_backward(eqn):
                in_backward.update(eqn.outvars)
        maker.update(dict.fromkeys(eqn.outvars, i))
    order = sorted(range(len(eqns)), key=lambda i: (anchor[i], i))
    return [_compat.as_forward(eqns[i]) if i in moved else eqns[i] for i in order], order


class Found(NamedTuple):
    """**Fields:** which pairs of scans are `cuttable`; `regions` of rows that may be done in chunks; `rules` for each
    region the results that have rows: equation of the plain program, result, dimension of the rows; `opened` the
    program with its loops inlined, whose equations regions in loops are of.
    """

    cuttable: tuple[bool, ...] = ()
    regions: tuple[Region, ...] = ()
    rules: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    opened: FlatProgram | None = None


@dataclass(frozen=True)
class Sites:
    """The places of a step that may take another form.

    **Fields:** `lengths` and `sources` (the user's lines) of the pairs of scans outside of other loops; `look` for the
    others, which takes as long as the rest of tracing: who follows a plan of the step as it is written needs none.
    """

    lengths: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    look: Callable[[], Found] = Found

    @cached_property
    def found(self) -> Found:
        """The sites that are looked for when they are first asked for."""
        return self.look()

    @property
    def cuttable(self) -> tuple[bool, ...]:
        """Which of the pairs can be cut."""
        return self.found.cuttable

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of rows."""
        return self.found.regions


@dataclass(frozen=True)
class Task:
    """What is to be made. **Fields:** the `source`; the `form`; the `inliner` that has made the flat program; its
    `sites`, once they are known.
    """

    source: Source
    form: Variant
    inliner: Inliner
    sites: Sites = Sites()

    def labels(self, program: FlatProgram) -> dict[Any, str]:
        """Return the user's `checkpoint_name`s by the variables of a program; the first where there are several."""
        return {program.read(v): name for v, name in reversed(self.inliner.labels.items())}


@dataclass(frozen=True)
class Pass:
    """**Fields:** `name`; `run`; `law` what holds after it that did not before; `applies` whether a task needs it;
    `optional` whether a program without it can be planned too.
    """

    name: str
    run: Callable[[FlatProgram, Task], FlatProgram]
    law: str
    applies: Callable[[Task], bool] = lambda _: True
    optional: bool = True


def find_sites(program: FlatProgram, source: Source, inliner: Inliner) -> Sites:
    """Look for what may take another form in a program whose equals are merged, that `inliner` has made."""
    scans = [program.eqns[i] for i in backward_of(program.eqns)]
    return Sites(
        tuple(scan.params["length"] for scan in scans),
        tuple(map(_compat.user_line, scans)),
        uncollected(partial(_look, program, source, inliner)),
    )


def _look(program: FlatProgram, source: Source, inliner: Inliner) -> Found:
    in_loops = Readers(inline_loops(program, inliner, inner=False))
    known = find_regions(program, in_loops, source, inliner, most=not source.respect_checkpoint)
    return Found(
        cuttable(program.eqns, in_loops),
        known,
        tuple(
            tuple(
                (program.origin[i][0], k, d)
                for i, rule in (region.rules.items() if region.loop < 0 else ())
                for k, d in enumerate(rule.results)
                if d is not None
            )
            for region in known
        ),
        in_loops.program,
    )


def find_regions(
    program: FlatProgram, in_loops: Readers, source: Source, inliner: Inliner, *, most: bool
) -> tuple[Region, ...]:
    """Look for regions of rows outside of loops and in their iterations.

    **Arguments:** `in_loops` the program with its loops inlined; `most` whether also for those that are most of the
    step, or of an iteration.
    """
    if source.apart:
        return ()
    readers, keep = Readers(program), source.keeps_scores
    many = microbatches(readers) if most else ()
    outside = program.apart_from_rows(inliner.hints, keeps_scores=keep)
    inside = regions_in_loops(in_loops, inliner, keeps_scores=keep, keeps_batches=bool(many) or not most)
    return (*regions(readers, outside), *many, *inside)


def pair_forms(task: Task) -> tuple[PairForm, ...]:
    """Return how each pair of scans is to be done."""
    undone, levels = task.form.settings(REVERSED), task.form.settings(LOOP)
    count = len(task.sites.lengths)
    return tuple(PairForm(levels.get(pair, ()), pair + 1 in undone) for pair in range(count))


def regions_inside(program: FlatProgram, task: Task) -> tuple[Region, ...]:
    """Look for regions of rows of a program in what the task's form makes of its regions."""
    return _found_in(_of_regions(program, task), task)


def _found_in(program: FlatProgram, task: Task) -> tuple[Region, ...]:
    in_loops = Readers(inline_loops(program, task.inliner, inner=False))
    return find_regions(program, in_loops, task.source, task.inliner, most=False)


def _in_chunks(program: FlatProgram, task: Task) -> FlatProgram:
    settings = task.form.settings(INSIDE)
    program = _of_regions(program, task)
    found = _found_in(program, task) if settings else ()
    return _chunked(program, [(found[site], count) for site, (count,) in settings.items()], task)


def _of_regions(program: FlatProgram, task: Task) -> FlatProgram:
    """Return the program with those of its regions in chunks that are so in the form."""
    chosen = [(task.sites.regions[site], count) for site, (count,) in task.form.settings(ROWS).items()]
    if any(region.whole for region, _ in chosen):  # whose equations others may have too
        chosen = [each for each in chosen if each[0].whole]
    return _chunked(program, chosen, task)


def _chunked(program: FlatProgram, chosen: Sequence[tuple[Region, int]], task: Task) -> FlatProgram:
    if not chosen:
        return program
    forward = (program.eqns[i] for i in backward_of(program.eqns))
    form_of = {v: form for eqn, form in zip(forward, program.pairs, strict=True) for v in eqn.outvars}
    keep = not task.form.settings(ATTENTION)  # else its pass looks for it later
    if within := [each for each in chosen if each[0].loop >= 0]:
        before = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
        program = chunked_in_loops(program, within, task.inliner, keeps_scores=keep)
        index = {before[v]: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars if v in before}
        chosen = [(region.named(index), count) for region, count in chosen if region.loop < 0]
    apart = program.apart_from_rows(task.inliner.hints, keeps_scores=keep)
    program = chunked(program, chosen, task.labels(program), apart=apart)
    task.inliner.forget_rows()
    # In another order, and without those within regions, which are done otherwise by nobody.
    forward = [program.eqns[i] for i in backward_of(program.eqns)]
    pairs = (next((form_of[v] for v in eqn.outvars if v in form_of), PairForm()) for eqn in forward)
    return program.anew(pairs=tuple(pairs))


def _forward_again(program: FlatProgram, task: Task) -> FlatProgram:
    eqns, order = forward_again(program.eqns)
    return program.moved(with_eqns(program.closed, eqns), order)


def _in_order(program: FlatProgram, task: Task) -> FlatProgram:
    """Leave out dead equations, and sort the others."""
    jaxpr, loop_of, loops = program.closed.jaxpr, program.loop_of, program.loops
    order = memory_order(jaxpr, program.alive, loop_of, loops, turns=task.source.turns)
    if task.source.apart:
        in_backward = behind_backward(jaxpr.eqns, loop_of, loops)
        order.sort(key=lambda i: in_backward[i])
    else:
        order = streamed(jaxpr, order, loop_of, loops)
    eqns = [jaxpr.eqns[i] for i in order]
    made = {v for eqn in eqns for v in eqn.outvars}
    left = (e for e in program.encoded if made.issuperset((e.whole, *e.parts, e.decoded)))
    return program.moved(with_eqns(program.closed, eqns), order, encoded=tuple(left))


PLAIN_PASSES = (
    Pass(
        "unread",
        lambda program, task: program.with_same(
            with_eqns(program.closed, without_unread(program.eqns, program.closed.jaxpr.outvars, {"scan"}))
        ),
        "Scans stack only results that are read. JAX stacks more for gradients that end in a `stop_gradient`.",
        lambda task: not task.source.respect_checkpoint,  # bodies stay as they are
    ),
    Pass(
        "pooling",
        lambda program, task: FlatProgram.of(pooled_by_place(program.closed, early=not task.source.apart)),
        "The gradient of max pooling reads positions, not the operand.",
    ),
    Pass(
        "row batches",
        lambda program, task: program.with_same(with_eqns(program.closed, with_row_batches(program.eqns))),
        "Indices that count rows are batch dimensions.",
    ),
    Pass(
        "bits",
        lambda program, task: with_copies(program),
        "Masks of random words are saved as bits.",
    ),
    Pass(
        "gathers",
        lambda program, task: FlatProgram.of(gathered(program.closed, task.source.gathers)).anew(
            encoded=program.encoded
        ),
        "The gathered form of a sharded operand is a separate value.",
        lambda task: bool(task.source.gathers),
    ),
    Pass(
        "cotangents",
        lambda program, task: program.with_same(with_names(program.closed)),
        "Cotangents that are read often and expensive to recompute in kernels have a name.",
    ),
)

MERGING_PASSES = (
    Pass(
        "equals",
        lambda program, task: merged_equals(program, task.inliner),
        "No two pure equations are equal: the user's own checkpoints are undone.",
        optional=False,
    ),
    Pass(
        "checkpoints",
        _forward_again,
        "Values of the forward pass that checkpoints recompute are computed in the forward pass.",
        lambda task: task.inliner.rematted,
    ),
)

FORM_PASSES = (
    Pass(
        "rows",
        _in_chunks,
        "Regions of rows, or most of the step, run one chunk at a time.",
        lambda task: bool(task.form.settings(ROWS)),
        optional=False,
    ),
    Pass(
        "streams",
        lambda program, task: with_streamed_stacks(program),
        "Each iteration copies its row of a stack in host memory.",
    ),
    Pass(
        "updates",
        lambda program, task: with_optimizer_in_backward(program, task.source.donated),
        "Backward loops in another form apply the optimizer's updates, and stack no gradients.",
    ),
    Pass(
        "reversed loops",
        lambda program, task: loops_in_reverse(program, task.inliner),
        "Undone pairs of loops keep only the last carry of the forward loop.",
        lambda task: bool(task.form.settings(REVERSED)),
        optional=False,
    ),
    Pass(
        "levels",
        lambda program, task: segmented(program, task.inliner),
        "Pairs of loops are split into the levels of the form.",
        optional=False,
    ),
    Pass(
        "loops",
        lambda program, task: inline_loops(program, task.inliner, inner=bool(task.form.settings(INNER))),
        "Iterations of loops that contain both passes, or belong to a pair, are sections of equations.",
        optional=False,
    ),
    Pass(
        "attention",
        lambda program, task: attended(
            program, task.source.attention_places, *task.form.settings(ATTENTION)[0]
        ),
        "Attention has no matrix of scores.",
        lambda task: bool(task.form.settings(ATTENTION)),
        optional=False,
    ),
    Pass(
        "reversed chains",
        lambda program, task: chains_in_reverse(program),
        "The backward pass computes the values of chains of blocks from the last block's output.",
        lambda task: 0 in task.form.settings(REVERSED),
        optional=False,
    ),
    Pass(
        "selections",
        lambda program, task: program.with_same(marked(program.closed, program.alive)),
        "A value is computed once if it is compared with a selection from it.",
    ),
    Pass(
        "copies",
        lambda program, task: with_copies(program, task.form.settings(COPIES).get(0, ())),
        "Large values have copies in fewer bits; masks of random words in loops are saved as bits.",
    ),
    Pass(
        "order",
        _in_order,
        "Only live equations, in the order that needs the least memory.",
        optional=False,
    ),
    Pass(
        "masks",
        lambda program, task: with_results(program),
        "Masks read results where this saves keeping the operands.",
        # Copies in fewer bits are of what masks read: a result would be kept whole for them.
        lambda task: not task.source.apart and not task.form.settings(COPIES),
    ),
)

PASSES = (*PLAIN_PASSES, *MERGING_PASSES, *FORM_PASSES)

Watcher = Callable[[Pass, FlatProgram, FlatProgram], None]
"""Called after each pass with the program before and after it."""

_without: ContextVar[frozenset[str]] = ContextVar("without", default=frozenset())
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def run(passes: Sequence[Pass], program: FlatProgram, task: Task) -> FlatProgram:
    """Run those of the passes that apply, one after the other."""
    watcher = _watcher.get()
    for each in passes:
        if not each.applies(task) or each.name in _without.get():
            continue
        before, program = program, each.run(program, task)
        if watcher is not None:
            watcher(each, before, program)
    return program


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Do without these passes, by name. **Raises:** ValueError where there is no such pass, or none can do without."""
    able = [each.name for each in PASSES if each.optional]
    if unable := set(names) - set(able):
        raise ValueError(
            f"no pass that can be left out is called {', '.join(sorted(unable))}; there are {able}"
        )
    token = _without.set(_without.get() | set(names))
    try:
        yield
    finally:
        _without.reset(token)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call a function after each pass."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def check(of: Pass, before: FlatProgram, after: FlatProgram) -> None:
    """Prove that a pass changed nothing that is computed; a `Watcher`. **Raises:** AssertionError."""
    differs = equivalence(runnable(before)).difference(runnable(after))
    if differs is not None:
        raise AssertionError(f"the pass {of.name!r} changes what is computed: {differs}")


def runnable(program: FlatProgram) -> jex.ClosedJaxpr:
    """Return the program with its loops closed again."""
    closed = with_eqns(program.closed, close_loops(program.eqns, program.loop_of, program.loops))
    _compat.check_jaxpr(closed)
    return closed
