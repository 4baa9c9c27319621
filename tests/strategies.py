"""Hypothesis strategies: small random graphs that are always valid, and choices of what to save and keep on them."""

from dataclasses import replace
from typing import Any

from forms import of_levels
from graphs import Builder, in_loops
from hypothesis import strategies as st

from jaxremat import Action, Graph, LoopForm, MemoryStats, Plan, Round
from jaxremat._model._graph import Node
from jaxremat._model._timeline import Group, Moment, Timeline
from jaxremat._report._account import Account, Share

SECONDS = st.integers(0, 8).map(lambda quarters: quarters / 4)  # sums of these are exact
FEW = st.integers(0, 9).map(lambda i: i == 0)  # true once in ten


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    most_nodes: int = 6,
    most_stages: int = 4,
    siblings: bool = True,
    unrepeatable: bool = True,
    late_forward: bool = True,
    least_size: int = 0,
    loops: bool = True,
    fusable_into: bool = True,
) -> Graph:
    """A forward DAG with skips, fused values, outputs and scratch memory, and stages that read it backwards.

    **Arguments:**

    - `siblings`: nodes may have two outputs.
    - `unrepeatable`: some nodes may run only once; their results are always in memory.
    - `late_forward`: stages may hold nodes of the forward pass, whose results later stages read.
    - `least_size`: of a value, in units.
    - `loops`: the forward pass may be a loop and the stages its backward loop.
    - `fusable_into`: nodes may be part of kernels of the backward pass, where those run in their stage.
    """
    build = Builder()
    values = [build.argument(draw(st.integers(0, 2))) for _ in range(draw(st.integers(1, 2)))]
    sizes = st.integers(least_size, 8)

    def pick(most: int) -> list[int]:
        """Recent values more often than old ones."""
        back = draw(st.lists(st.integers(1, len(values)) | st.integers(1, 2), min_size=1, max_size=most))
        return [values[-min(b, len(values))] for b in back]

    def forward_node(inputs: list[int], forward: bool | None = None) -> None:
        once = unrepeatable and draw(FEW)
        count = 1 + (siblings and draw(FEW))
        returned = [draw(FEW) for _ in range(count)]
        values.extend(
            build.node(
                inputs,
                [draw(sizes) for _ in range(count)],
                materialised=[once or out or draw(st.integers(0, 3)) > 0 for out in returned],
                is_output=returned,
                seconds=draw(SECONDS),
                workspace=draw(st.sampled_from([0, 0, 0, 1, 4])),
                fusion_root=once or draw(st.booleans()),
                forward=forward,
                repeatable=not once,
            )
        )

    for _ in range(draw(st.integers(1, most_nodes))):
        forward_node(pick(3))
    stages = draw(st.integers(1, most_stages))
    cotangent: list[int] = []
    for k in range(stages):
        build.stage()
        for _ in range(draw(st.integers(1, 2))):
            if late_forward and k and draw(FEW):
                forward_node(pick(2), forward=True)
                continue
            # The first stages read the newest values, as backward passes do, but not always.
            newest = len(values) - (len(values) * k) // stages
            read = [values[draw(st.integers(0, max(newest, 1) - 1))] for _ in range(draw(st.integers(1, 2)))]
            linked = cotangent if draw(st.integers(0, 3)) else []
            kernel = draw(st.integers(0, 4)) > 0
            last = draw(FEW)
            cotangent = list(
                build.node(
                    [*linked, *read],
                    [draw(sizes)],
                    materialised=kernel or last,
                    is_output=last,
                    seconds=draw(SECONDS),
                    workspace=draw(st.sampled_from([0, 0, 0, 1, 4])),
                    fusion_root=draw(st.booleans()),
                )
            )
    build.node([*cotangent, *pick(1)], [1], is_output=True, seconds=1.0, forward=False)
    graph = build.graph(base=draw(st.integers(0, 3)), small=draw(st.sampled_from([0, 0, 1])))
    if fusable_into and draw(st.booleans()):
        graph = draw(joining(graph))
    return (
        graph
        if not loops or draw(st.integers(0, 3))
        else in_loops(graph, draw(st.integers(2, 4)), draw(SECONDS))
    )


@st.composite
def joining(draw: st.DrawFn, graph: Graph) -> Graph:
    """The graph with partners for some of its forward nodes."""
    backward = [n.id for n in graph.nodes if not n.forward]

    def joined(node: Node) -> Node:
        if not node.forward or len(node.outputs) > 1 or draw(st.booleans()):
            return node
        fusable_into = draw(st.lists(st.sampled_from(backward), min_size=1, max_size=2, unique=True))
        share = draw(st.sampled_from([0.0, 0.5]))
        return replace(node, fusable_into=tuple(sorted(fusable_into)), fused_seconds=share * node.seconds)

    return replace(graph, nodes=tuple(map(joined, graph.nodes)))


