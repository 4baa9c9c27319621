"""Values that a plan keeps in fewer bits -> how many, and what that saves, in words."""

from dataclasses import dataclass

from .._runtime._bytes import format_nbytes


@dataclass(frozen=True, slots=True)
class Copied:
    """The saved values of one kind of which only a copy in fewer bits is kept.

    **Fields:** `kind` of the copies, `"bfloat16"`, ..., or `"bits"` for masks; `count` of values; `whole_nbytes`, their
    own size; `nbytes`, the size of their copies; `exact`, whether the copies restore the values without rounding.
    """

    kind: str
    count: int
    whole_nbytes: int
    nbytes: int
    exact: bool

    def __str__(self) -> str:
        values = f"{self.count} values" if self.count > 1 else "1 value"
        nbytes = f"{format_nbytes(self.whole_nbytes)} -> {format_nbytes(self.nbytes)}"
        rounded = "" if self.exact else "; gradients are rounded"
        return f"kept as {self.kind}: {values}, {nbytes}{rounded}"
