"""Blocks that the backward pass undoes -> what passes a barrier before each.

What undoes a block reads no cotangent, so that the compiler might do it long before it is wanted. It reads what it
starts from behind a barrier, together with a cotangent that is made last before.
"""

from typing import Any

from .._program import _compat
from .._rewrite._reversed_chains import block_of


def before_blocks(emitter: Any) -> dict[int, list[Any]]:
    """For the first equation of each block what passes the barrier before it."""
    graph, source = emitter.graph, emitter.source
    members: dict[int, list[int]] = {}
    for n in range(graph.forward_stop, len(source)):
        if (block := block_of(source[n])) is not None:
            members.setdefault(block, []).append(n)
    undoing = {n for own in members.values() for n in own}
    found: dict[int, list[Any]] = {}
    for own in members.values():
        made = {v for n in own for v in source[n].outvars}
        read = dict.fromkeys(a for n in own for a in _compat.variables(source[n].invars) if a not in made)
        starts = [a for a in read if _is_written(emitter, a, own[0])]
        cotangent = _cotangent(emitter, own[0], undoing)
        if starts and cotangent is not None:
            found[own[0]] = [*starts, cotangent]
    return found


def _is_written(emitter: Any, var: Any, before: int) -> bool:
    """Whether it is in memory before that equation, and no argument."""
    if var not in emitter.value_of:
        return False
    value = emitter.graph.values[emitter.value_of[var]]
    return 0 <= value.producer < before and value.materialised and not emitter.graph.is_small(value.id)


def _cotangent(emitter: Any, before: int, undoing: set[int]) -> Any:
    """What the backward pass made last before that equation, and reads behind it."""
    graph = emitter.graph
    for n in range(before - 1, graph.forward_stop - 1, -1):
        for v in () if n in undoing else emitter.source[n].outvars:
            later = any(reader >= before and reader not in undoing for reader in emitter.readers.get(v, ()))
            if later and graph.nodes[n].loop < 0 and _is_written(emitter, v, before):
                return v
    return None
