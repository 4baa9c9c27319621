"""Length of a loop -> lengths of nested loops in its place; graph -> its pairs of loops as sites of variants.

A pair of loops of `L` iterations in `d` levels, of lengths `S1 ... Sd` and with the rest `r = L - S1 * ... * Sd` behind
them, has at most

    max(S1 + r, S1 + ... + Sd)

carries in memory at once, for `d - 1` more runs of its forward pass: about `d * L ** (1 / d)`, which `d = log L` makes
`O(log L)`. A rest is run no more than once, and costs nothing until it has as many iterations as all the inner levels.

A loop with nested checkpointing absorbs the updates of what it stacks (see `_optimizer_in_backward`): one of a single
level does nothing else, or, if that has fewer than `L` iterations, is divided: it and its rest are two pairs, each with
a plan of its own. The rest may be divided again: negative numbers behind the levels are lengths of more parts.

The last iteration is the first that the backward pass comes to. What others recompute there it has just made, so that
saving it needs no more memory than that; it is a part of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from math import ceil, prod
from typing import ClassVar

from .._runtime._mechanisms import mechanism
from ._graph import Graph
from ._variant import LOOP, Choice, Estimate, Variant

WORTH = 0.95
"""One more level must leave no more than this share of the carries."""

REST = 1.1
"""A rest is a pair of loops more to compile: it must save this much of the carries."""

SPREAD = 2.5
"""Levels are at most this much longer or shorter than if all were equally long."""

WORTH_SHARE = 0.005
"""A deeper form must save this share of what the loops stack in the plain form where all is recomputed."""


def deep(form: Variant) -> bool:
    """Return whether any of its loops is in more than one level."""
    return any(map(nested, form.settings(LOOP).values()))


def nested(lengths: Sequence[int]) -> bool:
    """Return whether a loop of these levels and parts has more than one level."""
    return len(lengths) > 1 and lengths[1] > 0


def parts(length: int, lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return lengths by level of a loop, and those of the parts behind it: what is left is one more."""
    levels = tuple(n for n in lengths if n > 0)
    behind = tuple(-n for n in lengths if n < 0)
    rest = length - prod(levels) - sum(behind)
    return levels, (*behind, rest) if rest else behind


def carries(length: int, lengths: Sequence[int]) -> int:
    """Return how many carries are in memory at once."""
    if not lengths:
        return length
    levels, behind = parts(length, lengths)
    return max(levels[0] + sum(behind), sum(levels))


@mechanism("loops with nested checkpointing", off=lambda _: ((),))
@cache
def choices(length: int) -> tuple[tuple[int, ...], ...]:
    """Return lengths by level for a loop: as it is, and then of one level more each, as long as that saves
    carries.
    """
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


@dataclass(frozen=True)
class Loops:
    """The pairs of loops of a step, those outside of other loops, as `Sites`: any levels and parts have an estimate.

    **Fields**, each by pair: `lengths`; `choices` of levels, deeper and deeper; `divisible` whether it may be several;
    `carried_nbytes` of an iteration; `forward_seconds` of all; `absorbing` what that saves and the seconds that it
    takes, 0 bytes where it is nothing.
    """

    lengths: tuple[int, ...]
    choices: tuple[tuple[tuple[int, ...], ...], ...]
    divisible: tuple[bool, ...]
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
        """Return those of the graph of a step's plain form; `cuttable` says which may be other loops at all.

        A loop with nested checkpointing makes all that its iterations make again: where some of it must be saved, it
        has one level.
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
        deep = [able and loop not in saved for loop, able in zip(graph.pairs, cuttable, strict=True)]
        return cls(
            lengths=tuple(lengths),
            choices=tuple(
                choices(length) if able else ((),) for length, able in zip(lengths, deep, strict=True)
            ),
            divisible=tuple(able and length > 3 for length, able in zip(lengths, cuttable, strict=True)),
            carried_nbytes=tuple(nbytes),
            forward_seconds=tuple(seconds),
            absorbing=tuple(absorbing or [(0, 0.0)] * len(place)),
        )

    def estimate(self, choice: Choice) -> Estimate:
        """Return what a pair in these levels and parts saves of carries, for running its forward pass again."""
        _, site, setting = choice
        length = self.lengths[site]
        fewer = (length - carries(length, setting)) * self.carried_nbytes[site]
        less_nbytes, more_seconds = self.absorbing[site]
        levels, _ = parts(length, setting)
        again = (len(levels) - 1) * prod(levels) / length
        return Estimate(fewer + less_nbytes, again * self.forward_seconds[site] + more_seconds)

    @mechanism("loops with nested checkpointing, absorbed updates", off=lambda _: [])
    def rungs(self) -> Sequence[tuple[Choice, ...]]:
        """Return deeper and deeper levels of pairs, the first in one level; each cuts the pair further where that saves
        most bytes for its time.
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

    def unsplit(self, variant: Variant) -> bool:
        """Return whether no pair is with nested checkpointing or in parts."""
        return all(setting == (self.lengths[pair],) for pair, setting in variant.settings(LOOP).items())

    def split(self, pair: int, share: float) -> list[Choice]:
        """Return the pair as several, the first of which has about this share of its iterations: with the last
        iteration apart, which counts for the share, and without, where that leaves several; none where it may not be.
        """
        if not self.divisible[pair]:
            return []
        length = self.lengths[pair]
        first = max(ceil(share * length), 3)
        # Two parts of one iteration each would be one piece of code for the compiler.
        found = [(first - 1, first - length) if first < length - 1 else (length - 1,)]
        found += [(first,)] if first < length - 1 else []
        return [Choice(LOOP, pair, lengths) for lengths in found]
