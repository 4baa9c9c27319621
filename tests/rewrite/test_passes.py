"""Each pass changes nothing that is computed; passes can be watched and left out."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import zoo_checkpoints
import zoo_loops
from chains import make_step
from forms import of_levels
from zoo import ZOO, Case

from jaxremat._model._variant import ROWS, Variant
from jaxremat._rewrite._fingerprint import Outline, fingerprint, region_names, structure
from jaxremat._rewrite._flat_program import FlatProgram, with_eqns
from jaxremat._rewrite._passes import (
    FORM_PASSES,
    MERGING_PASSES,
    PASSES,
    PLAIN_PASSES,
    Pass,
    check,
    watched,
    without,
)
from jaxremat._rewrite._trace import Traced, trace

CASES = {
    **{case.name: case for case in ZOO},
    **{f"checkpoints, {name}": case for name, case in zoo_checkpoints.CHECKPOINTS.items()},
    **{f"loops, {name}": case for name, case in zoo_loops.LOOPS.items()},
}


def traced(case: Case) -> Traced:
    return trace(jax.jit(case.step, donate_argnums=case.donate_argnums), case.make_args(), {})


@pytest.mark.parametrize("name", CASES)
def test_each_pass_keeps_what_is_computed(name: str) -> None:
    ran: list[str] = []

    def checked(each: Pass, before: FlatProgram, after: FlatProgram) -> None:
        check(each, before, after)
        ran.append(each.name)

    with watched(checked):
        traced(CASES[name])
    assert {"equals", "levels", "loops", "order"} <= set(ran)


def test_a_pass_that_computes_something_else_is_found() -> None:
    step = traced(next(iter(zoo_loops.LOOPS.values())))
    program = step.program
    wrong = [
        eqn.replace(primitive=jax.lax.sub_p) if eqn.primitive is jax.lax.add_p else eqn
        for eqn in program.eqns
    ]
    with pytest.raises(AssertionError, match="the pass 'masks' changes what is computed"):
        check(PASSES[-1], program, program.with_same(with_eqns(program.closed, wrong)))


def test_variants_begin_where_equals_are_merged() -> None:
    """What does not depend on a variant runs once."""
    ran: list[str] = []
    with watched(lambda each, *_: ran.append(each.name)):
        step = traced(zoo_loops.LOOPS["layers"])
        plain, ran = ran, []
        step.in_form(of_levels((2, 2)))
        step.in_form(of_levels((2, 1)))
    assert set(plain) & {each.name for each in (*PLAIN_PASSES, *MERGING_PASSES)}
    assert set(ran) <= {each.name for each in FORM_PASSES}
    assert ran.count("levels") == 2


OPTIONAL = [each.name for each in PASSES if each.optional]


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_pass_can_be_left_out(name: str) -> None:
    ran: list[str] = []
    with without(name), watched(lambda each, *_: ran.append(each.name)):
        traced(zoo_checkpoints.CHECKPOINTS["accumulation"])
    assert name not in ran
    assert "order" in ran


def test_only_what_there_is_can_be_left_out() -> None:
    with pytest.raises(ValueError, match="called order; there are"), without("order"):
        pass


def test_names_are_distinct_and_laws_are_sentences() -> None:
    assert len({each.name for each in PASSES}) == len(PASSES)
    assert all(each.law.endswith(".") for each in PASSES)


def chain_of(rows: int, activation: Callable[[jax.Array], jax.Array] = jnp.tanh) -> Traced:
    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 8
    return trace(jax.jit(make_step(activation)), (weights, jax.ShapeDtypeStruct((rows, 64), "float32")), {})


def scanned(length: int) -> Traced:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros((4, 8)), x)[0].sum()

    args = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((length, 4, 8), "float32")
    return trace(jax.jit(jax.grad(loss)), args, {})


def test_shapes_and_lengths_tell_no_structures_apart() -> None:
    for one, other in ((chain_of(1024), chain_of(960)), (scanned(16), scanned(24))):
        assert fingerprint(one) != fingerprint(other) and structure(one) == structure(other)
        assert Outline.of(one).numbers == Outline.of(other).numbers
    assert structure(chain_of(1024)) != structure(chain_of(1024, jnp.sin))
    assert (Outline.of(scanned(16)).lengths, Outline.of(scanned(24)).lengths) == ((16,), (24,))


def test_an_outline_is_read_as_it_was_written() -> None:
    traced = chain_of(65536)
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
