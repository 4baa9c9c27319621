"""Length of a loop -> lengths of nested loops in its place; graph -> deeper and deeper forms that its loops may take.

A pair of loops of `L` iterations in `d` levels, of lengths `S1 ... Sd` and with the rest `r = L - S1 * ... * Sd` behind
them, has at most

    max(S1 + r, S1 + ... + Sd)

carries in memory at once, for `d - 1` more runs of its forward pass: about `d * L ** (1 / d)`, which `d = log L` makes
`O(log L)`. A rest is run no more than once, and costs nothing until it has as many iterations as all the inner levels.

A loop in levels absorbs the updates of what it stacks (see `_update_absorption`): one of a single level does nothing
else, or, if that has fewer than `L` iterations, is divided: it and its rest are two pairs, each with a plan of its
own. The rest may be divided again: negative numbers behind the levels are lengths of more parts.

The last iteration is the first that the backward pass comes to. What others recompute there it has just made, so that
saving it needs no more memory than that; it is a part of its own.

A region of rows (see `_row_chunks`) takes forms too: a number of chunks. It stands behind the pairs; and behind all,
where values have copies in fewer bits, the codes of the ways to do that (see `_encodings`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from math import ceil, prod

from ._graph import Graph, Segments

EXACT = ("microbatches", "rows")
"""Forms besides those of loops that compute the same, but for the order in which sums are added up: all of the step for
a part of the batch after the others, or some of its rows.
"""

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
    memory at once; `more_seconds` for the forward passes that are run again and the rows that are copied; `whole`
    whether most of the step is in chunks, loops within.
    """

    segments: Segments
    fewer_nbytes: int
    more_seconds: float
    whole: bool = False


def deep(form: Form) -> bool:
    """Whether any of its loops is in more than one level."""
    return any(map(nested, form.segments))


def nested(lengths: Sequence[int]) -> bool:
    """Whether a loop of these levels and parts has more than one level."""
    return len(lengths) > 1 and lengths[1] > 0


