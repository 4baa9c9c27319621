"""Jaxpr -> order of its equations in which gradients and updates are consumed as soon as they are complete.

Automatic differentiation leaves all optimizer updates to the end, so that every gradient lives until there. Here
*tail* equations, from which no contraction or loop is reachable any more (metrics, running statistics, weight-gradient
reductions, the optimizer), run as soon as their last operand of the main line exists, and those that depend on
arguments alone run just before their first reader. Contractions that feed nothing but the tail (weight gradients) go
first among those that are ready. Everything else keeps its order. The result is a topological order that keeps
effects in sequence.
"""

from collections.abc import Sequence
from typing import Any

from . import _compat
from ._primitives import is_contraction


def memory_order(jaxpr: Any, alive: Sequence[bool]) -> list[int]:
    """The indices of the live equations in execution order."""
    eqns = jaxpr.eqns
    live = [i for i, keep in enumerate(alive) if keep]
    maker = {v: i for i in live for v in eqns[i].outvars}
    operands = {
        i: sorted({maker[a] for a in eqns[i].invars if not _compat.is_literal(a) and a in maker})
        for i in live
    }
    readers: dict[int, list[int]] = {i: [] for i in live}
    for i in live:
        for j in operands[i]:
            readers[j].append(i)

    tail: dict[int, bool] = {}  # nothing reachable from here is a contraction, nor is it one itself
    for i in reversed(live):
        tail[i] = not is_contraction(eqns[i]) and not eqns[i].effects and all(tail[j] for j in readers[i])
    eager = {
        i: tail[i] or (not eqns[i].effects and bool(readers[i]) and all(tail[j] for j in readers[i]))
        for i in live
    }
    rooted: dict[int, bool] = {}  # depends on an equation of the main line
    for i in live:
        rooted[i] = not tail[i] or any(rooted[j] for j in operands[i])

    order: list[int] = []
    done: set[int] = set()
    waiting = {i: sum(rooted[j] for j in operands[i]) for i in live}

    def emit(root: int) -> None:
        stack = [(root, False)]
        while stack:
            i, ready = stack.pop()
            if i in done:
                continue
            if not ready:
                stack.append((i, True))
                stack.extend((j, False) for j in reversed(operands[i]) if j not in done)
                continue
            done.add(i)
            order.append(i)
            if rooted[i]:
                free = []
                for j in readers[i]:
                    waiting[j] -= 1
                    if waiting[j] == 0 and eager[j] and _backward(eqns[j]):
                        free.append(j)
                stack.extend((j, False) for j in reversed(free))

    for i in live:
        if rooted[i]:
            emit(i)
    for i in live:
        emit(i)
    return order


def _backward(eqn: Any) -> bool:
    """Whether running early can only free memory: not in the forward pass of the differentiated function."""
    stack = _compat.name_stack_text(eqn)
    return "transpose(" in stack or "jvp(" not in stack
