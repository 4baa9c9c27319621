"""How often each way to a planned step compiles it: once, where the plan is known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import make_step

import jaxremat

pytestmark = pytest.mark.usefixtures("folder")

WEIGHTS = [jnp.full((64, 64), 0.01)] * 8
X = jnp.ones((1024, 64))
STATS = jaxremat.memory(make_step(), WEIGHTS, X)
BUDGET = STATS.base_nbytes + int(0.8 * STATS.temporaries_nbytes)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of every compilation."""
    found: list[Any] = []
    own = jax.stages.Lowered.compile

    def counted(self: Any, compiler_options: Any = None, **more: Any) -> Any:
        found.append(compiler_options)
        return own(self, compiler_options, **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return found


def step(budget: Any = BUDGET, **options: Any) -> Any:
    return jaxremat.optimize(budget, **options)(make_step())


def fits_as_written() -> int:
    return 2 * STATS.peak_nbytes


@pytest.mark.parametrize(
    "budget", [BUDGET, "80% of temporaries", fits_as_written()], ids=["planned", "a share", "as written"]
)
@pytest.mark.parametrize("given", [False, True], ids=["from the cache", "given"])
@pytest.mark.parametrize("asked", [False, True], ids=["called", "plan, then called"])
def test_a_step_whose_plan_is_known_is_compiled_once(
    budget: int | str, given: bool, asked: bool, compiled: list[Any]
) -> None:
    """What is verified is what runs: nothing is compiled to be read besides."""
    plan = step(budget).plan(WEIGHTS, X)
    assert compiled
    compiled.clear()
    again = jaxremat.optimize(plan=plan)(make_step()) if given else step(budget)
    if asked:
        assert again.plan(WEIGHTS, X).compiled_peak_nbytes == plan.compiled_peak_nbytes
        assert len(compiled) == 1
    found = again(WEIGHTS, X)
    assert len(compiled) == 1
    assert "xla_backend_optimization_level" not in (compiled[0] or {}), "a draft runs"
    again(WEIGHTS, X)
    again.compile(WEIGHTS, X)
    assert len(compiled) == 1
    for one, other in zip(found, jax.jit(make_step())(WEIGHTS, X), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_new_plan_is_compiled_once_more_to_run(compiled: list[Any]) -> None:
    """Candidates are drafts, which nobody optimises: what runs is compiled when it is first called, and once."""
    made = step()
    plan = made.plan(WEIGHTS, X)
    assert all("xla_backend_optimization_level" in each for each in compiled)
    before = len(compiled)
    assert before >= plan.compile_count
    made(WEIGHTS, X)
    made(WEIGHTS, X)
    assert len(compiled) == before + 1
    assert "xla_backend_optimization_level" not in compiled[-1]


def test_shares_of_the_plain_step_take_one_compilation_at_most(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans start from the plain step that says what the share comes to; without compiling, the model says it."""
    monkeypatch.setenv("JAXREMAT_PLAN_CACHE", "0")
    assert step(BUDGET).plan(WEIGHTS, X).budget_nbytes == BUDGET
    in_bytes = len(compiled)
    compiled.clear()
    assert step("80% of temporaries").plan(WEIGHTS, X).budget_nbytes == BUDGET
    assert len(compiled) <= in_bytes + 1
    most = int(0.9 * STATS.peak_nbytes)
    assert (
        step("90%").plan(WEIGHTS, X).budget_nbytes
        == step("90% of peak").plan(WEIGHTS, X).budget_nbytes
        == most
    )
    compiled.clear()
    guess = step("90%", planning=jaxremat.Planning(verify=False)).plan(WEIGHTS, X)
    assert not compiled
    assert guess.budget_nbytes == int(0.9 * guess.baseline_peak_nbytes)
