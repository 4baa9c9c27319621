"""Equations that carry an axis, in several stages -> a subset of them whose loops hand on the fewest bytes.

Equations that mix an axis may still carry it: each row of the matrix in which a contrastive loss compares all examples
belongs to one example. Two loops that meet at that matrix hand it on, while the results of their towers are a hundredth
of it. The equations around the largest values stay in loops. A minimum cut decides about those between them and the
equations outside all loops. A value is handed on if some but not all of its maker and readers are in loops:

    minimise sum_v nbytes(v) a_v,   a_v >= x_i - x_j for every two equations i, j that compute or read v,

with x = 1 for equations in loops. Arguments of the program are in memory anyway, and sums over the axis are small.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from .._program._axes import BatchingRule
from .._program._flops import aval_nbytes
from ._program_readers import Readers

CORES = (1 / 2, 1 / 4, 1 / 8)
"""Loops keep the equations around values of one of these shares of the largest: the one with the fewest bytes."""

_INFINITE = 2**30


def narrower(
    program: Readers,
    rules: Mapping[int, BatchingRule],
    dimension: Mapping[jex.Var, int | None],
    stages: Sequence[Collection[int]],
) -> list[set[int]]:
    """Return subsets of the equations that loops may compute: those with the fewest bytes handed on around some of the
    largest values, for each share, and the equations of the first and the last of the `stages`.

    **Arguments:** `dimension` of the axis in values.
    """
    around = _around(program, dimension)
    largest = max((aval_nbytes(v.aval) for v in around), default=0)
    cores = [
        {
            i
            for v, near in around.items()
            if aval_nbytes(v.aval) >= share * largest
            for i in near
            if i in rules
        }
        for share in CORES
    ]
    ends = {*stages[0], *stages[-1]}
    return [
        *(_cut(rules, around, core) for core in cores),
        ends,
        *(_cut(ends, around, c & ends) for c in cores),
    ]


def outside_nbytes(
    program: Readers,
    dimension: Mapping[jex.Var, int | None],
    inside: Collection[int],
    handed: Collection[jex.Var],
) -> int:
    """Return about how many bytes with the axis are in memory at once outside loops: all values handed on, and the most
    that one equation reads and computes. Plans for the other equations recompute the values between.

    **Arguments:** `inside` the equations that loops compute; `handed` the values that these hand on.
    """
    beside: dict[int, int] = {}
    kept = 0
    for v, near in _around(program, dimension).items():
        if v in handed or program.maker[v] not in inside:
            kept += aval_nbytes(v.aval) * (v in handed)
            beside.update((i, beside.get(i, 0) + aval_nbytes(v.aval)) for i in near if i not in inside)
    return kept + max(beside.values(), default=0)


def _around(program: Readers, dimension: Mapping[jex.Var, int | None]) -> dict[Any, set[int]]:
    """Return the equations that compute or read each value with the axis."""
    rows = (v for v in program.maker if dimension.get(v) is not None)
    return {v: {program.maker[v], *program.readers.get(v, ())} for v in rows}


def _cut(
    rules: Collection[int], around: Mapping[jex.Var, Collection[int]], core: Collection[int]
) -> set[int]:
    """Return the subset of `rules` that includes `core` and hands on the fewest bytes."""
    source, sink, *_ = range(2 + len(rules))
    node = {i: 2 + n for n, i in enumerate(rules)}
    edges: list[tuple[int, int, int]] = [(source, node[i], _INFINITE) for i in core]
    count = 2 + len(rules)
    # Capacities are 32-bit: in this unit, all values together stay below the capacity of edges that must not be cut.
    unit = max(2**10, 1 + sum(aval_nbytes(v.aval) for v in around) // (_INFINITE // 2))
    for v, near in around.items():
        # Of a value's two nodes, one is reached if any of its equations is in a loop, the other if all are.
        some, every = count, count + 1
        count += 2
        edges.append((some, every, max(aval_nbytes(v.aval) // unit, 1)))
        edges += [(node[i], some, _INFINITE) for i in near if i in node]
        edges += {(every, node.get(i, sink), _INFINITE) for i in near}
    tails, heads, capacities = zip(*edges, strict=True)
    graph = coo_array((np.array(capacities, np.int32), (tails, heads)), shape=(count, count)).tocsr()
    left = graph - maximum_flow(graph, source, sink).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {i for i, n in node.items() if n in reached}
