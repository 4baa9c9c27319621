"""`checkpoint` keeps what its plan says and nothing else, and differentiates as the function does."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # what `jax.ad_checkpoint.print_saved_residuals` prints
from jax.sharding import Mesh, PartitionSpec

import jaxremat

OPTIONS = jaxremat.compiler_options("cpu")
EMITTERS = ("policy", "custom_vjp")
BUDGETS = ("dots", "free", "75% of residuals", "min")
x0 = jax.random.normal(jax.random.key(0), (64, 32))
weights = [jax.random.normal(jax.random.key(i), (32, 32)) / 6 for i in range(1, 7)]
few = weights[:2]


def chain(x: Any, ws: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w) + x
    return x


def gelus(x: Any, ws: Any) -> Any:
    for w in ws:
        x = jax.nn.gelu(jax.nn.relu(x @ w))
    return x


def scanned(x: Any, ws: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(jax.nn.gelu(x @ w) @ w) + x, None), x, jnp.stack(ws))[0]


def skips(x: Any, ws: Any) -> Any:
    down = []
    for w in ws[:3]:
        x = jnp.tanh(x @ w)
        down.append(x)
    for w, skip in zip(ws[3:], reversed(down), strict=True):
        x = jnp.concatenate([x @ w, skip], 1)[:, ::2]
    return x


def attention(x: Any, ws: Any) -> Any:
    q, k, v = (x @ w for w in ws[:3])
    mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
    p = jax.nn.softmax(jnp.where(mask, q @ k.T, -1e9))
    y = p @ v @ ws[3] + x
    return (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)


def spectral(x: Any, ws: Any) -> Any:
    for w in ws:
        x = jnp.real(jnp.fft.ifft(jnp.exp(1j * jnp.tanh(jnp.fft.fft(x)) / 4))) @ w
    return x


FUNCTIONS = (chain, gelus, scanned, skips, attention, spectral)


def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jnp.mean(jnp.sin(fn(*args)))


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * float(jnp.max(jnp.abs(b))) + 1e-7)


def kept_nbytes(fn: Callable[..., Any]) -> int:
    """What JAX keeps of what the function makes."""
    avals: list[tuple[Any, str]] = list(saved_residuals(fn, x0, weights))
    return sum(
        aval.size * aval.dtype.itemsize
        for aval, where in avals
        if not where.startswith(("from the argument", "from a literal"))
    )


QUICK = {
    (gelus, "75% of residuals", "policy"), (scanned, "min", "policy"), (scanned, "min", "custom_vjp"),
    (skips, "dots", "custom_vjp"), (attention, "free", "policy"), (spectral, "dots", "policy"),
}  # fmt: skip
CASES = [
    pytest.param(
        *case, id=f"{case[0].__name__}-{case[1]}-{case[2]}", marks=() if case in QUICK else pytest.mark.slow
    )
    for case in ((fn, budget, emit) for fn in FUNCTIONS for budget in BUDGETS for emit in EMITTERS)
]


@pytest.mark.parametrize(("fn", "budget", "emit"), CASES)
def test_gradients_are_the_functions_and_what_is_kept_is_what_the_plan_saves(
    fn: Callable[..., Any], budget: Any, emit: str
) -> None:
    planned = jaxremat.checkpoint(fn, budget, emit=emit)
    expected = jax.value_and_grad(loss(fn), (0, 1))(x0, weights)
    step = jax.jit(jax.value_and_grad(loss(planned), (0, 1)), compiler_options=OPTIONS)
    assert_close(step(x0, weights), expected)
    plan = planned.plan(x0, weights)
    assert kept_nbytes(planned) == plan.saved_nbytes
    assert plan.saved_nbytes <= plan.held_nbytes
    if budget != "min":
        assert plan.saved_nbytes < plan.plain_nbytes
    if budget == "75% of residuals":
        assert plan.held_nbytes <= plan.budget_nbytes == int(0.75 * plan.plain_nbytes)


@pytest.mark.parametrize("emit", EMITTERS)
def test_dots_computes_no_contraction_twice_and_min_does(emit: str) -> None:
    def dots(budget: Any) -> int:
        planned = jaxremat.checkpoint(gelus, budget, emit=emit)
        text = jax.jit(jax.grad(loss(planned), (0, 1))).lower(x0, weights).as_text()
        return text.count("stablehlo.dot_general")

    plain = jax.jit(jax.grad(loss(gelus), (0, 1))).lower(x0, weights).as_text().count("stablehlo.dot_general")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxremat.JaxrematWarning)
        assert dots("dots") == plain
        assert dots("min") > plain


@pytest.mark.jax_0_10("bytes that gelu's gradient reads")
def test_min_is_the_fastest_of_what_holds_about_the_least() -> None:
    def mlp(x: Any, ws: Any) -> Any:
        for a, b in ws:
            x = x + jax.nn.gelu(x @ a) @ b
        return x

    args = jnp.ones((64, 16)), [(jnp.ones((16, 64)), jnp.ones((64, 16)))] * 4
    about = jaxremat.checkpoint(mlp, "min", emit="custom_vjp").plan(*args)
    least = jaxremat.checkpoint(mlp, "10% of residuals", emit="custom_vjp").plan(*args)
    assert least.held_nbytes <= about.held_nbytes <= least.held_nbytes + 0.02 * about.plain_nbytes
    assert about.overhead < least.overhead


def test_blocks_at_min_save_no_more_than_checkpoints_that_save_nothing() -> None:
    """What one holds at least while it goes back would have each of many save the activations' sum."""

    def block(x: Any, w: Any, u: Any) -> Any:
        return x + jax.nn.gelu((x - x.mean(-1, keepdims=True)) @ w) @ u

    args = jnp.ones((512, 64)), jnp.ones((64, 128)), jnp.ones((128, 64))

    def temporaries(wrapped: Any) -> int:
        def loss(x: Any, *ws: Any) -> Any:
            for _ in range(4):
                x = wrapped(x, *ws)
            return jnp.mean(x**2)

        compiled = jax.jit(jax.grad(loss, (1, 2)), compiler_options=OPTIONS).lower(*args).compile()
        return jaxremat.MemoryStats.of(compiled).temporaries_nbytes

    assert temporaries(jaxremat.checkpoint(block, "min")) <= temporaries(jax.checkpoint(block))


