"""Length of a loop -> lengths of nested loops in its place; graph -> its pairs of loops as sites of variants.

A pair of loops of `L` iterations in `d` levels, of lengths `S1 ... Sd` and followed by the remaining `r = L - S1 * ...
* Sd` iterations, has at most

    max(S1 + r, S1 + ... + Sd)

carries in memory at once, for `d - 1` more runs of its forward pass: about `d * L ** (1 / d)`, which `d = log L` makes
`O(log L)`. The remainder runs no more than once, and costs no memory until it has as many iterations as all the inner
levels.

A loop with nested checkpointing absorbs the updates of its stacks (see `_optimizer_in_backward`); a single level, of
all its iterations, does only that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from math import prod
from typing import ClassVar

from .._runtime._mechanisms import mechanism
from ._graph import Graph
from ._variant import LOOP, Choice, Estimate, Variant

WORTH = 0.95
"""One more level must leave no more than this share of the carries."""

REST = 1.1
"""A remainder is one more pair of loops to compile: it must save this much of the carries."""

SPREAD = 2.5
"""Levels are at most this many times longer or shorter than levels of equal length."""

WORTH_SHARE = 0.005
"""A deeper form must save this share of the bytes that loops stack in the plain form if all is recomputed."""


def deep(form: Variant) -> bool:
    """Return whether any loop of a form has more than one level."""
    return any(map(nested, form.settings(LOOP).values()))


def nested(levels: Sequence[int]) -> bool:
    """Return whether a loop of these levels has more than one."""
    return len(levels) > 1


def may_have(length: int, levels: Sequence[int]) -> bool:
    """Return whether a loop may have these levels: one of all its iterations, or several."""
    return tuple(levels) == (length,) or (nested(levels) and min(levels) > 1 and prod(levels) <= length)


def carries(length: int, levels: Sequence[int]) -> int:
    """Return the number of carries in memory at once."""
    return max(levels[0] + length - prod(levels), sum(levels)) if levels else length


@mechanism("loops with nested checkpointing", off=lambda _: ((),))
@cache
def choices(length: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths by level for a loop: unchanged, then one more level each, as long as that saves carries."""
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
    # A remainder of one iteration would be left unplanned: only values of loops of several iterations are planned.
    return [levels for levels in found if levels[0] > 1 and length - prod(levels) != 1]


@dataclass(frozen=True)
class Loops:
    """The pairs of loops of a step that are outside of other loops, as `Sites`: any levels have an estimate.

    **Fields**, each by pair: `lengths`; `choices` of levels, ever deeper; `carried_nbytes` of an iteration;
    `forward_seconds` of all iterations; `absorbing` the bytes saved by absorbing updates and the seconds it takes, 0
    bytes if it saves none.
    """

    lengths: tuple[int, ...]
    choices: tuple[tuple[tuple[int, ...], ...], ...]
    carried_nbytes: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    absorbing: tuple[tuple[int, float], ...]
    rule: ClassVar[str] = LOOP
    exact: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        graph: Graph,
        lengths: Sequence[int],
        cuttable: Sequence[bool] = (),
        absorbing: Sequence[tuple[int, float]] = (),
    ) -> "Loops":
        """Return the pairs in the graph of a step's plain form; `cuttable` says which may be replaced by other loops.

        A loop with nested checkpointing recomputes all values of its iterations: if some must be saved, it has one
        level.
        """
        place = {loop: i for i, loop in enumerate(graph.pairs)}
        nbytes, seconds = [0] * len(place), [0.0] * len(place)
        for node in graph.nodes:
            if (i := place.get(node.loop)) is not None:
                seconds[i] += node.seconds
                if node.primitive == "scan_carry":
                    nbytes[i] += sum(graph.values[v].nbytes for v in node.outputs)
        cuttable = cuttable or [True] * len(place)
        saved = {graph.nodes[graph.values[v].producer].loop for v in graph.pinned["save"]}
        # Pinned values must stay saved, which nested checkpointing does not allow.
        deep = [able and loop not in saved for loop, able in zip(graph.pairs, cuttable, strict=True)]
        return cls(
            lengths=tuple(lengths),
            choices=tuple(
                choices(length) if able else ((),) for length, able in zip(lengths, deep, strict=True)
            ),
            carried_nbytes=tuple(nbytes),
            forward_seconds=tuple(seconds),
            absorbing=tuple(absorbing or [(0, 0.0)] * len(place)),
        )

    def estimate(self, choice: Choice) -> Estimate:
        """Return the carries' bytes that a pair in these levels saves, for the seconds of running its forward pass
        again.
        """
        _, site, setting = choice
        length = self.lengths[site]
        fewer = (length - carries(length, setting)) * self.carried_nbytes[site]
        less_nbytes, more_seconds = self.absorbing[site]
        again = (len(setting) - 1) * prod(setting) / length
        return Estimate(fewer + less_nbytes, again * self.forward_seconds[site] + more_seconds)

    @mechanism("loops with nested checkpointing, absorbed updates", off=lambda _: [])
    def rungs(self) -> Sequence[tuple[Choice, ...]]:
        """Return ever deeper levels of pairs, the first with one level; each deepens the pair that saves most bytes for
        its time.
        """
        both = zip(self.lengths, self.choices, strict=True)
        kept = [[carries(length, levels) for levels in found] for length, found in both]
        sizes = zip(self.lengths, self.carried_nbytes, strict=True)
        worth = WORTH_SHARE * sum(length * nbytes for length, nbytes in sizes)
        depth = [0] * len(self.lengths)
        found: list[tuple[Choice, ...]] = []
        while True:
            levels = [found[d] for found, d in zip(self.choices, depth, strict=True)]
            for i, (less_nbytes, _) in enumerate(self.absorbing):
                if not levels[i] and less_nbytes > worth:
                    levels[i] = (self.lengths[i],)
            if any(levels):
                found.append(tuple(Choice(LOOP, i, own) for i, own in enumerate(levels)))
            saving = {
                i: (kept[i][d] - kept[i][d + 1]) * self.carried_nbytes[i]
                for i, d in enumerate(depth)
                if d + 1 < len(kept[i])
            }
            saving = {i: saved for i, saved in saving.items() if saved > worth}
            if not saving:
                return found
            depth[max(saving, key=lambda i: saving[i] / (self.forward_seconds[i] or 1e-12))] += 1
