"""Iterations of loops compiled alone, as XLA's GPU compiler makes them: what plans of loops cost there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxremat
from examples.benchmarks.networks import program
from jaxremat import MemoryStats
from jaxremat._baseline import Baseline
from jaxremat._graph import Graph
from jaxremat._hlo import parse
from jaxremat._program import Program
from jaxremat._roofline import roofline
from jaxremat._specs import DEVICES
from jaxremat._target import Target

H100 = DEVICES["h100"]
SIZES: dict[str, Any] = {
    "batch": 16, "length": 1024, "layers": 6, "width": 512, "heads": 8, "context": 1024, "vocabulary": 8192,
    "dtype": jnp.bfloat16, "scanned": True,
}  # fmt: skip
SCORES = (16, 8, 1024, 1024)


def a_step(remat: Any = "none") -> Any:
    return program("gpt", scale="tiny", remat=remat, **SIZES)


@functools.cache
def by_hand(remat: str) -> tuple[int, float]:
    """Peak and seconds of the step with rematerialisation by hand, or without it."""
    step = a_step(remat)
    jitted = jax.jit(step.step, donate_argnums=step.donate_argnums)
    compiled = Target("h100").lower(jitted, step.abstract_args(), {}, {}).compile()
    return MemoryStats.of(compiled).peak_nbytes, roofline(parse(compiled.as_text()), H100).seconds


@functools.cache
def baseline() -> Baseline:
    step = a_step()
    of = Program(step.step, donate_argnums=step.donate_argnums, target=Target("h100"))
    return Baseline(of, step.abstract_args(), {}, H100, "roofline")


def scores_in_memory(graph: Graph) -> list[str]:
    """The primitives that write arrays like the attention's scores in the forward loop."""
    shape = f"[{','.join(map(str, SCORES))}]"
    return [
        graph.nodes[value.producer].primitive
        for value in graph.values
        if value.materialised and value.length > 1 and value.shape.endswith(shape)
    ]


def test_what_one_kernel_keeps_to_itself_is_not_for_stacks() -> None:
    """The plain loop stacks the softmax's exponentials, which one that stacks nothing never writes."""
    assert "exp" in scores_in_memory(baseline().rough)
    assert len(scores_in_memory(baseline().graph)) == 2  # the scores, and the weights that they become
    assert "exp" not in scores_in_memory(baseline().graph)


def test_no_stack_is_too_small_to_decide_about() -> None:
    """Each takes kernels of its own, however small it is; what lies outside of loops may be small."""
    graph = baseline().graph
    below = {v for v in graph.residuals if graph.values[v].saved_nbytes <= graph.small_nbytes}
    assert {v for v in below if graph.values[v].length > 1}
    assert {v for v in below if graph.is_small(v)} == {v for v in below if graph.values[v].length == 1}


def test_the_plain_loops_cost_what_they_stack() -> None:
    graph = baseline().graph
    peak, seconds = by_hand("none")
    assert graph.step_seconds == seconds
    assert peak == baseline().peak_nbytes
    # It writes each stack, and reads it: at least so much a plan saves that stacks nothing.
    stacked = sum(v.saved_nbytes for v in graph.values if v.id in graph.residuals)
    assert -graph.extra_seconds > 2 * stacked / H100.bandwidth


@pytest.mark.slow
def test_plans_of_loops_are_as_predicted_and_not_dominated_by_hand() -> None:
    step = a_step()
    peak, seconds = by_hand("block")
    plan = jaxremat.plan(
        step.step, *step.abstract_args(), budget=peak, donate_argnums=step.donate_argnums, target="h100"
    )
    first = plan.rounds[0]
    assert abs(first.predicted_peak_nbytes / first.compiled_peak_nbytes - 1) < 0.08
    assert abs(first.overhead - first.compiled_overhead) < 0.03
    assert plan.compiled_peak_nbytes is not None and plan.compiled_overhead is not None
    assert plan.compiled_peak_nbytes <= peak
    assert (1 + plan.compiled_overhead) * by_hand("none")[1] < seconds
    assert plan.compiled_overhead < 0
