"""Normalised jaxprs: what is inlined, merged, dropped and reordered, and that they still compute the same."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from evaluation import evaluated
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from jaxremat import close_over_dependencies, simulate
from jaxremat._compiler._devices import DEVICES
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Graph
from jaxremat._program import _compat
from jaxremat._rewrite import _passes
from jaxremat._rewrite._loop_closing import close_loops
from jaxremat._rewrite._source import Source
from jaxremat._rewrite._trace import Traced, normalise, trace

CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
KEY = jax.random.key(0, impl="unsafe_rbg")


def traced(fn: Callable[..., Any], *args: Any, **jit: Any) -> Traced:
    return trace(jax.jit(fn, **jit), args, {})


def count(closed: jex.ClosedJaxpr) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in closed.jaxpr.eqns)


def runnable(found: Traced) -> jex.ClosedJaxpr:
    """The normalised program with its loops closed again."""
    jaxpr = found.jaxpr.jaxpr
    eqns = close_loops(jaxpr.eqns, found.loop_of, found.loops)
    closed = _compat.new_jaxpr(jaxpr.constvars, found.jaxpr.consts, jaxpr.invars, jaxpr.outvars, eqns)
    _compat.check_jaxpr(closed)
    return closed


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_well_formed(found: Traced, calls: bool = True) -> None:
    """Flat (with `calls` all of them inlined), topological, without dead equations, and `origin` leads from each
    inlined equation to its like.
    """
    jaxpr = found.jaxpr.jaxpr
    known = {*jaxpr.constvars, *jaxpr.invars}
    read = {a for a in jaxpr.outvars if not _compat.is_literal(a)}
    for eqn in jaxpr.eqns:
        operands = {a for a in eqn.invars if not _compat.is_literal(a)}
        assert operands <= known
        read |= operands
        known.update(eqn.outvars)
    assert read <= known
    for eqn in jaxpr.eqns:
        assert eqn.effects or any(v in read for v in eqn.outvars) or eqn.primitive.name == "scan_last"
    for closed in (found.jaxpr, found.flat) if calls else ():
        assert not {eqn.primitive.name for eqn in closed.jaxpr.eqns} & CALLS
    assert len(found.origin) == len(found.flat.jaxpr.eqns)
    assert set(found.origin) - {-1} == {i for i, loop in enumerate(found.loop_of) if loop < 0}
    for i, eqn in zip(found.origin, found.flat.jaxpr.eqns, strict=True):
        if i >= 0:
            assert jaxpr.eqns[i].primitive is eqn.primitive
            assert [v.aval for v in jaxpr.eqns[i].outvars] == [v.aval for v in eqn.outvars]


def assert_same(fn: Callable[..., Any], *args: Any) -> Traced:
    """Both jaxprs give bitwise what the jitted function gives."""
    found = traced(fn, *args)
    assert_well_formed(found)
    want = jax.tree.leaves(evaluated(fn)(*args))
    for closed in (runnable(found), found.flat):
        got = evaluated(jex.jaxpr_as_fun(closed))(*jax.tree.leaves(args))
        for a, b in zip(got, want, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return found


# ---- programs


@jax.custom_jvp
def cube(x: Any) -> Any:
    return x * x * x


cube.defjvps(lambda t, ans, x: 3 * x * x * t)


@jax.custom_vjp
def clip_gradient(x: Any) -> Any:
    return x + 0.0 * x


clip_gradient.defvjp(lambda x: (clip_gradient(x), None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def mlp(params: Any, x: Any) -> Any:
    for w, b in params:
        x = jax.nn.gelu(x @ w + b)
    return x


def rematted_mlp(params: Any, x: Any, **options: Any) -> Any:
    for layer in params:
        x = jax.checkpoint(lambda layer, x: mlp([layer], x), **options)(layer, x)
    return x


def layers(count: int = 3, width: int = 8) -> list[tuple[jax.Array, jax.Array]]:
    return [(normal(width, width, seed=i), normal(width, seed=99 + i)) for i in range(count)]


def loss_of(net: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: jnp.mean(net(params, x) ** 2)


def nested(x: Any) -> Any:
    inner = jax.jit(lambda x: jnp.sin(x) * jnp.asarray([1.0, 2.0]))
    return jax.jit(lambda x: jax.jit(inner)(x) + inner(x + 1))(x)


def scanned(params: Any, x: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), x.sum()

    y, sums = lax.scan(body, x, params)
    return jnp.sum(y) + jnp.sum(sums)


def branches(x: Any) -> Any:
    y = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * y), (0, x))[1]


STACKED = normal(4, 8, 8)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (mlp, (layers(), normal(4, 8))),
    "gradient": (jax.grad(loss_of(mlp)), (layers(), normal(4, 8))),
    "value and gradient": (jax.value_and_grad(loss_of(mlp)), (layers(), normal(4, 8))),
    "checkpoint": (jax.grad(loss_of(rematted_mlp)), (layers(), normal(4, 8))),
    "second derivative": (jax.grad(lambda x: jax.grad(lambda y: jnp.sum(cube(y) ** 2))(x).sum()), (normal(5),)),
    "custom_jvp": (jax.value_and_grad(lambda x: cube(x).sum()), (normal(5),)),
    "custom_vjp": (jax.value_and_grad(lambda x: clip_gradient(x * x).sum()), (normal(5),)),
    "nested jit": (nested, (normal(2),)),
    "scan": (jax.grad(scanned), (STACKED, normal(3, 8))),
    "branches": (branches, (normal(5),)),
    "vmap": (jax.vmap(jax.grad(lambda x: cube(x).sum())), (normal(3, 5),)),
    "random": (lambda x: x * jax.random.bernoulli(KEY, 0.5, x.shape), (normal(5),)),
    "integers": (lambda i: (i // 2, i % 3, jnp.left_shift(i, 1)), (jnp.arange(5),)),
    "low precision": (lambda x: jax.grad(lambda y: jnp.sum(jnp.tanh(y)))(x.astype(jnp.bfloat16)), (normal(5),)),
}  # fmt: skip


AS_ROUNDED = pytest.mark.jax_0_10("XLA for the CPU rounds a checkpointed layer as the layer itself")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=AS_ROUNDED if name == "checkpoint" else ()) for name in PROGRAMS]
)
def test_programs_compute_the_same(name: str) -> None:
    fn, args = PROGRAMS[name]
    assert_same(fn, *args)


# ---- inlining


def test_calls_are_inlined_with_their_constants() -> None:
    found = assert_same(nested, normal(2))
    assert count(found.flat) == {"sin": 2, "mul": 2, "add": 2}
    assert len(found.jaxpr.consts) <= 1  # one array, however often it is used


def test_custom_rules_are_applied_once_differentiated_and_inlined_otherwise() -> None:
    x = normal(5)
    assert count(assert_same(cube, x).jaxpr) == {"mul": 2}
    assert set(count(assert_same(clip_gradient, x).jaxpr)) == {"mul", "add"}
    found = assert_same(jax.grad(lambda x: clip_gradient(x).sum()), x)
    assert {"min", "max"} & set(count(found.jaxpr)) or "clamp" in count(found.jaxpr)


def test_closed_calls_are_inlined() -> None:
    inner = jax.make_jaxpr(lambda x: jnp.sin(x) * 2.0)(1.0)
    call: Any = jex.primitives.closed_call_p
    x, y = jex.Var(inner.in_avals[0]), jex.Var(inner.out_avals[0])
    eqn = jex.new_jaxpr_eqn([x], [y], call, {"call_jaxpr": inner}, jex.no_effects)
    found = normalise(Source(_compat.new_jaxpr((), (), [x], [y], [eqn])))
    assert_well_formed(found)
    assert count(found.jaxpr) == {"sin": 1, "mul": 1}
    assert jex.jaxpr_as_fun(found.jaxpr)(1.0)[0] == jnp.sin(1.0) * 2.0


def test_a_nested_jit_with_shardings_of_its_own_stays() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inner = jax.jit(jnp.sin, in_shardings=sharding)
    found = traced(lambda x: inner(x) * 2.0, normal(3))
    assert {"jit", "pjit"} & set(count(found.jaxpr))
    assert jex.jaxpr_as_fun(found.jaxpr)(jnp.ones(3))[0][0] == jnp.sin(1.0) * 2.0


def test_names_become_labels_and_no_equations() -> None:
    def fn(x: Any) -> Any:
        y = checkpoint_name(jnp.sin(x), "the sine")
        return checkpoint_name(jnp.cos(y), "the cosine") + y

    found = assert_same(fn, normal(3))
    assert count(found.jaxpr) == {"sin": 1, "cos": 1, "add": 1}
    by_name = {name: var for var, name in found.labels.items()}
    assert found.jaxpr.jaxpr.eqns[0].outvars[0] is by_name["the sine"]
    assert found.jaxpr.jaxpr.eqns[1].outvars[0] is by_name["the cosine"]


@pytest.mark.jax_0_10("functions of jax.nn have the caller's lines")
def test_name_stacks_are_kept_through_calls() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        with jax.named_scope("inside"):
            return jax.nn.relu(jnp.sin(x))

    def loss(x: Any) -> Any:
        with jax.named_scope("block"):
            y = jax.checkpoint(inner)(x)
        with jax.named_scope("head"):
            return jnp.sum(y * x)

    found = assert_same(jax.grad(loss), normal(3))
    stacks = [(eqn.primitive.name, _compat.name_stack_text(eqn)) for eqn in found.jaxpr.jaxpr.eqns]
    assert ("sin", "jvp(block)/inside") in stacks
    # What the checkpoint makes for the derivative stands in the forward pass, where it does without a checkpoint.
    assert any(name == "cos" and stack.startswith("jvp(block)") for name, stack in stacks)
    assert any(name == "mul" and stack == "transpose(jvp(head))" for name, stack in stacks)
    for eqn in (*found.jaxpr.jaxpr.eqns, *found.flat.jaxpr.eqns):
        assert "test_trace.py" in _compat.user_line(eqn)


# ---- merging


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "per layer": rematted_mlp,
    "prevent_cse=False": lambda params, x: rematted_mlp(params, x, prevent_cse=False),
    "whole": jax.checkpoint(mlp),
    "nested": jax.checkpoint(rematted_mlp),
    "policy": lambda params, x: rematted_mlp(
        params, x, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "jit inside": jax.checkpoint(jax.jit(mlp)),
    "jit outside": jax.jit(jax.checkpoint(mlp)),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_users_recomputation_is_merged_back(name: str) -> None:
    args = layers(), normal(4, 8)
    plain = traced(jax.grad(loss_of(mlp)), *args)
    found = traced(jax.grad(loss_of(CHECKPOINTS[name])), *args)
    assert_well_formed(found)
    want = jax.tree.leaves(evaluated(jax.grad(loss_of(mlp)))(*args))
    got = evaluated(jex.jaxpr_as_fun(found.jaxpr))(*jax.tree.leaves(args))
    assert [np.asarray(a).tobytes() for a in got] == [np.asarray(b).tobytes() for b in want]
    # Three layers: one product forward, two backward each, but for the cotangent of x.
    assert count(plain.jaxpr)["dot_general"] == count(found.jaxpr)["dot_general"] == 8
    assert count(found.jaxpr) == count(plain.jaxpr)
    if name not in ("policy",):
        assert count(found.flat)["dot_general"] > 8
    assert found.rematted and not plain.rematted


def test_a_recomputed_scan_is_merged_back() -> None:
    def net(params: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]

    plain = traced(jax.grad(loss_of(net)), STACKED, normal(3, 8))
    found = traced(jax.grad(loss_of(jax.checkpoint(net))), STACKED, normal(3, 8))
    assert_well_formed(found)
    assert len(plain.loops) == len(found.loops) == 2
    assert count(runnable(plain))["scan"] == 2
    assert count(runnable(found))["scan"] <= 3


def test_equal_equations_are_computed_once() -> None:
    def fn(x: Any, y: Any) -> Any:
        return jnp.sin(x * y) + jnp.sin(x * y), jnp.sum(x, 0), jnp.sum(x, 0), jnp.sum(x, 1)

    found = assert_same(fn, normal(3, 3), normal(3, 3, seed=1))
    assert count(found.jaxpr) == {"mul": 1, "sin": 1, "add": 1, "reduce_sum": 2}
    assert count(found.flat) == {"mul": 2, "sin": 2, "add": 1, "reduce_sum": 3}
    assert [found.origin.count(i) for i in sorted(set(found.origin))] != [1] * 5


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.float32(0.0), np.float32(-0.0)),
        (np.float32(1.0), np.int32(1)),
        (np.int32(1), np.bool_(True)),
        (np.int32(1), np.uint32(1)),
        (np.float32(1.0), np.float16(1.0)),
        (np.float32(0.0), np.int32(0)),
        (np.float32(np.nan), np.float32(-np.nan)),
    ],
)
def test_literals_that_compare_equal_but_differ_are_not_merged(a: Any, b: Any) -> None:
    found = assert_same(lambda: (lax.broadcast(a, (3,)), lax.broadcast(b, (3,)), lax.broadcast(a, (3,))))
    assert count(found.jaxpr) == {"broadcast_in_dim": 2}


def test_negative_zero_as_a_factor() -> None:
    found = assert_same(lambda x: (x * 0.0, x * -0.0), normal(4))
    assert count(found.jaxpr) == {"mul": 2}


def test_a_number_of_another_kind_is_another_literal() -> None:
    found = assert_same(lambda x, i: (x + 1.0, i + 1, x + 1, i + True), normal(3), jnp.arange(3))
    assert count(found.jaxpr)["add"] == 2


def test_parameters_tell_equations_apart() -> None:
    def fn(x: Any, y: Any) -> Any:
        fast = lax.dot(x, y, precision=lax.Precision.DEFAULT)
        slow = lax.dot(x, y, precision=lax.Precision.HIGHEST)
        double = lax.dot(x, y, preferred_element_type=jnp.float32)
        return fast, slow, double, x**2, x**3, jnp.cumsum(x, 0), jnp.cumsum(x, 0, dtype=jnp.float32)

    found = assert_same(fn, normal(3, 3), normal(3, 3, seed=1))
    assert count(found.jaxpr)["dot_general"] in (2, 3)
    assert count(found.jaxpr)["cumsum"] == 1
    assert count(found.jaxpr)["square"] + count(found.jaxpr)["integer_pow"] == 2


def test_barriers_are_not_merged() -> None:
    def fn(x: Any) -> Any:
        return lax.optimization_barrier(jnp.sin(x)), lax.optimization_barrier(jnp.sin(x))

    assert count(assert_same(fn, normal(3)).jaxpr) == {"sin": 1, "optimization_barrier": 2}


# ---- dead code and odd signatures


def test_dead_equations_go_and_effects_stay() -> None:
    seen: list[float] = []

    def fn(x: Any) -> Any:
        dead = jnp.cos(jnp.exp(x))
        jax.debug.callback(lambda v: seen.append(float(v)), jnp.sum(x * 3))
        return jnp.sin(x), dead.shape

    found = traced(lambda x: fn(x)[0], jnp.ones(2))
    assert_well_formed(found)
    assert not {"cos", "exp"} & set(count(found.jaxpr))
    assert count(found.jaxpr)["debug_callback"] == 1
    jax.block_until_ready(jax.jit(jex.jaxpr_as_fun(found.jaxpr))(jnp.ones(2)))
    jax.effects_barrier()
    assert seen == [6.0]


def test_outputs_that_are_arguments_constants_or_the_same() -> None:
    table = normal(3)
    assert_same(lambda x, y: (x, x, 1.0, table, table), normal(3), normal(2))
    assert_same(lambda x: (jnp.sin(x),) * 2, normal(3))
    assert_same(lambda: 1)
    assert_same(lambda x: (), normal(3))
    assert_same(lambda x: {"b": jnp.array(x), "a": lax.stop_gradient(x)}, normal(3))


def test_structures_donation_and_static_arguments() -> None:
    def step(state: Any, batch: Any, power: int, *, scale: Any) -> Any:
        return {"loss": jnp.sum(batch**power) * scale, "state": [s + 1 for s in state]}

    jitted = jax.jit(step, static_argnums=2, donate_argnums=0)
    state, batch = [normal(2), normal(3)], normal(4)
    found = trace(jitted, (state, batch, 3), {"scale": 2.0})
    assert found.donated == (True, True, False, False)
    assert found.source.in_tree == jax.tree.structure(((state, batch), {"scale": 2.0}))
    assert found.source.out_tree == jax.tree.structure({"loss": 0, "state": [0, 0]})
    again = trace(jitted, (*jax.eval_shape(lambda: (state, batch)), 3), {"scale": 2.0})
    assert str(again.jaxpr) == str(found.jaxpr)


def test_tracing_twice_gives_the_same_program() -> None:
    args = layers(), normal(4, 8)
    fn = jax.grad(loss_of(rematted_mlp))
    assert str(traced(fn, *args).jaxpr) == str(traced(fn, *args).jaxpr)


# ---- order


def test_effects_keep_their_order() -> None:
    """Callbacks run in the user's order, even where the equations around them move."""
    log: list[Any] = []

    def tell(what: str, value: Any) -> None:
        jax.debug.callback(lambda v: log.append((what, float(v))), value, ordered=True)

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for i, w in enumerate(params):
                y = jnp.tanh(y @ w)
                tell(f"layer {i}", jnp.sum(y))
            jax.debug.print("a line {}", jnp.sum(y))
            return jnp.sum(y)

        value, grads = jax.value_and_grad(loss)(params)
        tell("loss", value)
        for i, g in enumerate(grads):
            tell(f"gradient {i}", jnp.sum(g))
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params, x = [normal(8, 8, seed=i) for i in range(3)], normal(2, 8)
    found = traced(step, params, x)
    assert_well_formed(found)
    jax.block_until_ready(jax.jit(step)(params, x))
    jax.effects_barrier()
    want, log[:] = list(log), []
    assert [what for what, _ in want] == [
        "layer 0", "layer 1", "layer 2", "loss", "gradient 0", "gradient 1", "gradient 2",
    ]  # fmt: skip
    jax.block_until_ready(jax.jit(jex.jaxpr_as_fun(found.jaxpr))(*params, x))
    jax.effects_barrier()
    assert log == want
    effects = [eqn.primitive.name for eqn in found.jaxpr.jaxpr.eqns if eqn.effects]
    assert effects == [eqn.primitive.name for eqn in found.flat.jaxpr.eqns if eqn.effects]


