"""Graph -> stages: where the backward pass may stop and recompute.

A cut costs what crosses it (the cotangents in flight: cuts inside a block carry several) and saves working set:
recomputed values of one stage are alive together. Both are bytes, so the stages are the shortest path through
`sum over cuts(crossing) + EFFORT * sum over stages(consumed**2) / total consumed`, found by dynamic programming.
"""

from ._graph import Graph, Stage

EFFORT = 30.0
MOST_CANDIDATES = 400
NOISE_SHARE = 0.01


def cut_stages(graph: Graph) -> tuple[Stage, ...]:
    """Stages that tile the schedule from the end of the forward pass."""
    start, stop = graph.forward_stop, len(graph.nodes)
    if start == stop:
        return ()
    crossing = _crossing(graph, start)
    consumed = _consumed(graph, start)
    places = _candidates(graph, start, crossing)
    total = consumed[-1] or 1
    # best[i]: cost of the best cutting of everything before places[i]
    best, previous = [0.0], [0]
    for i in range(1, len(places)):
        cost, at = min(
            (best[j] + EFFORT * (consumed[places[i] - start] - consumed[places[j] - start]) ** 2 / total, j)
            for j in range(i)
        )
        best.append(cost + (crossing[places[i] - start] if i < len(places) - 1 else 0))
        previous.append(at)
    cuts, i = [], len(places) - 1
    while i:
        cuts.append(places[i])
        i = previous[i]
    cuts = [start, *reversed(cuts)]
    return tuple(Stage(a, b) for a, b in zip(cuts, cuts[1:], strict=False))


def _crossing(graph: Graph, start: int) -> list[int]:
    """Bytes of values made by the backward pass and alive just before each of its nodes; outputs do not count."""
    last: dict[int, int] = {}
    for node in graph.nodes[start:]:
        for v in graph.reads[node.id]:
            last[v] = node.id
    delta = [0] * (len(graph.nodes) - start + 2)
    for node in graph.nodes[start:]:
        for v in node.outputs:
            if graph.values[v].materialised and not graph.values[v].is_output and last.get(v, -1) > node.id:
                delta[node.id - start + 1] += graph.values[v].nbytes
                delta[last[v] - start + 1] -= graph.values[v].nbytes
    for i in range(1, len(delta)):
        delta[i] += delta[i - 1]
    return delta


def _consumed(graph: Graph, start: int) -> list[int]:
    """Bytes of residuals first read by the backward pass before each of its nodes."""
    seen: set[int] = set()
    total, consumed = 0, [0]
    for node in graph.nodes[start:]:
        for v in graph.reads[node.id]:
            if v not in seen and graph.is_residual(v):
                seen.add(v)
                total += graph.values[v].nbytes
        consumed.append(total)
    return consumed


def _candidates(graph: Graph, start: int, crossing: list[int]) -> list[int]:
    """Places where cutting may be best, and both ends: the first place of each stretch of locally lowest crossing.

    Differences below a share of the highest crossing are noise (statistics, biases) and make no stretch of their own.
    """
    noise = max(crossing) * NOISE_SHARE
    stretches: list[tuple[int, int]] = []  # (place, crossing)
    for node in graph.nodes[start + 1 :]:
        if graph.is_kernel(node):
            here = crossing[node.id - start]
            if not stretches or abs(here - stretches[-1][1]) > noise:
                stretches.append((node.id, here))
    lowest = [
        stretches[i]
        for i in range(len(stretches))
        if (i == 0 or stretches[i - 1][1] > stretches[i][1])
        and (i == len(stretches) - 1 or stretches[i + 1][1] > stretches[i][1])
    ]
    lowest = sorted(sorted(lowest, key=lambda stretch: stretch[1])[:MOST_CANDIDATES])
    return [start, *(place for place, _ in lowest), len(graph.nodes)]
