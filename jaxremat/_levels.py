"""Length of a loop -> lengths of nested loops in its place; graph -> deeper and deeper forms that its loops may take.

A pair of loops of `L` iterations in `d` levels, of lengths `S1 ... Sd` and with the rest `r = L - S1 * ... * Sd` behind
them, has at most

    max(S1 + r, S1 + ... + Sd)

carries in memory at once, for `d - 1` more runs of its forward pass: about `d * L ** (1 / d)`, which `d = log L` makes
`O(log L)`. A rest is run no more than once, and costs nothing until it has as many iterations as all the inner levels.

A loop in levels absorbs the updates of what it stacks (see `_absorb`): one of a single level does nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from math import prod

from ._graph import Graph, Segments

WORTH = 0.95
"""One more level must leave no more than this share of the carries."""

REST = 1.1
"""A rest is a pair of loops more to compile: it must save this much of the carries."""

SPREAD = 2.5
"""Levels are at most this much longer or shorter than if all were equally long."""

WORTH_SHARE = 0.005
"""A deeper form must save this share of what the loops stack in the plain form where all is recomputed."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of the step, compared with its loops as they are, where only carries are saved.

    **Fields:** `segments` for each pair of loops its lengths by level, empty for one; `fewer_nbytes` of carries in
    memory at once; `more_seconds` for the forward passes that are run again.
    """

    segments: Segments
    fewer_nbytes: int
    more_seconds: float


def deep(form: Form) -> bool:
    """Whether any of its loops is in more than one level."""
    return any(len(levels) > 1 for levels in form.segments)


def carries(length: int, levels: Sequence[int]) -> int:
    """How many carries are in memory at once."""
    if not levels:
        return length
    rest = length - prod(levels)
    return max(levels[0] + rest, sum(levels))


@cache
def choices(length: int) -> tuple[tuple[int, ...], ...]:
    """Lengths by level for a loop: as it is, and then of one level more each, as long as that saves carries."""
    found: list[tuple[int, ...]] = [()]
    for depth in range(2, length.bit_length()):
        best = min(
            _candidates(length, depth),
            key=lambda levels: (carries(length, levels) * (REST if prod(levels) < length else 1), levels),
            default=(),
        )
        if not best or carries(length, best) > WORTH * carries(length, found[-1]):
            break
        found.append(best)
    return tuple(found)


def _candidates(length: int, depth: int) -> list[tuple[int, ...]]:
    root = length ** (1 / depth)
    near = range(max(2, int(root / SPREAD)), int(root * SPREAD) + 2)
    inner = (levels[::-1] for levels in combinations_with_replacement(near, depth - 1))
    found = ((length // prod(levels), *levels) for levels in inner)
    # A rest of one iteration would be left unplanned: what makes a loop's values plannable is that there are several.
    return [levels for levels in found if levels[0] > 1 and length - prod(levels) != 1]


def forms(
    graph: Graph,
    forward: Sequence[int],
    lengths: Sequence[int],
    absorbing: Sequence[tuple[int, float]] = (),
) -> tuple[Form, ...]:
    """Deeper and deeper forms, the first in one level; each cuts the pair further where that saves most bytes for its
    time.

    **Arguments:** `graph` of the plain form; `forward` for each pair the id of its forward loop, and `lengths`;
    `absorbing` what its one level saves and the seconds that it takes, 0 bytes if it has none.
    """
    nbytes, seconds = [0] * len(forward), [0.0] * len(forward)
    place = {loop: i for i, loop in enumerate(forward)}
    for node in graph.nodes:
        if (i := place.get(node.loop)) is not None:
            seconds[i] += node.seconds
            if node.primitive == "scan_carry":
                nbytes[i] += sum(graph.values[v].nbytes for v in node.outputs)
    kept = [[carries(length, levels) for levels in choices(length)] for length in lengths]
    worth = WORTH_SHARE * sum(length * size for length, size in zip(lengths, nbytes, strict=True))
    depth = [0] * len(forward)
    absorbing = absorbing or [(0, 0.0)] * len(forward)
    found: list[Form] = []

    def add() -> None:
        levels = [choices(length)[d] for length, d in zip(lengths, depth, strict=True)]
        fewer = sum((of[0] - of[d]) * size for of, d, size in zip(kept, depth, nbytes, strict=True))
        more = again_seconds(lengths, tuple(levels), seconds)
        for i, (less_nbytes, more_seconds) in enumerate(absorbing):
            if not levels[i] and less_nbytes > worth:
                levels[i] = (lengths[i],)
            if levels[i]:
                fewer += less_nbytes
                more += more_seconds
        if any(levels):
            found.append(Form(tuple(levels), fewer, more))

    add()
    while True:
        saving = {
            i: (kept[i][d] - kept[i][d + 1]) * nbytes[i] for i, d in enumerate(depth) if d + 1 < len(kept[i])
        }
        saving = {i: saved for i, saved in saving.items() if saved > worth}
        if not saving:
            return tuple(found)
        depth[max(saving, key=lambda i: saving[i] / (seconds[i] or 1e-12))] += 1
        add()


def again_seconds(lengths: Sequence[int], segments: Segments, forward_seconds: Sequence[float]) -> float:
    """What a form spends on running forward passes again, of loops whose forward pass takes so long."""
    return sum(
        (len(levels) - 1) * prod(levels) / length * taken
        for length, levels, taken in zip(lengths, segments, forward_seconds, strict=True)
        if levels
    )
