"""Equation -> the ways in which its work falls apart into rows, each made of the same rows of its operands.

A *way* names the dimension of the rows in each operand and result. What has none there is read whole. A result that is
a sum over rows has none either: the sums over parts of them add up to it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp

from .._program._primitives import PLACES, is_placed, is_placing, is_pointwise, is_repeatable


@dataclass(frozen=True, slots=True)
class Way:
    """**Fields:** the dimension of the rows in each of an equation's `operands` and in its `results`, None where there
    is none; `summed` whether the results are sums over rows, `linear` whether they are made of such sums.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    summed: bool = False
    linear: bool = False

    @property
    def sums(self) -> tuple[bool, ...]:
        """Which of the results are sums over rows."""
        return tuple(d is None for d in self.results)

    def in_chunk(self, eqn: Any, chunks: int, *, widens: bool = True) -> dict[str, Any]:
        """The equation's parameters where there are only so many parts of the rows.

        **Arguments:** `widens` sums to the type in which parts are added up.
        """
        params: dict[str, Any] = {
            name: None if name in PLACES and not is_placing(eqn) else value
            for name, value in eqn.params.items()
        }
        for name in ("shape", "new_sizes", "limit_indices"):
            if params.get(name) is not None and self.results[0] is not None:
                sizes = list(params[name])
                sizes[self.results[0]] //= chunks
                params[name] = tuple(sizes)
        if "slice_sizes" in params and self.operands[0] is not None:
            sizes = list(params["slice_sizes"])
            sizes[self.operands[0]] = max(sizes[self.operands[0]] // chunks, 1)
            params["slice_sizes"] = tuple(sizes)
        if self.summed and widens and "preferred_element_type" in params:
            params["preferred_element_type"] = sum_type(eqn.outvars[0].aval.dtype)
        return params


OF_SUM = Way((None,), (None,), linear=True)
OF_SUMS = Way((None, None), (None,), linear=True)
"""Of equations that make a sum over rows of one, or of two."""


def ways(eqn: Any) -> Iterator[Way]:
    """All that are known of an equation."""
    if is_placing(eqn):
        yield from _named(eqn)
    if is_placed(eqn) or not eqn.outvars or not is_repeatable(eqn):
        return
    if is_pointwise(eqn):
        yield from _pointwise(eqn)
    elif (known := _WAYS.get(eqn.primitive.name)) is not None:
        yield from known(eqn)


def agree(placed: Iterable[tuple[Any, int | None]]) -> bool:
    """Whether no value has its rows in two places."""
    found: dict[Any, int | None] = {}
    return all(found.setdefault(a, d) == d for a, d in placed)


def is_scattered(eqn: Any) -> bool:
    """Whether the equation adds rows to an array in its place."""
    return eqn.primitive.name == "scatter-add"


def sum_type(dtype: Any) -> Any:
    """The type in which parts of a sum are added up: short floating-point numbers would lose what each part adds."""
    short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if short else dtype


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _alike(eqn: Any, dimensions: Any) -> Iterator[Way]:
    """Operands and results of one shape have their rows in the same of these dimensions; scalars have none."""
    for d in dimensions:
        yield Way(
            tuple(d if _shape(a) else None for a in eqn.invars),
            tuple(d for _ in eqn.outvars),
        )


def _named(eqn: Any) -> Iterator[Way]:
    yield from _alike(eqn, range(len(_shape(eqn.outvars[0]))))


def _pointwise(eqn: Any) -> Iterator[Way]:
    """Where an operand has one entry in place of a row, it is read whole."""
    shape = _shape(eqn.outvars[0])
    for d, size in enumerate(shape):
        own = (d if _shape(a) and _shape(a)[d] == size else None for a in eqn.invars)
        yield Way(tuple(own), (d,))


def _broadcast(eqn: Any) -> Iterator[Way]:
    if len(eqn.invars) > 1:
        return  # of shapes that are not known
    operand, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    of = {d: j for j, d in enumerate(map(int, eqn.params["broadcast_dimensions"])) if operand[j] == result[d]}
    for d in range(len(result)):
        yield Way((of.get(d),), (d,))


def _reshape(eqn: Any) -> Iterator[Way]:
    if eqn.params.get("dimensions") is not None or len(eqn.invars) > 1:
        return
    operand, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    for i, before in enumerate(operand):
        for j, after in enumerate(result):
            same = prod(operand[:i]) == prod(result[:j])
            if same and min(before, after) > 1 and max(before, after) % min(before, after) == 0:
                yield Way((i,), (j,))


def _transpose(eqn: Any) -> Iterator[Way]:
    for j, i in enumerate(eqn.params["permutation"]):
        yield Way((int(i),), (j,))


def _squeeze(eqn: Any) -> Iterator[Way]:
    rank = len(_shape(eqn.invars[0]))
    gone = {d % rank for d in eqn.params["dimensions"]}
    for j, i in enumerate(d for d in range(rank) if d not in gone):
        yield Way((i,), (j,))


def _reduction(eqn: Any) -> Iterator[Way]:
    if len(eqn.invars) > 1:
        return
    axes = set(eqn.params["axes"])
    kept = [d for d in range(len(_shape(eqn.invars[0]))) if d not in axes]
    for j, i in enumerate(kept):
        yield Way((i,), (j,))
    if eqn.primitive.name == "reduce_sum":
        for i in sorted(axes):
            yield Way((i,), (None,), summed=True)


def _but(name: str) -> Callable[[Any], Iterator[Way]]:
    """Rows in any dimension but that, or those, that a parameter names."""

    def found(eqn: Any) -> Iterator[Way]:
        named = eqn.params[name]
        named = set(named) if isinstance(named, tuple) else {named}
        yield from _alike(eqn, (d for d in range(len(_shape(eqn.outvars[0]))) if d not in named))

    return found


def _top(eqn: Any) -> Iterator[Way]:
    yield from _alike(eqn, range(len(_shape(eqn.invars[0])) - 1))


def _pad(eqn: Any) -> Iterator[Way]:
    padded = eqn.params["padding_config"]
    yield from _alike(eqn, (d for d, each in enumerate(padded) if tuple(each) == (0, 0, 0)))


def _slice(eqn: Any) -> Iterator[Way]:
    operand, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    yield from _alike(eqn, (d for d in range(len(result)) if operand[d] == result[d]))


def _product(eqn: Any) -> Iterator[Way]:
    if len(eqn.invars) != 2:
        return
    contracted, batched = eqn.params["dimension_numbers"]
    for i, (a, b) in enumerate(zip(*batched, strict=True)):
        yield Way((int(a), int(b)), (i,))
    out = len(batched[0])
    for side, (own, each) in enumerate(zip(contracted, batched, strict=True)):
        for d in range(len(_shape(eqn.invars[side]))):
            if d not in own and d not in each:
                yield Way((d, None) if side == 0 else (None, d), (out,))
                out += 1
    for a, b in zip(*contracted, strict=True):
        yield Way((int(a), int(b)), (None,), summed=True)


def _convolution(eqn: Any) -> Iterator[Way]:
    """Over the batch; over what is contracted, as the batch is in the gradient of a kernel."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    if params["batch_group_count"] == 1:
        yield Way((numbers.lhs_spec[0], None), (numbers.out_spec[0],))
    if params["feature_group_count"] == 1:
        yield Way((numbers.lhs_spec[1], numbers.rhs_spec[1]), (None,), summed=True)


def _windows(eqn: Any) -> Iterator[Way]:
    """Where each entry has a window of its own."""
    params, rank = eqn.params, len(_shape(eqn.outvars[0]))
    ones = (params.get(name) or (1,) * rank for name in ("base_dilation", "window_dilation"))
    sizes = zip(params["window_dimensions"], params["window_strides"], *ones, strict=True)
    alone = (
        set(size) == {1} and tuple(pad) == (0, 0) for size, pad in zip(sizes, params["padding"], strict=True)
    )
    yield from _alike(eqn, [d for d, each in enumerate(alone) if each])


def _gather(eqn: Any) -> Iterator[Way]:
    """Where rows of the operand are batched or read whole, and where each row of the indices has its own results."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices, result = (_shape(a) for a in (*eqn.invars, *eqn.outvars))
    batch = [d for d in range(len(result)) if d not in numbers.offset_dims]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(operand)) if d not in gone]
    along = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for i in range(len(indices) - 1):
        yield Way((along.get(i), i), (batch[i],))
    for d, out in zip(whole, numbers.offset_dims, strict=True):
        if sizes[d] == operand[d] and d not in numbers.start_index_map:
            yield Way((d, None), (out,))