@pytest.mark.parametrize("emit", EMITTERS)
def test_the_compiled_program_needs_less_memory(emit: str) -> None:
    x, ws = jnp.ones((512, 128)), [jnp.eye(128)] * 6

    def peak(fn: Callable[..., Any]) -> int:
        return jaxremat.memory(jax.grad(loss(fn), (0, 1)), x, ws).temporaries_nbytes

    plain = peak(gelus)
    low = jaxremat.checkpoint(gelus, "min", emit=emit)
    assert peak(low) < 0.5 * plain
    assert peak(low) < peak(jaxremat.checkpoint(gelus, "dots", emit=emit)) < plain


@pytest.mark.parametrize("emit", EMITTERS)
def test_transformations(emit: str) -> None:
    planned = jaxremat.checkpoint(chain, "min", emit=emit)
    plain, ours = jax.grad(loss(chain), (0, 1)), jax.grad(loss(planned), (0, 1))
    assert_close(ours(x0, few), plain(x0, few))  # eagerly
    assert_close(jax.vmap(ours, (0, None))(x0[:, None], few), jax.vmap(plain, (0, None))(x0[:, None], few))

    def body(fn: Any) -> Any:
        def total(x: Any, ws: Any) -> Any:
            return jnp.sum(jax.lax.scan(lambda x, _: (fn(x, ws), None), x, length=3)[0])

        return jax.grad(total, (0, 1))(x0, few)

    assert_close(body(planned), body(chain))

    def twice(fn: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jax.grad(lambda x: loss(fn)(x, few))(x) ** 2))(x0)

    assert_close(twice(planned), twice(chain))


@pytest.mark.parametrize("emit", EMITTERS)
def test_second_derivatives_of_branches(emit: str) -> None:
    """Their index passes a barrier on its way to the backward pass, and has no derivative there."""

    def branches(x: Any, ws: Any) -> Any:
        for w in ws:
            x = jax.lax.cond(jnp.sum(x) > 0, lambda x, w=w: jnp.tanh(x @ w), lambda x, w=w: jnp.sin(x @ w), x)
        return x

    def twice(fn: Any) -> Any:
        return jax.jit(
            jax.grad(lambda x: jnp.sum(jax.grad(lambda x: loss(fn)(x, few))(x) ** 2)),
            compiler_options=OPTIONS,
        )(x0)

    planned = jaxremat.checkpoint(branches, "min", emit=emit)
    assert_close(twice(planned), twice(branches))


def test_policies_know_forward_mode_and_custom_vjps_say_that_they_do_not() -> None:
    tangent = (jnp.ones_like(x0), few)
    planned = jaxremat.checkpoint(chain, "min")
    assert_close(jax.jvp(planned, (x0, few), tangent)[1], jax.jvp(chain, (x0, few), tangent)[1])
    hessian = jax.hessian(lambda x: loss(planned)(x, few))(x0[:1])
    assert_close(hessian, jax.hessian(lambda x: loss(chain)(x, few))(x0[:1]))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jaxremat.checkpoint(chain, "min", emit="custom_vjp"), (x0, few), tangent)


