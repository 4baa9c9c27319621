"""What a plan for a function that is differentiated later says of itself."""

from dataclasses import dataclass
from typing import ClassVar

from .._report._actions import Action, Actions
from .._runtime._bytes import format_nbytes
from .._runtime._files import Written


@dataclass(frozen=True)
class HeldPlan(Actions, Written):
    """A plan for a function that something else differentiates, in held bytes (see `jaxremat.checkpoint`).

    **Fields:**

    - `budget_nbytes` the bytes allowed, None for "dots", "free" and "min"; `held_nbytes` the most that the plan holds
      at once; `plain_nbytes` what plain JAX keeps from the forward pass to the backward pass.
    - `overhead` extra seconds of the backward pass as a share of the seconds of both passes, by a roofline of the
      device; below zero where less is written to memory and read again.
    - `solver` that found it; `stage_count` in how many steps the backward pass recomputes.
    - `actions` per value that the backward pass needs, largest first.
    """

    FORMAT: ClassVar = ("held_format", 1)

    budget_nbytes: int | None
    held_nbytes: int
    plain_nbytes: int
    overhead: float
    solver: str
    stage_count: int
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        within = "" if self.budget_nbytes is None else f" within {format_nbytes(self.budget_nbytes)}"
        lines = [
            f"Plan: holds {format_nbytes(self.held_nbytes)} (predicted){within}; "
            f"plain JAX keeps {format_nbytes(self.plain_nbytes)}",
            f"  saved {format_nbytes(self.saved_nbytes)} in {sum(a.action == 'save' for a in self.actions)} values, "
            f"overhead {self.overhead:.2%}, {self.stage_count} stages, solver {self.solver}",
        ]
        lines.extend(
            f"    {format_nbytes(a.nbytes):>9}  {a}  {a.name} {a.shape}  {a.source or a.scope}"
            for a in self.actions[:12]
        )
        return "\n".join(lines)
