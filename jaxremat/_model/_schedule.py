"""Saved values -> complete schedule: the closure that makes any choice of saved values runnable.

Invariant: in a schedule from `close_over_dependencies`, every residual that a stage reads is saved, recomputed in that
stage from residuals available to it, or kept from the stage before. A saved value may be in host memory between its
readers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .._runtime._errors import SolverError
from ._graph import Graph
from ._host_copies import HostCopy

Passing = tuple[str, int]
"""A barrier of an emitted schedule by its name, and the position of one of its operands."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The fate of each residual: saved, recomputed or offloaded.

    **Fields:** `saved`: values that stay from the forward pass to their last reader. `recomputed`: for each stage, the
    ids of the *nodes* that run again before it, ascending. `kept`: pairs (value, stage) of recomputed values that the
    stage before hands on to `stage`. `offloaded`: the copies of saved values that are in host memory for a while.
    """

    saved: frozenset[int]
    recomputed: tuple[tuple[int, ...], ...]
    kept: frozenset[tuple[int, int]] = frozenset()
    offloaded: frozenset[HostCopy] = frozenset()

    @property
    def drops_nothing(self) -> bool:
        """Whether nothing is recomputed or offloaded."""
        return not any(self.recomputed) and not self.offloaded

    @property
    def away(self) -> frozenset[int]:
        """The values that are offloaded."""
        return frozenset(copy.value for copy in self.offloaded)


def must_save(graph: Graph) -> frozenset[int]:
    """Return the residuals that every schedule saves: those that may not be computed twice, small ones, and pinned
    ones.
    """
    return frozenset(
        v
        for v in graph.residuals
        if v not in graph.pinned["recompute"]
        and (not graph.recomputable(v) or graph.is_small(v) or graph.values[v].is_output)
    )


def save_all(graph: Graph) -> Schedule:
    """Return the plain step's schedule."""
    return Schedule(frozenset(graph.residuals), ((),) * len(graph.stages))


def close_over_dependencies(
    graph: Graph,
    saved: Iterable[int],
    kept: Iterable[tuple[int, int]] = (),
    offloaded: Iterable[int] = (),
) -> Schedule:
    """Return the schedule that saves `saved` and all values that must be saved; stages recompute the other values they
    need.

    **Arguments:**

    - `saved`: ids of residuals; ids of other values and of pinned ones are ignored.
    - `kept`: pairs (value, stage): if the value is recomputed, keep it from the stage before for this stage. Pairs that
      are not `Graph.holdable` are ignored.
    - `offloaded`: saved values to keep in host memory between their readers, in addition to those that are pinned to
      it; values that cannot be offloaded (see `Graph.away`) stay on the device.

    **Raises:** `SolverError` for ids that the graph does not have.
    """
    ids = tuple(saved)
    chosen = frozenset(ids)
    _check_ids("value", ids, len(graph.values))
    saved_values = must_save(graph) | (chosen & frozenset(graph.residuals)) - graph.pinned["recompute"]
    kept_pairs = frozenset((v, k) for v, k in kept if v not in saved_values and graph.holdable(v, k))
    wanted_next: list[set[int]] = [set() for _ in graph.stages]
    kept_for: list[set[int]] = [set() for _ in graph.stages]
    for v, k in kept_pairs:
        kept_for[k].add(v)
        wanted_next[k - 1].add(v)
    recomputed: list[tuple[int, ...]] = []
    for k, there in enumerate(kept_for):
        nodes: set[int] = set()
        stack = [*graph.needs(k), *wanted_next[k]]
        while stack:
            v = stack.pop()
            producer = graph.values[v].producer
            if v in saved_values or v in there or producer in nodes or not graph.recomputable(v):
                continue
            if graph.stage_of[producer] >= k:  # this stage or a later one computes it
                continue
            nodes.add(producer)
            stack.extend(graph.reads[producer])
        recomputed.append(tuple(sorted(nodes)))
    away = saved_values.intersection((*offloaded, *graph.pinned["offload"]))
    copies = graph.away.placed(away, recomputed) if away else frozenset()
    return Schedule(saved_values, tuple(recomputed), kept_pairs, copies)


def _check_ids(what: str, ids: Iterable[int], count: int) -> None:
    """Check that the graph has these ids. **Raises:** `SolverError` for the first that it does not have."""
    wrong = next((i for i in ids if not 0 <= i < count), None)
    if wrong is not None:
        raise SolverError(
            f"A schedule names {what} {wrong}, but the graph has {what}s 0 to {count - 1}. "
            f"A solver must return ids of `graph.{what}s`."
        )


