"""Flat equations -> the same with pairs of scans that keep only the last carry of the forward scan.

If an iteration's initial carries follow from its final ones (see `_inverses`), as in reversible couplings, no other
carry needs to be kept: a pair

    c, R = scan(forward, c0, X)                g, Y = scan(backward, g0, (R, X), reverse)

becomes a forward scan that stacks nothing, and a scan that computes from `c` the carry of the previous iteration and
the values that the backward scan reads, and runs the backward pass:

    c = scan(forward, c0, X)                   g, c, Y = scan(R, c = back(c, X); backward, (g0, c), X, reverse)

The latter contains a forward and a backward pass, and is planned as any such loop.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._inline import Inliner
from .._program._primitives import is_contraction
from ._flat_program import FlatProgram
from ._inverses import Following
from ._loop_inlining import APART, operands
from ._nested_checkpointing import backward_of
from ._selections import settled
from ._sinking import sink_into


def loops_in_reverse(program: FlatProgram, inliner: Inliner) -> FlatProgram:
    """Undo the pairs that the form selects, where this is possible, instead of keeping their residuals."""
    chosen = {number for number, form in enumerate(program.pairs) if form.undone}
    jaxpr = program.closed.jaxpr
    pairs = backward_of(jaxpr.eqns)
    scans = {n for number, (i, own) in enumerate(pairs.items()) if number in chosen for n in (i, *own)}
    eqns = sink_into(jaxpr.eqns, scans)
    returned = set(_compat.variables(jaxpr.outvars))
    replaced: dict[int, Any] = {}
    numbers: set[int] = set()
    for number, (i, own) in enumerate(pairs.items()):
        if number not in chosen or len(own) != 1:
            continue
        (back,) = own
        read = {a for j, eqn in enumerate(eqns) if j not in (i, back) for a in _compat.variables(eqn.invars)}
        pair = _Pair(eqns[i], eqns[back], inliner)
        if pair.known is not None:
            kept = [v in returned or v in read for v in eqns[i].outvars[pair.carries :]]
            replaced[i] = _compat.with_results(eqns[i], [*[True] * pair.carries, *kept])
            replaced[back] = pair.apart()
            numbers.add(number)
    found = [replaced.get(i, eqn) for i, eqn in enumerate(eqns)]
    made = _compat.new_jaxpr(inliner.constvars, inliner.consts, jaxpr.invars, jaxpr.outvars, found)
    left = tuple(form for number, form in enumerate(program.pairs) if number not in numbers)
    return program.moved(made, [-1 if i in replaced else i for i in range(len(eqns))], pairs=left)


def reversible_nbytes(forward: jex.JaxprEqn, backward: jex.JaxprEqn) -> int:
    """Return the bytes of a pair's carries that need not be kept for each iteration; 0 if the pair cannot be undone."""
    pair = _Pair(forward, backward, Inliner())
    if pair.known is None or not any(map(is_contraction, pair.again)):
        return 0
    return sum(aval_nbytes(pair.left[i].aval) for i in pair.kept)


class _Pair:
    """A forward scan and its backward scan.

    **Fields:** the number of `carries` of the forward scan, and those that are `kept` to go back from; `known` the
    values that follow from an iteration's final carries, or None if the backward scan reads others; `again` the
    equations that compute these values.
    """

    def __init__(self, forward: jex.JaxprEqn, backward: jex.JaxprEqn, inliner: Inliner):
        self.forward, self.backward, self.inliner = forward, backward, inliner
        consts, init, scanned = operands(forward)
        self.carries = len(init)
        self.consts = [_compat.new_var(a.aval) for a in consts]
        self.rows = [_compat.new_var(jex.mapped_aval(self._length, 0, a.aval)) for a in scanned]
        self.left = [_compat.new_var(a.aval) for a in init]  # the final carries of the iteration
        self.known: Following | None = None
        self.kept: list[int] = []
        self.again: list[Any] = []
        self._follow([_compat.new_var(a.aval) for a in init])

    @property
    def _length(self) -> int:
        return self.forward.params["length"]

    def _follow(self, found: Sequence[jex.Var]) -> None:
        """Derive the values that follow; `found` are the initial carries of the iteration."""
        eqns: list[Any] = []
        inside = [*self.consts, *found, *self.rows]
        info = self.forward.source_info
        results = self.inliner.body(self.forward.params["jaxpr"], inside, info, eqns)
        known = Following({v: eqn for eqn in eqns for v in eqn.outvars}.get)
        for eqn in eqns:
            known.learn(eqn)
        known.know({v: v for v in (*self.consts, *self.rows, *self.inliner.constvars)})
        ends = zip(results, self.left, strict=False)
        known.know({a: v for a, v in ends if not _compat.is_literal(a)})
        stacked = dict(zip(self.forward.outvars[self.carries :], results[self.carries :], strict=True))
        self.residuals = {v: a for v, a in stacked.items() if v in operands(self.backward)[2]}
        wanted = list(_compat.variables(self.residuals.values()))
        while all(v in known.name for v in wanted):
            again = known.needed(wanted)
            read = {a for eqn in again for a in _compat.variables(eqn.invars)}
            read.update(known.name[v] for v in wanted)
            kept = [i for i, v in enumerate(self.left) if v in read]
            more = [found[i] for i in kept if found[i] not in wanted]
            if not more:
                self.known, self.kept, self.again = known, kept, again
                self.found = [known.name[found[i]] for i in kept]
                return
            wanted += more

    def apart(self) -> jex.JaxprEqn:
        """Return the scan that undoes an iteration and runs its backward pass."""
        assert self.known is not None
        consts, init, scanned = operands(self.backward)
        own_consts = [_compat.new_var(a.aval) for a in consts]
        carried = [_compat.new_var(a.aval) for a in init]
        rows = {
            a: _compat.new_var(jex.mapped_aval(self._length, 0, a.aval))
            for a in scanned
            if a not in self.residuals
        }
        given = {v: self.known.read(a) for v, a in self.residuals.items()} | rows
        body = list(self.again)
        inside = [*own_consts, *carried, *(given[a] for a in scanned)]
        results = self.inliner.body(self.backward.params["jaxpr"], inside, self.backward.source_info, body)
        before, ends = operands(self.forward), self.forward.outvars
        read = {a for eqn in body for a in _compat.variables(eqn.invars)} | set(_compat.variables(results))
        fixed = [v for v in self.inliner.constvars if v in read]
        left = [self.left[i] for i in self.kept]
        invars = [*fixed, *self.consts, *own_consts, *left, *carried, *self.rows, *rows.values()]
        closed = settled(_compat.new_jaxpr((), (), invars, [*self.found, *results], body))
        starts = [*(ends[i] for i in self.kept), *init]
        lasts = [*(_compat.new_var(v.aval) for v in left), *self.backward.outvars[: len(init)]]
        scan = _compat.scan_like(
            self.backward,
            closed,
            self._length,
            ([*fixed, *before[0], *consts], starts, [*before[2], *rows]),
            (lasts, self.backward.outvars[len(init) :]),
        )
        # The scan contains both passes, and `_loop_inlining` inlines scans with this primitive.
        return scan.replace(primitive=APART, source_info=_compat.root_source(self.backward))