def test_callbacks_that_return_values_keep_their_order() -> None:
    log: list[str] = []

    def count_up(name: str, x: Any) -> Any:
        def up(v: Any) -> Any:
            log.append(name)
            return np.float32(v + len(log))

        return io_callback(up, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=True)

    def fn(x: Any) -> Any:
        a, b = count_up("a", x), count_up("b", x * 2)
        # The same callback on the same operand is no common subexpression.
        return count_up("c", x) * a - b * count_up("a", x)

    found = traced(fn, jnp.float32(1))
    assert_well_formed(found)
    assert count(found.jaxpr)["io_callback"] == 4
    want = float(jax.jit(fn)(jnp.float32(1)))
    order, log[:] = list(log), []
    assert order == ["a", "b", "c", "a"]
    assert float(jax.jit(jex.jaxpr_as_fun(found.jaxpr))(jnp.float32(1))[0]) == want
    assert log == order


WIDTH, DEPTH, BATCH, NORM = 64, 6, 4, 1e-2
OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-3),
    "global norm": optax.chain(optax.clip_by_global_norm(NORM), optax.sgd(0.1, momentum=0.9)),
    "global norm, adamw": optax.chain(optax.clip_by_global_norm(NORM), optax.adamw(1e-3)),
    "clipped by value": optax.chain(optax.clip(0.5), optax.sgd(0.1, momentum=0.9)),
}


