"""Step whose budget no plan meets, or only slow ones -> the arguments to keep in host memory instead.

Invariant: leaves are chosen by the estimated graph, so that all processes of a job choose the same.

An optimizer's state is read once in a step, to be updated. In host memory it needs device memory only for the few
updates in progress (see `_streamed_copies`), at the cost of one copy in each direction. If that is not enough, stacks
that loops read row by row follow, such as the weights of a loop over layers. Only the rows that an iteration uses are
on the device (see `_streamed_stacks`), at the cost of one copy to the device in each pass, and one back.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from .._model._graph import Graph
from .._model._host_copies import LEAST_NBYTES
from .._model._optimizer_updates import updated_alone
from .._program._primitives import on_host
from .._rewrite._streamed_stacks import read_by_rows
from .._runtime._budgets import parse_margin, read_budget
from .._runtime._bytes import format_nbytes
from .._runtime._errors import InfeasibleBudgetError
from ._plan import Plan
from ._planned import Planned
from ._problem import Problem
from ._request import Request
from ._search import LEAST_MORE

UNDER_WAY = 6
"""Number of the largest arrays that are on the device at once: Adam's two for each of three parameters."""

DEAR = 0.1
"""A plan with more overhead than this is compared with plans that keep all movable arguments in host memory."""


WORTH = 0.1
"""An error suggests moving arguments to host memory only from this share of arguments and outputs on."""


class Movable(NamedTuple):
    """Bytes per device of arguments that may be in host memory between steps, by place among the leaves of the traced
    arguments.

    **Fields:** `state` that is read only by its update, in the order of reading; other arguments, `stacks`, that loops
    read row by row, largest first.
    """

    state: dict[int, int]
    stacks: dict[int, int]

    @property
    def sizes(self) -> dict[int, int]:
        """The bytes of state and stacks."""
        return self.state | self.stacks

    def tries(self, missing: float) -> list[tuple[int, ...]]:
        """Return the sets of places to try in turn if this many bytes are missing: the first leaves that may be enough,
        in the order of `sizes`; all of the state, if that may be enough; and all.
        """
        few: list[int] = []
        left = missing + UNDER_WAY * max(self.state.values(), default=0)
        for place, nbytes in self.sizes.items():
            if left <= 0:
                break
            few.append(place)
            left -= nbytes
        among = (few, self.sizes) if missing >= sum(self.state.values()) else (few, self.state, self.sizes)
        return _distinct(among)

    def everything(self) -> list[tuple[int, ...]]:
        """Return the sets of places to try for the least memory: all."""
        return _distinct((self.sizes,))

    def all_of_each(self) -> list[tuple[int, ...]]:
        """Return the sets of places to try in turn if more in host memory may be faster: all of the state, and all."""
        return _distinct((self.state, self.sizes))


