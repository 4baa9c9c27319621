"""Tagged plain program -> equation -> bytes of scratch memory: what its kernels have beside the step's own values.

An equation compiled alone says little of them: there its operands come in the layout of arguments, while in the program
their own producers write them as it wants them. So they are read off the whole program, as `_purposes` finds them. A
copy of an argument alone is made at any time, and counts for all that run while it is there.
"""

from collections.abc import Sequence
from typing import Any

from ._hlo import CONTROL, Computation, Module, executed
from ._live import peak_of
from ._purposes import Values, purposes, values_of


def scratch(module: Module, eqns: Sequence[Any]) -> dict[int, int]:
    """Scratch bytes of each equation that has kernels of its own in the program, by index."""
    found: dict[int, int] = {}
    unseen = values_of(eqns)
    for computation in executed(module):
        for i, nbytes in _of(module, computation, unseen).items():
            found[i] = max(found.get(i, 0), nbytes)
    return found


def _of(module: Module, computation: Computation, values: Values) -> dict[int, int]:
    known = purposes(module, computation, values)
    own = known.own
    charged: dict[int, list[tuple[int, int, int]]] = {i: [] for tags in own for i in tags}
    results = dict.fromkeys(charged, 0)
    for tag, life in known.made:
        charged[tag].append((life.born, life.dies, life.buffer.nbytes))
        results[tag] += life.buffer.nbytes
    for life, copied in known.extras:
        users = set().union(*(known.wanted[p] for p in life.readers)) or known.wanted[life.born]
        if copied:
            users = users.union(*own[life.born : life.dies + 1])
        for i in users:
            charged[i].append((life.born, life.dies, life.buffer.nbytes))
    for position, instruction in enumerate(computation.instructions):
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
