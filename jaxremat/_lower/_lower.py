"""Traced step + the values that XLA materialises + device -> `Graph`, in plain numbers.

Invariant: node ids are the indices of `traced.jaxpr`'s equations, and value ids number its arguments, constants and
equation outputs in order.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import jax.extend.core as jex

from .._compiler._devices import DeviceSpec
from .._compiler._memory_stats import MemoryStats
from .._compiler._scratch import Scratch, with_room
from .._compiler._tags import Written
from .._emit._layouts import axes_in_memory
from .._model._graph import Graph, Node, Pin, Stage, Value, backend
from .._model._pins import Patterns, matching, with_pins
from .._model._primitive_names import FETCH, GATHER, OVERWRITING, PUT
from .._model._stages import cut_stages
from .._program import _compat
from .._program._axes import is_scattered
from .._program._compat import shaped
from .._program._flops import aval_nbytes, eqn_flops, in_rounds
from .._program._primitives import (
    is_fetch,
    is_fusion_root,
    is_light,
    is_product,
    is_put,
    is_repeatable,
    reads_memory,
)
from .._program._row_indices import batched_indices
from .._rewrite._flat_program import FORWARD, Loop
from .._rewrite._gathered_operands import is_gather
from .._rewrite._kernel_choice import replaced
from .._rewrite._selections import is_marked
from .._rewrite._trace import Traced
from .._runtime._garbage import uncollected
from ._kernel_prices import behind_views, handed_over, priced, sums_of_scattered, written_sums
from ._loop_memory import carried_values, crossing_values, with_waiting, written_whole

INDEX_SHARE = 0.01
"""Index arrays are not counted if together they are less than this share of all materialised bytes: a batch's labels
are a thousandth, but indices of lookups in images are as large as the results.
"""

SMALL_SHARE = 1e-4
"""Residuals below this share of the bytes that the forward pass writes are always saved, ..."""

MOST_SMALL = 0.01
"""... as long as together they are no more than this share of them."""


@uncollected
def lower(
    traced: Traced,
    device: DeviceSpec,
    *,
    base_nbytes: int,
    written: Written | None = None,
    workspace: Mapping[int, Scratch] | None = None,
    seconds: Mapping[int, float] | None = None,
    flops: Sequence[float] | None = None,
    patterns: Patterns = (),
) -> Graph:
    """Return the planner's view of a traced step, as one device has it.

    - `base_nbytes`: arguments + outputs - aliased bytes.
    - `written`: the values that the plain step's program writes and reads; None without a program: fusion rules decide.
    - `workspace`: scratch memory by equation index.
    - `seconds`: measured times of equations that ran by themselves, by index; the others' are the roofline's.
    - `flops` of each equation, if a device does only a part; `patterns`: the user's `pins`, besides hints.

    **Raises:** `HintError` if hints or pins contradict each other or the program.
    """
    jaxpr = traced.jaxpr.jaxpr
    index: dict[jex.Var, int] = {}
    values: list[Value] = []
    outputs = {a for a in jaxpr.outvars if not _compat.is_literal(a)}

    def add(var: jex.Var, producer: int, length: int = 0) -> int:
        index[var] = len(values)
        short = getattr(var.aval, "str_short", None)
        values.append(
            Value(
                id=len(values),
                producer=producer,
                nbytes=aval_nbytes(var.aval),
                materialised=producer < 0,
                is_output=var in outputs,
                shape=short(short_dtypes=True) if short else str(var.aval),
                name=traced.labels.get(var, ""),
                length=length,
            )
        )
        return index[var]

    for var in (*jaxpr.constvars, *jaxpr.invars):
        add(var, -1)
    nodes: list[Node] = []
    summed, gathered = (written.summed, written.gathered) if written is not None else ({}, {})
    fuses_reductions, better = backend(device.platform).fuses_reductions, replaced(backend(device.platform))
    in_backward, decided = traced.in_backward, traced.program.decisions
    # Everything after the first backward pass may read recomputed values, even the forward pass of a second loss.
    begun = list(accumulate(in_backward, operator.or_))
    once = decided.once(in_backward) | decided.once(begun)
    cotangents = decided.edges.shared_cotangents(begun)
    once |= {i for i in cotangents if not in_backward[i]}
    for i, eqn in enumerate(jaxpr.eqns):
        inputs = tuple(dict.fromkeys(index[a] for a in eqn.invars if not _compat.is_literal(a)))
        loop = traced.loops[traced.loop_of[i]] if traced.loop_of[i] >= 0 else None
        outs = tuple(add(v, i, _length(eqn, loop)) for v in eqn.outvars)
        nodes.append(
            Node(
                id=i,
                primitive=_name(eqn),
                inputs=inputs,
                outputs=outs,
                seconds=0.0,
                flops=eqn_flops(eqn) if flops is None else flops[i],
                workspace_nbytes=workspace[i].nbytes if workspace and i in workspace else 0,
                fusion_root=(is_fusion_root(eqn) and not (is_scattered(eqn) and better(eqn)))
                or is_gather(eqn)
                or in_rounds(device, eqn),
                contraction=is_gather(eqn) or reads_memory(eqn),
                forward=not in_backward[i],
                repeatable=is_repeatable(eqn)
                and i not in once
                and (is_gather(eqn) or is_product(eqn) or not (i in summed or i in gathered)),
                decides=i in once,
                summed_nbytes=summed.get(i, 0) if is_product(eqn) else 0,
                gathered_nbytes=gathered.get(i, 0) if is_product(eqn) else 0,
                scope=_compat.name_stack_text(eqn),
                source=_compat.user_line(eqn),
                loop=traced.loop_of[i],
            )
        )
    _take_over(nodes, values, {index[v] for v in traced.over})
    in_memory = _by_rules(jaxpr.eqns, nodes, values)
    if written is not None:
        # The plain loop stacks more than it needs to: in loops, rules or a separately compiled iteration decide.
        known = {-1, *written.loops}
        inside = {
            v for v in in_memory if values[v].producer >= 0 and nodes[values[v].producer].loop not in known
        }
        in_memory = _by_compiler(jaxpr.eqns, nodes, values, written.sizes) | inside
        if fuses_reductions:
            in_memory |= written_sums(jaxpr.eqns, nodes, values)
        else:
            in_memory |= _unnamed(nodes, written.sizes)
    sums = sums_of_scattered(jaxpr.eqns, nodes)
    in_memory = in_memory - sums.keys() | set(sums.values())
    nodes = [replace(n, fusion_root=False) if not sums.keys().isdisjoint(n.outputs) else n for n in nodes]
    crossing = crossing_values(jaxpr.eqns, nodes, values)
    exact = [each for each in traced.program.encoded if each.exact]
    crossing.update(index[v] for each in exact if index[each.decoded] in crossing for v in each.parts)
    in_memory |= crossing | carried_values(jaxpr.eqns, nodes)
    in_memory |= {v for n in nodes for v in {FETCH: n.outputs, PUT: n.inputs}.get(n.primitive, ())}
    in_memory |= written_whole(nodes, in_memory)
    in_memory |= {v for i in cotangents for v in nodes[i].outputs}
    marked = (node for node, eqn in zip(nodes, jaxpr.eqns, strict=True) if is_marked(eqn) and better(eqn))
    in_memory |= {v for node in marked for v in node.outputs}
    if not fuses_reductions:
        small = INDEX_SHARE * sum(values[v].nbytes for v in in_memory)
        in_memory |= _with_index_arrays(jaxpr.eqns, nodes, values, index, small)
    nodes = [replace(n, repeatable=False) if not crossing.isdisjoint(n.outputs) else n for n in nodes]
    nodes = with_waiting(
        jaxpr.eqns, nodes, values, traced.loops, backend(device.platform).materialises_eagerly
    )
    copies = {index[v] for each in traced.program.encoded for v in each.parts}
    in_memory -= {index[v] for each in exact for v in (each.whole, each.decoded)}
    in_memory |= copies | {v.id for v in values if v.producer < 0 or v.is_output}
    axes = axes_in_memory(jaxpr.eqns, nodes, values, device.chip if fuses_reductions else None)
    values = [
        replace(v, materialised=v.id in in_memory, axes=axes.get(v.id, ()) if v.nbytes else ())
        for v in values
    ]
    forward_stop = next((n.id for n in nodes if not n.forward), len(nodes))
    sizes = sorted(
        v.saved_nbytes for v in values if v.materialised and v.producer >= 0 and nodes[v.producer].forward
    )
    graph = Graph(
        nodes=tuple(nodes),
        values=tuple(values),
        stages=(Stage(forward_stop, len(nodes)),) if forward_stop < len(nodes) else (),
        base_nbytes=base_nbytes,
        step_seconds=0.0,
        small_nbytes=_small(sizes),
        donated=frozenset(index[v] for v, d in zip(jaxpr.invars, traced.donated, strict=True) if d),
        platform=device.platform,
        parents=tuple(loop.parent for loop in traced.loops),
        groups=tuple(loop.group for loop in traced.loops),
        loop_lengths=tuple(loop.length for loop in traced.loops),
        form=traced.form,
    )
    graph = with_room(graph, workspace or {}, sums)
    pins = [*_hinted(traced, index, graph), *matching(graph, patterns, written is not None)]
    graph = with_pins(graph, pins) if pins else graph
    graph = priced(graph, jaxpr.eqns, device, written, seconds or {})
    graph = replace(graph, values=tuple(_as_copy(v, device) if v.id in copies else v for v in graph.values))
    return replace(graph, stages=cut_stages(graph))


def _with_index_arrays(
    eqns: Sequence[jex.JaxprEqn],
    nodes: Sequence[Node],
    values: list[Value],
    index: Mapping[jex.Var, int],
    small_nbytes: float,
) -> set[int]:
    """Return the indices of gathers and scatters with batch dimensions, and give them their size in XLA:CPU: it writes
    them once for all operations that read the same indices, each index with its position in the batch.

    **Arguments:** `small_nbytes`: if the total is no more than this, they keep their size, as labels of a batch do.
    """
    found: dict[int, int] = {}
    for eqn in eqns:
        indices, beside = batched_indices(eqn)
        if indices is not None and beside and indices in index:
            v = behind_views(index[indices], eqns, nodes, values)
            places = shaped(indices).shape[-1]
            found[v] = max(found.get(v, 0), aval_nbytes(indices.aval) // places * (places + beside))
    found = {v: nbytes for v, nbytes in found.items() if values[v].producer >= 0}
    if sum(found.values()) <= small_nbytes:
        return set()
    for v, nbytes in found.items():
        values[v] = replace(values[v], nbytes=max(nbytes, values[v].nbytes))
    return set(found)


def _as_copy(value: Value, device: DeviceSpec) -> Value:
    """Return a copy in fewer bits, with the time of writing it as the cost of saving."""
    return replace(value, saved_seconds=max(value.saved_seconds, value.nbytes / device.bandwidth))


def _name(eqn: jex.JaxprEqn) -> str:
    """Return the primitive's name, or the graph's name for it."""
    if is_gather(eqn):
        return GATHER
    return FETCH if is_fetch(eqn) else PUT if is_put(eqn) else eqn.primitive.name


def _hinted(traced: Traced, index: Mapping[jex.Var, int], graph: Graph) -> list[Pin]:
    """Return the pins of the program's hints: for a view, on the value that is in memory; for a stage, at the first
    node that reads the cotangent.
    """
    found = []
    for hint in traced.hints:
        if (v := index.get(hint.variable)) is None:
            continue  # no equation needs it
        if hint.action == "stage":
            found.extend(Pin("stage", n, hint.origin) for n in graph.readers[v][:1])
            continue
        if not graph.values[v].materialised:
            v = behind_views(v, traced.jaxpr.jaxpr.eqns, graph.nodes, graph.values)
        found.append(Pin(hint.action, v, hint.origin))
    return found


def as_stacked(graph: Graph) -> Graph:
    """Return the graph with all values materialised that the plain step's forward loops stack for backward loops."""
    stacked = handed_over(graph)
    values = (replace(v, materialised=v.materialised or v.id in stacked) for v in graph.values)
    return replace(graph, values=tuple(values))


