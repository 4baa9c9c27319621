"""Where attention is found in a step, and what is left as it is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attentions import FOUND, HEADS, LENGTH, Attend, attending, masked, plain

from jaxremat._attention._finding import Site, attention
from jaxremat._rewrite._trace import trace


def sites(step: Callable[..., Any], *args: Any) -> list[Site]:
    traced = trace(jax.jit(step), args, {})
    return attention(traced.jaxpr, traced.program.scopes, traced.program.alive)


@pytest.mark.parametrize("attend", FOUND.values(), ids=FOUND)
def test_found_with_its_gradient(attend: Attend) -> None:
    case = attending(attend, layers=2)
    found = sites(case.step, *case.args)
    assert len(found) == 2
    for site in found:
        assert site.gradient is not None and None not in site.gradient.results
        for operand, gradient in zip(site.operands, site.gradient.results, strict=True):
            assert operand.aval.shape == gradient.aval.shape


def test_a_mask_of_places_is_read_from_nowhere() -> None:
    (site,) = sites(attending(masked).step, *attending(masked).args)
    assert site.leaves == ()
    assert [step.axis for step in site.pattern.before if step.axis is not None] == [2, 3]


def test_a_mask_is_read_where_it_is_smallest() -> None:
    """Before it is spread over heads and queries, and packed where it has bits."""
    case = attending(FOUND["padded"])
    (site,) = sites(case.step, *case.args)
    assert max(leaf.aval.size for leaf in site.leaves) <= 2 * LENGTH


def _returned(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v), weights


def _returning(weights: Any, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> Any:
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, w[i]) for i in range(3))
        mixed, seen = _returned(q, k, v)
        return (mixed**2).sum(), seen

    return jax.value_and_grad(loss, has_aux=True)(weights["into"][0])


def _penalised(weights: Any, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> Any:
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, w[i]) for i in range(3))
        mixed, seen = _returned(q, k, v)
        return (mixed**2).sum() + (seen**2).sum()

    return jax.value_and_grad(loss)(weights["into"][0])


def _learned_bias(weights: Any, x: jax.Array) -> Any:
    def loss(w: jax.Array, bias: jax.Array) -> Any:
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, w[i]) for i in range(3))
        seen = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        return (jnp.einsum("bhqk,bkhd->bqhd", seen, v) ** 2).sum()

    bias = jnp.zeros((HEADS, LENGTH, LENGTH)) + weights["back"][0, 0, 0]
    return jax.value_and_grad(loss, (0, 1))(weights["into"][0], bias)


def _of_no_softmax(weights: Any, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> Any:
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, w[i]) for i in range(3))
        seen = jax.nn.sigmoid(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return (jnp.einsum("bhqk,bkhd->bqhd", seen, v) ** 2).sum()

    return jax.value_and_grad(loss)(weights["into"][0])


def _over_queries(weights: Any, x: jax.Array) -> Any:
    """A softmax along the queries: no row of it is a row of the result."""

    def loss(w: jax.Array) -> Any:
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, w[i]) for i in range(3))
        seen = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=2)
        return (jnp.einsum("bhqk,bkhd->bqhd", seen, v) ** 2).sum()

    return jax.value_and_grad(loss)(weights["into"][0])


def _squared(weights: Any, x: jax.Array) -> Any:
    """What is multiplied is not linear in the softmax."""

    def loss(w: jax.Array) -> Any:
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, w[i]) for i in range(3))
        seen = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)) ** 2
        return (jnp.einsum("bhqk,bkhd->bqhd", seen, v) ** 2).sum()

    return jax.value_and_grad(loss)(weights["into"][0])


LEFT = (_returning, _penalised, _learned_bias, _of_no_softmax, _over_queries, _squared)


@pytest.mark.parametrize("step", LEFT, ids=lambda step: step.__name__.strip("_"))
def test_left_as_it_is(step: Callable[..., Any]) -> None:
    assert not sites(step, *attending(plain).args)


def test_left_where_scores_are_few() -> None:
    case = attending(plain, length=8)
    assert not sites(case.step, *case.args)
