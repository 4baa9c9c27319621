"""Train steps whose work falls apart along an axis, and what people write by hand when their memory runs out.

Points, tokens, pairs, clouds, edges, heads or rows of an image are done in parts, each forward and backward:

    step = DIVISIBLE["pinn"]("tiny")
    step.plain, step.by_hand["parts"]       # functions of a state and a batch, as `step.args()` has them

All have Adam, and losses that are means or sums over the axis, or read all of it in the middle (`contrastive`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Params = Any
Gradient = Callable[..., tuple[jax.Array, Params]]
"""``(params, *batch) -> (loss, gradient)``."""

ADAM = optax.adam(1e-3)


@dataclass(frozen=True)
class Divisible:
    """**Fields:** `plain` and `by_hand`, train steps of the same results; `initialise` makes their arguments."""

    plain: Callable[..., Any]
    by_hand: Mapping[str, Callable[..., Any]]
    initialise: Callable[[jax.Array], Any]

    def args(self) -> Any:
        """The state and the batch."""
        return jax.jit(self.initialise)(jax.random.key(0))


def made(initialise: Callable[[jax.Array], Any], gradient: Gradient, **by_hand: Gradient) -> Divisible:
    """Return the steps with these gradients. **Arguments:** `initialise` makes parameters and a batch."""

    def step(gradient: Gradient) -> Callable[..., Any]:
        def run(state: Any, *batch: Any) -> Any:
            loss, found = gradient(state[0], *batch)
            updates, moments = ADAM.update(found, state[1], state[0])
            return (optax.apply_updates(state[0], updates), moments), loss

        return run

    def arguments(key: jax.Array) -> Any:
        params, *batch = initialise(key)
        return ((params, ADAM.init(params)), *batch)

    return Divisible(step(gradient), {name: step(each) for name, each in by_hand.items()}, arguments)


def in_parts(loss: Callable[..., jax.Array], count: int) -> Gradient:
    """Return the gradient of a loss that is a mean over the batch, part after part."""

    def run(params: Params, *batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *part)), None

        total, _ = lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), parts)
        return jax.tree.map(lambda x: x / count, total)

    return run


class Draws:
    """Random arrays, each of a key of its own."""

    def __init__(self, key: jax.Array):
        self.key, self.count = key, 0

    def next(self) -> jax.Array:
        self.count += 1
        return jax.random.fold_in(self.key, self.count)

    def __call__(self, *shape: int) -> jax.Array:
        return jax.random.normal(self.next(), shape)

    def below(self, end: int, *shape: int) -> jax.Array:
        return jax.random.randint(self.next(), shape, 0, end)

    def dense(self, *sizes: int) -> list[Any]:
        """Layers from each size to the next."""
        return [{"w": self(i, o) / i**0.5, "b": jnp.zeros(o)} for i, o in pairwise(sizes)]


def mlp(layers: list[Any], x: jax.Array, act: Callable[[jax.Array], jax.Array] = jax.nn.gelu) -> jax.Array:
    for layer in layers[:-1]:
        x = act(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def pinn(scale: str) -> Divisible:
    """A physics-informed net: a residual with fourth derivatives, by points."""

    def u(params: Params, t: jax.Array, x: jax.Array) -> jax.Array:
        return mlp(params, jnp.stack([t, x]), jnp.tanh)[0]

    def residual(params: Params, t: jax.Array, x: jax.Array) -> jax.Array:
        first, second = jax.grad(u, 2), jax.grad(jax.grad(u, 2), 2)
        fourth = jax.grad(jax.grad(second, 2), 2)
        at = (params, t, x)
        return jax.grad(u, 1)(*at) + u(*at) * first(*at) + second(*at) + 0.5 * fourth(*at)

    def loss(params: Params, t: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.vmap(residual, (None, 0, 0))(params, t, x) ** 2).mean()

    points, width = (2048, 48) if scale == "full" else (256, 16)

    def initialise(key: jax.Array) -> Any:
        draw = Draws(key)
        return draw.dense(2, width, width, width, width, 1), draw(points), draw(points)

    return made(initialise, jax.value_and_grad(loss), parts=in_parts(loss, 8))


def block(p: Params, x: jax.Array) -> jax.Array:
    """A layer of a language model, with rotary positions whose pairs lie side by side."""
    tokens, heads = x.shape[1], 4
    angles = jnp.arange(tokens)[:, None, None] / 100.0 ** jnp.linspace(0, 1, x.shape[2] // heads // 2)

    def rotated(z: jax.Array) -> jax.Array:
        a, b = z[..., ::2], z[..., 1::2]
        c, s = jnp.cos(angles), jnp.sin(angles)
        return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(z.shape)

    h = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    q, k, v = (z.reshape(*x.shape[:2], heads, -1) for z in jnp.split(h @ p["qkv"], 3, -1))
    scores = jnp.einsum("bthd,bshd->bhts", rotated(q), rotated(k)) / 4
    scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e9))
    x = x + jnp.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape) @ p["out"]
    return x + mlp(p["mlp"], x)


def blocks(draw: Draws, count: int, width: int) -> list[Any]:
    """Parameters of such layers."""
    return [
        {
            "qkv": draw(width, 3 * width) / 9,
            "out": draw(width, width) / 9,
            "mlp": draw.dense(width, 4 * width, width),
        }
        for _ in range(count)
    ]


def grpo(scale: str) -> Divisible:
    """Groups of answers to a prompt, whose advantages are those over the group; a frozen reference in the step."""
    batch, group, tokens, width, words = (128, 8, 48, 64, 512) if scale == "full" else (16, 2, 8, 16, 32)

    def logp(p: Params, ids: jax.Array) -> jax.Array:
        x = p["words"][ids]
        for each in p["blocks"]:
            x = block(each, x)
        found = jax.nn.log_softmax((x @ p["head"])[:, :-1])
        return jnp.take_along_axis(found, ids[:, 1:, None], -1)[..., 0]

    def objective(
        p: Params, reference: Params, ids: jax.Array, advantage: jax.Array, old: jax.Array
    ) -> jax.Array:
        own, other = logp(p, ids), logp(reference, ids)
        ratio, a = jnp.exp(own - old), advantage[:, None]
        apart = jnp.exp(other - own) - (other - own) - 1
        return (0.04 * apart - jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)).mean()

    def advantages(reward: jax.Array) -> jax.Array:
        r = reward.reshape(-1, group)
        return ((r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-4)).reshape(-1)

    def plain(p: Params, reference: Params, ids: jax.Array, reward: jax.Array, old: jax.Array) -> Any:
        return jax.value_and_grad(objective)(p, reference, ids, advantages(reward), old)

    def parts(p: Params, reference: Params, ids: jax.Array, reward: jax.Array, old: jax.Array) -> Any:
        return in_parts(lambda p, *part: objective(p, reference, *part), 8)(p, ids, advantages(reward), old)

    def initialise(key: jax.Array) -> Any:
        draw = Draws(key)
        policy, reference = (
            {"words": draw(words, width), "blocks": blocks(draw, 2, width), "head": draw(width, words) / 9}
            for _ in range(2)
        )
        return (
            policy,
            reference,
            draw.below(words, batch, tokens),
            draw(batch),
            draw(batch, tokens - 1) / 9 - 6,
        )

    return made(initialise, plain, parts=parts)


def contrastive(scale: str) -> Divisible:
    """Two towers whose results are compared with all others. By hand: gradient caching (Gao et al. 2021)."""
    batch, width, deep = (1024, 64, 4) if scale == "full" else (16, 16, 2)

    def compared(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (a, b))
        scores = 8 * a @ b.T
        chosen = jnp.diagonal(jax.nn.log_softmax(scores, 0)) + jnp.diagonal(jax.nn.log_softmax(scores, 1))
        return -chosen.mean()

    def loss(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return compared(mlp(p[0], x), mlp(p[1], y))

    def cached(p: Params, x: jax.Array, y: jax.Array, count: int = 8) -> Any:
        parts = [z.reshape(count, -1, width) for z in (x, y)]
        made = [lax.map(partial(mlp, q), z).reshape(batch, -1) for q, z in zip(p, parts, strict=True)]
        found, cotangents = jax.value_and_grad(compared, (0, 1))(*made)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            each = [jax.vjp(lambda q, z=z: mlp(q, z), q)[1](c)[0] for q, (z, c) in zip(p, part, strict=True)]
            return jax.tree.map(jnp.add, total, each), None

        cut = [(z, c.reshape(count, -1, width)) for z, c in zip(parts, cotangents, strict=True)]
        return found, lax.scan(add, jax.tree.map(jnp.zeros_like, p), cut)[0]

    def initialise(key: jax.Array) -> Any:
        draw = Draws(key)
        sizes = [width, *[8 * width] * deep, width]
        return [draw.dense(*sizes), draw.dense(*sizes)], draw(batch, width), draw(batch, width)

    return made(initialise, jax.value_and_grad(loss), cached=cached)


def clouds(scale: str) -> Divisible:
    """Edges between nearest points of clouds, by distances of their features."""
    count, points, width = (32, 128, 32) if scale == "full" else (8, 16, 8)

    def edges(p: Params, x: jax.Array) -> jax.Array:
        apart = ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
        near = jax.vmap(lambda z, i: z[i])(x, lax.top_k(-apart, 8)[1])
        own = jnp.broadcast_to(x[:, :, None], near.shape)
        return jax.nn.relu(mlp(p, jnp.concatenate([own, near - own], -1), jax.nn.relu)).max(2)

    def loss(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        for each in p["edges"]:
            x = edges(each, x)
        found = x.max(1) @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(found, y).mean()

    def initialise(key: jax.Array) -> Any:
        draw = Draws(key)
        layers = [draw.dense(6, width, width), draw.dense(2 * width, 2 * width, 2 * width)]
        params = {"edges": layers, "head": draw(2 * width, 10)}
        return params, draw(count, points, 3), draw.below(10, count)

    return made(initialise, jax.value_and_grad(loss), parts=in_parts(loss, count))


DIVISIBLE: dict[str, Callable[[str], Divisible]] = {
    each.__name__: each for each in (pinn, grpo, contrastive, clouds)
}
