"""The law of axes: parts of a carried dimension give parts of the result, and parts of a summed one add up to it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from opaque_primitives import BODIES, OPAQUE

import jaxremat
from jaxremat._program import _compat
from jaxremat._program._axes import RULES, BatchingRule, Parts, agree, rules
from jaxremat._program._inline import Inliner
from jaxremat._program._primitives import inner_jaxprs, pointwise_names
from jaxremat._rewrite import _pooling_places  # noqa: F401  (registers primitives)


def floats(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def integers(*shape: int, below: int = 4) -> Any:
    return jax.random.randint(jax.random.key(1), shape, 0, below)


def matrices(*shape: int) -> Any:
    """Positive definite ones."""
    a = floats(*shape)
    return a @ a.swapaxes(-1, -2) + jnp.eye(shape[-1])


def conv(x: Any, w: Any, **options: Any) -> Any:
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def ragged(lhs: Any, rhs: Any, sizes: Any, contracted: Any, batched: Any, ragged: int, groups: Any) -> Any:
    numbers = lax.RaggedDotDimensionNumbers((contracted, batched), [ragged], groups)
    return lax.ragged_dot_general(lhs, rhs, sizes, numbers)


def scattered(name: str) -> Callable[..., Any]:
    return lambda x, i, u: getattr(x.at[i], name)(u)


def bound(name: str, **params: Any) -> Callable[..., Any]:
    return lambda *args: PRIMITIVES[name].bind(*args, **params)


PRIMITIVES = _compat.registered_primitives()
X = floats(4, 6, 8)
KEYS = jax.random.split(jax.random.key(0), (4, 6))
POOL: dict[str, Any] = {"window_dimensions": (1, 2, 2), "window_strides": (1, 2, 2), "padding": "VALID"}
WINDOWS: dict[str, Any] = {**POOL, "padding": ((0, 0),) * 3}


def scattered_windows(x: Any, s: Any) -> Any:
    from jax._src.lax.windowed_reductions import _select_and_scatter

    return _select_and_scatter(x, lax.ge, (1, 2, 2), (1, 2, 2), ((0, 0),) * 3, s, jnp.float32(0), lax.add)


Case = tuple[Callable[..., Any], tuple[Any, ...], int]
CASES: dict[str, Case] = {
    "pointwise": (lambda x, y: x * y, (X, X), 3),
    "of one entry": (lax.mul, (X, floats(4, 1, 8)), 3),
    "select": (lambda x, y: lax.select_n(x > 0, x, y), (X, X), 3),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 2, 6), (0, 2)), (floats(4, 6),), 3),
    "broadcast one": (lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), (floats(1, 6),), 2),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, (4, 6), 1), (floats(4, 6),), 2),
    "merge": (lambda x: x.reshape(24, 8), (X,), 2),
    "unmerge": (lambda x: x.reshape(4, 6, 4, 2), (X,), 3),
    "permute and merge": (lambda x: lax.reshape(x, (8, 24), (2, 0, 1)), (X,), 2),
    "transpose": (lambda x: x.transpose(1, 2, 0), (X,), 3),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (floats(4, 1, 6),), 2),
    "stack": (lambda x, y: bound("stack", axis=1)(x, y), (X, X), 3),
    "stack last": (lambda x, y: bound("stack", axis=3)(x, y), (X, X), 3),
    "unstack": (lambda x: bound("unstack", axis=1)(x), (X,), 2),
    "tile": (bound("tile", reps=(1, 3, 1)), (X,), 2),
    "sum": (lambda x: lax.reduce_sum(x, (1,)), (X,), 3),
    "sum of short": (lambda x: lax.reduce_sum(x, (0, 2)), (X.astype(jnp.float16),), 3),
    "max": (lambda x: lax.reduce_max(x, (2,)), (X,), 2),
    "min": (lambda x: lax.reduce_min(x, (2,)), (X,), 2),
    "prod": (lambda x: lax.reduce_prod(x, (1,)), (X,), 2),
    "and": (lambda x: lax.reduce_and(x > 0, (1,)), (X,), 2),
    "or": (lambda x: lax.reduce_or(x > 0, (1,)), (X,), 2),
    "xor": (lambda x: lax.reduce_xor(x, (1,)), (integers(4, 6, 8),), 2),
    "reduce": (
        lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + 2 * b[0], a[1] * b[1]), (1,)),
        (X, X),
        2,
    ),
    "argmax": (lambda x: lax.argmax(x, 2, jnp.int32), (X,), 2),
    "argmin": (lambda x: lax.argmin(x, 0, jnp.int32), (X,), 2),
    "cumsum": (lambda x: lax.cumsum(x, axis=1), (X,), 2),
    "cumprod": (lambda x: lax.cumprod(x, axis=0), (X,), 2),
    "cummax": (lambda x: lax.cummax(x, axis=2, reverse=True), (X,), 2),
    "cummin": (lambda x: lax.cummin(x, axis=1), (X,), 2),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, axis=1), (X,), 2),
    "sort": (lambda x: lax.sort(x, dimension=1), (X,), 2),
    "sort pairs": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (X, X), 2),
    "top_k": (lambda x: lax.top_k(x, 2), (X,), 2),
    "top_k of columns": (lambda x: lax.top_k(x, 2, axis=0), (X,), 2),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2), (X,), 2),
    "split": (lambda x: lax.split(x, (2, 4), axis=1), (X,), 2),
    "rev": (lambda x: lax.rev(x, (1,)), (X,), 2),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, X), 2),
    "pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 1), (0, 0, 0))), (X,), 2),
    "slice": (lambda x: x[:, 1:3], (X,), 2),
    "every other": (lambda x: x[..., ::2], (X,), 2),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (i, 0, i), (2, 6, 8)), (X, jnp.int32(1)), 2),
    "dynamic update": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 0)),
        (X, floats(4, 2, 8), jnp.int32(3)),
        2,
    ),
    "product": (lambda x, y: x @ y, (X, floats(8, 10)), 4),
    "batched product": (lambda x, y: jnp.einsum("btd,bsd->bts", x, y), (X, floats(4, 2, 8)), 4),
    "short product": (lambda x, y: x.T @ y, (floats(8, 6).astype(jnp.bfloat16),) * 2, 3),
    "ragged rows": (
        lambda x, w, n: ragged(x, w, n, ([1], [1]), ([], []), 0, [0]),
        (floats(8, 6), floats(3, 6, 4), jnp.array([3, 1, 4])),
        2,
    ),
    "ragged sum": (
        lambda x, y, n: ragged(x, y, n, ([0], [0]), ([], []), 0, []),
        (floats(8, 6), floats(8, 4), jnp.array([3, 1, 4])),
        2,
    ),
    "ragged rows of a batch": (
        lambda x, w, n: ragged(x, w, n, ([2], [2]), ([0], [1]), 1, [0]),
        (floats(2, 8, 6), floats(3, 2, 6, 4), jnp.array([[3, 1, 4], [2, 2, 4]])),
        3,
    ),
    "ragged rows, sizes of a batch": (
        lambda x, w, n: ragged(x, w, n, ([2], [1]), ([], []), 1, [0]),
        (floats(2, 8, 6), floats(3, 6, 4), jnp.array([[3, 1, 4], [2, 2, 4]])),
        3,
    ),
    "convolution": (conv, (floats(4, 5, 5, 2), floats(3, 3, 2, 6)), 3),
    "convolution of points": (conv, (floats(4, 6, 6, 2), floats(1, 1, 2, 6)), 5),
    "strided convolution of points": (
        lambda x, w: conv(x, w, window_strides=(2, 1)),
        (floats(4, 6, 6, 2), floats(1, 1, 2, 6)),
        4,
    ),
    "grouped convolution": (
        lambda x, w: conv(x, w, feature_group_count=4),
        (floats(3, 5, 5, 8), floats(3, 3, 2, 12)),
        1,
    ),
    "convolution of a grouped batch": (
        lambda x, w: conv(x, w, batch_group_count=4),
        (floats(8, 5, 5, 2), floats(3, 3, 2, 12)),
        2,
    ),
    "gradient of each example": (
        jax.vmap(jax.grad(lambda w, x: jnp.sum(conv(x[None], w) ** 2)), (None, 0)),
        (floats(3, 3, 2, 4), floats(4, 5, 5, 2)),
        12,
    ),
    "windows": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID"), (X,), 1),
    "sums of windows": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME"), (X,), 2),
    "minima of windows": (
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2), (1, 2, 2), "SAME"),
        (X,),
        1,
    ),
    "any windows": (
        lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + 2 * b, (1, 2, 2), (1, 2, 2), "VALID"),
        (X,),
        1,
    ),
    "gradient of windows": (
        jax.grad(
            lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID") ** 2)
        ),
        (X,),
        1,
    ),
    "derivative of windows": (
        lambda x: jax.jvp(
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID"), (x,), (x,)
        ),
        (X,),
        1,
    ),
    "scattered windows": (
        scattered_windows,
        (X, floats(4, 3, 4)),
        1,
    ),
    "rows of a table": (lambda x, i: x[i], (floats(10, 6), integers(4, 2)), 3),
    "an entry of each row": (
        lambda x, i: jnp.take_along_axis(x, i[..., None], -1, mode="promise_in_bounds"),
        (X, integers(4, 6)),
        2,
    ),
    "columns": (lambda x, i: jnp.take(x, i, axis=1, mode="clip"), (X, integers(2)), 3),
    "a window of each": (
        jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 8))),
        (X, integers(4)),
        2,
    ),
    "scattered to a table": (scattered("add"), (floats(10, 6), integers(4, 2), floats(4, 2, 6)), 3),
    "taken off a table": (scattered("subtract"), (floats(10, 6), integers(4, 2), floats(4, 2, 6)), 1),
    "set in a table": (scattered("set"), (floats(10, 6), integers(4), floats(4, 6)), 1),
    "multiplied": (scattered("multiply"), (floats(10, 6), integers(4), floats(4, 6)), 1),
    "least": (scattered("min"), (floats(10, 6), integers(4), floats(4, 6)), 1),
    "most": (scattered("max"), (floats(10, 6), integers(4), floats(4, 6)), 1),
    "sums of segments": (
        lambda x, i: jax.ops.segment_sum(x, i, num_segments=4),
        (floats(10, 6), integers(10)),
        2,
    ),
    "scattered to rows": (
        lambda x, i: jax.vjp(lambda x: jnp.take_along_axis(x, i[..., None], -1), x)[1](floats(4, 6, 1))[0],
        (X, integers(4, 6)),
        2,
    ),
    "fourier": (lambda x: jnp.fft.rfft(x), (X,), 2),
    "two fourier": (lambda x: jnp.fft.fft2(x), (X,), 1),
    "cholesky": (lax.linalg.cholesky, (matrices(4, 6, 3, 3),), 2),
    "eig": (lambda x: lax.linalg.eig(x), (matrices(4, 3, 3),), 1),
    "eigh": (lambda x: lax.linalg.eigh(x), (matrices(4, 3, 3),), 1),
    "lu": (lambda x: lax.linalg.lu(x), (matrices(4, 3, 3),), 1),
    "qr": (lambda x: lax.linalg.qr(x), (matrices(4, 3, 3),), 1),
    "geqrf": (lambda x: bound("geqrf")(x), (matrices(4, 3, 3),), 1),
    "geqp3": (
        lambda x: bound("geqp3", use_magma=None)(x, jnp.zeros((4, 3), jnp.int32)),
        (matrices(4, 3, 3),),
        1,
    ),
    "ormqr": (
        lambda x, t, c: bound("ormqr", left=True, transpose=False)(x, t, c),
        (floats(4, 3, 3), floats(4, 3), floats(4, 3, 2)),
        1,
    ),
    "svd": (lambda x: lax.linalg.svd(x), (matrices(4, 3, 3),), 1),
    "schur": (lambda x: lax.linalg.schur(x), (matrices(4, 3, 3),), 1),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x), (matrices(4, 3, 3),), 1),
    "householder": (lax.linalg.householder_product, (floats(4, 3, 3), floats(4, 3)), 1),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal(x), (matrices(4, 3, 3),), 1),
    "symmetric product": (
        lambda a, c: lax.linalg.symmetric_product(a, c),
        (floats(4, 3, 2), matrices(4, 3, 3)),
        1,
    ),
    "triangular solve": (lax.linalg.triangular_solve, (matrices(4, 3, 3), floats(4, 2, 3)), 1),
    "tridiagonal solve": (
        lambda a, b: lax.linalg.tridiagonal_solve(a, a + 4, a, b),
        (floats(4, 5), floats(4, 5, 2)),
        1,
    ),
    "bits as others": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), (X,), 3),
    "bits as long ones": (
        lambda x: lax.bitcast_convert_type(x, jnp.uint32),
        (integers(4, 6, 4).astype(jnp.uint8),),
        2,
    ),
    "seeds": (jax.vmap(jax.random.key), (integers(4),), 1),
    "draws": (lambda k: jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (3,))))(k), (KEYS,), 2),
    "split keys": (lambda k: jax.vmap(jax.vmap(lambda k: jax.random.split(k, 3)))(k), (KEYS,), 2),
    "folded keys": (lambda k, i: jax.vmap(jax.vmap(jax.random.fold_in))(k, i), (KEYS, integers(4, 6)), 2),
    "copied keys": (lambda k: jax.random.clone(k), (KEYS,), 2),
    "words of keys": (lambda k: jax.random.wrap_key_data(jax.random.key_data(k)), (KEYS,), 4),
    "pivots": (lambda p: bound("lu_pivots_to_permutation", permutation_size=5)(p), (integers(4, 3),), 1),
    "places of maxima": (bound("max_pool_places", largest=True, **WINDOWS), (X,), 1),
    "gradient of maxima": (
        bound("max_pool_gradient", sizes=(None, 6, 8), **WINDOWS),
        (floats(4, 3, 4), integers(4, 3, 4).astype(jnp.uint8)),
        1,
    ),
    "named": (lambda x: checkpoint_name(x, "x"), (X,), 3),
    "marked": (lambda x: jaxremat.hint(x, "save", name="x"), (X,), 3),
    "placed": (
        lambda x: lax.with_sharding_constraint(
            x, NamedSharding(Mesh(jax.devices()[:1], "d"), PartitionSpec())
        ),
        (X,),
        3,
    ),
    "threefry": (
        lambda x: bound("threefry2x32")(x, x + 1, x + 2, x + 3),
        (integers(4, 6).astype(jnp.uint32),),
        2,
    ),
}


POINTWISE_PARAMS: dict[str, dict[str, Any]] = {
    "convert_element_type": {"new_dtype": np.dtype("int32"), "weak_type": False, "sharding": None},
    "integer_pow": {"y": 3},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 3},
    "round": {"rounding_method": lax.RoundingMethod.AWAY_FROM_ZERO},
    **{
        name: {"accuracy": None}
        for name in (
            "cbrt", "cos", "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "rsqrt", "sin", "sqrt", "tan",
            "tanh",
        )
    },
}  # fmt: skip


def pointwise_equations() -> Iterator[tuple[Any, list[Any]]]:
    """Yield an equation of each pointwise primitive that JAX has, and operands."""
    whole, truth = integers(4, 6, 8), X > 0
    kinds = [jnp.abs(X) / 5 + 0.1, whole, truth, whole.astype(jnp.uint32), lax.complex(X, X)]
    choices = [(a,) * n for n in (1, 2, 3) for a in kinds] + [(truth, X, X), (kinds[0], whole)]
    for name in sorted(pointwise_names() & PRIMITIVES.keys()):
        fn = bound(name, **POINTWISE_PARAMS.get(name, {}))
        args = next((args for args in choices if _is_able(fn, args)), None)
        assert args is not None, name
        (eqn,) = jax.make_jaxpr(fn)(*args).jaxpr.eqns
        yield eqn, list(args)


def _is_able(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    try:
        jax.make_jaxpr(fn)(*args)
    except (AssertionError, TypeError, ValueError):
        return False
    return True


def part(a: Any, dimension: int | None, chunk: int) -> Any:
    if dimension is None:
        return a
    size = a.shape[dimension] // 2
    return lax.slice_in_dim(a, chunk * size, (chunk + 1) * size, axis=dimension)


def numbers(a: Any) -> np.ndarray[Any, Any]:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
    return np.asarray(a if jnp.issubdtype(a.dtype, jnp.complexfloating) else a.astype(jnp.float32))


ROUNDED = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""Products of other sizes, which libraries sum up in another order."""


