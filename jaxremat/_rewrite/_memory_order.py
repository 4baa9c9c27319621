"""Jaxpr -> order of its equations in which gradients and updates are consumed as soon as they are complete.

Automatic differentiation leaves all optimizer updates to the end, so every gradient is live until then. Here *tail*
equations, from which no contraction or loop is reachable (metrics, running statistics, weight-gradient reductions, the
optimizer), run as soon as their last operand of the main line exists; those that depend only on arguments run just
before their first reader. Among ready equations, contractions that only the tail reads (weight gradients) go first. All
others keep their order. The result is a topological order that keeps the sequence of equations that run once (effects,
draws). The equations of an inlined loop stay together, ordered among themselves in the same way, its results last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._primitives import is_backward, is_contraction, runs_once
from .._runtime._mechanisms import mechanism
from ._flat_program import Loop


@mechanism("memory order", off=lambda _, alive, *__, **___: [i for i, keep in enumerate(alive) if keep])
def memory_order(
    jaxpr: jex.Jaxpr,
    alive: Sequence[bool],
    loop_of: Sequence[int] = (),
    loops: Sequence[Loop] = (),
    *,
    turns: bool = True,
) -> list[int]:
    """Return the indices of the live equations in execution order.

    **Arguments:** `loop_of` and `loops` as in `Traced`; without them no loop is inlined. `turns` whether tails end
    where another forward pass begins: older plans, which name equations by position, were made without.
    """
    live = [i for i, keep in enumerate(alive) if keep]
    return _ordered(jaxpr.eqns, live, loop_of or [-1] * len(alive), loops, -1, turns)


@dataclass(frozen=True)
class _Unit:
    """One equation, or an inlined loop.

    **Fields:** `order` its equations in execution order; `reads` and `makes` variables; `contraction` as in
    `_primitives`; `once` whether one of its equations runs once; `backward` whether running it early can only free
    memory; `in_backward` whether it is in a backward pass, `forward` whether it is in the forward pass of a
    differentiated function.
    """

    order: tuple[int, ...]
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]
    contraction: bool
    once: bool
    backward: bool
    in_backward: bool
    forward: bool


def _ordered(
    eqns: Sequence[jex.JaxprEqn],
    live: Sequence[int],
    loop_of: Sequence[int],
    loops: Sequence[Loop],
    parent: int,
    turns: bool,
) -> list[int]:
    """Return the indices of the equations of a loop and the loops within it, in execution order."""
    inside: dict[int, list[int]] = {}  # loop of this level -> its equations
    single: list[int] = []
    for i in live:
        loop = loop_of[i]
        while loop != parent and loops[loop].parent != parent:
            loop = loops[loop].parent
        if loop == parent:
            single.append(i)
        else:
            inside.setdefault(loop, []).append(i)
    units = [_unit(eqns, (i,), is_contraction(eqns[i])) for i in single]
    for loop, members in inside.items():
        units.append(_unit(eqns, _ordered(eqns, members, loop_of, loops, loop, turns), True))
    units.sort(key=lambda unit: min(unit.order))
    order = [i for n in _unit_order(units, turns) for i in units[n].order]
    leaving = {i for i in single if eqns[i].primitive.name in ("scan_last", "scan_stack")}
    return [i for i in order if i not in leaving] + [i for i in order if i in leaving]


def _unit(eqns: Sequence[jex.JaxprEqn], order: Sequence[int], contraction: bool) -> _Unit:
    return _Unit(
        tuple(order),
        tuple(a for i in order for a in eqns[i].invars if not _compat.is_literal(a)),
        tuple(v for i in order for v in eqns[i].outvars),
        contraction,
        any(runs_once(eqns[i]) for i in order),
        _backward(eqns[order[0]]),
        is_backward(eqns[order[0]]),
        _forward(eqns[order[0]]),
    )


def _unit_order(units: Sequence[_Unit], turns: bool) -> list[int]:
    live = range(len(units))
    maker = {v: i for i, unit in enumerate(units) for v in unit.makes}
    operands = {i: sorted({maker[a] for a in units[i].reads if a in maker and maker[a] != i}) for i in live}
    readers: dict[int, list[int]] = {i: [] for i in live}
    for i in live:
        for j in operands[i]:
            readers[j].append(i)

    turn = _turns(units, operands) if turns else [0] * len(units)
    tail: dict[int, bool] = {}  # neither it nor anything of its turn that depends on it is a contraction
    ends: dict[int, bool] = {}  # all of its readers are in the tail
    for i in reversed(live):
        ends[i] = all(tail[j] or turn[j] > turn[i] for j in readers[i])
        tail[i] = not units[i].contraction and not units[i].once and ends[i]
    eager = {i: tail[i] or (not units[i].once and bool(readers[i]) and ends[i]) for i in live}
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
                    if waiting[j] == 0 and eager[j] and units[j].backward:
                        free.append(j)
                stack.extend((j, False) for j in reversed(free))

    for i in live:
        if rooted[i]:
            emit(i)
    for i in live:
        emit(i)
    return order


def _turns(units: Sequence[_Unit], operands: Mapping[int, Sequence[int]]) -> list[int]:
    """Return for each unit how often the step has changed from a backward pass to another forward pass before it. A
    turn begins with contractions, because zeros and similar values may be shared with the forward pass.
    """
    turns: list[int] = []
    behind: list[bool] = []  # whether it is, or depends on, a contraction of its turn's backward pass
    for i, unit in enumerate(units):
        turn = max((turns[j] for j in operands[i]), default=0)
        in_backward = (unit.in_backward and unit.contraction) or any(
            behind[j] and turns[j] == turn for j in operands[i]
        )
        turns.append(turn + (in_backward and unit.forward))
        behind.append(in_backward and not unit.forward)
    return turns


def _forward(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is in the forward pass of a differentiated function."""
    stack = _compat.name_stack_text(eqn)
    return "jvp(" in stack and "transpose(" not in stack


def _backward(eqn: jex.JaxprEqn) -> bool:
    """Return whether running an equation early can only free memory: not in a differentiated function's forward
    pass.
    """
    stack = _compat.name_stack_text(eqn)
    return "transpose(" in stack or "jvp(" not in stack
