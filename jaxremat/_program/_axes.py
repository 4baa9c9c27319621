"""Equation -> the axes along which its work is independent: one rule per primitive, total over JAX's primitives.

A rule yields `BatchingRule`s. Each is one independent axis, given by its dimension in each operand and result. An
operand without that dimension is read whole. A result without it is a sum over the axis: the sums over parts of the
axis add up to it.

A dimension that no rule names is *mixed*: each entry of a result depends on all entries along it, as in a sort, a
cumulative sum or a Fourier transform, or on entries at positions that are data.

Invariant: applying the equation to consecutive equal parts along an axis, and concatenating or adding the results,
gives the results of the whole.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ._compat import Atom, DType, shaped
from ._primitives import PLACES, is_placed, is_placing, is_repeatable, pointwise_names

Rule = Callable[[Any], Iterator["BatchingRule"]]


@dataclass(frozen=True, slots=True)
class Parts:
    """An axis in equal parts. **Fields:** `rows` sizes along the axis are multiples of this number; `count` the number
    of parts. If it does not divide the rows, the last part extends beyond them.
    """

    rows: int
    count: int

    @property
    def size(self) -> int:
        """Rows of a part."""
        return -(-self.rows // self.count)

    def of(self, size: int) -> int:
        """Return a dimension's size in a part."""
        return size * self.size // self.rows

    @property
    def beyond(self) -> int:
        """The number of rows that the last part has beyond the end."""
        return self.count * self.size - self.rows


@dataclass(frozen=True, slots=True)
class BatchingRule:
    """One independent axis of an equation.

    **Fields:** `operands` and `results`: the axis's dimension in each, None if it has none; `copied`: whether the
    equation stays in its place, and each reader recomputes its parts; `summed`: whether the results are sums over the
    axis; `linear`: whether they are linear in such sums; `sizes`: the parameters that hold the axis's size, each with
    the index of the entry, None for a plain number; `groups`: any number of parts must divide it, 0 if only the
    dimensions' sizes restrict it.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    summed: bool = False
    linear: bool = False
    sizes: tuple[tuple[str, int | None], ...] = ()
    groups: int = 0
    copied: bool = False

    @property
    def sums(self) -> tuple[bool, ...]:
        """Return for each result whether it is a sum over the axis."""
        return tuple(d is None for d in self.results)

    def in_chunk(self, eqn: jex.JaxprEqn, parts: Parts, *, widens: bool = True) -> dict[str, Any]:
        """Return the equation's parameters for one of these parts of the axis.

        **Arguments:** `widens`: whether a sum gets the type in which sums of parts accumulate.
        """
        params: dict[str, Any] = {
            name: None if name in PLACES and not is_placing(eqn) else value
            for name, value in eqn.params.items()
        }
        for name, index in self.sizes:
            if index is None:
                params[name] = parts.of(params[name])
            else:
                sizes = list(params[name])
                sizes[index] = parts.of(sizes[index])
                params[name] = tuple(sizes)
        if self.summed and widens and "preferred_element_type" in params:
            params["preferred_element_type"] = sum_type(shaped(eqn.outvars[0]).dtype)
        return params


BILINEAR = frozenset({"mul", "div", "dot_general"})

LINEAR = {
    **dict.fromkeys(("add", "add_any", "sub", "concatenate"), slice(None)),
    **dict.fromkeys(
        ("neg", "convert_element_type", "reduce_sum", "broadcast_in_dim", "cumsum", "rev"), slice(1)
    ),
    **dict.fromkeys(("reshape", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice"), slice(1)),
    **dict.fromkeys(("dynamic_update_slice", "pad"), slice(2)),
    "select_n": slice(1, None),
}
"""Equations that are linear in some operands together, which must then all be sums: the indices of these. Other
equations in the table are linear in each of two operands.
"""

OF_SUM = BatchingRule((None,), (None,), linear=True)
OF_SUMS = BatchingRule((None, None), (None,), linear=True)
"""The rules of equations that are linear in one sum over an axis, or in two."""


def rules(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the independent axes of an equation; none for loops, which depend on the equations around them."""
    placed = is_placed(eqn) and not is_placing(eqn)
    if placed or not eqn.outvars or not is_repeatable(eqn):
        return
    if (rule := RULES.get(eqn.primitive.name)) is not None:
        yield from rule(eqn)


JOINS = {"reduce_or": lax.or_p, "reduce_and": lax.and_p}
"""Reductions whose parts can be joined in any order and any number of times with the same bits, and the operation that
joins two.
"""