def check(eqn: Any, rule: BatchingRule, operands: list[Any], wholes: list[Any]) -> None:
    """Compare two halves along an axis with the whole."""
    made: list[list[Any]] = []
    for chunk in range(2):
        parts = [part(a, d, chunk) for a, d in zip(operands, rule.operands, strict=True)]
        if rule.summed and eqn.primitive.name == "scatter-add" and made:
            parts[0] = made[-1][0]
        found = eqn.primitive.bind(*parts, **rule.in_chunk(eqn, Parts(2, 2)))
        made.append(list(found) if eqn.primitive.multiple_results else [found])
    for whole, d, first, second in zip(wholes, rule.results, *made, strict=True):
        if d is not None:
            got = lax.concatenate([first, second], d)
        else:
            got = second if eqn.primitive.name == "scatter-add" else first + second
        assert got.shape == whole.shape, (eqn, rule)
        if rule.summed or eqn.primitive.name in ROUNDED:
            loose = 2e-2 if whole.dtype.itemsize < 4 else 1e-5
            np.testing.assert_allclose(numbers(got), numbers(whole), rtol=loose, atol=loose, err_msg=str(eqn))
        else:
            np.testing.assert_array_equal(numbers(got), numbers(whole), err_msg=f"{eqn} {rule}")


