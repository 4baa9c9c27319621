"""How much work planning takes: counted, whatever clocks say, unless the user gives it seconds."""

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import pytest
from chains import train

import jaxremat
from jaxremat import JaxrematWarning, MemoryStats
from jaxremat._plan import _plan_cache
from jaxremat._plan._ledger import Effort
from jaxremat._plan._search import Search
from jaxremat._plan._step_compiler import StepCompiler
from jaxremat._report._outcome import PlanningTime
from jaxremat._runtime import _progress
from jaxremat._runtime._progress import Stopwatch, phase, timed


@dataclass
class Clock(Stopwatch):
    """A stopwatch that shows what it is told to."""

    shown: float = 0.0

    @property
    def seconds(self) -> float:
        return self.shown


ARGS = ([jnp.ones((64, 64))] * 8, jnp.ones((1024, 64)))
BUDGET = "80% of temporaries"


def planned(budget: float | str = BUDGET, **options: Any) -> jaxremat.Plan:
    planning = jaxremat.Planning(**options)
    return jaxremat.plan(train, *ARGS, budget=budget, donate_argnums=0, planning=planning)


@pytest.mark.parametrize(("equations", "most"), [(100, 8), (1000, 8), (2000, 5), (6000, 3), (50_000, 2)])
def test_small_steps_have_more_compilations_and_all_more_while_nothing_fits(
    equations: int, most: int
) -> None:
    effort = Effort(equations=equations)
    assert (effort.most(fits=True), effort.most(fits=False)) == (most, 2 * most)
    effort.fits = True
    assert effort.most(fits=False) == most


def test_compilations_are_counted_in_each_turn() -> None:
    effort = Effort(equations=6000, turns=2)
    allowed = []
    for turn in (1, 2):
        effort.turn = turn
        while effort.allows(fits=True):
            effort.compiled(1.0)
        allowed.append(effort.compilations)
    assert allowed == [3, 6]
    assert effort.exhausted
    assert not effort.stopwatch.interrupted


def test_solves_are_counted_and_later_ones_get_less() -> None:
    effort = Effort(equations=6000)
    given = [effort.solving(6.0) for _ in range(30)]
    assert given == pytest.approx([2.0] * 12 + [0.6] * 18)
    assert not effort.allows(fits=True)
    assert effort.allows(fits=False)
    assert Effort(limited=False).solving(6.0) == 6.0


def test_without_limits_on_work_it_never_ends() -> None:
    effort = Effort(equations=6000, limited=False, compilations=1000, solves=10**6)
    assert effort.allows(fits=True)
    assert not effort.exhausted


@pytest.mark.parametrize(("shown", "allowed"), [(34.9, True), (35.1, False), (80.0, False)])
def test_no_plan_is_begun_that_would_end_after_the_seconds_of_the_user(shown: float, allowed: bool) -> None:
    effort = Effort(Clock(shown=shown), planning_seconds=45.0, compile_seconds=10.0)
    assert effort.allows(fits=True) is allowed
    assert effort.stopwatch.interrupted is not allowed
    assert not effort.exhausted


def test_turns_share_the_seconds_of_the_user_and_what_will_run_is_compiled_within_them() -> None:
    effort = Effort(Clock(shown=5.0), planning_seconds=40.0, turns=2, compile_seconds=3.0)
    assert effort.left_seconds == 15.0
    effort.turn, effort.unfused_builds = 2, True
    assert effort.left_seconds == 32.0


def test_solves_end_with_the_seconds_of_the_user_but_are_never_without() -> None:
    effort = Effort(Clock(shown=18.5), planning_seconds=20.0)
    assert effort.solving(3.0) == 1.0
    assert not effort.stopwatch.interrupted
    assert effort.solving(9.0) == 1.5
    assert effort.stopwatch.interrupted
    assert Effort(Clock(shown=99.0), planning_seconds=20.0).solving(9.0) == 1.0


def plan_of(clock: Any, monkeypatch: pytest.MonkeyPatch) -> jaxremat.Plan:
    """The plan of a step in four fifths of its temporaries, without what clocks say of it."""
    with monkeypatch.context() as patched:
        if clock is not None:
            patched.setattr(time, "monotonic", clock)
        plan = planned(cache=False)
    assert not plan.planning.cut_short
    rounds = tuple(replace(r, solve_seconds=0.0, compile_seconds=0.0) for r in plan.rounds)
    work = PlanningTime(plans_compiled=plan.planning.plans_compiled, solves=plan.planning.solves)
    return replace(plan, solve_seconds=0.0, rounds=rounds, planning=work)


