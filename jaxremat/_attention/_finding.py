"""Flat equations -> where attention is computed: its scores, the softmax of them, the product with values, and its
gradients.

Forward it is read backward from the product, each value with the axes of scores that its dimensions are. Backward it
is differentiated, and what that gives is looked up among the equations: so what stands in its place is known to be the
gradient, in whatever way the softmax was written.

Law: nothing else reads anything of the size of the scores, or what is made of that: what is returned of it leaves an
attention as it is. What nothing differentiates, as a reference model's, has no gradient.

Flat equations -> the softmax that a value is linear in: exponentials above the largest, divided by their sum.

The equations of an attention -> those of its gradient, looked up among the others.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._program import _compat
from .._program._compat import Atom, shaped
from .._program._inline import Inliner
from .._program._primitives import is_pointwise, on_host, on_mesh
from .._program._splice import inlined
from ._pattern import Axes, Pattern, Product
from ._reading import (
    DEEPEST,
    LINEAR,
    LinearReading,
    Program,
    Reading,
    UnlikeError,
    behind,
    count,
    is_cast,
    relabelled,
)


@dataclass(frozen=True)
class Gradient:
    """**Fields:** the `cotangent` of the result; for queries, keys and values, and other operands, the variable that is
    their gradient, None where there is none; `at` the first of the equations that make these.
    """

    cotangent: Any
    results: tuple[Any, ...]
    at: int


def between(program: Program, result: jex.Var, operands: Sequence[Atom]) -> tuple[list[int], list[Any]]:
    """Return the equations that make a result of these operands, in order, and what else they read."""
    depends: dict[Any, bool] = dict.fromkeys(operands, True)
    first = min(program.maker.get(a, -1) for a in operands)

    def follow(a: Atom) -> bool:
        if a not in depends:
            i = program.maker.get(a, -1)
            read = _compat.variables(program.eqns[i].invars) if i > first else []
            each = [follow(b) for b in read]  # all of them, to know of each
            depends[a] = any(each)
        return depends[a]

    follow(result)
    made = {program.maker[a] for a, is_so in depends.items() if is_so and a not in operands}
    read = dict.fromkeys(a for i in sorted(made) for a in _compat.variables(program.eqns[i].invars))
    return sorted(made), [a for a in read if not depends.get(a, False)]


def gradient_of(
    program: Program,
    forward: Sequence[int],
    operands: Sequence[jex.Var],
    fixed: Sequence[jex.Var],
    result: jex.Var,
    scope: int,
) -> tuple[Gradient | None, set[int]]:
    """Return the gradient, and the equations that compute it."""
    best: tuple[Gradient | None, set[int]] = None, set()
    most = 0
    for cotangent in _cotangents(program, operands[2], result, scope):
        for differentiated in _differentiated(program, forward, operands, fixed, result):
            info = program.eqns[forward[-1]].source_info
            eqns, made = inlined(differentiated, [*operands, *fixed, cotangent], info)
            start = len(program.equals.merged_of)
            for eqn in eqns:
                program.equals.add(eqn, scope)
            looked_up = (program.equals.eqns[i] for i in program.equals.merged_of[start:])
            known = {program.maker[v] for eqn in looked_up for v in eqn.outvars if v in program.maker}
            own = {i for i in known if program.alive[i]}
            results = tuple(
                v if not _compat.is_literal(v) and program.maker.get(v) in own else None
                for v in map(program.equals.read, made)
            )
            makers = [program.maker[v] for v in results if v is not None]
            if len(makers) > most:
                most = len(makers)
                best = Gradient(cotangent, results, min(makers)), own - set(forward)
    return best


def _cotangents(program: Program, values: jex.Var, result: jex.Var, scope: int) -> list[jex.Var]:
    """Return what may be the cotangent of a result: what values are multiplied by, of the same type."""
    found: dict[Any, None] = {}
    for i in program.readers.get(values, ()):
        eqn = program.eqns[i]
        if eqn.primitive.name == "dot_general" and program.scopes[i] == scope:
            for a in _compat.variables(eqn.invars):
                alike = (shaped(a).shape, shaped(a).dtype) == (shaped(result).shape, shaped(result).dtype)
                if a is not values and a is not result and alike:
                    found[a] = None
    return list(found)


def _differentiated(
    program: Program,
    forward: Sequence[int],
    operands: Sequence[jex.Var],
    fixed: Sequence[jex.Var],
    result: jex.Var,
) -> Iterable[jex.ClosedJaxpr]:
    """Operands, what is `fixed`, cotangent -> gradients, with the maxima as constants, and as they are."""
    eqns = [program.eqns[i] for i in forward]
    closed = _compat.new_jaxpr((), (), [*operands, *fixed], [result], eqns)
    text = f"{len(operands)} of {closed}"
    if text not in program.gradients:
        count = len(operands)
        program.gradients[text] = [_pulled(closed, count, constant=constant) for constant in (True, False)]
    return program.gradients[text]


def _pulled(closed: jex.ClosedJaxpr, count: int, *, constant: bool) -> jex.ClosedJaxpr:
    jaxpr = closed.jaxpr

    def run(*operands: jax.Array) -> Any:
        env = dict(zip(jaxpr.invars, operands, strict=True))
        for eqn in jaxpr.eqns:
            made = eqn.primitive.bind(
                *(a.val if _compat.is_literal(a) else env[a] for a in eqn.invars), **eqn.params
            )
            if constant and eqn.primitive.name == "reduce_max":
                made = lax.stop_gradient(made)
            env[eqn.outvars[0]] = made
        return env[jaxpr.outvars[0]]

    def pulled(*arguments: jax.Array) -> Any:
        *operands, cotangent = arguments
        fixed = operands[count:]
        _, pull = jax.vjp(lambda *of: run(*of, *fixed), *operands[:count])
        return pull(cotangent)

    types = [_typed(v) for v in (*jaxpr.invars, jaxpr.outvars[0])]
    flat = Inliner().program(jax.make_jaxpr(pulled)(*types))
    assert not flat.consts
    return flat


def _typed(v: jex.Var) -> Any:
    weak = bool(getattr(v.aval, "weak_type", False))
    sharding = getattr(v.aval, "sharding", None)
    named = sharding if sharding is not None and not sharding.mesh.empty else None
    return jax.ShapeDtypeStruct(shaped(v).shape, shaped(v).dtype, weak_type=weak, sharding=named)


@dataclass(frozen=True)
class Softmax:
    """**Fields:** `weights` that it gives and what it is `of`, both with the same `axes`; along axis `key`."""

    weights: Any
    of: Any
    axes: Axes
    key: int


def softmax_in(program: Program, a: Atom, axes: Axes, key: int, depth: int = 0) -> Softmax | None:
    """Return the softmax that a value is linear in."""
    eqn = program.made(a)
    if eqn is None or depth > DEEPEST:
        return None
    if eqn.primitive.name == "div" and (found := _is_softmax(program, eqn, axes, key)) is not None:
        return found
    if (inner := relabelled(eqn, axes)) is not None:
        whole = not _compat.is_literal(eqn.invars[0]) and count(eqn.invars[0]) == count(a)
        return softmax_in(program, eqn.invars[0], inner, key, depth + 1) if whole else None
    if eqn.primitive.name in LINEAR:
        for b in _compat.variables(eqn.invars):
            whole = shaped(b).shape == shaped(a).shape and shaped(b).dtype != np.bool_
            if whole and (found := softmax_in(program, b, axes, key, depth + 1)) is not None:
                return found
    return None


def _is_softmax(program: Program, eqn: jex.JaxprEqn, axes: Axes, key: int) -> Softmax | None:
    exponentials, total = eqn.invars
    exp = program.made(exponentials)
    if exp is None or exp.primitive.name != "exp" or _compat.is_literal(total):
        return None
    difference = program.made(exp.invars[0])
    if difference is None or difference.primitive.name != "sub":
        return None
    of, most = difference.invars
    if _compat.is_literal(of) or _compat.is_literal(most):
        return None
    rest = tuple(axis for axis in axes if axis != key)
    if _reduced(program, total, axes, "reduce_sum", exponentials) != rest:
        return None
    if _reduced(program, most, axes, "reduce_max", of) != rest:
        return None
    return Softmax(eqn.outvars[0], of, axes, key)


def _reduced(program: Program, a: Atom, axes: Axes, name: str, of: Atom) -> Axes | None:
    """Return the axes that are left where a value is a reduction of another along one axis, spread again; None
    where not.
    """
    root, left = behind(program, a, axes, maxima=name == "reduce_max")
    eqn = program.made(root)
    if eqn is None or eqn.primitive.name != name or len(eqn.params["axes"]) != 1:
        return None
    operand = eqn.invars[0]
    while operand is not of:  # sums of short numbers are in f32
        cast = program.made(operand)
        if cast is None or not is_cast(cast):
            return None
        operand = cast.invars[0]
    d = int(eqn.params["axes"][0])
    if operand.aval.shape[:d] + operand.aval.shape[d + 1 :] != root.aval.shape:
        return None
    # Dimensions of size 1 may have lost their number on the way.
    own = [axis for i, axis in enumerate(axes) if i != d]
    agree = all(axis == there or n == 1 for axis, there, n in zip(left, own, root.aval.shape, strict=True))
    return tuple(own) if agree else None


LEAST_SHARE = 2
"""The matrix of scores is worth doing without where it is this many times the queries, or larger."""


@dataclass(frozen=True)
class Site:
    """One attention. **Fields:** `operands` queries, keys and values; `leaves` as of the `pattern`; its `scores`; the
    `result`, made by equation `at`; its `gradient`, if any; the equations, `forward` and `backward`, that are for this
    alone.
    """

    operands: tuple[Any, Any, Any]
    leaves: tuple[Any, ...]
    scores: Any
    result: Any
    at: int
    pattern: Pattern
    gradient: Gradient | None
    forward: frozenset[int]
    backward: frozenset[int]


def attention(closed: jex.ClosedJaxpr, scopes: Sequence[int], alive: Sequence[bool]) -> list[Site]:
    """Return each attention in the equations.

    **Arguments:** `scopes` for each equation a number for the loop, or pair of loops, that it is of; `alive` whether
    anything needs it.
    """
    program = Program(closed, scopes, alive)
    found: list[Site] = []
    for i, eqn in enumerate(closed.jaxpr.eqns):
        if eqn.primitive.name == "dot_general" and alive[i]:
            sides = (_site(program, i, side) for side in (0, 1))
            found += [site for site in sides if site is not None][:1]
    return found


def _site(program: Program, at: int, side: int) -> Site | None:
    """Return the attention whose weights are this operand of an equation, None where there is none."""
    eqn = program.eqns[at]
    weights, values = eqn.invars[side], eqn.invars[1 - side]
    if _compat.is_literal(weights) or _compat.is_literal(values) or not _is_plain(eqn):
        return None
    contracted, _ = eqn.params["dimension_numbers"]
    shape = weights.aval.shape
    wide = [int(d) for d in contracted[side] if shape[d] > 1]
    if len(wide) != 1 or len(contracted[side]) != 1:
        return None
    axes: Axes = tuple(range(len(shape)))
    try:
        softmax = softmax_in(program, weights, axes, wide[0])
        if softmax is None:
            return None
        site = _matched(program, at, side, softmax, None)
        if site is None and program.scopes[at] >= 0:  # of a bias the gradient is that of what the loop reads
            site = _matched(program, at, side, softmax, program.scopes[at])
        return site
    except UnlikeError:
        return None


def _is_plain(eqn: jex.JaxprEqn) -> bool:
    """Return whether a product is one of arrays on one device, or where the compiler likes."""
    atoms = (*eqn.invars, *eqn.outvars)
    return eqn.params.get("out_sharding") is None and not any(
        on_host(a.aval) or on_mesh(a.aval) or (not _compat.is_literal(a) and _compat.varying_axes(a))
        for a in atoms
    )


def _product(eqn: jex.JaxprEqn, side: int, axes: Axes, fresh: int) -> tuple[Product, int]:
    """Return a product of rows, the operand of this `side` with these axes, and columns; and the next number for an
    axis.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    columns: list[int | None] = [None] * len(shaped(eqn.invars[1 - side]).shape)
    for mine, other in ((contracted[side], contracted[1 - side]), (batched[side], batched[1 - side])):
        for d, e in zip(mine, other, strict=True):
            columns[e] = axes[d]
    bound = {*contracted[1 - side], *batched[1 - side]}
    for e in range(len(columns)):
        if e not in bound:
            columns[e], fresh = fresh, fresh + 1
    free = [
        [axis for d, axis in enumerate(of) if d not in {*contracted[s], *batched[s]}]
        for s, of in ((side, axes), (1 - side, tuple(columns)))
    ]
    first, second = (free[0], free[1]) if side == 0 else (free[1], free[0])
    result = (*(axes[d] for d in batched[side]), *first, *second)
    return Product(dict(eqn.params), axes, tuple(columns), result, swapped=side == 1), fresh