@pytest.mark.parametrize("emit", EMITTERS)
def test_any_arguments_and_results(emit: str) -> None:
    def fn(batch: dict[str, Any], w: Any, *, scale: float, mode: str) -> Any:
        assert mode == "train"
        h = jnp.tanh(batch["x"] @ w) * scale
        top = jnp.argmax(h, -1)
        return {"h": h, "top": top, "none": None, "count": batch["ids"] + 1, "loss": jnp.sum(h[0] * top[0])}

    batch = {"x": x0, "ids": jnp.arange(3)}
    planned = jaxremat.checkpoint(fn, "min", emit=emit, static_argnames="mode")

    def total(f: Any) -> Any:
        def of(x: Any, w: Any, scale: Any) -> Any:
            out = f({**batch, "x": x}, w, scale=scale, mode="train")
            return out["loss"] + jnp.mean(out["h"] ** 2), out

        return jax.value_and_grad(of, (0, 1, 2), has_aux=True)(x0, weights[0], 0.5)

    assert_close(total(planned), total(fn))
    alone = jax.grad(lambda w: planned(batch, w, scale=2.0, mode="train")["loss"])(weights[0])
    assert_close(alone, jax.grad(lambda w: fn(batch, w, scale=2.0, mode="train")["loss"])(weights[0]))


@pytest.mark.parametrize("emit", EMITTERS)
def test_what_is_closed_over_is_differentiated(emit: str) -> None:
    table = np.linspace(0, 1, 32, dtype=np.float32)

    def total(wrap: Any) -> Any:
        def of(w: Any, v: Any) -> Any:
            hidden = jnp.exp(v)
            return jnp.sum(wrap(lambda x: jnp.tanh(x @ (w * hidden)) * table)(x0))

        return jax.jit(jax.grad(of, (0, 1)), compiler_options=OPTIONS)(weights[0], weights[1])

    assert_close(total(partial(jaxremat.checkpoint, budget="min", emit=emit)), total(lambda fn: fn))


@pytest.mark.parametrize("emit", EMITTERS)
def test_functions_with_derivatives_of_their_own_and_random_numbers(emit: str) -> None:
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.sin(x)

    clipped.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, ct: (jnp.clip(c * ct, -9, 9),))

    def fn(x: Any, ws: Any, key: Any) -> Any:
        for i, w in enumerate(ws):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
            x = clipped(jax.nn.softplus(x @ w)) * kept
        return jnp.where(x > 0.5, jax.lax.stop_gradient(x), x)

    key = jax.random.key(7, impl="unsafe_rbg")
    planned = jaxremat.checkpoint(fn, "min", emit=emit)
    found = jax.jit(jax.grad(loss(planned), (0, 1)), compiler_options=OPTIONS)(x0, few, key)
    assert_close(found, jax.jit(jax.grad(loss(fn), (0, 1)))(x0, few, key))


@pytest.mark.parametrize("emit", EMITTERS)
def test_gradients_within_the_function(emit: str) -> None:
    def inner(x: Any, ws: Any) -> Any:
        step = jax.grad(lambda x: jnp.sum(chain(x, ws) ** 2))(x)
        return chain(x - 0.1 * step, ws)

    planned = jaxremat.checkpoint(inner, "50% of residuals", emit=emit)
    assert_close(jax.grad(loss(planned), (0, 1))(x0, few), jax.grad(loss(inner), (0, 1))(x0, few))


@pytest.mark.parametrize(
    ("jit", "emit"),
    [
        (True, "policy"),
        (True, "custom_vjp"),
        *(pytest.param(False, e, marks=pytest.mark.slow) for e in EMITTERS),
    ],
)
def test_sharded_maps(jit: bool, emit: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = PartitionSpec("d"), PartitionSpec()

    def mapped(fn: Any) -> Any:
        return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=PartitionSpec("d"))

    planned = mapped(jaxremat.checkpoint(chain, "min", emit=emit))
    grad = jax.grad(loss(planned), (0, 1))
    found = (jax.jit(grad, compiler_options=OPTIONS) if jit else grad)(x0, few)
    assert_close(found, jax.grad(loss(chain), (0, 1))(x0, few))


