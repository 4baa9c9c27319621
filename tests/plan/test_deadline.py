"""When planning stops: by the clock of the compiler, or the user's; and what it was spent on."""

import math
import time
from dataclasses import dataclass

import jax.numpy as jnp
import pytest
from chains import train

import jaxremat
from jaxremat import ArgumentError, MemoryStats
from jaxremat._plan._deadline import DRAFT_SHARE, Deadline
from jaxremat._runtime._progress import Stopwatch, phase, timed


@dataclass
class Clock(Stopwatch):
    """A stopwatch that shows what it is told to."""

    shown: float = 0.0

    @property
    def seconds(self) -> float:
        return self.shown


ARGS = ([jnp.ones((64, 64))] * 8, jnp.ones((1024, 64)))


def test_there_is_more_time_while_nothing_fits() -> None:
    deadline = Deadline(Clock(), None, plain_seconds=10.0, trial_seconds=10.0)
    assert deadline.left(fits=True) == 3 * 10 + 15
    assert deadline.left(fits=False) == 6 * 10 + 30


def test_turns_have_as_much_time_each_and_share_what_the_user_gives() -> None:
    own = Deadline(Clock(), None, turns=2, plain_seconds=10.0, trial_seconds=10.0)
    given = Deadline(Clock(), 45.0, turns=2)
    assert own.left(fits=True) == 3 * 10 + 15
    assert given.left(fits=True) == 22.5
    own.turn = given.turn = 2
    assert own.left(fits=True) == 2 * (3 * 10 + 15)
    assert given.left(fits=True) == 45.0


def test_what_will_run_is_compiled_before_the_deadline() -> None:
    """A draft takes a part as long, so that the plain step takes more than its draft did."""
    plain = 10.0 / DRAFT_SHARE
    deadline = Deadline(Clock(shown=5.0), None, drafts=True, plain_seconds=10.0)
    assert plain > 10.0
    assert deadline.left(fits=True) == pytest.approx(3 * plain + 15 - plain - 5)


@pytest.mark.parametrize(("shown", "allowed"), [(34.9, True), (35.0, False), (80.0, False)])
def test_no_trial_begins_that_would_end_too_late(shown: float, allowed: bool) -> None:
    deadline = Deadline(Clock(shown=shown), 45.0, plain_seconds=3.0, trial_seconds=10.0)
    assert deadline.allows(fits=True) is allowed
    assert deadline.cut_short is not allowed


def test_a_trial_says_how_long_the_plain_step_takes_that_others_were_compiled_beside() -> None:
    deadline = Deadline(Clock(), None, plain_seconds=10.0)
    deadline.tried(6.0)
    assert (deadline.plain_seconds, deadline.trial_seconds) == (6.0, 6.0)
    deadline.tried(8.0)
    assert (deadline.plain_seconds, deadline.trial_seconds) == (6.0, 8.0)


def test_solvers_get_a_part_of_what_is_left_and_never_nothing() -> None:
    assert Deadline(Clock(), 20.0).solving(10.0, fits=True) == 5.0
    assert Deadline(Clock(), 20.0).solving(2.0, fits=True) == 2.0
    assert Deadline(Clock(shown=99.0), 20.0).solving(10.0, fits=True) == 1.0
    assert Deadline(Clock(), math.inf).solving(10.0, fits=False) == 10.0


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
    plan = jaxremat.plan(train, *ARGS, budget="min", donate_argnums=0)
    took = plan.planning
    assert 0 < took.trace_seconds + took.compile_seconds + took.solve_seconds <= took.seconds
    assert 0 < took.first_seconds <= took.seconds
    assert (
        f"planned in {took.seconds:.1f} s (the first that fits after {took.first_seconds:.1f}): tracing"
        in str(plan)
    )
    assert not took.cut_short
    assert jaxremat.Plan.from_json(plan.to_json()).planning == took


def test_a_deadline_gives_the_best_plan_so_far_and_says_so() -> None:
    """The budget is met by the first plan that fits, however short the time."""
    stats = jaxremat.memory(train, *ARGS, donate_argnums=0)
    budget = stats.base_nbytes + int(0.8 * stats.temporaries_nbytes)
    step = jaxremat.optimize(budget, donate_argnums=0, planning_seconds=1e-3, cache=False)(train)
    plan = step.plan(*ARGS)
    assert plan.planning.cut_short or len(plan.rounds) == 1
    assert MemoryStats.of(step.compile(*ARGS)).peak_nbytes <= budget


def test_a_deadline_is_a_positive_number() -> None:
    with pytest.raises(ArgumentError, match=r"`planning_seconds=0` is no positive number"):
        jaxremat.optimize("1GiB", planning_seconds=0)
