"""Steps that fall apart into microbatches give what they gave; those in which statistics cross the batch do not."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chains import descent
from comparing import assert_close
from evaluation import evaluated
from forms import of_chunks
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from random_steps import step_of
from test_chunks import close
from test_trace import runnable

import jaxremat
from jaxremat import ArgumentError
from jaxremat._program._primitives import inner_jaxprs
from jaxremat._rewrite import _row_regions
from jaxremat._rewrite._backward_equations import backward_equations
from jaxremat._rewrite._kernel_choice import equivalence
from jaxremat._rewrite._trace import Traced, trace

BATCH, LENGTH, WIDTH, WORDS, LAYERS = 8, 6, 16, 12, 4
Loss = Callable[..., Any]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of small arrays too."""
    monkeypatch.setattr(_row_regions, "LEAST_NBYTES", 1)


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(0.3 * np.random.default_rng(seed).normal(size=shape), dtype)


def weights(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).integers(0, WORDS, (BATCH, LENGTH)), jnp.int32)


def layers(params: Any, x: Any) -> Any:
    for up, down in zip(params[::2], params[1::2], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x**2)


def masked(params: Any, words: Any) -> Any:
    """The number of words that count is a sum over the batch, which every gradient is divided by; tied embeddings."""
    table, up, down = params
    counts = (words != 0).astype(jnp.float32)
    h = table[words]
    logits = (h + jax.nn.gelu(h @ up) @ down) @ table.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, words)
    of_normalisers = jnp.sum(counts * jax.nn.logsumexp(logits, -1) ** 2)
    return (jnp.sum(losses * counts) + 1e-2 * of_normalisers) / jnp.sum(counts)


def scanned(params: Any, words: Any) -> Any:
    table, *stacks = params

    def block(h: Any, layer: Any) -> Any:
        up, down, q, k, v = layer
        scores = jnp.einsum("btd,bsd->bts", h @ q, h @ k)
        allowed = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        h = h + jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(allowed, scores, -1e9)), h @ v)
        return h + jnp.tanh(h @ up) @ down, None

    h, _ = lax.scan(block, table[words], stacks)
    return optax.softmax_cross_entropy_with_integer_labels(h @ table.T, words).mean()


def normed(params: Any, x: Any) -> Any:
    """What `var` hands to the loop, and its body never reads, has rows behind the loop."""

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def block(x: Any, layer: Any) -> Any:
        up, down = layer
        return x + jnp.tanh(norm(x) @ up) @ down, None

    return jnp.mean(norm(lax.scan(block, x, params)[0]) ** 3)


def recurrent(params: Any, x: Any) -> Any:
    """All iterations share their weights, so that gradients are carried; the batch is no outermost dimension."""
    within, into = params

    def cell(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ within + x @ into)
        return h, jnp.sum(h**2, -1)

    h, squares = lax.scan(cell, jnp.zeros((BATCH, WIDTH)), jnp.swapaxes(x, 0, 1))
    return jnp.mean(squares) + jnp.mean(h)


def nested(params: Any, x: Any) -> Any:
    """A loop over layers, in which a loop over time runs."""

    def layer(x: Any, w: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh((h + x) @ w)
            return h, h

        _, out = lax.scan(cell, jnp.zeros((BATCH, WIDTH)), x)
        return out, None

    return jnp.mean(lax.scan(layer, jnp.swapaxes(x, 0, 1), params)[0] ** 2)


def chosen(params: Any, x: Any, count: Any) -> Any:
    """A term of the loss that only some steps have, about rows that a loop of so many iterations moves."""
    up, down = params
    moved = lax.fori_loop(0, count, lambda i, y: jnp.tanh(y + x * i), lax.stop_gradient(x))
    h, h_to = jnp.tanh(x @ up) @ down, jnp.tanh(moved)

    def term(h: Any) -> Any:
        return jnp.mean((jnp.tanh(h @ up) @ down - h_to) ** 2), h - moved

    more, h = lax.cond(count > 2, term, lambda h: (jnp.zeros(()), jnp.zeros_like(h)), h)
    return jnp.mean(h**2) + more


def dropped(params: Any, x: Any, key: Any) -> Any:
    up, down = params
    h = jnp.tanh(x @ up)
    h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0)
    return jnp.mean((h @ down) ** 2)


