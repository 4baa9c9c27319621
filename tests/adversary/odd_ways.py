"""A net -> train steps with odd results, arguments, effects and devices.

Law: a way gives a function and its arguments, of which the first is donated; references among the arguments are the
function's to write.
"""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from random_nets import WIDTH, Array, Chain, descend, normal


def returned(net: Chain, rng: random.Random) -> Any:
    """Results that are arguments, None, constants, integers and one another; arguments that nothing reads."""

    def step(state: Any, batch: Any, unused: Any) -> Any:
        params, count, _ = state
        value, grads = jax.value_and_grad(net.loss)(params, batch)
        new = descend(params, grads)
        results = {"batch": batch, "none": None, "twice": (value, value), "grads": grads, "one": jnp.ones(3)}
        return (new, count + 1, batch[0]), results, new, 2 * value

    batch = net.batch(rng)
    unused = {"a": jnp.arange(5), "none": None, "flag": jnp.array(True), "nothing": jnp.zeros((0, 3))}
    return step, ((net.weights(rng), jnp.int32(0), jnp.zeros_like(batch[0])), batch, unused)


def scaled(net: Chain, rng: random.Random) -> Any:
    """A loss that is scaled in half precision, and an update that is left out where a gradient is not finite."""

    def step(state: Any, batch: Any) -> Any:
        params, scale, good = state

        def loss(params: Any) -> Array:
            low = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), params)
            return net.loss(low, batch) * scale

        grads = jax.tree.map(lambda g: g.astype(jnp.float16).astype(g.dtype) / scale, jax.grad(loss)(params))
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        new = lax.cond(finite, lambda: descend(params, grads), lambda: params)
        grown = jnp.where(good > 2, scale * 2, scale)
        return (new, jnp.where(finite, grown, scale / 2), jnp.where(finite, good + 1, 0)), finite

    return step, ((net.weights(rng), jnp.float32(rng.choice([8.0, 1e7])), jnp.int32(2)), net.batch(rng))


def keyed(net: Chain, rng: random.Random) -> Any:
    """Noise of a key in the state on inputs, weights and gradients."""

    def step(state: Any, batch: Any) -> Any:
        params, key = state
        key, first, second = jax.random.split(key, 3)
        x, y = batch
        kept = jax.random.bernoulli(first, 0.8, x.shape)

        def loss(params: Any) -> Array:
            shaken = jax.tree.map(lambda a: a + 0.01 * jax.random.normal(second, a.shape), params)
            return net.loss(shaken, (jnp.where(kept, x, 0), y))

        value, grads = jax.value_and_grad(loss)(params)
        noisy = jax.tree.map(lambda g: g + 0.01 * jax.random.laplace(first, g.shape), grads)
        return (descend(params, noisy), key), value

    impl = rng.choice(["threefry2x32", "rbg", "unsafe_rbg"])
    return step, ((net.weights(rng), jax.random.key(4, impl=impl)), net.batch(rng))


def taught(net: Chain, rng: random.Random) -> Any:
    """A student, and its teacher that is a mean of what it was: one net at two sets of weights."""

    def step(state: Any, batch: Any) -> Any:
        params, teacher = state
        x, y = batch

        def loss(params: Any) -> Array:
            seen = net(params, x)
            target = lax.stop_gradient(net(teacher, x + 0.1 * y))
            cross = jax.nn.log_softmax(seen) * jax.nn.softmax(target)
            return -cross.mean() + 0.1 * net.loss(params, batch)

        params = descend(params, jax.grad(loss)(params))
        return (params, jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, teacher, params)), x.mean()

    params = net.weights(rng)
    return step, ((params, jax.tree.map(lambda a: 0.9 * a, params)), net.batch(rng))