def _matched(program: Program, at: int, side: int, softmax: Softmax, scope: int | None) -> Site | None:
    """**Arguments:** `scope` as of `Reading`."""
    eqn = program.eqns[at]
    weights, values = eqn.invars[side], eqn.invars[1 - side]
    rank = len(weights.aval.shape)
    size = count(weights)
    leaves: dict[tuple[Any, Axes], int] = {}
    after = LinearReading(program, softmax.weights, softmax.axes, size, leaves, scope)
    after.value(weights, tuple(range(rank)))
    mixed, fresh = _product(eqn, side, tuple(range(rank)), rank)
    dots = _dots(program, softmax.of, softmax.axes, size)
    if len(dots) != 1:
        return None
    ((scored, axes),) = dots.items()
    before = Reading(program, scored, axes, size, leaves, scope)
    before.value(softmax.of, softmax.axes)
    dot = program.eqns[program.maker[scored]]
    scores = _scores(dot, axes, softmax.key, fresh)
    if scores is None:
        return None
    queries, keys = dot.invars[::-1] if scores.swapped else dot.invars
    sizes = weights.aval.shape
    result = eqn.outvars[0]
    if size < LEAST_SHARE * max(count(queries), count(result)):
        return None
    pattern = Pattern(
        sizes=sizes,
        key=softmax.key,
        scores=scores,
        mixed=mixed,
        before=before.in_steps(len(leaves)),
        after=after.in_steps(len(leaves)),
        leaves=tuple(own for _, own in leaves),
        types=(np.dtype(softmax.of.aval.dtype), np.dtype(result.aval.dtype)),
        widths=(_beside(scores.rows, queries, rank), _beside(mixed.columns, values, rank)),
    )
    operands = (queries, keys, values)
    read = tuple(a for a, _ in leaves)
    if any(on_host(a.aval) or on_mesh(a.aval) or _compat.varying_axes(a) for a in (*operands, *read)):
        return None
    able = [i for i, a in enumerate(read) if _may_be_learned(i, read, pattern)]
    differentiated = (*operands, *(read[i] for i in able))
    forward, fixed = between(program, result, differentiated)
    gradient, backward = gradient_of(program, forward, differentiated, fixed, result, program.scopes[at])
    if gradient is not None:
        wanted = [v is not None for v in gradient.results[3:]]
        pattern = replace(pattern, learned=tuple(compress(able, wanted)))
        own = (*gradient.results[:3], *compress(gradient.results[3:], wanted))
        gradient = replace(gradient, results=own)
    kept = {result, *(v for v in (gradient.results if gradient else ()) if v is not None)}
    own = set(forward) | {i for i in backward if _compat.variables(program.eqns[i].invars)}
    made: set[Any] = set()  # of scores, and of what is passed back to them
    for i in sorted(own):
        eqn = program.eqns[i]
        if any(count(a) >= size or a in made for a in (*_compat.variables(eqn.invars), *eqn.outvars)):
            made.update(v for v in eqn.outvars if v not in kept)
    if any(v in program.returned or not own.issuperset(program.readers.get(v, ())) for v in made):
        return None
    return Site(
        operands, read, scored, result, at, pattern, gradient, frozenset(forward), frozenset(backward)
    )


