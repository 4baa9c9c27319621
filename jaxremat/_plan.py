"""The plan: what happens to each residual, what it costs and what was proven; text and JSON in and out."""

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ._alive import Alive
from ._budget import format_nbytes
from ._disk import write_atomically
from ._errors import PlanMismatchError
from ._graph import Graph
from ._schedule import Schedule, complete
from ._updates import with_updates

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Action:
    """What happens to one residual.

    **Fields:** `value` its id; `name` the user's `checkpoint_name`, else the primitive that makes it; `shape` as text;
    `nbytes`; `action`; `stages` in which it is recomputed; `scope` the name stack; `source` the user's line.
    """

    value: int
    name: str
    shape: str
    nbytes: int
    action: Literal["save", "recompute"]
    stages: tuple[int, ...]
    scope: str
    source: str


@dataclass(frozen=True)
class Plan:
    """A plan for one step and one set of argument shapes.

    **Fields:**

    - `budget_nbytes` the peak allowed; for `"min"` the peak reached and the margin; `margin_nbytes` what of it the
      compiled peak leaves free (`workspace_margin`).
    - `baseline_peak_nbytes` the plain step's compiled peak; `predicted_peak_nbytes` what the simulator expected before
      compiling; `compiled_peak_nbytes` what the compiler reports, None where `verify=False`.
    - `overhead` predicted extra seconds / the plain step's seconds; `compiled_overhead` the same ratio by a roofline of
      the two compiled programs, None where not compiled.
    - `lower_bound` no plan with these stages that recomputes for every stage afresh costs less than this share of the
      step, in the solver's model; `gap` the difference to it, 0 where values held from stage to stage beat it.
    - `solver`, `solve_seconds`, `compile_count` how it was found; `rounds` pairs (predicted peak, compiled peak) in
      bytes of every schedule that was compiled, in order.
    - `actions` per residual, largest first; `alive` what the compiled step has in memory at its peak besides arguments
      and outputs, the largest first, empty where not compiled.
    - `segments` for each pair of scans (see `_segments`) how many segments it is cut into.
    - `respect_checkpoint` whether what the user's own checkpoints compute again was left to them.
    - `fingerprint` of the program; `saved`, `kept`, `stages`, `materialised`, `small_nbytes`, `fence` what the emitter
      needs.
    """

    budget_nbytes: int
    baseline_peak_nbytes: int
    predicted_peak_nbytes: int
    compiled_peak_nbytes: int | None
    overhead: float
    compiled_overhead: float | None
    lower_bound: float
    gap: float
    solver: str
    solve_seconds: float
    compile_count: int
    rounds: tuple[tuple[int, int], ...]
    actions: tuple[Action, ...]
    alive: tuple[Alive, ...]
    fingerprint: str
    saved: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]
    stages: tuple[tuple[int, int], ...]
    materialised: tuple[int, ...]
    small_nbytes: int
    fence: str
    segments: tuple[int, ...]
    margin_nbytes: int = 0
    respect_checkpoint: bool = False

    @property
    def drops_nothing(self) -> bool:
        """Whether nothing is recomputed: the plain step, with fences for updates where `stages` are not empty."""
        return not any(a.action == "recompute" for a in self.actions)

    @property
    def saved_nbytes(self) -> int:
        """Bytes of the residuals that are saved."""
        return sum(a.nbytes for a in self.actions if a.action == "save")

    @property
    def dropped_nbytes(self) -> int:
        """Bytes of the residuals that are recomputed."""
        return sum(a.nbytes for a in self.actions if a.action == "recompute")

    def layout(self, graph: Graph) -> Graph:
        """The graph with this plan's stages and materialised values in place of its own.

        **Raises:** `PlanMismatchError` where the graph is of another program.
        """
        if self.materialised and max(self.materialised) >= len(graph.values):
            raise PlanMismatchError(
                "The plan names values that this program does not have. Plan this program afresh."
            )
        chosen = frozenset(self.materialised)
        values = tuple(replace(v, materialised=v.producer < 0 or v.id in chosen) for v in graph.values)
        graph = replace(graph, values=values, small_nbytes=self.small_nbytes)
        cuts = [*(start for start, _ in self.stages), len(graph.nodes)]
        return replace(graph, stages=with_updates(graph, cuts))

    def schedule(self, graph: Graph) -> Schedule:
        """The schedule of this plan on a graph that has its layout."""
        return complete(graph, self.saved, self.kept)

    def explain_peak(self, rows: int = 12) -> str:
        """What fills the compiled step's memory at its peak, by kind and user's source line, the largest first.

        Equal arrays from the same line are one row. The liveness is read off the compiler's schedule; it may exceed
        the compiler's own figure a little, because XLA also uses the memory of outputs.
        """
        if not self.alive:
            return "The plan was not compiled, so that nothing is known of its peak. Plan with `verify=True`."
        groups: dict[tuple[str, str, str], list[int]] = {}
        for a in self.alive:
            groups.setdefault((a.kind, a.shape, a.source or a.scope), []).append(a.nbytes)
        largest = sorted(groups.items(), key=lambda group: -sum(group[1]))
        kinds: dict[str, int] = {}
        for a in self.alive:
            kinds[a.kind] = kinds.get(a.kind, 0) + a.nbytes
        shares = ", ".join(
            f"{kind} {format_nbytes(n)}" for kind, n in sorted(kinds.items(), key=lambda k: -k[1])
        )
        lines = [f"At the compiled peak of {format_nbytes(self.compiled_peak_nbytes or 0)}: {shares}"]
        for (kind, shape, where), sizes in largest[:rows]:
            count = f"{len(sizes)} x " if len(sizes) > 1 else ""
            lines.append(f"  {format_nbytes(sum(sizes)):>9}  {kind:<10}  {count}{shape}  {where}")
        if len(largest) > rows:
            rest = sum(sum(sizes) for _, sizes in largest[rows:])
            lines.append(f"  {format_nbytes(rest):>9}  in {len(largest) - rows} more")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """A plan from its JSON text.

        **Raises:** `PlanMismatchError` where the text is no plan of this format version.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("format")
            if version != FORMAT:
                raise PlanMismatchError(
                    f"The plan has format {version}, this jaxremat reads format {FORMAT}. Plan again."
                )
            data["actions"] = tuple(Action(**{**a, "stages": tuple(a["stages"])}) for a in data["actions"])
            data["alive"] = tuple(Alive(**a) for a in data["alive"])
            for name in ("saved", "materialised", "segments"):
                data[name] = tuple(int(v) for v in data[name])
            for name in ("kept", "stages", "rounds"):
                data[name] = tuple((int(a), int(b)) for a, b in data[name])
            _check_scalars(data)
            unknown = set(data) ^ {f.name for f in fields(cls)}
            if unknown:
                raise KeyError(", ".join(sorted(unknown)))
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, PlanMismatchError):
                raise
            raise PlanMismatchError(
                f"This text is no jaxremat plan ({type(error).__name__}: {error}). "
                "Pass what `Plan.to_json` or `Plan.save` wrote."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan that `save` wrote. **Raises:** `PlanMismatchError` where the file is no plan."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            text = ""
        return cls.from_json(text)

    def __str__(self) -> str:
        return describe(self)


_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
}


def _check_scalars(data: dict[str, Any]) -> None:
    """**Raises:** TypeError where a number or a text of a plan's data is of another kind."""
    parts = ((type(part), asdict(part)) for name in ("actions", "alive") for part in data[name])
    for cls, item in ((Plan, data), *parts):
        for f in fields(cls):
            kinds = _SCALARS.get(str(getattr(f.type, "__name__", f.type)))
            if kinds is not None and f.name in item and not isinstance(item[f.name], kinds):
                raise TypeError(f"{f.name} is {item[f.name]!r}")
    if wrong := {a.action for a in data["actions"]} - {"save", "recompute"}:
        raise ValueError(f"unknown action {wrong.pop()!r}")


