"""Equation -> the axes along which a row of its result depends on a window of rows of its operand.

A convolution over an image reads, for each row of its result, a few rows around it. Parts of the rows are independent
if each is read together with the rows around it, its *halo*.

In rows of the operand after dilation, the window of row `r` starts at `r * stride - padding` and covers `extent` rows.
Rows outside of the operand count as a fixed number, such as the zeros of a padded convolution.

Invariant: applying the equation to a part with its halo, with that number for rows outside of the operand, gives that
part of the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.extend.core as jex
import numpy as np

from ._axes import BatchingRule, Parts
from ._compat import DType, is_literal, shaped

Halo = tuple[int, int]
"""The numbers of rows before a part and behind it."""

_EXTREMES = {"reduce_window_max": "min", "reduce_window_min": "max"}


@dataclass(frozen=True, slots=True)
class WindowRule(BatchingRule):
    """An axis with windows.

    **Fields:** `stride`, `padding`, `extent` and `dilation` of the first operand, as in the module's docstring; `fill`
    the number that rows outside of it count as, None if they are not read; `at` the parameter that holds the padding
    and the index in it. If results are sums over the axis, its rows are those of the second operand.
    """

    stride: int = 1
    padding: int = 0
    extent: int = 0
    dilation: int = 1
    fill: Any = None
    at: tuple[str, int] = ("padding", 0)

    def halo(self, result: Halo) -> tuple[Halo, Halo]:
        """Return the operand's halo for a halo of the result, and the padding of a part whose first and last rows are
        read.
        """
        before, behind = result
        first = before * self.stride + self.padding
        last = (behind - 1) * self.stride - self.padding + self.extent
        return (first // self.dilation, last // self.dilation + 1), (
            first % self.dilation,
            last % self.dilation,
        )

    def reached(self, operand: Halo) -> tuple[Halo, Halo]:
        """Return the halo of the results that read any row of a part with its halo, and the padding for them."""
        before, behind = operand
        first = max((before * self.dilation - self.padding + self.extent) // self.stride, 0)
        last = max(((behind - 1) * self.dilation + self.padding) // self.stride + 1, 0)
        low = first * self.stride + self.padding - before * self.dilation
        high = (last - 1) * self.stride - self.padding + self.extent - (behind - 1) * self.dilation
        return (first, last), (low, high)

    def is_linear(self, eqn: jex.JaxprEqn) -> bool:
        """Return whether an equation is linear in its first operand."""
        return self.fill in (0, None) and eqn.primitive.name not in _EXTREMES

    def has_every(self, size: int, count: int) -> bool:
        """Return whether the given number of results reads every row that any result reads."""
        before = self.extent - self.stride - self.padding  # where the window before the first ends
        return before < 0 and count * self.stride - self.padding > (size - 1) * self.dilation

    def padded(self, eqn: jex.JaxprEqn, low: int, high: int, rows: int) -> dict[str, Any]:
        """Return the equation's parameters for an operand with this number of rows and other padding."""
        name, index = self.at
        if name == "start_indices":
            return {
                **eqn.params,
                name: _replaced(eqn.params[name], index, -low),
                "limit_indices": _replaced(eqn.params["limit_indices"], index, rows + high),
            }
        more = eqn.params[name][index][2:]
        return {**eqn.params, name: _replaced(eqn.params[name], index, (low, high, *more))}

    def pads_gaps(self, eqn: jex.JaxprEqn) -> bool:
        """Return whether an equation pads no further than the position of the next row."""
        name, index = self.at
        return all(0 <= n < self.dilation for n in eqn.params[name][index][:2])


@dataclass(frozen=True, slots=True)
class PartWithHalo(Parts):
    """A part with its halo. **Fields:** `rows` the number of rows with the halo."""

    def of(self, size: int) -> int:
        del size
        return self.rows


def has_window(eqn: jex.JaxprEqn) -> bool:
    """Return whether each row of an equation's result depends on several rows of an operand."""
    return eqn.primitive.name == "conv_general_dilated" or eqn.primitive.name.startswith("reduce_window")


def windows(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the axes along which an equation has windows, and those along which its windows are adjacent."""
    name = eqn.primitive.name
    if name == "conv_general_dilated":
        yield from _convolution(eqn)
    elif name in ("reduce_window_max", "reduce_window_min", "reduce_window_sum"):
        yield from _reduction(eqn)
    elif name == "select_and_scatter_add":
        yield from _beside(eqn)
    elif name == "pad" and is_literal(eqn.invars[1]):
        fill = np.asarray(eqn.invars[1].val).item()
        for d, (low, _, interior) in enumerate(eqn.params["padding_config"]):
            at = ("padding_config", d)
            yield WindowRule((d, None), (d,), padding=int(low), dilation=interior + 1, fill=fill, at=at)
    elif name == "slice":
        strides = eqn.params["strides"] or (1,) * len(eqn.params["start_indices"])
        for d, (start, stride) in enumerate(zip(eqn.params["start_indices"], strides, strict=True)):
            yield WindowRule((d,), (d,), stride=stride, padding=-start, at=("start_indices", d))


def _convolution(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the spatial axes: of the result, or of a window as large as the operand, as in a kernel's gradient."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    spans = zip(
        numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], params["window_strides"],
        params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True,
    )  # fmt: skip
    kernel, result = (shaped(a).shape for a in (eqn.invars[1], eqn.outvars[0]))
    for i, (a, b, c, stride, (low, _), dilation, spread) in enumerate(spans):
        around = WindowRule((a, None), (c,), padding=int(low), dilation=dilation, fill=0, at=("padding", i))
        extent = (result[c] - 1) * stride
        found = (
            replace(around, stride=stride, extent=(kernel[b] - 1) * spread),
            replace(around, operands=(a, b), results=(None,), summed=True, stride=spread, extent=extent),
        )
        yield from found if kernel[b] <= result[c] else found[::-1]


def _reduction(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    params, dtype = eqn.params, shaped(eqn.invars[0]).dtype
    fill = _extreme(dtype, _EXTREMES[eqn.primitive.name]) if eqn.primitive.name in _EXTREMES else 0
    each = zip(
        params["window_dimensions"], params["window_strides"], params["padding"], params["base_dilation"],
        params["window_dilation"], strict=True,
    )  # fmt: skip
    for d, (size, stride, (low, _), dilation, spread) in enumerate(each):
        yield WindowRule(
            (d,), (d,), stride=int(stride), padding=int(low), extent=int((size - 1) * spread), dilation=int(dilation),
            fill=fill, at=("padding", d),
        )  # fmt: skip


def _beside(eqn: jex.JaxprEqn) -> Iterator[BatchingRule]:
    """Yield the axes along which windows cover the operand without overlap."""
    source, operand = (shaped(a).shape for a in eqn.invars)
    each = zip(*(eqn.params[n] for n in ("window_dimensions", "window_strides", "padding")), strict=True)
    for d, (size, stride, padding) in enumerate(each):
        if size == stride and tuple(padding) == (0, 0) and source[d] * size == operand[d]:
            yield BatchingRule((d, d), (d,))


def _extreme(dtype: DType, name: str) -> Any:
    if np.issubdtype(dtype, np.integer):
        return int(getattr(np.iinfo(dtype), name))
    return -np.inf if name == "min" else np.inf


def _replaced(values: Any, index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
