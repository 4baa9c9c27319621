"""Weights in host memory that loops over layers read: equal results, and no more than rows of them on the device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
import pytest
from chains import descent
from comparing import assert_computes
from forms import of_levels
from jax import lax
from test_absorb import loss, step_of
from test_loops import CPU, emitted, scans
from zoo_loops import LAYERS, _batch, _stacked

import jaxremat
from jaxremat import close_over_dependencies
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._compiler._target import Target
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._host_copies import AT_ONCE
from jaxremat._model._variant import PLAIN, Variant
from jaxremat._program import _compat
from jaxremat._program._host_arguments import from_host
from jaxremat._program._primitives import inner_eqns, is_barrier, is_fetch, is_put
from jaxremat._rewrite._passes import check, watched
from jaxremat._rewrite._streamed_stacks import read_by_rows
from jaxremat._rewrite._trace import Traced, trace
from jaxremat._runtime._mechanisms import recorded

Step = Callable[..., Any]
ADAM = optax.adamw(1e-2)


def there(tree: Any) -> Any:
    return jaxremat.to_host(tree, least_nbytes=1000)


@descent
def frozen(adapters: Any, params: Any, batch: Any) -> Any:
    """A step for adapters; the stacked weights are no more than read."""
    return loss({**params, "c": params["c"] + adapters}, batch)


def mixed(state: Any, batch: Any) -> Any:
    """Master weights in float32, of which the layers read copies in bfloat16."""
    masters, moments = state
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), batch)

    def of_masters(masters: Any) -> jax.Array:
        return loss(jax.tree.map(lambda a: a.astype(jnp.bfloat16), masters), low).astype(jnp.float32)

    value, gradients = jax.value_and_grad(of_masters)(masters)
    updates, moments = ADAM.update(gradients, moments, masters)
    return (optax.apply_updates(masters, updates), moments), value


def accumulating(state: Any, batch: Any) -> Any:
    """Gradients of several batches are added up in a loop around that over layers."""
    params, moments = state
    parts = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), batch)

    def one(total: Any, part: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, part)
        return jax.tree.map(jnp.add, total, gradients), value

    gradients, values = lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)
    updates, moments = ADAM.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), values.mean()


def arguments(name: str) -> Any:
    params, batch = _stacked(), _batch()
    if name == "frozen":
        return jnp.zeros_like(params["c"]), there(params), batch
    return there((params, ADAM.init(params))), batch


STEPS: dict[str, Step] = {
    "all trained": step_of(ADAM)[0],
    "frozen": frozen,
    "master weights": mixed,
    "accumulated": accumulating,
}
FORMS = {
    "as it is": PLAIN,
    "one level": of_levels((LAYERS,)),
    "levels": of_levels((2, 2)),
}


def traced(name: str, form: Variant = PLAIN) -> tuple[Traced, Any]:
    args = arguments(name)
    donated = () if name == "frozen" else 0
    return trace(jax.jit(from_host(STEPS[name]), donate_argnums=donated), args, {}).in_form(form), args


def every_eqn(eqns: Any) -> Any:
    for eqn in eqns:
        yield eqn
        yield from every_eqn(inner_eqns(eqn))


def stacks(eqns: Any, which: Callable[[Any], bool]) -> int:
    """How many copies there are of whole stacks of matrices."""
    return sum(which(eqn) and eqn.outvars[0].aval.ndim > 2 for eqn in every_eqn(eqns))


DEVICES = {"cpu": CPU, "gpu": Target("h100").spec}


def planned_for(found: Traced, device: DeviceSpec) -> jex.ClosedJaxpr:
    """The step for a device, which saves nothing that it need not."""
    graph = lower(found, device, base_nbytes=0)
    return emit(found, graph, close_over_dependencies(graph, ()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STEPS)
def test_results_are_equal_in_every_form(name: str, form: str, device: str) -> None:
    if name == "accumulated" and form != "as it is":
        pytest.skip("its loops over layers are within another")
    found, args = traced(name, FORMS[form])
    assert_computes(planned_for(found, DEVICES[device]), from_host(STEPS[name]), args)


def test_copies_of_an_iteration_begin_in_turn() -> None:
    """On a GPU, of which few copies are under way at once: what the first readers of a copy have made says that it has
    been read, and the next but one begins.
    """
    found, _ = traced("all trained", of_levels((LAYERS,)))
    with recorded() as acted:
        body = scans(planned_for(found, DEVICES["gpu"]))[-1].params["jaxpr"].jaxpr
    assert acted["row copies in turn"]
    fetches = [i for i, eqn in enumerate(body.eqns) if is_fetch(eqn)]
    behind = {v: eqn for eqn in body.eqns if is_barrier(eqn) for v in eqn.outvars}
    made: dict[Any, int] = {v: i for i, eqn in enumerate(body.eqns) for v in eqn.outvars}
    waiting = 0
    for i in fetches:
        row = body.eqns[i].invars[0]
        read = body.eqns[made[row]].invars if row in made else ()
        index = [a for a in _compat.variables(read) if not _compat.shaped(a).shape]
        barrier = behind.get(index[0]) if index else None
        if barrier is None:
            continue
        waiting += 1
        # what has been made is made of another copy, which stands before
        sources, seen = [made[a] for a in _compat.variables(barrier.invars) if a in made], set[int]()
        while sources:
            seen.add(j := sources.pop())
            sources += [made[a] for a in _compat.variables(body.eqns[j].invars) if a in made]
        assert seen.intersection(fetches) and max(seen) < i
    assert len(fetches) > AT_ONCE
    assert waiting >= len(fetches) // 3


@pytest.mark.parametrize("name", STEPS)
def test_no_pass_changes_what_is_computed(name: str) -> None:
    with watched(check):
        traced(name, PLAIN)
        if name != "accumulated":
            traced(name, of_levels((LAYERS,)))


@pytest.mark.parametrize("name", ["all trained", "master weights"])
def test_weights_state_and_gradients_of_all_layers_are_never_on_the_device(name: str) -> None:
    found, _ = traced(name, of_levels((LAYERS,)))
    planned = emitted(found, [])
    assert stacks(planned.eqns, is_fetch) == stacks(planned.eqns, is_put) == 0
    forward, backward = (loop.params["jaxpr"].jaxpr.eqns for loop in scans(planned))
    matrices = sum(a.ndim > 2 for a in jax.tree.leaves(_stacked()))
    assert sum(is_fetch(eqn) for eqn in forward if eqn.outvars[0].aval.ndim == 2) == matrices
    # weights and two moments come, and go
    assert sum(is_fetch(eqn) for eqn in backward if eqn.outvars[0].aval.ndim == 2) >= 3 * matrices
    assert sum(is_put(eqn) for eqn in backward if eqn.outvars[0].aval.ndim == 2) == 3 * matrices
    for loop in scans(planned):
        on_device = [v.aval for v in loop.outvars if v.aval.ndim > 2]
        assert all(_on_host(aval) or aval.shape[1:] == _batch()[0].shape for aval in on_device)


def _on_host(aval: Any) -> bool:
    return aval.memory_space == jax.memory.Space.Host


def test_frozen_weights_come_once_in_each_pass() -> None:
    found, _ = traced("frozen")
    planned = emitted(found, [])
    assert stacks(planned.eqns, is_fetch) == 0
    for loop in scans(planned):
        assert any(map(is_fetch, loop.params["jaxpr"].jaxpr.eqns))


def test_loops_within_a_loop_copy_their_rows() -> None:
    """Those over layers, in that over batches. Behind it the update copies each stack once."""
    found, _ = traced("accumulated")
    planned = emitted(found, [])
    inside = [eqn for loop in scans(planned) for eqn in inner_eqns(loop)]
    assert stacks(inside, is_fetch) == 0 and any(is_fetch(eqn) for eqn in every_eqn(inside))


def decayed(params: Any, batch: Any) -> Any:
    """The loss itself reads all weights."""
    squares = sum(jnp.sum(a**2) for a in jax.tree.leaves(params))
    value, gradients = jax.value_and_grad(lambda p: loss(p, batch) + 0.0 * squares)(params)
    return squares + value, gradients


def test_what_is_read_whole_before_a_loop_is_copied_whole() -> None:
    args = there(_stacked()), _batch()
    found = trace(jax.jit(from_host(decayed)), args, {})
    planned = emitted(found, [])
    assert stacks(planned.eqns, is_fetch) == sum(a.ndim > 2 for a in jax.tree.leaves(args[0]))
    assert_computes(planned, from_host(decayed), args)


def test_two_readings_of_one_array_in_one_loop() -> None:
    """As it is, and in fewer bits."""

    def step(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            return jnp.tanh(x @ w[0]) + (x.astype(jnp.bfloat16) @ w[1]).astype(x.dtype), None

        return lax.scan(layer, x, (weights, weights.astype(jnp.bfloat16)))[0]

    weights = jax.random.normal(jax.random.key(0), (4, 32, 32)) * 0.1
    args = there(weights), jnp.ones((8, 32))
    found = trace(jax.jit(from_host(step)), args, {})
    assert_computes(emitted(found, []), from_host(step), args)


def test_arguments_that_could_stream() -> None:
    """Those that loops alone read before the update: here of a step with all on the device."""
    params, batch = _stacked(), _batch()
    closed = jax.make_jaxpr(STEPS["all trained"])((params, ADAM.init(params)), batch)
    flat = trace(
        jax.jit(STEPS["all trained"]), ((params, ADAM.init(params)), batch), {}
    ).merged.program.closed
    places = [flat.jaxpr.invars.index(v) for v in read_by_rows(flat)]
    assert places == list(range(len(jax.tree.leaves(params)))) and closed.jaxpr.invars
    assert _compat.variables(flat.jaxpr.invars)
    whole = trace(jax.jit(decayed), (params, batch), {}).merged.program.closed
    assert read_by_rows(whole) == []
