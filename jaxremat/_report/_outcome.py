"""The full result of planning: the decision about each value, its cost, the compiler's figures and planning times."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .._compiler._memory_stats import MemoryStats
from .._compiler._peak_contents import Alive
from .._model._variant import Variant
from .._runtime._bytes import format_nbytes
from .._runtime._progress import Stopwatch
from ._account import Account
from ._actions import NONE_DECIDED, Action, Actions, Decided
from ._loop_forms import Copied, LoopForm


@dataclass(frozen=True, slots=True)
class PlanningTime:
    """The wall-clock seconds of planning.

    **Fields:** `seconds` in total, of which `trace_seconds` to trace and normalise the step, `compile_seconds` for all
    compilations, `solve_seconds` in solvers; the rest is reading compiled modules, simulating and writing.
    `first_seconds` until the first plan that fits was compiled, 0 if none was. `cut_short` whether a clock or Ctrl-C
    ended the search early: another run may find a better plan. The search's work: `plans_compiled` and `solves`.
    """

    seconds: float = 0.0
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    solve_seconds: float = 0.0
    first_seconds: float = 0.0
    cut_short: bool = False
    plans_compiled: int = 0
    solves: int = 0

    @classmethod
    def of(cls, stopwatch: Stopwatch, first: float, compiled: int, solves: int) -> "PlanningTime":
        """Return the times by a stopwatch."""
        kinds = (stopwatch.spent.get(kind, 0.0) for kind in ("trace", "compile", "solve"))
        seconds = (round(each, 3) for each in (stopwatch.seconds, *kinds, first))
        return cls(*seconds, cut_short=stopwatch.interrupted, plans_compiled=compiled, solves=solves)

    @property
    def work(self) -> str:
        """A clause about the search's work, which does not depend on a clock."""
        plans, solves = ("" if count == 1 else "s" for count in (self.plans_compiled, self.solves))
        return f"{self.plans_compiled} plan{plans} compiled and {self.solves} solve{solves}"

    def __str__(self) -> str:
        rest = self.seconds - self.trace_seconds - self.compile_seconds - self.solve_seconds
        first = f" (first plan that fits after {self.first_seconds:.1f})" if self.first_seconds else ""
        text = (
            f"planned in {self.seconds:.1f} s{first}: tracing {self.trace_seconds:.1f}, compiling "
            f"{self.compile_seconds:.1f}, solving {self.solve_seconds:.1f}, the rest {max(rest, 0.0):.1f}"
        )
        text += f"; {self.work}" if self.solves else ""
        return f"{text}; the search was cut short" if self.cut_short else text


UNTIMED = PlanningTime()
"""For plans that were made before planning was timed."""


@dataclass(frozen=True, slots=True)
class Round:
    """One schedule that was compiled during the search.

    **Fields:** `predicted_peak_nbytes` by the simulator, `compiled_peak_nbytes` by the compiler; `overhead` and
    `compiled_overhead` as in `Plan`; `gap` to the solver's bound; `solver`; `stages`, the number of stages of the
    backward pass; `form` as in `Plan`; `fence`, the kind of barriers; `solve_seconds` since the previous round;
    `compile_seconds` to emit, compile and read it.
    """

    predicted_peak_nbytes: int
    compiled_peak_nbytes: int
    overhead: float
    compiled_overhead: float
    gap: float
    solver: str
    stages: int
    form: Variant
    fence: str
    solve_seconds: float
    compile_seconds: float


class Collectives(NamedTuple):
    """The number of collectives of one kind in the compiled steps.

    **Fields:** `kind` such as `all-gather`; the number in the `plain` step and in the `planned` one.
    """

    kind: str
    plain: int
    planned: int

    def __str__(self) -> str:
        return f"{self.planned} {self.kind}s ({self.plain} in the plain step)"


