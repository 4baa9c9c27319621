"""The two operations that stand in an attention's place, forward and backward, neither of which makes all scores.

    attention            queries, keys, values, leaves -> result, largest, total
    attention_gradient   queries, keys, values, [result], largest, total, cotangent, leaves
                         -> gradients of queries, keys, values, and of learned leaves

`largest` of a row's scores and the `total` of their exponentials above that are all that the gradient wants of the
softmax. In XLA's operations, part after part along one axis of the scores: each part does what the step did, once more
where it is differentiated.

Law: values and gradients are those of the equations that were found, up to the order of sums.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching, mlir

from .._program._compat import Aval, DType, shaped
from .._program._primitives import inner_eqns
from ._gradient_kernels import gradient_in_kernels
from ._kernels import attend_in_kernels, fits, gradient_fits
from ._pattern import Axes, Pattern, as_it_was, canonical, in_order, results_of, run
from ._places import Places

ATTENTION: Any = jex.Primitive("attention")
GRADIENT: Any = jex.Primitive("attention_gradient")
ATTENTION.multiple_results = GRADIENT.multiple_results = True

_LOWERED_FOR: ContextVar[Any] = ContextVar("lowered_for", default=None)


@contextmanager
def lowered_for(device: object) -> Iterator[None]:
    """Lower kernels as for a `jax.sharding.AbstractDevice` that is not there: from jax 0.11 on these ask for one."""
    token = _LOWERED_FOR.set(device)
    try:
        yield
    finally:
        _LOWERED_FOR.reset(token)


AT_ONCE = 4
"""How many values of the size of its scores a part has at once, as compiled."""

FEWEST_PARTS = 4
"""In fewer parts nothing would be gained."""


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *leaves: jax.Array,
    pattern: Pattern,
    kernels: bool,
) -> list[jax.Array]:
    """Return attention, part after part."""
    del kernels
    own = tuple(range(len(pattern.sizes)))
    types = results_of(pattern, values)
    parts = _Parts(pattern)
    read, made = pattern.axes(gradient=False)
    operands = [
        *zip((queries, keys, values), read, strict=True),
        *((a, own) for a in in_order(leaves, pattern)),
    ]

    def part(
        start: jax.Array | int, queries: jax.Array, keys: jax.Array, values: jax.Array, *leaves: jax.Array
    ) -> list[jax.Array]:
        x = parts.scores(start, queries, keys, leaves)
        largest = x.max(pattern.key, keepdims=True)
        weights = jnp.exp(x - largest)
        total = weights.sum(pattern.key, keepdims=True)
        mixed = pattern.mixed(parts.mixing(start, weights / total, leaves), values)
        return [mixed, largest.astype(types[1].dtype), total.astype(types[2].dtype)]

    return parts.run(part, operands, list(zip(types, made, strict=True)))


def attend_gradient(
    *operands: jax.Array, pattern: Pattern, kernels: bool, mean: jax.Array | None = None
) -> list[jax.Array]:
    """Return gradients with respect to queries, keys, values and learned leaves, part after part.

    **Arguments:** `mean` as `delta` returns it, where some keys alone are among the operands.
    """
    del kernels
    queries, keys, values, *rest = operands
    largest, total, cotangent, *leaves = rest[len(rest) - 3 - len(pattern.leaves) :]  # without the result
    parts = _Parts(pattern)
    own = tuple(range(len(pattern.sizes)))
    read, _ = pattern.axes(gradient=True)
    ordered = in_order(leaves, pattern)
    of = [
        *zip((queries, keys, values, largest, total, cotangent), read, strict=True),
        *((a, own) for a in ordered),
        *([] if mean is None else [(mean, read[3])]),
    ]
    learned = [ordered[i] for i in pattern.learned]
    spread = [tuple(d if n > 1 else None for d, n in enumerate(a.shape)) for a in learned]

    def part(
        start: jax.Array | int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        largest: jax.Array,
        total: jax.Array,
        cotangent: jax.Array,
        *others: jax.Array,
    ) -> list[jax.Array]:
        leaves = others[: len(pattern.leaves)]

        def scores(queries: jax.Array, keys: jax.Array, *learned: Any) -> Any:
            biases = dict(zip(pattern.learned, learned, strict=True))
            return parts.scores(start, queries, keys, [biases.get(i, a) for i, a in enumerate(leaves)])

        x, scored = jax.vjp(scores, queries, keys, *(leaves[i] for i in pattern.learned))
        weights = jnp.exp(x - largest.astype(x.dtype)) / total.astype(x.dtype)
        _, mixed = jax.vjp(lambda w, v: pattern.mixed(parts.mixing(start, w, leaves), v), weights, values)
        to_weights, to_values = mixed(cotangent)
        own = others[len(leaves) :]
        mean = own[0].astype(x.dtype) if own else (weights * to_weights).sum(pattern.key, keepdims=True)
        to_queries, to_keys, *to_leaves = scored(weights * (to_weights - mean))
        return [to_queries, to_keys, to_values, *to_leaves]

    found = parts.run(part, of, [*of[:3], *zip(learned, spread, strict=True)])
    places = zip(pattern.learned, found[3:], strict=True)
    return [*found[:3], *(as_it_was(a, pattern.leaves[i], leaves[i].shape) for i, a in places)]


class _Parts:
    """An attention part after part along one axis of its scores."""

    def __init__(self, pattern: Pattern):
        self.pattern = pattern
        self.axis, self.count = division(pattern)
        self.size = pattern.sizes[self.axis] // self.count
        self.sizes = list(pattern.sizes)
        self.sizes[self.axis] = self.size

    def scores(
        self, start: jax.Array | int, queries: jax.Array, keys: jax.Array, leaves: Sequence[jax.Array]
    ) -> jax.Array:
        """Return what the softmax is of."""
        pattern = self.pattern
        made = pattern.scores(queries, keys)
        made = canonical(made, pattern.scores.result, len(pattern.sizes))
        return run(pattern.before, made, leaves, functools.partial(self._counted, start))

    def mixing(self, start: jax.Array | int, weights: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
        """Return what values are multiplied by."""
        return run(self.pattern.after, weights, leaves, functools.partial(self._counted, start))

    def _counted(self, start: jax.Array | int, axis: int, dtype: DType) -> jax.Array:
        found = lax.broadcasted_iota(dtype, self.sizes, axis)
        return found + jnp.asarray(start, dtype) if axis == self.axis else found

    def run(
        self,
        part: Callable[..., list[jax.Array]],
        operands: Sequence[tuple[jax.Array, Axes]],
        results: Sequence[tuple[Any, Axes]],
    ) -> Any:
        """Return the results of all parts: what has no such axis is added up.

        **Arguments:** `operands` and `results` with their axes; `part` of the first place of a part, and its operands.
        """
        if self.count == 1:
            return part(0, *(a for a, _ in operands))
        wide = [
            a.dtype if self.axis in axes else jnp.promote_types(a.dtype, jnp.float32) for a, axes in results
        ]

        def one(so_far: list[jax.Array], index: jax.Array) -> tuple[list[jax.Array], None]:
            start = index * self.size
            made = part(start, *(self._part(a, axes, start) for a, axes in operands))
            return [
                self._added(whole, each, axes, start)
                for whole, each, (_, axes) in zip(so_far, made, results, strict=True)
            ], None

        begun = [jnp.zeros(a.shape, dtype) for (a, _), dtype in zip(results, wide, strict=True)]
        found, _ = lax.scan(one, begun, jnp.arange(self.count, dtype=jnp.int32))
        return [a.astype(like.dtype) for a, (like, _) in zip(found, results, strict=True)]

    def _part(self, a: jax.Array, axes: Axes, start: jax.Array | int) -> jax.Array:
        if self.axis not in axes or a.shape[d := axes.index(self.axis)] == 1:
            return a
        return lax.dynamic_slice_in_dim(a, start, self.size, d)

    def _added(self, whole: jax.Array, made: jax.Array, axes: Axes, start: jax.Array | int) -> jax.Array:
        if self.axis not in axes:
            return whole + made.astype(whole.dtype)
        return lax.dynamic_update_slice_in_dim(whole, made.astype(whole.dtype), start, axes.index(self.axis))


def division(pattern: Pattern) -> tuple[int, int]:
    """Along which axis, and in how many parts: so many that what a part has of the size of its scores is together no
    larger than queries, keys, values and the result; along an axis over which nothing is added up, if there is one.
    """
    query, value = pattern.widths
    rows, columns = (
        [_count(pattern, axes) for axes in each]
        for each in (
            (pattern.scores.rows, pattern.mixed.result),
            (pattern.scores.columns, pattern.mixed.columns),
        )
    )
    beside = query * (rows[0] + columns[0]) + value * (rows[1] + columns[1])
    wanted = max(math.ceil(AT_ONCE * pattern.scores_count / max(beside, 1)), FEWEST_PARTS)
    found: list[tuple[bool, bool, int, int, int]] = []
    for axis in pattern.rows:
        shared = not all(axis in axes for axes in (pattern.scores.columns, pattern.mixed.columns))
        for count in _divisors(pattern.sizes[axis]):
            enough = count >= wanted
            found.append((not enough, shared, count if enough else -count, axis, count))
    *_, axis, count = min(found)
    return axis, count


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _count(pattern: Pattern, axes: Axes) -> int:
    """Return entries of an array with these axes, but for axes beside those of the scores."""
    return math.prod(pattern.sizes[axis] for axis in axes if axis is not None and axis < len(pattern.sizes))


def _define(
    primitive: jex.Primitive,
    fn: Callable[..., Sequence[jax.Array]],
    in_kernels: Callable[..., object],
    *,
    gradient: bool,
) -> None:
    def typed(*avals: Aval, pattern: Pattern, kernels: bool, places: Places | None) -> Any:
        del places
        return jax.make_jaxpr(functools.partial(fn, pattern=pattern, kernels=kernels))(*avals).out_avals

    def placed(
        fn: Callable[..., Sequence[jax.Array]],
        *operands: jax.Array,
        pattern: Pattern,
        kernels: bool,
        places: Places | None,
    ) -> Any:
        """Return what the function makes, on each device of its part where there are several."""
        if places is None:
            return fn(*operands, pattern=pattern, kernels=kernels)
        part = functools.partial(fn, kernels=kernels)
        return places.on_each(part, pattern, gradient=gradient, kernels=kernels)(*operands)

    written = functools.partial(placed, fn)

    def batched(
        operands: Sequence[jax.Array], axes: Sequence[int | None], **params: object
    ) -> tuple[Any, Any]:
        made = jax.vmap(functools.partial(written, **params), in_axes=axes)(*operands)
        return made, (0,) * len(made)

    def on_gpu(*operands: Any, pattern: Pattern, kernels: bool, **means: Any) -> Any:
        able = kernels and (gradient_fits if gradient else fits)(pattern, operands)
        return (in_kernels if able else fn)(*operands, pattern=pattern, kernels=kernels, **means)

    def lowered(*args: object, places: Places | None, **params: object) -> Any:
        device = _LOWERED_FOR.get()
        mesh = jax.sharding.get_abstract_mesh()
        if device is not None:
            mesh = mesh.update(abstract_device=device)
            places = places and replace(places, mesh=places.mesh.abstract_mesh.update(abstract_device=device))
        with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
            # Kernels in Triton are to be written otherwise from some later version of JAX on.
            warnings.filterwarnings("ignore", ".*Pallas Triton", DeprecationWarning)
            lower = mlir.lower_fun(functools.partial(placed, on_gpu), multiple_results=True)
            return lower(*args, places=places, **params)

    primitive.def_impl(lambda *operands, **params: jax.jit(functools.partial(written, **params))(*operands))
    primitive.def_abstract_eval(typed)
    mlir.register_lowering(primitive, mlir.lower_fun(written, multiple_results=True))
    mlir.register_lowering(primitive, lowered, platform="cuda")
    batching.primitive_batchers[primitive] = batched


_define(ATTENTION, attend, attend_in_kernels, gradient=False)
_define(GRADIENT, attend_gradient, gradient_in_kernels, gradient=True)


def of_one_device(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """Return one of these operations as a device has it."""
    pattern, places = eqn.params["pattern"], eqn.params["places"]
    if places is None:
        return eqn
    return eqn.replace(params={**eqn.params, "pattern": places.part(pattern), "places": None})


def runs_in_kernels(eqn: jex.JaxprEqn) -> tuple[bool, bool]:
    """Return whether an attention is in kernels on a GPU, and its gradient."""
    pattern = of_one_device(eqn).params["pattern"]
    operands = list(map(shaped, eqn.invars))
    asked = eqn.params["kernels"]
    return asked and fits(pattern, operands), asked and gradient_fits(pattern, operands)


def is_attention(eqn: jex.JaxprEqn) -> bool:
    """Return whether it is one of these operations."""
    return eqn.primitive is ATTENTION or eqn.primitive is GRADIENT


def attends(eqn: jex.JaxprEqn) -> bool:
    """Return whether it is one of them, or has some in its bodies."""
    return any(map(is_attention, (eqn, *inner_eqns(eqn))))
