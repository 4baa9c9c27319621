"""Section of a loop -> the same with copies from host memory that begin in turn, as they are needed.

The compiler runs few copies at once, and begins each so early that an iteration with many copies waits for most of them
at its start. Here the index of a row in host memory passes a barrier together with the results of the first readers of
the copy before the last: at most two copies are in flight, and no kernel waits for a copy before it needs it.

Invariant: the same rows.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.extend.core as jex

from .._model._host_copies import AT_ONCE
from .._program import _compat
from .._program._compat import Atom
from .._program._primitives import is_barrier, is_contraction, is_fetch, is_put, is_view, on_host
from .._runtime._mechanisms import mechanism
from ._flat_program import Loop
from ._loop_inlining import Section, append, row_at


@mechanism("row copies in turn", off=lambda *_: False)
def fetched_in_turn(section: Section, loop: Loop, place: Callable[[], jex.Var]) -> bool:
    """Let the copies of a section begin in turn; return whether any waits for another.

    **Arguments:** `place` returns a variable for the iteration's index.
    """
    fetches = [eqn for eqn in section.eqns if is_fetch(eqn)]
    if len(fetches) <= AT_ONCE or loop.length == 1:
        return False
    maker = {v: (i, eqn) for i, eqn in enumerate(section.eqns) for v in eqn.outvars}
    uses = _uses(section.eqns)
    order = sorted(
        (eqn for eqn in fetches if eqn.outvars[0] in uses), key=lambda eqn: uses[eqn.outvars[0]].first
    )
    behind: dict[int, list[Any]] = {}  # index of an equation -> new equations behind it
    gone: set[int] = set()
    for i in range(AT_ONCE, len(order)):
        fetch, first = order[i], uses[order[i].outvars[0]].first
        earlier = (uses[each.outvars[0]] for each in reversed(order[: i - AT_ONCE + 1]))
        use = next((use for use in earlier if use.last < first), None)
        read = _row_read(fetch.invars[0], section, maker, place)
        if use is None or read is None or (read.index in maker and maker[read.index][0] > use.last):
            continue
        later, made = _compat.new_var(read.index.aval), _compat.new_var(use.made.aval)
        new: list[Any] = [_compat.barrier([read.index, use.made], [later, made], loop.eqn.source_info)]
        row = append(new, row_at, (read.array, later), loop.eqn)
        behind.setdefault(use.last, []).extend([*new, fetch.replace(invars=[row])])
        gone.add(id(fetch))
    if not behind:
        return False
    found: list[Any] = []
    for i, eqn in enumerate(section.eqns):
        found.extend([] if id(eqn) in gone else [eqn])
        found.extend(behind.get(i, ()))
    results = [*(a for a, _ in section.lasts.values()), *section.stacked.values()]
    needed = set(_compat.variables(results))
    section.eqns = []
    for eqn in reversed(found):  # drop reads of rows that nothing copies any more
        if not _reads_host(eqn) or not needed.isdisjoint(eqn.outvars):
            section.eqns.insert(0, eqn)
            needed.update(_compat.variables(eqn.invars))
    section.scanned = {v: a for v, a in section.scanned.items() if not on_host(v.aval) or v in needed}
    return True


def _reads_host(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation only returns rows of arrays in host memory."""
    simple = eqn.primitive.name in _ROWS or is_view(eqn) or is_barrier(eqn)
    return simple and all(on_host(v.aval) for v in eqn.outvars)


_ROWS = frozenset({"dynamic_slice", "jit"})
"""The primitives of `row_at`."""


class _Use(NamedTuple):
    """The readers of a copy. **Fields:** `first` the index of its first reader; `last` that of the equation after which
    it has been read, a product or the maker of a value that is copied back; `made` the result of that equation.
    """

    first: int
    last: int
    made: Any


class _Read(NamedTuple):
    """How a row is read. **Fields:** the `array` in host memory; the `index`."""

    array: Any
    index: Any


def _uses(eqns: list[jex.JaxprEqn]) -> dict[Any, _Use]:
    """Return the readers of each copy."""
    readers: dict[Any, list[int]] = {}
    maker: dict[Atom, int] = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    for i, eqn in enumerate(eqns):
        for a in set(_compat.variables(eqn.invars)):
            readers.setdefault(a, []).append(i)
    found: dict[Any, _Use] = {}
    for eqn in filter(is_fetch, eqns):
        first, seen, waiting = -1, set[int](), list(readers.get(eqn.outvars[0], ()))
        while waiting:
            i = min(waiting)
            waiting.remove(i)
            seen.add(i)
            if first < 0 and not is_view(eqns[i]) and not is_barrier(eqns[i]):
                first = i
            if is_put(eqns[i]) or is_contraction(eqns[i]):
                (made,) = eqns[i].invars if is_put(eqns[i]) else eqns[i].outvars[:1]
                found[eqn.outvars[0]] = _Use(first, maker.get(made, i), made)
                break
            waiting += [
                j for v in eqns[i].outvars for j in readers.get(v, ()) if j not in seen and j not in waiting
            ]
    return found


def _row_read(
    row: Atom, section: Section, maker: Mapping[Atom, tuple[int, jex.JaxprEqn]], place: Callable[[], jex.Var]
) -> _Read | None:
    """Return the array and the index of a row in host memory; None if they cannot be traced."""
    while row in maker:
        eqn = maker[row][1]
        if eqn.primitive.name in _ROWS:
            indices = [a for a in _compat.variables(eqn.invars) if not _compat.shaped(a).shape]
            return _Read(eqn.invars[0], indices[0]) if len(indices) == 1 else None
        if not _reads_host(eqn):
            return None
        row = eqn.invars[[v is row for v in eqn.outvars].index(True)]
    return _Read(section.scanned[row], place()) if row in section.scanned else None
