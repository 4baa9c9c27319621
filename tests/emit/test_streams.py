"""Steps whose optimizer's state is in host memory: equal results, and little of it on the device at once."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_close
from flax import nnx
from flax.training.train_state import TrainState

import jaxremat
from jaxremat._compiler._hlo import parse, transfer
from jaxremat._model._host_copies import LEAST_NBYTES
from jaxremat._program._host_arguments import from_host
from jaxremat._program._primitives import is_backward, is_contraction, is_fetch, is_put
from jaxremat._rewrite._streamed_copies import updates
from jaxremat._rewrite._trace import trace

pytestmark = pytest.mark.usefixtures("few_compilations")

Weights = list[tuple[Any, Any]]


def unrolled(weights: Any, x: Any) -> jax.Array:
    h = x
    for up, down in weights:
        h = h + jax.nn.gelu(h @ up) @ down
    return jnp.mean(h**2)


def scanned(weights: Any, x: Any) -> jax.Array:
    h, _ = jax.lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w[0]) @ w[1], None), x, weights)
    return jnp.mean(h**2)


ADAM = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


def step_of(loss: Callable[..., Any], tx: Any = ADAM) -> Callable[..., Any]:
    """A step that knows nothing of host memory."""

    def step(weights: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        steps, state = tx.update(gradients, state, weights)
        return optax.apply_updates(weights, steps), state, value

    return step


def copying(weights: Any, state: Any, x: Any) -> Any:
    """One that copies itself."""
    state = jax.device_put(state, jax.memory.Space.Device)
    weights, state, value = step_of(unrolled)(weights, state, x)
    return weights, jax.device_put(state, jax.memory.Space.Host), value


def mapped(weights: Any, momentum: Any, x: Any) -> Any:
    """One whose state is read in a loop."""
    value, gradients = jax.value_and_grad(scanned)(weights, x)

    def update(layer: Any) -> Any:
        (up, down), (m_up, m_down), (g_up, g_down) = layer
        m_up, m_down = 0.9 * m_up + g_up, 0.9 * m_down + g_down
        return (up - 1e-3 * m_up, down - 1e-3 * m_down), (m_up, m_down)

    weights, momentum = jax.lax.map(update, (weights, momentum, gradients))
    return weights, momentum, value


STEPS = {
    "unrolled": step_of(unrolled),
    "clipped": step_of(unrolled, CLIPPED),
    "scanned": step_of(scanned),
    "copying": copying,
}


def shapes(name: str, width: int, count: int, rows: int) -> tuple[Any, Any, Any]:
    """Weights, optimizer's state, examples."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layers: Any = [(shape((width, 4 * width)), shape((4 * width, width)))] * count
    if name == "scanned":
        layers = (shape((count, width, 4 * width)), shape((count, 4 * width, width)))
    tx = CLIPPED if name == "clipped" else ADAM
    return layers, jax.eval_shape(tx.init, layers), shape((rows, width))


def arrays(tree: Any) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype) * 0.1, tree)


def kinds(tree: Any) -> set[Any]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
    ("name", "share"),
    [("unrolled", 0.75), ("unrolled", 0.45), ("clipped", 0.75), ("scanned", 0.45), ("copying", 0.75)],
)
def test_results_are_equal_and_stay_where_they_came_from(name: str, share: float) -> None:
    weights, state, x = shapes(name, 32, 4, 256)
    weights, x = arrays(weights), arrays(x)
    everything = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state)
    least = 0 if name == "copying" else 1000
    there = jaxremat.to_host(everything, least_nbytes=least)
    large = [a for a in jax.tree.leaves(there) if a.nbytes >= least]
    assert kinds(large) == {"pinned_host"}
    expected = jax.jit(
        step_of(scanned if name == "scanned" else unrolled, CLIPPED if name == "clipped" else ADAM)
    )(weights, everything, x)
    needs = jaxremat.memory(STEPS[name], weights, there, x)
    budget = needs.peak_nbytes - int((1 - share) * needs.temporaries_nbytes)
    step = jaxremat.optimize(budget)(STEPS[name])
    found = step(weights, there, x)
    assert_close(found, expected, rtol=2e-5, atol=1e-6)
    assert step.plan(weights, there, x).peak_nbytes <= budget
    assert [a.sharding.memory_kind for a in jax.tree.leaves(found[1])] == [
        a.sharding.memory_kind for a in jax.tree.leaves(there)
    ]
    assert kinds(found[0]) == {"device"}
    step(*found[:2], x)
    assert len(step._planned) == 1  # what came back is what went in


