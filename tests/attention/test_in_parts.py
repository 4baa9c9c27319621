"""Steps without the matrix of scores of their attention: the same numbers, of a fraction of the memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import BATCH, FOUND, HEADS, LENGTH, SHORT, Attend, assert_close, attending, masked
from evaluation import evaluated
from test_trace import runnable

from jaxremat._attention._operations import ATTENTION as ATTEND
from jaxremat._attention._operations import attends, division, is_attention
from jaxremat._model._variant import ATTENTION, LOOP, REVERSED, ROWS, Choice, Variant
from jaxremat._program._compat import shaped
from jaxremat._program._primitives import inner_eqns
from jaxremat._rewrite._trace import Traced, trace

pytestmark = pytest.mark.usefixtures("few_compilations")

IN_PARTS = Variant.of(Choice(ATTENTION, 0, (1,)))


def in_parts(step: Any, *args: Any) -> Traced:
    """The step with attention in parts."""
    return trace(jax.jit(step), args, {}).in_form(IN_PARTS)


def compare(changed: Traced, step: Callable[..., Any], args: Any, tolerance: float) -> None:
    """The results of a step in another form with its own."""
    found = evaluated(jex.jaxpr_as_fun(runnable(changed)))(*jax.tree.leaves(args))
    assert_close(found, jax.tree.leaves(evaluated(step)(*args)), tolerance)


@pytest.mark.parametrize("attend", FOUND.values(), ids=FOUND)
def test_the_same_numbers(attend: Attend) -> None:
    scanned = attend not in (FOUND["plain"], FOUND["grouped"], FOUND["dropout"])
    case = attending(attend, layers=2, scanned=scanned)
    changed = in_parts(case.step, *case.args)
    done = [eqn for eqn in changed.jaxpr.jaxpr.eqns if is_attention(eqn)]
    assert len(done) == (2 if scanned else 4)
    (pattern,) = {eqn.params["pattern"] for eqn in done}  # layers, forward and backward are alike
    axis, count = division(pattern)
    assert axis != pattern.key
    assert count > 1
    assert pattern.sizes[axis] % count == 0
    compare(changed, case.step, case.args, 5e-2 if attend in SHORT else 2e-5)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_in_microbatches(rows: int) -> None:
    """Of one example too: of such gradients are written otherwise."""
    weights = attending(masked, layers=2).args[0]
    x = jax.random.normal(jax.random.key(5), (8, 4 * LENGTH, weights["back"].shape[-1]))

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for i in range(2):
                q, k, v = (jnp.einsum("bti,ihd->bthd", h, weights["into"][i, j]) for j in range(3))
                h = h + jnp.tanh(masked(q, k, v).reshape(h.shape) @ weights["back"][i])
            return (h**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    plain = trace(jax.jit(step), (weights, x), {})
    ((site, (length, _, whole, *_)),) = ((i, row) for i, row in enumerate(plain.rows) if row[2])
    assert whole and length == 8
    changed = plain.in_form(IN_PARTS.also(Choice(ROWS, site, (8 // rows,))))
    done = [eqn for eqn in changed.jaxpr.jaxpr.eqns if is_attention(eqn)]
    assert len(done) == 4
    compare(changed, step, (weights, x), 2e-5)


@pytest.mark.parametrize("attend", FOUND.values(), ids=FOUND)
def test_no_value_is_as_large_as_the_scores(attend: Attend) -> None:
    """But for what dropout makes of random words, and what is made of places alone."""
    case = attending(attend)
    plain = trace(jax.jit(case.step), case.args, {})
    changed = plain.in_form(IN_PARTS)
    keys = LENGTH // 2 if attend is FOUND["crossed"] else LENGTH
    large = [
        [
            v
            for eqn in traced.jaxpr.jaxpr.eqns
            for v in eqn.outvars
            if v.aval.size >= BATCH * HEADS * keys * LENGTH and jnp.issubdtype(v.aval.dtype, jnp.floating)
        ]
        for traced in (plain, changed)
    ]
    assert len(large[0]) >= 8
    assert "random" in str(changed.jaxpr) or not large[1]


def test_a_row_that_sees_nothing() -> None:
    """Minus infinity everywhere is not a number, as it is in the step."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        x = jnp.where((jnp.arange(LENGTH) > 3)[:, None], x, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), v)

    case = attending(attend)
    changed = in_parts(case.step, *case.args)
    wanted = evaluated(case.step)(*case.args)
    found = evaluated(jex.jaxpr_as_fun(runnable(changed)))(*jax.tree.leaves(case.args))
    for got, expected in zip(found, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    assert np.isnan(found[0]).all()


def test_under_checkpoints_of_the_users() -> None:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.checkpoint(masked)(q, k, v)

    for scanned in (False, True):
        case = attending(attend, layers=2, scanned=scanned)
        changed = in_parts(case.step, *case.args)
        assert sum(map(is_attention, changed.jaxpr.jaxpr.eqns)) == (2 if scanned else 4)
        compare(changed, case.step, case.args, 2e-5)


def test_several_examples_at_once() -> None:
    """A step that is mapped over a batch of its own."""
    case = attending(masked)
    changed = in_parts(case.step, *case.args)
    run = jex.jaxpr_as_fun(runnable(changed))
    leaves = [jnp.stack([a, 2 * a]) for a in jax.tree.leaves(case.args)]
    found = jax.jit(jax.vmap(run))(*leaves)
    for i in range(2):
        assert_close([a[i] for a in found], evaluated(run)(*(a[i] for a in leaves)), 1e-5)


def distilled(attend: Attend, *, scanned: bool) -> Any:
    """A step whose loss reads what a network makes that nothing differentiates, and its arguments."""
    case = attending(attend, layers=2)
    weights, x = case.args

    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        q, k, v = (jnp.einsum("bti,ihd->bthd", h, w["into"][i]) for i in range(3))
        return h + jnp.tanh(attend(2 * q, k, v).reshape(h.shape) @ w["back"]), None

    def network(weights: Any, x: jax.Array) -> jax.Array:
        if scanned:
            return jax.lax.scan(layer, x, weights)[0]
        for i in range(2):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
        return x

    def step(student: jax.Array, teacher: Any, x: jax.Array) -> Any:
        def loss(student: jax.Array) -> jax.Array:
            return ((jnp.tanh(x @ student) - network(teacher, x)) ** 2).sum()

        return jax.value_and_grad(loss)(student)

    return step, (jnp.eye(x.shape[-1]), weights, x)


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", ["plain", "masked", "padded", "dropout", "bfloat16"])
def test_where_nothing_differentiates_it(name: str, scanned: bool) -> None:
    """In the bodies of loops too, which stay closed."""
    step, args = distilled(FOUND[name], scanned=scanned)
    changed = in_parts(step, *args)
    eqns = changed.jaxpr.jaxpr.eqns
    done = [inner for eqn in eqns for inner in (eqn, *inner_eqns(eqn)) if is_attention(inner)]
    assert [eqn.primitive for eqn in done] == [ATTEND] * (1 if scanned else 2)
    assert len(changed.attention) == len(done)
    assert any(attends(eqn) and not is_attention(eqn) for eqn in eqns) is scanned
    compare(changed, step, args, 5e-2 if name == "bfloat16" else 2e-5)


@pytest.mark.parametrize(
    "choice", [Choice(LOOP, 0, (2, 3)), Choice(REVERSED, 1, (1,))], ids=["levels", "undone"]
)
def test_forward_passes_that_forms_run_by_themselves(choice: Choice) -> None:
    case = attending(masked, layers=6, scanned=True)
    weights, x = case.args

    def step(weights: Any, x: jax.Array) -> Any:
        def layer(pair: Any, w: Any) -> Any:
            a, b = pair
            q, k, v = (jnp.einsum("bti,ihd->bthd", b, w["into"][i]) for i in range(3))
            a = a + jnp.tanh(masked(q, k, v).reshape(x.shape) @ w["back"])
            return (a, b + jnp.tanh(a)), None

        return jax.value_and_grad(lambda w: (jax.lax.scan(layer, (x, x), w)[0][1] ** 2).sum())(weights)

    changed = trace(jax.jit(step), (weights, x), {}).in_form(IN_PARTS.also(choice))
    closed = [eqn for eqn in changed.jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert closed and all(map(attends, closed))
    inside = (shaped(v) for eqn in closed for inner in inner_eqns(eqn) for v in inner.outvars)
    assert all(a.shape.count(LENGTH) < 2 for a in inside if jnp.issubdtype(a.dtype, jnp.floating))
    # Inputs that are computed from outputs differ in the last bits, and each layer adds some.
    compare(changed, step, (weights, x), 1e-4 if choice.rule == REVERSED else 2e-5)


def of_buckets(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
    """A bias by distance, learned for each of some buckets, as T5's."""
    apart = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :]
    bias = table[jnp.clip(apart + 8, 0, 15)].transpose(2, 0, 1)[None]
    x = jnp.where(apart >= 0, jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), v)


def of_places(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """A bias that is learned for each pair of places, in bfloat16."""
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k) + 2 * bias.astype(jnp.float32)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), v)


