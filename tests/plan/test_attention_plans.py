"""Plans of steps with attention: within budgets that no recomputation reaches, and as the user allows."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attentions import BATCH, HEADS, Attending, assert_close, attending, masked

import jaxremat
from jaxremat import Graph, InfeasibleBudgetError
from jaxremat._compiler._devices import DEVICES
from jaxremat._lower._lower import lower
from jaxremat._model._variant import ATTENTION, Variant
from jaxremat._plan import _baseline
from jaxremat._plan._rules import PlainStep, variants
from jaxremat._rewrite._trace import Traced, trace

pytestmark = pytest.mark.usefixtures("few_compilations")
LENGTH, LAYERS = 192, 2


def case(scanned: bool) -> Attending:
    return attending(masked, LAYERS, scanned=scanned, length=LENGTH)


def tight(step: Any, *args: Any) -> int:
    """A budget with room for one and a half matrices of scores, of which one layer has more at once."""
    base = jaxremat.MemoryStats.of(jax.jit(step).lower(*args).compile()).base_nbytes
    return base + 3 * BATCH * HEADS * LENGTH * LENGTH * 4 // 2


@pytest.mark.parametrize(
    "scanned", [pytest.param(False, id="unrolled", marks=pytest.mark.slow), pytest.param(True, id="scanned")]
)
def test_a_budget_without_room_for_scores(scanned: bool, tmp_path: Path) -> None:
    step, args = case(scanned).step, case(scanned).args
    budget = tight(step, *args)
    recomputing = jaxremat.optimize(budget, allow=())(step)
    with pytest.raises(InfeasibleBudgetError):
        recomputing.plan(*args)
    optimized = jaxremat.optimize(budget)(step)
    plan = optimized.plan(*args)
    assert plan.peak_nbytes <= budget
    assert plan.form.settings(ATTENTION) == {0: (1,)}
    (said,) = (str(loop) for loop in plan.loops if loop.attention)
    assert "without its matrix of scores, in parts" in said
    assert (f"{LAYERS} times" in said) != scanned
    assert said in str(plan)
    wanted = jax.jit(step)(*args)
    assert_close(optimized(*args), wanted, 2e-5)

    file = tmp_path / "plan.json"
    plan.save(file)
    again = jaxremat.optimize(plan=jaxremat.Plan.load(file))(step)
    assert_close(again(*args), wanted, 2e-5)


def test_nothing_is_done_otherwise_where_there_is_room() -> None:
    step, args = case(False).step, case(False).args
    plan = jaxremat.plan(step, *args, budget="1GiB")
    assert not plan.form
    assert not plan.loops


def test_on_a_gpu_in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant is lowered once, also that of attention by itself, which is compiled to see what it takes."""
    step, args = case(False).step, case(False).args
    lowered: list[Variant] = []
    build = _baseline.build_graph

    def counted(traced: Traced, *args: Any) -> Graph:
        lowered.append(traced.form)
        return build(traced, *args)

    monkeypatch.setattr(_baseline, "build_graph", counted)
    plan = jaxremat.plan(step, *args, budget=tight(step, *args), target="h100")
    assert plan.form.settings(ATTENTION) == {0: (2,)}
    assert len(lowered) == len(set(lowered)) > 1
    assert "attention at attentions.py" in str(plan)
    assert "in kernels" in str(plan)
    library = 4 << 20  # what products of matrices need besides on such a device
    older = jaxremat.plan(step, *args, budget=tight(step, *args) + library, target="p100")
    assert older.form.settings(ATTENTION) == {0: (1,)}


def test_hints_decide() -> None:
    """Where the user says what is saved, attention stays as it is written."""

    def hinted(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jaxremat.hint(jnp.tanh(masked(q, k, v)), "save")

    made = attending(hinted, LAYERS, length=LENGTH)
    plan = jaxremat.plan(made.step, *made.args, budget="min")
    assert not plan.form.settings(ATTENTION)


def offered(accumulated: int) -> tuple[float, float]:
    """Of attention in a loop over layers, in a loop over microbatches where there are several: what it saves in
    seconds, and how long the step takes.
    """
    heads, dims, layers = 4, 64, 6

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            q, k, v = (jnp.reshape(h @ w[i], (*h.shape[:2], heads, dims)) for i in range(3))
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8)
            return h + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)

    def step(ws: jax.Array, batches: jax.Array) -> jax.Array:
        if accumulated == 1:
            return jax.grad(loss)(ws, batches[0])
        more = lambda total, x: (total + jax.grad(loss)(ws, x), None)  # noqa: E731
        return jax.lax.scan(more, jnp.zeros_like(ws), batches)[0]

    width = heads * dims
    ws = jax.ShapeDtypeStruct((layers, 3, width, width), jnp.float32)
    batches = jax.ShapeDtypeStruct((accumulated, 2, 256, width), jnp.float32)
    traced = trace(jax.jit(step), (ws, batches), {})
    graph = lower(traced, DEVICES["h100"], base_nbytes=0)
    inside = traced.regions_inside
    found = variants(PlainStep(traced, traced, graph, DEVICES["h100"], None, ("attention",), inside))
    in_kernels = Variant.of_rule(ATTENTION, {0: (2,)})
    assert in_kernels in found.exact()
    return -found.estimate(in_kernels).more_seconds, graph.step_seconds


def test_attention_in_a_loop_within_a_loop_is_offered_once_for_each_iteration_of_both() -> None:
    (once, step), (often, longer) = offered(1), offered(4)
    assert often == pytest.approx(4 * once, rel=0.02)
    assert often / longer == pytest.approx(once / step, rel=0.05)
