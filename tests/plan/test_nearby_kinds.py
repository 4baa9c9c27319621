"""Steps of many kinds for other shapes: each takes its neighbour's plan, for two compilations and a solve at most."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from chains import descent
from comparing import assert_same

import jaxremat
from jaxremat import Plan
from jaxremat._compiler._program import Program
from jaxremat._plan._ledger import Ledger

WIDTH, HEADS, WORDS = 32, 2, 512
Args = tuple[Any, ...]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return 0.1 * jax.random.normal(jax.random.key(seed, impl="unsafe_rbg"), shape)


def layers(count: int = 4, seed: int = 0) -> dict[str, jax.Array]:
    """Blocks of attention and a perceptron, stacked."""
    shapes = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "o": WIDTH, "up": 4 * WIDTH}
    found = {name: normal(count, WIDTH, out, seed=seed) for name, out in shapes.items()}
    return found | {"down": normal(count, 4 * WIDTH, WIDTH, seed=seed + 1)}


def block(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    q, k, v = ((h @ p[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def perceptron(size: int) -> tuple[Callable[..., Any], Args]:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return descent(loss), ([normal(64, 64, seed=i) for i in range(8)], normal(size, 64))


def normalised(size: int) -> tuple[Callable[..., Any], Args]:
    """Convolutions and batch norm."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu((x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
        return jnp.mean(x**2)

    return descent(loss), ([normal(3, 3, 8, 8, seed=i) for i in range(5)], normal(size, 12, 12, 8))


def unrolled(size: int) -> tuple[Callable[..., Any], Args]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for i in range(4):
            x = block(x, {name: p[i] for name, p in params.items()})
        return jnp.mean(x**2)

    return descent(loss), (layers(), normal(size, 32, WIDTH))


def scanned(size: int) -> tuple[Callable[..., Any], Args]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, p: (block(x, p), None), x, params)[0] ** 2)

    return descent(loss), (layers(), normal(size, 32, WIDTH))


def recurrent(size: int) -> tuple[Callable[..., Any], Args]:
    """An LSTM over so many points in time."""

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
            h, state = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, -1)
            state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(state), state), None

        zeros = jnp.zeros(x.shape[1:])
        return jnp.mean(jax.lax.scan(cell, (zeros, zeros), x)[0][0] ** 2)

    weights = {name: normal(WIDTH, 4 * WIDTH, seed=i) for i, name in enumerate("xh")}
    return descent(loss), (weights, normal(size, 16, WIDTH))


def worded(size: int) -> tuple[Callable[..., Any], Args]:
    """Rows of logits, which are most of the step."""

    def loss(params: dict[str, jax.Array], x: jax.Array, words: jax.Array) -> jax.Array:
        logits = jnp.tanh(x @ params["w"]) @ params["out"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, None], -1))

    params = {"w": normal(WIDTH, WIDTH), "out": normal(WIDTH, WORDS)}
    return descent(loss), (params, normal(size, WIDTH), jnp.arange(size) % WORDS)


class Kind(NamedTuple):
    """A step by the size of its batch, or its length; one size, and the share of its temporaries within which it is
    planned.
    """

    make: Callable[[int], tuple[Callable[..., Any], Args]]
    size: int
    share: float


KINDS = {
    "perceptron": Kind(perceptron, 1024, 0.8),
    "normalised": Kind(normalised, 32, 0.7),
    "unrolled": Kind(unrolled, 16, 0.6),
    "scanned": Kind(scanned, 16, 0.6),
    "recurrent": Kind(recurrent, 40, 0.5),
    "worded": Kind(worded, 512, 0.3),
}
NEARBY = {"half": 0.5, "less": 0.9, "the last": 0.87, "twice": 2.0}
"""How many times the size."""


def budget_of(kind: Kind, size: int) -> int:
    step, args = kind.make(size)
    needs = jaxremat.memory(step, *args)
    return needs.base_nbytes + int(kind.share * needs.temporaries_nbytes)


@cache
def plan_of(name: str) -> Plan:
    kind = KINDS[name]
    step, args = kind.make(kind.size)
    return jaxremat.plan(step, *args, budget=budget_of(kind, kind.size))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Compilations, of whatever, and solves so far."""
    found = {"compilations": 0, "solves": 0}
    compiling, within = Program._compiled, Ledger.within

    def compiled(self: Program, *given: Any) -> Any:
        found["compilations"] += 1
        return compiling(self, *given)

    def solved(self: Ledger, *given: Any, **options: Any) -> Any:
        found["solves"] += 1
        return within(self, *given, **options)

    monkeypatch.setattr(Program, "_compiled", compiled)
    monkeypatch.setattr(Ledger, "within", solved)
    return found


@pytest.mark.parametrize("near", NEARBY)
@pytest.mark.parametrize("name", KINDS)
def test_other_shapes_follow_their_neighbours_plan(name: str, near: str, work: dict[str, int]) -> None:
    kind, plan = KINDS[name], plan_of(name)
    size = int(NEARBY[near] * kind.size) + (near == "the last")
    step, args = kind.make(size)
    budget = plan.budget_nbytes if near == "the last" else budget_of(kind, size)
    work.update(compilations=0, solves=0)
    made = jaxremat.optimize(budget, like=plan)(step)
    found = made(*args)
    assert work["compilations"] <= 2 and work["solves"] <= 1
    other = made.plan(*args)
    assert other.like == plan.fingerprint
    assert other.compiled_peak_nbytes is not None and other.compiled_peak_nbytes <= budget
    assert_same(jax.jit(step)(*args), found)