@dataclass(frozen=True, kw_only=True)
class Outcome(Actions):
    """The part of a `Plan` that reports show; `Plan` describes its fields."""

    step: str
    budget_nbytes: int
    margin_nbytes: int = 0
    respect_checkpoint: bool = False
    baseline_peak_nbytes: int
    baseline_modelled: str = ""
    predicted_peak_nbytes: int
    compiled_peak_nbytes: int | None
    memory: MemoryStats | None
    compiler: str
    overhead: float
    compiled_overhead: float | None
    lower_bound: float
    gap: float
    solver: str
    solve_seconds: float
    compile_count: int
    rounds: tuple[Round, ...]
    actions: tuple[Action, ...]
    alive: tuple[Alive, ...]
    account: Account
    loops: tuple[LoopForm, ...] = ()
    copies: tuple[Copied, ...] = ()
    planning: PlanningTime = UNTIMED
    devices: int = 1
    waiting: float = 0.0
    on_host_nbytes: int = 0
    collectives: tuple[Collectives, ...] = ()
    decided: Decided = NONE_DECIDED
    unproved: tuple[str, ...] = ()
    like: str = ""

    @property
    def gathered_again(self) -> int:
        """The number of arrays that are gathered again for the backward pass, instead of saved after the first time."""
        return sum(len(a.stages) for a in self.actions if "gather" in a.sent)

    @property
    def summed_again(self) -> int:
        """The number of sums over devices that are recomputed, instead of saved."""
        return sum(len(a.stages) for a in self.actions if "sum" in a.sent)

    @property
    def sent_again(self) -> str:
        """A clause about repeated communication, or ""."""
        gathers = f"gather {self.gathered_again} arrays" if self.gathered_again else ""
        sums = f"add up {self.summed_again} sums" if self.summed_again else ""
        found = " and ".join(words for words in (gathers, sums) if words)
        return found and f"devices {found} again instead of saving them"

    @property
    def peak_nbytes(self) -> int:
        """The compiled peak, or the predicted one if nothing was compiled."""
        return self.compiled_peak_nbytes or self.predicted_peak_nbytes

    @property
    def plain_needs(self) -> str:
        """The plain step's peak as text, with its source if that is not the compiler."""
        peak = format_nbytes(self.baseline_peak_nbytes)
        return f"about {peak} (modelled)" if self.baseline_modelled else peak

    def explain_peak(self, rows: int = 12) -> str:
        """Return the arrays in the compiled step's memory at its peak as text, by kind and user's source line, largest
        first.

        Equal arrays from the same line are one row. Live ranges come from the compiler's schedule. Their total may be
        slightly above the compiler's figure, because XLA also uses the memory of outputs.
        """
        if not self.alive:
            return (
                "The plan was not compiled, so its compiled peak is unknown. Plan with "
                "`Planning(verify=True)`."
            )
        largest = alike(self.alive)
        shares = ", ".join(f"{kind} {format_nbytes(n)}" for kind, n in by_kind(self.alive))
        lines = [f"At the compiled peak of {format_nbytes(self.compiled_peak_nbytes or 0)}: {shares}"]
        for group in largest[:rows]:
            a, times = group[0], f"{len(group)} x " if len(group) > 1 else ""
            nbytes = format_nbytes(bytes_of(group))
            lines.append(f"  {nbytes:>9}  {a.kind:<10}  {times}{a.shape}  {a.source or a.scope}")
        if len(largest) > rows:
            rest = sum(map(bytes_of, largest[rows:]))
            lines.append(f"  {format_nbytes(rest):>9}  in {len(largest) - rows} more")
        return "\n".join(lines)

    def __str__(self) -> str:
        return describe(self)


def alike(alive: Iterable[Alive]) -> list[list[Alive]]:
    """Return arrays in groups of equal ones from the same line, those of most bytes first."""
    groups: dict[tuple[str, str, str], list[Alive]] = {}
    for a in alive:
        groups.setdefault((a.kind, a.shape, a.source or a.scope), []).append(a)
    return sorted(groups.values(), key=bytes_of, reverse=True)


def bytes_of(arrays: Iterable[Alive]) -> int:
    """Return the total bytes of arrays."""
    return sum(a.nbytes for a in arrays)


