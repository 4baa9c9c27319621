"""Equations -> the sums that libraries write in place of products.

A library that multiplies matrices can add to what is there, and a bias: `C + A B + b` is one kernel. XLA:GPU rewrites a
product that nothing but such a sum reads so that the sum is what stands in memory; but the kernel keeps the product's
name. A residual stream, which is such a sum in every layer, would then look as if it were nowhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .._model._graph import Node, Value
from .._program._primitives import SUMS, is_light


def written_sums(eqns: Sequence[Any], nodes: Sequence[Node], values: Sequence[Value]) -> set[int]:
    """The values that are a matrix product and something of its size, where the product is read for that alone."""
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for v in node.inputs:
            readers.setdefault(v, []).append(node)
    products = (v for node in nodes if node.primitive == "dot_general" for v in node.outputs)
    return {v for made in products if (v := _sum_of(made, eqns, nodes, values, readers)) >= 0}


def _sum_of(
    v: int,
    eqns: Sequence[Any],
    nodes: Sequence[Node],
    values: Sequence[Value],
    readers: Mapping[int, Sequence[Node]],
) -> int:
    """The sum that a product is written as, -1 for none."""
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
    """Whether a value is the same in every row of a product, as a bias is."""
    producer = values[v].producer
    repeated = producer >= 0 and nodes[producer].primitive == "broadcast_in_dim"
    return repeated or values[v].nbytes < values[product].nbytes
