"""Numbers of chunks that regions of rows may be done in, priced -> what they offer to a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._form import ROWS, Choice, Setting, Worth
from ._form_offers import saving


@dataclass(frozen=True)
class RowOffers:
    """**Fields:** `worths` for each region, by number of chunks."""

    worths: tuple[dict[int, Worth], ...]
    kind: ClassVar[str] = ROWS
    exact: ClassVar[bool] = True

    def rungs(self) -> Sequence[tuple[Choice, ...]]:
        """One region at a time: the numbers of chunks that save more than all that cost less; those of most of the step
        among themselves.
        """
        able = [
            (Choice(ROWS, site, (chunks,)), worth)
            for site, own in enumerate(self.worths)
            for chunks, worth in own.items()
        ]
        parts = saving(each for each in able if not each[1].whole)
        return [(choice,) for choice in (*parts, *saving(each for each in able if each[1].whole))]

    def worth(self, site: int, setting: Setting) -> Worth:
        """That of such a number of chunks; nothing where it was not priced."""
        (chunks,) = setting
        return self.worths[site].get(chunks, Worth(0, 0.0))