def of_slopes(q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array) -> jax.Array:
    """A bias that grows with the distance, by a slope that each head learns, behind a soft cap."""
    apart = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :])
    x = 5 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 5) - jnp.exp(slopes)[:, None, None] * apart
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), v)


LEARNED = {
    of_buckets: jnp.linspace(-1, 1, 16 * HEADS).reshape(16, HEADS),
    of_places: jnp.sin(jnp.arange(HEADS * LENGTH * LENGTH))
    .reshape(HEADS, LENGTH, LENGTH)
    .astype(jnp.bfloat16),
    of_slopes: jnp.linspace(-3, -1, HEADS),
}


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("attend", LEARNED, ids=lambda attend: attend.__name__)
def test_biases_that_are_learned(attend: Any, scanned: bool) -> None:
    """One for all layers."""
    weights, x = attending(masked, layers=2).args

    def layer(h: jax.Array, w: Any, bias: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bti,ihd->bthd", h, w["into"][i]) for i in range(3))
        return h + jnp.tanh(attend(q, k, v, bias).reshape(h.shape) @ w["back"])

    def step(weights: Any, bias: jax.Array, x: jax.Array) -> Any:
        def loss(weights: Any, bias: jax.Array) -> jax.Array:
            if scanned:
                return (jax.lax.scan(lambda h, w: (layer(h, w, bias), None), x, weights)[0] ** 2).sum()
            h = x
            for i in range(2):
                h = layer(h, jax.tree.map(lambda w, i=i: w[i], weights), bias)
            return (h**2).sum()

        return jax.value_and_grad(loss, (0, 1))(weights, bias)

    args = weights, LEARNED[attend], x
    changed = in_parts(step, *args)
    done = [eqn for eqn in changed.jaxpr.jaxpr.eqns if is_attention(eqn)]
    assert len(done) == (2 if scanned else 4)
    (learned,) = {eqn.params["pattern"].learned for eqn in done}
    assert len(learned) == 1
    made = (v.aval for eqn in changed.jaxpr.jaxpr.eqns for v in eqn.outvars)
    assert all(
        a.size < BATCH * HEADS * LENGTH * LENGTH for a in made if jnp.issubdtype(a.dtype, jnp.floating)
    )
    compare(changed, step, args, 2e-2 if attend is of_places else 2e-5)
