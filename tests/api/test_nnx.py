"""`optimize` on steps of NNX objects: everything is updated as `nnx.jit` updates it, within the budget."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_same
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxremat
from jaxremat import JaxrematWarning, MinCut

ROWS, WIDTH, LAYERS = 512, 64, 3


class Net(nnx.Module):
    """Statistics, random state and parameters; without biases before a norm, whose gradients are but rounding."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(LAYERS))
        self.norms = nnx.List(nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(LAYERS))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(jnp.tanh(norm(layer(x))))
        return x


def make() -> tuple[Net, Any, Any]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def batch(rows: int = ROWS) -> dict[str, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (rows, WIDTH))
    return {"x": x, "y": jnp.roll(x, 1, axis=1)}


def train_step(model: Net, optimizer: Any, metrics: Any, batch: Any) -> jax.Array:
    """As anybody writes it for `nnx.jit`."""

    def loss_fn(model: Net) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def state_of(objects: Any) -> Any:
    """All arrays of objects, keys as numbers."""
    leaves = jax.tree.leaves(nnx.state(objects))
    is_key = jax.dtypes.prng_key
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, is_key) else jnp.asarray(x) for x in leaves]


@pytest.fixture(scope="module")
def budget() -> int:
    stats = jaxremat.memory(train_step, *make(), batch())
    return stats.base_nbytes + int(0.7 * stats.temporaries_nbytes)


def test_a_step_written_for_nnx_jit(budget: int) -> None:
    step = jaxremat.optimize(budget, planning=jaxremat.Planning(solver=MinCut()))(train_step)
    want, got = make(), make()
    reference = nnx.jit(train_step)
    for _ in range(2):
        assert_same(reference(*want, batch()), step(*got, batch()))
    assert_same(state_of(want), state_of(got), rounding=1e-3)
    assert float(got[2].compute()["loss"]) == pytest.approx(float(want[2].compute()["loss"]), rel=1e-4)
    assert int(got[0].dropout.rngs.count[...]) == int(want[0].dropout.rngs.count[...]) > 0  # type: ignore[union-attr]
    plan = step.plan(*got, batch())
    assert not plan.drops_nothing
    assert plan.compiled_peak_nbytes is not None and plan.compiled_peak_nbytes <= budget
    compiled = step.compile(*got, batch())
    assert jaxremat.MemoryStats.of(compiled).peak_nbytes == plan.compiled_peak_nbytes
    assert jaxremat.memory(step, *got, batch()).peak_nbytes == plan.compiled_peak_nbytes
    assert step.lower(*got, batch()).as_text()


def test_asking_for_a_plan_changes_nothing(budget: int) -> None:
    objects = make()
    before = state_of(objects)
    jaxremat.plan(
        train_step,
        *objects,
        batch(),
        budget=budget,
        planning=jaxremat.Planning(solver=MinCut(), verify=False),
    )
    jaxremat.memory(train_step, *objects, batch())
    assert_same(before, state_of(objects), rounding=0.0)
    assert_same(before, state_of(make()), rounding=0.0)


def test_memory_is_that_of_nnx_jit() -> None:
    compiled = nnx.jit(train_step, donate_argnums=(0, 1)).lower(*make(), batch()).compile()
    stats = jaxremat.memory(train_step, *make(), batch(), donate_argnums=(0, 1))
    own: Any = compiled
    want = jaxremat.MemoryStats.of(own.compiled)
    assert (stats.base_nbytes, stats.aliased_nbytes) == (want.base_nbytes, want.aliased_nbytes)
    assert stats.aliased_nbytes > 0


def test_donated_objects(budget: int) -> None:
    step = jaxremat.optimize(
        budget, donate_argnums=(0, 1), planning=jaxremat.Planning(solver=MinCut(), verify=False)
    )(train_step)
    want, got = make(), make()
    old = jax.tree.leaves(nnx.state(got[0], nnx.Param))
    for _ in range(2):
        assert_same(nnx.jit(train_step)(*want, batch()), step(*got, batch()))
    assert all(jnp.asarray(x).is_deleted() for x in old)
    assert_same(state_of(want), state_of(got), rounding=1e-3)


