"""Names of parts -> a small net of them, its weights and its batches.

A part is `(p, x) -> array of x's shape`, where `p` holds the weights of one layer or a stack of several. `NETS` are all
parts, each a kind of structure that people differentiate; others are `grown_nets`. Law: each is a program that JAX
runs as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grown_nets import grown, is_grown
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from odd_nets import ODD

Array = jax.Array
Part = Callable[[Any, Array], Array]
Net = Callable[[Any, Array], Array]

ROWS, WIDTH = 8, 6


def normal(rng: random.Random, *shape: int, scale: float = 1.0) -> Array:
    """Random numbers."""
    drawn = np.random.default_rng(rng.getrandbits(32)).normal(size=shape)
    return jnp.asarray(scale * drawn, jnp.float32)


def weights(rng: random.Random, *leading: int) -> dict[str, Array]:
    """Those of one layer, or of several."""
    matrices = normal(rng, *leading, WIDTH, WIDTH, scale=0.7 * WIDTH**-0.5)
    return {"w": matrices, "b": normal(rng, *leading, WIDTH, scale=0.1)}


def layer(p: Any, x: Array) -> Array:
    """One layer with a skip."""
    return 0.5 * x + jnp.tanh(x @ p["w"] + p["b"])


def dense(p: Any, x: Array) -> Array:
    return jax.nn.gelu(x @ p["w"] + p["b"])


def normed(p: Any, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(centred.var(-1, keepdims=True) + 0.1) * (1 + p["b"])


def attention(p: Any, x: Array) -> Array:
    return x + jax.nn.softmax((x @ p["w"]) @ x.T * 0.3) @ x


def layers(p: Any, x: Array, **options: Any) -> Array:
    return lax.scan(lambda x, p: (layer(p, x), None), x, p, **options)[0]


def remat_layers(p: Any, x: Array) -> Array:
    return lax.scan(jax.checkpoint(lambda x, p: (layer(p, x), None)), x, p)[0]


def nested_layers(p: Any, x: Array) -> Array:
    """Layers that loop over pieces of the batch."""

    def one(x: Array, p: Any) -> Any:
        pieces = x.reshape(2, -1, WIDTH)
        total, pieces = lax.scan(lambda t, piece: (t + piece.mean(0), layer(p, piece)), p["b"], pieces)
        return pieces.reshape(x.shape) + 0.1 * total, total.sum()

    x, totals = lax.scan(one, x, p)
    return x + 0.01 * totals.sum()


def rolled_layers(p: Any, x: Array, **options: Any) -> Array:
    """Layers with a checkpoint, each of which is run several times on what it has made at first."""

    @jax.checkpoint
    def one(x: Array, p: Any) -> Any:
        start, gate = layer(p, x), jax.nn.softmax(x @ p["w"])

        def again(y: Array, scale: Array) -> Any:
            y = layer(p, y) * gate + scale * start
            return y, jnp.tanh(y).mean(0)

        y, means = lax.scan(again, start, jnp.arange(1.0, 4.0), **options)
        return x + 0.1 * y + gate, means.sum()

    x, totals = lax.scan(one, x, p)
    return x + 0.01 * totals.sum()


def recurrent(p: Any, x: Array) -> Array:
    """A recurrence over the rows whose states are read behind it."""

    def one(h: Array, row: Array) -> Any:
        h = jnp.tanh(row + h @ p["w"] + p["b"])
        return h, (h, jnp.sin(h).sum())

    _, (states, sums) = lax.scan(one, jnp.zeros_like(x[0]), x, reverse=True)
    return states + 0.1 * jnp.cumsum(sums)[:, None]


def carryless(p: Any, x: Array) -> Array:
    """Scans that carry nothing: over rows, and over nothing but their number."""
    rows = lax.map(lambda row: jnp.tanh(row @ p["w"]) * row, x)
    _, again = lax.scan(lambda _, __: (None, jnp.sin(x @ p["w"])), None, None, length=2)
    return rows + 0.1 * again.sum(0)


def counted(p: Any, x: Array) -> Array:
    """A loop over indices with an integer and a key among its carries."""

    def one(i: Any, carry: Any) -> Any:
        x, count, key = carry
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.8, x.shape)
        return jnp.where(kept, layer(p, x), x * (1 + 0.1 * count)), count + i, key

    return lax.fori_loop(0, 3, one, (x, 0, jax.random.key(1)))[0]


def associative(p: Any, x: Array) -> Array:
    """A linear recurrence with gates, as state-space models have."""
    gates = jax.nn.sigmoid(x @ p["w"])

    def join(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lax.associative_scan(join, (gates, (1 - gates) * x))[1]


def smoother(p: Any, x: Array) -> Array:
    """A Kalman filter over the rows and the smoother behind it: solves in a scan, and an associative scan."""
    size = 2
    f = 0.9 * jnp.eye(size) + 0.1 * p["w"][:size, :size]
    seen, q = p["w"][:, :size], 0.1 * jnp.eye(size)
    none = jnp.zeros((size, 0))  # no inputs drive it

    def observe(carry: Any, row: Array) -> Any:
        mean, spread, lost = carry
        s = seen @ spread @ seen.T + 0.5 * jnp.eye(WIDTH)
        gain = jnp.linalg.solve(s, seen @ spread).T
        error = row - seen @ mean
        mean, spread = mean + gain @ error, spread - gain @ seen @ spread
        lost = lost + error @ jnp.linalg.solve(s, error)
        return (f @ mean + none @ jnp.zeros(0), f @ spread @ f.T + q, lost), (mean, spread)

    start = jnp.zeros(size), jnp.eye(size), jnp.zeros(())
    (_, _, lost), (means, spreads) = lax.scan(observe, start, x)
    gains = jax.vmap(lambda s: jnp.linalg.solve(f @ s @ f.T + q, f @ s).T)(spreads)

    def join(left: Any, right: Any) -> Any:
        return jnp.einsum("...ij,...jk", right[0], left[0]), jnp.einsum(
            "...ij,...j", right[0], left[1]
        ) + right[1]

    offsets = means - jnp.einsum("tij,jk,tk->ti", gains, f, means)
    _, smooth = lax.associative_scan(join, (gains, offsets), reverse=True)
    return x + smooth @ seen.T + 0.01 * lost


def empty(p: Any, x: Array) -> Array:
    """Arrays of no elements: multiplied, joined, carried, stacked and scanned over."""
    nothing = x[:, :0]

    def one(carry: Any, row: Any) -> Any:
        x, none = carry
        return (layer(p, x) + row.sum(), none * 2), (none, row)

    (y, none), (_, rows) = lax.scan(one, (x, nothing), jnp.zeros((2, 0)))
    never, _ = lax.scan(lambda c, w: (c @ w, None), y, jnp.zeros((0, WIDTH, WIDTH)))
    return jnp.concatenate([never, none], 1) + nothing @ jnp.zeros((0, WIDTH)) + rows.sum()


def converged(p: Any, x: Array) -> Array:
    """A loop of unknown length over what it closes over, through which no gradient goes."""
    target = lax.stop_gradient(1 + jnp.square(x @ p["w"]))

    def go_on(state: Any) -> Any:
        y, count = state
        return (count < 20) & (jnp.abs(y * y - target).max() > 1e-3)

    root, count = lax.while_loop(go_on, lambda s: (0.5 * (s[0] + target / s[0]), s[1] + 1), (target, 0))
    return x / root + 0.001 * count


def _fixed_point(f: Callable[[Array], Array], start: Array) -> Array:
    def go_on(state: Any) -> Any:
        before, now, count = state
        return (jnp.abs(before - now).max() > 1e-6) & (count < 40)

    return lax.while_loop(go_on, lambda s: (s[1], f(s[1]), s[2] + 1), (start, f(start), 0))[1]


def _pull(p: Any, x: Array, z: Array) -> Array:
    return jnp.tanh(0.3 * z @ p["w"] + x)


@jax.custom_vjp
def equilibrium(p: Any, x: Array) -> Array:
    """A deep equilibrium: a fixed point whose derivative is that of another."""
    return _fixed_point(lambda z: _pull(p, x, z), jnp.zeros_like(x))


def _equilibrium_fwd(p: Any, x: Array) -> Any:
    z = equilibrium(p, x)
    return z, (p, x, z)


def _equilibrium_bwd(kept: Any, g: Array) -> Any:
    p, x, z = kept
    _, back = jax.vjp(lambda z: _pull(p, x, z), z)
    u = _fixed_point(lambda u: back(u)[0] + g, g)
    return jax.vjp(lambda p, x: _pull(p, x, z), p, x)[1](u)


equilibrium.defvjp(_equilibrium_fwd, _equilibrium_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled(how: str, x: Array, times: int) -> Array:
    return x / (1 + jnp.abs(x)) * times


def _scaled_fwd(how: str, x: Array, times: int) -> Any:
    return _scaled(how, x, times), {"slope": 1 / (1 + jnp.abs(x)), "times": times, "none": None, "way": ()}


def _scaled_bwd(how: str, kept: Any, g: Array) -> Any:
    power = {"square": 2}[how]
    return kept["times"] * g * kept["slope"] ** power, None


_scaled.defvjp(_scaled_fwd, _scaled_bwd)


def own_rule(p: Any, x: Array) -> Array:
    """A rule of its own whose residuals are not arrays alone."""
    return _scaled("square", x @ p["w"], 2)


@jax.custom_jvp
def _softsign(x: Array) -> Array:
    return x / jnp.sqrt(1 + x * x)


@_softsign.defjvp
def _softsign_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return _softsign(x), t * (1 + x * x) ** -1.5


def own_tangent(p: Any, x: Array) -> Array:
    return _softsign(layer(p, x))


def branches(p: Any, x: Array) -> Array:
    x = lax.cond(jnp.sum(x) > 0, lambda x: layer(p, x), lambda x: jnp.sin(2 * x) @ p["w"], x)
    ways = [jnp.tanh, lambda x: jax.nn.softmax(x) * x, lambda x: dense(p, x)]
    return lax.switch(jnp.argmax(x[0]) % 3, ways, x)


def branching_layers(p: Any, x: Array) -> Array:
    def one(x: Array, inputs: Any) -> Any:
        i, p = inputs
        return lax.cond(i % 2 == 0, lambda: layer(p, x), lambda: jnp.cos(x) @ p["w"]), x[0]

    x, firsts = lax.scan(one, x, (jnp.arange(p["b"].shape[0]), p))
    return x + firsts.mean(0)


def called(p: Any, x: Array) -> Array:
    inner = jax.jit(lambda p, x: jax.jit(jnp.tanh)(layer(p, x)))
    return jax.checkpoint(inner, policy=jax.checkpoint_policies.dots_saveable)(p, inner(p, x))


def sharded(p: Any, x: Array) -> Array:
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))

    def one(p: Any, x: Array) -> Array:
        x = layers(jax.tree.map(lambda a: jnp.stack([a, a]), p), x)
        return jnp.tanh(x) * lax.pmean(x.sum(), "rows")

    return jax.shard_map(one, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P("rows"))(p, x)


def _flow(p: Any, t: Any, x: Array) -> Array:
    return jnp.tanh(x @ p["w"] + t * p["b"]) - 0.1 * x


def _runge_kutta(p: Any, x: Array, times: Array) -> Array:
    h = 0.2

    def one(x: Array, t: Array) -> Any:
        k1 = _flow(p, t, x)
        k2 = _flow(p, t + h / 2, x + h / 2 * k1)
        k3 = _flow(p, t + h / 2, x + h / 2 * k2)
        k4 = _flow(p, t + h, x + h * k3)
        return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return lax.scan(one, x, times)[0]


def solved(p: Any, x: Array) -> Array:
    """A neural differential equation, by steps of a fixed size."""
    return _runge_kutta(p, x, 0.2 * jnp.arange(4.0))


@jax.custom_vjp
def adjoint(p: Any, x: Array) -> Array:
    """The same, whose gradient is the solution of another equation that runs back in time."""
    return lax.scan(lambda x, t: (x + 0.1 * _flow(p, t, x), None), x, 0.1 * jnp.arange(4.0))[0]


def _adjoint_bwd(kept: Any, g: Array) -> Any:
    p, end = kept

    def one(carry: Any, t: Array) -> Any:
        x, a, grads = carry
        v, back = jax.vjp(lambda p, x: _flow(p, t, x), p, x)
        dp, dx = back(a)
        return (x - 0.1 * v, a + 0.1 * dx, jax.tree.map(lambda s, d: s + 0.1 * d, grads, dp)), None

    start = end, g, jax.tree.map(jnp.zeros_like, p)
    (_, a, grads), _ = lax.scan(one, start, 0.1 * jnp.arange(4.0), reverse=True)
    return grads, a


adjoint.defvjp(lambda p, x: (adjoint(p, x), (p, adjoint(p, x))), _adjoint_bwd)


def gathered(p: Any, x: Array) -> Array:
    order = jnp.argsort(lax.stop_gradient(x[:, 0]))
    table = jnp.zeros(x.shape).at[order % 3].add(x)
    return jnp.sort(x, axis=0)[order] + table @ p["w"]


def mapped(p: Any, x: Array) -> Array:
    """A gradient with respect to the net's own values, mapped over rows."""
    energy = jax.vmap(jax.grad(lambda row: jnp.sum(jnp.tanh(row @ p["w"]) ** 2)))
    return x - 0.1 * energy(x)