def ensemble(net: Chain, rng: random.Random) -> Any:
    """A whole train step, mapped over models."""

    def one(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(net.loss)(params, batch)
        return descend(params, grads), value

    def step(models: Any, batch: Any) -> Any:
        return jax.vmap(one, (0, None))(models, batch)

    params = net.weights(rng)
    return step, (jax.tree.map(lambda a: jnp.stack([a, 1.1 * a]), params), net.batch(rng))


def forward(net: Chain, rng: random.Random) -> Any:
    """A gradient along a direction, by forward mode."""

    def step(params: Any, batch: Any, direction: Any) -> Any:
        value, slope = jax.jvp(lambda p: net.loss(p, batch), (params,), (direction,))
        return descend(params, jax.tree.map(lambda d: slope * d, direction)), value

    params = net.weights(rng)
    return step, (params, net.batch(rng), jax.tree.map(lambda a: normal(rng, *a.shape), params))


def contrasted(net: Chain, rng: random.Random) -> Any:
    """Similarities of the whole batch, through a decision on them: the hardest negative of each row."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Array:
            x, y = (net(params, a) for a in batch)
            x, y = (a / jnp.sqrt(1e-3 + jnp.square(a).sum(-1, keepdims=True)) for a in (x, y))
            alike = x @ y.T
            others = jnp.where(jnp.eye(len(x), dtype=bool), -jnp.inf, alike)
            hardest = jnp.take_along_axis(alike, jnp.argmax(others, -1)[:, None], -1)[:, 0]
            return jax.nn.relu(0.2 + hardest - jnp.diag(alike)).mean() - jax.nn.log_softmax(3 * alike).mean()

        value, grads = jax.value_and_grad(loss)(params)
        most = jnp.max(jnp.stack([jnp.abs(g).max() for g in jax.tree.leaves(grads)]))
        signs = jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 0.01 * most, jnp.sign(g), g), grads)
        return descend(params, signs, 0.01), value

    return step, (net.weights(rng), net.batch(rng))


def with_reference(net: Chain, rng: random.Random) -> Any:
    """Sums over steps in a reference that is given."""

    def step(params: Any, batch: Any, total: Any) -> Any:
        value, grads = jax.value_and_grad(net.loss)(params, batch)
        total[...] += value
        new = descend(params, grads)
        total[...] = total[...] * 0.5 + net.loss(new, batch)
        return new, value

    return step, (net.weights(rng), net.batch(rng), jax.new_ref(jnp.float32(1)))


def _two() -> Mesh:
    devices = jax.devices()
    return Mesh(np.array(devices[: 2 if len(devices) > 1 else 1]), ("data",))


def mapped_devices(net: Chain, rng: random.Random) -> Any:
    """Each device differentiates its rows; gradients are summed once."""
    mesh = _two()

    def step(params: Any, batch: Any) -> Any:
        def gradient(params: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(net.loss)(params, batch)
            return lax.pmean(value, "data"), lax.pmean(grads, "data")

        run = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        value, grads = run(params, batch)
        return descend(params, grads), value

    return step, jax.device_put((net.weights(rng), net.batch(rng)), NamedSharding(mesh, P()))


def partitioned(net: Chain, rng: random.Random) -> Any:
    """Rows of the batch and columns of matrices on different devices, by the arrays' shardings."""
    mesh = _two()

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(net.loss)(params, batch)
        return descend(params, grads), value

    def placed(a: Array) -> Array:
        spec = P(*[None] * (a.ndim - 1), "data") if a.ndim > 1 and a.shape[-1] == WIDTH else P()
        return jax.device_put(a, NamedSharding(mesh, spec))

    batch = jax.device_put(net.batch(rng), NamedSharding(mesh, P("data")))
    return step, (jax.tree.map(placed, net.weights(rng)), batch)


def counted_batches(net: Chain, rng: random.Random) -> Any:
    """Gradients of slices of a batch, summed by a loop over indices into a carry that is donated."""

    def step(state: Any, batch: Any) -> Any:
        params, sums = state

        def one(i: Any, carry: Any) -> Any:
            sums, most = carry
            piece = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * net.rows, net.rows), batch)
            value, grads = jax.value_and_grad(net.loss)(params, piece)
            return jax.tree.map(lambda s, g: s + g / (i + 1), sums, grads), jnp.maximum(most, value)

        sums, most = lax.fori_loop(0, 3, one, (jax.tree.map(lambda s: 0.5 * s, sums), 0.0))
        return (descend(params, sums, 0.03), sums), most

    params = net.weights(rng)
    batch = tuple(normal(rng, 3 * net.rows, WIDTH) for _ in range(2))
    return step, ((params, jax.tree.map(jnp.zeros_like, params)), batch)


def several_steps(net: Chain, rng: random.Random) -> Any:
    """Steps of an optimizer that waits for every second gradient, in a scan, and a mean of the parameters."""
    tx = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)

    def one(state: Any, batch: Any) -> Any:
        params, mean, opt_state = state
        value, grads = jax.value_and_grad(net.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, mean, params), opt_state), value

    def step(state: Any, batches: Any) -> Any:
        state, values = lax.scan(one, state, batches)
        return state, values.mean(), values

    params = net.weights(rng)
    mean = jax.tree.map(jnp.copy, params)
    return step, ((params, mean, tx.init(params)), net.batch(rng, 3))


def sharpened(net: Chain, rng: random.Random) -> Any:
    """The gradient at parameters that are moved along the gradient, by a number that is weakly typed."""

    def step(params: Any, batch: Any, radius: Any) -> Any:
        grads = jax.grad(net.loss)(params, batch)
        size = radius / (1e-6 + optax.tree.norm(grads))
        value, grads = jax.value_and_grad(net.loss)(descend(params, grads, -size), batch)
        return descend(params, grads), value, radius * 2

    return step, (net.weights(rng), net.batch(rng), jnp.asarray(0.05))


def remembered(net: Chain, rng: random.Random) -> Any:
    """A memory of what was seen, written in the place of the least and read in an order that data says."""

    def step(state: Any, batch: Any) -> Any:
        params, memory, scores, place = state
        x, y = batch
        old = memory[jnp.argsort(scores)[: net.rows]]

        def loss(params: Any) -> Any:
            seen = net(params, x)
            return net.loss(params, (0.5 * (x + old), y)), lax.stop_gradient(seen)

        (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(params)
        memory = lax.dynamic_update_slice(memory, seen, (place, 0))
        scores = scores.at[jnp.argmin(scores)].set(value)
        return (descend(params, grads), memory, scores, (place + net.rows) % memory.shape[0]), value

    size = 4 * net.rows
    memory, scores = normal(rng, size, WIDTH), normal(rng, size)
    return step, ((net.weights(rng), memory, scores, jnp.int32(net.rows)), net.batch(rng))


ODD_WAYS = {
    "counted batches": counted_batches,
    "several steps": several_steps,
    "sharpened": sharpened,
    "remembered": remembered,
    "returned": returned,
    "scaled": scaled,
    "keyed": keyed,
    "taught": taught,
    "ensemble": ensemble,
    "forward": forward,
    "contrasted": contrasted,
    "with reference": with_reference,
    "mapped devices": mapped_devices,
    "partitioned": partitioned,
}
