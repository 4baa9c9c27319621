"""Flat jaxpr of a function that is differentiated later -> its divisions into parts, and the function in parts.

Written by hand this is a `lax.scan` of a `jax.checkpoint` over chunks of tokens, rays or rows of logits. The scan is
planned as any scan of such a function: its operands and results are kept, and the values of each part that the plan
saves.

Invariant: as those of `_row_regions` and `_row_chunks`. All random numbers are drawn before the scan.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.extend.core as jex

from .._model._device_specs import DeviceSpec
from ._flat_program import FlatProgram
from ._microbatches import most_of
from ._program_readers import Readers
from ._regions import Region
from ._row_chunks import chunked
from ._row_regions import regions


@dataclass(frozen=True)
class Division:
    """**Fields:** the `regions` that run in parts, and the number of `parts` of each."""

    regions: tuple[Region, ...]
    parts: tuple[int, ...]

    @property
    def handed_nbytes(self) -> int:
        """The bytes that regions hand on."""
        return sum(region.left_nbytes + region.sum_nbytes for region in self.regions)

    @property
    def inner_nbytes(self) -> int:
        """The most bytes that stay inside a part of any region."""
        both = zip(self.regions, self.parts, strict=True)
        return max(region.inner_nbytes // count for region, count in both)

    def more_seconds(self, device: DeviceSpec) -> float:
        """Return about how much longer both passes take in parts."""
        both = zip(self.regions, self.parts, strict=True)
        return 2 * sum(region.more_seconds(count, device) for region, count in both)


def divisions(closed: jex.ClosedJaxpr) -> list[list[Division]]:
    """Return the ways to divide a function: around its largest values, and most of it, each with all possible numbers
    of parts, the fewest first.
    """
    program = Readers(FlatProgram.of(closed), differentiable=True)
    whole = most_of(program, program.alive)
    found = regions(program)
    within = whole is not None and all(
        r.rows == whole.rows and r.rules.keys() <= whole.rules.keys() for r in found
    )
    sets = [() if within else found, () if whole is None else (whole,)]
    return [_ladder(each) for each in sets if each]


def _ladder(found: tuple[Region, ...]) -> list[Division]:
    """Return the possible numbers of parts, with the nearest possible number for each region."""
    counts = sorted({count for region in found for count in region.choices})
    nearest = (tuple(min(r.choices, key=lambda n: abs(n - count)) for r in found) for count in counts)
    return [Division(found, parts) for parts in dict.fromkeys(nearest)]


def divided(closed: jex.ClosedJaxpr, division: Division, labels: Mapping[jex.Var, str]) -> jex.ClosedJaxpr:
    """Return the function in these parts. **Arguments:** `labels` the user's `checkpoint_name`s by variable."""
    chosen = tuple(zip(division.regions, division.parts, strict=True))
    return chunked(FlatProgram.of(closed), chosen, labels, differentiable=True).closed
