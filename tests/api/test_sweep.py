"""The frontier of a step: what its points promise, that it is picked up where it was left, and how it looks."""

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest
from chains import make_step
from zoo import BY_NAME

import jaxremat
from jaxremat import (
    ArgumentError,
    BudgetError,
    Frontier,
    Greedy,
    InfeasibleBudgetError,
    InstallError,
    JaxrematWarning,
    Milp,
    Plan,
    PlanMismatchError,
)
from jaxremat._plan import _problem as problem_module
from jaxremat._plan import _step_compiler
from jaxremat._plan._search import Search
from jaxremat._report._frontier_plot import IN_PICTURE

CASE = BY_NAME["custom_vjp"]
ARGS = jax.eval_shape(CASE.make_args)
POINTS = 6


def swept(points: int = POINTS, allow: tuple[str, ...] = (), **options: Any) -> Frontier:
    return jaxremat.sweep(CASE.step, *ARGS, points=points, donate_argnums=0, allow=allow, **options)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that the tests of this file share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def frontier(kept: Path, monkeypatch: pytest.MonkeyPatch) -> Frontier:
    monkeypatch.setenv("JAXREMAT_CACHE", str(kept))
    monkeypatch.delenv("JAXREMAT_PLAN_CACHE", raising=False)
    return swept()


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """One entry for each call of a function from now on."""
    calls: list[None] = []
    own: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


# ---- what it promises


def test_every_point_keeps_its_budget_and_more_budget_never_costs_more(frontier: Frontier) -> None:
    assert len(frontier) == POINTS
    budgets = [p.budget_nbytes for p in frontier]
    assert budgets == sorted(set(budgets), reverse=True)
    costs = [frontier.cost(p) for p in frontier]
    assert costs == sorted(costs) and costs[0] == 0.0 < costs[-1]
    for p in frontier:
        assert p.compiled_peak_nbytes is not None and p.compiled_peak_nbytes <= p.budget_nbytes
        assert p.plan.fingerprint == frontier.fingerprint
        assert p.gap == pytest.approx(max(p.overhead - p.plan.lower_bound, 0.0))
    assert frontier.plain.plan.drops_nothing and frontier.plain.kind == "plain"
    assert {p.kind for p in frontier} == {"plain", "hull", "budget", "least"}


def test_a_budget_of_a_sweep_takes_one_compilation(frontier: Frontier) -> None:
    """The plain step is compiled for all of them, and a solve knows about where to aim."""
    *points, least = frontier
    own = (p for p in points if p.kind in ("budget", "hull") and p.peak_nbytes != least.peak_nbytes)
    counts = [point.plan.compile_count for point in own]
    assert counts and max(counts) == 1