def actions(graph: Graph, schedule: Schedule) -> tuple[Action, ...]:
    """What a schedule does to each residual, largest first."""
    stages: dict[int, list[int]] = {}
    for k, nodes in enumerate(schedule.recomputed):
        for n in nodes:
            for v in graph.nodes[n].outputs:
                stages.setdefault(v, []).append(k)
    found = []
    for v in graph.residuals:
        value, node = graph.values[v], graph.nodes[graph.values[v].producer]
        saved = v in schedule.saved
        found.append(
            Action(
                value=v,
                name=value.name or node.primitive,
                shape=value.shape if value.length == 1 else f"{value.length} x {value.shape}",
                nbytes=value.saved_nbytes,
                action="save" if saved else "recompute",
                stages=() if saved else tuple(stages.get(v, ())),
                scope=node.scope,
                source=node.source,
            )
        )
    return tuple(sorted(found, key=lambda a: (-a.nbytes, a.value)))


def describe(plan: Plan, rows: int = 12) -> str:
    """The plan in a few lines for a terminal."""
    compiled = plan.compiled_peak_nbytes
    lines = [
        f"Plan: peak {format_nbytes(compiled or plan.predicted_peak_nbytes)} "
        f"({'compiled' if compiled else 'predicted, not compiled'}) within {format_nbytes(plan.budget_nbytes)}"
        + (f", of which {format_nbytes(plan.margin_nbytes)} stay free" if plan.margin_nbytes else "")
        + f"; the plain step needs {format_nbytes(plan.baseline_peak_nbytes)}",
        f"  predicted peak {format_nbytes(plan.predicted_peak_nbytes)}, overhead {plan.overhead:.2%}"
        + (f" (compiled program {plan.compiled_overhead:.2%})" if plan.compiled_overhead is not None else "")
        + f", at most {plan.gap:.2%} from the best",
        f"  saved {format_nbytes(plan.saved_nbytes)} in {sum(a.action == 'save' for a in plan.actions)} values, "
        f"recomputed {format_nbytes(plan.dropped_nbytes)} in {sum(a.action == 'recompute' for a in plan.actions)}",
        f"  solver {plan.solver}, {plan.solve_seconds:.2f} s, {plan.compile_count} compilations",
    ]
    if plan.respect_checkpoint:
        lines.append("  the step's own checkpoints are kept, and what they recompute is not counted above")
    if not plan.drops_nothing:
        lines.append("  largest values:")
        for a in plan.actions[:rows]:
            where = f" in stage {', '.join(map(str, a.stages))}" if a.stages else ""
            lines.append(
                f"    {format_nbytes(a.nbytes):>9}  {a.action}{where}  {a.name} {a.shape}  {a.source or a.scope}"
            )
    return "\n".join(lines)
