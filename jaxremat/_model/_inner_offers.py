"""Pairs of loops inside of pairs -> what laying them open offers to a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._form import INNER, Choice, Setting, Worth


@dataclass(frozen=True)
class InnerOffers:
    """**Fields:** `fewer_nbytes` of what the inner loops need not stack; `more_seconds` that their forward passes take
    once more, where the plain step does not repeat them on the way back itself.
    """

    fewer_nbytes: int
    more_seconds: float
    kind: ClassVar[str] = INNER
    exact: ClassVar[bool] = True

    def rungs(self) -> Sequence[tuple[Choice, ...]]:
        """All of them."""
        return [(Choice(INNER, 0, (1,)),)]

    def worth(self, site: int, setting: Setting) -> Worth:
        """That of all."""
        return Worth(self.fewer_nbytes, self.more_seconds)
