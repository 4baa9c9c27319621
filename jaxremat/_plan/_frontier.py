"""Plans of one step -> its frontier: the extra time of each budget, as a table, a plot and JSON.

Invariant: more budget never costs more time, by the measure that chose the plans (`Frontier.cost`).
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .._runtime._budgets import Budget, parse_budget
from .._runtime._bytes import format_nbytes
from .._runtime._errors import ArgumentError, InfeasibleBudgetError
from .._runtime._files import Written
from ._plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """One budget of a frontier.

    **Fields:** `plan` the best known within the budget; `kind` the origin of the budget: the `"plain"` step, a vertex
    of the convex `"hull"`, a `"budget"` between vertices, the `"least"` memory.
    """

    plan: Plan
    kind: Literal["plain", "hull", "budget", "least"]

    @property
    def budget_nbytes(self) -> int:
        """The peak allowed."""
        return self.plan.budget_nbytes

    @property
    def predicted_peak_nbytes(self) -> int:
        """The simulated peak."""
        return self.plan.predicted_peak_nbytes

    @property
    def compiled_peak_nbytes(self) -> int | None:
        """The compiler's peak, None with `verify=False`."""
        return self.plan.compiled_peak_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The compiled peak, or the predicted one if nothing was compiled."""
        return self.plan.compiled_peak_nbytes or self.plan.predicted_peak_nbytes

    @property
    def overhead(self) -> float:
        """Predicted extra seconds, as a share of the plain step's."""
        return self.plan.overhead

    @property
    def compiled_overhead(self) -> float | None:
        """Extra time by a roofline of the compiled programs, None with `verify=False`."""
        return self.plan.compiled_overhead

    @property
    def gap(self) -> float:
        """A bound on the predicted overhead above the best plan's, as a share of the plain step's time."""
        return self.plan.gap


@dataclass(frozen=True)
class Policy:
    """A hand-written rule without a budget, to compare with. **Fields** as in `Point`. The compiled ones are None if
    the rule was not compiled, because it is predicted to be much slower than the plan of least memory.
    """

    name: str
    predicted_peak_nbytes: int
    compiled_peak_nbytes: int | None
    overhead: float
    compiled_overhead: float | None

    @property
    def peak_nbytes(self) -> int:
        """The compiled peak, or the predicted one if the rule was not compiled."""
        return self.compiled_peak_nbytes or self.predicted_peak_nbytes


