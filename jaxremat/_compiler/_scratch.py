"""Tagged plain program -> equation -> bytes of scratch memory: what its kernels have beside the step's own values.

An equation compiled alone says little of them: there its operands come in the layout of arguments, while in the program
their own producers write them as it wants them. So they are read off the whole program, as `_attribution` finds them. A
copy of an argument alone is made at any time, and counts for all that run while it is there; but not a copy of an
argument as it is, which the program's order needs because something overwrites the argument before its last reader;
nor one from the host's memory, which is an equation's own.

An operand that is copied, and that nothing reads later, is gone before the copy is: it makes room for what the equation
has besides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._model._graph import Graph
from .._model._reuse import dies_at
from .._runtime._mechanisms import mechanism
from ._attribution import Values, purposes, values_of
from ._hlo import COLLECTIVES, CONTROL, Computation, Instruction, Module, executed, transfer
from ._liveness import peak_of

Span = tuple[int, int, int]
"""Born, dies, bytes."""


@dataclass(frozen=True)
class Scratch:
    """Scratch memory of an equation.

    **Fields:** `nbytes` where all that its kernels read is there until it has run; `fewer` for each equation that makes
    some of that how many bytes less where nothing reads it later.
    """

    nbytes: int
    fewer: Mapping[int, int] = field(default_factory=dict)

    def renumbered(self, place: Mapping[int, int]) -> "Scratch":
        """The same by other indices; equations without one are left out."""
        return Scratch(self.nbytes, {place[i]: nbytes for i, nbytes in self.fewer.items() if i in place})


@mechanism("scratch memory as compiled", off=lambda *_: {})
def scratch(module: Module, eqns: Sequence[Any]) -> dict[int, Scratch]:
    """That of each equation that has kernels of its own in the program, by index."""
    found: dict[int, Scratch] = {}
    unseen = values_of(eqns)
    for computation in executed(module):
        for i, each in _of(module, computation, unseen).items():
            if i not in found or each.nbytes > found[i].nbytes:
                found[i] = each
    return found


def _of(module: Module, computation: Computation, values: Values) -> dict[int, Scratch]:
    known = purposes(module, computation, values)
    own = known.own
    charged: dict[int, list[Span]] = {i: [] for tags in own for i in tags}
    results = dict.fromkeys(charged, 0)
    for tag, life in known.made:
        charged[tag].append((life.born, life.dies, life.buffer.nbytes))
        results[tag] += life.buffer.nbytes
    kernel_for = [set(tags) for tags in known.wanted]
    scope = computation.by_name()
    # What devices send each other is values, of several equations where the compiler makes one of them.
    sending = [each.opcode.removesuffix("-start") in COLLECTIVES for each in computation.instructions]
    extras = [
        (life, copied)
        for life, copied in known.extras
        if not sending[life.born] and not _is_spare(module, life.buffer.instruction, scope)
    ]
    for life, copied in extras:
        users = set().union(*(known.wanted[life.born if sending[p] else p] for p in life.readers))
        users = users or known.wanted[life.born]
        kernel_for[life.born] |= users
        if copied:
            users = users.union(*own[life.born : life.dies + 1])
        for i in users:
            charged[i].append((life.born, life.dies, life.buffer.nbytes))
    for position, instruction in enumerate(computation.instructions):
        if instruction.opcode in CONTROL:
            inner = max(peak_of(module, callee).nbytes for callee in instruction.callees)
            for i in own[position]:
                charged[i].append((position, position, inner))
    read: dict[int, dict[int, Span]] = {i: {} for i in charged}  # what each reads, until it has
    for tag, life in known.made:
        for p in life.readers:
            for i in kernel_for[p] - {tag}:
                read[i][tag] = (0, p, life.buffer.nbytes)
    # While an equation makes its results they count in full, whether they are there yet or not.
    return {i: _scratch(spans, results[i], read[i]) for i, spans in charged.items()}


def _scratch(spans: Sequence[Span], results: int, read: Mapping[int, Span]) -> Scratch:
    nbytes = max(_most(spans) - results, 0)
    where_gone = {tag: max(_most([*spans, span]) - results - span[2], 0) for tag, span in read.items()}
    return Scratch(nbytes, {tag: nbytes - less for tag, less in where_gone.items() if less < nbytes})


def _most(spans: Sequence[Span]) -> int:
    """The most bytes at a time."""
    changes: dict[int, int] = {}
    for born, dies, nbytes in spans:
        changes[born] = changes.get(born, 0) + nbytes
        changes[dies + 1] = changes.get(dies + 1, 0) - nbytes
    now = most = 0
    for position in sorted(changes):
        now += changes[position]
        most = max(most, now)
    return most


def _is_spare(module: Module, made: Instruction, scope: Mapping[str, Instruction]) -> bool:
    """Whether it is a copy of an argument as it is, or one from the host's memory that the step makes itself."""
    if transfer(module, made) is not None:
        return True
    if made.opcode != "copy":
        return False
    source = scope[made.operands[0]]
    same = [shape.layout for shape in made.shapes] == [shape.layout for shape in source.shapes]
    return source.opcode == "parameter" and same


def with_room(graph: Graph, workspace: Mapping[int, Scratch], sums: Mapping[int, int]) -> Graph:
    """The graph with less scratch memory where it takes the place of what nothing reads later.

    **Arguments:** `sums` for each value that is scattered into something what stands for it.
    """
    nodes = [*graph.nodes]
    scattered = {graph.values[v].producer: graph.values[u].producer for u, v in sums.items()}
    for n, scratch in workspace.items():
        dying = [graph.values[v].producer for v in graph.reads[n] if dies_at(graph, v, nodes[n])]
        fewer = max((scratch.fewer.get(scattered.get(i, i), 0) for i in dying), default=0)
        nodes[n] = replace(nodes[n], workspace_nbytes=nodes[n].workspace_nbytes - fewer)
    return replace(graph, nodes=tuple(nodes))
