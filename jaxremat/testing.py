"""Solver -> report: tries a planner on a zoo of small graphs and holds every answer against the rules of `Solver`.

Law: no claim of a solver is trusted. Peaks and seconds are the simulator's, optima are found by trying
every set of saved values.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from ._model import _example_graphs as specimens
from ._model._graph import Graph
from ._model._schedule import check, close_over_dependencies, must_save
from ._model._simulate import Profile, simulate
from ._runtime._bytes import format_nbytes
from ._runtime._errors import SolverRuleError
from ._solver import Solution, Solver

MOST_FREE = 8
"""Residuals that there is a choice about: with no more than these, the optimum is found by brute force."""

TOLERANCE = 1e-6
"""Shares of the step that a lower bound's arithmetic may be off."""

HURRY_SECONDS = 1e-3
"""A time limit in which no search ends."""

_GRAPHS: dict[str, Callable[[], Graph]] = {
    "chain of 6": lambda: specimens.chain(6),
    "more blocks": lambda: specimens.blocks(5, inner=2),
    "chain of unequal seconds": lambda: specimens.chain(5, size=3, seconds=[8.0, 1.0, 4.0, 1.0, 2.0]),
    "chain of unequal sizes": lambda: specimens.uneven(8),
    "blocks": lambda: specimens.blocks(3),
    "diamond": specimens.diamond,
    "skip connections": lambda: specimens.skips(3),
    "two results of one node": specimens.siblings,
    "what may not be repeated": specimens.unrepeatable,
    "loop": lambda: specimens.in_loops(specimens.chain(5, size=2), 4),
    "loop whose stacks take time": lambda: specimens.in_loops(specimens.blocks(2), 3, 0.5),
    "differentiated twice": lambda: specimens.passes(2, 3),
    "no backward pass": specimens.forward_only,
    "what the user has pinned": specimens.pinned,
}


def graphs() -> dict[str, Graph]:
    """Return the zoo: a fresh copy of every graph that `check_solver` tries, by name."""
    return {name: make() for name, make in _GRAPHS.items()}


@dataclass(frozen=True, slots=True)
class SolverRow:
    """A solver's answer for one graph and budget.

    **Fields:** `graph` its name; `budget_nbytes`, None for the least memory; `peak_nbytes` as simulated; `overhead` and
    the solver's `lower_bound` as shares of the step; `best_overhead` that of the cheapest schedule within the budget
    that recomputes each stage independently, infinite where none fits, None where there are too many to try.
    """

    graph: str
    budget_nbytes: int | None
    peak_nbytes: int
    overhead: float
    lower_bound: float
    best_overhead: float | None

    @property
    def fits(self) -> bool:
        """Whether the schedule is within the budget."""
        return self.budget_nbytes is not None and self.peak_nbytes <= self.budget_nbytes

    @property
    def missed(self) -> bool:
        """Whether the schedule exceeds a budget that can be met."""
        possible = self.best_overhead is not None and self.best_overhead < math.inf
        return self.budget_nbytes is not None and not self.fits and possible


@dataclass(frozen=True)
class SolverReport:
    """The result of `check_solver` if no rule is broken. `print` it to see how far the answers are from the best."""

    solver: str
    rows: tuple[SolverRow, ...]

    @property
    def missed(self) -> tuple[SolverRow, ...]:
        """The rows of feasible budgets that the solver missed: that breaks no rule, but costs users memory."""
        return tuple(row for row in self.rows if row.missed)

    def __str__(self) -> str:
        judged = [row for row in self.rows if row.fits and row.best_overhead not in (None, math.inf)]
        excess = [row.overhead - (row.best_overhead or 0.0) for row in judged]
        lines = [
            f"{self.solver}: no rule broken on {len({row.graph for row in self.rows})} graphs with "
            f"{len(self.rows)} budgets; {len(self.missed)} feasible budgets missed; in the others the step "
            f"takes {100 * sum(excess) / (len(excess) or 1):.1f} % longer than with the best schedule on "
            f"average, {100 * max(excess, default=0.0):.1f} % at most",
            f"  {'graph':<28} {'budget':>9} {'peak':>9} {'overhead':>9} {'bound':>8} {'best':>8}",
        ]
        for row in self.rows:
            budget = "least" if row.budget_nbytes is None else format_nbytes(row.budget_nbytes)
            best = {None: "?", math.inf: "none"}.get(row.best_overhead) or f"{row.best_overhead:.1%}"
            lines.append(
                f"  {row.graph:<28} {budget:>9} {format_nbytes(row.peak_nbytes):>9} {row.overhead:>9.1%} "
                f"{row.lower_bound:>8.1%} {best:>8}{'  missed' if row.missed else ''}"
            )
        return "\n".join(lines)


