"""Kinds of train steps that people write: whatever is emitted for them is a program, and gives what the step gives."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import adversary
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same, compile_plain
from evaluation import evaluate
from grown_nets import LARGEST, grown, is_grown, name_of, smaller
from judging import Judge, numbers
from odd_nets import ODD
from odd_ways import ODD_WAYS
from random_nets import NETS, ROWS, WIDTH
from random_steps import MAPPED, TWICE, WAYS, Step, fitting, random_step, step_of
from zoo_kinds import KINDS

import jaxremat
from jaxremat import InfeasibleBudgetError, MemoryStats, MinCut, close_over_dependencies
from jaxremat._emit._emit import FENCES, emit
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Pin
from jaxremat._model._stages import uncut
from jaxremat._rewrite import _row_regions
from jaxremat._rewrite._trace import trace

SEEDS = 5
AT_ONCE = 3
"""Odd parts of one step."""


@pytest.fixture(autouse=True)
def _small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of small arrays too."""
    monkeypatch.setattr(_row_regions, "LEAST_NBYTES", 1)


MENDED = {
    # Who is the larger of two was decided in one loop over chunks, and whether the other one is in the next.
    "running maxima": ("plain", ("grown 1000703 of 8", "codebook", "by bits"), 1000703),
    # A loop of one iteration read a row that was left out where its neighbours were done in chunks.
    "stacks of one": ("plain", ("grown 1000850 of 4", "heads"), 1000850),
    # Keys were handed on from one loop over chunks to the next, which begin as zeros.
    "keys": ("by example", ("keyed layers",), 1000952),
}
"""Steps that were wrong."""


def odd_steps() -> Iterator[tuple[str, list[str]]]:
    """Each odd part in one step, in the odd ways in turn."""
    ways = itertools.cycle(["plain", *sorted(ODD_WAYS.keys() - {"with reference"})])
    for first in range(0, len(ODD), AT_ONCE):
        parts = list(ODD)[first : first + AT_ONCE]
        yield next(way for way in ways if {*parts} <= {*fitting(way)}), parts


def wrong(step: Step, seed: int, count: int) -> list[adversary.Found]:
    return [each for each in adversary.check_emitted(step, seed, count) if each[1]]


@pytest.mark.parametrize("name", MENDED)
def test_what_was_wrong_is_right(name: str) -> None:
    made = adversary.Made(*MENDED[name])
    assert not wrong(made.step(), made.seed, 10)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_steps(seed: int) -> None:
    assert wrong(random_step(seed), seed, 4) == []


@pytest.mark.parametrize(("way", "parts"), list(odd_steps()), ids=str)
def test_odd_parts_in_odd_ways(way: str, parts: list[str]) -> None:
    assert wrong(step_of(way, parts), 5, 2) == []


@pytest.mark.parametrize("part", ["resampled", "running maximum", "short loops"])
def test_compiled(part: str) -> None:
    """Decisions, and loops of no iteration."""
    found = adversary.check(adversary.Made("plain", (part,), 3), emitted=0, compiled=1, planned=False)
    assert len(found["compiled"]) == 1
    assert adversary.wrong(found) == []


@pytest.mark.parametrize(
    ("way", "parts", "seed", "count"),
    [
        ("in jit", ["adjoint", "called", "smoother"], 309, 2),
        ("by example", ["counted"], 574, 2),
        ("meta", ["called"], 44, 7),
        ("meta", ["counted"], 20134, 7),
        ("meta", ["near"], 800021, 6),
        ("returned", ["grown 800175 of 2", "loops in loops"], 800175, 10),
        ("plain", ["mapped", "mapped", "carryless"], 800217, 10),
        ("curved", ["near", "layers", "gathered"], 810016, 8),
        ("counted batches", ["written", "grown 900057 of 2"], 900057, 2),
        ("meta", ["rounded", "called back"], 900105, 4),
        ("penalised", ["carryless", "resampled"], 900230, 6),
    ],
    ids=[
        "rows of nothing but constants",
        "loops of examples' own lengths",
        "rows with nested checkpointing alone",
        "carries handed on",
        "large cotangents of large cotangents",
        "recurrences found while others are tried",
        "loops that are named as a cotangent",
        "what stands beside large numbers in a Hessian",
        "loops within regions of a loop around them",
        "stacks of inner loops that outer ones carry",
        "loops that regions put in another order",
    ],
)
def test_random_steps_that_failed(way: str, parts: list[str], seed: int, count: int) -> None:
    assert wrong(step_of(way, parts, seed), seed, count) == []


