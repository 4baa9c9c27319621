"""A loop divided in two, each with a plan of its own: the same results, whatever is saved in which, within budgets that
lie between two plans of the whole loop.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import updating
from comparing import assert_same
from forms import of_levels
from graphs import chain, in_loops
from jax import lax
from test_loops import CPU, in_levels, scans, traced
from zoo_loops import LAYERS, LOOPS, ROWS, WIDTH

import jaxremat
from jaxremat import Milp, Solution, close_over_dependencies, simulate
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Pin
from jaxremat._model._pins import with_pins
from jaxremat._model._variant import LOOP
from jaxremat._plan import _candidates
from jaxremat._plan._candidates import best_split
from jaxremat._program import _compat
from jaxremat._rewrite._flat_program import BACKWARD, FORWARD
from jaxremat._rewrite._trace import trace
from jaxremat._solver import _hull


def test_each_part_is_a_pair() -> None:
    """With their own lengths, on the rows of the same arrays."""
    found = traced(LOOPS["layers"])
    divided, planned = in_levels(found, (4,))
    assert [loop.role for loop in divided.loops] == [FORWARD, FORWARD, BACKWARD, BACKWARD]
    assert [eqn.params["length"] for eqn in scans(planned)] == [4, LAYERS - 4, LAYERS - 4, 4]
    first, second, second_back, first_back = scans(planned)
    for forward, backward in ((first, first_back), (second, second_back)):
        made = set(forward.outvars[_compat.scan_counts(forward)[1] :])
        length = forward.params["length"]
        assert [v.aval.shape for v in backward.invars if v in made] == [(length, ROWS, WIDTH)]


def test_each_part_saves_what_it_likes() -> None:
    divided = traced(LOOPS["layers"]).in_form(of_levels((2,)))
    graph = lower(divided, CPU, base_nbytes=0)
    for part, length in zip(graph.pairs, (2, LAYERS - 2), strict=True):
        products = [
            v
            for v in graph.residuals
            if graph.nodes[graph.values[v].producer].loop == part
            and graph.nodes[graph.values[v].producer].contraction
        ]
        assert products
        planned = emit(divided, graph, close_over_dependencies(graph, products))
        first, second, *_ = scans(planned)
        saving, other = (first, second) if length == 2 else (second, first)
        assert saving.params["length"] == length
        assert len(saving.outvars) == len(other.outvars) + len(products)


WIDE, DEPTH, BATCH = 64, 5, 512  # too short for levels


@updating
def heavy(params: Any, x: Any) -> Any:
    """A step whose loop has one choice, to save a product or not."""

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(jnp.sin(x) @ w) @ w.T, None

    return (lax.scan(layer, x, params)[0] ** 2).mean()


HEAVY = (
    jax.ShapeDtypeStruct((DEPTH, WIDE, WIDE), jnp.float32),
    jax.ShapeDtypeStruct((BATCH, WIDE), jnp.float32),
)


def planned(budget: int | str, **options: Any) -> jaxremat.Plan:
    planning = jaxremat.Planning(**options)
    return jaxremat.plan(heavy, *HEAVY, budget=budget, donate_argnums=0, planning=planning, allow=())


@pytest.mark.parametrize("verify", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_budgets_between_two_plans_divide_the_loop(verify: bool) -> None:
    """What is recomputed in some layers only costs less than what is recomputed in all."""
    least = planned("min", verify=verify)
    row_nbytes = 4 * BATCH * WIDE
    between = planned(int(least.peak_nbytes + 2.5 * row_nbytes), verify=verify)
    assert between.peak_nbytes <= between.budget_nbytes
    first, *_ = between.form.settings(LOOP)[0]
    assert 2 <= first < DEPTH, between.form
    assert between.overhead < 0.75 * least.overhead
    (form,) = between.loops
    assert (form.length, form.levels[0]) == (DEPTH, first) and "test_divided.py" in form.source
    said = f": split into {first}"
    assert said in str(between) and said in " ".join(between.report().html().split())
    loaded = jaxremat.Plan.from_json(between.to_json())
    args = [jax.random.normal(jax.random.key(i), a.shape) / 8 for i, a in enumerate(HEAVY)]
    want = jax.jit(heavy)(*args)
    assert_same(
        want,
        jaxremat.optimize(plan=loaded, donate_argnums=0, planning=jaxremat.Planning(verify=verify))(heavy)(
            *args
        ),
    )


def test_a_hint_holds_in_both_parts() -> None:
    @updating
    def step(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jaxremat.hint(jnp.tanh(x @ w), "recompute") @ w.T, None

        return (lax.scan(layer, x, params)[0] ** 2).mean()

    cut = trace(jax.jit(step, donate_argnums=0), HEAVY, {}).in_form(of_levels((5,)))
    graph = lower(cut, CPU, base_nbytes=0)
    parts = {graph.nodes[graph.values[v].producer].loop for v in graph.pinned["recompute"]}
    assert parts == set(graph.pairs)


def test_the_share_is_that_of_the_edge_of_the_hull() -> None:
    """With three quarters of what two plans of the whole loop differ in, three quarters of it have the larger; with
    nothing of it, the last iteration still recomputes nothing.
    """
    graph = replace(in_loops(chain(1), 8), step_seconds=1.0)
    everything, nothing = (Solution(close_over_dependencies(graph, saved)) for saved in (graph.residuals, ()))
    high, low = (simulate(graph, solution.schedule) for solution in (everything, nothing))
    assert low.peak_nbytes < high.peak_nbytes
    assert low.extra_seconds > high.extra_seconds
    budget = (low.peak_nbytes + 3 * high.peak_nbytes) // 4
    solution = Milp().solve(graph, budget, time_limit=5.0)
    found = best_split(graph, solution, budget, Milp(), 5.0)
    assert found is not None
    assert found.pair == 0
    assert found.share == pytest.approx(0.25, abs=0.01)
    last = (low.extra_seconds - high.extra_seconds) / 8  # which recomputes nothing
    assert found.seconds == pytest.approx((low.extra_seconds + 3 * high.extra_seconds) / 4 - last, rel=0.01)
    assert best_split(graph, nothing, low.peak_nbytes, Milp(), 5.0) == (0, 1.0, low.extra_seconds - last)
    assert best_split(graph, everything, high.peak_nbytes, Milp(), 5.0) is None
    assert best_split(chain(4), Solution(close_over_dependencies(chain(4), ())), 10**12, Milp(), 5.0) is None


@pytest.mark.parametrize("length", [2, 3])
def test_loops_too_short_for_two_parts_may_have_the_last_iteration_apart(length: int) -> None:
    graph = replace(in_loops(chain(1), length), step_seconds=1.0)
    nothing = Solution(close_over_dependencies(graph, ()))
    high, low = (simulate(graph, close_over_dependencies(graph, saved)) for saved in (graph.residuals, ()))
    for budget in range(low.peak_nbytes, high.peak_nbytes, (high.peak_nbytes - low.peak_nbytes) // 4):
        found = best_split(graph, nothing, budget, Milp(), 5.0)
        assert found is not None and found.share == 1.0


def test_what_is_pinned_to_be_recomputed_gains_nothing_apart() -> None:
    graph = replace(in_loops(chain(1), 8), step_seconds=1.0)
    graph = with_pins(graph, [Pin("recompute", v, "a hint") for v in graph.residuals])
    pinned = Solution(close_over_dependencies(graph, graph.residuals))
    assert not pinned.schedule.drops_nothing
    assert best_split(graph, pinned, 10**12, Milp(), 5.0) is None


def test_the_last_iteration_is_no_loop_and_recomputes_behind_its_carries() -> None:
    """The compiler would merge it with the forward pass: what it recomputes reads barrier names, and so does
    a carry.
    """
    cut = traced(LOOPS["layers"]).in_form(of_levels((LAYERS - 1,)))
    graph = lower(cut, CPU, base_nbytes=0)
    assert {v.length for v in graph.values} == {0, 1, LAYERS - 1}
    assert (
        graph.kept_by(next(v for v in graph.residuals if graph.values[v].length == 1), cut.loops[2].id) == -1
    )
    _, last, back, _ = scans(emit(cut, graph, close_over_dependencies(graph, ())))
    assert (last.params["length"], back.params["length"]) == (1, 1)
    body = back.params["jaxpr"].jaxpr
    fence = next(eqn for eqn in body.eqns if "barrier_" in _compat.name_stack_text(eqn))
    at = body.eqns.index(fence)
    again = [i for i, eqn in enumerate(body.eqns) if "recompute_" in _compat.name_stack_text(eqn)]
    assert again
    assert min(again) > at
    read = {a for i in again for a in _compat.variables(body.eqns[i].invars)}
    assert not read.isdisjoint(fence.outvars)
    carried = body.invars[_compat.scan_counts(back)[0] :]
    assert not set(carried).isdisjoint(fence.invars)
    stacked = [v for v in last.outvars if v.aval.shape[:1] == (1,)]
    assert stacked


def test_plans_that_need_the_same_are_no_two_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plans on both sides of a budget need equally much, a loop is all of the one or all of the other."""
    graph = in_loops(chain(6, size=4), 8)
    everything = Solution(close_over_dependencies(graph, graph.residuals))
    same = _hull.vertex(graph, everything)
    monkeypatch.setattr(_candidates, "edge", lambda *_: (same, same))
    found = best_split(graph, everything, 10**9, Milp(), 1.0)
    assert found is None or found.share == 1.0
