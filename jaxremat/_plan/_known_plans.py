"""Program -> the plans of it that were made before, in this process or an earlier one: what later ones are held to.

Law: a budget that one of them keeps is not refused, and within it nothing that takes longer is returned; for the least
memory nothing is returned that needs a good deal more than the least of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .._runtime._cache_folder import cache_dir, read, store
from .._runtime._errors import InfeasibleBudgetError
from ._plan import Plan
from ._search import MOST_OVERHEAD

MORE = 0.05
"""A least peak is a good deal more than another from this share on."""

SAVES = 0.005
"""Of two plans within a budget that were made at different times, the newer one stays unless it takes longer by this
share of the step."""


class Known(NamedTuple):
    """A plan by its compiled peak, the share of the step's time that it takes longer, and its file."""

    peak_nbytes: int
    overhead: float
    file: str


@dataclass(frozen=True)
class KnownPlans:
    """**Fields:** `path` of the list of them; `fuses_reductions` whether their compiled programs say what they take."""

    path: Path
    fuses_reductions: bool

    @classmethod
    def of(cls, key: str, fuses_reductions: bool) -> "KnownPlans":
        """Of one program with one set of options, whatever the budget."""
        return cls(cache_dir() / "known" / f"{key}.json", fuses_reductions)

    def add(self, plan: Plan, file: Path) -> None:
        """One more, that is kept in this file."""
        known = [each for each in self.all() if each.file != file.name]
        known.append(Known(plan.peak_nbytes, self.overhead(plan), file.name))
        store(self.path, json.dumps(known))

    def all(self) -> list[Known]:
        """Those that there are; the files may have been removed since."""
        return read(self.path, lambda text: [Known(*each) for each in json.loads(text)]) or []

    def overhead(self, plan: Plan) -> float:
        """What a plan is judged by."""
        return (
            plan.overhead
            if plan.compiled_overhead is None or not self.fuses_reductions
            else plan.compiled_overhead
        )

    def better(self, plan: Plan | None, budget: int | None) -> list[Known]:
        """Those that beat a plan, or none, within a budget, None for the least memory; the best first."""
        if budget is None:
            most = 0 if plan is None else (1 - MORE) * plan.peak_nbytes
            found = [
                each for each in self.all() if each.peak_nbytes < most and each.overhead <= MOST_OVERHEAD
            ]
            return sorted(found)
        most = float("inf") if plan is None else self.overhead(plan) - SAVES
        found = [each for each in self.all() if each.peak_nbytes <= budget and each.overhead < most]
        return sorted(found, key=lambda each: (each.overhead, each.peak_nbytes))

    def corrected(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """A refusal that names no more than the least of them needs."""
        least = min((each.peak_nbytes for each in self.all()), default=error.min_peak_nbytes)
        if least < error.min_peak_nbytes:
            error.min_peak_nbytes = least
            error.args = (f"{error} A plan that was made before needs {least} bytes.",)
        return error
