"""Seed -> a small train step: a random net in a random way to train it, with its arguments.

Laws: the same seed gives the same step; every step is one that JAX runs as it is. `WAYS` are what is done with
gradients; any net of `random_nets` goes with any way, but for those that `fitting` leaves out. `step_of` makes a step
of a chosen way and chosen parts, `random_step` one of any.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grown_nets import LARGEST, name_of
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from odd_ways import ODD_WAYS
from random_nets import APART, BACKWARD_ONLY, NETS, ONCE, REFERRING, ROWS, WIDTH, Array, Chain, descend

OF_GROWN = 0.5
"""The share of nets one part of which nobody wrote."""

SEVERAL = 3
"""How many batches, tasks or minibatches a way takes."""


@dataclass(frozen=True)
class Step:
    """A train step. **Fields:** `name` its way and the parts of its net; `fn` and `args`, the first of them donated."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


Way = Callable[[Chain, random.Random], tuple[Callable[..., Any], tuple[Any, ...]]]


def plain(net: Chain, rng: random.Random) -> Any:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(net.loss)(params, batch)
        return descend(params, grads), value

    return step, (net.weights(rng), net.batch(rng))


def optimized(net: Chain, rng: random.Random) -> Any:
    chosen = [optax.adamw(1e-2), optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))]
    tx = rng.choice(chosen)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(net.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = net.weights(rng)
    return step, ((params, tx.init(params)), net.batch(rng))


def in_jit(net: Chain, rng: random.Random) -> Any:
    gradient = jax.jit(jax.value_and_grad(jax.jit(jax.checkpoint(net.loss))))

    def step(params: Any, batch: Any) -> Any:
        value, grads = gradient(params, batch)
        return jax.jit(descend)(params, grads), value

    return step, (net.weights(rng), net.batch(rng))


def in_shards(net: Chain, rng: random.Random) -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def gradient(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(net.loss)(params, batch)
        return lax.pmean(value, "data"), lax.pmean(grads, "data")

    def step(params: Any, batch: Any) -> Any:
        run = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        value, grads = run(params, batch)
        return descend(params, grads), value

    return step, (net.weights(rng), net.batch(rng))


def accumulated(net: Chain, rng: random.Random) -> Any:
    """Gradients of several batches, summed by a loop."""

    def step(params: Any, batches: Any) -> Any:
        def one(carry: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(net.loss)(params, batch)
            return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

        (value, grads), _ = lax.scan(one, (0.0, jax.tree.map(jnp.zeros_like, params)), batches)
        return descend(params, grads), value

    return step, (net.weights(rng), net.batch(rng, SEVERAL))


def collected(net: Chain, rng: random.Random) -> Any:
    """Gradients of several batches in a loop that carries nothing."""

    def step(params: Any, batches: Any) -> Any:
        grads = lax.map(lambda batch: jax.grad(net.loss)(params, batch), batches)
        return descend(params, jax.tree.map(lambda g: g.mean(0), grads))

    return step, (net.weights(rng), net.batch(rng, SEVERAL))


def several_losses(net: Chain, rng: random.Random) -> Any:
    """Two nets, each with a loss of its own, the second behind the first's update."""

    def judged(judge: Any, maker: Any, batch: Any) -> Array:
        x, y = batch
        return jnp.mean(jax.nn.softplus(net(judge, net(maker, x)) - net(judge, y)))

    def step(state: Any, batch: Any) -> Any:
        maker, judge = state
        lost, grads = jax.value_and_grad(judged)(judge, maker, batch)
        judge = descend(judge, grads)
        won, grads = jax.value_and_grad(lambda m: -judged(judge, m, batch))(maker)
        return (descend(maker, grads), judge), (lost, won)

    return step, ((net.weights(rng), net.weights(rng)), net.batch(rng))


def penalised(net: Chain, rng: random.Random) -> Any:
    """The gradient of a loss that has a gradient in it."""

    def loss(params: Any, batch: Any) -> Array:
        x, _ = batch
        slope = jax.grad(lambda x: jnp.sum(net(params, x)))(x)
        return net.loss(params, batch) + 0.1 * jnp.mean(slope**2)

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return descend(params, grads), value

    return step, (net.weights(rng), net.batch(rng))


def curved(net: Chain, rng: random.Random) -> Any:
    """Newton's step for what scales the net's result, by a whole Hessian."""

    def step(state: Any, batch: Any) -> Any:
        params, scale = state

        def loss(scale: Array) -> Array:
            x, y = batch
            return jnp.mean((net(params, x * scale) - y) ** 2) + 0.1 * jnp.sum(scale**2)

        grad, hessian = jax.grad(loss)(scale), jax.hessian(loss)(scale)
        return (params, scale - jnp.linalg.solve(hessian + 5 * jnp.eye(WIDTH), grad)), hessian

    return step, ((net.weights(rng), jnp.ones(WIDTH)), net.batch(rng))


def linearized(net: Chain, rng: random.Random) -> Any:
    """Products with Jacobians and Hessians, forward over reverse."""

    def step(params: Any, batch: Any) -> Any:
        grads, product = jax.linearize(lambda p: jax.grad(net.loss)(p, batch), params)
        direction = jax.tree.map(lambda g: 0.1 * g, grads)
        return descend(params, product(direction)), product(grads)

    return step, (net.weights(rng), net.batch(rng))


def by_example(net: Chain, rng: random.Random) -> Any:
    """Gradients of each example, clipped."""

    def step(params: Any, batches: Any) -> Any:
        values, grads = jax.vmap(jax.value_and_grad(net.loss), (None, 0))(params, batches)
        norms = jax.vmap(optax.tree.norm)(grads)
        clip = jnp.minimum(1, 1 / norms)
        return descend(params, jax.tree.map(lambda g: jnp.tensordot(clip, g, 1), grads)), values

    return step, (net.weights(rng), net.batch(rng, SEVERAL))


def meta(net: Chain, rng: random.Random) -> Any:
    """Steps of descent for each task, differentiated."""
    looped = rng.random() < 0.5

    def adapted(params: Any, batch: Any) -> Array:
        def one(p: Any, _: Any) -> Any:
            return descend(p, jax.grad(net.loss)(p, batch), 0.05), None

        if looped:
            params, _ = lax.scan(one, params, None, length=2)
        else:
            params = one(params, None)[0]
        return net.loss(params, batch)

    def step(params: Any, tasks: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jax.vmap(adapted, (None, 0))(p, tasks).mean())(params)
        return descend(params, grads), value

    return step, (net.weights(rng), net.batch(rng, 2))


def searched(net: Chain, rng: random.Random) -> Any:
    """L-BFGS with a line search: gradients within a loop of unknown length."""
    tx = optax.lbfgs(memory_size=2, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=3))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss(params: Any) -> Array:
            return net.loss(params, batch)

        value, grad = optax.value_and_grad_from_state(loss)(params, state=opt_state)
        updates, opt_state = tx.update(grad, opt_state, params, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(params, updates), opt_state), value

    params = net.weights(rng)
    return step, ((params, tx.init(params)), net.batch(rng))


def policy(net: Chain, rng: random.Random) -> Any:
    """Epochs over shuffled minibatches of a rollout, with a clipped ratio and advantages from a scan."""

    def loss(params: Any, batch: Any) -> Array:
        x, before, gain = batch
        ratio = jnp.exp(jnp.clip(jnp.tanh(net(params, x)).mean(-1) - before, -1, 1))
        clipped = jnp.clip(ratio, 0.8, 1.2) * gain
        return -jnp.minimum(ratio * gain, clipped).mean() + 0.1 * jnp.mean(ratio**2)

    def step(state: Any, batch: Any) -> Any:
        params, key = state
        x, y = (a.reshape(-1, WIDTH) for a in batch)
        before = jnp.tanh(x).mean(-1)
        gains = lax.scan(lambda c, r: (0.9 * c + r, 0.9 * c + r), 0.0, y.mean(-1), reverse=True)[1]

        def epoch(carry: Any, _: Any) -> Any:
            params, key = carry
            key, now = jax.random.split(key)
            order = jax.random.permutation(now, x.shape[0])
            pieces = [a[order].reshape(SEVERAL, -1, *a.shape[1:]) for a in (x, before, gains)]

            def one(params: Any, piece: Any) -> Any:
                value, grads = jax.value_and_grad(loss)(params, piece)
                return descend(params, grads), value

            params, values = lax.scan(one, params, tuple(pieces))
            return (params, key), values

        state, values = lax.scan(epoch, (params, key), None, length=2)
        return state, values.mean()

    return step, ((net.weights(rng), jax.random.key(3)), net.batch(rng, SEVERAL))


WAYS: dict[str, Way] = {
    "plain": plain,
    "optimizer": optimized,
    "in jit": in_jit,
    "in shards": in_shards,
    "accumulated": accumulated,
    "collected": collected,
    "several losses": several_losses,
    "policy": policy,
    "searched": searched,
    "by example": by_example,
    "penalised": penalised,
    "curved": curved,
    "linearized": linearized,
    "meta": meta,
    **ODD_WAYS,
}
"""What is done with gradients."""

TWICE = frozenset({"penalised", "curved", "linearized", "meta"})
MAPPED = frozenset({"by example", "curved", "meta", "in shards", "ensemble", "mapped devices"})


def step_of(way: str, parts: Sequence[str], seed: int = 0, rows: int = ROWS) -> Step:
    """The step of a way and a net of these parts."""
    fn, args = WAYS[way](Chain(tuple(parts), rows), random.Random(seed))
    return Step(f"{way}: {', '.join(parts)}", fn, args)


def fitting(way: str) -> list[str]:
    """The parts that JAX differentiates in this way."""
    wrong = ONCE | {"converged"} | REFERRING if way in TWICE else frozenset[str]()
    wrong |= BACKWARD_ONLY if way == "forward" else frozenset()
    wrong |= APART if way in MAPPED else frozenset()
    wrong |= {"sharded"} if way == "partitioned" else frozenset()  # on a mesh of its own
    wrong |= REFERRING if way in ("in jit", *MAPPED) else frozenset()
    return sorted(NETS.keys() - wrong)


def random_parts(seed: int) -> tuple[str, tuple[str, ...]]:
    """The way and the parts of a seed."""
    rng = random.Random(seed)
    way = rng.choice([*WAYS, "plain", "accumulated"])
    parts = rng.choices(fitting(way), k=rng.choice([1, 1, 2, 2, 3, 4]))
    growing = random.Random(f"grown of {seed}")
    if growing.random() < OF_GROWN:
        parts[growing.randrange(len(parts))] = name_of(seed, growing.randint(2, LARGEST))
    return way, tuple(parts)


def random_step(seed: int) -> Step:
    """The step of a seed."""
    return step_of(*random_parts(seed), seed)