def test_no_clock_changes_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still, one that jumps by hours whenever it is looked at."""
    want = plan_of(None, monkeypatch)
    hours = itertools.count(step=3600.0)
    assert want.rounds
    assert plan_of(lambda: 0.0, monkeypatch) == want
    assert plan_of(lambda: float(next(hours)), monkeypatch) == want


def test_phases_count_for_their_own_kind_without_those_inside() -> None:
    with timed() as outer, timed() as inner, phase("a", kind="compile"):
        time.sleep(0.02)
        with phase("b", kind="solve"):
            time.sleep(0.02)
        with phase("c"):
            pass
    assert outer is inner
    assert set(outer.spent) == {"compile", "solve", "other"}
    assert sum(outer.spent.values()) <= outer.seconds
    assert min(outer.spent["compile"], outer.spent["solve"]) >= 0.019


def test_a_plan_says_what_planning_took() -> None:
    plan = planned("min")
    took = plan.planning
    assert 0 < took.trace_seconds + took.compile_seconds + took.solve_seconds <= took.seconds
    assert 0 < took.first_seconds <= took.seconds
    assert (
        f"planned in {took.seconds:.1f} s (first plan that fits after {took.first_seconds:.1f}): tracing"
        in str(plan)
    )
    assert not took.cut_short
    assert jaxremat.Plan.from_json(plan.to_json()).planning == took


def test_the_seconds_of_the_user_give_the_best_plan_so_far_and_a_warning() -> None:
    """The budget is met by the first plan that fits, however short the time."""
    planning = jaxremat.Planning(planning_seconds=1e-3, cache=False)
    step = jaxremat.optimize(BUDGET, donate_argnums=0, planning=planning)(train)
    said = "The search for the plan of `train` was cut short after .* plans? compiled"
    with pytest.warns(JaxrematWarning, match=said):
        plan = step.plan(*ARGS)
    assert plan.planning.cut_short
    assert "the search was cut short" in str(plan)
    assert MemoryStats.of(step.compile(*ARGS)).peak_nbytes <= plan.budget_nbytes
    with pytest.warns(JaxrematWarning, match=said):  # also of a plan from a file
        jaxremat.optimize(plan=jaxremat.Plan.from_json(plan.to_json()), donate_argnums=0)(train).plan(*ARGS)


@pytest.mark.parametrize("budget", ["60% of temporaries", "min"])
def test_an_interrupt_gives_the_best_plan_so_far_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    """Ctrl-C while the next plan is looked for after one that fits. Before, there is nothing to return."""
    looking = Search._next

    def look_or_interrupt(search: Search, *args: Any) -> Any:
        if search.ledger.compiled:
            raise KeyboardInterrupt
        return looking(search, *args)

    monkeypatch.setattr(Search, "_next", look_or_interrupt)
    with pytest.warns(JaxrematWarning, match="was cut short after"):
        found = planned(budget, on_interrupt="best", cache=False)
    assert found.planning.cut_short
    assert budget == "min" or found.peak_nbytes <= found.budget_nbytes
    with pytest.raises(KeyboardInterrupt):
        planned(budget, on_interrupt="stop", cache=False)
    monkeypatch.setattr(StepCompiler, "compile", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        planned(budget, on_interrupt="best", cache=False)


@pytest.mark.usefixtures("folder")
def test_a_plan_that_a_clock_cut_short_is_used_and_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, made = [True], 0
    make_plan = _plan_cache.make_plan

    def counting(*args: Any) -> Any:
        nonlocal made
        made += 1
        found = make_plan(*args)
        if interrupted[0]:
            _progress.interrupt()
            found.plan = replace(found.plan, planning=replace(found.plan.planning, cut_short=True))
        return found

    monkeypatch.setattr(_plan_cache, "make_plan", counting)
    assert planned().planning.cut_short
    assert planned().planning.cut_short
    assert made == 2, "it is looked for again"
    interrupted[0] = False
    assert not planned().planning.cut_short
    assert not planned().planning.cut_short
    assert made == 3, "what no clock cut short is final"


def test_warnings_of_a_plan_come_again_with_it() -> None:
    plan = planned(cache=False)
    assert plan.warnings == ()
    said = replace(plan, warnings=("it takes long",)).to_json()
    with pytest.warns(JaxrematWarning, match="it takes long"):
        jaxremat.optimize(plan=jaxremat.Plan.from_json(said), donate_argnums=0)(train).plan(*ARGS)