def test_what_one_loop_over_chunks_decides_no_other_decides_again() -> None:
    """The shares of a minimum's two operands add up to one where both are of one run."""
    with adversary.small_values():
        found = list(adversary.check_emitted(step_of("plain", ["critics"], 1003133, 4), 1003133, 8))
    assert [what for _, what in found] == [""] * 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, 200))
def test_many_random_steps(seed: int) -> None:
    """Emitted, compiled and planned; what fails is told by the simplest step that does."""
    made = adversary.made_of(seed)
    found = adversary.wrong(adversary.check(made))
    assert not found, (adversary.shrunk(made), found)


@pytest.mark.parametrize("name", KINDS)
def test_kinds_in_any_form(name: str) -> None:
    case = KINDS[name]
    step = Step(name, case.step, case.make_args())
    assert wrong(step, 7, 2) == []


def test_the_generator_makes_every_kind() -> None:
    names = [random_step(seed).name for seed in range(400)]
    assert {name.partition(": ")[0] for name in names} == WAYS.keys()
    parts = {part for name in names for part in name.partition(": ")[2].split(", ")}
    assert {part for part in parts if not is_grown(part)} == NETS.keys()
    assert len(parts - NETS.keys()) > 100
    assert {*TWICE, *MAPPED} <= WAYS.keys() and all(fitting(way) for way in WAYS)
    assert random_step(3).name == random_step(3).name


