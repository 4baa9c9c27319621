"""Loops inlined and closed again: the same programs, planned inside, with exactly what the plan says stacked."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close, assert_computes, assert_same, compile_plain
from evaluation import evaluate
from forms import of_levels
from jax import lax
from test_trace import assert_well_formed, runnable
from zoo import Case
from zoo_loops import LAYERS, LOOPS, ROWS, WIDTH, _block, _case, _stacked

import jaxremat
from jaxremat import InfeasibleBudgetError, MemoryStats, SaveAll, close_over_dependencies, simulate
from jaxremat._compiler._devices import DeviceSpec, detect
from jaxremat._compiler._program import Program
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._loop_levels import carries, choices
from jaxremat._model._variant import LOOP
from jaxremat._plan._problem import Problem
from jaxremat._plan._request import Request
from jaxremat._plan._verify import make_plan
from jaxremat._program import _compat
from jaxremat._rewrite._flat_program import BACKWARD, FORWARD, UNPAIRED
from jaxremat._rewrite._trace import Traced, trace

CPU = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
PAIR = [FORWARD, BACKWARD]
ROLES = {
    "two loops": [*PAIR, *PAIR],
    "turned": [*PAIR, *PAIR],
    "accumulation": [UNPAIRED],
    "accumulation over layers": [UNPAIRED, *PAIR],
    "checkpointed loop": PAIR,
    "one layer": [],
}
"""The roles of the loops that are inlined, where it is not one pair."""

REMATTED = {"checkpointed body", "linen scan, remat"}
"""Programs with checkpoints of their own in the loop's body."""

LITTLE = {*REMATTED, "one layer", "recurrent", "accumulation"}
"""Programs of which half the temporaries cannot be saved."""


OFTEN = {"layers", "one layer", "constants", "two loops", "nested", "accumulation over layers"}
"""What is run by default where each program has to be compiled; the others are slow tests."""


def often(names: Iterable[str], chosen: Collection[str] = OFTEN) -> list[Any]:
    """All of the names, those that are not chosen as slow tests."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


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
    return emit(found, graph, close_over_dependencies(graph, chosen))


@pytest.mark.parametrize("name", often(LOOPS))
def test_closing_gives_the_program_back(name: str) -> None:
    """Which is proved to compute the step, as all that is emitted (`tests/emit/test_validation.py`)."""
    found = traced(LOOPS[name])
    assert_well_formed(found)
    runnable(found)
    assert [loop.role for loop in sorted(found.loops, key=lambda loop: loop.id)].count(UNPAIRED) == ROLES.get(
        name, PAIR
    ).count(UNPAIRED)
    assert sorted(loop.role for loop in found.loops) == sorted(ROLES.get(name, PAIR))


@pytest.mark.parametrize(
    "name", often(sorted(LOOPS.keys() - REMATTED), LOOPS.keys() - {"linen scan", "nnx scan"})
)
def test_what_is_stacked_is_what_was_stacked(name: str) -> None:
    """Laying open, merging equals and closing again adds no stacked array, where none was recomputed."""
    found = traced(LOOPS[name])
    plain, again = (sum(len(eqn.outvars) for eqn in scans(c)) for c in (found.flat, runnable(found)))
    assert again <= plain


@pytest.mark.parametrize("name", often(sorted(LOOPS.keys() - LITTLE), {"accumulation over layers"}))
def test_half_the_memory(name: str) -> None:
    check_budget(LOOPS[name], 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_least_memory(name: str) -> None:
    check_budget(LOOPS[name], None)


def check_budget(case: Case, share: float | None) -> jaxremat.Plan:
    """The budget, this share of the temporaries or "min", is kept, with the plain step's results; returns the plan."""
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
    return plan


def test_half_of_a_plain_loop_costs_nothing() -> None:
    """Plain JAX stacks every intermediate of the body; what fuses into its reader need not be."""
    case = LOOPS["layers"]
    plan = jaxremat.plan(case.step, *case.make_args(), budget="60% of temporaries", donate_argnums=0)
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
    again = [n for nodes in close_over_dependencies(graph, ()).recomputed for n in nodes]
    repeated = sum(graph.nodes[n].primitive == "dot_general" for n in again)
    assert repeated >= 2
    assert dots(emitted(found, [])) == [2, 4 + repeated]