def _distinct(places: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    return [each for each in dict.fromkeys(tuple(sorted(each)) for each in places) if each]


def movable(problem: Problem) -> Movable:
    """Return the arguments that may be in host memory between steps, within the host's budget. None may if the device
    has no separate memory, or the user does not allow host memory or gives shardings.
    """
    program = problem.program
    given = program.in_shardings is not None or program.out_shardings is not None  # must stay as given
    if problem.host is None or given or problem.traced.around or problem.traced.source.references:
        return Movable({}, {})
    graph, first = problem.estimated, len(problem.traced.jaxpr.jaxpr.constvars)
    state = updated_alone(graph)
    stacks = [v for v in _stacks(problem) if v in graph.donated]
    left = math.inf if problem.host.nbytes is None else problem.host.nbytes
    found: list[dict[int, int]] = []
    for values in (state, stacks):
        found.append({})
        for v in values:
            if v >= first and LEAST_NBYTES <= (nbytes := graph.values[v].nbytes) <= left:
                found[-1][v - first] = nbytes
                left -= nbytes
    return Movable(*found)


def _stacks(problem: Problem) -> list[int]:
    """Return the arguments on the device that loops read row by row and that are no state, largest first."""
    graph, closed = problem.estimated, problem.traced.jaxpr
    place = {v: len(closed.jaxpr.constvars) + i for i, v in enumerate(closed.jaxpr.invars)}
    rows = (place[v] for v in read_by_rows(problem.traced.merged.program.closed) if not on_host(v.aval))
    return sorted(set(rows).difference(updated_alone(graph)), key=lambda v: (-graph.values[v].nbytes, v))


def advice(problem: Problem) -> str:
    """Return advice, if nothing fits, on arguments that could be in host memory; "" if these are too small. Arguments
    that the planner has moved already are not counted.
    """
    graph = problem.estimated
    if graph.platform != "gpu":
        return ""
    return _of_arguments(problem, graph) + _of_values(graph)


def _of_values(graph: Graph) -> str:
    """Return advice if the limit of host memory is too small for all residuals, else "" (also without host memory)."""
    room = graph.host.nbytes if graph.host is not None else None
    if room is None or sum(graph.values[v].saved_nbytes for v in graph.away.alone) <= room:
        return ""
    return (
        f" `offload` leaves {format_nbytes(room)} of host memory for residuals, which is not enough for all of them: "
        "write a larger limit, if the machine has the memory."
    )


def _of_arguments(problem: Problem, graph: Graph) -> str:
    state, stacks = updated_alone(graph), _stacks(problem)
    told: list[str] = []
    for values, what, name in (
        (state, "read only by the update, such as an optimizer's state", "opt_state"),
        (stacks, "stacks that loops read one row at a time, such as layers' weights", "weights"),
    ):
        nbytes = sum(graph.values[v].nbytes for v in values)
        if nbytes < WORTH * graph.base_nbytes:
            continue
        moved = f"`{name} = jaxremat.to_host({name})`"
        if problem.host is not None and problem.host.nbytes is not None and graph.donated.issuperset(values):
            how = f"`offload` leaves {format_nbytes(problem.host.nbytes)} for them: write a larger limit"
        elif problem.host is None and not graph.donated.isdisjoint(values):
            how = f"Write `optimize(..., offload=True)`, or {moved}"
        else:
            how = f"Write {moved}"
        told.append(
            f" {format_nbytes(nbytes)} of the arguments are {what}. They can stay in host memory. {how}."
        )
    return "".join(told)


def beside(problem: Problem, nbytes: int) -> Problem:
    """Return the problem with this much of its host memory taken."""
    host = problem.host
    if host is None or host.nbytes is None:
        return problem
    return replace(problem, host=host._replace(nbytes=max(host.nbytes - nbytes, 0)))


def certainly_missing(problem: Problem, request: Request) -> int:
    """Return the bytes by which arguments and outputs exceed a budget in bytes, at least 0; 0 for other budgets."""
    budget = read_budget(request.budget)
    return max(problem.estimated.base_nbytes - budget, 0) if isinstance(budget, int) else 0


def missing_nbytes(error: InfeasibleBudgetError, request: Request) -> int:
    """Return the bytes by which the least memory exceeds the budget."""
    margin = parse_margin(request.planning.workspace_margin, error.budget_nbytes)
    return error.min_peak_nbytes - (error.budget_nbytes - margin)


def is_dear(plan: Plan) -> bool:
    """Return whether a plan is so slow that one with more arguments in host memory may be faster."""
    return _overhead(plan) > DEAR


def best(plans: Sequence[Planned], *, least: bool) -> Planned:
    """Return the fastest of the plans; for the `least` memory, of those that need about the least."""
    most = (1 + LEAST_MORE) * min(each.plan.peak_nbytes for each in plans) if least else math.inf
    able = (each for each in plans if each.plan.peak_nbytes <= most)
    return min(able, key=lambda each: seconds(each.plan))


def seconds(plan: Plan) -> float:
    """Return the planned step's time, by a roofline of the compiled program, or by the model."""
    return plan.account.step_seconds * (1.0 + _overhead(plan))


def _overhead(plan: Plan) -> float:
    return plan.overhead if plan.compiled_overhead is None else plan.compiled_overhead
