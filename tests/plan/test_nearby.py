"""Plans made from those of steps that differ in shapes alone: what they cost, when they are taken, and when not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import make_step
from comparing import assert_same

import jaxremat
from jaxremat import JaxrematWarning, Plan, PlanMismatchError
from jaxremat._compiler._memory_stats import MemoryStats
from jaxremat._compiler._program import Program
from jaxremat._model._variant import COPIES, PLAIN, Variant
from jaxremat._plan import _nearby
from jaxremat._plan._nearby import MORE, _Neighbour

WEIGHTS = [jnp.full((64, 64), 0.01, jnp.float32)] * 8


def batch(rows: int) -> jax.Array:
    return jnp.linspace(-1.0, 1.0, 64 * rows, dtype=jnp.float32).reshape(rows, 64)


def budget_of(rows: int, share: float = 0.8) -> int:
    needs = jaxremat.memory(make_step(), WEIGHTS, batch(rows))
    return needs.base_nbytes + int(share * needs.temporaries_nbytes)


class Counting(jaxremat.Milp):
    """Counts its solves."""

    solves = 0

    def solve(self, *args: Any, **kwargs: Any) -> Any:
        type(self).solves += 1
        return super().solve(*args, **kwargs)


def step(budget: Any, **options: Any) -> Any:
    like = {"like": options.pop("like")} if "like" in options else {}
    planning = jaxremat.Planning(**options)
    return jaxremat.optimize(budget, planning=planning, allow=(), **like)(make_step())


@pytest.fixture(scope="module")
def plan() -> Plan:
    """For 1,024 rows."""
    found = step(budget_of(1024)).plan(WEIGHTS, batch(1024))
    assert not found.drops_nothing and not found.like
    return found


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, int]]:
    """Compilations, of whatever, and solves so far."""
    compiled: list[Any] = []
    own = Program._compiled

    def counted(self: Program, *given: Any) -> Any:
        compiled.append(self)
        return own(self, *given)

    monkeypatch.setattr(Program, "_compiled", counted)
    monkeypatch.setattr(Counting, "solves", 0)
    return lambda: (len(compiled), Counting.solves)


@pytest.mark.parametrize("rows", [1000, 2048, 640])
def test_another_batch_size_takes_two_compilations_and_a_solve_at_most(
    plan: Plan, rows: int, work: Callable[[], tuple[int, int]], tmp_path: Path
) -> None:
    """It is certified by the compiler, and computes what the plain step does."""
    plan.save(tmp_path / "plan.json")
    budget = budget_of(rows)
    made = step(budget, like=tmp_path / "plan.json", solver=Counting())
    before = work()[0]
    found = made(WEIGHTS, batch(rows))
    compilations, solves = work()
    assert compilations - before <= 2 and solves <= 1
    other = made.plan(WEIGHTS, batch(rows))
    assert other.like == plan.fingerprint != other.fingerprint
    assert (
        other.compiled_peak_nbytes == MemoryStats.of(made.compile(WEIGHTS, batch(rows))).peak_nbytes <= budget
    )
    assert 0 < other.overhead <= plan.overhead + MORE and other.compiled_overhead is None
    assert f"made from the plan {plan.fingerprint[:12]}" in str(other) and "needs about" in str(other)
    assert f"f32[{rows},64]" in {a.shape for a in other.actions}
    assert_same(jax.jit(make_step())(WEIGHTS, batch(rows)), found)
    again = jaxremat.optimize(plan=Plan.from_json(other.to_json()))(make_step())
    assert again.plan(WEIGHTS, batch(rows)).compiled_peak_nbytes == other.compiled_peak_nbytes


def test_a_step_takes_its_own_plan_for_the_last_batch(work: Callable[[], tuple[int, int]]) -> None:
    made = step(budget_of(1024), solver=Counting())
    first = made.plan(WEIGHTS, batch(1024))
    compilations, solves = work()
    last = made.plan(WEIGHTS, batch(960))
    assert last.like == first.fingerprint
    assert work()[0] - compilations <= 2 and work()[1] - solves <= 1
    assert last.compiled_peak_nbytes is not None and last.compiled_peak_nbytes <= first.budget_nbytes
    fresh = step(budget_of(1024), like=False)
    fresh.plan(WEIGHTS, batch(1024))
    assert not fresh.plan(WEIGHTS, batch(960)).like
    thorough = step(budget_of(1024), effort="thorough")
    thorough.plan(WEIGHTS, batch(1024))
    assert not thorough.plan(WEIGHTS, batch(960)).like


@pytest.mark.parametrize("share", ["", "60% of temporaries"])
def test_the_cache_has_neighbours(folder: Path, share: str) -> None:
    budget, other = (share, "59% of temporaries") if share else (budget_of(1024), budget_of(1024) - 64)
    first = step(budget).plan(WEIGHTS, batch(1024))
    last = step(budget).plan(WEIGHTS, batch(960))
    assert last.like == first.fingerprint
    assert step(budget).plan(WEIGHTS, batch(960)) == last  # which is in the cache now
    assert not step(budget, like=False).plan(WEIGHTS, batch(960)).like
    assert not step(other).plan(WEIGHTS, batch(960)).like, "another budget's plan is no neighbour"


def test_what_costs_more_than_its_neighbour_is_planned_afresh_where_another_form_promises_more(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that is slower than the neighbour's is taken unless another form promises a good deal less."""
    tight = budget_of(1024, 0.7)
    assert step(tight, like=plan).plan(WEIGHTS, batch(1024)).like
    monkeypatch.setattr(_nearby, "MORE", 0.0)
    found = step(tight, like=plan).plan(WEIGHTS, batch(1024))
    assert found.like and found.overhead > plan.overhead, "nothing promises to cost half as much"
    monkeypatch.setattr(_Neighbour, "_promised", lambda *_: PLAIN)
    assert not step(tight, like=plan).plan(WEIGHTS, batch(1024)).like


