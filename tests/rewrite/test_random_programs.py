"""Random differentiable programs: whatever is saved or kept, the emitted program is well-formed; planned at random
budgets, results are the same and compiled peaks within the budget."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import choices
from test_optimize import assert_same
from zoo_calls import attend

import jaxremat
from jaxremat import Graph, InfeasibleBudgetError, MemoryStats, Milp, MinCut, close_over_dependencies
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._emit._emit import FENCES, emit
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Pin
from jaxremat._model._stages import uncut
from jaxremat._rewrite._trace import trace

OPERATIONS = (
    "matmul", "matmul", "tanh", "relu", "softmax", "norm", "multiply", "add", "branch", "switch", "loop", "attend",
)  # fmt: skip
CPU = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)


@dataclass(frozen=True)
class Net:
    """A DAG: each operation, as (name, places of its operands counted back from the newest value)."""

    batch: int
    width: int
    operations: tuple[tuple[str, int, int], ...]

    def make_args(self) -> tuple[list[jax.Array], jax.Array]:
        """Weights, one per contraction, and a batch."""
        count = sum(name in ("matmul", "attend") for name, _, _ in self.operations)
        keys = jax.random.split(jax.random.key(0), count + 1)
        weights = [jax.random.normal(k, (self.width, self.width)) * self.width**-0.5 for k in keys[1:]]
        return weights, jax.random.normal(keys[0], (self.batch, self.width))

    def loss(self, params: list[jax.Array], x: jax.Array) -> jax.Array:
        """The mean square of all values that nobody else reads."""
        values, rest, unread = [x], list(params), {0}
        for name, first, second in self.operations:
            i, j = (max(len(values) - back, 0) for back in (first, second))
            unread -= {i, j} if name in ("multiply", "add") else {i}
            unread.add(len(values))
            values.append(self._apply(name, values[i], values[j], rest))
        return sum((jnp.mean(values[i] ** 2) for i in sorted(unread)), jnp.zeros(()))

    @staticmethod
    def _apply(name: str, a: jax.Array, b: jax.Array, weights: list[jax.Array]) -> jax.Array:
        match name:
            case "matmul":
                return a @ weights.pop()
            case "tanh":
                return jnp.tanh(a)
            case "relu":
                return jax.nn.relu(a)
            case "softmax":
                return jax.nn.softmax(a)
            case "branch":
                # Either way is taken in some programs.
                return jax.lax.cond(
                    jnp.sum(a) > 0, lambda a: jnp.tanh(a) * jnp.cos(a), lambda a: jnp.sin(2 * a), a
                )
            case "switch":
                ways = [jnp.tanh, lambda a: jax.nn.softmax(a) * a, lambda a: a * jax.nn.sigmoid(a)]
                return jax.lax.switch(jnp.argmax(a[0]) % 3, ways, a)
            case "loop":
                return jax.lax.scan(lambda c, s: (jnp.tanh(c * s), None), a, jnp.arange(1.0, 4.0))[0]
            case "attend":
                return a + attend(a, weights.pop())
            case "norm":
                return (a - a.mean(-1, keepdims=True)) * jax.lax.rsqrt(a.var(-1, keepdims=True) + 1e-3)
            case "multiply":
                return a * jnp.tanh(b)
        return a + b

    def step(self, params: list[jax.Array], x: jax.Array) -> Any:
        """Plain gradient descent."""
        value, grads = jax.value_and_grad(self.loss)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


@st.composite
def nets(draw: st.DrawFn) -> Net:
    """Mostly chains, with skips to older values; the first operation is a contraction."""
    back = st.integers(1, 2) | st.just(1) | st.integers(1, 6)
    operation = st.tuples(st.sampled_from(OPERATIONS), back, back)
    operations = draw(st.lists(operation, min_size=5, max_size=14))
    batch = 32 * draw(st.integers(8, 32))  # activations larger than weights
    return Net(batch, draw(st.sampled_from([16, 32, 64])), (("matmul", 1, 1), *operations))


def check(net: Net, share: float, solver: Any) -> None:
    args = net.make_args()
    plain = jax.jit(net.step).lower(*args).compile(jaxremat.compiler_options("cpu"))
    stats = MemoryStats.of(plain)
    budget = stats.base_nbytes + int(share * stats.temporaries_nbytes)
    step = jaxremat.optimize(budget, planning=jaxremat.Planning(solver=solver))(net.step)
    try:
        compiled = step.compile(*args)
    except InfeasibleBudgetError as error:
        assert error.min_peak_nbytes > budget
        return
    plan = step.plan(*args)
    assert MemoryStats.of(compiled).peak_nbytes == plan.compiled_peak_nbytes
    assert MemoryStats.of(compiled).peak_nbytes <= budget
    assert_same(plain(*args), step(*args), rounding=1e-4)


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(nets(), st.data())
def test_any_schedule_can_be_emitted(net: Net, data: st.DataObject) -> None:
    check_emitted(net, data)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(nets(), st.data())
def test_many_schedules_can_be_emitted(net: Net, data: st.DataObject) -> None:
    check_emitted(net, data)


def check_emitted(net: Net, data: st.DataObject) -> None:
    """`emit` type-checks: nothing is read before it is made, wherever stages begin and whatever waits for which."""
    found = trace(jax.jit(net.step, donate_argnums=0), net.make_args(), {})
    for platform in ("cpu", "gpu"):
        whole = lower(found, replace(CPU, platform=platform), base_nbytes=0)
        for graph in whole, data.draw(cut(whole)):
            for saved, kept in ((), ()), data.draw(choices(graph)):
                for fence in FENCES:
                    emit(found, graph, close_over_dependencies(graph, saved, kept), fence)


@st.composite
def cut(draw: st.DrawFn, graph: Graph) -> Graph:
    """The graph with stages that begin anywhere, as pins may say, before contractions more often than elsewhere."""
    behind = graph.nodes[graph.forward_stop + 1 :]
    begin = st.sampled_from([n.id for n in behind if n.contraction]) | st.sampled_from([n.id for n in behind])
    pins = tuple(Pin("stage", n, "") for n in draw(st.sets(begin, max_size=12)))
    pinned = replace(graph, pins=pins)
    return replace(pinned, stages=uncut(pinned))


SHARES = st.floats(0.3, 1)
SOLVERS = st.sampled_from([MinCut(), Milp()])


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(nets(), SHARES, SOLVERS)
def test_random_programs(net: Net, share: float, solver: Any) -> None:
    check(net, share, solver)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(nets(), SHARES, SOLVERS)
def test_many_random_programs(net: Net, share: float, solver: Any) -> None:
    check(net, share, solver)
