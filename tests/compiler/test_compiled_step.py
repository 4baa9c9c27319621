"""A compiled program is read once: its memory, seconds, peak, overwritten reads and collectives."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import make_step
from jax import lax

import jaxremat
from jaxremat._compiler import _compiled_step, _single_equation
from jaxremat._compiler._compiled_step import CompiledStep, seconds_with_copies
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._compiler._hlo import Module, parse
from jaxremat._compiler._peak_contents import alive_at_peak
from jaxremat._lower import _iteration

CPU = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
CHAIN = ([jnp.ones((64, 64))] * 8, jnp.ones((1024, 64)))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the text of each program is parsed."""
    found = Counter[str]()

    def counted(text: str) -> Module:
        found[text] += 1
        return parse(text)

    for module in (_compiled_step, _single_equation, _iteration):
        monkeypatch.setattr(module, "parse", counted)
    return found


def compiled(args: Any = CHAIN) -> Any:
    return jax.jit(make_step(), donate_argnums=0).lower(*args).compile()


def test_all_facts_are_those_of_the_text_and_take_one_parse(parsed: Counter[str]) -> None:
    executable = compiled()
    step = CompiledStep(executable, CPU, keep_module=True)
    assert step.memory == jaxremat.MemoryStats.of(executable)
    assert repr(step.memory).startswith(
        f"MemoryStats(peak_nbytes={step.memory.peak_nbytes}, arguments_nbytes="
    )
    assert not parsed, "the memory needs no text"
    text = executable.as_text()
    module = parse(text)
    assert step.seconds == seconds_with_copies(module, CPU) > 0
    assert step.alive == alive_at_peak(module, text)
    assert step.alive
    assert not step.overwritten_reads
    assert not step.collectives
    assert step.module.computations.keys() == module.computations.keys()
    assert list(parsed.values()) == [1]


def test_a_module_that_is_not_kept_is_an_error() -> None:
    with pytest.raises(ValueError, match="keep_module=True"):
        _ = CompiledStep(compiled(), CPU).module


@pytest.mark.parametrize("budget", ["min", 0.8, 2.0])
def test_a_plan_parses_each_compiled_program_once(budget: Any, parsed: Counter[str]) -> None:
    plain = jaxremat.MemoryStats.of(compiled()).peak_nbytes
    budget = budget if budget == "min" else int(budget * plain)
    step = jaxremat.optimize(budget, donate_argnums=0)(make_step())
    plan = step.plan(*CHAIN)
    assert set(parsed.values()) == {1}
    assert len(parsed) >= 1
    assert plan.compiled_peak_nbytes is not None


@pytest.mark.parametrize("width", [1, 6, 100], ids="{} numbers".format)
def test_a_loop_of_few_bytes_may_hold_a_barrier(width: int) -> None:
    """XLA:CPU makes one kernel of a loop over less than a kilobyte, and ends the process where that has a barrier."""

    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        def one(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            y, again = lax.optimization_barrier((jnp.sin(carry), w))
            return y * again, None

        return lax.scan(one, x, None, length=3)[0]

    args = jnp.full(width, 0.5), jnp.full(width, 2.0)
    got = jax.jit(looped, compiler_options=jaxremat.compiler_options("cpu"))(*args)
    want = 0.5
    for _ in range(3):
        want = 2 * np.sin(want)
    np.testing.assert_allclose(got, np.full(width, want), rtol=1e-6)


def test_options_of_the_caller_are_kept() -> None:
    name = "xla_disable_hlo_passes"
    own = jaxremat.compiler_options("cpu")[name].split(",")
    merged = jaxremat.compiler_options("cpu", {name: f"algsimp,{own[0]}", "xla_cpu_copy_insertion": 1})
    assert merged == {name: ",".join(["algsimp", *own]), "xla_cpu_copy_insertion": 1}
    assert jaxremat.compiler_options("gpu", {name: "algsimp"}) == {name: "algsimp"}
