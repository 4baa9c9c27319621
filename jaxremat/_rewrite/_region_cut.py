"""Equations that carry an axis, in several stages -> those of them whose loops hand on the least.

An axis may be carried far into what mixes it: each row of the matrix in which a contrastive loss compares all examples
belongs to one of them, and two loops that meet there hand on the matrix, where their towers' results are a hundredth of
it. What is around the largest values stays in loops; between that and what no loop does, a minimum cut of the bytes
handed on says what else does. A value that some of its maker and readers are within and others without is handed on:

    minimise sum_v nbytes(v) a_v,   a_v >= x_i - x_j for every two equations i, j that make or read v,

with x = 1 within. Arguments of the program are there anyway, and sums over the axis are small.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from .._program import _compat
from .._program._axes import BatchingRule
from .._program._flops import aval_nbytes
from ._program_readers import Readers

CORES = (1 / 2, 1 / 4, 1 / 8)
"""Loops keep at least what is around values of one of these shares of the largest: that by which least is handed on."""

_INFINITE = 2**30


def narrowed(
    program: Readers, rules: Mapping[int, BatchingRule], dimension: Mapping[Any, int | None]
) -> set[int]:
    """Return which of these equations loops should do, so that they hand on little and others need little for what was
    handed on: all, if nothing else is better.

    **Arguments:** `dimension` of the axis in values.
    """
    rows = [v for v in program.maker if dimension.get(v) is not None]
    largest = max((aval_nbytes(v.aval) for v in rows), default=0)
    around = {v: {program.maker[v], *program.readers.get(v, ())} for v in rows}

    def needed(inside: Collection[int]) -> int:
        """Return the bytes that are handed on, and that the largest other equation reads or makes of them."""
        handed = {
            v for v in rows if any(i in inside for i in around[v]) and any(i not in inside for i in around[v])
        }
        outside = {i for v in rows for i in around[v] if i not in inside}
        beside = max(
            (sum(aval_nbytes(v.aval) for v in _atoms(program, i) & around.keys()) for i in outside), default=0
        )
        return sum(aval_nbytes(v.aval) for v in handed) + beside

    best = set(rules)
    for share in CORES:
        core = {i for v in rows if aval_nbytes(v.aval) >= share * largest for i in around[v] if i in rules}
        best = min(best, _cut(rules, around, core), key=needed)
    return best


def _atoms(program: Readers, i: int) -> set[Any]:
    eqn = program.eqns[i]
    return {*_compat.variables(eqn.invars), *eqn.outvars}


def _cut(rules: Collection[int], around: Mapping[Any, Collection[int]], core: Collection[int]) -> set[int]:
    """Return the equations within where the core is, none but these may be, and the fewest bytes are handed on."""
    source, sink, *_ = range(2 + len(rules))
    node = {i: 2 + n for n, i in enumerate(rules)}
    edges: list[tuple[int, int, int]] = [(source, node[i], _INFINITE) for i in core]
    count = 2 + len(rules)
    for v, near in around.items():
        # One of two nodes for the value is reached where any equation is within, the other where all are.
        some, every = count, count + 1
        count += 2
        edges.append((some, every, max(aval_nbytes(v.aval) >> 10, 1)))
        edges += [(node[i], some, _INFINITE) for i in near if i in node]
        edges += {(every, node.get(i, sink), _INFINITE) for i in near}
    tails, heads, capacities = zip(*edges, strict=True)
    graph = coo_array((np.array(capacities, np.int32), (tails, heads)), shape=(count, count)).tocsr()
    left = graph - maximum_flow(graph, source, sink).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {i for i, n in node.items() if n in reached}
