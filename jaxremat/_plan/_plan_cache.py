"""Program, request -> the plan cached on disk for them, or a new one, which is stored.

Invariants: the key is everything that planning depends on, including the planner's code, and nothing else. If a clock
cut a search short, the next request searches again, and the better plan is kept. A cached plan is emitted, compiled and
compared with its budget like a plan from a file, so the cache can cost time but never memory. If any earlier plan fits
a budget, the budget is not refused, and no slower plan is returned. For the least memory, no returned plan needs much
more than the least of the earlier ones.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import jax
from jaxlib import version as jaxlib

from .._compiler._memory_stats import MemoryStats
from .._program import _compat
from .._runtime._budgets import Parts, parse_budget, parse_margin, read_budget
from .._runtime._cache_folder import cache_dir, read, store, touch, trim
from .._runtime._errors import CompilationError, InfeasibleBudgetError, PlanMismatchError
from .._runtime._garbage import uncollected
from .._runtime._progress import Stopwatch, timed
from .._solver import Solver
from ._baseline import Baseline, measure_baseline
from ._nearby import plan_nearby
from ._plan import Plan
from ._planned import Planned, apply_plan
from ._problem import Problem
from ._request import Planning, Request
from ._search import MOST_OVERHEAD
from ._state_on_host import movable
from ._verify import make_plan

T = TypeVar("T")
logger = logging.getLogger("jaxremat")

_SEARCHING = frozenset({"time_limit", "effort", "planning_seconds", "on_interrupt"})
"""Limits of the search: keys of what does not depend on the search leave these fields of `Planning` out."""

_TOLD = ("budget_nbytes", "min_peak_nbytes", "step_seconds")
"""Attributes of a refusal that are stored in addition to its text."""

MOST_NBYTES = 256 * 2**20
"""Most bytes of stored plans. The plan of a network with thousands of equations has some hundred kilobytes."""

MORE = 0.05
"""A plan of the least memory is replaced by an earlier one if that needs less by this share."""

SAVES = 0.005
"""The newer of two plans within a budget is kept unless it is slower by this share of the step's time."""


MOST_ALIKE = 4
"""Most plans of nearly the same step that are tried: each failure may take a compilation."""


class Known(NamedTuple):
    """A cached plan: its peak, overhead and file."""

    peak_nbytes: int
    overhead: float
    file: str


@uncollected
def recall_or_plan(problem: Problem, request: Request) -> Planned:
    """Return the cached plan for this request if it still fits, else a new one. **Raises:** as `make_plan`."""
    request, baseline = _in_bytes(problem, request)
    key = key_of(problem, request.planning, {"known": True}, besides=_SEARCHING)
    if key is None:
        return plan_nearby(problem, request) or make_plan(problem, request, baseline)
    return _KeptPlans(problem, request, cache_dir() / "known" / f"{key}.json", baseline).recall_or_plan()


def _in_bytes(problem: Problem, request: Request) -> tuple[Request, Baseline | None]:
    """Return the request with its budget in bytes, and the baseline if one was measured for that.

    A share of the plain step's peak needs its compilation. The figures are cached, and planning reuses the baseline.
    """
    measured: list[Baseline] = []

    def plain() -> Parts:
        if not request.planning.verify:
            return parts(problem.modelled_memory("nothing was compiled"))
        key = key_of(problem, request.planning, {"plain": True}, besides=_SEARCHING)
        path = None if key is None else cache_dir() / "plain" / f"{key}.json"
        found = None if path is None else recall(path, json.loads)
        if found is None:
            measured.append(measure_baseline(problem, plain=True, tagged=False))
            found = parts(measured[0].memory)
            if path is not None and not measured[0].refused:
                keep(path, json.dumps(found))
        base, temporaries = found
        return base, temporaries

    def parts(memory: MemoryStats) -> Parts:
        return memory.base_nbytes, memory.temporaries_nbytes

    nbytes = request.nbytes or parse_budget(request.budget, request.device_nbytes, plain)
    return replace(request, nbytes=nbytes), measured[0] if measured else None


