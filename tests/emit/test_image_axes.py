"""Images pass barriers with their axes in the order in which a GPU's libraries keep them, so that kernels are
not cut.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxremat
from examples.benchmarks.networks import program
from jaxremat import close_over_dependencies
from jaxremat._compiler._devices import CPU, DEVICES
from jaxremat._compiler._hlo import Module, executed, parse
from jaxremat._compiler._program import Program
from jaxremat._compiler._roofline import roofline
from jaxremat._compiler._target import Target
from jaxremat._emit._emit import FENCES, emit
from jaxremat._lower._lower import lower
from jaxremat._model._simulate import extra_seconds
from jaxremat._plan._baseline import measure_baseline
from jaxremat._plan._problem import Problem
from jaxremat._rewrite._trace import trace

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def network(numbers: tuple[str, str, str], dtype: Any = jnp.float32) -> Any:
    """A gradient of two convolutions with an activation between, and its arguments."""

    def loss(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu6(
                jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            )
        return jnp.mean(x.astype(jnp.float32) ** 2)

    sizes = {"N": 16, "H": 12, "W": 10, "C": 32, "I": 32, "O": 32}
    image = [sizes[axis] for axis in numbers[0]]
    kernel = [3 if axis in "HW" else sizes[axis] for axis in numbers[1]]
    args = [jax.ShapeDtypeStruct(kernel, dtype)] * 2, jax.ShapeDtypeStruct(image, dtype)
    return jax.jit(jax.value_and_grad(loss)), args


def test_channels_come_before_pixels() -> None:
    fn, args = network(LAST)
    traced = trace(fn, args, {})
    graph, eqns = lower(traced, DEVICES["p100"], base_nbytes=0), traced.jaxpr.jaxpr.eqns
    pairs = zip(graph.nodes, eqns, strict=True)
    axes = {var: graph.values[v].axes for n, e in pairs for v, var in zip(n.outputs, e.outvars, strict=True)}
    found = {v: order for v, order in axes.items() if order}
    images = {v for e in eqns for v in e.outvars if v.aval.shape == (16, 12, 10, 32)}
    convolved = [e.outvars[0] for e in eqns if e.primitive.name == "conv_general_dilated"]
    assert set(found.values()) == {(0, 3, 1, 2)}
    assert images.intersection(convolved) <= found.keys() <= images  # and no gradient of a kernel
    assert {e.primitive.name for e in eqns for v in e.outvars if v in found} >= {"min", "select_n"}


@pytest.mark.parametrize(
    ("device", "numbers", "dtype", "axes"),
    [
        (CPU, LAST, jnp.float32, ()),
        (DEVICES["p100"], FIRST, jnp.float32, ()),
        (DEVICES["a100-40"], LAST, jnp.bfloat16, ()),
        (DEVICES["a100-40"], FIRST, jnp.bfloat16, (0, 2, 3, 1)),
        (DEVICES["h100"], LAST, jnp.float32, ()),
        (DEVICES["h100"], FIRST, jnp.float32, (0, 2, 3, 1)),
    ],
)
def test_the_order_is_the_devices(device: Any, numbers: Any, dtype: Any, axes: tuple[int, ...]) -> None:
    """The CPU's compiler turns images where it convolves."""
    fn, args = network(numbers, dtype)
    traced = trace(fn, args, {})
    graph = lower(traced, device, base_nbytes=0)
    assert {value.axes for value in graph.values if value.axes} == ({axes} if axes else set())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("target", jaxremat.targets())
def test_compilers_keep_that_order(target: str, dtype: Any) -> None:
    step, args = network(LAST, dtype)
    text = Target(target).lower(step, args, {}, {}).compile().as_text() or ""
    chip = DEVICES[target].chip
    assert chip is not None
    wanted = "b01f" if chip.channels_last(str(jnp.dtype(dtype))) else "bf01"
    assert set(re.findall(r"dim_labels=(\w+)_\w+->(\w+)", text)) == {(wanted, wanted)}


@pytest.mark.parametrize("fence", FENCES)
def test_every_fence_turns_images_and_turns_them_back(fence: str) -> None:
    fn, args = network(LAST)
    traced = trace(fn, args, {})
    graph = lower(traced, DEVICES["p100"], base_nbytes=0)
    eqns = emit(traced, graph, close_over_dependencies(graph, ()), fence).jaxpr.eqns
    made_by = {v: e for e in eqns for v in e.outvars}
    barriers = [e for e in eqns if e.primitive.name == "optimization_barrier"]
    passing = [a for e in barriers for a in e.invars if a in made_by and a.aval.ndim == 4]
    turned = [a for a in passing if made_by[a].primitive.name == "transpose"]
    images = [a for a in passing if 16 in a.aval.shape]
    assert turned == images != []
    assert all(a.aval.shape == (16, 32, 12, 10) for a in turned)
    behind = {v for e in barriers for v in e.outvars}
    back = [e for e in eqns if e.primitive.name == "transpose" and e.invars[0] in behind]
    assert len(back) == len(turned)
    assert all(e.outvars[0].aval.shape == (16, 12, 10, 32) for e in back)


def masks_apart(module: Module) -> int:
    """Kernels that write masks and nothing else."""
    kernels = (i for c in executed(module) for i in c.instructions if i.opcode == "fusion")
    return sum({s.dtype for s in i.shapes} == {"pred"} for i in kernels)


@pytest.mark.parametrize("target", ["p100", "h100"])
def test_masks_are_written_by_kernels_that_reduce(target: str) -> None:
    """As in the plain step, and plans cost what they promise."""
    step = program("mobilenet_v2", scale="tiny", batch=64, pixels=128)
    made = Program(step.step, donate_argnums=(0,), target=Target(target))
    problem = Problem(made, step.abstract_args(), {}, DEVICES[target], "roofline")
    plain = measure_baseline(problem, plain=False, tagged=True)
    graph = plain.graphs.plain
    saved = [v for v in graph.residuals if "bool" not in graph.values[v].shape]
    schedule = close_over_dependencies(graph, saved)
    again = {graph.nodes[n].primitive for nodes in schedule.recomputed for n in nodes}
    assert again == {"and"}
    text = problem.compile(problem.jitted(graph, schedule)).executable.as_text() or ""
    passed = [
        shape
        for line in text.splitlines()
        if re.search(r"%optimization_barrier\S* = \(", line)
        for shape in re.findall(r"f32\[64(?:,\d+){3}\]\{[\d,]+\}", line.split(" tuple(")[0])
    ]
    assert passed
    assert all(shape.endswith("{3,2,1,0}") for shape in passed)
    assert masks_apart(parse(text)) <= 1 + masks_apart(plain.tagged.module)  # that of the pooled images
    seconds = roofline(parse(text), problem.device).seconds
    # Variances are kept, by kernels of their own.
    assert seconds == pytest.approx(plain.seconds + extra_seconds(graph, schedule), rel=0.015)
