"""Small train steps with loops, one per structure that has to be inlined and closed again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax import lax
from zoo import KEY, Case, _normal, _sgd, _squash

ROWS, WIDTH, LAYERS = 256, 64, 6


def _stacked(count: int = LAYERS, seed: int = 10) -> dict[str, jax.Array]:
    scale = WIDTH**-0.5
    return {
        "a": scale * _normal((count, WIDTH, 2 * WIDTH), seed),
        "b": scale * _normal((count, 2 * WIDTH, WIDTH), seed + 1),
        "c": jnp.zeros((count, WIDTH)),
    }


def _batch(*leading: int) -> tuple[jax.Array, jax.Array]:
    return _normal((*leading, ROWS, WIDTH), 1), _normal((*leading, ROWS, WIDTH), 2)


def _block(x: jax.Array, p: Any) -> jax.Array:
    h = jax.nn.gelu(x @ p["a"])
    return x + jnp.tanh(h @ p["b"] + p["c"])


def _squares(net: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((net(params, x) - y) ** 2)

    return loss


def _layers(**options: Any) -> Callable[..., jax.Array]:
    def net(params: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, p: (_block(x, p), None), x, params, **options)[0]

    return net


def _case(name: str, net: Callable[..., jax.Array], params: Callable[[], Any] = _stacked) -> Case:
    return Case(name, _sgd(_squares(net)), lambda: (params(), _batch()))


def _checkpointed(params: Any, x: jax.Array) -> jax.Array:
    return lax.scan(jax.checkpoint(lambda x, p: (_block(x, p), None)), x, params)[0]


def _constants(params: Any, x: jax.Array) -> jax.Array:
    """A constant array, several carries, results of each iteration, and the last layer first."""
    mask = jnp.tanh(x[:, :1])

    def body(carry: Any, p: Any) -> Any:
        x, total, count = carry
        y = _block(x * mask, p)
        return (y, total + y.mean(1), count + 1), y[:, :8]

    (y, total, count), heads = lax.scan(body, (x, jnp.zeros(ROWS), 0), params, reverse=True)
    return y + total[:, None] * count + heads.mean()


def _map(params: Any, x: jax.Array) -> jax.Array:
    return lax.map(lambda p: _block(x, p), params).mean(0)


def _fori(params: Any, x: jax.Array) -> jax.Array:
    def body(i: Any, x: jax.Array) -> jax.Array:
        return _block(x, jax.tree.map(lambda a: a[i], params))

    return lax.fori_loop(0, LAYERS, body, x)


def _two(params: Any, x: jax.Array) -> jax.Array:
    """Two loops with the same weights, the second over what the first stacked too."""
    y, between = lax.scan(lambda x, p: (_block(x, p), jnp.tanh(x)), x, params)

    def body(x: jax.Array, inputs: Any) -> Any:
        p, skipped = inputs
        return _block(x, p) + skipped, None

    return lax.scan(body, y, (params, between), reverse=True)[0]


def _turned(params: Any, x: jax.Array) -> jax.Array:
    """Two loops, and between them nothing but a change of layout."""
    y = _layers()(params, x).reshape(16, ROWS // 16, WIDTH)
    return _layers()(params, y.swapaxes(0, 1).reshape(x.shape))


def _recurrent(params: Any, x: jax.Array) -> jax.Array:
    """A recurrent net over time, its states read by what follows."""

    def body(h: jax.Array, row: jax.Array) -> Any:
        h = jnp.tanh(row @ params["u"] + h @ params["w"])
        return h, h

    _, states = lax.scan(body, jnp.zeros((16, WIDTH)), x.reshape(ROWS // 16, 16, WIDTH))
    return (jnp.sin(states) @ params["v"]).reshape(x.shape)


def _recurrent_params() -> Any:
    return {name: WIDTH**-0.5 * _normal((WIDTH, WIDTH), i) for i, name in enumerate("uwv")}


def _nested(params: Any, x: jax.Array) -> jax.Array:
    """Layers that loop over pieces of the batch."""

    def layer(x: jax.Array, p: Any) -> Any:
        pieces = x.reshape(4, ROWS // 4, WIDTH)
        total, pieces = lax.scan(
            lambda t, piece: (t + piece.mean(0), _block(piece, p)), jnp.zeros(WIDTH), pieces
        )
        return pieces.reshape(x.shape) + total, None

    return lax.scan(layer, x, params)[0]


def _branching(params: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, inputs: Any) -> Any:
        i, p = inputs
        return lax.cond(i % 2 == 0, lambda: _block(x, p), lambda: jnp.sin(x) @ p["a"] @ p["b"]), None

    return lax.scan(body, x, (jnp.arange(LAYERS), params))[0]


def _custom_rule(params: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, p: (_squash(_block(x, p)), None), x, params)[0]


def _random(params: Any, x: jax.Array) -> jax.Array:
    """Dropout with a key of its own in each layer."""

    def body(carry: Any, p: Any) -> Any:
        x, key = carry
        key, now = jax.random.split(key)
        return (jnp.where(jax.random.bernoulli(now, 0.9, x.shape), _block(x, p), 0.0), key), None

    return lax.scan(body, (x, KEY), params)[0][0]


def _accumulating(net: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Gradients of several batches, summed by a loop."""
    loss = _squares(net)

    def step(params: Any, batches: Any) -> Any:
        def one(carry: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

        zero = jax.tree.map(jnp.zeros_like, params)
        (value, grads), _ = lax.scan(one, (0.0, zero), batches)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def _unrolled(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = _block(x, jax.tree.map(lambda a, i=i: a[i], params))
    return x


class _Block(linen.Module):
    train: bool = True

    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> Any:
        h = linen.BatchNorm(use_running_average=not self.train)(x)
        h = linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(h)))
        return x + linen.Dropout(0.1, deterministic=not self.train)(h), None


