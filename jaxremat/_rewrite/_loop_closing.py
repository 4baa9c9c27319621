"""Sections of equations -> scans again; the inverse of `_loop_inlining.open_loops`, for any plan of an iteration.

A section becomes one scan, at the position of its last equation. Values that it reads from another section of its group
are stacked there and scanned over here; values from outside are constants of its body. Invariant: closing the loops
that were just inlined gives the original program, with the same stacked values.

Scan that stacks results -> the same scan, with buffers that exist only once its operands do.

XLA:CPU starts the arrays that a loop stacks into as zeros, which wait for nothing: those of all loops are in memory
from the beginning of the step. Here they are carries, which start as a zero that has passed a barrier with the scan's
operands.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._flops import aval_nbytes
from .._program._inline import Inliner
from .._program._primitives import is_barrier, on_mesh
from .._runtime._mechanisms import mechanism
from ._flat_program import FORWARD, Loop, within
from ._in_place_stacks import written_in_place
from ._loop_inlining import SLICE, STACK, Opener, Section


def close_loops(
    eqns: Sequence[jex.JaxprEqn],
    loop_of: Sequence[int],
    loops: Sequence[Loop],
    *,
    materialises_eagerly: bool = True,
) -> list[jex.JaxprEqn]:
    """Return flat equations with scans in place of sections.

    **Arguments:** `loop_of` the loop of each equation, -1 for none; the equations of a loop are contiguous.
    """
    return [
        eqn for eqn, _ in closed_within(eqns, loop_of, loops, -1, materialises_eagerly=materialises_eagerly)
    ]


def closed_within(
    eqns: Sequence[jex.JaxprEqn],
    loop_of: Sequence[int],
    loops: Sequence[Loop],
    around: int,
    *,
    materialises_eagerly: bool = True,
) -> list[tuple[jex.JaxprEqn, int]]:
    """Return flat equations and their loops, with scans in place of the sections within loop `around`, -1 for the
    program.
    """
    behind_barrier = before_barriers(eqns)
    before = dict(behind_barrier)  # also maps variables to their names before a loop overwrote rows of them
    items = [_Item(eqn, loop) for eqn, loop in zip(eqns, loop_of, strict=True)]
    inside = {i for i in loop_of if i >= 0 and around in (*within(i, loops)[1:], -1)}
    for loop in sorted(inside, key=lambda i: (-len(within(i, loops)), i)):
        items = _closed(items, loops[loop], loops, before, behind_barrier, materialises_eagerly)
    return [(item.eqn, item.loop) for item in items]


def scan_of(
    section: Sequence[jex.JaxprEqn], loop: Loop, before: dict[jex.Var, Atom], *, materialises_eagerly: bool
) -> jex.JaxprEqn:
    """Return the scan of a section that shares no slices with another: all values from outside are constants.

    **Arguments:** `before` as returned by `before_barriers`.
    """
    found = _sorted(section)
    written_in_place(
        found, loop, name_before(before), name_before(before), materialises_eagerly=materialises_eagerly
    )
    return _scan(found, loop)


def before_barriers(eqns: Sequence[jex.JaxprEqn]) -> dict[jex.Var, Atom]:
    """Return the name that each variable had before a barrier."""
    barriers = (eqn for eqn in eqns if is_barrier(eqn))
    return {v: a for eqn in barriers for v, a in zip(eqn.outvars, eqn.invars, strict=True)}


def name_before(before: dict[jex.Var, Atom]) -> Callable[[Atom], Atom]:
    """Return a function that maps a variable to its first name."""

    def same(atom: Atom) -> Atom:
        while not _compat.is_literal(atom) and atom in before:
            atom = before[atom]
        return atom

    return same


def without_unread(
    eqns: Sequence[jex.JaxprEqn], results: Sequence[Atom], kinds: Collection[str] = ("cond", "shard_map")
) -> list[jex.JaxprEqn]:
    """Return the equations, with those of these kinds reduced to results that are read and the equations for these.

    A plan that drops a result for the backward pass recomputes it in a clone, which need not compute the other results.
    """
    read = {a for a in results if not _compat.is_literal(a)}
    found = []
    for eqn in reversed(eqns):
        if eqn.primitive.name in kinds and not eqn.effects:
            wanted = [v in read for v in eqn.outvars]
            eqn = _compat.with_results(eqn, wanted) if any(wanted) and not all(wanted) else eqn
        read.update(a for a in eqn.invars if not _compat.is_literal(a))
        found.append(eqn)
    return found[::-1]


@dataclass(frozen=True, slots=True)
class _Item:
    eqn: Any
    loop: int


def _closed(
    items: list[_Item],
    loop: Loop,
    loops: Sequence[Loop],
    before: dict[jex.Var, Atom],
    behind_barrier: dict[jex.Var, Atom],
    materialises_eagerly: bool,
) -> list[_Item]:
    """Return the items with one loop's section replaced by a scan of the loop around it."""
    at = [i for i, item in enumerate(items) if item.loop == loop.id]
    if at[-1] - at[0] + 1 != len(at):
        raise AssertionError(f"the equations of loop {loop.id} do not stand together")
    section = _sorted([item.eqn for item in items[at[0] : at[-1] + 1]])
    after = items[at[-1] + 1 :]
    for other in dict.fromkeys(item.loop for item in after if item.loop >= 0):
        if loops[other].group == loop.group:
            after = _handed_on(after, section, loop, other)
    names = name_before(before), name_before(behind_barrier)
    begun, over = written_in_place(section, loop, *names, materialises_eagerly=materialises_eagerly)
    before.update(over)
    closed = [_Item(eqn, loop.parent) for eqn in (*begun, _scan(section, loop))]
    return [*items[: at[0]], *closed, *after]


