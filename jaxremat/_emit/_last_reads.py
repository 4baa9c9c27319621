"""Updates of donated arguments -> the same behind the last matrix product that reads the argument.

A weight is read for the gradient of what it was multiplied with, and overwritten when its own gradient is there, in the
same stage, and nothing says in which order. XLA:GPU then copies the weight before the step begins, or the updated one
at its end, and either copy is there for most of the step. So the weight passes a fence with that product's result, on
its way to its update, and the result on its way to its readers: both are in memory in any case.

On several devices each may have a part of a product's sum over what is divided among them. Where several products are
added up, XLA sends only what they come to, so there it is their sum that passes.

Convolutions are left alone: libraries want their kernels in a layout of their own, so that they are copied anyway.
"""

from typing import Any

from .._program import _compat
from .._program._primitives import SUMS, is_relabelling
from .._runtime._mechanisms import mechanism
from ._layouts import append_fence


@mechanism("updates behind the last read", off=lambda _: ({}, set()))
def last_reads(emitter: Any) -> tuple[dict[int, list[Any]], set[int]]:
    """For each product, or the sum that it is a part of, the donated arguments that no later one reads before they are
    updated, in the same stage; and the nodes of those updates, from the first that reads such an argument on.
    """
    jaxpr, graph, place = emitter.traced.jaxpr.jaxpr, emitter.graph, emitter.place
    donated = {v for v, d in zip(jaxpr.invars, emitter.traced.donated, strict=True) if d}
    updates = update_nodes(emitter) if donated and graph.backend.fuses and not graph.loop_stop else set()
    updated = {a: n for n in updates for a in _compat.variables(emitter.source[n].invars) if a in donated}
    last: dict[Any, int] = {}
    for n in range(graph.forward_stop, len(graph.nodes)):
        if graph.nodes[n].primitive == "dot_general":
            read = (_behind(emitter, a) for a in _compat.variables(emitter.source[n].invars))
            last.update((a, n) for a in read if a in updated and place[updated[a]] == place[n])
    found: dict[int, list[Any]] = {}
    for a, n in last.items():
        found.setdefault(_added_up(emitter, n, updates), []).append(a)
    held: set[int] = set()
    made = set(last)
    for n in sorted(updates):
        if not made.isdisjoint(_compat.variables(emitter.source[n].invars)):
            held.add(n)
            made.update(emitter.source[n].outvars)
    return found, held


def update_nodes(emitter: Any) -> set[int]:
    """The nodes of the backward pass from which nothing follows but the step's results, in no kernel of their own."""
    graph = emitter.graph
    found: set[int] = set()
    for n in reversed(range(graph.forward_stop, len(graph.nodes))):
        readers = (m for v in emitter.source[n].outvars for m in emitter.readers.get(v, ()))
        if not graph.nodes[n].heavy and graph.nodes[n].repeatable and found.issuperset(readers):
            found.add(n)
    return found


def _added_up(emitter: Any, n: int, updates: set[int]) -> int:
    """The node of the last sum in the same stage that a product goes into, and nothing else reads the product."""
    while emitter.traced.devices > 1:
        (made,) = emitter.source[n].outvars
        readers = emitter.readers.get(made, ())
        if len(readers) != 1 or readers[0] in updates or emitter.place[readers[0]] != emitter.place[n]:
            break
        eqn = emitter.source[readers[0]]
        if eqn.primitive.name not in SUMS and not is_relabelling(eqn):
            break
        (n,) = readers
    return n


def hold(emitter: Any, n: int) -> None:
    """Append a fence behind what comes of the products that are the last to read some arguments."""
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
