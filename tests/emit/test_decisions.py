"""Decisions run once: recomputed numbers that differ in the last bit change no mask, index or position."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_emit import lowered

from jaxremat import close_over_dependencies
from jaxremat._emit._emit import emit
from jaxremat._program import _compat
from jaxremat._report._actions import NONE_DECIDED, actions, decided

ROWS, WIDTH = 64, 32
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH)).astype("float32")
WEIGHTS = [RNG.normal(size=(WIDTH, WIDTH)).astype("float32") / 6 for _ in range(3)]
TABLE = RNG.normal(size=(40,)).astype("float32")
LAST_BITS = 2.0**-22


def largest(y: Any) -> Any:
    return y.max(-1, keepdims=True) * jnp.tanh(y)


def largest_by_difference(y: Any) -> Any:
    return y * (y - y.max(-1, keepdims=True) >= 0)


def largest_by_ratio(y: Any) -> Any:
    y = 1 + y**2
    return y * (0.5 * (y / y.max(-1, keepdims=True)) >= 0.5)


def third_largest(y: Any) -> Any:
    return y * (y >= jnp.sort(y)[:, -3:-2])


def best_three(y: Any) -> Any:
    return y * (y >= lax.top_k(y, 3)[0][:, -1:])


def median(y: Any) -> Any:
    return y * (y == jnp.sort(y)[:, WIDTH // 2 :][:, :1])


def bits(y: Any) -> Any:
    keys = lax.bitcast_convert_type(jnp.abs(y), jnp.int32)
    return y * (keys == keys.max(-1, keepdims=True))


def truncated(y: Any) -> Any:
    """Numbers made of some of the bits of others."""
    shorter = lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.int32) & -2, jnp.float32)
    return y * (shorter == shorter.max(-1, keepdims=True))


def running(y: Any) -> Any:
    return y * (y >= lax.cummax(y, axis=1))


def in_a_branch(y: Any) -> Any:
    most = y.max(-1, keepdims=True)
    return lax.cond(
        jnp.sum(X) > 0, lambda y, most: y * (y >= most), lambda y, most: -y * (y >= most), y, most
    )


COMPARED = (
    largest, largest_by_difference, largest_by_ratio, third_largest, best_three, median, bits, truncated, running,
    in_a_branch,
)  # fmt: skip


def routed(y: Any) -> Any:
    """Rows in slots of the best of eight experts, in the order in which they come."""
    expert = jnp.argmax(y[:, :8], -1)
    chosen = jax.nn.one_hot(expert, 8, dtype=jnp.int32)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1) - 1
    slots = jnp.zeros((8, ROWS, WIDTH)).at[expert, place].set(y)
    return jnp.tanh(slots)[expert, place] * y


def looked_up(y: Any) -> Any:
    """Linear interpolation in a table."""
    place = jnp.clip(4 * y + 20, 0, 38)
    cell = jnp.floor(place)
    within = place - cell
    index = cell.astype(jnp.int32)
    table = jnp.asarray(TABLE)
    return table[index] * (1 - within) + table[index + 1] * within


def interpolated(y: Any) -> Any:
    return jnp.interp(y, jnp.linspace(-2, 2, 40), TABLE) * y


def counted(y: Any) -> Any:
    index = jnp.sum(y[..., None] > jnp.linspace(-2, 2, 39), -1)
    return jnp.asarray(TABLE)[index] * y


def ranked(y: Any) -> Any:
    return jnp.take_along_axis(jnp.sin(y), jnp.argsort(y, -1), -1) * y


PLACED = (routed, looked_up, interpolated, counted, ranked)


def step_of(decide: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for w in weights:
                product = h @ w
                h = decide(jnp.sin(3 * product)) + product
            return jnp.mean(h**2)

        return jax.value_and_grad(loss)(weights)

    return step


def perturbed(closed: jex.ClosedJaxpr, share: float) -> Callable[..., Any]:
    """Evaluate a jaxpr, with the floats that it recomputes larger by this share."""

    def run(*args: Any) -> list[Any]:
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(closed.jaxpr.invars, args, strict=True))
        for eqn in closed.jaxpr.eqns:
            variables = list(dict.fromkeys(_compat.variables(eqn.invars)))
            inner = _compat.new_jaxpr([], [], variables, eqn.outvars, [eqn])
            made = jex.jaxpr_as_fun(inner)(*(env[v] for v in variables))
            if "recompute_" in _compat.name_stack_text(eqn):
                made = [v * (1 + share) if jnp.issubdtype(v.dtype, jnp.inexact) else v for v in made]
            env.update(zip(eqn.outvars, made, strict=True))
        return [a.val if isinstance(a, jex.Literal) else env[a] for a in closed.jaxpr.outvars]

    return run


def clones(closed: jex.ClosedJaxpr) -> list[Any]:
    return [eqn for eqn in closed.jaxpr.eqns if "recompute_" in _compat.name_stack_text(eqn)]


def schedules(graph: Any) -> Any:
    """Everything is dropped that may be, then each value in turn, and each in turn is saved."""
    residuals = sorted(graph.residuals)
    yield close_over_dependencies(graph, ())
    for v in residuals:
        yield close_over_dependencies(graph, set(residuals) - {v})
        yield close_over_dependencies(graph, {v})


@pytest.mark.parametrize("decide", COMPARED, ids=lambda f: f.__name__)
def test_last_bits_change_no_comparison(decide: Callable[[Any], Any]) -> None:
    step = step_of(decide)
    traced, graph = lowered(step, (WEIGHTS, X))
    wanted = jax.tree.leaves(jax.jit(step)(WEIGHTS, X))
    seen: set[str] = set()
    for schedule in schedules(graph):
        closed = emit(traced, graph, schedule)
        if str(closed) in seen or not clones(closed):
            continue
        seen.add(str(closed))
        for share in (-LAST_BITS, LAST_BITS):
            found = jax.jit(perturbed(closed, share))(*WEIGHTS, X)
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * float(np.abs(b).max()))
        if len(seen) == 4:
            break
    assert seen


@pytest.mark.parametrize("decide", (*COMPARED, *PLACED), ids=lambda f: f.__name__)
def test_what_is_kept_as_a_decision_is_told(decide: Callable[[Any], Any]) -> None:
    """Also where the compiler makes it beside something else, so that no solver weighs it."""
    _, graph = lowered(step_of(decide), (WEIGHTS, X))
    schedule = close_over_dependencies(graph, ())
    found = decided(graph, schedule)
    assert 3 <= found.values <= 12 and found.nbytes >= found.values * ROWS
    for action in actions(graph, schedule):
        assert action.decision == (action.action == "save" and not graph.is_small(action.value))
    undecided = replace(graph, nodes=tuple(replace(n, decides=False) for n in graph.nodes))
    assert decided(undecided, schedule) == NONE_DECIDED


@pytest.mark.parametrize("decide", PLACED, ids=lambda f: f.__name__)
def test_no_integer_is_made_of_floats_again(decide: Callable[[Any], Any]) -> None:
    traced, graph = lowered(step_of(decide), (WEIGHTS, X))
    made = {"counted": "gt", "looked_up": "floor"}.get(decide.__name__, "")

    def decides(eqn: Any) -> bool:
        floats, integers = (
            any(jnp.issubdtype(a.aval.dtype, kind) for a in atoms)
            for atoms, kind in ((eqn.invars, jnp.inexact), (eqn.outvars, jnp.integer))
        )
        return floats and (integers or eqn.primitive.name == made)

    assert any(map(decides, traced.jaxpr.jaxpr.eqns))
    for schedule in schedules(graph):
        assert not [eqn for eqn in clones(emit(traced, graph, schedule)) if decides(eqn)]
