"""A program and arrays -> what it gives, one operation after the other, by NumPy where it has the operation.

Compiling a program takes longer than all else that is done with a small one, and compiling its operations one by one
takes long enough. Laws: what two programs do alike gives the same numbers in both; but with a `rounding`, where each
result that is not exact is rounded up or down at random, each time that it is made: so do kernels that a compiler makes
of the same equation in two places. What reads a decision of one run with the numbers of another is seen then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

import jaxremat
from jaxremat._program import _compat
from jaxremat._program._inline import CALLS

Params = dict[str, Any]

PLAIN: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "square": np.square,
    "is_finite": np.isfinite,
    "not": np.invert,
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": np.copy,
    "copy_p": np.copy,
}
"""Of operands alone; their results have the operands' common type, or are truths."""


def _select(_: Params, which: Any, *cases: Any) -> Any:
    return np.where(which, *reversed(cases)) if len(cases) == 2 else np.choose(which, cases)


def _broadcast(params: Params, x: Any) -> Any:
    shape, places = params["shape"], params["broadcast_dimensions"]
    spread = [1] * len(shape)
    for place, n in zip(places, x.shape, strict=True):
        spread[place] = n
    return np.broadcast_to(x.reshape(spread), shape)


def _dot(params: Params, x: Any, y: Any) -> Any:
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    names = iter(range(x.ndim + y.ndim))
    of_y = dict.fromkeys(range(y.ndim), -1)
    of_x = [next(names) for _ in range(x.ndim)]
    for a, b in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        of_y[b] = of_x[a]
    for b, name in of_y.items():
        of_y[b] = next(names) if name < 0 else name
    batch = [of_x[a] for a in left_batch]
    own = [of_x[a] for a in range(x.ndim) if a not in left and a not in left_batch]
    others = [of_y[b] for b in range(y.ndim) if b not in right and b not in right_batch]
    return np.einsum(_wide(x), of_x, _wide(y), list(of_y.values()), [*batch, *own, *others])


def _wide(x: Any) -> Any:
    """An array in a type that is added up without loss."""
    if x.itemsize >= 4 or x.dtype == bool:
        return x
    return x.astype(np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.int32)


