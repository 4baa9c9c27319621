"""Clones of a stage -> more of them, where its own equations need some of what clones are made of.

A softmax is one kernel that reads scores and writes weights; its gradient is another, which reads the scores too and
makes exponentials and sums anew. Where a stage makes the weights again, both would read the same exponentials and
sums: the compiler then writes the sums with a kernel of their own, which reads all scores once more. So what hides a
reduction from both is made for the stage's own equations of sources that have passed another barrier.
"""

from collections.abc import Collection, Iterable
from typing import Any

from .._program import _compat
from .._program._primitives import is_loop_edge
from ._layouts import append_barrier


def make_apart(emitter: Any, k: int, wanted: Collection[int], own: Iterable[int], loop: int) -> None:
    """Append clones for the own equations of stage `k`, of which `wanted` are cloned already, and have them read."""
    graph, source = emitter.graph, emitter.source
    if not graph.backend.fuses_reductions:
        return
    fused = {n for n in wanted if not any(graph.values[v].materialised for v in graph.nodes[n].outputs)}

    def within(nodes: Iterable[int]) -> set[int]:
        """The fused clones that these nodes read, and those that they are made of."""
        found: set[int] = set()
        waiting = list(nodes)
        while waiting:
            for v in graph.nodes[waiting.pop()].inputs:
                n = graph.values[v].producer
                if n in fused and n not in found:
                    found.add(n)
                    waiting.append(n)
        return found

    mine = within(own)
    both = mine & within(n for n in wanted if n not in fused)
    hidden = {n for n in both if graph.nodes[n].fusion_root}
    if not hidden:
        return
    apart = within(hidden) | hidden
    for n in sorted(mine):
        if any(graph.values[v].producer in apart for v in graph.nodes[n].inputs):
            apart.add(n)  # what follows from a reduction, and so from its sources
    apart = {n for n in apart if not is_loop_edge(source[n])}
    made = {v for n in apart for v in source[n].outvars}
    read = dict.fromkeys(
        a for n in sorted(apart) for a in _compat.variables(source[n].invars) if a not in made
    )
    sources = [a for a in read if a in emitter.clones and emitter.value_of[a] in graph.residuals]
    if not sources:
        return
    info = source[graph.forward_stop].source_info
    fenced = append_barrier(
        emitter, sources, [emitter.clones[a] for a in sources], f"barrier_{k}", loop, info
    )
    names = dict(zip(sources, fenced, strict=True))
    for n in sorted(apart):
        eqn = source[n]
        outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
        invars = [a if _compat.is_literal(a) else names.get(a, emitter.clones.get(a, a)) for a in eqn.invars]
        clone = _compat.in_scope(eqn.replace(invars=invars, outvars=outvars), f"recompute_{k}")
        emitter.append([clone], [loop])
        names.update(zip(eqn.outvars, outvars, strict=True))
    emitter.clones.update((v, names[v]) for v in made)