def check_solver(solver: Solver, *, time_limit: float = 10.0) -> SolverReport:
    """Try a solver on every graph of the zoo, with budgets from loose to infeasible.

    **Arguments:** the solver; `time_limit` in seconds for each of its answers.

    **Returns:** a report that compares peaks and overheads with the best possible ones.

    **Raises:** `SolverRuleError`, which names the graph, the budget and the rule, for the first of these broken:

    - *answers*: every graph and budget gets a `Solution`, even if nothing fits or time runs out.
    - *emittable*: stages read only values that are saved, recomputed in them, or kept from the stage before.
    - *budget*: the simulated peak is within the budget if saving everything is, or the solver's own answer to None.
    - *deterministic*: an equal graph and budget get an equal answer.
    - *leaves the graph alone*.
    - *bound*: no schedule that recomputes each stage independently is cheaper than the lower bound.
    - *proven*: if a proven schedule exceeds the budget, nothing fits.

    ```python
    print(jaxremat.testing.check_solver(MySolver()))
    ```
    """
    name = type(solver).__name__
    rows = [row for graph in _GRAPHS for row in _Case(solver, name, graph, time_limit).rows()]
    return SolverReport(name, tuple(rows))


def frontier(graph: Graph, pairs: Sequence[tuple[int, int]] = ()) -> dict[int, float]:
    """Compute by brute force the least extra seconds for each peak that can be reached.

    Over all sets of saved values and, for each, over all sets of those `pairs` (value, stage) that can be kept.
    """
    best: dict[int, float] = {}
    for saved in subsets(_free(graph)):
        for kept in subsets([pair for pair in pairs if pair[0] not in saved]):
            profile = simulate(graph, close_over_dependencies(graph, saved, kept))
            peak = profile.peak_nbytes
            best[peak] = min(best.get(peak, math.inf), profile.extra_seconds)
    return best


def least_seconds(best: dict[int, float], budget_nbytes: int) -> float:
    """Return the optimum of a `frontier` within a budget; infinite where nothing fits."""
    return min((seconds for peak, seconds in best.items() if peak <= budget_nbytes), default=math.inf)


def _free(graph: Graph) -> list[int]:
    fixed = must_save(graph)
    return [v for v in graph.residuals if v not in fixed]


def subsets(items: Sequence[object]) -> Iterator[tuple[Any, ...]]:
    """Return all choices of items, the empty one first."""
    return chain.from_iterable(combinations(items, r) for r in range(len(items) + 1))


