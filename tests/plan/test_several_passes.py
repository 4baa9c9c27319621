"""Steps with several forward and backward passes one after the other, planned: each of them in half of its memory."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from jax import lax

import jaxremat
from jaxremat import Plan, close_over_dependencies
from jaxremat._compiler._devices import detect
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._later_passes import later_passes
from jaxremat._rewrite import _passes
from jaxremat._rewrite._fingerprint import fingerprint
from jaxremat._rewrite._memory_order import memory_order
from jaxremat._rewrite._trace import trace

WIDTH, BATCH = 32, 1024
Params = list[tuple[jax.Array, jax.Array]]
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def layers(seed: int, count: int, *, wide: int = WIDTH, out: int = WIDTH) -> Params:
    random = np.random.default_rng(seed)
    widths = [wide, *[WIDTH] * (count - 1), out]
    shapes = itertools.pairwise(widths)
    return [(jnp.asarray(random.normal(size=s) * s[0] ** -0.5, jnp.float32), jnp.zeros(s[1])) for s in shapes]


def batch(seed: int, width: int = WIDTH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, width)), jnp.float32)


def net(params: Params, x: jax.Array) -> jax.Array:
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def moved(params: Any, grads: Any, rate: Any = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def sharpness_aware() -> Made:
    """The gradient at parameters that the first gradient has moved uphill (Foret et al., 2021)."""

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((net(params, x) - y) ** 2)

    def step(params: Params, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.grad(loss)(params, x, y)
        norm = jnp.sqrt(jax.tree.reduce(operator.add, jax.tree.map(lambda g: jnp.sum(g * g), grads)))
        value, grads = jax.value_and_grad(loss)(moved(params, grads, -0.05 / norm), x, y)
        return moved(params, grads), value

    return step, (layers(0, 8), batch(1), batch(2))


def adversarial() -> Made:
    """A generator's gradient by the discriminator that has just been updated."""

    def judges_loss(judge: Params, maker: Params, real: jax.Array, noise: jax.Array) -> jax.Array:
        fake = jnp.mean(jax.nn.softplus(net(judge, net(maker, noise))))
        return fake + jnp.mean(jax.nn.softplus(-net(judge, real)))

    def makers_loss(maker: Params, judge: Params, noise: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-net(judge, net(maker, noise))))

    def step(state: Any, real: jax.Array, noise: jax.Array) -> Any:
        maker, judge = state
        judged, grads = jax.value_and_grad(judges_loss)(judge, maker, real, noise)
        judge = moved(judge, grads)
        made, grads = jax.value_and_grad(makers_loss)(maker, judge, noise)
        return (moved(maker, grads), judge), (judged, made)

    return step, ((layers(0, 4), layers(1, 4, out=1)), batch(2), batch(3))


def actor_critic() -> Made:
    """An actor's gradient by the critic that has just been updated."""

    def worth(critic: Params, state: jax.Array, action: jax.Array) -> jax.Array:
        return net(critic, jnp.concatenate([state, action], axis=1))

    def critics_loss(critic: Params, actor: Params, seen: Any) -> jax.Array:
        state, action, reward, following = seen
        later = worth(critic, following, jnp.tanh(net(actor, following)))
        return jnp.mean((worth(critic, state, action) - lax.stop_gradient(reward + 0.9 * later)) ** 2)

    def actors_loss(actor: Params, critic: Params, state: jax.Array) -> jax.Array:
        return -jnp.mean(worth(critic, state, jnp.tanh(net(actor, state))))

    def step(both: Any, seen: Any) -> Any:
        actor, critic = both
        value, grads = jax.value_and_grad(critics_loss)(critic, actor, seen)
        critic = moved(critic, grads)
        worth_now, grads = jax.value_and_grad(actors_loss)(actor, critic, seen[0])
        return (moved(actor, grads), critic), (value, worth_now)

    both = layers(0, 4), layers(1, 4, wide=2 * WIDTH, out=1)
    return step, (both, (batch(2), batch(3), batch(4, 1), batch(5)))