def parts(length: int, lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths by level of a loop, and those of the parts behind it: what is left is one more."""
    levels = tuple(n for n in lengths if n > 0)
    behind = tuple(-n for n in lengths if n < 0)
    rest = length - prod(levels) - sum(behind)
    return levels, (*behind, rest) if rest else behind


def carries(length: int, lengths: Sequence[int]) -> int:
    """How many carries are in memory at once."""
    if not lengths:
        return length
    levels, behind = parts(length, lengths)
    return max(levels[0] + sum(behind), sum(levels))


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


@dataclass(frozen=True, slots=True)
class Chunking:
    """A number of `chunks` of a region's rows; `fewer_nbytes` and `more_seconds` as in `Form`; `whole` where the region
    is most of the step, and loops are within it.
    """

    chunks: int
    fewer_nbytes: int
    more_seconds: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Copies:
    """Values that may be kept in fewer bits: `codes` of the encodings, and `fewer_nbytes` of all values' copies."""

    codes: tuple[int, ...]
    fewer_nbytes: int


@dataclass(frozen=True)
class Pairs:
    """The pairs of loops of a step, outside of other loops, and its regions of rows.

    **Fields**, each by pair: `lengths`; `choices` of levels, deeper and deeper; `divisible` whether it may be two;
    `carried_nbytes` of an iteration; `forward_seconds` of all; `absorbing` what that saves and the seconds that it
    takes, 0 bytes where it is nothing. By region: `chunkings` that it may have. `copies` that values may have.
    """

    lengths: tuple[int, ...]
    choices: tuple[tuple[tuple[int, ...], ...], ...]
    divisible: tuple[bool, ...]
    carried_nbytes: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    absorbing: tuple[tuple[int, float], ...]
    chunkings: tuple[tuple[Chunking, ...], ...] = ()
    copies: Copies | None = None

    @classmethod
    def of(
        cls,
        graph: Graph,
        lengths: Sequence[int],
        cuttable: Sequence[bool] = (),
        absorbing: Sequence[tuple[int, float]] = (),
        chunkings: Sequence[Sequence[Chunking]] = (),
        copies: Copies | None = None,
    ) -> "Pairs":
        """Those of the graph of a step's plain form; `cuttable` says which may be other loops at all.

        A loop in levels makes all that its iterations make again: where some of it must be saved, it has one level.
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
            chunkings=tuple(map(tuple, chunkings)),
            copies=copies,
        )

    def form(self, segments: Segments) -> Form:
        """The form with these levels and chunks."""
        count = len(self.lengths)
        forms = count + len(self.chunkings)
        segments, chunks, codes = segments[:count], segments[count:forms], segments[forms:]
        kept = map(carries, self.lengths, segments)
        fewer = sum(
            (length - at_once) * nbytes
            for length, at_once, nbytes in zip(self.lengths, kept, self.carried_nbytes, strict=True)
        )
        more = again_seconds(self.lengths, segments, self.forward_seconds)
        for levels, (less_nbytes, more_seconds) in zip(segments, self.absorbing, strict=True):
            if levels:
                fewer += less_nbytes
                more += more_seconds
        whole = False
        if codes and self.copies is not None:
            fewer += self.copies.fewer_nbytes
        for able, chosen in zip(self.chunkings, chunks, strict=True):
            for chunking in able:
                if chosen == (chunking.chunks,):
                    fewer += chunking.fewer_nbytes
                    more += chunking.more_seconds
                    whole |= chunking.whole
        return Form((*segments, *chunks, *codes), fewer, more, whole)

    def copied(self) -> tuple[Form, ...]:
        """The plain form with copies of all values that may have one, and deeper and deeper ones but for microbatches;
        none where no value may.
        """
        if self.copies is None:
            return ()
        plain, codes = ((),) * (len(self.lengths) + len(self.chunkings)), self.copies.codes
        deeper = (form.segments for form in self.deeper() if not form.whole)
        return tuple(self.form((*segments, codes)) for segments in (plain, *deeper))

    def has_copies(self, segments: Segments) -> bool:
        """Whether these are a form's whose values have copies."""
        return len(segments) > len(self.lengths) + len(self.chunkings)

    def deeper(self) -> tuple[Form, ...]:
        """Deeper and deeper forms without copies: those in chunks, the cheapest first, and those of other loops, each
        also with what saves most of those; microbatches behind all that is cheaper.
        """
        uncut = ((),) * len(self.lengths)
        none = ((),) * len(self.chunkings)
        able = [
            self.form((*uncut, *none[:i], (chunking.chunks,), *none[i + 1 :]))
            for i, own in enumerate(self.chunkings)
            for chunking in own
        ]
        able.sort(key=lambda form: form.more_seconds)
        found = _saving(form for form in able if not form.whole)
        chunks = found[-1].segments[len(self.lengths) :] if found else ()
        for levels in self._deeper():
            found.append(self.form((*levels, *none)))
            if chunks:
                found.append(self.form((*levels, *chunks)))
        for form in _saving(form for form in able if form.whole):
            cheaper = [i for i, other in enumerate(found) if other.more_seconds <= form.more_seconds]
            found.insert(max(cheaper, default=-1) + 1, form)
        return tuple(found)

    def _deeper(self) -> list[Segments]:
        """Deeper and deeper levels of pairs, the first in one level; each cuts the pair further where that saves most
        bytes for its time.
        """
        both = zip(self.lengths, self.choices, strict=True)
        kept = [[carries(length, levels) for levels in found] for length, found in both]
        sizes = zip(self.lengths, self.carried_nbytes, strict=True)
        worth = WORTH_SHARE * sum(length * nbytes for length, nbytes in sizes)
        depth = [0] * len(self.lengths)
        found: list[Segments] = []
        while True:
            levels = [found[d] for found, d in zip(self.choices, depth, strict=True)]
            for i, (less_nbytes, _) in enumerate(self.absorbing):
                if not levels[i] and less_nbytes > worth:
                    levels[i] = (self.lengths[i],)
            if any(levels):
                found.append(tuple(levels))
            saving = {
                i: (kept[i][d] - kept[i][d + 1]) * self.carried_nbytes[i]
                for i, d in enumerate(depth)
                if d + 1 < len(kept[i])
            }
            saving = {i: saved for i, saved in saving.items() if saved > worth}
            if not saving:
                return found
            depth[max(saving, key=lambda i: saving[i] / (self.forward_seconds[i] or 1e-12))] += 1

    def whole(self, segments: Segments) -> bool:
        """Whether no pair is in levels or divided."""
        return all(levels in ((), (n,)) for levels, n in zip(segments, self.lengths, strict=False))

    def divided(self, segments: Segments, pair: int, share: float) -> list[Form]:
        """The forms whose pair is several, the first of which has about this share of its iterations: one with the last
        iteration apart, which counts for the share, and one without, where that leaves several; none where it may not
        be.
        """
        if not self.divisible[pair]:
            return []
        length = self.lengths[pair]
        first = max(ceil(share * length), 3)
        # Two parts of one iteration each would be one piece of code for the compiler.
        found = [(first - 1, first - length) if first < length - 1 else (length - 1,)]
        found += [(first,)] if first < length - 1 else []
        return [self.form((*segments[:pair], lengths, *segments[pair + 1 :])) for lengths in found]


def _saving(forms: Iterable[Form]) -> list[Form]:
    """Of forms, the cheapest first, those that save more than all cheaper ones."""
    found: list[Form] = []
    for form in forms:
        if not found or form.fewer_nbytes > found[-1].fewer_nbytes:
            found.append(form)
    return found


def again_seconds(lengths: Sequence[int], segments: Segments, forward_seconds: Sequence[float]) -> float:
    """What a form spends on running forward passes again, of loops whose forward pass takes so long."""
    return sum(
        (len(levels) - 1) * prod(levels) / length * taken
        for length, own, taken in zip(lengths, segments, forward_seconds, strict=True)
        if (levels := parts(length, own)[0])
    )