class _Case:
    """One solver on one graph."""

    def __init__(self, solver: Solver, name: str, graph: str, time_limit: float):
        self.solver = solver
        self.name = name
        self.graph = graph
        self.time_limit = time_limit
        self.own = _GRAPHS[graph]()  # never shown to the solver
        self.step_seconds = self.own.step_seconds or 1.0
        self.plain_nbytes = simulate(
            self.own, close_over_dependencies(self.own, self.own.residuals)
        ).peak_nbytes
        self.best = frontier(self.own) if len(_free(self.own)) <= MOST_FREE else None

    def rows(self) -> Iterator[SolverRow]:
        least = self.answer(None)[1]
        yield self.judged(None, least)
        for budget in self.budgets():
            yield self.judged(budget, least)

    def budgets(self) -> list[int]:
        """Return budgets from twice the plain step's peak down to infeasible ones, some of them one byte apart."""
        base = self.own.base_nbytes
        room = self.plain_nbytes - base
        found = {2 * self.plain_nbytes, self.plain_nbytes, self.plain_nbytes - 1, base + 1}
        found |= {base + room * quarters // 4 for quarters in (1, 2, 3)}
        if self.best:
            found |= {min(self.best), min(self.best) - 1}
        return sorted((budget for budget in found if budget > 0), reverse=True)

    def judged(self, budget: int | None, least: Profile) -> SolverRow:
        """Return the row of a budget, of which no rule is broken."""
        solution, profile = self.answer(budget)
        again, _ = self.answer(budget)
        if again != solution:
            raise self.broken(
                "deterministic",
                budget,
                "two calls returned different solutions: " + _difference(solution, again),
            )
        self.answer(budget, HURRY_SECONDS)
        overhead = profile.extra_seconds / self.step_seconds
        fits = budget is not None and profile.peak_nbytes <= budget
        if budget is not None and not fits:
            for peak, what in (
                (self.plain_nbytes, "saving everything"),
                (least.peak_nbytes, "what it answers for the least memory (a budget of None)"),
            ):
                if peak <= budget:
                    raise self.broken(
                        "budget",
                        budget,
                        f"its schedule needs {_exactly(profile.peak_nbytes)}, and {what} needs {_exactly(peak)}",
                    )
        optimum = None
        if self.best is not None:
            optimum = (
                least_seconds(self.best, max(self.best) if budget is None else budget) / self.step_seconds
            )
        bound = solution.lower_bound
        above = [(overhead, "its own schedule costs")] if fits and not solution.schedule.kept else []
        above += [(optimum, "the best schedule costs")] if optimum is not None and budget is not None else []
        for share, what in above:
            if bound > share + TOLERANCE:
                raise self.broken(
                    "bound", budget, f"its lower bound is {bound:.4%} of the step, and {what} {share:.4%}"
                )
        if solution.proven and budget is not None and not fits and optimum not in (None, math.inf):
            raise self.broken(
                "proven",
                budget,
                f"it says that nothing fits (its schedule needs {_exactly(profile.peak_nbytes)} and is `proven`), "
                f"but saving the right values does, at {optimum:.4%} of the step",
            )
        return SolverRow(self.graph, budget, profile.peak_nbytes, overhead, bound, optimum)

    def answer(self, budget: int | None, time_limit: float | None = None) -> tuple[Solution, Profile]:
        """Return the solver's answer and its profile, if it can be emitted and the graph is as it was."""
        shown = _GRAPHS[self.graph]()
        before = copy.deepcopy(shown)
        try:
            solution = self.solver.solve(shown, budget, time_limit=time_limit or self.time_limit)
        except Exception as error:
            raise self.broken(
                "answers",
                budget,
                f"`solve` raised {type(error).__name__}: {error}. If nothing fits, or time is short, return the "
                "schedule with the lowest peak that you found",
            ) from error
        if not isinstance(solution, Solution):
            raise self.broken(
                "answers",
                budget,
                f"`solve` returned a {type(solution).__name__}. Return a `jaxremat.Solution`, for example "
                "`Solution(close_over_dependencies(graph, saved))`",
            )
        if _changed(shown, before):
            raise self.broken("leaves the graph alone", budget, "the graph is not what it was before `solve`")
        bound = solution.lower_bound
        if not (isinstance(bound, int | float) and math.isfinite(bound)):
            raise self.broken("bound", budget, f"its lower bound is {bound!r}, which is not finite")
        try:
            return solution, simulate(self.own, check(self.own, solution.schedule))
        except Exception as error:
            raise self.broken("emittable", budget, str(error).rstrip(".")) from error

    def broken(self, rule: str, budget: int | None, what: str) -> SolverRuleError:
        asked = "the least memory" if budget is None else f"a budget of {_exactly(budget)}"
        return SolverRuleError(
            f'{self.name} breaks the rule "{rule}" on the graph "{self.graph}" with {asked}: {what}. '
            f'`jaxremat.testing.graphs()["{self.graph}"]` is that graph.',
            rule=rule,
            graph=self.graph,
            budget_nbytes=budget,
        )


def _exactly(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)"


def _difference(one: Solution, other: Solution) -> str:
    if one.schedule.saved != other.schedule.saved:
        return f"it saves {sorted(one.schedule.saved)}, then {sorted(other.schedule.saved)}"
    if one.schedule != other.schedule:
        return "it saves the same and recomputes something else"
    return f"{one.lower_bound=}, {one.proven=}, then {other.lower_bound=}, {other.proven=}"


_PLAYED = ("forward_tape", "played")
"""A graph's caches of simulated schedules."""


def _changed(graph: Graph, before: Graph) -> bool:
    """Return whether a graph, with what it remembers of itself, is other than it was; what was simulated last is no
    matter.
    """
    missing = object()
    known = ((name, value) for name, value in vars(graph).items() if name not in _PLAYED)
    return any(value != getattr(before, name, missing) for name, value in known)
