"""Section of a loop -> the same with stacked results that its iterations write into one array, a carry.

A scan's own stacked results begin as zeros of which the compiler knows nothing, and may stand in memory long before the
loop: those that have a zero are made of it. Others are written over an array that the loop reads, row over row. The
compiler must then never read a row behind the write, or it copies the whole array in every iteration. So

- a row that the iteration's own work reads is read once, and passes a barrier;
- what is made of a row for such results alone is done when the first of them is written: they pass a barrier together.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.extend.core as jex

from . import _compat
from ._loops import Loop, row_at


def written_in_place(section: Any, loop: Loop, hoists: bool) -> list[Any]:
    """Turn results of a section (see `_close`) into carries; returns the equations that make what these start with."""
    if not section.filled and not section.over:
        return []
    before: list[Any] = []
    places = _inline(before, loop, lambda: jax.lax.iota(jax.numpy.int32, loop.length))
    place = _compat.new_var(jex.mapped_aval(loop.length, 0, places.aval))
    section.scanned[place] = places

    def carry(begun: Any, carried: Any, part: Any, array: Any) -> None:
        index = max(section.carries, default=-1) + 1
        section.carries[index] = begun, carried
        section.lasts[index] = _inline(section.eqns, loop, _write, carried, part, place), array

    for array, (part, zero) in section.filled.items():
        shape, dtype = array.aval.shape, array.aval.dtype

        def begin(zero: Any, shape: Any = shape, dtype: Any = dtype) -> Any:
            return jax.lax.broadcast(zero.astype(dtype), shape)

        carry(_inline(before, loop, begin, zero), _compat.new_var(array.aval), part, array)
    carried = {row: _compat.new_var(array.aval) for array, (_, row) in section.over.items()}
    begun = {row: section.scanned[row] for row in carried}
    own = _needed_besides(section) if hoists else set()
    _read_rows(section, carried, own, place, loop)
    parts = _written_together(section, set(carried) - own, own, loop) if hoists else {}
    for array, (part, row) in section.over.items():
        carry(begun[row], carried[row], parts.get(part, part), array)
    return before


def renamed(eqn: Any, rename: dict[Any, Any]) -> Any:
    """The equation with other operands."""
    invars = [a if _compat.is_literal(a) else rename.get(a, a) for a in eqn.invars]
    return eqn if invars == list(eqn.invars) else eqn.replace(invars=invars)


def _write(array: Any, row: Any, index: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(array, row, index, 0)


def _inline(into: list[Any], loop: Loop, fn: Any, *operands: Any, made: Any = None) -> Any:
    """Append the equations of a function of these operands; returns its result, of the given name if any."""
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    named = () if made is None else (made,)
    eqns, (result,) = _compat.inlined(jax.make_jaxpr(fn)(*types), operands, loop.eqn.source_info, named)
    into.extend(eqns)
    return result


def _needed_besides(section: Any) -> set[Any]:
    """What is needed for anything but results that are written over."""
    needed = set(_variables([*(a for a, _ in section.lasts.values()), *section.stacked.values()]))
    for eqn in reversed(section.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(_variables(eqn.invars))
    return needed


def _read_rows(section: Any, carried: dict[Any, Any], own: set[Any], place: Any, loop: Loop) -> None:
    """Read the rows of what is written over from the carry, all of a row that the iteration's own work reads held."""
    reads: list[Any] = []
    for row, array in carried.items():
        same = [v for v, other in section.scanned.items() if other is section.scanned[row]]
        held = not own.isdisjoint(same)
        own.update(same if held else ())
        for v in same:
            read = _inline(reads, loop, row_at, array, place, made=None if held else v)
            if held:
                reads.append(_compat.barrier([read], [v], loop.eqn.source_info))
            del section.scanned[v]
    section.eqns = [*reads, *section.eqns]


def _written_together(section: Any, rows: set[Any], own: set[Any], loop: Loop) -> dict[Any, Any]:
    """Append barriers for results that are made of the same rows, none of which the iteration's own work reads; what
    results are called behind them.
    """
    made_of: dict[Any, frozenset[Any]] = {row: frozenset({row}) for row in rows}
    for eqn in section.eqns:
        reads = [made_of[a] for a in _variables(eqn.invars) if a in made_of]
        if reads and own.isdisjoint(eqn.outvars):
            made_of.update(dict.fromkeys(eqn.outvars, frozenset().union(*reads)))
    groups: list[tuple[set[Any], list[Any]]] = []
    for part in dict.fromkeys(part for part, _ in section.over.values()):
        read = set(made_of.get(part, ()))
        near = [group for group in groups if group[0] & read]
        groups = [group for group in groups if not group[0] & read]
        groups.append((read.union(*(r for r, _ in near)), [part, *(p for _, parts in near for p in parts)]))
    behind: dict[Any, Any] = {}
    for read, parts in groups:
        if len(parts) > 1 or len(read) > 1:
            made = {part: _compat.new_var(part.aval) for part in parts if not _compat.is_literal(part)}
            section.eqns.append(_compat.barrier(list(made), list(made.values()), loop.eqn.source_info))
            behind.update(made)
    return behind


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [a for a in atoms if not _compat.is_literal(a)]