def _linen(remat: bool = False) -> Case:
    """`nn.scan` over blocks with statistics and dropout."""
    block = linen.remat(_Block, prevent_cse=False) if remat else _Block
    layers = linen.scan(
        block,
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True, "dropout": True},
        length=LAYERS,
    )
    optimizer = optax.adamw(1e-3)

    def make_args() -> tuple[Any, ...]:
        variables = layers().init({"params": KEY, "dropout": KEY}, _batch()[0], None)
        return (variables, optimizer.init(variables["params"])), _batch()

    def step(state: Any, batch: Any) -> Any:
        variables, opt_state = state
        x, y = batch

        def loss(params: Any) -> Any:
            inputs = {**variables, "params": params}
            (out, _), changed = layers().apply(
                inputs, x, None, rngs={"dropout": KEY}, mutable=["batch_stats"]
            )
            return jnp.mean((out - y) ** 2), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, opt_state = optimizer.update(grads, opt_state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        return ({"params": params, **changed}, opt_state), value

    return Case("linen scan, remat" if remat else "linen scan", step, make_args)


def _nnx() -> Case:
    """`nnx.scan` over blocks."""

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(nnx.gelu(self.up(x)))

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x: jax.Array, block: Block) -> jax.Array:
        return block(x)

    graph, _ = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))))

    def net(params: Any, x: jax.Array) -> jax.Array:
        return forward(x, nnx.merge(graph, params))

    return _case("nnx scan", net, lambda: nnx.split(create(nnx.Rngs(0)))[1])


LOOPS = {
    case.name: case
    for case in (
        _case("layers", _layers()),
        _case("reversed layers", _layers(reverse=True)),
        _case("unrolled by 4", _layers(unroll=4)),
        _case("one layer", _layers(), lambda: _stacked(1)),
        _case("five layers", _layers(), lambda: _stacked(5)),
        _case("seven layers", _layers(), lambda: _stacked(7)),
        _case("seven layers, reversed", _layers(reverse=True), lambda: _stacked(7)),
        _case("thirteen layers", _layers(), lambda: _stacked(13)),
        _case("twenty-four layers", _layers(), lambda: _stacked(24)),
        _case("checkpointed body", _checkpointed),
        _case("checkpointed loop", jax.checkpoint(_layers())),
        _case("constants", _constants),
        _case("map", _map),
        _case("fori", _fori),
        _case("two loops", _two),
        _case("turned", _turned),
        _case("recurrent", _recurrent, _recurrent_params),
        _case("nested", _nested),
        _case("branching", _branching),
        _case("custom rule", _custom_rule),
        _case("random", _random),
        Case("accumulation", _accumulating(_unrolled), lambda: (_stacked(), _batch(3))),
        Case("accumulation over layers", _accumulating(_layers()), lambda: (_stacked(), _batch(3))),
        _linen(),
        _linen(remat=True),
        _nnx(),
    )
}
