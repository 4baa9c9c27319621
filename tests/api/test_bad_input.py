"""Steps and arguments that are wrong, or odd: the user's own exception as it was raised, once, and nothing kept."""

import os
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close

import jaxremat
from jaxremat import ArgumentError, MinCut
from jaxremat._plan import _defects

BUDGETS = ["1GiB", "min"]
WEIGHTS, BATCH = jnp.eye(16) / 2, jnp.ones((64, 16))


class OwnError(Exception):
    """A user's own."""


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def train(w: jax.Array, x: jax.Array) -> Any:
    value, grad = jax.value_and_grad(loss)(w, x)
    return w - grad, value


def optimized(fn: Callable[..., Any], budget: Any = "1GiB", **options: Any) -> Any:
    return jaxremat.optimize(budget, planning=jaxremat.Planning(solver=MinCut()), **options)(fn)


def ways(step: Any) -> list[Callable[..., Any]]:
    """All that plans."""
    return [step, step.plan, step.compile, step.lower]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where plans and reports of defects would be kept."""
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("JAXREMAT_PLAN_CACHE", "1")
    _defects._reported.clear()
    return tmp_path


def kept(folder: Path) -> list[str]:
    """Plans and reports that were written."""
    return [
        name
        for part in ("plans", "defects")
        if (folder / part).exists()
        for name in os.listdir(folder / part)
    ]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", [OwnError, TypeError, ValueError, ZeroDivisionError, MemoryError])
def test_a_step_that_fails_to_trace(kind: type[Exception], budget: Any, folder: Path) -> None:
    """The same object, with a traceback to the user's line, and of the user's function alone."""
    raised: list[Exception] = []

    def step(w: jax.Array, x: jax.Array) -> Any:
        def inner(w: jax.Array) -> jax.Array:
            raised.append(kind("mine"))
            raise raised[-1]

        return jax.grad(inner)(w)

    planned = optimized(step, budget, donate_argnums=0)
    for count, way in enumerate(ways(planned), 1):
        with pytest.raises(kind, match="mine") as caught:
            way(WEIGHTS, BATCH)
        assert len(raised) == count  # traced once
        assert caught.value is raised[-1]
        assert caught.value.__context__ is None or caught.value.__suppress_context__
        assert "inner" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert planned._planned == {} and kept(folder) == []


def test_what_jax_says_of_a_step_is_said_as_jax_says_it(folder: Path) -> None:
    def branching(w: jax.Array, x: jax.Array) -> Any:
        return w if x.sum() > 0 else -w

    def mismatched(w: jax.Array, x: jax.Array) -> Any:
        return w @ x

    def no_array(w: jax.Array, x: jax.Array) -> Any:
        return w, "text"

    for fn in (branching, mismatched, no_array):
        with pytest.raises(Exception) as plain:
            jax.jit(fn)(WEIGHTS, BATCH)
        for budget in BUDGETS:
            with pytest.raises(type(plain.value)) as caught:
                optimized(fn, budget)(WEIGHTS, BATCH)
            assert type(caught.value) is type(plain.value)
            assert str(caught.value).splitlines()[0] == str(plain.value).splitlines()[0]
    assert kept(folder) == []


def test_a_step_that_failed_may_be_called_again(folder: Path) -> None:
    fails = [True]

    def step(w: jax.Array, x: jax.Array) -> Any:
        if fails:
            raise OwnError(fails.pop())
        return train(w, x)

    planned = optimized(step, "min")
    with pytest.raises(OwnError):
        planned(WEIGHTS, BATCH)
    np.testing.assert_allclose(planned(WEIGHTS, BATCH)[1], train(WEIGHTS, BATCH)[1], rtol=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_unhashable_static_arguments(budget: Any, folder: Path) -> None:
    def step(w: jax.Array, x: jax.Array, sizes: Any) -> Any:
        raise OwnError("never traced")

    planned = optimized(step, budget, static_argnums=2)
    for way in ways(planned):
        with pytest.raises(ArgumentError, match="cannot be hashed"):
            way(WEIGHTS, BATCH, [1, 2])
    with pytest.raises(OwnError):
        planned(WEIGHTS, BATCH, (1, 2))
    assert planned._planned == {} and kept(folder) == []


def test_a_static_argument_whose_hash_is_the_users_own() -> None:
    class Odd:
        def __hash__(self) -> int:
            raise OwnError("no hash today")

    planned = optimized(lambda w, x, odd: train(w, x), static_argnums=2)
    with pytest.raises(OwnError, match="no hash today"):
        planned(WEIGHTS, BATCH, Odd())


@pytest.mark.parametrize("leaf", ["text", object(), {1, 2}, b"bytes"])
def test_leaves_that_are_no_arrays(leaf: Any, folder: Path) -> None:
    planned = optimized(lambda state, x: train(state["w"], x), "min")
    for way in ways(planned):
        with pytest.raises(ArgumentError, match=r"`state\['odd'\]`"):
            way({"w": WEIGHTS, "odd": leaf}, BATCH)
    assert planned._planned == {} and kept(folder) == []


@pytest.mark.parametrize("budget", BUDGETS)
def test_steps_that_return_nothing(budget: Any) -> None:
    seen: list[float] = []

    def nothing(w: jax.Array, x: jax.Array) -> None:
        train(w, x)

    def said(w: jax.Array, x: jax.Array) -> None:
        jax.debug.callback(lambda value: seen.append(float(value)), train(w, x)[1])

    def empty(w: jax.Array, x: jax.Array) -> Any:
        return {}, ()

    assert optimized(nothing, budget)(WEIGHTS, BATCH) is None
    assert optimized(empty, budget)(WEIGHTS, BATCH) == ({}, ())
    assert optimized(said, budget)(WEIGHTS, BATCH) is None
    jax.effects_barrier()
    assert len(seen) == 1
    assert optimized(lambda: None, budget)() is None


@pytest.mark.parametrize("budget", BUDGETS)
def test_steps_that_make_nan(budget: Any) -> None:
    """Numbers that are none are results like others."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grad = jax.value_and_grad(lambda w: loss(w, x) + jnp.log(-jnp.sum(w * w)))(w)
        return w - grad, value, jnp.sqrt(x - 2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = optimized(step, budget)(WEIGHTS, BATCH)
    want = jax.jit(step)(WEIGHTS, BATCH)
    assert bool(jnp.isnan(want[1]))
    assert_close(want, got, rtol=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_an_array_that_is_donated_twice(budget: Any) -> None:
    """As `jax.jit` has it, which may refuse or not."""

    def step(a: jax.Array, b: jax.Array, x: jax.Array) -> Any:
        return train(a, x)[0], train(b, x)[0]

    def outcome(fn: Any) -> Any:
        twice = jnp.array(WEIGHTS)
        try:
            return [np.asarray(a).tolist() for a in fn(twice, twice, BATCH)]
        except Exception as error:
            return type(error), str(error).splitlines()[0]

    want = outcome(jax.jit(step, donate_argnums=(0, 1)))
    planned = optimized(step, budget, donate_argnums=(0, 1))
    got = [outcome(planned) for _ in range(2)]
    if isinstance(want, tuple):
        assert got == [want, want]
    else:
        for each in got:
            np.testing.assert_allclose(each, want, rtol=1e-5)


@pytest.mark.parametrize("name", ["donate_argnums", "static_argnums", "donate_argnames", "static_argnames"])
def test_positions_and_names_are_told_apart(name: str) -> None:
    wrong: Any = "w" if name.endswith("nums") else (0, 1)
    with pytest.raises(ArgumentError, match=rf"`{name}={re.escape(repr(wrong))}` is not valid.*go into"):
        jaxremat.optimize("1GiB", **{name: wrong})(train)


def test_an_argument_is_named_as_in_the_signature() -> None:
    def step(kind: str, w: jax.Array, *rest: Any, **named: Any) -> Any:
        return train(w, rest[0])

    planned = optimized(step, static_argnums=0)
    for args, named, name in (
        (("a", "text", BATCH), {}, "w"),
        (("a", WEIGHTS, BATCH, ["text"]), {}, r"args\[3\]\[0\]"),
        (("a", WEIGHTS, BATCH), {"more": {"x": "text"}}, r"more\['x'\]"),
    ):
        with pytest.raises(ArgumentError, match=f"The argument `{name}` is a str"):
            planned(*args, **named)


def test_tracebacks_have_the_frames_of_the_user_alone() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        raise OwnError

    for fn, options, error in ((train, {"donate_argnums": 7}, ValueError), (step, {}, OwnError)):
        with pytest.raises(error) as caught:
            optimized(fn, **options)(WEIGHTS, BATCH)
        files = {Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)}
        assert files <= {Path(__file__).name, "traceback_util.py"}  # of JAX, which hides it when it prints


def test_errors_are_named_as_users_write_them() -> None:
    errors = [
        each for each in vars(jaxremat).values() if isinstance(each, type) and issubclass(each, Exception)
    ]
    assert len(errors) > 10
    for each in errors:
        assert (each.__module__, getattr(jaxremat, each.__name__)) == ("jaxremat", each)


def test_only_planned_steps_are_compared() -> None:
    with pytest.raises(ArgumentError, match=r"takes a step of `jaxremat\.optimize`; it was given a function"):
        jaxremat.compare(train, WEIGHTS, BATCH)  # type: ignore[arg-type]


def test_a_step_for_another_device_is_not_planned_to_be_called() -> None:
    planned = optimized(train, target="h100")
    with pytest.raises(jaxremat.TargetError, match="cannot run on this machine"):
        planned(WEIGHTS, BATCH)
    assert planned._planned == {}


@pytest.mark.parametrize("budget", BUDGETS)
def test_an_array_that_is_gone(budget: Any) -> None:
    planned = optimized(train, budget, donate_argnums=0)
    w = jnp.array(WEIGHTS)
    planned(w, BATCH)
    assert w.is_deleted()
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated") as caught:
            planned(w, BATCH)
        assert (
            "The argument `w` (float32[16,16]) is deleted: an earlier call donated it"
            in caught.value.__notes__[0]
        )
    assert len(planned._planned) == 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_callback_that_fails_while_the_step_runs(budget: Any) -> None:
    def refuse(a: np.ndarray) -> np.ndarray:
        raise OwnError("while it ran")

    def step(w: jax.Array, x: jax.Array) -> Any:
        held = jax.lax.stop_gradient(x)
        return train(w, x + jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), held))

    def outcome(fn: Any) -> Any:
        with pytest.raises(Exception, match="while it ran") as caught:
            jax.block_until_ready(fn(WEIGHTS, BATCH))
        return type(caught.value)

    assert outcome(optimized(step, budget)) is outcome(jax.jit(step))
