"""Tagged plain program -> equation -> bytes of scratch memory: what its kernels have beside the step's own values.

Copies of operands in another layout or with padding, index arrays of a pooling gradient and library scratch appear in
no jaxpr, and an equation compiled alone says little of them: there its operands come in the layout of arguments, while
in the program their own producers write them as it wants them. So they are read off the whole program: a buffer that
is no equation's value counts for the equations whose kernels read it, directly or through kernels of no equation, or
for the one whose kernel it is of where nothing does. A copy of an argument alone is made at any time, and counts for
all that run while it is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _compat
from ._cost import aval_nbytes
from ._hlo import CONTROL, Computation, Module, executed, maker
from ._live import Life, lives, peak_of
from ._primitives import is_relabelling
from ._tags import TAG


def scratch(module: Module, eqns: Sequence[Any]) -> dict[int, int]:
    """Scratch bytes of each equation that has kernels of its own in the program, by index."""
    found: dict[int, int] = {}
    unseen = _values(eqns)
    for computation in executed(module):
        for i, nbytes in _of(module, computation, unseen).items():
            found[i] = max(found.get(i, 0), nbytes)
    return found


def _values(eqns: Sequence[Any]) -> "_Values":
    root: dict[Any, int] = {}  # variable -> the equation whose memory it is in
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
    return _Values(of, sizes)


@dataclass
class _Values:
    """Which buffers are values. **Fields:** `root` of each equation, behind views; `sizes` of those not seen yet."""

    root: Mapping[int, int]
    sizes: dict[int, list[int]]

    def claim(self, i: int, nbytes: int) -> bool:
        """Whether a buffer that the equation makes is a value of it that was not seen before."""
        sizes = self.sizes.get(self.root.get(i, -1), [])
        near = next((size for size in sizes if abs(size - nbytes) <= size // 8), None)
        if near is None:
            return False
        sizes.remove(near)
        return True


def _of(module: Module, computation: Computation, values: _Values) -> dict[int, int]:
    scope = computation.by_name()
    instructions = computation.instructions
    ours = lives(module, computation.name)
    own: list[set[int]] = [{int(t) for t in TAG.findall(i.op_name)[-1:]} for i in instructions]
    made: list[tuple[int, Life]] = []  # values, and which equation's
    extras: list[tuple[Life, bool]] = []  # the others, and whether they are copies of arguments
    made_at: dict[int, list[Life]] = {}
    for life in ours:
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
    wanted: list[set[int]] = [set() for _ in instructions]  # for whom an instruction runs
    for position in reversed(range(len(instructions))):
        wanted[position] = own[position] or set().union(
            *(wanted[reader] for life in made_at.get(position, ()) for reader in life.readers)
        )
    charged: dict[int, list[tuple[int, int, int]]] = {i: [] for tags in own for i in tags}
    results = dict.fromkeys(charged, 0)
    for tag, life in made:
        charged[tag].append((life.born, life.dies, life.buffer.nbytes))
        results[tag] += life.buffer.nbytes
    for life, copied in extras:
        users = set().union(*(wanted[p] for p in life.readers)) or wanted[life.born]
        if copied:
            users = users.union(*own[life.born : life.dies + 1])
        for i in users:
            charged[i].append((life.born, life.dies, life.buffer.nbytes))
    for position, instruction in enumerate(instructions):
        if instruction.opcode in CONTROL:
            inner = max(peak_of(module, callee).nbytes for callee in instruction.callees)
            for i in own[position]:
                charged[i].append((position, position, inner))
    # While an equation makes its results they count in full, whether they are there yet or not.
    return {i: max(_most(spans) - results[i], 0) for i, spans in charged.items()}


def _most(spans: Sequence[tuple[int, int, int]]) -> int:
    """The most bytes at a time of (born, dies, bytes)."""
    changes: dict[int, int] = {}
    for born, dies, nbytes in spans:
        changes[born] = changes.get(born, 0) + nbytes
        changes[dies + 1] = changes.get(dies + 1, 0) - nbytes
    now = most = 0
    for position in sorted(changes):
        now += changes[position]
        most = max(most, now)
    return most