def test_a_sweep_compiles_no_schedule_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What budgets, vertices and rules have compiled is known to the others."""
    found: list[Any] = []
    own = _step_compiler.compile_schedule

    def compiled(problem: Any, graph: Any, schedule: Any, fence: str, *args: Any, **kwargs: Any) -> Any:
        found.append((graph.form, tuple(s.start for s in graph.stages), schedule, fence))
        return own(problem, graph, schedule, fence, *args, **kwargs)

    monkeypatch.setattr(_step_compiler, "compile_schedule", compiled)
    step, weights, x = make_step(), [jax.ShapeDtypeStruct((64, 64), "float32")] * 8, (1024, 64)
    frontier = jaxremat.sweep(step, weights, jax.ShapeDtypeStruct(x, "float32"), points=8)
    assert len(frontier) > 4 and len(found) > 4
    assert len(found) == len(set(found)), "a schedule was compiled twice"
    assert len(found) <= 8, "a point takes more than one compilation"


def test_a_rule_beyond_the_picture_is_not_compiled() -> None:
    frontier = swept(3)
    most = IN_PICTURE * frontier.least.overhead
    assert {p.overhead > most for p in frontier.policies} == {True, False}
    for p in frontier.policies:
        assert (p.compiled_peak_nbytes is None) == (p.overhead > most)


def test_no_plan_of_the_sweep_is_better_than_the_point_of_a_budget(frontier: Frontier) -> None:
    for p in frontier:
        fitting = [frontier.cost(q) for q in frontier if q.peak_nbytes <= p.budget_nbytes]
        assert frontier.cost(p) == min(fitting)


def test_plans_lie_above_the_proven_bound(frontier: Frontier) -> None:
    """Unless they hand values on from stage to stage, of which the bound does not speak."""
    assert frontier.bounds
    for p in frontier:
        if not p.plan.kept:
            assert p.overhead >= frontier.lower_bound(p.predicted_peak_nbytes) - 1e-6
    hull = [p for p in frontier if p.kind == "hull"]
    assert hull
    near = [p.overhead - frontier.lower_bound(p.predicted_peak_nbytes) for p in hull]
    assert min(near) <= Milp().gap + 1e-6  # the bound touches it


def test_the_bound_speaks_of_variants_that_later_plans_are_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    frontier = swept(allow=jaxremat.EXACT)
    assert any(p.plan.form for p in frontier)
    for p in frontier:
        if not p.plan.kept:
            assert p.overhead >= frontier.lower_bound(p.predicted_peak_nbytes) - 1e-6


def test_the_plan_of_a_point_runs(frontier: Frontier) -> None:
    point = frontier.best(max_overhead=0.2)
    step = jaxremat.optimize(plan=point.plan, donate_argnums=0)(CASE.step)
    assert step.plan(*ARGS).compiled_peak_nbytes == point.compiled_peak_nbytes


def test_the_best_point_and_the_point_within_a_budget(frontier: Frontier) -> None:
    assert frontier.best(0.0).overhead == 0.0
    best = frontier.best(max_overhead=0.1)
    assert frontier.cost(best) <= 0.1
    assert all(frontier.cost(p) > 0.1 for p in frontier if p.budget_nbytes < best.budget_nbytes)
    assert frontier.best(99.0) is frontier.least
    assert frontier.within("1TiB") is frontier.plain
    assert frontier.within(frontier[3].budget_nbytes) is frontier[3]
    assert frontier.within(frontier[3].budget_nbytes - 1) is frontier[4]
    assert frontier.within("min") is frontier.least
    with pytest.raises(InfeasibleBudgetError, match="the least budget of this frontier is") as caught:
        frontier.within(1000)
    assert caught.value.min_peak_nbytes == frontier.least.peak_nbytes
    with pytest.raises(ArgumentError, match="faster than the plain one"):
        frontier.best(-0.1)
    with pytest.raises(BudgetError):
        frontier.within("much")


def test_the_knee_is_the_corner_of_a_bent_line(frontier: Frontier) -> None:
    def at(peak: int, overhead: float) -> Any:
        plan = replace(frontier[1].plan, budget_nbytes=peak, compiled_peak_nbytes=peak, overhead=overhead)
        return replace(frontier[1], plan=plan)

    bent = replace(frontier, points=(at(100, 0.0), at(80, 0.01), at(50, 0.02), at(45, 0.3), at(40, 0.6)))
    assert bent.knee is bent[2]


# ---- from an earlier sweep


def test_a_sweep_that_was_done_compiles_and_solves_nothing(
    frontier: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = counted(monkeypatch, problem_module.Problem, "compile")
    solved = counted(monkeypatch, Milp, "solve")
    priced = counted(monkeypatch, Milp, "priced")
    assert swept() == frontier
    assert not compiled and not solved and not priced


def test_an_interrupted_sweep_goes_on(
    frontier: Frontier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was solved before is not solved again, and the result is that of the sweep in one go."""
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    own, budgets = Milp.begin, []

    def solve(self: Milp, graph: Any, budget_nbytes: int | None, *, time_limit: float) -> Any:
        budgets.append(budget_nbytes)
        if budget_nbytes is not None and any((tmp_path / "sweeps").glob("*-hull-*")):
            raise KeyboardInterrupt
        return own(self, graph, budget_nbytes, time_limit=time_limit)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Milp, "begin", solve)
        swept()
    done = {path.name.split("-", 1)[1] for path in (tmp_path / "sweeps").iterdir()}
    assert {"plain.json", "least.json"} < done and any(name.startswith("hull-") for name in done)
    assert None in budgets
    budgets.clear()
    priced, least = counted(monkeypatch, Milp, "priced"), counted(monkeypatch, Search, "least")

    def rest(self: Milp, graph: Any, budget_nbytes: int | None, *, time_limit: float) -> Any:
        budgets.append(budget_nbytes)
        return own(self, graph, budget_nbytes, time_limit=time_limit)

    monkeypatch.setattr(Milp, "begin", rest)
    again = swept()
    assert budgets and not priced and not least
    for p, q in zip(frontier, again, strict=True):
        assert (p.kind, p.budget_nbytes, p.plan.saved, p.overhead) == (
            q.kind, q.budget_nbytes, q.plan.saved, q.overhead,
        )  # fmt: skip


