"""What a value is compared with that was selected from it is of the same run, and gradients of maxima are not lost."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
import recorded
from adversary import draw
from chains import descent
from comparing import assert_close
from evaluation import evaluate
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from test_loops import CPU

import jaxremat
from jaxremat import Graph, close_over_dependencies
from jaxremat._compiler._program import compiler_options
from jaxremat._compiler._tags import Written
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._variant import LOOP, Choice, Variant
from jaxremat._model._variant import ROWS as IN_CHUNKS
from jaxremat._program._compat import is_literal
from jaxremat._program._flops import aval_nbytes
from jaxremat._program._inline import Inliner
from jaxremat._rewrite._decisions import decisions
from jaxremat._rewrite._flat_program import alive
from jaxremat._rewrite._selections import compared_directly, is_marked, marked, settled
from jaxremat._rewrite._trace import Traced, trace

ROWS, WIDTH, LAYERS = 4096, 128, 6


def flattened(run: Callable[..., Any], *args: Any) -> Any:
    return Inliner().program(jax.make_jaxpr(run)(*args))


SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]


@given(st.lists(st.tuples(*[st.sampled_from(SPECIAL)] * 2), min_size=1, max_size=20))
def test_an_operand_is_compared_with_the_other_one(pairs: list[tuple[float, float]]) -> None:
    def run(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        more, less = lax.max(x, y), lax.min(x, y)
        return [x == more, y == more, more == x, x == less, less == y]

    x, y = np.asarray(pairs, np.float32).T
    closed = flattened(run, x, y)
    direct = compared_directly(closed)
    made = [eqn.primitive.name for eqn in direct.jaxpr.eqns]
    assert made == ["max", "min", "ge", "ge", "ge", "le", "le"]
    found, wanted = (jex.jaxpr_as_fun(each)(x, y) for each in (direct, closed))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def _of_the_largest(x: jax.Array) -> jax.Array:
    return x == x.max(-1, keepdims=True)


def _not_below_the_third(x: jax.Array) -> jax.Array:
    return x >= jnp.sort(x)[:, -3:-2]


def _of_the_best(x: jax.Array) -> jax.Array:
    return lax.top_k(x, 2)[0][:, 1:] <= x.astype(jnp.bfloat16).astype(jnp.float32)


def _below_its_size(x: jax.Array) -> jax.Array:
    return x < jnp.abs(x)


def _no_more_than_its_size(x: jax.Array) -> jax.Array:
    return -jnp.abs(x) >= x


def _of_sign_and_size(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    made = jnp.where(lax.bitcast_convert_type(x, jnp.int32) < 0, -size, size)
    return made == made.max(-1, keepdims=True)


def _larger_than_a_constant(x: jax.Array) -> jax.Array:
    return x > 0


def _no_number(x: jax.Array) -> jax.Array:
    return x != x


def _no_number_between(x: jax.Array) -> jax.Array:
    gap = jnp.exp(x) - x
    return gap != gap


def _than_the_mean(x: jax.Array) -> jax.Array:
    return x > x.mean(-1, keepdims=True)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("compare", "exposed", "runs_again"),
    [
        (_of_the_largest, True, False),
        (_not_below_the_third, True, False),
        (_of_the_best, True, False),
        (_below_its_size, True, False),
        (_no_more_than_its_size, True, False),
        (_of_sign_and_size, True, False),
        (_than_the_mean, False, False),
        (_larger_than_a_constant, False, True),
        (_no_number, False, True),
        (_no_number_between, False, True),
    ],
)
def test_what_may_not_run_again(
    compare: Callable[[Any], Any], exposed: bool, runs_again: bool, in_backward: bool
) -> None:
    def run(x: jax.Array) -> jax.Array:
        return compare(jnp.sin(x))

    flat = flattened(run, jnp.ones((4, 8)))
    eqns = marked(flat, alive(flat)).jaxpr.eqns
    once = decisions(eqns).once([in_backward] * len(eqns))
    (sine,) = (i for i, eqn in enumerate(eqns) if eqn.primitive.name == "sin")
    assert any(map(is_marked, eqns)) == exposed
    assert (sine in once) == (in_backward and not runs_again)
    assert bool(once) == (not runs_again)


def test_what_a_maximum_selects_from_is_in_memory_with_the_mask_and_nothing_that_it_is_made_of() -> None:
    """What else reads those operands makes them again in its own kernel, and keeps no array of them."""

    def run(x: jax.Array) -> Any:
        y = jnp.sin(x)
        z = jax.nn.relu(y)
        return z == z.max(-1, keepdims=True), y > 0

    flat = flattened(run, jnp.ones((4, 8)))
    eqns = marked(flat, alive(flat)).jaxpr.eqns
    assert [e.primitive.name for e in eqns if is_marked(e)] == ["max", "eq"]


@pytest.mark.parametrize("readers", [1, 2])
def test_a_choice_between_two_is_made_by_one_kernel_for_all_its_readers(readers: int) -> None:
    def run(x: jax.Array) -> Any:
        larger = jnp.sin(x) > jnp.cos(x)
        return [jnp.where(larger, c * x, 1.0) for c in range(readers)]

    flat = flattened(run, jnp.ones((4, 8)))
    eqns = marked(flat, alive(flat)).jaxpr.eqns
    assert [e.primitive.name for e in eqns if is_marked(e)] == ["gt"] * (readers - 1)


def test_maxima_over_neighbours_take_what_is_predicted() -> None:
    """XLA kept what was compared for the backward pass, in place of the mask: a quarter more than was predicted."""
    points, neighbours, widths = 512, 16, (3, 64, 64, 128)

    @descent
    def step(weights: Any, x: jax.Array, near: jax.Array) -> jax.Array:
        for w in weights:
            others = jax.vmap(lambda row, places: row[places])(x, near)
            edges = jnp.concatenate(
                [others - x[:, :, None], jnp.broadcast_to(x[:, :, None], others.shape)], -1
            )
            h = edges @ w
            h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
            x = jax.nn.leaky_relu(h, 0.2).max(2)
        return jnp.mean(x**2)

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = [array(2 * rows, columns) for rows, columns in pairwise(widths)]
    args = weights, array(4, points, 3), array(4, points, neighbours, dtype=jnp.int32)
    plan = jaxremat.plan(step, *args, budget="min", donate_argnums=0, allow=(), target="h100")
    assert plan.compiled_peak_nbytes is not None
    assert abs(plan.compiled_peak_nbytes / plan.predicted_peak_nbytes - 1) < 0.02


def test_of_arguments_nothing_is_made_again() -> None:
    eqns = flattened(_of_the_largest, jnp.ones((4, 8))).jaxpr.eqns
    assert not decisions(eqns).once([False] * len(eqns))


def largest(h: jax.Array, scale: jax.Array) -> jax.Array:
    return (h * scale + h**2).max(-1)


def largest_of_four(h: jax.Array, scale: jax.Array) -> jax.Array:
    return (h * scale + h**2).reshape(len(h), -1, 4).max(-1)


def clipped(h: jax.Array, scale: jax.Array) -> jax.Array:
    """The loss of values in proximal policy optimisation."""
    value = h @ scale
    return jnp.maximum((value - 1) ** 2, (jnp.clip(value, -0.2, 0.2) - 1) ** 2)


def largest_of_segments(h: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.ops.segment_max(h * scale + h**2, jnp.arange(len(h)) // 8, len(h) // 8)


def highest_so_far(h: jax.Array, scale: jax.Array) -> jax.Array:
    return lax.cummax(h * scale + h**2, axis=1)


def stepping(select: Callable[..., Any], layers: int = LAYERS) -> tuple[Any, Any]:
    """A train step whose loss is of what is selected from the last layer, and its arguments."""
    keys = jax.random.split(jax.random.key(0), 20)

    @descent
    def step(weights: Any, x: jax.Array, t: jax.Array) -> Any:
        h, (layers, scale) = x, weights
        for w, b in layers:
            y = h @ w + b
            y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
            h = jnp.tanh(y)
        chosen = select(h, scale)
        return (chosen * t[: len(chosen)].reshape(-1, *(1,) * (chosen.ndim - 1))).mean()

    weights = [
        (jax.random.normal(keys[i], (WIDTH, WIDTH)) / WIDTH**0.5, jnp.zeros(WIDTH)) for i in range(layers)
    ]
    scale, x = jax.random.normal(keys[8], (WIDTH,)), jax.random.normal(keys[10], (ROWS, WIDTH))
    return step, ((weights, scale), x, jax.random.normal(keys[11], (ROWS,)))


SELECTED = [largest, largest_of_four, clipped, largest_of_segments, highest_so_far]


@pytest.mark.parametrize("select", SELECTED)
def test_no_comparison_runs_again(select: Callable[..., Any]) -> None:
    step, args = stepping(select)
    traced = trace(jax.jit(step), args, {})
    graph = lower(traced, CPU, base_nbytes=0)
    eqns = traced.jaxpr.jaxpr.eqns
    made = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    comparing = [
        i for i, eqn in enumerate(eqns) if eqn.primitive.name == "eq" and made.keys() & {*eqn.invars}
    ]
    if select in (clipped, highest_so_far):
        pairs = (pair for i in comparing for pair in (eqns[i].invars, eqns[i].invars[::-1]))
        chosen = ((a, eqns[made[b]]) for a, b in pairs if not is_literal(b) and b in made)
        assert not any(a in eqn.invars for a, eqn in chosen if eqn.primitive.name in ("max", "min"))
    else:
        assert not all(graph.nodes[i].repeatable for i in comparing)


def test_what_a_compiler_would_make_twice_passes_a_fence() -> None:
    """XLA:CPU makes what maxima are of in the kernel that selects, and once more in the one that compares."""
    step, (weights, x, t) = stepping(largest_of_four, layers=2)
    args = weights, x[:64], t[:64]
    flat = flattened(step, *args)
    leaves = jax.tree.leaves(args)
    with jax.disable_jit():
        wanted = jax.tree.leaves(step(*args))

    def worst(closed: Any) -> float:
        lowered = jax.jit(jex.jaxpr_as_fun(closed)).lower(*leaves)
        found = lowered.compile(compiler_options={**compiler_options(), **recorded.AS_USERS})(*leaves)
        moved = zip(found, wanted, leaves, strict=False)  # the loss has no such argument
        return max(float(jnp.abs(a - b).max() / jnp.abs(b - c).max()) for a, b, c in moved)

    assert worst(flat) > 0.1  # or XLA has learnt it, and this can go
    assert worst(settled(flat)) < 1e-2


def test_a_call_that_compares_passes_no_fence() -> None:
    """No kernel repeats it, and it may have several results."""

    @jax.jit
    def parts(x: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(x == largest, x, 0), jnp.where(x == largest, 0, x)

    called = jax.make_jaxpr(lambda x: parts(y := jnp.sin(x), y.max()))(jnp.arange(8.0))
    assert [e.primitive.name for e in settled(called).eqns].count("jit") == 1


def test_chunks_do_not_lose_gradients() -> None:
    step, args = stepping(largest_of_four, layers=2)
    planned = jaxremat.optimize(
        "min", allow=("microbatches",), donate_argnums=0, compiler_options=recorded.AS_USERS
    )(step)
    assert planned.plan(*jax.tree.map(jnp.copy, args)).form.settings(IN_CHUNKS)
    with jax.disable_jit():
        wanted = step(*args)
    assert_close(planned(*args), wanted, rtol=0, atol=1e-6)


def test_what_is_decided_behind_the_first_backward_pass_is_of_one_run() -> None:
    """The forward pass of a second loss reads what the backward pass of the first may have computed again."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, back = jax.vjp(lambda w: jnp.tanh(x @ w), w)
        (grads,) = back(jnp.cos(y))
        more = grads.sum() > 0

        def second(y: jax.Array) -> jax.Array:
            return jnp.where(y >= jnp.where(more, y.max(-1, keepdims=True), 0.0), jnp.sin(y), 0.0)

        made, back = jax.vjp(second, y)
        return grads, back(made)[0]

    graph = lower(trace(jax.jit(step), (jnp.ones((4, 4)), jnp.ones((8, 4))), {}), CPU, base_nbytes=0)
    (made,) = (node for node in graph.nodes if node.primitive == "tanh")
    compared = [node for node in graph.nodes if node.primitive == "ge"]
    assert compared and min(node.id for node in compared) > graph.forward_stop > made.id
    assert not made.repeatable


