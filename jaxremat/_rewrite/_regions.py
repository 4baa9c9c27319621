"""A region: equations of a program that split into equal rows, and its gain and cost for each number of chunks.

`_row_regions` searches for regions, `_row_chunks` runs them one chunk at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .._model._device_specs import DeviceSpec
from .._program._axes import Parts
from .._program._flops import alone_seconds
from .._program._primitives import is_fusion_root
from ._region_loops import Loop

CHUNKS = (2, 4, 8, 16)
"""For each of these numbers, the nearest number of chunks that divides the rows is considered, ..."""

MORE_CHUNKS = (32, 64, 128)
"""... and for these if a chunk then keeps `LEAST_CHUNK_NBYTES` inside: hand-written steps often run single examples."""

LEAST_CHUNK_NBYTES = 1 << 20

FAR = 1.5
"""If the nearest is off by more than this factor, a number that does not divide the rows is considered too, ..."""

MOST_BEYOND = 1 / 8
"""... if at most this share of all rows would be past the end, in its last chunk."""


@dataclass(frozen=True)
class Region:
    """Equations of a program that split into equal rows.

    **Fields:** the `loops` over chunks that compute them, in order; `rows` that any number of chunks must divide;
    `inner_nbytes` of the values that neither enter nor leave it; `left_nbytes` of the rows that leave it; `sum_nbytes`
    of its sums; `read_nbytes` of the values that each chunk reads whole; `kernels` about how many it takes; `source`
    the user's line; `whole` whether it is most of a step, see `_microbatches`; `overlaps` whether it
    shares equations with other regions, which then do not run in chunks; `parts` the number of pieces of its
    rows, each on separate devices, or 0 if it may not run in chunks there (a chunk has rows of every piece);
    `sent_nbytes` that these devices send each other for each chunk; `repeated` the equations that loops recompute;
    `loop` the program's loop that it is in, with the backward loop of a pair, or -1, and the number of its `trips`;
    `uneven` whether the last chunk may end past the rows (not if a loop or a branch inside adds up sums: its body would
    have to zero the missing rows); `windowed` whether equations read neighbouring rows, see `_halos`, and `halos` the
    share of all rows that each chunk computes in addition to its own, by equation.
    """

    loops: tuple[Loop, ...]
    rows: int
    inner_nbytes: int
    left_nbytes: int
    sum_nbytes: int
    read_nbytes: int
    kernels: int
    source: str
    whole: bool = False
    overlaps: bool = False
    parts: int = 1
    sent_nbytes: int = 0
    repeated: tuple[Any, ...] = ()
    loop: int = -1
    trips: int = 1
    uneven: bool = False
    windowed: bool = False
    halos: tuple[tuple[Any, float], ...] = ()

    @property
    def alone(self) -> bool:
        """Whether no other region runs in chunks with it."""
        return self.whole or self.overlaps

    @cached_property
    def rules(self) -> Loop:
        """The rules of all its equations, by index."""
        return {i: rule for loop in self.loops for i, rule in loop.items()}

    def on_devices(self, parts: int, share: float) -> "Region":
        """Return the same region in `parts` pieces: devices add up their sums, and gather values that are read whole.

        **Arguments:** `share` of the values without rows that one device has.
        """
        parts = 0 if self.windowed and parts > 1 else parts
        return replace(
            self,
            parts=parts,
            inner_nbytes=self.inner_nbytes // max(parts, 1),
            sum_nbytes=int(share * self.sum_nbytes),
            read_nbytes=int(share * self.read_nbytes),
            sent_nbytes=self.sum_nbytes * (parts > 1) + self.read_nbytes * (share < 1),
        )

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """The numbers of chunks to choose from, in ascending order."""
        rows = self.rows // self.parts if self.parts and self.rows % self.parts == 0 else 0
        counts = range(2, min(rows, 2 * MORE_CHUNKS[-1]) + 1)
        even = [n for n in counts if rows % n == 0]
        beyond = {n: Parts(rows, n).beyond for n in counts if self.uneven and self.parts == 1}
        uneven = [n for n, b in beyond.items() if 0 < b < min(Parts(rows, n).size, MOST_BEYOND * rows)]
        more = (n for n in MORE_CHUNKS if self.inner_nbytes >= n * LEAST_CHUNK_NBYTES)
        found = set[int]()
        for about in (*CHUNKS, *more):
            nearest = min(even, key=lambda n: abs(n - about), default=None)
            found.update([] if nearest is None else [nearest])
            if nearest is None or not about / FAR <= nearest <= about * FAR:
                found.update(
                    sorted((n for n in uneven if about / FAR <= n <= about * FAR), key=beyond.__getitem__)[:1]
                )
        return tuple(sorted(found))

    def fewer_nbytes(self, chunks: int) -> int:
        """Return the most bytes that this number of chunks may save."""
        return self.inner_nbytes - self.inner_nbytes // chunks

    def more_seconds(self, chunks: int, device: DeviceSpec) -> float:
        """Return the extra time of this number of chunks: each reads and writes the sums, reads whole values again, has
        devices send them again and launches its kernels, and loops repeat some of these.
        """
        nbytes = (3 * chunks - 1) * self.sum_nbytes + (chunks - 1) * self.read_nbytes
        again = self.kernels * device.launch_seconds + self.sent_nbytes / device.link
        repeated = math.fsum(alone_seconds(device, eqn) for eqn in self.repeated if is_fusion_root(eqn))
        repeated += chunks * math.fsum(share * alone_seconds(device, eqn) for eqn, share in self.halos)
        return self.trips * (nbytes / device.bandwidth + (chunks - 1) * again + repeated)

    def named(self, index: Mapping[int, int]) -> "Region":
        """Return the same region with other indices of its equations."""
        loops = ({index[i]: rule for i, rule in loop.items()} for loop in self.loops)
        return replace(self, loops=tuple(loops))
