"""Sizes, seconds, readers -> small graphs: a builder, and the shapes on which planners are tested.

Invariant: equal calls give equal graphs.
"""

from collections.abc import Sequence
from dataclasses import replace

from ._graph import Graph, Node, Pin, Stage, Value
from ._schedule import must_save

UNIT = 2**20
"""Bytes of a value of size one."""


class Builder:
    """Appends arguments, nodes and stages in execution order; sizes are in units of `UNIT` bytes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.starts: list[int] = []

    def argument(self, size: int = 1) -> int:
        """Return the id of a new argument of the step."""
        return self._value(-1, size, True, False)

    def node(
        self,
        inputs: Sequence[int],
        sizes: Sequence[int] = (1,),
        *,
        materialised: Sequence[bool] | bool = True,
        is_output: Sequence[bool] | bool = False,
        seconds: float = 1.0,
        workspace: int = 0,
        fusion_root: bool = True,
        contraction: bool = False,
        forward: bool | None = None,
        repeatable: bool = True,
        primitive: str = "op",
        scope: str = "",
    ) -> tuple[int, ...]:
        """Return the ids of a new node's outputs; by default it is a forward node if no stage has begun."""
        n = len(self.nodes)
        # One flag stands for all outputs.
        written = [materialised] * len(sizes) if isinstance(materialised, bool) else list(materialised)
        returned = [is_output] * len(sizes) if isinstance(is_output, bool) else list(is_output)
        outputs = tuple(self._value(n, *row) for row in zip(sizes, written, returned, strict=True))
        self.nodes.append(
            Node(
                id=n,
                primitive=primitive,
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=outputs,
                seconds=seconds,
                workspace_nbytes=workspace * UNIT,
                fusion_root=fusion_root,
                contraction=contraction,
                forward=not self.starts if forward is None else forward,
                repeatable=repeatable,
                scope=scope,
                source=f"model.py:{n + 1} (f)",
            )
        )
        return outputs

    def stage(self) -> None:
        """Begin a new stage with the next node."""
        self.starts.append(len(self.nodes))

    def graph(self, *, base: int = 0, small: int = 0) -> Graph:
        """Return the graph; its step takes the seconds of all its kernels."""
        stops = [*self.starts[1:], len(self.nodes)]
        graph = Graph(
            nodes=tuple(self.nodes),
            values=tuple(self.values),
            stages=tuple(Stage(a, b) for a, b in zip(self.starts, stops, strict=False)),
            base_nbytes=base * UNIT,
            step_seconds=0.0,
            small_nbytes=small * UNIT,
        )
        return replace(graph, step_seconds=sum(n.seconds for n in graph.kernels()))

    def _value(self, producer: int, size: int, materialised: bool, is_output: bool) -> int:
        v = len(self.values)
        self.values.append(Value(v, producer, size * UNIT, materialised, is_output, f"u8[{size}]"))
        return v


def in_loops(graph: Graph, length: int, saved_seconds: float = 0.0) -> Graph:
    """Return the graph with its forward pass as a loop of that length, and all its stages as its backward loop.

    **Arguments:** `saved_seconds` the cost of stacking each value that need not be saved.
    """
    stop = graph.forward_stop
    nodes = tuple(replace(n, loop=int(n.id >= stop), contraction=n.fusion_root) for n in graph.nodes)
    values = tuple(
        replace(v, length=length, is_output=False) if 0 <= v.producer < stop else v for v in graph.values
    )
    looped = replace(
        graph, nodes=nodes, values=values, parents=(-1, -1), groups=(0, 0), loop_lengths=(length, length)
    )
    free = set(looped.residuals) - must_save(looped)
    priced = (replace(v, saved_seconds=saved_seconds) if v.id in free else v for v in values)
    return replace(looped, values=tuple(priced))


def chain(length: int, *, size: int = 1, seconds: Sequence[float] | None = None) -> Graph:
    """Return `x[i+1] = f(x[i])`; stage `k` reads `x[length - k]` and the cotangent, and computes the next cotangent.

    Values 1 to `length` are `x[1]` to `x[length]`, outputs of nodes 0 to `length - 1`; cotangents are of size one.
    """
    build = Builder()
    x = build.argument()
    xs = []
    for i in range(length):
        price = 1.0 if seconds is None else seconds[i]
        (x,) = build.node([x], [size], seconds=price, primitive="dot_general")
        xs.append(x)
    cotangent: list[int] = []
    for x in reversed(xs):
        build.stage()
        cotangent = list(build.node([x, *cotangent], [1], primitive="dot_general"))
    build.node(cotangent, [1], is_output=True, primitive="add")
    return build.graph()


def blocks(count: int, *, inner: int = 3, big: int = 4) -> Graph:
    """Return a chain of blocks: a stream value of size one, `inner` values of size `big` per block, one stage per
    block.

    The second of the inner values is fused, the last one adds back to the stream.
    """
    build = Builder()
    stream = build.argument()
    made: list[list[int]] = []
    for _ in range(count):
        values, v = [stream], stream
        for i in range(inner):
            kernel = i != 1
            (v,) = build.node(
                [v], [big], materialised=kernel, fusion_root=kernel, seconds=2.0 if kernel else 0.25
            )
            values.append(v)
        (stream,) = build.node([stream, v], [1], fusion_root=False, seconds=0.5, primitive="add")
        made.append(values)
    cotangent: list[int] = []
    for values in reversed(made):
        build.stage()
        for v in reversed(values):
            cotangent = list(build.node([v, *cotangent], [1], seconds=2.0))
        build.node(cotangent, [1], is_output=True, seconds=0.5)
    return build.graph(base=2)


