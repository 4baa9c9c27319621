"""Pairs of scans inside of pairs inlined: the same results, and less memory than what an outer iteration stacks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import assert_computes, compile_plain
from jax import lax
from test_loops import CPU, check_budget, emitted
from test_trace import assert_well_formed, normal, runnable
from zoo import Case, _sgd

import jaxremat
from jaxremat import InfeasibleBudgetError, MemoryStats
from jaxremat._lower._lower import lower
from jaxremat._model._variant import INNER, Choice, Variant
from jaxremat._rewrite._flat_program import BACKWARD, FORWARD, UNPAIRED
from jaxremat._rewrite._inner_loops import fewer_nbytes, inner_pairs
from jaxremat._rewrite._trace import Traced, trace

pytestmark = pytest.mark.usefixtures("few_compilations")

ROWS, WIDTH, STEPS, LAYERS = 128, 32, 6, 3
OPEN = Variant.of(Choice(INNER, 0, (1,)))

Layer = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


def _inner(p: Any, x: jax.Array, **options: Any) -> jax.Array:
    def body(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        h = jax.nn.softplus(jnp.tanh(x @ p["a"]) @ p["b"])
        return x + jnp.sin(h), None

    return lax.scan(body, x, None, STEPS, **options)[0]


def _simple(p: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return _inner(p, x), None


def _backwards(p: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return _inner(p, x, reverse=True), None


def _closed_over(p: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """The inner scan reads what the layer makes as a constant, as its first carry and slice by slice."""
    start, gate = jax.nn.gelu(x @ p["a"]), jax.nn.softmax(x @ p["b"])
    rows = jnp.stack([jnp.tanh(start[: ROWS // 2] * k) for k in range(STEPS)])

    def body(c: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jax.nn.softplus(jnp.tanh(c @ p["a"] + start) @ p["b"]) * gate
        return c + h, jnp.sum(h[: ROWS // 2] * row, axis=0)

    c, sums = lax.scan(body, start, rows)
    return jnp.sin(c @ p["b"]) + x + gate, sums


def _two(p: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return _inner(p, jnp.tanh(_inner(p, x))), None


def _checkpointed(p: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return jax.checkpoint(_closed_over)(p, x)


def _params() -> dict[str, jax.Array]:
    return {k: normal(LAYERS, WIDTH, WIDTH, seed=i) * WIDTH**-0.5 for i, k in enumerate("ab")}


def _case(name: str, layer: Layer) -> Case:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, made = lax.scan(lambda x, p: layer(p, x), batch, params)
        return jnp.mean(x**2) + sum(jnp.mean(leaf**2) for leaf in jax.tree.leaves(made))

    return Case(name, _sgd(loss), lambda: (_params(), normal(ROWS, WIDTH, seed=5)))


def _accumulated() -> Case:
    """Gradients of two batches, one after the other."""

    def step(params: Any, batches: jax.Array) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            x, _ = lax.scan(lambda x, p: jax.checkpoint(_simple)(p, x), batch, params)
            return jnp.mean(x**2)

        def add(total: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, batch)
            return jax.tree.map(jnp.add, total, grads), value

        total, values = lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total), jnp.mean(values)

    return Case("accumulated", step, lambda: (_params(), normal(2, ROWS, WIDTH, seed=5)))


CASES = {
    case.name: case
    for case in (
        _case("plain", _simple),
        _case("checkpoint around the inner loop", lambda p, x: jax.checkpoint(_simple)(p, x)),
        _case("backwards", _backwards),
        _case("closed over", _closed_over),
        _case("closed over, checkpoint", _checkpointed),
        _case("two", _two),
        _accumulated(),
    )
}


def plain(case: Case) -> Traced:
    return trace(jax.jit(case.step, donate_argnums=case.donate_argnums), case.make_args(), {})


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_same_whatever_is_saved(name: str) -> None:
    case = CASES[name]
    opened, args = plain(case).in_form(OPEN), case.make_args()
    assert_well_formed(opened)
    nested = [
        loop for loop in opened.loops if loop.parent >= 0 and opened.loops[loop.parent].role != UNPAIRED
    ]
    assert [loop.role for loop in nested] == [FORWARD, BACKWARD] * (2 if name == "two" else 1)
    assert all(opened.loops[loop.parent].role == BACKWARD for loop in nested)
    for closed in (runnable(opened), emitted(opened, []), emitted(opened, ["dot_general", "tanh"])):
        assert_computes(closed, case.step, args)


def test_what_the_inner_loop_reads_is_recomputed_in_the_loop_around() -> None:
    """A softmax of the layer that all inner iterations read is made again once for them all, not in each."""
    opened = plain(CASES["closed over"]).in_form(OPEN)
    outer = next(loop for loop in opened.loops if loop.role == BACKWARD and loop.parent < 0)
    graph = lower(opened, CPU, base_nbytes=0)
    around = {n.loop for n in graph.nodes if n.primitive == "reshape" and not n.forward and n.loop >= 0}
    assert around == {outer.id}
    read = {v for n in graph.nodes if n.loop > outer.id for v in graph.reads[n.id]}
    lengths = [
        graph.values[v].length for v in read if graph.nodes[graph.values[v].producer].loop == outer.group
    ]
    assert not any(lengths)  # nothing of the outer forward loop is read by its own name


def test_inner_pairs_and_what_they_stack() -> None:
    found = plain(CASES["plain"])
    jaxpr = found.jaxpr.jaxpr
    assert len(inner_pairs(jaxpr.eqns, found.loop_of, found.loops)) == 1
    entries = ROWS * WIDTH * STEPS * 4
    assert fewer_nbytes(jaxpr.eqns, inner_pairs(jaxpr.eqns, found.loop_of, found.loops)) >= 2 * entries
    opened = found.in_form(OPEN)
    assert not inner_pairs(opened.jaxpr.jaxpr.eqns, opened.loop_of, opened.loops)


@pytest.mark.parametrize("name", ["checkpoint around the inner loop", "closed over, checkpoint"])
def test_less_memory_than_an_outer_iteration_stacks(name: str) -> None:
    """As written an outer iteration stacks all that its inner loop's way back reads; that may be recomputed too."""
    case = CASES[name]
    plan = check_budget(case, 0.6)
    assert plan.form.settings(INNER)
    assert "inner loop of 6 iterations at test_inner_loops.py" in str(plan)
    loaded = jaxremat.Plan.from_json(plan.to_json())
    assert loaded.loops == plan.loops
    again = jaxremat.optimize(plan=loaded, donate_argnums=case.donate_argnums)(case.step)
    found = again.plan(*case.make_args())
    assert (found.form, found.compiled_peak_nbytes) == (plan.form, plan.compiled_peak_nbytes)


def test_an_inner_loop_stays_as_it_is_where_that_fits() -> None:
    """Whether its outer loop takes its updates along or not: both cost less than the plain step, and about the same."""
    plan = check_budget(CASES["plain"], 0.7)
    assert not plan.form.settings(INNER)
    assert not any(form.inner for form in plan.loops)
    assert plan.overhead < 0


def test_the_least_is_named_in_that_form() -> None:
    case = CASES["checkpoint around the inner loop"]
    args = case.make_args()
    stats = MemoryStats.of(compile_plain(case, args))
    with pytest.raises(InfeasibleBudgetError) as error:
        jaxremat.plan(case.step, *args, budget=stats.base_nbytes, donate_argnums=case.donate_argnums)
    assert error.value.min_peak_nbytes < stats.base_nbytes + 0.7 * stats.temporaries_nbytes
