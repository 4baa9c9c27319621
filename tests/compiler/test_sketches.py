"""Programs that are compiled only to see what they write: as little machine code as that takes, and the same graphs."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from chains import train, updating

import jaxremat
from jaxremat import Graph
from jaxremat._compiler import _compiled_step
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._compiler._hlo import Module
from jaxremat._compiler._overwritten_reads import OverwrittenRead, overwritten_reads
from jaxremat._compiler._program import Program, placed
from jaxremat._plan._baseline import Baseline, measure_baseline
from jaxremat._plan._problem import Problem

CPU = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
EMITTERS = "xla_cpu_use_fusion_emitters"
CHAIN = ([jnp.ones((64, 64))] * 8, jnp.ones((1024, 64)))


def attention(w: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
    weights = jax.nn.softmax(x @ w @ x.mT)
    return jax.nn.gelu(weights @ x @ w), None


@updating
def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    """A train step with a loop: iterations of both passes are compiled alone."""
    return (jax.lax.scan(lambda x, w: attention(w, x), x, weights)[0] ** 2).sum()


@updating
def pooled(weights: jax.Array, x: jax.Array) -> jax.Array:
    """A train step with convolutions and a max-pool, whose gradient needs scratch memory."""
    y = x
    for w in weights:
        y = jax.nn.relu(jax.lax.conv(y, w, (1, 1), "SAME"))
    return (jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 3, 3), "SAME") ** 2).sum()


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


STEPS = [
    (scanned, (array(4, 32, 32), array(2, 64, 32))),
    (pooled, (array(3, 8, 8, 3, 3), array(4, 8, 24, 24))),
]


def problem(step: Any, args: Any) -> Problem:
    program = placed(Program(step, donate_argnums=(0,)), args, {})
    return Problem(program, args, {}, CPU, "roofline")


def baseline(step: Any, args: Any) -> Baseline:
    return measure_baseline(problem(step, args), plain=True, tagged=True)


def in_memory(graph: Graph) -> set[int]:
    return {v.id for v in graph.values if v.materialised}


@pytest.mark.parametrize(("step", "args"), STEPS)
def test_a_sketch_shows_what_a_draft_does(step: Any, args: Any) -> None:
    sketched = baseline(step, args)
    with patch.object(Program, "unoptimised_build", Program.unfused_build):
        drafted = baseline(step, args)
        wanted = drafted.graphs.plain
    found = sketched.graphs.plain
    assert dict(sketched.problem.unoptimised_build.compiler_options)[EMITTERS] is False
    assert sketched.peak_nbytes == drafted.peak_nbytes, "a sketch's peak was taken for the step's"
    assert sketched.seconds == drafted.seconds, "a sketch was timed"
    alone = measure_baseline(problem(step, args), plain=False, tagged=True)
    assert sketched.seconds == alone.seconds
    assert in_memory(found) == in_memory(wanted)
    for one, other in zip(found.nodes, wanted.nodes, strict=True):
        assert one.workspace_nbytes == pytest.approx(other.workspace_nbytes, rel=0.01)
        assert replace(one, workspace_nbytes=0) == replace(other, workspace_nbytes=0)


def test_peaks_are_a_drafts() -> None:
    """The plain step and each plan are compiled with the kernels that will run; what is only read is not."""
    compiled: list[bool] = []
    compile_as = Program.compile

    def counted(self: Program, *args: object) -> object:
        compiled.append(EMITTERS in dict(self.compiler_options))
        return compile_as(self, *args)  # type: ignore[arg-type]

    found: list[bool] = []

    def looked(module: Module) -> tuple[OverwrittenRead, ...]:
        reads = overwritten_reads(module)
        found.append(bool(reads))
        return reads

    step, args = STEPS[0]
    with (
        patch.object(Program, "compile", counted),
        patch.object(_compiled_step, "overwritten_reads", looked),
    ):
        planned = jaxremat.optimize("min", donate_argnums=0)(step)
        plan = planned.plan(*args)
    # the plain step is begun; plans are compiled once each, and once more where XLA would overwrite what they read
    assert compiled.count(False) == len(plan.rounds) + sum(found)
    assert compiled.count(True) >= 1 + 3, "the tagged step, and iterations of both passes"
    assert jaxremat.MemoryStats.of(planned.compile(*args)).peak_nbytes == plan.compiled_peak_nbytes


def test_where_checkpoints_are_undone_seconds_are_compared_and_nothing_is_sketched() -> None:
    """A plan's time is counted from the step's own, by the kernels of both."""

    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.sin(x @ w) @ w)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.checkpoint(block)(w, x)
        return (x**2).sum()

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    checkpointed = problem(step, CHAIN)
    options: list[dict[str, object]] = []
    compile_as = Program.compile

    def counted(self: Program, *args: object) -> object:
        options.append(dict(self.compiler_options))
        return compile_as(self, *args)  # type: ignore[arg-type]

    assert checkpointed.undoes
    with patch.object(Program, "compile", counted):
        _ = measure_baseline(checkpointed, plain=False, tagged=True).tagged
    assert [EMITTERS in each for each in options] == [False]


@pytest.mark.uncached  # tables of source lines are in another order once a program has been read from the cache
def test_what_cannot_be_sketched_is_drafted() -> None:
    """A version of jax that knows no such option compiles with the others."""
    of = placed(Program(train, donate_argnums=(0,)), CHAIN, {})
    unknown = replace(of.unoptimised_build("cpu"), compiler_options=(("xla_cpu_no_such_option", True),))
    found, wanted = (each.compile(of.plain, CHAIN, {}) for each in (unknown, of.unfused_build("cpu")))
    assert found.as_text() == wanted.as_text()
    part = unknown.alone(train, donate_argnums=(0,))
    assert part.compile(part.plain, CHAIN, {}).as_text() == wanted.as_text()
    with pytest.raises(Exception, match="xla_cpu_no_such_option"):
        replace(unknown, otherwise=()).compile(of.plain, CHAIN, {})


def test_for_a_target_nothing_is_sketched() -> None:
    of = Program(train)
    assert of.unoptimised_build("gpu") == of.unfused_build("gpu")
