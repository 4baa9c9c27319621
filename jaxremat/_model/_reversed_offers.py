"""What the way back can compute from what comes out of it -> what that offers to a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._form import REVERSED, Choice, Setting, Worth


@dataclass(frozen=True)
class ReversedOffers:
    """**Fields:** `worths` by site, numbered as in a `Form`, of going back without what was kept for it."""

    worths: Mapping[int, Worth]
    kind: ClassVar[str] = REVERSED
    exact: ClassVar[bool] = False

    def rungs(self) -> Sequence[tuple[Choice, ...]]:
        """All sites."""
        return [tuple(Choice(REVERSED, site, (1,)) for site in sorted(self.worths))]

    def worth(self, site: int, setting: Setting) -> Worth:
        """That of one."""
        return self.worths[site]