class _KeptPlans:
    """The cached plans of one program with one set of options, for this budget and others."""

    def __init__(self, problem: Problem, request: Request, known: Path, baseline: Baseline | None) -> None:
        self.problem, self.request, self.known, self.baseline = problem, request, known, baseline
        assert request.nbytes is not None
        self.budget: int | Literal["min"] = request.nbytes
        self.margin = self._margin(self.budget)
        self.path = self._path("plans", self.budget)
        # Keyed by the budget as written: a share of the plain step is other bytes for a larger batch.
        asked = {"budget": str(read_budget(request.budget)), "margin": str(request.planning.workspace_margin)}
        self.alike = self._path("alike", self.budget, program=problem.structure, **asked)
        # A refusal is stored only where planning goes on with arguments in host memory, see `_state_on_host`.
        refusals = "brief_refusals" if request.briefly else "refusals"
        self.refusal = self._path(refusals, self.budget) if movable(problem).sizes else None

    def recall_or_plan(self) -> Planned:
        if self.refusal and (refused := recall(self.refusal, json.loads)) is not None:
            raise InfeasibleBudgetError(**refused)
        plan = recall(self.path, Plan.from_json)
        if plan is not None and plan.like and self.request.neighbours is None:
            plan = None  # it was adapted from a neighbour, which this request excludes
        if plan is not None and not plan.planning.cut_short:  # otherwise search again
            follow = functools.partial(self._followed, self.path, plan)
            defects = self.problem.defects
            planned = defects.attempted("emitting the cached plan", follow, plan.form)
            if planned is not None:
                logger.info("followed the plan in %s", self.path)
                return self._kept(planned, plan)
        with timed() as stopwatch:
            return self._fresh(stopwatch)

    def _fresh(self, stopwatch: Stopwatch) -> Planned:
        """Return a new plan, or a better earlier one, and store it. **Raises:** as `make_plan`."""
        try:
            planned = self._nearby() or make_plan(self.problem, self.request, self.baseline)
        except InfeasibleBudgetError as error:
            planned = self._better(None, stopwatch)
            if planned is None:
                self._keep_refusal(error, interrupted=stopwatch.interrupted)
                raise error from None
        else:
            planned = self._better(planned.plan, stopwatch) or planned
        self._kept(planned)
        if self.request.planning.verify:
            self._add(planned.plan, self.path)
        if not planned.plan.like:
            store(self.alike, json.dumps([self.path.name, *self._alike()][:MOST_ALIKE]))
        return planned

    def _nearby(self) -> Planned | None:
        """Return a plan within the budget, adapted from one of nearly the same step, or None."""
        given = self.request.neighbours
        if given is None:
            return None
        files = self._alike() if self.request.planning.effort == "normal" else []
        kept = (recall(cache_dir() / "plans" / name, Plan.from_json) for name in files)
        return plan_nearby(self.problem, replace(self.request, neighbours=(*given, *filter(None, kept))))

    def _alike(self) -> list[str]:
        """Return the files of plans of nearly the same step, newest first; some may no longer exist."""
        found = read(self.alike, json.loads) or []
        return [name for name in found if name != self.path.name]

    def _kept(self, planned: Planned, there: Plan | None = None) -> Planned:
        """Store a plan, and later its correction in its place. **Arguments:** `there` the plan stored already."""

        def put(plan: Plan) -> None:
            keep(self.path, plan.to_json())

        if there is None or there.saved != planned.plan.saved:
            put(planned.plan)
        planned.keep = put
        return planned

    def _keep_refusal(self, error: InfeasibleBudgetError, *, interrupted: bool) -> None:
        """Store a refusal, whose least budget is at most the least of the known plans, and the plan for that budget,
        which the user is likely to request next.
        """
        if error.least_plan is not None and self.budget != "min":
            path = self._path("plans", error.min_peak_nbytes + self.margin)
            keep(path, error.least_plan.to_json())
            self._add(error.least_plan, path)
        least = min((each.peak_nbytes for each in self._all()), default=error.min_peak_nbytes)
        if least < error.min_peak_nbytes:
            error.min_peak_nbytes = least
            error.args = (f"{error} An earlier plan needs {least} bytes.",)
        if self.refusal and not interrupted:
            told = {name: getattr(error, name) for name in _TOLD}
            keep(self.refusal, json.dumps({"message": str(error), **told}))

    def _better(self, plan: Plan | None, stopwatch: Stopwatch) -> Planned | None:
        """Return an earlier plan that is better than this one (or than none), or None. It no longer counts as cut short
        if the present search was not.
        """
        for each in self._known_better(plan) if self.request.planning.verify else ():
            path = cache_dir() / "plans" / each.file
            found = recall(path, Plan.from_json)
            if found is None:
                continue
            cut_short = found.planning.cut_short and stopwatch.interrupted
            found = replace(
                found,
                planning=replace(found.planning, cut_short=cut_short),
                budget_nbytes=found.peak_nbytes if self.budget == "min" else self.budget,
                margin_nbytes=self.margin,
            )
            if (planned := self._followed(path, found)) is not None:
                return planned
        return None

    def _known_better(self, plan: Plan | None) -> list[Known]:
        """Return the known plans that beat a plan (or none) within the budget or for the least memory, best first."""
        if self.budget == "min":
            most = 0 if plan is None else (1 - MORE) * plan.peak_nbytes
            found = (each for each in self._all() if each.peak_nbytes < most)
            return sorted(each for each in found if each.overhead <= MOST_OVERHEAD)
        room, most = self.budget - self.margin, math.inf if plan is None else self._overhead(plan) - SAVES
        found = (each for each in self._all() if each.peak_nbytes <= room and each.overhead < most)
        return sorted(found, key=lambda each: (each.overhead, each.peak_nbytes))

    def _followed(self, path: Path, plan: Plan) -> Planned | None:
        """Return a plan from a file, applied to the step; None if it no longer holds."""
        try:
            return apply_plan(self.problem, plan, self.request.planning)
        except (CompilationError, InfeasibleBudgetError, PlanMismatchError) as error:
            logger.info("the plan in %s no longer holds: %s", path, error)
            return None

    def _path(self, folder: str, budget: int | Literal["min"], /, **instead: str) -> Path:
        """Return the file for a budget. **Arguments:** `instead` overrides entries of the key, such as the budget and
        the program.
        """
        wanted = {"budget": budget, "margin": self._margin(budget), **instead}
        key = key_of(self.problem, self.request.planning, wanted)
        return cache_dir() / folder / f"{key}.json"

    def _margin(self, budget: int | Literal["min"]) -> int:
        """Return the bytes of a budget that stay free."""
        return 0 if budget == "min" else parse_margin(self.request.planning.workspace_margin, budget)

    def _add(self, plan: Plan, file: Path) -> None:
        """Add a plan that is stored in a file to the known plans."""
        known = [each for each in self._all() if each.file != file.name]
        known.append(Known(plan.peak_nbytes, self._overhead(plan), file.name))
        store(self.known, json.dumps(known))

    def _all(self) -> list[Known]:
        """Return the known plans; some files may no longer exist."""
        return read(self.known, lambda text: [Known(*each) for each in json.loads(text)]) or []

    def _overhead(self, plan: Plan) -> float:
        """Return the overhead that ranks plans: of the compiled kernels where these give the step's time."""
        more = plan.compiled_overhead if self.problem.backend.fuses_reductions else None
        return plan.overhead if more is None else more


