"""Variant of a step, facts of the plain step -> `Graph`, by what XLA writes to memory."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from .._model._graph import Graph
from .._rewrite._trace import Traced
from ._facts import BaselineFacts
from ._iteration import Iteration, backward, forward, repeated
from ._loop_seconds import longer_seconds
from ._lower import lower


def build_graph(traced: Traced, facts: BaselineFacts, otherwise: float | None = None) -> Graph:
    """Build the graph of a variant, in seconds of the tagged plain step.

    What backward loops write shows an iteration of the step that saves everything; what that is says a graph that knows
    the forward loops' iterations alone.

    **Arguments:** `otherwise` the seconds by which the variant takes longer than the tagged plain step, where its loops
    do not say; None for what prices of stacks say.
    """
    there, flops = facts.division.local(traced)
    workspace, seconds = facts.workspace(traced), facts.seconds(traced)
    both = repeated(traced, facts.backend)  # iterations with a forward and a backward pass of their own
    written = facts.written(traced)
    for loop, iteration in both.items():
        written = written.also(loop, facts.written_in(iteration))

    def graph_with(iterations: Mapping[int, Iteration]) -> Graph:
        """Lower the step by what these iterations of pairs of loops show, and those before."""
        nonlocal written, workspace
        for loop, iteration in iterations.items():
            # Of pairs, a compiler that does not fuse reductions writes what the rules say, and some more.
            add = partial(written.also, loop) if facts.backend.fuses_reductions else written.with_
            written = add(facts.written_in(iteration))
        workspace = workspace | facts.workspace_in(traced, iterations.values())
        return lower(
            there,
            facts.device,
            base_nbytes=facts.base_nbytes,
            written=written,
            workspace=workspace,
            seconds=seconds,
            flops=flops,
            patterns=facts.pins,
        )

    pairs = forward(traced, facts.backend)
    graph = graph_with(pairs)
    if traced.loops:
        behind = backward(traced, graph, facts.backend)
        graph = graph_with(behind)
        pairs |= behind
    if not facts.by_kernels:
        return graph
    more = longer_seconds(graph, traced, facts, pairs, both)
    more = otherwise if more is None else more
    return graph if more is None else replace(graph, extra_seconds=more)
