"""Section of a loop -> the same with rows of arrays read where they are needed, not all when an iteration begins.

Reading a row of a stack copies it, unless a pointwise kernel reads it in its place. A compiler that does early what it
can copies all rows that an iteration reads at its start, and there they stay until the last stage has read them. So
behind each barrier rows are read anew, at an index that has passed the barrier. Those of arrays that the iteration
writes are read once (see `_in_place_stacks`), and pass the barriers themselves: else what is made of them, broadcasts
to the size of what they are added to, would be made at the start too. So do all rows in a loop of one iteration, whose
index is no secret to the compiler.

Law: the same rows.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom
from .._program._primitives import is_barrier
from .._runtime._mechanisms import mechanism
from ._flat_program import Loop
from ._loop_inlining import PART, Section, append, row_at


def read_late(
    section: Section,
    loop: Loop,
    written: Collection[Atom],
    own: Collection[jex.Var],
    place: Callable[[], jex.Var],
    same: Callable[[Atom], Atom],
) -> None:
    """Read the rows of a section in the stages that need them.

    **Arguments:** `written` the arrays that the iteration writes; `own` what it needs for anything but that; `place`
    makes a variable for the iteration's index; `same` gives a variable the name that it had before it passed any
    barrier.
    """
    every = _rows(section)
    rows = {v: row for v, row in every.items() if same(row[0]) not in written}
    passed: dict[Any, Any] = {}  # what passes barriers -> its name before
    for eqn in filter(is_barrier, section.eqns):
        pairs = zip(eqn.invars, eqn.outvars, strict=True)
        passed.update((v, passed.get(a, a)) for a, v in pairs if not _compat.is_literal(a))
    late = _late(section, every, passed)
    where = {
        v: (array, place() if index is None else index)
        for v, (array, index) in rows.items()
        if v in late and loop.length > 1
    }
    there = {
        v: v for v in every if v in late and v not in rows and v in own
    }  # its name behind the last barrier
    if not where and not there:
        return
    found: list[Any] = []
    index_of = {index: index for _, index in where.values()}  # its name behind the last barrier
    names: dict[Any, Any] = {}  # row -> its name there

    def read(atom: Atom) -> Atom:
        row = None if _compat.is_literal(atom) else passed.get(atom, atom)
        if row not in where:
            return there.get(row, atom)
        if row not in names:
            array, index = where[row]
            names[row] = append(found, row_at, (array, index_of[index]), loop.eqn)
        return names[row]

    for eqn in section.eqns:
        if is_barrier(eqn):
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            moved = where.keys() | there.keys()
            through = [(a, v) for a, v in pairs if _compat.is_literal(a) or passed.get(a, a) not in moved]
            behind_barrier = {index: _compat.new_var(index.aval) for index in index_of}
            behind = {row: _compat.new_var(row.aval) for row in there}
            through.extend((index_of[index], v) for index, v in behind_barrier.items())
            through.extend((there[row], v) for row, v in behind.items())
            found.append(eqn.replace(invars=[a for a, _ in through], outvars=[v for _, v in through]))
            index_of, there, names = behind_barrier, behind, {}
        elif eqn.primitive is PART:
            found.extend([eqn] if eqn.outvars[0] not in where else [])
        else:
            invars = [read(a) for a in eqn.invars]
            found.append(eqn if invars == list(eqn.invars) else eqn.replace(invars=invars))
    section.lasts = {i: (read(a), v) for i, (a, v) in section.lasts.items()}
    section.filled = {v: (read(a), zero) for v, (a, zero) in section.filled.items()}
    section.over = {v: (read(a), row) for v, (a, row) in section.over.items()}
    section.stacked = {v: read(a) for v, a in section.stacked.items()}
    section.scanned = {v: array for v, array in section.scanned.items() if v not in where}
    section.eqns = found


@mechanism("rows read late", off=lambda *_: set())
def _late(section: Section, rows: Collection[jex.Var], passed: Mapping[jex.Var, Atom]) -> set[jex.Var]:
    """Return the rows that are read behind a barrier. **Arguments:** `passed` the names before it of what
    passes one.
    """
    found: set[Any] = set()
    behind = False
    for eqn in section.eqns:
        if is_barrier(eqn):
            behind = behind or not passed.keys().isdisjoint(eqn.outvars)
        elif behind and eqn.primitive is not PART:
            found.update({*rows} & {passed.get(a, a) for a in _compat.variables(eqn.invars)})
    return found


def _rows(section: Section) -> dict[Any, tuple[Any, Any]]:
    """Return the rows that the section reads: the array of each, and the index, None for the iteration's own."""
    parts = [eqn for eqn in section.eqns if eqn.primitive is PART]
    indices = {eqn.invars[1] for eqn in parts}
    scanned = {v: (array, None) for v, array in section.scanned.items() if v not in indices}
    return {**scanned, **{eqn.outvars[0]: (eqn.invars[0], eqn.invars[1]) for eqn in parts}}
