"""Parts of nets that try a planner: decisions, draws, cancellation, numbers that are none, dtypes, rules of their own.

A part is `(p, x) -> array of x's shape`; `p` holds the weights of one layer, `w` (WIDTH, WIDTH) and `b` (WIDTH,).
Law: each is a program that JAX differentiates as it is; a number that is not finite stays within the part unless its
name says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Array = jax.Array
Part = Callable[[Any, Array], Array]


def _linear(p: Any, x: Array) -> Array:
    return x @ p["w"] + p["b"]


# Decisions: numbers are compared, sorted or rounded, and read together with what was decided.


def own_maximum(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    d = y - y.max(-1, keepdims=True)
    return jnp.where(d >= 0, jnp.sin(y), 0.3 * jnp.tanh(d))


def quantiles(p: Any, x: Array) -> Array:
    y = jnp.tanh(_linear(p, x))
    limit = jnp.quantile(y, 0.7, axis=-1, keepdims=True)
    return jnp.where(y >= limit, y - limit, 0.1 * y) + jnp.median(y, axis=0)


def best_of(p: Any, x: Array) -> Array:
    """A mixture of experts: the two best of the columns, by their own weights."""
    scores = jax.nn.softmax(_linear(p, x))
    best, places = lax.top_k(scores, 2)
    chosen = jnp.take_along_axis(jnp.sin(x @ p["w"].T), places, axis=-1)
    return x + (best / best.sum(-1, keepdims=True) * chosen).sum(-1, keepdims=True)


def ranked(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    order = jnp.argsort(y, axis=0)
    return jnp.take_along_axis(jnp.cos(y), order, axis=0) + 0.3 * jnp.sort(y, axis=0)


def resampled(p: Any, x: Array) -> Array:
    """Depths drawn from a density of bins, as radiance fields do: a cumulative sum, a search and an interpolation."""
    weights = jax.nn.softmax(_linear(p, x)) + 1e-3
    total = jnp.cumsum(weights / weights.sum(-1, keepdims=True), -1)
    at = jnp.linspace(0.05, 0.95, x.shape[-1])
    found = jax.vmap(lambda edges: jnp.searchsorted(edges, at))(total)
    found = jnp.clip(found, 1, x.shape[-1] - 1)
    low, high = (jnp.take_along_axis(total, found - i, -1) for i in (1, 0))
    t = (at - low) / jnp.where(high - low < 1e-5, 1.0, high - low)
    depths = jnp.sort(found + t, -1)
    steps = jnp.diff(depths, axis=-1, append=depths[:, -1:] + 1)
    return x + jnp.cumprod(jnp.exp(-0.05 * steps * jax.nn.softplus(_linear(p, x))), -1)


def interpolated(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    knots = jnp.cumsum(jax.nn.softplus(p["b"])) - 2.0
    return x + jnp.interp(y, knots, jnp.sin(p["w"][0]))


def rounded(p: Any, x: Array) -> Array:
    """Quantised with a gradient that passes straight through."""
    y = _linear(p, x)
    scale = jnp.abs(y).max() / 7
    steps = jnp.round(y / scale) * scale
    return 0.5 * x + y + lax.stop_gradient(steps - y)


def codebook(p: Any, x: Array) -> Array:
    """The nearest row of a table, with a commitment to it."""
    y = _linear(p, x)
    distance = jnp.square(y[:, None] - p["w"][None]).sum(-1)
    nearest = p["w"][jnp.argmin(distance, -1)]
    return y + lax.stop_gradient(nearest - y) + 0.1 * (nearest - lax.stop_gradient(y))


def bucketed(p: Any, x: Array) -> Array:
    y = jax.nn.sigmoid(_linear(p, x)) * 4
    place = jnp.floor(y).astype(jnp.int32)
    inside = y - place
    return (1 - inside) * p["b"][place] + inside * p["b"][(place + 1) % x.shape[-1]] + x


def running_maximum(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    most = lax.cummax(y, axis=0)
    return jnp.where(y == most, jnp.sin(y), 0.2 * y) + jnp.exp(y - most)


def by_bits(p: Any, x: Array) -> Array:
    """Sorted by keys made of their bits."""
    y = _linear(p, x)
    bits = lax.bitcast_convert_type(lax.stop_gradient(y), jnp.int32)
    keys = jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31)))
    _, sorted_y = lax.sort((keys, y), dimension=0, num_keys=1)
    return sorted_y + jnp.tanh(y)


def sorted_branches(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    order = jnp.argsort(y.sum(-1))
    middle = y.sum(-1)[order[x.shape[0] // 2]]
    return lax.cond(y.sum(-1)[0] >= middle, lambda y: jnp.sin(y) + x, lambda y: jnp.cos(y[order]) * 0.5, y)


def hard_gate(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    gate = jax.nn.relu6(y * 3 + 3) / 6
    return y * gate + jnp.sign(y) * jnp.minimum(jnp.abs(x), 0.5) + jnp.clip(y, -0.5, 0.5)


def segments(p: Any, x: Array) -> Array:
    """Rows summed by the place of their maximum, and read again."""
    y = _linear(p, x)
    which = jnp.argmax(y, -1)
    sums = jax.ops.segment_sum(y, which, num_segments=x.shape[-1])
    most = jax.ops.segment_max(y, which, num_segments=x.shape[-1])
    return y + 0.1 * sums[which] + 0.1 * jnp.where(jnp.isfinite(most), most, 0)[which]


def written(p: Any, x: Array) -> Array:
    """Arrays written in places that data says, in all ways."""
    y = _linear(p, x)
    places = jnp.argsort(lax.stop_gradient(y[:, 0]))[:3]
    z = y.at[places].set(jnp.sin(y[:3]))
    z = z.at[places, 1].mul(0.5).at[0].min(y[1]).at[:, 2].max(0.1 * y[:, 3])
    start = jnp.argmax(y[0]) % 3
    piece = lax.dynamic_slice(z, (start, 0), (2, x.shape[1]))
    return lax.dynamic_update_slice(z, jnp.tanh(piece), (start + 1, 0)) + z[::-1] * 0.1


# Cancellation, and numbers that are not finite


def cancelling(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    spread = jnp.mean(y * y, -1, keepdims=True) - jnp.mean(y, -1, keepdims=True) ** 2
    return (y + 64.0) - 64.0 + y * lax.rsqrt(jax.nn.relu(spread) + 0.1)


def masked_root(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    safe = jnp.where(y > 0, y, 1.0)
    return jnp.where(y > 0, jnp.sqrt(safe), jnp.exp(y) - 1)


def distances(p: Any, x: Array) -> Array:
    """Of all pairs of rows, whose root is guarded where rounding decides whether there is one."""
    y = jnp.tanh(_linear(p, x))
    squares = jnp.sum(y * y, -1)
    apart = squares[:, None] + squares - 2 * y @ y.T
    roots = jnp.where(apart > 0, jnp.sqrt(jnp.where(apart > 0, apart, 1.0)), 0.0)
    below = y.max(-1, keepdims=True) - y
    return (
        x + 0.1 * jnp.tanh(roots) @ y + jnp.where(below > 0, jnp.log(jnp.where(below > 0, below, 1.0)), 0.0)
    )


def critics(p: Any, x: Array) -> Array:
    """Choices between two that are equal but for rounding, and kinks where they meet: the sum of what both get is
    certain.
    """
    y = jnp.tanh(_linear(p, x))
    one, other = y @ p["w"], y @ (3.0 * p["w"]) / 3.0
    clipped = x + jnp.clip(y - x, -2.0, 2.0)
    chosen = jnp.where(one > other, one, other) + jnp.minimum(y * y, clipped * clipped)
    return jnp.tanh(chosen + one + other + jnp.abs(one - other)) + y + jax.nn.relu(clipped - y)


def cells(p: Any, x: Array) -> Array:
    """Numbers that are whole but for rounding, taken apart into a cell and a place in it, or sign, size and exponent,
    and put together again.
    """
    y = lax.stop_gradient(_linear(p, x))
    at = 1.0 + jnp.arange(x.shape[0])[:, None] % 3 + (3 * y - y - 2 * y)
    exponent = jnp.exp2(jnp.floor(jnp.log2(at)))
    cell, share = jnp.divmod(at, 1.0)
    table = jnp.tanh(p["w"])
    rows = jnp.clip(cell.astype(jnp.int32), 0, table.shape[0] - 2)
    found = (1 - share) * jnp.take_along_axis(table, rows, 0) + share * jnp.take_along_axis(
        table, rows + 1, 0
    )
    scaled = 4097.0 * at
    high = scaled - (scaled - at)
    sine = jnp.sin(high) * jnp.cos(at - high) + jnp.cos(high) * jnp.sin(at - high)
    return x * found + jnp.round(64 * at / exponent) / 64 * exponent * sine + jnp.ldexp(*jnp.frexp(at)) * x


def near(p: Any, x: Array) -> Array:
    """Distances without a guard: their derivatives are largest where rounding alone is left of the difference."""
    y = jnp.tanh(_linear(p, x))
    squares = jnp.sum(y * y, -1)
    apart = -2 * (y @ y.T) + squares[:, None] + squares
    cosines = y @ y.T / jnp.sqrt(squares[:, None] * squares + 1e-6)
    angles = jnp.arccos(jnp.clip(cosines, -1 + 1e-6, 1 - 1e-6))
    return x + 0.1 * jnp.tanh(jnp.sqrt(jnp.maximum(apart, 0) + 1e-8)) @ y + 0.1 * jnp.cos(2 * angles) @ y


def pivoted(p: Any, x: Array) -> Array:
    """A system with two pivots of one size, and a basis of eigenvectors, which are decisions of their own."""
    y = jnp.tanh(_linear(p, x))
    size = min(y.shape)
    other = jnp.tanh(-_linear(p, x))[:size, :size]
    matrix = jnp.concatenate(
        [y[:1, :size], other[:1] + jnp.eye(1, size), other[1:-1] + 4 * jnp.eye(size - 2, size, 1)]
    )
    basis = jnp.linalg.eigh(y.T @ y + jnp.diag(jnp.arange(y.shape[1])))[1]
    return x + jnp.tanh(0.1 * jnp.linalg.solve(matrix, y[:size])).sum(0) + jnp.tanh(y @ basis) @ basis.T


def infinite_mask(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    kept = (jnp.arange(x.shape[0])[:, None] >= jnp.arange(x.shape[0])) & (x[:, 0] < 5)
    scores = jnp.where(kept, 0.3 * y @ x.T, -jnp.inf)
    return x + jnp.where(kept.any(-1, keepdims=True), jax.nn.softmax(scores), 0.0) @ y


def log_space(p: Any, x: Array) -> Array:
    y = jax.nn.log_softmax(_linear(p, x))
    return x + jnp.where(y < -30, 0.0, -y * jnp.exp(y)) + lax.cumlogsumexp(y, axis=1)


def gradient_of_nothing(p: Any, x: Array) -> Array:
    """A gradient that is not a number in one place: a root of zero."""
    y = x - x[:1]
    return x @ p["w"] + jnp.sqrt(jnp.sum(y * y, -1, keepdims=True)) * p["b"]


# Draws


def dropout(p: Any, x: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(7), 3)
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    return jnp.where(keep, jnp.tanh(_linear(p, x)) / 0.7, 0) + x


def noise(p: Any, x: Array) -> Array:
    key = jax.random.PRNGKey(11)
    a, b = jax.random.split(key)
    y = _linear(p, x) + 0.1 * jax.random.normal(a, x.shape)
    return y + x * jax.random.permutation(b, x.shape[0])[:, None] / x.shape[0]


def sampled(p: Any, x: Array) -> Array:
    """Categories drawn with logits, relaxed and hard, of one key of another kind."""
    key = jax.random.key(5, impl="rbg")
    y = _linear(p, x)
    noisy = y + jax.random.gumbel(key, y.shape)
    soft = jax.nn.softmax(noisy)
    hard = jax.nn.one_hot(jnp.argmax(noisy, -1), x.shape[-1])
    return x + (lax.stop_gradient(hard - soft) + soft) @ p["w"]


def keyed_layers(p: Any, x: Array) -> Array:
    """A loop that splits its key, of layers with dropout."""

    @jax.checkpoint
    def one(carry: Any, w: Array) -> Any:
        x, key = carry
        key, now = jax.random.split(key)
        y = jax.nn.gelu(x @ w) * jax.random.bernoulli(now, 0.9, x.shape)
        return (x + y, key), y.mean()

    (x, _), means = lax.scan(one, (x, jax.random.key(2)), jnp.stack([p["w"]] * 3))
    return x + means.sum()


# Types of numbers


def half(p: Any, x: Array) -> Array:
    y = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
    return x + jax.nn.silu(y).astype(x.dtype) + jnp.mean(y, dtype=jnp.float32)


def halves(p: Any, x: Array) -> Array:
    y = lax.dot_general(
        x.astype(jnp.float16),
        p["w"].astype(jnp.float16),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return x + jnp.tanh(y).astype(jnp.float16).astype(x.dtype)


def eighths(p: Any, x: Array) -> Array:
    """Rounded to eight bits of two kinds, with a scale of the array's own."""
    y = _linear(p, x)
    scale = lax.stop_gradient(jnp.abs(y).max()) / 448
    low = (y / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale
    return x + low + jnp.tanh(y).astype(jnp.float8_e5m2).astype(x.dtype)


def integers(p: Any, x: Array) -> Array:
    """Products of integers of 8 and of 4 bits, dequantised."""
    y = lax.stop_gradient(jnp.clip(jnp.round(x * 20), -127, 127)).astype(jnp.int8)
    w = lax.stop_gradient(jnp.clip(jnp.round(p["w"] * 7), -7, 7)).astype(jnp.int4)
    z = lax.dot(y, w.astype(jnp.int8), preferred_element_type=jnp.int32)
    odd = (jnp.bitwise_and(z, 1) == 1) | (z > lax.cummin(z, axis=0))
    return jnp.where(odd, jnp.tanh(x), x) + z.astype(x.dtype) / 140 * p["b"]


def spectral(p: Any, x: Array) -> Array:
    z = jnp.fft.rfft(x, axis=-1) * (1 + 1j * p["b"][: x.shape[-1] // 2 + 1])
    turned = x[:, ::2] + 1j * x[:, 1::2]
    turned = turned * jnp.exp(1j * p["w"][0, ::2])
    return jnp.fft.irfft(z, x.shape[-1], axis=-1) + jnp.abs(turned + 0.5).repeat(2, -1)


# Attention in odd ways


def _softmax(scores: Array) -> Array:
    e = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def interleaved(p: Any, x: Array) -> Array:
    """Rotary positions by pairs of columns, joined again by a stack."""
    place = jnp.arange(x.shape[0])[:, None] * jnp.array([1.0, 0.1, 0.01])

    def turned(x: Array) -> Array:
        a, b = x[:, ::2], x[:, 1::2]
        c, s = jnp.cos(place), jnp.sin(place)
        return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)

    q, k = turned(_linear(p, x)), turned(x @ p["w"].T)
    causal = jnp.tril(jnp.ones((x.shape[0],) * 2, bool))
    return x + _softmax(jnp.where(causal, q @ k.T / 2, -1e9)) @ x


def heads(p: Any, x: Array) -> Array:
    """Heads of one projection, stacked, with two readers of the probabilities and dropout between."""
    q, k, v = (y.reshape(-1, 3, 2).swapaxes(0, 1) for y in (_linear(p, x), x @ p["w"].T, jnp.sin(x)))
    scores = jnp.einsum("hqd,hkd->hqk", q, k)
    far = jnp.abs(jnp.arange(x.shape[0])[:, None] - jnp.arange(x.shape[0]))
    weights = jax.nn.softmax(scores - 0.1 * far, axis=-1)
    weights = jnp.where(jax.random.bernoulli(jax.random.key(1), 0.9, weights.shape), weights / 0.9, 0)
    y = jnp.einsum("hqk,hkd->qhd", weights, v).reshape(x.shape)
    return x + y + 0.1 * jnp.square(weights).sum((0, 2))[:, None]


def shared_keys(p: Any, x: Array) -> Array:
    """Grouped queries; sums of exponentials by hand in lower precision."""
    q = _linear(p, x).reshape(-1, 3, 2)
    k, v = x @ p["w"][:, :2], x @ p["w"][:, 2:4]
    scores = jnp.einsum("qhd,kd->qhk", q, k).astype(jnp.bfloat16).astype(jnp.float32)
    y = jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))
    return x + jnp.einsum("qhk,kd->qhd", y, v).reshape(x.shape)


