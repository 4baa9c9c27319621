"""Rows in chunks: which work falls apart into them, that the results are the same, that planned steps need less."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chains import descent
from evaluation import evaluated
from forms import of_chunks
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxremat
from jaxremat._compiler._program import Program, device_count
from jaxremat._compiler._single_equation import workspaces
from jaxremat._program._compat import shaped
from jaxremat._program._primitives import is_in_chunks
from jaxremat._rewrite._flat_program import FlatProgram
from jaxremat._rewrite._kernel_choice import equivalence
from jaxremat._rewrite._program_readers import Readers
from jaxremat._rewrite._region_loops import USUAL
from jaxremat._rewrite._row_chunks import chunked
from jaxremat._rewrite._row_regions import regions
from jaxremat._rewrite._trace import Traced, trace

WORDS, WIDE, BATCH, LENGTH, LAYERS = 4000, 32, 8, 32, 2


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def one_hot(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(labels, WORDS), 0.1)).mean()


def masked(logits: Any, labels: Any) -> Any:
    """Of the tokens that are no padding, and with a loss of the normaliser."""
    mask = labels > 10
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    losses += 1e-4 * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(mask, losses, 0).sum() / mask.sum()


def flattened(logits: Any, labels: Any) -> Any:
    logits, labels = logits.reshape(-1, WORDS), labels.reshape(-1)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1).mean()


def accuracy_too(logits: Any, labels: Any) -> Any:
    right = (logits.argmax(-1) == labels).mean()
    return cross_entropy(logits, labels) + jax.lax.stop_gradient(right)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "cross entropy": cross_entropy,
    "one hot": one_hot,
    "masked": masked,
    "flattened": flattened,
    "accuracy": accuracy_too,
}


def network(params: Any, x: Any) -> Any:
    h = params["words"][x]
    for w, u in zip(params["in"], params["out"], strict=True):
        h = h + jax.nn.gelu(h @ w) @ u
    return h


def step_of(loss: Callable[[Any, Any], Any], dtype: Any = jnp.float32, *, tied: bool = True) -> Any:
    @descent
    def step(params: Any, x: Any, y: Any) -> Any:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        head = params["words"].T if tied else params["head"]
        return loss((network(params, x) @ head).astype(jnp.float32), y)

    return step


def arguments() -> tuple[Any, Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 3 + 2 * LAYERS))
    params = {
        "words": jax.random.normal(next(keys), (WORDS, WIDE)),
        "in": [jax.random.normal(next(keys), (WIDE, 2 * WIDE)) / 6 for _ in range(LAYERS)],
        "out": [jax.random.normal(next(keys), (2 * WIDE, WIDE)) / 9 for _ in range(LAYERS)],
        "head": jax.random.normal(next(keys), (WIDE, WORDS)),
    }
    x, y = jax.random.randint(next(keys), (2, BATCH, LENGTH), 0, WORDS)
    return params, x, y


def close(first: Any, second: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        scale = float(jnp.abs(a).max()) or 1.0
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)


def in_chunks(
    step: Any, args: Any, count: int, tolerance: float = 1e-5, at: int = 0
) -> tuple[Traced, FlatProgram]:
    """The step, and the same with one of its regions in so many chunks, which gives what it gave."""
    traced = trace(jax.jit(step), args, {})
    flat, leaves = FlatProgram.of(traced.flat), jax.tree.leaves(args)
    made = chunked(flat, [(regions(Readers(flat))[at], count)])
    want, got = (evaluated(jex.jaxpr_as_fun(each))(*leaves) for each in (traced.flat, made.closed))
    close(want, got, tolerance)
    return traced, made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_heads_fall_apart_into_rows(loss: str, tied: bool) -> None:
    traced, made = in_chunks(step_of(LOSSES[loss], tied=tied), arguments(), 4)
    region = traced.sites.regions[0]
    assert region.choices == (2, 4, 8)
    assert region.inner_nbytes >= 4 * BATCH * LENGTH * WORDS * 2  # logits and their gradient at least
    cut, origin = made.closed, made.origin
    (call,) = (eqn for eqn in cut.jaxpr.eqns if is_in_chunks(eqn))
    jex.check_jaxpr(cut.jaxpr)
    assert len(origin) == len(cut.jaxpr.eqns)
    largest = max(v.aval.size for eqn in cut.jaxpr.eqns for v in eqn.outvars if v not in call.outvars)
    assert largest < BATCH * LENGTH * WORDS


def test_sums_over_chunks_lose_nothing_in_short_numbers() -> None:
    cut = in_chunks(step_of(cross_entropy, jnp.bfloat16), arguments(), 8, 1e-2)[1].closed
    (call,) = (eqn for eqn in cut.jaxpr.eqns if is_in_chunks(eqn))
    outside = [v.aval.size for eqn in cut.jaxpr.eqns if eqn is not call for v in eqn.outvars]
    assert max(outside) < BATCH * LENGTH * WORDS  # also of the gradient that is made shorter
    assert max(v.aval.size for v in call.outvars) < BATCH * LENGTH * WORDS


def test_a_matrix_that_a_split_into_one_leaves_whole_is_read_in_chunks() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        def whole(params: Any) -> Any:
            (head,) = jnp.split(params["head"], 1, axis=1)
            return cross_entropy(network(params, x) @ head, y)

        return jax.value_and_grad(whole)(params)

    in_chunks(step, arguments(), 4)


@pytest.mark.parametrize("chunks", [4, 3])
def test_what_any_or_all_rows_are_leaves_no_rows(chunks: int) -> None:
    """Which words some token or every token finds likely: neither is kept for all tokens, nor read by the gradient."""

    def step(params: Any, x: Any, y: Any) -> Any:
        def whole(params: Any) -> Any:
            logits = network(params, x) @ params["head"]
            above = jax.lax.stop_gradient(logits) > 0
            return cross_entropy(logits, y), (above.any((0, 1)), above.all((0, 1)), above.any(2))

        return jax.value_and_grad(whole, has_aux=True)(params)

    traced, made = in_chunks(step, arguments(), chunks)
    assert max(v.aval.size for eqn in made.closed.jaxpr.eqns for v in eqn.outvars) < BATCH * LENGTH * WORDS
    assert equivalence(traced.flat).difference(made.closed) is None


def normalised_by_all(logits: Any, labels: Any) -> Any:
    """Every token's loss weighs as the mean of all says: no token's gradient is known before all are read."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * jnp.exp(losses - losses.mean())).mean()


