"""Small train steps with operations that hold others, and stay whole: branches, shards, kernels, custom rules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxlib import lapack
from zoo import Case
from zoo_loops import LAYERS, ROWS, WIDTH, _block, _case


def _unrolled(layer: Callable[[Any, jax.Array, int], jax.Array], name: str) -> Case:
    def net(params: Any, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = layer(jax.tree.map(lambda a, i=i: a[i], params), x, i)
        return x

    return _case(name, net)


def _other(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.sin(jax.nn.silu(x @ p["a"]) @ p["b"])


def _cond(p: Any, x: jax.Array, i: int) -> jax.Array:
    return lax.cond(x[i, 0] > 0, _block, _other, x, p)


def _switch(p: Any, x: jax.Array, i: int) -> jax.Array:
    def third(x: jax.Array, p: Any) -> jax.Array:
        return x * 0.5 + p["c"]

    return lax.switch(jnp.argmax(x[i, :3]), [_block, _other, third], x, p)


def _nested(p: Any, x: jax.Array, i: int) -> jax.Array:
    return lax.cond(x[i, 0] > 0, lambda: _cond(p, jnp.tanh(x), i + 1), lambda: _other(x, p))


def _in_loop(params: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, inputs: Any) -> Any:
        i, p = inputs
        return lax.switch(i % 3, [_block, _other, lambda x, p: jnp.sin(x) + p["c"]], x, p), None

    return lax.scan(body, x, (jnp.arange(LAYERS), params))[0]


def _sharded(p: Any, x: jax.Array, i: int) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    run = jax.shard_map(_block, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    return run(x, p)


def _iterated(p: Any, x: jax.Array, i: int) -> jax.Array:
    """A square root by as many steps as it takes, through which no gradient goes."""
    target = lax.stop_gradient(1 + x * x)

    def step(state: Any) -> Any:
        y, count = state
        return 0.5 * (y + target / y), count + 1

    root, _ = lax.while_loop(
        lambda s: (s[1] < 20) & (jnp.abs(s[0] ** 2 - target).max() > 1e-3), step, (target, 0)
    )
    return _block(x / root, p)


def _called_back(p: Any, x: jax.Array, i: int) -> jax.Array:
    held = lax.stop_gradient(x)
    scale = jax.pure_callback(lambda a: np.abs(a), jax.ShapeDtypeStruct(x.shape, x.dtype), held)
    return _block(x / (1 + scale), p)


def _whitened(p: Any, x: jax.Array, *, effects: bool = False) -> jax.Array:
    """Rows over the Cholesky factor of their covariance, by LAPACK, called as a foreign function."""
    held = lax.stop_gradient(x)
    covariance = held.T @ held / ROWS + jnp.eye(WIDTH)
    types = jax.ShapeDtypeStruct(covariance.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32)
    target = lapack.prepare_lapack_call("potrf_ffi", np.float32)
    run = jax.ffi.ffi_call(target, types, has_side_effect=effects)
    factor, _ = run(covariance, uplo=np.uint8(ord("U")))
    return _block(lax.linalg.triangular_solve(jnp.tril(factor), x, lower=True, transpose_a=True), p)


def _times(x: jax.Array, y: jax.Array) -> Any:
    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = a[...] * jnp.tanh(b[...])

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)


@jax.custom_vjp
def _gated(x: jax.Array, y: jax.Array) -> jax.Array:
    return _times(x, y)


_gated.defvjp(
    lambda x, y: (_times(x, y), (x, y)),
    lambda kept, g: (_times(g, kept[1]), g * kept[0] * (1 - jnp.tanh(kept[1]) ** 2)),
)


@jax.custom_vjp
def attend(x: jax.Array, keys: jax.Array) -> jax.Array:
    """Attention to keys that are the values too, by a rule of its own with a loop inside."""
    return _attend_fwd(x, keys)[0]


def _attend_fwd(x: jax.Array, keys: jax.Array) -> Any:
    """Attention over blocks of keys with a running maximum and sum, whose backward pass computes the scores again."""

    def body(carry: Any, block: jax.Array) -> Any:
        top, total, out = carry
        scores = x @ block.T
        new = jnp.maximum(top, scores.max(1))
        weights, fade = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
        return (new, total * fade + weights.sum(1), out * fade[:, None] + weights @ block), None

    blocks = keys.reshape(2, -1, keys.shape[1])
    start = jnp.full(x.shape[0], -jnp.inf), jnp.zeros(x.shape[0]), jnp.zeros_like(x)
    (top, total, out), _ = lax.scan(body, start, blocks)
    out = out / total[:, None]
    return out, (x, keys, out, top + jnp.log(total))


def _attend_bwd(kept: Any, g: jax.Array) -> Any:
    x, keys, out, norm = kept
    weights = jnp.exp(x @ keys.T - norm[:, None])
    scores = weights * (g @ keys.T - (g * out).sum(1, keepdims=True))
    return scores @ keys, scores.T @ x + weights.T @ g


attend.defvjp(_attend_fwd, _attend_bwd)


CALLS = {
    case.name: case
    for case in (
        _unrolled(_cond, "cond"),
        _unrolled(_switch, "switch"),
        _unrolled(_nested, "cond in cond"),
        _unrolled(lambda p, x, i: jax.checkpoint(lambda p, x: _cond(p, x, i))(p, x), "checkpointed cond"),
        _case("switch in loop", _in_loop),
        _unrolled(_sharded, "shard_map"),
        _unrolled(_iterated, "while"),
        _unrolled(_called_back, "callback"),
        _unrolled(lambda p, x, i: _whitened(p, x), "foreign function"),
        _unrolled(lambda p, x, i: _whitened(p, x, effects=True), "foreign function with effects"),
        _unrolled(lambda p, x, i: _gated(_block(x, p), jnp.sin(x)), "pallas"),
        _unrolled(lambda p, x, i: _block(x + attend(x, p["a"].T), p), "custom rule with a loop"),
    )
}