ARGS = [jax.random.normal(jax.random.key(0), (8, 8)), jax.random.normal(jax.random.key(1), (24, 8))]


def all_in_memory(loss: Callable[[Any, Any], Any]) -> tuple[Traced, Graph]:
    """The gradient of a loss, and its graph with all values in memory."""
    found = trace(jax.jit(jax.grad(loss)), tuple(ARGS), {})
    sizes = {
        i: tuple(aval_nbytes(v.aval) for v in eqn.outvars) for i, eqn in enumerate(found.jaxpr.jaxpr.eqns)
    }
    return found, lower(found, CPU, base_nbytes=0, written=Written(sizes, (), frozenset()))


def _root(d: jax.Array) -> jax.Array:
    return jnp.where(d > 0, jnp.sqrt(jnp.where(d > 0, d, 1.0)), 0.0)


def distances(w: jax.Array, x: jax.Array) -> jax.Array:
    """Of all pairs, by a product: of each with itself it is rounding that is above zero or below."""
    y = jnp.tanh(x @ w)
    squares = (y * y).sum(-1)
    return jnp.tanh(_root(squares[:, None] + squares - 2 * y @ y.T)).mean()


def gaps(w: jax.Array, x: jax.Array) -> jax.Array:
    """Below the largest of each row."""
    y = jnp.tanh(x @ w)
    return _root(y.max(-1, keepdims=True) - y).mean()


