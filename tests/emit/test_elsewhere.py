"""Steps whose values are in host memory meanwhile: equal results, and copies that stand where they should."""

import functools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import descent
from comparing import assert_close
from jax.extend.core import jaxpr_as_fun

import jaxremat
from jaxremat import Graph, JaxrematWarning, Plan, PlanMismatchError, Solution, close_over_dependencies
from jaxremat._compiler._compiled_step import host_traffic
from jaxremat._compiler._devices import detect
from jaxremat._compiler._hlo import Module, parse, transfer
from jaxremat._compiler._program import Program
from jaxremat._emit._emit import FENCES, emit
from jaxremat._model._device_specs import DEVICES
from jaxremat._model._host_copies import AT_ONCE, HostMemory
from jaxremat._model._stages import cuttings
from jaxremat._plan._baseline import measure_baseline
from jaxremat._plan._problem import Problem
from jaxremat._plan._verify import make_plan_of


def matrices(rows: int, width: int, layers: int, *, biases: bool = False) -> Any:
    sizes = ((width, 4 * width), (4 * width, width), *([(4 * width,)] if biases else []))
    layer = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes)
    return [layer] * layers, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def layers(rows: int, width: int, count: int) -> Any:
    up, down = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((count, width, 4 * width), (count, 4 * width, width))
    )
    return (up, down), jax.ShapeDtypeStruct((rows, width), jnp.float32)


def images(batch: int, size: int, channels: int, layers: int) -> Any:
    kernel = jax.ShapeDtypeStruct((3, 3, channels, channels), jnp.float32)
    return [kernel] * layers, jax.ShapeDtypeStruct((batch, size, size, channels), jnp.float32)


def squares(width: int, layers: int) -> Any:
    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return [(square,) * 3] * layers, square


SMALL = {
    "matrices": matrices(1024, 256, 3),
    "images": images(8, 64, 32, 5),
    "branches": squares(1024, 4),
    "biases": matrices(1024, 256, 3, biases=True),
    "loop": layers(1024, 256, 4),
    "reversed loop": layers(1024, 256, 4),
    "loop in a loop": layers(2048, 256, 4),
}
"""Arguments for this machine."""

LARGE = {
    "matrices": matrices(4096, 4096, 5),
    "images": images(8, 64, 2048, 5),
    "branches": squares(4096, 5),
    "biases": matrices(4096, 4096, 5, biases=True),
    "loop": layers(16384, 4096, 8),
    "loop in a loop": layers(32768, 4096, 8),
}
"""Arguments of which products take about as long as copies of their results to the host, for a GPU."""


@descent
def mlp(weights: Any, x: Any) -> Any:
    """One SGD step of an unrolled network with activations that are made of another value in memory."""

    h = x
    for up, down, *bias in weights:
        h = h + jax.nn.gelu(sum(bias, h @ up)) @ down
    return jnp.mean(h**2)


