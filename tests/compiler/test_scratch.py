"""Scratch memory of equations, read off the whole program as XLA's GPU compiler makes it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from chains import updating
from graphs import peak_of
from jax import lax

import jaxremat
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._program import Program
from jaxremat._compiler._scratch import Scratch, scratch
from jaxremat._compiler._single_equation import workspaces
from jaxremat._compiler._target import Target
from jaxremat._lower._lower import lower
from jaxremat._model._device_specs import DEVICES
from jaxremat._plan._baseline import Baseline, measure_baseline
from jaxremat._plan._problem import Problem
from jaxremat._program._flops import aval_nbytes
from jaxremat._rewrite._passes import without
from jaxremat._rewrite._trace import trace


def conv(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


@updating
def inverted(weights: Any, x: jax.Array) -> Any:
    """A train step of MobileNet's block with a stride."""
    wide, depth, narrow = weights
    y = jnp.tanh(conv(jnp.tanh(conv(x, wide)), depth, stride=2, groups=96))
    return jnp.mean(conv(y, narrow) ** 2)


@updating
def vgg(weights: Any, x: jax.Array) -> Any:
    """A train step of two of VGG's groups."""
    y = x
    for first, second in weights:
        y = jax.nn.relu(conv(jax.nn.relu(conv(y, first)), second))
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(y**2)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


STEPS = {
    "inverted": (inverted, ((struct(1, 1, 4, 96), struct(3, 3, 1, 96), struct(1, 1, 96, 24)), struct(32, 56, 56, 4))),
    "vgg": (
        vgg,
        (
            [(struct(3, 3, 3, 32), struct(3, 3, 32, 32)), (struct(3, 3, 32, 64), struct(3, 3, 64, 64))],
            struct(16, 128, 128, 3),
        ),
    ),
}  # fmt: skip


def baseline(name: str, target: str) -> Baseline:
    step, args = STEPS[name]
    program = Program(step, donate_argnums=(0,), target=Target(target))
    problem = Problem(program, args, {}, DEVICES[target], "roofline")
    return measure_baseline(problem, plain=False, tagged=True)


def test_copies_that_only_the_equation_alone_needs_are_not_counted() -> None:
    """In the program the producers of a convolution's operands write them as it wants them, but for the padding."""
    plain = baseline("inverted", "p100")
    eqns = plain.problem.traced.jaxpr.jaxpr.eqns
    shown = scratch(plain.tagged.module, eqns)
    alone = workspaces(plain.problem.traced, plain.problem.program, "gpu", 2**20)
    (gradient,) = (
        i for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "conv_general_dilated" and eqn.params["lhs_dilation"] == (2, 2)
    )  # fmt: skip
    wide = aval_nbytes(eqns[gradient].outvars[0].aval)
    assert alone[gradient] > 1.9 * wide  # in the other layout, and padded
    assert 1.0 * wide < shown[gradient].nbytes < 1.3 * wide  # padded, and a copy of the input
    products = [i for i in alone if eqns[i].params["padding"] == ((0, 0), (0, 0))]
    assert len(products) == 5
    assert sum(shown[i].nbytes for i in products) < 0.1 * sum(alone[i] for i in products)


@pytest.mark.parametrize("masks", ["operands", "results"])
@pytest.mark.parametrize("target", ["p100", "h100"])
def test_a_pooling_gradient_fills_no_zeros_in_the_forward_pass(target: str, masks: str) -> None:
    """The plain program fills them there, and keeps them; a plan that drops nothing does not."""
    with without(*["masks"] * (masks == "operands")):
        plain = baseline("vgg", target)
    spared = plain.peak_nbytes - plain.tagged.peak_nbytes
    assert spared > 0.15 * plain.peak_nbytes
    assert plain.seconds >= plain.tagged.seconds
    step, args = STEPS["vgg"]
    budget = plain.peak_nbytes - spared // 2
    plan = jaxremat.plan(step, *args, budget=budget, donate_argnums=0, target=target)
    assert plan.drops_nothing
    assert plan.baseline_peak_nbytes == plain.peak_nbytes
    assert plan.compiled_overhead is not None
    assert plan.compiled_overhead <= 0.001
    assert plan.overhead >= plan.compiled_overhead - 0.01
    if masks == "operands":  # with results there is more that the compiled program does without
        assert plan.overhead == pytest.approx(plan.compiled_overhead, abs=0.01)


