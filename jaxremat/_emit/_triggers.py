"""Stages before a fence -> the results that must be there before anything behind the fence may begin."""

from collections.abc import Sequence
from typing import Any

from .._model._later_passes import made_later
from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import is_product, is_relabelling
from ._fence_operands import can_pass


def trigger(emitter: Any, k: int) -> list[Any]:
    """What must be finished before the stage's recomputation may begin.

    The compiler drops a fence's operands whose results nobody reads, so a trigger has readers behind the fence: the
    updates that wait for it, or the step's result. Where no small result has any, a cotangent passes through.
    """
    graph, start = emitter.graph, emitter.graph.stages[k].start
    if k == 0:
        loss = [
            v
            for n in range(max(start - 1, 0), start)
            for v in emitter.source[n].outvars
            if v in emitter.returned
        ]
        return [v for v in emitter.cotangents or loss if can_pass(v)]
    before = graph.stages[k - 1].start
    triggers = finished(emitter, k)

    def counts(n: int) -> bool:
        return not graph.nodes[n].forward or made_later(emitter.passes, n) is not None

    contractions = [n for n in range(before, start) if graph.nodes[n].contraction and counts(n)]
    last = contractions[-1] if contractions else before
    behind_pass = bool(contractions) and graph.nodes[last].forward
    place = emitter.place if graph.backend.fuses or behind_pass else graph.stage_of
    if not any(emitter.maker(v) >= last for v in triggers):
        crossing = [
            v
            for n in range(last, start)
            if counts(n) and n not in emitter.waiting and emitter.place[n] < k
            for v in emitter.source[n].outvars
            if can_pass(v)
            and _home(emitter, v) == graph.around(start)
            and (v in emitter.returned or any(place[m] >= k for m in emitter.readers.get(v, ())))
            and graph.values[emitter.value_of[v]].materialised
        ]
        if behind_pass:
            crossing = _end_of_pass(emitter, last, crossing)
        triggers.extend(crossing[:1])
    return triggers


def _end_of_pass(emitter: Any, last: int, crossing: Sequence[Any]) -> list[Any]:
    """Of what crosses a fence right behind a forward pass what its last contraction leads to, the smallest first."""
    reached: set[Any] = set()
    for eqn in emitter.source[last : emitter.maker(crossing[-1]) + 1] if crossing else ():
        if not reached or not reached.isdisjoint(_compat.variables(eqn.invars)):
            reached.update(eqn.outvars)
    return sorted((v for v in crossing if v in reached), key=lambda v: aval_nbytes(v.aval))


def finished(emitter: Any, k: int) -> list[Any]:
    """What earlier stages have finished and readers behind the fence of stage `k` wait for.

    A value passes the fence after its stage, and those up to the one that its deferred readers wait for.
    """
    stages = emitter.graph.stages
    around = emitter.graph.around(stages[k].start) if k < len(stages) else -1
    return [
        var
        for var, j in ((emitter.variable[v], j) for j in range(k) for v in stages[j].finished)
        for readers in (emitter.readers.get(var, ()),)
        if _home(emitter, var) == around
        and not _is_added_up(emitter, var)
        and (
            any(n in emitter.waiting for n in readers)
            or (j == k - 1 and (var in emitter.returned or any(emitter.place[n] >= k for n in readers)))
        )
    ]


def _is_added_up(emitter: Any, var: Any) -> bool:
    """Whether a value passes no fence because devices may add it up, as products and sums (see `_emit.COMBINED`)."""
    eqn = emitter.source[emitter.maker(var)] if emitter.combined and emitter.maker(var) >= 0 else None
    if eqn is not None and is_relabelling(eqn):
        operands = [a for a in _compat.variables(eqn.invars) if a in emitter.value_of]
        return bool(operands) and _is_added_up(emitter, operands[0])
    return eqn is not None and (is_product(eqn) or eqn.primitive.name == "reduce_sum")


def _home(emitter: Any, var: Any) -> int:
    """The loop in whose body a variable is, -1 for none: a loop's results are in that around it."""
    node = emitter.graph.nodes[emitter.maker(var)]
    return emitter.graph.parents[node.loop] if node.primitive in ("scan_last", "scan_stack") else node.loop
