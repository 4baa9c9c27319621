"""Bodies of a function + graph of its joint program -> where `jax.checkpoint`s begin and end, and which values they
save.

One `jax.checkpoint` recomputes all values that it drops at once, right before its part of the backward pass. So each
stage of the backward pass becomes a segment of the forward pass: the equations whose derivatives run in it. A value
that one segment computes and another reads is an argument of that `jax.checkpoint`, and therefore kept. Fused values
are not: each segment that reads one recomputes it.

A call that contains an equation which may run only once (an effect, a draw, a host call) is a segment without a
`jax.checkpoint`, because a policy does not see inside it.

Invariant: the segments of a body contain each of its equations once, in order. They also contain the equations that
they recompute, all of which may run again.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.extend.core as jex

from .._model._graph import Graph, Pin
from .._model._schedule import Schedule
from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import inner_jaxprs, is_light, runs_once
from .._rewrite._flat_program import FORWARD
from ._bodies import Body, name_of, number_of
from ._joint import Joint


@dataclass(frozen=True)
class Segment:
    """A stretch of a body. **Fields:** `own` the positions of its equations; `again` the positions of other equations
    that it recomputes.
    """

    own: tuple[int, ...]
    again: tuple[int, ...]

    @property
    def positions(self) -> list[int]:
        """The positions of all equations that it computes, in order."""
        return sorted((*self.own, *self.again))


@dataclass(frozen=True)
class Segmentation:
    """The segments of a function.

    **Fields:** `segments` by the number of each body's first equation; `opened` the numbers of the scans whose bodies
    have segments of their own; `alone` the numbers of equations that no `jax.checkpoint` may contain; `crossing` the
    names of the values that segments pass on to others.
    """

    segments: Mapping[int, tuple[Segment, ...]]
    opened: frozenset[int]
    alone: frozenset[int]
    crossing: frozenset[str]


def segmentation(joint: Joint, graph: Graph) -> Segmentation:
    """Return segments that follow the graph's stages. Its values' names are those of `_bodies`."""
    # equation's number -> the first stage that holds something of its derivative
    stage_of: dict[int, int] = {}
    for node in graph.nodes[graph.forward_stop :]:
        number = number_of(node.scope)
        if number is not None and not node.forward:
            stage_of.setdefault(number, graph.stage_of[node.id])
    scans = (_compat.name_stack_text(loop.eqn) for loop in joint.traced.loops if loop.role == FORWARD)
    opened = frozenset(number for number in map(number_of, scans) if number is not None)
    alone = _alone(joint)
    known = {v.name: v.materialised for v in graph.values if v.name and graph.is_residual(v.id)}
    segments: dict[int, tuple[Segment, ...]] = {}
    crossing: set[str] = set()
    for each in _cut_bodies(joint.body, opened):
        own = _cut(each, stage_of, opened | alone)
        segments[each.numbers[0]] = _completed(each, own, known, opened, alone, crossing)
    return Segmentation(segments, opened, alone, frozenset(crossing))


def _alone(joint: Joint) -> frozenset[int]:
    """Return the numbers of equations with effects, or with parts in either pass that may run only once, also inside
    bodies or derivatives: values there cannot be named.
    """
    once = {number_of(_compat.name_stack_text(e)) for e in joint.traced.flat.jaxpr.eqns if runs_once(e)}
    return frozenset(
        number
        for body in joint.body.walk()
        for number, eqn in zip(body.numbers, body.jaxpr.eqns, strict=True)
        if eqn.effects or ((number in once or runs_once(eqn)) and inner_jaxprs(eqn))
    )


def restricted(graph: Graph, cut: Segmentation) -> Graph:
    """Return the graph with the decisions that `jax.checkpoint` cannot follow fixed: crossing values are saved, unnamed
    ones are not.
    """
    keeps = {
        graph.values[v].producer for v in range(len(graph.values)) if graph.values[v].name in cut.crossing
    }
    nodes = (replace(n, repeatable=False) if n.forward and n.id in keeps else n for n in graph.nodes)
    unnamed = (v.id for v in graph.values if v.materialised and graph.recomputable(v.id) and not v.name)
    pins = (Pin("recompute", v, "") for v in unnamed)
    return replace(graph, nodes=tuple(nodes), pins=(*graph.pins, *pins))


def names_to_save(body: Body, cut: Segmentation, graph: Graph, schedule: Schedule) -> frozenset[str]:
    """Return the names of the saved values, without those that are kept anyway as arguments of other segments."""
    segment_of: dict[int, int] = {}
    for i, (first, segments) in enumerate(cut.segments.items()):
        each = next(found for found in body.walk() if found.numbers and found.numbers[0] == first)
        for j, segment in enumerate(segments):
            segment_of.update((each.numbers[p], (i << 32) + j) for p in segment.own)

    def place(n: int) -> int:
        number = number_of(graph.nodes[n].scope)
        return -1 if number is None else segment_of.get(number, -1)

    again = {n for nodes in schedule.recomputed for n in nodes}
    readers: dict[int, set[int]] = {}
    for node in graph.nodes:
        if not node.forward or node.id in again:
            for v in graph.reads[node.id]:
                readers.setdefault(v, set()).add(place(node.id))
    saved = (graph.values[v] for v in schedule.saved)
    return frozenset(
        v.name
        for v in saved
        if v.name and (v.name not in cut.crossing or place(v.producer) in readers.get(v.id, ()))
    )


def _cut_bodies(body: Body, opened: Collection[int]) -> list[Body]:
    scanned = [inner for i, inner in body.inner.items() if body.numbers[i] in opened]
    found = [body] if body.numbers else []
    return found + [deeper for inner in scanned for deeper in _cut_bodies(inner, opened)]


def _cut(body: Body, stage_of: Mapping[int, int], single: Collection[int]) -> list[list[int]]:
    """Return the positions of a body's equations by stage, the last first. Equations in `single` are groups of one."""
    groups: list[list[int]] = []
    last_first = list(reversed(range(len(body.numbers))))
    voting = [i for i in last_first if body.numbers[i] in stage_of]
    votes = [(stage_of[body.numbers[i]], 1 + _made_nbytes(body.jaxpr.eqns[i])) for i in voting]
    fitted = dict(zip(voting, _rising(votes), strict=True))
    stage, key = 0, None
    for i in last_first:
        stage = fitted.get(i, stage)
        before, key = key, ("alone", i) if body.numbers[i] in single else ("stage", stage)
        if key != before:
            groups.append([])
        groups[-1].append(i)
    return [group[::-1] for group in reversed(groups)]