def library_attention(p: Any, x: Array) -> Array:
    q, k, v = (y.reshape(1, -1, 3, 2) for y in (_linear(p, x), x @ p["w"].T, x))
    return x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)


# Convolutions, pools and factors


def convolved(p: Any, x: Array, groups: int = 1) -> Array:
    """Along rows, in groups, dilated and strided, and back."""
    w = jnp.stack([p["w"][:, : x.shape[1] // groups], 0.5 * p["w"].T[:, : x.shape[1] // groups]])
    numbers = ("NHC", "HOI", "NHC")
    options: Any = {"dimension_numbers": numbers, "feature_group_count": groups}
    y = lax.conv_general_dilated(x[None], w, (1,), ((1, 1),), rhs_dilation=(2,), **options)
    z = lax.conv_general_dilated(jnp.tanh(y), w, (2,), "SAME", **options)
    return x + z.repeat(2, 1)[0, : x.shape[0]]


def pooled(p: Any, x: Array) -> Array:
    y = _linear(p, x)[None, :, :, None]
    most = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 3, 1), (1, 2, 3, 1), "VALID")
    mean = lax.reduce_window(y, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9
    return most.repeat(2, 1).repeat(3, 2)[0, :, :, 0] + mean[0, :, :, 0]


def factored(p: Any, x: Array) -> Array:
    y = _linear(p, x)
    square = x.T @ x / x.shape[0] + jnp.eye(x.shape[1])
    low = jnp.linalg.cholesky(square)
    q, r = jnp.linalg.qr(p["w"] + 3 * jnp.eye(x.shape[1]))
    solved = jax.scipy.linalg.solve_triangular(low, y.T, lower=True).T
    return solved @ q + jnp.linalg.slogdet(square)[1] + 0.01 * jnp.trace(r)


# Rules of their own, some of which disagree with what they differentiate


@jax.custom_vjp
def _reversed(x: Array) -> Array:
    return jnp.sin(x)


_reversed.defvjp(lambda x: (jnp.sin(x), (x, x > 0)), lambda kept, g: (jnp.where(kept[1], -g, 0.1 * g),))


def reversed_gradient(p: Any, x: Array) -> Array:
    return _reversed(_linear(p, x)) + x


@jax.custom_vjp
def _clipped(x: Array, limit: Array) -> Array:
    return x * limit


def _clipped_bwd(kept: Any, g: Array) -> Any:
    _, limit = kept
    size = jnp.sqrt(jnp.sum(g * g) + 1e-9)
    return jnp.minimum(1, limit / size) * g, jnp.zeros_like(limit)


_clipped.defvjp(lambda x, limit: (x * limit, (x, limit)), _clipped_bwd)


def clipped_gradient(p: Any, x: Array) -> Array:
    return _clipped(jnp.tanh(_linear(p, x)), jnp.float32(0.7)) + x


@jax.custom_jvp
def _other_slope(x: Array) -> Array:
    return jnp.floor(4 * x) / 4


@_other_slope.defjvp
def _other_slope_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = _other_slope(x)
    return y, t * (1 - jnp.square(x - y))


def other_slope(p: Any, x: Array) -> Array:
    return _other_slope(_linear(p, x)) + jnp.tanh(x)


# Checkpoints


def _block(p: Any, x: Array) -> Array:
    y = checkpoint_name(jnp.sin(_linear(p, x)), "inner")
    return x + checkpoint_name(jnp.tanh(y @ p["w"]), "outer") * 0.5


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("outer"),
    "other names": jax.checkpoint_policies.save_any_names_but_these("inner"),
}


def with_policy(p: Any, x: Array, policy: str) -> Array:
    run = jax.checkpoint(_block, policy=POLICIES[policy], prevent_cse=policy == "names")
    return run(p, run(p, x))


def nested_checkpoints(p: Any, x: Array) -> Array:
    inner = jax.checkpoint(lambda x: jax.checkpoint(_block)(p, jnp.sin(x)))
    return jax.checkpoint(lambda x: inner(inner(x)) + x)(x)


# Loops


def stubborn_loop(p: Any, x: Array) -> Array:
    """Carries that stay what they are, integers and truths beside numbers, rows that are given back, and two alike."""

    def one(carry: Any, row: Any) -> Any:
        h, constant, count, flag = carry
        row, i = row
        new = jnp.tanh(h @ p["w"] + row) * jnp.where(flag, 1.0, 0.5) + constant
        return (new, constant, count + i, new.sum() > 0), (row, new, new, count)

    carry = jnp.zeros_like(x[0]), p["b"], 0, True
    (last, _, count, _), (rows, states, again, counts) = lax.scan(
        one, carry, (x, jnp.arange(x.shape[0])), reverse=True
    )
    return rows + states * again + 0.01 * counts[:, None] + last + 0.001 * count


def loops_in_loops(p: Any, x: Array) -> Array:
    """Three deep, each in another direction, with a checkpoint in the middle."""

    def innermost(h: Array, t: Array) -> Any:
        h = jnp.sin(h @ p["w"] + t)
        return h, h.mean()

    @jax.checkpoint
    def middle(h: Array, row: Array) -> Any:
        h, means = lax.scan(innermost, h + row, row[:2], reverse=True)
        return h, means

    def outer(x: Array, _: Any) -> Any:
        last, means = lax.scan(middle, jnp.zeros_like(x[0]), x)
        return x + 0.1 * last + 0.1 * means.sum(-1, keepdims=True), last

    x, lasts = lax.scan(outer, x, None, length=2)
    return x + lasts.sum(0)


def short_loops(p: Any, x: Array) -> Array:
    """Loops of one iteration and of none."""
    y, once = lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, p["w"][None])
    z, never = lax.scan(lambda c, w: (jnp.tanh(c @ w), c), y, p["w"][None][:0])
    return z + once[0] + never.sum()


