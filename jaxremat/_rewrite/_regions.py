"""A region: equations of a program that fall apart into rows alike, and what it is worth in how many chunks.

`_row_regions` finds them, `_row_chunks` does their work chunk after chunk.
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
"""Of the numbers of chunks that divide the rows the nearest to these are considered, ..."""

MORE_CHUNKS = (32, 64, 128)
"""... and to these where a chunk keeps `LEAST_CHUNK_NBYTES` to itself then: by hand examples are often done one by one.
"""

LEAST_CHUNK_NBYTES = 1 << 20

FAR = 1.5
"""Where the nearest is farther off than by this factor, one that does not divide the rows is considered besides, ..."""

MOST_BEYOND = 1 / 8
"""... if the last of its chunks has no more than this share of all rows behind them."""


@dataclass(frozen=True)
class Region:
    """Equations of a program that fall apart into rows alike.

    **Fields:** the `loops` over chunks that do them, in order; `rows` that any number of chunks must divide;
    `inner_nbytes` of what it neither reads nor leaves; `left_nbytes` of the rows that it leaves; `sum_nbytes` of its
    sums; `read_nbytes` of what each chunk reads whole; `kernels` about how many it takes; `source` the user's line;
    `whole` whether it is most of a step, see `_microbatches`; `parts` in how many pieces its rows lie, each on devices
    of its own, 0 where they may not be done in chunks there: a chunk has rows of every part; `sent_nbytes` of what
    these devices send each other for each chunk; `repeated` the equations that loops do once more; `loop` of the
    program that it is in an iteration of, with the backward loop of a pair, -1 for none, and how many `trips` that has;
    `uneven` whether the last chunk may end behind the rows: not where a loop or a choice adds up sums within, for its
    body would have to make zeros of rows that there are not; `windowed` whether equations read rows around their own,
    see `_halos`, and the `halos` of equations: how much of all rows each chunk does besides its own.
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
    parts: int = 1
    sent_nbytes: int = 0
    repeated: tuple[Any, ...] = ()
    loop: int = -1
    trips: int = 1
    uneven: bool = False
    windowed: bool = False
    halos: tuple[tuple[Any, float], ...] = ()

    @cached_property
    def rules(self) -> Loop:
        """The ways of all its equations, by index."""
        return {i: rule for loop in self.loops for i, rule in loop.items()}

    def on_devices(self, parts: int, share: float) -> "Region":
        """Return the same of rows that lie in so many parts: they add up their sums, and gather what they read whole.

        **Arguments:** `share` of what is the same for all rows that a device has.
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
        """Numbers of chunks, in ascending order."""
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
        """Return what so many chunks may save at most."""
        return self.inner_nbytes - self.inner_nbytes // chunks

    def more_seconds(self, chunks: int, device: DeviceSpec) -> float:
        """Return what so many chunks take longer: sums are read and written for each, what is read whole is read
        again, devices send it again, kernels are launched, and loops repeat some of them.
        """
        nbytes = (3 * chunks - 1) * self.sum_nbytes + (chunks - 1) * self.read_nbytes
        again = self.kernels * device.launch_seconds + self.sent_nbytes / device.link
        repeated = math.fsum(alone_seconds(device, eqn) for eqn in self.repeated if is_fusion_root(eqn))
        repeated += chunks * math.fsum(share * alone_seconds(device, eqn) for eqn, share in self.halos)
        return self.trips * (nbytes / device.bandwidth + (chunks - 1) * again + repeated)

    def named(self, index: Mapping[int, int]) -> "Region":
        """Return the same by other indices of its equations."""
        loops = ({index[i]: rule for i, rule in loop.items()} for loop in self.loops)
        return replace(self, loops=tuple(loops))
