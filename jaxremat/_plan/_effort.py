"""Equations of a step -> how many compilations and solves its planning takes.

A user waits for planning as for compiling, so that small steps have more compilations than large ones, and all have
more while no plan fits. Laws: work is counted, not timed, so that a warm cache or a busy machine changes no plan; a
clock ends the search only where the user gave `planning_seconds`, and the plan says so; what is begun is not stopped.
"""

import math
from dataclasses import dataclass, field

from .._runtime._progress import Stopwatch

COMPILATIONS = 2
MORE_COMPILATIONS = 6
EQUATIONS = 6000
"""A search compiles 2 plans, and one more for each time that its step goes into 6,000 equations, but at most 8: a
thousand equations take XLA 2 to 5 s, so that all take three compilations of the plain step and 15 s, or less."""

WHILE_NOTHING_FITS = 2
"""So many times as many while no plan fits."""

SOLVES = 10
"""For each of these compilations: two for each form of the step that a round compares."""

FIRST_SOLVES, FIRST_SHARE, LATER_SHARE = 12, 1 / 3, 1 / 10
"""The first solves get this share of the time limit, the others that: with many forms each is worth less."""

LEAST_SOLVE_SECONDS = 1.0
"""What a solve gets when the user's time is up."""


@dataclass
class Effort:
    """The work of a search.

    **Fields:** `stopwatch` since planning began; `equations` of the step; `planning_seconds` that the user gave;
    `limited` whether work is; `turns` in which plans are looked for, which have as much work each and share the user's
    seconds; `turn` the present one, from 1 on; `unfused_builds` whether what is compiled in search is compiled anew to
    run; `fits` whether there is a program that does anyway; `compile_seconds` of the last plan, at first of the plain
    step; `compilations` of plans and `solves` so far; `exhausted` whether a limit on work has ended the search.
    """

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    equations: int = 0
    planning_seconds: float = math.inf
    limited: bool = True
    turns: int = 1
    turn: int = 1
    unfused_builds: bool = False
    fits: bool = False
    compile_seconds: float = 0.0
    compilations: int = 0
    solves: int = 0
    exhausted: bool = False

    def most(self, fits: bool) -> int:
        """Return how many compilations one turn may take."""
        most = COMPILATIONS + min(MORE_COMPILATIONS, EQUATIONS // max(self.equations, 1))
        return most if fits or self.fits else WHILE_NOTHING_FITS * most

    @property
    def left_seconds(self) -> float:
        """The user's, in this turn."""
        finishing = self.compile_seconds if self.unfused_builds else 0.0
        return self.turn * self.planning_seconds / self.turns - self.stopwatch.seconds - finishing

    def allows(self, fits: bool) -> bool:
        """Return whether one more plan may be compiled, once something fits or while nothing does."""
        if self.left_seconds < self.compile_seconds:
            self.stopwatch.interrupted = True
            return False
        most = self.turn * self.most(fits)
        allowed = not self.limited or (self.compilations < most and self.solves < SOLVES * most)
        self.exhausted |= not allowed
        return allowed

    def compiled(self, seconds: float) -> None:
        """Count a plan that was compiled."""
        self.compilations += 1
        self.compile_seconds = seconds

    def solving(self, time_limit: float) -> float:
        """Count a solve, and return the seconds for it, of those that the user allows at most."""
        self.solves += 1
        if self.limited:
            time_limit *= FIRST_SHARE if self.solves <= FIRST_SOLVES else LATER_SHARE
        left = max(self.left_seconds, LEAST_SOLVE_SECONDS)
        self.stopwatch.interrupted |= time_limit > left
        return min(time_limit, left)

    def __str__(self) -> str:
        return f"{self.compilations} plans compiled and {self.solves} solves"
