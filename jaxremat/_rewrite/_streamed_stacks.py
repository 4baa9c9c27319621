"""Flat equations -> the same with arrays in host memory scanned over there, each row copied in the iteration that reads
it.

A step copies an argument in host memory to the device before it reads it. If loops read it row by row, as those over
layers read their weights, the whole stack would then be on the device,

    X = fetch(H);  scan(body, c0, X)        ->        scan((c, h) -> body(c, fetch(h)), c0, H)

and so would arrays computed from it row by row, such as weights in fewer bits. Loops within others, as in gradient
accumulation, are handled too. A backward loop reads values recomputed from the same row: it copies the row once more,
unless the plan saves them on the device.

Invariant: the same values. Every other reader of the copy, such as an optimizer's update, comes after the loops: it
then gets a separate copy (see `_streamed_copies`), or joins the last loop (see `_optimizer_in_backward`).

Equations of stacks -> the same for one row: an iteration can then compute them instead of the program around its loop.

Invariant: a row of the result is computed from the same rows of the operands, by the same operation.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._primitives import PLACES, is_fetch, is_light, is_placed, is_pointwise, is_put, is_repeatable
from .._program._splice import needed
from ._flat_program import FlatProgram, with_eqns

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_DIMENSIONS = ("broadcast_dimensions", "permutation", "axes")
_SIZES = ("shape", "new_sizes")


def is_by_rows(eqn: jex.JaxprEqn, length: int) -> bool:
    """Return whether each of the `length` rows of a result depends only on the same rows of the operands."""
    if len(eqn.outvars) != 1 or not is_repeatable(eqn) or is_placed(eqn):
        return False
    shape, name = shaped(eqn.outvars[0]).shape, eqn.primitive.name
    if not eqn.invars or not shape or shape[0] != length:
        return False
    if is_pointwise(eqn):
        return all(shaped(a).shape in ((), shape) for a in eqn.invars)
    operand = shaped(eqn.invars[0]).shape
    if name == "broadcast_in_dim":
        return len(eqn.invars) == 1 and (repeats_row(eqn) or operand[0] == length)
    if not operand or operand[0] != length:
        return False
    if is_fetch(eqn) or is_put(eqn):
        return True
    if name == "reshape":
        return eqn.params.get("dimensions") is None and prod(operand) > 0
    if name == "transpose":
        return eqn.params["permutation"][0] == 0
    return name in REDUCTIONS and 0 not in eqn.params["axes"]


def repeats_row(eqn: jex.JaxprEqn) -> bool:
    """Return whether all rows of the result are the same."""
    return eqn.primitive.name == "broadcast_in_dim" and 0 not in eqn.params["broadcast_dimensions"]


def row_equation(
    eqn: jex.JaxprEqn,
    length: int,
    row: Callable[[Any], Atom],
    whole: Callable[[Atom], Atom],
    made: jex.Var | None = None,
) -> jex.JaxprEqn:
    """Return the equation for one row.

    **Arguments:** `row` returns the row of an operand, `whole` an operand that is the same in all iterations; `made`
    the variable for the result, a new one by default.
    """
    params: dict[str, Any] = {name: None if name in PLACES else value for name, value in eqn.params.items()}
    same = repeats_row(eqn)
    invars: Sequence[Any] = [row(a) if not same and shaped(a).shape else whole(a) for a in eqn.invars]
    less = {name: tuple(d - 1 for d in params[name] if d) for name in _DIMENSIONS if name in params}
    less |= {name: tuple(params[name][1:]) for name in _SIZES if name in params}
    made = _compat.new_var(jex.mapped_aval(length, 0, eqn.outvars[0].aval)) if made is None else made
    inner = eqn.replace(invars=list(invars), outvars=[made], params={**params, **less})
    return inner.replace(source_info=_compat.root_source(eqn))


Chain = tuple[jex.JaxprEqn, ...]
"""The equations, of one operand each, that compute an array from another row by row."""


def with_streamed_stacks(program: FlatProgram) -> FlatProgram:
    """Let loops scan over arrays in host memory."""
    fetches = [eqn for eqn in program.eqns if is_fetch(eqn)]
    if not fetches:
        return program
    results = program.closed.jaxpr.outvars
    found = _streaming(program.eqns, fetches, results)
    left = needed(found, results)  # remove copies of whole arrays that nothing reads any more
    return program.moved(with_eqns(program.closed, [found[i] for i in left]), left)


def read_by_rows(closed: jex.ClosedJaxpr) -> list[jex.Var]:
    """Return the arguments that loops read row by row, without other readers before the last of these loops: in host
    memory, they need little of the device's memory.
    """
    jaxpr = closed.jaxpr
    found = _read_in_loops(jaxpr.eqns, _chains(jaxpr.eqns, dict.fromkeys(jaxpr.invars, ())), ())
    sources = {chain[0].invars[0] if chain else v for v, chain in found.items()}
    return [v for v in jaxpr.invars if v in sources]


def _streaming(
    eqns: Sequence[jex.JaxprEqn], fetches: Iterable[jex.JaxprEqn], results: Iterable[Atom]
) -> list[Any]:
    """Return the equations with loops that copy the rows of these fetched arrays to the device."""
    chains = _chains(eqns, {eqn.outvars[0]: (eqn,) for eqn in fetches})
    found = _read_in_loops(eqns, chains, set(_compat.variables(results)))
    return [_copying(eqn, found) for eqn in eqns]


def _chains(eqns: Sequence[jex.JaxprEqn], begun: Mapping[jex.Var, Chain]) -> dict[Any, Chain]:
    """Return the chains of light equations that compute arrays row by row from those in `begun`, and these."""
    found = dict(begun)
    for eqn in eqns:
        operands = _compat.variables(eqn.invars)
        if len(operands) != 1 or operands[0] not in found or not is_light(eqn):
            continue
        shape = getattr(operands[0].aval, "shape", ())
        if shape and is_by_rows(eqn, shape[0]):
            found[eqn.outvars[0]] = (*found[operands[0]], eqn)
    return found


def _read_in_loops(
    eqns: Sequence[jex.JaxprEqn], chains: Mapping[jex.Var, Chain], returned: Collection[Atom]
) -> dict[Any, Chain]:
    """Return the chains whose ends loops read row by row, if nothing else reads any array of the chain before the last
    of these loops.
    """
    readers: dict[Any, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for a in set(_compat.variables(eqn.invars)):
            readers.setdefault(a, []).append(i)
    loops = {v: [i for i in readers.get(v, ()) if _reads_rows(eqns[i], v)] for v in chains}
    found: dict[Any, Chain] = {}
    for v, chain in chains.items():
        own = set(map(id, chain))
        made = {v, *(a for eqn in chain for a in (*eqn.invars, *eqn.outvars) if a in chains)}
        others = (i for a in made for i in readers.get(a, ()) if i not in loops[a] and id(eqns[i]) not in own)
        if loops[v] and made.isdisjoint(returned) and all(i > loops[v][-1] for i in others):
            found[v] = chain
    return found


def _reads_rows(eqn: jex.JaxprEqn, v: jex.Var) -> bool:
    """Return whether an equation is a loop that reads an array only row by row, itself or in loops within it."""
    if eqn.primitive.name != "scan" or not eqn.params["length"] or list(eqn.invars).count(v) != 1:
        return False
    consts, init, _ = _compat.scan_operands(eqn)
    at, body = list(eqn.invars).index(v), _compat.opened(eqn.params["jaxpr"])[0]
    if at >= len(consts):
        return at >= len(consts) + len(init)
    inside = body.invars[at]
    found = _read_in_loops(body.eqns, _chains(body.eqns, {inside: ()}), set(_compat.variables(body.outvars)))
    links = {id(link) for chain in found.values() for link in chain}
    made = {inside, *(link.outvars[0] for chain in found.values() for link in chain)}
    return bool(found) and all(
        id(each) in links
        or any(a in found and _reads_rows(each, a) for a in made.intersection(_compat.variables(each.invars)))
        for each in body.eqns
        if not made.isdisjoint(_compat.variables(each.invars))
    )


def _copying(eqn: jex.JaxprEqn, chains: Mapping[jex.Var, Chain]) -> Any:
    """Return a loop that copies the rows of these chains' sources itself; other equations unchanged."""
    ends = [v for v in _compat.variables(eqn.invars) if v in chains and _reads_rows(eqn, v)]
    if not ends:
        return eqn
    body, own = _compat.opened(eqn.params["jaxpr"])
    operands, length = _compat.scan_operands(eqn), eqn.params["length"]
    pairs = list(zip(eqn.invars, body.invars, strict=True))
    name = {a: x for a, x in pairs if not _compat.is_literal(a)}
    starts: list[
        dict[Any, Any]
    ] = []  # of constants and scanned-over arrays those in host memory, with their names
    first: list[Any] = []
    for arrays, rows in ((operands[0], False), (operands[2], True)):
        inside: dict[Any, Any] = {}
        made: dict[Any, Any] = {}
        own_ends = [v for v in ends if v in arrays]
        for link in (link for v in own_ends for link in chains[v]):
            source, result = link.invars[0], link.outvars[0]
            if result in made:
                continue
            if is_fetch(link):
                aval = jex.mapped_aval(length, 0, source.aval) if rows else source.aval
                made[source] = inside.setdefault(source, _compat.new_var(aval))
            if rows:
                named = name[result] if result in own_ends else None
                first.append(row_equation(link, length, made.__getitem__, lambda a: a, named))
            else:
                named = name[result] if result in own_ends else _compat.new_var(result.aval)
                invars = [made.get(a, a) if not _compat.is_literal(a) else a for a in link.invars]
                first.append(
                    link.replace(invars=invars, outvars=[named], source_info=_compat.root_source(link))
                )
            made[result] = first[-1].outvars[0]
        starts.append(inside)
    kept = [[a for a in group if _compat.is_literal(a) or a not in ends] for group in operands]
    known = iter(x for a, x in pairs if _compat.is_literal(a) or a not in ends)
    consts, init, scanned = ([next(known) for _ in group] for group in kept)
    invars = [*consts, *starts[0].values(), *init, *scanned, *starts[1].values()]
    whole = [each for each in first if is_fetch(each) and each.invars[0] in starts[0].values()]
    eqns = _streaming([*first, *body.eqns], whole, body.outvars)
    eqns = [eqns[i] for i in needed(eqns, body.outvars)]
    closed = _compat.new_jaxpr(body.constvars, own, invars, body.outvars, eqns)
    given = [*kept[0], *starts[0]], kept[1], [*kept[2], *starts[1]]
    results = eqn.outvars[: len(init)], eqn.outvars[len(init) :]
    return _compat.scan_like(eqn, closed, length, given, results)
