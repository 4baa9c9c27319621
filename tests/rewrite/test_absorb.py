"""Optimizer updates inside the loop that makes their gradients: the same results, and no stack of gradients."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
import pytest
import recorded
from comparing import assert_computes, assert_same
from forms import of_levels
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from test_loops import emitted, scans
from test_trace import assert_well_formed
from zoo_loops import LAYERS, LOOPS, WIDTH, _batch, _block, _stacked

import jaxremat
from jaxremat._program import _compat
from jaxremat._program._host_arguments import from_host
from jaxremat._program._primitives import is_fetch, is_put, on_host
from jaxremat._rewrite._optimizer_in_backward import Gain
from jaxremat._rewrite._trace import Traced, trace

Step = Callable[..., Any]
STACK_NBYTES = 4 * LAYERS * (2 * WIDTH * 2 * WIDTH + WIDTH)
"""The gradients of all layers."""


def net(params: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, p: (_block(x, p), None), x, params)[0]


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((net(params, batch[0]) - batch[1]) ** 2)


def step_of(tx: optax.GradientTransformation) -> tuple[Step, Any]:
    """A train step `((params, opt_state), batch) -> ((params, opt_state), loss)` and its arguments."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = _stacked()
    return step, ((params, tx.init(params)), _batch())


def absorbing(step: Step, args: Any, donate: Any = 0) -> tuple[Traced, Traced]:
    """The step as it is, and with each of its loops in one level."""
    found = trace(jax.jit(step, donate_argnums=donate), args, {})
    return found, found.in_form(of_levels(*((length,) for length in found.sites.lengths)))


def between(closed: Any) -> list[tuple[int, ...]]:
    """The shapes of the stacks of matrices that the last scan makes for something else than the step's results."""
    made = scans(closed)[-1].outvars
    return [v.aval.shape for v in made if len(v.aval.shape) > 2 and v not in closed.jaxpr.outvars]


