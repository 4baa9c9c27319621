"""Rows with halos: steps over a large image, part after part of its rows, compute what they did, and this is proved."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxremat
from jaxremat._program._windows import WindowRule
from jaxremat._rewrite import _halos, _row_regions
from jaxremat._rewrite._halos import Halos
from jaxremat._rewrite._kernel_choice import equivalence
from jaxremat._rewrite._regions import Region
from jaxremat._rewrite._row_chunks import chunked
from jaxremat._rewrite._trace import trace

NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x: Any, w: Any, padding: Any = "SAME", stride: int = 1, **more: Any) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=NHWC, **more)


def pooled(
    x: Any, init: float, by: Callable[..., Any], size: int, stride: int, padding: str = "VALID"
) -> Any:
    return lax.reduce_window(x, init, by, (1, size, size, 1), (1, stride, stride, 1), padding)


def same(w: Sequence[Any], x: Any) -> Any:
    return conv(jax.nn.gelu(conv(jax.nn.gelu(conv(x, w[0])), w[1])), w[2])


def with_bias(w: Sequence[Any], x: Any) -> Any:
    """Where there is no row, rows of zeros are no more zeros behind a bias, nor behind a division numbers."""
    x = jnp.cos(conv(x, w[0]) + 1.0)
    x = jnp.log(jnp.abs(conv(x, w[1])) + x**2)
    return conv(x / x, w[2]) + conv(jax.nn.relu(x - 0.3), w[2])


def valid(w: Sequence[Any], x: Any) -> Any:
    return conv(jnp.sin(conv(jnp.sin(conv(x, w[0], "VALID")), w[1], "VALID")), w[2], "VALID")


def strided(w: Sequence[Any], x: Any) -> Any:
    return conv(jnp.sin(conv(jnp.sin(conv(x, w[0])), w[1], stride=2)), w[2], stride=2)


def uneven(w: Sequence[Any], x: Any) -> Any:
    return conv(jnp.sin(conv(x, w[0], ((2, 0), (1, 1)))), w[1], ((0, 3), (1, 1)), stride=2)


def dilated(w: Sequence[Any], x: Any) -> Any:
    return conv(jnp.sin(conv(jnp.sin(conv(x, w[0])), w[1], rhs_dilation=(3, 2))), w[2])


def depthwise(w: Sequence[Any], x: Any) -> Any:
    x = jnp.sin(conv(x, w[0]))
    return conv(jnp.sin(conv(x, w[3], feature_group_count=x.shape[-1])), w[2])


def blocks(w: Sequence[Any], x: Any) -> Any:
    x = conv(x, w[0])
    for _ in range(2):
        x = x + conv(jnp.tanh(conv(jnp.tanh(x), w[1])), w[1])
    return conv(x, w[2])


def averaged(w: Sequence[Any], x: Any) -> Any:
    return conv(jnp.sin(pooled(jnp.sin(conv(x, w[0])), 0.0, lax.add, 3, 2, "SAME")), w[1])


def maximal(w: Sequence[Any], x: Any) -> Any:
    return conv(pooled(jnp.sin(conv(x, w[0])), -jnp.inf, lax.max, 2, 2), w[1])


def up_and_down(w: Sequence[Any], x: Any) -> Any:
    """A small U-Net."""
    across = jnp.sin(conv(x, w[0]))
    x = jnp.sin(conv(pooled(across, -jnp.inf, lax.max, 2, 2), w[1]))
    x = lax.conv_transpose(x, w[1], (2, 2), "SAME", dimension_numbers=NHWC)
    return conv(jnp.sin(conv(jnp.concatenate([x, across], -1), w[4])), w[2])


def repeated(w: Sequence[Any], x: Any) -> Any:
    x = jnp.sin(conv(x, w[0], stride=2))
    return conv(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), w[1])


def padded(w: Sequence[Any], x: Any) -> Any:
    x = jnp.pad(jnp.sin(conv(x, w[0])), ((0, 0), (2, 3), (1, 1), (0, 0)))
    x = jnp.cos(x)[:, 1:-1]
    return conv(x, w[1], "VALID")[:, ::2]


def causal(w: Sequence[Any], x: Any) -> Any:
    """As in Flax: `jnp.pad` before a convolution, wider than its windows."""
    for k, dilation in zip(w[:3], (1, 2, 4), strict=True):
        x = jnp.pad(x, ((0, 0), (2 * dilation, 0), (1, 1), (0, 0)))
        x = jnp.sin(conv(x, k, "VALID", rhs_dilation=(dilation, 1)))
    return x


def words(w: Sequence[Any], x: Any) -> Any:
    """The gradient of a table is added to in its place."""
    x = conv(x, w[0])
    at = jnp.arange(x.shape[1] * x.shape[2], dtype=jnp.int32).reshape(1, *x.shape[1:3]) % 9
    return conv(jnp.sin(x + w[1].reshape(-1, 6)[:9][at]), w[2])


def padded_with_ones(w: Sequence[Any], x: Any) -> Any:
    x = jnp.pad(jnp.sin(conv(x, w[0])), ((0, 0), (1, 4), (1, 1), (0, 0)), constant_values=1.0)
    return conv(jnp.cos(x), w[1], "VALID")


def channels_first(w: Sequence[Any], x: Any) -> Any:
    y = jnp.moveaxis(x, 3, 1)
    for k in w[:3]:
        y = jnp.sin(lax.conv_general_dilated(y, jnp.transpose(k, (3, 2, 0, 1)), (1, 1), "SAME"))
    return y


def differences(w: Sequence[Any], x: Any) -> Any:
    """Total variation."""
    y = conv(x, w[0])
    return (y[:, 1:] - y[:, :-1]) ** 2


NETS: list[tuple[Callable[..., Any], int]] = [
    (same, 32), (same, 37), (with_bias, 32), (with_bias, 29), (valid, 40), (valid, 37), (strided, 32), (strided, 35),
    (uneven, 32), (uneven, 33), (dilated, 32), (depthwise, 32), (depthwise, 31), (blocks, 32), (averaged, 32),
    (averaged, 31), (maximal, 32), (up_and_down, 32), (repeated, 32), (padded, 32), (causal, 32), (causal, 35),
    (padded_with_ones, 32), (words, 32), (words, 35), (channels_first, 32), (differences, 32),
]  # fmt: skip


def step_of(
    net: Callable[..., Any], rows: int, of_image: bool = True
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step that trains a net's weights, and the image that it is of."""

    def made(i: int, *shape: int) -> Any:
        return jnp.asarray(0.3 * np.random.default_rng(i).standard_normal(shape), jnp.float32)

    w = [
        made(0, 3, 3, 3, 6),
        made(1, 3, 3, 6, 6),
        made(2, 3, 3, 6, 6),
        made(3, 3, 3, 1, 6),
        made(4, 3, 3, 12, 6),
    ]

    def step(w: Any, x: Any) -> Any:
        trained = (0, 1) if of_image else (0,)
        loss, grads = jax.value_and_grad(lambda w, x: (net(w, x) ** 2).mean(), trained)(w, x)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, (w, x)[: len(trained)], grads)

    return step, (w, made(5, 1, rows, 16, 3))