@pytest.mark.parametrize("emit", EMITTERS)
def test_functions_without_a_backward_pass_run_as_they_are(emit: str) -> None:
    planned = jaxremat.checkpoint(lambda n: n + 1, "min", emit=emit)
    assert planned(3) == 4

    def until(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c * 2, x)

    assert_close(jaxremat.checkpoint(until, emit=emit)(jnp.ones(4)), until(jnp.ones(4)))


def test_that_there_is_no_backward_pass_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import jaxremat._api._checkpoint as module

    traced: list[int] = []

    def counting(*args: Any) -> Any:
        traced.append(1)
        return differentiated(*args)

    differentiated = module.differentiated
    monkeypatch.setattr(module, "differentiated", counting)

    def until(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c * 2, x)

    planned = jaxremat.checkpoint(until)
    for x in (jnp.ones(4), jnp.zeros(4) + 3):
        assert_close(planned(x), until(x))
        assert_close(jax.jvp(planned, (x,), (x,))[1], jax.jvp(until, (x,), (x,))[1])
        with pytest.raises(jaxremat.ArgumentError, match="no backward pass to plan"):
            planned.plan(x)
    assert len(traced) == 1


@pytest.mark.parametrize("emit", EMITTERS)
def test_effects_happen_once(emit: str) -> None:
    seen: list[float] = []

    def fn(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        jax.debug.callback(lambda v: seen.append(float(v)), y[0, 0])
        return jnp.tanh(y @ w)

    jax.jit(jax.grad(loss(jaxremat.checkpoint(fn, "min", emit=emit)), 1), compiler_options=OPTIONS)(
        x0, weights[0]
    )
    jax.effects_barrier()
    assert len(seen) == 1


class Counting:
    """Chen's planner, and how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def solve(self, graph: Any, budget_nbytes: Any, *, time_limit: float) -> Any:
        self.calls += 1
        return jaxremat.Chen().solve(graph, budget_nbytes, time_limit=time_limit)


def test_plans_are_made_once_for_each_kind_of_arguments() -> None:
    solver = Counting()
    planned = jaxremat.checkpoint(chain, "90% of residuals", planning=jaxremat.Planning(solver=solver))
    planned(x0, weights)
    first = solver.calls
    planned(x0 + 1, weights)
    assert first > 0 and solver.calls == first
    planned(x0[:8], weights)
    assert solver.calls > first


def test_equal_layers_share_a_plan() -> None:
    solver = Counting()

    def layer(scale: float) -> Any:
        return jaxremat.checkpoint(
            lambda x: jnp.tanh(jnp.tanh(x * scale) @ weights[0]),
            "90% of residuals",
            planning=jaxremat.Planning(solver=solver),
        )

    layer(2.0)(x0)
    first = solver.calls
    layer(2.0)(x0)
    assert first > 0 and solver.calls == first
    layer(3.0)(x0)
    assert solver.calls > first


def test_usable_as_a_decorator_and_a_method() -> None:
    class Net:
        w = weights[0]

        @jaxremat.checkpoint(budget="min", static_argnums=0)
        def apply(self, x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ self.w) @ self.w)

    net = Net()
    expected = jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ net.w) @ net.w)))(x0)
    assert_close(jax.grad(lambda x: jnp.sum(net.apply(x)))(x0), expected)


def test_what_cannot_be_met_or_read_is_said() -> None:
    with pytest.raises(jaxremat.InfeasibleBudgetError, match=r"cannot be met.*plain JAX keeps"):
        jaxremat.checkpoint(chain, "1KiB").plan(x0, weights)
    with pytest.raises(jaxremat.BudgetError, match=r'not a number of bytes.*"40% of residuals"'):
        jaxremat.checkpoint(chain, "much")
    with pytest.raises(
        jaxremat.BudgetError, match=r'is 40% of device.* Write "40% of residuals" for a share'
    ):
        jaxremat.checkpoint(chain, 0.4)
    with pytest.raises(jaxremat.ArgumentError, match="policy"):
        jaxremat.checkpoint(chain, emit="magic")
    with pytest.raises(jaxremat.ArgumentError, match="takes a function as its first argument"):
        jaxremat.checkpoint("2GiB")  # type: ignore[arg-type]
    with pytest.raises(jaxremat.ArgumentError, match="not a positive number"):
        jaxremat.checkpoint(chain, planning=jaxremat.Planning(time_limit=0))
    with pytest.raises(jaxremat.ArgumentError, match="a tuple with a bool"):
        jaxremat.checkpoint(chain, prevent_cse=(True, "w"))
    with pytest.raises(jaxremat.ArgumentError, match=r"static argument of chain cannot be hashed.*tuple"):
        jaxremat.checkpoint(chain, static_argnums=1)(x0, [1])
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        jaxremat.checkpoint(lambda x, deep: chain(x, weights if deep else few))(x0, True)
    said = "`deep` is True: an argument that Python code branches on must be static. Write `checkpoint("
    assert any(note.startswith(said) for note in error.value.__notes__)


def test_a_budget_that_the_other_emitter_may_meet() -> None:
    with pytest.raises(jaxremat.InfeasibleBudgetError, match=r', or `emit="custom_vjp"`'):
        jaxremat.checkpoint(chain, "1KiB").plan(x0, weights)
    with pytest.raises(jaxremat.InfeasibleBudgetError, match=r'at least \d+ bytes \("[\d.]+KiB"\)\.$'):
        jaxremat.checkpoint(chain, "1KiB", emit="custom_vjp").plan(x0, weights)


@pytest.mark.parametrize(
    ("emit", "budget"), [("policy", "40% of residuals"), ("custom_vjp", "25% of residuals")]
)
def test_hints_that_a_budget_has_no_room_for_are_named(emit: str, budget: float) -> None:
    def hinted(x: Any, ws: Any) -> Any:
        for w in ws:
            x = jaxremat.hint(jnp.tanh(x @ w), "save", name="squashed") @ w
        return x

    args = jnp.ones((512, 32)), weights
    with pytest.raises(
        jaxremat.InfeasibleHintError, match=r'"save", name="squashed"\) at test_ch.*pass has'
    ) as e:
        jaxremat.checkpoint(hinted, budget, emit=emit, allow=()).plan(*args)
    assert e.value.free_min_peak_nbytes <= e.value.budget_nbytes < e.value.min_peak_nbytes
    with pytest.raises(jaxremat.InfeasibleBudgetError) as neither:
        jaxremat.checkpoint(hinted, "1KiB", emit=emit).plan(*args)
    assert not isinstance(neither.value, jaxremat.InfeasibleHintError)


@pytest.mark.parametrize(
    ("prevent_cse", "arguments"), [(True, 2), (False, None), ((True, False), 1), ([{"x": True}, False], 1)]
)
def test_what_must_not_be_merged_is_said_of_all_arguments_or_of_each(
    prevent_cse: Any, arguments: Any
) -> None:
    def layer(first: dict[str, Any], w: Any) -> Any:
        return jnp.sin(first["x"] @ w)

    def total(x: Any, w: Any) -> Any:
        return jnp.sum(jaxremat.checkpoint(layer, "min", prevent_cse=prevent_cse)({"x": x}, w))

    text = jax.jit(jax.grad(total, (0, 1)), compiler_options=OPTIONS).lower(x0, weights[0]).as_text()
    barriers = [line.split(" : ")[0] for line in text.splitlines() if "optimization_barrier" in line]
    # Besides, the cotangent.
    assert [line.count("%") - 1 for line in barriers] == ([] if arguments is None else [arguments + 1])


def test_missing_compiler_options_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import jaxremat._api._checkpoint as module

    monkeypatch.setattr(module, "_warned", False)
    planned = jaxremat.checkpoint(chain)
    with pytest.warns(jaxremat.JaxrematWarning, match="compiler_options") as told:
        jax.jit(jax.grad(lambda x: loss(planned)(x, weights)))(x0)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: planned(x, weights) + 1)(x0)
        monkeypatch.setattr(module, "_warned", False)
        jax.jit(lambda x: planned(x, weights) + 2, compiler_options=OPTIONS)(x0)
        planned(x0, weights)


@pytest.mark.parametrize("emit", EMITTERS)
def test_loops_over_masks_that_are_drawn_before(emit: str) -> None:
    """Masks are kept in bits, and what a loop reads is kept."""

    def fn(x: Any, w: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.9, x.shape)

        def part(_: Any, each: Any) -> Any:
            rows, mask = each
            return None, rows + jnp.where(mask, jnp.tanh(rows @ w) / 0.9, 0)

        parts = x.reshape(8, -1, x.shape[-1]), kept.reshape(8, -1, x.shape[-1])
        return jax.lax.scan(part, None, parts)[1].reshape(x.shape)

    args = jnp.ones((1024, 64)), jnp.eye(64), jax.random.key(0)
    planned = jaxremat.checkpoint(fn, "min", emit=emit)
    assert planned.plan(*args).held_nbytes < planned.plan(*args).plain_nbytes
    assert_close(jax.grad(loss(planned), (0, 1))(*args), jax.grad(loss(fn), (0, 1))(*args))