def test_what_waits_for_all_rows_is_done_in_two_loops() -> None:
    found = trace(jax.jit(step_of(normalised_by_all)), arguments(), {}).sites.regions
    assert [(region.whole, len(region.loops)) for region in found] == [(False, 2), (True, 2)]


def test_a_network_of_many_layers_alike_is_done_in_microbatches_or_not_at_all() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w in params:
                h = jax.nn.gelu(h @ w)
            return (h**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    spec = jax.ShapeDtypeStruct
    args = [spec((256, 256), jnp.float32)] * 6, spec((4096, 256), jnp.float32)
    assert [region.whole for region in trace(jax.jit(step), args, {}).sites.regions] == [True]


def test_each_layer_of_an_unusual_attention_is_done_in_chunks_of_its_queries() -> None:
    """Later layers work on the same rows, which would be too much for one region: they stay out of it."""
    length, heads, width, layers = 256, 2, 32, 4
    keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 1))
    sizes = dict.fromkeys(("query", "key", "value", "out", "up"), (width, width))
    params = [
        {name: jax.random.normal(next(keys), size) / width**0.5 for name, size in sizes.items()}
        for _ in range(layers)
    ]
    x = jax.random.normal(next(keys), (1, length, width))

    @descent
    def step(params: Any, x: Any) -> Any:
        for w in params:
            query, key = ((x @ w[name]).reshape(1, length, heads, 2, -1) for name in ("query", "key"))
            weights = jax.nn.softmax(jnp.einsum("bqhtd,bkhtd->bhtqk", query, key))
            value = (x @ w["value"]).reshape(1, length, heads, -1)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights[:, :, 0] - 0.5 * weights[:, :, 1], value)
            x = x + mixed.reshape(x.shape) @ w["out"]
            x = x + jnp.tanh(x @ w["up"])
        return (x**2).mean()

    traced, _ = in_chunks(step, (params, x), 8)
    assert [region.rows for region in traced.sites.regions] == [length] * layers