def convolved(params: Any, x: Any) -> Any:
    kernel, depthwise, out = params
    order = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=order)
    h = lax.conv_general_dilated(h, depthwise, (1, 1), "SAME", dimension_numbers=order, feature_group_count=8)
    own = (1, 2, 3)
    h = jax.nn.relu((h - h.mean(own, keepdims=True)) / jnp.sqrt(h.var(own, keepdims=True) + 1e-3))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean((h.mean((1, 2)) @ out) ** 2)


def filtered(params: Any, x: Any) -> Any:
    """Filters over time are made of positions by a network of their own, with as many products as examples have."""
    positions = jnp.linspace(0, 1, LENGTH)[:, None] * jnp.ones((1, WIDTH))
    for up, down, into, out in params:
        filters = jnp.sin(jnp.sin(positions @ into) @ out)
        spectrum = jnp.fft.rfft(x, 2 * LENGTH, axis=1) * jnp.fft.rfft(filters, 2 * LENGTH, axis=0)
        x = x + jnp.tanh(jnp.fft.irfft(spectrum, 2 * LENGTH, axis=1)[:, :LENGTH] @ up) @ down
    return jnp.mean(x**2)


def short(params: Any, x: Any) -> Any:
    h = x.astype(jnp.bfloat16)
    for w in params:
        h = h + jnp.tanh(h @ w.astype(jnp.bfloat16))
    return jnp.mean(h.astype(jnp.float32) ** 2)


@jax.custom_vjp
def flow(w: jax.Array, x: jax.Array) -> jax.Array:
    """Five steps of an ordinary differential equation, differentiated by its adjoint backward in time."""
    return lax.fori_loop(0, 5, lambda _, x: x + 0.1 * jnp.tanh(x @ w), x)


