"""Seconds that planning may take, seconds that compiling takes -> when to stop looking for something better.

A user waits for planning as for compiling, so it takes as long as a few compilations of the plain step and some seconds
more: less where there is a plan already that fits, more while there is none. Law: nothing is begun that is not
expected to end by then, but for a first plan; what is begun is not stopped, and what was found by then is the answer.
"""

import math
from dataclasses import dataclass, field

from .._runtime._progress import Stopwatch

BETTER = (3.0, 15.0)
"""A better plan is looked for until so many compilations of the plain step, and so many seconds, have passed,"""

ANY = (6.0, 30.0)
"""and one that fits at all until these have."""

DRAFT_SHARE = 0.7
"""What compiling a draft takes of the seconds of compiling what will run: 0.5 to 1, more the more kernels."""

SOLVES = 4
"""A solver gets at most this part of what is left."""

LEAST_SOLVE_SECONDS = 1.0


@dataclass
class Deadline:
    """When to stop.

    **Fields:** `stopwatch` since planning began; `limit` in seconds that the user gave, None for what the compiler's
    own time makes of it, infinity for none; `turns` in which plans are looked for, which share what the user gave, or
    may take so much each; `turn` the present one, from 1 on; `drafts` whether what is compiled in search is compiled
    once more to run; `fits` whether there is a program that does anyway; `plain_seconds` and `trial_seconds` that
    compiling the plain step and the last trial took, as drafts; `cut_short` whether it has ended the search.
    """

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    limit: float | None = math.inf
    turns: int = 1
    turn: int = 1
    drafts: bool = False
    fits: bool = False
    plain_seconds: float = 0.0
    trial_seconds: float = 0.0
    cut_short: bool = False

    @property
    def _finishing(self) -> float:
        """To compile what will run."""
        return self.plain_seconds / DRAFT_SHARE if self.drafts else 0.0

    def left(self, fits: bool) -> float:
        """Seconds left for looking, once something fits or while nothing does."""
        compilations, seconds = BETTER if fits or self.fits else ANY
        compiling = self._finishing or self.plain_seconds
        own = compilations * compiling + seconds if self.limit is None else self.limit / self.turns
        return self.turn * own - self.stopwatch.seconds - self._finishing

    def allows(self, fits: bool) -> bool:
        """Whether there is time for one more trial."""
        allowed = self.left(fits) > max(self.trial_seconds, self.plain_seconds)
        self.cut_short = self.cut_short or not allowed
        return allowed

    def tried(self, seconds: float) -> None:
        """A trial was compiled, by itself; the plain step, perhaps at the same time as others, takes no longer."""
        self.trial_seconds = seconds
        self.plain_seconds = min(self.plain_seconds, seconds)

    def solving(self, time_limit: float, fits: bool) -> float:
        """Seconds for one solve, of those that the user allows at most."""
        return min(time_limit, max(self.left(fits) / SOLVES, LEAST_SOLVE_SECONDS))
