"""Equations -> the same, whose backward pass computes a chain of blocks' values from the last block's output.

If a block's input follows from its output (see `_inverses`), as in reversible couplings, the blocks are undone from the
last to the first, each right before the backward pass needs its values. Only the output of the whole chain is kept.

A block is the shortest stretch of the forward pass, from its end backward, from whose output all values in memory
before it follow. Values that need no contraction are assumed to be known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import SUMS, is_contraction
from ._backward_equations import backward_equations
from ._flat_program import FlatProgram, Loop, with_eqns
from ._inverses import Following

LONGEST = 1024
"""The most equations of a block."""

BLOCKS = 2
"""The fewest blocks with contractions in a chain."""

ENDS = (*SUMS, "sub", "mul", "concatenate")
"""Primitives that a chain may end with."""

LARGE = 1e-3
"""A chain does not end with a value below this share of the largest."""

_UNDONE = "undone_"
"""The scope of equations that undo a block, before the block's number."""


def block_of(eqn: jex.JaxprEqn) -> int | None:
    """Return the number of the block that an equation of the backward pass undoes, or None."""
    name = _compat.last_scope(eqn)
    return int(name.removeprefix(_UNDONE)) if name.startswith(_UNDONE) else None


@dataclass(frozen=True)
class Block:
    """The part of a block that the backward pass computes.

    **Fields:** `eqns` in order; `names` the new names of values of the forward pass that the backward pass reads.
    """

    eqns: tuple[Any, ...]
    names: dict[Any, Any]


def chains(closed: jex.ClosedJaxpr, loop_of: Sequence[int], loops: Sequence[Loop]) -> list[list[Block]]:
    """Return the chains of a program with inlined loops: the blocks of each, the last first."""
    return _chains(closed, loop_of, backward_equations(closed.jaxpr.eqns, loop_of, loops))


def _chains(
    closed: jex.ClosedJaxpr, loop_of: Sequence[int], in_backward: Sequence[bool]
) -> list[list[Block]]:
    program = _Program(closed, loop_of, in_backward)
    found: list[list[Block]] = []
    stop = len(program.forward)
    while stop > 0:
        chain, start = program.chain(stop) if program.ends(stop) else ([], stop)
        if chain:
            found.append(chain)
        stop = start if chain else stop - 1
    return found


class _Program:
    """The forward pass as a list of equations, with properties of its values."""

    def __init__(self, closed: jex.ClosedJaxpr, loop_of: Sequence[int], in_backward: Sequence[bool]):
        eqns = closed.jaxpr.eqns
        flags = list(zip(eqns, loop_of, in_backward, strict=True))
        self.forward = [eqn for eqn, _, is_backward in flags if not is_backward]
        self.in_loop = [loop >= 0 for _, loop, is_backward in flags if not is_backward]
        self.wanted = {
            a for eqn, _, is_backward in flags if is_backward for a in _compat.variables(eqn.invars)
        }
        self.maker = {v: eqn for eqn in self.forward for v in eqn.outvars}
        self.last: dict[Any, int] = {}  # value -> its last reader in the forward pass
        self.deep: set[Any] = set()  # values that depend on contractions
        self.given = {*closed.jaxpr.invars, *closed.jaxpr.constvars}
        for i, eqn in enumerate(self.forward):
            read = _compat.variables(eqn.invars)
            self.last.update(dict.fromkeys(read, i))
            if is_contraction(eqn) or self.in_loop[i] or not self.deep.isdisjoint(read):
                self.deep.update(eqn.outvars)
            else:
                self.given.update(eqn.outvars)
        self.large = LARGE * max((aval_nbytes(v.aval) for v in self.maker), default=0)

    def ends(self, stop: int) -> bool:
        """Return whether a chain may end before the equation at `stop`."""
        eqn = self.forward[stop - 1]
        if eqn.primitive.name not in ENDS or self.in_loop[stop - 1]:
            return False
        (v,) = eqn.outvars
        return v in self.deep and v in self.last and aval_nbytes(v.aval) >= self.large

    def chain(self, stop: int) -> tuple[list[Block], int]:
        """Return the blocks of the chain that ends before `stop`, and the index of its first equation."""
        known = Following(self.maker.get)
        known.know({v: v for v in self.given})
        there = {
            v for i in range(stop) for v in self.forward[i].outvars if self.last.get(v, -1) >= stop
        } & self.deep
        known.know({v: v for v in there})
        edges, made = [stop], [0]
        i = stop - 1
        while i >= 0 and not self.in_loop[i] and edges[-1] - i <= LONGEST:
            eqn = self.forward[i]
            known.learn(eqn)
            there.difference_update(eqn.outvars)
            there.update(a for a in _compat.variables(eqn.invars) if a in self.deep)
            if there and there <= known.name.keys():
                edges.append(i)
                made.append(len(known.eqns))
            i -= 1
        return self._blocks(known, edges, made)

    def _blocks(self, known: Following, edges: Sequence[int], made: Sequence[int]) -> tuple[list[Block], int]:
        """Return the blocks with values that the backward pass reads, if there are several."""
        inside = self.forward[edges[-1] : edges[0]]
        names = {
            v: known.name[v] for eqn in inside for v in eqn.outvars if v in self.wanted and v in known.name
        }
        names = {v: name for v, name in names.items() if name is not v and v in self.deep}
        needed = {id(eqn) for eqn in known.needed(names)}
        found: list[Block] = []
        for start, end in zip(made, (*made[1:], len(known.eqns)), strict=True):
            eqns = tuple(eqn for eqn in known.eqns[start:end] if id(eqn) in needed)
            own = {v for eqn in eqns for v in eqn.outvars}
            found.append(Block(eqns, {v: name for v, name in names.items() if name in own}))
        deep = sum(any(map(is_contraction, block.eqns)) for block in found)
        return ([block for block in found if block.eqns], edges[-1]) if deep >= BLOCKS else ([], edges[0])


def chains_in_reverse(program: FlatProgram) -> FlatProgram:
    """Compute the values of chains that the backward pass reads from the chains' outputs."""
    jaxpr, loop_of = program.closed.jaxpr, program.loop_of
    in_backward = backward_equations(jaxpr.eqns, loop_of, program.loops)
    before: dict[int, list[Block]] = {}  # equation of the backward pass -> the blocks undone before it
    names: dict[Any, Any] = {}
    backward = (i for i in reversed(range(len(in_backward))) if in_backward[i])
    reads = {a: i for i in backward for a in _compat.variables(jaxpr.eqns[i].invars)}  # first readers
    for chain in _chains(program.closed, loop_of, in_backward):
        at = len(jaxpr.eqns)
        for block in reversed(chain):
            at = min([at, *(reads[v] for v in block.names)])
            before.setdefault(at, []).insert(0, block)
            names |= block.names
    eqns: list[Any] = []
    sources: list[int] = []
    count = 0
    for i, eqn in enumerate(jaxpr.eqns):
        for block in before.get(i, ()):
            eqns += [_compat.as_backward(each, eqn, f"{_UNDONE}{count}") for each in block.eqns]
            count += 1
        sources += [-1] * (len(eqns) - len(sources))
        eqns.append(_compat.renamed(eqn, names) if in_backward[i] else eqn)
        sources.append(i)
    return program.moved(with_eqns(program.closed, eqns), sources)
