"""Blocks and loops that the way back undoes: the same results, and nothing kept for each of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from jax import lax
from test_trace import runnable

from jaxremat._model._variant import LOOP, PLAIN, REVERSED, Choice, Variant
from jaxremat._program import _compat
from jaxremat._rewrite._reversed_chains import block_of, chains
from jaxremat._rewrite._trace import Traced, trace

ROWS, WIDTH, DEPTH = 48, 16, 6
Net = Callable[[Any, Any], jax.Array]


def layers(depth: int = DEPTH) -> list[Any]:
    def normal(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[0])

    return [
        {
            "f": normal(3 * i, WIDTH, 4 * WIDTH),
            "down": normal(3 * i + 1, 4 * WIDTH, WIDTH),
            "g": normal(3 * i + 2, WIDTH, WIDTH),
        }
        for i in range(depth)
    ]


def coupled(pair: Any, layer: Any) -> Any:
    x1, x2 = pair
    y1 = x1 + jnp.tanh(x2 @ layer["f"]) @ layer["down"]
    return y1, x2 + jnp.sin(y1 @ layer["g"])


def affine(pair: Any, layer: Any) -> Any:
    x1, x2 = pair
    s = jnp.tanh(x2 @ layer["f"]) @ layer["down"]
    return x2, x1 * jax.nn.sigmoid(s) + jnp.sin(x2 @ layer["g"])


def residual(pair: Any, layer: Any) -> Any:
    x1, x2 = pair
    return x1 + jnp.tanh(x1 @ layer["f"]) @ layer["down"], x2


def unrolled(block: Callable[..., Any]) -> Net:
    def net(weights: Any, x: Any) -> jax.Array:
        pair = (x @ jnp.eye(WIDTH), x)
        for layer in weights:
            pair = block(pair, layer)
        return jnp.mean(pair[0] * pair[1] + pair[1] ** 2)

    return net


def scanned(block: Callable[..., Any]) -> Net:
    def net(weights: Any, x: Any) -> jax.Array:
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *weights)
        a, b = lax.scan(lambda pair, layer: (block(pair, layer), None), (x @ jnp.eye(WIDTH), x), stacked)[0]
        return jnp.mean(a * b + b**2)

    return net


def counting(weights: Any, x: Any) -> jax.Array:
    """The loop counts, sums up what it comes by, hands rows on, and reads what is the same in all iterations."""
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *weights)
    scale = jnp.sum(x, 0)

    def layer(carry: Any, layer: Any) -> Any:
        pair, i, total = carry
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(7), i), x.shape)
        a, b = coupled((pair[0] + 0.1 * noise * scale, pair[1]), layer)
        return ((a, b), i + 1, total + jnp.mean(b**2)), jnp.mean(a)

    (pair, _, total), rows = lax.scan(layer, ((x @ jnp.eye(WIDTH), x), 0, 0.0), stacked)
    return jnp.mean(pair[0] * pair[1]) + total + jnp.sum(rows**2)


def two_scales(weights: Any, x: Any) -> jax.Array:
    """Two chains, between them a layer that cannot be undone."""
    pair = (x @ jnp.eye(WIDTH), x)
    for layer in weights[:3]:
        pair = coupled(pair, layer)
    pair = jnp.tanh(pair[0] @ weights[0]["g"]), jnp.tanh(pair[1])
    for layer in weights[3:]:
        pair = coupled(pair, layer)
    return jnp.mean(pair[0] * pair[1] + pair[1] ** 2)


def training(net: Net) -> Callable[..., Any]:
    def step(weights: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(net)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), loss

    return step


def traced(net: Net, *choices: Choice) -> Traced:
    args = layers(), jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    return trace(jax.jit(training(net), donate_argnums=0), args, {}).in_form(Variant.of(*choices))


def results(program: jex.ClosedJaxpr) -> list[Any]:
    args = layers(), jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    return jex.jaxpr_as_fun(program)(*jax.tree.leaves(args))


BLOCKS, FIRST_LOOP = Choice(REVERSED, 0, (1,)), Choice(REVERSED, 1, (1,))

NETS = {
    "couplings": (unrolled(coupled), BLOCKS),
    "affine": (unrolled(affine), BLOCKS),
    "two chains": (two_scales, BLOCKS),
    "scanned": (scanned(coupled), FIRST_LOOP),
    "scanned affine": (scanned(affine), FIRST_LOOP),
    "counting": (counting, FIRST_LOOP),
}


@pytest.mark.parametrize("name", NETS)
def test_results_are_the_same_but_for_rounding(name: str) -> None:
    net, choice = NETS[name]
    assert_close(results(runnable(traced(net, choice))), results(runnable(traced(net))), rtol=2e-5, atol=2e-5)


def kept_nbytes(step: Traced) -> int:
    """What the backward pass reads of the forward pass, but for weights."""
    program = runnable(step).jaxpr
    undoing = [i for i, eqn in enumerate(program.eqns) if "transpose(" in _compat.name_stack_text(eqn)]
    made = {v for eqn in program.eqns[: undoing[0]] for v in eqn.outvars}
    read = {a for eqn in program.eqns[undoing[0] :] for a in _compat.variables(eqn.invars)}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in made & read if ROWS in v.aval.shape)


@pytest.mark.parametrize("name", NETS)
def test_what_is_kept_does_not_grow_with_the_depth(name: str) -> None:
    net, choice = NETS[name]
    entry = 4 * ROWS * WIDTH
    assert kept_nbytes(traced(net)) > DEPTH * 4 * entry
    # What comes out, what the loss reads, and of each chain what its last block needs.
    assert kept_nbytes(traced(net, choice)) <= (12 if net is two_scales else 8) * entry


def test_each_chain_is_found() -> None:
    step = traced(two_scales)
    found = chains(step.jaxpr, step.loop_of, step.loops)
    assert len(found) == 2
    undone = traced(two_scales, BLOCKS)
    assert undone.chain.startswith("test_reversed.py")
    count = len({block_of(eqn) for eqn in undone.jaxpr.jaxpr.eqns} - {None})
    assert count == sum(map(len, found)) >= 2 * DEPTH - 2


@pytest.mark.parametrize(("net", "choice"), [(unrolled(residual), BLOCKS), (scanned(residual), FIRST_LOOP)])
def test_what_cannot_be_undone_is_left(net: Net, choice: Choice) -> None:
    step = traced(net)
    assert chains(step.jaxpr, step.loop_of, step.loops) == []
    assert str(runnable(traced(net, choice))) == str(runnable(step))


def test_a_loop_that_is_undone_is_in_no_levels() -> None:
    form = Variant.of(Choice(LOOP, 0, (2, 3)), Choice(LOOP, 1, (2, 3)), FIRST_LOOP)
    assert form.settings(LOOP) == {1: (2, 3)}
    assert form.settings(REVERSED) == {1: (1,)}
    assert PLAIN.also(FIRST_LOOP) == Variant.of(FIRST_LOOP)
