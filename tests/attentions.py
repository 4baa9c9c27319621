"""Attentions as people write them, each a function of queries, keys and values `[batch, length, heads, width]`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

Attend = Callable[[jax.Array, jax.Array, jax.Array], Any]

BATCH, HEADS, WIDTH = 2, 4, 8
LENGTH = 48


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5


def _mixed(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _causal(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _mixed(jax.nn.softmax(_scores(q, k)), v)


def masked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _mixed(jax.nn.softmax(jnp.where(_causal(q, k), _scores(q, k), -1e30)), v)


def _masked_out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Some parts of the keys are for no query of some parts of these."""
    return _mixed(jax.nn.softmax(jnp.where(_causal(q, k), _scores(q, k), -jnp.inf)), v)


def _by_hand(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The softmax written out, with a gradient through the maximum."""
    x = jnp.where(_causal(q, k), _scores(q, k), -1e30)
    exponentials = jnp.exp(x - x.max(-1, keepdims=True))
    return _mixed(exponentials / exponentials.sum(-1, keepdims=True), v)


def _stopped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = _scores(q, k)
    exponentials = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return _mixed(exponentials / exponentials.sum(-1, keepdims=True), v)


def _padded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Some keys of each sequence are none; the last queries see no key at all, all alike."""
    there = jnp.arange(k.shape[1])[None, :] < jnp.asarray([k.shape[1], k.shape[1] // 2])[:, None]
    mask = there[:, None, None, :] & (jnp.arange(q.shape[1]) < q.shape[1] - 2)[None, None, :, None]
    return _mixed(jax.nn.softmax(jnp.where(mask, _scores(q, k), -1e30)), v)


def _biased(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A bias by distance that differs from head to head, as ALiBi."""
    distance = jnp.abs(jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :])
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
    return _mixed(jax.nn.softmax(_scores(q, k) - slopes[:, None, None] * distance), v)


def _capped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _mixed(jax.nn.softmax(5 * jnp.tanh(_scores(q, k) / 5)), v)


def _dropped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(_scores(q, k))
    kept = jax.random.bernoulli(jax.random.key(3), 0.8, weights.shape)
    return _mixed(jnp.where(kept, weights / 0.8, 0), v)


def _of_flax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return nn.dot_product_attention(
        q, k, v, dropout_rng=jax.random.key(0), dropout_rate=0.1, deterministic=False, broadcast_dropout=False
    )


def _of_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], is_causal=True)


def _of_one_head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """All heads read the same keys and values."""
    k, v = k[:, :, 0], v[:, :, 0]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k))
    return jnp.einsum("bhqk,bkd->bqhd", weights, v)


def _turned(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys in front of queries, batch innermost, widths of their own."""
    q, k = (jnp.einsum("blhd->hdlb", a) for a in (q, k))
    weights = jax.nn.softmax(jnp.einsum("hdqb,hdkb->khqb", q, k), axis=0)
    return jnp.einsum("khqb,bkhe->bhqe", weights, jnp.concatenate([v, v], -1))


def _crossed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """More keys than queries, of another length."""
    return plain(q[:, : LENGTH // 2], k, v)


def _in_short(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """In bfloat16 with the softmax in f32."""
    q, k, v = (a.astype(jnp.bfloat16) for a in (q, k, v))
    weights = jax.nn.softmax(_scores(q, k).astype(jnp.float32)).astype(jnp.bfloat16)
    return _mixed(weights, v).astype(jnp.float32)


def _all_in_short(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """In bfloat16 with a softmax in bfloat16, of large scores."""
    q, k, v = (a.astype(jnp.bfloat16) for a in (q, 4 * k, v))
    return _mixed(jax.nn.softmax(_scores(q, k)), v).astype(jnp.float32)


SHORT = (_in_short, _all_in_short)
"""Those that round."""

FOUND: dict[str, Attend] = {
    "plain": plain,
    "masked": masked,
    "masked out": _masked_out,
    "written out": _by_hand,
    "written out, the maximum held": _stopped,
    "padded": _padded,
    "biased": _biased,
    "capped": _capped,
    "dropout": _dropped,
    "flax": _of_flax,
    "jax": _of_jax,
    "grouped": _grouped,
    "one head of keys": _of_one_head,
    "turned": _turned,
    "crossed": _crossed,
    "bfloat16": _in_short,
    "softmax in bfloat16": _all_in_short,
}
"""These are done without their matrix of scores."""


@dataclass(frozen=True)
class Attending:
    """A train step with attention. **Fields:** `step` of weights and inputs; `args`."""

    step: Callable[[Any, jax.Array], Any]
    args: tuple[Any, jax.Array]


def attending(
    attend: Attend, layers: int = 1, *, scanned: bool = False, length: int = LENGTH, width: int = WIDTH
) -> Attending:
    """The gradients of a few layers of it, one after the other."""
    inner = HEADS * width
    keys = jax.random.split(jax.random.key(0), 3)
    into = jax.random.normal(keys[0], (layers, 3, inner, HEADS, width)) / inner**0.5
    out = jax.eval_shape(attend, *[jax.ShapeDtypeStruct((BATCH, length, HEADS, width), jnp.float32)] * 3)
    made = out.size // out.shape[0] // _length(out, length)
    back = jax.random.normal(keys[1], (layers, made, inner)) / made**0.5
    x = jax.random.normal(keys[2], (BATCH, length, inner))

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, w["into"][i]) for i in range(3))
        mixed = attend(2 * q, k, v)
        if mixed.shape[1] == HEADS:  # heads in front
            mixed = jnp.swapaxes(mixed, 1, 2)
        mixed = jnp.tanh(mixed.reshape(BATCH, -1, made) @ w["back"])
        return x.at[:, : mixed.shape[1]].add(mixed), None

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            if scanned:
                return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()
            h = x
            for i in range(layers):
                h, _ = layer(h, jax.tree.map(lambda w, i=i: w[i], weights))
            return (h**2).sum()

        return jax.value_and_grad(loss)(weights)

    return Attending(step, ({"into": into, "back": back}, x))


def _length(out: Any, length: int) -> int:
    return next(n for n in (length, length // 2) if n in out.shape[1:3])


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        largest = float(jnp.abs(expected).max())
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * max(largest, 0.1))
