"""`plan.policy()` is what a plan saves, wherever JAX and Flax take a policy."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals  # what `jax.ad_checkpoint.print_saved_residuals` prints
from jax.ad_checkpoint import checkpoint_name
from test_checkpoint import assert_close, chain, loss, scanned, weights, x0

import jaxremat
from jaxremat._emit._segmentation import _rising

weights = weights[:4]


def kept(fn: Callable[..., Any], *args: Any) -> list[tuple[int, str]]:
    """Bytes and origin of what JAX keeps of what the function makes."""
    listed: list[tuple[Any, str]] = list(saved_residuals(fn, *args))
    return [(a.size * a.dtype.itemsize, where) for a, where in listed if not where.startswith("from")]


def named_chain(x: Any, ws: Any) -> Any:
    for i, w in enumerate(ws):
        x = checkpoint_name(jnp.tanh(checkpoint_name(x @ w, "product")), "even" if i % 2 else "odd")
    return x


def test_values_that_the_user_named() -> None:
    plan = jaxremat.checkpoint(named_chain, "dots").plan(x0, weights)
    remat = jax.checkpoint(named_chain, policy=plan.policy())
    saved = {a.name for a in plan.actions if a.named and a.action == "save"}
    assert saved == plan.saved_names < {"product", "even", "odd"}
    listed = [where for _, where in kept(remat, x0, weights) if where.startswith("named")]
    assert listed and all(any(f"'{name}'" in where for name in saved) for where in listed)
    assert jaxremat.policy(plan) == plan.policy()


def test_what_a_plan_has_in_the_hosts_memory_is_offloaded() -> None:
    plan = jaxremat.checkpoint(named_chain, "dots").plan(x0, weights)
    name = max((a for a in plan.actions if a.named and a.action == "save"), key=lambda a: a.nbytes).name
    there = replace(
        plan,
        actions=tuple(replace(a, action="offload") if a.name == name else a for a in plan.actions),
    )
    assert not plan.offloaded_names
    assert there.offloaded_names == {name} and there.saved_names == plan.saved_names

    def gradients(policy: Any) -> Any:
        return jax.grad(loss(jax.checkpoint(named_chain, policy=policy)))

    program = str(jax.make_jaxpr(gradients(there.policy()))(x0, weights))
    copies = sum(a.name == name for a in there.actions)
    assert program.count("device_put") == 2 * copies > 0
    assert "device_put" not in str(jax.make_jaxpr(gradients(plan.policy()))(x0, weights))
    assert_close(gradients(there.policy())(x0, weights), jax.grad(loss(named_chain))(x0, weights))


def test_plans_of_whole_steps_have_policies_too() -> None:
    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(lambda ws: loss(named_chain)(x, ws))(ws))

    least = jaxremat.plan(step, weights, x0, budget="min", planning=jaxremat.Planning(verify=False))
    assert isinstance(least, jaxremat.Plan) and {a.name for a in least.actions if a.named}
    assert "product" not in least.saved_names
    remat = jax.checkpoint(named_chain, policy=least.policy())
    assert not any("'product'" in where for _, where in kept(remat, x0, weights))


def test_plans_without_names_have_none() -> None:
    with pytest.raises(jaxremat.ArgumentError, match="has no names"):
        jaxremat.checkpoint(chain).plan(x0, weights).policy()
    with pytest.raises(jaxremat.ArgumentError, match="takes a plan"):
        jaxremat.policy("plan.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("fn", [chain, scanned], ids=lambda fn: fn.__name__)
def test_values_named_by_the_library(fn: Callable[..., Any]) -> None:
    naming = jaxremat.name_values(fn)
    assert_close(naming(x0, weights), fn(x0, weights))
    plan = jaxremat.checkpoint(naming, "50% of residuals", emit="custom_vjp").plan(x0, weights)
    remat = jax.checkpoint(naming, policy=plan.policy())
    assert_close(jax.grad(loss(remat), (0, 1))(x0, weights), jax.grad(loss(fn), (0, 1))(x0, weights))
    named = sum(a.nbytes for a in plan.actions if a.named and a.action == "save")
    assert sum(nbytes for nbytes, _ in kept(remat, x0, weights)) == named > 0


def test_a_plan_from_a_file_has_the_same_policy(tmp_path: Path) -> None:
    plan = jaxremat.checkpoint(named_chain, "dots").plan(x0, weights)
    plan.save(tmp_path / "plan.json")
    again = jaxremat.HeldPlan.load(tmp_path / "plan.json")
    assert again == plan and hash(again) == hash(plan) and again.policy() == plan.policy()
    with pytest.raises(jaxremat.PlanMismatchError, match=r"HeldPlan\.save"):
        jaxremat.HeldPlan.from_json("{}")
    with pytest.raises(jaxremat.PlanMismatchError, match="held_format"):  # one kind is not read as the other
        jaxremat.HeldPlan.from_json('{"format": 2}')


class Named(nn.Module):
    """A block whose values have names: what is expensive to compute, and what is cheap."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        product = checkpoint_name(nn.Dense(64)(x), "product")
        cheap = checkpoint_name(nn.gelu(product), "cheap")
        return x + jnp.tanh(checkpoint_name(nn.Dense(32)(cheap), "out"))


