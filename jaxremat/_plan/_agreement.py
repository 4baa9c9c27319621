"""Program, request, in each process of a job -> the same plan in all of them, compiled and confirmed in each.

Invariants: all processes have the plan, or all raise. A difference between them (in code, step or request) is an error
that names the process. The least device memory of all processes counts. Only one process uses the plan cache.

The first of the processes on whose devices the step runs is the leader: it plans, and compiles the candidates of the
search. The others receive its plan.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jaxlib import version as jaxlib

from .._model._graph import Graph
from .._model._optimizer_updates import with_updates
from .._model._schedule import close_over_dependencies
from .._model._simulate import simulate
from .._program import _compat
from .._runtime._errors import ProcessError
from .._runtime._meeting import Meeting, first_said
from .._runtime._progress import phase
from .._solver import Solution
from ._made_for import placeless
from ._plan import Plan
from ._plan_cache import recall_or_plan, sources
from ._planned import Planned, apply_plan
from ._problem import Problem
from ._request import Request
from ._residuals import Found, counted

_meetings = Counter[tuple[int, ...]]()
"""The number of meetings of each group of processes so far. All processes call their steps in the same order."""


def agreed(problem: Problem, request: Request, given: Plan | None) -> Planned:
    """Return the plan of a step that runs on devices of one process or of several.

    **Arguments:** `given` the plan to apply, None to make one.

    **Raises:** as `make_plan`; `PlanMismatchError`; `ProcessError`.
    """
    members = problem.processes
    if len(members) == 1:
        return _alone(problem, request, given)
    store = _compat.process_store()
    if store is None or jax.process_index() not in members:
        raise ProcessError(
            f"The step runs on devices of the processes {members}, and this one (process {jax.process_index()}) "
            "cannot take part in planning it. Call `jax.distributed.initialize` in all of them, and call the "
            "step in each process that has some of its devices.",
            process=jax.process_index(),
        )
    number = _meetings[members]
    _meetings[members] += 1
    name = "jaxremat/" + "-".join(map(str, members))
    meeting = Meeting(store, f"{name}/{number}", members, jax.process_index())
    with meeting.attended():
        if meeting.me != meeting.leader:
            return _followed(meeting, problem, request, given)
        planned = _led(meeting, problem, request, given)
    if number:
        meeting.forget(f"{name}/{number - 1}")  # all processes have left that one
    return planned


def found_first(key: str, graph: Graph, found: Found, restrict: Callable[[Graph], Graph] | None) -> Found:
    """Return the first process's schedule for a function that every process plans when tracing it: at a time limit,
    solvers may return different schedules in different processes.

    **Arguments:** `key` identifies the function; `graph` of it, and `restrict` as in `plan_held`.
    """
    store = _compat.process_store()
    if jax.process_count() == 1 or store is None:
        return found
    schedule = found.solution.schedule
    own = {
        "starts": [stage.start for stage in found.graph.stages],
        "saved": sorted(schedule.saved),
        "kept": sorted(map(list, schedule.kept)),
    }
    first = first_said(store, "jaxremat/held/" + hashlib.sha256(placeless(key).encode()).hexdigest(), own)
    if first == own:
        return found
    cut = replace(graph, stages=with_updates(graph, [*first["starts"], len(graph.nodes)]))
    cut = restrict(cut) if restrict else cut
    schedule = close_over_dependencies(cut, first["saved"], map(tuple, first["kept"]))
    solution = Solution(schedule, solver=found.solution.solver)
    return replace(found, graph=cut, solution=solution, profile=simulate(counted(cut), schedule))


def _alone(problem: Problem, request: Request, given: Plan | None) -> Planned:
    if given is not None:
        return apply_plan(problem, given, request.planning)
    return recall_or_plan(problem, request)


def _led(meeting: Meeting, problem: Problem, request: Request, given: Plan | None) -> Planned:
    """Make the plan, and send it to the other processes."""
    with meeting.saying("plan") as say:
        own = _asked(problem, request, given)
        asked = {process: meeting.hear("asked", process) for process in meeting.others}
        for process, theirs in asked.items():
            _compare(process, theirs, own)
        reported = [each["device_nbytes"] for each in (own, *asked.values()) if each["device_nbytes"]]
        least = replace(request, device_nbytes=min(reported, default=None))
        planned = _alone(problem, least, given)
        say(planned.plan.to_json())
    with meeting.saying("verdict") as say:
        _ = planned.executable()
        for process in meeting.others:
            meeting.hear("done", process)
        say("agreed")
    return planned


def _followed(meeting: Meeting, problem: Problem, request: Request, given: Plan | None) -> Planned:
    """Receive the plan, and apply it."""
    with meeting.saying("asked") as say:
        say(_asked(problem, request, given))
    with phase(f"waiting for the plan of process {meeting.leader}"):
        text = meeting.hear("plan", meeting.leader)
    with meeting.saying("done") as say:
        planned = apply_plan(problem, Plan.from_json(text), request.planning, to_run=True)
        say("agreed")
    with phase("waiting for the other processes"):
        meeting.hear("verdict", meeting.leader)
    return planned


def _asked(problem: Problem, request: Request, given: Plan | None) -> dict[str, Any]:
    """Return the request of a process, to compare with the others'."""
    alike = replace(request.planning, progress=None, cache=True)
    options = alike, request.pins, request.offload, request.allow
    return {
        "versions": [jax.__version__, jaxlib.__version__, sources()],
        "program": problem.fingerprint,
        "plan": given and given.fingerprint,
        "budget": repr(request.budget),
        "options": placeless(repr(options)),
        "device_nbytes": request.device_nbytes,
    }


_DIFFERENCES: dict[str, Callable[[Any, Any], str]] = {
    "versions": lambda theirs, own: (
        f"runs other versions: jax {theirs[0]} and jaxlib {theirs[1]}, here {own[0]} and {own[1]}"
        if theirs[:2] != own[:2]
        else "runs another version of jaxremat"
    ),
    "program": lambda theirs, own: f"has another version of the step ({theirs[:12]}, here {own[:12]})",
    "plan": lambda theirs, own: (
        "follows another plan"
        if theirs and own
        else "has `plan=...` where the others have a budget, or vice versa"
    ),
    "budget": lambda theirs, own: f"asks for the budget {theirs}, here {own}",
    "options": lambda theirs, own: f"plans with other options ({theirs}, here {own})",
}
"""Fields that must be equal in all processes, and the message for each that is not."""


def _compare(process: int, theirs: dict[str, object], own: dict[str, object]) -> None:
    """Compare two requests. **Raises:** `ProcessError` if they differ."""
    for name, say in _DIFFERENCES.items():
        if theirs[name] != own[name]:
            raise ProcessError(
                f"Process {process} {say(theirs[name], own[name])}. All processes of a job must call the same steps "
                "in the same order; compare their code, their arguments' shapes and their options.",
                process=process,
            )
