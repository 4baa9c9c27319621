"""Functions that are differentiated later are done part after part, where that holds less than any choice of what is
saved: they stay what they are, and need no more memory than by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxremat
import jaxremat.flax
from jaxremat._emit._joint import flattened, in_parts
from jaxremat._plan._residuals import is_proved
from jaxremat._program._compat import shaped
from jaxremat._program._primitives import inner_eqns
from jaxremat._rewrite import _row_chunks
from jaxremat._rewrite._function_parts import divisions

OPTIONS = jaxremat.compiler_options("cpu")
EMITTERS = ("policy", "custom_vjp")
TOKENS, WIDTH, HIDDEN, WORDS, RAYS, SAMPLES = 1024, 128, 768, 4000, 256, 48
rng = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)


def gated(x: Any, w: Any) -> Any:
    """A feed-forward block over tokens, with a norm, a gate and a residual connection."""
    h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * w["scale"]
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def cross_entropy(x: Any, w: Any) -> Any:
    """The loss of a large vocabulary: logits with a soft cap, words that are left out, a mean of the others."""
    logits = 30.0 * jnp.tanh(x @ w["words"] / 30.0)
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, w["next"][:, None], -1)[:, 0]
    counts = w["next"] > WORDS // 8
    return jnp.sum(losses * counts) / jnp.maximum(counts.sum(), 1)


def rendered(x: Any, w: Any) -> Any:
    """The colours of rays: samples along each, their encoding, a decoder with rectifiers, compositing."""
    begin, direction = x[:, :3], x[:, 3:6]
    points = begin[:, None] + direction[:, None] * jnp.linspace(0.0, 1.0, SAMPLES)[:, None]
    waves = (points[..., None] * 2.0 ** jnp.arange(5)).reshape(*points.shape[:2], 15)
    h = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)
    for name in ("in", "mid"):
        h = jax.nn.relu(h @ w[name])
    out = h @ w["out"]
    density = jax.nn.softplus(out[..., 0]) / SAMPLES
    through = jnp.exp(-jnp.cumsum(density, 1) + density)
    return jnp.sum((through * (1 - jnp.exp(-density)))[..., None] * jax.nn.sigmoid(out[..., 1:]), 1)


def by_parts(fn: Callable[..., Any], x: Any, w: Any, parts: int = 8) -> Any:
    """What people write."""
    rows = x.reshape(parts, -1, *x.shape[1:])
    return jax.lax.map(jax.checkpoint(lambda each: fn(each, w)), rows).reshape(x.shape[0], -1)


def losses_by_parts(x: Any, w: Any, parts: int = 8) -> Any:
    def part(total: Any, each: Any) -> Any:
        rows, words = each
        counts = words > WORDS // 8
        losses = cross_entropy(rows, {**w, "next": words}) * jnp.maximum(counts.sum(), 1)
        return (total[0] + losses, total[1] + counts.sum()), None

    chunks = x.reshape(parts, -1, x.shape[1]), w["next"].reshape(parts, -1)
    (total, count), _ = jax.lax.scan(jax.checkpoint(part), (0.0, 0), chunks)
    return total / count


@dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    by_hand: Callable[..., Any]
    x: Any
    w: Any

    def __str__(self) -> str:
        return self.fn.__name__


words = jnp.asarray(rng.integers(0, WORDS, TOKENS))
CASES = (
    Case(
        gated,
        lambda x, w: by_parts(gated, x, w),
        normal(TOKENS, WIDTH),
        {
            "scale": jnp.ones(WIDTH), "gate": normal(WIDTH, HIDDEN), "up": normal(WIDTH, HIDDEN),
            "down": normal(HIDDEN, WIDTH),
        },
    ),
    Case(cross_entropy, losses_by_parts, normal(TOKENS, WIDTH), {"words": normal(WIDTH, WORDS), "next": words}),
    Case(
        rendered,
        lambda x, w: by_parts(rendered, x, w),
        normal(RAYS, 6),
        {"in": normal(30, 96), "mid": normal(96, 96), "out": normal(96, 4)},
    ),
)  # fmt: skip


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.sin(fn(x, w)))

    return jax.grad(loss, (0, 1), allow_int=True)


def smooth(tree: Any) -> list[Any]:
    return [a for a in jax.tree.leaves(tree) if a.dtype != jax.dtypes.float0]


def assert_close(found: Any, expected: Any, within: float = 1e-5) -> None:
    for a, b in zip(smooth(found), smooth(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=within * float(jnp.abs(b).max()) + 1e-7)


def temporaries(fn: Callable[..., Any], case: Case) -> int:
    return jaxremat.memory(gradient(fn), case.x, case.w).temporaries_nbytes


@pytest.mark.parametrize("emit", EMITTERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_least_is_no_more_than_by_hand(case: Case, emit: str) -> None:
    planned = jaxremat.checkpoint(case.fn, "min", emit=emit)
    plan = planned.plan(case.x, case.w)
    assert [(form.length, form.rows) for form in plan.parts] == [(case.x.shape[0], True)]
    assert f"in {plan.parts[0].levels[0]} chunks" in str(plan)
    found = jax.jit(gradient(planned), compiler_options=OPTIONS)(case.x, case.w)
    assert_close(found, gradient(case.fn)(case.x, case.w))
    assert temporaries(planned, case) <= temporaries(case.by_hand, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_not_allowed_is_not_done(case: Case) -> None:
    planned = jaxremat.checkpoint(case.fn, "min", allow=())
    assert not planned.plan(case.x, case.w).parts
    assert temporaries(planned, case) > 2 * temporaries(case.by_hand, case)


@pytest.mark.parametrize("emit", EMITTERS)
def test_budgets_that_nothing_else_meets(emit: str) -> None:
    case = CASES[0]
    budget = 1 << 20
    with pytest.raises(jaxremat.InfeasibleBudgetError):
        jaxremat.checkpoint(case.fn, budget, emit=emit, allow=()).plan(case.x, case.w)
    planned = jaxremat.checkpoint(case.fn, budget, emit=emit)
    plan = planned.plan(case.x, case.w)
    assert plan.parts and plan.held_nbytes <= budget
    assert_close(gradient(planned)(case.x, case.w), gradient(case.fn)(case.x, case.w))
    assert jaxremat.HeldPlan.from_json(plan.to_json()) == plan
    shared = jaxremat.checkpoint(case.fn, "10% of residuals", emit=emit).plan(case.x, case.w)
    assert shared.plain_nbytes == plan.plain_nbytes
    assert shared.parts and shared.held_nbytes <= shared.budget_nbytes == shared.plain_nbytes // 10
    with pytest.raises(jaxremat.InfeasibleBudgetError, match="plain JAX keeps") as raised:
        jaxremat.checkpoint(case.fn, 64, emit=emit).plan(case.x, case.w)
    least = raised.value.min_peak_nbytes
    assert 64 < least < budget
    assert jaxremat.checkpoint(case.fn, least, emit=emit).plan(case.x, case.w).held_nbytes <= least


def test_budgets_that_need_no_parts_have_none() -> None:
    case = CASES[0]
    for budget in ("dots", "free", "95% of residuals"):
        assert not jaxremat.checkpoint(case.fn, budget).plan(case.x, case.w).parts


@pytest.mark.parametrize("emit", EMITTERS)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_rows_that_no_number_of_parts_divides(case: Case, emit: str) -> None:
    rows = 1021
    x, w = case.x[:rows], {name: a[:rows] if name == "next" else a for name, a in case.w.items()}
    planned = jaxremat.checkpoint(case.fn, "min", emit=emit)
    (form,) = planned.plan(x, w).parts
    assert form.length == rows and rows % form.levels[0]
    assert_close(planned(x, w), case.fn(x, w))
    found = jax.jit(gradient(planned), compiler_options=OPTIONS)(x, w)
    assert_close(found, gradient(case.fn)(x, w))


def test_random_numbers_are_those_of_the_whole() -> None:
    w = CASES[0].w

    def dropped(x: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(kept, gated(x, w), 0.0)

    x, key = CASES[0].x, jax.random.key(3)
    planned = jaxremat.checkpoint(dropped, "min")
    assert planned.plan(x, key).parts
    np.testing.assert_array_equal(planned(x, key) == 0, dropped(x, key) == 0)

    def mean(fn: Any) -> Any:
        return jax.jit(jax.grad(lambda x: jnp.sum(fn(x, key) ** 2)), compiler_options=OPTIONS)(x)

    np.testing.assert_array_equal(mean(planned) == 0, mean(dropped) == 0)
    assert_close(mean(planned), mean(dropped))


@jax.custom_jvp
def rounded(x: Any) -> Any:
    return jnp.round(x * 4) / 4


@rounded.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """The gradient goes straight through, but for its scale."""
    (x,), (t,) = primals, tangents
    return rounded(x), t * (1.0 + 0.1 * rounded(x))


def test_functions_with_derivatives_of_their_own_keep_them() -> None:
    case = CASES[0]

    def quantised(x: Any, w: Any) -> Any:
        scores = jax.nn.softmax(rounded(gated(x, w)) @ w["gate"])
        return jax.nn.relu(scores @ w["down"] - 0.01)

    planned = jaxremat.checkpoint(quantised, "min")
    assert planned.plan(case.x, case.w).parts
    plain, ours = gradient(quantised), gradient(planned)
    assert_close(ours(case.x, case.w), plain(case.x, case.w))
    tangent = jnp.cos(case.x), case.w
    for a, b in zip(
        jax.jvp(planned, (case.x, case.w), tangent),
        jax.jvp(quantised, (case.x, case.w), tangent),
        strict=True,
    ):
        assert_close(a, b)

    def again(fn: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(fn(x, case.w)[0] ** 2))(case.x)

    assert_close(again(ours), again(plain))


def test_short_numbers_are_added_up_in_long_ones() -> None:
    x, w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (CASES[0].x, CASES[0].w))
    planned = jaxremat.checkpoint(gated, "min")
    assert planned.plan(x, w).parts
    closed = jax.make_jaxpr(gradient(planned))(x, w)
    scans = [
        eqn for each in closed.jaxpr.eqns for eqn in (each, *inner_eqns(each)) if eqn.primitive.name == "scan"
    ]
    carried = {
        shaped(v).dtype
        for eqn in scans
        for v in eqn.outvars[: eqn.params.get("num_carry", 0)]
        if shaped(v).shape in {a.shape for a in jax.tree.leaves(w)}
    }
    assert carried <= {jnp.dtype(jnp.float32)}
    exact = gradient(gated)(*jax.tree.map(lambda a: a.astype(jnp.float32), (x, w)))
    found, plain = gradient(planned)(x, w), gradient(gated)(x, w)

    def apart(some: Any) -> float:
        return max(
            float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
            for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(exact), strict=True)
        )

    assert apart(found) <= 1.5 * apart(plain)


def test_layers_and_transformations() -> None:
    case = CASES[0]
    planned = jaxremat.checkpoint(gated, "min")

    def layers(fn: Any) -> Any:
        return lambda x, w: jax.lax.scan(lambda x, _: (fn(x, w), None), x, length=3)[0]

    found = jax.jit(gradient(layers(planned)), compiler_options=OPTIONS)(case.x, case.w)
    assert_close(found, gradient(layers(gated))(case.x, case.w))

    def mapped(fn: Any) -> Any:
        return jax.vmap(gradient(fn), (0, None))(jnp.stack([case.x, case.x + 1]), case.w)

    assert_close(mapped(planned), mapped(gated))


def test_names_and_hints_of_the_user_stay() -> None:
    case = CASES[0]

    def marked(x: Any, w: Any) -> Any:
        h = jaxremat.hint(checkpoint_name(x @ w["gate"], "wide"), "save")
        return jax.nn.silu(h) @ w["down"] + gated(x, w)

    plan = jaxremat.checkpoint(marked, "min", emit="custom_vjp").plan(case.x, case.w)
    (action,) = (action for action in plan.actions if action.name == "wide")
    assert plan.parts and action.action == "save"


def test_what_is_not_proved_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    function = flattened(gated, [case.x, case.w])
    division = divisions(function.closed)[0][1]
    assert is_proved(function, division)
    real = _row_chunks.stacked

    def shifted(whole: Any, dimension: int, *sizes: int) -> Any:
        return real(jnp.roll(whole, 1, dimension), dimension, *sizes)

    monkeypatch.setattr(_row_chunks, "stacked", shifted)
    assert not is_proved(function, division)
    assert in_parts(function, division).closed.jaxpr.eqns
    assert not jaxremat.checkpoint(gated, "min").plan(case.x[:768], case.w).parts
    monkeypatch.undo()
    assert jaxremat.checkpoint(gated, "min").plan(case.x[:760], case.w).parts


def test_flax_modules() -> None:
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))

    x = CASES[0].x

    def grads(block: Any) -> Any:
        module = block()
        return jax.grad(lambda p: jnp.sum(jnp.sin(module.apply(p, x))))

    params = Block().init(jax.random.key(0), x)
    peaks = {
        name: jaxremat.memory(grads(kind), params).temporaries_nbytes
        for name, kind in (
            ("ours", jaxremat.flax.remat(Block, "min")),
            ("without", jaxremat.flax.remat(Block, "min", allow=())),
            ("flax's", nn.remat(Block)),
        )
    }
    assert peaks["ours"] < peaks["without"] <= 1.02 * peaks["flax's"]
    assert_close(grads(jaxremat.flax.remat(Block, "min"))(params), grads(Block)(params))


def test_forms_of_whole_steps_are_refused() -> None:
    with pytest.raises(jaxremat.ArgumentError, match=r'`allow=\("microbatches",\)`|Write some of "rows"'):
        jaxremat.checkpoint(gated, "min", allow=("microbatches",))


@pytest.mark.parametrize("emit", EMITTERS)
def test_each_device_of_a_sharded_map_does_its_rows_in_parts(emit: str) -> None:
    case = CASES[0]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec

    def mapped(fn: Any) -> Any:
        return jax.shard_map(fn, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d"))

    planned = mapped(jaxremat.checkpoint(gated, "min", emit=emit))
    found = jax.jit(gradient(planned), compiler_options=OPTIONS)
    assert_close(found(case.x, case.w), gradient(gated)(case.x, case.w))
    assert (
        temporaries(planned, case)
        < temporaries(mapped(jaxremat.checkpoint(gated, "min", allow=())), case) / 2
    )


@pytest.mark.parametrize("emit", EMITTERS)
def test_each_device_of_a_sharded_map_adds_up_its_rows(emit: str) -> None:
    """What differs from device to device is added to zeros that do."""
    case, spec = CASES[0], jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))

    def squared(x: Any, w: Any) -> Any:
        return jnp.sum(gated(x, w) ** 2)

    planned = jaxremat.checkpoint(squared, "min", emit=emit)
    mapped = jax.shard_map(
        lambda x, w: planned(x, w)[None], mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d")
    )
    both = jax.grad(lambda *args: mapped(*args).sum(), (0, 1))
    assert "scan[" in str(jax.make_jaxpr(both)(case.x, case.w))
    found = jax.jit(both, compiler_options=OPTIONS)(case.x, case.w)
    assert_close(found, jax.grad(squared, (0, 1))(case.x, case.w))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (jnp.clip(c * g, -0.5, 0.5),))


def test_functions_with_a_backward_pass_of_their_own_stay_outside() -> None:
    case = CASES[0]

    def fn(x: Any, w: Any) -> Any:
        return clipped(gated(x, w) * 3.0)

    planned = jaxremat.checkpoint(fn, "min")
    (form,) = planned.plan(case.x, case.w).parts
    assert form.length == TOKENS
    assert_close(gradient(planned)(case.x, case.w), gradient(fn)(case.x, case.w))