@st.composite
def choices(draw: st.DrawFn, graph: Graph) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    """What to save and what to keep, as `close_over_dependencies` takes them: any residuals, any of them into any later
    stage.
    """
    saved = {v for v in graph.residuals if draw(st.booleans())}
    pairs = holdable(graph)
    kept = {pair for pair in pairs if draw(FEW if draw(st.booleans()) else st.booleans())}
    return frozenset(saved), frozenset(kept)


def holdable(graph: Graph) -> list[tuple[int, int]]:
    """Pairs (value, stage): dropped values that the stage before can have recomputed."""
    return [
        (v, k)
        for v in graph.residuals
        for k in range(1, len(graph.stages))
        if graph.recomputable(v) and graph.stage_of[graph.values[v].producer] < k - 1
    ]


def tuples_of(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Tuples of at most three."""
    return st.lists(items, max_size=3).map(tuple)


@st.composite
def accounts(draw: st.DrawFn) -> Account:
    """Accounts with arbitrary content, for reading and writing."""
    moments = st.builds(
        Moment,
        seconds=SHARES,
        forward_nbytes=NBYTES,
        recomputed_nbytes=NBYTES,
        backward_nbytes=NBYTES,
        scratch_nbytes=NBYTES,
    )
    timelines = st.builds(Timeline, seconds=SHARES, forward_seconds=SHARES, moments=tuples_of(moments))
    shares = st.builds(
        Share,
        saved_nbytes=NBYTES,
        recomputed_nbytes=NBYTES,
        dropped_nbytes=NBYTES,
        seconds=SHARES,
        extra_seconds=SHARES,
    )
    return draw(
        st.builds(
            Account,
            base_nbytes=NBYTES,
            loops=st.integers(0, 2),
            step_seconds=SHARES,
            plain=timelines,
            planned=st.none() | timelines,
            groups=tuples_of(st.builds(Group, nbytes=NBYTES)),
            shares=tuples_of(shares),
        )
    )


NBYTES = st.integers(0, 2**50)
SHARES = st.floats(0, 10, allow_nan=False)
TEXTS = st.text(max_size=12)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with arbitrary content, for reading and writing."""
    ids = st.integers(0, 99)
    pairs = st.tuples(ids, ids)
    actions: Any = st.builds(
        Action,
        value=ids,
        name=TEXTS,
        shape=TEXTS,
        nbytes=NBYTES,
        action=st.sampled_from(["save", "recompute"]),
        stages=st.lists(ids, max_size=3).map(tuple),
        scope=TEXTS,
        source=TEXTS,
    )
    return draw(
        st.builds(
            Plan,
            budget_nbytes=NBYTES,
            baseline_peak_nbytes=NBYTES,
            predicted_peak_nbytes=NBYTES,
            compiled_peak_nbytes=st.none() | NBYTES,
            overhead=SHARES,
            compiled_overhead=st.none() | SHARES,
            lower_bound=SHARES,
            gap=SHARES,
            solver=TEXTS,
            solve_seconds=SHARES,
            compile_count=ids,
            step=TEXTS,
            memory=st.none() | st.builds(MemoryStats, NBYTES, NBYTES, NBYTES, NBYTES),
            compiler=TEXTS,
            rounds=tuples_of(
                st.builds(
                    Round,
                    predicted_peak_nbytes=NBYTES,
                    compiled_peak_nbytes=NBYTES,
                    overhead=SHARES,
                    compiled_overhead=SHARES,
                    gap=SHARES,
                    solve_seconds=SHARES,
                    compile_seconds=SHARES,
                )
            ),
            account=accounts(),
            actions=st.lists(actions, max_size=4).map(tuple),
            fingerprint=TEXTS,
            saved=st.lists(ids, max_size=4).map(tuple),
            kept=st.lists(pairs, max_size=4).map(tuple),
            stages=st.lists(pairs, max_size=4).map(tuple),
            materialised=st.lists(ids, max_size=4).map(tuple),
            small_nbytes=NBYTES,
            form=st.lists(st.lists(ids, max_size=3).map(tuple), max_size=3).map(
                lambda each: of_levels(*each)
            ),
            loops=tuples_of(st.builds(LoopForm, length=ids, levels=st.lists(ids).map(tuple), source=TEXTS)),
            respect_checkpoint=st.booleans(),
        )
    )
