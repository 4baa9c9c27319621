"""Flat program -> the regions of rows in iterations of its loops, and the same program with them in chunks.

The body of a scan over layers, or of gradient accumulation, has regions like any program: with its loops inlined, both
passes of a pair are sections of equations, and the backward section reads the forward one's values. Each loop over
chunks is in one section. Values that chunks of the backward section recompute need no stack.

Invariant: the resulting loops have the same carries and order.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from .._program._inline import Inliner
from ._flat_program import UNPAIRED, FlatProgram, with_eqns, within
from ._inlined_loops import inline_loops
from ._loop_closing import close_loops
from ._microbatches import microbatches
from ._program_readers import Readers
from ._regions import Region
from ._row_chunks import chunked
from ._row_regions import regions


def regions_in_loops(
    readers: Readers, inliner: Inliner, *, keeps_scores: bool, keeps_batches: bool
) -> tuple[Region, ...]:
    """Return the regions in iterations of inlined loops, and those that are most of an iteration of a loop with both
    passes, of a program that `inliner` produced.

    **Arguments:** `keeps_scores` as in `Source`; `keeps_batches` leaves out regions of the second kind.
    """
    opened = readers.program
    if not opened.loops:
        return ()
    outside = {i for i, loop in enumerate(opened.loop_of) if loop < 0}
    found = regions(readers, outside | opened.apart_from_rows(inliner.hints, keeps_scores=keeps_scores))
    both = [loop.id for loop in opened.loops if loop.role == UNPAIRED and not keeps_batches]
    found += tuple(region for loop in both for region in microbatches(readers, loop))
    around = (within(region.loop, opened.loops) for region in found)
    trips = (prod(opened.loops[loop].length for loop in loops) for loops in around)
    return tuple(replace(region, trips=count) for region, count in zip(found, trips, strict=True))


def chunked_in_loops(
    program: FlatProgram, chosen: Sequence[tuple[Region, int]], inliner: Inliner, *, keeps_scores: bool
) -> FlatProgram:
    """Return the program with each of these regions in its number of chunks, and its loops closed again.

    **Arguments:** `inliner` that produced the program; `keeps_scores` as in `Source`, or if attention stays unchanged.
    """
    opened = inline_loops(program, inliner, inner=False)
    cut = chunked(opened, chosen, apart=opened.apart_from_rows(inliner.hints, keeps_scores=keeps_scores))
    made = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
    eqns = close_loops(cut.eqns, cut.loop_of, opened.loops)
    places = [next((made[v] for v in eqn.outvars if v in made), -1) for eqn in eqns]
    return cut.moved(with_eqns(cut.closed, eqns), [-1] * len(eqns), [-1] * len(eqns), loops=()).anew(
        origin=tuple(program.origin[i] if i >= 0 else () for i in places)
    )
