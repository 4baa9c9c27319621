"""Graph -> graph with the time of each kernel, and of each value that a loop saves; equations -> sums written in place
of their operands.

The price of a node is the time of running it once more: for a separate kernel, its arithmetic or traffic by the
device's roofline; for a kernel that its readers absorb, the additional bytes that they read.

Saving a value costs time if a compiler that fuses writes it only for the backward pass, as an additional result of a
kernel: a plan that drops the value saves that write.

Matrix libraries can add to an existing array, and a bias: `C + A B + b` is one kernel. If only such a sum reads a
product, XLA:GPU rewrites the product, and the sum is the value in memory; but the kernel keeps the product's name.
Without `written_sums`, a residual stream, which is such a sum in every layer, would look as if it were never in memory.
Likewise, a scatter into zeros whose result is added to another array scatters into that array, if it is a separate
kernel.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import jax.extend.core as jex

from .._compiler._devices import DeviceSpec
from .._compiler._tags import Kernel, Written
from .._model._graph import Graph, Node, Value
from .._model._primitive_names import FETCH, GATHER
from .._program._flops import (
    THREEFRY_PASSES,
    alone_seconds,
    aval_nbytes,
    flops_dtype,
    in_rounds,
    kernel_seconds,
)
from .._program._primitives import (
    SUMS,
    is_costly,
    is_light,
    is_loop_edge,
    is_loop_slice,
    is_relabelling,
    is_view,
    is_window,
    is_write,
)
from .._runtime._mechanisms import mechanism

MOST_FUSED_FLOPS = 50.0
"""Bound on the pointwise arithmetic that a fused value stands for, per byte."""

COPIES = 2
"""The writes and reads that stacking adds to a value, each into the stack and out of it, from and to the buffers that
an iteration's kernels use. Fitted to a compiled scanned GPT, with a compiler that does not fuse.
"""


def priced(
    graph: Graph,
    eqns: Sequence[jex.JaxprEqn],
    device: DeviceSpec,
    written: Written | None,
    measured: Mapping[int, float],
) -> Graph:
    """Return the graph with the seconds of running each kernel once more: its arithmetic and that fused into it,
    operands, results.

    If an equation was measured by itself, the ratio of that time to its roofline corrects the price.
    """
    light: dict[int, float] = {}  # pointwise arithmetic that a reader of a fused value repeats
    # contractions and reductions that the compiler fuses into their reader
    fusion_root: dict[int, frozenset[int]] = {}
    costly: set[int] = set()  # values with arithmetic that the compiler does not repeat in each reader
    for node in graph.nodes:
        below = sum(light.get(v, 0.0) for v in node.inputs)
        inner = frozenset().union(*(fusion_root.get(v, frozenset()) for v in node.inputs))
        fused = (v for v in node.inputs if not graph.values[v].materialised)
        if is_costly(eqns[node.id]) or not costly.isdisjoint(fused):
            costly.update(node.outputs)
        for v in node.outputs:
            if not graph.values[v].materialised:
                # Fused chains are trees written as DAGs: without a bound, shared operands count exponentially often.
                own = 0.0 if node.fusion_root else node.flops
                light[v] = min(own + below, MOST_FUSED_FLOPS * max(graph.values[v].nbytes, 1))
                fusion_root[v] = inner | {node.id} if node.fusion_root else inner
    loaded = _contracted(graph, eqns)
    beside: dict[int, float] = {}  # the cost of saving values that are written only for the backward pass
    alone = (
        _for_later(graph, written)
        if written and graph.backend.fuses_reductions and not graph.parents
        else frozenset()
    )
    behind: dict[int, frozenset[int]] = {}  # the operands of these values
    nodes = []
    step_seconds = 0.0
    for node, eqn in zip(graph.nodes, eqns, strict=True):
        fused_away = node.outputs and not any(graph.values[v].materialised for v in node.outputs)
        if not graph.kernel[node.id] or is_view(eqn) or is_loop_edge(eqn) or fused_away:
            nodes.append(node)
            continue
        inner = frozenset().union(*(fusion_root.get(v, frozenset()) for v in node.inputs))
        flops = (
            node.flops
            + sum(light.get(v, 0.0) for v in node.inputs)
            + sum(graph.nodes[n].flops for n in inner)
        )
        arguments = sum(graph.values[v].nbytes for v in node.inputs if graph.values[v].producer < 0)
        sources = frozenset().union(*(behind.get(v, (v,)) for v in graph.reads[node.id]))
        read = arguments + sum(graph.values[v].nbytes for v in sources)
        made = sum(graph.values[v].nbytes for v in node.outputs)
        if is_window(eqn) and node.loop < 0:  # in loops, the iteration's kernels show what they read
            read = made
        if is_write(eqn):
            read = made = aval_nbytes(eqn.invars[1].aval)
        if in_rounds(device, eqn):
            made = int(THREEFRY_PASSES * aval_nbytes(eqn.outvars[0].aval))
        # Measured time over roofline time of the equation alone; the kernel also contains the arithmetic fused into it.
        slower = measured[node.id] / alone_seconds(device, eqn, node.flops) if node.id in measured else 1.0
        once = slower * kernel_seconds(device, flops_dtype(eqn), flops, read + made)
        if node.primitive == GATHER:
            once = max(once, (made - read) / device.link + device.collective_seconds)
        else:
            sent = [nbytes for nbytes in (node.summed_nbytes, node.gathered_nbytes) if nbytes]
            once += sum(sent) / device.link + len(sent) * device.collective_seconds
        times = graph.total_trips[node.loop] if node.loop >= 0 else 1
        step_seconds += once * times
        if not node.fusion_root and not inner and not any(v in loaded for v in node.outputs):
            # Its readers absorb it: they read its operands instead of it.
            more = max(read - made, 0)
            if graph.backend.fuses_reductions and node.loop < 0:
                more = _read_instead(graph, node, written)
                for v in alone.intersection(node.outputs):
                    behind[v] = sources
                    beside[v] = graph.values[v].nbytes / device.bandwidth
            absorbed = slower * _absorbed_seconds(device, flops / device.peak(flops_dtype(eqn)), read, more)
            if costly.isdisjoint(alone.intersection(node.outputs)):
                once = absorbed
            else:  # absorbed by one reader, not by several
                late = _late_readers(graph, node, written)
                fusable_into = late if len(late) == 1 else ()
                node = replace(node, fusable_into=fusable_into, fused_seconds=min(absorbed, once))
        elif fusable_into := _fusable_into(graph, node, written, eqns):
            joined = slower * _absorbed_seconds(device, flops / device.peak(flops_dtype(eqn)), read, made)
            node = replace(node, fusable_into=fusable_into, fused_seconds=min(joined, once))
        nodes.append(replace(node, seconds=once * times))
    waiting = _waiting_seconds(replace(graph, nodes=tuple(nodes)), device)
    nodes = [replace(n, seconds=n.seconds + waiting[n.id]) if n.id in waiting else n for n in nodes]
    step_seconds += math.fsum(waiting.values())
    graph = replace(graph, nodes=tuple(nodes), step_seconds=step_seconds)
    if beside:
        values = tuple(replace(v, saved_seconds=beside.get(v.id, 0.0)) for v in graph.values)
        return replace(graph, values=values, extra_seconds=-math.fsum(beside.values()))
    return _with_stacking(graph, device)


def _waiting_seconds(graph: Graph, device: DeviceSpec) -> dict[int, float]:
    """Return the seconds for which a loop waits for rows from host memory: the link's time beyond the kernels of its
    iterations, divided among the copies by size. A backward loop that copies the row again has kernels of at least that
    time.
    """
    found: dict[int, float] = {}
    copied = [n for n in graph.nodes if n.primitive == FETCH and n.loop >= 0]
    for loop in {n.loop for n in copied} if graph.platform == "gpu" else ():
        own = [n for n in copied if n.loop == loop]
        nbytes = {n.id: sum(graph.values[v].nbytes for v in n.outputs) for n in own}
        kernels = math.fsum(n.seconds for n in graph.nodes if n.loop == loop and n.primitive != FETCH)
        link = graph.total_trips[loop] * sum(nbytes.values()) / device.host_link
        share = max(link - kernels, 0.0) / (sum(nbytes.values()) or 1)
        found.update((n, share * size) for n, size in nbytes.items())
    return found


def _absorbed_seconds(device: DeviceSpec, arithmetic: float, read: int, more: int) -> float:
    """Return the extra time of a kernel that reads so many bytes more, and does arithmetic while it reads others
    anyway.

    On the CPU such kernels are bound by arithmetic, which overlaps only with the additional bytes.
    """
    if device.platform == "cpu":
        return max(arithmetic, more / device.bandwidth)
    return more / device.bandwidth + max(arithmetic - read / device.bandwidth, 0.0)


def _late(graph: Graph, writes: Set[int], reads: Set[int]) -> int:
    """Return a node of the backward pass whose kernel has these writes and reads, -1 for a kernel of the forward pass.

    The kernel may also compute forward values. Compilers do not name everything that they write.
    """
    made = [n for n in writes if not graph.nodes[n].forward]
    return min(made) if made else max((n for n in reads if not graph.nodes[n].forward), default=-1)


def _fusable_into(
    graph: Graph,
    node: Node,
    written: Written | None,
    eqns: Sequence[jex.JaxprEqn],
) -> tuple[int, ...]:
    """Return the backward kernels that can write a node's result as an additional output, if they run in the same
    stage.

    They read all of its operands of at least a quarter of its size, and do not depend on its readers. Only contractions
    read the result from memory, usually for weight gradients, for which no kernel waits.
    """
    if (
        written is None
        or not graph.backend.fuses_reductions
        or node.loop >= 0
        or not node.forward
        or len(node.outputs) != 1
    ):
        return ()
    made = max((graph.values[v].nbytes for v in node.outputs), default=0)
    large = {u for u in graph.reads[node.id] if 4 * graph.values[u].nbytes >= made}
    if all(graph.values[u].nbytes != made for u in large):
        return ()
    operands = {graph.values[u].producer for u in large}
    found = {
        late
        for writes, reads, single in written.kernels
        if operands <= reads and not single and not any(graph.nodes[n].contraction for n in writes)
        if (late := _late(graph, writes, reads)) >= 0
    }
    return tuple(sorted(found - _following(graph, node.outputs, eqns, max(found, default=-1))))


def _following(
    graph: Graph,
    values: Sequence[int],
    eqns: Sequence[jex.JaxprEqn],
    last: int,
) -> set[int]:
    """Return the nodes of the backward pass, up to `last`, that depend on a contraction which reads these values."""
    found: set[int] = set()
    waiting = [(n, False) for v in values for n in graph.readers[v]]
    while waiting:
        n, follows = waiting.pop()
        follows = follows or graph.nodes[n].contraction
        if n in found or not graph.forward_stop <= n <= last or not (follows or is_relabelling(eqns[n])):
            continue
        if follows:
            found.add(n)
        waiting.extend((m, follows) for v in graph.nodes[n].outputs for m in graph.readers[v])
    return found


def _for_later(graph: Graph, written: Written) -> frozenset[int]:
    """Return the values that the forward pass's kernels write and none of them reads."""
    late = [_late(graph, k.writes, k.reads) >= 0 for k in written.kernels]
    read = {
        i
        for kernel, after in zip(written.kernels, late, strict=True)
        if kernel.writes and not after
        for i in kernel.reads
    }
    made = {i for k, after in zip(written.kernels, late, strict=True) if after for i in k.writes}
    return frozenset(
        v
        for v in graph.residuals
        for i in (graph.values[v].producer,)
        if i in written.sizes and i not in read | made
        if graph.recomputable(v) and not graph.is_small(v) and not graph.values[v].is_output
    )