def checked(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Check all axes of a function's equations, and return the primitive of each axis."""
    flat = program(fn, args)
    env = dict(zip(flat.jaxpr.invars, args, strict=True))
    env.update(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    seen: list[str] = []
    for eqn in flat.jaxpr.eqns:
        operands = [
            jnp.asarray(a.val, _compat.shaped(a).dtype) if _compat.is_literal(a) else env[a]
            for a in eqn.invars
        ]
        results = eqn.primitive.bind(*operands, **eqn.params)
        wholes = list(results) if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, wholes, strict=True))
        for rule in even_ways(eqn):
            check(eqn, rule, operands, wholes)
            seen.append(eqn.primitive.name)
    return seen


def program(fn: Callable[..., Any], args: tuple[Any, ...]) -> jex.ClosedJaxpr:
    """Trace a function to equations without calls."""
    closed = jax.make_jaxpr(fn)(*args)
    return Inliner().program(closed) if any(map(inner_jaxprs, closed.jaxpr.eqns)) else closed


def even_ways(eqn: Any) -> list[BatchingRule]:
    """Return the axes of an equation that have two halves."""

    def even(rule: BatchingRule) -> bool:
        both = zip([*eqn.invars, *eqn.outvars], [*rule.operands, *rule.results], strict=True)
        placed = [(a, d) for a, d in both if not _compat.is_literal(a)]
        sizes = [a.aval.shape[d] for a, d in placed if d is not None]
        return agree(placed) and all(size % 2 == 0 for size in (*sizes, rule.groups))

    return [rule for rule in rules(eqn) if even(rule)]


