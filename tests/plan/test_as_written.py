"""The step as its user wrote it is a plan too: nothing that is returned or refused is worse."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import descent
from comparing import assert_same

import jaxremat
from jaxremat import InfeasibleBudgetError, MemoryStats

WIDTH, LAYERS, BATCH = 64, 4, 2048


def make_step(remat: bool, least: bool = False) -> Any:
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T)

    own: Any = jax.checkpoint(block) if remat else block

    @descent
    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        y = x
        for w in weights:
            y = own(y, w)
        return jnp.mean(y**2)

    return step


def make_args() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [0.1 * jax.random.normal(k, (WIDTH, 4 * WIDTH)) for k in keys[1:]]
    return weights, jax.random.normal(keys[0], (BATCH, WIDTH))


def written(remat: bool) -> tuple[int, float]:
    """Its compiled peak and arithmetic."""
    jitted = jax.jit(make_step(remat), donate_argnums=0)
    compiled = jitted.lower(*make_args()).compile(compiler_options=jaxremat.compiler_options("cpu"))
    return MemoryStats.of(compiled).peak_nbytes, flops(compiled)


def flops(compiled: Any) -> float:
    return compiled.cost_analysis()["flops"]


PEAK, FLOPS = written(True)
PLAIN_PEAK, PLAIN_FLOPS = written(False)


@pytest.mark.parametrize(
    "budget", [PEAK, (PEAK + PLAIN_PEAK) // 2, 2 * PLAIN_PEAK], ids=["own", "more", "much"]
)
def test_what_fits_as_written_is_a_good_deal_cheaper_when_planned(budget: int) -> None:
    """In no more memory than the checkpoints take, little more than half of what they compute again is enough."""
    step = jaxremat.optimize(budget, donate_argnums=0)(make_step(True))
    compiled, plan = step.compile(*make_args()), step.plan(*make_args())
    assert MemoryStats.of(compiled).peak_nbytes <= PEAK
    assert flops(compiled) - PLAIN_FLOPS <= 0.55 * (FLOPS - PLAIN_FLOPS)
    assert plan.overhead < 0
    assert plan.baseline_peak_nbytes == PEAK
    assert_same(jax.jit(make_step(True))(*make_args()), step(*make_args()))


@pytest.mark.parametrize(
    "allow",
    [
        pytest.param((), id="recomputing"),
        pytest.param(jaxremat.EXACT, id="microbatches too", marks=pytest.mark.slow),
    ],
)
def test_the_least_is_the_same_with_and_without_checkpoints(allow: tuple[str, ...]) -> None:
    """Within a twentieth; in microbatches, of which each array is one, within a fiftieth of the plain step's peak."""
    own, plain = (
        jaxremat.plan(
            make_step(remat),
            *make_args(),
            budget="min",
            donate_argnums=0,
            planning=jaxremat.Planning(planning_seconds=600, time_limit=6),
            allow=allow,
        ).peak_nbytes
        for remat in (True, False)
    )
    assert own <= PEAK
    assert abs(own - plain) <= (0.02 * PLAIN_PEAK if allow else 0.05 * plain)


def test_no_refusal_names_more_than_the_step_as_written_needs() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        jaxremat.plan(make_step(True), *make_args(), budget=PEAK // 3, donate_argnums=0, allow=())
    assert caught.value.min_peak_nbytes <= PEAK


def small(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def test_a_refusal_names_what_the_least_plan_needs() -> None:
    """Forms that were passed over on the way to the refusal are looked at for it too."""

    @descent
    def step(weights: jax.Array, x: jax.Array) -> Any:
        y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(jax.nn.gelu(y @ w) @ w.T), None), x, weights)
        return jnp.mean(y**2)

    args = (0.1 * jnp.ones((12, WIDTH, 4 * WIDTH)), jnp.ones((256, WIDTH)))
    own: Any = {"donate_argnums": 0, "planning": jaxremat.Planning(planning_seconds=600, time_limit=30)}
    least = jaxremat.plan(step, *args, budget="min", **own).peak_nbytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        jaxremat.plan(step, *args, budget=least // 2, **own)
    assert caught.value.min_peak_nbytes <= least


def test_the_least_of_a_tiny_step_is_at_most_what_it_needs_anyway() -> None:
    args = (jnp.ones((4, 4)), jnp.ones((4, 4)))
    compiled = (
        jax.jit(small, donate_argnums=0)
        .lower(*args)
        .compile(compiler_options=jaxremat.compiler_options("cpu"))
    )
    plan = jaxremat.plan(small, *args, budget="min", donate_argnums=0)
    assert plan.peak_nbytes <= MemoryStats.of(compiled).peak_nbytes


def test_a_refusal_says_that_a_step_is_tiny() -> None:
    args = (jnp.ones((4, 4)), jnp.ones((4, 4)))
    with pytest.raises(
        InfeasibleBudgetError, match=r"With \d+ B of temporaries, the step is too small to plan well"
    ):
        jaxremat.plan(small, *args, budget=100, donate_argnums=0)
    with pytest.raises(InfeasibleBudgetError) as caught:
        jaxremat.plan(
            make_step(False),
            *make_args(),
            budget=1000,
            donate_argnums=0,
            planning=jaxremat.Planning(verify=False),
        )
    assert "too small" not in str(caught.value)


def test_checkpoints_that_are_kept_are_kept_as_written() -> None:
    step = jaxremat.optimize(PEAK, donate_argnums=0, planning=jaxremat.Planning(respect_checkpoint=True))(
        make_step(True)
    )
    assert step.plan(*make_args()).overhead == 0.0
    assert flops(step.compile(*make_args())) == FLOPS