def joined(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the axes over which such a reduction joins entries."""
    if eqn.primitive.name in JOINS:
        yield from (BatchingRule((axis,), (None,), summed=True) for axis in eqn.params["axes"])


def agree(placed: Iterable[tuple[Atom, int | None]]) -> bool:
    """Return whether no value has the axis in two dimensions."""
    found: dict[Any, int | None] = {}
    return all(found.setdefault(a, d) == d for a, d in placed)


def is_scattered(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation adds to an array in place."""
    return eqn.primitive.name == "scatter-add"


def terms(eqn: jex.JaxprEqn, rule: BatchingRule) -> list[int]:
    """Return the operands whose zeros add nothing to an equation's sums over an axis."""
    return [k for k, d in enumerate(rule.operands) if d is not None and (k == 2 or not is_scattered(eqn))]


def sum_type(dtype: DType) -> Any:
    """Return the type in which sums of parts accumulate: narrow floating-point types would lose small contributions."""
    short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if short else dtype


def _shape(atom: Atom) -> tuple[int, ...]:
    return shaped(atom).shape


def _alike(eqn: jex.JaxprEqn, dimensions: Iterable[int], *sizes: str) -> Iterator[BatchingRule]:
    """Yield an axis for each of these dimensions, the same in all operands and results; scalars have none.

    **Arguments:** `sizes`: parameters that hold the size of each dimension.
    """
    for d in dimensions:
        yield BatchingRule(
            tuple(d if _shape(a) else None for a in eqn.invars),
            tuple(d for _ in eqn.outvars),
            sizes=tuple((name, d) for name in sizes),
        )


def _named(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    yield from _alike(eqn, range(len(_shape(eqn.outvars[0]))))


def _pointwise(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the axes of pointwise work. An operand with one entry along the axis is read whole; the operands of choices
    are not repeated.
    """
    if eqn.primitive.name == "select_n" and len({*map(_shape, eqn.invars)} - {()}) > 1:
        return
    for d, size in enumerate(_shape(eqn.outvars[0])):
        own = (d if _shape(a) and _shape(a)[d] == size else None for a in eqn.invars)
        yield BatchingRule(tuple(own), tuple(d for _ in eqn.outvars))


def _leading(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the leading dimensions, where results have more or fewer trailing dimensions than the operand."""
    yield from _alike(eqn, range(min(len(_shape(v)) for v in (*eqn.invars, *eqn.outvars))))


def _batched(core: int) -> Rule:
    """Yield all dimensions of the first operand but the last `core`: independent problems."""

    def rule(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
        yield from _alike(eqn, range(len(_shape(eqn.invars[0])) - core))

    return rule


def _fourier(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    yield from _batched(len(eqn.params["fft_lengths"]))(eqn)


def _keys(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the dimensions of keys, each of which draws by itself. Generators other than Threefry may draw for a whole
    batch from the first key.
    """
    if "fry" in str(shaped(eqn.invars[0]).dtype):
        yield from _leading(eqn)


def _iota(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    if len(eqn.invars) == 0:
        others = (d for d in range(len(_shape(eqn.outvars[0]))) if d != eqn.params["dimension"])
        yield from _alike(eqn, others, "shape")


def _broadcast(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    if len(eqn.invars) > 1:
        return  # dynamic shapes
    operand, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    of = {d: j for j, d in enumerate(map(int, eqn.params["broadcast_dimensions"])) if operand[j] == result[d]}
    for d in range(len(result)):
        yield BatchingRule((of.get(d),), (d,), sizes=(("shape", d),))


def _reshape(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the axes of a reshape: the outermost of those that a dimension merges or is split into, once `dimensions`
    permute them.
    """
    if len(eqn.invars) > 1:
        return
    shape, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    order = eqn.params.get("dimensions") or range(len(shape))
    operand = [shape[d] for d in order]
    for i, before in enumerate(operand):
        for j, after in enumerate(result):
            same = prod(operand[:i]) == prod(result[:j])
            if same and min(before, after) > 1 and max(before, after) % min(before, after) == 0:
                yield BatchingRule((order[i],), (j,), sizes=(("new_sizes", j),))


def _transpose(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    for j, i in enumerate(eqn.params["permutation"]):
        yield BatchingRule((int(i),), (j,))


def _squeeze(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    rank = len(_shape(eqn.invars[0]))
    gone = {d % rank for d in eqn.params["dimensions"]}
    for j, i in enumerate(d for d in range(rank) if d not in gone):
        yield BatchingRule((i,), (j,))


def _stack(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    axis = eqn.params["axis"] % len(_shape(eqn.outvars[0]))
    for d in range(len(_shape(eqn.invars[0]))):
        yield BatchingRule(tuple(d for _ in eqn.invars), (d + (d >= axis),))


def _unstack(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    rank = len(_shape(eqn.invars[0]))
    axis = eqn.params["axis"] % rank
    for d in range(rank):
        if d != axis:
            yield BatchingRule((d,), tuple(d - (d > axis) for _ in eqn.outvars))


def _tile(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    yield from _alike(eqn, (d for d, times in enumerate(eqn.params["reps"]) if times == 1))


def _reduction(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the axes of a reduction. The initial values of a general reduction, one for each operand, are scalars."""
    axes = set(eqn.params["axes" if "axes" in eqn.params else "dimensions"])
    kept = [d for d in range(len(_shape(eqn.invars[0]))) if d not in axes]
    for j, i in enumerate(kept):
        yield BatchingRule(tuple(i if _shape(a) else None for a in eqn.invars), tuple(j for _ in eqn.outvars))
    if eqn.primitive.name == "reduce_sum":
        for i in sorted(axes):
            yield BatchingRule((i,), (None,), summed=True)


def _but(name: str) -> Rule:
    """Yield all dimensions except those that a parameter names."""

    def rule(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
        rank, named = len(_shape(eqn.invars[0])), eqn.params[name]
        mixed = {d % rank for d in (named if isinstance(named, tuple) else (named,))} if rank else set[int]()
        yield from _alike(eqn, (d for d in range(rank) if d not in mixed))

    return rule


def _pad(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    padded = eqn.params["padding_config"]
    yield from _alike(eqn, (d for d, each in enumerate(padded) if tuple(each) == (0, 0, 0)))


def _slice(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    operand, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    yield from _alike(eqn, (d for d in range(len(result)) if operand[d] == result[d]), "limit_indices")


def _window(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the dimensions that a window at a position given by data spans whole."""
    operand, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    yield from _alike(eqn, (d for d in range(len(result)) if operand[d] == result[d]), "slice_sizes")


def _written_window(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    operand, update = _shape(eqn.invars[0]), _shape(eqn.invars[1])
    yield from _alike(eqn, (d for d in range(len(operand)) if operand[d] == update[d]))


def _product(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    contracted, batched = eqn.params["dimension_numbers"]
    for i, (a, b) in enumerate(zip(*batched, strict=True)):
        yield BatchingRule((int(a), int(b)), (i,))
    out = len(batched[0])
    for side, (own, each) in enumerate(zip(contracted, batched, strict=True)):
        for d in range(len(_shape(eqn.invars[side]))):
            if d not in own and d not in each:
                yield BatchingRule((d, None) if side == 0 else (None, d), (out,))
                out += 1
    for a, b in zip(*contracted, strict=True):
        yield BatchingRule((int(a), int(b)), (None,), summed=True)


def _ragged_product(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the axes of a ragged product. The ragged dimension and the groups are mixed, because group sizes are data.
    The sizes may have dimensions before that of the groups: the product's batch, and those like the ragged operand's.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (ragged,), grouped = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    contracted, batched = numbers.dot_dimension_numbers
    lhs, rhs, sizes = (len(_shape(a)) for a in eqn.invars)
    free = [d for d in range(lhs) if d not in contracted[0] and d not in batched[0]]
    kind = next(each for each in (free, list(contracted[0]), list(batched[0])) if ragged in each)
    before = kind[: kind.index(ragged)]
    prefix = [*(batched[0] if ragged not in batched[0] else ()), *before] if sizes > 1 else []
    where = {d: i for i, d in enumerate(prefix)}
    first = int(ragged in contracted[0])  # the groups' own dimension of the result
    for i, (a, b) in enumerate(zip(*batched, strict=True)):
        if a != ragged:
            yield BatchingRule((a, b, where.get(a)), (first + i,))
    out = first + len(batched[0])
    for d in free:
        if d != ragged:
            yield BatchingRule((d, None, where.get(d)), (out,))
        out += 1
    for d in range(rhs):
        if d not in contracted[1] and d not in batched[1] and d not in grouped:
            yield BatchingRule((None, d, None), (out,))
            out += 1
    for a, b in zip(*contracted, strict=True):
        if a != ragged and a not in where:
            yield BatchingRule((a, b, None), (None,), summed=True)


def _convolution(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the batch; the contracted features, which are the batch in a kernel's gradient; groups of features and of
    the batch; features of the result; positions, where a window has one entry.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    by_batch, by_feature = params["batch_group_count"], params["feature_group_count"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if by_batch == 1:
        yield BatchingRule((lhs[0], None), (out[0],))
    if by_feature == 1:
        yield BatchingRule((lhs[1], rhs[1]), (None,), summed=True)
    if by_feature > 1:
        sizes = (("feature_group_count", None),)
        yield BatchingRule((lhs[1], rhs[0]), (out[1],), sizes=sizes, groups=by_feature)
    elif by_batch > 1:
        sizes = (("batch_group_count", None),)
        yield BatchingRule((lhs[0], rhs[0]), (out[1],), sizes=sizes, groups=by_batch)
    else:
        yield BatchingRule((None, rhs[0]), (out[1],))
    spans = zip(
        lhs[2:], rhs[2:], out[2:], params["window_strides"], params["padding"], params["lhs_dilation"], strict=True
    )  # fmt: skip
    for a, b, c, stride, padding, dilation in spans:
        if (_shape(eqn.invars[1])[b], stride, dilation, *padding) == (1, 1, 1, 0, 0):
            yield BatchingRule((a, None), (c,))


def _windows(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the dimensions in which each entry has a window of its own."""
    params, rank = eqn.params, len(_shape(eqn.outvars[0]))
    ones = (params.get(name) or (1,) * rank for name in ("base_dilation", "window_dilation"))
    sizes = zip(params["window_dimensions"], params["window_strides"], *ones, strict=True)
    alone = (
        set(size) == {1} and tuple(pad) == (0, 0) for size, pad in zip(sizes, params["padding"], strict=True)
    )
    yield from _alike(eqn, [d for d, each in enumerate(alone) if each])


def _gather(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield batch dimensions of the operand, dimensions that are read whole, and rows of the indices."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices, result = (_shape(a) for a in (*eqn.invars, *eqn.outvars))
    batch = [d for d in range(len(result)) if d not in numbers.offset_dims]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(operand)) if d not in gone]
    along = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for i in range(len(indices) - 1):
        yield BatchingRule((along.get(i), i), (batch[i],))
    for d, out in zip(whole, numbers.offset_dims, strict=True):
        if sizes[d] == operand[d] and d not in numbers.start_index_map:
            yield BatchingRule((d, None), (out,), sizes=(("slice_sizes", d),))


def _scatter(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the same for the scattered operand. Parts of the indices add up where the scatter adds to the operand."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (_shape(a) for a in eqn.invars)
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(operand)) if d not in gone]
    along = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for i in range(len(indices) - 1):
        if i in along:
            yield BatchingRule((along[i], i, batch[i]), (along[i],))
        elif is_scattered(eqn):
            yield BatchingRule((None, i, batch[i]), (None,), summed=True)
    for d, update in zip(whole, numbers.update_window_dims, strict=True):
        if updates[update] == operand[d] and d not in numbers.scatter_dims_to_operand_dims:
            yield BatchingRule((d, None, update), (d,))


RULES: dict[str, Rule] = {
    **dict.fromkeys(pointwise_names(), _pointwise),
    **dict.fromkeys(("threefry2x32", "random_clone"), _pointwise),
    **dict.fromkeys(("name", "jaxremat_hint", "random_seed", "sharding_constraint"), _named),
    **dict.fromkeys(("bitcast_convert_type", "random_wrap"), _leading),
    **dict.fromkeys(("random_bits", "random_split", "random_unwrap"), _keys),
    "random_fold_in": _pointwise,
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    **dict.fromkeys(
        (
            "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "reduce",
            "argmax", "argmin",
        ),
        _reduction,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split", "top_k"), _but("axis")),
    "rev": _but("dimensions"),
    **dict.fromkeys(("sort", "concatenate"), _but("dimension")),
    "approx_top_k": _but("reduction_dimension"),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _window,
    "dynamic_update_slice": _written_window,
    "dot_general": _product,
    "ragged_dot_general": _ragged_product,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        (
            "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter",
            "select_and_scatter_add", "select_and_gather_add", "max_pool_places", "max_pool_gradient",
        ),
        _windows,
    ),
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter
    ),
    "fft": _fourier,
    **dict.fromkeys(
        (
            "cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu",
            "ormqr", "qr", "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal",
        ),
        _batched(2),
    ),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"), _batched(1)),
}  # fmt: skip
"""The rules by primitive name. Calls are replaced by their bodies before, and scans have a module of their own. No axis
of any other primitive is known to be independent; `tests/program/opaque_primitives.py` says why.
"""
