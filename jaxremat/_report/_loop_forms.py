"""Lengths by level of a step's loops, chunks of its rows -> the form of each, as text.

Also: values that a plan saves in fewer bits -> their number and the saved bytes, as text.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .._model._loop_levels import nested
from .._model._variant import INSIDE, LOOP, REVERSED, ROWS, Variant
from .._runtime._bytes import format_nbytes


@dataclass(frozen=True, slots=True)
class LoopForm:
    """The form in which a plan runs a scan and its backward scan, a region of rows, or attention, if it differs from
    the plain step's.

    **Fields:**

    - `length`: iterations, or rows (a divisor of their number that any number of chunks must divide); 0 for blocks.
    - `levels`: as in `Plan.form`; empty for rows that stay together.
    - `source`: the user's line.
    - `rows`: whether this is a region of rows, not a loop of the user's. `whole`: whether the region is most of the
      step, in microbatches; `repeats`: whether some of it therefore runs twice; `windowed`: whether it runs on parts of
      an image's rows instead of microbatches.
    - `inner`: whether it is an inlined loop inside another loop, which the backward pass recomputes; for microbatches,
      whether they are inside a loop of the user's; for rows, whether they are those of each microbatch.
    - `attention`: whether this is attention, `length` times at that line; `kernels`: whether it runs in kernels;
      `gradient`: whether its gradient does (True in plans of earlier versions, which lack the field).
    - `undone`: whether the backward pass computes the values of this loop, or of these blocks, from its results.
    """

    length: int
    levels: tuple[int, ...]
    source: str
    rows: bool = False
    whole: bool = False
    inner: bool = False
    attention: bool = False
    kernels: bool = False
    gradient: bool = True
    undone: bool = False
    repeats: bool = False
    windowed: bool = False

    def __str__(self) -> str:
        if self.whole:
            twice = "; values that are compared across the batch are computed twice" if self.repeats else ""
            into = (
                "parts of an image's rows, each with the rows around it,"
                if self.windowed
                else "microbatches,"
            )
            parts_of = f"in {self.levels[0]} {into} with accumulated gradients"
            return f"{'an iteration' if self.inner else 'the step'}: {parts_of}{twice}"
        where = f" at {self.source}" if self.source else ""
        if self.attention:
            how = "in kernels" if self.kernels else "in parts"
            back = ", and in parts in the backward pass" if self.kernels and not self.gradient else ""
            return f"attention{where}{_times(self.length)}: without its matrix of scores, {how}{back}"
        if self.rows:
            if not self.levels:
                return f"rows{where}: not in chunks, because they are on several devices"
            each = ", in each microbatch" if self.inner else ""
            return (
                f"rows{where}{each}, with the operations that make and read them: in {self.levels[0]} chunks"
            )
        if self.undone and not self.length:
            return f"blocks{where}: undone in the backward pass, from the last block's output"
        loop = f"loop of {self.length} iterations{where}"
        if self.inner:
            return f"inner {loop}: recomputed in the backward pass, and inlined"
        if self.undone:
            return f"{loop}: undone in the backward pass, from its last carry"
        if nested(self.levels):
            rest = self.length - math.prod(self.levels)
            after = f", and {rest} after them" if rest else ""
            return f"{loop}: {len(self.levels)} levels, {' x '.join(map(str, self.levels))}{after}"
        return f"{loop}: updates its stacked parameters in the backward pass"


def _times(count: int) -> str:
    return f", {count} times" if count > 1 else ""


def loop_forms(
    lengths: Sequence[int],
    form: Variant,
    sources: Sequence[str],
    rows: Sequence[tuple[int, str, bool, bool, bool, bool]] = (),
    rows_inside: Sequence[tuple[int, str, bool, bool, bool, bool]] = (),
    inner: Sequence[tuple[int, str]] = (),
    attention: Sequence[tuple[str, bool, bool]] = (),
    chain: str = "",
    devices: int = 1,
) -> tuple[LoopForm, ...]:
    """Return the forms of changed loops, and of rows that are in chunks or would be on one device.

    **Arguments:** `rows` of each region that may be in chunks, with the user's line, whether it is most of the step,
    whether some of it then runs twice, whether it is inside a loop, and whether chunks read rows around their own;
    `rows_inside` the same for the program in microbatches; `inner` the lengths of inlined inner loops, and the user's
    lines; `attention` the user's line of each attention without its matrix of scores, whether it runs in kernels, and
    whether its gradient does; `chain` the user's line of the first undone block; `devices` the number of devices among
    which the compiler divides the step.
    """
    levels, chunks, undone = form.settings(LOOP), form.settings(ROWS), form.settings(REVERSED)
    inside, none = form.settings(INSIDE), tuple[int, ...]()
    loops = [
        LoopForm(length, levels[i], source)
        for i, (length, source) in enumerate(zip(lengths, sources, strict=True))
        if i in levels
    ]
    regions = [
        LoopForm(
            length,
            chunks.get(i, none),
            source,
            rows=True,
            whole=whole,
            repeats=repeats,
            inner=whole and inside,
            windowed=windowed,
        )
        for i, (length, source, whole, repeats, inside, windowed) in enumerate(rows)
        if i in chunks or (not whole and devices > 1)
    ]
    regions += [
        LoopForm(length, inside[i], source, rows=True, repeats=repeats, inner=in_loop)
        for i, (length, source, _, repeats, in_loop, _) in enumerate(rows_inside)
        if i in inside
    ]
    attending = [
        LoopForm(count, (), source, attention=True, kernels=kernels, gradient=gradient)
        for (source, kernels, gradient), count in Counter(attention).items()
    ]
    return (
        *loops,
        *(LoopForm(lengths[site - 1], (), sources[site - 1], undone=True) for site in sorted(undone) if site),
        *(LoopForm(0, (), chain, undone=True) for site in undone if not site),
        *attending,
        *(LoopForm(length, (), source, inner=True) for length, source in inner),
        *regions,
    )


@dataclass(frozen=True, slots=True)
class Copied:
    """The values that are saved only as a copy in fewer bits, by kind.

    **Fields:** `kind` of the copies, `"bfloat16"`, ..., or `"bits"` for masks; `count` of values; `whole_nbytes`, their
    full size; `nbytes`, the size of their copies; `exact`, whether the copies restore the values without rounding.
    """

    kind: str
    count: int
    whole_nbytes: int
    nbytes: int
    exact: bool

    def __str__(self) -> str:
        values = f"{self.count} values" if self.count > 1 else "1 value"
        nbytes = f"{format_nbytes(self.whole_nbytes)} -> {format_nbytes(self.nbytes)}"
        rounded = "" if self.exact else "; gradients are rounded"
        return f"kept as {self.kind}: {values}, {nbytes}{rounded}"
