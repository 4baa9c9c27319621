"""Nodes of inlined loops -> the memory that the loops themselves need, however XLA fuses their bodies."""

from collections.abc import Sequence, Set
from dataclasses import replace

import jax.extend.core as jex

from .._attention._operations import attends
from .._model._graph import Node, Value
from .._program._primitives import is_in_chunks, is_loop_edge, is_view
from .._rewrite._flat_program import Loop, within
from .._runtime._mechanisms import mechanism
from ._kernel_prices import behind_views


def crossing_values(eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node], values: Sequence[Value]) -> set[int]:
    """Return the values that loops read from outside: they are in memory while the loops run.

    A value of the surrounding forward loop may have another name in the surrounding backward loop (see `_inner_loops`).
    It is in memory under that name: a row of a stack, or recomputed.
    """
    found: set[int] = set()
    for node, eqn in zip(nodes, eqns, strict=True):
        for v in node.inputs:
            producer = values[v].producer
            outside = producer >= 0 and node.loop >= 0 and nodes[producer].loop != node.loop
            if outside and (not values[v].length or is_loop_edge(eqn)):
                named = nodes[producer].inputs[:1]
                handed = (
                    not values[v].length and any(values[u].length for u in named) and is_view(eqns[producer])
                )
                found.add(v if handed else behind_views(v, eqns, nodes, values))
    return {v for v in found if values[v].producer >= 0}


def is_whole(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation stands for many, of which only the results are in memory: rows in chunks, attention in
    parts, or a body that contains such.
    """
    return is_in_chunks(eqn) or attends(eqn)


def carried_values(eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node]) -> set[int]:
    """Return the values that iterations pass to the next, in memory on both sides; and results of loops and of rows in
    chunks.
    """
    leaving = ("scan_carry", "scan_last", "scan_stack", "scan")
    edges = [n for n, e in zip(nodes, eqns, strict=True) if e.primitive.name in leaving or is_whole(e)]
    return {v for n in edges for v in (*n.outputs, *(n.inputs if n.primitive == "scan_last" else ()))}


def written_whole(nodes: Sequence[Node], in_memory: Set[int]) -> set[int]:
    """Return the results of contractions or reductions that iterations write into arrays: by another kernel."""
    hidden: set[int] = set()
    row = {"scan_stack": 0, "dynamic_update_slice": 1}
    for node in nodes:
        if node.fusion_root or not hidden.isdisjoint(node.inputs):
            hidden.update(v for v in node.outputs if v not in in_memory)
    writes = [n for n in nodes if n.primitive in row and n.loop >= 0 and len(n.inputs) > row[n.primitive]]
    return {v for n in writes if (v := n.inputs[row[n.primitive]]) in hidden}


@mechanism("loop scratch memory", off=lambda _, nodes, *__: list(nodes))
def with_waiting(
    eqns: Sequence[jex.JaxprEqn],
    nodes: Sequence[Node],
    values: Sequence[Value],
    loops: Sequence[Loop],
    materialises_eagerly: bool,
) -> list[Node]:
    """Return the nodes with arrays that wait for their turn from the first iteration on as scratch memory, in inner
    loops too.

    The whole array of stacked results is in memory before the loop has filled it. If the compiler computes values
    early, so is the row that is overwritten, if the forward pass reads it too (see `_in_place_stacks`). Carries that
    begin with the same array, such as zeros, are copies of it: all but one, or all if it is read again.
    """
    waiting: dict[int, int] = {}
    read = {v.id for v in values if v.is_output}  # by later nodes
    found = []
    for node, eqn in zip(reversed(nodes), reversed(eqns), strict=True):
        more = sum(waiting.get(loop, 0) for loop in within(node.loop, loops))
        found.append(replace(node, workspace_nbytes=node.workspace_nbytes + more) if more else node)
        if eqn.primitive.name == "scan_stack":
            rows = [v for v in node.inputs[1:] if materialises_eagerly and values[v].length]
            made = sum(values[v].nbytes for v in (*node.outputs, *rows) if not values[v].is_output)
            waiting[node.loop] = waiting.get(node.loop, 0) + made
        elif eqn.primitive.name == "scan_carry" and node.inputs and not read.isdisjoint(node.inputs):
            waiting[node.loop] = waiting.get(node.loop, 0) + sum(values[v].nbytes for v in node.outputs)
        read.update(node.inputs)
    return found[::-1]