def _sorted(eqns: Sequence[jex.JaxprEqn]) -> Section:
    section = Section()
    for eqn in eqns:
        _sort(eqn, section)
    return section


def _sort(eqn: jex.JaxprEqn, section: Section) -> None:
    name = eqn.primitive.name
    if name == "scan_carry":
        section.carries[eqn.params["index"]] = (eqn.invars[0], eqn.outvars[0])
    elif name == "scan_last":
        section.lasts[eqn.params["index"]] = (eqn.invars[0], eqn.outvars[0])
    elif name == "scan_slice":
        section.scanned[eqn.outvars[0]] = eqn.invars[0]
    elif name == "scan_stack" and len(eqn.invars) == 2 and eqn.invars[1] in section.scanned:
        section.over[eqn.outvars[0]] = eqn.invars[0], eqn.invars[1]
    elif name == "scan_stack" and len(eqn.invars) == 2:
        section.filled[eqn.outvars[0]] = eqn.invars[0], eqn.invars[1]
    elif name == "scan_stack":
        section.stacked[eqn.outvars[0]] = eqn.invars[0]
    else:
        section.eqns.append(eqn)


def _handed_on(items: list[_Item], section: Section, loop: Loop, other: int) -> list[_Item]:
    """Return the items, with slices where loop `other` reads values of the section's iterations; the section stacks
    these.
    """
    made = {v: None for eqn in section.eqns for v in eqn.outvars}
    made.update((v, None) for _, v in section.carries.values())
    slices: list[Any] = []
    rename: dict[Any, Any] = {}
    for item in items:
        for a in item.eqn.invars if item.loop == other else ():
            if _compat.is_literal(a) or a in rename or (a not in made and a not in section.scanned):
                continue
            array = section.scanned.get(a)
            if array is None:
                array = _compat.new_var(jex.unmapped_aval(loop.length, 0, a.aval))
                section.stacked[array] = a
            rename[a] = _compat.new_var(a.aval)
            params = {"loop": other, "length": loop.length}
            slices.append(_compat.new_eqn([array], [rename[a]], SLICE, params, loop.eqn.source_info))
    at = next(i for i, item in enumerate(items) if item.loop == other)
    handed = [_Item(_compat.renamed(i.eqn, rename), i.loop) if i.loop == other else i for i in items[at:]]
    return [*items[:at], *(_Item(eqn, other) for eqn in slices), *handed]


def _scan(section: Section, loop: Loop) -> jex.JaxprEqn:
    indices = sorted(section.carries)
    results = [*(section.lasts[i][0] for i in indices), *section.stacked.values()]
    section.eqns = without_unread(section.eqns, results)
    carried = [section.carries[i][1] for i in indices]
    known = {*carried, *section.scanned, *(v for eqn in section.eqns for v in eqn.outvars)}
    read = [a for eqn in section.eqns for a in eqn.invars] + results
    consts = list(dict.fromkeys(a for a in read if not _compat.is_literal(a) and a not in known))
    body = _compat.new_jaxpr((), (), [*consts, *carried, *section.scanned], results, section.eqns)
    init = [section.carries[i][0] for i in indices]
    lasts = [section.lasts[i][1] for i in indices]
    operands = consts, init, list(section.scanned.values())
    return _compat.scan_like(loop.eqn, body, loop.length, operands, (lasts, list(section.stacked)))


_ZERO = _compat.literal(np.float32(0))


@mechanism("stacks begun late", off=lambda _: 0)
def stacked_nbytes(eqn: jex.JaxprEqn) -> int:
    """Return the bytes that a scan fills slice by slice; 0 for other equations, and if they cannot be carries."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return 0
    stacks = list(map(shaped, eqn.outvars[_compat.scan_counts(eqn)[1] :]))
    plain = all(jnp.issubdtype(a.dtype, jnp.number) or a.dtype == jnp.bool_ for a in stacks)
    untyped = not any(_compat.varying_axes(a) for a in eqn.invars) and not any(map(on_mesh, stacks))
    return sum(map(aval_nbytes, stacks)) if plain and untyped and _compat.variables(eqn.invars) else 0


def begun_late(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """Return the equations that replace such a scan: inlined, and closed again with stacks that start as that zero."""
    given = list(dict.fromkeys(_compat.variables(eqn.invars)))
    zero = _compat.new_var(_ZERO.aval)
    behind = {a: _compat.new_var(a.aval) for a in given}
    barrier = _compat.barrier([_ZERO, *given], [zero, *behind.values()], eqn.source_info)
    opener = Opener(Inliner(), {})
    opener.open(_compat.renamed(eqn, behind), FORWARD, None, -1)
    begun = [e.replace(invars=[*e.invars, zero]) if e.primitive is STACK else e for e in opener.eqns]
    return [barrier, *close_loops(begun, opener.loop_of, opener.loops)]