def _contracted(graph: Graph, eqns: Sequence[jex.JaxprEqn]) -> set[int]:
    """Return the values that contractions of the backward pass read."""
    return {
        behind_views(v, eqns, graph.nodes, graph.values)
        for node in graph.nodes
        if node.contraction and not node.forward
        for v in node.inputs
    }


def _read_instead(graph: Graph, node: Node, written: Written | None) -> int:
    """Return the additional bytes that the backward pass's kernels read if they recompute a value instead of reading
    it.
    """
    made = sum(graph.values[v].nbytes for v in node.outputs)
    operands = {graph.values[v].producer: graph.values[v].nbytes for v in graph.reads[node.id]}
    kernels = written.kernels if written else (Kernel(frozenset(), frozenset({node.id})),)
    return sum(
        max(sum(nbytes for n, nbytes in operands.items() if n not in k.reads) - made, 0)
        for k in kernels
        if node.id in k.reads and (not k.writes or _late(graph, k.writes, k.reads) >= 0)
    )


def _late_readers(graph: Graph, node: Node, written: Written | None) -> tuple[int, ...]:
    """Return the nodes that the backward kernels which read a node's result write."""
    kernels = (k for k in (written.kernels if written else ()) if node.id in k.reads)
    return tuple(sorted({late for k in kernels if (late := _late(graph, k.writes, k.reads)) >= 0}))


