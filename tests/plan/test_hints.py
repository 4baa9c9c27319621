"""`jaxremat.hint` and `pins`: identities where nothing is planned, honoured exactly where something is."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same, stripped
from flax import linen as nn
from jax.sharding import PartitionSpec

import jaxremat
from jaxremat import (
    HintError,
    InfeasibleHintError,
    JaxrematWarning,
    MinCut,
    Plan,
    RecomputeAll,
    SaveAll,
    hint,
)
from jaxremat._model import _variant

ROWS, WIDTH, LAYERS = 1024, 64, 4
AMPLE = "1GiB"


# ---- outside of a plan


def block(x: jax.Array, w: jax.Array, mark: Callable[..., Any]) -> jax.Array:
    h = mark(x @ w, "save", name="h")
    return mark(mark(jnp.tanh(h), "recompute") + x, "stage")


def bare(x: Any, action: str, *, name: str = "") -> Any:
    return x


def scanned(x: jax.Array, w: jax.Array, mark: Callable[..., Any]) -> jax.Array:
    return jax.lax.scan(lambda c, _: (block(c, w, mark), None), x, length=3)[0]


def total(x: jax.Array, w: jax.Array, mark: Callable[..., Any]) -> jax.Array:
    return block(x, w, mark).sum()


TRANSFORMED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "itself": lambda mark: partial(block, mark=mark),
    "grad": lambda mark: jax.grad(partial(total, mark=mark), (0, 1)),
    "forward mode": lambda mark: lambda x, w: jax.jvp(partial(block, mark=mark), (x, w), (w, x)),
    "linearize": lambda mark: lambda x, w: jax.linearize(partial(block, mark=mark), x, w)[1](w, x),
    "grad of grad": lambda mark: jax.grad(lambda x, w: jax.grad(partial(total, mark=mark))(x, w).sum()),
    "vmap": lambda mark: lambda x, w: jax.vmap(partial(block, mark=mark), (0, None))(jnp.stack([x, w]), w),
    "grad of vmap": lambda mark: jax.grad(
        lambda x, w: jax.vmap(partial(total, mark=mark), (None, 0))(x, jnp.stack([w, x])).sum()
    ),
    "scan": lambda mark: partial(scanned, mark=mark),
    "grad of scan": lambda mark: jax.grad(lambda x, w: scanned(x, w, mark).sum(), (0, 1)),
    "checkpoint": lambda mark: jax.grad(lambda x, w: jax.checkpoint(partial(total, mark=mark))(x, w)),
    "policy": lambda mark: jax.grad(
        jax.checkpoint(partial(total, mark=mark), policy=jax.checkpoint_policies.everything_saveable)
    ),
    "cond": lambda mark: lambda x, w: jax.lax.cond(x[0, 0] > 0, partial(block, mark=mark), lambda x, w: x, x, w),
    "shard_map": lambda mark: jax.shard_map(
        jax.grad(partial(total, mark=mark)),
        mesh=jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(PartitionSpec("i"), PartitionSpec()),
        out_specs=PartitionSpec("i"),
    ),
}  # fmt: skip


SLOW = {
    "grad of grad",
    "checkpoint",
    "grad of vmap",
    "grad of scan",
    "policy",
    "linearize",
    "cond",
    "forward mode",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in TRANSFORMED]
)
def test_a_hint_is_an_identity_and_compiles_to_nothing(name: str) -> None:
    x, w = jax.random.normal(jax.random.key(0), (2, 4, 4))
    marked, plain = TRANSFORMED[name](hint), TRANSFORMED[name](bare)
    assert_same(plain(x, w), marked(x, w))
    assert "jaxremat_hint" in str(jax.make_jaxpr(marked)(x, w))
    assert stripped(jax.jit(marked).lower(x, w).compile()) == stripped(jax.jit(plain).lower(x, w).compile())


def test_a_hint_on_trees_and_what_is_no_array() -> None:
    tree = {"a": jnp.ones(3), "b": [np.arange(2), None, "text", 3], "c": jax.random.key(0)}
    found = hint(tree, "save")
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["b"][0] is tree["b"][0]
    assert found["b"][2:] == ["text", 3]
    assert_same(tree["a"], found["a"])
    assert jnp.array_equal(jax.random.key_data(found["c"]), jax.random.key_data(tree["c"]))
    text = str(jax.make_jaxpr(lambda t: hint(t, "save"))({"a": jnp.ones(3), "b": jnp.arange(2)}))
    assert text.count("jaxremat_hint") == 2


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(
        HintError, match=r'`hint\(x, \'keep\'\)`.*Write "save", "recompute", "offload" or "stage"'
    ):
        hint(jnp.ones(3), "keep")  # type: ignore[arg-type]
    with pytest.raises(HintError, match="action is unknown"):
        jaxremat.optimize(AMPLE, pins={"*": "keep"})(bare)
    with pytest.raises(HintError, match="a pattern is text"):
        jaxremat.optimize(AMPLE, pins={3: "save"})(bare)  # type: ignore[dict-item]


def test_a_name_is_jaxs_own_too() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("h")
    rows = jnp.ones((4, 4))
    text = str(
        jax.make_jaxpr(jax.grad(jax.checkpoint(partial(total, mark=hint), policy=policy), 1))(rows, rows)
    )
    assert "name=h" in text


def test_other_forms_leave_what_is_hinted_in_memory() -> None:
    key = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(key[0], (4, 512, 32))
    weights = {
        "qkv": jax.random.normal(key[1], (32, 3, 32)) * 0.2,
        "up": jax.random.normal(key[2], (32, 512)) * 0.2,
        "down": jax.random.normal(key[3], (512, 32)) * 0.05,
    }

    def loss(weights: Any, x: jax.Array, marked: bool) -> jax.Array:
        q, k, v = jnp.moveaxis(jnp.einsum("btc,cjd->btjd", x, weights["qkv"]), 2, 0)
        attended = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ v
        attended = hint(attended, "save", name="attended") if marked else attended
        return jnp.mean((jnp.tanh((attended + x) @ weights["up"]) @ weights["down"]) ** 2)

    def step(weights: Any, x: jax.Array, marked: bool = True) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x, marked)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    optimized = jaxremat.optimize("min", planning=jaxremat.Planning(solver=MinCut()))(step)
    plan = optimized.plan(weights, x)
    assert plan.form.settings(_variant.ATTENTION) and plan.form.settings(_variant.ROWS)
    assert ["save"] in actions_of(plan).values()
    assert_same(jax.jit(partial(step, marked=False))(weights, x), optimized(weights, x))


# ---- programs


def marked_loss(weights: Any, x: jax.Array, marks: Any) -> jax.Array:
    for i, w in enumerate(weights):
        h = x @ w
        h = hint(h, marks[i]) if i in marks else h
        x = jnp.sin(h)
    return jnp.mean(x**2)


def train(weights: Any, x: jax.Array, *, marks: Any) -> Any:
    value, grads = jax.value_and_grad(marked_loss)(weights, x, marks)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def arguments() -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) * 0.2 for k in keys]
    return weights, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def planned(marks: Any, budget: Any, fn: Any = train, **options: Any) -> tuple[Plan, Any]:
    planning = jaxremat.Planning(**({"solver": MinCut(), "verify": False} | options))
    step = jaxremat.optimize(budget, planning=planning, allow=())(partial(fn, marks=marks))
    plan = step.plan(*arguments())
    assert_same(jax.jit(partial(fn, marks={}))(*arguments()), step(*arguments()))
    return plan, step


def actions_of(plan: Plan) -> dict[str, list[str]]:
    """What happens to the marked values, by the hint."""
    found: dict[str, list[str]] = {}
    for action in plan.actions:
        if action.pin:
            found.setdefault(action.pin, []).append(action.action)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"solver": jaxremat.Milp(), "verify": True},
        {},
        {"solver": RecomputeAll()},
        {"solver": SaveAll()},
    ],
    ids=str,
)
def test_hints_in_a_model_are_honoured(options: Any) -> None:
    plan, _ = planned({1: "save", 3: "recompute"}, AMPLE, **options)
    assert not plan.drops_nothing  # though the plain step fits
    line = re.escape("test_hints.py:") + r"\d+ \(marked_loss\)"
    found = actions_of(plan)
    assert len(found) == 2
    for pin, actions in found.items():
        match = re.fullmatch(rf'hint\(..., "(save|recompute)"\) at {line}', pin)
        assert match is not None
        assert actions == [match[1]]


def test_a_hint_in_the_text_of_a_plan_and_its_json() -> None:
    plan, _ = planned({3: "recompute"}, AMPLE)
    assert re.search(r"recompute in stages? \d+.* \(pinned\)  dot_general", str(plan))
    assert Plan.from_json(plan.to_json()) == plan
    again = jaxremat.optimize(plan=plan)(partial(train, marks={3: "recompute"}))
    assert actions_of(again.plan(*arguments())) == actions_of(plan)
    with pytest.raises(jaxremat.PlanMismatchError):
        jaxremat.optimize(plan=plan)(partial(train, marks={}))(*arguments())


def test_save_hints_cost_nothing_where_the_plain_step_fits() -> None:
    plan, step = planned({0: "save", 2: "stage"}, AMPLE, verify=True)
    assert plan.drops_nothing and plan.stages == ()
    compiled = jax.jit(partial(train, marks={})).lower(*arguments()).compile()
    assert jaxremat.MemoryStats.of(step.compile(*arguments())) == jaxremat.MemoryStats.of(compiled)


def test_a_stage_in_a_model_cuts_behind_the_cotangent() -> None:
    """Cotangents of `h[2]` are read by the contractions of layer 2, which stand behind the cut, not before it."""
    step = jaxremat.optimize("min", planning=jaxremat.Planning(verify=False))(
        partial(train, marks={2: "stage"})
    )
    plan = step.plan(*arguments())
    traced = jaxremat._rewrite._trace.trace(jax.jit(partial(train, marks={2: "stage"})), arguments(), {})  # type: ignore[attr-defined]
    (mark,) = traced.hints
    readers = [i for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns) if mark.variable in eqn.invars]
    assert len(readers) == 2
    assert min(readers) in {start for start, _ in plan.stages}
    assert_same(jax.jit(partial(train, marks={}))(*arguments()), step(*arguments()))


def test_hints_that_make_a_budget_infeasible_are_named() -> None:
    def plan(marks: Any, budget: Any, **options: Any) -> Plan:
        planning = jaxremat.Planning(solver=MinCut(), **options)
        return jaxremat.plan(partial(train, marks=marks), *arguments(), budget=budget, planning=planning)

    marks = dict.fromkeys(range(LAYERS), "save")
    budget = plan({}, "min").peak_nbytes + 4 * ROWS * WIDTH // 2
    with pytest.raises(InfeasibleHintError, match="cannot be met with these hints") as caught:
        plan(marks, budget)
    error = caught.value
    assert error.free_min_peak_nbytes <= budget < error.min_peak_nbytes
    assert len(error.hints) == 1 and error.hints[0] in str(error)
    assert "test_hints.py:" in error.hints[0]
    assert jaxremat.format_nbytes(error.free_min_peak_nbytes) in str(error)
    fits = plan(marks, error.min_peak_nbytes)
    assert actions_of(fits)
    with pytest.raises(InfeasibleHintError, match="cannot be met with these hints"):
        plan(marks, fits.predicted_peak_nbytes - 4 * ROWS * WIDTH, verify=False)
    with pytest.raises(jaxremat.InfeasibleBudgetError, match="or a smaller batch") as plain:
        plan(marks, 1000)
    assert not isinstance(plain.value, InfeasibleHintError)
    assert "Without hints and pins, the step may need less" in str(plain.value)


def in_a_scan(weights: Any, x: jax.Array, *, marks: Any) -> Any:
    def loss(stacked: jax.Array) -> jax.Array:
        def body(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            h = c @ w
            h = hint(h, marks["h"]) if "h" in marks else h
            return jnp.sin(jnp.sin(h) @ w), None

        again = jax.checkpoint(body) if "checkpoint" in marks else body
        return jnp.mean(jax.lax.scan(again, x, stacked)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(jnp.stack(weights))
    return grads, value


@pytest.mark.parametrize(
    ("checkpoint", "action"),
    [
        ({}, "save"),
        ({"checkpoint": True}, "recompute"),
        pytest.param({}, "recompute", marks=pytest.mark.slow),
        pytest.param({"checkpoint": True}, "save", marks=pytest.mark.slow),
    ],
)
def test_a_hint_in_the_body_of_a_scan_is_about_every_iteration(action: str, checkpoint: Any) -> None:
    plan, _ = planned({"h": action, **checkpoint}, AMPLE if action == "recompute" else "min", in_a_scan)
    (mark,) = (a for a in plan.actions if a.pin)
    assert mark.action == action
    assert mark.shape == f"{LAYERS} x f32[{ROWS},{WIDTH}]"
    assert mark.nbytes == LAYERS * ROWS * WIDTH * 4


def test_a_stage_in_the_body_of_a_scan() -> None:
    plan, _ = planned({"h": "stage"}, "min", in_a_scan)
    assert plan.stages


def in_a_checkpoint(weights: Any, x: jax.Array, *, marks: Any) -> Any:
    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        h = x @ w
        h = hint(h, marks["h"]) if "h" in marks else h
        return jnp.sin(h)

    def loss(weights: Any) -> jax.Array:
        y = x
        for w in weights:
            y = layer(y, w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return grads, value


def test_hints_within_checkpoints_of_the_users_own() -> None:
    plan, _ = planned({"h": "save"}, "min", in_a_checkpoint)
    assert list(actions_of(plan).values()) == [["save"] * (LAYERS - 1)] or [["save"] * LAYERS]
    assert all(a.action == "save" for a in plan.actions if a.name == "dot_general")


def test_a_hint_that_no_plan_reaches_is_reported() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda y: hint(jnp.sin(y @ w), "save"), lambda y: y, x).sum()

    with pytest.warns(
        JaxrematWarning, match=r'hint\(..., "save"\) at test_hints.py:.* has no effect.*`cond`'
    ):
        jaxremat.plan(
            jax.grad(loss),
            jnp.eye(WIDTH),
            jnp.ones((WIDTH, WIDTH)),
            budget=AMPLE,
            planning=jaxremat.Planning(verify=False),
        )


# ---- from outside


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH, name="out")(nn.gelu(nn.Dense(2 * WIDTH)(x)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = Block()(x)
        return x


def pinned_plan(step: Any, args: Any, pins: Any, budget: Any = AMPLE, **options: Any) -> Plan:
    planning = jaxremat.Planning(**({"solver": MinCut(), "verify": False} | options))
    return jaxremat.plan(step, *args, budget=budget, pins=pins, planning=planning)


def flax_step() -> tuple[Any, tuple[Any, ...]]:
    x = arguments()[1]
    params = Net().init(jax.random.key(0), x)

    def step(params: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean(jnp.square(Net().apply(p, x)))  # type: ignore[arg-type]

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, x)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("Block_1", None),
        ("Block_*/Dense_0/dot_general", 3),
        ("Block_[02]/Dense_0/dot_general", 2),
        (re.compile(r"Block_\d/Dense_0/dot"), 3),
        ("(Dense.__call__)", None),
    ],
    ids=str,
)
def test_pins_from_outside(pattern: Any, count: int | None) -> None:
    step, args = flax_step()
    plan = pinned_plan(step, args, {pattern: "recompute"})
    hit = [a for a in plan.actions if a.pin]
    assert hit and all(a.action == "recompute" for a in hit)
    assert count is None or len(hit) == count
    if pattern == "Block_1":
        assert all("Block_1" in a.scope for a in hit)
        assert not any("Block_1" in a.scope for a in plan.actions if not a.pin)


def test_a_pin_for_stages_cuts_where_each_backward_pass_begins() -> None:
    step, args = flax_step()
    planning = jaxremat.Planning(solver=MinCut(), verify=False)
    pins = {"Block_*": "stage"}
    plan = jaxremat.plan(
        step, *args, budget="min", pins=pins, allow=(), planning=planning
    )  # as it is numbered below
    starts = {start for start, _ in plan.stages}
    traced = jaxremat._rewrite._trace.trace(jax.jit(step), args, {})  # type: ignore[attr-defined]
    stacks = [str(eqn.source_info.name_stack) for eqn in traced.jaxpr.jaxpr.eqns]
    for i in range(3):
        first = next(n for n, text in enumerate(stacks) if "transpose(" in text and f"Block_{i}" in text)
        assert first in starts or first == min(starts)


def test_a_pattern_that_matches_nothing_names_what_is_near() -> None:
    step, args = flax_step()
    with pytest.raises(HintError, match=r"matches nothing in the forward pass. Similar names are: .*Block_"):
        pinned_plan(step, args, {"Blokc_*": "save"})
    with pytest.raises(HintError, match="matches nothing in the backward pass"):
        pinned_plan(step, args, {"nowhere": "stage"})
    with pytest.raises(HintError, match="reads none of their results from memory"):
        pinned_plan(step, args, {"Block_*/integer_pow": "save"}, "min", verify=True)


def test_pins_belong_to_planning() -> None:
    step, args = flax_step()
    plan = pinned_plan(step, args, {"Block_1": "recompute"})
    with pytest.raises(jaxremat.ArgumentError, match="`pins` is an option of planning"):
        jaxremat.optimize(plan=plan, pins={"Block_1": "recompute"})
    again = jaxremat.optimize(plan=plan, planning=jaxremat.Planning(verify=False))(step).plan(*args)
    assert [(a.value, a.action) for a in again.actions] == [(a.value, a.action) for a in plan.actions]
