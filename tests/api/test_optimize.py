"""`optimize` over the zoo: the compiled peak keeps the budget, the results are the plain step's."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import assert_same, compile_plain, stripped
from zoo import BY_NAME, ZOO, Case

import jaxremat
from jaxremat import InfeasibleBudgetError, MemoryStats

pytestmark = pytest.mark.usefixtures("few_compilations")

SHARE = 0.6


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_budget_and_results(case: Case) -> None:
    args = case.make_args()
    plain = compile_plain(case, args)
    stats = MemoryStats.of(plain)
    budget = stats.base_nbytes + int(SHARE * stats.temporaries_nbytes)
    step = jaxremat.optimize(budget, donate_argnums=case.donate_argnums)(case.step)
    compiled = step.compile(*args)
    plan = step.plan(*args)
    peak = MemoryStats.of(compiled).peak_nbytes
    assert peak == plan.compiled_peak_nbytes
    assert peak <= budget == plan.budget_nbytes
    assert plan.baseline_peak_nbytes == pytest.approx(stats.peak_nbytes, rel=0.05)
    assert plan.stages
    # Which stack less than the plain step, or compute less again than its checkpoints do.
    assert plan.overhead >= 0 or case.name in ("scan", "own_checkpoint")
    assert "opt-barrier" in str(step.lower(*args).as_text("hlo"))
    want = plain(*jax.tree.map(lambda a: a.copy(), args))
    got = step(*args)
    assert_same(want, got)
    donated = [leaf for i in case.donate_argnums for leaf in jax.tree.leaves(args[i])]
    assert all(leaf.is_deleted() for leaf in donated)


def test_memory_is_the_compilers_number() -> None:
    case = BY_NAME["masks"]
    args = case.make_args()
    structs = jax.eval_shape(lambda: args)
    want = MemoryStats.of(compile_plain(case, args))
    assert jaxremat.memory(case.step, *args, donate_argnums=0) == want
    assert jaxremat.memory(jax.jit(case.step, donate_argnums=0), *structs) == want
    kept = want.arguments_nbytes + want.outputs_nbytes - want.aliased_nbytes
    assert want.peak_nbytes == kept + want.temporaries_nbytes


def test_a_step_of_loops_that_fits_costs_nothing() -> None:
    """Neither by the kernels, which are its own, nor by the model."""

    def step(weights: jax.Array, x: jax.Array) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            h, gate = jnp.tanh(x @ w), jax.nn.sigmoid(x @ w.T)
            summed, _ = jax.lax.scan(lambda c, a: (0.9 * c + a, c), jnp.zeros(16), h)
            return x + gate * summed, None

        def loss(weights: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    weights = jax.random.normal(jax.random.key(0), (3, 16, 16))
    plan = jaxremat.plan(step, weights, jnp.ones((32, 16)), budget="1GiB", donate_argnums=0)
    assert plan.drops_nothing
    assert (plan.overhead, plan.compiled_overhead, plan.gap) == (0, 0, 0)


@pytest.mark.parametrize("to_the_byte", [True, False])
def test_a_step_that_fits_is_left_alone(to_the_byte: bool) -> None:
    case = BY_NAME["nnx"]
    args = case.make_args()
    plain = compile_plain(case, args)
    budget = MemoryStats.of(plain).peak_nbytes if to_the_byte else "1TiB"
    step = jaxremat.optimize(budget, donate_argnums=case.donate_argnums)(case.step)
    compiled, plan = step.compile(*args), step.plan(*args)
    assert stripped(compiled) == stripped(plain)
    assert plan.drops_nothing
    assert (plan.overhead, plan.compiled_overhead, plan.gap) == (0, 0, 0)
    assert plan.compiled_peak_nbytes == plan.baseline_peak_nbytes == MemoryStats.of(plain).peak_nbytes
    assert_same(plain(*jax.tree.map(lambda a: a.copy(), args)), step(*args))


@pytest.mark.parametrize("to_the_byte", [True, False])
def test_checkpoints_of_its_own_that_fit_are_undone(to_the_byte: bool) -> None:
    """Where that needs no more memory than the step as written, and no more time."""
    case = BY_NAME["own_checkpoint"]
    args = case.make_args()
    plain = compile_plain(case, args)
    written = MemoryStats.of(plain).peak_nbytes
    step = jaxremat.optimize(written if to_the_byte else "1TiB", donate_argnums=case.donate_argnums)(
        case.step
    )
    compiled, plan = step.compile(*args), step.plan(*args)
    assert plan.baseline_peak_nbytes == written
    assert plan.compiled_peak_nbytes == MemoryStats.of(compiled).peak_nbytes <= written
    assert plan.overhead < 0
    assert_same(plain(*jax.tree.map(lambda a: a.copy(), args)), step(*args))


def test_more_budget_never_costs_more() -> None:
    case = BY_NAME["masks"]
    args = case.make_args()
    overheads = []
    for share in (45, 65, 85, 100):
        budget = f"{share}% of temporaries"
        overheads.append(jaxremat.plan(case.step, *args, budget=budget, donate_argnums=0).overhead)
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[0] > overheads[-1] == 0


def test_least_memory_and_what_lies_below() -> None:
    case = BY_NAME["mlp_adamw"]
    args = jax.eval_shape(case.make_args)
    least = jaxremat.plan(case.step, *args, budget="min", donate_argnums=0)
    assert least.compiled_peak_nbytes == least.budget_nbytes < least.baseline_peak_nbytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        jaxremat.plan(case.step, *args, budget=700_000, donate_argnums=0)
    error = caught.value
    assert error.budget_nbytes == 700_000
    assert error.min_peak_nbytes <= least.budget_nbytes
    message = str(error)
    assert "The budget 700000 cannot be met" in message
    assert f"at least {error.min_peak_nbytes} bytes" in message
    assert re.search(
        r"at \w+ \(\w+\.py:\d+ \(\w+\)\): arguments and outputs [\d.]+ [KM]iB, live values", message
    )
    assert "smaller batch" in message
    fits = jaxremat.plan(case.step, *args, budget=error.min_peak_nbytes, donate_argnums=0)
    assert fits.compiled_peak_nbytes is not None
    assert fits.compiled_peak_nbytes <= error.min_peak_nbytes