def _may_be_learned(i: int, leaves: Sequence[Atom], pattern: Pattern) -> bool:
    """Return whether a leaf is one of floats that stands before the softmax alone, and in one place."""
    alone = leaves.count(leaves[i]) == 1 and not any(1 + i in step.operands for step in pattern.after)
    return alone and bool(jnp.issubdtype(shaped(leaves[i]).dtype, jnp.floating))


def _beside(axes: Axes, a: Atom, rank: int) -> int:
    """Return how many numbers a value has along axes beside those of the scores."""
    return math.prod(
        n for axis, n in zip(axes, shaped(a).shape, strict=True) if axis is not None and axis >= rank
    )


def _dots(program: Program, a: Atom, axes: Axes, size: int) -> dict[Any, Axes]:
    """Return the products that a value is made of, entry by entry, with their axes."""
    found: dict[Any, Axes] = {}
    seen: set[Any] = set()
    waiting: list[tuple[Any, Axes]] = [(a, axes)]
    while waiting:
        a, axes = waiting.pop()
        eqn = program.made(a)
        if a in seen or eqn is None or count(a) < size:
            continue
        seen.add(a)
        if eqn.primitive.name == "dot_general":
            found[a] = axes
        elif (inner := relabelled(eqn, axes)) is not None:
            waiting += [(b, inner) for b in _compat.variables(eqn.invars)]
        elif is_pointwise(eqn):
            waiting += [(b, axes) for b in _compat.variables(eqn.invars) if shaped(b).shape]
    return found