def test_the_model_of_a_network_with_pools_meets_the_compiler() -> None:
    plain = baseline("vgg", "p100")
    step, args = STEPS["vgg"]
    plan = jaxremat.plan(step, *args, budget=plain.peak_nbytes // 2, donate_argnums=0, target="p100")
    peak = plan.rounds[-1].compiled_peak_nbytes
    assert plan.rounds[-1].predicted_peak_nbytes == pytest.approx(peak, rel=0.15)
    assert plan.overhead < 0.1


def row(products: bool) -> Any:
    """The equations of an activation and its product with a weight, and a product with that weight before."""

    def fn(x: jax.Array, w: jax.Array) -> Any:
        y = jnp.tanh(x @ w if products else x)
        return y @ w

    return jax.make_jaxpr(fn)(struct(64, 64), struct(64, 64)).jaxpr.eqns


PADDED = """HloModule m, is_scheduled=true

%pad.1 (p: f32[64,64]) -> f32[64,72] {
  %p = f32[64,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %pad = f32[64,72]{1,0} pad(%p, %zero), padding=0_0x0_8
}

%pad.2 (p: f32[64,64]) -> f32[72,64] {
  %p = f32[64,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %pad = f32[72,64]{1,0} pad(%p, %zero), padding=0_8x0_0
}

ENTRY %main (x: f32[64,64], w: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %w = f32[64,64]{1,0} parameter(1)
  %tanh = f32[64,64]{1,0} tanh(%x), metadata={op_name="jit(fn)/#0/tanh"}
  %left = f32[64,72]{1,0} fusion(%tanh), kind=kLoop, calls=%pad.1
  %right = f32[72,64]{1,0} fusion(%w), kind=kLoop, calls=%pad.2
  %dot = f32[64,64]{1,0} custom-call(%left, %right), custom_call_target="gemm", metadata={op_name="#1/dot_general"}
  ROOT %copy = f32[64,64]{1,0} negate(%dot)
}
"""


def test_an_operand_that_was_copied_makes_room_for_the_other_copy() -> None:
    """Both copies are there while the product runs, but what one is a copy of need not be."""
    whole, padded = 64 * 64 * 4, 64 * 72 * 4
    found = scratch(parse(PADDED), row(products=False))
    # With the operand: both copies. Without: it and its copy, then both copies and the result, less operand and result.
    assert found[1] == Scratch(2 * padded, {0: 2 * padded - (2 * padded - whole)})


LOSS = """HloModule m, is_scheduled=true

%sum.1 (a: f32[64,64], b: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  %b = f32[64,64]{1,0} parameter(1)
  ROOT %both = f32[64,64]{1,0} add(%a, %b)
}

ENTRY %main (x: f32[64,64], w: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %w = f32[64,64]{1,0} parameter(1)
  %first = (f32[64,64]{1,0}, f32[64,64]{1,0}) custom-call(%x), custom_call_target="gemm", metadata={op_name="#0/dot"}
  %own = f32[64,64]{1,0} get-tuple-element(%first), index=0
  %more = f32[64,64]{1,0} get-tuple-element(%first), index=1
  %loss = f32[64,64]{1,0} fusion(%own, %more), kind=kLoop, calls=%sum.1, metadata={op_name="#1/tanh"}
  ROOT %out = f32[64,64]{1,0} custom-call(%loss, %w), custom_call_target="gemm", metadata={op_name="#2/dot_general"}
}
"""


def test_what_kernels_of_other_equations_make_is_not_there_in_forms_without_them() -> None:
    """What a product makes besides its result counts for the loss that reads it; in chunks there is none."""
    module, eqns = parse(LOSS), row(products=True)
    assert scratch(module, eqns)[1].nbytes == 64 * 64 * 4
    assert scratch(module, eqns, {0})[1].nbytes == 0
    assert scratch(module, eqns, {2})[1].nbytes == 64 * 64 * 4


SPARE = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[64,64], w: f32[64,64]) -> (f32[64,64], f32[64,64]) {
  %x = f32[64,64]{1,0} parameter(0)
  %w = f32[64,64]{1,0} parameter(1)
  %copy = f32[64,64]{LAYOUT} copy(%w)
  %first = f32[64,64]{1,0} custom-call(%x, %copy), custom_call_target="gemm", metadata={op_name="#0/dot_general"}
  %tanh = f32[64,64]{1,0} tanh(%first), metadata={op_name="jit(fn)/#1/tanh"}
  %second = f32[64,64]{1,0} custom-call(%tanh, %copy), custom_call_target="gemm", metadata={op_name="#2/dot_general"}
  %new = f32[64,64]{1,0} subtract(%w, %second)
  ROOT %out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(%second, %new)
}
"""


@pytest.mark.parametrize(("layout", "counted"), [("1,0", False), ("0,1", True)])
def test_copies_of_arguments_as_they_are_come_of_the_programs_order(layout: str, counted: bool) -> None:
    """In another layout they would be there in every plan, for all that runs meanwhile."""
    found = scratch(parse(SPARE.replace("LAYOUT", layout)), row(products=True))
    assert [found[i].nbytes for i in range(3)] == [64 * 64 * 4 * counted] * 3


@updating
def language_model(weights: Any, x: jax.Array, labels: jax.Array) -> Any:
    """A train step whose logits XLA pads, with the weight, for the product that goes back from them."""
    inner, embedding = weights
    logits = jnp.tanh(x @ inner) @ embedding.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_the_model_of_padded_logits_meets_the_compiler() -> None:
    labels = jax.ShapeDtypeStruct((1024,), jnp.int32)
    args = ((struct(512, 512), struct(50257, 512)), struct(1024, 512), labels)
    program = Program(language_model, donate_argnums=(0,), target=Target("h100"))
    problem = Problem(program, args, {}, DEVICES["h100"], "roofline")
    plain = measure_baseline(problem, plain=False, tagged=True)
    graph = plain.graphs.plain
    assert max(node.workspace_nbytes for node in graph.nodes) > 1024 * 50257 * 4
    predicted = peak_of(graph, graph.residuals)
    assert predicted == pytest.approx(plain.peak_nbytes, rel=0.01)


def test_only_what_dies_makes_room_for_scratch_memory() -> None:
    """A cotangent whose last reader copies it does, an activation and a cotangent that is read again do not."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    traced = trace(jax.jit(jax.grad(loss)), (struct(64, 64), struct(64, 64)), {})
    bare = lower(traced, DEVICES["h100"], base_nbytes=0)
    products = [n for n in bare.nodes if n.primitive == "dot_general" and not n.forward]
    every = {n.id: Scratch(100, dict.fromkeys(range(len(bare.nodes)), 60)) for n in products}
    graph = lower(traced, DEVICES["h100"], base_nbytes=0, workspace=every)
    last = {v: n.id for n in bare.nodes for v in bare.reads[n.id]}
    expected = {
        n.id: 40
        if any(last[v] == n.id and not bare.nodes[bare.values[v].producer].forward for v in bare.reads[n.id])
        else 100
        for n in products
    }
    assert {n.id: graph.nodes[n.id].workspace_nbytes for n in products} == expected
    assert {40, 100} == set(expected.values())