def dynamic_reads(p: Any, x: Array) -> Array:
    """Loops that read and write the rows of what they carry, as caches are."""

    def one(i: Any, carry: Any) -> Any:
        cache, total = carry
        row = lax.dynamic_index_in_dim(cache, i, keepdims=False)
        before = lax.dynamic_index_in_dim(cache, jnp.maximum(i - 1, 0), keepdims=False)
        row = jnp.tanh(row @ p["w"] + 0.5 * before)
        return lax.dynamic_update_index_in_dim(cache, row, i, 0), total + row

    cache, total = lax.fori_loop(0, x.shape[0], one, (x, p["b"]))
    return cache + total


def mapped_in_batches(p: Any, x: Array) -> Array:
    return lax.map(lambda row: jnp.sin(row @ p["w"]) * row, x, batch_size=3) + x


def gathering(p: Any, x: Array) -> Array:
    """Rows that know of all by names of axes."""

    def one(row: Array) -> Array:
        row = row - lax.pmean(row, "rows")
        return jnp.tanh(row @ p["w"]) + 0.1 * lax.axis_index("rows") * lax.pmax(
            lax.stop_gradient(row), "rows"
        )

    return jax.vmap(one, axis_name="rows")(x)


# References and effects


def accumulator(p: Any, x: Array) -> Array:
    """A reference that is written within a loop."""
    total = jax.new_ref(jnp.zeros_like(x))

    def one(i: Any, _: Any) -> Any:
        total[...] += jnp.sin(total[...] + x @ p["w"]) * (i + 1.0)
        return None

    lax.fori_loop(0, 3, lambda i, c: one(i, c), None)
    return total[...]