def test_stacked_sizes_count_in_the_model() -> None:
    found = traced(LOOPS["layers"])
    graph = lower(found, CPU, base_nbytes=0)
    values = {
        graph.nodes[graph.values[v].producer].primitive: graph.values[v]
        for v in graph.residuals
        if graph.values[v].length
    }
    assert {v.length for v in values.values()} == {LAYERS}
    all_saved, none = close_over_dependencies(graph, graph.residuals), close_over_dependencies(graph, ())
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


def test_a_loop_of_one_iteration_is_its_body() -> None:
    """It is planned as the layer written out, value by value: nothing is stacked, and what is read is no slice."""

    def least(net: Callable[..., jax.Array]) -> tuple[Counter[str], list[int], int]:
        found = traced(_case("one layer", net, lambda: _stacked(1)))
        graph = lower(found, CPU, base_nbytes=0)
        sizes = sorted(graph.values[v].saved_nbytes for v in graph.residuals)
        peak = simulate(graph, close_over_dependencies(graph, ())).peak_nbytes
        return Counter(n.primitive for n in graph.nodes if n.contraction), sizes, peak

    def written_out(params: Any, x: jax.Array) -> jax.Array:
        return _block(x, jax.tree.map(lambda a: a.squeeze(0), params))

    looped = least(lambda params, x: lax.scan(lambda x, p: (_block(x, p), x.sum()), x, params)[0])
    assert looped == least(written_out)
    assert looped[0] == {"dot_general": 5}


def in_levels(found: Traced, levels: tuple[int, ...]) -> tuple[Traced, jex.ClosedJaxpr]:
    """The step with its only loop with nested checkpointing, and the same emitted with nothing saved but carries."""
    cut = found.in_form(of_levels(levels))
    return cut, emitted(cut, [])


def test_two_levels() -> None:
    """A carry per segment and one per layer of a segment, instead of one per layer."""
    found = traced(LOOPS["layers"])
    assert found.sites.lengths == (LAYERS,)
    two, planned = in_levels(found, (2, 3))
    assert [loop.role for loop in two.loops] == [UNPAIRED, *PAIR]
    assert stacked(planned) == [(2, ROWS, WIDTH)]
    outer = scans(planned)[-1]
    assert stacked(outer.params["jaxpr"]) == [(3, ROWS, WIDTH)]


def test_three_levels() -> None:
    case = LOOPS["twenty-four layers"]
    three, planned = in_levels(traced(case), (2, 3, 4))
    assert [loop.role for loop in three.loops] == [UNPAIRED, UNPAIRED, *PAIR]
    kept = []
    for _ in range(3):
        first, *_, last = scans(planned)
        kept.append([v.aval.shape for v in first.outvars[_compat.scan_counts(first)[1] :]])
        planned = last.params["jaxpr"]
    assert kept == [[(length, ROWS, WIDTH)] for length in (2, 3, 4)]
    assert not scans(planned)


def test_a_rest_is_a_pair_of_its_own() -> None:
    """Seven layers, first in two segments of two: the others are run once, and their carries are gone before theirs."""
    seven, planned = in_levels(traced(LOOPS["seven layers"]), (2, 2))
    assert [loop.role for loop in seven.loops] == [*PAIR, UNPAIRED, *PAIR]
    assert [eqn.params["length"] for eqn in scans(planned)] == [2, 3, 3, 2]
    outer, rest, rest_back, back = scans(planned)
    made, again = set(outer.outvars[1:]), set(rest.outvars[1:])
    assert [v.aval.shape for v in back.invars if v in made] == [(2, ROWS, WIDTH)]
    assert [v.aval.shape for v in rest_back.invars if v in again] == [(3, ROWS, WIDTH)]


LEVELS = {
    "seven layers": (2, 2),
    "seven layers, reversed": (2, 3),
    "thirteen layers": (2, 2, 3),
    "twenty-four layers": (2, 3, 4),
    "constants": (2, 2),
    "map": (2, 3),
    "recurrent": (3, 5),
    "random": (2, 2),
    "linen scan": (2, 3),
    "two loops": (2, 2),
}


