"""Tagged plain program -> equation -> bytes of scratch memory: buffers of its kernels that are no values of the step.

Copies of operands in another layout or with padding, and library scratch, appear in no jaxpr. An equation compiled
separately says little about them: its operands then have the layout of arguments, while in the program their producers
write them in the layout that it needs. So scratch is read from the whole program.

A buffer that is no equation's value counts for the equations whose kernels read it, directly or through untagged
kernels; if no kernel reads it, for the equation of its own kernel. A copy of an argument may run at any time, and
counts for all equations that run during its life. Not counted are a copy of an argument in the same layout, which the
schedule needs because another kernel overwrites the argument before its last reader, and one from host memory, which is
an equation of the step. A form without the equation that writes a buffer does not have that buffer: a loss that is
computed in chunks of rows reads no logits.

An operand that is copied, and that nothing reads later, is freed before the copy is: other scratch of the equation can
take its place.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import jax.extend.core as jex

from .._model._graph import Graph, dies_at
from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import is_relabelling
from .._runtime._mechanisms import mechanism
from ._hlo import COLLECTIVES, CONTROL, Computation, Instruction, Module, executed, maker, transfer
from ._liveness import Life, lives, peak_of
from ._tags import TAG


@dataclass(frozen=True)
class Purposes:
    """The equations for which a computation's instructions run.

    **Fields:** `own` the equation with which each instruction is tagged, if any; `wanted` the equations for which each
    runs: its own, else those of its readers; `made` the buffers that are values, with their equation; `extras` the
    other buffers, and whether each is a copy of an argument.
    """

    own: Sequence[set[int]]
    wanted: Sequence[set[int]]
    made: Sequence[tuple[int, Life]]
    extras: Sequence[tuple[Life, bool]]


def values_of(eqns: Sequence[jex.JaxprEqn]) -> "Values":
    """Return the step's values, none of them claimed yet."""
    root: dict[jex.Var | jex.Literal, int] = {}  # variable -> the equation whose memory it is in
    for i, eqn in enumerate(eqns):
        operands = [a for a in eqn.invars if not _compat.is_literal(a)]
        seen = is_relabelling(eqn) and len(operands) == len(eqn.outvars) == 1
        for v in eqn.outvars:
            root[v] = root.get(operands[0], -1) if seen else i
    sizes: dict[int, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in eqn.outvars:
            if root[v] == i:
                sizes.setdefault(i, []).append(aval_nbytes(v.aval))
    of = {i: root[eqn.outvars[0]] for i, eqn in enumerate(eqns) if eqn.outvars}
    return Values(of, sizes)


@dataclass
class Values:
    """The step's values. **Fields:** `root` the equation behind each one's views; `sizes` of those not claimed yet."""

    root: Mapping[int, int]
    sizes: dict[int, list[int]]

    def claim(self, i: int, nbytes: int) -> bool:
        """Return whether a buffer of an equation is one of its values, not claimed before. Sizes may differ by 1/8."""
        sizes = self.sizes.get(self.root.get(i, -1), [])
        near = next((size for size in sizes if abs(size - nbytes) <= size // 8), None)
        if near is None:
            return False
        sizes.remove(near)
        return True


def purposes(module: Module, computation: Computation, values: Values) -> Purposes:
    """Return the purposes of a computation's instructions. Claims the values that they compute."""
    scope = computation.by_name()
    instructions = computation.instructions
    own: list[set[int]] = [{int(t) for t in TAG.findall(i.op_name)[-1:]} for i in instructions]
    made: list[tuple[int, Life]] = []
    extras: list[tuple[Life, bool]] = []
    made_at: dict[int, list[Life]] = {}
    for life in lives(module, computation.name):
        buffer = life.buffer
        made_by = maker(module, TAG, scope, buffer.instruction, buffer.element)
        tag = int(made_by) if isinstance(made_by, str) else -1
        if tag >= 0:
            own[life.born].add(tag)
        made_at.setdefault(life.born, []).append(life)
        if tag >= 0 and values.claim(tag, buffer.nbytes):
            made.append((tag, life))
        elif buffer.nbytes:
            extras.append((life, isinstance(made_by, tuple)))
    wanted: list[set[int]] = [set() for _ in instructions]
    for position in reversed(range(len(instructions))):
        wanted[position] = own[position] or set().union(
            *(wanted[reader] for life in made_at.get(position, ()) for reader in life.readers)
        )
    return Purposes(own, wanted, made, extras)


Span = tuple[int, int, int]
"""Born, dies, bytes."""


@dataclass(frozen=True)
class Scratch:
    """Scratch memory of an equation.

    **Fields:** `nbytes` if all operands of its kernels live until it has run; `fewer` by equation of an operand: the
    bytes less if nothing reads that operand later.
    """

    nbytes: int
    fewer: Mapping[int, int] = field(default_factory=dict)

    def renumbered(self, place: Mapping[int, int]) -> "Scratch":
        """Return the same with other equation indices; equations without a new one are left out."""
        return Scratch(self.nbytes, {place[i]: nbytes for i, nbytes in self.fewer.items() if i in place})


@mechanism("compiled scratch memory", off=lambda *_, **__: {})
def scratch(module: Module, eqns: Sequence[jex.JaxprEqn], gone: Set[int] = frozenset()) -> dict[int, Scratch]:
    """Return the scratch memory of each equation with kernels in the program, by index.

    **Arguments:** `gone` the equations of the program that a form does not have.
    """
    found: dict[int, Scratch] = {}
    unseen = values_of(eqns)
    for computation in executed(module):
        for i, each in _of(module, computation, unseen, gone).items():
            if i not in found or each.nbytes > found[i].nbytes:
                found[i] = each
    return found


def _of(module: Module, computation: Computation, values: Values, gone: Set[int]) -> dict[int, Scratch]:
    known = purposes(module, computation, values)
    own = known.own
    charged: dict[int, list[Span]] = {i: [] for tags in own for i in tags}
    results = dict.fromkeys(charged, 0)
    for tag, life in known.made:
        charged[tag].append((life.born, life.dies, life.buffer.nbytes))
        results[tag] += life.buffer.nbytes
    kernel_for = [set(tags) for tags in known.wanted]
    scope = computation.by_name()
    # Buffers of collectives are values, of several equations if the compiler combines collectives.
    sending = [each.opcode.removesuffix("-start") in COLLECTIVES for each in computation.instructions]
    extras = [
        (life, copied)
        for life, copied in known.extras
        if not sending[life.born]
        and not _is_spare(module, life.buffer.instruction, scope)
        and not (own[life.born] and own[life.born] <= gone)
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
    read: dict[int, dict[int, Span]] = {i: {} for i in charged}  # operands of each, until they are read
    for tag, life in known.made:
        for p in life.readers:
            for i in kernel_for[p] - {tag}:
                read[i][tag] = (0, p, life.buffer.nbytes)
    # While an equation runs, its results count in full, so they are subtracted here.
    return {i: _scratch(spans, results[i], read[i]) for i, spans in charged.items()}


def _scratch(spans: Sequence[Span], results: int, read: Mapping[int, Span]) -> Scratch:
    nbytes = max(_most(spans) - results, 0)
    where_gone = {tag: max(_most([*spans, span]) - results - span[2], 0) for tag, span in read.items()}
    return Scratch(nbytes, {tag: nbytes - less for tag, less in where_gone.items() if less < nbytes})


def _most(spans: Sequence[Span]) -> int:
    """Return the most bytes at a time."""
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
    """Return whether a buffer is a copy of an argument in the same layout, or an explicit copy from host memory."""
    if transfer(module, made) is not None:
        return True
    if made.opcode != "copy":
        return False
    source = scope[made.operands[0]]
    same = [shape.layout for shape in made.shapes] == [shape.layout for shape in source.shapes]
    return source.opcode == "parameter" and same


def with_room(graph: Graph, workspace: Mapping[int, Scratch], sums: Mapping[int, int]) -> Graph:
    """Return the graph with less scratch memory for nodes whose scratch can take the place of a dying operand.

    **Arguments:** `sums` for each scattered value, the value into which it is added.
    """
    nodes = [*graph.nodes]
    scattered = {graph.values[v].producer: graph.values[u].producer for u, v in sums.items()}
    for n, scratch in workspace.items():
        dying = [graph.values[v].producer for v in graph.reads[n] if dies_at(graph, v, nodes[n])]
        fewer = max((scratch.fewer.get(scattered.get(i, i), 0) for i in dying), default=0)
        nodes[n] = replace(nodes[n], workspace_nbytes=nodes[n].workspace_nbytes - fewer)
    return replace(graph, nodes=tuple(nodes))
