"""Small train steps, one per structure that a planner has to get right, with activations far larger than parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import lax

BATCH, WIDTH, LAYERS = 512, 64, 8
KEY = jax.random.key(0, impl="unsafe_rbg")  # compiles far faster than the default


@dataclass(frozen=True)
class Case:
    """A train step: `step(*make_args())`, jitted with these arguments donated."""

    name: str
    step: Callable[..., Any]
    make_args: Callable[[], tuple[Any, ...]]
    donate_argnums: tuple[int, ...] = (0,)


def _normal(shape: Sequence[int], seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _tokens(shape: Sequence[int], below: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, below, shape), jnp.int32)


def _layers(dtype: Any = jnp.float32, count: int = LAYERS) -> list[dict[str, jax.Array]]:
    weights = [_normal((WIDTH, WIDTH), 10 + i, dtype) * WIDTH**-0.5 for i in range(count)]
    return [{"w": w, "b": jnp.zeros(WIDTH, dtype)} for w in weights]


def _forward(params: Any, x: jax.Array, activation: Callable[..., jax.Array] = jnp.tanh) -> jax.Array:
    for layer in params:
        x = activation(x @ layer["w"] + layer["b"])
    return x


def _squares(activation: Callable[..., jax.Array] = jnp.tanh) -> Callable[..., jax.Array]:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((_forward(params, x, activation) - y) ** 2)

    return loss


def _sgd(loss: Callable[..., jax.Array], rate: float = 0.1) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - jnp.asarray(rate, p.dtype) * g, params, grads), value

    return step


def _batch(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    return _normal((BATCH, WIDTH), 1, dtype), _normal((BATCH, WIDTH), 2, dtype)


def _plain_args() -> tuple[Any, ...]:
    return _layers(), _batch()


def _with(optimizer: optax.GradientTransformation, loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def _mlp_adamw() -> Case:
    optimizer = optax.adamw(1e-3)

    def make_args() -> tuple[Any, ...]:
        params = _layers()
        return (params, optimizer.init(params)), _batch()

    return Case("mlp_adamw", _with(optimizer, _squares()), make_args)


def _global_norm() -> Case:
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1, momentum=0.9))

    def make_args() -> tuple[Any, ...]:
        params = _layers()
        return (params, optimizer.init(params)), _batch()

    return Case("global_norm", _with(optimizer, _squares(jax.nn.gelu)), make_args)


class _Block(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(linen.Conv, self.features, (3, 3), use_bias=False)
        norm = partial(linen.BatchNorm, use_running_average=False, momentum=0.8)
        y = linen.relu(norm()(conv()(x)))
        return linen.relu(x + norm()(conv()(y)))


class _ResNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Conv(16, (3, 3), use_bias=False)(x)
        for _ in range(2):
            x = _Block(16)(x)
        x = linen.max_pool(x, (2, 2), (2, 2))
        return linen.Dense(10)(x.mean((1, 2)))


def _resnet() -> Case:
    model = _ResNet()

    def make_args() -> tuple[Any, ...]:
        images, labels = _normal((16, 16, 16, 3), 1), jnp.arange(16) % 10
        variables = jax.jit(model.init)(KEY, images)
        return (variables["params"], variables["batch_stats"]), (images, labels)

    def step(state: Any, batch: Any) -> Any:
        params, stats = state
        images, labels = batch

        def loss(params: Any) -> Any:
            logits, updated = model.apply(
                {"params": params, "batch_stats": stats}, images, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels)
            return losses.mean(), updated["batch_stats"]

        (value, new_stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new_stats), value

    return Case("resnet", step, make_args)


class _Transformer(linen.Module):
    """A block of pre-norm attention and MLP with dropout over 48 tokens.

    Without attention's biases: that of the keys has no gradient but rounding.
    """

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(64, 32)(tokens)
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False, use_bias=False)(
            h
        )
        h = linen.Dense(128)(linen.LayerNorm()(x))
        x = x + linen.Dropout(0.1, deterministic=False)(linen.Dense(32)(linen.gelu(h)))
        return linen.Dense(64)(linen.LayerNorm()(x))


def _transformer() -> Case:
    model = _Transformer()

    def make_args() -> tuple[Any, ...]:
        tokens = _tokens((16, 48), 64)
        params = jax.jit(model.init)({"params": KEY, "dropout": KEY}, tokens)["params"]
        return (params, jax.random.fold_in(KEY, 7)), tokens

    def step(state: Any, tokens: Any) -> Any:
        params, key = state
        key, dropout = jax.random.split(key)

        def loss(params: Any) -> jax.Array:
            logits: Any = model.apply({"params": params}, tokens, rngs={"dropout": dropout})
            targets = jnp.roll(tokens, -1, axis=1)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key), value

    return Case("transformer", step, make_args)


def _tied_embeddings() -> Case:
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        x = x + _forward(params["layers"], x, jax.nn.silu)
        logits = x @ params["embed"].T
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens, 1)[:, None], axis=1)
        )

    def make_args() -> tuple[Any, ...]:
        params = {"embed": _normal((96, WIDTH), 3) * 0.1, "layers": _layers()}
        return params, _tokens((BATCH,), 96)

    return Case("tied_embeddings", _sgd(loss), make_args)


def _own_checkpoint() -> Case:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for i in range(0, len(params), 2):
            x = jax.checkpoint(_forward, policy=jax.checkpoint_policies.dots_saveable)(params[i : i + 2], x)
        return jnp.mean((x - y) ** 2)

    return Case("own_checkpoint", _sgd(loss), _plain_args)


@jax.custom_vjp
def _squash(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.abs(x))


def _squash_fwd(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _squash(x)
    return y, 1 - jnp.abs(y)


def _squash_bwd(slope: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (g * slope * slope,)


_squash.defvjp(_squash_fwd, _squash_bwd)


@jax.custom_jvp
def _softsign(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(1 + x * x)


@_softsign.defjvp
def _softsign_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return _softsign(x), t * (1 + x * x) ** -1.5


def _scan() -> Case:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        x = _forward(params[:4], x)

        def body(carry: jax.Array, b: jax.Array) -> Any:
            return jnp.tanh(carry @ params[4]["w"] + b), carry.mean()

        x, means = lax.scan(body, x, jnp.zeros((2, WIDTH)))
        return jnp.mean((_forward(params[5:], x) - y) ** 2) + means.sum()

    return Case("scan", _sgd(loss), _plain_args)


def _cond() -> Case:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for i, layer in enumerate(params):
            x = jnp.tanh(x @ layer["w"] + layer["b"])
            if i in (2, 5):
                x = lax.cond(jnp.sum(layer["b"]) > 0.5, lambda a: 2 * a, jnp.sin, x)
        return jnp.mean((x - y) ** 2)

    return Case("cond", _sgd(loss), _plain_args)


def _two_gradients() -> Case:
    """A generator and a discriminator, each with its own gradient in one step."""

    def judge(judges: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(_forward(judges, x, jax.nn.leaky_relu), axis=1)

    def judges_loss(judges: Any, real: jax.Array, fake: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-judge(judges, real))) + jnp.mean(
            jax.nn.softplus(judge(judges, fake))
        )

    def makers_loss(makers: Any, judges: Any, noise: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-judge(judges, _forward(makers, noise))))

    def step(state: Any, batch: Any) -> Any:
        makers, judges = state
        real, noise = batch
        judged, grads = jax.value_and_grad(judges_loss)(judges, real, _forward(makers, noise))
        judges = jax.tree.map(lambda p, g: p - 0.1 * g, judges, grads)
        made, grads = jax.value_and_grad(makers_loss)(makers, judges, noise)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, makers, grads), judges), (judged, made)

    return Case("two_gradients", step, lambda: ((_layers(count=4), _layers(count=4)), _batch()))


def _bfloat16() -> Case:
    dtype = jnp.bfloat16
    return Case("bfloat16", _sgd(_squares()), lambda: (_layers(dtype), _batch(dtype)))


class _Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return x


def _nnx_split() -> Case:
    graphdef, state = nnx.split(_Perceptron(nnx.Rngs(0)))

    def loss(state: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((nnx.merge(graphdef, state)(x) - y) ** 2)

    return Case("nnx", _sgd(loss), lambda: (jax.tree.map(jnp.copy, state), _batch()))


def _integers() -> Case:
    """Counts among the parameters' companions, tokens in, an integer out."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return jnp.mean(_forward(params, jax.nn.one_hot(tokens, WIDTH), jax.nn.relu) ** 2)

    def step(state: Any, tokens: jax.Array) -> Any:
        params, count = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        histogram = jnp.zeros(WIDTH, jnp.int32).at[tokens].add(1)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), count + 1), (value, histogram)

    def make_args() -> tuple[Any, ...]:
        return (_layers(), jnp.int32(3)), _tokens((BATCH,), WIDTH)

    return Case("integers", step, make_args)


