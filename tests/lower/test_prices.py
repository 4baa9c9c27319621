"""What running a kernel again costs, and what saving a value does, where the compiler fuses."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import updating
from test_loops import CPU, traced
from zoo import Case, _normal, _sgd

import jaxremat
from jaxremat import Graph, close_over_dependencies, simulate
from jaxremat._compiler._devices import DEVICES
from jaxremat._compiler._program import Program
from jaxremat._compiler._tags import Kernel, Written
from jaxremat._compiler._target import Target
from jaxremat._lower._lower import lower
from jaxremat._model._graph import Node
from jaxremat._model._simulate import extra_seconds
from jaxremat._plan._baseline import measure_baseline
from jaxremat._plan._problem import Problem
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


EXAMPLES, CLASSES = 512, 8192


def cross_entropy(weights: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Its gradient by the logits is their softmax, less one at the label: automatic differentiation adds both."""
    x, labels = batch
    logits = jnp.tanh(x) @ weights
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked[:, 0])


def make_args() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _normal((64, CLASSES)), (_normal((EXAMPLES, 64), 1), jnp.arange(EXAMPLES) % CLASSES)


CASE = Case("cross entropy", _sgd(cross_entropy), make_args)


def the_sum(graph: Graph) -> Node:
    """The node that adds what is scattered, which is in no memory by itself."""
    wide = (n for n in graph.nodes if n.primitive == "scatter-add")
    (v,) = (v for n in wide for v in n.outputs if graph.values[v].nbytes == 4 * EXAMPLES * CLASSES)
    assert not graph.values[v].materialised
    (reader,) = (n for n in graph.nodes if v in n.inputs)
    assert graph.values[reader.outputs[0]].materialised
    return reader


def test_zeros_that_are_added_to_take_no_memory() -> None:
    assert the_sum(lower(traced(CASE), CPU, base_nbytes=0)).primitive == "add_any"


def test_the_sum_is_written_over_its_other_operand_on_a_gpu() -> None:
    args = jax.eval_shape(make_args)
    of = Program(CASE.step, donate_argnums=(0,), target=Target("h100"))
    problem = Problem(of, args, {}, DEVICES["h100"], "roofline")
    baseline = measure_baseline(problem, plain=False, tagged=True)
    graph = baseline.graphs.plain
    assert the_sum(graph).id in graph.in_place
    predicted = simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes
    assert abs(predicted / baseline.tagged.peak_nbytes - 1) < 0.05


IMAGES, SIZE, POINTS, ROUNDS = 8, 16, 1024, 6


def looked_up(image: jax.Array, x: jax.Array) -> jax.Array:
    """Entries of an image, of a size that each has, at two places for each of these points."""
    places = jnp.clip(jnp.floor(x), 0, SIZE - 2).astype(int)
    return sum(image[places[:, 0] + d, places[:, 1]] * (1 - x[:, 0] % 1 + d) for d in (0, 1))  # type: ignore[return-value]


@updating
def step(w: Any, images: jax.Array) -> Any:
    seen, points = jnp.tanh(images * w["scale"]), jnp.broadcast_to(w["points"], (IMAGES, POINTS, 2))
    for turn in w["turns"]:
        read = jax.vmap(looked_up)(seen, jax.lax.stop_gradient(points))
        points = SIZE * jax.nn.sigmoid(points @ turn + read[..., None])
    return (points**2).mean()


def test_the_model_counts_them() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "scale": jnp.ones(()),
        "points": SIZE * jax.random.uniform(keys[0], (POINTS, 2)),
        "turns": list(jax.random.normal(keys[1], (ROUNDS, 2, 2))),
    }
    images = jax.random.normal(keys[2], (IMAGES, SIZE, SIZE))
    plan = jaxremat.plan(step, w, images, budget="60%", allow=())
    first, base = plan.rounds[0], plan.memory.base_nbytes  # type: ignore[union-attr]
    predicted, compiled = (each - base for each in (first.predicted_peak_nbytes, first.compiled_peak_nbytes))
    assert compiled < 1.4 * predicted  # 1.6 times without them
