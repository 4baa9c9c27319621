"""Graph, schedules -> account: the data about the graph that a report needs, compact enough for the plan's file.

Invariant: the saved and unsaved bytes of all modules add up to those of the plan's actions.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from .._model._graph import Graph, Node, Stage
from .._model._schedule import Schedule, close_over_dependencies, idle
from .._model._simulate import extra_seconds, run_again
from .._model._timeline import Group, Groups, Timeline, module_path, rounded, timeline


class Share(NamedTuple):
    """One module's share, without the modules inside it.

    **Fields:** `path` the names of its parents and its own; `saved_nbytes`, `recomputed_nbytes` and `dropped_nbytes`
    (neither saved nor needed again) of its residuals; `seconds` of running its forward pass once more, and
    `extra_seconds` of recomputation.
    """

    path: tuple[str, ...]
    saved_nbytes: int
    recomputed_nbytes: int
    dropped_nbytes: int
    seconds: float
    extra_seconds: float


@dataclass(frozen=True, slots=True)
class Account:
    """The step's memory and time by module and over time, by the model.

    **Fields:** `base_nbytes` arguments + outputs - aliased bytes; `step_seconds` of the plain step; `loops` the number
    of inlined loops, whose bodies the timelines show once; `plain` and `planned` timelines, None if the plain step
    runs, and the `groups` that they name by index; `shares` by module, in program order.
    """

    base_nbytes: int
    step_seconds: float
    loops: int
    plain: Timeline
    planned: Timeline | None
    groups: tuple[Group, ...]
    shares: tuple[Share, ...]

    @property
    def runs(self) -> tuple[Timeline, ...]:
        """The existing timelines, the plain step's first."""
        return (self.plain,) if self.planned is None else (self.plain, self.planned)


def account(plain: Graph, graph: Graph, schedule: Schedule) -> Account:
    """Return the account of a schedule of a graph; `plain` is the graph of the plain step."""
    groups = Groups()
    before = _before(plain, groups)
    after = timeline(graph, schedule, max(plain.step_seconds + extra_seconds(graph, schedule), 0.0), groups)
    shares, loops = _shares(graph, schedule), len(plain.parents)
    return Account(graph.base_nbytes, plain.step_seconds, loops, before, after, groups.listed(), shares)


def account_of_plain(plain: Graph) -> Account:
    """Return the account of the plain step."""
    groups = Groups()
    before = _before(plain, groups)
    shares = _shares(plain, close_over_dependencies(plain, plain.residuals))
    loops = len(plain.parents)
    return Account(plain.base_nbytes, plain.step_seconds, loops, before, None, groups.listed(), shares)


def _before(plain: Graph, groups: Groups) -> Timeline:
    # One stage: the plain step has no barriers to wait for.
    whole = (Stage(plain.forward_stop, len(plain.nodes)),) if plain.stages else ()
    plain = replace(plain, stages=whole)
    return timeline(plain, close_over_dependencies(plain, plain.residuals), plain.step_seconds, groups)


def _shares(graph: Graph, schedule: Schedule) -> tuple[Share, ...]:
    found: dict[tuple[str, ...], list[float]] = {}
    again: dict[int, list[float]] = {}
    for k, nodes in enumerate(schedule.recomputed):
        for n, seconds in zip(nodes, run_again(graph, k, nodes), strict=True):
            again.setdefault(n, []).append(seconds)
    residuals = set(graph.residuals) - idle(graph, schedule)
    for node in graph.nodes:
        if not node.forward:
            continue
        share = found.setdefault(_path(node), [0, 0, 0, 0.0, 0.0])
        for v in residuals.intersection(node.outputs):
            share[0 if v in schedule.saved else 1 if node.id in again else 2] += graph.values[v].saved_nbytes
        share[3] += node.seconds
        share[4] += sum(again.get(node.id, ()))
    return tuple(
        Share(path, *map(int, share[:3]), *map(rounded, share[3:]))
        for path, share in found.items()
        if any(share)
    )


def _path(node: Node) -> tuple[str, ...]:
    """Return the modules of a node; its source line if it is in none."""
    return module_path(node.scope) or (node.source or "(no name)",)
