"""Tagged plain program -> for whom each of its kernels runs, and which buffers are the step's own values.

Copies of operands in another layout or with padding and library scratch appear in
no jaxpr. A buffer that is no equation's value counts for the equations whose kernels read it, directly or through
kernels of no equation, or for the one whose kernel it is of where nothing does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import is_relabelling
from ._hlo import Computation, Module, maker
from ._liveness import Life, lives
from ._tags import TAG


@dataclass(frozen=True)
class Purposes:
    """What the instructions of a computation are for.

    **Fields:** `own` for each instruction the equation that it is tagged with, if any; `wanted` for each the equations
    for which it runs: its own, else those of its readers; `made` the buffers that are values, with their equation;
    `extras` the others, and whether they are copies of arguments.
    """

    own: Sequence[set[int]]
    wanted: Sequence[set[int]]
    made: Sequence[tuple[int, Life]]
    extras: Sequence[tuple[Life, bool]]


def values_of(eqns: Sequence[jex.JaxprEqn]) -> "Values":
    """The step's values, none of them seen yet."""
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
    return Values(of, sizes)


@dataclass
class Values:
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


def purposes(module: Module, computation: Computation, values: Values) -> Purposes:
    """What the computation's instructions are for; the values that they make are seen from then on."""
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