@pytest.mark.parametrize("vectors", [False, True])
def test_the_edges_of_a_graph_network_with_forces_are_done_in_chunks(vectors: bool) -> None:
    """Forces are a gradient that is differentiated: of three layers ten loops, each of which waits for all edges.

    Components of vectors are independent of each other, too, and need fewer loops, but keep far less.
    """
    atoms, width, edges, layers = 32, 32, 8192, 3
    keys = iter(jax.random.split(jax.random.key(0), 3 * layers + 2))
    params = [
        [jax.random.normal(next(keys), (width, width)) / width**0.5 for _ in range(3)] for _ in range(layers)
    ]
    position, (source, target) = (
        jax.random.normal(next(keys), (atoms, 3)),
        jax.random.randint(next(keys), (2, edges), 0, atoms),
    )

    def energy(params: Any, position: Any) -> Any:
        offset = position[source] - position[target]
        distance = jnp.sqrt((offset**2).sum(-1) + 1e-3)
        radial = jnp.exp(-((distance[:, None] - jnp.linspace(0.0, 4.0, width)) ** 2))
        h = jnp.ones((atoms, width))
        for inner, outer, mix in params:
            messages = h[source] * jnp.tanh(jnp.tanh(radial @ inner) @ outer)
            h = h + jnp.tanh(jax.ops.segment_sum(messages, target, atoms) / edges * atoms @ mix)
        if not vectors:
            return h.sum()
        direction = offset / distance[:, None]
        sums = jax.ops.segment_sum((h[source] * radial)[..., None] * direction[:, None], target, atoms)
        return h.sum() + (sums**2).sum() / edges

    def step(params: Any, position: Any) -> Any:
        def loss(params: Any) -> Any:
            return (jax.grad(energy, argnums=1)(params, position) ** 2).sum()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    found = trace(jax.jit(step), (params, position), {}).sites.regions
    assert [region.rows for region in found if region.overlaps] == ([edges] if vectors else [])
    traced, made = in_chunks(step, (params, position), 8, at=-1)
    assert len(traced.sites.regions[-1].loops) > USUAL.stages
    assert (
        sum(shaped(v).size >= edges * width for eqn in made.eqns for v in eqn.outvars) < 8
    )  # of more than a hundred


def test_functions_that_are_differentiated_later_have_none() -> None:
    params, x, y = arguments()
    held = jaxremat.checkpoint(lambda p, x: cross_entropy(network(p, x) @ p["words"].T, y), "8MiB")
    expected = jax.grad(lambda p: cross_entropy(network(p, x) @ p["words"].T, y))(params)
    close(expected, jax.grad(held)(params, x), 1e-5)


@pytest.mark.parametrize("target", [None, pytest.param("h100", marks=pytest.mark.slow)])
def test_a_step_fits_into_less_than_its_logits(target: str | None, tmp_path: Any) -> None:
    step, args = step_of(cross_entropy), arguments()
    plain = jaxremat.memory(step, *args, target=target)
    logits = 4 * BATCH * LENGTH * WORDS
    budget = plain.peak_nbytes - plain.temporaries_nbytes + logits
    planned = jaxremat.optimize(budget, target=target)(step)
    plan = planned.plan(*args)
    assert plan.compiled_peak_nbytes is not None
    assert plan.compiled_peak_nbytes <= budget
    (rows,) = plan.loops
    assert rows.rows
    assert "chunks" in str(plan)
    plan.save(tmp_path / "plan.json")
    again = jaxremat.Plan.load(tmp_path / "plan.json")
    assert again == plan
    if target is None:
        applied = jaxremat.optimize(plan=again)(step)
        close(jax.jit(step)(*args), planned(*args), 1e-5)
        close(jax.jit(step)(*args), applied(*args), 1e-5)


