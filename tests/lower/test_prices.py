"""What running a kernel again costs, and what saving a value does, where the compiler fuses."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxremat import Graph, close_over_dependencies
from jaxremat._compiler._devices import DEVICES
from jaxremat._compiler._tags import Kernel, Written
from jaxremat._lower._lower import lower
from jaxremat._model._simulate import extra_seconds
from jaxremat._report._actions import actions
from jaxremat._rewrite._trace import Traced, trace

H100 = DEVICES["h100"]
ROWS, WIDTH = 4096, 1024
NBYTES = ROWS * WIDTH * 4


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def gated(ws: Any, x: jax.Array) -> jax.Array:
    """A layer whose activation is made of two kernels' worth of pointwise work."""
    y = x @ ws[0]
    return jnp.mean(((y * jnp.tanh(y)) @ ws[1]) ** 2)


def written_by_one_kernel(traced: Traced, also_read: bool) -> tuple[Written, dict[str, int]]:
    """The compiled program in which the tanh is another result of the kernel that makes the product's operand."""
    eqns = traced.jaxpr.jaxpr.eqns
    first = {}
    for i, e in enumerate(eqns):
        first.setdefault(e.primitive.name, i)
    dot, tanh, mul = first["dot_general"], first["tanh"], first["mul"]
    second = next(i for i, e in enumerate(eqns) if i > dot and e.primitive.name == "dot_general")
    last = len(eqns) - 1
    reads = {mul, tanh} if also_read else {mul}
    kernels = (
        Kernel(frozenset({mul, tanh}), frozenset({dot})),
        Kernel(frozenset({second}), frozenset(reads)),
        Kernel(frozenset({last}), frozenset({dot, tanh})),
    )
    return Written(dict.fromkeys((dot, tanh, mul, second), (NBYTES,)), kernels), first


def test_sums_of_what_devices_have_may_be_made_again_at_the_price_of_the_link() -> None:
    """Nothing else that devices send for is made twice."""
    traced = trace(jax.jit(jax.grad(gated)), ([struct(WIDTH, WIDTH)] * 2, struct(ROWS, WIDTH)), {})
    written, first = written_by_one_kernel(traced, also_read=True)
    bare = lower(traced, H100, base_nbytes=0, written=written)
    dot, tanh = first["dot_general"], first["tanh"]
    sent = replace(written, summed={dot: 2 * NBYTES, tanh: 8}, gathered={dot: NBYTES})
    graph = lower(traced, H100, base_nbytes=0, written=sent)
    assert graph.nodes[dot].repeatable and not graph.nodes[tanh].repeatable
    more = 3 * NBYTES / H100.link + 2 * H100.collective_seconds
    assert graph.nodes[dot].seconds == pytest.approx(bare.nodes[dot].seconds + more)
    (made,) = graph.nodes[dot].outputs
    found = actions(graph, close_over_dependencies(graph, set(graph.residuals) - {made}))
    assert [(a.value, a.sent) for a in found if a.sent] == [(made, ("sum", "gather"))]


@pytest.mark.parametrize("also_read", [False, True])
def test_what_is_written_for_the_backward_pass_alone_need_not_be(also_read: bool) -> None:
    traced = trace(jax.jit(jax.grad(gated)), ([struct(WIDTH, WIDTH)] * 2, struct(ROWS, WIDTH)), {})
    written, first = written_by_one_kernel(traced, also_read)
    graph = lower(traced, H100, base_nbytes=0, written=written)
    (tanh,), (mul,) = (graph.nodes[first[name]].outputs for name in ("tanh", "mul"))
    spared = 0.0 if also_read else NBYTES / H100.bandwidth
    assert graph.values[tanh].materialised
    assert graph.values[tanh].saved_seconds == pytest.approx(spared)
    assert graph.values[mul].saved_seconds == 0.0
    assert extra_seconds(graph, close_over_dependencies(graph, graph.residuals)) == pytest.approx(0.0)
    assert graph.extra_seconds == pytest.approx(-spared)
    # What is made of it is then made of what it is made of.
    made_of_both, made_of_one = 3 * NBYTES / H100.bandwidth, 2 * NBYTES / H100.bandwidth
    expected = made_of_both if also_read else made_of_one
    assert graph.nodes[first["mul"]].seconds == pytest.approx(expected + H100.launch_seconds, rel=0.01)


def squared(w: jax.Array, x: jax.Array) -> jax.Array:
    """An activation's products with itself: its gradient comes from a product that reads it."""
    y = x @ w
    h = y * jnp.tanh(y)
    return jnp.sum((h.T @ h) ** 2)