def _clipped(starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The part of an array that a dynamic slice is, moved into it."""
    within = (min(max(int(s), 0), n - m) for s, n, m in zip(starts, shape, sizes, strict=True))
    return tuple(slice(s, s + m) for s, m in zip(within, sizes, strict=True))


def _written(_: Params, x: Any, part: Any, *starts: Any) -> Any:
    x = x.copy()
    x[_clipped(starts, x.shape, part.shape)] = part
    return x


def _slice(params: Params, x: Any) -> Any:
    steps = params["strides"] or (1,) * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return x[tuple(slice(*each) for each in bounds)]


def _bits(params: Params, x: Any) -> Any:
    dtype = np.dtype(params["new_dtype"])
    alike = dtype.kind in "fiu" and x.dtype.kind in "fiu" and dtype.itemsize == x.itemsize
    return np.ascontiguousarray(x).view(dtype).reshape(x.shape) if alike else NotImplemented


def _padded(params: Params, x: Any, value: Any) -> Any:
    """An array with more around and between its entries; or fewer, where a number is negative."""
    low, high, between = zip(*params["padding_config"], strict=True) if x.ndim else ((), (), ())
    inner = [max(n + (n - 1) * gap, 0) for n, gap in zip(x.shape, between, strict=True)]
    shape = [n + max(a, 0) + max(b, 0) for n, a, b in zip(inner, low, high, strict=True)]
    result = np.full(shape, value, x.dtype)
    inside = zip(inner, low, between, strict=True)
    result[tuple(slice(max(a, 0), max(a, 0) + n, gap + 1) for n, a, gap in inside)] = x
    cut = zip(shape, low, high, strict=True)
    return result[tuple(slice(max(-a, 0), n - max(-b, 0)) for n, a, b in cut)].copy()


def _iota(params: Params) -> Any:
    shape, along = params["shape"], params["dimension"]
    spread = [-1 if d == along else 1 for d in range(len(shape))]
    return np.broadcast_to(np.arange(shape[along]).reshape(spread), shape)


def _parts(params: Params, x: Any) -> Any:
    return tuple(map(np.ascontiguousarray, np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])))


def _rows(params: Params, x: Any) -> Any:
    return tuple(np.ascontiguousarray(np.moveaxis(x, params["axis"], 0)))


def _divided(_: Params, x: Any, y: Any) -> Any:
    return x / y if jnp.issubdtype(x.dtype, jnp.floating) else NotImplemented


WITH_PARAMS: dict[str, Callable[..., Any]] = {
    # Results are given their type anyway.
    "convert_element_type": lambda p, x: x if jnp.issubdtype(p["new_dtype"], np.complexfloating) else x.real,
    "layout_constraint": lambda p, x: x,
    "integer_pow": lambda p, x: x ** p["y"] if p["y"] > 0 else 1 / x ** -p["y"],
    "div": _divided,
    "select_n": _select,
    "broadcast_in_dim": lambda p, x, *sizes: NotImplemented if sizes else _broadcast(p, x),
    "reshape": lambda p, x, *sizes: NotImplemented if sizes or p["dimensions"] else x.reshape(p["new_sizes"]),
    "squeeze": lambda p, x: np.squeeze(x, p["dimensions"]),
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "slice": _slice,
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "dynamic_slice": lambda p, x, *starts: x[_clipped(starts, x.shape, p["slice_sizes"])],
    "dynamic_update_slice": _written,
    "reduce_sum": lambda p, x: np.sum(_wide(x), p["axes"]),
    "reduce_max": lambda p, x: np.max(x, p["axes"]) if x.size else NotImplemented,
    "reduce_min": lambda p, x: np.min(x, p["axes"]) if x.size else NotImplemented,
    "reduce_and": lambda p, x: np.bitwise_and.reduce(x, axis=tuple(p["axes"])),
    "reduce_or": lambda p, x: np.bitwise_or.reduce(x, axis=tuple(p["axes"])),
    "dot_general": _dot,
    "bitcast_convert_type": _bits,
    "pad": _padded,
    "iota": lambda p, *sizes: NotImplemented if sizes else _iota(p),
    "split": _parts,
    "unstack": _rows,
    "stack": lambda p, *xs: np.stack(xs, p["axis"]),
}
"""Of parameters too; several results are a tuple. Where NumPy does another thing, NotImplemented."""


ON_ONE_DEVICE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("psum", "psum_invariant", "pmax", "pmin", "pvary", "ppermute", "pcast"), lambda p, *xs: list(xs)
    ),
    "axis_index": lambda p: [np.int32(0)],
    "all_gather": lambda p, x: [x if p["tiled"] else np.expand_dims(x, p["all_gather_dimension"])],
    "reduce_scatter": lambda p, x: [x if p["tiled"] else np.squeeze(x, p["scatter_dimension"])],
}
"""Collectives of a `shard_map` over one device."""

_DRAWS = frozenset({"random_bits", "random_split", "random_fold_in", "threefry2x32", "iota_2x32_shape"})
_drawn_before: dict[Any, list[Any]] = {}
"""Random numbers are drawn alike by all programs of a step."""

AS_WRITTEN = jaxremat.compiler_options("cpu", {"xla_allow_excess_precision": False})
"""What is compiled rounds to narrow types where the step does, and keeps barriers as a plan's compilation does: without
them XLA merges what is recomputed with what it is recomputed from, and decides anew in each fusion that reads a mask.
"""

ROUNDED = frozenset(
    {
        "exp", "log", "log1p", "expm1", "tanh", "sin", "cos", "sqrt", "rsqrt", "logistic", "square", "add", "add_any",
        "sub", "mul", "integer_pow", "div", "reduce_sum", "dot_general",
    }
)  # fmt: skip
"""NumPy's operations whose results are rounded; made with more digits it is seen which are exact."""

ROUNDED_BY_JAX = frozenset(
    {
        "asin", "acos", "asinh", "acosh", "atan", "atan2", "atanh", "cbrt", "cosh", "cumlogsumexp", "cumprod", "cumsum",
        "digamma", "erf", "erf_inv", "erfc", "exp2", "fft", "lgamma", "pow", "reduce_prod", "reduce_window_sum",
        "sinh", "tan", "conv_general_dilated", "ragged_dot_general", "triangular_solve", "scatter-add", "scatter_add",
    }
)  # fmt: skip
"""JAX's, of whose results those that are whole numbers pass for exact."""


def evaluate(closed: Any, args: Sequence[Any], rounding: np.random.Generator | None = None) -> list[Any]:
    """What a program gives for these arrays.

    **Arguments:** `rounding` draws whether what is not exact is rounded up or down; None rounds to the nearest.
    """
    with np.errstate(all="ignore"):
        return _run(closed, [_here(a) for a in args], rounding)


def evaluated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives what it gave, evaluated in place of compiled."""

    def array(x: Any, aval: Any) -> jax.Array:
        return jnp.asarray(x.item() if aval.weak_type and not aval.ndim else x)

    def run(*args: Any) -> Any:
        closed, results = jax.make_jaxpr(fn, return_shape=True)(*args)
        made = evaluate(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(results), map(array, made, closed.out_avals))

    return run


def _rounded(exact: Any, dtype: Any, rounding: np.random.Generator) -> Any:
    """Numbers that lie between two of a type, at random one of those."""
    nearest = exact.astype(dtype)
    error = exact - nearest.astype(exact.dtype)
    other = np.nextafter(nearest, np.where(error > 0, np.inf, -np.inf).astype(dtype))
    moved = (error != 0) & np.isfinite(error) & (rounding.random(exact.shape) < 0.5)
    return np.where(moved, other, nearest)


def _moved(nearest: Any, rounding: np.random.Generator, kept: Any = False) -> Any:
    """The same of numbers of which it is not known on which side they lie."""
    ends = np.where(rounding.random(nearest.shape) < 0.5, np.inf, -np.inf).astype(nearest.dtype)
    whole = (nearest == np.rint(nearest)) | ~np.isfinite(nearest) | kept
    return np.where(whole, nearest, np.nextafter(nearest, ends))


def _here(x: Any) -> Any:
    """An array of NumPy's; keys stay what they are."""
    return x if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def _run(closed: Any, args: Sequence[Any], rounding: np.random.Generator | None) -> list[Any]:
    jaxpr = getattr(closed, "jaxpr", closed)
    known = {v: _here(c) for v, c in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True)}
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype) if isinstance(atom, jex.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _applied(eqn, [read(a) for a in eqn.invars], rounding), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _applied(eqn: Any, operands: list[Any], rounding: np.random.Generator | None) -> Sequence[Any]:
    """What an equation gives for these operands."""
    params, name = eqn.params, eqn.primitive.name
    if name == "scan":
        return _scanned(eqn, operands, rounding)
    if name == "optimization_barrier":
        return operands
    if name in _DRAWS:
        return _drawn(eqn, operands)
    if name == "while":
        stop, count = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        state = operands[count:]
        while np.any(go_on := _run(params["cond_jaxpr"], [*operands[:stop], *state], rounding)[0]):
            moved = _run(params["body_jaxpr"], [*operands[stop:count], *state], rounding)
            # mapped over examples: each goes on for itself
            state = [_where(go_on, a, b) for a, b in zip(moved, state, strict=True)] if go_on.ndim else moved
        return state
    if name == "cond":
        place = min(max(int(operands[0]), 0), len(params["branches"]) - 1)
        return _run(params["branches"][place], operands[1:], rounding)
    if name in CALLS:
        return _run(params.get("jaxpr") or params["call_jaxpr"], operands, rounding)
    if name == "shard_map" and params["mesh"].size == 1:
        return _run(params["jaxpr"], operands, rounding)
    if name in ON_ONE_DEVICE and not any(isinstance(axis, int) for axis in params.get("axes", ())):
        return ON_ONE_DEVICE[name](params, *operands)
    if name == "shard_map":
        invars = [_compat.new_var(a.aval) for a in eqn.invars]
        run = jax.jit(jex.jaxpr_as_fun(_compat.single(eqn, invars)), compiler_options=AS_WRITTEN)
        return [_here(x) for x in run(*operands)]
    arrays = all(isinstance(x, np.ndarray) for x in operands)
    if arrays and (given := _by_numpy(eqn, operands, rounding)) is not None:
        return given
    got = eqn.primitive.bind(*operands, **params)
    got = [_here(x) for x in (got if eqn.primitive.multiple_results else [got])]
    if rounding is None or name not in ROUNDED_BY_JAX:
        return got
    exact: Any = False
    if name in ("scatter-add", "scatter_add"):  # what is added to zero is exact
        exact = (got[0] == operands[0]) | ((operands[0] == 0) & np.isin(got[0], operands[2]))
    return [_moved(x, rounding, exact) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in got]


def _drawn(eqn: Any, operands: list[Any]) -> list[Any]:
    """Random numbers, and the keys and counts that they are made of."""
    bits = [np.asarray(jax.random.key_data(x) if isinstance(x, jax.Array) else x) for x in operands]
    drawing = eqn.primitive.name, str(eqn.params), *((x.shape, x.dtype.str, x.tobytes()) for x in bits)
    if drawing not in _drawn_before:
        if len(_drawn_before) > 1000:
            _drawn_before.clear()
        got = eqn.primitive.bind(*operands, **eqn.params)
        _drawn_before[drawing] = [_here(x) for x in (got if eqn.primitive.multiple_results else [got])]
    return _drawn_before[drawing]


def _where(chosen: Any, a: Any, b: Any) -> Any:
    """Of two arrays the rows of the first where that is chosen."""
    return np.where(chosen.reshape(chosen.shape + (1,) * (a.ndim - chosen.ndim)), a, b).astype(a.dtype)


def _by_numpy(eqn: Any, operands: list[Any], rounding: np.random.Generator | None) -> list[Any] | None:
    """The same, None where NumPy has no such operation."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    exactly = rounding is not None and name in ROUNDED and jnp.issubdtype(aval.dtype, jnp.floating)
    if exactly:
        operands = [x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands]
    if name in PLAIN:
        given = PLAIN[name](*operands)
    elif name in WITH_PARAMS:
        given = WITH_PARAMS[name](eqn.params, *operands)
    else:
        return None
    if given is NotImplemented:
        return None
    results = given if isinstance(given, tuple) else (given,)
    if exactly and rounding is not None:
        results = [_rounded(np.asarray(x), aval.dtype, rounding) for x in results]
    typed = [np.asarray(x, v.aval.dtype) for x, v in zip(results, eqn.outvars, strict=True)]
    assert [x.shape for x in typed] == [v.aval.shape for v in eqn.outvars], eqn
    return typed


def _scanned(eqn: Any, operands: list[Any], rounding: np.random.Generator | None) -> list[Any]:
    consts, init, _ = _compat.scan_operands(eqn)
    start, behind = len(consts), len(consts) + len(init)
    state, arrays = operands[start:behind], operands[behind:]
    length = eqn.params["length"]
    made: list[list[Any]] = []
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        rows = [a[i] if isinstance(a, jax.Array) else np.asarray(a[i]) for a in arrays]
        results = _run(eqn.params["jaxpr"], [*operands[:start], *state, *rows], rounding)
        state = results[: len(init)]
        made.append(results[len(init) :])
    if eqn.params["reverse"]:
        made.reverse()
    stacks = [_stacked([each[j] for each in made], v.aval) for j, v in enumerate(eqn.outvars[len(init) :])]
    return [*state, *stacks]


def _stacked(rows: list[Any], aval: Any) -> Any:
    if rows and isinstance(rows[0], jax.Array):
        return jnp.stack(rows)
    return np.stack(rows) if rows else np.zeros(aval.shape, aval.dtype)