class Stack(nn.Module):
    """Some of these blocks."""

    block: Any = Named
    count: int = 3

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(self.count):
            x = self.block(name=f"block_{i}")(x)
        return x


def test_linen_remat() -> None:
    net = Stack()
    params = net.init(jax.random.key(1), x0)
    plan = jaxremat.checkpoint(net.apply, "dots").plan(params, x0)
    assert "product" in plan.saved_names and "cheap" not in plan.saved_names
    planned = Stack(nn.remat(Named, policy=plan.policy()))
    names = {where.split("'")[1] for _, where in kept(planned.apply, params, x0) if where.startswith("named")}
    assert names == plan.saved_names
    assert sum(n for n, _ in kept(planned.apply, params, x0)) < sum(n for n, _ in kept(net.apply, params, x0))
    assert_close(jax.grad(loss(planned.apply))(params, x0), jax.grad(loss(net.apply))(params, x0))


def test_linen_remat_scan() -> None:
    """Four layers in two levels of loops follow the plan of two unrolled ones, whose values have the same names."""
    params = Stack(count=2).init(jax.random.key(1), x0)
    plan = jaxremat.checkpoint(Stack(count=2).apply, "dots").plan(params, x0)
    net = nn.remat_scan(Named, lengths=(2, 2))()
    planned = nn.remat_scan(Named, lengths=(2, 2), policy=plan.policy())()
    params = net.init(jax.random.key(1), x0)
    found, expected = (jax.grad(loss(each.apply)) for each in (planned, net))
    assert_close(found(params, x0), expected(params, x0))
    sizes = [nbytes for nbytes, _ in kept(planned.apply, params, x0)]
    assert 4 * 64 * 64 * 4 in sizes and 4 * 64 * 32 * 4 in sizes  # both products of each layer, stacked
    ours, plain = (str(jax.make_jaxpr(grad)(params, x0)).count("dot_general") for grad in (found, expected))
    assert ours < plain


class Part(nnx.Module):
    """As `Named`."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        product = checkpoint_name(self.first(x), "product")
        cheap = checkpoint_name(nnx.gelu(product), "cheap")
        return x + jnp.tanh(checkpoint_name(self.second(cheap), "out"))


def test_nnx_remat() -> None:
    part = Part(nnx.Rngs(0))
    graph, state = nnx.split(part)

    def plain(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x)

    plan = jaxremat.checkpoint(plain, "dots").plan(state, x0)

    def planned(state: Any, x: Any) -> Any:
        return nnx.remat(Part.__call__, policy=plan.policy())(nnx.merge(graph, state), x)

    assert "product" in plan.saved_names and "cheap" not in plan.saved_names
    names = {where.split("'")[1] for _, where in kept(planned, state, x0) if where.startswith("named")}
    assert names == plan.saved_names
    assert_close(jax.grad(loss(planned))(state, x0), jax.grad(loss(plain))(state, x0))


def test_stages_rise_and_differ_least_from_the_votes() -> None:
    draw = random.Random(3)
    for _ in range(200):
        votes = [(draw.randrange(4), draw.randint(1, 9)) for _ in range(draw.randint(0, 6))]

        def cost(stages: Any, votes: list[tuple[int, int]] = votes) -> int:
            return sum(
                weight * abs(stage - vote) for stage, (vote, weight) in zip(stages, votes, strict=True)
            )

        found = _rising(votes)
        rising = (s for s in itertools.product(range(4), repeat=len(votes)) if list(s) == sorted(s))
        assert found == sorted(found)
        assert cost(found) == min(map(cost, rising))


def test_a_small_value_with_a_late_derivative_moves_nobody() -> None:
    """That of a running mean's decay runs last of all, behind all stages."""
    x, ws = jnp.ones((256, 64)), [jnp.eye(64)] * 6

    def net(x: Any, ws: Any, means: Any, counted: bool) -> Any:
        kept = []
        for w, mean in zip(ws, means, strict=True):
            x = jnp.tanh(jnp.sin(x @ w) @ w)
            kept.append(0.9 * mean + 0.1 * x.mean(0) if counted else mean)
        return x, kept

    def checkpoints(counted: bool) -> int:
        planning = jaxremat.Planning(solver=jaxremat.MinCut())
        planned = jaxremat.checkpoint(net, "min", static_argnums=3, planning=planning)
        text = str(jax.make_jaxpr(planned, static_argnums=3)(x, ws, [jnp.zeros(64)] * 6, counted))
        return text.count("policy=")

    assert checkpoints(True) >= checkpoints(False) >= 3