def test_a_state_that_is_read_in_a_loop() -> None:
    weights, _, x = shapes("scanned", 32, 4, 256)
    weights, x = arrays(weights), arrays(x)
    momentum = jax.tree.map(jnp.zeros_like, weights)
    there = jaxremat.to_host(momentum, least_nbytes=0)
    needs = jaxremat.memory(mapped, weights, there, x)
    found = jaxremat.optimize(needs.peak_nbytes - needs.temporaries_nbytes // 3)(mapped)(weights, there, x)
    assert_close(found, jax.jit(mapped)(weights, momentum, x), rtol=2e-5, atol=1e-6)
    assert kinds(found[1]) == {"pinned_host"}


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_a_state_that_is_updated_elsewhere_or_not_at_all(share: float) -> None:
    """In the forward pass, in the backward pass without a gradient, nowhere."""
    weights, _, x = shapes("unrolled", 32, 4, 256)
    weights, x = arrays(weights), arrays(x)
    state = {
        "seen": jnp.zeros((256, 32)),
        "count": jnp.zeros((16, 16)),
        "kept": jnp.ones((8, 8)),
        "spare": jnp.ones((4, 4)),
    }

    def step(weights: Any, state: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for up, down in weights:
                h = h + jax.nn.gelu(h @ up) @ down
            return jnp.mean(h**2), 0.9 * state["seen"] + jax.lax.stop_gradient(h)

        (value, seen), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g * state["kept"][0, 0], weights, gradients)
        new = {"seen": seen, "count": state["count"] + 1, "kept": state["kept"], "spare": state["spare"]}
        return weights, new, value

    there = jaxremat.to_host(state, least_nbytes=0)
    needs = jaxremat.memory(step, weights, there, x)
    planned = jaxremat.optimize(
        needs.peak_nbytes - int((1 - share) * needs.temporaries_nbytes),
    )(step)
    assert_close(planned(weights, there, x), jax.jit(step)(weights, state, x), rtol=2e-5, atol=1e-6)
    assert kinds(planned(weights, there, x)[1]) == {"pinned_host"}


def test_train_states_and_objects() -> None:
    """What a step returns at the place of an argument goes back, wherever in the tree that is."""
    weights, _, x = shapes("unrolled", 32, 4, 256)
    weights, x = arrays(weights), arrays(x)

    def step(state: TrainState, x: Any) -> Any:
        value, gradients = jax.value_and_grad(unrolled)(state.params, x)
        return {"state": state.apply_gradients(grads=gradients), "loss": value}

    def alone(state: TrainState, x: Any) -> Any:
        return step(state, x)["state"]

    made = TrainState.create(apply_fn=unrolled, params=weights, tx=CLIPPED)
    there = made.replace(opt_state=jaxremat.to_host(made.opt_state, least_nbytes=1000))
    for fn, new in ((step, lambda found: found["state"]), (alone, lambda found: found)):
        planned = jaxremat.optimize("1GiB")(fn)
        found, expected = new(planned(there, x)), new(jax.jit(fn)(made, x))
        assert_close(found, expected, rtol=2e-5, atol=1e-6)
        assert "pinned_host" in kinds(found.opt_state) and kinds(found.params) == {"device"}

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(6)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + nnx.gelu(layer(x))
            return x

    def learn(model: Net, optimizer: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    losses = []
    for moved in (False, True):
        model = Net()
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
        if moved:
            nnx.update(optimizer, jaxremat.to_host(nnx.state(optimizer), least_nbytes=1000))
        fn = jaxremat.optimize("1GiB")(learn) if moved else nnx.jit(learn)
        losses.append([float(fn(model, optimizer, x)) for _ in range(3)])
        matrices = [a for a in jax.tree.leaves(nnx.state(optimizer)) if a.ndim > 1]
        assert kinds(matrices) == {"pinned_host" if moved else "device"}
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_what_is_returned_at_the_place_of_an_argument_goes_there() -> None:
    here, there = jnp.zeros((4, 4)), jaxremat.to_host(jnp.zeros((4, 4)), least_nbytes=0)

    def where(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(
            lambda a: a.sharding.memory_kind == "pinned_host", jax.jit(from_host(fn))(*args, **kwargs)
        )

    def three(weights: Any, first: Any, second: Any) -> Any:
        return weights + 1, first + 1, second + 1

    assert where(three, here, there, here) == (False, True, False)
    assert where(three, {"w": here}["w"], there, there) == (False, True, True)
    # as many arguments with the same places within them: none of them is told from another by that
    assert where(lambda a, b: {"a": a["w"] + 1, "b": b["w"] + 1}, {"w": here}, {"w": there}) == {
        "a": False,
        "b": False,
    }
    assert where(lambda a, n: {"a": a["m"] + n, "w": a["w"]}, {"w": here, "m": there}, 2.0) == {
        "a": False,
        "w": False,
    }
    assert where(lambda a, n: {"m": a["m"] + n, "w": a["w"]}, {"w": here, "m": there}, 2.0) == {
        "m": True,
        "w": False,
    }
    assert where(lambda a, n: {"m": a["m"][:2] + n}, {"m": there}, 2.0) == {"m": False}  # another shape
    assert where(lambda n, state: (n, {"m": state["m"] + n}), here, state={"m": there}) == (
        False,
        {"m": True},
    )


def test_what_fails_by_itself_fails_as_it_does() -> None:
    calls = []

    def broken(state: Any) -> Any:
        calls.append(state)
        raise KeyError("mine")

    there = jaxremat.to_host(jnp.zeros((4, 4)), least_nbytes=0)
    with pytest.raises(KeyError, match="mine"):
        jaxremat.optimize("1GiB")(broken).plan(there)


def test_to_host_leaves_what_is_small_and_what_is_no_array() -> None:
    tree = {"large": jnp.zeros((512, 512)), "small": jnp.zeros(4), "name": "x", "count": 3}
    moved = jaxremat.to_host(tree)
    assert moved["large"].nbytes >= LEAST_NBYTES and kinds(moved["large"]) == {"pinned_host"}
    assert moved["small"] is tree["small"] and moved["name"] == "x" and moved["count"] == 3
    assert kinds(jaxremat.to_host(moved)["large"]) == {"pinned_host"}
    struct = jaxremat.to_host(jax.ShapeDtypeStruct((512, 512), jnp.float32))
    assert struct.sharding is not None and struct.sharding.memory_kind == "pinned_host"
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    struct = jaxremat.to_host(jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=sharding))
    assert struct.sharding == sharding.with_memory_kind("pinned_host")


def test_devices_without_such_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxremat._program._host_arguments._HOST", "elsewhere")
    with pytest.raises(
        jaxremat.TargetError, match=r"memory of the kind 'elsewhere', but .* has only 'device'"
    ):
        jaxremat.to_host(jnp.zeros((512, 512)))


def traced(name: str, rows: int = 8192) -> list[Any]:
    weights, state, x = shapes(name, 2048, 6, rows)
    program = jax.jit(STEPS[name] if name == "copying" else from_host(STEPS[name]))
    return list(trace(program, (weights, jaxremat.to_host(state, least_nbytes=0), x), {}).jaxpr.jaxpr.eqns)


@pytest.mark.parametrize("name", STEPS)
def test_copies_stand_beside_at_most_the_next_update(name: str) -> None:
    eqns = traced(name)
    fetches = [i for i, eqn in enumerate(eqns) if is_fetch(eqn)]
    puts = [i for i, eqn in enumerate(eqns) if is_put(eqn)]
    first = next(i for i, eqn in enumerate(eqns) if is_backward(eqn))
    assert min(fetches) > first and len(fetches) == len(puts)
    of = updates(eqns, fetches)
    matrices = [i for i in fetches if eqns[i].outvars[0] in of]
    assert len(matrices) == (4 if name == "scanned" else 24)  # two of each weight
    uses: dict[int, list[int]] = {}  # update -> where what it has copied is read
    for i, eqn in enumerate(eqns):
        for a in eqn.invars:
            if type(a).__name__ != "Literal" and a in of and not is_put(eqn):
                uses.setdefault(of[a], []).append(i)
    begin = {update: min(places) for update, places in uses.items()}
    turns = sorted(begin, key=begin.__getitem__)
    assert len(turns) == (2 if name == "scanned" else 12)
    for i in matrices:
        turn = turns.index(of[eqns[i].outvars[0]])
        assert i < begin[turns[turn]]
        assert turn == 0 or i >= begin[turns[turn - 1]] - 4  # those of one update follow one another
    for i in puts:
        update = of.get(eqns[i].invars[0])
        if update is not None and (turn := turns.index(update)) + 2 < len(turns):
            assert i < begin[turns[turn + 2]]


def test_where_there_is_time_for_it_a_copy_begins_no_earlier_than_need_be() -> None:
    """With many rows a product takes longer than the copies of an update."""
    eqns = traced("unrolled", rows=1 << 18)
    for i, eqn in enumerate(eqns):
        if is_fetch(eqn) and len(eqn.outvars[0].aval.shape) > 1:
            reader = next(j for j, other in enumerate(eqns) if eqn.outvars[0] in other.invars)
            products = sum(is_contraction(other) for other in eqns[i:reader])
            assert products == 1


@pytest.mark.parametrize("name", ["unrolled", "clipped"])
def test_a_compiled_plan_holds_less_than_the_state(name: str) -> None:
    """Within a budget that parameters and state alone do not fit into; of all copies few are under way at once."""
    weights, state, x = shapes(name, 2048, 8, 4096)
    on_device = jaxremat.memory(STEPS[name], weights, state, x, donate_argnums=(0, 1), target="h100")
    there = jaxremat.to_host(state)
    as_written = jaxremat.memory(STEPS[name], weights, there, x, donate_argnums=(0, 1), target="h100")
    budget = on_device.arguments_nbytes if name == "unrolled" else as_written.peak_nbytes // 2
    assert budget < as_written.peak_nbytes
    step = jaxremat.optimize(budget, donate_argnums=(0, 1), target="h100")(STEPS[name])
    plan = step.plan(weights, there, x)
    assert plan.peak_nbytes <= budget
    module = parse(step.compile(weights, there, x).as_text())
    entry = module.computations[module.entry].instructions
    begun = {i.name: copy for i in entry if (copy := transfer(module, i)) is not None}
    assert sum(copy.back for copy in begun.values()) == len(begun) / 2 == 32
    under_way = most = 0
    for instruction in entry:
        if instruction.name in begun and begun[instruction.name].back:
            under_way += 1
        ended = re.match(r"copy-done", instruction.opcode) and begun.get(instruction.operands[0])
        under_way -= bool(ended and ended.back)
        most = max(most, under_way)
    assert most <= 6  # of three updates


def test_a_refusal_says_what_the_hosts_memory_could_hold() -> None:
    weights, state, x = shapes("unrolled", 2048, 4, 512)
    options: Any = {"budget": "100MiB", "donate_argnums": (0, 1), "target": "h100"}
    options["planning"] = jaxremat.Planning(solver=jaxremat.Greedy(), cache=False)
    with pytest.raises(
        jaxremat.InfeasibleBudgetError, match=r"1\.00 GiB of the arguments .* `opt_state = jaxremat\.to_host"
    ):
        jaxremat.plan(STEPS["unrolled"], weights, state, x, **options)
    with pytest.raises(jaxremat.InfeasibleBudgetError) as refused:
        jaxremat.plan(STEPS["unrolled"], weights, jaxremat.to_host(state), x, **options)
    assert "to_host" not in str(refused.value)
