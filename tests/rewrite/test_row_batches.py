"""Indices that count rows are batch dimensions: the same entries, and work in chunks of rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxremat
from jaxremat._program._equivalence import Equivalence
from jaxremat._program._inline import Inliner
from jaxremat._rewrite._flat_program import with_eqns
from jaxremat._rewrite._row_batches import with_row_batches

X, ONE = jnp.arange(20.0).reshape(4, 5), jnp.array([0, -1, 4, 9])
SOME = jnp.array([[0, 1], [2, -9], [4, 4], [1, 1]])
CUBE, LABELS = jnp.arange(60.0).reshape(4, 3, 5), jnp.arange(12).reshape(4, 3) % 6


def squares(read: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return jax.grad(lambda *args: (read(*args) ** 2).sum())


@pytest.mark.parametrize(
    ("fn", "args", "count"),
    [
        (lambda x, i: x[jnp.arange(4), i], (X, ONE), 1),
        (squares(lambda x, i: x[jnp.arange(4), i]), (X, ONE), 2),
        (lambda x, i: x.at[jnp.arange(4)[:, None], i].get(mode="fill"), (X, SOME), 1),
        (lambda x, i: jnp.zeros_like(x).at[jnp.arange(4)[:, None], i].set(x[:, :2]), (X, SOME), 1),
        (lambda x, i: x.at[jnp.arange(4)[:, None], i].add(x[:, :2], mode="clip"), (X, SOME), 1),
        (lambda x, i: x.at[jnp.arange(4)[:, None], i].max(9.0), (X, SOME), 1),
        (squares(lambda x, i: x[jnp.arange(4)[:, None], jnp.arange(3)[None], i]), (CUBE, LABELS), 2),
        (lambda x, i: x[:, jnp.arange(3), i[0]], (CUBE, LABELS), 1),
        (lambda x, i: x[jnp.arange(4)[:, None], i % 3], (CUBE, LABELS), 1),
        # The other way round, from one on, of some rows alone, twice the same, or two places of data.
        (lambda x, i: x[jnp.arange(4)[::-1], i], (X, ONE), 0),
        (lambda x, i: x[jnp.arange(3) + 1, i[:3]], (X, ONE), 0),
        (lambda x, i: x[jnp.arange(3), i[:3]], (X, ONE), 0),
        (lambda x, i: x[jnp.arange(3), jnp.arange(3)], (X, ONE), 0),
        (lambda x, i: x[i % 4, jnp.arange(3), i % 5], (CUBE, LABELS), 0),
    ],
)
def test_the_same_entries(fn: Any, args: Any, count: int) -> None:
    closed = Inliner().program(jax.make_jaxpr(fn)(*args))
    changed = with_eqns(closed, with_row_batches(closed.jaxpr.eqns))
    others = zip(closed.jaxpr.eqns, changed.jaxpr.eqns, strict=True)
    assert sum(before is not after for before, after in others) == count
    np.testing.assert_array_equal(*(jex.jaxpr_as_fun(each)(*args)[0] for each in (closed, changed)))
    assert Equivalence(closed).difference(changed) is None


def test_another_row_is_no_such_index() -> None:
    """The proof tells rows from others."""

    def read(first: int) -> jex.ClosedJaxpr:
        return Inliner().program(jax.make_jaxpr(lambda x, i: x[jnp.arange(4)[:: 1 - 2 * first], i])(X, ONE))

    assert Equivalence(read(0)).difference(read(1)) is not None


WIDTH, LATENTS, EXAMPLES = 32, 2048, 2048


def sparse(p: Any, x: jax.Array) -> jax.Array:
    """A sparse autoencoder: the largest latents of each example, in their places."""
    best, places = lax.top_k(x @ p["in"], 8)
    latents = jnp.zeros((EXAMPLES, LATENTS)).at[jnp.arange(EXAMPLES)[:, None], places].add(jax.nn.relu(best))
    return ((latents @ p["out"] - x) ** 2).mean()


def step(p: Any, x: jax.Array) -> Any:
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(sparse)(p, x))


def test_rows_are_done_in_chunks() -> None:
    rng = np.random.default_rng(0)
    p = {
        "in": jnp.asarray(rng.normal(size=(WIDTH, LATENTS)), jnp.float32),
        "out": jnp.asarray(rng.normal(size=(LATENTS, WIDTH)), jnp.float32),
    }
    args = p, jnp.asarray(rng.normal(size=(EXAMPLES, WIDTH)), jnp.float32)
    planned = jaxremat.optimize("min")(step)
    plan = planned.plan(*args)
    assert plan.loops
    assert plan.memory is not None
    assert plan.memory.temporaries_nbytes < EXAMPLES * LATENTS * 4 / 2
    assert not plan.unproved
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), planned(*args), step(*args)
    )