def by_kind(alive: Iterable[Alive]) -> list[tuple[str, int]]:
    """Return bytes by kind, most first."""
    kinds: dict[str, int] = {}
    for a in alive:
        kinds[a.kind] = kinds.get(a.kind, 0) + a.nbytes
    return sorted(kinds.items(), key=lambda kind: -kind[1])


def brief(plan: Outcome) -> str:
    """Return the plan's peak, budget and overhead in one line."""
    compiled = plan.compiled_peak_nbytes
    overhead = plan.overhead if plan.compiled_overhead is None else plan.compiled_overhead
    return (
        f"peak {format_nbytes(plan.peak_nbytes)} ({'compiled' if compiled else 'predicted, not compiled'}) within "
        f"{format_nbytes(plan.budget_nbytes)}, overhead {overhead:.2%}"
    )


def describe(plan: Outcome, rows: int = 12) -> str:
    """Return the plan in a few lines for a terminal."""
    compiled = plan.compiled_peak_nbytes
    lines = [
        f"Plan: peak {format_nbytes(plan.peak_nbytes)} "
        f"({'compiled' if compiled else 'predicted, not compiled'}) within {format_nbytes(plan.budget_nbytes)}"
        + (f", {format_nbytes(plan.margin_nbytes)} of it kept free" if plan.margin_nbytes else "")
        + f"; the plain step needs {plan.plain_needs}"
        + (f", per device (of {plan.devices})" if plan.devices > 1 else ""),
        f"  predicted peak {format_nbytes(plan.predicted_peak_nbytes)}, overhead {plan.overhead:.2%}"
        + (f" (compiled program {plan.compiled_overhead:.2%})" if plan.compiled_overhead is not None else "")
        + f", at most {plan.gap:.2%} from the best",
        f"  saved {format_nbytes(plan.saved_nbytes)} in {sum(a.action != 'recompute' for a in plan.actions)} values, "
        f"recomputed {format_nbytes(plan.dropped_nbytes)} in {sum(a.action == 'recompute' for a in plan.actions)}",
        f"  solver {plan.solver}, {plan.solve_seconds:.2f} s, {plan.compile_count} "
        f"compilation{'' if plan.compile_count == 1 else 's'}",
    ]
    if plan.planning.seconds:
        lines.append(f"  {plan.planning}")
    lines += [f"  {remark}" for remark in remarks(plan)]
    if not plan.drops_nothing:
        lines.append("  largest values:")
        lines += [
            f"    {format_nbytes(a.nbytes):>9}  {a}  {a.name} {a.shape}  {a.source or a.scope}"
            for a in plan.actions[:rows]
        ]
    return "\n".join(lines)


def remarks(plan: Outcome) -> list[str]:
    """Return further remarks on a plan's figures, one clause each."""
    found: list[str] = []
    if plan.baseline_modelled:
        found.append(f"the plain step's figures are the model's: {plan.baseline_modelled}")
    if plan.like:
        found.append(f"made from the plan {plan.like[:12]} of the same step with other shapes")
    if plan.offloaded_nbytes:
        found.append(
            f"offloads {format_nbytes(plan.offloaded_nbytes)} in "
            f"{sum(a.action == 'offload' for a in plan.actions)} values to host memory; kernels wait "
            f"{plan.waiting:.2%} of the step for them"
        )
    if plan.on_host_nbytes:
        found.append(
            f"{format_nbytes(plan.on_host_nbytes)} of the arguments stay in host memory between steps"
        )
    found += map(str, (*plan.loops, *plan.copies))
    if plan.unproved:
        found.append(f"not proved for this step, only tested in general: {', '.join(plan.unproved)}")
    if plan.decided.values:
        found.append(str(plan.decided))
    if plan.sent_again:
        found.append(plan.sent_again)
    if any(each.planned > each.plain for each in plan.collectives):
        found.append(f"devices do {', '.join(map(str, plan.collectives))}")
    if plan.respect_checkpoint:
        found.append("your own checkpoints are kept; the overhead excludes their recomputation")
    return found