def called_back(p: Any, x: Array) -> Array:
    """Numbers that the host makes."""
    given = jax.pure_callback(
        lambda a: 2 * a,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        lax.stop_gradient(x),
        vmap_method="sequential",
    )
    return jnp.tanh(_linear(p, x)) * given


# Structure


def twice(p: Any, x: Array) -> Array:
    """Shared weights: read by several layers, transposed, as a table and as a bias."""
    ids = jnp.arange(x.shape[0]) % x.shape[1]
    y = jnp.tanh(_linear(p, x) + p["w"][ids])
    return jnp.tanh(_linear(p, y)) @ p["w"].T + p["b"] * p["b"][::-1]


def barriers(p: Any, x: Array) -> Array:
    """A user's own barriers, and functions called within functions."""
    y, w = lax.optimization_barrier((jnp.sin(_linear(p, x)), p["w"]))
    return jax.jit(lambda a: jax.jit(jnp.cos)(a) + lax.optimization_barrier(a @ w))(y)


def reduced_precision(p: Any, x: Array) -> Array:
    y = lax.reduce_precision(_linear(p, x), exponent_bits=8, mantissa_bits=5)
    return jnp.tanh(y) + lax.reduce(x * y, jnp.float32(0), lax.add, (1,))[:, None]


def multiplied_up(p: Any, x: Array) -> Array:
    y = 1 + 0.1 * jnp.tanh(_linear(p, x))
    return jnp.cumprod(y, 0) / jnp.prod(y, 0) + lax.cumsum(x, axis=1, reverse=True)


