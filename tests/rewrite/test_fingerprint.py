"""What tells programs apart that differ in shapes, in numbers of iterations, and in more."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from chains import make_step

from jaxremat._model._variant import ROWS, Variant
from jaxremat._rewrite._fingerprint import Outline, fingerprint, region_names, structure
from jaxremat._rewrite._trace import Traced, trace


def chain(rows: int, activation: Callable[[jax.Array], jax.Array] = jnp.tanh) -> Traced:
    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 8
    return trace(jax.jit(make_step(activation)), (weights, jax.ShapeDtypeStruct((rows, 64), "float32")), {})


def scanned(length: int) -> Traced:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros((4, 8)), x)[0].sum()

    args = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((length, 4, 8), "float32")
    return trace(jax.jit(jax.grad(loss)), args, {})


def test_shapes_and_lengths_tell_no_structures_apart() -> None:
    for one, other in ((chain(1024), chain(960)), (scanned(16), scanned(24))):
        assert fingerprint(one) != fingerprint(other) and structure(one) == structure(other)
        assert Outline.of(one).numbers == Outline.of(other).numbers
    assert structure(chain(1024)) != structure(chain(1024, jnp.sin))
    assert (Outline.of(scanned(16)).lengths, Outline.of(scanned(24)).lengths) == ((16,), (24,))


def test_an_outline_is_read_as_it_was_written() -> None:
    traced = chain(65536)
    form = traced.in_form(Variant.of_rule(ROWS, {0: (4,)}))
    for each in (Outline.of(traced), Outline.of(form), Outline.of(scanned(16))):
        assert Outline.parse(str(each)) == each
    assert dict(Outline.of(form).rows) == {0: region_names(traced)[0]}
    assert Outline.of(form).starts[-1] == Outline.of(form).arguments + sum(
        len(eqn.outvars) for eqn in form.jaxpr.jaxpr.eqns
    )


def test_equations_are_matched_where_there_are_more_of_them() -> None:
    """Equal words are the first, the second and so on of both."""
    one = Outline(2, (), (), (("a", 1), ("b", 2), ("a", 1)))
    other = Outline(2, (), (), (("c", 1), ("a", 1), ("a", 1), ("a", 1), ("b", 1)))
    assert one.matches(other) == {0: 1, 2: 2}
    assert other.matches(one) == {1: 0, 2: 2}
    assert one.starts == [2, 3, 5, 6]
