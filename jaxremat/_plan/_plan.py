"""Plans: the results of planning, and the data from which the emitter builds the step; JSON in and out, reports out."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .._model._graph import Graph
from .._model._host_copies import HostCopy
from .._model._optimizer_updates import with_updates
from .._model._schedule import Passing, Schedule, close_over_dependencies
from .._model._variant import ROWS, Variant
from .._report import Report
from .._report._actions import Action, Actions
from .._report._loop_forms import LoopForm
from .._report._outcome import Outcome, brief
from .._runtime._bytes import format_nbytes
from .._runtime._errors import ArgumentError, PlanMismatchError
from .._runtime._files import Written

_MOST = 3
"""Most arguments that an error names: all of an optimizer's state may differ."""


@dataclass(frozen=True)
class MadeFor:
    """The arguments and versions that a plan was made for.

    **Fields:** `jax` its version; `mesh` axes and sizes, "" without one; `arguments` the place, type and sharding of
    each traced argument; `donated` the places of donated ones; `static` arguments and their values.
    """

    jax: str
    mesh: str
    arguments: tuple[tuple[str, str], ...]
    donated: tuple[str, ...]
    static: tuple[tuple[str, str], ...]

    def differences(self, now: "MadeFor") -> list[str]:
        """Return the differences from another, as text."""
        found = [
            f"{name} was {before or 'none'} and is {after or 'none'}"
            for name, before, after in (("jax", self.jax, now.jax), ("the mesh", self.mesh, now.mesh))
            if before != after
        ]
        found += _changes("argument", dict(self.arguments), dict(now.arguments))
        found += _changes("static argument", dict(self.static), dict(now.static))
        for words, places in (
            ("was donated and is not", sorted(set(self.donated) - set(now.donated))),
            ("was not donated and is", sorted(set(now.donated) - set(self.donated))),
        ):
            found += _few([f"argument {place} {words}" for place in places])
        return found


def _changes(kind: str, before: dict[str, str], after: dict[str, str]) -> list[str]:
    found = [
        f"{kind} {place} was {before.get(place, 'not there')} and is {after.get(place, 'not there')}"
        for place in dict.fromkeys((*before, *after))
        if before.get(place) != after.get(place)
    ]
    return _few(found)


def _few(found: Sequence[str]) -> list[str]:
    more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return [*found[:_MOST], *more]