@pytest.mark.parametrize("name", often(LEVELS, {"seven layers, reversed", "constants", "random"}))
def test_levels_change_no_result(name: str) -> None:
    case = LOOPS[name]
    found, args = traced(case), case.make_args()
    cut = found.in_form(of_levels(*(LEVELS[name],) * len(found.sites.lengths)))
    assert_computes(emitted(cut, ["dot_general"]), case.step, args)


def test_large_gradients_begin_behind_the_fence() -> None:
    """Zeros that a loop writes its gradients into are made of what passes the barrier before it, not before that."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params)[0] ** 2).mean()

        grads = jax.grad(loss)(params)
        return params - grads / jnp.sum(grads * grads)  # all of them are needed first

    args = (jax.ShapeDtypeStruct((19, 160, 160), jnp.float32), jax.ShapeDtypeStruct((16, 160), jnp.float32))
    for levels in ((4, 4), (2, 2, 4)):
        found = trace(jax.jit(step, donate_argnums=0), args, {}).in_form(of_levels(levels))
        planned = emitted(found, []).jaxpr.eqns
        zeros = [
            eqn
            for eqn in planned
            if eqn.outvars[0].aval.shape == args[0].shape and eqn.primitive.name != "scan"
        ]
        begun = next(eqn for eqn in zeros if eqn.primitive.name == "broadcast_in_dim")
        fence = next(eqn for eqn in planned if any(v is begun.invars[0] for v in eqn.outvars))
        assert fence.primitive.name == "optimization_barrier"


def test_no_level_copies_parameters_or_gradients() -> None:
    """All levels read the rows of the arguments and write those of one array of gradients."""
    case = LOOPS["twenty-four layers"]
    _, planned = in_levels(traced(case), (2, 3, 4))

    def shapes(closed: Any) -> set[tuple[int, ...]]:
        jaxpr = getattr(closed, "jaxpr", closed)
        inner = [shapes(eqn.params["jaxpr"]) for eqn in scans(jaxpr)]
        return {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars}.union(*inner)

    weights = {s for s in shapes(planned) if s[-2:] == (WIDTH, 2 * WIDTH) and len(s) > 2}
    assert weights == {(24, WIDTH, 2 * WIDTH), (1, WIDTH, 2 * WIDTH)}


def deep(depth: int) -> tuple[Any, tuple[Any, ...]]:
    """A step of that many layers, and its arguments; carries are far larger than the rest."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (lax.scan(lambda x, w: (jnp.tanh(x * w), None), x, params)[0] ** 2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    return step, (jax.ShapeDtypeStruct((depth,), jnp.float32), jax.ShapeDtypeStruct((SIZE,), jnp.float32))


SIZE = 2**14
CARRY_NBYTES = 4 * SIZE


def carries_at_the_peak(depth: int, levels: tuple[int, ...]) -> float:
    """The compiled temporaries of a deep step whose loop keeps nothing but carries, in carries."""
    step, args = deep(depth)
    found = trace(jax.jit(step, donate_argnums=0), args, {})
    planned = emitted(found.in_form(of_levels(levels)) if levels else found, [])
    options = jaxremat.compiler_options("cpu")
    compiled = jax.jit(jex.jaxpr_as_fun(planned)).lower(*args).compile(compiler_options=options)
    return MemoryStats.of(compiled).temporaries_nbytes / CARRY_NBYTES


def test_the_compiled_peak_grows_as_the_levels_say() -> None:
    """Carries by level, and a few for what an iteration makes, at any depth."""
    for depth in (16, 81):
        for levels in choices(depth):
            assert carries(depth, levels) <= carries_at_the_peak(depth, levels) <= carries(depth, levels) + 6
    logarithm = [carries_at_the_peak(4**d, (4,) * d) for d in (2, 3, 4)]
    assert np.allclose(np.diff(logarithm), 4, atol=0.1)


def check_levels(budgets: Sequence[int], depths: Sequence[int]) -> list[jaxremat.Plan]:
    """67 layers, a prime number, within so many carries, in so many levels."""
    step, args = deep(67)
    plans = [jaxremat.plan(step, *args, budget=n * CARRY_NBYTES, donate_argnums=0) for n in budgets]
    assert [len(plan.form.settings(LOOP)[0]) for plan in plans] == depths
    assert all((plan.compiled_peak_nbytes or np.inf) <= plan.budget_nbytes for plan in plans)
    return plans