def _scores(dot: jex.JaxprEqn, axes: Axes, key: int, fresh: int) -> Product | None:
    """Return the product of queries and keys that gives scores with these axes; None where it is another one."""
    if not _is_plain(dot) or any(map(_compat.is_literal, dot.invars)):
        return None
    contracted, batched = dot.params["dimension_numbers"]
    shapes = [shaped(a).shape for a in dot.invars]
    both: list[list[int | None]] = [[None] * len(shape) for shape in shapes]
    numbers = iter(axes)
    for d, e in zip(*batched, strict=True):
        both[0][d] = both[1][e] = next(numbers)
    free: list[list[int | None]] = [[], []]
    for s in (0, 1):
        for d in range(len(shapes[s])):
            if d not in {*contracted[s], *batched[s]}:
                both[s][d] = next(numbers)
                free[s].append(both[s][d] if shapes[s][d] > 1 else None)
    for d, e in zip(*contracted, strict=True):
        both[0][d] = both[1][e] = fresh
        fresh += 1
    columns = next((s for s in (0, 1) if key in free[s]), None)
    if columns is None or any(axis is not None and axis != key for axis in free[columns]):
        return None
    rows = 1 - columns
    return Product(dict(dot.params), tuple(both[rows]), tuple(both[columns]), axes, swapped=columns == 0)