def _made_nbytes(eqn: jex.JaxprEqn) -> int:
    return sum(aval_nbytes(v.aval) for v in eqn.outvars)


def _rising(votes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the non-decreasing stages closest to these, each with its weight.

    The derivatives of some equations run long after those of their neighbours: that of a running mean's decay, for
    example, whose result nothing waits for. A weighted median of each decreasing stretch outvotes them (pool adjacent
    violators: Best and Chakravarti, Mathematical Programming 47, 1990).
    """
    stretches: list[tuple[int, Counter[int], int]] = []  # their stage, the weight of each vote, how many
    for stage, weight in votes:
        stretches.append((stage, Counter({stage: weight}), 1))
        while len(stretches) > 1 and stretches[-2][0] > stretches[-1][0]:
            (_, late, n), (_, early, m) = stretches.pop(), stretches.pop()
            both = early + late
            stretches.append((_median(both), both, n + m))
    return [stage for stage, _, count in stretches for _ in range(count)]


def _median(weights: Counter[int]) -> int:
    half, reached = weights.total() / 2, 0
    for stage in sorted(weights):
        reached += weights[stage]
        if reached >= half:
            return stage
    raise ValueError("no votes")


def _completed(
    body: Body,
    groups: Sequence[Sequence[int]],
    known: Mapping[str, bool],
    opened: Collection[int],
    alone: Collection[int],
    crossing: set[str],
) -> tuple[Segment, ...]:
    """Return the segments, with fused values recomputed where they are read; add the values that they pass on to
    `crossing`.
    """
    jaxpr = body.jaxpr
    maker = {v: (i, j) for i, eqn in enumerate(jaxpr.eqns) for j, v in enumerate(eqn.outvars)}
    segments = []
    for group in groups:
        own, again = set(group), set()
        stack = [a for i in group for a in jaxpr.eqns[i].invars]
        while stack:
            a = stack.pop()
            if _compat.is_literal(a) or a not in maker or maker[a][0] in own or maker[a][0] in again:
                continue
            i, j = maker[a]
            name = name_of(body.numbers[i], j)
            in_memory = known.get(name, not is_light(jaxpr.eqns[i]))
            if in_memory or body.numbers[group[0]] in opened or body.numbers[i] in alone:
                crossing.add(name)
            else:
                again.add(i)
                stack.extend(jaxpr.eqns[i].invars)
        segments.append(Segment(tuple(group), tuple(sorted(again))))
    return tuple(segments)
