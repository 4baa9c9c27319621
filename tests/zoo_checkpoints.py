"""Small train steps with checkpoints of their own, one per place where they stand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from zoo import KEY, Case, _sgd
from zoo_loops import LAYERS, _accumulating, _batch, _block, _case, _squares, _stacked, _unrolled

POLICIES = jax.checkpoint_policies


def _named(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.tanh(checkpoint_name(jax.nn.gelu(x @ p["a"]), "hidden") @ p["b"] + p["c"])


def _blocks(**options: Any) -> Callable[..., jax.Array]:
    """Unrolled layers, each under a checkpoint."""

    def net(params: Any, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            p = jax.tree.map(lambda a, i=i: a[i], params)
            x = jax.checkpoint(_named, **options)(x, p)
        return x

    return net


def _body(params: Any, x: jax.Array, **options: Any) -> jax.Array:
    """A loop over layers, each under a checkpoint."""
    body = jax.checkpoint(lambda x, p: (_named(x, p), None), prevent_cse=False, **options)
    return lax.scan(body, x, params)[0]


def _loop(**options: Any) -> Callable[..., jax.Array]:
    """A loop under a checkpoint, its first state made under it too."""

    def net(params: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, p: (_named(x, p), None), jnp.sin(x), params)[0]

    return _checkpointed(net, **options)


def _checkpointed(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.checkpoint`, which reads the flag `jax_remat3` where it is called, here while the step is traced."""
    return lambda *args: jax.checkpoint(fn, **options)(*args)


def _loops(params: Any, x: jax.Array) -> jax.Array:
    """Two loops under checkpoints of their own, the second over what the first stacked, with several carries."""

    def first(params: Any, x: jax.Array) -> Any:
        def body(carry: Any, p: Any) -> Any:
            x, total, count = carry
            y = _block(x, p)
            return (y, total + y.mean(1), count + 1), jnp.tanh(x)

        (y, total, count), between = lax.scan(body, (x, jnp.zeros(x.shape[0]), 0), params)
        return y + total[:, None] * count, between

    def second(params: Any, x: jax.Array, between: jax.Array) -> jax.Array:
        def body(x: jax.Array, inputs: Any) -> Any:
            p, skipped = inputs
            return _block(x, p) + skipped, None

        return lax.scan(body, x, (params, between), reverse=True)[0]

    y, between = jax.checkpoint(first)(params, x)
    return jax.checkpoint(second)(params, y, between)


def _pieces(params: Any, x: jax.Array) -> jax.Array:
    """Layers under checkpoints that loop over pieces of the batch, of a variance that constants are chosen in."""

    def layer(x: jax.Array, p: Any) -> Any:
        pieces = jnp.sin(x / jnp.sqrt(1 + x.var(1, keepdims=True))).reshape(4, -1, x.shape[1])
        _, made = lax.scan(lambda t, piece: (t + piece.mean(0), _block(piece, p)), pieces[0, 0], pieces)
        return made.reshape(x.shape), None

    return lax.scan(jax.checkpoint(layer), x, params)[0]


def _by_hand(params: Any, x: jax.Array) -> jax.Array:
    """Two levels by hand: segments of layers under a checkpoint, layers under another."""
    halves = jax.tree.map(lambda a: a.reshape(2, LAYERS // 2, *a.shape[1:]), params)
    inner = jax.checkpoint(lambda x, p: (_block(x, p), None))
    outer = jax.checkpoint(lambda x, half: lax.scan(inner, x, half))
    return lax.scan(outer, x, halves)[0]


class _Layer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = linen.Dense(2 * x.shape[-1])(linen.LayerNorm()(x))
        h = linen.Dense(x.shape[-1])(linen.gelu(h))
        return x + linen.Dropout(0.1, deterministic=False)(h)


class _Stack(linen.Module):
    """`nn.remat` layer by layer, unrolled."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = linen.remat(_Layer)()(x)
        return x


def _linen(name: str, model: linen.Module) -> Case:
    def net(params: Any, x: jax.Array) -> jax.Array:
        return jnp.asarray(model.apply({"params": params}, x, rngs={"dropout": KEY}))

    def make_args() -> tuple[Any, ...]:
        batch = _batch()
        return jax.jit(model.init)({"params": KEY, "dropout": KEY}, batch[0])["params"], batch

    return Case(name, _sgd(_squares(net)), make_args)


def _remat_scan(lengths: tuple[int, ...], **options: Any) -> linen.Module:
    return linen.remat_scan(
        _Layer, lengths=lengths, split_rngs={"params": True, "dropout": True}, **options
    )()


CHECKPOINTS = {
    case.name: case
    for case in (
        _case("blocks", _blocks()),
        _case("blocks, dots", _blocks(policy=POLICIES.dots_saveable)),
        _case("blocks, names", _blocks(policy=POLICIES.save_only_these_names("hidden"))),
        _case("body", _body),
        _case("loop", _loop()),
        _case("loop, dots", _loop(policy=POLICIES.dots_saveable)),
        _case("loop, names", _loop(policy=POLICIES.save_only_these_names("hidden"))),
        _case("loops", _loops),
        _case("checkpoint in checkpoint", _checkpointed(_body)),
        _case("pieces", _pieces),
        _case("two levels by hand", _by_hand),
        Case("accumulation", _accumulating(_loop()), lambda: (_stacked(), _batch(3))),
        Case(
            "accumulation, unrolled",
            _accumulating(_checkpointed(_unrolled)),
            lambda: (_stacked(), _batch(3)),
        ),
        _linen("nn.remat", _Stack()),
        _linen("nn.remat_scan", _remat_scan((2, 3))),
        _linen("nn.remat_scan, three levels", _remat_scan((2, 2, 2))),
        _linen("nn.remat_scan, dots", _remat_scan((2, 3), policy=POLICIES.dots_saveable)),
    )
}
