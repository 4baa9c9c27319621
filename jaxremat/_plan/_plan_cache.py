"""Program, request -> the plan that was made for them before, on disk; or a fresh one, which is kept there.

Laws: a plan is found under all that planning looks at, the planner's own code included, and nothing else; one that a
clock cut short is used, but made anew when it is asked for again, and the better one kept; what is found is
emitted, compiled and held against its budget as a plan from a file is, so that a cache can cost time but no byte.
A budget that a plan made before keeps, with whatever other budget, is not refused, and within it nothing that takes
longer is returned; for the least memory nothing is returned that needs a good deal more than the least of them.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
from jaxlib import version as jaxlib

from .._program import _compat
from .._runtime._bytes import parse_budget, parse_margin
from .._runtime._cache_folder import cache_dir, read, store, touch, trim
from .._runtime._errors import InfeasibleBudgetError, PlanMismatchError
from .._runtime._progress import Stopwatch, timed
from .._solver import Solver
from ._plan import Plan
from ._planned import Planned, apply_plan
from ._problem import Problem
from ._request import Options, Request
from ._search import MOST_OVERHEAD
from ._state_on_host import movable
from ._verify import make_plan

T = TypeVar("T")
logger = logging.getLogger("jaxremat")

_SEARCHING = frozenset({"time_limit", "effort", "planning_seconds"})
"""How long to look for a plan, which does not matter to plans that are found."""

_TOLD = ("budget_nbytes", "min_peak_nbytes", "step_seconds")
"""What is kept of a refusal besides its text."""

MOST_NBYTES = 256 * 2**20
"""Plans kept, all together. A plan of a network with thousands of equations takes some hundred kilobytes."""

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
    """**Fields:** `path` of the list of them; `fuses` whether their compiled programs say what they take."""

    path: Path
    fuses: bool

    @classmethod
    def of(cls, key: str, fuses: bool) -> "KnownPlans":
        """Of one program with one set of options, whatever the budget."""
        return cls(cache_dir() / "known" / f"{key}.json", fuses)

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
        return plan.overhead if plan.compiled_overhead is None or not self.fuses else plan.compiled_overhead

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


def recall_or_plan(problem: Problem, request: Request) -> Planned:
    """The plan kept for this request, if there is one that still fits; else a new one. **Raises:** as `make_plan`."""
    path = _path(problem, request)
    if path is None:
        return make_plan(problem, request)
    refusal = _path(problem, request, refused=True) if movable(problem) else None
    if refusal and (refused := recall(refusal, json.loads)) is not None:
        raise InfeasibleBudgetError(**refused)
    plan = recall(path, Plan.from_json)
    if plan is not None and not plan.planning.cut_short:  # else it is looked for once more
        try:
            follow = functools.partial(apply_plan, problem, plan, request.options)
            planned = problem.defects.attempted("emitting a plan that was kept", follow, plan.form)
        except (InfeasibleBudgetError, PlanMismatchError) as error:
            logger.info("the plan in %s no longer holds: %s", path, error)
        else:
            if planned is not None:
                logger.info("followed the plan in %s", path)
                return _kept(planned, path, plan)
    key = key_of(problem, request.options, {"known": True}, besides=_SEARCHING)
    assert key is not None  # there is none for what is not kept
    known = KnownPlans.of(key, problem.backend.fuses)
    with timed() as stopwatch:
        return _fresh(problem, request, known, path, refusal, stopwatch)


def _fresh(
    problem: Problem,
    request: Request,
    known: KnownPlans,
    path: Path,
    refusal: Path | None,
    stopwatch: Stopwatch,
) -> Planned:
    """Make a plan, or take a better one that was made before, and keep it there. **Raises:** as `make_plan`."""
    try:
        planned = make_plan(problem, request)
    except InfeasibleBudgetError as error:
        planned = _known(problem, request, known, None, stopwatch)
        if planned is None:
            _keep_least(problem, request, known, error)
            error = known.corrected(error)
            if refusal and not stopwatch.interrupted:  # what is planned instead is kept, see `_state_on_host`
                told = {name: getattr(error, name) for name in _TOLD}
                keep(refusal, json.dumps({"message": str(error), **told}))
            raise error from None
    else:
        planned = _known(problem, request, known, planned.plan, stopwatch) or planned
    _kept(planned, path)
    if request.options.verify:
        known.add(planned.plan, path)
    return planned


def _kept(planned: Planned, path: Path, kept: Plan | None = None) -> Planned:
    """Keep a plan, and in its place whatever corrects it. **Arguments:** `kept` what is there."""

    def put(plan: Plan) -> None:
        keep(path, plan.to_json())

    if kept is None or kept.saved != planned.plan.saved:
        put(planned.plan)
    planned.keep = put
    return planned


def _keep_least(problem: Problem, request: Request, known: KnownPlans, error: InfeasibleBudgetError) -> None:
    """Keep the plan of the least that a refusal names, which is what will be asked for next."""
    if error.least_plan is not None:
        _, margin = _asked(request)
        path = _path(problem, replace(request, budget=error.min_peak_nbytes + margin))
        assert path is not None  # as that of the request
        keep(path, error.least_plan.to_json())
        known.add(error.least_plan, path)


def _known(
    problem: Problem, request: Request, known: KnownPlans, plan: Plan | None, stopwatch: Stopwatch
) -> Planned | None:
    """Return a plan that was made before and is better than this one, or than none; None where there is none. It is
    final where no clock cut the present search short.
    """
    budget, margin = _asked(request)
    room = None if budget == "min" else budget - margin
    for each in known.better(plan, room) if request.options.verify else ():
        found = recall(cache_dir() / "plans" / each.file, Plan.from_json)
        if found is None:
            continue
        cut_short = found.planning.cut_short and stopwatch.interrupted
        found = replace(found, planning=replace(found.planning, cut_short=cut_short))
        allowed = found.peak_nbytes if budget == "min" else budget
        try:
            found = replace(found, budget_nbytes=allowed, margin_nbytes=margin)
            return apply_plan(problem, found, request.options)
        except (InfeasibleBudgetError, PlanMismatchError) as error:
            logger.info("the plan in %s no longer holds: %s", each.file, error)
    return None


def _asked(request: Request) -> tuple[int | Literal["min"], int]:
    """The budget in bytes, and what of it stays free."""
    budget = parse_budget(request.budget, request.device_nbytes)
    return budget, 0 if budget == "min" else parse_margin(request.options.workspace_margin, budget)


def recall(path: Path, parse: Callable[[str], T]) -> T | None:
    """What `keep` wrote there; None where there is none, or where it cannot be read, which is a warning."""

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
    """Write a file of the cache, and remove the oldest of its folder where they have become too many."""
    store(path, json.dumps({"sha256": _digest(text), "text": text}))
    trim(path.parent, MOST_NBYTES)


def enabled() -> bool:
    """Whether the environment lets plans be kept: not with `JAXREMAT_PLAN_CACHE=0`."""
    return os.environ.get("JAXREMAT_PLAN_CACHE", "").strip().lower() not in ("0", "off", "no", "false")


def _path(problem: Problem, request: Request, *, refused: bool = False) -> Path | None:
    """Where the plan of a request is kept, or that there is none; None where it may not be."""
    budget, margin = _asked(request)
    key = key_of(problem, request.options, {"budget": budget, "margin": margin})
    return None if key is None else cache_dir() / ("refusals" if refused else "plans") / f"{key}.json"


def key_of(
    problem: Problem, options: Options, wanted: dict[str, Any], besides: frozenset[str] = frozenset()
) -> str | None:
    """What tells something `wanted` of a step from the like of other steps; None where nothing may be kept.

    **Arguments:** `besides` options that tell nothing apart.
    """
    solver = _identity(options.solver)
    if not (options.cache and enabled()) or solver is None:
        return None
    program, here = problem.program, problem.here
    shardings = _shardings(problem.args, problem.kwargs)
    names = (
        {f.name for f in dataclasses.fields(options)}
        - {"solver", "workspace_margin", "cache", "progress"}
        - besides
    )
    key = {
        "program": problem.fingerprint,
        **wanted,
        "options": {name: getattr(options, name) for name in names}
        | {"solver": solver, "pins": repr(options.pins)},
        "device": problem.device.to_json(),
        "host": problem.host and problem.host.nbytes,
        "target": program.target and program.target.name,
        "runtime": here and [str(here.device_kind), str(here.client.platform_version)],
        "shardings": [repr(program.in_shardings), repr(program.out_shardings), shardings],
        "compiler": [repr(program.compiler_options), os.environ.get("XLA_FLAGS", "")],
        "settings": _compat.settings_in_words(),
        "versions": [jax.__version__, jaxlib.__version__, sources()],
    }
    return _digest(json.dumps(key, sort_keys=True))


def _identity(solver: Solver | None) -> str | None:
    """What tells a solver from others; None of a user's, of which nobody knows whether it is still the same."""
    own = type(solver).__module__.startswith("jaxremat.")
    return repr(solver) if own and dataclasses.is_dataclass(solver) else None


def _shardings(args: Any, kwargs: Any) -> list[str]:
    """How arguments are laid out over several devices; on one device arrays and mere shapes are planned alike."""
    found = []
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        found.append(repr(sharding) if sharding is not None and sharding.num_devices > 1 else "")
    return found if any(found) else []


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sources() -> str:
    """A hash of this library's code: another planner plans anew."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
