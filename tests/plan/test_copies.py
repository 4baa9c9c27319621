"""Plans that keep values in fewer bits: what they save, what becomes of losses and gradients, and what they say."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxremat
from jaxremat import ArgumentError

pytestmark = pytest.mark.usefixtures("few_compilations")

ROWS, WIDTH, LAYERS = 2048, 128, 4
KINDS = {"bf16_residuals": "bfloat16", "fp8_residuals": "float8", "int8_residuals": "int8"}
OPTIMIZER = optax.adam(1e-3)


def unrolled(params: Any, x: Any) -> Any:
    for up, down in params:
        x = x + jnp.sin(x @ up) @ down
    return x


def scanned(params: Any, x: Any) -> Any:
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *params)
    return lax.scan(lambda x, layer: (x + jnp.sin(x @ layer[0]) @ layer[1], None), x, stacked)[0]


def training(net: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((net(p, x) - y) ** 2))(params)
        updates, state = OPTIMIZER.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    return step


def arguments(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype)

    params = [(normal(WIDTH, 4 * WIDTH), normal(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    return params, OPTIMIZER.init(params), normal(ROWS, WIDTH), normal(ROWS, WIDTH)


@functools.cache
def planned(net: Any, share: float, *kinds: str, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    step, args = training(net), arguments(dtype)
    made = jaxremat.optimize(f"{share:.0%} of temporaries", allow=kinds)(step)
    return made, made.plan(*args)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_make_a_plan_cheaper_and_are_in_its_report(kind: str) -> None:
    exact, plan = (planned(unrolled, 0.5, *kinds)[1] for kinds in ((), (kind,)))
    assert plan.overhead < exact.overhead
    assert plan.compiled_peak_nbytes <= plan.budget_nbytes
    (copied,) = plan.copies
    assert copied.kind == KINDS[kind]
    assert copied.nbytes <= copied.whole_nbytes * (0.5 if kind == "bf16_residuals" else 0.3)
    assert str(copied) in str(plan)
    assert str(copied)[1:] in " ".join(str(plan.report()).split())  # begins a sentence there
    assert jaxremat.Plan.from_json(plan.to_json()) == plan
    assert not exact.copies


@pytest.mark.parametrize(
    ("net", "kind"), [*((unrolled, kind) for kind in KINDS), (scanned, "bf16_residuals")]
)
def test_the_loss_is_exact_and_gradients_are_near(net: Any, kind: str) -> None:
    """First moments say how far gradients are apart."""
    step, plan = planned(net, 0.5, kind)
    args = arguments()
    _, (adam, *_), loss = step(*args)
    _, (plain, *_), expected = jax.jit(training(net))(*args)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    both = zip(jax.tree.leaves(adam.mu), jax.tree.leaves(plain.mu), strict=True)
    found = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in both]
    assert max(found) < {"bf16_residuals": 0.01, "int8_residuals": 0.02, "fp8_residuals": 0.06}[kind]
    assert (max(found) > 1e-6) == bool(plan.copies)  # not a no-op
    if net is unrolled:
        assert plan.copies


def test_half_precision_has_copies_in_a_quarter() -> None:
    _, plan = planned(unrolled, 0.5, *KINDS, dtype=jnp.bfloat16)
    assert {copied.kind for copied in plan.copies} <= {"float8"}


def test_training_goes_as_without() -> None:
    step, plan = planned(unrolled, 0.5, "bf16_residuals")
    assert plan.copies
    plain = jax.jit(training(unrolled))
    losses: dict[str, list[float]] = {}
    for name, run in (("planned", step), ("plain", plain)):
        params, state, x, y = arguments()
        for _ in range(30):
            params, state, loss = run(params, state, x, y)
            losses.setdefault(name, []).append(float(loss))
    assert losses["plain"][-1] < 0.9 * losses["plain"][0]
    np.testing.assert_allclose(losses["planned"], losses["plain"], rtol=0.02)


def test_compare_says_how_far_gradients_are_apart() -> None:
    step, _ = planned(unrolled, 0.5, "bf16_residuals")
    args = arguments()
    found = jaxremat.compare(step, *args)
    moments = [leaf for leaf in found.leaves if ".mu" in leaf.path]
    assert len(moments) == 2 * LAYERS
    assert 1e-6 < max(leaf.relative for leaf in moments) < 0.02
    assert not found.agrees
    assert found.worst.relative == max(leaf.relative for leaf in found.leaves)
    furthest = sorted(found.leaves, key=lambda leaf: -leaf.relative)[:20]
    assert all(leaf.path in str(found) for leaf in furthest)
    assert f"and {len(found.leaves) - 20} more" in str(found)
    assert jaxremat.compare(planned(unrolled, 0.5)[0], *args).agrees


def test_a_plan_with_copies_is_followed_elsewhere() -> None:
    step, plan = planned(unrolled, 0.5, "bf16_residuals")
    args = arguments()
    again = jaxremat.optimize(plan=jaxremat.Plan.from_json(plan.to_json()))(training(unrolled))
    for a, b in zip(jax.tree.leaves(again(*args)), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_rounded_where_the_user_decides() -> None:
    step, args = training(unrolled), arguments()
    options: Any = {"budget": "60% of temporaries", "allow": "bf16_residuals"}
    plan = jaxremat.plan(step, *args, pins={"sin": "recompute"}, **options)
    assert not plan.copies


def test_an_unknown_kind() -> None:
    with pytest.raises(ArgumentError, match="bf16_residuals"):
        jaxremat.optimize("1GiB", allow=("bf17_residuals",))
