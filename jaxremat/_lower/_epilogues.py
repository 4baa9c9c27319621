"""Equations -> the sums that are written in place of what goes into them.

A library that multiplies matrices can add to what is there, and a bias: `C + A B + b` is one kernel. XLA:GPU rewrites a
product that nothing but such a sum reads so that the sum is what stands in memory; but the kernel keeps the product's
name. A residual stream, which is such a sum in every layer, would then look as if it were nowhere. What is scattered
into zeros and added to something is scattered into that, where a kernel scatters it.
"""

from collections.abc import Mapping, Sequence

import jax.extend.core as jex

from .._model._graph import Node, Value
from .._program._primitives import SUMS, is_light
from .._runtime._mechanisms import mechanism


def _readers(nodes: Sequence[Node]) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node in nodes:
        for v in node.inputs:
            found.setdefault(v, []).append(node)
    return found


@mechanism("sums in place of products", off=lambda *_: set())
def written_sums(eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node], values: Sequence[Value]) -> set[int]:
    """Return the values that are a matrix product and something of its size, where the product is read for that
    alone.
    """
    readers = _readers(nodes)
    products = (v for node in nodes if node.primitive == "dot_general" for v in node.outputs)
    return {v for made in products if (v := _sum_of(made, eqns, nodes, values, readers)) >= 0}


def _sum_of(
    v: int,
    eqns: Sequence[jex.JaxprEqn],
    nodes: Sequence[Node],
    values: Sequence[Value],
    readers: Mapping[int, Sequence[Node]],
) -> int:
    """Return the sum that a product is written as, -1 for none."""
    while len(readers.get(v, ())) == 1 and not values[v].is_output:
        (node,) = readers[v]
        others = [u for u in node.inputs if u != v]
        sums = node.primitive in SUMS and len(others) == 1 and node.loop == nodes[values[v].producer].loop
        if sums and not _is_repeated(others[0], v, nodes, values):
            return node.outputs[0]
        if not sums and (others or not is_light(eqns[node.id])):
            return -1
        v = node.outputs[0]
    return -1


def _is_repeated(v: int, product: int, nodes: Sequence[Node], values: Sequence[Value]) -> bool:
    """Return whether a value is the same in every row of a product, as a bias is."""
    producer = values[v].producer
    repeated = producer >= 0 and nodes[producer].primitive == "broadcast_in_dim"
    return repeated or values[v].nbytes < values[product].nbytes


@mechanism("sums in place of products", off=lambda *_: {})
def sums_of_scattered(eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node]) -> dict[int, int]:
    """Return what is scattered into zeros to be added to something else, and that sum: the compiler scatters into
    the other operand, and writes no zeros.
    """
    maker = {v: node.id for node in nodes for v in node.outputs}
    readers = _readers(nodes)
    found: dict[int, int] = {}
    for node, eqn in zip(nodes, eqns, strict=True):
        if not (node.fusion_root and eqn.primitive.name.startswith("scatter")):
            continue
        (made,), filled = node.outputs, maker.get(node.inputs[0], -1)
        added = [n for n in readers.get(made, ()) if n.primitive in SUMS]
        if readers.get(made, ()) == added != [] and filled >= 0 and not nodes[filled].inputs:
            found.update((made, v) for n in added[:1] for v in n.outputs)
    return found