@pytest.mark.parametrize("case", CASES)
def test_halves_give_what_the_whole_gives(case: str) -> None:
    fn, args, least = CASES[case]
    assert len(checked(fn, args)) >= least


@pytest.mark.parametrize("dimension", range(3))
def test_halves_of_pointwise_work(dimension: int) -> None:
    """All primitives in one program, which is compiled once."""
    found = [(eqn, args, even_ways(eqn)[dimension]) for eqn, args in pointwise_equations()]
    assert all(rule.results == (dimension,) for _, _, rule in found)
    each = [args for _, args, _ in found]

    def together(operands: list[list[Any]]) -> list[Any]:
        pairs = zip(found, operands, strict=True)
        return [
            eqn.primitive.bind(*args, **rule.in_chunk(eqn, Parts(2, 2))) for (eqn, _, rule), args in pairs
        ]

    compiled = jax.jit(together)
    halves = (
        [[part(a, d, i) for a, d in zip(args, rule.operands, strict=True)] for _, args, rule in found]
        for i in (0, 1)
    )
    for (eqn, _, _), whole, *parts in zip(found, compiled(each), *map(compiled, halves), strict=True):
        got = numbers(lax.concatenate(parts, dimension))
        np.testing.assert_array_equal(got, numbers(whole), err_msg=eqn.primitive.name)


