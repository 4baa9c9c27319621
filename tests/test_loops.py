"""Loops laid open and closed again: the same programs, planned inside, with exactly what the plan says stacked."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_optimize import assert_same, compile_plain
from test_trace import assert_well_formed, runnable
from zoo import Case
from zoo_loops import LAYERS, LOOPS, ROWS, WIDTH

import jaxremat
from jaxremat import InfeasibleBudgetError, MemoryStats, _compat, complete, simulate
from jaxremat._devices import DeviceSpec
from jaxremat._emit import emit
from jaxremat._loops import ALONE, BACKWARD, FORWARD
from jaxremat._lower import lower
from jaxremat._segments import choices
from jaxremat._trace import Traced, trace

CPU = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
PAIR = [FORWARD, BACKWARD]
ROLES = {
    "two loops": [*PAIR, *PAIR],
    "turned": [*PAIR, *PAIR],
    "accumulation": [ALONE],
    "accumulation over layers": [ALONE, *PAIR],
    "checkpointed loop": PAIR,
}
"""The roles of the loops that are laid open, where it is not one pair."""

REMATTED = {"checkpointed body", "linen scan, remat"}
"""Programs with checkpoints of their own in the loop's body."""

LITTLE = {*REMATTED, "one layer", "recurrent", "accumulation"}
"""Programs of which half the temporaries cannot be saved."""


def traced(case: Case) -> Traced:
    return trace(jax.jit(case.step, donate_argnums=case.donate_argnums), case.make_args(), {})


def scans(closed: Any) -> list[Any]:
    return [eqn for eqn in getattr(closed, "jaxpr", closed).eqns if eqn.primitive.name == "scan"]


def stacked(closed: jex.ClosedJaxpr) -> list[tuple[int, ...]]:
    """The shapes of what the first scan stacks and the last scans over."""
    first, *_, last = scans(closed)
    made = set(first.outvars[_compat.scan_counts(first)[1] :])
    return sorted(v.aval.shape for v in dict.fromkeys(last.invars) if v in made)


def emitted(found: Traced, saved: Sequence[str]) -> jex.ClosedJaxpr:
    """The step that saves the values that these primitives make, and whatever must be saved."""
    graph = lower(found, CPU, base_nbytes=0)
    chosen = [v for v in graph.residuals if graph.nodes[graph.values[v].producer].primitive in saved]
    return emit(found, graph, complete(graph, chosen))


@pytest.mark.parametrize("name", LOOPS)
def test_closing_gives_the_program_back(name: str) -> None:
    case = LOOPS[name]
    found, args = traced(case), case.make_args()
    assert_well_formed(found)
    assert [loop.role for loop in sorted(found.loops, key=lambda loop: loop.id)].count(ALONE) == ROLES.get(
        name, PAIR
    ).count(ALONE)
    assert sorted(loop.role for loop in found.loops) == sorted(ROLES.get(name, PAIR))
    want = jax.jit(case.step)(*args)
    got = jax.tree.unflatten(found.out_tree, jex.jaxpr_as_fun(runnable(found))(*jax.tree.leaves(args)))
    assert_same(want, got)


