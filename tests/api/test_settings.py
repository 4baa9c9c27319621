"""JAX's settings are part of what is planned, as they are of `jit`'s cache; those for debugging act as there."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comparing import assert_same
from jax.core import Tracer

import jaxremat

pytestmark = pytest.mark.usefixtures("few_compilations")

P, X = jnp.eye(16) + 0.1, jnp.ones((32, 16)) / 16
PLANNING = jaxremat.Planning(verify=False)


def step(p: jax.Array, x: jax.Array) -> Any:
    def loss(p: jax.Array) -> jax.Array:
        h = x
        for _ in range(4):
            h = jnp.tanh(h @ p) + jnp.sin(h)
        return (h**2).mean()

    loss_, gradient = jax.value_and_grad(loss)(p)
    return p - gradient, loss_, jnp.arange(3.0) / 3, jax.random.uniform(jax.random.PRNGKey(0), (2,))


def planned(fn: Callable[..., Any] = step, **options: Any) -> jaxremat.Step:
    return jaxremat.optimize("1GiB", planning=PLANNING, **options)(fn)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "words": lambda: jax.threefry_partitionable(False),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "device": lambda: jax.default_device(jax.devices("cpu")[0]),
}


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "promotion"])
def test_a_step_follows_the_settings_of_its_call(name: str) -> None:
    """There and back: what was planned for one setting is not what runs in another."""
    plain, own = jax.jit(step), planned()
    want = plain(P, X)
    assert_same(want, own(P, X))
    with SETTINGS[name]():
        changed = plain(P, X)
        result = own(P, X)
        assert jax.tree.map(jax.typeof, result) == jax.tree.map(jax.typeof, changed)
        assert_same(changed, result)
        assert own.lower(P, X).as_text().count("HIGHEST") == plain.lower(P, X).as_text().count("HIGHEST")
    assert_same(want, own(P, X))


def test_what_a_setting_refuses_is_refused_after_a_call_too() -> None:
    own = planned(lambda p, x: (step(p, x), jnp.arange(3) + 0.5 * jnp.ones(3, "float32")))
    own(P, X)
    with (
        SETTINGS["promotion"](),
        pytest.raises(Exception, match="no available implicit dtype promotion path"),
    ):
        own(P, X)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_told_from_the_others(name: str) -> None:
    from jaxremat._program import _compat

    before = _compat.settings()
    with SETTINGS[name]():
        assert _compat.settings() != before
    assert _compat.settings() == before


def test_plans_are_kept_apart_where_programs_are_compiled_otherwise() -> None:
    from jaxremat._program import _compat

    before = _compat.settings_in_words()
    assert before == _compat.settings_in_words()
    with SETTINGS["words"]():
        assert _compat.settings_in_words() != before


def test_without_jit_the_function_runs_as_it_is() -> None:
    concrete: list[bool] = []

    def watched(p: jax.Array, x: jax.Array) -> Any:
        concrete.append(not isinstance(p, Tracer))
        return step(p, x)

    own = planned(watched)
    for called_before in (False, True):
        concrete.clear()
        with jax.disable_jit():
            own(P, X)
        assert concrete == [True], called_before
        own(P, X)
    with jax.disable_jit():
        assert own.plan(P, X) == own.plan(P, X)


@pytest.mark.parametrize("debug", [jax.debug_nans, jax.debug_infs])
def test_special_values_raise_as_they_do_in_jit(debug: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def bad(p: jax.Array, x: jax.Array) -> Any:
        return step(p, x), jnp.log(-jnp.abs(p[0, 0])), 1 / (p[0, 0] - p[0, 0])

    own = planned(bad)
    for _ in range(2):  # before the first call, and after it
        said = []
        for run in (jax.jit(bad), own):
            with debug(True), pytest.raises(FloatingPointError) as caught:
                run(P, X)
            said.append(str(caught.value))
        assert said[0] == said[1]
        own(P, X)
    capsys.readouterr()


def test_leaks_are_found_as_in_jit() -> None:
    leaked: list[Any] = []

    def leaking(p: jax.Array, x: jax.Array) -> Any:  # a short one: JAX looks for leaks after each trace
        leaked.append(p * 2)
        return jnp.sum(x @ p)

    with jax.checking_leaks(), pytest.raises(Exception, match=r"[Ll]eak"):
        planned(leaking)(P, X)


def test_threads_that_call_first_plan_once() -> None:
    traced: list[int] = []

    def watched(p: jax.Array, x: jax.Array) -> Any:
        traced.append(threading.get_ident())
        return step(p, x)

    own, results = planned(watched), list[Any]()
    begin = threading.Barrier(4)

    def call() -> None:
        begin.wait()
        results.append(own(P, X))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len(set(traced)) == 1
    for result in results:
        assert_same(results[0], result)