def _auxiliary() -> Case:
    """Statistics of every layer and one whole activation come back with the loss."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        means, kept = [], x
        for i, layer in enumerate(params):
            x = jnp.tanh(x @ layer["w"] + layer["b"])
            means.append(x.mean(0))
            kept = x if i == 3 else kept
        return jnp.mean((x - y) ** 2), (means, kept)

    def step(params: Any, batch: Any) -> Any:
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, aux

    return Case("auxiliary", step, _plain_args)


def _nested_jit() -> Case:
    @jax.jit
    def layer(params: Any, x: jax.Array) -> jax.Array:
        return jax.jit(jnp.tanh)(x @ params["w"] + params["b"])

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for p in params:
            x = layer(p, x)
        return jnp.mean((x - y) ** 2)

    return Case("nested_jit", jax.jit(_sgd(jax.jit(loss))), _plain_args)


def _masks() -> Case:
    """Residual blocks with dropout by hand: random bits are made again from their keys."""

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        x, y = batch
        for i, layer in enumerate(params):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
            x = x + jnp.where(keep, jax.nn.gelu(x @ layer["w"] + layer["b"]), 0)
        return jnp.mean((x - y) ** 2)

    def step(state: Any, batch: Any) -> Any:
        params, key = state
        key, used = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, batch, used)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key), value

    return Case("masks", step, lambda: ((_layers(), jax.random.fold_in(KEY, 1)), _batch()))


ZOO = (
    _mlp_adamw(),
    _resnet(),
    _transformer(),
    _tied_embeddings(),
    _own_checkpoint(),
    Case("custom_vjp", _sgd(_squares(_squash)), _plain_args),
    Case("custom_jvp", _sgd(_squares(_softsign)), _plain_args),
    _scan(),
    _cond(),
    _two_gradients(),
    _global_norm(),
    _bfloat16(),
    _nnx_split(),
    _integers(),
    _auxiliary(),
    _nested_jit(),
    _masks(),
)
BY_NAME = {case.name: case for case in ZOO}