def train_step(optimizer: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of a chain of wide layers on a small batch, where gradients outweigh activations."""

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = [normal(WIDTH, WIDTH, seed=i) for i in range(DEPTH)]
    return step, (params, optimizer.init(params), normal(BATCH, WIDTH, seed=7))


def in_users_order(monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], *args: Any) -> Traced:
    with monkeypatch.context() as patch:
        patch.setattr(
            _passes, "memory_order", lambda jaxpr, alive, *_, **__: [i for i, on in enumerate(alive) if on]
        )
        return traced(fn, *args)


def plain_peak(found: Traced) -> int:
    graph: Graph = lower(found, DEVICES["h100"], base_nbytes=0)
    return simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes


def weight_gradients(found: Traced) -> list[int]:
    """Places of the products that make weight-shaped values."""
    return [
        i
        for i, eqn in enumerate(found.jaxpr.jaxpr.eqns)
        if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == (WIDTH, WIDTH)
    ]


def new_parameters(found: Traced) -> list[int]:
    """Places of the equations that make the new parameters, in their order."""
    eqns = found.jaxpr.jaxpr.eqns
    return [
        next(i for i, e in enumerate(eqns) if out in e.outvars) for out in found.jaxpr.jaxpr.outvars[:DEPTH]
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reordered_steps_compute_the_same(name: str) -> None:
    step, args = train_step(OPTIMIZERS[name])
    assert_same(step, *args)


@pytest.mark.parametrize("name", ["momentum", "adamw", "clipped by value"])
def test_updates_follow_their_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = train_step(OPTIMIZERS[name])
    found, user = traced(step, *args), in_users_order(monkeypatch, step, *args)
    assert max(weight_gradients(user)) < min(new_parameters(user))  # or else there is nothing to test
    gradients, updates = weight_gradients(found), new_parameters(found)
    assert len(gradients) == len(updates) == DEPTH
    # The last layer's gradient comes first; its update is done before the next layer's gradient begins.
    for gradient, update, following in zip(gradients, reversed(updates), gradients[1:], strict=False):
        assert gradient < update < following
    saved = plain_peak(user) - plain_peak(found)
    assert saved >= (DEPTH - 2) * WIDTH * WIDTH * 4  # gradients that no longer wait for the end
    assert plain_peak(found) < 4 * WIDTH * WIDTH * 4


@pytest.mark.parametrize("name", ["global norm", "global norm, adamw"])
def test_clipping_by_the_global_norm_waits_for_all_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = train_step(OPTIMIZERS[name])
    found, user = traced(step, *args), in_users_order(monkeypatch, step, *args)
    assert max(weight_gradients(found)) < min(new_parameters(found))
    assert plain_peak(found) <= plain_peak(user) + 1024  # a few scalars
    if name == "global norm":
        new = evaluated(jex.jaxpr_as_fun(found.jaxpr))(*jax.tree.leaves(args))[:DEPTH]
        squares = [np.sum((np.asarray(a) - np.asarray(b)) ** 2) for a, b in zip(new, args[0], strict=True)]
        np.testing.assert_allclose(np.sqrt(sum(squares)), 0.1 * NORM, rtol=1e-2)  # of rounded differences


def test_the_forward_pass_keeps_its_order() -> None:
    step, args = train_step(OPTIMIZERS["adamw"])
    found = traced(step, *args)

    def forward(closed: jex.ClosedJaxpr) -> list[str]:
        stacks = [(_compat.name_stack_text(eqn), eqn.primitive.name) for eqn in closed.jaxpr.eqns]
        primal = [name for stack, name in stacks if "jvp(" in stack and "transpose(" not in stack]
        return [name for name in primal if name in ("dot_general", "tanh")]

    assert forward(found.jaxpr) == forward(found.flat) == ["dot_general", "tanh"] * DEPTH


def test_metrics_do_not_hold_up_what_they_read() -> None:
    """An accuracy of the logits, asked for after the update, is computed where the logits are."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            logits = jnp.tanh(x @ w)
            return jnp.mean(logits**2), logits

        (value, logits), g = jax.value_and_grad(loss, has_aux=True)(w)
        new = w - 0.1 * g
        return new, value, jnp.max(logits)

    found = assert_same(step, normal(8, 8), normal(4, 8))
    names = [eqn.primitive.name for eqn in found.jaxpr.jaxpr.eqns]
    products = [i for i, name in enumerate(names) if name == "dot_general"]
    assert names.index("reduce_max") < products[-1]


def recycled(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A gradient step of layers run twice, the first time without a gradient."""

    def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.sin(x @ w) * x, None), x, weights)[0]

    def loss(weights: jax.Array) -> jax.Array:
        return layers(weights, lax.stop_gradient(layers(weights, x))).sum()

    value, grads = jax.value_and_grad(loss)(weights)
    return weights - grads, value


def test_scans_stack_only_what_is_read() -> None:
    args = normal(3, 8, 8), normal(16, 8, seed=1)
    written = jax.make_jaxpr(recycled)(*args)
    found = traced(recycled, *args)
    assert_well_formed(found)
    read = {a for eqn in found.jaxpr.jaxpr.eqns for a in eqn.invars if not _compat.is_literal(a)}
    read |= {a for a in found.jaxpr.jaxpr.outvars if not _compat.is_literal(a)}
    scans = [eqn for eqn in found.jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert next(len(eqn.outvars) for eqn in written.jaxpr.eqns if eqn.primitive.name == "scan") > 1
    assert len(scans) == 1 and read.issuperset(scans[0].outvars)
    for got, wanted in zip(evaluated(jex.jaxpr_as_fun(runnable(found)))(*args), recycled(*args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