@dataclass(frozen=True)
class Frontier(Written):
    """The extra time of a step within each of several budgets, from `jaxremat.sweep`. Iterates over its points.

    **Fields:**

    - `points`: by falling budget, from the plain step to the least memory.
    - `policies`: hand-written rules, with the same stages and barriers.
    - `bounds`: pairs (price, share): in the solver's model, no plan of the points' variants that recomputes each stage
      independently has an overhead below share - price x predicted peak in bytes.
    - `judged`: the overhead that chose the plans: `"compiled"` where the compiler fuses much, as on GPUs, else
      `"predicted"`.
    - `device`: its name; `fingerprint`: the program's.
    """

    FORMAT: ClassVar = ("frontier_format", 2)
    WHAT: ClassVar = ("frontier", "Sweep again")

    points: tuple[Point, ...]
    policies: tuple[Policy, ...]
    bounds: tuple[tuple[float, float], ...]
    judged: Literal["compiled", "predicted"]
    device: str
    fingerprint: str

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Point:
        return self.points[index]

    @property
    def plain(self) -> Point:
        """The plain step."""
        return self.points[0]

    @property
    def least(self) -> Point:
        """The point of least memory."""
        return self.points[-1]

    def cost(self, point: Point | Policy) -> float:
        """Return the overhead that decides, as a share of the plain step's time; at least 0."""
        compiled = point.compiled_overhead if self.judged == "compiled" else None
        return max(point.overhead if compiled is None else compiled, 0.0)

    def best(self, max_overhead: float = 0.05) -> Point:
        """Return the point of least memory that costs at most this share of the plain step's time.

        **Raises:** `ArgumentError` for a negative overhead.
        """
        if not max_overhead >= 0:
            raise ArgumentError(
                f"`best(max_overhead={max_overhead!r})` asks for a step faster than the plain one. Write a share of "
                "its time, such as 0.05."
            )
        return min((p for p in self if self.cost(p) <= max_overhead), key=lambda p: p.budget_nbytes)

    def within(self, budget: Budget) -> Point:
        """Return the fastest point within a budget, in bytes or as a share such as `"50%"` of the plain step's peak.

        **Raises:** `InfeasibleBudgetError` if none fits; `BudgetError` for a share of something unknown to a frontier.
        """
        memory = self.plain.plan.memory
        parts = None if memory is None else (memory.base_nbytes, memory.temporaries_nbytes)
        nbytes = parse_budget(budget, None, parts and (lambda: parts))
        if nbytes == "min":
            return self.least
        found = next((p for p in self if p.budget_nbytes <= nbytes), None)
        if found is None:
            least = self.least.budget_nbytes
            raise InfeasibleBudgetError(
                f"`within({budget!r})`: the least budget of this frontier is {least} bytes ({format_nbytes(least)}).",
                budget_nbytes=nbytes,
                min_peak_nbytes=self.least.peak_nbytes,
            )
        return found

    @property
    def knee(self) -> Point:
        """The point where saving more memory starts to cost more time per byte: the one farthest below the straight
        line from the plain step to the least memory.
        """
        memory = self.plain.peak_nbytes - self.least.peak_nbytes
        time = self.cost(self.least)

        def below(point: Point) -> float:
            saved = (self.plain.peak_nbytes - point.peak_nbytes) / (memory or 1)
            return saved - self.cost(point) / (time or 1.0)

        return max(self, key=lambda p: (below(p), -p.budget_nbytes))

    def lower_bound(self, peak_nbytes: int) -> float:
        """Return the proven lower bound on the overhead of plans with this predicted peak; see `bounds`."""
        return max((share - price * peak_nbytes for price, share in self.bounds), default=0.0)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plot memory against time: the points, the plain step, hand-written rules, the lower bound and the knee.

        Needs matplotlib (`pip install ".[tools]"`).

        **Arguments:** `ax` to draw on; None for a new figure of pyplot's.

        **Returns:** the axes; `plot().figure.savefig("frontier.png")` writes a file.

        **Raises:** `InstallError` if matplotlib is missing.
        """
        from .._report._frontier_plot import plot

        return plot(self, ax)

    @classmethod
    def upgraded(cls, data: dict[str, Any], version: int) -> dict[str, Any] | None:
        """Return the fields in format 2. In format 1, each plan stated its own format."""
        if version != 1:
            return None
        plans = [asdict(Plan.from_json(json.dumps(point["plan"]))) for point in data["points"]]
        points = [point | {"plan": plan} for point, plan in zip(data["points"], plans, strict=True)]
        return json.loads(json.dumps(data | {"points": points}))

    def __repr__(self) -> str:
        return table(self)


def monotone(points: Iterable[Point], cost: Callable[[Point], float]) -> tuple[Point, ...]:
    """Return the points by falling budget, one for each, with the best of all their plans that fits.

    A plan that moves to another budget takes the lower bound of that budget.
    """
    points = tuple(points)
    found: dict[int, Point] = {}
    for point in points:
        room = point.budget_nbytes - point.plan.margin_nbytes
        best = min((p for p in points if p.peak_nbytes <= room), key=lambda p: (cost(p), p.peak_nbytes))
        if cost(best) < cost(point):
            bound = min(point.plan.lower_bound, best.overhead)
            plan = replace(
                best.plan,
                budget_nbytes=point.budget_nbytes,
                margin_nbytes=point.plan.margin_nbytes,
                lower_bound=bound,
                gap=max(best.overhead - bound, 0.0),
            )
            point = replace(point, plan=plan)
        found.setdefault(point.budget_nbytes, point)
    return tuple(sorted(found.values(), key=lambda p: -p.budget_nbytes))


def table(frontier: Frontier) -> str:
    """Return the frontier as text, a line for each point."""
    plain = frontier.plain.peak_nbytes
    head = ("budget", "of plain", "compiled", "predicted", "overhead", "(compiled)", "gap", "")
    rows: list[tuple[str, ...]] = [head]
    for p in frontier:
        compiled = p.compiled_peak_nbytes
        notes = [p.kind] + (["knee"] if p is frontier.knee and len(frontier) > 2 else [])
        rows.append(
            (
                format_nbytes(p.budget_nbytes),
                f"{p.budget_nbytes / plain:.0%}",
                "-" if compiled is None else format_nbytes(compiled),
                format_nbytes(p.predicted_peak_nbytes),
                f"{p.overhead:.2%}",
                "-" if p.compiled_overhead is None else f"{p.compiled_overhead:.2%}",
                f"{p.gap:.2%}",
                ", ".join(notes),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(f"{cell:>{w}}" for cell, w in zip(r[:-1], widths, strict=False)) + f"  {r[-1]}"
        for r in rows
    ]
    what = (
        f"Frontier: {len(frontier)} budgets on {frontier.device}; the plain step needs {format_nbytes(plain)}"
    )
    return "\n".join([what, *(f"  {line}".rstrip() for line in lines)])
