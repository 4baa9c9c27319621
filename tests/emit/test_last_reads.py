"""Barriers for the GPU compiler: weights change behind their last product, and no piece keeps a whole in memory."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
import pytest
from chains import updating
from comparing import assert_same

import jaxremat
from examples.benchmarks.networks import program
from jaxremat import RecomputeAll, close_over_dependencies
from jaxremat._compiler._devices import DEVICES
from jaxremat._compiler._hlo import maker, parse
from jaxremat._compiler._program import Program
from jaxremat._compiler._tags import TAG
from jaxremat._compiler._target import Target
from jaxremat._emit._analysis import Analysis
from jaxremat._emit._constraints import constraints
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._plan._baseline import measure_baseline
from jaxremat._plan._problem import Problem
from jaxremat._rewrite._trace import trace
from jaxremat._runtime._mechanisms import switched_off

LAYERS, WIDTH = 4, 32
TX = optax.adamw(1e-3)


def init(layers: int = LAYERS, width: int = WIDTH) -> Any:
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    wide = [jax.random.normal(k, (width, 4 * width)) * width**-0.5 for k in keys[:layers]]
    weights = [(up, jnp.flip(up.T)) for up in wide]
    return weights, TX.init(weights)


def step(state: Any, x: jax.Array) -> Any:
    """A train step of a residual stack of two products each."""
    weights, opt = state

    def loss(weights: Any) -> jax.Array:
        y = x
        for up, down in weights:
            y = y + jax.nn.gelu(y @ up) @ down
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(weights)
    updates, opt = TX.update(grads, opt, weights)
    return (optax.apply_updates(weights, updates), opt), value


def planned(donate: bool) -> tuple[Any, Any, jex.ClosedJaxpr]:
    x = jax.random.normal(jax.random.key(1), (64, WIDTH))
    jitted = jax.jit(step, donate_argnums=0 if donate else ())
    traced = trace(jitted, (init(), x), {})
    graph = lower(traced, DEVICES["h100"], base_nbytes=0)
    schedule = RecomputeAll().solve(graph, None, time_limit=1.0).schedule
    return (init(), x), traced, emit(traced, graph, schedule)


def test_updates_read_what_has_passed_a_fence_with_the_last_product_of_the_weight() -> None:
    args, traced, jaxpr = planned(donate=True)
    eqns = jaxpr.jaxpr.eqns
    maker_of = {v: e for e in eqns for v in e.outvars}
    held = [e for e in eqns if "last_read" in str(e.source_info.name_stack)]
    weights = {v for v in jaxpr.jaxpr.invars if v.aval.shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))}
    behind_barrier = [a for e in held for a in e.invars if a in weights]
    assert len(set(behind_barrier)) == len(behind_barrier) >= LAYERS
    for fence in held:
        *arguments, made = fence.invars
        assert maker_of[made].primitive.name == "dot_general"
        names = dict(zip(arguments, fence.outvars, strict=False))
        behind = eqns[eqns.index(fence) + 1 :]
        # Nothing reads the argument any more but by the barrier's name, and somebody reads the product by it.
        assert not any(a in arguments for e in behind for a in e.invars)
        assert all(any(name in e.invars for e in behind) for name in names.values())
        assert any(fence.outvars[-1] in e.invars for e in behind)
    plain = jex.jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves(args))
    assert_same(plain, jex.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args)))


@updating
def gated(weights: Any, x: jax.Array) -> Any:
    """A step of layers whose two products have the same operand: its gradient is a sum of two products."""
    y = x
    for values, gates in weights:
        y = jnp.sin((y @ values) * jnp.tanh(y @ gates))
    return jnp.mean(y**2)


@pytest.mark.parametrize(("devices", "makers"), [(1, {"dot_general"}), (8, {"add_any"})])
def test_on_several_devices_products_that_are_added_up_pass_as_their_sum(
    devices: int, makers: set[str]
) -> None:
    """Each device has a part of either product's sum, and they send what both come to."""
    keys = jax.random.split(jax.random.key(0), 6)
    weights = [tuple(jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[i : i + 2]) for i in (0, 2, 4)]
    args = weights, jax.random.normal(keys[0], (64, WIDTH))
    traced = trace(jax.jit(gated, donate_argnums=0), args, {}).gathered((), devices)
    graph = lower(traced, DEVICES["h100"], base_nbytes=0)
    jaxpr = emit(traced, graph, RecomputeAll().solve(graph, None, time_limit=1.0).schedule)
    eqns = jaxpr.jaxpr.eqns
    maker_of = {v: e.primitive.name for e in eqns for v in e.outvars}
    held = [e for e in eqns if "last_read" in str(e.source_info.name_stack)]
    assert {maker_of[e.invars[-1]] for e in held} == makers
    # Weights, and what comes of them; both weights of a layer where no stage ends between their updates.
    assert {len(e.invars) for e in held} <= {2, 3}
    assert max(len(e.invars) for e in held) == (3 if devices > 1 else 2)
    flat = jax.tree.leaves(args)
    assert_same(jex.jaxpr_as_fun(traced.jaxpr)(*flat), jex.jaxpr_as_fun(jaxpr)(*flat))


def test_arguments_that_are_not_overwritten_are_held_by_nothing() -> None:
    *_, jaxpr = planned(donate=False)
    assert not any("last_read" in str(e.source_info.name_stack) for e in jaxpr.jaxpr.eqns)


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_the_compiled_plan_copies_no_weight(share: float) -> None:
    """Neither before it is multiplied nor after it was updated; and the peak is as predicted."""
    args = jax.eval_shape(lambda: init(6, 1024)), jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    optimized = jaxremat.optimize(f"{share:.0%} of temporaries", donate_argnums=0, target="h100")(step)
    plan, compiled = optimized.plan(*args), optimized.compile(*args)
    module = parse(compiled.as_text())
    entry = module.computations[module.entry]
    scope = entry.by_name()
    copies = [i for i in entry.instructions if i.opcode == "copy" and i.nbytes >= 2**20]
    assert not any(isinstance(maker(module, TAG, scope, i, 0), tuple) for i in copies)
    assert not {i.name for i in copies}.intersection(entry.root.operands)
    assert plan.rounds[0].predicted_peak_nbytes == pytest.approx(
        plan.rounds[0].compiled_peak_nbytes, rel=0.05
    )


def test_what_a_skip_connection_hands_back_does_not_keep_a_concatenations_gradient() -> None:
    """Where all is made again in a UNet. Where nothing is, the peak is elsewhere, and no kernel is cut."""
    net = program("unet", scale="tiny")
    made = Program(net.step, donate_argnums=net.donate_argnums, target=Target("h100"))
    problem = Problem(made, net.abstract_args(), {}, DEVICES["h100"], "roofline")
    graph = measure_baseline(problem, plain=False, tagged=True).graphs.plain
    none, every = (close_over_dependencies(graph, saved) for saved in ((), graph.residuals))

    found = [each for each in constraints(Analysis(problem.traced, graph, none)) if each.why == "pieces"]
    for each in found:
        split = problem.traced.jaxpr.jaxpr.eqns[each.at.number]
        assert split.primitive.name == "split" and [*each.hold] == split.outvars
    assert not [each for each in constraints(Analysis(problem.traced, graph, every)) if each.why == "pieces"]

    peak = problem.compile(problem.jitted(graph, none)).peak_nbytes
    with switched_off("barriers: pieces"):
        assert peak < 0.95 * problem.compile(problem.jitted(graph, none)).peak_nbytes, [str(e) for e in found]
