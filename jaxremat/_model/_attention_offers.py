"""Attention in a step -> what doing it without its matrix of scores offers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._form import ATTENTION, Choice, Setting, Worth


@dataclass(frozen=True)
class AttentionOffers:
    """**Fields:** `how` as in a `Form`; `fewer_nbytes` of scores, and what is made of them, that are not kept;
    `more_seconds` of what is done once more, less what is not written and read.
    """

    how: int
    fewer_nbytes: int
    more_seconds: float
    kind: ClassVar[str] = ATTENTION
    exact: ClassVar[bool] = True

    def rungs(self) -> Sequence[tuple[Choice, ...]]:
        """All of it."""
        return [(Choice(ATTENTION, 0, (self.how,)),)]

    def worth(self, site: int, setting: Setting) -> Worth:
        """That of all."""
        return Worth(self.fewer_nbytes, self.more_seconds)
