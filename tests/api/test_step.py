"""What `optimize` accepts, keeps and refuses: signatures, structures, caching, plans from files, every error."""

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close, assert_same, stripped
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxremat
from jaxremat import (
    ArgumentError,
    BudgetError,
    InfeasibleBudgetError,
    JaxrematWarning,
    MemoryStats,
    MinCut,
    Plan,
    PlanMismatchError,
    RecomputeAll,
    Solution,
    SolverError,
)

BATCH, WIDTH, LAYERS = 256, 32, 6
AMPLE = "1GiB"


class Counting:
    """A user's own solver, which counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def solve(self, graph: jaxremat.Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        self.calls += 1
        return MinCut().solve(graph, budget_nbytes, time_limit=time_limit)


class Fixed:
    """A solver that returns what it is made with."""

    def __init__(self, answer: Any):
        self.answer = answer

    def solve(self, graph: jaxremat.Graph, budget_nbytes: int | None, *, time_limit: float) -> Any:
        return self.answer(graph) if callable(self.answer) else self.answer


def loss(
    params: Any, x: jax.Array, scale: Any = 1.0, activation: str = "tanh", layers: int | None = None
) -> jax.Array:
    for w in params[:layers]:
        x = getattr(jnp, activation)(x @ w) * scale
    return jnp.mean(x.astype(jnp.float32) ** 2)


def train(
    params: Any, x: jax.Array, scale: Any = 1.0, activation: str = "tanh", layers: int | None = None
) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, scale, activation, layers)
    return {"params": [p - 0.1 * g for p, g in zip(params, grads, strict=True)], "loss": (value, None)}


def make_params(layers: int = LAYERS, dtype: Any = jnp.float32) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), layers)
    return [jax.random.normal(k, (WIDTH, WIDTH), dtype) * 0.3 for k in keys]


def make_batch(batch: int = BATCH, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, WIDTH), dtype)


def two_thirds(fn: Any = train, *args: Any, share: float = 0.67) -> int:
    """A budget with this share of the plain temporaries."""
    stats = jaxremat.memory(fn, *(args or (make_params(), make_batch())))
    return stats.base_nbytes + int(share * stats.temporaries_nbytes)


@pytest.fixture(scope="module")
def budget() -> int:
    return two_thirds()


@pytest.fixture(scope="module")
def planned(budget: int) -> jaxremat.Step:
    """A step that is planned for the usual arguments."""
    step = jaxremat.optimize(budget)(train)
    assert not step.plan(make_params(), make_batch()).drops_nothing
    return step


def test_drop_in_for_jit(planned: jaxremat.Step) -> None:
    args = make_params(), make_batch()
    want = jax.jit(train)(*args)
    assert_same(want, planned(*args))
    assert_same(want, planned(*args))  # by the short way
    assert_same(jax.jit(train)(args[0], 2 * args[1]), planned(args[0], 2 * args[1]))
    assert_same(want, planned(args[0], np.asarray(args[1])))
    names: Any = planned
    assert names.__wrapped__ is train
    assert names.__name__ == "train"
    assert "optimize(" in repr(planned)
    assert "train" in repr(planned)


def test_keyword_arguments(budget: int) -> None:
    step = jaxremat.optimize(budget, planning=jaxremat.Planning(solver=MinCut()))(train)
    params, x = make_params(), make_batch()
    assert_same(jax.jit(train)(x=x, params=params), step(x=x, params=params))
    assert step.plan(x=x, params=params) is step.plan(params=params, x=x)
    assert MemoryStats.of(step.compile(params, x=x)).peak_nbytes <= budget


def test_structs_on_a_mesh_are_planned_once_with_the_arrays_of_their_kind() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    args = jax.device_put((make_params(), make_batch()), NamedSharding(mesh, PartitionSpec()))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args)
    step = jaxremat.optimize(AMPLE)(train)
    assert step.plan(*like) is step.plan(*args)


def test_static_arguments() -> None:
    params, x = make_params(), make_batch()
    budget = two_thirds(partial(train, activation="sin"))
    solver = Counting()
    names = jaxremat.optimize(
        AMPLE, static_argnames=("activation", "layers"), planning=jaxremat.Planning(solver=solver)
    )(train)
    numbers = jaxremat.optimize(budget, static_argnums=(3, 4), planning=jaxremat.Planning(solver=solver))(
        train
    )
    for activation in ("sin", "tanh"):
        want = jax.jit(train, static_argnames=("activation", "layers"))(
            params, x, 1.0, activation, layers=None
        )
        assert_same(want, names(params, x, 1.0, activation=activation))
        assert_same(want, numbers(params, x, 1.0, activation, None))
        assert_same(want, numbers(params, x, 1.0, activation, None))
    sin, tanh = (numbers.plan(params, x, 1.0, name, None) for name in ("sin", "tanh"))
    assert sin.fingerprint != tanh.fingerprint


def test_methods(budget: int) -> None:
    class Trainer:
        rate = 0.1

        @partial(jaxremat.optimize, budget, static_argnums=0, planning=jaxremat.Planning(solver=MinCut()))()
        def step(self, params: Any, x: jax.Array) -> Any:
            """One step."""
            value, grads = jax.value_and_grad(loss)(params, x)
            return [p - self.rate * g for p, g in zip(params, grads, strict=True)], value

    trainer, other = Trainer(), Trainer()
    other.rate = 0.2
    params, x = make_params(), make_batch()
    assert isinstance(Trainer.step, jaxremat.Step)
    assert trainer.step.__doc__ == "One step."
    for t in (trainer, other, trainer):
        value, grads = jax.jit(jax.value_and_grad(loss))(params, x)
        assert_same(([p - t.rate * g for p, g in zip(params, grads, strict=True)], value), t.step(params, x))
    assert not trainer.step.plan(params, x).drops_nothing
    assert MemoryStats.of(trainer.step.compile(params, x)).peak_nbytes <= budget
    assert trainer.step.lower(params, x).as_text()


@pytest.mark.parametrize("donate", [{"donate_argnums": 0}, {"donate_argnames": "params"}], ids=str)
def test_donation(donate: Any) -> None:
    stats = MemoryStats.of(
        jax.jit(train, **donate).lower(make_params(), make_batch()).compile(jaxremat.compiler_options("cpu"))
    )
    budget = stats.base_nbytes + int(0.67 * stats.temporaries_nbytes)
    step = jaxremat.optimize(budget, planning=jaxremat.Planning(solver=MinCut()), **donate)(train)
    assert not step.plan(make_params(), make_batch()).drops_nothing
    assert (
        MemoryStats.of(step.compile(make_params(), make_batch())).aliased_nbytes == stats.aliased_nbytes > 0
    )
    for _ in range(2):
        params, x = make_params(), make_batch()
        want = jax.jit(train)(params, x)
        assert_same(want, step(params, x))
        assert all(p.is_deleted() for p in params)
        assert not x.is_deleted()


def test_structs_in_place_of_arrays(budget: int) -> None:
    solver = Counting()
    step = jaxremat.optimize(budget, planning=jaxremat.Planning(solver=solver))(train)
    structs = jax.eval_shape(lambda: (make_params(), make_batch()))
    plan = step.plan(*structs)
    assert stripped(step.lower(*structs).compile()) == stripped(step.compile(*structs))
    assert MemoryStats.of(step.compile(*structs)).peak_nbytes == plan.compiled_peak_nbytes
    compiled = step.compile(*structs)
    assert_same(jax.jit(train)(make_params(), make_batch()), compiled(make_params(), make_batch()))


def test_one_planning_per_signature(budget: int) -> None:
    solver = Counting()
    step = jaxremat.optimize(budget, like=False, planning=jaxremat.Planning(solver=solver))(train)
    params, x = make_params(), make_batch()
    step(params, x)
    asked = solver.calls
    assert asked > 0
    step(params, x)
    step(make_params(), np.asarray(x))
    plan = step.plan(params, x)
    step.compile(params, x)
    assert solver.calls == asked
    bigger = make_batch(BATCH + 16)
    assert_same(jax.jit(train)(params, bigger), step(params, bigger))
    assert solver.calls > asked
    asked = solver.calls
    assert step.plan(params, bigger) != plan
    assert step.plan(params, x) is plan
    assert_same(jax.jit(train)(params, x), step(params, x))
    assert solver.calls == asked
    assert plan.solver == "mincut"


def test_weak_types_are_kept_apart() -> None:
    params, x = make_params(dtype=jnp.bfloat16), make_batch(dtype=jnp.bfloat16)
    step = jaxremat.optimize(AMPLE)(train)
    for scale in (0.5, jnp.float32(0.5), jnp.bfloat16(0.5), 1):
        assert_same(jax.jit(train)(params, x, scale), step(params, x, scale))
    assert step.plan(params, x, 0.5).fingerprint != step.plan(params, x, jnp.float32(0.5)).fingerprint


def test_inside_other_transformations(planned: jaxremat.Step) -> None:
    params, x = make_params(), make_batch()
    with pytest.warns(JaxrematWarning, match="outermost"):
        got = jax.jit(lambda p: planned(p, x))(params)
    assert_same(jax.jit(train)(params, x), got)
    with pytest.warns(JaxrematWarning, match="`loss` is called inside another"):
        grads = jax.grad(jaxremat.optimize(AMPLE)(loss))(params, x)
    assert_same(jax.grad(jax.jit(loss))(params, x), grads)


def test_plan_from_a_file_needs_no_solver(planned: jaxremat.Step, tmp_path: Any, monkeypatch: Any) -> None:
    args = make_params(), make_batch()
    plan = planned.plan(*args)
    plan.save(tmp_path / "plan.json")
    monkeypatch.delitem(sys.modules, "jaxremat._solver._milp", raising=False)
    monkeypatch.setitem(sys.modules, "mip", None)
    with pytest.raises(ImportError):
        import mip  # noqa: F401
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    step = jaxremat.optimize(plan=loaded)(train)
    assert MemoryStats.of(step.compile(*args)).peak_nbytes == plan.compiled_peak_nbytes
    assert stripped(step.compile(*args)) == stripped(planned.compile(*args))
    assert_same(jax.jit(train)(*args), step(*args))
    assert "plan=" in repr(step)
    with pytest.raises(
        PlanMismatchError, match=r"was made for the program \w{12}, .*Make a new plan for this step"
    ):
        step(args[0], make_batch(BATCH + 1))
    path = tmp_path / "plan.json"
    assert jaxremat.optimize(plan=path)(train).plan(*args) == jaxremat.optimize(plan=str(path))(train).plan(
        *args
    )
    with pytest.raises(ArgumentError, match="No such file"):
        jaxremat.optimize(plan="missing.json")(train)
    with pytest.raises(ArgumentError, match=r"Plan\.from_json"):
        jaxremat.optimize(plan=plan.to_json())(train)
    tight = Plan.from_json(json.dumps({**json.loads(plan.to_json()), "budget_nbytes": 1000}))
    with pytest.raises(InfeasibleBudgetError, match="this machine's compiler needs") as caught:
        jaxremat.optimize(plan=tight)(train).plan(*args)
    assert caught.value.min_peak_nbytes == plan.compiled_peak_nbytes


def test_thorough_effort_gives_no_worse_plan(budget: int) -> None:
    step = jaxremat.optimize(budget, planning=jaxremat.Planning(effort="thorough"))(train)
    args = make_params(), make_batch()
    found = step.plan(*args)
    assert found.compiled_peak_nbytes is not None
    assert found.compiled_peak_nbytes <= budget
    quick = jaxremat.plan(train, *args, budget=budget)
    assert found.compile_count >= quick.compile_count
    assert found.overhead <= quick.overhead
    again = jaxremat.optimize(plan=Plan.from_json(found.to_json()))(train)
    assert_close(again(*args), train(*args), rtol=1e-5, atol=1e-6)


def test_unverified_plan(budget: int) -> None:
    args = make_params(), make_batch()
    step = jaxremat.optimize(budget, planning=jaxremat.Planning(verify=False))(train)
    plan = step.plan(*args)
    assert plan.compiled_peak_nbytes is None
    assert plan.compiled_overhead is None
    assert plan.compile_count == 0
    assert plan.predicted_peak_nbytes <= budget
    assert_same(jax.jit(train)(*args), step(*args))


def test_budgets_as_text_and_shares() -> None:
    args = make_params(), make_batch()
    with pytest.raises(BudgetError, match="reports none"):
        jaxremat.optimize(0.9)(train)(*args)
    with pytest.raises(BudgetError, match="reports none"):
        jaxremat.optimize(None)(train)(*args)
    for bad in ("24 apples", 0, -5, 1.5, "0GiB", True, float("nan")):
        with pytest.raises(BudgetError, match="Write"):
            jaxremat.optimize(bad)
    assert jaxremat.plan(train, *args, budget="2GB").budget_nbytes == 2 * 10**9


def test_refused_where_written() -> None:
    with pytest.raises(ArgumentError, match=r"without a budget. Write `@jaxremat.optimize\(\"24GiB\"\)`"):

        @jaxremat.optimize
        def step(x: jax.Array) -> jax.Array:
            return x

    with pytest.raises(ArgumentError, match="but not both"):
        jaxremat.optimize()
    with pytest.raises(ArgumentError, match="no method `solve"):
        jaxremat.optimize(AMPLE, planning=jaxremat.Planning(solver=object()))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="decorates functions; it was given a int"):
        jaxremat.optimize(AMPLE)(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned a NoneType"),
        ((1, 2), "must return a `jaxremat.Solution`"),
        (lambda graph: Solution(jaxremat.Schedule(frozenset(), ())), "stages"),
        (
            lambda graph: Solution(jaxremat.Schedule(frozenset(), ((),) * len(graph.stages))),
            "neither saved nor recomputed",
        ),
    ],
    ids=["none", "tuple", "stages", "gone"],
)
def test_solver_answers_nonsense(answer: Any, message: str) -> None:
    with pytest.raises(SolverError, match=message):
        jaxremat.plan(
            train,
            make_params(),
            make_batch(),
            budget=200_000,
            planning=jaxremat.Planning(solver=Fixed(answer)),
        )


def test_solver_that_fits_nothing_is_no_excuse(budget: int) -> None:
    """A solver that ignores the budget: what the compiler says decides."""
    args = make_params(), make_batch()
    plan = jaxremat.plan(train, *args, budget=budget, planning=jaxremat.Planning(solver=RecomputeAll()))
    assert plan.compiled_peak_nbytes is not None
    assert plan.compiled_peak_nbytes <= budget


SCALED, WIDE, LONG = 8, 32, 256


def scaled(state: Any, x: jax.Array) -> Any:
    """Layers with a scale that is weakly typed, as what is made of Python's numbers is."""

    def loss(params: Any) -> jax.Array:
        def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ own["w"]) * own["scale"], None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def test_weak_types_stay_weak_and_nothing_is_planned_twice() -> None:
    scale = jnp.log(2.0 + jnp.arange(SCALED))[:, None]
    state = {"scale": scale, "w": jnp.tile(jnp.eye(WIDE), (SCALED, 1, 1))}
    x = jnp.ones((LONG, WIDE))
    planned = jaxremat.optimize("50% of temporaries")(scaled)
    after, _ = planned(state, x)
    plain, _ = jax.jit(scaled)(state, x)
    assert planned.plan(state, x).rounds
    assert scale.aval.weak_type and plain["scale"].aval.weak_type
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, plain)
    assert planned.plan(after, x) is planned.plan(state, x)
