"""Section of a loop -> the same with results that its iterations write into one array, a carry.

A scan's stacked results start as zeros that depend on no value, so they may be in memory long before the loop: results
that have a zero in the program start from that. Other results overwrite, row by row, an array that the loop reads; so
do carries of loops with nested checkpointing. If an equation then reads a row after its write, or the array from before
the loop, the compiler copies the whole array in every iteration. Therefore

- all rows are read from the carry;
- a row that the iteration's other work needs is read once, and passes a barrier;
- values computed from a row only for such results are computed together: the results pass one barrier.

A compiler that computes nothing early fuses such a read, the update and the write into one kernel, and barriers would
prevent that.

Section of a loop -> the same with rows of arrays read by the stages that need them, not all when an iteration begins.

Reading a row of a stack copies it, unless a pointwise kernel reads it in place. A compiler that computes values as
early as it can copies all rows of an iteration at its start, and they stay in memory until the last stage has read
them. So after each barrier, rows are read again, at an index that has passed the barrier. Rows of arrays that the
iteration writes are read once, and pass the barriers themselves; otherwise the compiler would compute values from them
at the start too, such as broadcasts. So do all rows in a loop of one iteration, whose index is a constant.

Invariant: the same rows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom, DType
from .._program._primitives import is_barrier
from .._runtime._mechanisms import mechanism
from ._fetch_turns import fetched_in_turn
from ._flat_program import Loop
from ._loop_inlining import PART, Section, append, row_at, row_written


@dataclass(frozen=True, eq=False)
class _Write:
    """A result written over an array. **Fields:** `start` the array; `carried` its variable in the body; `part` the
    written value; `eqn` that writes it, or None if it is still to be added; `array` the result in that case.
    """

    start: Any
    carried: Any
    part: Any
    eqn: Any = None
    array: Any = None


def written_in_place(
    section: Section,
    loop: Loop,
    same: Callable[[Atom], Atom],
    before_barrier: Callable[[Atom], Atom],
    *,
    materialises_eagerly: bool,
) -> tuple[list[Any], dict[Any, Any]]:
    """Turn results of a section into carries, and parts of arrays into equations that read them; return the equations
    that compute the start values of the carries, and the array under each result that is written over one.

    **Arguments:** `same` maps a variable to its name before it passed any barrier, and before other rows of it were
    overwritten; `before_barrier` to its name before it passed any barrier.
    """
    before: list[Any] = []
    place, places = None, None

    def index() -> jex.Var:
        nonlocal place, places
        if place is None:
            places = append(before, lambda: jax.lax.iota(jax.numpy.int32, loop.length), (), loop.eqn)
            place = _compat.new_var(jex.mapped_aval(loop.length, 0, places.aval))
        return place

    if section.filled or section.over:
        index()
    # Late reads change the section's equations, so the writes are collected again below.
    if materialises_eagerly:
        writes = _writes(section, same)
        written = {v for write in writes for v in (write.carried, same(write.start))}
        read_late(section, loop, written, _needed_besides(section, writes), index, same)
    writes = _writes(section, same)
    taken = {id(write.eqn) for write in writes}
    section.eqns = [eqn for eqn in section.eqns if id(eqn) not in taken]
    own = _read_rows(
        section, loop, writes, index, same, before_barrier, materialises_eagerly=materialises_eagerly
    )
    behind = _written_together(section, own, writes, loop) if materialises_eagerly else {}
    section.eqns.extend(_compat.renamed(write.eqn, behind) for write in writes if write.eqn is not None)

    def carry(begun: Atom, carried: Atom, part: Atom, array: Atom) -> None:
        number = max(section.carries, default=-1) + 1
        section.carries[number] = begun, carried
        section.lasts[number] = append(section.eqns, row_written, (carried, part, index()), loop.eqn), array

    for array, (part, zero) in section.filled.items():
        shape, dtype = array.aval.shape, array.aval.dtype

        def begin(zero: jax.Array, shape: tuple[int, ...] = shape, dtype: DType = dtype) -> jax.Array:
            return jax.lax.broadcast(zero.astype(dtype), shape)

        carry(append(before, begin, (zero,), loop.eqn), _compat.new_var(array.aval), part, array)
    for write in writes:
        if write.eqn is None:
            carry(write.start, write.carried, behind.get(write.part, write.part), write.array)
    if not materialises_eagerly:
        fetched_in_turn(section, loop, index)
    if place is not None:
        section.scanned[place] = places
    carried = {write.carried: write.start for write in writes}
    over = {section.lasts[i][1]: carried[v] for i, (_, v) in section.carries.items() if v in carried}
    return before, over


def _writes(section: Section, same: Callable[[Atom], Atom]) -> list[_Write]:
    """Return the writes over arrays of which the section reads rows."""
    found = [
        _Write(section.scanned[row], _compat.new_var(array.aval), part, None, array)
        for array, (part, row) in section.over.items()
    ]
    read = {same(eqn.invars[0]) for eqn in section.eqns if eqn.primitive is PART}
    starts = {carried: start for start, carried in section.carries.values()}
    ends = {a for a, _ in section.lasts.values() if not _compat.is_literal(a)}
    for eqn in section.eqns:
        carried = eqn.invars[0] if eqn.primitive.name == "dynamic_update_slice" else None
        if (
            carried in starts
            and eqn.outvars[0] in ends
            and not read.isdisjoint((carried, same(starts[carried])))
        ):
            found.append(_Write(starts[carried], carried, eqn.invars[1], eqn))
    return found


def _needed_besides(section: Section, writes: Sequence[_Write]) -> set[jex.Var]:
    """Return the values that are needed for anything but results that overwrite arrays."""
    written = {write.eqn.outvars[0] for write in writes if write.eqn is not None}
    needed = (
        set(_compat.variables([*(a for a, _ in section.lasts.values()), *section.stacked.values()])) - written
    )
    for eqn in reversed(section.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(_compat.variables(eqn.invars))
    return needed


def _read_rows(
    section: Section,
    loop: Loop,
    writes: Sequence[_Write],
    place: Callable[[], jex.Var],
    same: Callable[[Atom], Atom],
    before_barrier: Callable[[Atom], Atom],
    *,
    materialises_eagerly: bool,
) -> set[jex.Var]:
    """Read parts of arrays, from the carry if they are overwritten, and behind a barrier if the iteration's other work
    needs them too; return these and the other values that this work needs.
    """
    carried = {v: write.carried for write in writes for v in (write.carried, same(write.start))}
    parts = [(v, a, place()) for v, a in section.scanned.items() if same(a) in carried]
    for v, *_ in parts:
        del section.scanned[v]
    parts += [(e.outvars[0], *e.invars) for e in section.eqns if e.primitive is PART]
    own = _needed_besides(section, writes) if materialises_eagerly else set()
    kept = {carried[same(a)] for v, a, _ in parts if same(a) in carried and v in own}
    own.update(v for v, a, _ in parts if carried.get(same(a)) in kept)
    reads: list[Any] = []
    for v, a, index in parts:
        held = v in own and same(a) in carried
        array = carried.get(
            same(a), before_barrier(a)
        )  # an array that an earlier loop has overwritten has a new name
        read = append(reads, row_at, (array, index), loop.eqn, None if held else v)
        if held:
            reads.append(_compat.barrier([read], [v], loop.eqn.source_info))
    section.eqns = [*reads, *(eqn for eqn in section.eqns if eqn.primitive is not PART)]
    return own


@mechanism("rows written together", off=lambda *_: {})
def _written_together(
    section: Section, own: set[jex.Var], writes: Sequence[_Write], loop: Loop
) -> dict[Any, Any]:
    """Append barriers for results that depend on the same rows, unless the iteration's other work needs them; return
    the names of these results behind the barriers.
    """
    carried = {write.carried for write in writes}
    made_of: dict[Any, frozenset[Any]] = {}
    for eqn in section.eqns:
        rows = [made_of[a] for a in _compat.variables(eqn.invars) if a in made_of]
        rows += [frozenset({a}) for a in _compat.variables(eqn.invars) if a in carried]
        if rows and own.isdisjoint(eqn.outvars):
            made_of.update(dict.fromkeys(eqn.outvars, frozenset().union(*rows)))
    groups: list[tuple[set[Any], list[Any]]] = []
    for part in dict.fromkeys(_compat.variables(write.part for write in writes)):
        read = set(made_of.get(part, ()))
        near = [group for group in groups if group[0] & read]
        groups = [group for group in groups if not group[0] & read]
        groups.append((read.union(*(r for r, _ in near)), [part, *(p for _, parts in near for p in parts)]))
    behind: dict[Any, Any] = {}
    for read, parts in groups:
        if len(parts) > 1 or len(read) > 1:
            made = {part: _compat.new_var(part.aval) for part in parts}
            section.eqns.append(_compat.barrier(list(made), list(made.values()), loop.eqn.source_info))
            behind.update(made)
    return behind


def read_late(
    section: Section,
    loop: Loop,
    written: Collection[Atom],
    own: Collection[jex.Var],
    place: Callable[[], jex.Var],
    same: Callable[[Atom], Atom],
) -> None:
    """Read the rows of a section in the stages that need them.

    **Arguments:** `written` the arrays that the iteration writes; `own` the values that it needs for anything else;
    `place` returns a variable for the iteration's index; `same` maps a variable to its name before it passed any
    barrier.
    """
    every = _rows(section)
    rows = {v: row for v, row in every.items() if same(row[0]) not in written}
    passed: dict[Any, Any] = {}  # name behind barriers -> name before
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
    names: dict[Any, Any] = {}  # row -> its name behind the last barrier, once it is read

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
    """Return the rows that are read behind a barrier. **Arguments:** `passed` the names before barriers of values that
    pass one.
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
    """Return the array and the index of each row that the section reads; the index is None for the iteration's own."""
    parts = [eqn for eqn in section.eqns if eqn.primitive is PART]
    indices = {eqn.invars[1] for eqn in parts}
    scanned = {v: (array, None) for v, array in section.scanned.items() if v not in indices}
    return {**scanned, **{eqn.outvars[0]: (eqn.invars[0], eqn.invars[1]) for eqn in parts}}
