"""Several regions of a step in chunks together, and regions in the bodies of loops: which, and that results are the
same."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from chains import descent
from evaluation import evaluated
from forms import of_chunks

from jaxremat._model._variant import INSIDE, LOOP, Choice
from jaxremat._program._compat import shaped
from jaxremat._program._primitives import inner_eqns, is_in_chunks
from jaxremat._report._loop_forms import loop_forms
from jaxremat._rewrite._kernel_choice import equivalence
from jaxremat._rewrite._passes import runnable
from jaxremat._rewrite._trace import Traced, trace

NODES, WIDE, LAYERS, WORDS = 128, 64, 4, 2000
LARGE = NODES * NODES * WIDE // 2


def layer(w: Any, h: Any) -> Any:
    """Messages between all pairs of nodes, some of them dropped, summed over the senders."""
    messages = jnp.tanh(h[:, None] @ w["in"] + h[None] @ w["in"])
    messages = jax.nn.silu(messages @ w["mid"])
    kept = jax.random.bernoulli(jax.random.key(3), 0.9, (NODES, NODES, 1)).astype(jnp.float32)
    return h + (messages * kept).mean(1) @ w["out"]


def unrolled(params: Any, h: Any) -> Any:
    for i in range(LAYERS):
        h = layer(jax.tree.map(lambda w, i=i: w[i], params), h)
    return (h**2).mean()


def scanned(params: Any, h: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (layer(w, h), None), h, params)
    return (h**2).mean()


def arguments() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"in": (16, WIDE), "mid": (WIDE, WIDE), "out": (WIDE, 16)}
    params = {
        name: jnp.asarray(rng.normal(size=(LAYERS, *shape)) / shape[0] ** 0.5, jnp.float32)
        for name, shape in shapes.items()
    }
    return params, jnp.asarray(rng.normal(size=(NODES, 16)), jnp.float32)


def results(closed: jex.ClosedJaxpr, args: Any) -> list[Any]:
    return evaluated(jex.jaxpr_as_fun(closed))(*jax.tree.leaves(args))


def check_same(traced: Traced, changed: Traced, args: Any) -> list[jex.JaxprEqn]:
    """Compare the results of two forms; return the equations of the second, those in loops, but not in chunks, too."""
    closed = runnable(changed.program)
    jex.check_jaxpr(closed.jaxpr)
    for a, b in zip(results(traced.flat, args), results(closed, args), strict=True):
        scale = float(jnp.abs(a).max()) or 1.0
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=2e-5)
    found = []
    for eqn in closed.jaxpr.eqns:
        found += [eqn] if is_in_chunks(eqn) or eqn.primitive.name != "scan" else inner_eqns(eqn)
    return found


def largest(eqns: list[jex.JaxprEqn]) -> int:
    """Return the most numbers in a result of an equation that is not in chunks."""
    within = {id(inner) for eqn in eqns if is_in_chunks(eqn) for inner in inner_eqns(eqn)}
    return max(math.prod(shaped(v).shape) for eqn in eqns if id(eqn) not in within for v in eqn.outvars)


def test_layers_that_mix_all_nodes_are_in_regions_of_their_own() -> None:
    args = arguments()
    traced = trace(jax.jit(descent(unrolled)), args, {})
    rows = [region for region in traced.sites.regions if not region.whole]
    assert len(rows) > 1
    assert sum(len(region.loops) for region in rows) == 2 * LAYERS
    assert all(region.rows == NODES and region.repeated for region in rows)
    changed = traced.in_form(of_chunks(*(8 * (1 + i % 2) for i in range(len(rows)))))
    eqns = check_same(traced, changed, args)
    assert sum(map(is_in_chunks, eqns)) == 2 * LAYERS
    assert largest(eqns) < LARGE <= largest(list(traced.flat.jaxpr.eqns))


def test_one_of_several_regions_may_be_in_chunks() -> None:
    args = arguments()
    traced = trace(jax.jit(descent(unrolled)), args, {})
    eqns = check_same(traced, traced.in_form(of_chunks(0, 4)), args)
    assert sum(map(is_in_chunks, eqns)) == len(traced.sites.regions[1].loops)


@pytest.mark.parametrize("levels", [(), (2, 2)])
def test_bodies_of_loops_have_regions(levels: tuple[int, ...]) -> None:
    args = arguments()
    traced = trace(jax.jit(descent(scanned)), args, {})
    (region,) = traced.sites.regions
    assert region.loop >= 0 and region.trips == LAYERS and len(region.loops) == 2
    changed = traced.in_form(of_chunks(8).also(Choice(LOOP, 0, levels)))
    eqns = check_same(traced, changed, args)
    assert sum(map(is_in_chunks, eqns)) >= 2
    assert largest(eqns) < LARGE <= NODES * NODES * WIDE


def head_loss(params: Any, x: Any, y: Any) -> Any:
    logits = jnp.tanh(x @ params["in"]) @ params["out"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], axis=-1).mean()


def accumulating(loss: Callable[..., Any], add: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(params: Any, xs: Any, ys: Any) -> Any:
        def body(total: Any, batch: Any) -> Any:
            return jax.tree.map(add, total, jax.grad(loss)(params, *batch)), None

        grads, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), (xs, ys))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def head_arguments(*batch: int) -> Any:
    rng = np.random.default_rng(0)
    params = {
        "in": jnp.asarray(rng.normal(size=(16, 32)) / 4, jnp.float32),
        "out": jnp.asarray(rng.normal(size=(32, WORDS)) / 6, jnp.float32),
    }
    xs = jnp.asarray(rng.normal(size=(*batch, 16)), jnp.float32)
    return params, xs, jnp.asarray(rng.integers(0, WORDS, batch))


def fills(eqns: list[jex.JaxprEqn], shape: tuple[int, ...]) -> int:
    """Return how many arrays of this shape are filled with one number."""
    made = (eqn for eqn in eqns if eqn.primitive.name == "broadcast_in_dim")
    return sum(shaped(v).shape == shape for eqn in made for v in eqn.outvars)


@pytest.mark.parametrize("add", [jnp.add, lambda total, grad: total + grad / 3 * 2], ids=["sum", "scaled"])
def test_gradient_accumulation_has_the_regions_of_its_body(add: Callable[[Any, Any], Any]) -> None:
    args = params, *_ = head_arguments(3, 512)
    traced = trace(jax.jit(accumulating(head_loss, add)), args, {})
    rows, batches = (i for i, region in enumerate(traced.sites.regions) if region.loop >= 0)
    for site in rows, batches:
        assert traced.sites.regions[site].trips == 3
        changed = traced.in_form(of_chunks(*(8 * (i == site) for i in range(site + 1))))
        eqns = check_same(traced, changed, args)
        assert largest(eqns) < 512 * WORDS
    (loop,) = (eqn for eqn in runnable(changed.program).jaxpr.eqns if eqn.primitive.name == "scan")
    assert [eqn.params["length"] for eqn in inner_eqns(loop) if eqn.primitive.name == "scan"] == [8]
    # Microbatches add to what the loop around has accumulated: there is no second sum of gradients.
    assert fills(inner_eqns(loop), params["out"].shape) == 0
    assert equivalence(traced.flat).difference(runnable(changed.program)) is None


@pytest.mark.parametrize("loops", [1, 0], ids=["accumulated", "at once"])
def test_microbatches_have_regions_inside(loops: int) -> None:
    """Of each example the words; none of those of more words than its own."""
    args = head_arguments(*(3,) * loops, 8, 128)
    step = accumulating(head_loss, jnp.add) if loops else descent(lambda p, batch: head_loss(p, *batch))
    args = args if loops else (args[0], args[1:])
    traced = trace(jax.jit(step), args, {})
    (whole,) = (i for i, region in enumerate(traced.sites.regions) if region.whole)
    form = of_chunks(*(0,) * whole, 2)
    (region,) = traced.regions_inside(form)
    assert (region.loop >= 0, region.trips, region.whole) == (True, 2 * 3**loops, False)
    changed = traced.in_form(form.also(Choice(INSIDE, 0, region.choices[-1:])))
    check_same(traced, changed, args)
    closed = runnable(changed.program)
    assert equivalence(traced.flat).difference(closed) is None
    lengths = [
        eqn.params["length"] for eqn in (*closed.jaxpr.eqns, *within(closed.jaxpr.eqns)) if is_scan(eqn)
    ]
    assert lengths[loops:] == [2, region.choices[-1]]
    made = (shaped(v).shape for eqn in within(closed.jaxpr.eqns) if not is_scan(eqn) for v in eqn.outvars)
    logits = [math.prod(shape) for shape in made if WORDS in shape and len(shape) == 3]
    assert max(logits) == 8 * 128 * WORDS // 2 // region.choices[-1]
    assert [str(each) for each in loop_forms((), changed.form, (), traced.rows, changed.rows_inside)] == [
        f"{'an iteration' if loops else 'the step'}: in 2 microbatches, with accumulated gradients",
        f"rows at {region.source}, in each microbatch, with the operations that make and read them: "
        f"in {region.choices[-1]} chunks",
    ]


def within(eqns: Sequence[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
    """Return the equations in the bodies of loops and calls."""
    return [each for eqn in eqns for each in inner_eqns(eqn)]


def is_scan(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan"


def test_gradients_of_what_two_regions_read_are_one_sum() -> None:
    """That of the second begins with that of the first."""

    def loss(params: Any, x: Any) -> Any:
        first = jax.nn.log_softmax(jnp.tanh(x @ params["in"]) @ params["out"])[..., 0].mean()
        second = jax.nn.log_softmax(jnp.tanh(x * first @ params["in"]) @ params["out"])[..., 1].mean()
        return -first - second

    params, *_ = args = head_arguments(2048)
    traced = trace(jax.jit(descent(loss)), args[:2], {})
    able = [not region.whole for region in traced.sites.regions]
    assert sum(able) == 2
    for sites, filled in (able[:1], 0), (able, 1):
        changed = traced.in_form(of_chunks(*(8 * each for each in sites)))
        check_same(traced, changed, args[:2])
        closed = runnable(changed.program)
        assert equivalence(traced.flat).difference(closed) is None
        eqns = [each for eqn in closed.jaxpr.eqns if is_in_chunks(eqn) for each in inner_eqns(eqn)]
        assert fills(eqns, params["out"].shape) == filled


def test_scores_of_long_sequences_hide_no_other_regions() -> None:
    """They are 16 times the logits, and loops stack them for all layers: attention does without them."""
    tokens, width, words = 16384, 64, 1024

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        query, key, value = (x @ each for each in w)
        return x + jax.nn.softmax(query @ key.T) @ value, None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(layer, x, params["layers"])
        return -jax.nn.log_softmax(y @ params["head"])[:, 0].mean()

    shapes = {"layers": (LAYERS, 3, width, width), "head": (width, words)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    (logits,) = trace(jax.jit(descent(loss)), (params, x), {}).sites.regions
    assert (logits.rows, logits.loop) == (tokens, -1)


def test_the_mask_of_a_long_sequence_hides_no_regions() -> None:
    """Loops alone read it, and the numbers that it is made of are 16 times the logits."""
    tokens, width, words = 16384, 64, 1024

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            query, key, value = (x @ each for each in w)
            scores = jnp.where(jnp.tri(tokens, dtype=bool), query @ key.T, -1e30)
            return x + jax.nn.softmax(scores) @ value, None

        y, _ = jax.lax.scan(layer, x, params["layers"])
        return -jax.nn.log_softmax(y @ params["head"])[:, 0].mean()

    shapes = {"layers": (LAYERS, 3, width, width), "head": (width, words)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    found = trace(jax.jit(descent(loss)), (params, x), {}).sites.regions
    assert [(region.rows, region.loop) for region in found if region.loop < 0] == [(tokens, -1)]
