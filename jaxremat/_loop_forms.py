"""Lengths by level of a step's loops -> what became of each, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from ._graph import Segments
from ._levels import parts


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
        levels, behind = parts(self.length, self.levels)
        if len(levels) > 1:
            rest = f", and {sum(behind)} behind them" if behind else ""
            return f"{loop}: {len(levels)} levels, {' x '.join(map(str, levels))}{rest}"
        if behind:
            *first, last = map(str, (*levels, *behind))
            return f"{loop}: divided into {', '.join(first)} and {last}, each with a plan of its own"
        return f"{loop}: makes the updates of what it stacks"


def loop_forms(lengths: Sequence[int], segments: Segments, sources: Sequence[str]) -> tuple[LoopForm, ...]:
    """Of the loops that are not left as they are."""
    forms = (LoopForm(*each) for each in zip(lengths, segments, sources, strict=True))
    return tuple(form for form in forms if form.levels)