def test_other_shapes_and_other_objects_are_planned_anew(budget: int) -> None:
    step = jaxremat.optimize(budget, planning=jaxremat.Planning(solver=MinCut(), verify=False))(train_step)
    objects = make()
    plan = step.plan(*objects, batch())
    step(*objects, batch())
    assert step.plan(*objects, batch()) is plan  # trained, but the same for all that
    assert step.plan(*objects, batch(ROWS // 2)) is not plan
    objects[0].eval()  # other static attributes, which make another program
    assert step.plan(*objects, batch()).fingerprint != plan.fingerprint


def test_structure_that_the_step_changes_and_references_that_it_shares() -> None:
    class Holder(nnx.Module):
        def __init__(self, inner: Any):
            self.inner = inner

    def step(holder: Holder, inner: Any, x: jax.Array) -> Any:
        assert holder.inner is inner
        inner.kernel[...] = inner.kernel[...] + 1.0
        holder.seen = nnx.Intermediate(  # type: ignore[attr-defined]
            x @ inner.kernel[...]
        )
        return inner, nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    found = []
    for transform in (nnx.jit, jaxremat.optimize("1GiB")):
        inner = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        holder = Holder(inner)
        same, new = transform(step)(holder, inner, jnp.ones((3, 2)))
        assert same is inner is holder.inner
        assert isinstance(new, nnx.Linear)
        found.append(state_of((holder, new)))
    assert len(found[0]) == 5
    assert_same(*found)


def test_above_and_beneath_nnx_jit(budget: int) -> None:
    want, above, beneath = make(), make(), make()
    nnx.jit(train_step)(*want, batch())
    jaxremat.optimize(budget, planning=jaxremat.Planning(solver=MinCut(), verify=False))(nnx.jit(train_step))(
        *above, batch()
    )
    assert_same(state_of(want), state_of(above), rounding=1e-4)
    inner = jaxremat.optimize(budget, planning=jaxremat.Planning(solver=MinCut()))(train_step)
    with pytest.warns(JaxrematWarning, match="called inside another JAX transformation"):
        nnx.jit(lambda *args: inner(*args))(*beneath, batch())
    assert_same(state_of(want), state_of(beneath), rounding=1e-4)


def test_static_and_keyword_arguments() -> None:
    def step(model: Any, x: jax.Array, *, times: int, scale: Any) -> jax.Array:
        model.bias[...] = model.bias[...] + times * scale
        return model(x).sum()

    model, other = (nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    planned = jaxremat.optimize("1GiB", static_argnames="times")(step)
    for times in (1, 2):
        want = nnx.jit(step, static_argnames="times")(other, jnp.ones((1, 2)), times=times, scale=2.0)
        assert_same(want, planned(model, jnp.ones((1, 2)), times=times, scale=2.0))
    np.testing.assert_array_equal(nnx.state(model)["bias"][...], jnp.full(2, 6.0))


def test_shardings_of_objects_are_those_of_nnx_jit() -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    options: Any = {"in_shardings": here, "out_shardings": here}
    one, other = make(), make()
    want = nnx.jit(train_step, graph=True, graph_updates=True, **options)(*one, batch())
    assert_same(want, jaxremat.optimize("1GiB", **options)(train_step)(*other, batch()))
    assert_same(nnx.state(one), nnx.state(other))


def test_a_state_is_a_tree_like_any_other() -> None:
    """What `nnx.split` gives goes in and comes back; nothing is updated behind its back."""
    graphdef, state = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

    @jaxremat.optimize("1GiB")
    def step(state: Any) -> Any:
        model = nnx.merge(graphdef, state)
        model.kernel[...] = model.kernel[...] + 1.0
        return nnx.state(model)

    before = [np.asarray(x) for x in jax.tree.leaves(state)]
    after = step(state)
    assert_same([jnp.asarray(x) for x in before], jax.tree.leaves(state))
    assert not np.array_equal(before[1], jax.tree.leaves(after)[1]) or not np.array_equal(
        before[0], jax.tree.leaves(after)[0]
    )


def test_a_train_state_of_linen() -> None:
    net = nn.Sequential([layer for _ in range(8) for layer in (nn.Dense(WIDTH), nn.tanh)])
    params = net.init(jax.random.key(0), batch()["x"])

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            out: Any = state.apply_fn(params, batch["x"])
            return jnp.mean((out - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def fresh() -> TrainState:
        return TrainState.create(apply_fn=net.apply, params=jax.tree.map(jnp.copy, params), tx=optax.sgd(0.1))

    planning = jaxremat.Planning(solver=MinCut())
    planned = jaxremat.optimize("70% of temporaries", donate_argnums=0, planning=planning)(step)
    plan = planned.plan(fresh(), batch())
    assert plan.form or not plan.drops_nothing
    state, loss = planned(fresh(), batch())
    want, want_loss = jax.jit(step)(fresh(), batch())
    assert_same((want.params, want.step, want_loss), (state.params, state.step, loss))
    assert isinstance(state, TrainState)