def test_the_least_memory_is_that_of_small_chunks() -> None:
    """And predictions know what these need."""
    plan = jaxremat.plan(step_of(cross_entropy), *arguments(), budget="min", donate_argnums=0)
    (rows,) = plan.loops
    assert rows.levels == (8,)
    assert plan.compiled_peak_nbytes is not None and plan.memory is not None
    assert plan.memory.temporaries_nbytes < 4 * BATCH * LENGTH * WORDS
    first, base = plan.rounds[0], plan.memory.base_nbytes
    assert (first.predicted_peak_nbytes - base) / (first.compiled_peak_nbytes - base) == pytest.approx(
        1, abs=0.1
    )


def test_what_the_user_decides_about_is_not_in_chunks() -> None:
    def loss(logits: Any, labels: Any) -> Any:
        return cross_entropy(jaxremat.hint(logits, "save"), labels)

    options: Any = {"budget": "5MiB", "planning": jaxremat.Planning(solver=jaxremat.Greedy())}
    with pytest.raises(jaxremat.InfeasibleBudgetError):
        jaxremat.plan(step_of(loss), *arguments(), **options)
    with pytest.raises(jaxremat.InfeasibleBudgetError):
        jaxremat.plan(step_of(cross_entropy), *arguments(), pins={"dot_general": "save"}, **options)
    assert jaxremat.plan(step_of(cross_entropy), *arguments(), **options).loops


def test_arrays_on_several_devices_are_known() -> None:
    args = arguments()
    assert device_count(Program(step_of(cross_entropy)), args, {}) == 1
    several = NamedSharding(AbstractMesh((2,), ("data",)), PartitionSpec("data"))
    program = Program(step_of(cross_entropy), in_shardings=(None, several, several))
    assert device_count(program, args, {}) == 2


def chosen(layers: int, branch: Callable[[Any], Any]) -> Any:
    """Rows that so many choices, the same for all of them, may change."""

    @descent
    def step(params: Any, x: Any, flag: Any) -> Any:
        h = x @ params["in"]
        for _ in range(layers):
            h = jax.lax.cond(flag, branch, lambda h: h, jnp.sin(h))
        return jnp.mean((h @ params["out"]) ** 2)

    shapes = {"in": (WIDE, 16 * WIDE), "out": (16 * WIDE, WIDE)}
    params = {name: jnp.ones(shape) / WIDE for name, shape in shapes.items()}
    return step, (params, jnp.ones((BATCH * LENGTH, WIDE)), jnp.bool_(True))


def test_choices_without_contractions_are_none() -> None:
    step, args = chosen(USUAL.products + 1, jnp.tanh)
    assert in_chunks(step, args, 4)[0].sites.regions[0].rows == BATCH * LENGTH


def test_what_branches_keep_to_themselves_counts() -> None:
    def branch(h: Any) -> Any:
        for _ in range(3):
            h = jnp.sin(jnp.cos(h))
        return h

    few, many = (
        trace(jax.jit(step), args, {}).sites.regions[0].inner_nbytes
        for step, args in (chosen(1, jnp.sin), chosen(1, branch))
    )
    value = 4 * BATCH * LENGTH * 16 * WIDE
    assert many >= few + 10 * value  # five values of the forward pass, and as many factors at least


@pytest.mark.parametrize("count", [4, 8])
def test_a_head_has_two_chunks_of_logits_and_two_gradients_at_most(count: int) -> None:
    args = arguments()
    made = in_chunks(step_of(cross_entropy), args, count)[1].closed
    needs = jaxremat.memory(jex.jaxpr_as_fun(made), *jax.tree.leaves(args))
    logits, gradient = 4 * BATCH * LENGTH * WORDS // count, 4 * WORDS * WIDE
    # The other gradient is a result.
    assert needs.temporaries_nbytes < 2 * logits + 1.5 * gradient


def test_what_chunks_hold_inside_counts_however_small_their_operands() -> None:
    traced = trace(jax.jit(step_of(cross_entropy)), arguments(), {}).in_form(of_chunks(4))
    (call,) = (i for i, eqn in enumerate(traced.jaxpr.eqns) if is_in_chunks(eqn))
    found = workspaces(traced, Program(step_of(cross_entropy)), "cpu", above_nbytes=2**40)
    assert list(found) == [call]
    assert found[call] > 4 * BATCH * LENGTH * WORDS // 4  # a chunk of logits