@pytest.mark.parametrize("loss", [distances, gaps])
def test_a_mask_guards_what_it_was_made_of(loss: Callable[[Any, Any], Any]) -> None:
    """Masks saved and all else made again, with other rounding: what they let through is still above zero."""
    found, graph = all_in_memory(loss)
    masks = [v for v in graph.residuals if "bool" in graph.values[v].shape]
    program = emit(found, graph, close_over_dependencies(graph, masks))
    assert any(eqn.primitive.name == "sqrt" for eqn in program.jaxpr.eqns)
    for seed in range(8):
        (gradient,) = evaluate(program, ARGS, np.random.default_rng(seed))
        assert np.isfinite(gradient).all()


def _softened(d: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.maximum(d, 0) + 1e-12)


@pytest.mark.parametrize("root", [_root, _softened])
def test_what_is_lost_in_rounding_is_of_one_run(root: Callable[[jax.Array], jax.Array]) -> None:
    """Below a root of it a large cotangent goes to all that the difference is of, and cancels if it is one."""

    def loss(ws: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            y = jnp.tanh(x @ w)
            squares = (y * y).sum(-1)
            roots = root(squares[:, None] + squares - 2 * y @ y.T)
            return x + 0.1 * jnp.tanh(roots) @ y, None

        return (lax.scan(layer, ARGS[1], ws)[0] ** 2).sum()

    args = [0.5 * jax.random.normal(jax.random.key(2), (4, 8, 8))]
    found = trace(jax.jit(jax.grad(loss)), tuple(args), {})
    wanted = evaluate(found.source.closed, args)[0]

    def off(closed: Any, seed: int) -> float:
        return np.abs(evaluate(closed, args, np.random.default_rng(seed))[0] - wanted).max()

    allowed = 10 * max(off(found.source.closed, seed) for seed in range(8))
    rng = random.Random(0)
    nested = found.in_form(Variant().also(Choice(LOOP, 0, (2, 2))))
    for seed in range(100):
        assert off(draw(rng, nested if seed % 2 else found).emit(), seed) < allowed < np.abs(wanted).max()


@pytest.mark.parametrize("least", [0.25, 1.0])
def test_powers_to_learned_exponents_take_nested_checkpointing(least: float) -> None:
    """Only the backward pass reads their derivatives, which are large next to zero for exponents below one."""

    def loss(ws: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            weights = jax.nn.softmax(10 * jnp.tanh(x @ w))
            gate = jax.nn.sigmoid(x[:, -1:])
            moved = gate * weights + (1 - gate) * jnp.roll(weights, 1, 1) + 1e-8
            sharp = moved ** (least + jax.nn.softplus(x[:, :1]))
            return x + 0.1 * jnp.tanh(sharp / sharp.sum(1, keepdims=True) @ memory)[:, :8], None

        memory = jax.random.normal(jax.random.key(3), (8, 256))
        return (lax.scan(layer, ARGS[1], ws)[0] ** 2).sum()

    args = [4 * jax.random.normal(jax.random.key(2), (4, 8, 8))]
    found = trace(jax.jit(jax.grad(loss)), tuple(args), {})
    assert found.sites.cuttable == (True,)
    wanted = evaluate(found.source.closed, args)[0]

    def off(closed: Any, seed: int) -> float:
        return np.abs(evaluate(closed, args, np.random.default_rng(seed))[0] - wanted).max()

    allowed = 10 * max(off(found.source.closed, seed) for seed in range(8))
    rng = random.Random(0)
    nested = found.in_form(Variant().also(Choice(LOOP, 0, (2, 2))))
    for seed in range(16):
        assert off(draw(rng, nested if seed % 2 else found).emit(), seed) < allowed < np.abs(wanted).max()


def from_the_first(w: jax.Array, x: jax.Array) -> jax.Array:
    """Points, which a layer moves, that are not where the first of them is."""
    y = x + jnp.tanh(x @ w)
    gaps = y - y[:1]
    return jnp.where((gaps * gaps).sum(-1, keepdims=True) > 0, y, 0.0).sum()


def test_a_number_is_zero_where_it_is_taken_from_itself() -> None:
    """The first point saved, and all points made again."""
    found, graph = all_in_memory(from_the_first)
    first = [v for v in graph.residuals if graph.values[v].shape == "f32[1,8]"]
    program = emit(found, graph, close_over_dependencies(graph, first))
    wanted = evaluate(found.source.closed, ARGS)[0]
    for seed in range(8):
        error = np.abs(evaluate(program, ARGS, np.random.default_rng(seed))[0] - wanted).max()
        assert first and error < 1e-4 * np.abs(wanted).max()


def as_certain_as_the_plain_step(
    loss: Callable[..., jax.Array], args: tuple[Any, ...], programs: int
) -> None:
    """Assert that rounding does no more to so many random schedules of a gradient than to the plain step."""
    found = trace(jax.jit(jax.grad(loss)), args, {})
    wanted = evaluate(found.source.closed, args)[0]

    def off(closed: Any, seed: int) -> float:
        return np.abs(evaluate(closed, args, np.random.default_rng(seed))[0] - wanted).max()

    allowed = 10 * max(off(found.source.closed, seed) for seed in range(8))
    rng = random.Random(0)
    for seed in range(programs):
        assert off(draw(rng, found).emit(), seed) < allowed < 1e-3 * np.abs(wanted).max()


def _larger_of_two(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(a > b, a, b)


def _larger_by_their_gap(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + jax.nn.relu(b - a)


def _larger_by_their_distance(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a + b + jnp.abs(a - b)) / 2


def _within(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.clip(a, -jnp.abs(b), jnp.abs(b))


@pytest.mark.parametrize(
    "choose",
    [jnp.minimum, jnp.maximum, _larger_of_two, _larger_by_their_gap, _larger_by_their_distance, _within],
)
def test_of_two_numbers_that_are_equal_but_for_rounding_one_gets_the_cotangent(
    choose: Callable[[jax.Array, jax.Array], jax.Array],
) -> None:
    """As of two critics that begin with the same weights: where masks were of two runs both got it, or neither."""
    scale, ws = jnp.ones(8), 0.5 * jax.random.normal(jax.random.key(1), (3, 8, 8))

    def loss(scale: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
        h = jnp.tanh(ARGS[1] * scale)
        for w, v in zip(one, other, strict=True):
            h = h + choose(jnp.tanh(h @ w), jnp.tanh(h @ v))
        return (h**2).sum()

    as_certain_as_the_plain_step(loss, (scale, ws, ws), 50)


CELLS = jax.random.normal(jax.random.key(3), (12, 8))


def _between_cells(cell: jax.Array, share: jax.Array) -> jax.Array:
    lower = cell.astype(int)
    return (1 - share) * jnp.take_along_axis(CELLS, lower, 0) + share * jnp.take_along_axis(
        CELLS, lower + 1, 0
    )


def _by_remainder(c: jax.Array) -> jax.Array:
    return _between_cells(jnp.floor(c), c % 1.0)


def _by_division(c: jax.Array) -> jax.Array:
    return _between_cells(*jnp.divmod(c, 1.0))


def _by_power_of_two(c: jax.Array) -> jax.Array:
    exponent = jnp.floor(jnp.log2(c))
    return jnp.exp2(exponent) * jnp.round(1024 * c / jnp.exp2(exponent)) / 1024


def _by_exponent(c: jax.Array) -> jax.Array:
    return jnp.ldexp(*jnp.frexp(c))


def _by_short_numbers(c: jax.Array) -> jax.Array:
    """As products in higher precision are made of short ones; numbers of one are between two short ones."""
    c = c + 2.0**-8
    high = c.astype(jnp.bfloat16).astype(jnp.float32)
    low = c - high
    return jnp.sin(high) * jnp.cos(low) + jnp.cos(high) * jnp.sin(low)


def _by_what_a_sum_loses(c: jax.Array) -> jax.Array:
    scaled = 4097.0 * c
    high = scaled - (scaled - c)
    low = c - high
    return jnp.sin(high) * jnp.cos(low) + jnp.cos(high) * jnp.sin(low)


@pytest.mark.parametrize(
    "look_up",
    [
        _by_remainder,
        _by_division,
        _by_power_of_two,
        _by_exponent,
        _by_short_numbers,
        _by_what_a_sum_loses,
    ],
)
def test_parts_of_a_number_are_of_one_run(look_up: Callable[[jax.Array], jax.Array]) -> None:
    """Numbers that are whole but for rounding: a cell of one run and a place in it of another are a cell apart."""
    whole, ws = 1 + jnp.arange(16.0)[:, None] % 8, 0.5 * jax.random.normal(jax.random.key(1), (2, 8, 8))

    def loss(scale: jax.Array, ws: jax.Array) -> jax.Array:
        h = jnp.tanh(jax.random.normal(jax.random.key(0), (16, 8)) * scale)
        for w in ws:
            y = jnp.tanh(h @ w)
            h = h + y * look_up(lax.stop_gradient(whole + (3 * y - y - 2 * y)))
        return (h**2).sum()

    as_certain_as_the_plain_step(loss, (jnp.ones(8), ws), 30)


def smooth_in_roots(w: jax.Array, x: jax.Array) -> jax.Array:
    """Matern's kernel of distances: what is left of its derivative is as small as the root's is large."""
    y = jnp.tanh(x @ w)
    squares = (y * y).sum(-1)
    roots = jnp.sqrt(jnp.maximum(squares[:, None] + squares - 2 * y @ y.T, 0) + 1e-8)
    return ((1 + roots) * jnp.exp(-roots) * x[:, :1]).sum()


def test_functions_of_a_root_are_of_one_run() -> None:
    """Of rows of which two are nearly the same: each residual saved alone, all else made again."""
    x = np.asarray(ARGS[1]).copy()
    x[1::2] = x[::2] * (1 + 1e-4 * np.arange(x.shape[1]))
    args = [ARGS[0], x]
    found, graph = all_in_memory(smooth_in_roots)
    wanted = evaluate(found.source.closed, args)[0]

    def off(closed: Any) -> float:
        made = (evaluate(closed, args, np.random.default_rng(seed))[0] for seed in range(6))
        return max(np.abs(each - wanted).max() for each in made)

    allowed = 4 * off(found.source.closed)
    for saved in graph.residuals:
        assert (
            off(emit(found, graph, close_over_dependencies(graph, [saved]))) < allowed < np.abs(wanted).max()
        )


def test_second_derivatives_at_the_edge_of_a_domain_take_no_nested_checkpointing() -> None:
    """Of forces from distances a loop for each derivative reads what another one has computed."""

    def energy(x: jax.Array, ws: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (h + jnp.tanh(smooth_in_roots(w, h) * h), None), x, ws)[0].sum()

    def forces(x: jax.Array, ws: jax.Array) -> jax.Array:
        return (jax.grad(energy)(x, ws) ** 2).sum()

    args = ARGS[1], jnp.stack([ARGS[0]] * 4)
    nested = [trace(jax.jit(jax.grad(fn, 1)), args, {}).sites.cuttable for fn in (energy, forces)]
    assert all(nested[0]) and nested[1] and not any(nested[1])


def solved(w: jax.Array, x: jax.Array) -> jax.Array:
    """With a matrix of which any of two rows may be the pivot."""
    y = jnp.tanh(x @ w)
    matrix = jnp.concatenate([y[:4], -jnp.tanh(x[:4] @ w) + jnp.eye(4, 8, 4)])
    return jnp.sum(jnp.linalg.solve(matrix, y.T[:, :3]) ** 2)


def test_parts_of_a_factorisation_are_of_one_run() -> None:
    found, graph = all_in_memory(solved)
    (node,) = (node for node in graph.nodes if node.primitive == "lu")
    parts = [v for v in node.outputs if v in graph.residuals]
    wanted = evaluate(found.source.closed, ARGS)[0]
    for saved in ([], *([v] for v in parts)):
        program = emit(found, graph, close_over_dependencies(graph, saved))
        for seed in range(100):
            (gradient,) = evaluate(program, ARGS, np.random.default_rng(seed))
            np.testing.assert_allclose(gradient, wanted, atol=1e-3 * np.abs(wanted).max())


def test_what_guards_no_domain_may_run_again() -> None:
    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        y = jnp.sin(x)
        return (
            jnp.where(y > 0, y, 0.1 * y),
            jnp.log(jnp.where(x > 0, x, 1.0)),
            jnp.log(jnp.where(y > 0, 1.0, 2.0)),
        )

    assert not decisions(flattened(run, jnp.ones((4, 8))).jaxpr.eqns).counted
