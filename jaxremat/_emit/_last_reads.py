"""Updates of donated arguments -> the same behind the last matrix product that reads the argument.

A weight is read for the gradient of what it was multiplied with, and overwritten when its own gradient is there, in the
same stage, and nothing says in which order. XLA:GPU then copies the weight before the step begins, or the updated one
at its end, and either copy is there for most of the step. So the weight passes a fence with that product's result, on
its way to its update, and the result on its way to its readers: both are in memory in any case.

Convolutions are left alone: libraries want their kernels in a layout of their own, so that they are copied anyway.
"""

from typing import Any

from .._program import _compat
from .._program._primitives import is_relabelling
from ._layouts import append_fence


def last_reads(emitter: Any) -> tuple[dict[int, list[Any]], set[int]]:
    """For each product the donated arguments that no later one reads before they are updated, in the same stage; and
    the nodes of those updates, from the first that reads such an argument on.
    """
    jaxpr, graph, place = emitter.traced.jaxpr.jaxpr, emitter.graph, emitter.place
    donated = {v for v, d in zip(jaxpr.invars, emitter.traced.donated, strict=True) if d}
    updates = _updates(emitter) if donated and graph.backend.fuses and not graph.loop_stop else set()
    updated = {a: n for n in updates for a in _compat.variables(emitter.source[n].invars) if a in donated}
    last: dict[Any, int] = {}
    for n in range(graph.forward_stop, len(graph.nodes)):
        if graph.nodes[n].primitive == "dot_general":
            read = (_behind(emitter, a) for a in _compat.variables(emitter.source[n].invars))
            last.update((a, n) for a in read if a in updated and place[updated[a]] == place[n])
    found: dict[int, list[Any]] = {}
    for a, n in last.items():
        found.setdefault(n, []).append(a)
    held: set[int] = set()
    made = set(last)
    for n in sorted(updates):
        if not made.isdisjoint(_compat.variables(emitter.source[n].invars)):
            held.add(n)
            made.update(emitter.source[n].outvars)
    return found, held


def _updates(emitter: Any) -> set[int]:
    """The nodes of the backward pass from which nothing follows but the step's results, in no kernel of their own."""
    graph = emitter.graph
    found: set[int] = set()
    for n in reversed(range(graph.forward_stop, len(graph.nodes))):
        readers = (m for v in emitter.source[n].outvars for m in emitter.readers.get(v, ()))
        if not graph.nodes[n].heavy and graph.nodes[n].repeatable and found.issuperset(readers):
            found.add(n)
    return found


def hold(emitter: Any, n: int) -> None:
    """Append a fence behind a product that is the last to read some arguments."""
    if arguments := emitter.last_reads.get(n):
        (made,) = emitter.source[n].outvars
        operands = [*arguments, made]
        names = append_fence(emitter, operands, operands, "last_read", -1, emitter.source[n].source_info)
        emitter.passed[made] = names.pop()
        emitter.overwritten.update(zip(arguments, names, strict=True))


def _behind(emitter: Any, var: Any) -> Any:
    """What a variable is a view of, or a transposition."""
    while var in emitter.value_of:
        eqn = emitter.source[emitter.maker(var)]
        operands = _compat.variables(eqn.invars)
        if not is_relabelling(eqn) or len(operands) != 1:
            break
        (var,) = operands
    return var
