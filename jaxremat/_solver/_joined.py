"""Nodes that may run again for a stage -> the terms of an integer program's objective that say what that takes.

Where a node joins a kernel of the stage, it takes `fused_seconds`, and the rest if it runs apart all the same: for
something else that runs again for that stage and reads it. Law: these terms are what `simulate` counts. With `r[n,k]`
for running node n again for stage k

    sum seconds(n) r[n,k]                                                 n joins nothing in stage k
    sum joined_seconds(n) r[n,k] + (seconds(n) - joined_seconds(n)) a[n,k]          n joins
                r[n,k] + r[m,k] - 1 <= a[n,k] <= r[n,k]                              m reads n
                a[n,k] <= sum r[m,k]                                                 over these m
"""

from collections.abc import Mapping

from .._model._graph import Graph
from ._integer_program import IntegerProgram


def run_again(
    graph: Graph, program: IntegerProgram, again: Mapping[tuple[int, int], int]
) -> tuple[list[tuple[float, int]], dict[tuple[int, ...], int]]:
    """Pairs of seconds and a variable; and the variables that it adds to the program, for what runs apart.

    **Arguments:** `again` the binary variables by node and stage.
    """
    terms: list[tuple[float, int]] = []
    apart: dict[tuple[int, ...], int] = {}
    reading: dict[tuple[int, int], list[int]] = {}  # value, stage -> the variables of what reads it there
    for (n, k), x in again.items():
        for v in graph.reads[n]:
            reading.setdefault((v, k), []).append(x)
    for (n, k), x in again.items():
        node = graph.nodes[n]
        if graph.joins(n, k) < 0:
            terms.append((node.seconds, x))
            continue
        terms.append((node.fused_seconds, x))
        if readers := [y for v in node.outputs for y in reading.get((v, k), ())]:
            apart[n, k] = a = program.variable(1.0)
            for y in readers:
                program.at_least([(a, 1.0), (x, -1.0), (y, -1.0)], -1.0)
            program.at_most([(a, 1.0), (x, -1.0)], 0.0)
            program.at_most([(a, 1.0), *((y, -1.0) for y in readers)], 0.0)
            terms.append((node.seconds - node.fused_seconds, a))
    return terms, apart
