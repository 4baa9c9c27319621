"""Plans of reversible networks: what they need, what they cost, what they say, and that nobody gets one unasked."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import descent
from comparing import assert_close
from jax import lax

import jaxremat
from jaxremat import ArgumentError, MinCut
from jaxremat._model._variant import REVERSED

pytestmark = pytest.mark.usefixtures("few_compilations")

ROWS, WIDTH, DEPTH = 512, 64, 16


def coupled(pair: Any, layer: Any) -> Any:
    x1, x2 = pair
    y1 = x1 + jnp.tanh(x2 @ layer["f"]) @ layer["down"]
    return y1, x2 + jax.nn.gelu(y1 @ layer["g"])


def unrolled(weights: Any, x: Any) -> jax.Array:
    pair = (x @ weights[0]["g"], x)
    for layer in weights:
        pair = coupled(pair, layer)
    return normalised(pair)


def scanned(weights: Any, x: Any) -> jax.Array:
    pair = (x @ weights["g"][0], x)
    return normalised(lax.scan(lambda pair, layer: (coupled(pair, layer), None), pair, weights)[0])


def normalised(pair: Any) -> jax.Array:
    """Statistics cross the batch, so that it cannot be done part after part."""
    a, b = ((each - each.mean(0)) / (each.std(0) + 1) for each in pair)
    return jnp.mean(jnp.sin(a * b))


def arguments(net: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    layers = [
        {"f": normal(WIDTH, 2 * WIDTH), "down": normal(2 * WIDTH, WIDTH), "g": normal(WIDTH, WIDTH)}
        for _ in range(DEPTH)
    ]
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    return stacked if net is scanned else layers, normal(ROWS, WIDTH)


def planned(net: Any, share: float, **options: Any) -> tuple[Any, Any]:
    """The step and its plan within this share of the temporaries: what is undone hardly depends on the solver."""
    step, args = descent(net), arguments(net)
    options |= {"donate_argnums": 0, "planning": jaxremat.Planning(solver=MinCut())}
    made = jaxremat.optimize(f"{share:.0%} of temporaries", **options)(step)
    return made, made.plan(*args)


@functools.cache
def undone(net: Any) -> tuple[Any, Any]:
    return planned(net, {unrolled: 0.23, scanned: 0.08}[net], allow=("reversible",))


SAID = {
    unrolled: "blocks at test_reversed_plans.py:{} (coupled): undone in the backward pass, from the last",
    scanned: "loop of 16 iterations at test_reversed_plans.py:{} (scanned): undone in the backward pass",
}


@pytest.mark.parametrize("net", [unrolled, scanned])
def test_what_can_be_undone_is_where_that_is_allowed(net: Any) -> None:
    step, plan = undone(net)
    assert plan.form.settings(REVERSED)
    assert plan.compiled_peak_nbytes <= plan.budget_nbytes
    assert plan.overhead < 0.5
    (form,) = plan.loops
    before, after = SAID[net].split("{}")
    assert str(form).startswith(before) and after in str(form)
    assert str(form) in str(plan)
    assert str(form)[1:] in " ".join(str(plan.report()).split())  # begins a sentence there
    assert jaxremat.Plan.from_json(plan.to_json()) == plan
    args = arguments(net)
    want = jax.jit(descent(net))(*args)
    assert_close(step(*args), want, rtol=1e-4, atol=1e-5)
    again = jaxremat.optimize(plan=jaxremat.Plan.from_json(plan.to_json()), donate_argnums=0)(descent(net))
    jax.tree.map(np.testing.assert_array_equal, again(*arguments(net)), step(*arguments(net)))


@pytest.mark.parametrize("net", [unrolled, scanned])
def test_training_goes_as_without(net: Any) -> None:
    made, plan = undone(net)
    assert plan.form.settings(REVERSED)
    curves = []
    for step in (jax.jit(descent(net)), made):
        weights, x = arguments(net)
        losses = []
        for _ in range(20):
            weights, loss = step(weights, x)
            losses.append(float(loss))
        curves.append(losses)
    want, found = np.asarray(curves)
    assert want[-1] < 0.5 * want[0]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-3 * np.ptp(want))


def test_it_needs_less_than_recomputing_can() -> None:
    """Of a long loop all carries but one are computed back."""
    step, args = descent(scanned), arguments(scanned)
    least = {
        kinds: jaxremat.plan(step, *args, budget="min", donate_argnums=0, allow=kinds)
        for kinds in ((), ("reversible",))
    }
    found = {
        kinds: plan.memory.temporaries_nbytes for kinds, plan in least.items() if plan.memory is not None
    }
    assert found["reversible",] < 0.6 * found[()]
    assert least["reversible",].overhead < least[()].overhead


def test_nothing_is_undone_unasked() -> None:
    _, plan = planned(scanned, 0.3)
    assert not plan.form.settings(REVERSED)
    with pytest.raises(ArgumentError, match='"reversible"'):
        jaxremat.optimize("1GiB", allow=("reversable",))


def test_nothing_is_undone_where_the_user_decides() -> None:
    _, plan = planned(scanned, 0.3, allow=("reversible",), pins={"tanh": "recompute"})
    assert not plan.form.settings(REVERSED)