def _scatter(eqn: Any) -> Iterator[Way]:
    """The same of the sums that gradients of gathers are, the whole of which one operand begins with."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (_shape(a) for a in eqn.invars)
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(operand)) if d not in gone]
    along = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for i in range(len(indices) - 1):
        if i in along:
            yield Way((along[i], i, batch[i]), (along[i],))
        else:
            yield Way((None, i, batch[i]), (None,), summed=True)
    for d, update in zip(whole, numbers.update_window_dims, strict=True):
        if updates[update] == operand[d] and d not in numbers.scatter_dims_to_operand_dims:
            yield Way((d, None, update), (d,))


_WAYS: dict[str, Callable[[Any], Iterator[Way]]] = {
    "name": _named,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"), _reduction
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _but("axis")),
    "split": _but("axis"),
    "rev": _but("dimensions"),
    "sort": _but("dimension"),
    "concatenate": _but("dimension"),
    "iota": _but("dimension"),
    "top_k": _top,
    "pad": _pad,
    "slice": _slice,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        (
            "reduce_window_max",
            "reduce_window_min",
            "reduce_window_sum",
            "select_and_scatter_add",
            "select_and_gather_add",
            "max_pool_places",
            "max_pool_gradient",
        ),
        _windows,
    ),
    "gather": _gather,
    "scatter-add": _scatter,
}