def rooted(p: Any, x: Array) -> Array:
    """Cube roots by Newton's method, and their derivative by the implicit function theorem."""
    target = jnp.tanh(_linear(p, x))

    def residual(y: Array) -> Array:
        return y + y**3 / 3 - target

    def solve(f: Callable[[Array], Array], start: Array) -> Array:
        return lax.fori_loop(0, 6, lambda _, y: y - f(y) / (1 + y * y), start)

    return lax.custom_root(residual, jnp.zeros_like(x), solve, lambda g, y: y / g(jnp.ones_like(y)))


def linear_system(p: Any, x: Array) -> Array:
    """A symmetric system that a loop solves, of which JAX knows the transposed one."""
    matrix = jnp.eye(x.shape[-1]) + 0.1 * p["w"] @ p["w"].T

    def solve(apply: Callable[[Array], Array], b: Array) -> Array:
        return lax.fori_loop(0, 8, lambda _, y: y + 0.5 * (b - apply(y)), b)

    return lax.custom_linear_solve(lambda y: y @ matrix, jnp.tanh(x) + p["b"], solve, symmetric=True)


def quantised(p: Any, x: Array) -> Array:
    """Weights and values as eight-bit integers with a scale for each row, whose gradients pass as if they were not."""

    def through(y: Array) -> Array:
        scale = lax.stop_gradient(jnp.abs(y).max(-1, keepdims=True) / 127 + 1e-6)
        whole = jnp.clip(jnp.round(y / scale), -127, 127).astype(jnp.int8)
        return y + lax.stop_gradient(whole.astype(y.dtype) * scale - y)

    return jnp.tanh(through(_linear(p, x)) @ through(p["w"]))