def test_a_corrupt_entry_is_found_again(
    frontier: Frontier, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (kept / "sweeps").glob("*-least.json")
    path.write_text(path.read_text()[:-20])
    with pytest.warns(JaxrematWarning, match=r"least\.json cannot be read"):
        again = swept()
    assert [p.plan.saved for p in again] == [p.plan.saved for p in frontier]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert swept() == again


def test_other_options_are_another_sweep(frontier: Frontier, kept: Path) -> None:
    before = len(list((kept / "sweeps").iterdir()))
    rough = swept(4, planning=jaxremat.Planning(verify=False))
    assert len(list((kept / "sweeps").iterdir())) > before
    assert all(p.compiled_peak_nbytes is None and p.compiled_overhead is None for p in rough)
    assert [p.compiled_overhead for p in rough.policies] == [None] * len(rough.policies)
    costs = [rough.cost(p) for p in rough]
    assert costs == sorted(costs) and costs[0] == 0.0 < costs[-1]
    budgets = [p.budget_nbytes for p in rough]
    assert all(p.predicted_peak_nbytes <= b for p, b in zip(rough, budgets, strict=True))


def test_without_a_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    found = swept(3, planning=jaxremat.Planning(cache=False, verify=False, solver=Greedy()))
    assert len(found) == 3 and not found.bounds
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.parametrize("margin", [30_000, 0.05])
def test_a_margin_stays_free_at_every_point(margin: Any) -> None:
    found = swept(4, planning=jaxremat.Planning(verify=False, workspace_margin=margin))
    for p in found:
        want = margin if isinstance(margin, int) else int(margin * p.budget_nbytes)
        assert p.plan.margin_nbytes == want
        assert p.predicted_peak_nbytes <= p.budget_nbytes - want


# ---- in and out


def test_json_round_trip(frontier: Frontier, tmp_path: Path) -> None:
    assert Frontier.from_json(frontier.to_json()) == frontier
    frontier.save(tmp_path / "frontier.json")
    assert Frontier.load(tmp_path / "frontier.json") == frontier
    points = [{"kind": p.kind, "plan": json.loads(p.plan.to_json())} for p in frontier]  # as in format 1
    old = {**json.loads(frontier.to_json()), "frontier_format": 1, "points": points}
    assert Frontier.from_json(json.dumps(old)) == frontier
    with pytest.raises(PlanMismatchError, match="not a jaxremat plan"):
        Plan.from_json(frontier.to_json())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"frontier_format": 1}', '{"format": 1}'])
def test_what_is_no_frontier(text: str) -> None:
    with pytest.raises(PlanMismatchError, match="not a jaxremat frontier"):
        Frontier.from_json(text)


