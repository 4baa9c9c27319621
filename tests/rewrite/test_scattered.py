"""What is scattered into zeros and added to something else is scattered into that: there are no zeros in memory."""

import jax
import jax.numpy as jnp
from test_loops import CPU, traced
from zoo import Case, _normal, _sgd

from jaxremat import close_over_dependencies, simulate
from jaxremat._compiler._program import Program
from jaxremat._compiler._target import Target
from jaxremat._lower._lower import lower
from jaxremat._model._device_specs import DEVICES
from jaxremat._model._graph import Graph, Node
from jaxremat._plan._baseline import measure_baseline
from jaxremat._plan._problem import Problem

ROWS, CLASSES = 512, 8192


def cross_entropy(weights: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Its gradient by the logits is their softmax, less one at the label: automatic differentiation adds both."""
    x, labels = batch
    logits = jnp.tanh(x) @ weights
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked[:, 0])


def make_args() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _normal((64, CLASSES)), (_normal((ROWS, 64), 1), jnp.arange(ROWS) % CLASSES)


CASE = Case("cross entropy", _sgd(cross_entropy), make_args)


def the_sum(graph: Graph) -> Node:
    """The node that adds what is scattered, which is in no memory by itself."""
    wide = (n for n in graph.nodes if n.primitive == "scatter-add")
    (v,) = (v for n in wide for v in n.outputs if graph.values[v].nbytes == 4 * ROWS * CLASSES)
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