def test_deep_loops_in_levels() -> None:
    """The plan says which levels, and is followed after it was saved."""
    (plan,) = check_levels([20], [3])
    loaded = jaxremat.Plan.from_json(plan.to_json())
    assert loaded == plan
    step, args = deep(67)
    compiled = jaxremat.optimize(plan=loaded, donate_argnums=0)(step).compile(*args)
    assert MemoryStats.of(compiled).peak_nbytes == plan.compiled_peak_nbytes


@pytest.mark.slow
def test_smaller_budgets_have_deeper_loops() -> None:
    """Each form inside its own budget, at more time."""
    plain, two, three = (plan.overhead for plan in check_levels([76, 28, 20], [0, 2, 3]))
    assert plain < two < three


@pytest.mark.jax_0_10("the forms that 28 carries ask for")
def test_forms_are_made_when_they_are_needed() -> None:
    step, args = deep(64)
    program = Program(
        step, donate_argnums=(0,), compiler_options=tuple(jaxremat.compiler_options("cpu").items())
    )
    for budget, forms in ((74, 0), (28, 1)):
        problem = Problem(program, args, {}, CPU, "roofline")
        make_plan(problem, Request(budget * CARRY_NBYTES))
        assert len(problem._in_form) == forms


def test_without_compiling() -> None:
    case = LOOPS["layers"]
    args = case.make_args()
    stats = MemoryStats.of(compile_plain(case, args))
    budget = stats.base_nbytes + int(0.5 * stats.temporaries_nbytes)
    step = jaxremat.optimize(
        budget, planning=jaxremat.Planning(verify=False), donate_argnums=case.donate_argnums
    )(case.step)
    plan = step.plan(*args)
    assert plan.baseline_peak_nbytes == pytest.approx(stats.peak_nbytes, rel=0.25)
    assert MemoryStats.of(step.compile(*args)).peak_nbytes <= 1.2 * budget
    with pytest.raises(InfeasibleBudgetError):
        jaxremat.plan(
            case.step, *args, budget=stats.base_nbytes + 1000, planning=jaxremat.Planning(verify=False)
        )


def test_effects_stay_in_their_loop() -> None:
    """A loop that prints is left as it is."""

    def step(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            jax.debug.print("{}", x.sum())
            return jnp.sin(x @ w), None

        return jax.grad(lambda p: lax.scan(body, x, p)[0].sum())(params)

    found = trace(jax.jit(step), (np.ones((3, 8, 8)), np.ones((4, 8))), {})
    assert found.loops == ()


DEEP, NARROW = 6, 8


def critic(weights: Any, entry: Any, x: Any, y: Any) -> Any:
    """As a critic and its generator: an update, and another of other parameters through what that gave."""

    def loss(weights: Any, entry: Any, x: Any) -> jax.Array:
        out, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ entry, weights)
        return jnp.mean(out**2)

    first, gradient = jax.value_and_grad(loss)(weights, entry, x)
    weights = weights - 0.5 * gradient
    second, gradient = jax.value_and_grad(loss, 1)(weights, entry, y)
    return weights, entry - 0.5 * gradient, first, second


@pytest.mark.parametrize("materialises_eagerly", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("first", [(6,), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("second", [(), (2, 2)], ids=str)
def test_a_loop_reads_what_another_has_written(
    first: tuple[int, ...], second: tuple[int, ...], materialises_eagerly: bool
) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((DEEP, NARROW, NARROW), (NARROW, NARROW), (16, NARROW), (16, NARROW))
    args = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    traced = trace(jax.jit(critic, donate_argnums=(0, 1)), args, {}).in_form(form := of_levels(first, second))
    assert traced.form == form and traced.over
    device = detect(jax.devices()[0])
    graph = replace(lower(traced, device, base_nbytes=0), platform="cpu" if materialises_eagerly else "gpu")
    schedule = SaveAll().solve(graph, None, time_limit=1.0).schedule
    found = evaluate(emit(traced, graph, schedule), args)
    assert_close(critic(*args), found, rtol=1e-4, atol=1e-5)
