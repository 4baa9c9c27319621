"""Flat equations -> the same with optimizer updates of stacked parameters inside the loop that computes their
gradients.

A backward scan stacks the gradients of all layers, which stay in memory until the optimizer has read the whole stack.
But an optimizer works entry by entry: the update of a row depends only on that row of the gradients, so the iteration
that computes the row can apply it,

    g, G = scan(backward, g0, X)                 g, P' = scan(backward', g0, (X, P))
    P' = P - rate * G                    ->          p' = p - rate * (this iteration's gradient)

and no stack of gradients is needed. If the step's caller donates `P`, its rows are overwritten (see
`_in_place_stacks`), and there is never a second stack. Arrays in host memory come to the device and return row by row.
A norm of a whole stack becomes norms of its rows, and the norm of these.

Invariant: every row is computed by the same operations as before. Equations move only if fewer bytes are then stacked.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._flops import aval_nbytes
from .._program._primitives import is_contraction, on_host
from ._flat_program import FlatProgram, Gain, with_eqns
from ._nested_checkpointing import backward_of
from ._streamed_stacks import REDUCTIONS, is_by_rows, repeats_row, row_equation


def with_optimizer_in_backward(program: FlatProgram, donated: Sequence[bool]) -> FlatProgram:
    """Move updates into the backward scans of pairs that take another form.

    **Arguments:** `donated` per argument.
    """
    jaxpr = program.closed.jaxpr
    items = list(enumerate(jaxpr.eqns))
    over: dict[Any, Any] = {}
    aliased = _aliases(jaxpr, donated)
    backward = list(backward_of(jaxpr.eqns).values())
    gains = [Gain(0, 0)] * len(backward)
    for at, pair in sorted(((j, i) for i, own in enumerate(backward) for j in own), reverse=True):
        loop = _Loop(items, next(k for k, (j, _) in enumerate(items) if j == at), program.closed, aliased)
        found = loop.found()
        gains[pair] = Gain(*map(sum, zip(gains[pair], found.gain, strict=True)))
        form = program.pairs[pair]
        if found.moved and (form.levels or form.undone):
            items = loop.rebuilt(found)
            over |= found.over
    closed = with_eqns(program.closed, [eqn for _, eqn in items])
    return program.moved(closed, [i for i, _ in items], over=over, gains=tuple(gains))


def _aliases(jaxpr: jex.Jaxpr, donated: Sequence[bool]) -> dict[jex.Var, jex.Var]:
    """Return for results the donated argument whose memory JAX gives them: the first unused one of the same type, among
    the arguments that are read.
    """
    read = {a for eqn in jaxpr.eqns for a in _compat.variables(eqn.invars)}
    read.update(a for a in jaxpr.outvars if not _compat.is_literal(a))
    free: dict[Any, deque[Any]] = {}
    for v, is_so in zip(jaxpr.invars, donated, strict=False):
        if is_so and v in read:
            free.setdefault(_alike(v), deque()).append(v)
    found: dict[Any, Any] = {}
    for a in jaxpr.outvars:
        if left := free.get(_alike(a)):
            argument = left.popleft()
            if not _compat.is_literal(a):
                found.setdefault(a, argument)
    return found


def _alike(atom: Atom) -> tuple[Any, ...]:
    """Return the type that a result shares with the argument whose memory it takes."""
    return shaped(atom).shape, shaped(atom).dtype, on_host(atom.aval)


@dataclass(frozen=True)
class _Found:
    """**Fields:** `moved` the equations that go into the loop; `made` their results, which it stacks; `over` as in a
    `FlatProgram`; `gain`.
    """

    moved: set[int]
    made: list[Any]
    over: dict[Any, Any]
    gain: Gain


class _Loop:
    """One backward scan, at a position among the items (old index, equation), and the equations that it may absorb."""

    def __init__(
        self,
        items: list[tuple[int, jex.JaxprEqn]],
        at: int,
        flat: jex.ClosedJaxpr,
        aliased: Mapping[jex.Var, jex.Var],
    ):
        self.scan = items[at][1]
        self.length = self.scan.params["length"]
        self.at, self.aliased = at, aliased
        self.items = items = [each for i, item in enumerate(items) for each in self._split(*item, i > at)]
        self.returned = {a for a in flat.jaxpr.outvars if not _compat.is_literal(a)}
        self.maker = {v: i for i, (_, eqn) in enumerate(items) for v in eqn.outvars}
        self.readers: dict[Any, set[int]] = {}
        for i, (_, eqn) in enumerate(items):
            for a in _compat.variables(eqn.invars):
                self.readers.setdefault(a, set()).add(i)
        self.carries = _compat.scan_counts(self.scan)[1]
        self.stacks = self.scan.outvars[self.carries :]
        self.behind = {at}  # equations that need the loop's results
        for i in range(at + 1, len(items)):
            if any(self.maker.get(a) in self.behind for a in _compat.variables(items[i][1].invars)):
                self.behind.add(i)
        self.blocked = set(self.behind)  # and equations that cannot move before the loop for other reasons
        for i in range(at + 1, len(items)):
            eqn = items[i][1]
            if is_contraction(eqn) or any(
                self.maker.get(a, at) > at and self.maker[a] in self.blocked
                for a in _compat.variables(eqn.invars)
            ):
                self.blocked.add(i)

    def _split(self, index: int, eqn: jex.JaxprEqn, late: bool) -> list[tuple[int, Any]]:
        """Return a reduction of whole stacks, such as a norm, as a reduction of each row and one of the results."""
        if not late or eqn.primitive.name not in REDUCTIONS:
            return [(index, eqn)]
        axes = eqn.params["axes"]
        if 0 not in axes or len(axes) == 1 or shaped(eqn.invars[0]).shape[0] != self.length:
            return [(index, eqn)]
        kept = [n for d, n in enumerate(shaped(eqn.invars[0]).shape) if d == 0 or d not in axes]
        rows = _compat.new_var(eqn.outvars[0].aval.update(shape=tuple(kept)))
        inner = {**eqn.params, "axes": tuple(d for d in axes if d)}
        first = eqn.replace(outvars=[rows], params=inner)
        return [(-1, first), (index, eqn.replace(invars=[rows], params={**eqn.params, "axes": (0,)}))]

    def found(self) -> "_Found":
        """Return the equations that are worth moving."""
        moved: set[int] = set()
        made: list[Any] = []
        over: dict[Any, Any] = {}
        fewer = 0
        for group in self._groups():
            leaving = [v for i in sorted(group) for v in self.items[i][1].outvars if self._seen(v, group)]
            gone = [y for y in self.stacks if self.readers.get(y, set()) & group and not self._seen(y, group)]
            written = {v: x for v in leaving if (x := self._written_over(v, group)) is not None}
            more = [v for v in leaving if v not in self.returned or (v in self.aliased and v not in written)]
            if (less := _nbytes(gone) - _nbytes(more)) > 0:
                moved |= group
                made += leaving
                over |= written
                fewer += less
        return _Found(moved, made, over, Gain(fewer, _nbytes(made)))

    def _groups(self) -> list[set[int]]:
        """Return the equations behind the loop that can run row by row, in groups that depend on each other."""
        by_rows: dict[int, set[int]] = {}  # each -> its group, which they share
        stacks = set(self.stacks)
        for i in sorted(self.behind - {self.at}):
            eqn = self.items[i][1]
            needed = [a for a in _compat.variables(eqn.invars) if self.maker.get(a) in self.blocked]
            known = all(a in stacks or self.maker[a] in by_rows for a in needed)
            if not known or not is_by_rows(eqn, self.length) or repeats_row(eqn):
                continue
            group = {i}
            near = {self.maker[a] for a in needed if a not in stacks}
            near |= {j for a in needed if a in stacks for j in self.readers[a]}
            for j in near:
                group |= by_rows.get(j, set())
            by_rows.update(dict.fromkeys(group, group))
        return [set(each) for each in {id(group): group for group in by_rows.values()}.values()]

    def _seen(self, v: jex.Var, group: set[int]) -> bool:
        """Return whether other equations than these read a value."""
        return v in self.returned or not self.readers.get(v, set()) <= group

    def _written_over(self, v: jex.Var, group: set[int]) -> Any:
        """Return the argument whose memory the value takes, if nothing else reads it in or behind the loop."""
        argument = self.aliased.get(v)
        if argument is None or argument in self.returned:
            return None
        mine = group | self._pulled(group)
        late = {i for i in self.readers.get(argument, ()) if i >= self.at} - mine
        whole = [*_compat.scan_operands(self.scan)[0], *_compat.scan_operands(self.scan)[1]]
        return argument if late <= {self.at} and argument not in whole else None

    def _pulled(self, moved: set[int]) -> set[int]:
        """Return the earlier equations that only these read and that can run row by row too."""
        pulled: set[int] = set()
        for i in reversed(range(len(self.items))):
            eqn = self.items[i][1]
            if i not in self.behind and is_by_rows(eqn, self.length):
                readers = self.readers.get(eqn.outvars[0], set())
                if readers and readers <= moved | pulled and eqn.outvars[0] not in self.returned:
                    pulled.add(i)
        return pulled

    def rebuilt(self, found: "_Found") -> list[tuple[int, Any]]:
        """Return the items with these equations in the loop."""
        moved, made, over = found.moved, found.made, found.over
        body = _Body(self, moved | self._pulled(moved))
        for argument in over.values():
            body.row(argument)
        for i in sorted(moved):
            body.row(self.items[i][1].outvars[0])
        kept = [y for y in self.stacks if self._seen(y, moved)]
        scan = body.scan(kept, made)
        # The loop has new operands, whose equations must come before it.
        first: set[int] = set()
        pending = [self.maker[a] for a in _compat.variables(scan.invars) if a in self.maker]
        while pending:
            if (i := pending.pop()) > self.at and i not in first:
                first.add(i)
                pending.extend(
                    self.maker[a] for a in _compat.variables(self.items[i][1].invars) if a in self.maker
                )
        before = [*self.items[: self.at], *(self.items[i] for i in sorted(first))]
        left = (i for i in range(self.at + 1, len(self.items)) if i not in first and i not in moved)
        return [*before, (self.items[self.at][0], scan), *(self.items[i] for i in left)]


class _Body:
    """The scan's body as it grows: `inside` are the equations that run row by row in it."""

    def __init__(self, loop: _Loop, inside: set[int]):
        self.loop, self.inside = loop, inside
        closed = loop.scan.params["jaxpr"]
        self.jaxpr, self.own = _compat.opened(closed)
        self.eqns = list(self.jaxpr.eqns)
        self.consts, self.init, scanned = map(list, _compat.scan_operands(loop.scan))
        self.first = len(self.consts) + len(self.init)
        self.known: dict[Any, Any] = {}  # constants from outside that were added
        self.rows = dict(zip(loop.stacks, self.jaxpr.outvars[loop.carries :], strict=True))
        self.scanned: dict[Any, Any] = {}  # arrays that were added
        for array, row in zip(scanned, self.jaxpr.invars[self.first :], strict=True):
            self.rows.setdefault(array, row)

    def row(self, array: jex.Var) -> Atom:
        """Return the row of an array in the body, computed there or scanned over."""
        if array in self.rows:
            return self.rows[array]
        i = self.loop.maker.get(array, -1)
        eqn = self.loop.items[i][1] if i >= 0 else None
        anew = (
            eqn is not None
            and repeats_row(eqn)
            and is_by_rows(eqn, self.loop.length)
            and i not in self.loop.behind
        )
        if eqn is not None and (i in self.inside or anew):
            self.rows[array] = self._made(eqn)
        else:
            made = _compat.new_var(jex.mapped_aval(self.loop.length, 0, array.aval))
            self.rows[array] = self.scanned[array] = made
        return self.rows[array]

    def _made(self, eqn: jex.JaxprEqn) -> jex.Var:
        """Append the equation for one row."""
        inner = row_equation(eqn, self.loop.length, self.row, self._outside)
        self.eqns.append(inner)
        return inner.outvars[0]

    def _outside(self, atom: Atom) -> Atom:
        """Return the body's variable for a value that is the same in all iterations."""
        if _compat.is_literal(atom):
            return atom
        return self.known.setdefault(atom, _compat.new_var(atom.aval))

    def scan(self, kept: Sequence[jex.Var], made: Sequence[jex.Var]) -> jex.JaxprEqn:
        """Return the scan that stacks `kept` of its own results, and `made`."""
        loop, invars = self.loop, self.jaxpr.invars
        cut = len(self.consts)
        arguments = [
            *(*invars[:cut], *self.known.values(), *invars[cut : self.first]),
            *(*invars[self.first :], *self.scanned.values()),
        ]
        results = [*self.jaxpr.outvars[: loop.carries], *(self.rows[v] for v in (*kept, *made))]
        body = _compat.new_jaxpr(self.jaxpr.constvars, self.own, arguments, results, self.eqns)
        arrays = [*_compat.scan_operands(loop.scan)[2], *self.scanned]
        operands = [*self.consts, *self.known], self.init, arrays
        lasts = loop.scan.outvars[: loop.carries]
        return _compat.scan_like(loop.scan, body, loop.length, operands, (lasts, [*kept, *made]))


def _nbytes(values: Sequence[jex.Var]) -> int:
    return sum(aval_nbytes(v.aval) for v in values)
