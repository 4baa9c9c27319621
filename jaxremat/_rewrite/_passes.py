"""The passes that rewrite a step's program into a form, in the order in which they run.

After `PLAIN_PASSES` the program still compiles to the plain step. After `MERGING_PASSES` the sites that may take
another form are searched for. `FORM_PASSES` produce the program that is planned. Each pass takes a `FlatProgram` and
returns one. To watch the passes, or to leave one out:

    with watched(lambda each, before, after: print(each.name, len(before.eqns), len(after.eqns))):
        trace(jitted, args, {})
    with without("masks"):
        trace(jitted, args, {})

Invariant: a pass keeps its `law`. `check` proves, where it can, that a pass changed no computed value.

This module also has the pass "checkpoints": flat equations with the user's checkpoints inlined -> the same equations,
with the forward pass of the checkpoints among the other forward equations. A checkpoint repeats its forward pass in the
backward pass and also computes derivatives there. The repeated equations merge with the forward pass
(`_common_subexpressions`), but the derivatives (`2 * x` of a square, `1 - y**2` of `tanh`) keep a position and a name
stack of the backward pass. They read no cotangent: without the checkpoint they would be residuals of the forward pass,
which a plan may save or recompute. So the pass moves them to the forward pass.

Invariant: the same equations in a topological order; no equation that reads a cotangent moves.
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
    """Return the equations in their new order, moved ones with a forward pass's name stack, and their old indices."""
    anchor: list[int] = []  # for each equation, the unmoved equation that it follows
    maker: dict[Any, int] = {}
    in_backward: set[Any] = set()  # values that depend on cotangents
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
    """**Fields:** `cuttable` says for each pair of scans whether it can be cut; `regions` the regions of rows that may
    run in chunks; `rules` for each region its results that have rows, as (equation of the plain program, result,
    dimension of the rows); `opened` the program with its loops inlined, which the indices of regions in loops refer to.
    """

    cuttable: tuple[bool, ...] = ()
    regions: tuple[Region, ...] = ()
    rules: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    opened: FlatProgram | None = None


@dataclass(frozen=True)
class Sites:
    """The parts of a step that may take another form.

    **Fields:** `lengths` and `sources` (the user's lines) of the pairs of scans outside other loops; `look` searches
    for the other sites, which takes as long as the rest of tracing; a plan of the step as written does not need them.
    """

    lengths: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    look: Callable[[], Found] = Found

    @cached_property
    def found(self) -> Found:
        """The other sites, searched for on first access."""
        return self.look()

    @property
    def cuttable(self) -> tuple[bool, ...]:
        """For each pair of scans, whether it can be cut."""
        return self.found.cuttable

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of rows."""
        return self.found.regions


@dataclass(frozen=True)
class Task:
    """The inputs of the passes. **Fields:** the `source`; the `form`; the `inliner` that produced the flat program; its
    `sites`, once they are known.
    """

    source: Source
    form: Variant
    inliner: Inliner
    sites: Sites = Sites()

    def labels(self, program: FlatProgram) -> dict[Any, str]:
        """Return the user's `checkpoint_name` of each named variable of a program: the first of several."""
        return {program.read(v): name for v, name in reversed(self.inliner.labels.items())}


@dataclass(frozen=True)
class Pass:
    """**Fields:** `name`; `run`; `law`, which holds after the pass and not before it; `applies` returns whether a task
    needs the pass; `optional` whether a program without the pass can still be planned.
    """

    name: str
    run: Callable[[FlatProgram, Task], FlatProgram]
    law: str
    applies: Callable[[Task], bool] = lambda _: True
    optional: bool = True


def find_sites(program: FlatProgram, source: Source, inliner: Inliner) -> Sites:
    """Return the sites of a program that `inliner` produced, after equal equations are merged."""
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
    """Return the regions of rows outside loops and within their iterations.

    **Arguments:** `in_loops` the program with its loops inlined; `most` whether to search also for regions that cover
    most of the step, or of an iteration.
    """
    if source.apart:
        return ()
    readers, keep = Readers(program), source.keeps_scores
    many = microbatches(readers) if most else ()
    outside = program.apart_from_rows(inliner.hints, keeps_scores=keep)
    inside = regions_in_loops(in_loops, inliner, keeps_scores=keep, keeps_batches=bool(many) or not most)
    return (*regions(readers, outside), *many, *inside)