def test_a_frontier_of_another_format(frontier: Frontier) -> None:
    data = {**json.loads(frontier.to_json()), "frontier_format": 99}
    with pytest.raises(PlanMismatchError, match="has format 99"):
        Frontier.from_json(json.dumps(data))


def test_the_table(frontier: Frontier) -> None:
    lines = repr(frontier).splitlines()
    assert re.match(r"Frontier: 6 budgets on .*; the plain step needs 1\.\d+ MiB", lines[0])
    assert lines[1].split() == [
        "budget",
        "of",
        "plain",
        "compiled",
        "predicted",
        "overhead",
        "(compiled)",
        "gap",
    ]
    assert len(lines) == 2 + POINTS
    assert re.search(r"100%  .*  0\.00%  +0\.00%  0\.00%  plain$", lines[2])
    assert sum("knee" in line for line in lines) == 1


def test_the_picture(frontier: Frontier, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = frontier.plot()
    pyplot.savefig(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    labels = axes.get_legend_handles_labels()[1]
    for wanted in (
        "plain step",
        "planned for a budget",
        "vertex of the hull",
        "knee: ",
        "bound",
        "dots saved",
    ):
        assert any(wanted in label for label in labels), wanted
    assert len(labels) == len(set(labels))
    own = pyplot.subplots()[1]
    assert frontier.plot(own) is own
    alone = swept(2, planning=jaxremat.Planning(verify=False)).plot()
    assert "predicted" in alone.get_xlabel()
    pyplot.close("all")


def test_a_picture_without_matplotlib(frontier: Frontier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InstallError, match=r"pip install \"\.\[tools\]\""):
        frontier.plot()


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 1}, "not a number of budgets"),
        ({"points": True}, "not a number of budgets"),
        ({"points": 2.5}, "not a number of budgets"),
        ({"budget": "1GiB"}, "leave out `budget`"),
        ({"plan": None}, "leave out `plan`"),
        (
            {"effort": "much"},
            "as part of `planning`. Write `sweep(..., planning=jaxremat.Planning(effort='much'))`",
        ),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        jaxremat.sweep(CASE.step, *ARGS, **options)


def test_a_step_is_swept_with_its_own_options(frontier: Frontier) -> None:
    step = jaxremat.optimize("1TiB", donate_argnums=0, allow=())(CASE.step)
    assert jaxremat.sweep(step, *ARGS, points=POINTS) == frontier
    with pytest.raises(ArgumentError, match="uses the options of a step"):
        jaxremat.sweep(step, *ARGS, donate_argnums=0)


def test_bounds_only_grow_between_neighbours(frontier: Frontier) -> None:
    """The bound is convex and falls with memory."""
    peaks = sorted(p.predicted_peak_nbytes for p in frontier)
    bounds = [frontier.lower_bound(peak) for peak in peaks]
    assert all(a >= b for a, b in pairwise(bounds))


def test_a_step_of_nnx_objects() -> None:
    from flax import nnx

    net = nnx.List([nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(4)])

    def step(net: Any, x: jax.Array) -> jax.Array:
        def loss(net: Any) -> jax.Array:
            y = x
            for layer in net:
                y = jax.numpy.tanh(layer(y))
            return (y**2).mean()

        value, grads = nnx.value_and_grad(loss)(net)
        nnx.update(net, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(net, nnx.Param), grads))
        return value

    x = jax.ShapeDtypeStruct((512, 64), jax.numpy.float32)
    found = jaxremat.sweep(step, net, x, points=3, planning=jaxremat.Planning(verify=False))
    assert [found.cost(p) for p in found] == sorted(found.cost(p) for p in found)
    assert (
        found.least.plan.fingerprint
        == jaxremat.plan(step, net, x, budget="min", planning=jaxremat.Planning(verify=False)).fingerprint
    )