ONE: dict[str, Part] = {
    "dense": dense,
    "norm": normed,
    "attention": attention,
    "recurrent": recurrent,
    "carryless": carryless,
    "counted": counted,
    "associative": associative,
    "smoother": smoother,
    "empty": empty,
    "converged": converged,
    "equilibrium": equilibrium,
    "own rule": own_rule,
    "own tangent": own_tangent,
    "branches": branches,
    "called": called,
    "sharded": sharded,
    "solved": solved,
    "adjoint": adjoint,
    "gathered": gathered,
    "mapped": mapped,
}
"""Parts with the weights of one layer."""

STACKED: dict[str, Part] = {
    "layers": layers,
    "reversed layers": partial(layers, reverse=True),
    "unrolled layers": partial(layers, unroll=2),
    "remat layers": remat_layers,
    "nested layers": nested_layers,
    "rolled layers": rolled_layers,
    "rolled back layers": partial(rolled_layers, reverse=True),
    "branching layers": branching_layers,
}
"""Parts with those of several."""

NETS = ONE | STACKED | ODD
"""What nets are made of."""

ONCE = frozenset({"equilibrium", "adjoint", "own rule"})
"""Parts that are differentiated backward only, and once: a rule of their own says how."""

BACKWARD_ONLY = ONCE | {"reversed gradient", "clipped gradient"}
"""Parts whose rules JAX does not differentiate in forward mode."""

