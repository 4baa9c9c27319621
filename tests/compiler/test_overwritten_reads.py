"""XLA writes over an array that a kernel still reads under a second name: found in its HLO, and avoided."""

import functools
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxremat
from jaxremat._compiler._compiled_step import CompiledStep
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._overwritten_reads import OverwrittenRead, overwritten_reads
from jaxremat._compiler._target import Target
from jaxremat._emit._detaching import Detached, detach
from jaxremat._plan import _step_compiler
from jaxremat._plan._step_compiler import OverwrittenReadError, compile_schedule

CPU = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
X = np.random.default_rng(0).normal(size=(512, 64)).astype("float32")


def row_before(x: Any) -> Any:
    """Read an array element by element, and the row before through a barrier."""
    v = jnp.exp(lax.sort(x, dimension=0))
    other = lax.sort(v, dimension=1)
    with jax.named_scope("barrier_0"):
        behind, _ = lax.optimization_barrier((v, other))
    before = jnp.pad(behind, ((1, 0), (0, 0)))[:-1]
    return jnp.sum(lax.sort(jnp.tanh(v - before), dimension=1)[:, ::3] ** 2), other.sum()


def same_row(x: Any) -> Any:
    """Read an array element by element under both names."""
    v = jnp.exp(lax.sort(x, dimension=0))
    other = lax.sort(v, dimension=1)
    with jax.named_scope("barrier_0"):
        behind, _ = lax.optimization_barrier((v, other))
    return jnp.sum(lax.sort(jnp.tanh(v - 2 * behind), dimension=1)[:, ::3] ** 2), other.sum()


def compiled(fn: Any) -> Any:
    return jax.jit(fn).lower(X).compile(compiler_options=jaxremat.compiler_options("cpu"))


@functools.cache
def traced(fn: Any) -> Any:
    return jax.make_jaxpr(fn)(X)


def detached(fn: Any, known: Detached | None = None) -> Any:
    """The function with what is known behind a barrier of its own, or what passes first through its barrier."""
    closed = traced(fn)
    jaxpr = closed.jaxpr
    flat = [-1] * len(jaxpr.eqns)
    eqns, loop_of, outvars = detach(
        jaxpr.eqns, flat, (), jaxpr.outvars, known or Detached((("barrier_0", 0),))
    )
    assert len(eqns) == len(loop_of) == len(jaxpr.eqns) + 1
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), closed.consts))


def test_a_second_name_that_is_read_elsewhere_is_found() -> None:
    assert overwritten_reads(parse(compiled(row_before).as_text())) == (
        OverwrittenRead("subtract_tanh_fusion", "jit(row_before)/barrier_0", 0),
    )


@pytest.mark.jax_0_10("XLA overwrites the array")
def test_xla_still_overwrites_it() -> None:
    """If this fails, XLA has been mended, and `_overwritten_reads` with `_detaching` can go."""
    right, wrong = jax.jit(row_before)(X)[0], compiled(row_before)(X)[0]
    assert abs(wrong - right) > right


def test_a_second_name_that_is_read_at_the_same_place_is_left_alone() -> None:
    executable = compiled(same_row)
    assert not overwritten_reads(parse(executable.as_text()))
    np.testing.assert_array_equal(executable(X)[0], jax.jit(same_row)(X)[0])


def test_a_barrier_of_its_own_avoids_it() -> None:
    executable = compiled(detached(row_before))
    assert not overwritten_reads(parse(executable.as_text()))
    np.testing.assert_array_equal(executable(X)[0], jax.jit(row_before)(X)[0])


def test_what_one_schedule_detaches_so_does_the_next() -> None:
    """Its arrays are known by themselves, and named where they pass a barrier."""
    jaxpr = traced(row_before).jaxpr
    first = Detached((("barrier_0", 0),))
    for known in (first, again := Detached(arrays=first.arrays)):
        found = detach(jaxpr.eqns, [-1] * len(jaxpr.eqns), (), jaxpr.outvars, known)
        assert len(found[0]) == len(jaxpr.eqns) + 1
    assert again.passing == first.passing
    others = Detached(arrays={*jaxpr.invars})
    assert detach(jaxpr.eqns, [-1] * len(jaxpr.eqns), (), jaxpr.outvars, others)[0] == jaxpr.eqns
    assert others.passing == ()


def test_so_it_does_on_a_gpu() -> None:
    options = {"xla_gpu_enable_cub_radix_sort": False}
    texts = [
        Target("h100").lower(jax.jit(fn), (X,), {}, options).compile().as_text()
        for fn in (row_before, detached(row_before))
    ]
    found = [overwritten_reads(parse(text)) for text in texts]
    assert [len(each) for each in found] == [1, 0]


class FakeBaseline:
    """Emits `row_before`, with what is detached named."""

    def __init__(self, mends: bool) -> None:
        self.mends = mends
        self.asked: list[Any] = []

    def jitted(self, graph: Any, schedule: Any, fence: str, detached_: Any) -> Any:
        self.asked.append(detached_.passing)
        return detached(row_before, detached_) if detached_ and self.mends else row_before

    def compile(self, jitted: Any) -> Any:
        return CompiledStep(compiled(jitted), CPU)


def test_a_schedule_is_compiled_again_with_the_array_detached() -> None:
    baseline: Any = FakeBaseline(mends=True)
    none: Any = None
    made = compile_schedule(baseline, none, none, "finished")
    assert baseline.asked == [(), (("barrier_0", 0),)]
    assert made.detached == (("barrier_0", 0),)
    np.testing.assert_array_equal(made.compiled.executable(X)[0], jax.jit(row_before)(X)[0])


def test_the_next_schedule_is_compiled_once() -> None:
    """It detaches the arrays of the one before, and its plan names them."""
    baseline: Any = FakeBaseline(mends=True)
    none: Any = None
    arrays = set[Any]()
    for _ in range(2):
        made = compile_schedule(baseline, none, none, "finished", arrays=arrays)
        assert made.detached == (("barrier_0", 0),)
    assert baseline.asked == [(), (("barrier_0", 0),), ()]


def test_a_schedule_that_cannot_be_mended_is_refused() -> None:
    baseline: Any = FakeBaseline(mends=False)
    none: Any = None
    with pytest.raises(OverwrittenReadError, match=r"kernel `\w+` write over .* \(.*barrier_0, operand 0\)"):
        compile_schedule(baseline, none, none, "finished")
    assert len(baseline.asked) == 2 <= _step_compiler.ROUNDS