@dataclass(frozen=True, kw_only=True)
class Plan(Outcome, Written):
    """A plan for one step and one set of argument shapes.

    **Fields:**

    - `step`: the name of the function.
    - `budget_nbytes`: the peak allowed; for `"min"`, the peak reached plus the margin. `margin_nbytes`: the part of it
      that the compiled peak leaves free (`workspace_margin`).
    - `baseline_peak_nbytes`: the plain step's compiled peak, or the model's if `baseline_modelled` says why the plain
      step was not compiled. `predicted_peak_nbytes`: the simulator's figure before compiling. `compiled_peak_nbytes`:
      the compiler's, and `memory` its parts; None with `verify=False`. `compiler`: which one.
    - `overhead`: predicted extra seconds as a share of the plain step's. `compiled_overhead`: the same by a roofline of
      the two compiled programs, None where not compiled. If the plain step was not compiled, its seconds are the
      model's.
    - `lower_bound`: in the solver's model, no plan with these stages that recomputes each independently costs less
      than this share of the step. `gap`: the overhead above it; 0 if values kept from stage to stage beat it.
    - `solver`, `solve_seconds`, `compile_count`: how the plan was found. `rounds`: every schedule that was compiled, in
      order. `planning`: how long it took, in parts.
    - `actions`: one per residual, largest first. `alive`: the arrays in memory at the compiled step's peak besides
      arguments and outputs, largest first; empty where not compiled. `account`: memory and time by module, as modelled.
    - `form`: the sites of the step that run in another form, and the forms: pairs of scans with nested checkpointing,
      outermost first (see `_nested_checkpointing`), or with absorbed updates (see `_optimizer_in_backward`); rows in
      chunks (see `_row_regions`); values in fewer bits (see `_encodings`).
    - `loops`: the forms of loops and rows, as text. `copies`: the values that are saved in fewer bits.
    - `devices`: their number; all bytes are per device. `waiting`: the share of the step's time for which kernels wait
      for copies from host memory.
    - `respect_checkpoint`: whether the user's own checkpoints were kept.
    - `warnings`: the warnings of planning, repeated each time that the plan is applied.
    - `fingerprint`: of the program. `saved`, `kept`, `stages`, `materialised`, `unrepeated`, `small_nbytes`, `fence`,
      `offloaded`: for the emitter. `unrepeated` are the operations that may not run twice; some of them, such as
      collectives, only the compiled plain step shows.
    - `scratch`: scratch memory of equations, as multiples of the computed values that they read.
    - `detached`: operands of barriers that have barriers of their own, so that XLA does not overwrite them while they
      are read.
    - `on_host`: positions of the traced arguments' leaves that stay in host memory between steps; `on_host_nbytes`:
      their size.
    - `collectives`: the numbers of collectives, empty where not compiled or on one device.
    - `unproved`: parts of the form, in words, that were not proved to compute the step; the library's tests compare
      their results. Empty where nothing was compiled.
    - `decided`: how many values and bytes are saved because decisions run once.
    - `structure`: a hash of the step that ignores shapes. `outline`: the form's equations without shapes, to match them
      with a neighbour's. `like`: the fingerprint of the neighbour's plan from which this one was adapted, or "".
    - `made_for`: the arguments, mesh and version of jax; None in plans of earlier versions.
    """

    FORMAT: ClassVar = ("format", 3)

    fingerprint: str
    saved: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]
    stages: tuple[tuple[int, int], ...]
    materialised: tuple[int, ...]
    small_nbytes: int
    fence: str
    form: Variant
    unrepeated: tuple[int, ...] = ()
    offloaded: tuple[HostCopy, ...] = ()
    on_host: tuple[int, ...] = ()
    detached: tuple[Passing, ...] = ()
    made_for: MadeFor | None = None
    structure: str = ""
    outline: str = ""
    scratch: tuple[tuple[int, float], ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def upgraded(cls, data: dict[str, Any], version: int) -> dict[str, Any] | None:
        """Return the fields in format 3. In format 2, a form was a list of the settings of all sites."""
        if version != 2:
            return None
        for each in (data, *data["rounds"]):
            choices = Variant.unnamed(tuple(each.pop("segments"))).choices
            each["form"] = {"choices": [list(choice) for choice in choices]}
        return data

    def layout(self, graph: Graph) -> Graph:
        """Return the graph with this plan's stages, materialised values and unrepeated operations in place of its own.

        **Raises:** `PlanMismatchError` if the graph is of another program.
        """
        if self.materialised and max(self.materialised) >= len(graph.values):
            raise PlanMismatchError(
                "The plan names values that this program does not have. Make a new plan for this program."
            )
        chosen = frozenset(self.materialised)
        values = tuple(replace(v, materialised=v.producer < 0 or v.id in chosen) for v in graph.values)
        once = frozenset(self.unrepeated)
        nodes = tuple(replace(n, repeatable=n.repeatable and n.id not in once) for n in graph.nodes)
        graph = replace(graph, nodes=nodes, values=values, small_nbytes=self.small_nbytes)
        cuts = [*(start for start, _ in self.stages), len(graph.nodes)]
        return replace(graph, stages=with_updates(graph, cuts))

    def with_scratch(self, graph: Graph) -> Graph:
        """Return the graph with this plan's scratch memory; for rows in chunks, that of one chunk."""
        chunks = math.prod(n for (n,) in self.form.settings(ROWS).values())
        here = math.prod(n for (n,) in graph.form.settings(ROWS).values())
        nodes = [*graph.nodes]
        for n, share in self.scratch:
            nbytes = share * graph.computed_nbytes(n) * (chunks / here if nodes[n].primitive == "jit" else 1)
            nodes[n] = replace(nodes[n], workspace_nbytes=int(nbytes))
        return replace(graph, nodes=tuple(nodes))

    def schedule(self, graph: Graph) -> Schedule:
        """Return this plan's schedule, for a graph from `layout`."""
        schedule = close_over_dependencies(graph, self.saved, self.kept)
        return replace(schedule, offloaded=frozenset(self.offloaded))

    def report(self) -> Report:
        """Return the report of this plan: print it, `save` it as one HTML file, or show it in a notebook."""
        return Report(self)

    def __repr__(self) -> str:
        return f"<jaxremat.Plan of {self.step}: {brief(self)}>"

    def _repr_html_(self) -> str | None:
        return self.report().summary_html()


@dataclass(frozen=True)
class HeldPlan(Actions, Written):
    """A plan for a function that other code differentiates, in held bytes (see `jaxremat.checkpoint`).

    **Fields:**

    - `budget_nbytes`: the bytes allowed, None for "dots", "free" and "min". `held_nbytes`: the most that the plan holds
      at once. `plain_nbytes`: what plain JAX keeps between the passes.
    - `overhead`: extra seconds of the backward pass as a share of the seconds of both passes, by a roofline of the
      device. Negative means estimated to be faster.
    - `solver`: the solver's name. `stage_count`: the number of stages of the backward pass.
    - `actions`: one for each value that the backward pass reads, largest first.
    - `parts`: which rows run in chunks, in words.
    """

    FORMAT: ClassVar = ("held_format", 1)

    budget_nbytes: int | None
    held_nbytes: int
    plain_nbytes: int
    overhead: float
    solver: str
    stage_count: int
    actions: tuple[Action, ...]
    parts: tuple[LoopForm, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<jaxremat.HeldPlan: holds {format_nbytes(self.held_nbytes)} of {format_nbytes(self.plain_nbytes)}, "
            f"overhead {self.overhead:.2%}>"
        )

    def __str__(self) -> str:
        within = "" if self.budget_nbytes is None else f" within {format_nbytes(self.budget_nbytes)}"
        lines = [
            f"Plan: holds {format_nbytes(self.held_nbytes)} (predicted){within}; "
            f"plain JAX keeps {format_nbytes(self.plain_nbytes)}",
            f"  saved {format_nbytes(self.saved_nbytes)} in {sum(a.action == 'save' for a in self.actions)} values, "
            f"overhead {self.overhead:.2%}, {self.stage_count} stages, solver {self.solver}",
        ]
        lines.extend(f"  {each}" for each in self.parts)
        lines.extend(
            f"    {format_nbytes(a.nbytes):>9}  {a}  {a.name} {a.shape}  {a.source or a.scope}"
            for a in self.actions[:12]
        )
        return "\n".join(lines)


GivenPlan = Plan | str | os.PathLike[str] | None
"""A plan, or the file that `Plan.save` wrote."""


def given_plan(plan: GivenPlan) -> Plan | None:
    """Return the plan of a user's argument. **Raises:** `ArgumentError`; `PlanMismatchError` if a file has no plan."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        raise ArgumentError(
            f"`plan={plan!r:.60}` is a {type(plan).__name__}. Pass a `jaxremat.Plan`, or the path of a file that "
            "`Plan.save` wrote."
        )
    if isinstance(plan, str) and plan.lstrip().startswith("{"):
        raise ArgumentError("`plan` is a plan's text, not the path of a file. Pass `Plan.from_json(text)`.")
    try:
        return Plan.load(plan)
    except OSError as error:
        raise ArgumentError(
            f"`plan={os.fspath(plan)!r}` cannot be read: {error.strerror}. Pass the path of a file that `Plan.save` "
            "wrote."
        ) from None
