"""Equations of the backward pass -> the stages they run in."""

from typing import Any

from ._hoisting import is_zero


def places(emitter: Any) -> list[int]:
    """For each equation the stage it runs in: of fused ones that of their first reader, whose kernel they are."""
    graph, source = emitter.graph, emitter.source
    place = list(graph.stage_of)
    begins: dict[int, int] = {}  # loop -> its first stage, whose barrier stands before it
    for n in range(graph.forward_stop, len(source)):
        begins.setdefault(graph.nodes[n].loop, place[n])
    for n in range(graph.forward_stop, len(source)):
        if entered(emitter, n):
            place[n] = begins[graph.nodes[n].loop]
    settled = {n for stage in graph.stages for n, _ in stage.deferred}
    settled |= {graph.values[v].producer for stage in graph.stages for v in stage.finished}
    starts = (v for n in range(graph.forward_stop, len(source)) for v in entered(emitter, n))
    makers = {graph.values[v].producer for v in starts}
    # What starts a loop off passes the barrier before it; if it is zeros, it is made behind that barrier.
    begun = {n for n in makers if n >= 0 and is_zero(source[n])}
    settled |= makers - begun
    for n in reversed(range(graph.forward_stop, len(graph.nodes))):
        readers = [place[m] for v in source[n].outvars for m in emitter.readers.get(v, ())]
        fused = not graph.kernel[n] and graph.nodes[n].repeatable
        if readers and (n in begun or (fused and n not in settled)):
            place[n] = _outside(graph, min(readers), graph.nodes[n].loop)
    return place


def entered(emitter: Any, n: int) -> tuple[int, ...]:
    """The values that start a loop off, which thereby waits for a barrier before it, if the equation is its carry."""
    return emitter.graph.nodes[n].inputs if emitter.source[n].primitive.name == "scan_carry" else ()


def _outside(graph: Any, k: int, loop: int) -> int:
    """The stage, or the last before it with whose equations or barrier an equation of this loop may stand."""
    while k and loop not in (graph.nodes[n := graph.stages[k].start].loop, graph.around(n)):
        k -= 1
    return k
