"""Copies in fewer bits: what decoding them gives, and which values have them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxremat._model._variant import COPIES, Variant
from jaxremat._program import _compat
from jaxremat._rewrite import _encodings
from jaxremat._rewrite._encodings import BY_CODE, ENCODINGS, MASK, Encoding, allowed, decoders
from jaxremat._rewrite._trace import trace

BF16, FP8, INT8 = ENCODINGS
ERRORS = {BF16.name: 2.0**-8, FP8.name: 2.0**-3, INT8.name: 1 / 127}
"""What a copy may be off: of the entry, but of the largest entry of its group for those that have a scale."""

SHAPES = st.lists(st.sampled_from([1, 3, 8, 16, 128, 256]), min_size=1, max_size=3).map(tuple)


def back(encoding: Encoding, x: jax.Array) -> jax.Array:
    return encoding.decode(jax.ShapeDtypeStruct(x.shape, x.dtype), *encoding.encode(x))


def nbytes(encoding: Encoding, x: jax.Array) -> int:
    return sum(part.nbytes for part in encoding.encode(x))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@settings(max_examples=5)
@given(shape=SHAPES, seed=st.integers(0, 99), size=st.sampled_from([1e-3, 1.0, 1e3]))
def test_an_inexact_copy_is_as_near_as_its_kind_allows(
    encoding: Encoding, dtype: Any, shape: tuple[int, ...], seed: int, size: float
) -> None:
    x = jnp.asarray(size * np.random.default_rng(seed).normal(size=shape), dtype)
    if not encoding.fits(x):
        assert (encoding, dtype) in ((BF16, jnp.bfloat16), (BF16, jnp.float16))
        return
    found = back(encoding, x)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    whole, apart = (
        np.abs(np.asarray(a, np.float64)) for a in (x, np.asarray(found, np.float64) - np.asarray(x))
    )
    scale = whole if encoding is BF16 else whole.max(-1, keepdims=True)
    assert (apart <= (ERRORS[encoding.name] + float(jnp.finfo(dtype).eps)) * scale).all()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
def test_what_is_no_number_stays_none_and_zeros_stay_zeros(encoding: Encoding) -> None:
    assert np.array_equal(back(encoding, jnp.zeros((2, 128))), np.zeros((2, 128)))
    for what in (jnp.nan, jnp.inf, -jnp.inf):
        x = jnp.ones((2, 128)).at[0, 5].set(what)
        assert not np.isfinite(back(encoding, x)[0, 5])
        assert np.array_equal(back(encoding, x)[1], np.ones(128))


def test_copies_take_what_they_say() -> None:
    x = jnp.ones((4, 256), jnp.float32)
    assert nbytes(BF16, x) * 2 == x.nbytes
    assert nbytes(INT8, x) == nbytes(FP8, x) == x.size + 4 * x.size // 128


def test_several_devices_keep_only_what_each_has_alone() -> None:
    names = tuple(encoding.name for encoding in ENCODINGS)
    assert allowed(names, 1) == tuple(encoding.code for encoding in ENCODINGS)
    assert [BY_CODE[code].entrywise for code in allowed(names, 8)] == [True]
    assert allowed(("rows",), 1) == ()


def loss(params: Any, x: Any, key: Any) -> Any:
    for up, down in params:
        h = jax.nn.gelu(x @ up)
        x = x + jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0) @ down
    return jnp.mean(x**2)


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    params = [tuple(jnp.asarray(0.1 * rng.normal(size=s), jnp.float32) for s in ((16, 64), (64, 16)))] * 2
    return params, jnp.ones((8, 16)), jax.random.key(0)


def of_form(step: Any, args: Any, *codes: int) -> Any:
    return trace(jax.jit(step), args, {}).in_form(Variant.of_rule(COPIES, {0: codes}))


def primitives(traced: Any, code: int) -> list[str]:
    """Of what makes the values that have copies of this kind."""
    maker = {v: eqn.primitive.name for eqn in traced.jaxpr.jaxpr.eqns for v in eqn.outvars}
    return sorted(maker[each.whole] for each in traced.program.encoded if each.encoding == code)


@pytest.mark.parametrize("scanned", [False, True])
def test_values_that_are_dear_to_make_again_have_copies(scanned: bool) -> None:
    """Products, sums of what is not made of one value, carries; what is made of one entry by entry has none."""

    def in_a_loop(params: Any, x: Any, key: Any) -> Any:
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *params)
        x, _ = lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer[0]) @ layer[1], None), x, stacked)
        return jnp.mean(x**2)

    step = jax.value_and_grad(in_a_loop if scanned else loss)
    traced = of_form(step, arguments(), BF16.code)
    made = primitives(traced, BF16.code)
    assert made.count("scan_carry") == scanned
    assert "tanh" not in made
    assert "dot_general" in made
    place = decoders(traced.jaxpr.jaxpr, traced.program.encoded)
    eqns = traced.jaxpr.jaxpr.eqns
    assert [(eqns[i].outvars, eqns[j].outvars) for i, j in place.items()] == [
        ([each.whole], [each.decoded]) for each in traced.program.encoded if not each.exact
    ]


@pytest.mark.parametrize("codes", [(1,), (2,), (3,), (1, 2)])
def test_a_form_with_copies_is_a_program(codes: tuple[int, ...]) -> None:
    traced = of_form(jax.value_and_grad(loss), arguments(), *codes)
    assert traced.program.encoded
    _compat.check_jaxpr(traced.jaxpr)


def test_small_values_have_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_encodings, "LARGE", 1.0)
    assert not of_form(jax.value_and_grad(loss), arguments(), BF16.code).program.encoded


@settings(max_examples=10)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_bits_are_the_mask(shape: tuple[int, ...], seed: int) -> None:
    mask = jnp.asarray(np.random.default_rng(seed).random(shape) < 0.5)
    if not MASK.fits(mask):
        assert not any(size % 8 == 0 for size in shape)
        return
    assert np.array_equal(back(MASK, mask), mask)
    assert 8 * nbytes(MASK, mask) == mask.size


def masks(traced: Any) -> list[Any]:
    return [each for each in traced.program.encoded if each.encoding == MASK.code]


def readers(traced: Any, variable: Any) -> list[str]:
    return [e.primitive.name for e in traced.jaxpr.jaxpr.eqns if any(a is variable for a in e.invars)]


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("scanned", [False, True])
def test_masks_of_dropout_are_in_bits_and_nobody_reads_them_otherwise(generator: str, scanned: bool) -> None:
    def in_a_loop(params: Any, x: Any, key: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            (up, down), key = own
            h = x @ up
            kept = jax.random.bernoulli(key, 0.5, h.shape)
            return x + (kept.astype(h.dtype) * h) @ down, None

        stacked = jax.tree.map(lambda *a: jnp.stack(a), *params)
        return jnp.mean(lax.scan(layer, x, (stacked, jax.random.split(key, len(params))))[0] ** 2)

    params, x, _ = arguments()
    key = jax.random.key(0, impl=generator)
    step = jax.value_and_grad(in_a_loop if scanned else loss)
    traced = of_form(step, (params, x, key))
    assert len(masks(traced)) == 1  # all layers of the loss draw alike
    for each in masks(traced):
        assert each.whole.aval.dtype == jnp.bool_
        (packed,) = each.parts
        assert 8 * packed.aval.size == each.whole.aval.size
        assert readers(traced, each.whole) == ["reshape"]  # the first of what packs it
        assert readers(traced, each.decoded)
    _compat.check_jaxpr(traced.jaxpr)


def test_masks_that_are_not_random_or_not_read_again_are_left_as_they_are() -> None:
    def positive(params: Any, x: Any, key: Any) -> Any:
        for up, down in params:
            h = x @ up
            x = x + jnp.where(h > 0, h, jnp.sin(h)) @ down
        return jnp.mean(x**2)

    def forward(params: Any, x: Any, key: Any) -> Any:
        ((up, _), *_) = params
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, (8, 64)), x @ up, 0))

    assert not masks(of_form(jax.value_and_grad(positive), arguments()))
    assert not masks(of_form(forward, arguments()))


def test_masks_that_are_returned_or_of_odd_sizes_are_left_as_they_are() -> None:
    def odd(params: Any, x: Any, key: Any) -> Any:
        ((up, _), *_) = params
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, (7, 63)), (x @ up)[:7, :63], 0) ** 2)

    def returned(params: Any, x: Any, key: Any) -> Any:
        ((up, _), *_) = params
        kept = jax.random.bernoulli(key, 0.5, (8, 64))
        return jnp.mean(jnp.where(kept, x @ up, 0) ** 2), kept

    assert not masks(of_form(jax.value_and_grad(odd), arguments()))
    assert not masks(of_form(jax.value_and_grad(returned, has_aux=True), arguments()))


@pytest.mark.parametrize("code", [2, 3])
def test_scalars_that_contractions_make_have_no_scaled_copies(code: int) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w: jnp.sin((w @ x) ** 2))(w)

    form = Variant.of_rule(COPIES, {0: (code,)})
    found = trace(jax.jit(step), (jnp.ones(3), jnp.ones(3)), {}).in_form(form)
    assert all(each.whole.aval.ndim for each in found.program.encoded)
