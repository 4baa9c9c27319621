"""Emitter, equation -> a barrier before it, if a weight gradient is to be done first: barriers in the form "ordered".

`due` of the emitter holds, by cotangent, the weight gradients of this stage that read something recomputed.
"""

from typing import Any

from .._program import _compat
from ._layouts import append_barrier


def put_in_order(emitter: Any, n: int, eqn: Any) -> None:
    """Append a barrier if the equation must wait for a weight gradient; note it if it is one."""
    graph = emitter.graph
    if eqn.primitive.name != "conv_general_dilated" or graph.nodes[n].loop >= 0:
        return
    operands = [a for a in eqn.invars if not _compat.is_literal(a)]
    for cotangent in operands:
        if before := [a for a in emitter.due.pop(cotangent, ()) if emitter.maker(a) < n]:
            made = [emitter.passed.get(a, a) for a in (cotangent, *before)]
            fenced = append_barrier(emitter, (cotangent, *before), made, "order", -1, eqn.source_info)
            emitter.passed.update(zip((cotangent, *before), fenced, strict=True))
    clones = [graph.nodes[emitter.maker(a)] for a in operands if a in emitter.clones]
    ends = _ends(emitter, eqn.outvars[0]) if any(not clone.fusion_root for clone in clones) else []
    for a in operands:
        if ends and a not in emitter.clones and not graph.nodes[emitter.maker(a)].forward:
            emitter.due.setdefault(a, []).extend(ends)


def _ends(emitter: Any, var: Any) -> list[Any]:
    """What an update that waits for a barrier reads of a gradient: the variable itself, or what follows from it."""
    readers = emitter.readers.get(var, [])
    if any(n in emitter.waiting for n in readers):
        return [var]
    following = [
        v for n in readers if not emitter.graph.nodes[n].fusion_root for v in emitter.source[n].outvars
    ]
    return [end for v in following for end in _ends(emitter, v)]
