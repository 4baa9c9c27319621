"""Variant of a step, facts of the plain step -> `Graph`, by what XLA writes to memory."""

from dataclasses import replace

from .._compiler._tags import Written
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
    known, workspace, seconds = facts.written(traced), facts.workspace(traced), facts.seconds(traced)
    both = repeated(traced, facts.backend)  # iterations with a forward and a backward pass of their own

    def graph_with(iterations: dict[int, Iteration]) -> Graph:
        return lower(
            there,
            facts.device,
            base_nbytes=facts.base_nbytes,
            written=_with_iterations(known, facts, iterations, both),
            workspace=workspace | facts.workspace_in(traced, iterations.values()),
            seconds=seconds,
            flops=flops,
            patterns=facts.pins,
        )

    iterations = forward(traced, facts.backend)
    graph = graph_with(iterations)
    if traced.loops:
        iterations |= backward(traced, graph, facts.backend)
        graph = graph_with(iterations)
    if not facts.by_kernels:
        return graph
    more = longer_seconds(graph, traced, facts, iterations, both)
    more = otherwise if more is None else more
    return graph if more is None else replace(graph, extra_seconds=more)


def _with_iterations(
    known: Written, facts: BaselineFacts, pairs: dict[int, Iteration], both: dict[int, Iteration]
) -> Written:
    """Add what iterations of loops write.

    Of pairs of loops, a compiler that does not fuse reductions writes what the rules say, and some more.
    """
    for loop, iteration in pairs.items():
        written = facts.written_in(iteration)
        known = known.also(loop, written) if facts.backend.fuses else known.with_(written)
    for loop, iteration in both.items():
        known = known.also(loop, facts.written_in(iteration))
    return known
