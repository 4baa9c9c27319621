"""Stage of a planned step -> what passes through its barrier, and so waits for the stage before.

Law: nothing that a stage recomputes, nor what its own contractions read in another layout, is made of what is there
before the barrier in any other way.
"""

from collections.abc import Sequence
from typing import Any

from .._program import _compat
from .._program._primitives import is_loop_edge, is_write
from ._hoisting import is_zero
from ._placement import entered

ZERO = "zero"
"""A constant that passes, so that what is made of it waits for the barrier."""


def passing(emitter: Any, k: int, wanted: Sequence[int], loop: int) -> list[Any]:
    """What passes through the barrier of stage `k` in a loop, -1 for none, which clones the equations `wanted`."""
    source, graph = emitter.source, emitter.graph
    made = {v for n in wanted for v in source[n].outvars} | emitter.sunk
    found: list[Any] = []
    for n in wanted:
        if is_loop_edge(source[n]):
            continue
        operands = [a for a in source[n].invars if not _compat.is_literal(a)]
        inner = [a for a in operands if a in emitter.value_of and a not in made]
        found.extend(inner if inner or any(a in made for a in operands) else operands)
    entering = [n for n in emitter.own[k] if graph.nodes[n].loop != loop and entered(emitter, n)]
    starts = (a for n in entering for a in source[n].invars if a in emitter.value_of)
    found.extend(a for a in starts if emitter.place[emitter.maker(a)] < k)
    here = [n for n in emitter.own[k] if graph.nodes[n].loop == loop]
    for n in here:
        operands = (a for a in source[n].invars if not _compat.is_literal(a))
        found.extend(a for a in operands if emitter.hazards.early(n, a) and _there_before(emitter, a, k))
    made |= emitter.elsewhere.arriving(k)
    found = [a for a in dict.fromkeys(found) if a not in made and can_pass(a) and not _due(emitter, a)]
    filled = any(is_zero(source[n]) for n in (*here, *wanted))
    if entering or (filled and graph.backend.materialises_eagerly):
        found.append(ZERO)  # what loops fill, any compiler begins early
    return found


def barrier_within(
    emitter: Any, k: int, wanted: Sequence[int], inside: Sequence[int], loop: int
) -> dict[Any, Any]:
    """Append the barrier of the first stage of a loop of one iteration; returns the barrier names of what passes.

    The compiler makes no loop of it, so that the loop's carries hold nothing back but what is made of them: what the
    stage recomputes it would compute in the forward pass, once, and keep.

    **Arguments:** `inside` the stage's own equations, in the loop.
    """
    carries = (emitter.source[n].outvars[0] for n in inside if entered(emitter, n))
    carried = [v for v in carries if can_pass(v) and not _is_written(emitter, v)]
    through = passing(emitter, k, wanted, loop)
    return emitter.fenced(through, carried, f"barrier_{k}", loop) if through else {}


def can_pass(var: Any) -> bool:
    """Whether it is an array."""
    return hasattr(var.aval, "dtype")


def _is_written(emitter: Any, var: Any) -> bool:
    """Whether a part of it is written over: behind a barrier it would be copied for that."""
    return any(is_write(emitter.source[n]) for n in emitter.readers.get(var, ()))


def _due(emitter: Any, var: Any) -> bool:
    """Whether what makes it waits for a barrier, behind which it is made then."""
    return var in emitter.value_of and emitter.maker(var) in emitter.waiting


def _there_before(emitter: Any, var: Any, k: int) -> bool:
    """Whether it is saved, held or an argument: the compiler could copy it to another layout long before."""
    v = emitter.value_of.get(var)
    held = var in emitter.clones or v in emitter.schedule.saved
    return v is None or (held and emitter.graph.stage_of[emitter.maker(var)] < k)