def _with_stacking(graph: Graph, device: DeviceSpec) -> Graph:
    """Return the graph with the time of copies into stacks and out of them; the plain step spends it on all stacked
    values.
    """
    plain = handed_over(graph)
    loaded = _loaded(graph)
    seconds: dict[int, float] = {}
    plain_seconds = 0.0
    for value in graph.values:
        if not value.length or not graph.recomputable(value.id) or graph.is_small(value.id):
            continue  # the same in every plan
        times = graph.total_trips[graph.nodes[value.producer].loop]
        taken = times * _stacking_seconds(graph, value, device, loaded)
        if value.materialised:
            seconds[value.id] = taken
        if value.id in plain:
            plain_seconds += taken
    values = tuple(replace(v, saved_seconds=seconds.get(v.id, 0.0)) for v in graph.values)
    step_seconds = graph.step_seconds + plain_seconds
    return replace(graph, values=values, step_seconds=step_seconds, extra_seconds=-plain_seconds)


def _stacking_seconds(graph: Graph, value: Value, device: DeviceSpec, loaded: Set[int]) -> float:
    """Return an iteration's extra seconds for a value that is stacked; `loaded` as from `_loaded`.

    A compiler that fuses fills the stack with zeros first and copies each value into it. It copies a value out of the
    stack if a contraction or several kernels read it; a single other kernel reads the stack itself.
    """
    if not graph.backend.fuses_reductions:
        return 2 * COPIES * value.nbytes / device.bandwidth
    copies = 2 if value.id in loaded else 1
    return (1 + 2 * copies) * value.nbytes / device.bandwidth + copies * device.launch_seconds