def test_what_the_neighbours_plan_cannot_fit_is_planned_afresh(plan: Plan) -> None:
    tight = budget_of(2048, 0.45)
    with pytest.raises(jaxremat.InfeasibleBudgetError) as afresh:
        step(tight // 2, like=False).plan(WEIGHTS, batch(2048))
    with pytest.raises(jaxremat.InfeasibleBudgetError) as refused:
        step(tight // 2, like=plan).plan(WEIGHTS, batch(2048))
    assert refused.value.min_peak_nbytes == afresh.value.min_peak_nbytes


def test_what_fits_as_written_is_left_so(plan: Plan) -> None:
    found = step(plan.budget_nbytes, like=plan).plan(WEIGHTS, batch(128))
    assert found.drops_nothing and not found.like


def test_the_least_memory_is_looked_for(plan: Plan) -> None:
    assert not step("min", like=plan).plan(WEIGHTS, batch(1000)).like


def test_a_plan_of_another_step_is_no_neighbour(plan: Plan) -> None:
    planned = jaxremat.optimize(plan.budget_nbytes, like=plan)(make_step(jnp.sin))
    with pytest.warns(JaxrematWarning, match="`like`: the plan of `train` has other equations"):
        assert not planned.plan(WEIGHTS, batch(1024)).like


def test_a_form_that_is_not_allowed_is_not_taken_over(plan: Plan) -> None:
    """A neighbour's plan may have been made with another `allow`."""
    rounded = replace(plan, form=Variant.of_rule(COPIES, {0: (1,)}))
    with pytest.warns(JaxrematWarning, match="or uses a form that these shapes or `allow` rule out"):
        found = step(budget_of(1000), like=rounded).plan(WEIGHTS, batch(1000))
    assert not found.like and not found.copies


def test_who_gives_a_plan_for_other_shapes_is_told_of_like(plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match=r"or from this plan, with `optimize\(budget, like=plan\)`"):
        jaxremat.optimize(plan=plan)(make_step()).plan(WEIGHTS, batch(512))
    with pytest.raises(jaxremat.ArgumentError, match="`like` is an option of planning"):
        jaxremat.optimize(plan=plan, like=plan)
