"""`search_plan`: the least memory for at most one more forward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import descent
from graphs import UNIT, chain

import jaxremat
from jaxremat import Chen, MinCut, RecomputeAll, simulate
from jaxremat._model._schedule import check
from jaxremat._solver import Sublinear
from jaxremat._solver._milp import Milp
from jaxremat.testing import check_solver, graphs

LAYERS, ROWS, WIDTH = 9, 512, 64


@descent
def train(weights: list[jax.Array], x: jax.Array) -> Any:
    y = x
    for w in weights:
        y = jnp.sin(y @ w)
    return jnp.mean(y**2)


def arguments() -> tuple[list[jax.Array], jax.Array]:
    weights = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) * 0.2 for i in range(LAYERS)]
    return weights, jax.random.normal(jax.random.key(99), (ROWS, WIDTH))


@pytest.mark.parametrize("name", graphs())
def test_at_most_one_more_forward_pass_on_every_graph(name: str) -> None:
    graph = graphs()[name]
    solver = Sublinear(MinCut())
    profile = simulate(graph, check(graph, solver.solve(graph, None, time_limit=10.0).schedule))
    plain = simulate(graph, jaxremat.close_over_dependencies(graph, graph.residuals))
    assert profile.extra_seconds <= max(solver.most_seconds(graph), plain.extra_seconds) * (1 + 1e-9)
    chen = simulate(graph, Chen().solve(graph, None, time_limit=10.0).schedule)
    if chen.extra_seconds <= solver.most_seconds(graph):
        assert profile.peak_nbytes <= chen.peak_nbytes
    assert profile.peak_nbytes <= plain.peak_nbytes


def test_memory_grows_with_the_root_of_the_depth() -> None:
    """Chen's bound on a chain of equal values, at about two roots and what the gradients take."""
    for n in (16, 36, 64):
        graph = chain(n)
        solver = Sublinear(MinCut())
        profile = simulate(graph, solver.solve(graph, None, time_limit=10.0).schedule)
        assert profile.extra_seconds <= n
        assert profile.peak_nbytes <= (2 * n**0.5 + 2) * UNIT


def test_an_exact_solver_does_better_than_the_papers_rule() -> None:
    graph = chain(9)
    profile = simulate(graph, Sublinear(Milp()).solve(graph, None, time_limit=10.0).schedule)
    chen = simulate(graph, Chen().solve(graph, None, time_limit=10.0).schedule)
    assert profile.peak_nbytes <= chen.peak_nbytes
    assert profile.extra_seconds <= 9.0


def test_it_keeps_the_rules_of_solvers() -> None:
    check_solver(Sublinear(RecomputeAll()))


def test_search_plan_and_cost() -> None:
    plan = jaxremat.search_plan(train, *arguments(), planning=jaxremat.Planning(solver=MinCut()))
    least = jaxremat.plan(train, *arguments(), budget="min", planning=jaxremat.Planning(solver=MinCut()))
    assert plan.solver == "sublinear"
    assert 0 < plan.overhead < 0.4  # the forward pass is about a third of the step
    assert plan.compiled_peak_nbytes is not None and least.compiled_peak_nbytes is not None
    assert least.compiled_peak_nbytes <= plan.compiled_peak_nbytes < plan.baseline_peak_nbytes
    step = jaxremat.optimize(plan=plan)(train)
    assert jaxremat.cost(step, *arguments()) == plan.compiled_peak_nbytes
    assert jaxremat.cost(train, *arguments()) == plan.baseline_peak_nbytes
    donating = jaxremat.cost(train, *arguments(), donate_argnums=0)
    assert donating == jaxremat.memory(train, *arguments(), donate_argnums=0).peak_nbytes
    planning = jaxremat.Planning(solver=MinCut(), verify=False)
    predicted = jaxremat.search_plan(train, *arguments(), allow=(), planning=planning)
    assert predicted.overhead < 0.4