def pair_forms(task: Task) -> tuple[PairForm, ...]:
    """Return the form of each pair of scans."""
    undone, levels = task.form.settings(REVERSED), task.form.settings(LOOP)
    count = len(task.sites.lengths)
    return tuple(PairForm(levels.get(pair, ()), pair + 1 in undone) for pair in range(count))


def regions_inside(program: FlatProgram, task: Task) -> tuple[Region, ...]:
    """Return the regions of rows of the program after the form's own regions run in chunks."""
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
    """Return the program with the regions that the form runs in chunks rewritten."""
    chosen = [(task.sites.regions[site], count) for site, (count,) in task.form.settings(ROWS).items()]
    if any(region.alone for region, _ in chosen):  # smaller regions may share its equations
        chosen = [each for each in chosen if each[0].alone]
    return _chunked(program, chosen, task)


def _chunked(program: FlatProgram, chosen: Sequence[tuple[Region, int]], task: Task) -> FlatProgram:
    if not chosen:
        return program
    forward = (program.eqns[i] for i in backward_of(program.eqns))
    form_of = {v: form for eqn, form in zip(forward, program.pairs, strict=True) for v in eqn.outvars}
    keep = not task.form.settings(ATTENTION)  # otherwise the pass "attention" needs these equations later
    if within := [each for each in chosen if each[0].loop >= 0]:
        # Regions within loops go first; the others refer to equations by index, so their indices are updated.
        before = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
        program = chunked_in_loops(program, within, task.inliner, keeps_scores=keep)
        index = {before[v]: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars if v in before}
        chosen = [(region.named(index), count) for region, count in chosen if region.loop < 0]
    apart = program.apart_from_rows(task.inliner.hints, keeps_scores=keep)
    program = chunked(program, chosen, task.labels(program), apart=apart)
    task.inliner.forget_rows()
    # The forward scans have a new order, and those inside regions are absent: no form applies to these.
    forward = [program.eqns[i] for i in backward_of(program.eqns)]
    pairs = (next((form_of[v] for v in eqn.outvars if v in form_of), PairForm()) for eqn in forward)
    return program.anew(pairs=tuple(pairs))


def _forward_again(program: FlatProgram, task: Task) -> FlatProgram:
    eqns, order = forward_again(program.eqns)
    return program.moved(with_eqns(program.closed, eqns), order)


def _in_order(program: FlatProgram, task: Task) -> FlatProgram:
    """Remove dead equations, and sort the others."""
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
        # Copies in fewer bits replace the operands that masks read; a mask that reads a result would keep it whole.
        lambda task: not task.source.apart and not task.form.settings(COPIES),
    ),
)

PASSES = (*PLAIN_PASSES, *MERGING_PASSES, *FORM_PASSES)

Watcher = Callable[[Pass, FlatProgram, FlatProgram], None]
"""Called after each pass with the program before and after it."""

_without: ContextVar[frozenset[str]] = ContextVar("without", default=frozenset())
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def run(passes: Sequence[Pass], program: FlatProgram, task: Task) -> FlatProgram:
    """Run the passes that apply, in order."""
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
    """Leave out these passes, by name. **Raises:** ValueError for an unknown name or a pass that is not optional."""
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
    """Call `watcher` after each pass."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def check(of: Pass, before: FlatProgram, after: FlatProgram) -> None:
    """Prove that a pass changed no computed value; a `Watcher`. **Raises:** AssertionError."""
    differs = equivalence(runnable(before)).difference(runnable(after))
    if differs is not None:
        raise AssertionError(f"the pass {of.name!r} changes what is computed: {differs}")


def runnable(program: FlatProgram) -> jex.ClosedJaxpr:
    """Return the program with its loops closed again."""
    closed = with_eqns(program.closed, close_loops(program.eqns, program.loop_of, program.loops))
    _compat.check_jaxpr(closed)
    return closed