def in_the_backward_pass(
    fn: Any,
    weights: Any,
    besides: tuple[str, ...] = (),
    reads: tuple[str, ...] = ("dot",),
    *,
    single: bool = False,
) -> tuple[Graph, dict[str, int]]:
    """The graph where one kernel, of a `single` result or not, makes an activation's gradient of its cotangent and what
    else it `reads`, and writes other nodes `besides`; with nodes by name.
    """
    traced = trace(jax.jit(jax.grad(fn)), (weights, struct(ROWS, WIDTH)), {})
    eqns = traced.jaxpr.jaxpr.eqns
    bare = lower(traced, H100, base_nbytes=0)
    large = [i for i, e in enumerate(eqns) if e.outvars[0].aval.size == ROWS * WIDTH]
    late = [i for i in large if not bare.nodes[i].forward]
    named = {eqns[i].primitive.name: i for i in reversed(large) if bare.nodes[i].forward}
    named |= {"dot": named["dot_general"], "cotangent": [i for i in late if bare.nodes[i].contraction][-1]}
    named["gradient"] = late[-1]
    kernels = (
        Kernel(frozenset({named["mul"]}), frozenset({named["dot"]})),
        Kernel(
            frozenset({named["gradient"], *(named[b] for b in besides)}),
            frozenset(named[r] for r in (*reads, "cotangent")),
            single,
        ),
        Kernel(frozenset({len(eqns) - 1}), frozenset({named["gradient"], *(named[b] for b in besides)})),
    )
    sizes = {
        i: (NBYTES,) for name, i in named.items() if name in {"mul", "dot", "cotangent", "gradient", *besides}
    }
    return lower(traced, H100, base_nbytes=0, written=Written(sizes, kernels)), named


def test_what_another_kernel_writes_besides_costs_its_writing() -> None:
    graph, named = in_the_backward_pass(gated, [struct(WIDTH, WIDTH)] * 2)
    node = graph.nodes[named["mul"]]
    assert node.fusable_into == (named["gradient"],)
    assert node.fused_seconds == pytest.approx(NBYTES / H100.bandwidth)
    assert node.seconds == pytest.approx(2 * NBYTES / H100.bandwidth + H100.launch_seconds, rel=0.01)
    schedule = close_over_dependencies(graph, set(graph.residuals) - set(node.outputs))
    assert schedule.recomputed == ((node.id,),)
    assert extra_seconds(graph, schedule) == node.fused_seconds


@pytest.mark.parametrize(
    ("fn", "weights", "reads"),
    [(squared, struct(WIDTH, WIDTH), ("dot",)), (gated, [struct(WIDTH, WIDTH)] * 2, ())],
)
def test_kernels_that_wait_for_its_readers_or_read_others_write_it_not(
    fn: Any, weights: Any, reads: tuple[str, ...]
) -> None:
    graph, named = in_the_backward_pass(fn, weights, reads=reads)
    assert graph.nodes[named["mul"]].fusable_into == ()


def test_kernels_of_a_single_result_write_nothing_besides() -> None:
    graph, named = in_the_backward_pass(gated, [struct(WIDTH, WIDTH)] * 2, single=True)
    assert graph.nodes[named["mul"]].fusable_into == ()


def test_costly_work_is_repeated_for_one_reader_and_not_for_two() -> None:
    """The tanh is part of the backward pass's kernel, but not where the product's operand is made again of it too."""
    traced = trace(jax.jit(jax.grad(gated)), ([struct(WIDTH, WIDTH)] * 2, struct(ROWS, WIDTH)), {})
    written, first = written_by_one_kernel(traced, also_read=False)
    graph = lower(traced, H100, base_nbytes=0, written=written)
    tanh, mul = (graph.nodes[first[name]] for name in ("tanh", "mul"))
    alone = close_over_dependencies(graph, set(graph.residuals) - set(tanh.outputs))
    both = close_over_dependencies(graph, set(graph.residuals) - {*tanh.outputs, *mul.outputs})
    assert set().union(*alone.recomputed) == {tanh.id}
    assert set().union(*both.recomputed) == {tanh.id, mul.id}
    spared = NBYTES / H100.bandwidth
    assert extra_seconds(graph, alone) == pytest.approx(-spared)
    kernel = 2 * NBYTES / H100.bandwidth + H100.launch_seconds
    assert tanh.seconds == pytest.approx(kernel, rel=0.01)
    assert extra_seconds(graph, both) == pytest.approx(-spared + kernel + mul.fused_seconds, rel=0.01)


def test_what_the_backward_pass_makes_besides_is_not_saved() -> None:
    """Of a kernel that reads cotangents, results of the forward pass's equations are no residuals of the plain step."""
    graph, named = in_the_backward_pass(gated, [struct(WIDTH, WIDTH)] * 2, besides=("tanh",))
    (tanh,) = graph.nodes[named["tanh"]].outputs
    assert graph.values[tanh].materialised
    assert graph.values[tanh].saved_seconds == 0.0
    assert graph.extra_seconds == 0.0


def sliced(parts: int) -> Graph:
    """Products of the parts of one."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        whole = x @ w
        width = whole.shape[1] // parts
        pieces = [whole[:, i * width : (i + 1) * width] for i in range(parts)]
        return jnp.sum(jnp.stack([jnp.mean((jnp.sin(p).T @ p) ** 2) for p in pieces]))

    args = struct(WIDTH, WIDTH), struct(ROWS, WIDTH)
    return lower(trace(jax.jit(jax.grad(loss)), args, {}), H100, base_nbytes=0)


@pytest.mark.parametrize("parts", [2, 8])
def test_a_part_costs_what_it_has(parts: int) -> None:
    graph = sliced(parts)
    found = [n for n in graph.nodes if n.primitive == "slice" and n.forward and n.seconds > 0]
    assert len(found) == parts
    for node in found:
        assert node.seconds == pytest.approx(2 * NBYTES / parts / H100.bandwidth + H100.launch_seconds)