@pytest.mark.parametrize("name", sorted(LOOPS.keys() - REMATTED))
def test_what_is_stacked_is_what_was_stacked(name: str) -> None:
    """Laying open, merging equals and closing again adds no stacked array, where none was recomputed."""
    found = traced(LOOPS[name])
    plain, again = (sum(len(eqn.outvars) for eqn in scans(c)) for c in (found.flat, runnable(found)))
    assert again <= plain


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in LITTLE])
def test_half_the_memory(name: str) -> None:
    check_budget(LOOPS[name], 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_least_memory(name: str) -> None:
    check_budget(LOOPS[name], None)


def check_budget(case: Case, share: float | None) -> None:
    """The budget, this share of the temporaries or "min", is kept, with the plain step's results."""
    args = case.make_args()
    plain = compile_plain(case, args)
    stats = MemoryStats.of(plain)
    budget = "min" if share is None else stats.base_nbytes + int(share * stats.temporaries_nbytes)
    step = jaxremat.optimize(budget, donate_argnums=case.donate_argnums)(case.step)
    plan = step.plan(*args)
    assert MemoryStats.of(step.compile(*args)).peak_nbytes == plan.compiled_peak_nbytes
    assert (plan.compiled_peak_nbytes or 0) <= plan.budget_nbytes
    want = plain(*jax.tree.map(lambda a: a.copy(), args))
    assert_same(want, step(*args))


def test_half_of_a_plain_loop_costs_nothing() -> None:
    """Plain JAX stacks every intermediate of the body; what fuses into its reader need not be."""
    case = LOOPS["layers"]
    args = case.make_args()
    stats = MemoryStats.of(compile_plain(case, args))
    budget = stats.base_nbytes + int(0.6 * stats.temporaries_nbytes)
    plan = jaxremat.plan(case.step, *args, budget=budget, donate_argnums=case.donate_argnums)
    assert plan.overhead < 0  # what is not stacked is not written either


def test_residuals_of_the_rewritten_loops() -> None:
    found = traced(LOOPS["layers"])
    carry, hidden, narrow = (LAYERS, ROWS, WIDTH), (LAYERS, ROWS, 2 * WIDTH), (LAYERS, ROWS, WIDTH)
    plain = scans(found.flat)[0]
    assert len(plain.outvars) - _compat.scan_counts(plain)[1] > 5
    assert stacked(emitted(found, [])) == [carry]
    assert stacked(emitted(found, ["dot_general"])) == sorted([carry, hidden, narrow])


def test_recomputation_stands_in_the_backward_loop() -> None:
    def dots(closed: jex.ClosedJaxpr) -> list[int]:
        return [
            sum(inner.primitive.name == "dot_general" for inner in eqn.params["jaxpr"].jaxpr.eqns)
            for eqn in scans(closed)
        ]

    found = traced(LOOPS["layers"])
    assert dots(found.flat) == [2, 4]
    assert dots(emitted(found, ["dot_general"])) == [2, 4]
    graph = lower(found, CPU, base_nbytes=0)
    again = [n for nodes in complete(graph, ()).recomputed for n in nodes]
    repeated = sum(graph.nodes[n].primitive == "dot_general" for n in again)
    assert repeated >= 2
    assert dots(emitted(found, [])) == [2, 4 + repeated]


def test_stacked_sizes_count_in_the_model() -> None:
    found = traced(LOOPS["layers"])
    graph = lower(found, CPU, base_nbytes=0)
    values = {
        graph.nodes[graph.values[v].producer].primitive: graph.values[v]
        for v in graph.residuals
        if graph.values[v].length > 1
    }
    assert {v.length for v in values.values()} == {LAYERS}
    all_saved, none = complete(graph, graph.residuals), complete(graph, ())
    saved, least = simulate(graph, all_saved).peak_nbytes, simulate(graph, none).peak_nbytes
    assert least < saved < 2 * sum(graph.values[v].saved_nbytes for v in graph.residuals)
    nbytes = sum(graph.values[v].saved_nbytes for v in all_saved.saved - none.saved)
    # Recomputed values count for one iteration.
    assert saved - least > nbytes * (1 - 2 / LAYERS)


def test_the_length_of_a_loop_does_not_matter_for_planning() -> None:
    def count(length: int) -> Counter[str]:
        def step(params: Any, x: Any) -> Any:
            return jax.grad(lambda p: lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, p)[0].sum())(params)

        args = (jax.ShapeDtypeStruct((length, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32))
        found = trace(jax.jit(step), args, {})
        return Counter(eqn.primitive.name for eqn in found.jaxpr.jaxpr.eqns)

    assert count(4) == count(4000)


@pytest.mark.parametrize("length", [4, 12, 36, 100])
def test_segments_divide_the_loop(length: int) -> None:
    for count in choices(length):
        assert 1 < count < length
        assert length % count == 0


def test_two_levels() -> None:
    """A carry per segment and one per layer of a segment, instead of one per layer."""
    found = traced(LOOPS["layers"])
    assert found.lengths == (LAYERS,)
    two = found.in_segments((2,))
    assert [loop.role for loop in two.loops] == [ALONE, *PAIR]
    planned = emitted(two, [])
    assert stacked(planned) == [(2, ROWS, WIDTH)]
    outer = scans(planned)[-1]
    assert stacked(outer.params["jaxpr"]) == [(LAYERS // 2, ROWS, WIDTH)]
    args = LOOPS["layers"].make_args()
    want = jax.jit(LOOPS["layers"].step)(*args)
    got = jax.tree.unflatten(two.out_tree, jex.jaxpr_as_fun(planned)(*jax.tree.leaves(args)))
    assert_same(want, got)


def test_deep_loops_need_the_square_root() -> None:
    """64 layers in two levels: far less than one carry per layer."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (lax.scan(lambda x, w: (jnp.tanh(x * w), None), x, params)[0] ** 2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    depth, size = 64, 2**14
    args = (jax.ShapeDtypeStruct((depth,), jnp.float32), jax.ShapeDtypeStruct((size,), jnp.float32))
    plan = jaxremat.plan(step, *args, budget="min", donate_argnums=0)
    assert plan.segments == (8,)
    assert plan.compiled_peak_nbytes is not None
    assert plan.compiled_peak_nbytes < 32 * size * 4
    loaded = jaxremat.Plan.from_json(plan.to_json())
    compiled = jaxremat.optimize(plan=loaded, donate_argnums=0)(step).compile(*args)
    assert MemoryStats.of(compiled).peak_nbytes == plan.compiled_peak_nbytes


def test_without_compiling() -> None:
    case = LOOPS["layers"]
    args = case.make_args()
    stats = MemoryStats.of(compile_plain(case, args))
    budget = stats.base_nbytes + int(0.5 * stats.temporaries_nbytes)
    step = jaxremat.optimize(budget, verify=False, donate_argnums=case.donate_argnums)(case.step)
    plan = step.plan(*args)
    assert plan.baseline_peak_nbytes == pytest.approx(stats.peak_nbytes, rel=0.25)
    assert MemoryStats.of(step.compile(*args)).peak_nbytes <= 1.2 * budget
    with pytest.raises(InfeasibleBudgetError):
        jaxremat.plan(case.step, *args, budget=stats.base_nbytes + 1000, verify=False)


def test_effects_stay_in_their_loop() -> None:
    """A loop that prints is left as it is."""

    def step(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            jax.debug.print("{}", x.sum())
            return jnp.sin(x @ w), None

        return jax.grad(lambda p: lax.scan(body, x, p)[0].sum())(params)

    found = trace(jax.jit(step), (np.ones((3, 8, 8)), np.ones((4, 8))), {})
    assert found.loops == ()