def ragged_experts(p: Any, x: Array) -> Array:
    """Rows in the order of their experts, each with a matrix of its own, of as many rows as have chosen it."""
    experts = jnp.stack([p["w"], p["w"].T, 0.5 * p["w"] + 0.1])
    chosen = jnp.argmax(_linear(p, x)[:, :3], axis=-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=3).astype(jnp.int32)
    made = lax.ragged_dot(x[order], experts, sizes)
    return jnp.zeros_like(x).at[order].set(jnp.tanh(made))


def ragged_rows(p: Any, x: Array) -> Array:
    """Sequences of unequal lengths one behind the other: starts that are data, reads between them, and their sums and
    maxima.
    """
    y = _linear(p, x)
    rows = x.shape[0]
    of = jnp.cumsum(lax.stop_gradient(y[:, 0]) > 0.3).clip(0, rows - 1)
    starts = jnp.searchsorted(of, jnp.arange(rows)).clip(0, rows - 1)
    sums = jax.ops.segment_sum(jnp.sin(y), of, rows)
    most = jax.ops.segment_max(y, of, rows, indices_are_sorted=True)
    most = jnp.where(jnp.isfinite(most), most, 0.0)
    first = jnp.take(y, starts[of], axis=0, mode="clip")
    before = y.at[jnp.arange(rows) - 1].get(mode="fill", fill_value=0.5)
    return 0.3 * sums[of] + jnp.where(y >= most[of], y, 0.2 * y) + 0.1 * first * before