def _of_flow(w: jax.Array, end: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of the weights is a sum over the batch, scaled and subtracted in each iteration."""

    def back(carry: Any, _: None) -> Any:
        x, adjoint, total = carry
        speed, pull = jax.vjp(lambda w, x: jnp.tanh(x @ w), w, x)
        of_w, of_x = pull(-adjoint)
        return (x - 0.1 * speed, adjoint - 0.1 * of_x, total - 0.1 * of_w), None

    (_, adjoint, total), _ = lax.scan(back, (end, cotangent, jnp.zeros_like(w)), None, length=5)
    return total, adjoint


def _kept(w: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    end = flow(w, x)
    return end, (w, end)


flow.defvjp(_kept, lambda saved, cotangent: _of_flow(saved[0], saved[1], cotangent))


def integrated(params: Any, x: Any) -> Any:
    up, w, down = params
    return jnp.mean((flow(w, jnp.tanh(x @ up)) @ down) ** 2)


Case = tuple[Loss, list[jax.Array], tuple[Any, ...]]
D, V = WIDTH, WORDS
PAIR = (D, 2 * D), (2 * D, D)


def cases() -> dict[str, Case]:
    x = normal(BATCH, LENGTH, D, seed=5)
    stacks = [(LAYERS, *shape) for shape in (*PAIR, (D, D), (D, D), (D, D))]
    return {
        "layers": (layers, weights(*PAIR, *PAIR), (x,)),
        "masked": (masked, weights((V, D), *PAIR), (tokens(),)),
        "scanned": (scanned, weights((V, D), *stacks), (tokens(),)),
        "normed": (normed, weights(*stacks[:2]), (x,)),
        "recurrent": (recurrent, weights((D, D), (D, D)), (x,)),
        "nested": (nested, weights((LAYERS, D, D))[0], (x,)),  # type: ignore[dict-item]
        "chosen": (chosen, weights(*PAIR), (x, jnp.int32(3))),
        "not chosen": (chosen, weights(*PAIR), (x, jnp.int32(1))),
        "dropped": (dropped, weights(*PAIR), (x, jax.random.key(3))),
        "convolved": (
            convolved,
            weights((3, 3, 3, 8), (3, 3, 1, 8), (8, 4)),
            (normal(BATCH, 8, 8, 3, seed=6),),
        ),
        "filtered": (filtered, [weights(*PAIR, (D, D), (D, D))] * 3, (x,)),  # type: ignore[list-item]
        "integrated": (integrated, weights((D, D), (D, D), (D, D)), (x,)),
        "short": (short, weights((D, D), (D, D)), (x,)),
    }


def in_microbatches(found: Traced, count: int) -> Traced:
    return found.in_form(of_chunks(*(count * region.whole for region in found.sites.regions)))


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", cases())
@pytest.mark.usefixtures("_small")
def test_microbatches_give_what_the_batch_gives(name: str, count: int) -> None:
    loss, params, batch = cases()[name]
    step = descent(loss)
    found = trace(jax.jit(step), (params, *batch), {})
    (region,) = (region for region in found.sites.regions if region.whole)
    assert region.rows == BATCH and count in region.choices
    divided = in_microbatches(found, count)
    assert divided.microbatches == count and divided.loops[0].length == count
    flat = jax.tree.leaves((params, *batch))
    want = jax.tree.leaves(evaluated(step)(params, *batch))
    got = evaluated(jex.jaxpr_as_fun(runnable(divided)))(*flat)
    close(want, got, 1e-2 if name == "short" else 1e-5)


def preferred(params: Any, words: Any, others: Any) -> Any:
    """A table that pairs of sequences read, and twice more as the head of theirs."""
    table, up, down = params

    def score(words: Any) -> Any:
        h = table[words]
        logits = jax.nn.log_softmax((h + jnp.tanh(h @ up) @ down) @ table.T)
        return jnp.take_along_axis(logits, words[..., None], -1).sum((1, 2))

    return -jax.nn.log_sigmoid(score(words) - score(others)).mean()


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.usefixtures("_small")
def test_gradients_of_what_is_read_several_times_are_one_sum(count: int) -> None:
    step = descent(preferred)
    args = (weights((WORDS, D), *PAIR), tokens(), tokens()[::-1])
    found = trace(jax.jit(step), args, {})
    divided = in_microbatches(found, count)
    (region,) = (region for region in found.sites.regions if region.whole)
    assert region.sum_nbytes <= 4 * (sum(w.size for w in args[0]) + 1)
    (loop,) = divided.loops
    table = [v for v in loop.eqn.outvars if v.aval.shape == (WORDS, D)]
    assert len(table) == 1
    close(
        jax.tree.leaves(evaluated(step)(*args)),
        jax.tree.leaves(evaluated(jex.jaxpr_as_fun(runnable(divided)))(*jax.tree.leaves(args))),
        1e-5,
    )
    assert equivalence(found.flat).difference(runnable(divided)) is None


@pytest.mark.usefixtures("_small")
def test_a_sum_that_is_added_to_itself_is_twice_that_sum() -> None:
    """Equal gradients are one array, which one equation reads twice."""

    def loss(params: Any, words: Any) -> Any:
        table, up, _ = params
        return sum(jnp.mean(jnp.tanh(table[words] @ up)) for _ in range(2))

    step, args = descent(loss), (weights((WORDS, D), *PAIR), tokens())
    divided = in_microbatches(trace(jax.jit(step), args, {}), 4)
    assert divided.microbatches == 4
    got = evaluated(jex.jaxpr_as_fun(runnable(divided)))(*jax.tree.leaves(args))
    close(jax.tree.leaves(evaluated(step)(*args)), jax.tree.leaves(got), 1e-5)


def sizes(eqns: Any) -> list[int]:
    own = [v.aval.size for eqn in eqns for v in eqn.outvars]
    return own + [size for eqn in eqns for inner in inner_jaxprs(eqn) for size in sizes(inner.eqns)]


@pytest.mark.usefixtures("_small")
def test_no_array_of_the_whole_batch_is_left() -> None:
    """Of loops over layers too, what they stack included."""
    loss, params, batch = cases()["scanned"]
    found = trace(jax.jit(descent(loss)), (params, *batch), {})
    stacked = LAYERS * BATCH * LENGTH * WIDTH * 2
    assert max(sizes(found.closed.jaxpr.eqns)) >= stacked
    gradients = LAYERS * WIDTH * WIDTH * 2
    assert max(sizes(runnable(in_microbatches(found, 8)).jaxpr.eqns)) <= max(stacked // 8, gradients)


@pytest.mark.usefixtures("_small")
def test_a_loop_may_scale_and_subtract_a_sum_over_the_batch() -> None:
    loss, params, batch = cases()["integrated"]
    found = trace(jax.jit(descent(loss)), (params, *batch), {})
    assert max(sizes(found.closed.jaxpr.eqns)) >= BATCH * LENGTH * WIDTH
    assert max(sizes(runnable(in_microbatches(found, 8)).jaxpr.eqns)) <= WIDTH * WIDTH


def of_the_batch(params: Any, x: Any) -> Any:
    """Batch normalisation."""
    for up, down in zip(params[::2], params[1::2], strict=True):
        h = x @ up
        h = (h - h.mean((0, 1))) / jnp.sqrt(h.var((0, 1)) + 1e-3)
        x = x + h @ down
    return jnp.mean(x**2)


def contrastive(params: Any, x: Any) -> Any:
    """Every example is compared with all others."""
    up, down = params
    h = jnp.tanh(x @ up).mean(1) @ down
    return optax.softmax_cross_entropy_with_integer_labels(h @ h.T, jnp.arange(BATCH)).mean()


def of_two_towers(params: Any, x: Any, words: Any) -> Any:
    """What one tower makes of an example is compared with what another makes of all."""
    up, down, table, *stacks = params

    def block(h: Any, layer: Any) -> Any:
        up, down = layer
        return h + jnp.tanh(h @ up) @ down, None

    first = jnp.tanh(x @ up).mean(1) @ down
    second = lax.scan(block, table[words], stacks)[0].mean(1)
    first, second = (h / jnp.linalg.norm(h, axis=-1, keepdims=True) for h in (first, second))
    scores, own = 4 * first @ second.T, jnp.arange(BATCH)
    losses = (optax.softmax_cross_entropy_with_integer_labels(s, own) for s in (scores, scores.T))
    return sum(loss.mean() for loss in losses)


def weighed(params: Any, x: Any) -> Any:
    """How much an example counts is told by the losses of all."""
    up, down = params
    losses = jnp.mean((jnp.tanh(x @ up) @ down) ** 2, (1, 2))
    return jnp.sum(losses * lax.stop_gradient(jax.nn.softmax(losses)))


def centred(params: Any, x: Any) -> Any:
    """Examples count by what they are more than the mean."""
    up, down = params
    h = (jnp.tanh(x @ up) @ down).mean(1)
    return jnp.mean((h - h.mean(0)) ** 4)


def coupled() -> dict[str, Case]:
    x, shapes = normal(BATCH, LENGTH, D, seed=5), [(LAYERS, *shape) for shape in PAIR]
    return {
        "contrastive": (contrastive, weights(*PAIR), (x,)),
        "two towers": (of_two_towers, weights(*PAIR, (V, D), *shapes), (x, tokens())),
        "weighed": (weighed, weights(*PAIR), (x,)),
        "centred": (centred, weights(*PAIR), (x,)),
    }


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", coupled())
@pytest.mark.usefixtures("_small")
def test_where_examples_see_one_another_a_part_is_done_twice(name: str, count: int) -> None:
    """What mixes them stands between two loops, of which the second does the forward pass of a part once more."""
    loss, params, batch = coupled()[name]
    step = descent(loss)
    found = trace(jax.jit(step), (params, *batch), {})
    (region,) = (region for region in found.sites.regions if region.whole)
    assert count in region.choices and len(region.loops) > 1
    products = {"dot_general", "scan"}
    again = [eqn for eqn in region.repeated if eqn.primitive.name in products]
    assert again and not any("transpose" in str(eqn.source_info.name_stack) for eqn in again)
    divided = in_microbatches(found, count)
    program = runnable(divided)
    widest, given = max(sizes(found.closed.jaxpr.eqns)), max(a.size for a in (*params, *batch))
    assert max(sizes(program.jaxpr.eqns)) <= max(widest // count, given)
    flat = jax.tree.leaves((params, *batch))
    want = jax.tree.leaves(evaluated(step)(params, *batch))
    close(want, evaluated(jex.jaxpr_as_fun(program))(*flat), 2e-5)


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("ensemble", ("convolved by column",)),
        ("optimizer", ("branching layers", "infinite mask")),
        ("scaled", ("library attention", "remat layers")),
    ],
)
@pytest.mark.usefixtures("_small")
def test_what_one_loop_hands_to_another_is_made_in_the_first(way: str, parts: tuple[str, ...]) -> None:
    """Also where it is a mere view, which a loop may do itself if nothing else does."""
    step = step_of(way, parts)
    found = trace(jax.jit(step.fn), step.args, {})
    (region,) = (region for region in found.sites.regions if region.whole)
    assert len(region.loops) > 1
    flat, want = jax.tree.leaves(step.args), jax.tree.leaves(evaluated(step.fn)(*step.args))
    got = evaluated(jex.jaxpr_as_fun(runnable(in_microbatches(found, region.choices[0]))))(*flat)
    assert_close(want, got, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_small")
def test_not_where_most_would_be_done_many_times() -> None:
    """Each batch normalisation waits for the whole batch twice."""
    args = weights(*PAIR * 4), normal(BATCH, LENGTH, D, seed=5)
    found = trace(jax.jit(descent(of_the_batch)), args, {})
    assert not any(region.whole for region in found.sites.regions)


@pytest.mark.usefixtures("_small")
def test_a_step_without_a_backward_pass_has_none() -> None:
    found = trace(jax.jit(layers), (weights(*PAIR, *PAIR), normal(BATCH, LENGTH, D)), {})
    assert not any(region.whole for region in found.sites.regions)


def test_what_an_iteration_keeps_to_itself_counts() -> None:
    """Of a frozen teacher, scanned, nothing but what its layers hand on is in memory between them."""
    ups, downs = normal(LAYERS, 32, 4096), normal(LAYERS, 4096, 32, seed=1)

    def layer(h: Any, w: Any) -> Any:
        return h + jnp.sin(jnp.cos(h @ w[0])) @ w[1], None

    def loss(params: Any, x: Any) -> Any:
        taught, _ = lax.scan(layer, x, (ups, downs))
        return jnp.mean((x @ params[0] - taught) ** 2)

    found = trace(jax.jit(descent(loss)), (weights((32, 32)), normal(512, 32)), {})
    (region,) = (region for region in found.sites.regions if region.whole)
    assert region.inner_nbytes >= 3 * 4 * 512 * 4096


def wide(rows: int = 512) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A deep network of which no product is cheap to repeat."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return descent(loss), (weights(*((256, 256),) * 8), normal(rows, 256))


@pytest.mark.usefixtures("_small")
def test_what_a_microbatch_saves_is_planned() -> None:
    """The gradient of a mean is made of nothing, and so before the loop: no backward pass begins there."""
    step, args = wide()
    found = trace(jax.jit(step), args, {})
    form = in_microbatches(found, 2)
    in_backward = backward_equations(form.jaxpr.jaxpr.eqns, form.loop_of, form.loops)
    within = [n for n, loop in enumerate(form.loop_of) if loop >= 0]
    assert not any(in_backward[: within[0]])
    forward = in_backward.index(True)
    assert within[0] < forward < within[-1]
    made = {v for eqn in form.jaxpr.jaxpr.eqns[:forward] for v in eqn.outvars}
    read = {v for eqn in form.jaxpr.jaxpr.eqns[forward:] for v in eqn.invars if not hasattr(v, "val")}
    assert sum(v.aval.size > 1000 for v in made & read) >= 4


def test_the_planner_takes_them_where_recomputing_costs_more() -> None:
    step, args = wide(8192)
    needs = jaxremat.memory(step, *args, donate_argnums=0)
    budget = needs.base_nbytes + needs.temporaries_nbytes * 6 // 10
    common: Any = {"budget": budget, "donate_argnums": 0, "planning": jaxremat.Planning(cache=False)}
    divided = jaxremat.plan(step, *args, **common)
    (form,) = divided.loops
    assert form.whole and str(form).startswith("the step: in ") and "microbatches" in str(divided)
    assert divided.compiled_peak_nbytes is not None and divided.compiled_peak_nbytes <= budget
    recomputed = jaxremat.plan(step, *args, **common, allow=("rows",))
    assert not any(form.whole for form in recomputed.loops)
    assert divided.overhead < recomputed.overhead / 2
    again = jaxremat.Plan.from_json(divided.to_json())
    want = jax.jit(step)(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = jaxremat.optimize(plan=again, donate_argnums=0)(step)(*jax.tree.map(jnp.copy, args))
    assert_close(want, got, atol=1e-5)


@pytest.mark.parametrize("allow", ["micro", ("rows", "columns"), 3])
def test_unknown_forms_are_refused(allow: Any) -> None:
    with pytest.raises(ArgumentError, match=r'Write some of "attention", "microbatches", "rows"'):
        jaxremat.optimize("1GiB", allow=allow)


@pytest.mark.usefixtures("_small")
def test_names_are_the_planner_s_to_know() -> None:
    """Outside of loops and within."""

    def loss(params: Any, x: Any) -> Any:
        first, stack = params

        def layer(x: Any, w: Any) -> Any:
            return checkpoint_name(jnp.tanh(x @ w), "layer"), None

        return jnp.mean(lax.scan(layer, checkpoint_name(x @ first, "first"), stack)[0] ** 2)

    args = weights((D, D), (LAYERS, D, D)), normal(BATCH, LENGTH, D, seed=5)
    found = trace(jax.jit(descent(loss)), args, {})
    divided = in_microbatches(found, 2)
    made = {v for eqn in divided.jaxpr.jaxpr.eqns for v in eqn.outvars}
    assert {name for v, name in divided.labels.items() if v in made} == {"first", "layer"}
    named = {name: v.aval.shape for v, name in divided.labels.items() if v in made}
    assert named["first"] == named["layer"] == (BATCH // 2, LENGTH, D)


@pytest.mark.parametrize("last", ["squared", "rounded", "replaced", "read"])
@pytest.mark.usefixtures("_small")
def test_what_a_loop_makes_of_a_sum_must_be_linear(last: str) -> None:
    """A sum over the batch that a loop carries is no sum of the parts' where anything else becomes of it."""

    def total(w: Any, x: Any) -> Any:
        def one(carry: Any, w: jax.Array) -> Any:
            x, total = carry
            x = jnp.tanh(x @ w)
            more = total + jnp.sum(x**2, (0, 1))
            if last == "squared":
                more = more * more
            if last == "rounded":
                more = jnp.asarray(jnp.asarray(more, jnp.int32), jnp.float32)
            if last == "replaced":
                more = w[0]
            return (x * (1 + (last == "read") * total), more), None

        return lax.scan(one, (x, jnp.zeros(D)), w)[0]

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(total(w, x)[0] ** 2))(w)
        return w - 0.1 * gradient, total(w, x)[1]

    args = normal(LAYERS, D, D), normal(BATCH, LENGTH, D, seed=5)
    found = trace(jax.jit(step), args, {})
    for region in found.sites.regions:
        if region.whole:  # without that loop
            flat, divided = jax.tree.leaves(args), in_microbatches(found, 2)
            want = jax.tree.leaves(evaluated(step)(*args))
            assert_close(want, evaluated(jex.jaxpr_as_fun(runnable(divided)))(*flat), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "parts"),
    [("plain", ("counted", "unrolled layers")), ("by example", ("dynamic reads", "spectral"))],
)
@pytest.mark.usefixtures("_small")
def test_a_loop_may_be_in_microbatches_without_its_pair(way: str, parts: tuple[str, ...]) -> None:
    """Which is no pair of loops then; places that it hands on are the same for all, and no sum over microbatches."""
    step = step_of(way, parts)
    found = trace(jax.jit(step.fn), step.args, {})
    assert found.sites.lengths
    flat, want = jax.tree.leaves(step.args), jax.tree.leaves(evaluated(step.fn)(*step.args))
    for i, region in enumerate(found.sites.regions):
        if not region.choices:
            continue
        form = found.in_form(of_chunks(*(0,) * i, region.choices[0]))
        got = evaluated(jex.jaxpr_as_fun(runnable(form)))(*flat)
        assert_close(want, got, rtol=1e-4, atol=1e-5)