def passes(count: int, length: int, *, size: int = 2) -> Graph:
    """Return a chain that is differentiated `count` times in sequence, each time with other parameters, which the
    previous gradients have updated. Each layer has a stage; each later forward pass is in the last stage before it.
    """
    build = Builder()
    x = build.argument()
    weights = build.argument(0)
    for turn in range(count):
        xs = [x]
        for _ in range(length):
            forward = {"contraction": True, "forward": True, "scope": "jvp()"}
            xs += build.node([xs[-1], weights], [size], seconds=1.0, primitive="dot_general", **forward)
        cotangent: list[int] = []
        for v in reversed(xs[1:]):
            build.stage()
            cotangent = list(
                build.node(
                    [v, *cotangent],
                    [1],
                    seconds=2.0,
                    contraction=True,
                    primitive="dot_general",
                    scope="transpose(jvp())",
                )
            )
        (weights,) = build.node(cotangent, [1], is_output=turn + 1 == count, seconds=0.25, fusion_root=False)
    return build.graph(base=1)


def diamond() -> Graph:
    """Return two branches from one value, joined; one stage of the backward pass reads both branches, the last the
    root.
    """
    build = Builder()
    x = build.argument()
    (root,) = build.node([x], [2], seconds=4.0)
    (left,) = build.node([root], [3], seconds=1.0)
    (right,) = build.node([root], [3], seconds=2.0)
    (join,) = build.node([left, right], [1], seconds=1.0)
    build.stage()
    (c,) = build.node([join], [1])
    build.stage()
    (c,) = build.node([left, right, c], [1], workspace=1)
    build.stage()
    build.node([root, c], [1], is_output=True)
    return build.graph()


def unrepeatable() -> Graph:
    """Return a chain whose second value comes from a callback, which may run only once; another value is small."""
    build = Builder()
    x = build.argument()
    (a,) = build.node([x], [4], seconds=2.0)
    (b,) = build.node([a], [4], repeatable=False, primitive="pure_callback")
    (c,) = build.node([b], [4], seconds=2.0)
    (d, e) = build.node([c], [4, 1], seconds=2.0)
    build.stage()
    (g,) = build.node([d, e], [1])
    build.stage()
    (g,) = build.node([c, g], [1])
    build.stage()
    build.node([a, g], [1], is_output=True)
    return build.graph(small=1)


def forward_only() -> Graph:
    """Return a step without a backward pass, which leaves no choice to a planner."""
    build = Builder()
    (a,) = build.node([build.argument()], [2])
    build.node([a], [1], is_output=True)
    return build.graph(base=1)


def skips(depth: int) -> Graph:
    """Return a U: `depth` levels down and up; each level up reads the level down of its size, and sizes halve on the
    way down.

    The values of the first levels are the largest, are computed first and are read last.
    """
    build = Builder()
    x = build.argument()
    sizes = [2 ** (depth - i) for i in range(depth)]
    down: list[int] = []
    for size in sizes:
        (x,) = build.node([x], [size], seconds=size / 2)
        down.append(x)
    reads: list[list[int]] = []
    for skip, size in zip(reversed(down), reversed(sizes), strict=True):
        reads.append([x, skip])
        (x,) = build.node([x, skip], [size], seconds=size)
    cotangent: list[int] = []
    for operands in reversed(reads):
        build.stage()
        cotangent = list(build.node([x, *operands, *cotangent], [1], seconds=2.0))
        x = operands[0]
    for v in reversed(down):
        build.stage()
        cotangent = list(build.node([v, *cotangent], [1], seconds=1.0))
    build.node(cotangent, [1], is_output=True, seconds=0.5)
    return build.graph(base=1)


def uneven(length: int) -> Graph:
    """Return a chain of values of sizes 1 to 5 whose seconds are unrelated to their sizes; every third node has scratch
    memory.
    """
    build = Builder()
    x = build.argument()
    values = []
    for i in range(length):
        scratch = 2 if i % 3 == 0 else 0
        (x,) = build.node([x], [1 + 7 * i % 5], seconds=0.25 * (1 + 11 * i % 13), workspace=scratch)
        values.append(x)
    cotangent: list[int] = []
    for i, v in enumerate(reversed(values)):
        if i % 2 == 0:
            build.stage()
        cotangent = list(build.node([v, *cotangent], [1], seconds=1.0))
    build.node(cotangent, [1], is_output=True, seconds=0.25)
    return build.graph(base=1)


def siblings() -> Graph:
    """Return a node with two large results, read by different stages: one may be saved and the other recomputed."""
    build = Builder()
    (a, b) = build.node([build.argument()], [4, 4])
    build.stage()
    (c,) = build.node([b], [0], workspace=10)
    build.stage()
    build.node([a, b, c], [1], is_output=True, workspace=6)
    return build.graph()


def pinned() -> Graph:
    """Return a chain with pins that save one value and recompute two, at any cost."""
    pins = (Pin("recompute", 2, "pin of 2"), Pin("save", 4, "pin of 4"), Pin("recompute", 5, "pin of 5"))
    return replace(chain(6, size=2), pins=pins)