def check(step: Step, args: Any, donate: Any = 0, saved: Sequence[str] = ()) -> jex.ClosedJaxpr:
    """Absorbing changes no result, where only what these primitives make is saved; the program."""
    _, inside = absorbing(step, args, donate)
    assert_well_formed(inside)
    planned = emitted(inside, saved)
    assert_computes(planned, step, args)
    return planned


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(optax.linear_schedule(0.1, 0.01, 10)),
    "adamw, some not decayed": optax.adamw(
        0.1, weight_decay=0.1, mask=lambda params: {"a": True, "b": True, "c": False}
    ),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9),
    "lion": optax.lion(0.1),
    "clipped entries": optax.chain(optax.clip(0.01), optax.adagrad(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_stack_of_gradients_is_left(name: str) -> None:
    step, args = step_of(OPTIMIZERS[name])
    found, _ = absorbing(step, args)
    (gain,) = found.program.gains
    assert gain.fewer_nbytes == STACK_NBYTES
    assert gain.written_nbytes % STACK_NBYTES == 0
    assert len(between(emitted(found, []))) == 2
    assert between(check(step, args)) == []


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_rows_of_a_state_in_the_hosts_memory_are_fetched_and_put_back_in_the_loop(name: str) -> None:
    """No stack of it is on the device: what the loop makes of a row is written over that, where it is."""
    step, ((params, state), batch) = step_of(OPTIMIZERS[name])
    args = (params, jaxremat.to_host(state, least_nbytes=1000)), batch
    planned = check(from_host(step), args)
    assert between(planned) == []
    outside = [eqn for eqn in planned.eqns if is_fetch(eqn) or is_put(eqn)]
    assert all(len(eqn.outvars[0].aval.shape) < 3 for eqn in outside)
    (loop,) = scans(planned)[-1:]
    body = loop.params["jaxpr"].jaxpr.eqns
    stacks = sum(leaf.ndim > 2 for leaf in jax.tree.leaves(state))
    assert stacks > 0
    for copies in (is_fetch, is_put):
        assert sum(copies(eqn) and eqn.outvars[0].aval.ndim == 2 for eqn in body) == stacks
    carried = loop.outvars[: _compat.scan_counts(loop)[1]]
    assert sum(on_host(v.aval) and v.aval.ndim > 2 for v in carried) == stacks


def test_a_planned_step_returns_such_a_state_to_the_hosts_memory() -> None:
    step, ((params, state), batch) = step_of(OPTIMIZERS["adam"])
    want = jax.jit(step, compiler_options=recorded.EMITTED)((params, state), batch)
    there = jaxremat.to_host(state, least_nbytes=1000)
    args = (params, there), batch
    planned = jaxremat.optimize("min", donate_argnums=0, compiler_options=recorded.EMITTED)(step)
    assert any(choice.rule == "loop" for choice in planned.plan(*args).form.choices)
    (_, got_state), _ = got = planned(*args)
    assert_same(want, got)
    kinds = [(leaf.ndim > 2, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(got_state)]
    assert {kind for is_stack, kind in kinds if is_stack} == {"pinned_host"}


@pytest.mark.usefixtures("few_compilations")
def test_copies_of_one_scan_s_state_are_over_outside_of_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """Updates behind the first backward scan are copied to the host while the second runs."""
    tx = optax.lion(1e-3, weight_decay=0.1)

    def group(h: jax.Array, weights: Any) -> jax.Array:
        def layer(h: jax.Array, w: Any) -> Any:
            made = jax.nn.silu(h @ w["gate"]) * (h @ w["in"])
            return h + (made @ w["out"]) * w["scale"], None

        return lax.scan(layer, h, weights)[0]

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        def of_both(params: Any) -> jax.Array:
            h = group(x, params["early"])
            return jnp.mean(group(h.reshape(len(h) // 2, -1) @ params["merge"], params["late"]) ** 2)

        value, grads = jax.value_and_grad(of_both)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    keys = iter(jax.random.split(jax.random.key(0), 10))

    def made(*shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(next(keys), shape)

    def stack(n: int) -> dict[str, jax.Array]:
        return {
            "in": made(n, 64, 256),
            "out": made(n, 256, 64),
            "gate": made(n, 64, 256),
            "scale": made(n, 64),
        }

    params = {"early": stack(3), "late": stack(5), "merge": made(128, 64)}
    state, x = tx.init(params), made(512, 64)
    want = jax.jit(step)(params, state, x)
    planned = jaxremat.optimize("min", donate_argnums=(0, 1))(step)
    assert_same(want, planned(params, jaxremat.to_host(state, least_nbytes=1000), x))
    assert "defect" not in caplog.text


def test_half_of_a_state_in_bfloat16() -> None:
    """Parameters in bfloat16, their copies in float32: the gradients are converted row by row."""

    def mixed(state: Any, batch: Any) -> Any:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state)
        grads = jax.grad(lambda p: loss(p, jax.tree.map(lambda b: b.astype(jnp.bfloat16), batch)))(low)
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), state, grads)

    assert between(check(mixed, (_stacked(), _batch()))) == []


@pytest.mark.parametrize("donate", [(), 1, (0, 1)], ids=str)
def test_without_donation_the_results_are_stacked_anew(donate: Any) -> None:
    """Of what is not donated nothing is written over."""
    step, args = step_of(optax.sgd(0.1, momentum=0.9))
    planned = check(step, args, donate)
    again = check(lambda batch, state: step(state, batch), args[::-1], donate)
    assert between(planned) == between(again) == []


def test_results_in_another_order_than_arguments() -> None:
    """JAX gives the memory of the first argument to the first result of its type, which may be another's."""
    step, ((params, opt_state), batch) = step_of(optax.adam(0.1))

    def turned(params: Any, opt_state: Any, batch: Any) -> Any:
        (params, opt_state), value = step((params, opt_state), batch)
        return value, opt_state, params

    check(turned, (params, opt_state, batch), (0, 1))


def returns_gradients(params: Any, batch: Any) -> Any:
    grads = jax.grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads


def test_arguments_that_nobody_reads_give_no_memory() -> None:
    step, (params, batch) = step_of(optax.sgd(0.1))

    def with_spare(spare: Any, state: Any, batch: Any) -> Any:
        return step(state, batch)

    _, inside = absorbing(with_spare, (_stacked(seed=3), params, batch), (0, 1))
    spare = len(jax.tree.leaves(params[0]))
    assert inside.over == frozenset(inside.jaxpr.jaxpr.invars[spare : 2 * spare])


UNMOVED = {
    "all gradients together": step_of(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
    "one array at a time": step_of(optax.lamb(0.1)),
    "returned": (returns_gradients, (_stacked(), _batch())),
}


@pytest.mark.parametrize("name", UNMOVED)
def test_what_needs_more_than_a_row_stays(name: str) -> None:
    step, args = UNMOVED[name]
    found, inside = absorbing(step, args)
    assert found.program.gains == (Gain(0, 0),)
    assert len(inside.jaxpr.eqns) == len(found.jaxpr.eqns)


def test_an_argument_that_is_read_later_is_not_written_over() -> None:
    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return updated, jax.tree.map(lambda p, g: jnp.vdot(p, g), params, grads)

    check(step, (_stacked(), _batch()))
    step_, args = step_of(optax.sgd(0.1))
    check(lambda state, batch: (step_(state, batch), jax.tree.map(jnp.sum, state)), args)


def test_two_loops_with_the_same_weights() -> None:
    """The second gradient is added to the first before the update: in the loop that comes last."""

    def twice(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((net(params, net(params, batch[0])) - batch[1]) ** 2)

    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(twice)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    args = (_stacked(), _batch())
    found, _ = absorbing(step, args)
    assert sorted(bool(gain.fewer_nbytes) for gain in found.program.gains) == [False, True]
    check(step, args)


@pytest.mark.parametrize("levels", [(2, 3), (2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_levels_write_over_the_same_arrays(levels: tuple[int, ...]) -> None:
    """Also with a rest of two layers; only zeros would be stacks between."""
    step, args = step_of(optax.sgd(0.1, momentum=0.9))
    args = (
        jax.tree.map(lambda a: jnp.concatenate([a, 0.5 * a[:2]]), args[0]) if len(levels) > 2 else args[0],
        args[1],
    )
    cut = trace(jax.jit(step, donate_argnums=0), args, {}).in_form(of_levels(levels))
    planned = emitted(cut, [])
    assert_computes(planned, step, args)
    assert not [eqn for eqn in planned.jaxpr.eqns if eqn.primitive.name != "scan" and len(_shape(eqn)) > 2]
    leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.tree.leaves(args)]
    donated = tuple(range(len(jax.tree.leaves(args[0]))))
    lowered = jax.jit(jex.jaxpr_as_fun(planned), donate_argnums=donated).lower(*leaves)
    text = lowered.compile(compiler_options=jaxremat.compiler_options("cpu")).as_text() or ""
    assert not re.findall(r"= f32\[[68],\d+,\d+\]\S* copy\(", text)


def _shape(eqn: Any) -> tuple[int, ...]:
    return eqn.outvars[0].aval.shape if eqn.outvars[0].aval.shape[:1] in ((6,), (8,)) else ()


def test_a_norm_that_is_only_reported_is_made_of_those_of_the_rows() -> None:

    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return updated, sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))

    assert between(check(step, (_stacked(), _batch()))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_absorbs_what_it_can(name: str) -> None:
    case = LOOPS[name]
    check(case.step, case.make_args(), case.donate_argnums, ["dot_general"])


NUMBERS = st.floats(0.1, 2.0)
UNARY: tuple[Any, ...] = (
    jnp.tanh,
    jnp.square,
    jnp.negative,
    lambda x: jnp.where(x > 0, x, 0.5 * x),
    lambda x: x.swapaxes(1, 2),
)
BINARY: tuple[Any, ...] = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_random_updates(data: st.DataObject) -> None:
    """Pointwise programs of gradients, two arrays of state, a number per layer and one for all."""
    ops = [
        (
            data.draw(st.sampled_from([*UNARY, *BINARY])),
            data.draw(st.integers(0, 30)),
            data.draw(st.integers(0, 30)),
        )
        for _ in range(data.draw(st.integers(1, 8)))
    ]
    results = [data.draw(st.integers(0, 30)) for _ in range(3)]
    donate = data.draw(st.sampled_from([(), 0, (0, 2)]))

    def step(state: Any, batch: Any, rates: Any) -> Any:
        w, m = state
        value, grad = jax.value_and_grad(
            lambda w: jnp.mean((lax.scan(_layer, batch[0], w)[0] - batch[1]) ** 2)
        )(w)
        pool = [grad, w, m, rates[0][:, None, None] * grad, m * rates[1]]
        for op, i, j in ops:
            pool.append(
                op(pool[i % len(pool)]) if op in UNARY else op(pool[i % len(pool)], pool[j % len(pool)])
            )
        w, m, norm = (pool[i % len(pool)] for i in results)
        return (w, m), value, norm.sum()

    w = _stacked()["a"][:, :, :WIDTH]
    rates = jnp.linspace(0.5, 1, LAYERS), jnp.float32(data.draw(NUMBERS))
    saved = data.draw(st.sampled_from([(), ("dot_general",)]))
    check(step, ((w, 0.5 * w), _batch(), rates), donate, saved)


def _layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ w), None


@pytest.mark.parametrize("target", [None, pytest.param("h100", marks=pytest.mark.slow)])
def test_nothing_is_copied_to_be_written_over(target: str | None) -> None:
    """The compiled step has neither the stack of gradients nor copies of parameters and state."""
    step, (state, _) = step_of(optax.adamw(0.1))
    batch = 2 * (jnp.zeros((16, WIDTH)),)
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (state, batch))
    stats = jaxremat.memory(step, *args, donate_argnums=0, target=target)
    plan = jaxremat.plan(step, *args, budget="min", donate_argnums=0, target=target)
    assert plan.form == of_levels((LAYERS,))
    assert plan.memory is not None and plan.memory.aliased_nbytes == stats.aliased_nbytes
    assert stats.temporaries_nbytes > STACK_NBYTES
    assert plan.memory.temporaries_nbytes < 0.8 * STACK_NBYTES
