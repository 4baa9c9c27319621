"""The law of rows: what chunks of them give is what the whole gives, side by side or added up."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxremat._program._inline import Inliner
from jaxremat._rewrite._row_rules import ways


def floats(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def integers(*shape: int, below: int = 4) -> Any:
    return jax.random.randint(jax.random.key(1), shape, 0, below)


X = floats(4, 6, 8)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "pointwise": (lambda x, y: x * y, (X, X), 3),
    "of one entry": (lax.mul, (X, floats(4, 1, 8)), 3),
    "select": (lambda x, y: lax.select_n(x > 0, x, y), (X, X), 3),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 2, 6), (0, 2)), (floats(4, 6),), 3),
    "broadcast one": (lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), (floats(1, 6),), 2),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, (4, 6), 1), (floats(4, 6),), 2),
    "merge": (lambda x: x.reshape(24, 8), (X,), 2),
    "unmerge": (lambda x: x.reshape(4, 6, 4, 2), (X,), 3),
    "transpose": (lambda x: x.transpose(1, 2, 0), (X,), 3),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (floats(4, 1, 6),), 2),
    "sum": (lambda x: lax.reduce_sum(x, (1,)), (X,), 3),
    "sum of short": (lambda x: lax.reduce_sum(x, (0, 2)), (X.astype(jnp.float16),), 3),
    "max": (lambda x: lax.reduce_max(x, (2,)), (X,), 2),
    "argmax": (lambda x: lax.argmax(x, 2, jnp.int32), (X,), 2),
    "cumsum": (lambda x: lax.cumsum(x, axis=1), (X,), 2),
    "sort": (lambda x: lax.sort(x, dimension=1), (X,), 2),
    "top_k": (lambda x: lax.top_k(x, 2), (X,), 2),
    "split": (lambda x: lax.split(x, (2, 4), axis=1), (X,), 2),
    "rev": (lambda x: lax.rev(x, (1,)), (X,), 2),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, X), 2),
    "pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0), (0, 0, 0))), (X,), 2),
    "slice": (lambda x: x[:, 1:3], (X,), 2),
    "product": (lambda x, y: x @ y, (X, floats(8, 10)), 4),
    "batched product": (lambda x, y: jnp.einsum("btd,bsd->bts", x, y), (X, floats(4, 2, 8)), 4),
    "short product": (lambda x, y: x.T @ y, (floats(8, 6).astype(jnp.bfloat16),) * 2, 3),
    "convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (floats(4, 5, 5, 2), floats(3, 3, 2, 6)),
        2,
    ),
    "rows of a table": (lambda x, i: x[i], (floats(10, 6), integers(4, 2)), 3),
    "an entry of each row": (
        lambda x, i: jnp.take_along_axis(x, i[..., None], -1, mode="promise_in_bounds"),
        (X, integers(4, 6)),
        2,
    ),
    "columns": (lambda x, i: jnp.take(x, i, axis=1, mode="clip"), (X, integers(2)), 3),
    "scattered to a table": (lambda x, i, u: x.at[i].add(u), (floats(10, 6), integers(4, 2), floats(4, 2, 6)), 3),
    "scattered to rows": (
        lambda x, i: jax.vjp(lambda x: jnp.take_along_axis(x, i[..., None], -1), x)[1](floats(4, 6, 1))[0],
        (X, integers(4, 6)),
        2,
    ),
}  # fmt: skip


def part(a: Any, dimension: int | None, chunk: int, chunks: int) -> Any:
    if dimension is None:
        return a
    size = a.shape[dimension] // chunks
    return lax.slice_in_dim(a, chunk * size, (chunk + 1) * size, axis=dimension)


@pytest.mark.parametrize("case", CASES)
def test_chunks_give_what_the_whole_gives(case: str) -> None:
    fn, args, least = CASES[case]
    flat = Inliner().program(jax.make_jaxpr(fn)(*args))
    env = dict(zip(flat.jaxpr.invars, args, strict=True))
    env.update(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    seen = 0
    for eqn in flat.jaxpr.eqns:
        operands = [a.val if hasattr(a, "val") else env[a] for a in eqn.invars]
        results = eqn.primitive.bind(*operands, **eqn.params)
        wholes = list(results) if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, wholes, strict=True))
        for way in ways(eqn):
            placed = zip([*operands, *wholes], [*way.operands, *way.results], strict=True)
            if any(d is not None and np.shape(a)[d] % 2 for a, d in placed):
                continue
            seen += 1
            made: list[list[Any]] = []
            for chunk in range(2):
                parts = [part(a, d, chunk, 2) for a, d in zip(operands, way.operands, strict=True)]
                if way.summed and eqn.primitive.name == "scatter-add" and made:
                    parts[0] = made[-1][0]
                found = eqn.primitive.bind(*parts, **way.in_chunk(eqn, 2))
                made.append(list(found) if eqn.primitive.multiple_results else [found])
            for whole, d, first, second in zip(wholes, way.results, *made, strict=True):
                if d is not None:
                    got = jnp.concatenate([first, second], d)
                elif eqn.primitive.name == "scatter-add":
                    got = second
                else:
                    got = first + second
                assert got.shape == whole.shape
                np.testing.assert_allclose(
                    np.asarray(got, np.float32), np.asarray(whole, np.float32), rtol=2e-2, atol=1e-2
                )
    assert seen >= least


def test_sums_of_short_products_are_added_up_in_long_numbers() -> None:
    x = floats(8, 6).astype(jnp.bfloat16)
    (eqn,) = (e for e in jax.make_jaxpr(lambda x: lax.dot_general(x, x, (((0,), (0,)), ((), ()))))(x).eqns)
    (summed,) = (way for way in ways(eqn) if way.summed)
    assert summed.in_chunk(eqn, 2)["preferred_element_type"] == jnp.float32


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.cumsum(x, axis=0),
        lambda x: lax.sort(x, dimension=0),
        lambda x: lax.rev(x, (0,)),
        lambda x: lax.reduce_max(x, (0,)),
        lambda x: x[1:],
        lambda x: lax.pad(x, 0.0, ((1, 0, 0),)),
    ],
)
def test_what_mixes_rows_has_no_way(fn: Callable[[Any], Any]) -> None:
    for eqn in jax.make_jaxpr(fn)(floats(6)).eqns:
        assert not list(ways(eqn)), eqn
