"""Values that may be kept in fewer bits -> what that offers to a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._form import COPIES, Choice, Setting, Worth


@dataclass(frozen=True)
class CopyOffers:
    """**Fields:** `codes` of the encodings that are allowed; `fewer_nbytes` that all values' copies take less."""

    codes: tuple[int, ...]
    fewer_nbytes: int
    kind: ClassVar[str] = COPIES
    exact: ClassVar[bool] = False

    def rungs(self) -> Sequence[tuple[Choice, ...]]:
        """Copies of all values that may have one."""
        return [(Choice(COPIES, 0, self.codes),)]

    def worth(self, site: int, setting: Setting) -> Worth:
        """Encoding and decoding are operations like others, whose time the graph has."""
        return Worth(self.fewer_nbytes, 0.0)