def _take_over(nodes: Sequence[Node], values: list[Value], over: set[int]) -> None:
    """Give no memory to values that loops carry in place of these arguments and overwrite."""
    for node in nodes:
        if node.primitive in ("scan_carry", *OVERWRITING) and not over.isdisjoint(node.inputs[:1]):
            over.update(node.outputs)
            for v in node.outputs:
                values[v] = replace(values[v], nbytes=0)


def _length(eqn: jex.JaxprEqn, loop: Loop | None) -> int:
    """Return how many values of this equation a backward loop reads if they are saved, 0 if it reads none."""
    if loop is None or loop.role != FORWARD or eqn.primitive.name in ("scan_last", "scan_stack"):
        return 0
    return loop.length


def _small(sizes: Sequence[int]) -> int:
    """Return the size up to which values are always saved, given all sizes in ascending order."""
    total, together = sum(sizes), 0
    limit = int(SMALL_SHARE * total)
    for size, group in groupby(sizes):
        together += sum(group)
        if size > limit:
            break
        if together > MOST_SMALL * total:
            return size - 1
    return limit


def _by_compiler(
    eqns: Sequence[jex.JaxprEqn],
    nodes: Sequence[Node],
    values: Sequence[Value],
    written: Mapping[int, Sequence[int]],
) -> set[int]:
    """Return the values whose buffers the compiled plain step writes, and those that the backward pass reads from
    memory.
    """
    chosen = {
        v
        for i, sizes in written.items()
        for v in nodes[i].outputs
        if values[v].nbytes and any(abs(size - values[v].nbytes) <= values[v].nbytes // 8 for size in sizes)
    }
    chosen = {behind_views(v, eqns, nodes, values) for v in chosen}
    return chosen | _read_in_memory(eqns, nodes, values, lambda node: not node.forward)


def _unnamed(nodes: Sequence[Node], written: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the results of convolutions that the compiled program does not name: XLA:CPU turns some into matrix
    products, or swaps their operands, and the replacement may have no name. It is never fused into another kernel.
    """
    lost = (n for n in nodes if n.primitive == "conv_general_dilated" and n.id not in written)
    return {v for node in lost for v in node.outputs}


def _by_rules(eqns: Sequence[jex.JaxprEqn], nodes: Sequence[Node], values: Sequence[Value]) -> set[int]:
    """Return the values that XLA's fusion usually leaves in memory: results and operands of heavy work, and values that
    several distant kernels read.
    """
    chosen = {v for node in nodes if node.fusion_root for v in node.outputs}
    chosen |= _read_in_memory(eqns, nodes, values, lambda node: True)
    readers: dict[int, list[int]] = {}
    for node in nodes:
        for v in node.inputs:
            readers.setdefault(behind_views(v, eqns, nodes, values), []).append(node.id)
    for v, users in readers.items():
        producer = values[v].producer
        if producer < 0 or is_light(eqns[producer]):
            continue
        kernels = sum(nodes[u].fusion_root for u in users)
        if kernels > 1 or (kernels and len(users) > 2):
            chosen.add(v)
    return chosen


def _read_in_memory(
    eqns: Sequence[jex.JaxprEqn],
    nodes: Sequence[Node],
    values: Sequence[Value],
    which: Callable[[Node], bool],
) -> set[int]:
    """Return the values that contractions and other such nodes read: they are in memory whatever their producer is."""
    chosen = set()
    for node in nodes:
        if node.contraction and which(node):
            for v in node.inputs:
                root = behind_views(v, eqns, nodes, values)
                producer = values[root].producer
                if producer >= 0 and nodes[producer].inputs:
                    chosen.add(root)
    return chosen


def estimate_base(traced: Traced) -> MemoryStats:
    """Return the step's memory that is always in use, assuming that donated buffers are reused by outputs of equal
    size.
    """
    jaxpr = traced.jaxpr.jaxpr
    used = {a for eqn in jaxpr.eqns for a in eqn.invars if not _compat.is_literal(a)}
    outputs = [a for a in jaxpr.outvars if not _compat.is_literal(a)]
    used.update(outputs)
    arguments = sum(aval_nbytes(v.aval) for v in jaxpr.invars if v in used)
    results = sum(aval_nbytes(v.aval) for v in jaxpr.outvars)
    free = [(v.aval.shape, v.aval.dtype) for v, d in zip(jaxpr.invars, traced.donated, strict=True) if d]
    aliased = 0
    for v in outputs:
        if (v.aval.shape, v.aval.dtype) in free:
            free.remove((v.aval.shape, v.aval.dtype))
            aliased += aval_nbytes(v.aval)
    return MemoryStats(arguments, results, aliased, 0)
