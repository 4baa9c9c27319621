"""`workspace_margin`: what stays free below the budget, how it is written, and what is refused."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import train

import jaxremat
from jaxremat import ArgumentError, BudgetError, InfeasibleBudgetError, MemoryStats, Plan
from jaxremat._runtime._budgets import parse_margin

WIDTH, LAYERS = 32, 6
ARGS = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS,
    jax.ShapeDtypeStruct((512, WIDTH), jnp.float32),
)


@pytest.fixture(scope="module")
def plain() -> MemoryStats:
    return jaxremat.memory(train, *ARGS)


def planned(budget: Any, margin: Any, **options: Any) -> Plan:
    planning = jaxremat.Planning(workspace_margin=margin, **options)
    return jaxremat.plan(train, *ARGS, budget=budget, planning=planning)


@pytest.mark.parametrize(
    ("margin", "nbytes"),
    [(0, 0), (0.0, 0), (17, 17), ("1KiB", 1024), (0.25, 250_000), ("1e3", 1000), (2.0, 2)],
)
def test_spellings(margin: Any, nbytes: int) -> None:
    assert parse_margin(margin, 1_000_000) == nbytes


@pytest.mark.parametrize("margin", [-1, "much", -0.5, True, None, float("nan"), 1.5])
def test_refused_where_written(margin: Any) -> None:
    with pytest.raises(BudgetError, match="not a number of bytes"):
        jaxremat.optimize("1GiB", planning=jaxremat.Planning(workspace_margin=margin))


def test_nothing_would_be_left() -> None:
    with pytest.raises(
        BudgetError, match=r"keeps 2.00 GiB free, but the budget is 1.00 GiB. Write a smaller"
    ):
        planned("1GiB", "2GiB")


@pytest.mark.parametrize("share", [False, True])
def test_the_compiled_peak_leaves_it_free(plain: MemoryStats, share: bool) -> None:
    budget = plain.peak_nbytes + 1000  # the plain step fits, and leaves too little free
    margin = plain.temporaries_nbytes // 3
    plan = planned(budget, margin / budget if share else margin)
    assert abs(plan.margin_nbytes - margin) <= share
    assert plan.budget_nbytes == budget
    assert plan.compiled_peak_nbytes is not None
    assert plan.compiled_peak_nbytes <= budget - plan.margin_nbytes < plain.peak_nbytes
    assert not plan.drops_nothing
    assert f"{jaxremat.format_nbytes(plan.margin_nbytes)} of it kept free" in str(plan)
    without = jaxremat.plan(train, *ARGS, budget=budget)
    assert without.margin_nbytes == 0 and without.drops_nothing
    assert "kept free" not in str(without)


def test_a_step_that_fits_with_it_is_left_alone(plain: MemoryStats) -> None:
    plan = planned(plain.peak_nbytes + 1000, 1000)
    assert plan.drops_nothing and plan.compiled_peak_nbytes == plain.peak_nbytes
    assert (plan.budget_nbytes, plan.margin_nbytes) == (plain.peak_nbytes + 1000, 1000)


def test_the_least_budget_includes_it(plain: MemoryStats) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        planned(plain.base_nbytes + 5000, 4000)
    error = caught.value
    assert error.budget_nbytes == plain.base_nbytes + 5000
    assert f"at least {error.min_peak_nbytes + 4000} bytes" in str(error)
    enough = error.min_peak_nbytes + 4000
    plan = planned(enough, 4000)
    assert plan.compiled_peak_nbytes is not None and plan.compiled_peak_nbytes <= error.min_peak_nbytes


def test_a_plan_carries_its_own(plain: MemoryStats) -> None:
    plan = planned(plain.peak_nbytes, 0.2)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    step = jaxremat.optimize(plan=again)(train)
    assert MemoryStats.of(step.compile(*ARGS)).peak_nbytes == plan.compiled_peak_nbytes
    with pytest.raises(ArgumentError, match="`workspace_margin` is an option of planning"):
        jaxremat.optimize(plan=again, planning=jaxremat.Planning(workspace_margin=1))
    more = Plan.from_json(
        json.dumps({**json.loads(plan.to_json()), "margin_nbytes": plain.temporaries_nbytes})
    )
    with pytest.raises(InfeasibleBudgetError, match="this machine's compiler needs"):
        jaxremat.optimize(plan=more)(train).plan(*ARGS)


def test_the_least_peak_has_no_margin() -> None:
    with pytest.raises(ArgumentError, match='"min" is no such limit'):
        jaxremat.optimize("min", planning=jaxremat.Planning(workspace_margin=1))


def test_an_unverified_plan_leaves_it_free(plain: MemoryStats) -> None:
    plan = planned(plain.peak_nbytes, 0.3, verify=False)
    assert plan.predicted_peak_nbytes <= plain.peak_nbytes - plan.margin_nbytes
