"""Loop over chunks of rows -> equations that compute all rows at once.

The body of such a loop reads chunk `i` of an array, rows `i * size` to `(i + 1) * size` along one axis, and writes a
carry chunk by chunk or adds to it. Or the loop scans over a stack of chunks and stacks its results. Each value of the
body has one of these kinds, which follows from the kinds of its operands:

- *whole*: the same in all chunks;
- *rows*: chunk `i` of a value with all rows, or chunk `i` of each of several equal parts of it, one behind the other; a
  *slab* if it extends beyond them (see `_chunk_slabs`);
- *sum*: the chunks' contributions add up to, or are *joined* to, a value of all rows;
- *index*: a number that depends on `i` alone;
- *carry*: a carry so far, *written* with a chunk or *added* to.

For each equation of the body, the rules of `_axes` give the equation of all rows of which it is a chunk. A carry that
is written becomes the value of all rows, one that is added to becomes the sum, and one that is whole becomes that
value. This module knows nothing of how such loops are written.

Invariant: the equations give the loop's results, up to the order in which sums are added and the type of narrow
floating-point sums. A loop that might compute anything else is rejected.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _compat
from ._axes import JOINS, is_scattered, rules, sum_type
from ._chunk_kinds import (
    SIZES,
    Added,
    AllRows,
    Carry,
    Index,
    Joined,
    Kind,
    OtherLoopError,
    Places,
    Rows,
    Slab,
    Sum,
    Wanted,
    Whole,
    Written,
    is_rule,
    linear_in,
    neutral,
    parts_place,
    place_of,
    stacked,
    variable,
)
from ._chunk_slabs import Slabs
from ._compat import AnyJaxpr, Atom, SourceInfo, shaped
from ._inline import followed
from ._primitives import SUMS, runs_once
from ._splice import inlined, needed, typed


def of_all_rows(
    eqn: jex.JaxprEqn, operands: Sequence[int], scanned: Sequence[int | AllRows], places: Places
) -> Any | None:
    """Return a program that computes a loop's results from its constants, its carries and the values whose rows it
    scans, None if there is no such program.

    **Arguments:** `operands` the numbers of constants and carries; `scanned` the numbers of scanned values: of an
    index, or of the value of which a stack holds the chunks.
    """
    consts, carries = _compat.scan_counts(eqn)
    closed = eqn.params["jaxpr"]
    inner = _compat.opened(closed)[0].invars
    variables = [variable(a.aval) for a in inner[: consts + carries]]
    loop = _Chunks(eqn.params["length"], places)
    loop.begin = variables[consts:]
    loop.known = dict(zip(variables, operands, strict=True))
    given: list[Kind] = [*map(Whole, variables[:consts]), *map(Carry, range(carries))]
    try:
        for each, v in zip(scanned, inner[consts + carries :], strict=True):
            given.append(Index(each) if isinstance(each, int) else loop.stacked_rows(each, v))
        variables += [kind.atom for kind in given[consts + carries :] if isinstance(kind, (Rows, Slab))]
        kinds = loop.body(closed, given)
        results = [loop.left(i, kind) for i, kind in enumerate(kinds[:carries])]
        stacks = zip(kinds[carries:], eqn.outvars[carries:], strict=True)
        results += [loop.stack(kind, shaped(v).shape, eqn.source_info) for kind, v in stacks]
        made = loop.program(variables, results)
        _compat.check_jaxpr(made)
    except (OtherLoopError, Wanted, TypeError, ValueError):
        return None
    return made


class _Chunks:
    """The equations of all rows for a body, built equation by equation. **Arguments:** `given` the operands of an inner
    body.
    """

    def __init__(self, count: int, places: Places, given: Sequence[Kind] = ()):
        self.count, self.places = count, places
        self.eqns: list[Any] = []
        self.begin: list[Any] = []  # the carries
        self.known: dict[Any, int] = {}  # the numbers of what the loop is given
        self.consts: dict[int, tuple[Any, Any]] = {}
        self.maker: dict[Any, tuple[Any, int, list[Kind]]] = {}  # of what is whole
        self.given = {kind.atom: i for i, kind in enumerate(given) if isinstance(kind, Whole)}
        self.spread: dict[tuple[Any, int], Rows] = {}
        self.alike_rows: set[Any] = set()  # of these all rows are alike
        self.slabs = Slabs(self)

    def program(self, operands: Sequence[jex.Var], results: Sequence[Atom]) -> jex.ClosedJaxpr:
        """Return the equations for these operands."""
        variables, consts = [v for v, _ in self.consts.values()], [c for _, c in self.consts.values()]
        eqns = [self.eqns[i] for i in needed(self.eqns, results)]
        return _compat.new_jaxpr(variables, consts, operands, results, eqns)

    def left(self, place: int, kind: Kind) -> Any:
        """Return the final value of a carry."""
        if isinstance(kind, Carry) and kind.place == place:
            return self.begin[place]
        if isinstance(kind, (Written, Added)) and kind.place == place:
            return kind.atom
        if isinstance(kind, Whole):
            return kind.atom
        raise OtherLoopError

    def stacked_rows(self, scanned: AllRows, chunk: Atom) -> Kind:
        """Return the rows that a loop scans. **Arguments:** `chunk` the body's variable for one chunk."""
        shape, d = list(shaped(chunk).shape), scanned.dimension
        size, shape[d] = shape[d], scanned.rows
        v = variable(chunk.aval.update(shape=tuple(shape)))
        self.known[v] = scanned.number
        return self.slabs.kind(Slab(v, d, size, 0), size)

    def stack(self, kind: Kind, shape: Sequence[int], source_info: SourceInfo) -> Any:
        """Return the chunks of all rows as a stack of this shape."""
        if isinstance(kind, Whole):
            closed = jax.make_jaxpr(lambda x: lax.broadcast(x, shape[:1]))(typed(kind.atom))
        elif isinstance(kind, (Rows, Slab)):
            d, size = kind.dimension, shape[1 + kind.dimension]
            kind = Whole(self.slabs.written(kind, size, source_info))
            closed = jax.make_jaxpr(lambda x: stacked(x, d, self.count, size))(typed(kind.atom))
        else:
            raise OtherLoopError
        eqns, (made,) = inlined(closed, [kind.atom], source_info)
        self.eqns += eqns
        return made

    def body(self, closed: AnyJaxpr, given: Sequence[Kind]) -> list[Kind]:
        """Return the kinds of a body's results."""
        jaxpr, consts = _compat.opened(closed)
        env: dict[Any, Kind] = dict(zip(jaxpr.invars, given, strict=True))
        for v, const in zip(jaxpr.constvars, consts, strict=True):
            env[v] = Whole(self.consts.setdefault(id(const), (variable(v.aval), const))[0])

        return followed(jaxpr, env, Whole, self.body, self._results)

    def _results(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> Sequence[Kind]:
        if runs_once(eqn):
            raise OtherLoopError
        name = eqn.primitive.name
        has = {type(kind) for kind in kinds}
        if name == "gather" and Index in has:
            return [self.slabs.read(eqn, *kinds)]
        if name == "dynamic_slice" and Index in has and not self._is_index(kinds[0]):
            return [self._read(eqn, kinds)]
        if name == "dynamic_update_slice" and Carry in has:
            return [self._written(eqn, kinds)]
        if name == "select_n" and (selected := self.slabs.masked(eqn, *kinds)):
            return [selected]
        if has & {Carry, Added}:
            return [self._added(eqn, kinds)]
        if Index in has:
            return self._indices(eqn, kinds)
        if name in ("scan", "cond") and has & {Rows, Slab, Sum}:
            return (self._scan if name == "scan" else self._cond)(eqn, kinds)
        if name in JOINS and isinstance(kinds[0], (Rows, Slab)) and kinds[0].dimension in eqn.params["axes"]:
            return [self._joined(eqn, kinds[0])]
        if Slab in has:
            return self._once_over(eqn, kinds[0], self.slabs.results(eqn, kinds))
        if has <= {Whole}:
            return self._same(eqn, kinds)
        if has <= {Whole, Rows}:
            if name == "reshape" and (joined := self._of_parts(eqn, kinds[0])) is not None:
                return [joined]
            ways = [self._of_rows, self.slabs.results]
            if name == "slice" and eqn.invars[0].aval == eqn.outvars[0].aval:
                ways.reverse()  # one that cuts off rows at an end has all of a chunk
            try:
                found = ways[0](eqn, kinds)
            except OtherLoopError:
                found = ways[1](eqn, kinds)
            return self._once_over(eqn, kinds[0], found)
        if has <= {Whole, Sum}:
            return list(map(Sum, self.made(eqn, self._linear(eqn, kinds))))
        raise OtherLoopError

    def made(self, eqn: jex.JaxprEqn, kinds: Sequence[Kind], **changed: Any) -> list[jex.Var]:
        """Append an equation with these operands, and return its results."""
        outvars = [variable(v.aval) for v in changed.pop("like", eqn.outvars)]
        atoms = [kind.atom for kind in kinds]  # pyright: ignore[reportAttributeAccessIssue]
        self.eqns.append(eqn.replace(invars=atoms, outvars=outvars, **changed))
        return outvars

    def _same(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        made = self.made(eqn, kinds)
        self.maker.update((v, (eqn, i, kinds)) for i, v in enumerate(made))
        return list(map(Whole, made))

    # Indices, and what is read and written at them.

    def _number(self, kind: Kind) -> int:
        if isinstance(kind, Index):
            return kind.number
        if isinstance(kind, Whole) and _compat.is_literal(kind.atom):
            return self.places.literal(kind.atom)
        if isinstance(kind, Whole) and kind.atom in self.known:
            return self.known[kind.atom]
        if isinstance(kind, Whole) and kind.atom in self.maker:
            eqn, i, kinds = self.maker[kind.atom]
            return self.places.number(eqn, list(map(self._number, kinds)))[i]
        raise OtherLoopError

    def _is_index(self, kind: Kind) -> bool:
        try:
            return self.places.is_index(self._number(kind))
        except OtherLoopError:
            return False

    def _indices(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        if any(jnp.issubdtype(shaped(v).dtype, jnp.inexact) for v in eqn.outvars):
            raise OtherLoopError
        return list(map(Index, self.places.number(eqn, list(map(self._number, kinds)))))

    def _along(self, shape: Sequence[int], size: Sequence[int], indices: Sequence[Kind]) -> int:
        """Return the axis along which a slice of this size is the loop's chunk of an array."""
        along = [d for d, (a, b) in enumerate(zip(shape, size, strict=True)) if a != b]
        if len(along) != 1 or self.count * size[along[0]] != shape[along[0]]:
            raise OtherLoopError
        for d, kind in enumerate(indices):
            wanted = (((self.places.symbol, size[d]),), 0) if d == along[0] else ((), 0)
            if self.places.place(self._number(kind)) != wanted:
                raise OtherLoopError
        return along[0]

    def _read(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> Kind:
        array, *indices = kinds
        shape, size = shaped(eqn.invars[0]).shape, shaped(eqn.outvars[0]).shape
        if not isinstance(array, Whole) or len(indices) != len(shape):
            raise OtherLoopError
        return Rows(array.atom, self._along(shape, size, indices))

    def _written(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> Kind:
        array, update, *indices = kinds
        if not isinstance(array, Carry):
            raise OtherLoopError
        shape, size = shaped(eqn.invars[0]).shape, shaped(eqn.invars[1]).shape
        axis = self._along(shape, size, indices)
        rows = update if isinstance(update, Slab) else self._rows(update, axis)
        if rows is None or rows.dimension != axis:
            raise OtherLoopError
        return Written(array.place, self.slabs.written(rows, size[axis], eqn.source_info))

    def _added(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> Kind:
        """Return a carry to which chunks have added, plus a sum."""
        so_far, *others = kinds
        if any(isinstance(kind, (Index, Carry, Added, Written)) for kind in others[1:]):
            raise OtherLoopError
        if is_scattered(eqn) and isinstance(so_far, (Carry, Added)):
            if not all(isinstance(kind, (Whole, Rows, Slab)) for kind in others):
                raise OtherLoopError
            begin = self.begin[so_far.place]
            before = so_far.atom if isinstance(so_far, Added) else begin
            apart = before is not begin and self._is_zero(Whole(begin))
            way = self.slabs.results if any(isinstance(kind, Slab) for kind in others) else self._of_rows
            (made,) = way(eqn, [Whole(begin if apart else before), *others])
            if not isinstance(made, Sum):
                raise OtherLoopError
            return Added(so_far.place, self._plus(before, made.atom, eqn) if apart else made.atom)
        if len(kinds) != 2:
            raise OtherLoopError
        if not isinstance(so_far, (Carry, Added)):
            so_far, others = kinds[1], kinds[:1]
        if isinstance(others[0], Joined) and isinstance(so_far, Carry):
            return self._joined_to(eqn, so_far, others[0])
        dtype = shaped(eqn.outvars[0]).dtype
        able = eqn.primitive.name in SUMS and sum_type(dtype) == dtype
        if not able or not isinstance(so_far, (Carry, Added)) or not isinstance(others[0], Sum):
            raise OtherLoopError
        before = so_far.atom if isinstance(so_far, Added) else self.begin[so_far.place]
        if self._is_zero(Whole(before)):
            return Added(so_far.place, others[0].atom)
        return Added(so_far.place, self._plus(before, others[0].atom, eqn))

    def _plus(self, before: Atom, own: Atom, like: jex.JaxprEqn) -> jex.Var:
        """Return the sum of two values, in the order in which the program under comparison adds them."""
        closed = jax.make_jaxpr(lax.add)(typed(before), typed(own))
        ways = [inlined(closed, each, like.source_info) for each in ([before, own], [own, before])]
        eqns, (made,) = next((way for way in ways if self.slabs.is_known(way[0][0])), ways[0])
        self.eqns += eqns
        return made

    def _once_over(self, eqn: jex.JaxprEqn, so_far: Kind, found: list[Kind]) -> list[Kind]:
        """Return a scatter's sum without the zeros to which each chunk adds."""
        adds = is_scattered(eqn) and any(isinstance(kind, Sum) for kind in found)
        if adds and not (isinstance(so_far, Whole) and self._is_zero(so_far)):
            raise OtherLoopError
        return found

    def _joined(self, eqn: jex.JaxprEqn, rows: Rows | Slab) -> Kind:
        """Return the reduction over all rows."""
        size, name = shaped(eqn.invars[0]).shape[rows.dimension], eqn.primitive.name
        fill = neutral(name, shaped(eqn.invars[0]).dtype)
        if isinstance(rows, Slab) and not self.slabs.is_own(rows, size, fill):
            raise OtherLoopError
        return Joined(self.made(eqn, [rows])[0], name)

    def _joined_to(self, eqn: jex.JaxprEqn, so_far: Carry, joined: Joined) -> Kind:
        """Return a carry that started neutral and to which chunks were joined."""
        begin = self.begin[so_far.place]
        none = neutral(joined.by, shaped(begin).dtype)
        begins = begin in self.known and self.places.is_all(self.known[begin], none)
        if not begins or eqn.primitive is not JOINS[joined.by]:
            raise OtherLoopError
        return Added(so_far.place, joined.atom)

    # Rows, and sums over them.

    def _rows(self, kind: Kind, dimension: int) -> Rows | None:
        """Return a value as rows; also one that is the same in all chunks, if all its rows are equal."""
        if isinstance(kind, Rows):
            return kind if kind.dimension == dimension else None
        if not isinstance(kind, Whole) or _compat.is_literal(kind.atom):
            return None
        if (kind.atom, dimension) in self.spread:
            return self.spread[kind.atom, dimension]
        if kind.atom in self.given:
            raise Wanted(self.given[kind.atom], dimension)
        if kind.atom not in self.maker:
            return None
        eqn, place, kinds = self.maker[kind.atom]
        try:
            made = self._of_rows(eqn, kinds, (place, dimension))
        except OtherLoopError:
            return None
        found = made[place]
        if not isinstance(found, Rows) or found.dimension != dimension:
            return None
        self.spread[kind.atom, dimension] = found
        self.alike_rows.add(found.atom)
        return found

    def _of_rows(
        self, eqn: jex.JaxprEqn, kinds: list[Kind], wanted: tuple[int, int] | None = None
    ) -> list[Kind]:
        """Return the results of an equation on rows: those of the equation of all rows of which it is a chunk.

        **Arguments:** `wanted` a result that must have its rows in a dimension.
        """
        missing: Wanted | None = None
        found: list[tuple[list[Kind], Any]] = []
        for rule in rules(eqn):
            if wanted is not None and rule.results[wanted[0]] != wanted[1]:
                continue
            try:
                own = self._operands(kinds, rule.operands)
            except Wanted as each:
                missing = each
                continue
            if own is not None and (made := self._as_part(eqn, own, rule.results, rule.sizes)) is not None:
                found.append((made, self.eqns[-1]))
                break
        # A chunk of one row may be more than what the rules see.
        guesses = range(len(shaped(eqn.outvars[0]).shape)) if wanted is None else ()
        if found and eqn.primitive.name != "reshape":
            guesses = ()
        for guess in guesses:
            results = tuple(guess for _ in eqn.outvars)
            sizes = tuple((name, guess) for name in SIZES if name in eqn.params)
            if (made := self._as_part(eqn, kinds, results, sizes)) is not None:
                found.append((made, self.eqns[-1]))
        if not found:
            raise missing or OtherLoopError
        if len(found) > 1:
            known = [self.slabs.is_known(whole) for _, whole in found]
            found = [each for each, is_known in zip(found, known, strict=True) if is_known] or found
        return min(found, key=lambda each: shaped(each[1].outvars[0]).shape.count(1))[0]

    def _of_parts(self, eqn: jex.JaxprEqn, kind: Kind) -> Rows | None:
        """Return rows of several parts after a reshape that merges or splits the axes of parts and of rows."""
        assert isinstance(kind, Rows)
        result = tuple(shaped(eqn.outvars[0]).shape)
        if (place := parts_place(kind, shaped(eqn.invars[0]).shape, result)) is None:
            return None
        (found, parts), whole = place, list(result)
        whole[found] *= self.count
        like = [variable(eqn.outvars[0].aval.update(shape=tuple(whole)))]
        (made,) = self.made(eqn, [kind], params={**eqn.params, "new_sizes": tuple(whole)}, like=like)
        return Rows(made, found, parts) if parts > 1 or found > kind.dimension else None

    def _operands(self, kinds: Sequence[Kind], dimensions: Sequence[int | None]) -> list[Kind] | None:
        """Return the operands with their rows in these dimensions, None if the rows of one are elsewhere."""
        for kind, d in zip(kinds, dimensions, strict=True):
            if isinstance(kind, Rows) and kind.dimension != d:
                return None
        found = []
        for kind, d in zip(kinds, dimensions, strict=True):
            own = kind if d is None else self._rows(kind, d)
            if own is None:
                return None
            found.append(own)
        return found

    def _as_part(
        self,
        eqn: jex.JaxprEqn,
        kinds: Sequence[Kind],
        results: Sequence[int | None],
        sizes: Sequence[tuple[str, int | None]],
    ) -> list[Kind] | None:
        """Return the results of the equation of all rows, if this one is a chunk of it."""
        like = []
        for v, d in zip(eqn.outvars, results, strict=True):
            shape = list(shaped(v).shape)
            if d is not None:
                if d >= len(shape):
                    return None
                shape[d] *= self.count
            like.append(variable(v.aval.update(shape=tuple(shape))))
        params = dict(eqn.params)
        for name, index in sizes:
            known = params[name]
            size = [part * self.count for part in ([known] if index is None else known[index : index + 1])]
            params[name] = size[0] if index is None else (*known[:index], *size, *known[index + 1 :])
        atoms = [kind.atom for kind in kinds]  # pyright: ignore[reportAttributeAccessIssue]
        whole = eqn.replace(invars=atoms, outvars=like, params=params)
        dimensions = tuple(kind.dimension if isinstance(kind, Rows) else None for kind in kinds)
        rows = [kind for kind in kinds if isinstance(kind, Rows) and kind.atom not in self.alike_rows]
        parts = {kind.parts for kind in rows} or {1}
        among = self.count * max(parts)
        able = (rule for rule in rules(whole) if rule.groups % among == 0 and not rule.copied)
        if len(parts) > 1 or not any(is_rule(rule, dimensions, results, sizes) for rule in able):
            return None
        if any(d is not None and v.aval.shape[d] % among for v, d in zip(like, results, strict=True)):
            return None
        made = self.made(eqn, kinds, params=params, like=like)
        both = zip(made, results, strict=True)
        return [Sum(v) if d is None else Rows(v, d, max(parts)) for v, d in both]

    def _linear(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        """Return the operands of an equation that maps sums of parts to the sum of its results for the parts."""
        linear = linear_in(eqn, [isinstance(kind, Sum) for kind in kinds])
        if linear is None:
            raise OtherLoopError
        return [self._sum(kind) if i in linear else kind for i, kind in enumerate(kinds)]

    def _sum(self, kind: Kind) -> Sum:
        """Return a value as a sum; zeros count as one."""
        if isinstance(kind, Sum):
            return kind
        if not isinstance(kind, Whole) or not self._is_zero(kind):
            if isinstance(kind, Whole) and kind.atom in self.given:
                raise Wanted(self.given[kind.atom], None)
            raise OtherLoopError
        return Sum(kind.atom)

    # Loops and choices within.

    def _scan(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        """Return the results of a loop over rows, whose carries keep their kind in all iterations."""
        consts, carries = _compat.scan_counts(eqn)
        first, kinds = consts + carries, list(kinds)
        for _ in range(4 * len(kinds) + 4):
            given = [self._inside(kind, i >= first) for i, kind in enumerate(kinds)]
            inner = _Chunks(self.count, self.places, given)
            try:
                made = inner.body(eqn.params["jaxpr"], given)
                made = [*map(inner.alike, made[:carries], given[consts:first]), *made[carries:]]
            except Wanted as each:
                scanned = each.place >= first
                kinds[each.place] = self._as_wanted(kinds[each.place], each.dimension, each.ratio, scanned)
                continue
            changed = False
            for i, (kind, result) in enumerate(zip(given[consts:first], made, strict=False), consts):
                if place_of(kind) != place_of(result):
                    if not isinstance(kind, Whole) or not isinstance(result, (Rows, Slab, Sum)):
                        raise OtherLoopError
                    kinds[i], changed = self._as_wanted(kinds[i], *self._placed(result, eqn.invars[i])), True
            if not changed:
                body = inner.program_of(given, made)
                return self._with_bodies(eqn, kinds, made, carries, jaxpr=body)
        raise OtherLoopError

    def _cond(self, eqn: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        """Return the results of a choice that is the same for all chunks; all branches must return the same kinds."""
        choice, *kinds = kinds
        if not isinstance(choice, Whole):
            raise OtherLoopError
        for _ in range(4 * len(kinds) + 4):
            given = [self._inside(kind, False) for kind in kinds]
            branches = [_Chunks(self.count, self.places, given) for _ in eqn.params["branches"]]
            try:
                each = zip(branches, eqn.params["branches"], strict=True)
                made = [inner.body(branch, given) for inner, branch in each]
                like = [min(own, key=lambda kind: isinstance(kind, Whole)) for own in zip(*made, strict=True)]
                made = [[*map(inner.alike, own, like)] for inner, own in zip(branches, made, strict=True)]
            except Wanted as each:
                kinds[each.place] = self._as_wanted(kinds[each.place], each.dimension, each.ratio)
                continue
            if any([*map(place_of, own)] != [*map(place_of, like)] for own in made):
                raise OtherLoopError
            bodies = tuple(inner.program_of(given, own) for inner, own in zip(branches, made, strict=True))
            return self._with_bodies(eqn, [choice, *kinds], made[0], len(like), branches=bodies)
        raise OtherLoopError

    def alike(self, made: Kind, begun: Kind) -> Kind:
        """Return a body's results as rows or sums where their initial values, or another branch's results, are such."""
        if isinstance(begun, Sum):
            return self._sum(made)
        if isinstance(begun, (Rows, Slab)) and isinstance(made, Whole):
            dimension, ratio = self._placed(begun, made.atom)
            return self._as_rows(made, dimension or 0, ratio) or made
        return made

    def _inside(self, kind: Kind, scanned: bool) -> Kind:
        is_rows = isinstance(kind, (Rows, Slab))
        if not is_rows and not isinstance(kind, (Whole, Sum)):
            raise OtherLoopError
        if is_rows and scanned and kind.dimension == 0:
            raise OtherLoopError
        aval = kind.atom.aval
        v = variable(aval.update(shape=aval.shape[1:], weak_type=False) if scanned else aval)
        return kind._replace(atom=v, **({"dimension": kind.dimension - scanned} if is_rows else {}))

    def _placed(self, kind: Kind, chunk: Atom) -> tuple[int | None, Fraction | None]:
        """Return the dimension of rows (None for sums) and the number of rows for each row of a chunk, if it is not
        all.
        """
        if not isinstance(kind, Slab):
            return getattr(kind, "dimension", None), None
        d = kind.dimension
        return d, Fraction(kind.atom.aval.shape[d], shaped(chunk).shape[d])

    def _as_rows(self, kind: Kind, dimension: int, ratio: Fraction | None) -> Kind | None:
        """Return a value as rows, with this number for each row of a chunk; also one that is the same in all chunks."""
        if ratio is None or not isinstance(kind, Whole):
            return self._rows(kind, dimension)
        made, size = self.slabs.spread_over(kind, dimension, ratio), shaped(kind.atom).shape[dimension]
        return None if made is None else self.slabs.kind(Slab(made, dimension, size, 0), size)

    def _as_wanted(
        self, kind: Kind, dimension: int | None, ratio: Fraction | None, scanned: bool = False
    ) -> Kind:
        found = self._sum(kind) if dimension is None else self._as_rows(kind, dimension + scanned, ratio)
        if found is None:
            raise OtherLoopError
        return found

    def _is_zero(self, kind: Whole) -> bool:
        if kind.atom in self.known:
            return self.places.is_all(self.known[kind.atom], 0)
        return self.filled(kind) == 0

    def filled(self, kind: Kind) -> float | None:
        """Return the number that all entries of a value equal, None if it is not known."""
        if not isinstance(kind, Whole):
            return None
        if _compat.is_literal(kind.atom):
            return None if np.shape(kind.atom.val) else kind.atom.val
        eqn, _, kinds = self.maker.get(kind.atom, (None, 0, []))
        names = {"broadcast_in_dim", "convert_element_type", "reshape"}
        named = eqn is not None and eqn.primitive.name in names
        return self.filled(kinds[0]) if named and len(kinds) == 1 else None

    def program_of(self, given: Sequence[Kind], made: Sequence[Kind]) -> jex.ClosedJaxpr:
        """Return the equations of a body for all rows of its operands."""
        if any(not isinstance(kind, (Whole, Sum, Rows, Slab)) for kind in made):
            raise OtherLoopError
        body = self.program([k.atom for k in given], [k.atom for k in made])  # pyright: ignore
        _compat.check_jaxpr(body)
        return body

    def _with_bodies(
        self, eqn: jex.JaxprEqn, kinds: Sequence[Kind], made: Sequence[Kind], carries: int, **bodies: object
    ) -> list[Kind]:
        """Return the results of an equation with these bodies; results behind the carries are stacks."""
        like: list[jex.Var] = []
        found: list[Kind] = []
        for i, (kind, v) in enumerate(zip(made, eqn.outvars, strict=True)):
            shape = kind.atom.aval.shape  # pyright: ignore
            shape = shape if i < carries else (eqn.params["length"], *shape)
            like.append(variable(v.aval.update(shape=shape)))
        outvars = self.made(eqn, kinds, params={**eqn.params, **bodies}, like=like)
        for i, (kind, v) in enumerate(zip(made, outvars, strict=True)):
            d = {"dimension": kind.dimension + (i >= carries)} if isinstance(kind, (Rows, Slab)) else {}
            found.append(kind._replace(atom=v, **d))
        return found
