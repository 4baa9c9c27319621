"""Lengths by level of a step's loops -> what became of each, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ._graph import Segments


@dataclass(frozen=True, slots=True)
class LoopForm:
    """What a plan makes of a scan and of the backward scan that reads what it stacks.

    **Fields:** `length` iterations; `levels` as in `Plan.segments`; `source` the user's line.
    """

    length: int
    levels: tuple[int, ...]
    source: str

    def __str__(self) -> str:
        loop = f"loop of {self.length} iterations" + (f" at {self.source}" if self.source else "")
        rest = self.length - prod(self.levels)
        if len(self.levels) > 1:
            behind = f", and {rest} behind them" if rest else ""
            return f"{loop}: {len(self.levels)} levels, {' x '.join(map(str, self.levels))}{behind}"
        if rest:
            return f"{loop}: divided, the first {prod(self.levels)} have one plan, the other {rest} another"
        return f"{loop}: makes the updates of what it stacks"


def loop_forms(lengths: Sequence[int], segments: Segments, sources: Sequence[str]) -> tuple[LoopForm, ...]:
    """Of the loops that are not left as they are."""
    forms = (LoopForm(*each) for each in zip(lengths, segments, sources, strict=True))
    return tuple(form for form in forms if form.levels)