@descent
def conv(weights: Any, x: Any) -> Any:
    """The same of images."""

    h = x
    for w in weights:
        h = jnp.tanh(
            jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return jnp.mean(h**2)


@descent
def branches(weights: Any, x: Any) -> Any:
    """The same of layers that add up three branches each, so that a stage reads many values."""

    h = x
    for layer in weights:
        h = h + sum(jnp.tanh(h @ w) for w in layer)
    return jnp.mean(h**2)


@descent
def scanned(weights: Any, x: Any, reverse: bool = False) -> Any:
    """The first network with its layers in a scan."""

    def layer(h: jax.Array, w: Any) -> Any:
        h = h + jax.nn.gelu(h @ w[0]) @ w[1]
        return h, jnp.mean(h)

    h, means = jax.lax.scan(layer, x, weights, reverse=reverse)
    return jnp.mean(h**2) + jnp.sum(jnp.sin(means))


def accumulated(weights: Any, x: Any) -> Any:
    """The same with gradients of two halves added up."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.sin(h @ w[0]) @ w[1], None), x, weights)
        return jnp.mean(h**2)

    def half(sums: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(jnp.add, sums, gradients), value

    sums, values = jax.lax.scan(half, jax.tree.map(jnp.zeros_like, weights), x.reshape(2, -1, x.shape[1]))
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, sums), jnp.mean(values)


STEPS = {
    "matrices": mlp,
    "images": conv,
    "branches": branches,
    "biases": mlp,
    "loop": scanned,
    "reversed loop": functools.partial(scanned, reverse=True),
    "loop in a loop": accumulated,
}


class Everything:
    """Saves everything, and has as much as possible in host memory meanwhile; recomputes what `again` says."""

    def __init__(self, again: bool = False) -> None:
        self.again = again

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        away = sorted(graph.away.alone)
        saved = [v for v in graph.residuals if not self.again or v in away[::2] or v not in away]
        return Solution(close_over_dependencies(graph, saved, (), away), solver="everything")


@functools.cache
def planned(kind: str, again: bool = False, target: str = "h100", stages: int = 0) -> tuple[Plan, Module]:
    """The plan of that schedule for a GPU, and what its compiler makes of it."""
    decorated = jaxremat.optimize("min", donate_argnums=0, target=target, offload=True)(STEPS[kind])
    problem, request = decorated._prepare(LARGE[kind], {})
    baseline = measure_baseline(problem, plain=False, tagged=True)
    graph = cuttings(baseline.graphs.plain)[stages]
    solution = Everything(again).solve(graph, None, time_limit=1.0)
    found = make_plan_of(problem, request, graph, solution, baseline)
    assert found.compiled is not None
    return found.plan, parse(found.compiled.executable.as_text() or "")


def values_of(shapes: Any) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [0.05 * jax.random.normal(key, s.shape, s.dtype) for key, s in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


@pytest.mark.parametrize(
    ("kind", "again", "fence"),
    [
        (kind, again, FENCES[(number + again) % len(FENCES)])
        for number, kind in enumerate(STEPS)
        for again in (False, True)
    ],
)
def test_results_are_those_of_the_step(kind: str, again: bool, fence: str) -> None:
    """On the CPU, where a copy to the host is none."""
    step, shapes = STEPS[kind], SMALL[kind]
    program = Program(fn=step)
    problem = Problem(
        program, shapes, {}, DEVICES["h100"], "roofline", jax.devices()[0], host=HostMemory(1e13)
    )
    graph = replace(problem.estimated, platform="gpu")
    schedule = Everything(again).solve(graph, None, time_limit=1.0).schedule
    assert schedule.offloaded
    jaxpr = emit(problem.traced, graph, schedule, fence)
    in_loops = sum(
        graph.values[copy.value].length > 0 for copy in schedule.offloaded
    )  # the first row comes before
    assert str(jaxpr).count("= device_put[") == 2 * len(schedule.offloaded) + in_loops
    assert (in_loops > 0) == ("loop" in kind)
    args = values_of(shapes)
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    found = jax.jit(jaxpr_as_fun(jaxpr))(*jax.tree.leaves(args))
    assert_close(wanted, found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("again", [False, True], ids=["all saved", "some recomputed"])
@pytest.mark.parametrize("kind", ["matrices", "images"])
def test_the_compiler_copies_what_the_plan_says(kind: str, again: bool) -> None:
    plan, module = planned(kind, again)
    assert plan.offloaded
    instructions = module.computations[module.entry].instructions
    copies = [copy for i in instructions if (copy := transfer(module, i))]
    there, back = ([copy for copy in copies if copy.back == which] for which in (False, True))
    assert len(there) == len(back) == len(plan.offloaded)
    traffic = host_traffic(module, DEVICES["h100"])
    assert traffic.sent_nbytes == traffic.fetched_nbytes == plan.offloaded_nbytes
    assert plan.memory is not None and 0 < plan.memory.host_nbytes <= plan.offloaded_nbytes


@pytest.mark.parametrize("kind", [pytest.param("loop", marks=pytest.mark.slow), "loop in a loop"])
def test_loops_copy_a_slice_in_each_iteration(kind: str) -> None:
    """Each loop's copies begin and are over within it; what is on the way is begun in the iteration before."""
    plan, module = planned(kind)
    assert len(plan.offloaded) == 2
    traffic = host_traffic(module, DEVICES["h100"])
    layers, halves = 8, 2 if kind == "loop in a loop" else 1
    assert traffic.sent_nbytes == halves * plan.offloaded_nbytes
    assert traffic.fetched_nbytes == halves * plan.offloaded_nbytes * (layers + 1) // layers
    assert plan.memory is not None and plan.memory.host_nbytes == plan.offloaded_nbytes
    assert plan.compiled_peak_nbytes is not None
    less = plan.baseline_peak_nbytes - plan.compiled_peak_nbytes
    assert less > (layers - 2) / layers * plan.offloaded_nbytes
    assert 0.95 < plan.predicted_peak_nbytes / plan.compiled_peak_nbytes < 1.15


def test_copies_back_begin_in_their_stages() -> None:
    """Before its stage's barrier a copy has not begun: what passes the barrier is what it reads."""
    plan, module = planned("matrices")
    instructions = module.computations[module.entry].instructions
    place = {i.name: n for n, i in enumerate(instructions)}
    barriers = {
        int(found[1]): n
        for n, i in enumerate(instructions)
        if i.opcode == "tuple" and (found := re.search(r"barrier_(\d+)", i.op_name))
    }
    begun = sorted(place[i.name] for i in instructions if (copy := transfer(module, i)) and copy.back)
    assert len(barriers) >= len({copy.begun for copy in plan.offloaded})
    assert all(n > min(barriers.values()) for n in begun)
    left = [place[f"{i.operands[0]}"] for i in instructions if i.opcode == "copy-done" and i.shapes[0].space]
    assert len(left) == len(begun) and max(left) < begun[-1]  # all have left before the last comes back


def test_no_kernel_waits_for_copies_that_have_time() -> None:
    """Were more copies back under way than the compiler has at once, it would wait for each to begin the next."""
    plan, module = planned("branches", target="gh200", stages=-1)
    back = Counter(copy.begun for copy in plan.offloaded)
    assert sum(back.values()) > 2 * AT_ONCE and max(back.values()) == AT_ONCE
    assert any(copy.over > copy.begun for copy in plan.offloaded)
    traffic = host_traffic(module, DEVICES["gh200"])  # it waits for the last that leave
    assert traffic.wait_seconds < 0.25 * traffic.fetched_nbytes / DEVICES["gh200"].host_link


def test_gradients_of_biases_are_done_with_those_of_their_matrices() -> None:
    """Beside copies the compiler puts off what nobody waits for, and keeps what it is made of until then."""
    _, module = planned("biases")
    instructions = module.computations[module.entry].instructions
    made = [n for n, i in enumerate(instructions) if i.opcode == "fusion" and (4 * 4096,) in shapes_of(i)]
    barriers = [n for n, i in enumerate(instructions) if i.opcode == "tuple" and "barrier_" in i.op_name]
    assert len(made) >= 5
    assert sum(n < barriers[-1] for n in made) >= 0.6 * len(made)


def shapes_of(instruction: Any) -> list[tuple[int, ...]]:
    return [tuple(shape.dims) for shape in instruction.shapes]


def test_the_device_has_less_in_memory() -> None:
    plan, _ = planned("matrices")
    assert plan.compiled_peak_nbytes is not None
    saved = plan.baseline_peak_nbytes - plan.compiled_peak_nbytes
    assert saved > 0.2 * plan.offloaded_nbytes
    assert abs(plan.predicted_peak_nbytes - plan.compiled_peak_nbytes) < 0.1 * plan.baseline_peak_nbytes


def test_the_planner_chooses_what_is_cheapest() -> None:
    """With host memory a plan is never slower by the model, and is faster here; its report says what went."""
    plain = jaxremat.memory(mlp, *LARGE["matrices"], donate_argnums=0, target="h100")
    budget = plain.peak_nbytes - plain.temporaries_nbytes // 3
    without, with_it = (
        jaxremat.plan(
            mlp,
            *LARGE["matrices"],
            budget=budget,
            donate_argnums=0,
            target="h100",
            offload=o,
        )
        for o in (False, True)
    )
    assert not without.offloaded
    assert with_it.peak_nbytes <= budget
    assert with_it.offloaded
    for shown in (str(with_it), str(with_it.report()), with_it.report().html()):
        assert " values to host memory; kernels wait " in " ".join(shown.split())
    assert with_it.overhead <= without.overhead + 1e-3
    again = Plan.from_json(with_it.to_json())
    assert again == with_it


def hinted(weights: Any, x: Any, count: int = 1) -> Any:
    """The first network, with a hint on what its first products make."""

    def loss(weights: Any) -> jax.Array:
        h = x
        for i, (up, down) in enumerate(weights):
            made = jax.nn.gelu(jaxremat.hint(h @ up, "offload", name="wide") if i < count else h @ up)
            h = h + made @ down
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def with_hints(step: Any, args: Any, **options: Any) -> Plan:
    return jaxremat.optimize("60GB", donate_argnums=0, target="h100", **options)(step).plan(*args)


def test_a_hint_puts_a_value_there_though_all_would_fit() -> None:
    plan = with_hints(functools.partial(hinted, count=2), LARGE["matrices"], offload="auto")
    there = [a for a in plan.actions if a.action == "offload"]
    assert len(there) == len(plan.offloaded) == 2
    assert all('hint(..., "offload", name="wide")' in a.pin for a in there)
    assert "(pinned)" in str(plan)


def test_a_pin_from_outside_does_and_names_what_stays() -> None:
    """The first products leave; the last is wanted again before it is gone."""
    with pytest.warns(
        JaxrematWarning, match=r'pins.*"offload": \d of its values are not offloaded, .*no time'
    ):
        plan = with_hints(mlp, LARGE["matrices"], offload=True, pins={"dot_general": "offload"})
    assert plan.offloaded
    assert all(a.pin for a in plan.actions if a.action == "offload")


def test_a_hint_that_cannot_be_followed_says_so() -> None:
    with pytest.warns(JaxrematWarning, match=r'hint.*"offload".*only with `offload=True`'):
        assert not with_hints(hinted, LARGE["matrices"]).offloaded
    with pytest.warns(JaxrematWarning, match=r"a copy takes longer than the 5 ms"):
        assert not with_hints(hinted, matrices(8192, 4096, 2), offload=True).offloaded


def test_a_plan_that_was_kept_is_followed() -> None:
    plan, _ = planned("matrices")
    step = jaxremat.optimize(plan=Plan.from_json(plan.to_json()), donate_argnums=0, target="h100")(mlp)
    assert step.plan(*LARGE["matrices"]).offloaded == plan.offloaded
    assert step.plan(*LARGE["matrices"]).compiled_peak_nbytes == plan.compiled_peak_nbytes


def test_a_device_without_that_memory_refuses_the_plan() -> None:
    plan, _ = planned("matrices")
    with pytest.raises(PlanMismatchError, match="no memory besides"):
        jaxremat.optimize(plan=plan, donate_argnums=0)(mlp).plan(*LARGE["matrices"])


def test_a_cpu_plans_without() -> None:
    assert detect(jax.devices()[0]).platform == "cpu"
    plain = jaxremat.memory(mlp, *LARGE["matrices"], donate_argnums=0)
    budget = plain.peak_nbytes - plain.temporaries_nbytes // 3
    with pytest.warns(JaxrematWarning, match="no memory besides"):
        plan = jaxremat.plan(
            mlp,
            *LARGE["matrices"],
            budget=budget,
            donate_argnums=0,
            offload=True,
        )
    assert not plan.offloaded and plan.peak_nbytes <= budget


def test_auto_says_nothing_where_there_is_no_such_memory(recwarn: pytest.WarningsRecorder) -> None:
    args = SMALL["matrices"]
    plain = jaxremat.memory(mlp, *args, donate_argnums=0)
    plan = jaxremat.plan(
        mlp, *args, budget=plain.peak_nbytes, donate_argnums=0, offload="auto"
    )  # fmt: skip
    assert not plan.offloaded
    assert not [w for w in recwarn if issubclass(w.category, JaxrematWarning)]


def test_the_host_has_a_budget_of_its_own() -> None:
    plain = jaxremat.memory(mlp, *LARGE["matrices"], donate_argnums=0, target="h100")
    budget, room = plain.peak_nbytes - plain.temporaries_nbytes // 3, 2**31  # two values
    plan = jaxremat.plan(
        mlp, *LARGE["matrices"], budget=budget, donate_argnums=0, target="h100", offload=room,
    )  # fmt: skip
    assert plan.offloaded_nbytes <= room


def test_a_refusal_says_that_the_hosts_budget_leaves_no_room_for_values() -> None:
    options: Any = {"budget": "100MiB", "donate_argnums": 0, "target": "h100"}
    for room, said in (("64MiB", True), (True, False)):
        with pytest.raises(jaxremat.InfeasibleBudgetError) as refused:
            jaxremat.plan(mlp, *LARGE["matrices"], offload=room, **options)
        assert ("`offload` leaves 64.0 MiB of host memory for residuals" in str(refused.value)) == said


@pytest.mark.parametrize(
    "options, said",
    [
        ({"offload": "always"}, "`offload='always'`"),
        ({"offload": 0}, "`offload=0`"),
        ({"host_budget": "1GiB"}, "Write `optimize(..., offload='1GiB')`"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((jaxremat.ArgumentError, jaxremat.BudgetError), match=re.escape(said)):
        jaxremat.optimize("1GiB", **options)