def accumulated() -> Made:
    """Gradients of three batches one after the other, without a loop."""

    def loss(params: Params, x: jax.Array) -> jax.Array:
        return jnp.mean((net(params, x) - x) ** 2)

    def step(params: Params, batches: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batches[0])
        for x in batches[1:]:
            more, others = jax.value_and_grad(loss)(params, x)
            value, grads = value + more, jax.tree.map(jnp.add, grads, others)
        return moved(params, grads), value

    return step, (layers(0, 6), [batch(1), batch(2), batch(3)])


STEPS = {made.__name__: made for made in (sharpness_aware, adversarial, actor_critic, accumulated)}


def planned(step: Callable[..., Any], args: Any, share: float) -> Plan:
    """The plan within this share of the plain step's temporaries."""
    return jaxremat.plan(step, *args, budget=f"{share:.0%} of temporaries")


def same(expected: Any, got: Any) -> None:
    assert_close(expected, got, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "share", "most"), [
    ("sharpness_aware", 0.35, 0.5),
    ("adversarial", 0.5, 0.4),
    ("actor_critic", 0.5, 0.25),
    ("accumulated", 0.3, 0.5),
])  # fmt: skip
def test_planned(name: str, share: float, most: float) -> None:
    step, args = STEPS[name]()
    plan = planned(step, args, share)
    assert plan.compiled_peak_nbytes is not None
    assert plan.compiled_peak_nbytes <= plan.budget_nbytes
    assert 0 < plan.overhead < most
    read = Plan.from_json(plan.to_json())
    follower = jaxremat.optimize(plan=read)(step)
    assert follower.plan(*args).compiled_peak_nbytes == plan.compiled_peak_nbytes
    same(jax.jit(step)(*args), follower(*args))


@pytest.mark.parametrize("name", sorted(STEPS))
def test_recomputation_waits_for_the_forward_pass_before_it(name: str) -> None:
    step, args = STEPS[name]()
    traced = trace(jax.jit(step), args, {})
    graph = lower(traced, detect(jax.devices()[0]), base_nbytes=0)
    eqns = emit(traced, graph, close_over_dependencies(graph, ())).jaxpr.eqns
    for later in later_passes(graph):
        last = max(n.id for n in graph.nodes[later.start : later.stop] if n.contraction)
        behind = set(traced.jaxpr.jaxpr.eqns[last].outvars)
        for eqn in eqns:
            if not behind.isdisjoint(v for v in eqn.invars if isinstance(v, jex.Var)):
                behind.update(eqn.outvars)
        first = next(k for k, stage in enumerate(graph.stages) if stage.start >= later.stop)
        again = [
            eqn
            for k in range(first, len(graph.stages))
            for eqn in eqns
            if eqn.primitive.name == "dot_general" and f"(recompute_{k})" in str(eqn.source_info.name_stack)
        ]
        assert again
        assert all(not behind.isdisjoint(eqn.invars) for eqn in again)


def test_updates_that_another_pass_reads_do_not_wait_for_each_other() -> None:
    step, args = adversarial()
    traced = trace(jax.jit(step), args, {})
    graph = lower(traced, detect(jax.devices()[0]), base_nbytes=0)
    nodes = graph.nodes[graph.forward_stop : later_passes(graph)[0].start]
    updates = [n.id for n in nodes if n.primitive == "sub"]
    contractions = [n.id for n in nodes if n.contraction]
    assert sum(n < contractions[-1] for n in updates) >= len(updates) // 2


def test_plans_made_in_the_order_of_before_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = adversarial()

    def before(*program: Any, turns: bool) -> list[int]:
        return memory_order(*program, turns=False)

    with monkeypatch.context() as patched:
        patched.setattr(_passes, "memory_order", before)
        plan = planned(step, args, 0.6)
    follower = jaxremat.optimize(plan=Plan.from_json(plan.to_json()))(step)
    assert follower.plan(*args).compiled_peak_nbytes == plan.compiled_peak_nbytes
    assert plan.fingerprint != fingerprint(trace(jax.jit(step), args, {}))
    same(jax.jit(step)(*args), follower(*args))
