"""Flat equations -> those of a step that can run on one part of its examples at a time.

If no statistics cross the batch, forward and backward work on an example depends on that example only, and gradients
are sums over examples. A loop over *microbatches* then needs a fraction of the activations, repeats no operation, and
reads the parameters once per microbatch: gradient accumulation. The loop contains a forward and a backward pass, which
are planned as those of any step.

Invariant: as that of `_row_regions`. All random numbers are drawn before the loop.
"""

from collections.abc import Collection, Sequence

from .._program._flops import aval_nbytes
from .._program._primitives import contracts, is_backward
from .._program._windows import has_window
from ._program_readers import Readers
from ._region_loops import loops_of
from ._regions import Region
from ._row_regions import Grower, largest, region_of

LEAST_SHARE = 0.5
"""A region is most of a step if it has at least this share of the forward pass's contractions. Networks that depend
only on parameters, such as an implicit filter, are outside; those of an optimizer are not counted.
"""

ENOUGH_SHARE = 0.75
"""An axis with this share ends the search: an axis with less may stop where attention mixes it."""

SEEDS = 4
"""This many of the largest values of different shapes are tried, ..."""

DIMENSIONS = 3
"""... with the examples in one of this many outermost dimensions."""

LARGE = 1 / 8
"""The search for components goes on while a value outside has this share of the largest inside."""

FEW = 4
"""With fewer microbatches than this, or none, rows of images with their halos are tried, ..."""

MANY_TIMES = 8
"""... and taken if they allow this many times as many parts: two images of thousands of rows."""

COMPONENTS = 4
"""The most components. Towers of a contrastive loss are connected only by equations that mix examples."""


def microbatches(program: Readers, scope: int = -1) -> tuple[Region, ...]:
    """Return the region that is most of a step, or of an iteration of a loop, such as gradient accumulation that the
    user wrote; empty if there is none.

    **Arguments:** `scope` the loop, -1 for the step itself.
    """
    own = [i for i in program.alive if scope < 0 or program.scopes[i] == scope]
    if not any(is_backward(program.eqns[i]) for i in own):
        return ()
    region = most_of(program, own, whole=True)
    most = region.choices[-1] if region is not None else 1
    if most < FEW and any(has_window(program.eqns[i]) for i in own):
        rows = most_of(program, own, whole=True, windowed=True)
        if rows is not None and (region is None or rows.choices[-1] >= MANY_TIMES * most):
            region = rows
    return () if region is None else (region,)


def most_of(
    program: Readers, own: Collection[int], *, whole: bool = False, windowed: bool = False
) -> Region | None:
    """Return the region that is most of some equations, or None.

    **Arguments:** `whole` as in `Region`; `windowed` whether chunks may read neighbouring rows.
    """
    products = [i for i in own if contracts(program.eqns[i])]
    products = [i for i in products if not program.in_backward[i]] or products
    outside = {*program.alive}.difference(own)
    most = 1 if windowed else COMPONENTS
    first = _grown(program, products, [], outside, windowed)
    joined = first[:1]
    while 0 < len(joined) < most and (found := _grown(program, products, joined, outside, windowed)):
        joined.append(found[0])
    # If loops over the parts of the first axis have too many stages, another axis may still be most of the step.
    for grown in (joined, *([each] for each in first[1:])):
        # The last components may have an unrelated number of rows, such as weights.
        for count in range(len(grown), 0, -1):
            if sum(_share(each, products) for each in grown[:count]) < LEAST_SHARE:
                break
            loops = loops_of(program, grown[:count])
            region = region_of(program, loops, whole=whole) if loops else None
            if region is not None and region.choices:
                return region
    return None


def _share(grower: Grower, products: Sequence[int]) -> float:
    """Return the share of these contractions in a component."""
    return sum(i in grower.rules for i in products) / max(len(products), 1)


def _grown(
    program: Readers,
    products: Sequence[int],
    others: Sequence[Grower],
    outside: Collection[int],
    windowed: bool,
) -> list[Grower]:
    """Return components around the largest values in no other, sorted by their shares of the products; empty if none is
    large.

    **Arguments:** `outside` equations that are in none; `windowed` as in `most_of`.
    """
    taken = {i for each in others for i in each.rules}.union(outside)
    least = max((each.largest_nbytes for each in others), default=0) * LARGE
    found: list[tuple[float, Grower]] = []
    for v in largest(program, SEEDS, taken):
        for dimension in range(min(len(v.aval.shape), DIMENSIONS)):
            if aval_nbytes(v.aval) < least or any(share >= ENOUGH_SHARE for share, _ in found):
                break
            if windowed and v.aval.shape[dimension] == 1:
                continue
            grower = Grower(program, taken, scans=True, windowed=windowed)
            if grower.grow(v, dimension) and (share := _share(grower, products)) > 0:
                found.append((share, grower))
    return [grower for _, grower in sorted(found, key=lambda each: -each[0])]
