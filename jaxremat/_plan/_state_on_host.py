"""Step whose budget is met by nothing, or only dearly -> what of its arguments host memory may hold instead.

An optimizer's state is read once in a step, to be updated. In host memory it takes none of the device's, but for
the few updates that are under way (see `_streamed_copies`); its price is the way there and back.

Law: leaves are chosen by the graph by rules alone, so that all processes of a job choose the same.
"""

import math
from dataclasses import replace

from .._model._host_copies import LEAST_NBYTES
from .._model._optimizer_updates import updated_alone
from .._runtime._budgets import parse_margin
from .._runtime._errors import InfeasibleBudgetError
from ._plan import Plan
from ._problem import Problem
from ._request import Request

UNDER_WAY = 6
"""So many of the largest arrays are on the device at once: Adam's two of each of three parameters."""

DEAR = 0.1
"""Plans that take this share of the step longer are compared with such that have all of it in host memory."""


def movable(problem: Problem) -> dict[int, int]:
    """Return bytes on one device of what may be in host memory between steps, by place among the leaves of the traced
    arguments, in the order in which they are read; none where the device has no other memory, the user wants none used,
    or says where arguments are, and no more than the host's budget.
    """
    program = problem.program
    given = program.in_shardings is not None or program.out_shardings is not None  # as which they must stay
    if problem.host is None or given or problem.traced.around or problem.traced.source.references:
        return {}
    graph, first = problem.estimated, len(problem.traced.jaxpr.jaxpr.constvars)
    sizes = {v - first: graph.values[v].nbytes for v in updated_alone(graph)}
    left = math.inf if problem.host.nbytes is None else problem.host.nbytes
    found: dict[int, int] = {}
    for place, nbytes in sizes.items():
        if place >= 0 and LEAST_NBYTES <= nbytes <= left:
            found[place] = nbytes
            left -= nbytes
    return found


def beside(problem: Problem, nbytes: int) -> Problem:
    """Return what is planned for, with so much of host memory taken."""
    host = problem.host
    if host is None or host.nbytes is None:
        return problem
    return replace(problem, host=host._replace(nbytes=max(host.nbytes - nbytes, 0)))


def missing_nbytes(error: InfeasibleBudgetError, request: Request) -> int:
    """Return what the least that was found is above its budget."""
    margin = parse_margin(request.planning.workspace_margin, error.budget_nbytes)
    return error.min_peak_nbytes - (error.budget_nbytes - margin)


def enough(sizes: dict[int, int], missing: int) -> list[tuple[int, ...]]:
    """Return places to try in turn: the first that may do, then all."""
    found: list[int] = []
    left = missing + UNDER_WAY * max(sizes.values(), default=0)
    for place, nbytes in sizes.items():
        if left > 0:
            found.append(place)
            left -= nbytes
    return list(dict.fromkeys(tuple(sorted(places)) for places in (found, sizes) if places))


def is_dear(plan: Plan) -> bool:
    """Return whether something else may well be cheaper."""
    return _overhead(plan) > DEAR


def seconds(plan: Plan) -> float:
    """Return what the planned step takes, by a roofline of the compiled program, or as modelled."""
    return plan.account.step_seconds * (1.0 + _overhead(plan))


def _overhead(plan: Plan) -> float:
    return plan.overhead if plan.compiled_overhead is None else plan.compiled_overhead