@pytest.mark.parametrize("seed", range(12))
def test_parts_that_nobody_wrote(seed: int) -> None:
    """JAX differentiates each in either mode, twice, and maps it; a smaller one is another program."""
    part = grown(name_of(seed, LARGEST))
    p, x = {"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}, jnp.ones((ROWS, WIDTH))

    def slope(p: Any) -> Any:
        return jax.grad(lambda p: part(p, x).mean())(p)

    assert jax.eval_shape(part, p, x) == jax.ShapeDtypeStruct(x.shape, x.dtype)
    pushed = jax.eval_shape(lambda p: jax.jvp(slope, (p,), (p,))[1], p)
    assert jax.tree.map(jnp.shape, pushed) == jax.tree.map(jnp.shape, p)
    assert jax.eval_shape(jax.vmap(part, (None, 0)), p, jnp.stack([x, x])).shape == (2, *x.shape)
    assert len(smaller(name_of(seed, LARGEST))) == 2


def test_a_decision_of_two_runs_is_seen() -> None:
    """Evaluated to the nearest both programs give the same; rounded at random what was made again is no maximum."""

    def once(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        return y * (y == y.max(-1, keepdims=True))

    def twice(x: jax.Array) -> jax.Array:
        again = jnp.tanh(jax.lax.optimization_barrier(x))
        return again * (again == jnp.tanh(x).max(-1, keepdims=True))

    x, rounding = jnp.linspace(0.1, 0.9, 24).reshape(4, 6), np.random.default_rng(0)
    one, other = jax.make_jaxpr(once)(x), jax.make_jaxpr(twice)(x)
    assert adversary.difference(evaluate(one, [x]), evaluate(other, [x])) == ""
    judge = Judge(lambda x: evaluate(one, [x], rounding), (x,))
    assert judge.wrong(numbers(evaluate(one, [x], rounding))) == ""
    assert "off by" in judge.wrong(numbers(evaluate(other, [x], rounding)))


def test_what_a_loop_begins_with_is_read_before_it() -> None:
    """An array of zeros that iterations read, and carry, where a barrier within the loop lets it pass for them."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        zeros = jnp.zeros_like(x)

        def one(carry: Any, w: jax.Array) -> Any:
            x, total = carry
            kept = jnp.where(x > 0, jnp.tanh(x @ w), zeros)
            return (jnp.sin(kept + total), total + kept), None

        return jnp.sum(jax.lax.scan(one, (x, zeros), p)[0][0] ** 2)  # the total's cotangent begins as zeros

    def step(p: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, x))

    args = jnp.linspace(-1, 1, 48).reshape(3, 4, 4), jnp.linspace(-1, 2, 16).reshape(4, 4)
    found = trace(jax.jit(step, donate_argnums=0), args, {})
    want = evaluate(found.closed, jax.tree.leaves(args))
    for platform in ("cpu", "gpu"):
        graph = lower(found, replace(adversary.DEVICE, platform=platform), base_nbytes=0)
        for n in range(graph.forward_stop + 1, len(graph.nodes)):
            cut = replace(graph, pins=(Pin("stage", n, ""),))
            cut = replace(cut, stages=uncut(cut))
            for fence in FENCES:
                planned = emit(found, cut, close_over_dependencies(cut, ()), fence)
                assert adversary.difference(want, evaluate(planned, jax.tree.leaves(args))) == ""


def test_differences_are_seen() -> None:
    one, nan = jnp.ones(3), jnp.array([1, 1, float("nan")])
    assert adversary.difference([one], [one]) == ""
    assert adversary.difference([nan], [nan]) == ""
    assert "not finite" in adversary.difference([one], [nan])
    assert "off by" in adversary.difference([one], [1.01 * one])
    assert "int32" in adversary.difference([one], [one.astype("int32")])
    assert "structure" in adversary.difference([one], [one, one])


def test_a_wrong_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not type-check, and one that computes something else."""
    own = adversary.Drawn.emit

    def doubled(drawn: adversary.Drawn) -> jex.ClosedJaxpr:
        return jax.make_jaxpr(lambda *a: [x + x for x in jex.jaxpr_as_fun(own(drawn))(*a)])(
            *own(drawn).in_avals
        )

    step = Step("", KINDS["plain: dense"].step, KINDS["plain: dense"].make_args())
    monkeypatch.setattr(adversary.Drawn, "emit", doubled)
    assert all("off by" in what for _, what in adversary.check_emitted(step, 0, 3))

    def broken(drawn: adversary.Drawn) -> jex.ClosedJaxpr:
        raise TypeError("variable not defined")

    monkeypatch.setattr(adversary.Drawn, "emit", broken)
    assert all("TypeError: variable not defined" in what for _, what in adversary.check_emitted(step, 0, 3))


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
    step = jaxremat.optimize(budget, donate_argnums=0, planning=jaxremat.Planning(solver=MinCut()))(case.step)
    try:
        made = step.compile(*args)
    except InfeasibleBudgetError as error:
        assert error.min_peak_nbytes > budget
        return
    assert MemoryStats.of(made).peak_nbytes <= budget
    copies = [jax.tree.map(jnp.copy, args) for _ in range(2)]
    assert_same(plain(*copies[0]), step(*copies[1]), rounding=adversary.ROUNDING)


def test_a_run_goes_on_where_it_was(tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    assert adversary.read_rows(path) == []
    row = {
        "seed": 5, "step": "", "way": "plain", "parts": ["dense"], "emitted": 8, "compiled": 4, "planned": 2,
        "wrong": [], "shrunk": "",
    }  # fmt: skip
    path.write_text(json.dumps(row) + '\n{"seed": 6, "st')
    assert adversary.read_rows(path) == [row]
    found = adversary.summary([row, {**row, "wrong": [{"form": "f", "what": "w"}]}])
    assert (found["steps"], found["emitted"], found["compiled"], found["wrong"]) == (2, 16, 8, 1)
    assert found["ways"]["plain"] == found["parts"]["dense"] == 28


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("optimizer", ["recurrent", "branching layers", "gathered"]),
        ("penalised", ["norm", "nested layers"]),
        ("accumulated", ["empty", "sharded", "recurrent"]),
        ("plain", ["own tangent", "counted", "nested layers", "solved"]),
        ("returned", ["segments", "half", "spectral"]),
        ("plain", ["branches", "converged"]),
    ],
)
def test_programs_are_evaluated_as_jax_does(way: str, parts: list[str]) -> None:
    """What other programs are compared with."""
    step = step_of(way, parts)
    jitted = jax.jit(step.fn)
    found = trace(jitted, step.args, {})
    given = evaluate(found.step(found.closed), jax.tree.leaves(step.args))
    assert adversary.difference(jax.tree.leaves(jitted(*step.args)), given) == ""
