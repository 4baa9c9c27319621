"""Seed, size -> a part of a net that nobody wrote: so many random operations, on arrays of several shapes and types.

Operations take what was made before, and some take bodies of their own: loops, branches, checkpoints, derivatives and
mappings, of operations that are as random, and read what is around them. Laws: the same name gives the same part, and a
smaller one is the beginning of a larger one, so that it can be shrunk; JAX differentiates each in either mode, twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Body = Callable[[Array], Array]

GROWN = "grown"
DEEPEST = 2
"""Bodies within bodies."""

STRUCTURED = 0.3
"""The share of operations with bodies."""

LARGEST = 14


def name_of(seed: int, size: int) -> str:
    """The name of a part."""
    return f"{GROWN} {seed} of {size}"


def is_grown(name: str) -> bool:
    """Whether a part of this name is made here."""
    return name.startswith(f"{GROWN} ")


def smaller(name: str) -> list[str]:
    """Names of the same part with fewer operations."""
    seed, size = map(int, name.removeprefix(f"{GROWN} ").split(" of "))
    return [name_of(seed, n) for n in dict.fromkeys((size // 2, size - 1)) if n > 0]


def grown(name: str) -> Callable[[Any, Array], Array]:
    """The part of a name."""
    seed, size = map(int, name.removeprefix(f"{GROWN} ").split(" of "))

    def part(p: Any, x: Array) -> Array:
        made = Made(p, [x], [p["b"]], [jnp.float32(0.5)], [jnp.arange(x.shape[0])], [x > 0])
        return _body(str(seed), size, made, 0)(x)

    return part


@dataclass(frozen=True)
class Made:
    """What operations may read. **Fields:** weights; arrays of the input's shape, and of a row's; numbers; places of
    rows; masks.
    """

    p: Any
    whole: list[Array]
    rows: list[Array] = field(default_factory=list)
    numbers: list[Array] = field(default_factory=list)
    places: list[Array] = field(default_factory=list)
    masks: list[Array] = field(default_factory=list)

    def within(self, *whole: Array) -> Made:
        """The same for a body that is given more."""
        kinds = {k: list(getattr(self, k)) for k in ("rows", "numbers", "places", "masks")}
        return replace(self, whole=[*self.whole, *whole], **kinds)


def _body(seed: str, size: int, made: Made, depth: int) -> Body:
    """A body of random operations on what is around it and its operand."""

    def run(x: Array) -> Array:
        here = made.within(x)
        for i in range(size):
            rng = random.Random(f"{seed}.{i}")
            if depth < DEEPEST and rng.random() < STRUCTURED:
                here.whole.append(_structured(rng, f"{seed}.{i}", here, depth))
            else:
                kind = rng.choice(KINDS)
                getattr(here, kind).append(rng.choice(OPERATIONS[kind])(rng, here))
        *_, last = here.whole
        other = here.whole[len(here.whole) // 2]
        return 0.7 * last + 0.2 * other + 0.1 * here.rows[-1] * here.numbers[-1] + 0.05 * here.masks[-1]

    return run


def _one(rng: random.Random, some: list[Array]) -> Array:
    """One of them, of the last more often."""
    return some[-1 - min(int(rng.expovariate(0.7)), len(some) - 1)]


def _matrix(rng: random.Random, made: Made) -> Array:
    return rng.choice([made.p["w"], made.p["w"].T, 0.5 * made.p["w"] + 0.1])


def _apply(operation: Callable[..., Any]) -> Callable[[random.Random, Made], Array]:
    return lambda rng, made: operation(_one(rng, made.whole))


def _apply_two(operation: Callable[..., Any]) -> Callable[[random.Random, Made], Array]:
    return lambda rng, made: operation(_one(rng, made.whole), _one(rng, made.whole))


def _each(apply: Any, operations: list[Callable[..., Any]]) -> list[Callable[[random.Random, Made], Array]]:
    return [apply(operation) for operation in operations]


def _norm(x: Array, axis: int = -1) -> Array:
    return x * lax.rsqrt(jnp.square(x).mean(axis, keepdims=True) + 0.1)


def _rounded(x: Array) -> Array:
    return x + lax.stop_gradient(jnp.round(8 * x) / 8 - x)


def _truncated(x: Array) -> Array:
    """Fewer bits, by a mask of them, with a gradient that passes."""
    bits = lax.bitcast_convert_type(lax.stop_gradient(x), jnp.uint32) & jnp.uint32(0xFFFF8000)
    return x + lax.stop_gradient(lax.bitcast_convert_type(bits, jnp.float32) - x)


def _noisily_rounded(x: Array) -> Array:
    """Rounded to bfloat16 at random, by their bits."""
    noise = jax.random.bits(jax.random.key(3), x.shape, jnp.uint16).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(lax.stop_gradient(x), jnp.uint32) + noise
    low = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return x + lax.stop_gradient(low - x)


def _attended(a: Array, b: Array) -> Array:
    return jax.nn.softmax(a @ b.T / 3) @ a


def _halved(a: Array, b: Array) -> Array:
    return jnp.concatenate([b[:, 3:], a[:, :3]], 1)


def _conditioned(a: Array, b: Array) -> Array:
    return jnp.where(b == b.max(0), a, 0.3 * b)


def _turned(x: Array) -> Array:
    return jnp.fft.irfft(jnp.fft.rfft(x, axis=-1) * (1 + 0.2j), x.shape[-1], axis=-1)


def _low(x: Array, dtype: Any) -> Array:
    return jnp.tanh(x).astype(dtype).astype(jnp.float32)


def _low_product(rng: random.Random, made: Made) -> Array:
    x, w = _one(rng, made.whole).astype(jnp.bfloat16), _matrix(rng, made).astype(jnp.bfloat16)
    wide = rng.choice([None, jnp.float32])
    return lax.dot(x, w, preferred_element_type=wide).astype(jnp.float32)


WHOLE: list[Callable[[random.Random, Made], Array]] = [
    lambda rng, made: _one(rng, made.whole) @ _matrix(rng, made),
    lambda rng, made: jnp.tanh(_one(rng, made.whole) @ _matrix(rng, made) + _one(rng, made.rows)),
    _low_product,
    *_each(
        _apply,
        [
            jnp.tanh, jnp.sin, jax.nn.sigmoid, jax.nn.gelu, jax.nn.silu, jax.nn.relu, jax.nn.softplus, jax.nn.softmax,
            jnp.abs, jnp.sign, _norm, _rounded, _truncated, _noisily_rounded, _turned, lax.stop_gradient,
            lambda x: _norm(x, 0),
            lambda x: x - x.mean(-1, keepdims=True),
            lambda x: x - x.max(-1, keepdims=True),
            lambda x: jnp.exp(jnp.clip(x, -3, 1)),
            lambda x: jnp.log1p(jnp.square(x)),
            lambda x: jnp.sqrt(jnp.abs(x) + 0.01),
            lambda x: 1 / (1 + x * x),
            lambda x: 0.1 * jax.nn.log_softmax(x, 0),
            lambda x: jnp.where(x > 0.1, jnp.log(jnp.where(x > 0.1, x, 1.0)), 0.0),
            lambda x: x - jnp.floor(x),
            lambda x: 0.3 * jnp.cumsum(x, 0),
            lambda x: lax.cummax(x, 0),
            lambda x: jnp.sort(x, 0),
            lambda x: jnp.roll(x, 1, 0),
            lambda x: x[::-1, ::-1],
            lambda x: x.at[1:3].multiply(0.5).at[0].add(x[1]),
            lambda x: jnp.pad(x[:2], ((1, x.shape[0] - 3), (0, 0))),
            lambda x: _low(x, jnp.bfloat16),
            lambda x: _low(x, jnp.float16),
            lambda x: _low(x, jnp.float8_e4m3fn),
            lambda x: lax.top_k(x, 2)[0].repeat(3, 1),
            lambda x: x * jax.random.bernoulli(jax.random.key(5), 0.7, x.shape),
            lambda x: x + 0.1 * jax.random.normal(jax.random.fold_in(jax.random.key(1), 2), x.shape),
            lambda x: jnp.einsum("ij,kj,kl->il", x, x, x) / (4 * x.shape[0]),
            lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME") / 3,
            lambda x: lax.associative_scan(lambda a, b: 0.5 * a + b, x),
            lambda x: x @ np.linspace(-0.5, 0.5, x.shape[1] ** 2, dtype=np.float32).reshape((x.shape[1],) * 2),
        ],
    ),
    *_each(
        _apply_two,
        [
            jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, jnp.logaddexp, _attended, _halved,
            _conditioned,
            lambda a, b: a / (1 + jnp.abs(b)),
            lambda a, b: jnp.arctan2(a, 1 + b * b),
            lambda a, b: a * jax.nn.sigmoid(b),
            lambda a, b: a @ (a.T @ b) / (4 * a.shape[0]),
            lambda a, b: lax.optimization_barrier((a, b))[1],
            lambda a, b: lax.stop_gradient(jnp.tanh(a)) * b,
            lambda a, b: a + (b - a) * 2.0,
            lambda a, b: lax.clamp(-jnp.abs(b), a, jnp.abs(b)),
        ],
    ),
    lambda rng, made: jnp.where(_one(rng, made.masks), _one(rng, made.whole), 0.1 * _one(rng, made.whole)),
    lambda rng, made: _one(rng, made.whole) + _one(rng, made.rows),
    lambda rng, made: _one(rng, made.whole) * jnp.tanh(_one(rng, made.numbers)),
    lambda rng, made: _one(rng, made.whole)[_one(rng, made.places)],
    lambda rng, made: jnp.zeros_like(made.whole[0]).at[_one(rng, made.places)].add(_one(rng, made.whole)),
    lambda rng, made: _one(rng, made.whole).at[_one(rng, made.places)].max(0.5 * _one(rng, made.whole)),
    lambda rng, made: lax.dynamic_update_slice(
        _one(rng, made.whole), 0.5 * _one(rng, made.whole)[:2], (_one(rng, made.places)[0], 0)
    ),
    lambda rng, made: jax.ops.segment_sum(
        _one(rng, made.whole), _one(rng, made.places) // 2, made.whole[0].shape[0]
    ),
]  # fmt: skip
ROWS: list[Callable[[random.Random, Made], Array]] = [
    *_each(_apply, [lambda x: x.mean(0), lambda x: x.max(0), lambda x: x[0], lambda x: x[-1] - x[0]]),
    lambda rng, made: jnp.tanh(_matrix(rng, made) @ _one(rng, made.rows)),
    lambda rng, made: jax.nn.softmax(_one(rng, made.rows)) + _one(rng, made.rows),
    lambda rng, made: _one(rng, made.rows) * _one(rng, made.numbers),
    lambda rng, made: _one(rng, made.whole)[_one(rng, made.places)[0]],
]
NUMBERS: list[Callable[[random.Random, Made], Array]] = [
    *_each(_apply, [jnp.mean, jnp.max, lambda x: x[0, 0], lambda x: jnp.sqrt(jnp.square(x).mean() + 0.1)]),
    lambda rng, made: jnp.tanh(_one(rng, made.rows).sum()),
    lambda rng, made: jnp.tanh(2 * _one(rng, made.numbers)),
    lambda rng, made: jax.nn.logsumexp(_one(rng, made.rows)),
    lambda rng, made: 0.1 * _one(rng, made.places)[0].astype(jnp.float32),
]
PLACES: list[Callable[[random.Random, Made], Array]] = [
    *_each(
        _apply,
        [
            lambda x: jnp.argsort(x[:, 0]),
            lambda x: jnp.argsort(-x.sum(-1)),
            lambda x: jnp.argmax(x, -1) % x.shape[0],
            lambda x: jnp.floor(jnp.abs(3 * x[:, 0])).astype(jnp.int32) % x.shape[0],
            lambda x: jnp.clip(jnp.searchsorted(jnp.sort(x[:, 0]), x[:, 1]), 0, x.shape[0] - 1),
            lambda x: jnp.cumsum(x[:, 0] > 0) % x.shape[0],
        ],
    ),
    lambda rng, made: _one(rng, made.places)[::-1],
    lambda rng, made: _one(rng, made.places)[_one(rng, made.places)],
    lambda rng, made: jax.random.permutation(jax.random.key(8), made.whole[0].shape[0]),
]
MASKS: list[Callable[[random.Random, Made], Array]] = [
    *_each(
        _apply,
        [
            lambda x: x > 0,
            lambda x: x >= x.mean(0),
            lambda x: x == x.max(-1, keepdims=True),
            lambda x: x - x.min(0) <= 0,
            lambda x: x >= jnp.sort(x, 0)[2],
            lambda x: jnp.isclose(x, jnp.round(x), atol=0.1),
            lambda x: jax.random.uniform(jax.random.key(6), x.shape) < 0.5,
        ],
    ),
    _apply_two(lambda a, b: a > b),
    lambda rng, made: _one(rng, made.masks) & ~_one(rng, made.masks)[::-1],
    lambda rng, made: _one(rng, made.masks) ^ (_one(rng, made.places)[:, None] > 2),
]
OPERATIONS = {"whole": WHOLE, "rows": ROWS, "numbers": NUMBERS, "places": PLACES, "masks": MASKS}
KINDS = ["whole"] * 5 + ["rows", "numbers", "places", "masks"]

POLICIES = [
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.nothing_saveable,
]


def _structured(rng: random.Random, seed: str, made: Made, depth: int) -> Array:
    """An operation with bodies."""
    x, y = _one(rng, made.whole), _one(rng, made.whole)
    kind = rng.choice(STRUCTURES)

    def body(number: int = 0) -> Body:
        return _body(f"{seed}.{number}", rng.randint(1, 4), made, depth + 1)

    return kind(rng, made, body, x, y)


Bodies = Callable[..., Body]


def _checkpointed(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    return jax.checkpoint(body(), policy=rng.choice(POLICIES), prevent_cse=rng.random() < 0.5)(x)


def _called(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    run = jax.jit(body(), inline=rng.random() < 0.3)
    return run(run(x) if rng.random() < 0.5 else x)


def _scanned(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    run, ends = body(), rng.random() < 0.5

    def one(carry: Any, inputs: Any) -> Any:
        x, row, count = carry
        w, key = inputs
        new = jnp.tanh(run(x) @ w) + 0.3 * x
        draw = jax.random.uniform(key, row.shape) if ends else row
        return (new, 0.5 * row + new.mean(0) * draw, count + 1), (new[0], count)

    one = jax.checkpoint(one) if rng.random() < 0.3 else one
    length = rng.choice([1, 2, 3, 4, 6])
    inputs = jnp.stack([made.p["w"]] * length), jax.random.split(jax.random.key(4), length)
    options = {"reverse": rng.random() < 0.3, "unroll": rng.choice([1, 1, 1, 2])}
    (x, row, count), (firsts, counts) = lax.scan(one, (x, made.rows[-1], 0), inputs, **options)
    return x + row + 0.1 * (firsts * counts[:, None]).sum(0) + 0.01 * count


def _counted(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    run = body()
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(run(x)) + 0.1 * i * y, x)


def _converged(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    run, x = body(), lax.stop_gradient(x)
    inner = lax.stop_gradient(lax.while_loop(
        lambda s: (s[1] < 4) & (jnp.abs(s[0]).max() > 0.2),
        lambda s: (lax.stop_gradient(0.3 * jnp.tanh(run(s[0]))), s[1] + 1),
        (x, 0),
    )[0])  # fmt: skip
    return y * inner + x


def _branched(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    return lax.cond(_one(rng, made.numbers) > 0.2, body(), body(1), x)


def _switched(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    return lax.switch(_one(rng, made.places)[0] % 3, [body(), body(1), lambda x: x * y], x)


def _mapped(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    stack = jnp.stack([x, y])
    made_each = lax.map(body(), stack) if rng.random() < 0.3 else jax.vmap(body())(stack)
    return made_each[0] - 0.5 * made_each[1]


def _differentiated(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    run = body()
    return jax.grad(lambda x: (jnp.tanh(run(x)) * y).mean())(x) * 4


def _pushed(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    value, along = jax.jvp(body(), (x,), (y,))
    return value + 0.1 * jnp.tanh(along)


def _with_rule(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    """A derivative of its own, that is another's."""
    run, factor = body(), jax.custom_jvp(lambda x: jnp.round(4 * x) / 4)
    factor.defjvp(lambda primals, tangents: (factor(*primals), tangents[0] * jnp.cos(primals[0])))
    return run(factor(x))


def _doubled(rng: random.Random, made: Made, body: Bodies, x: Array, y: Array) -> Array:
    run = body()
    return run(x) - run(0.5 * y)


STRUCTURES = [
    _checkpointed, _called, _scanned, _scanned, _counted, _converged, _branched, _switched, _mapped, _differentiated,
    _pushed, _with_rule, _doubled,
]  # fmt: skip