def test_each_rule_is_checked() -> None:
    """By an instance of its primitive, in which an axis was found."""
    eqns = [eqn for fn, args, _ in CASES.values() for eqn in program(fn, args).jaxpr.eqns]
    seen = {eqn.primitive.name for eqn in eqns if even_ways(eqn)} | pointwise_names()
    unseen = RULES.keys() & PRIMITIVES.keys() - seen
    assert not unseen, sorted(unseen)


def test_sums_of_short_products_are_added_up_in_long_numbers() -> None:
    x = floats(8, 6).astype(jnp.bfloat16)
    (eqn,) = (e for e in jax.make_jaxpr(lambda x: lax.dot_general(x, x, (((0,), (0,)), ((), ()))))(x).eqns)
    (summed,) = (rule for rule in rules(eqn) if rule.summed)
    assert summed.in_chunk(eqn, Parts(2, 2))["preferred_element_type"] == jnp.float32


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.cumsum(x, axis=0),
        lambda x: lax.sort(x, dimension=0),
        lambda x: lax.rev(x, (0,)),
        lambda x: lax.reduce_max(x, (0,)),
        lambda x: lax.top_k(x, 2),
        lambda x: jnp.fft.fft(x),
        lambda x: x[1:],
        lambda x: lax.pad(x, 0.0, ((1, 0, 0),)),
    ],
)
def test_mixed_dimensions_are_no_axes(fn: Callable[[Any], Any]) -> None:
    for eqn in jax.make_jaxpr(fn)(floats(6)).eqns:
        assert not list(rules(eqn)), eqn


