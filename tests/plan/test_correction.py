"""A plan of which the device's own compiler says that it needs more than its budget is corrected, or refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import make_step
from comparing import assert_close

import jaxremat
from jaxremat import InfeasibleBudgetError, JaxrematWarning, MemoryStats, Plan
from jaxremat._compiler._compiled_step import CompiledStep
from jaxremat._plan._problem import Problem

pytestmark = pytest.mark.usefixtures("folder")

WEIGHTS = [jnp.full((64, 64), 0.01)] * 12
X = jnp.ones((1024, 64))
STATS = jaxremat.memory(make_step(), WEIGHTS, X)
BUDGET = STATS.base_nbytes + int(0.6 * STATS.temporaries_nbytes)
VALUE = X.nbytes


class Needy(CompiledStep):
    """What a compiler made that chose otherwise: the same step, in more memory."""

    more = 0

    @cached_property
    def memory(self) -> MemoryStats:
        found = MemoryStats.of(self.executable)
        return replace(found, temporaries_nbytes=found.temporaries_nbytes + self.more)


@pytest.fixture
def needy(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has what is compiled to run need so many bytes more than what is compiled to be read."""
    own = Problem.finished

    def finished(self: Problem, jitted: Any) -> CompiledStep:
        found = own(self, jitted)
        return Needy(found.executable, found.device)

    def more(nbytes: int) -> None:
        monkeypatch.setattr(Needy, "more", nbytes)
        monkeypatch.setattr(Problem, "finished", finished)

    return more


def step(**options: Any) -> Any:
    return jaxremat.optimize(**{"budget": BUDGET, **options})(make_step())


def assert_right(found: Any) -> None:
    assert_close(found, jax.jit(make_step())(WEIGHTS, X), rtol=1e-5, atol=1e-7)


def test_a_plan_that_needs_more_to_run_is_made_anew_from_that(needy: Callable[[int], None]) -> None:
    needy(0)
    made = step()
    before = made.plan(WEIGHTS, X)
    more = BUDGET - before.peak_nbytes + VALUE // 2
    needy(more)
    with pytest.warns(JaxrematWarning, match=r"The plan of `train` .* It was corrected: it now needs "):
        assert_right(made(WEIGHTS, X))
    after = made.plan(WEIGHTS, X)
    assert after.peak_nbytes <= after.budget_nbytes == BUDGET
    executable = MemoryStats.of(made.compile(WEIGHTS, X)).peak_nbytes
    assert executable + more == after.peak_nbytes < before.peak_nbytes + more
    assert after.saved_nbytes < before.saved_nbytes and after.overhead > before.overhead
    assert after.rounds[:-1] == before.rounds and after.rounds[-1].compiled_peak_nbytes == after.peak_nbytes
    # and is what is kept
    again = step()
    assert again.plan(WEIGHTS, X).saved == after.saved
    assert_right(again(WEIGHTS, X))


@pytest.mark.parametrize("given", [False, True], ids=["from the cache", "given"])
def test_a_known_plan_that_needs_more_here_is_corrected(needy: Callable[[int], None], given: bool) -> None:
    before = step().plan(WEIGHTS, X)
    needy(BUDGET - before.peak_nbytes + VALUE // 2)
    again = jaxremat.optimize(plan=Plan.from_json(before.to_json()))(make_step()) if given else step()
    with pytest.warns(JaxrematWarning, match="was corrected"):
        after = again.plan(WEIGHTS, X)
    assert after.saved_nbytes < before.saved_nbytes
    assert after.peak_nbytes <= BUDGET
    assert_right(again(WEIGHTS, X))
    if not given:
        assert step().plan(WEIGHTS, X) == after


def test_what_cannot_be_corrected_is_refused_before_it_runs(
    needy: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = jaxremat.plan(make_step(), WEIGHTS, X, budget="min")
    needy(VALUE)
    for more in (VALUE, 100 * VALUE):  # nothing less is there; another device's
        needy(more)
        made = jaxremat.optimize(plan=plan)(make_step())
        with pytest.raises(InfeasibleBudgetError, match="this machine's compiler needs") as caught:
            made(WEIGHTS, X)
        assert caught.value.min_peak_nbytes == plan.peak_nbytes + more
