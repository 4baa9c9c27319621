"""Recurrences under checkpoints of their own: run again as a whole, and no buffer of theirs before it is needed."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from comparing import assert_same
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxremat
from jaxremat import MemoryStats, compiler_options
from jaxremat._program import _compat
from jaxremat._rewrite._loop_closing import begun_late, stacked_nbytes
from jaxremat._rewrite._trace import trace

LENGTH, BATCH, WIDTH, LAYERS = 64, 4, 64, 4
STACK = 4 * LENGTH * BATCH * WIDTH


def recurrence(decay: jax.Array, x: jax.Array, *, reverse: bool = False) -> jax.Array:
    def body(h: jax.Array, row: Any) -> Any:
        h = row[0] * h + row[1]
        return h, h

    return lax.scan(body, jnp.zeros_like(x[0]), (decay, x), reverse=reverse, unroll=2)[1]


def step(weights: Any, x: jax.Array) -> Any:
    """A train step of gated recurrences, each under a checkpoint, and wide layers between them."""

    def layer(x: jax.Array, w: Any) -> jax.Array:
        decay = jax.nn.sigmoid(x @ w["decay"])
        x = x + recurrence(decay, (1 - decay) * jnp.tanh(x)) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["up"].T

    def loss(weights: Any) -> jax.Array:
        y = x
        for w in weights:
            y = jax.checkpoint(layer)(y, w)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def arguments() -> Any:
    def made(i: int, *shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(jax.random.key(i), shape)

    weights = [
        {
            "decay": made(i, WIDTH, WIDTH),
            "out": made(i + 1, WIDTH, WIDTH),
            "up": made(i + 2, WIDTH, 4 * WIDTH),
        }
        for i in range(LAYERS)
    ]
    return weights, made(99, LENGTH, BATCH, WIDTH)


def test_a_recurrence_is_one_operation_and_what_works_in_its_iterations_is_laid_open() -> None:
    found = trace(jax.jit(step, donate_argnums=0), arguments(), {})
    assert not found.loops
    assert sum(eqn.primitive.name == "scan" for eqn in found.jaxpr.jaxpr.eqns) == 2 * LAYERS

    def working(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, row: jax.Array) -> Any:
            h = jnp.tanh(h @ w + row)
            return h, h

        return jnp.sum(lax.scan(body, x[0], x)[1])

    args = jnp.ones((WIDTH, WIDTH)), jnp.ones((LENGTH, BATCH, WIDTH))
    assert len(trace(jax.jit(jax.grad(working)), args, {}).loops) == 2


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_with_late_buffers_gives_the_same(reverse: bool) -> None:
    args = [jax.random.uniform(jax.random.key(i), (LENGTH, BATCH, WIDTH)) for i in range(2)]
    closed = jax.make_jaxpr(lambda *args: recurrence(*args, reverse=reverse))(*args)
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    assert stacked_nbytes(eqn) == STACK
    eqns = [made for e in closed.jaxpr.eqns for made in (begun_late(e) if e is eqn else [e])]
    own = closed.jaxpr
    late = _compat.new_jaxpr(own.constvars, closed.consts, own.invars, own.outvars, eqns)
    assert_same(recurrence(*args, reverse=reverse), jax.jit(jex.jaxpr_as_fun(late))(*args)[0])


def test_a_scan_with_late_buffers_may_hand_on_a_carry() -> None:
    """Differentiation leaves such loops; where it is traced again, JAX takes the carry out."""

    def run(w: jax.Array, x: jax.Array) -> Any:
        return lax.scan(lambda w, row: (w + 1.0, jnp.tanh(row @ w)), w, x)

    args = jnp.full((WIDTH, WIDTH), 0.1), jax.random.uniform(jax.random.key(0), (LENGTH, BATCH, WIDTH))
    closed = jax.make_jaxpr(run)(*args)
    (eqn,) = closed.jaxpr.eqns
    body = eqn.params["jaxpr"].jaxpr
    inner = [e for e in body.eqns if e.primitive.name != "add"]
    unchanged = _compat.new_jaxpr((), (), body.invars, [body.invars[0], body.outvars[1]], inner)
    eqn = eqn.replace(params={**eqn.params, "jaxpr": unchanged})
    own = closed.jaxpr
    late = _compat.new_jaxpr(own.constvars, closed.consts, own.invars, own.outvars, begun_late(eqn))
    _compat.check_jaxpr(late)
    assert_same((args[0], jnp.tanh(args[1] @ args[0])), tuple(jex.jaxpr_as_fun(late)(*args)))


def test_half_of_the_checkpointed_step_is_planned() -> None:
    """A layer alone has a good deal more than its recurrence: by hand the rest would be a checkpoint of its own."""
    args = arguments()
    plain = jax.jit(step, donate_argnums=0).lower(*args).compile(compiler_options=compiler_options())
    stats = MemoryStats.of(plain)
    budget = stats.peak_nbytes - int(0.4 * stats.temporaries_nbytes)
    planned = jaxremat.optimize(budget, donate_argnums=0)(step)
    assert MemoryStats.of(planned.compile(*args)).peak_nbytes <= budget
    assert_same(plain(*jax.tree.map(jnp.copy, args)), planned(*args))


def scan_of(x: jax.Array) -> Any:
    eqns = jax.make_jaxpr(recurrence)(x, x).jaxpr.eqns
    return next(eqn for eqn in eqns if eqn.primitive.name == "scan")


def test_stacks_whose_types_name_devices_stay_as_they_are() -> None:
    x = jnp.ones((LENGTH, BATCH, WIDTH))
    assert stacked_nbytes(scan_of(x)) == STACK
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(None, "batch")))
        assert stacked_nbytes(scan_of(placed)) == 0