MODULES = (
    "jax.nn", "jax.numpy.linalg", "jax.scipy.linalg", "jax.scipy.special", "jax.random", "jax.checkpoint_policies",
    "jax.export", "jax.custom_batching", "jax.experimental.checkify", "jax.experimental.compute_on",
    "jax.experimental.custom_partitioning", "jax.experimental.multihost_utils", "jax.experimental.pallas",
    "jax.experimental.pallas.fuser", "jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.tpu",
    "jax.experimental.pallas.triton", "jax.experimental.rnn", "jax.experimental.shard_alike",
    "jax.experimental.shard_map", "jax.experimental.sparse", "jax._src.buffer_callback",
    "jax._src.cudnn.fused_attention_stablehlo", "jax._src.cudnn.scaled_matmul_stablehlo",
)  # fmt: skip

# A process of its own: other tests register primitives too, in whatever order they run.
SCRIPT = """
import importlib, sys
import jaxremat
from jaxremat._program import _compat
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError:  # of another version of JAX, or of another machine
        continue
print(*_compat.registered_primitives())
"""


def registered() -> frozenset[str]:
    """Return the names of all primitives that JAX compiles, once what registers them is imported."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *MODULES]
    return frozenset(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_each_primitive_has_a_rule_or_a_reason() -> None:
    names = registered()
    assert {"dot_general", "scan", "stack", "conv_general_dilated"} <= names
    unknown = names - RULES.keys() - BODIES - OPAQUE.keys()
    assert not unknown, f"no rule of axes, and no reason for having none: {sorted(unknown)}"


def test_no_primitive_has_both() -> None:
    assert not RULES.keys() & OPAQUE.keys()
    assert not (RULES.keys() | OPAQUE.keys()) & BODIES