def always_stacked_seconds(graph: Graph, device: DeviceSpec) -> float:
    """Return the seconds that loops spend on stacks under any plan, with a compiler that fuses: on the zeros that their
    results overwrite, and on values that are saved because they cannot be recomputed.
    """
    loaded = _loaded(graph)
    taken = 0.0
    for node in graph.nodes:
        if node.primitive == "scan_stack" and len(node.inputs) == 1:
            nbytes = sum(graph.values[v].nbytes for v in node.outputs)
            taken += nbytes / device.bandwidth + device.launch_seconds
    for value in (graph.values[v] for v in graph.residuals):
        if value.length and not graph.recomputable(value.id):
            times = graph.total_trips[graph.nodes[value.producer].loop]
            taken += times * _stacking_seconds(graph, value, device, loaded)
    return taken


def _loaded(graph: Graph) -> set[int]:
    """Return the values that the backward pass's contractions read, or several of its kernels."""
    reads = Counter(v for n in graph.nodes if not n.forward for v in graph.reads[n.id])
    contracted = {v for n in graph.nodes if n.contraction and not n.forward for v in graph.reads[n.id]}
    return contracted | {v for v, count in reads.items() if count > 1}


def handed_over(graph: Graph) -> set[int]:
    """Return the values of forward iterations that the backward loops' own nodes read."""
    slices = {v for n in graph.nodes if n.primitive == "scan_slice" for v in n.outputs}
    return {
        v
        for node in graph.nodes
        for v in node.inputs
        if graph.values[v].length and graph.nodes[graph.values[v].producer].loop != node.loop
    } - slices


def behind_views(v: int, eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node], values: Sequence[Value]) -> int:
    """Return the value whose memory a contraction reads for a reshaped or transposed one."""
    while (
        (producer := values[v].producer) >= 0
        and is_relabelling(eqns[producer])
        and (len(nodes[producer].inputs) == 1 or is_loop_slice(eqns[producer]))
    ):
        v = nodes[producer].inputs[0]
    return v


def _readers(nodes: Sequence[Node]) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node in nodes:
        for v in node.inputs:
            found.setdefault(v, []).append(node)
    return found


@mechanism("sums in place of products", off=lambda *_: set())
def written_sums(eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node], values: Sequence[Value]) -> set[int]:
    """Return the sums of a matrix product and a value of its size, if only the sum reads the product."""
    readers = _readers(nodes)
    products = (v for node in nodes if node.primitive == "dot_general" for v in node.outputs)
    return {v for made in products if (v := _sum_of(made, eqns, nodes, values, readers)) >= 0}


def _sum_of(
    v: int,
    eqns: Sequence[jex.JaxprEqn],
    nodes: Sequence[Node],
    values: Sequence[Value],
    readers: Mapping[int, Sequence[Node]],
) -> int:
    """Return the sum as which a product is written, -1 for none."""
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
    """Return whether a value is the same in every row of a product, as a bias is."""
    producer = values[v].producer
    repeated = producer >= 0 and nodes[producer].primitive == "broadcast_in_dim"
    return repeated or values[v].nbytes < values[product].nbytes


@mechanism("sums in place of products", off=lambda *_: {})
def sums_of_scattered(eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node]) -> dict[int, int]:
    """Return the results of scatters into zeros that are only added to another value, each with that sum.

    The compiler scatters into the other value, and writes no zeros.
    """
    maker = {v: node.id for node in nodes for v in node.outputs}
    readers = _readers(nodes)
    found: dict[int, int] = {}
    for node, eqn in zip(nodes, eqns, strict=True):
        if not (node.fusion_root and eqn.primitive.name.startswith("scatter")):
            continue
        (made,), filled = node.outputs, maker.get(node.inputs[0], -1)
        added = [n for n in readers.get(made, ()) if n.primitive in SUMS]
        if readers.get(made, ()) == added != [] and filled >= 0 and not nodes[filled].inputs:
            found.update((made, v) for n in added[:1] for v in n.outputs)
    return found