def _check_pins(graph: Graph, schedule: Schedule) -> None:
    """Check that the schedule honours all pins. **Raises:** `SolverError` for the first that it does not."""
    cuts = {stage.start for stage in graph.stages}
    residuals = frozenset(graph.residuals)
    for pin in graph.pins:
        if pin.action == "stage":
            if pin.at not in cuts and not graph.backend.fuses_reductions:
                raise SolverError(f"No stage begins at node {pin.at}, but {pin.origin} asks for one.")
        elif (pin.at in schedule.saved) == (pin.action == "recompute") and pin.at in residuals:
            done = "saves" if pin.action == "recompute" else "does not save"
            raise SolverError(
                f"A schedule {done} value {pin.at}, which contradicts {pin.origin}. "
                "`close_over_dependencies(graph, saved)` honours all pins; `graph.pins` lists them."
            )


def idle(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """Return saved values that no pin asks for and no backward or recomputed node reads: all that needs them is saved
    too.
    """
    read = {v for k in range(len(graph.stages)) for v in graph.needs(k)}
    read.update(v for nodes in schedule.recomputed for n in nodes for v in graph.reads[n])
    return schedule.saved - read - graph.pinned["save"]


def check(graph: Graph, schedule: Schedule) -> Schedule:
    """Return the schedule itself, if it can be emitted.

    **Raises:** `SolverError` if a stage would read a value that is neither saved, recomputed nor kept, or if a pin is
    not honoured.
    """
    if len(schedule.recomputed) != len(graph.stages):
        raise SolverError(
            f"A schedule has {len(schedule.recomputed)} stages, but the graph has {len(graph.stages)}. "
            "Return `close_over_dependencies(graph, saved)`, or one tuple of nodes per stage."
        )
    _check_ids("value", {*schedule.saved, *(v for v, _ in schedule.kept)}, len(graph.values))
    _check_ids("node", {n for nodes in schedule.recomputed for n in nodes}, len(graph.nodes))
    _check_pins(graph, schedule)
    for v, k in sorted(schedule.kept):
        if k >= len(graph.stages) or not graph.holdable(v, k):
            raise SolverError(
                f"A schedule keeps value {v} into stage {k}: values are kept from one stage into the next, "
                f"not into or out of a loop, and there are stages 0 to {len(graph.stages) - 1}."
            )
    previous: set[int] = set()
    for k, nodes in enumerate(schedule.recomputed):
        available = {v for v, stage in schedule.kept if stage == k}
        if not available <= previous:
            raise SolverError(
                f"Stage {k} keeps values {sorted(available - previous)} that stage {k - 1} does not have."
            )

        def missing(v: int, k: int = k, available: set[int] = available) -> bool:
            ready = v in schedule.saved or v in available or not graph.is_residual(v)
            return not ready and graph.stage_of[graph.values[v].producer] < k

        for n in nodes:
            node = graph.nodes[n]
            if not (node.forward and node.repeatable):
                raise SolverError(
                    f"Stage {k} recomputes node {n} ({node.primitive}), which may run only once."
                )
            if not graph.repeats(graph.nodes[graph.stages[k].start].loop, node.loop):
                raise SolverError(
                    f"Stage {k} recomputes node {n} ({node.primitive}) of another loop, whose slices it does not see."
                )
            if lost := [v for v in graph.reads[n] if missing(v)]:
                raise SolverError(
                    f"Stage {k} recomputes node {n} ({node.primitive}) from values {lost}, which are gone."
                )
            # Later nodes of this stage, and its own kernels, may read these outputs.
            available.update(node.outputs)
        if lost := [v for v in graph.needs(k) if missing(v)]:
            raise SolverError(f"Stage {k} reads values {lost}, which are neither saved nor recomputed.")
        previous = available
    _check_copies(graph, schedule)
    return schedule


def _check_copies(graph: Graph, schedule: Schedule) -> None:
    """Check the copies. **Raises:** `SolverError` for the first value that cannot be in host memory, or is read too
    early.
    """
    first = graph.away.first(schedule.away, schedule.recomputed)
    for copy in sorted(schedule.offloaded):
        there = copy.value in schedule.saved and copy.value in first and 0 <= copy.begun < len(graph.stages)
        if there and graph.values[copy.value].length:
            there = graph.away.stacked.get(copy.value) == copy
        elif there:
            producer, back = graph.values[copy.value].producer, graph.stages[copy.begun].start
            there = producer <= copy.left < copy.gone < back and copy.begun <= first[copy.value].stage
            there = there and copy.left < graph.forward_stop
        if not there:
            raise SolverError(
                f"A schedule keeps value {copy.value} in host memory from node {copy.gone} to stage {copy.begun}, but "
                "the value is not saved, not yet computed, or read in between. "
                "`close_over_dependencies(graph, saved, kept, offloaded)` chooses valid times."
            )