def recall(path: Path, parse: Callable[[str], T]) -> T | None:
    """Return the content of a file written by `keep`, parsed; None if it is missing, or unreadable, with a warning."""

    def opened(text: str) -> T:
        stored = json.loads(text)
        if _digest(stored["text"]) != stored["sha256"]:
            raise ValueError("its checksum is wrong")
        return parse(stored["text"])

    found = read(path, opened)
    if found is not None:
        touch(path)
    return found


def keep(path: Path, text: str) -> None:
    """Write a file of the cache, and remove the oldest of its folder if they exceed `MOST_NBYTES`."""
    store(path, json.dumps({"sha256": _digest(text), "text": text}))
    trim(path.parent, MOST_NBYTES)


def enabled() -> bool:
    """Return whether the environment allows a plan cache: not with `JAXREMAT_PLAN_CACHE=0`."""
    return os.environ.get("JAXREMAT_PLAN_CACHE", "").strip().lower() not in ("0", "off", "no", "false")


def key_of(
    problem: Problem, planning: Planning, wanted: dict[str, object], besides: frozenset[str] = frozenset()
) -> str | None:
    """Return the cache key of a step, its planning options and what is `wanted`; None if nothing may be cached.

    **Arguments:** `besides` the fields of `planning` to leave out.
    """
    solver = _identity(planning.solver)
    if not (planning.cache and enabled()) or solver is None:
        return None
    program, here = problem.program, problem.here
    shardings = _shardings(problem.args, problem.kwargs)
    names = (
        {f.name for f in dataclasses.fields(planning)}
        - {"solver", "workspace_margin", "cache", "progress"}
        - besides
    )
    key = {
        "program": problem.fingerprint,
        **wanted,
        "planning": {name: getattr(planning, name) for name in names} | {"solver": solver},
        "question": [repr(problem.pins), problem.allow],
        "device": problem.device.to_json(),
        "host": problem.host and [problem.host.nbytes, problem.host.sparing],
        "target": program.target and program.target.name,
        "runtime": here and [str(here.device_kind), str(here.client.platform_version)],
        "shardings": [repr(program.in_shardings), repr(program.out_shardings), shardings],
        "compiler": [repr(program.compiler_options), os.environ.get("XLA_FLAGS", "")],
        "settings": _compat.settings_in_words(),
        "versions": [jax.__version__, jaxlib.__version__, sources()],
    }
    return _digest(json.dumps(key, sort_keys=True))


def _identity(solver: Solver | None) -> str | None:
    """Return a key of a solver; None for a user's own, whose code may have changed."""
    own = type(solver).__module__.startswith("jaxremat.")
    return repr(solver) if own and dataclasses.is_dataclass(solver) else None


def _shardings(args: object, kwargs: object) -> list[str]:
    """Return the arguments' shardings over several devices; empty on one device, where arrays and shapes get the same
    plan.
    """
    found = []
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        found.append(repr(sharding) if sharding is not None and sharding.num_devices > 1 else "")
    return found if any(found) else []


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sources() -> str:
    """Return a hash of this library's code, so that plans of other versions are not reused."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