APART = frozenset({"sharded", "ragged experts"})
"""Parts that stand in no mapping over examples."""

REFERRING = frozenset({"accumulator"})
"""Parts with references of their own, which JAX does not differentiate twice, map or check within `jit`."""


@dataclass(frozen=True)
class Chain:
    """A net: parts one behind the other, and a skip from its start to its end."""

    parts: tuple[str, ...]
    rows: int = ROWS

    def batch(self, rng: random.Random, *leading: int) -> tuple[Array, Array]:
        """Inputs and targets."""
        shape = *leading, self.rows, WIDTH
        return normal(rng, *shape), normal(rng, *shape)

    def weights(self, rng: random.Random) -> list[Any]:
        """Fresh weights."""
        return [weights(rng, rng.randint(2, 7)) if n in STACKED else weights(rng) for n in self.parts]

    def __call__(self, params: Any, x: Array) -> Array:
        y = x
        for name, p in zip(self.parts, params, strict=True):
            y = (grown(name) if is_grown(name) else NETS[name])(p, y)
        return y + 0.1 * x

    def loss(self, params: Any, batch: Any) -> Array:
        """Squares, of inputs and targets."""
        x, y = batch
        return jnp.mean((self(params, x) - y) ** 2)


def descend(params: Any, grads: Any, rate: float = 0.1) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)
