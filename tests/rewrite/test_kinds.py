"""Kinds of train steps that people write: whatever is emitted for them is a program, and gives what the step gives."""

from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import pytest
from test_optimize import assert_same, compile_plain
from zoo_kinds import KINDS

import jaxremat
from examples.benchmarks import fuzz
from examples.benchmarks.evaluation import evaluate
from examples.benchmarks.random_steps import MAPPED, NETS, TWICE, WAYS, fitting, random_step
from jaxremat import InfeasibleBudgetError, MemoryStats, MinCut, complete
from jaxremat._emit._emit import FENCES, emit
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Pin
from jaxremat._model._stages import uncut
from jaxremat._rewrite import _row_regions
from jaxremat._rewrite._trace import trace

SEEDS = 16


@pytest.fixture(autouse=True)
def _small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of small arrays too."""
    monkeypatch.setattr(_row_regions, "LEAST_NBYTES", 1)


def wrong(seed: int, count: int) -> list[tuple[str, str]]:
    return [each for each in fuzz.check_emitted(random_step(seed), seed, count) if each[1]]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_steps(seed: int) -> None:
    assert wrong(seed, 8) == []


@pytest.mark.parametrize(
    ("seed", "count"),
    [(309, 2), (574, 2), (44, 7), (20134, 7)],
    ids=[
        "rows of nothing but constants",
        "loops of examples' own lengths",
        "rows in levels alone",
        "carries handed on",
    ],
)
def test_random_steps_that_failed(seed: int, count: int) -> None:
    assert wrong(seed, count) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, 10 * SEEDS))
def test_many_random_steps(seed: int) -> None:
    assert wrong(seed, 16) == []


@pytest.mark.parametrize("name", KINDS)
def test_kinds_in_any_form(name: str) -> None:
    case = KINDS[name]
    step = fuzz.Step(name, case.step, case.make_args())
    assert [each for each in fuzz.check_emitted(step, 7, 4) if each[1]] == []


def test_the_generator_makes_every_kind() -> None:
    names = [random_step(seed).name for seed in range(400)]
    assert {name.partition(": ")[0] for name in names} == WAYS.keys()
    assert {part for name in names for part in name.partition(": ")[2].split(", ")} == NETS.keys()
    assert {*TWICE, *MAPPED} <= WAYS.keys() and all(fitting(way) for way in WAYS)
    assert random_step(3).name == random_step(3).name


def test_what_a_loop_begins_with_is_read_before_it() -> None:
    """An array of zeros that iterations read, and carry, where a fence within the loop lets it pass for them."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        zeros = jax.numpy.zeros_like(x)

        def one(carry: Any, w: jax.Array) -> Any:
            x, total = carry
            kept = jax.numpy.where(x > 0, jax.numpy.tanh(x @ w), zeros)
            return (jax.numpy.sin(kept + total), total + kept), None

        return jax.numpy.sum(
            jax.lax.scan(one, (x, zeros), p)[0][0] ** 2
        )  # the total's cotangent begins as zeros

    def step(p: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, x))

    args = fuzz.jnp.linspace(-1, 1, 48).reshape(3, 4, 4), fuzz.jnp.linspace(-1, 2, 16).reshape(4, 4)
    found = trace(jax.jit(step, donate_argnums=0), args, {})
    want = evaluate(found.closed, jax.tree.leaves(args))
    for platform in ("cpu", "gpu"):
        graph = lower(found, replace(fuzz.DEVICE, platform=platform), base_nbytes=0)
        for n in range(graph.forward_stop + 1, len(graph.nodes)):
            cut = replace(graph, pins=(Pin("stage", n, ""),))
            cut = replace(cut, stages=uncut(cut))
            for fence in FENCES:
                planned = emit(found, cut, complete(cut, ()), fence)
                assert fuzz.difference(want, evaluate(planned, jax.tree.leaves(args))) == ""


def test_the_evaluator_gives_what_jax_gives() -> None:
    """What programs are compared with."""
    for name in ("plain: smoother", "plain: branches", "plain: converged", "plain: empty", "plain: counted"):
        case = KINDS[name]
        args = case.make_args()
        closed = jax.jit(case.step).trace(*args).jaxpr
        want = jax.tree.leaves(jax.jit(case.step)(*args))
        assert fuzz.difference(want, evaluate(closed, jax.tree.leaves(args))) == ""


def test_differences_are_seen() -> None:
    one, nan = jax.numpy.ones(3), jax.numpy.array([1, 1, float("nan")])
    assert fuzz.difference([one], [one]) == ""
    assert fuzz.difference([nan], [nan]) == ""
    assert "not finite" in fuzz.difference([one], [nan])
    assert "off by" in fuzz.difference([one], [1.01 * one])
    assert "int32" in fuzz.difference([one], [one.astype("int32")])
    assert "structure" in fuzz.difference([one], [one, one])


def test_a_wrong_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not type-check, and one that computes something else."""
    own = fuzz.Drawn.emit

    def doubled(drawn: fuzz.Drawn) -> jex.ClosedJaxpr:
        return jax.make_jaxpr(lambda *a: [x + x for x in jex.jaxpr_as_fun(own(drawn))(*a)])(
            *own(drawn).in_avals
        )

    step = fuzz.Step("", KINDS["plain: dense"].step, KINDS["plain: dense"].make_args())
    monkeypatch.setattr(fuzz.Drawn, "emit", doubled)
    assert all("off by" in what for _, what in fuzz.check_emitted(step, 0, 3))

    def broken(drawn: fuzz.Drawn) -> jex.ClosedJaxpr:
        raise TypeError("variable not defined")

    monkeypatch.setattr(fuzz.Drawn, "emit", broken)
    assert all("TypeError: variable not defined" in what for _, what in fuzz.check_emitted(step, 0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
@pytest.mark.parametrize("name", KINDS)
def test_plans(name: str, share: float) -> None:
    """Planned as a whole, within several budgets."""
    case = KINDS[name]
    args = case.make_args()
    plain = compile_plain(case, args)
    stats = MemoryStats.of(plain)
    budget = stats.base_nbytes + int(share * stats.temporaries_nbytes)
    step = jaxremat.optimize(budget, donate_argnums=0, solver=MinCut())(case.step)
    try:
        made = step.compile(*args)
    except InfeasibleBudgetError as error:
        assert error.min_peak_nbytes > budget
        return
    assert MemoryStats.of(made).peak_nbytes <= budget
    copies = [jax.tree.map(jax.numpy.copy, args) for _ in range(2)]
    assert_same(plain(*copies[0]), step(*copies[1]), rounding=fuzz.ROUNDING)


def test_a_run_goes_on_where_it_was(tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    assert fuzz.read_rows(path) == []
    row = {"seed": 5, "step": "plain: dense", "emitted": 16, "planned": 0, "wrong": []}
    path.write_text(fuzz.json.dumps(row) + '\n{"seed": 6, "st')
    assert fuzz.read_rows(path) == [row]
    found = fuzz.summary([row, {**row, "wrong": [{"form": "f", "what": "w"}]}])
    assert (found["steps"], found["emitted"], found["mismatches"]) == (2, 32, 1)
    assert found["ways"]["plain"] == found["parts"]["dense"] == 32


@pytest.mark.parametrize("seed", [43, 48, 50, 56])
def test_programs_are_evaluated_as_jax_does(seed: int) -> None:
    step = random_step(seed)
    jitted = jax.jit(step.fn)
    found = trace(jitted, step.args, {})
    given = evaluate(found.step(found.closed), jax.tree.leaves(step.args))
    assert fuzz.difference(jax.tree.leaves(jitted(*step.args)), given) == ""
