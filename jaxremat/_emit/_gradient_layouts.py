"""Weight gradient that is a product's transposition -> the same, with its elements in memory in the order of its axes.

JAX writes the gradient of a product's weights as a product and a transposition of it. XLA:GPU multiplies the other way
round instead where it knows in which order the result is wanted, which it finds out from the step's results, backwards.
No barrier lets that through: behind one, gradient and update came in the product's order, each result of the update
from a kernel of its own, and were transposed at the end of the step.

On several devices it stays as it is: what says the order cannot be divided, and XLA would gather each gradient.
"""

from typing import Any

from .._program import _compat
from ._last_reads import update_nodes


def turned_gradients(emitter: Any) -> set[int]:
    """The transpositions, the last where there are several, of products from which nothing but updates follows."""
    graph, source = emitter.graph, emitter.source
    if not graph.backend.fuses_reductions or emitter.traced.devices > 1:
        return set()
    turns = {
        n
        for n in update_nodes(emitter)
        if graph.nodes[n].loop < 0 and source[n].primitive.name == "transpose" and _is_product(emitter, n)
    }
    return {n for n in turns if turns.isdisjoint(emitter.readers.get(source[n].outvars[0], ()))}


def _is_product(emitter: Any, n: int) -> bool:
    """Whether a node is a product, or a transposition of one."""
    eqn = emitter.source[n]
    if eqn.primitive.name != "transpose":
        return eqn.primitive.name == "dot_general"
    (operand,) = eqn.invars
    return (
        operand in emitter.value_of
        and emitter.maker(operand) >= 0
        and _is_product(emitter, emitter.maker(operand))
    )


def in_order(eqn: Any) -> list[Any]:
    """The equation with its result's elements in the order of its axes."""
    (made,) = eqn.outvars
    turned = _compat.new_var(made.aval)
    ordered = _compat.row_major(turned, eqn.source_info)
    return [eqn.replace(outvars=[turned]), ordered.replace(outvars=[made])]