def split_number(p: Any, x: Array) -> Array:
    """A number as the sum of a short one and what that leaves, which are read apart and together."""
    y = jnp.tanh(_linear(p, x))
    high = y.astype(jnp.bfloat16)
    low = (y - high.astype(jnp.float32)).astype(jnp.bfloat16)
    w = p["w"].astype(jnp.bfloat16)
    made = sum(lax.dot(a, w, preferred_element_type=jnp.float32) for a in (high, low))
    return made + 256.0 * (y - high.astype(jnp.float32))


DECISIONS: dict[str, Part] = {
    "own maximum": own_maximum,
    "quantiles": quantiles,
    "best of": best_of,
    "ranked": ranked,
    "resampled": resampled,
    "interpolated": interpolated,
    "rounded": rounded,
    "codebook": codebook,
    "bucketed": bucketed,
    "running maximum": running_maximum,
    "by bits": by_bits,
    "sorted branches": sorted_branches,
    "hard gate": hard_gate,
    "segments": segments,
    "written": written,
}
"""Parts that decide by numbers."""

ODD: dict[str, Part] = DECISIONS | {
    "cancelling": cancelling,
    "masked root": masked_root,
    "distances": distances,
    "cells": cells,
    "critics": critics,
    "near": near,
    "pivoted": pivoted,
    "infinite mask": infinite_mask,
    "log space": log_space,
    "gradient of nothing": gradient_of_nothing,
    "dropout": dropout,
    "noise": noise,
    "sampled": sampled,
    "keyed layers": keyed_layers,
    "half": half,
    "halves": halves,
    "eighths": eighths,
    "integers": integers,
    "spectral": spectral,
    "interleaved": interleaved,
    "heads": heads,
    "shared keys": shared_keys,
    "library attention": library_attention,
    "convolved": convolved,
    "convolved in groups": partial(convolved, groups=3),
    "convolved by column": partial(convolved, groups=6),
    "pooled": pooled,
    "factored": factored,
    "reversed gradient": reversed_gradient,
    "clipped gradient": clipped_gradient,
    "other slope": other_slope,
    **{f"policy of {name}": partial(with_policy, policy=name) for name in POLICIES},
    "nested checkpoints": nested_checkpoints,
    "stubborn loop": stubborn_loop,
    "loops in loops": loops_in_loops,
    "short loops": short_loops,
    "dynamic reads": dynamic_reads,
    "mapped in batches": mapped_in_batches,
    "gathering": gathering,
    "accumulator": accumulator,
    "called back": called_back,
    "twice": twice,
    "barriers": barriers,
    "reduced precision": reduced_precision,
    "multiplied up": multiplied_up,
    "rooted": rooted,
    "linear system": linear_system,
    "quantised": quantised,
    "ragged experts": ragged_experts,
    "ragged rows": ragged_rows,
    "split number": split_number,
}
"""All of them."""