def is_convolution(eqn: Any) -> bool:
    return eqn.primitive.name == "conv_general_dilated"


def regions_of(step: Any, args: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Region]]:
    monkeypatch.setattr(_row_regions, "LEAST_NBYTES", 1)
    traced = trace(jax.jit(step), args, {})
    return traced.merged.program, [region for region in traced.sites.regions if region.windowed]


@pytest.mark.parametrize("of_image", [True, False], ids=["image", "weights"])
@pytest.mark.parametrize(("net", "rows"), NETS, ids=[f"{net.__name__} {rows}" for net, rows in NETS])
def test_results_are_the_same(
    net: Callable[..., Any], rows: int, of_image: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = step_of(net, rows, of_image)
    program, found = regions_of(step, args, monkeypatch)
    assert found and found[0].whole
    for i, eqn in enumerate(program.eqns):
        is_pad = eqn.primitive.name == "pad" and eqn.outvars[0].aval.shape[:1] == (1,)
        assert i in found[0].rules or not (is_pad or is_convolution(eqn))
    proof, wanted = equivalence(program.closed), run(program.closed, args)
    for count in (2, 3, 4) if of_image else (2, 3):
        made = chunked(program, [(found[0], count)]).closed
        for a, b in zip(wanted, run(made, args), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
        assert proof.difference(made) is None


def test_values_without_rows_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(w: Sequence[Any], x: Any) -> Any:
        return jnp.sin(conv(jnp.sin(conv(x, w[0]))[:, 32:], w[1]))

    assert not regions_of(*step_of(empty, 32), monkeypatch)[1]


@pytest.mark.parametrize(("of_image", "rows"), [(False, 16 + 2 * 2), (True, 16 + 2 * 5)])
def test_what_parts_add_needs_no_more_of_the_forward_pass(
    of_image: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of weights are sums; of the image a part has its own rows, for which it does more of all others."""
    program, found = regions_of(*step_of(same, 32, of_image), monkeypatch)
    made = chunked(program, [(found[0], 2)]).closed
    (loop,) = (eqn for eqn in made.jaxpr.eqns if eqn.primitive.name == "scan")
    done = [eqn.outvars[0].aval.shape for eqn in loop.params["jaxpr"].jaxpr.eqns if is_convolution(eqn)]
    assert max(shape[1] for shape in done if shape[0] == 1) == rows


def without_masks(halos: Any, eqns: Any, env: Any, v: Any, halo: Any, fill: Any, *others: Any) -> Any:
    del fill
    return SLAB(halos, eqns, env, v, halo, None, *others)


def one_row_on(halos: Any, whole: Any, i: Any, v: Any) -> Any:
    return READ(halos, jnp.roll(whole, 1, 1), i, v)


def with_its_halo(eqn: Any, rule: Any, *others: Any) -> Any:
    """A sum of what other parts add too."""
    before, behind = WANTED(eqn, rule, *others)
    return (before + 1, behind) if rule.summed else (before, behind)


def less_a_row(rule: Any, operand: Any) -> Any:
    """Of what a part adds to rows around its own."""
    (before, behind), (low, high) = REACHED(rule, operand)
    return (before - 1, behind), (low - rule.stride, high)


SLAB, READ, WANTED, REACHED = Halos.slab, Halos.read, _halos.wanted, WindowRule.reached
WRONG = [
    (Halos, "slab", without_masks, True), (Halos, "slab", without_masks, False), (Halos, "read", one_row_on, True),
    (_halos, "wanted", with_its_halo, True), (WindowRule, "reached", less_a_row, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "name", "wrong", "of_image"), WRONG, ids=[f"{each[1]} {each[3]}" for each in WRONG]
)
@pytest.mark.parametrize("rows", [32, 37])
def test_what_is_wrong_is_not_proved(
    place: Any, name: str, wrong: Any, of_image: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = step_of(with_bias, rows, of_image)
    program, found = regions_of(step, args, monkeypatch)
    monkeypatch.setattr(place, name, wrong)
    made = chunked(program, [(found[0], 3)]).closed
    assert not np.allclose(run(program.closed, args)[1], run(made, args)[1], rtol=1e-3)
    assert equivalence(program.closed).difference(made) is not None


def test_a_plan_needs_less() -> None:
    """Of one large image, whose rows no batch makes independent."""
    step, args = step_of(same, 1024)
    args = args[0], jnp.tile(args[1], (1, 1, 16, 1))
    plain = jaxremat.plan(step, *args, budget="1GiB")
    planned = jaxremat.optimize("min", planning=jaxremat.Planning(cache=False))(step)
    plan = planned.plan(*args)
    assert [choice.rule for choice in plan.form.choices] == ["rows"]
    assert (plan.compiled_peak_nbytes or 0) < (plain.compiled_peak_nbytes or 0) / 2
    for a, b in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(planned(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-6)


def run(closed: jex.ClosedJaxpr, args: Any) -> list[Any]:
    return jax.jit(jex.jaxpr_as_fun(closed))(*jax.tree.leaves(args))
