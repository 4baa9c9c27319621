"""Sites of a step, and the setting of each: the `Variant` of a step that is planned.

A site is a part of the step that a rule may change: a pair of loops, a region of rows, the values that may have copies.
Invariant: equal variants compare and hash equal, and a variant names no unchanged site.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

LOOP, ROWS, COPIES, INNER, ATTENTION, REVERSED = "loop", "rows", "copies", "inner", "attention", "reversed"
INSIDE = "inside"
"""Names of the rules, with the settings that each gives to its sites:

- `LOOP`, a pair of loops: its lengths by level (see `_loop_levels`);
- `ROWS`, a region of rows: the number of chunks;
- `INSIDE`, a region of rows in a program with most of the step in microbatches: the number of chunks;
- `COPIES`, all values together: the codes of the encodings that they may be kept in;
- `INNER`, all pairs of loops inside of pairs: 1, they are inlined;
- `ATTENTION`, all attention together: 1 in parts, 2 in kernels;
- `REVERSED`, a pair of loops (numbered from 1) or the blocks outside of loops (0): 1, the backward pass computes its
  values from its results.
"""

_UNNAMED = "site"


class Choice(NamedTuple):
    """One changed site. **Fields:** `rule`; `site` its number among the rule's sites; `setting`."""

    rule: str
    site: int
    setting: tuple[int, ...]


class Estimate(NamedTuple):
    """The estimated worth of a choice or a variant, compared with the step as written if loops save only carries.

    **Fields:** `fewer_nbytes` in memory at once; `more_seconds` of recomputation, copies and launches; `whole` whether
    it changes most of the step, the loops in it included; `divided` pairs (value of the plain graph, the number of
    parts of which one at a time is in memory, or 0 if none ever is), () if not known; `sum_nbytes` of the sums over its
    parts.
    """

    fewer_nbytes: int = 0
    more_seconds: float = 0.0
    whole: bool = False
    divided: tuple[tuple[int, int], ...] = ()
    sum_nbytes: int = 0

    def plus(self, other: "Estimate") -> "Estimate":
        """Return the estimate of both together."""
        return Estimate(
            self.fewer_nbytes + other.fewer_nbytes,
            self.more_seconds + other.more_seconds,
            self.whole or other.whole,
            self.divided + other.divided,
            self.sum_nbytes + other.sum_nbytes,
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """**Fields:** `choices` of the changed sites, in order."""

    choices: tuple[Choice, ...] = ()

    @classmethod
    def of(cls, *choices: Choice) -> Self:
        """Return the variant with these choices; later ones replace earlier ones for the same site. A reversed pair of
        loops has no levels.
        """
        found = {choice[:2]: choice for choice in choices}
        for pair in [site - 1 for rule, site in found if rule == REVERSED]:
            found.pop((LOOP, pair), None)
        return cls(tuple(found[site] for site in sorted(found) if found[site].setting))

    @classmethod
    def of_rule(cls, rule: str, settings: Mapping[int, tuple[int, ...]]) -> Self:
        """Return the variant with these settings of one rule, by site."""
        return cls.of(*(Choice(rule, site, setting) for site, setting in settings.items()))

    @classmethod
    def unnamed(cls, settings: tuple[tuple[int, ...], ...]) -> Self:
        """Return a variant of which only the settings of all sites are known, in a row, as in plans of format 2."""
        return cls.of_rule(_UNNAMED, dict(enumerate(settings)))

    @property
    def is_named(self) -> bool:
        """Whether the rules of all choices are known, see `unnamed`."""
        return all(choice.rule != _UNNAMED for choice in self.choices)

    def named(self, loops: int, regions: int) -> Self:
        """Return the variant with the rules of unnamed choices, in a step with so many pairs of loops and regions of
        rows.
        """
        starts = ((COPIES, loops + regions), (ROWS, loops), (LOOP, 0))

        def one(choice: Choice) -> Choice:
            if choice.rule != _UNNAMED:
                return choice
            rule, start = next(each for each in starts if each[1] <= choice.site)
            return Choice(rule, choice.site - start, choice.setting)

        return type(self).of(*map(one, self.choices))

    def settings(self, rule: str) -> dict[int, tuple[int, ...]]:
        """Return the settings of one rule, by site."""
        return {choice.site: choice.setting for choice in self.choices if choice.rule == rule}

    def also(self, *choices: Choice) -> Self:
        """Return the variant with these choices added, or replaced for the same site."""
        return type(self).of(*self.choices, *choices)

    def overlaps(self, other: "Variant") -> bool:
        """Return whether both variants change a common site, even to different settings."""
        return not {choice[:2] for choice in self.choices}.isdisjoint(choice[:2] for choice in other.choices)

    def __bool__(self) -> bool:
        return bool(self.choices)

    def __str__(self) -> str:
        said = (f"{rule} {site}: {' x '.join(map(str, setting))}" for rule, site, setting in self.choices)
        return ", ".join(said) or "as written"


PLAIN = Variant()
"""The step as it is written."""
