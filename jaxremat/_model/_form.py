"""Sites of a step, and how each is done: the `Form` that a step takes.

A site is what may be done otherwise than it is written: a pair of loops, a region of rows, the values that may have
copies. Law: equal forms are equal and hash alike, and a form names no site that is as it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

Setting = tuple[int, ...]
"""How a site is done: numbers that its kind gives a meaning to, none as it was."""

LOOP, ROWS, COPIES, INNER, ATTENTION, REVERSED = "loop", "rows", "copies", "inner", "attention", "reversed"
"""Kinds of sites. Of a pair of loops the setting is its lengths by level and those of its parts (see `_loop_levels`),
of a region of rows how many chunks it is done in, of values the codes of the ways to keep them in fewer bits, of the
pairs inside of pairs, which are one site, a one: they are inlined; of attention, which is one site too, a one where
it is done in parts, a two in kernels; of what can be undone, which is site 0 outside of loops and else one more than
the number of the pair of loops, a one where the way back computes it from what comes out of it.
"""

_UNNAMED = "site"


class Choice(NamedTuple):
    """One site that is done otherwise. **Fields:** its `kind`; `site` its number among those of its kind; `setting`."""

    kind: str
    site: int
    setting: Setting


class Worth(NamedTuple):
    """What a choice is worth, compared with the site as it is, where of a loop only carries are saved.

    **Fields:** `fewer_nbytes` in memory at once; `more_seconds` of what runs again, is copied or launched; `whole`
    whether most of the step is done so, its loops within.
    """

    fewer_nbytes: int
    more_seconds: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """**Fields:** `choices` of the sites that are not as they were, in order."""

    choices: tuple[Choice, ...] = ()

    @classmethod
    def of(cls, *choices: Choice) -> Self:
        """The form with these choices, the later ones in place of earlier ones for the same site. A pair of loops that
        is undone is in no levels.
        """
        found = {choice[:2]: choice for choice in choices}
        for pair in [site - 1 for kind, site in found if kind == REVERSED]:
            found.pop((LOOP, pair), None)
        return cls(tuple(found[site] for site in sorted(found) if found[site].setting))

    @classmethod
    def of_kind(cls, kind: str, settings: Mapping[int, Setting]) -> Self:
        """The form with these settings by site, of one kind."""
        return cls.of(*(Choice(kind, site, setting) for site, setting in settings.items()))

    @classmethod
    def unnamed(cls, settings: tuple[Setting, ...]) -> Self:
        """One of which only the settings of all sites are known, in a row, as plans were written once."""
        return cls.of_kind(_UNNAMED, dict(enumerate(settings)))

    def named(self, loops: int, regions: int) -> Self:
        """The same, where it is such a one, of a step with so many pairs of loops and regions of rows."""
        starts = ((COPIES, loops + regions), (ROWS, loops), (LOOP, 0))

        def one(choice: Choice) -> Choice:
            if choice.kind != _UNNAMED:
                return choice
            kind, start = next(each for each in starts if each[1] <= choice.site)
            return Choice(kind, choice.site - start, choice.setting)

        return type(self).of(*map(one, self.choices))

    def settings(self, kind: str) -> dict[int, Setting]:
        """Of the sites of this kind that are not as they were."""
        return {choice.site: choice.setting for choice in self.choices if choice.kind == kind}

    def also(self, *choices: Choice) -> Self:
        """The same with these choices as well, or instead for the same site."""
        return type(self).of(*self.choices, *choices)

    def __bool__(self) -> bool:
        return bool(self.choices)

    def __str__(self) -> str:
        said = (f"{kind} {site}: {' x '.join(map(str, setting))}" for kind, site, setting in self.choices)
        return ", ".join(said) or "as written"


PLAIN = Form()
"""The step as it is written."""
