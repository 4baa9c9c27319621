"""Step whose budget is met by nothing, or only dearly -> what of its arguments host memory may hold instead.

An optimizer's state is read once in a step, to be updated. In host memory it takes none of the device's, but for
the few updates that are under way (see `_streamed_copies`); its price is the way there and back. Where that is not
enough, stacks go that loops read row by row, as those over layers read their weights: of these only the rows that an
iteration works on are on the device (see `_streamed_stacks`). Their price is the way there once in each pass, and back.

Law: leaves are chosen by the graph by rules alone, so that all processes of a job choose the same.
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
"""So many of the largest arrays are on the device at once: Adam's two of each of three parameters."""

DEAR = 0.1
"""Plans that take this share of the step longer are compared with such that have all of it in host memory."""


WORTH = 0.1
"""Moving less of the arguments to host memory is not worth a word."""


class Movable(NamedTuple):
    """Bytes on one device of what may be in host memory between steps, by place among the leaves of the traced
    arguments.

    **Fields:** `state` that is read to be updated alone, in the order in which it is read; `stacks` that loops read row
    by row besides, the largest first.
    """

    state: dict[int, int]
    stacks: dict[int, int]

    @property
    def sizes(self) -> dict[int, int]:
        """The bytes of all."""
        return self.state | self.stacks

    def tries(self, missing: float) -> list[tuple[int, ...]]:
        """Return places to try in turn where so many bytes are missing: the first of the state that may do, all of it,
        the first of the stacks that may do besides, and all that can be moved.
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
        """Return the places to try for the least memory: all."""
        return _distinct((self.sizes,))

    def all_of_each(self) -> list[tuple[int, ...]]:
        """Return places to try in turn where more in host memory may be cheaper: all of the state, and all."""
        return _distinct((self.state, self.sizes))


def _distinct(places: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    return [each for each in dict.fromkeys(tuple(sorted(each)) for each in places) if each]


def movable(problem: Problem) -> Movable:
    """Return what may be in host memory between steps: nothing where the device has no other memory, the user wants
    none used, or says where arguments are, and no more than the host's budget.
    """
    program = problem.program
    given = program.in_shardings is not None or program.out_shardings is not None  # as which they must stay
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
    """Return the arguments on the device that loops read row by row, and that are no state, the largest first."""
    graph, closed = problem.estimated, problem.traced.jaxpr
    place = {v: len(closed.jaxpr.constvars) + i for i, v in enumerate(closed.jaxpr.invars)}
    rows = (place[v] for v in read_by_rows(problem.traced.merged.program.closed) if not on_host(v.aval))
    return sorted(set(rows).difference(updated_alone(graph)), key=lambda v: (-graph.values[v].nbytes, v))


def advice(problem: Problem) -> str:
    """Return what to say, where nothing fits, of arguments that host memory could hold; "" where they are not worth
    it. Those that the planner has moved are no longer on the device.
    """
    graph = problem.estimated
    if graph.platform != "gpu":
        return ""
    return _of_arguments(problem, graph) + _of_values(graph)


def _of_values(graph: Graph) -> str:
    """Return what to say of values that find no room in host memory; "" where there is enough, or none at all."""
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
    """Return what is planned for, with so much of host memory taken."""
    host = problem.host
    if host is None or host.nbytes is None:
        return problem
    return replace(problem, host=host._replace(nbytes=max(host.nbytes - nbytes, 0)))


def certainly_missing(problem: Problem, request: Request) -> int:
    """Return what arguments and results alone are above a budget of bytes; 0 where they are not, or it is of another
    kind.
    """
    budget = read_budget(request.budget)
    return max(problem.estimated.base_nbytes - budget, 0) if isinstance(budget, int) else 0


def missing_nbytes(error: InfeasibleBudgetError, request: Request) -> int:
    """Return what the least that was found is above its budget."""
    margin = parse_margin(request.planning.workspace_margin, error.budget_nbytes)
    return error.min_peak_nbytes - (error.budget_nbytes - margin)


def is_dear(plan: Plan) -> bool:
    """Return whether something else may well be cheaper."""
    return _overhead(plan) > DEAR


def best(plans: Sequence[Planned], *, least: bool) -> Planned:
    """Return the fastest of the plans; for the `least` memory, of those that need about that."""
    most = (1 + LEAST_MORE) * min(each.plan.peak_nbytes for each in plans) if least else math.inf
    able = (each for each in plans if each.plan.peak_nbytes <= most)
    return min(able, key=lambda each: seconds(each.plan))


def seconds(plan: Plan) -> float:
    """Return what the planned step takes, by a roofline of the compiled program, or as modelled."""
    return plan.account.step_seconds * (1.0 + _overhead(plan))


def _overhead(plan: Plan) -> float:
    return plan.overhead if plan.compiled_overhead is None else plan.compiled_overhead
