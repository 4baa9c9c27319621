"""Masks made of results: equal bit by bit, only where that frees something, and what they were made of is not kept."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from chains import descent
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from test_loops import CPU

import jaxremat
from jaxremat._lower._lower import lower
from jaxremat._model._variant import COPIES, Variant
from jaxremat._rewrite._fingerprint import fingerprint
from jaxremat._rewrite._flat_program import FlatProgram
from jaxremat._rewrite._masks import with_results
from jaxremat._rewrite._passes import without
from jaxremat._rewrite._trace import Traced, trace

LAYERS, WIDTH, ROWS = 6, 64, 1024
SPECIAL = (-np.inf, -7, -1, -1e-30, -0.0, 0.0, 1e-30, 0.5, 1, 6, 7, np.inf, np.nan)
"""Ties with limits and numbers that are compared with among them."""
COMPARISONS = {lax.gt: operator.gt, lax.ge: operator.ge, lax.lt: operator.lt,
               lax.le: operator.le, lax.eq: operator.eq, lax.ne: operator.ne}  # fmt: skip
NUMBERS = st.sampled_from((-1, 0, 1, 6, 7))
CLAMPING = st.lists(
    st.tuples(st.sampled_from(("max", "min", "clamp")), NUMBERS, NUMBERS), min_size=1, max_size=3
)


def clamped(x: Any, how: list[tuple[str, int, int]]) -> Any:
    for name, low, high in how:
        low_, high_ = (np.asarray(a, x.dtype) for a in (low, max(low, high)))
        made = {"clamp": (lax.clamp, low_, x, high_), "max": (lax.max, x, low_), "min": (lax.min, high_, x)}
        function, *operands = made[name]
        x = function(*operands)
    return x


def masked(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, dict[int, Any]]:
    made = with_results(FlatProgram.of(closed))
    return made.closed, dict(made.masked)


@given(
    CLAMPING,
    st.sampled_from(list(COMPARISONS)),
    NUMBERS,
    st.sampled_from((np.float32, jnp.bfloat16, np.float16, np.int32, np.uint8)),
    st.booleans(),
)
def test_masks_are_what_they_were(how: Any, compare: Any, number: int, dtype: Any, swapped: bool) -> None:
    if dtype == np.uint8:
        number, how = abs(number), [(name, abs(low), abs(high)) for name, low, high in how]
    numbers = np.asarray([x for x in SPECIAL if np.issubdtype(dtype, np.floating) or dtype == jnp.bfloat16
                          or (np.isfinite(x) and x == int(x) and (x >= 0 or dtype != np.uint8))])  # fmt: skip
    t = np.asarray(number, dtype)

    def program(a: Any, w: Any) -> Any:
        x = lax.reduce_max(a, (0,))
        y = clamped(x, how)
        mask = compare(t, x) if swapped else compare(x, t)
        with jax.named_scope("transpose(jvp(f))"):
            return mask, lax.dot(y, w)

    a = numbers.astype(dtype)[None]
    before = jax.make_jaxpr(program)(a, a[0])
    after, found = masked(before)
    # A mask reads the result wherever it may: where no number at all is on another side then.
    line = np.linspace(-2, 9, 45)
    image = np.asarray(clamped(line.astype(np.float32), how))
    sides = COMPARISONS[compare]
    exact = all(np.array_equal(sides(number, x), sides(number, y)) if swapped else
                np.array_equal(sides(x, number), sides(y, number)) for x, y in [(line, image)])  # fmt: skip
    assert bool(found) == exact
    for got, want in zip(*(jex.jaxpr_as_fun(c)(a, a[0]) for c in (after, before)), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def net(function: Callable[[Any], Any], norm: Callable[[Any], Any] = lambda x: x) -> Callable[..., Any]:
    @descent
    def step(weights: list[Any], x: Any) -> Any:
        h = x
        for w, b in weights:
            h = function(norm(h @ w + b))
        return (h.astype(jnp.float32) ** 2).mean()

    return step


def args(dtype: Any = jnp.float32) -> tuple[list[Any], Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [(jax.random.normal(k, (WIDTH, WIDTH), dtype) * 0.2, jnp.zeros(WIDTH, dtype)) for k in keys[1:]]
    return weights, jax.random.normal(keys[0], (ROWS, WIDTH), dtype)


def traced(step: Callable[..., Any], given: Any = None) -> Traced:
    return trace(jax.jit(step, donate_argnums=0), given or args(), {})


def standardised(x: Any) -> Any:
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (jax.nn.relu, 1),
        (jax.nn.relu6, 2),
        (lambda x: lax.clamp(x.dtype.type(0), x, x.dtype.type(6)), 2),
        (jax.nn.hard_tanh, 0),  # a choice, no limit
        (lambda x: jnp.maximum(x, 0), 0),  # its gradient asks whether x is 0, which y does not say
        (jnp.abs, 0),  # no sign is left
        (jax.nn.leaky_relu, 0),
        (jnp.tanh, 0),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_which_masks_and_equal_gradients(function: Any, count: int, dtype: Any) -> None:
    step, given = net(function), args(dtype)
    found = traced(step, given)
    assert len(found.program.masked) == count * (LAYERS - 1)  # what the last layer makes no product reads
    weights, x = given
    x = x.at[:13].set(jnp.asarray(SPECIAL, dtype)[:, None])
    flat = jax.tree.leaves((weights, x))
    got, want = (jex.jaxpr_as_fun(c)(*flat) for c in (found.jaxpr, found.flat))
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_not_where_all_is_kept_anyway() -> None:
    """Normalisation wants the product itself; a square wants the result, but as part of a kernel."""
    assert not traced(net(jax.nn.relu, standardised)).program.masked
    assert not traced(
        lambda ws, x: jax.grad(lambda ws: (jax.nn.relu(x @ ws[0][0]) ** 2).sum())(ws)
    ).program.masked


def test_copies_in_fewer_bits_are_of_what_masks_read() -> None:
    found = traced(net(jax.nn.relu))
    assert not found.in_form(Variant.of_rule(COPIES, {0: (1,)})).program.masked


def test_programs_are_told_apart_as_before() -> None:
    step = net(jax.nn.relu)
    found = traced(step)
    with without("masks"):
        before = traced(step)
    assert found.program.masked and not before.program.masked
    assert fingerprint(found) == fingerprint(before)
    assert fingerprint(found) != fingerprint(traced(net(jax.nn.relu6)))


def kept_nbytes(step: Callable[..., Any]) -> int:
    """What the backward pass reads of the forward pass's."""
    graph = lower(traced(step), CPU, base_nbytes=0)
    read = {v for k in range(len(graph.stages)) for v in graph.needs(k)}
    return sum(graph.values[v].nbytes for v in read if 0 <= graph.values[v].producer < graph.forward_stop)


def test_half_of_the_residuals_are_gone() -> None:
    step = net(jax.nn.relu)
    with without("masks"):
        before = kept_nbytes(step)
    product = ROWS * WIDTH * 4
    assert before >= (2 * LAYERS - 1) * product
    assert kept_nbytes(step) == before - (LAYERS - 1) * product


@descent
def scanned(weights: Any, x: Any) -> Any:
    return (lax.scan(lambda h, w: (jax.nn.relu(h @ w) @ w, None), x, weights)[0] ** 2).mean()


def accumulated(weights: Any, x: Any) -> Any:
    """Forward and backward pass in one body."""

    def body(carry: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            return (functools.reduce(lambda h, w: jax.nn.relu(h @ w), weights, x) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(weights)
        return carry + gradients, loss

    gradients, losses = lax.scan(body, jnp.zeros_like(weights), x.reshape(4, -1, WIDTH))
    return weights - 0.1 * gradients, losses.mean()


@pytest.mark.parametrize("step", [scanned, accumulated])
def test_loops(step: Any) -> None:
    weights, x = args()
    given = jnp.stack([w for w, _ in weights]), jnp.tile(x, (8, 1))
    assert traced(step, given).program.masked
    planned = jaxremat.optimize("60% of temporaries", donate_argnums=0)(step)
    plan = planned.plan(*given)
    assert plan.peak_nbytes <= plan.budget_nbytes
    assert_same(jax.jit(step)(*given), planned(*given))


def test_a_plan_that_recomputes_nothing_needs_little_more_than_half() -> None:
    """The compiler does not look through the result: what that is made of is not kept for the masks."""
    step, (weights, x) = net(jax.nn.relu), args()
    given = weights, jnp.tile(x, (4, 1))
    planned = jaxremat.optimize("75% of temporaries", donate_argnums=0, allow=())(step)
    plan = planned.plan(*given)
    assert plan.drops_nothing and plan.peak_nbytes <= plan.budget_nbytes
    assert_same(jax.jit(step)(*given), planned(*given))
    with without("masks"):
        unread = jaxremat.optimize(plan.budget_nbytes, donate_argnums=0, allow=())(step)
        assert not unread.plan(*given).drops_nothing
